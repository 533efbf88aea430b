from __future__ import annotations

import asyncio
import logging
import queue
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.grpc.echo import LIMIT_BYTES, SERVICE
from tests.server import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.grpc.echo import RunningGrpc

TIMEOUT_S = 20


def unary(channel: grpc.Channel, method: str, content: bytes = b"x", timeout: float = TIMEOUT_S, **more: Any) -> bytes:
    answer: bytes = channel.unary_unary(SERVICE + method)(content, timeout=timeout, **more)
    return answer


def failure(channel: grpc.Channel, method: str, content: bytes = b"x", **more: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as failed:
        unary(channel, method, content, **more)
    return failed.value.code(), failed.value.details()


@pytest.mark.parametrize("method", ["Unary", "Later"])
@pytest.mark.parametrize("size", [0, 1, 16_379, 16_384, 131_072, 1_000_000])
def test_unary(channel: grpc.Channel, method: str, size: int) -> None:
    content = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert unary(channel, method, content) == content


def test_messages_of_50_mb_both_ways(channel: grpc.Channel) -> None:
    content = bytes(range(250)) * 200_000
    assert unary(channel, "Unary", content) == content


def test_client_streaming(channel: grpc.Channel) -> None:
    contents = [bytes(size) for size in (0, 1, 200_000, 3_000_000, 5)]
    assert channel.stream_unary(SERVICE + "Count")(iter(contents), timeout=TIMEOUT_S) == b"5 3200006"
    assert channel.stream_unary(SERVICE + "Count")(iter([]), timeout=TIMEOUT_S) == b"0 0"


def test_server_streaming(channel: grpc.Channel) -> None:
    answers = list(channel.unary_stream(SERVICE + "Repeat")(b"30 700000", timeout=TIMEOUT_S))
    assert [len(answer) for answer in answers] == [700_000] * 30
    assert answers[-1][:256] == bytes(range(256))


def test_thousands_of_small_answers_in_a_stream(channel: grpc.Channel) -> None:
    assert sum(map(len, channel.unary_stream(SERVICE + "Repeat")(b"5000 10", timeout=TIMEOUT_S))) == 50_000


def test_bidirectional_streaming_answers_each_message_before_the_next_is_sent(channel: grpc.Channel) -> None:
    answered: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def contents() -> Iterator[bytes]:
        for number in range(20):
            yield b"%d" % number
            assert answered.get(timeout=TIMEOUT_S) == b"%d" % number

    count = 0
    for answer in channel.stream_stream(SERVICE + "Stream")(contents(), timeout=TIMEOUT_S):
        answered.put(answer)
        count += 1
    assert count == 20


def test_metadata_reaches_the_handler(channel: grpc.Channel) -> None:
    seen = unary(channel, "Metadata", metadata=(("x-key", "value"), ("x-raw-bin", b"\0\xff")))
    assert b"x-key=value" in seen
    assert b"x-raw-bin=AP8" in seen


def test_errors_have_their_status_and_exactly_their_text(channel: grpc.Channel) -> None:
    text = 'nö such % model\n\t"ü" \N{SNOWMAN}'
    assert failure(channel, "Fail", text.encode()) == (grpc.StatusCode.NOT_FOUND, text)


def test_a_long_text_is_cut_where_clients_would_refuse_it(channel: grpc.Channel) -> None:
    code, details = failure(channel, "Fail", ("ü" * 20_000).encode())
    assert code is grpc.StatusCode.NOT_FOUND
    assert details.startswith("ü" * 1_000)
    assert details.endswith("ü ... (cut)")


def test_a_defect_is_internal_and_logged(channel: grpc.Channel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert failure(channel, "Break") == (grpc.StatusCode.INTERNAL, "ZeroDivisionError: a defect")
    assert "ZeroDivisionError" in caplog.text


def test_unknown_method(channel: grpc.Channel) -> None:
    assert failure(channel, "Nope") == (grpc.StatusCode.UNIMPLEMENTED, "unknown method '/test.Echo/Nope'")


def test_a_unary_method_takes_exactly_one_message(channel: grpc.Channel) -> None:
    for contents in ([], [b"a", b"b"]):
        with pytest.raises(grpc.RpcError) as failed:
            channel.stream_unary(SERVICE + "Unary")(iter(contents), timeout=TIMEOUT_S)
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "exactly one message" in failed.value.details()


def test_parts_of_a_reply_are_one_message(channel: grpc.Channel) -> None:
    assert unary(channel, "Twice", b"ab") == b"abab"
    assert unary(channel, "Twice", bytes(300_000)) == bytes(600_000)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
@pytest.mark.parametrize("size", [10, 1_000, 2_000_000])
def test_compressed_messages(channel: grpc.Channel, compression: grpc.Compression, size: int) -> None:
    content = b"abc" * size
    assert unary(channel, "Unary", content, compression=compression) == content
    assert unary(channel, "Later", content, compression=compression) == content
    stream = channel.stream_stream(SERVICE + "Stream")
    assert list(stream(iter([content, b""]), timeout=TIMEOUT_S, compression=compression)) == [content, b""]


def test_a_message_that_is_too_large_is_refused(channel: grpc.Channel) -> None:
    code, details = failure(channel, "Unary", bytes(LIMIT_BYTES + 1))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details == f"Received message larger than max ({LIMIT_BYTES + 1} vs. {LIMIT_BYTES})"
    assert unary(channel, "Unary") == b"x"


def test_deadline_ends_the_handler(server: RunningGrpc, channel: grpc.Channel) -> None:
    assert failure(channel, "Slow", timeout=0.2)[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert server.echo.cancelled.wait(TIMEOUT_S)


def test_cancellation_ends_the_handler(server: RunningGrpc, channel: grpc.Channel) -> None:
    for method in ("Slow", "Endless"):
        server.echo.reset()
        call = channel.unary_stream(SERVICE + method)(b"x", timeout=TIMEOUT_S)
        assert server.echo.started.wait(TIMEOUT_S)
        call.cancel()
        assert server.echo.cancelled.wait(TIMEOUT_S)
    eventually(lambda: server.open_calls() == 0, "the calls are gone")


def test_what_is_not_abandonable_goes_on_after_its_client(server: RunningGrpc, channel: grpc.Channel) -> None:
    call = channel.unary_unary(SERVICE + "Lasting").future(b"x", timeout=TIMEOUT_S)
    assert server.echo.started.wait(TIMEOUT_S)
    call.cancel()
    eventually(lambda: server.open_calls() == 0, "the call is gone")
    server.call(server.echo.open_gates)
    assert server.echo.finished.wait(TIMEOUT_S)


def test_a_client_that_disconnects_ends_its_handlers(server: RunningGrpc) -> None:
    with grpc.insecure_channel(server.target) as channel:
        call = channel.unary_unary(SERVICE + "Slow").future(b"x", timeout=TIMEOUT_S)
        assert server.echo.started.wait(TIMEOUT_S)
    assert call.code() is grpc.StatusCode.CANCELLED
    assert server.echo.cancelled.wait(TIMEOUT_S)
    eventually(lambda: server.connections() == 0, "the connection is gone")


def test_an_early_refusal_ends_a_stream_of_the_client(server: RunningGrpc, channel: grpc.Channel) -> None:
    for _ in range(30):  # Were anything of these windows lost, the connection would stop.
        with pytest.raises(grpc.RpcError) as failed:
            channel.stream_unary(SERVICE + "Refuse")(iter([bytes(1_000_000)] * 20), timeout=TIMEOUT_S)
        assert (failed.value.code(), failed.value.details()) == (grpc.StatusCode.ABORTED, "not now")
    assert unary(channel, "Unary", bytes(10_000_000)) == bytes(10_000_000)
    eventually(lambda: server.open_calls() == 0, "the calls are gone")


def test_1000_calls_at_a_time(server: RunningGrpc) -> None:
    async def run() -> list[bytes]:
        async with grpc.aio.insecure_channel(server.target) as channel:
            call = channel.unary_unary(SERVICE + "Later")
            return await asyncio.gather(*(_settled(call(b"%d" % each, timeout=TIMEOUT_S)) for each in range(1000)))

    assert asyncio.run(run()) == [b"%d" % number for number in range(1000)]


def test_more_calls_than_streams_are_answered_in_time(server: RunningGrpc) -> None:
    async def run() -> int:
        async with grpc.aio.insecure_channel(server.target) as channel:
            call = channel.unary_unary(SERVICE + "Slow")
            calls = [call(b"x", timeout=TIMEOUT_S) for _ in range(1100)]
            answers = [asyncio.ensure_future(_settled(each)) for each in calls]
            while not all(answer.done() for answer in answers):
                server.call(server.echo.open_gates)
                await asyncio.sleep(0.01)
            return sum(answer.result() == b"x" for answer in answers)

    assert asyncio.run(run()) == 1100


async def _settled(call: Any) -> bytes:
    answer: bytes = await call
    return answer
