"""Errors cross the wire: what the server's front end makes of each, the client makes the same error of again."""

from __future__ import annotations

import json

import pytest

from rebind.client.errors import error_from
from rebind.client.flow import Reply
from rebind.errors import (
    Conflict,
    DigestMismatch,
    Fault,
    Internal,
    InvalidArgument,
    MemoryExceeded,
    NotFound,
    RebindError,
    StorageFailed,
    Unavailable,
    Unsupported,
    WaitTimeout,
    WeightsPending,
    WeightsRefused,
)
from rebind.http.errors import error_reply


def over_the_wire(error: RebindError) -> Reply:
    status, _, body = error_reply(error)
    return Reply(status, {}, b"".join(body))


@pytest.mark.parametrize(
    "error",
    [
        Conflict("stage 3 is being committed"),
        Internal("it broke"),
        InvalidArgument("a label is 1 to 256 printable characters"),
        NotFound("no such model"),
        Unavailable("Server exiting"),
        Unsupported("not here"),
        WaitTimeout("generation 4 did not serve within 1 s"),
        DigestMismatch("model 'policy' version 1", "aa", "bb"),
        MemoryExceeded(812, 600, 1000),
        MemoryExceeded(812, 600),
        WeightsPending("policy", 3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_keeps_its_class_and_what_it_knows(error: RebindError) -> None:
    found = error_from(over_the_wire(error))
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    "faults",
    [
        [Fault("", "truncated: 4 bytes are missing")],
        [Fault("'a'", "missing, expected F32 [4]", "name it"), Fault("'b'", "unexpected")],
    ],
)
def test_refused_weights_keep_their_faults(faults: list[Fault]) -> None:
    error = WeightsRefused("weights sent for 'policy'", faults)
    found = error_from(over_the_wire(error), weights_sent=True)
    assert isinstance(found, WeightsRefused)
    assert str(found) == str(error)
    assert found.subject == error.subject
    assert [str(fault) for fault in found.faults] == [str(fault) for fault in error.faults]


def test_faults_that_cannot_be_told_apart_keep_their_text() -> None:
    error = WeightsRefused("weights", [Fault("'a | b'", "missing"), Fault("'c'", "missing")])
    found = error_from(over_the_wire(error), weights_sent=True)
    assert (type(found), str(found)) == (InvalidArgument, str(error))


@pytest.mark.parametrize(
    ("status", "kind"), [(502, Internal), (507, StorageFailed), (412, InvalidArgument), (418, InvalidArgument)]
)
def test_what_stands_between_is_quoted(status: int, kind: type[RebindError]) -> None:
    found = error_from(Reply(status, {}, b"<html>Bad Gateway</html>"))
    assert type(found) is kind
    assert f"status {status}" in str(found)
    assert "<html>Bad Gateway</html>" in str(found)


def test_server_without_these_calls_is_told_apart() -> None:
    found = error_from(Reply(405, {}, json.dumps({"error": "Method Not Allowed"}).encode()))
    assert isinstance(found, Unsupported)
    assert "does not know this call" in str(found)
