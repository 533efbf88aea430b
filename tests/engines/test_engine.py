"""Graphs that torch must not load in this process before a child has, and compiles that fail."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from rebind.engines.aot_inductor import engine as engine_module
from rebind.engines.aot_inductor.engine import ENGINE, AotInductorGraph, _in_brief
from rebind.engines.contract import EngineOptions, Graph
from rebind.engines.registry import engine
from rebind.errors import CompileFailed, CompileForbidden, ModelInvalid
from rebind.plans.cache import PlanCache
from rebind.weights.store import WeightStore
from tests.engines.models import MLP, CountsCalls, export
from tests.engines.tampering import GRAPH, edit_json, rewrite


@pytest.fixture
def fresh_cache(tmp_path: Path) -> PlanCache:
    return PlanCache(tmp_path / "cache")


def open_graph(path: Path, cache: PlanCache) -> Graph:
    return engine("aot_inductor").open(path, EngineOptions(cache))


def forbidden(*_: Any, **__: Any) -> NoReturn:
    pytest.fail("a child process was started")


def test_other_weights_of_a_known_graph_start_no_child(
    archives: dict[str, Path], plan_cache: PlanCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_graph(archives["mlp"], plan_cache).eager_plan()
    monkeypatch.setattr(engine_module, "run_child", forbidden)
    other = open_graph(MLP.export(5, tmp_path / "other.pt2"), plan_cache)
    assert other.eager_plan().key == first.key
    assert other.eager_plan().function is first.function  # type: ignore[attr-defined]


def test_the_cache_of_sources_has_the_graph_without_the_weights(fresh_cache: PlanCache, tmp_path: Path) -> None:
    path = export(torch.nn.Linear(512, 512), tmp_path / "model.pt2", torch.zeros(2, 512))
    open_graph(path, fresh_cache).eager_plan()
    (entry,) = fresh_cache.sources.entries()
    assert entry.nbytes < path.stat().st_size / 20


def test_a_model_that_writes_to_its_buffers_is_refused_by_name(fresh_cache: PlanCache, tmp_path: Path) -> None:
    """The signature of the exported program says nothing of it; served so, it would change weights that others read."""
    graph = open_graph(export(CountsCalls(), tmp_path / "model.pt2", torch.zeros(2, 4), batch=False), fresh_cache)
    with pytest.raises(ModelInvalid, match="is no pure function: it writes to 'calls'"):
        graph.eager_plan()
    assert fresh_cache.sources.entries() == ()


def test_a_graph_that_torch_does_not_know_is_refused_with_torchs_reason(
    archives: dict[str, Path], fresh_cache: PlanCache, tmp_path: Path
) -> None:
    def rename(document: Any) -> None:
        document["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.aten.no_such_operator.default"

    path = edit_json(archives["mlp"], tmp_path / "model.pt2", GRAPH, rename)
    with pytest.raises(ModelInvalid, match=r"model\.pt2: torch cannot load its graph: .*no_such_operator"):
        open_graph(path, fresh_cache).eager_plan()


def test_a_graph_on_which_torch_hangs_is_refused(
    archives: dict[str, Path], fresh_cache: PlanCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_EXAMINE_TIMEOUT_S", 0.01)
    with pytest.raises(ModelInvalid, match=r"does not survive loading its graph: .*no answer within"):
        open_graph(archives["mlp"], fresh_cache).eager_plan()


def test_a_graph_for_which_torch_wants_all_memory_is_refused(
    archives: dict[str, Path], fresh_cache: PlanCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_EXAMINE_MEMORY_BYTES", 256 << 20)
    with pytest.raises(ModelInvalid, match="torch"):
        open_graph(archives["mlp"], fresh_cache).eager_plan()


def test_a_graph_goes_on_with_the_file_that_was_opened(
    archives: dict[str, Path], fresh_cache: PlanCache, tmp_path: Path
) -> None:
    path = rewrite(archives["mlp"], tmp_path / "model.pt2", lambda records: None)
    graph = open_graph(path, fresh_cache)
    rewrite(archives["everything"], tmp_path / "new.pt2", lambda records: None).rename(path)
    weights = WeightStore().put(graph.slots, graph.embedded_weights()).weights
    inputs = MLP.inputs(np.random.default_rng(0))
    answers = graph.eager_plan().bind(weights).execute(inputs)
    assert [a.tobytes() for a in answers] == [e.tobytes() for e in MLP.expected(MLP.state(0), inputs)]


def test_files_of_graphs_are_closed_when_nobody_needs_them(archives: dict[str, Path], plan_cache: PlanCache) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_files()
    weights = open_graph(archives["mlp"], plan_cache).embedded_weights()
    assert open_files() == before + 1
    weights.read_into("first.bias", 0, memoryview(bytearray(4)))
    del weights
    assert open_files() == before


def test_graphs_that_differ_in_weights_only_share_what_is_read_from_them(
    archives: dict[str, Path], plan_cache: PlanCache, tmp_path: Path
) -> None:
    files = [archives["mlp"], *(MLP.export(seed, tmp_path / f"{seed}.pt2") for seed in (1, 2)), archives["half"]]
    graphs = [engine("aot_inductor").open(file, EngineOptions(plan_cache)) for file in files]
    programs = [graph.program for graph in graphs if isinstance(graph, AotInductorGraph)]

    assert programs[0] is programs[1] is programs[2]
    assert graphs[0].key == graphs[1].key
    assert programs[3].digest != programs[0].digest
    program = weakref.ref(programs[0])
    del programs, graphs
    gc.collect()
    assert program() is None


def test_archives_of_one_graph_with_other_tensors_beside_it_have_slots_of_their_own(
    archives: dict[str, Path], plan_cache: PlanCache, tmp_path: Path
) -> None:
    """Without their values, optional slots of a weight-free archive are required."""
    whole = engine("aot_inductor").open(archives["everything"], EngineOptions(plan_cache))
    plan_source, _ = ENGINE.split(archives["everything"], tmp_path)
    part = engine("aot_inductor").open(plan_source, EngineOptions(plan_cache))

    assert whole.key == part.key
    assert whole.embedded_weights().tensors.keys() > part.embedded_weights().tensors.keys()
    assert whole.slots is not part.slots


def test_a_forbidden_compile_is_an_error(
    archives: dict[str, Path], fresh_cache: PlanCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REBIND_FORBID_COMPILE", "1")
    graph = open_graph(archives["mlp"], fresh_cache)
    assert graph.cached_plan() is None
    with pytest.raises(CompileForbidden):
        graph.build_plan(lambda _: None)


def test_without_a_compiler_there_is_no_plan(
    archives: dict[str, Path], fresh_cache: PlanCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    with pytest.raises(CompileFailed, match=r"model\.pt2: no C\+\+ compiler on PATH"):
        open_graph(archives["mlp"], fresh_cache).build_plan(lambda _: None)


@pytest.mark.compiles
def test_a_compiler_that_fails_leaves_nothing_behind(
    archives: dict[str, Path], fresh_cache: PlanCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'internal compiler error: made up' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    stages: list[str] = []
    with pytest.raises(CompileFailed, match=r"model\.pt2: no plan: "):
        open_graph(archives["mlp"], fresh_cache).build_plan(stages.append)
    assert stages[:2] == ["reading the graph", "compiling"]
    assert fresh_cache.plans.entries() == ()
    assert list(fresh_cache.plans.directory.iterdir()) == []


def test_a_compilers_report_is_told_in_one_line() -> None:
    command = "Command:\ng++ -O3 -L/a/b c.o"
    report = f"CppCompileError: C++ compile error\n\n{command}\n\nOutput:\n/usr/bin/ld: cannot find -ltorch\n"
    assert _in_brief(report) == "CppCompileError: C++ compile error; /usr/bin/ld: cannot find -ltorch"
    assert _in_brief("KeyError: 'x'\none\ntwo\nthree") == "KeyError: 'x'; two; three"
    assert len(_in_brief("error\n" * 1000)) == 600
    assert _in_brief("") == ""
