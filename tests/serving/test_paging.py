"""Paging with real files, memory and versions; only the engine is a small one of the test's own."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from rebind.config.complete import GraphFacts, complete
from rebind.config.model import ModelConfig
from rebind.config.pbtxt import parse_pbtxt
from rebind.engines.contract import Tier
from rebind.errors import MemoryExceeded, Unavailable
from rebind.inference import InferRequest
from rebind.repository.scan import scan_model
from rebind.repository.versions import resolve
from rebind.scheduling.completions import Completions
from rebind.scheduling.default import DefaultScheduler
from rebind.serving.eviction import Resident, choose_evictions
from rebind.serving.lifecycle import VersionState
from rebind.serving.loader import Loaded
from rebind.serving.models import Models, VersionRecord
from rebind.serving.paging import Pager
from rebind.serving.signature import Signature
from rebind.serving.staging import Stager, Target
from rebind.serving.version import ModelVersion
from rebind.tensor import DataType, GraphTensor, Tensor
from rebind.weights.slots import Slot, SlotTable
from rebind.weights.source import WeightsSource
from rebind.weights.store import WeightStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from rebind.engines.contract import BoundPlan, Graph, Plan
    from rebind.serving.eviction import Memory
    from rebind.serving.stages import Stage
    from rebind.weights.slots import TensorInfo
    from rebind.weights.store import WeightSet

ELEMENTS = 1 << 16
NBYTES = 4 * ELEMENTS
"""Of one weight set: whole pages of memory."""
SLOTS = SlotTable((Slot("w", "F32", (ELEMENTS,), required=True, used=True),))
INPUT, OUTPUT = GraphTensor("INPUT__0", DataType.FP32, (1,)), GraphTensor("OUTPUT__0", DataType.FP32, (1,))


# --- the decision -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Piece:
    nbytes: int


PIECES = tuple(Piece(10**power) for power in range(6))
"""Each is more than all before it together: a sum tells which are in it."""

residents = st.builds(
    Resident,
    owner=st.just("somebody"),
    memory=st.frozensets(st.sampled_from(PIECES), max_size=3),
    last_used_s=st.integers(0, 3),
    retained=st.booleans(),
    busy=st.booleans(),
    unevictable=st.booleans(),
)


def freed(all_of: Sequence[Resident[str]], without: Sequence[Resident[str]]) -> int:
    """The memory that nobody holds any more once some are gone."""
    gone = {id(resident) for resident in without}
    before = {memory for resident in all_of for memory in resident.memory}
    after = {memory for resident in all_of if id(resident) not in gone for memory in resident.memory}
    return sum(memory.nbytes for memory in before - after)


@given(st.lists(residents, max_size=6), st.integers(1, 200_000))
def test_what_goes_is_enough_and_none_of_it_goes_for_nothing(all_of: list[Resident[str]], needed_bytes: int) -> None:
    chosen = choose_evictions(all_of, needed_bytes)
    movable = [resident for resident in all_of if not (resident.busy or resident.unevictable)]

    assert all(any(each is resident for resident in movable) for each in chosen)
    assert bool(chosen) == (freed(all_of, movable) >= needed_bytes)
    if chosen:
        assert freed(all_of, chosen) >= needed_bytes
    for each in chosen:
        assert freed(all_of, [other for other in chosen if other is not each]) < needed_bytes


def resident(name: str, *memory: Memory, last_used_s: float = 0.0, **flags: bool) -> Resident[str]:
    return Resident(name, frozenset(memory), last_used_s, **flags)


def test_retained_sets_go_first_then_those_used_the_longest_ago() -> None:
    old, new, kept_by_new, free = (Piece(10) for _ in range(4))
    all_of = [
        resident("new", new, last_used_s=3),
        resident("new retained", kept_by_new, last_used_s=3, retained=True),
        resident("old", old, last_used_s=1),
        resident("busy", free, busy=True),
        resident("pushed", free, unevictable=True),
    ]

    assert [each.owner for each in choose_evictions(all_of, 10)] == ["new retained"]
    assert [each.owner for each in choose_evictions(all_of, 11)] == ["new retained", "old"]
    assert [each.owner for each in choose_evictions(all_of, 30)] == ["new retained", "old", "new"]
    assert choose_evictions(all_of, 31) == []


def test_memory_that_others_hold_does_not_count() -> None:
    shared, own, other = Piece(100), Piece(1), Piece(100)
    first, twin = resident("first", shared, own, last_used_s=1), resident("twin", shared, last_used_s=3)
    third = resident("third", other, last_used_s=2)

    assert [each.owner for each in choose_evictions([first, twin, third], 50)] == ["third"]
    assert [each.owner for each in choose_evictions([first, twin], 50)] == ["first", "twin"]
    assert choose_evictions([first, resident("twin", shared, busy=True)], 50) == []


# --- versions ---------------------------------------------------------------------------------------------------------


class Nothing(WeightsSource):
    """A model file without weights."""

    def __init__(self) -> None:
        self.subject = "nothing"
        self.tensors: Mapping[str, TensorInfo] = {}

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        raise AssertionError

    def check_unchanged(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Multiplying:
    """A plan that multiplies by the first weight."""

    key: str
    tier: Tier = Tier.COMPILED

    def bind(self, weights: WeightSet) -> BoundPlan:
        return Bound(self, weights)


@dataclass(frozen=True, eq=False)
class Bound:
    plan: Plan
    weights: WeightSet

    def execute(self, inputs: Sequence[Any]) -> list[Any]:
        return [inputs[0] * np.frombuffer(self.weights.buffer("w"), np.float32, 1)]


GRAPH = cast(
    "Graph",
    SimpleNamespace(slots=SLOTS, inputs=(INPUT,), outputs=(OUTPUT,), embedded_weights=Nothing, shares_weights=True),
)


def described(name: str) -> tuple[ModelConfig, Signature]:
    """The configuration of a model without one."""
    facts = GraphFacts((INPUT,), (OUTPUT,), None, "torch_aoti", "pytorch", "model.pt2")
    config = ModelConfig.from_message(complete(parse_pbtxt("", name), facts, name), name)
    return config, Signature(config, GRAPH)


@dataclass
class Fleet:
    """Versions over files of weights, and memory for ``sets`` of these."""

    root: Path
    sets: int
    models: Models = field(default_factory=Models)
    executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2))

    def __post_init__(self) -> None:
        self.store = WeightStore(limit_bytes=self.sets * NBYTES)
        self.stager = Stager(self.store)
        self.pager = Pager(self.models, self.stager, self.executor)

    def save(self, name: str, factor: float) -> Path:
        """A weights file whose version multiplies by ``factor``, put in place by a rename."""
        path = self.root / name / "1/model.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name("model.pt2").touch()
        aside = path.with_name(".aside")
        save_file({"w": np.full(ELEMENTS, factor, np.float32)}, aside)
        return aside.rename(path)

    def load(self, name: str, factor: float) -> ModelVersion:
        """A version that serves."""
        self.save(name, factor)
        source = resolve(scan_model(self.root / name, self.root), 1)
        config, signature = described(name)
        plan = Multiplying("plan")
        staged = self.stager.from_files(Target(config, GRAPH, signature, self.root / name), plan, source)
        loaded = Loaded(source, config, GRAPH, signature, plan, staged, from_files=True, load_s=0.001)
        completions = Completions(asyncio.get_running_loop())
        version = ModelVersion(
            name, loaded, lambda instances, observer: DefaultScheduler(instances, completions, observer)
        )
        self.models.enter(name).versions[1] = VersionRecord(VersionState.READY, served=version)
        version.last_used_s = float(len(self.versions))
        return version

    @property
    def versions(self) -> list[ModelVersion]:
        return [version for model in self.models for version in model.ready()]

    async def factor(self, version: ModelVersion) -> float:
        """What a request finds that version to multiply by, as the data plane sends it."""
        request = InferRequest(
            version.name, None, (Tensor("INPUT__0", DataType.FP32, np.ones(1, np.float32)),), None, ""
        )
        with version.pinned():
            await self.pager.page_in(version)
            response = await version.infer(request)
        return float(response.outputs[0].array[0])

    def resident(self) -> list[str]:
        return [version.name for version in self.versions if version.generation.resident]


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path, sets=2)


def run(fleet: Fleet, test: Callable[[], Awaitable[None]]) -> None:
    async def with_end() -> None:
        try:
            await test()
        finally:
            for version in fleet.versions:
                await version.drain()
            fleet.executor.shutdown()

    asyncio.run(with_end())


def names_of(version: ModelVersion) -> tuple[int, str, str]:
    generation = version.generation
    return generation.number, generation.label, generation.digest


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_set_that_was_let_go_comes_back_as_it_was(fleet: Fleet) -> None:
    async def test() -> None:
        version = fleet.load("m", 3.0)
        plan, names = version.generation.plan, names_of(version)

        assert fleet.pager.make_room(NBYTES)
        assert not version.generation.resident
        assert names_of(version) == names
        assert version.has_weights
        assert fleet.store.usage().segment_bytes == 0
        assert await fleet.factor(version) == 3.0

        assert names_of(version) == names
        assert version.generation.plan is plan
        assert (fleet.pager.paged_out, fleet.pager.paged_in) == (1, 1)
        assert version.refits.page_ins.cumulative()[-1] == 1
        assert [commit.generation for commit in version.history] == [1]

    run(fleet, test)


def test_requests_to_more_versions_than_fit_are_all_answered_by_their_own_weights(fleet: Fleet) -> None:
    async def test() -> None:
        versions = [fleet.load("0", 0.0), fleet.load("1", 1.0)]
        for number in range(2, 5):
            assert fleet.pager.make_room(NBYTES)
            versions.append(fleet.load(str(number), float(number)))
        assert fleet.resident() == ["3", "4"]

        order = [0, 3, 1, 4, 4, 2, 0, 1, 3] * 2
        for number in order:
            assert await fleet.factor(versions[number]) == number
        answers = await asyncio.gather(*(fleet.factor(versions[number]) for number in order))
        assert answers == order
        assert len(fleet.resident()) == 2

    run(fleet, test)


def test_sets_in_use_and_sets_that_no_file_has_stay(fleet: Fleet) -> None:
    async def test() -> None:
        pushed, used = fleet.load("pushed", 1.0), fleet.load("used", 2.0)
        pushed.source_digest = ""
        with used.pinned():
            assert not fleet.pager.make_room(1)
        async with used.refit_lock:
            assert not fleet.pager.make_room(1)
        used.stages["s"] = cast("Stage", SimpleNamespace(abort=lambda: None))
        assert not fleet.pager.make_room(1)
        used.stages.clear()

        assert not fleet.pager.make_room(NBYTES + 1)
        assert fleet.resident() == ["pushed", "used"]
        assert fleet.pager.make_room(NBYTES)
        assert fleet.resident() == ["pushed"]

    run(fleet, test)


def test_retained_set_goes_before_any_that_serves(fleet: Fleet) -> None:
    async def test() -> None:
        version = fleet.load("m", 1.0)
        fleet.save("m", 2.0)
        source = resolve(scan_model(fleet.root / "m", fleet.root), 1)
        staged = fleet.stager.from_files(version.target, version.generation.plan, source)
        version.step("stage")
        version.step("validated")
        version.commit(staged, "poll", 0.001)
        assert [each.number for each in version.retained] == [1]

        async with version.refit_lock:  # the version's own next change may be what needs it
            assert fleet.pager.make_room(NBYTES)

        assert not version.retained
        assert version.generation.resident
        assert fleet.store.usage().segment_bytes == NBYTES
        assert fleet.pager.paged_out == 0

    run(fleet, test)


def test_file_that_another_replaces_by_a_rename_still_gives_the_old_weights(fleet: Fleet) -> None:
    async def test() -> None:
        version = fleet.load("m", 3.0)
        assert fleet.pager.make_room(1)
        fleet.save("m", 4.0)

        assert await fleet.factor(version) == 3.0
        assert not fleet.pager.make_room(1), "the file that lies there now has other weights"

    run(fleet, test)


def test_file_that_was_overwritten_is_refused_until_its_weights_are_back(fleet: Fleet) -> None:
    async def test() -> None:
        version = fleet.load("m", 3.0)
        path, digest = fleet.root / "m/1/model.safetensors", version.generation.digest
        original = path.read_bytes()
        assert fleet.pager.make_room(1)
        path.write_bytes(original[:-4] + bytes(4))

        with pytest.raises(Unavailable, match=rf"{path} has weights with the digest \w+ now, not {digest}") as said:
            await fleet.factor(version)
        assert version.lost == str(said.value)
        with pytest.raises(Unavailable) as said_again:
            await fleet.factor(version)
        assert str(said_again.value) == version.lost
        assert not version.has_weights

        path.write_bytes(original)
        assert await fleet.factor(version) == 3.0
        assert version.has_weights

    run(fleet, test)


def test_file_that_was_only_touched_is_read(fleet: Fleet) -> None:
    async def test() -> None:
        version = fleet.load("m", 3.0)
        assert fleet.pager.make_room(1)
        os.utime(fleet.root / "m/1/model.safetensors")

        assert await fleet.factor(version) == 3.0

    run(fleet, test)


def test_file_that_is_gone_is_read_as_it_was_once_opened(fleet: Fleet) -> None:
    async def test() -> None:
        version, other = fleet.load("m", 3.0), fleet.load("other", 4.0)
        assert fleet.pager.make_room(1)
        shutil.rmtree(fleet.root / "m")
        shutil.rmtree(fleet.root / "other")

        assert await fleet.factor(version) == 3.0
        assert await fleet.factor(other) == 4.0
        assert not fleet.pager.make_room(1), "nothing has them but the memory"

    run(fleet, test)


def test_requests_at_once_share_one_reading_which_outlives_those_who_give_up(fleet: Fleet) -> None:
    async def test() -> None:
        version = fleet.load("m", 3.0)
        assert fleet.pager.make_room(1)
        requests = [asyncio.create_task(fleet.factor(version)) for _ in range(5)]
        await asyncio.sleep(0)
        requests[0].cancel()

        answers = await asyncio.gather(*requests, return_exceptions=True)

        assert isinstance(answers[0], asyncio.CancelledError)
        assert answers[1:] == [3.0] * 4
        assert fleet.pager.paged_in == 1

    run(fleet, test)


def test_page_in_waits_for_memory_that_requests_use(fleet: Fleet) -> None:
    async def test() -> None:
        first, second = fleet.load("1", 1.0), fleet.load("2", 2.0)
        assert fleet.pager.make_room(1)
        third = fleet.load("3", 3.0)
        assert fleet.resident() == ["2", "3"]
        with second.pinned(), third.pinned():
            request = asyncio.create_task(fleet.factor(first))
            done, _ = await asyncio.wait([request], timeout=0.1)
            assert not done
            assert fleet.resident() == ["2", "3"]
        assert await request == 1.0

    run(fleet, test)


def test_page_in_fails_at_once_when_nothing_can_make_room(fleet: Fleet) -> None:
    async def test() -> None:
        first, second = fleet.load("1", 1.0), fleet.load("2", 2.0)
        assert fleet.pager.make_room(1)
        third = fleet.load("3", 3.0)
        second.source_digest = third.source_digest = ""

        with pytest.raises(MemoryExceeded):
            await fleet.factor(first)

        assert first.has_weights, "there may be room for the next request"
        assert first.refits.updates["page_in", "refused"] == 1

    run(fleet, test)


def test_plan_that_was_promoted_meanwhile_runs_what_comes_back(fleet: Fleet) -> None:
    async def test() -> None:
        version = fleet.load("m", 3.0)
        assert fleet.pager.make_room(1)
        request = asyncio.create_task(fleet.factor(version))
        await asyncio.sleep(0)
        compiled = Multiplying("compiled")
        assert version.promote(compiled, (), version.generation)

        assert await request == 3.0
        assert version.generation.plan is compiled
        assert version.generation.bounds[0].plan is compiled

    run(fleet, test)


def test_equal_weights_of_two_versions_go_and_come_together(fleet: Fleet) -> None:
    async def test() -> None:
        first, twin = fleet.load("1", 1.0), fleet.load("2", 1.0)
        assert fleet.store.usage().segment_bytes == NBYTES
        with twin.pinned():
            assert not fleet.pager.make_room(1)
        assert fleet.pager.make_room(1)
        assert fleet.resident() == []

        assert await fleet.factor(first) == await fleet.factor(twin) == 1.0
        assert fleet.store.usage().segment_bytes == NBYTES

    run(fleet, test)


def test_files_are_held_open_while_weights_are_out_and_no_longer(fleet: Fleet) -> None:
    async def test() -> None:
        version, unloaded = fleet.load("m", 1.0), fleet.load("unloaded", 2.0)
        await fleet.factor(version)  # threads, and all else that is made once
        before = descriptors()
        for _ in range(20):
            assert fleet.pager.make_room(2 * NBYTES)
            await fleet.factor(version)
            await fleet.factor(unloaded)
        assert fleet.pager.make_room(2 * NBYTES)
        fleet.store.trim()
        await unloaded.drain()
        del fleet.models.enter("unloaded").versions[1], unloaded
        gc.collect()
        await fleet.factor(version)
        assert not fleet.pager.make_room(2 * NBYTES)
        assert descriptors() <= before

    run(fleet, test)
