"""``split``: a plan source without weights, and a safetensors file that other tools read."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.torch
import torch

from rebind.engines.aot_inductor.archive import Archive
from rebind.engines.aot_inductor.embedded import EmbeddedWeights
from rebind.engines.aot_inductor.program import read_program
from rebind.engines.contract import EngineOptions
from rebind.engines.registry import engine
from rebind.errors import AlreadyExists, ModelInvalid, StorageFailed
from rebind.weights.formats import open_weights
from rebind.weights.store import WeightStore
from tests.engines.models import CASES, EVERYTHING, Case, Strided, export

if TYPE_CHECKING:
    from pathlib import Path

    from rebind.plans.cache import PlanCache

split = engine("aot_inductor").split  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_parts_are_the_whole(case: Case, archives: dict[str, Path], plan_cache: PlanCache, tmp_path: Path) -> None:
    model_file, weights_file = split(archives[case.name], tmp_path / "1")
    assert (model_file, weights_file) == (tmp_path / "1/model.pt2", tmp_path / "1/model.safetensors")
    options = EngineOptions(plan_cache)
    whole, graph = (
        engine("aot_inductor").open(archives[case.name], options),
        engine("aot_inductor").open(model_file, options),
    )
    assert graph.key == whole.key
    assert graph.slots == whole.slots
    with open_weights(weights_file) as source, graph.embedded_weights() as embedded:
        assert set(embedded.tensors) == {slot.name for slot in graph.slots.slots if not slot.required and slot.used}
        weights = WeightStore().put(graph.slots, source, embedded).weights
    inputs = case.inputs(np.random.default_rng(0))
    answers = graph.eager_plan().bind(weights).execute(inputs)
    assert [a.tobytes() for a in answers] == [e.tobytes() for e in case.expected(case.state(0), inputs)]


def test_the_weights_file_is_plain_safetensors(archives: dict[str, Path], tmp_path: Path) -> None:
    _, weights_file = split(archives["everything"], tmp_path)
    state = EVERYTHING.state(0)
    loaded = safetensors.torch.load_file(weights_file)
    assert loaded.keys() == state.keys()  # the tied tensor once
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    header = int.from_bytes(weights_file.read_bytes()[:8], "little")
    assert (8 + header) % 64 == 0
    json.loads(weights_file.read_bytes()[8 : 8 + header])


@pytest.mark.filterwarnings("ignore:No complete tensor found:UserWarning")
def test_strided_and_empty_tensors_keep_their_values(tmp_path: Path) -> None:
    model = Strided()
    source = export(model, tmp_path / "source.pt2", torch.zeros(4, 4))
    model_file, weights_file = split(source, tmp_path / "1")
    loaded = safetensors.torch.load_file(weights_file)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    with Archive(source) as whole, Archive(model_file) as part:
        assert read_program(whole).digest == read_program(part).digest


def test_torch_reads_the_weight_free_file_and_takes_no_zeros_for_weights(
    archives: dict[str, Path], tmp_path: Path
) -> None:
    model_file, _ = split(archives["everything"], tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.load(model_file)
    assert {tensor.device.type for tensor in program.state_dict.values()} == {"meta"}
    assert program.constants["window"].tolist() == pytest.approx(torch.linspace(0.5, 1.5, 10).tolist())
    with Archive(model_file) as archive, EmbeddedWeights(archive) as embedded:
        assert set(embedded.tensors) == {"window", "lifted_tensor_0"}


def test_a_file_that_has_no_weights_is_refused(archives: dict[str, Path], tmp_path: Path) -> None:
    model_file, _ = split(archives["mlp"], tmp_path / "1")
    with pytest.raises(ModelInvalid, match="has no weights inside"):
        split(model_file, tmp_path / "2")
    assert not (tmp_path / "2").exists()


def test_nothing_is_overwritten(archives: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(AlreadyExists, match=r"model\.safetensors exists already"):
        split(archives["mlp"], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_directory_that_cannot_be_made_is_named(archives: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageFailed, match=r"file/1: cannot write"):
        split(archives["mlp"], tmp_path / "file/1")
