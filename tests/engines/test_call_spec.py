"""Places of tensors in calls, from pytree specs as torch writes them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_structure, treespec_dumps

from rebind.engines.aot_inductor.call_spec import input_names, input_paths, result_names, result_paths

T = torch.zeros(1)


def spec(value: Any) -> str:
    return treespec_dumps(tree_structure(value))


def test_inputs_lie_among_arguments_and_keyword_arguments() -> None:
    call = spec(((T, {"p": [T, T]}), {"k": T, "more": (T,)}))
    assert [paths[0] for paths in input_paths(call)] == [
        "ARGS[0]",
        "ARGS[1][p][0]",
        "ARGS[1][p][1]",
        "KWARGS[k]",
        "KWARGS[more][0]",
    ]
    assert input_names(call) == ("INPUT__0", "INPUT__1", "INPUT__2", "k", "INPUT__4")


def test_keys_are_taken_quoted_and_as_fields_too() -> None:
    _, nested, keyword = input_paths(spec(((T, {"p": [T]}), {"k": T})))
    assert nested == ("ARGS[1][p][0]", "ARGS[1]['p'][0]", 'ARGS[1]["p"][0]', "ARGS[1].p[0]")
    assert keyword == ("KWARGS[k]", "KWARGS['k']", 'KWARGS["k"]', "KWARGS.k", "KWARGSk")


def test_results_lie_below_the_result() -> None:
    assert result_paths(spec(T)) == (("RESULT",),)
    assert [paths[0] for paths in result_paths(spec((T, [T, {"a": T}])))] == [
        "RESULT[0]",
        "RESULT[1][0]",
        "RESULT[1][1][a]",
    ]


@pytest.mark.parametrize("result", [{"b": T, "a": T}, OrderedDict(b=T, a=T)])
def test_results_in_a_flat_dictionary_have_their_keys_as_names(result: Any) -> None:
    assert result_names(spec(result)) == ("b", "a")
    assert [paths[0] for paths in result_paths(spec(result))] == ["RESULT[b]", "RESULT[a]"]


@pytest.mark.parametrize("result", [T, (T, T), {"a": [T]}, {"": T}, {"a\n": T}, {1: T}, [{"a": T}]])
def test_other_results_are_numbered(result: Any) -> None:
    count = len(result_paths(spec(result)))
    assert result_names(spec(result)) == tuple(f"OUTPUT__{index}" for index in range(count))


@pytest.mark.parametrize("text", ["", "[]", "[1]", "[1, 2]", '[1, {"type": "builtins.tuple"}]', "{}"])
def test_what_torch_does_not_write_is_an_error(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        input_paths(text)
