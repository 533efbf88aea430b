"""Triton's parameters of PyTorch models, read and reported (spec 04 section 1.2). What they do: ``test_execution``."""

from __future__ import annotations

import logging
from dataclasses import fields

import pytest

from rebind.config.model import ModelConfig
from rebind.config.pbtxt import parse_pbtxt
from rebind.engines.pytorch.parameters import Settings
from rebind.errors import ConfigInvalid

SWITCHES = [
    "DISABLE_OPTIMIZED_EXECUTION",
    "ENABLE_CACHE_CLEANING",
    "INFERENCE_MODE",
    "DISABLE_CUDNN",
    "ENABLE_TENSOR_FUSER",
    "ENABLE_WEIGHT_SHARING",
    "ENABLE_JIT_PROFILING",
    "ENABLE_JIT_EXECUTOR",
]
COUNTS = ["INTRA_OP_THREAD_COUNT", "INTER_OP_THREAD_COUNT"]
ALWAYS = [
    "Optimized execution is enabled for model instance 'M'",
    "Cache Cleaning is disabled for model instance 'M'",
    "Inference Mode is enabled for model instance 'M'",
    "cuDNN is enabled for model instance 'M'",
]


def lines(parameters: dict[str, str], *, jit: bool = True) -> list[str]:
    """The lines of level INFO, which is Triton's."""
    found = Settings.from_options(parameters).log_lines("M", jit=jit)
    return [text for level, text in found if level == logging.INFO]


def warnings(parameters: dict[str, str], *, jit: bool = True) -> list[str]:
    found = Settings.from_options(parameters).log_lines("M", jit=jit)
    return [text for level, text in found if level == logging.WARNING]


def test_without_parameters_the_settings_are_tritons_defaults() -> None:
    settings = Settings.from_options({})
    assert settings == Settings()
    assert [getattr(settings, key.lower()) for key in SWITCHES] == [False, False, True, False, None, None, None, None]
    assert [getattr(settings, key.lower()) for key in COUNTS] == [None, None]
    assert lines({}) == ALWAYS
    assert warnings({}) == []


def test_every_parameter_that_is_set_has_its_line_in_tritons_order() -> None:
    on = dict.fromkeys(SWITCHES, "true") | dict.fromkeys(COUNTS, "2")
    assert lines(on) == [
        "Optimized execution is disabled for model instance 'M'",
        "Cache Cleaning is enabled for model instance 'M'",
        "Inference Mode is enabled for model instance 'M'",
        "cuDNN is disabled for model instance 'M'",
        "Tensor fuser is enabled for model instance 'M'",
        "Weight sharing is enabled for model instance 'M'",
        "Jit profiling is enabled for model instance 'M'",
        "Jit executor is enabled for model instance 'M'",
        "Intra op thread count is set to 2 for model instance 'M'",
        "Inter op thread count is set to 2 for model instance 'M'",
    ]
    off = dict.fromkeys(reversed(SWITCHES), "false")
    assert lines(off) == [
        "Optimized execution is enabled for model instance 'M'",
        "Cache Cleaning is disabled for model instance 'M'",
        "Inference Mode is disabled for model instance 'M'",
        "cuDNN is enabled for model instance 'M'",
        "Tensor fuser is disabled for model instance 'M'",
        "Weight sharing is disabled for model instance 'M'",
        "Jit profiling is disabled for model instance 'M'",
        "Jit executor is disabled for model instance 'M'",
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("ON", True), ("1", True), ("False", False), ("off", False), ("0", False)],
)
@pytest.mark.parametrize("key", SWITCHES)
def test_switches_are_read_as_triton_reads_them(key: str, text: str, value: bool) -> None:
    assert getattr(Settings.from_options({key: text}), key.lower()) is value


def test_all_values_that_cannot_be_read_come_in_one_report() -> None:
    with pytest.raises(ConfigInvalid) as refused:
        Settings.from_options({"INFERENCE_MODE": "yes", "ENABLE_JIT_EXECUTOR": "", "INTER_OP_THREAD_COUNT": "0"})
    assert [str(fault) for fault in refused.value.faults] == [
        "INFERENCE_MODE: failed to convert 'yes' to boolean; give true or false",
        "ENABLE_JIT_EXECUTOR: failed to convert '' to boolean; give true or false",
        (
            "INTER_OP_THREAD_COUNT: '0' is no integer from 1 to 1024; "
            'give a whole number of threads as a string, e.g. "4"'
        ),
    ]


@pytest.mark.parametrize("field", [field.name for field in fields(Settings) if field.name != "enable_nvfuser"])
def test_a_configuration_is_refused_for_the_values_that_an_engine_would_refuse(field: str) -> None:
    text = f'backend: "pytorch" parameters {{ key: "{field.upper()}" value {{ string_value: "maybe" }} }}'
    with pytest.raises(ConfigInvalid, match=field.upper()):
        ModelConfig.from_message(parse_pbtxt(text, "m"), "m")


def test_other_parameters_are_ignored() -> None:
    assert Settings.from_options({"cudnn": "x", "inference_mode": "off", "EXECUTION_MODE": "?"}) == Settings()


@pytest.mark.parametrize("value", ["true", "false", "anything"])
def test_nvfuser_is_accepted_and_said_to_be_gone(value: str) -> None:
    assert lines({"ENABLE_NVFUSER": value}) == ALWAYS
    assert warnings({"ENABLE_NVFUSER": value}) == [
        "ENABLE_NVFUSER has no effect on model 'M': torch has no nvFuser any more"
    ]


def test_models_without_a_graph_executor_say_so_where_its_parameters_are_set() -> None:
    parameters = {"DISABLE_OPTIMIZED_EXECUTION": "on", "ENABLE_JIT_PROFILING": "off", "INTRA_OP_THREAD_COUNT": "3"}
    assert lines(parameters, jit=False) == [*ALWAYS[1:], "Intra op thread count is set to 3 for model instance 'M'"]
    assert warnings(parameters, jit=False) == [
        "DISABLE_OPTIMIZED_EXECUTION has no effect on model 'M': only TorchScript has a graph executor",
        "ENABLE_JIT_PROFILING has no effect on model 'M': only TorchScript has a graph executor",
    ]
    assert warnings({}, jit=False) == []


@pytest.mark.parametrize("key", SWITCHES)
def test_plans_have_other_keys_only_where_a_setting_changes_how_a_graph_runs(key: str) -> None:
    default = Settings().key_parts()
    changed = Settings.from_options({key: "false" if key == "INFERENCE_MODE" else "true"}).key_parts()
    changes_plans = key not in ("ENABLE_CACHE_CLEANING", "DISABLE_CUDNN", "ENABLE_WEIGHT_SHARING")
    assert (changed != default) is changes_plans
