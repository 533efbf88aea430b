"""Which types ``forward`` may take and return, as torch itself describes them (spec 04 section 1.5, case T16)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from rebind.engines.torchscript.examine_child import examine
from rebind.engines.torchscript.signature import Argument, Inputs, choose_inputs, read_results
from rebind.errors import InvalidArgument
from tests.engines.torchscript_models import Optionals, Pair, script

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rebind.tensor import GraphTensor


def inputs_of(model: nn.Module, path: Path, configured: Sequence[str] = ()) -> Inputs:
    found = examine({"source": str(script(model, path)), "keeps_devices": False}, lambda _: None)
    return choose_inputs("m", [Argument(**argument) for argument in found["arguments"]], configured)


def outputs_of(model: nn.Module, path: Path) -> tuple[GraphTensor, ...]:
    found = examine({"source": str(script(model, path)), "keeps_devices": False}, lambda _: None)
    return read_results("m", found["result"])


class TwoDictionaries(nn.Module):
    def forward(self, x: dict[str, torch.Tensor], y: dict[str, torch.Tensor]) -> torch.Tensor:
        return x["a"] + y["b"]


class ListOfTensors(nn.Module):
    def forward(self, x: list[torch.Tensor]) -> torch.Tensor:
        return x[0]


class Text(nn.Module):
    def forward(self, x: str) -> torch.Tensor:
        return torch.ones(len(x))


@pytest.mark.parametrize("kind", [TwoDictionaries, ListOfTensors, Text])
def test_arguments_of_other_types_are_refused(tmp_path: Path, kind: type[nn.Module]) -> None:
    with pytest.raises(InvalidArgument, match=r"model 'm': argument 'x' of forward is of type (Dict|List|str)"):
        inputs_of(kind(), tmp_path / "m.pt")


class MayTakeAnything(nn.Module):
    def forward(self, x: torch.Tensor, options: dict[str, int] | None = None) -> torch.Tensor:
        return x


def test_arguments_of_other_types_may_be_left_out_if_they_can_be(tmp_path: Path) -> None:
    inputs = inputs_of(MayTakeAnything(), tmp_path / "m.pt")
    assert [tensor.name for tensor in inputs.tensors] == ["x"]
    with pytest.raises(InvalidArgument, match=r"argument 'options' of forward is of type Optional\[Dict\[str, int\]\]"):
        inputs_of(MayTakeAnything(), tmp_path / "m.pt", ["x", "options"])


def test_without_a_default_what_is_optional_is_none(tmp_path: Path) -> None:
    inputs = inputs_of(Optionals(), tmp_path / "m.pt", ["x", "by"])
    assert [argument.name for argument in inputs.arguments] == ["x", "by"]
    assert inputs.without_default == ("mask",)


class NestedTuple(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        return x, (x, x)


class ReturnsDictionary(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": x}


class ReturnsNone(nn.Module):
    def forward(self, x: torch.Tensor) -> None:
        x.sum()


class ReturnsNumber(nn.Module):
    def forward(self, x: torch.Tensor) -> int:
        return x.size(0)


class ReturnsList(nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x, x]


class ReturnsNumbers(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        return x, [1]


@pytest.mark.parametrize("kind", [NestedTuple, ReturnsDictionary, ReturnsNone, ReturnsNumber])
def test_other_results_are_refused(tmp_path: Path, kind: type[nn.Module]) -> None:
    text = r"^output must be of type Tensor, List\[str\] or Tuple containing one of these two types\."
    with pytest.raises(InvalidArgument, match=text):
        outputs_of(kind(), tmp_path / "m.pt")


@pytest.mark.parametrize(("kind", "received"), [(ReturnsList, "Tensor"), (ReturnsNumbers, "int")])
def test_lists_of_anything_but_strings_are_refused(tmp_path: Path, kind: type[nn.Module], received: str) -> None:
    text = rf"^output must be of type Tensor or List\[str\], received List\[{received}\]"
    with pytest.raises(InvalidArgument, match=text):
        outputs_of(kind(), tmp_path / "m.pt")


class ReturnsPair(nn.Module):
    def forward(self, x: torch.Tensor) -> Pair:
        return Pair(x, ["a"])


class ReturnsAll(nn.Module):
    def forward(self, x: torch.Tensor, words: list[str]) -> tuple[torch.Tensor, list[str], torch.Tensor]:
        return x, words, x


def test_results_are_numbered_and_fields_of_named_tuples_known_by_name_too(tmp_path: Path) -> None:
    assert [(o.name, o.paths) for o in outputs_of(ReturnsPair(), tmp_path / "m.pt")] == [
        ("OUTPUT__0", ("total",)),
        ("OUTPUT__1", ("words",)),
    ]
    assert [(o.name, o.paths) for o in outputs_of(ReturnsAll(), tmp_path / "m.pt")] == [
        ("OUTPUT__0", ()),
        ("OUTPUT__1", ()),
        ("OUTPUT__2", ()),
    ]
