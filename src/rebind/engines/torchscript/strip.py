"""Taking the weights out of a TorchScript file: what is left is a plan source that any set of weights fits."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

from rebind.engines.torchscript.archive import DATA
from rebind.weights.script_module import WEIGHT_FREE

if TYPE_CHECKING:
    from pathlib import Path

    from rebind.engines.torchscript.archive import ScriptArchive
    from rebind.engines.torchscript.attributes import Attributes

_ROOT = "model"
_CHUNK = bytes(1 << 20)


def write_weight_free(archive: ScriptArchive, attributes: Attributes, destination: Path) -> None:
    """Writes ``archive`` with zeros in place of its weights, which take no room since they are deflated.

    The result is a TorchScript file with the same graph digest, and a record that marks it. What says nothing about the
    graph is left out: extra files, the shapes of traced inputs, the places in the sources that errors would name.
    """
    with zipfile.ZipFile(destination, "x", zipfile.ZIP_DEFLATED, compresslevel=1) as zipped:
        zipped.writestr(f"{_ROOT}/{WEIGHT_FREE}", "")
        for name, member in archive.graph_members():
            zipped.writestr(f"{_ROOT}/{name}", archive.read(member))
        for name, member in archive.members.items():
            if not name.startswith(DATA):
                continue
            with zipped.open(f"{_ROOT}/{name}", "w", force_zip64=True) as file:
                if member in attributes.kept:
                    file.write(archive.read(member))
                elif member in attributes.weights:
                    for start in range(0, member.nbytes, len(_CHUNK)):
                        file.write(_CHUNK[: member.nbytes - start])
