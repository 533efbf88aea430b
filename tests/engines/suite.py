"""What every engine promises (architecture section 2, at the level of an engine), against eager PyTorch.

An engine's test module subclasses :class:`EngineSuite` and gives it the fixture ``bench``. A test takes plans from the
bench and nothing else of the engine."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from rebind.engines.contract import BoundPlan, Engine, EngineOptions, Graph, Plan, Tier
from rebind.errors import Internal, InvalidArgument, WeightsRefused
from rebind.tensor import DataType
from rebind.weights.formats import open_weights
from rebind.weights.store import WeightSet, WeightStore

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engines.models import Arrays, Case

State = dict[str, torch.Tensor]


@dataclass
class Bench:
    """A model file of one case, opened by one engine, at one tier, with a store of weights.

    ``bound``: largest ``max|answer - eager| / max|eager|`` of real numbers; 0 asks for equal bits. ``embedded``: the
    file has weights inside. ``any_shapes``: the file runs whatever eager PyTorch would; other plans are for the shapes
    that they were made for.
    """

    case: Case
    engine: Engine
    options: EngineOptions
    tier: Tier
    model_file: Path
    directory: Path
    bound: float = 0.0
    embedded: bool = True
    any_shapes: bool = False
    store: WeightStore = field(default_factory=WeightStore)

    def open(self) -> Graph:
        return self.engine.open(self.model_file, self.options)

    def plan(self, graph: Graph | None = None) -> Plan:
        graph = graph or self.open()
        plan = graph.eager_plan() if self.tier is Tier.EAGER else graph.cached_plan()
        assert plan is not None, "the module's fixture builds the plan"
        return plan

    def state(self, seed: int) -> State:
        """The weights of ``seed`` by the names that the graph knows."""
        return self.case.state(seed, self.open().slots.by_name)

    def put(self, state: State, name: str = "weights") -> WeightSet:
        path = self.case.save(state, self.directory / f"{name}.safetensors")
        graph = self.open()
        with open_weights(path) as source, graph.embedded_weights() as embedded:
            return self.store.put(graph.slots, source, embedded).weights

    def bind(self, seed: int) -> BoundPlan:
        return self.plan().bind(self.put(self.state(seed)))

    def inputs(self, seed: int = 0) -> Arrays:
        return self.case.inputs(np.random.default_rng(seed))

    def ask(self, bound: BoundPlan, inputs: Arrays) -> Arrays:
        """The answer; of a network with state, the last of the case's calls after a new beginning."""
        if self.case.calls > 1:
            bound = bound.plan.bind(bound.weights)
        return [bound.execute(inputs) for _ in range(self.case.calls)][-1]

    def bits(self, bound: BoundPlan, inputs: Arrays) -> list[bytes]:
        return [answer.tobytes() for answer in self.ask(bound, inputs)]

    def assert_as_eager(self, answers: Arrays, state: State, inputs: Arrays) -> None:
        expected = self.case.expected(state, inputs)
        assert [a.shape for a in answers] == [e.shape for e in expected]
        assert [a.dtype for a in answers] == [e.dtype for e in expected]
        for datatype, answer, want in zip(self.case.outputs, answers, expected, strict=True):
            if self.bound == 0:
                assert answer.tobytes() == want.tobytes()
            else:
                got, wanted = _reals(answer, datatype), _reals(want, datatype)
                assert np.abs(got - wanted).max() <= self.bound * np.abs(wanted).max()


class EngineSuite:
    """To be subclassed with a fixture ``bench``."""

    def test_answers_are_those_of_eager_pytorch(self, bench: Bench) -> None:
        for seed in (1, 2):
            bound, inputs = bench.bind(seed), bench.inputs(seed)
            bench.assert_as_eager(bench.ask(bound, inputs), bench.state(seed), inputs)

    def test_what_the_graph_says_of_its_inputs_and_outputs_is_true(self, bench: Bench) -> None:
        graph = bench.open()
        assert len(graph.inputs) == len(bench.inputs())
        for output, datatype in zip(graph.outputs, bench.case.outputs, strict=True):
            assert output.datatype in {None, datatype}

    def test_every_weight_has_a_slot(self, bench: Bench) -> None:
        """Under one of its names at least. Nothing is so small that it became part of the code (T5)."""
        names: dict[int, set[str]] = {}
        for name, tensor in bench.case.model(0).state_dict().items():
            if tensor.is_floating_point():
                names.setdefault(tensor.data_ptr(), set()).add(name)
        slots = bench.open().slots.by_name
        assert [tied for tied in names.values() if not tied & slots.keys()] == []

    def test_weights_inside_the_model_file_serve(self, bench: Bench) -> None:
        graph, inputs = bench.open(), bench.inputs()
        with graph.embedded_weights() as embedded:
            if not bench.embedded:
                with pytest.raises(WeightsRefused):  # never run without (T3)
                    bench.store.put(graph.slots, embedded)
                return
            weights = bench.store.put(graph.slots, embedded).weights
        bench.assert_as_eager(bench.ask(bench.plan(graph).bind(weights), inputs), bench.case.state(0), inputs)

    def test_every_single_weight_counts(self, bench: Bench) -> None:
        """Promise 4: nothing is folded, tied or cached away. Each slot is changed alone."""
        state, inputs = bench.state(1), bench.inputs()
        before = bench.bits(bench.bind(1), inputs)
        for name, tensor in state.items():
            if not (tensor.is_floating_point() and bench.case.probed(name)):
                continue
            changed = {**state, name: bench.case.changed(tensor)}
            answers = bench.ask(bench.plan().bind(bench.put(changed)), inputs)
            bench.assert_as_eager(answers, changed, inputs)
            assert [answer.tobytes() for answer in answers] != before, name

    def test_a_refit_compiles_nothing(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        """Promise 1."""
        monkeypatch.setenv("REBIND_FORBID_COMPILE", "1")
        inputs = bench.inputs()
        for seed in (1, 2, 3):
            bench.assert_as_eager(bench.ask(bench.bind(seed), inputs), bench.state(seed), inputs)

    def test_threads_with_two_weight_sets_never_mix(self, bench: Bench) -> None:
        """Promise 2: four threads run, on whichever of two weight sets is current, while it changes all the time."""
        inputs = bench.inputs()
        plans = [bench.bind(1), bench.bind(2)]
        pure = [bench.bits(plan, inputs) for plan in plans]
        assert pure[0] != pure[1]
        current = [0]
        wrong: list[Any] = []

        def run() -> None:
            for _ in range(200):
                index = current[0]
                if bench.bits(plans[index], inputs) != pure[index]:
                    wrong.append(index)
                current[0] = 1 - index

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_refused_weights_leave_the_old_ones_answering(self, bench: Bench) -> None:
        """Promise 3."""
        inputs, state = bench.inputs(), bench.state(1)
        bound = bench.bind(1)
        before = bench.bits(bound, inputs)
        required = [slot.name for slot in bench.open().slots.slots if slot.required and slot.name in state]
        victim = max(required, key=lambda name: state[name].numel())
        bad: list[State] = [
            {name: tensor for name, tensor in state.items() if name != victim},
            {**state, victim: state[victim].flatten()[:-1]},
            {**state, victim: state[victim].double()},
            {**state, victim: state[victim] * float("nan")},
            {**state, "stray": torch.zeros(1)},
        ]
        for offered in bad:
            with pytest.raises(WeightsRefused, match="stray" if "stray" in offered else victim.replace(".", r"\.")):
                bench.put(offered, "bad")
            assert bench.bits(bound, inputs) == before

    def test_a_weight_set_for_other_slots_cannot_be_bound(self, bench: Bench) -> None:
        from rebind.weights.slots import Slot, SlotTable

        graph = bench.open()
        slots = SlotTable(
            tuple(Slot(f"{s.name}.other", s.dtype, s.shape, s.required, s.used) for s in graph.slots.slots)
        )
        path = bench.directory / "other.safetensors"
        bench.case.save({f"{name}.other": tensor for name, tensor in bench.state(1).items()}, path)
        with open_weights(path) as source:
            used = SlotTable(tuple(slot for slot in slots.slots if slot.name in source.tensors))
            weights = bench.store.put(used, source).weights
        with pytest.raises(WeightsRefused):
            bench.plan(graph).bind(weights)

    def test_after_a_refit_answers_are_those_of_a_fresh_process(self, bench: Bench) -> None:
        """Promise 4."""
        inputs = bench.inputs()
        bench.ask(bench.bind(1), inputs)
        refitted = [bits.hex() for bits in bench.bits(bench.bind(2), inputs)]
        assert _fresh_process(bench, bench.directory / "weights.safetensors", inputs) == refitted

    def test_files_may_be_overwritten_while_they_serve(self, bench: Bench, tmp_path: Path) -> None:
        """Promise 7."""
        inputs = bench.inputs()
        bound = bench.bind(1)
        before = bench.bits(bound, inputs)
        path = bench.directory / "weights.safetensors"
        path.write_bytes(b"\xff" * 64)
        original = bench.model_file.read_bytes()
        try:
            bench.model_file.write_bytes(b"\xff" * 64)
            assert bench.bits(bound, inputs) == before
        finally:
            bench.model_file.write_bytes(original)

    def test_inputs_that_do_not_fit_are_refused(self, bench: Bench) -> None:
        """Promise 8: compiled code would read what is not there."""
        bound, inputs, state = bench.bind(1), bench.inputs(), bench.state(1)
        first, rest = inputs[0], inputs[1:]
        described = all(spec.shape is not None for spec in bench.open().inputs)
        refusal = InvalidArgument if described else (InvalidArgument, Internal)
        for bad in (
            [],
            [*inputs, first],
            [first.astype(np.complex64), *rest],
            [first[..., :-1], *rest],
            [first[0], *rest],
        ):
            if bench.any_shapes and _takes(bench, bad):
                bench.assert_as_eager(bench.ask(bound, bad), state, bad)
            else:
                with pytest.raises(refusal):
                    bound.execute(bad)
        bench.assert_as_eager(bench.ask(bound, inputs), state, inputs)

    def test_inputs_of_any_layout_are_taken(self, bench: Bench) -> None:
        """Read-only, strided, and at an odd address, as a decoder finds them in a request."""
        bound, inputs = bench.bind(1), bench.inputs()
        expected = bench.bits(bound, inputs)

        def at_odd_address(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            shifted: np.ndarray[Any, Any] = np.frombuffer(b"\0" + array.tobytes(), np.uint8)[1:].view(array.dtype)
            return shifted.reshape(array.shape)

        def strided(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            every_second: np.ndarray[Any, Any] = np.stack([array, array], axis=-1)[..., 0]
            return every_second

        for layout in (at_odd_address, strided, np.asfortranarray):
            assert bench.bits(bound, [layout(array) for array in inputs]) == expected

    def test_binding_reads_the_weights_where_they_are(self, bench: Bench) -> None:
        """Promise 5: any number of bound plans, one copy of the weights."""
        weights = bench.put(bench.state(1))
        before = bench.store.usage().unique_bytes
        plans = [bench.plan().bind(weights) for _ in range(4)]
        assert bench.store.usage().unique_bytes == before
        assert all(plan.weights is weights for plan in plans)

    def test_a_bound_plan_outlives_everything_else(self, bench: Bench) -> None:
        bound, inputs = bench.bind(1), bench.inputs()
        before = bench.bits(bound, inputs)
        bench.store = WeightStore()
        for seed in (2, 3, 4):
            bench.ask(bench.bind(seed), inputs)
        assert bench.bits(bound, inputs) == before


def _takes(bench: Bench, inputs: Arrays) -> bool:
    """Whether eager PyTorch runs with these inputs."""
    try:
        bench.case.expected(bench.state(1), inputs)
    except Exception:  # noqa: BLE001 - it fails in any way
        return False
    return True


def _reals(array: np.ndarray[Any, Any], datatype: DataType) -> np.ndarray[Any, Any]:
    if datatype is DataType.BF16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    reals: np.ndarray[Any, Any] = array.astype(np.float64)
    return reals


_FRESH = """
import json, sys
from pathlib import Path
import numpy as np
from rebind.engines.contract import EngineOptions
from rebind.engines.registry import engine
from rebind.plans.cache import PlanCache
from rebind.weights.formats import open_weights
from rebind.weights.store import WeightStore
request = json.load(sys.stdin)
graph = engine(request["engine"]).open(Path(request["model"]), EngineOptions(PlanCache(Path(request["cache"]))))
plan = graph.eager_plan() if request["tier"] == "eager" else graph.cached_plan()
with open_weights(Path(request["weights"])) as source, graph.embedded_weights() as embedded:
    weights = WeightStore().put(graph.slots, source, embedded).weights
inputs = [np.frombuffer(bytes.fromhex(d), t).reshape(s) for d, t, s in request["inputs"]]
bound = plan.bind(weights)
answers = [bound.execute(inputs) for _ in range(request["calls"])][-1]
print(json.dumps([answer.tobytes().hex() for answer in answers]))
"""


def _fresh_process(bench: Bench, weights: Path, inputs: Arrays) -> list[str]:
    request = {
        "engine": bench.engine.name,
        "model": str(bench.model_file),
        "cache": str(bench.options.cache.root),
        "tier": bench.tier.value,
        "calls": bench.case.calls,
        "weights": str(weights),
        "inputs": [(array.tobytes().hex(), array.dtype.str, array.shape) for array in inputs],
    }
    done = subprocess.run(
        [sys.executable, "-c", _FRESH],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    answers: list[str] = json.loads(done.stdout)
    return answers
