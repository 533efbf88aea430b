"""Several safetensors files that an index joins: ``model.safetensors.index.json`` and the shards beside it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rebind.errors import Fault, WeightsRefused
from rebind.weights.header import MOST_JSON_BYTES, is_text_map, load_object
from rebind.weights.pinned import PinnedFile
from rebind.weights.safetensors import open_safetensors
from rebind.weights.slots import refusal, shown
from rebind.weights.source import WeightsSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rebind.weights.safetensors import RecordSource

MOST_SHARDS = 1024
"""Of one index. Each takes a look-up of its name, and a descriptor for as long as the source is open."""


class ShardedSource(WeightsSource):
    """Several safetensors files (``shards``, by name) that one ``index`` joins."""

    def __init__(self, subject: str, index: PinnedFile, shards: Mapping[str, RecordSource]) -> None:
        self.subject = subject
        self.tensors = {name: info for shard in shards.values() for name, info in shard.tensors.items()}
        self._index = index
        self._shards = shards
        self._shard_of = {name: shard for shard in shards.values() for name in shard.tensors}

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self._shard_of[name].read_into(name, start, buffer)

    def check_unchanged(self) -> None:
        # A replaced file counts here, since the shards must be of one make.
        self._index.check_unchanged()
        self._index.check_in_place()
        for shard in self._shards.values():
            shard.check_unchanged()
            shard.check_in_place()

    def close(self) -> None:
        self._index.close()
        for shard in self._shards.values():
            shard.close()


def open_sharded(path: Path) -> ShardedSource:
    """Opens an index and all its shards; :class:`rebind.errors.WeightsRefused` with every fault of any of them."""
    index = PinnedFile(path)
    with ExitStack() as on_failure:
        on_failure.callback(index.close)
        weight_map = _weight_map(index)
        shards: dict[str, RecordSource] = {}
        faults: list[Fault] = []
        for name in sorted(set(weight_map.values())):
            try:
                shards[name] = _open_shard(path.parent, name)
                on_failure.callback(shards[name].close)
            except WeightsRefused as refused:
                faults += [
                    Fault(" ".join(filter(None, (shown(name), fault.where))), fault.problem, fault.remedy)
                    for fault in refused.faults
                ]
        faults += _mapping_faults(weight_map, shards)
        if faults:
            raise refusal(str(path), faults)
        on_failure.pop_all()
    return ShardedSource(str(path), index, shards)


def _weight_map(index: PinnedFile) -> Mapping[str, str]:
    """Which shard has which tensor, as the index says."""
    subject = str(index.path)
    if index.nbytes > MOST_JSON_BYTES:
        raise index.refusal(f"has {index.nbytes} bytes, and an index at most {MOST_JSON_BYTES}")
    document, duplicates = load_object(index.read(0, index.nbytes), subject)
    faults = [Fault(shown(name), "is in the index twice (duplicate key)") for name in duplicates]
    weight_map = document.get("weight_map")
    if not is_text_map(weight_map):
        raise refusal(subject, [*faults, Fault("weight_map", "must be an object that names the file of each tensor")])
    if faults:
        raise refusal(subject, faults)
    if (count := len(set(weight_map.values()))) > MOST_SHARDS:
        raise index.refusal(f"names {count} shards, and an index at most {MOST_SHARDS}", "save larger shards")
    return weight_map


def _open_shard(directory: Path, name: str) -> RecordSource:
    if name != Path(name).name or "\\" in name or not name.endswith(".safetensors"):
        problem = "must be the plain name of a .safetensors file beside the index"
        raise refusal(str(directory), [Fault("", problem)])
    if not (directory / name).exists():
        raise refusal(str(directory), [Fault("", "absent", "copy it beside the index")])
    return open_safetensors(directory / name)


def _mapping_faults(weight_map: Mapping[str, str], shards: Mapping[str, RecordSource]) -> list[Fault]:
    """Where the index and the shards that could be opened disagree."""
    lost = [
        Fault(shown(name), f"the index places it in {shown(shard)}, which lacks it")
        for name, shard in weight_map.items()
        if shard in shards and name not in shards[shard].tensors
    ]
    stray = [
        Fault(shown(name), f"is in {shown(shard)}, but {_placement(weight_map.get(name))}")
        for shard, source in shards.items()
        for name in source.tensors
        if weight_map.get(name) != shard
    ]
    return lost + stray


def _placement(shard: str | None) -> str:
    return "not in the index" if shard is None else f"the index places it in {shown(shard)}"
