"""Taking a model file apart: a plan source without weights, and the weights as a safetensors file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rebind.engines.torchscript.archive import ScriptArchive
from rebind.engines.torchscript.attributes import Attributes
from rebind.engines.torchscript.strip import write_weight_free
from rebind.errors import AlreadyExists, Fault, ModelInvalid, StorageFailed
from rebind.weights.script_module import WEIGHT_FREE
from rebind.weights.strided import StridedSource
from rebind.weights.writing import write_weights, written_aside

if TYPE_CHECKING:
    from pathlib import Path


def split(model_file: Path, directory: Path) -> tuple[Path, Path]:
    """Writes ``model.pt`` and ``model.safetensors`` into ``directory``; returns their paths.

    The first has the graph with its constants, and zeros for weights; its plan key is that of ``model_file``. The
    second has parameters, buffers and other attributes that are tensors, row-major, tied ones once. Raises
    :class:`rebind.errors.ModelInvalid` for a file that is no model or has no weights inside,
    :class:`rebind.errors.AlreadyExists`, and :class:`rebind.errors.StorageFailed`.
    """
    plan_source, weights = directory / "model.pt", directory / "model.safetensors"
    for path in (plan_source, weights):
        if path.exists():
            raise AlreadyExists(f"{path} exists already; name another directory or remove it")
    with ScriptArchive(model_file) as archive:
        attributes = Attributes(archive)
        owners = {name: slot for name, slot in attributes.slots.items() if name not in attributes.ties}
        if not owners or WEIGHT_FREE in archive.members:
            raise ModelInvalid(str(model_file), [Fault("", "has no weights inside that could be split off")])
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_weights(StridedSource(str(model_file), archive.zip, owners, keeps_archive=True), weights)
            with written_aside(plan_source) as path:
                write_weight_free(archive, attributes, path)
        except OSError as error:
            raise StorageFailed(f"{directory}: cannot write the parts of the model: {error.strerror}") from error
    return plan_source, weights
