from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks import forms
from benchmarks.harness import Answer
from rebind.config.pbtxt import read_pbtxt

if TYPE_CHECKING:
    from benchmarks.harness import Prepared

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def test_every_form_has_the_weights_of_seed_0(prepared: dict[str, Prepared]) -> None:
    for form, each in prepared.items():
        assert forms.torch_load_s(each, form) > 0  # it checks the answers


def test_config_says_what_a_torchscript_file_does_not(prepared: dict[str, Prepared]) -> None:
    config = read_pbtxt(prepared["torchscript"].repository / "stack_10mb" / "config.pbtxt")

    assert config.platform == "pytorch_libtorch"
    assert [(each.name, list(each.dims)) for each in config.input] == [("INPUT__0", [1, 512])]
    assert [(each.name, list(each.dims)) for each in config.output] == [("OUTPUT__0", [1, 512])]
    assert config.parameters["DISABLE_CUDNN"].string_value == "true"


def test_answers_of_other_weights_are_refused(prepared: dict[str, Prepared]) -> None:
    answer = Answer(prepared["archive"].answers[1][0], generation=2)
    prepared["archive"].check(answer, seed=1, generation=2)
    with pytest.raises(RuntimeError, match="error"):
        prepared["archive"].check(answer, seed=2, generation=2)
    with pytest.raises(RuntimeError, match="expected generation 3, got 2"):
        prepared["archive"].check(answer, seed=1, generation=3)
