from __future__ import annotations

import json
import os

import pytest

from rebind.http.reply import json_reply


def test_text_without_utf8_can_be_told() -> None:
    """A file's name may be any bytes, and the reasons of the repository index quote it."""
    name = os.fsdecode(b"model-\xff-\xc3\xbc")
    (body,) = json_reply([{"reason": f"{name} is still being written", "size": 1.5}]).body
    assert json.loads(bytes(body)) == [{"reason": "model-?-ü is still being written", "size": 1.5}]


def test_what_is_no_json_is_a_defect() -> None:
    with pytest.raises(TypeError):
        json_reply({"value": object()})
