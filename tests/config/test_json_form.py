from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from hypothesis import given

from rebind.config.complete import normalise
from rebind.config.pbtxt import from_json, parse_json, parse_pbtxt, read_pbtxt, to_json, to_pbtxt
from rebind.errors import ConfigInvalid
from tests.config.strategies import messages

if TYPE_CHECKING:
    from rebind.config.schema import ConfigMessage

TRITON = Path(__file__).parent / "triton_2_51"
MODELS = sorted(path.stem for path in TRITON.glob("*.json"))


def refused(config: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigInvalid) as caught:
        from_json(config, "load of 'm'")
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize("model", MODELS)
def test_equals_what_a_live_triton_answers(model: str) -> None:
    message = read_pbtxt(TRITON / f"{model}.pbtxt")
    message.default_model_filename = "model.py"
    assert to_json(normalise(message, model)) == json.loads((TRITON / f"{model}.json").read_text())


@pytest.mark.parametrize("model", MODELS)
def test_fields_come_in_the_order_of_triton(model: str) -> None:
    theirs = json.loads((TRITON / f"{model}.json").read_text())
    assert list(to_json(parse_json(orjson.dumps(theirs), model))) == list(theirs)


@pytest.mark.parametrize("model", MODELS)
def test_the_config_endpoints_answer_pasted_into_config_pbtxt_is_read(model: str) -> None:  # case C10
    answer = (TRITON / f"{model}.json").read_text()
    message = parse_pbtxt(f"\n  {answer}", "config.pbtxt")
    assert message == parse_json(answer, "config")
    assert parse_pbtxt(to_pbtxt(message), "config.pbtxt") == message


@given(messages())
def test_json_and_text_read_back_the_same(message: ConfigMessage) -> None:  # case C10
    answered = orjson.loads(orjson.dumps(to_json(message)))
    assert from_json(answered, "m") == message
    assert parse_pbtxt(to_pbtxt(from_json(answered, "m")), "m") == message


def test_64_bit_numbers_beyond_doubles_survive() -> None:
    message = parse_pbtxt("dynamic_batching { max_queue_delay_microseconds: 18446744073709551615 }", "m")
    assert to_json(message)["dynamic_batching"]["max_queue_delay_microseconds"] == 2**64 - 1
    assert parse_json(orjson.dumps(to_json(message)), "m") == message


def test_floats_are_the_shortest_that_read_back() -> None:
    message = parse_pbtxt("sequence_batching { direct { minimum_slot_utilization: 0.1 } }", "m")
    assert orjson.dumps(to_json(message)["sequence_batching"]["direct"]["minimum_slot_utilization"]) == b"0.1"


@pytest.mark.parametrize("value", ["3.4028235e38", "-3.4028235e38", "1e-45", "16777217", "-0.0"])
def test_floats_at_their_limits_read_back_the_same(value: str) -> None:
    control = f"control {{ fp32_false_true: [ {value}, 1 ] }}"
    message = parse_pbtxt(f"sequence_batching {{ control_input {{ {control} }} }}", "m")
    assert parse_json(orjson.dumps(to_json(message)), "m") == message


def test_what_json_cannot_say_is_a_string() -> None:
    text = """model_metrics { metric_control { histogram_options { buckets: [ inf, -inf, nan ] } } }"""
    control = to_json(parse_pbtxt(text, "m"))["model_metrics"]["metric_control"][0]
    assert control["histogram_options"]["buckets"] == ["Infinity", "-Infinity", "NaN"]


def test_numbers_as_strings_and_camel_case_are_accepted() -> None:
    config = {
        "maxBatchSize": "8",
        "input": [{"name": "x", "dims": ["3", -1], "data_type": "TYPE_FP32"}],
        "platform": None,
    }
    message = from_json(config, "m")
    assert (message.max_batch_size, list(message.input[0].dims), message.platform) == (8, [3, -1], "")


@pytest.mark.parametrize(
    ("parameters", "key"),
    [
        ({"key": "K", "value": {"string_value": "v"}}, '"K"'),
        ([{"key": "K", "value": {"string_value": "v"}}], '"K"'),
        ({"K": "v"}, '"K"'),
        ("K=v", '"K"'),
        ([], '"K"'),
        ({"key": "MY_KEY", "value": {"string_value": "v"}}, '"MY_KEY"'),
    ],
)
def test_parameters_of_a_wrong_form_are_told_the_right_one(parameters: Any, key: str) -> None:  # case C3
    [fault] = refused({"name": "m", "parameters": parameters})
    assert fault.startswith("parameters: ")
    assert f'write "parameters": {{{key}: {{"string_value": "..."}}}}' in fault


def test_parameters_of_the_right_form() -> None:
    message = from_json({"parameters": {"key": {"string_value": "v"}, "empty": {}}}, "m")
    assert {key: value.string_value for key, value in message.parameters.items()} == {"key": "v", "empty": ""}


def test_all_faults_come_in_one_report_with_their_paths() -> None:
    faults = refused(
        {
            "nam": "m",
            "max_batch_size": "${batch}",
            "input": [{"name": 3, "data_type": "TYPE_FLOAT32", "dims": [1, "x", 1.5]}, "y"],
            "parameters": {"K": {"strng_value": "v"}},
            "metric_tags": [],
            "output": {},
            "model_warmup": [None],
            "optimization": {"cuda": 1},
            "dynamic_batching": {"priority_queue_policy": {"high": {}}, "preserve_ordering": "yes"},
        },
    )
    assert [fault.split(":")[0] for fault in faults] == [
        "nam",
        "max_batch_size",
        "input[0].name",
        "input[0].data_type",
        "input[0].dims[1]",
        "input[0].dims[2]",
        "input[1]",
        "parameters['K'].strng_value",
        "metric_tags",
        "output",
        "model_warmup[0]",
        "optimization.cuda",
        "dynamic_batching.priority_queue_policy['high']",
        "dynamic_batching.preserve_ordering",
    ]
    text = "\n".join(faults)
    assert 'did you mean "name"?' in text
    assert "${batch} looks like an unfilled placeholder" in text
    assert "did you mean TYPE_FP32?" in text
    assert 'did you mean "string_value"?' in text
    assert 'expected int64, got "x"' in text


def test_a_string_that_is_no_unicode_is_refused() -> None:
    assert refused({"name": "\ud800"}) == ["name: expected string, got a value that cannot be shown"]


def test_two_schedulers_are_refused() -> None:
    [fault] = refused({"dynamic_batching": {}, "ensemble_scheduling": {}})
    assert "scheduling_choice" in fault


def test_an_enum_number_without_a_name_is_refused() -> None:
    [fault] = refused({"instance_group": [{"kind": 9}]})
    assert fault.startswith("instance_group.kind: 9 is no value of Kind; it can be KIND_AUTO")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", r"^load:1:\d+: no valid JSON"),
        ('{\n"name": "m",\n}', r"^load:2:12: no valid JSON"),
        ("[]", r"^load: expected a JSON object, got \[\]"),
        ("", r"^load:1:\d+: no valid JSON"),
        (b"\xff", r"^load:1:1: byte 0xff is not UTF-8"),
        ('{"input": ' + "[" * 100_000, r"^load:1:\d+: no valid JSON"),
        ('{"input": ' + "[" * 500 + "]" * 500 + "}", r"input\[0\]: expected an object \(ModelInput\)"),
    ],
)
def test_text_that_is_no_json_object(content: str | bytes, said: str) -> None:
    with pytest.raises(ConfigInvalid, match=said):
        parse_json(content, "load")
