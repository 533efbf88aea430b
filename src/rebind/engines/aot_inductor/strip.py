"""Taking the weights out of an archive: what is left is a plan source that any set of weights fits."""

from __future__ import annotations

import json
import zipfile
from typing import TYPE_CHECKING, Any

from rebind.engines.aot_inductor.archive import CONSTANTS, GRAPH, SAMPLE_INPUTS, TIES, WEIGHTS
from rebind.engines.aot_inductor.embedded import EmbeddedWeights
from rebind.weights.strided import row_major_strides

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from rebind.engines.aot_inductor.archive import Archive, Payload

_STRIDED = 7  # torch._export.serde.schema.Layout
_ROOT = "model"
_FORMAT = {"archive_format": b"pt2", "archive_version": b"0", ".data/version": b"6\n", "byteorder": b"little"}


def write_weight_free(archive: Archive, destination: Path, keep: Callable[[Payload], bool]) -> None:
    """Writes ``archive`` without the values of its tensors, but for those that ``keep`` chooses.

    The result is a torch.export archive that ``torch.export.load`` reads too: tensors without values are on the
    ``meta`` device there, so that nobody takes zeros for weights. Its graph has the same digest. Example inputs, and
    the places in the sources that metadata names, are left out.
    """
    with zipfile.ZipFile(destination, "x", zipfile.ZIP_STORED) as zipped, EmbeddedWeights(archive) as embedded:

        def put(name: str, data: bytes | bytearray) -> None:
            zipped.writestr(f"{_ROOT}/{name}", data)

        def value(payload: Payload) -> bytearray | None:
            if not (payload.present and keep(payload)):
                return None
            data = bytearray(payload.view.nbytes)
            with archive.model_errors():
                embedded.read_into(payload.name, 0, memoryview(data))
            return data

        for name, data in _FORMAT.items():
            put(name, data)
        _put_tensors(put, archive, WEIGHTS, "weights", archive.weights, value)
        _put_tensors(put, archive, CONSTANTS, "constants", archive.constants, value)
        put(GRAPH, json.dumps(_without_metadata(archive.read_json(GRAPH))).encode())
        put(SAMPLE_INPUTS, b"")
        put(TIES, json.dumps(archive.ties).encode())


def _put_tensors(
    put: Callable[[str, bytes | bytearray], None],
    archive: Archive,
    directory: str,
    kind: str,
    payloads: Mapping[str, Payload],
    value: Callable[[Payload], bytearray | None],
) -> None:
    """One record for each tensor that is tied to no other, in row-major order, empty if its values are left out."""
    prefix = "weight_" if directory == WEIGHTS else "tensor_"  # torch tells tensors from custom objects by it
    metas = archive.read_json(f"{directory}/model_{kind}_config.json")["config"]
    written: dict[str, tuple[str, str]] = {}
    for name, payload in payloads.items():
        if name in archive.ties:
            continue
        data = value(payload)
        written[name] = f"{prefix}{len(written)}", "meta" if data is None else "cpu"
        put(f"{directory}/{written[name][0]}", data or b"")
    config = {
        name: _row_major_meta(metas[name], *written[archive.ties.get(name, name)], payload.shape)
        for name, payload in payloads.items()
    }
    put(f"{directory}/model_{kind}_config.json", json.dumps({"config": config}).encode())


def _row_major_meta(meta: dict[str, Any], path_name: str, device: str, shape: tuple[int, ...]) -> dict[str, Any]:
    tensor_meta = {
        **meta["tensor_meta"],
        "strides": [{"as_int": stride} for stride in row_major_strides(shape)],
        "storage_offset": {"as_int": 0},
        "device": {"type": device, "index": None},
        "layout": _STRIDED,
    }
    return {**meta, "path_name": path_name, "tensor_meta": tensor_meta}


def _without_metadata(graph: dict[str, Any]) -> dict[str, Any]:
    """The document without stack traces and module stacks; the graphs of control flow, in arguments, keep theirs."""
    module = graph["graph_module"]
    nodes = [{**node, "metadata": {}} for node in module["graph"]["nodes"]]
    calls = module["module_call_graph"][:1]
    return {
        **graph,
        "graph_module": {**module, "graph": {**module["graph"], "nodes": nodes}, "module_call_graph": calls},
    }
