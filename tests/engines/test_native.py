"""The compiled tier's driver: what the C interface of AOTInductor would do to a server that trusts it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from rebind.engines.aot_inductor.compile_child import LIBRARY
from rebind.engines.aot_inductor.native import NativeFunction
from rebind.engines.contract import EngineOptions, Tier
from rebind.engines.registry import engine
from rebind.errors import Internal
from tests.engines.models import MLP, TRANSFORMER, Case
from tests.engines.suite import Bench

if TYPE_CHECKING:
    from rebind.plans.cache import PlanCache

pytestmark = [pytest.mark.compiles, pytest.mark.timeout(300)]


@pytest.fixture
def benches(archives: dict[str, Path], plan_cache: PlanCache, tmp_path: Path) -> dict[str, Bench]:
    def make(case: Case) -> Bench:
        options = EngineOptions(plan_cache)
        bench = Bench(case, engine("aot_inductor"), options, Tier.COMPILED, archives[case.name], tmp_path, 1e-5)
        bench.open().build_plan(lambda _: None)
        return bench

    return {case.name: make(case) for case in (MLP, TRANSFORMER)}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def function_of(bench: Bench) -> NativeFunction:
    function = bench.plan().function  # type: ignore[attr-defined]
    assert isinstance(function, NativeFunction)
    return function


def test_an_entry_is_one_library_without_constants_and_its_manifest(benches: dict[str, Bench]) -> None:
    for bench in benches.values():
        graph = bench.open()
        entry = bench.options.cache.plans.get(graph.key)
        assert entry is not None
        assert sorted(path.name for path in entry.directory.iterdir()) == ["manifest.json", LIBRARY]
        assert function_of(bench).count("Constants") == 0
        assert entry.manifest["slots"] == graph.slots.to_json()
        assert entry.manifest["torch"] == torch.__version__
        assert entry.manifest["verification"]["largest_error"] < entry.manifest["verification"]["error_bound"]
        assert entry.manifest["target"]["machine"] == os.uname().machine


def test_calls_and_binds_do_not_leak(benches: dict[str, Bench]) -> None:
    bench = benches["mlp"]
    weights = [bench.put(MLP.state(seed), f"w{seed}") for seed in (1, 2)]
    plan, inputs = bench.plan(), bench.inputs()

    def work(binds: int, calls: int) -> None:
        for index in range(binds):
            bound = plan.bind(weights[index % 2])
            for _ in range(calls):
                bound.execute(inputs)
        gc.collect()

    work(900, 7)  # until malloc has what it wants
    before = resident_bytes()
    work(300, 7)  # 2100 calls; one handle, 16 bytes, lost per call and tensor would be 235 kB
    assert resident_bytes() - before < 200_000


def test_outputs_outlive_their_call(benches: dict[str, Bench]) -> None:
    bound = benches["mlp"].bind(1)
    random = np.random.default_rng(0)
    batches = [MLP.inputs(random) for _ in range(50)]
    answers = [bound.execute(batch)[0] for batch in batches]
    copies = [bound.execute(batch)[0].copy() for batch in batches]
    assert all(np.array_equal(answer, copy) for answer, copy in zip(answers, copies, strict=True))


@pytest.mark.parametrize(("case", "parallel"), [(MLP, True), (TRANSFORMER, False)], ids=["mlp", "transformer"])
def test_plans_for_several_threads_have_parallel_loops_unless_these_could_raise(
    case: Case, parallel: bool, archives: dict[str, Path], plan_cache: PlanCache, tmp_path: Path
) -> None:
    options = EngineOptions(plan_cache, intra_op_threads=2)
    bench = Bench(case, engine("aot_inductor"), options, Tier.COMPILED, archives[case.name], tmp_path, 1e-5)
    graph = bench.open()
    graph.build_plan(lambda _: None)
    entry = plan_cache.plans.get(graph.key)
    assert entry is not None
    assert entry.manifest["parallel_loops"] is parallel
    bound, inputs = bench.bind(1), bench.inputs()
    bench.assert_as_eager(bound.execute(inputs), case.state(1), inputs)
    if not parallel:
        inputs[0][0, 0] = 1000
        with pytest.raises(Internal, match="index out of bounds"):
            bound.execute(inputs)


def test_an_index_out_of_range_fails_the_call_and_nothing_else(
    benches: dict[str, Bench], capfd: pytest.CaptureFixture[str]
) -> None:
    """Compiled with OpenMP loops, this ends the process. The batch is large enough for such a loop."""
    bound = benches["transformer"].bind(1)
    ids = np.tile(np.arange(8), (64, 1))
    good = [answer.tobytes() for answer in bound.execute([ids])]
    for bad in (50, -51, 1 << 40):
        broken = ids.copy()
        broken[33, 3] = bad
        with pytest.raises(Internal, match=r"PyTorch execute failure: index out of bounds[^\n]*$"):
            bound.execute([broken])
    assert [answer.tobytes() for answer in bound.execute([ids])] == good


FIRST_IMPORTS = """
import sys, threading
from pathlib import Path
from rebind.engines.contract import EngineOptions
from rebind.engines.registry import engine
from rebind.plans.cache import PlanCache

cache, compiled, eager = map(Path, sys.argv[1:])
opened = [engine("aot_inductor").open(path, EngineOptions(PlanCache(cache))) for path in (compiled, eager)]
assert "torch" not in sys.modules
together, plans = threading.Barrier(2), []

def load(plan):
    together.wait()
    plans.append(plan())

threads = [threading.Thread(target=load, args=[plan]) for plan in (opened[0].cached_plan, opened[1].eager_plan)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sorted(plan.tier.value for plan in plans))
"""


def test_first_loads_at_once_import_torch_once(
    benches: dict[str, Bench], archives: dict[str, Path], plan_cache: PlanCache
) -> None:
    """The modules of torch import each other in cycles: two threads would find half of them, or each other's locks."""
    benches["transformer"].open().eager_plan()  # is examined from now on
    arguments = [plan_cache.root, archives["mlp"], archives["transformer"]]
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_IMPORTS, *arguments], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.stdout == "['compiled', 'eager']\n", done.stderr


def test_threads_come_and_go(benches: dict[str, Bench]) -> None:
    """Each has a container of its own, which goes with it."""
    bench = benches["mlp"]
    bound, inputs = bench.bind(1), bench.inputs()
    expected = [answer.tobytes() for answer in bound.execute(inputs)]
    wrong: list[str] = []

    def run() -> None:
        if [answer.tobytes() for answer in bound.execute(inputs)] != expected:
            wrong.append(threading.current_thread().name)

    def wave() -> None:
        threads = [threading.Thread(target=run) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    for _ in range(10):
        wave()
    before = resident_bytes()
    for _ in range(10):
        wave()
    assert not wrong
    assert resident_bytes() - before < 2_000_000


def test_a_thread_runs_with_the_threads_it_was_given(
    archives: dict[str, Path], plan_cache: PlanCache, benches: dict[str, Bench]
) -> None:
    counts: list[int] = []

    def run(intra_op_threads: int) -> None:
        options = EngineOptions(plan_cache, intra_op_threads)
        plan = engine("aot_inductor").open(archives["mlp"], options).cached_plan()
        assert plan is not None
        plan.bind(benches["mlp"].put(MLP.state(1))).execute(benches["mlp"].inputs())
        counts.append(torch.get_num_threads())

    for number in (2, 1):
        thread = threading.Thread(target=run, args=(number,))
        thread.start()
        thread.join()
    assert counts == [2, 1]


def test_a_wrong_number_of_tensors_is_refused(benches: dict[str, Bench]) -> None:
    with pytest.raises(Internal, match="takes 5 tensors, not 2"):
        function_of(benches["mlp"])([torch.zeros(1), torch.zeros(1)])


def test_a_library_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.so"
    path.write_bytes(b"\x7fELF")
    with pytest.raises(Internal, match="the compiled plan cannot be loaded"):
        NativeFunction(path)
