"""Sizes for which a graph was not traced: compiled code would read beyond its tensors."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from rebind.engines.aot_inductor.archive import Archive
from rebind.engines.aot_inductor.conditions import parse_condition
from rebind.engines.aot_inductor.program import read_program
from rebind.engines.aot_inductor.symbols import Symbol
from rebind.engines.contract import EngineOptions, Tier
from rebind.engines.registry import engine
from rebind.errors import CompileFailed, Internal, InvalidArgument
from rebind.weights.store import WeightStore
from tests.engines.tampering import GRAPH, edit_json

if TYPE_CHECKING:
    from pathlib import Path

    from rebind.engines.contract import BoundPlan, Graph
    from rebind.plans.cache import PlanCache

SHAPES = {"a_0": (Symbol("s0"), 7), "d_k_1": (Symbol("s1"),)}


@pytest.mark.parametrize(
    ("text", "sizes", "holds"),
    [
        ("(-1) + L['a'][0].size()[0] < L['d']['K-1'].size()[0]", {"s0": 3, "s1": 3}, True),
        ("(-1) + L['a'][0].size()[0] < L['d']['K-1'].size()[0]", {"s0": 4, "s1": 3}, False),
        ("L['a'][0].size()[0] % 2 == 0 and not L['a'][0].size()[1] != 7", {"s0": 4, "s1": 0}, True),
        ("2 <= L['a'][0].size()[0] // L['d'].k_1.size()[0] <= 4", {"s0": 9, "s1": 2}, True),
        ("L['a'][0].size()[0] % L['d'].k_1.size()[0] == 0", {"s0": 9, "s1": 0}, False),
    ],
)
def test_conditions_are_as_python_reads_them(text: str, sizes: dict[str, int], holds: bool) -> None:
    assert parse_condition(text, SHAPES).holds(sizes) is holds


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('false')",
        "s0 > 1",
        "L['a'][0].size()[2] > 1",
        "L['b'].size()[0] > 1",
        "L['a'][0].stride()[0] == 7",
        "L['a'][0].size(0) == 7",
        "[1 for _ in (1,)]",
        "L['a'][0].size()[0] ** 2 == 4",
        "L",
        "1 +",
        "(" * 10_000,
    ],
)
def test_what_is_no_condition_on_sizes_is_never_evaluated(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_condition(text, SHAPES)


class Picks(nn.Module):
    """Reads a row of ``table`` that depends on how long ``x`` is, and the last but one column of ``x``."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return table[x.shape[0] - 1], x[:, -2] * 2


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("picks") / "model.pt2"
    columns = torch.export.Dim("columns", min=0, max=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about itself
        arguments = torch.zeros(3, 5), torch.zeros(4, 2)
        shapes = {"x": {0: torch.export.Dim.AUTO, 1: columns}, "table": {0: torch.export.Dim.AUTO}}
        torch.export.save(torch.export.export(Picks(), arguments, dynamic_shapes=shapes), path)
    return path


def open_graph(path: Path, cache: PlanCache) -> Graph:
    return engine("aot_inductor").open(path, EngineOptions(cache))


@pytest.fixture(scope="module", params=Tier)
def bound(request: pytest.FixtureRequest, archive: Path, plan_cache: PlanCache) -> BoundPlan:
    graph = open_graph(archive, plan_cache)
    plan = graph.eager_plan() if request.param is Tier.EAGER else graph.build_plan(print)
    assert plan.tier is request.param
    with graph.embedded_weights() as weights:
        return plan.bind(WeightStore().put(graph.slots, weights).weights)


def execute(bound: BoundPlan, rows: int, columns: int, table_rows: int) -> list[Any]:
    x, table = np.arange(rows * columns), np.arange(table_rows * 2)
    return bound.execute([x.reshape(rows, columns).astype(np.float32), table.reshape(table_rows, 2).astype(np.float32)])


def test_sizes_that_fit_are_served(bound: BoundPlan) -> None:
    row, column = execute(bound, rows=4, columns=3, table_rows=4)
    assert row.tolist() == [6, 7]
    assert column.tolist() == [2, 8, 14, 20]


def test_sizes_that_do_not_fit_together_are_refused(bound: BoundPlan) -> None:
    with pytest.raises(InvalidArgument, match=r"do not fit together: .* got the shapes \[5,3\], \[4,2\]"):
        execute(bound, rows=5, columns=3, table_rows=4)


@pytest.mark.parametrize("columns", [0, 1])
def test_sizes_that_tracing_left_out_are_checked_by_the_operators(bound: BoundPlan, columns: int) -> None:
    with pytest.raises(Internal, match="out of range"):
        execute(bound, rows=3, columns=columns, table_rows=4)


def test_a_graph_with_a_condition_that_is_not_understood_stays_eager(
    archive: Path, plan_cache: PlanCache, tmp_path: Path
) -> None:
    def add(document: Any) -> None:
        document["guards_code"].append("L['x'].stride()[0] == 5")

    path = edit_json(archive, tmp_path / "model.pt2", GRAPH, add)
    with Archive(path) as opened:
        assert len(read_program(opened).unclear) == 1
    graph = open_graph(path, plan_cache)
    assert graph.cached_plan() is None
    with pytest.raises(CompileFailed, match=r"conditions that are not understood: .*stride"):
        graph.build_plan(print)
