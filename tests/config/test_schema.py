from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb2

from rebind.config.schema import MODEL_CONFIG, POOL, copy_of, new_config

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, EnumDescriptor


def _described(message: Descriptor) -> dict[str, Any]:
    """All there is to know of a message type and those inside it, as plain data."""
    return {
        "fields": [
            (
                field.name,
                field.number,
                field.type,
                field.is_repeated,
                field.has_presence,
                field.message_type.full_name if field.message_type else None,
                field.enum_type.full_name if field.enum_type else None,
            )
            for field in message.fields
        ],
        "oneofs": {oneof.name: [field.name for field in oneof.fields] for oneof in message.oneofs},
        "is_map_entry": message.GetOptions().map_entry,
        "enums": {enum.name: _values(enum) for enum in message.enum_types},
        "messages": {nested.name: _described(nested) for nested in message.nested_types},
    }


def _values(enum: EnumDescriptor) -> list[tuple[str, int]]:
    return [(value.name, value.number) for value in enum.values]


def test_every_message_and_enum_equals_that_of_tritonclient() -> None:
    ours, theirs = MODEL_CONFIG.file, pb2.DESCRIPTOR
    assert {name: _values(enum) for name, enum in ours.enum_types_by_name.items()} == {
        name: _values(enum) for name, enum in theirs.enum_types_by_name.items()
    }
    assert {name: _described(message) for name, message in ours.message_types_by_name.items()} == {
        name: _described(message) for name, message in theirs.message_types_by_name.items()
    }


def test_fields_that_spec_03_names_beyond_released_servers_are_there() -> None:
    """What the spec (mid-2026) has and tritonserver 2.51 has not; nothing in it is missing in tritonclient 2.73."""
    newer = {"ModelConfig": ["model_metrics"], "ModelEnsembling": ["max_inflight_requests"]}
    for message, fields in newer.items():
        known = POOL.FindMessageTypeByName(f"inference.{message}").fields_by_name
        assert [name for name in fields if name not in known] == []


def test_bytes_mean_the_same_to_tritonclient() -> None:
    ours = new_config()
    ours.name = "m"
    ours.input.add(name="x", data_type="TYPE_BF16", dims=[-1, 3])
    ours.parameters["k"].string_value = "v"
    ours.dynamic_batching.priority_queue_policy[7].max_queue_size = 3
    theirs = pb2.ModelConfig.FromString(ours.SerializeToString())
    assert theirs.input[0].data_type == pb2.TYPE_BF16
    assert theirs.dynamic_batching.priority_queue_policy[7].max_queue_size == 3
    assert theirs.SerializeToString(deterministic=True) == ours.SerializeToString(deterministic=True)


def test_lives_beside_tritonclient_whichever_comes_first() -> None:
    modules = ["tritonclient.grpc.model_config_pb2", "rebind.config.schema"]
    for order in (modules, modules[::-1]):
        code = "; ".join(f"import {module}" for module in order)
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_copy_is_independent() -> None:
    message = new_config()
    message.name = "a"
    copy = copy_of(message)
    copy.name = "b"
    assert message.name == "a"
