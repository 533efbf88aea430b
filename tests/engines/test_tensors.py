from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import safetensors.torch
import torch

from rebind.engines.pytorch.tensors import check_weights
from rebind.errors import WeightsRefused
from rebind.weights.formats import open_weights
from rebind.weights.slots import Slot, SlotTable
from rebind.weights.store import WeightSet, WeightStore

if TYPE_CHECKING:
    from pathlib import Path

SLOTS = SlotTable((Slot("a", "F32", (2, 3)), Slot("b", "F32", (4,)), Slot("c", "I64", (), used=False)))


@pytest.fixture
def weights(tmp_path: Path) -> WeightSet:
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.tensor(1)}, path)
    with open_weights(path) as source:
        return WeightStore().put(SLOTS, source).weights


def test_weights_that_fit_pass(weights: WeightSet) -> None:
    check_weights("p", SLOTS.slots[:2], weights)
    check_weights("p", (), weights)


def test_all_that_do_not_fit_are_told(weights: WeightSet) -> None:
    wanted = [
        Slot("a", "F32", (3, 2)),
        Slot("b", "I32", (4,)),
        Slot("c", "I64", ()),  # dropped by the store, as its own table does not use it
        Slot("d", "BF16", (1,)),
    ]
    with pytest.raises(WeightsRefused) as refused:
        check_weights("p", wanted, weights)
    assert refused.value.subject == "plan p"
    assert [str(fault) for fault in refused.value.faults] == [
        "'a': expected F32 [3,2], got F32 [2,3]",
        "'b': expected I32 [4], got F32 [4]",
        "'c': missing, expected I64 []",
        "'d': missing, expected BF16 [1]",
    ]
