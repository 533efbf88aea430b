"""Taking the weights out of an archive: what is left is a plan source that any set of weights fits."""

from __future__ import annotations

import json
import zipfile
from math import prod
from typing import TYPE_CHECKING, Any

from rebind.engines.aot_inductor.archive import CONSTANTS, GRAPH, SAMPLE_INPUTS, TIES, WEIGHTS
from rebind.engines.aot_inductor.embedded import gather

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
    with zipfile.ZipFile(destination, "x", zipfile.ZIP_STORED) as zipped:

        def put(name: str, data: bytes) -> None:
            zipped.writestr(f"{_ROOT}/{name}", data)

        for name, data in _FORMAT.items():
            put(name, data)
        _put_tensors(put, archive, WEIGHTS, "weights", archive.weights, keep)
        _put_tensors(put, archive, CONSTANTS, "constants", archive.constants, keep)
        put(GRAPH, json.dumps(_without_metadata(archive.read_json(GRAPH))).encode())
        put(SAMPLE_INPUTS, b"")
        put(TIES, json.dumps(archive.ties).encode())


def _put_tensors(
    put: Callable[[str, bytes], None],
    archive: Archive,
    directory: str,
    kind: str,
    payloads: Mapping[str, Payload],
    keep: Callable[[Payload], bool],
) -> None:
    """One record for each tensor that is tied to no other, in row-major order, empty if its values are left out."""
    prefix = "weight_" if directory == WEIGHTS else "tensor_"  # torch tells tensors from custom objects by it
    owners = [name for name in payloads if name not in archive.ties]
    paths = {name: f"{prefix}{index}" for index, name in enumerate(owners)}
    metas = archive.read_json(f"{directory}/model_{kind}_config.json")["config"]
    config = {}
    for name, payload in payloads.items():
        owner = archive.ties.get(name, name)
        kept = payload.present and keep(payloads[owner])
        if owner == name:
            put(f"{directory}/{paths[name]}", gather(archive.read_record(payload.record), payload) if kept else b"")
        config[name] = _row_major_meta(metas[name], paths[owner], payload, "cpu" if kept else "meta")
    put(f"{directory}/model_{kind}_config.json", json.dumps({"config": config}).encode())


def _row_major_meta(meta: dict[str, Any], path_name: str, payload: Payload, device: str) -> dict[str, Any]:
    strides = [prod(max(1, size) for size in payload.shape[axis + 1 :]) for axis in range(len(payload.shape))]
    tensor_meta = {
        **meta["tensor_meta"],
        "strides": [{"as_int": stride} for stride in strides],
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
