from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import grpc
import pytest

from rebind.errors import Unavailable
from rebind.grpc.server import GrpcServer
from tests.grpc.echo import SERVICE, RunningGrpc
from tests.grpc.wire import GOAWAY, Peer, message
from tests.server import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 20


@pytest.fixture
def stopping() -> Iterator[RunningGrpc]:
    running = RunningGrpc()
    yield running
    running.close()


def in_background(server: RunningGrpc, timeout_s: float) -> threading.Thread:
    thread = threading.Thread(target=server.drain, args=(timeout_s,))
    thread.start()
    return thread


def test_calls_that_have_begun_are_answered_and_new_connections_refused(stopping: RunningGrpc) -> None:
    with grpc.insecure_channel(stopping.target) as channel:
        call = channel.unary_unary(SERVICE + "Slow").future(b"x", timeout=PATIENCE_S)
        assert stopping.echo.started.wait(PATIENCE_S)
        draining = in_background(stopping, PATIENCE_S)
        eventually(lambda: _refuses(stopping.port), "new connections are refused")
        stopping.call(stopping.echo.open_gates)
        assert call.result() == b"x"
        draining.join()
        assert stopping.connections() == 0


def test_a_call_on_its_way_is_answered(stopping: RunningGrpc) -> None:
    with Peer(stopping.port) as peer:
        peer.synchronize()
        draining = in_background(stopping, PATIENCE_S)
        peer.until(lambda each: each.kind == GOAWAY)
        peer.call(1, "Unary", b"hello")
        assert peer.reply(1) == message(b"hello")
        draining.join()


def test_idle_connections_are_closed(stopping: RunningGrpc) -> None:
    with Peer(stopping.port) as peer:
        peer.synchronize()
        stopping.drain(PATIENCE_S)
        assert peer.goaway().error_code == 0


def test_endless_calls_end_at_once(stopping: RunningGrpc) -> None:
    with grpc.insecure_channel(stopping.target) as channel:
        call = channel.unary_stream(SERVICE + "Endless")(b"x", timeout=PATIENCE_S)
        assert next(call) == b"begun"
        stopping.drain(PATIENCE_S)
        with pytest.raises(grpc.RpcError):
            next(call)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in call.details()
    assert stopping.echo.cancelled.is_set()


def test_what_is_not_answered_in_time_is_cut(stopping: RunningGrpc, caplog: pytest.LogCaptureFixture) -> None:
    with grpc.insecure_channel(stopping.target) as channel:
        call = channel.unary_unary(SERVICE + "Slow").future(b"x", timeout=PATIENCE_S)
        assert stopping.echo.started.wait(PATIENCE_S)
        stopping.drain(0.1)
        assert isinstance(call.exception(), grpc.RpcError)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
    assert stopping.echo.cancelled.wait(PATIENCE_S)
    assert "cut 1 connections of GRPCInferenceService" in caplog.text


def test_a_port_that_is_taken_is_told_with_tritons_text(stopping: RunningGrpc) -> None:
    with pytest.raises(Unavailable, match=f"Socket '127.0.0.1:{stopping.port}' already in use"):
        stopping.run(GrpcServer({}).start("127.0.0.1", stopping.port))


def _refuses(port: int) -> bool:
    try:
        Peer(port).__exit__()
    except ConnectionRefusedError:
        return True
    return False
