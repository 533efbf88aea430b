from __future__ import annotations

import asyncio
import threading
import tracemalloc
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebind.errors import Internal
from rebind.inference import InferRequest, InferResponse
from rebind.scheduling.completions import Completions
from rebind.scheduling.default import DefaultScheduler
from rebind.serving.caching_scheduler import CachingScheduler
from rebind.serving.generation import Generation
from rebind.serving.instances import ModelInstance
from rebind.serving.response_cache import Key, ResponseCache, request_digest
from rebind.serving.statistics import Statistics
from rebind.tensor import DataType, Tensor
from tests.serving.test_signature import signature

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from rebind.engines.contract import BoundPlan, Plan
    from rebind.inference import Parameter
    from rebind.serving.version import ModelVersion

CONFIG = """
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "scaled" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "first" data_type: TYPE_FP32 dims: [ 1 ] reshape { } }
"""
SIGNATURE = signature(CONFIG, inputs="x")


@dataclass
class Version:
    """A version whose model multiplies by its only weight. ``gate``: executions begin, and wait for it to be set."""

    cache: ResponseCache
    name: str = "m"
    number: int = 1
    statistics: Statistics = field(default_factory=Statistics)
    executions: int = 0
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    gate: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self.gate.set()
        self.signature = SIGNATURE
        self.generation = Generation(0, "", "", cast("Plan", None), ())
        self.weights: dict[int, float] = {}
        instance = ModelInstance("m_0", cast("ModelVersion", self), 0)
        scheduler = DefaultScheduler([instance], Completions(asyncio.get_running_loop()), self.statistics)
        self.scheduler = CachingScheduler(scheduler, self.cache, self)

    def commit(self, weight: float, label: str) -> None:
        number = self.generation.number + 1
        self.weights[number] = weight
        bound = cast("BoundPlan", SimpleNamespace(execute=lambda inputs: self._execute(weight, inputs)))
        self.generation = Generation(number, label, f"digest of {weight}", cast("Plan", None), (bound,))

    def resident_generation(self, _: Mapping[str, Parameter]) -> Generation:
        return self.generation

    async def ask(self, *values: float, id: str = "", outputs: tuple[str, ...] = ("scaled",)) -> InferResponse:
        return await self.scheduler.submit(request(*values, id=id, outputs=outputs))

    def _execute(self, weight: float, inputs: list[Any]) -> list[Any]:
        self.begun.release()
        assert self.gate.wait(30)
        self.executions += 1
        if self.failure is not None:
            raise self.failure
        return [inputs[0] * np.float32(weight), inputs[0][0] * np.float32(weight)]


def request(*values: float, id: str = "", outputs: tuple[str, ...] | None = ("scaled",)) -> InferRequest:
    return InferRequest("m", None, (Tensor("x", DataType.FP32, np.array(values, np.float32)),), outputs, id)


def numbers(response: InferResponse) -> list[float]:
    (tensor,) = response.outputs
    listed: list[float] = tensor.array.tolist()
    return listed


def run(story: Callable[[Version], Awaitable[None]], size_bytes: int = 1 << 20) -> Version:
    """Runs ``story`` on a version with the weight 2, labelled "two"."""

    async def told() -> Version:
        version = Version(ResponseCache(size_bytes))
        version.commit(2, "two")
        try:
            await story(version)
        finally:
            version.gate.set()
            await version.scheduler.drain()
        return version

    return asyncio.run(told())


# --- the same question ------------------------------------------------------------------------------------------------


def test_same_question_is_computed_once_and_answered_to_each_client_by_its_own_id() -> None:
    async def story(version: Version) -> None:
        first = await version.ask(1, 2, id="a")
        again = await version.ask(1, 2, id="b")
        assert numbers(first) == numbers(again) == [2, 4]
        assert (again.id, again.model_name, again.model_version) == ("b", "m", 1)
        assert again.parameters == first.parameters == {"weights_generation": 1, "weights_label": "two"}
        assert numbers(await version.ask(1, 3)) == [2, 6]

    version = run(story)
    assert version.executions == 2


def test_other_outputs_are_another_question() -> None:
    async def story(version: Version) -> None:
        await version.ask(5, 6)
        assert numbers(await version.ask(5, 6, outputs=("first",))) == [10]
        both = await version.scheduler.submit(request(5, 6, outputs=None))
        assert [tensor.name for tensor in both.outputs] == ["scaled", "first"]

    assert run(story).executions == 3


def test_statistics_tell_hits_and_misses_as_triton_does() -> None:
    async def story(version: Version) -> None:
        for _ in range(3):
            await version.ask(1)

    told = run(story).statistics.to_json("m", 1)
    counts = {name: each["count"] for name, each in told["inference_stats"].items()}
    assert counts == {
        "success": 3,
        "fail": 0,
        "queue": 3,
        "compute_input": 1,
        "compute_infer": 1,
        "compute_output": 1,
        "cache_hit": 2,
        "cache_miss": 1,
    }
    assert (told["inference_count"], told["execution_count"]) == (1, 1)
    assert told["inference_stats"]["cache_hit"]["ns"] > 0
    assert told["inference_stats"]["cache_miss"]["ns"] > 0


def test_failures_and_what_nobody_waits_for_are_not_kept() -> None:
    async def story(version: Version) -> None:
        version.failure = Internal("no")
        with pytest.raises(Internal):
            await version.ask(1)
        version.failure = None
        assert numbers(await version.ask(1)) == [2]

        version.gate.clear()
        given_up = version.scheduler.submit(request(7))
        given_up.cancel()
        version.gate.set()
        assert numbers(await version.ask(7)) == [14]
        assert len(version.cache) == 2

    told = run(story).statistics.to_json("m", 1)
    assert told["inference_stats"]["cache_miss"]["count"] == 2


# --- weights (case U6) ------------------------------------------------------------------------------------------------


def test_new_weights_answer_themselves_and_old_ones_that_come_back_find_their_answers() -> None:
    async def story(version: Version) -> None:
        await version.ask(1)
        version.commit(3, "three")
        new = await version.ask(1)
        assert numbers(new) == [3]
        assert new.parameters == {"weights_generation": 2, "weights_label": "three"}
        version.commit(2, "two again")
        back = await version.ask(1)
        assert numbers(back) == [2]
        assert back.parameters == {"weights_generation": 3, "weights_label": "two again"}
        version.commit(3, "")
        assert (await version.ask(1)).parameters == {"weights_generation": 4}

    assert run(story).executions == 2


def test_answer_that_old_weights_computed_during_a_commit_is_not_kept() -> None:
    async def story(version: Version) -> None:
        version.gate.clear()
        late = version.scheduler.submit(request(1))
        await asyncio.to_thread(version.begun.acquire)
        version.commit(3, "three")
        version.gate.set()
        old = await late
        assert (numbers(old), old.parameters["weights_label"]) == ([2], "two")
        new = await version.ask(1)
        assert (numbers(new), new.parameters["weights_label"]) == ([3], "three")
        version.commit(2, "two again")
        assert numbers(await version.ask(1)) == [2]

    assert run(story).executions == 3


def test_answer_of_a_request_that_waited_for_a_commit_is_kept_for_the_weights_that_ran() -> None:
    async def story(version: Version) -> None:
        version.gate.clear()
        first = version.scheduler.submit(request(100))
        waiting = version.scheduler.submit(request(1))
        await asyncio.to_thread(version.begun.acquire)
        version.commit(3, "three")
        version.gate.set()
        assert numbers(await waiting) == [3]
        assert numbers(await first) == [200]
        assert numbers(await version.ask(1)) == [3]

    assert run(story).executions == 2


def test_request_that_names_its_weights_goes_past_the_cache() -> None:
    async def story(version: Version) -> None:
        for _ in range(2):
            asked = request(1)
            asked.parameters = {"weights_generation": 1}
            await version.scheduler.submit(asked)
        assert len(version.cache) == 0

    told = run(story).statistics.to_json("m", 1)
    assert told["execution_count"] == 2
    assert told["inference_stats"]["cache_miss"]["count"] == 0


def test_another_load_of_the_same_weights_finds_no_answers_of_the_graph_before() -> None:
    async def story(version: Version) -> None:
        await version.ask(1)
        successor = Version(version.cache)
        successor.commit(2, "two")
        assert numbers(await successor.ask(1)) == [2]
        assert successor.executions == 1
        await successor.scheduler.drain()

    run(story)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.one_of(st.tuples(st.just("ask"), st.integers(1, 3)), st.tuples(st.just("commit"), st.integers(1, 3))))
)
def test_every_answer_is_that_of_the_weights_it_names(steps: list[tuple[str, int]]) -> None:
    """Requests and commits in any order, with requests under way while weights change."""

    async def story(version: Version) -> None:
        asked: list[tuple[int, asyncio.Future[InferResponse]]] = []
        for number, (step, value) in enumerate(steps):
            if step == "ask":
                asked.append((value, version.scheduler.submit(request(value))))
            else:
                version.commit(value, f"label {version.generation.number + 1}")
            if number % 3 == 0:
                await asyncio.sleep(0)
        for value, future in asked:
            answer = await future
            generation = cast("int", answer.parameters["weights_generation"])
            assert numbers(answer) == [value * version.weights[generation]]
            assert answer.parameters["weights_label"] == ("two" if generation == 1 else f"label {generation}")

    run(story)


# --- questions --------------------------------------------------------------------------------------------------------


def asks(*tensors: Tensor, outputs: tuple[str, ...] | None = None, **fields: Any) -> bytes:
    return request_digest(InferRequest("m", None, tensors, outputs, **fields))


def floats(name: str, *values: float, shape: tuple[int, ...] | None = None) -> Tensor:
    array = np.array(values, np.float32)
    return Tensor(name, DataType.FP32, array if shape is None else array.reshape(shape))


def texts(*values: bytes) -> Tensor:
    array = np.empty(len(values), object)
    array[:] = values
    return Tensor("t", DataType.BYTES, array)


def test_order_of_inputs_and_outputs_id_and_parameters_are_no_part_of_the_question() -> None:
    a, b = floats("a", 1), floats("b", 2)
    assert asks(a, b) == asks(b, a)
    assert asks(a, outputs=("y", "z")) == asks(a, outputs=("z", "y"))
    assert asks(a, outputs=()) == asks(a, outputs=None)
    assert asks(a, id="7", parameters={"priority": 1}) == asks(a)


def test_layout_in_memory_is_no_part_of_the_question() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    column_major = Tensor("a", DataType.FP32, np.asfortranarray(array))
    every_other = Tensor("a", DataType.FP32, np.repeat(array, 2, axis=1)[:, ::2])
    assert len({asks(Tensor("a", DataType.FP32, array)), asks(column_major), asks(every_other)}) == 1


def test_names_datatypes_shapes_values_and_outputs_are_part_of_it() -> None:
    bits = np.array([1.0, 2.0], np.float32)
    questions = [
        asks(floats("a", 1, 2)),
        asks(floats("b", 1, 2)),
        asks(floats("a", 1, 2, shape=(2, 1))),
        asks(floats("a", 1, 2, shape=(1, 2))),
        asks(Tensor("a", DataType.INT32, bits.view(np.int32))),
        asks(floats("a", 1, 3)),
        asks(floats("a", 1), floats("b", 2)),
        asks(floats("a", 2), floats("b", 1)),
        asks(floats("a", 1, 2), outputs=("y",)),
        asks(floats("a", 1, 2), outputs=("y", "z")),
        asks(floats("a")),
        asks(),
        asks(texts(b"ab", b"")),
        asks(texts(b"a", b"b")),
        asks(texts(b"", b"ab")),
        asks(Tensor("a", DataType.FP32, np.array(-0.0, np.float32).reshape(1))),
        asks(Tensor("a", DataType.FP32, np.array(0.0, np.float32).reshape(1))),
    ]
    assert len(set(questions)) == len(questions)


# --- memory -----------------------------------------------------------------------------------------------------------


def key(number: int) -> Key:
    return Key(0, "digest", number.to_bytes(32, "little"))


def test_answers_that_were_not_asked_for_the_longest_make_room() -> None:
    cache = ResponseCache(10_000)
    outputs = (floats("y", *range(500)),)
    for number in range(3):
        cache.insert(key(number), outputs)
    assert len(cache) == 3
    assert cache.lookup(key(0)) is not None
    cache.insert(key(3), outputs)
    cache.insert(key(4), outputs)
    assert [cache.lookup(key(number)) is not None for number in range(5)] == [True, False, False, True, True]
    assert 3 * 2000 < cache.used_bytes <= 10_000


def test_answer_that_is_larger_than_the_cache_is_not_kept_and_drives_nothing_out() -> None:
    cache = ResponseCache(10_000)
    cache.insert(key(0), (floats("y", 1),))
    cache.insert(key(1), (floats("y", *range(2500)),))
    assert cache.lookup(key(1)) is None
    assert cache.lookup(key(0)) is not None


def test_same_answer_twice_takes_room_once() -> None:
    cache = ResponseCache(10_000)
    for _ in range(2):
        cache.insert(key(0), (floats("y", 1),))
    used_bytes = cache.used_bytes
    assert len(cache) == 1
    cache.insert(key(1), (floats("y", 1),))
    assert cache.used_bytes == 2 * used_bytes


def test_kept_answers_are_copies_that_nobody_can_write_to() -> None:
    cache = ResponseCache(100_000)
    batch = np.zeros((1000, 4), np.float32)
    cache.insert(key(0), (Tensor("y", DataType.FP32, batch[:1]),))
    batch[:] = 1
    (kept,) = cast("tuple[Tensor, ...]", cache.lookup(key(0)))
    assert kept.array.base is None  # of the batch nothing else is kept alive
    assert kept.array.tolist() == [[0, 0, 0, 0]]
    with pytest.raises(ValueError, match="read-only"):
        kept.array[0, 0] = 5


@pytest.mark.parametrize(
    "make",
    [
        lambda number: (floats("y", number),),
        lambda number: (floats("y", *range(number % 300)), floats("z", number)),
        lambda number: (texts(*[b"%d word of %d" % (word, number) for word in range(20)]),),
    ],
)
def test_what_the_cache_says_that_it_uses_is_what_it_uses(make: Callable[[int], tuple[Tensor, ...]]) -> None:
    cache = ResponseCache(1 << 30)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(2000):
            cache.insert(key(number), make(number))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.9 * (after - before) < cache.used_bytes < 1.25 * (after - before)
