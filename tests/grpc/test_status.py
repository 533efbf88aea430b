from __future__ import annotations

import asyncio
from urllib.parse import unquote

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebind import errors
from rebind.grpc.head import NotGrpc, parse_head
from rebind.grpc.status import RpcFailed, Status, details_of, encode_details, status_of


def test_codes_are_those_of_grpc() -> None:
    assert {status.name: status.value for status in Status} == {code.name: code.value[0] for code in grpc.StatusCode}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidArgument("x"), Status.INVALID_ARGUMENT),
        (errors.WeightsRefused("x", [errors.Fault("a", "b")]), Status.INVALID_ARGUMENT),
        (errors.DigestMismatch("x", "a", "b"), Status.FAILED_PRECONDITION),
        (errors.Conflict("x"), Status.ABORTED),
        (errors.WaitTimeout("x"), Status.DEADLINE_EXCEEDED),
        (errors.WeightsPending("m", 1), Status.UNAVAILABLE),
        (errors.Unavailable("x"), Status.UNAVAILABLE),
        (errors.MemoryExceeded(2, 1), Status.RESOURCE_EXHAUSTED),
        (errors.StorageFailed("x"), Status.INTERNAL),
        (errors.NotFound("x"), Status.NOT_FOUND),
        (errors.AlreadyExists("x"), Status.ALREADY_EXISTS),
        (errors.Unsupported("x"), Status.UNIMPLEMENTED),
        (errors.Cancelled("x"), Status.CANCELLED),
        (errors.RebindError("x"), Status.UNKNOWN),
        (RpcFailed(Status.DATA_LOSS, "x"), Status.DATA_LOSS),
        (asyncio.CancelledError(), Status.CANCELLED),
        (KeyError("x"), Status.INTERNAL),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_errors_and_their_status(error: BaseException, status: Status) -> None:
    assert status_of(error) is status


def test_the_details_are_exactly_the_message() -> None:
    assert details_of(errors.NotFound("no such thing")) == "no such thing"
    assert details_of(KeyError("x")) == "KeyError: 'x'"


@given(text=st.text(max_size=2000))
def test_details_are_printable_ascii_and_come_back(text: str) -> None:
    encoded = encode_details(text)
    assert all(0x20 <= byte < 0x7F for byte in encoded)
    if len(encoded) < 6000:
        assert unquote(encoded.decode()) == text


@given(text=st.text(min_size=700, max_size=800), start=st.integers(0, 12))
def test_long_details_are_cut_between_characters(text: str, start: int) -> None:
    long = "x" * start + text * 10
    encoded = encode_details(long)
    assert len(encoded) <= 6144
    kept, _, _ = unquote(encoded.decode(), errors="strict").rpartition(" ... (cut)")
    assert long.startswith(kept)
    assert kept


def test_lone_surrogates_do_not_hurt() -> None:
    assert encode_details("a\ud800b") == b"a?b"


def fields(**more: str) -> tuple[tuple[bytes, bytes], ...]:
    known = {":method": "POST", ":path": "/a.B/C", "content-type": "application/grpc"}
    named = {name.replace("_", "-"): value for name, value in more.items()}
    return tuple((name.encode(), value.encode()) for name, value in (known | named).items())


@pytest.mark.parametrize(
    ("text", "timeout_s"),
    [("1H", 3600), ("2M", 120), ("30S", 30), ("1500m", 1.5), ("20u", 2e-5), ("5n", 5e-9), ("99999999S", 99_999_999)],
)
def test_timeouts(text: str, timeout_s: float) -> None:
    assert parse_head(fields(grpc_timeout=text)).timeout_s == pytest.approx(timeout_s)


@pytest.mark.parametrize("text", ["", "5", "S", "-1S", "1.5S", "123456789S", "1 S", "1s", "\xb2S"])
def test_malformed_timeouts(text: str) -> None:
    with pytest.raises(RpcFailed, match="grpc-timeout") as failed:
        parse_head(fields(grpc_timeout=text))
    assert failed.value.status is Status.INTERNAL


def test_encodings() -> None:
    plain = parse_head(fields())
    assert (plain.encoding, plain.reply_encoding, plain.timeout_s, plain.path) == (
        "identity",
        "identity",
        None,
        "/a.B/C",
    )
    both = parse_head(fields(grpc_encoding="gzip", grpc_accept_encoding="identity, gzip"))
    assert (both.encoding, both.reply_encoding) == ("gzip", "gzip")
    one_way = parse_head(fields(grpc_encoding="gzip"))
    assert (one_way.encoding, one_way.reply_encoding) == ("gzip", "identity")
    with pytest.raises(RpcFailed, match="'br' is not supported: deflate, gzip, identity are") as failed:
        parse_head(fields(grpc_encoding="br"))
    assert failed.value.status is Status.UNIMPLEMENTED


@pytest.mark.parametrize("kind", ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"])
def test_content_types_of_grpc(kind: str) -> None:
    assert parse_head(fields(content_type=kind)).path == "/a.B/C"


@pytest.mark.parametrize("kind", ["", "application/json", "application/grpc-web", "application/grpcx"])
def test_other_content_types(kind: str) -> None:
    with pytest.raises(NotGrpc) as refused:
        parse_head(fields(content_type=kind))
    assert refused.value.status == b"415"


def test_other_methods_of_http() -> None:
    with pytest.raises(NotGrpc) as refused:
        parse_head(((b":method", b"GET"), (b":path", b"/"), (b"content-type", b"application/grpc")))
    assert refused.value.status == b"405"
