"""What each parameter does to the calls of a TorchScript module on a CPU, and that it does so to no other model's.

Modules look at torch from inside of a call, through an operator of this file. How a graph was optimised is read from
what the executor kept:

=====================  =========================================================================================
optimised              from the second call on there is a plan; types seen by the profiler are gone from its graph
unoptimised            there never is a plan (``DISABLE_OPTIMIZED_EXECUTION``)
profiled               as optimised, but the profiler's nodes stay: the fuser's pass is what removes them
simple                 a plan at the first call, loops as written: nothing was profiled (``ENABLE_JIT_PROFILING`` off)
legacy                 a plan at the first call, loops unrolled: the old executor (``ENABLE_JIT_EXECUTOR`` off)
=====================  =========================================================================================

No effect on a CPU, hence no test here: ``DISABLE_CUDNN`` (cuDNN runs on GPUs only), ``ENABLE_CACHE_CLEANING`` (empties
the cache of GPU memory). Fused kernels cannot be seen either: for a CPU they need LLVM, which torch's wheels lack.
``ENABLE_WEIGHT_SHARING`` is a matter of instances, not of calls.
"""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._C import (
    _get_graph_executor_optimize,
    _jit_texpr_fuser_enabled,
    _last_executed_optimized_graph,
)

from rebind.engines.pytorch.execution import Execution, Gate, JitSwitches
from rebind.engines.pytorch.parameters import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

DEFAULT = JitSwitches(tensor_fuser=True, profiling=True, executor=True)
OTHER = JitSwitches(tensor_fuser=False, profiling=True, executor=True)
THIRD = JitSwitches(tensor_fuser=True, profiling=False, executor=True)
KINDS = {
    "optimised": {},
    "profiled": {"ENABLE_TENSOR_FUSER": "false"},
    "simple": {"ENABLE_JIT_PROFILING": "false"},
    "legacy": {"ENABLE_JIT_EXECUTOR": "false"},
    "unoptimised": {"DISABLE_OPTIMIZED_EXECUTION": "true"},
}

_local = threading.local()
_library = torch.library.Library("rebind_tests", "DEF")  # type: ignore[no-untyped-call]
_library.define("visit(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]


def _visit(x: torch.Tensor) -> torch.Tensor:
    getattr(_local, "visit", lambda: None)()
    return x.clone()


_library.impl("visit", _visit, "CPU")  # type: ignore[no-untyped-call]


class Visited(torch.nn.Module):
    """Calls the thread's ``_local.visit`` at its begin and at its end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.ops.rebind_tests.visit(x)
        for _ in range(3):
            x = torch.relu(x) * 2 - torch.mm(x, x)
        return torch.ops.rebind_tests.visit(x)  # type: ignore[no-any-return]


class Modes(torch.nn.Module):
    """What TorchScript itself can tell of the modes: of a tensor of the call, of its weight, of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, bool, bool, bool]:
        y = x * self.weight
        return y, y.is_inference(), self.weight.is_inference(), torch.is_grad_enabled()


@pytest.fixture(scope="module")
def visited() -> bytes:
    return scripted(Visited())


def scripted(module: torch.nn.Module) -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(module), buffer)
    return buffer.getvalue()


def load(saved: bytes) -> Any:
    return torch.jit.load(io.BytesIO(saved))  # type: ignore[no-untyped-call]


def execution(parameters: dict[str, str], intra_op_threads: int = 1) -> Execution:
    return Execution(Settings.from_options(parameters), intra_op_threads)


def kind_of_graph(saved: bytes, guarded: Execution) -> str:
    """How two calls of a fresh module are optimised; see the module's docstring."""
    module = load(saved)
    with guarded.guard():
        module(torch.ones(4, 4))
    planned_at_once = has_plan(module)
    with guarded.guard():
        module(torch.ones(4, 4))
    graph = str(_last_executed_optimized_graph())
    if not has_plan(module):
        return "unoptimised"
    if planned_at_once:
        return "simple" if "prim::Loop" in graph else "legacy"
    return "profiled" if "prim::profile" in graph else "optimised"


def has_plan(module: Any) -> bool:
    try:
        return len(module.get_debug_state().execution_plans) > 0
    except RuntimeError:  # a plan is asserted
        return False


def in_threads(*bodies: Callable[[], None]) -> None:
    """Runs all at once; raises the first error of any."""
    errors: list[Exception] = []

    def run(body: Callable[[], None]) -> None:
        try:
            body()
        except Exception as error:  # noqa: BLE001 - raised again in the test's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "waits for ever"
    if errors:
        raise errors[0]


# --- each parameter ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parameters", "on"), [({}, True), ({"INFERENCE_MODE": "false"}, False)])
def test_inference_mode(parameters: dict[str, str], on: bool) -> None:
    guarded = execution(parameters)
    saved = scripted(Modes())
    with guarded.modes():
        module = load(saved)
    with guarded.guard():
        result, *modes, grad_enabled = module(torch.ones(2))
    assert modes == [on, on]
    assert (result.is_inference(), result.requires_grad, grad_enabled) == (on, False, False)
    assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == (False, True)


@pytest.mark.parametrize(("kind", "parameters"), KINDS.items(), ids=KINDS)
def test_how_graphs_are_optimised(kind: str, parameters: dict[str, str], visited: bytes) -> None:
    assert kind_of_graph(visited, execution(parameters)) == kind
    assert kind_of_graph(visited, execution({})) == "optimised"
    assert _get_graph_executor_optimize()


def test_parameters_that_ask_for_torchs_own_defaults_change_nothing(visited: bytes) -> None:
    keys = ["ENABLE_TENSOR_FUSER", "ENABLE_JIT_PROFILING", "ENABLE_JIT_EXECUTOR"]
    guarded = execution(dict.fromkeys(keys, "true"))
    assert guarded.switches == execution({}).switches == DEFAULT
    assert kind_of_graph(visited, guarded) == "optimised"


def test_how_a_graph_is_optimised_is_decided_by_its_calls_and_not_by_its_loading(visited: bytes) -> None:
    with execution({"ENABLE_JIT_EXECUTOR": "false"}).guard():
        module = load(visited)
    with execution({}).guard():
        module(torch.ones(4, 4))
    assert not has_plan(module), "the old executor would have a plan"


def test_each_call_has_the_intra_op_threads_of_its_model(visited: bytes) -> None:
    """At once, and on fresh threads, whose first parallel operator would take the count that another one set."""
    both = threading.Barrier(2, timeout=30)
    counts: dict[int, list[int]] = {1: [], 2: [], 3: []}

    def call(count: int) -> None:
        module, guarded = load(visited), execution({}, count)

        def visit() -> None:
            both.wait()
            counts[count].append(torch.get_num_threads())

        _local.visit = visit
        with guarded.guard():
            module(torch.ones(4, 4))

    in_threads(lambda: call(1), lambda: call(2))
    in_threads(lambda: call(3), lambda: call(1))
    assert counts == {1: [1] * 4, 2: [2] * 2, 3: [3] * 2}


INTER_OP = """
import json, os, threading, torch
from rebind.engines.pytorch.execution import Execution
from rebind.engines.pytorch.parameters import Settings

library = torch.library.Library("rebind_tests", "DEF")
library.define("meet(Tensor x) -> Tensor")
meeting, seen = threading.Barrier(3), []

def meet(x):
    meeting.wait(20)
    seen.append([torch.is_inference_mode_enabled(), torch._C._get_graph_executor_optimize()])
    return x.clone()

library.impl("meet", meet, "CPU")

def branch(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.rebind_tests.meet(x)

def forward(x: torch.Tensor) -> torch.Tensor:
    a = torch.jit.fork(branch, x)
    b = torch.jit.fork(branch, x)
    c = torch.jit.fork(branch, x)
    return torch.jit.wait(a) + torch.jit.wait(b) + torch.jit.wait(c)

first = Execution(Settings(inter_op_thread_count=3, disable_optimized_execution=True), 1)
with first.guard():
    total = torch.jit.script(forward)(torch.ones(2)).tolist()
second = Execution(Settings(inter_op_thread_count=5), 1)
third = Execution(Settings(inter_op_thread_count=3), 1)
limitations = [first.limitation, second.limitation, third.limitation]
print(json.dumps([total, seen, limitations, second.log_lines("M")[-1]]), flush=True)
os._exit(0)  # threads of the pool that ran Python may end the process with an abort
"""


def test_inter_op_threads_run_forked_branches_and_the_first_model_decides_how_many(tmp_path: Path) -> None:
    """In a process of its own. The three branches wait for each other: they end only if as many threads run them."""
    script = tmp_path / "script.py"
    script.write_text(INTER_OP)
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, timeout=100, check=True)
    total, seen, limitations, last_line = json.loads(done.stdout)
    assert total == [3.0, 3.0]
    assert seen == [[True, True]] * 3, (
        "forked branches have the inference mode, and not the optimisation, of their call"
    )
    text = "INTER_OP_THREAD_COUNT 5 has no effect: this process already has 3 inter-op threads"
    assert limitations == [None, text, None]
    assert last_line == [logging.WARNING, f"{text}, for model 'M'"]


def test_the_log_says_which_parameters_do_not_reach_forked_branches() -> None:
    def warnings(parameters: dict[str, str], *, forks: bool) -> list[str]:
        lines = execution(parameters).log_lines("M", forks=forks)
        return [text for level, text in lines if level == logging.WARNING]

    assert warnings({}, forks=True) == []
    assert warnings({"INTRA_OP_THREAD_COUNT": "2"}, forks=False) == []
    assert "no effect on what torch.jit.fork runs" in warnings({"INTRA_OP_THREAD_COUNT": "2"}, forks=True)[0]
    assert "no effect on what torch.jit.fork runs" in warnings({"DISABLE_OPTIMIZED_EXECUTION": "1"}, forks=True)[0]


# --- no other model's -------------------------------------------------------------------------------------------------


@dataclass
class Inside:
    """Which switches have calls inside, as the calls themselves report it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: Counter[JitSwitches] = field(default_factory=Counter)
    mixed: int = 0
    together: int = 0

    def visits(self, guarded: Execution) -> Iterator[None]:
        """To be advanced at the begin and at the end of each call."""
        while True:
            with self.lock:
                self.calls[guarded.switches] += 1
                self.mixed += len(+self.calls) > 1
                self.together += max(self.calls.values()) > 1
            assert _jit_texpr_fuser_enabled() is guarded.switches.tensor_fuser
            yield
            with self.lock:
                self.calls[guarded.switches] -= 1
            yield


@pytest.mark.timeout(60)
def test_models_with_different_settings_never_see_each_others(visited: bytes) -> None:
    inside = Inside()
    kinds: dict[str, set[str]] = {kind: set() for kind in KINDS}

    def run(kind: str) -> None:
        guarded = execution(KINDS[kind])
        visits = inside.visits(guarded)
        _local.visit = lambda: next(visits)
        for _ in range(25):
            kinds[kind].add(kind_of_graph(visited, guarded))

    in_threads(*[lambda kind=kind: run(kind) for kind in KINDS for _ in range(2)])
    assert kinds == {kind: {kind} for kind in KINDS}
    assert inside.mixed == 0
    assert inside.together > 0, "calls with equal switches do not wait for each other"


@pytest.mark.timeout(60)
def test_calls_that_overlap_without_end_do_not_starve_another_model(visited: bytes) -> None:
    done = threading.Event()
    deadline = time.monotonic() + 20

    def hammer() -> None:
        module, guarded = load(visited), execution({})
        while not done.is_set():
            assert time.monotonic() < deadline, "the other model waits for ever"
            with guarded.guard():
                module(torch.ones(64, 64))

    def other() -> None:
        module, guarded = load(visited), execution(KINDS["legacy"])
        for _ in range(20):
            with guarded.guard():
                module(torch.ones(64, 64))
        done.set()

    in_threads(hammer, hammer, hammer, other)


@dataclass
class Visitor:
    """A thread that goes through a gate, and stays inside until it is told to leave."""

    gate: Gate
    switches: JitSwitches
    entered: threading.Event = field(default_factory=threading.Event)
    leave: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.gate.enter(self.switches)
        self.entered.set()
        self.leave.wait(30)
        self.gate.leave()

    def end(self) -> None:
        assert self.entered.wait(30)
        self.leave.set()
        self.thread.join(30)


def waits(gate: Gate, calls: int) -> None:
    deadline = time.monotonic() + 30
    while f"{calls} waiting" not in repr(gate):
        assert time.monotonic() < deadline, repr(gate)


@pytest.fixture
def gate() -> Iterator[Gate]:
    before = DEFAULT.apply()
    before.apply()
    yield Gate()
    before.apply()


def test_groups_take_turns_in_the_order_in_which_they_came(gate: Gate) -> None:
    first = Visitor(gate, DEFAULT)
    assert first.entered.wait(30)
    with_first = Visitor(gate, DEFAULT)
    assert with_first.entered.wait(30), "equal switches run together"
    others = [Visitor(gate, OTHER)]
    waits(gate, 1)
    late = Visitor(gate, DEFAULT)
    waits(gate, 2)
    third = Visitor(gate, THIRD)
    waits(gate, 3)
    others.append(Visitor(gate, OTHER))
    waits(gate, 4)
    assert repr(gate) == "<gate: 2 running, 4 waiting>"

    first.end()
    assert repr(gate) == "<gate: 1 running, 4 waiting>", "nobody enters before the last one has left"
    with_first.end()
    assert all(other.entered.wait(30) for other in others)
    assert repr(gate) == "<gate: 2 running, 2 waiting>", "the latecomer of the first group waits for its next turn"
    assert not _jit_texpr_fuser_enabled()
    for other in others:
        other.end()
    assert late.entered.wait(30)
    assert repr(gate) == "<gate: 1 running, 1 waiting>"
    assert _jit_texpr_fuser_enabled()
    late.end()
    third.end()
    assert repr(gate) == "<gate: 0 running, 0 waiting>"


def test_that_models_take_turns_is_told_once(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        inside = Visitor(gate, DEFAULT)
        assert inside.entered.wait(30)
        outside = Visitor(gate, OTHER)
        waits(gate, 1)
        inside.end()
        outside.end()
    assert ["take turns" in record.getMessage() for record in caplog.records] == [True]


def test_a_call_that_fails_leaves_no_setting_behind(visited: bytes) -> None:
    guarded = execution({"DISABLE_OPTIMIZED_EXECUTION": "true", "ENABLE_TENSOR_FUSER": "false"})
    with pytest.raises(RuntimeError, match="must be a matrix"), guarded.guard():
        load(visited)(torch.ones(3))
    assert _get_graph_executor_optimize()
    assert not torch.is_inference_mode_enabled()
    assert kind_of_graph(visited, execution({})) == "optimised", "the gate is open"
