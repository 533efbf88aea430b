from __future__ import annotations

import socket
import struct
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rebind.http.limits import Limits
from tests.http.plane import NumpyPlane, RunningServer
from tests.http.wire import Client, message, tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

LIVE = message("GET", "/v2/health/live")
ONE = {"inputs": [tensor("INPUT0", "FP32", [1, 4], [1, 2, 3, 4])]}


def chunked(body: bytes, size: int, path: str = "/v2/models/id/infer", headers: str = "") -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    wire = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    return f"POST {path} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n{headers}\r\n".encode() + wire


def big_request(count: int) -> tuple[dict[str, object], bytes]:
    array = np.arange(count, dtype=np.float32)
    document = {"inputs": [tensor("INPUT0", "FP32", [1, count], size=array.nbytes)]}
    return {**document, "parameters": {"binary_data_output": True}}, array.tobytes()


def test_a_connection_serves_many_requests(client: Client) -> None:
    for _ in range(3):
        assert client.ask("GET", "/v2/health/live").status == 200
        assert client.infer("id", ONE).json["outputs"][0]["data"] == [1, 2, 3, 4]


def test_pipelined_requests_are_answered_in_order(client: Client) -> None:
    client.send(b"".join(message("GET", f"/v2/models/any_{kind}") for kind in ("INT8", "FP64", "BYTES")) + LIVE)
    assert [client.read().json["name"] for _ in range(3)] == ["any_INT8", "any_FP64", "any_BYTES"]
    assert client.read().body == b""


def test_a_request_may_arrive_byte_by_byte(client: Client) -> None:
    client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in message("POST", "/v2/models/id/infer", b'{"inputs":[]}') + LIVE:
        client.send(bytes([byte]))
    assert client.read().status == 400
    assert client.read().status == 200


def test_empty_line_before_a_request_is_ignored(client: Client) -> None:
    client.send(b"\r\n" + LIVE)
    assert client.read().status == 200


def test_close_is_done_as_asked(client: Client) -> None:
    answer = client.ask("GET", "/v2/health/live", connection="close")
    assert answer.headers["connection"] == "close"
    assert client.at_end()


def test_http_1_0_closes_unless_told_otherwise(server: RunningServer) -> None:
    with Client(server.port) as client:
        client.send(b"GET /v2/health/live HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert client.read().headers["connection"] == "keep-alive"
        client.send(b"GET /v2/health/live HTTP/1.0\r\n\r\n")
        assert client.read().headers["connection"] == "close"
        assert client.at_end()


def test_head_gets_a_status_without_a_body(client: Client) -> None:
    assert client.ask("HEAD", "/v2/health/live").status == 405
    assert client.ask("GET", "/v2/health/live").status == 200


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_chunked_bodies_of_any_cut(client: Client, size: int) -> None:
    body = b'{"inputs":[{"name":"INPUT0","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}'
    client.send(chunked(body, size) + LIVE)
    assert client.read().json["outputs"][0]["data"] == [1, 2, 3, 4]
    assert client.read().status == 200


def test_chunked_body_with_tensors(client: Client) -> None:
    document, binary = big_request(50_000)
    json = str(document).replace("'", '"').replace("True", "true").encode()
    header = f"Inference-Header-Content-Length: {len(json)}\r\n"
    client.send(chunked(json + binary, 30_000, "/v2/models/big/infer", header))
    assert client.read().body.endswith(binary)


def test_large_tensors_arrive_whole_and_their_arrays_are_aligned_and_writable(
    server: RunningServer, client: Client
) -> None:
    document, binary = big_request(500_000)
    for _ in range(3):
        answer = client.infer("big", document, binary)
        assert answer.body[int(answer.headers["inference-header-content-length"]) :] == binary
    array = server.plane.seen[-1].inputs[0].array
    assert array.flags.writeable
    assert array.ctypes.data % 64 == 0


def test_client_that_ends_its_stream_after_its_requests_gets_their_answers(client: Client) -> None:
    client.send(LIVE * 3)
    client.socket.shutdown(socket.SHUT_WR)
    assert [client.read().status for _ in range(3)] == [200] * 3
    assert client.at_end()


def test_request_after_a_large_one_in_the_same_segment_is_served(client: Client) -> None:
    document, binary = big_request(50_000)
    json = str(document).replace("'", '"').replace("True", "true").encode()
    large = message("POST", "/v2/models/big/infer", json + binary, inference_header_content_length=str(len(json)))
    client.send(large[:1000])
    client.send(large[1000:] + LIVE + large + LIVE)
    assert [client.read().status for _ in range(4)] == [200] * 4


@pytest.mark.parametrize("count", [10, 50_000])
def test_expect_continue_is_answered_before_the_body(client: Client, count: int) -> None:
    document, binary = big_request(count)
    json = str(document).replace("'", '"').replace("True", "true").encode()
    whole = message(
        "POST",
        "/v2/models/big/infer",
        json + binary,
        expect="100-continue",
        inference_header_content_length=str(len(json)),
    )
    head = whole.index(b"\r\n\r\n") + 4
    client.send(whole[:head])
    assert client.read().status == 100
    client.send(whole[head:])
    assert client.read().body.endswith(binary)


def test_head_over_64_kib_is_431(client: Client) -> None:
    client.send(b"GET /v2 HTTP/1.1\r\nX: " + b"a" * 70_000)
    answer = client.read()
    assert answer.status == 431
    assert "65536" in answer.error
    assert client.at_end()


def test_malformed_request_is_answered_and_the_connection_ends(client: Client) -> None:
    client.send(b"POST /v2 HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab")
    answer = client.read()
    assert (answer.status, answer.headers["connection"]) == (400, "close")
    assert "Content-Length" in answer.error
    assert client.at_end()


def test_what_follows_a_refused_head_is_never_taken_for_a_request(server: RunningServer, client: Client) -> None:
    body = b'{"inputs":[{"name":"INPUT0","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}'
    smuggled = message("POST", "/v2/models/id/infer", body)
    client.send(b"POST /v2 HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled)
    assert client.read().status == 400
    assert client.at_end()
    assert server.plane.seen == []


@pytest.fixture
def small_limits() -> Iterator[RunningServer]:
    running = RunningServer(NumpyPlane(), Limits(input_bytes=1000, body_bytes=100_000))
    yield running
    running.close()


def test_announced_json_over_the_limit_is_refused_before_it_is_sent(small_limits: RunningServer) -> None:
    for path in ("/v2/models/id/infer", "/v2/repository/index", "/v2/repository/models/id/load"):
        with Client(small_limits.port) as client:
            client.send(f"POST {path} HTTP/1.1\r\nContent-Length: 1001\r\nExpect: 100-continue\r\n\r\n".encode())
            answer = client.read()
            assert answer.status == 400
            assert answer.error == (
                "request JSON size of 1001 bytes exceeds the maximum allowed input size of 1000 bytes. "
                "Use --http-max-input-size to increase the limit."
            )


def test_announced_body_over_the_hard_limit_is_413(small_limits: RunningServer) -> None:
    with Client(small_limits.port) as client:
        client.send(
            b"POST /v2/models/id/infer HTTP/1.1\r\nContent-Length: 2199023255552\r\n"
            b"Inference-Header-Content-Length: 10\r\n\r\n"
        )
        assert client.read().status == 413
        assert client.at_end()


def test_client_that_goes_on_sending_after_a_refusal_can_read_it(small_limits: RunningServer) -> None:
    with Client(small_limits.port) as client:
        client.send(message("POST", "/v2/models/id/infer", b"x" * 3_000_000))
        assert client.read().status == 413


def test_chunked_body_over_the_limit_is_413(small_limits: RunningServer) -> None:
    with Client(small_limits.port) as client:
        client.send(chunked(b"x" * 2000, 500))
        assert client.read().status == 413
        assert client.at_end()


def test_tensors_may_exceed_the_json_limit(small_limits: RunningServer) -> None:
    with Client(small_limits.port) as client:
        document, binary = big_request(5000)
        assert client.infer("big", document, binary).status == 200


def test_json_part_over_the_limit_is_refused(small_limits: RunningServer) -> None:
    with Client(small_limits.port) as client:
        document, binary = big_request(5000)
        padded = str(document).replace("'", '"').replace("True", "true").encode() + b" " * 1000
        answer = client.infer("big", padded, binary)
        assert answer.status == 400
        assert answer.error.startswith("request JSON size of ")


def test_json_tensor_and_raw_body_over_the_limit_are_refused(small_limits: RunningServer) -> None:
    with Client(small_limits.port) as client:
        answer = client.infer("big", {"inputs": [tensor("INPUT0", "FP32", [1, 300], [1])]})
        assert answer.error.startswith(
            "JSON input 'INPUT0' has a byte_size (1200 bytes) that exceeds the maximum allowed"
        )
        client.send(
            b"POST /v2/models/vector/infer HTTP/1.1\r\nContent-Length: 2000\r\n"
            b"Inference-Header-Content-Length: 0\r\n\r\n"
        )
        answer = client.read()
        assert answer.status == 400
        assert answer.error.startswith("Raw input has a byte_size (2000 bytes) that exceeds the maximum allowed value")


def test_requests_wait_for_the_one_in_flight(server: RunningServer, client: Client) -> None:
    client.infer("id", ONE)
    body = b'{"inputs":[{"name":"INPUT0","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}'
    client.send(message("POST", "/v2/models/slow/infer", body) + LIVE)
    assert server.plane.started.wait(10)
    client.socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.socket.recv(1)
    client.socket.settimeout(10)
    server.call(server.plane.release)
    with Client(server.port) as other:
        assert other.ask("GET", "/v2/health/live").status == 200
    received = b""
    while received.count(b"HTTP/1.1 200 OK") < 2:
        received += client.socket.recv(65536)
    assert received.index(b'"model_name":"slow"') < received.rindex(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_client_that_goes_away_cancels_its_request(server: RunningServer, *, reset: bool) -> None:
    client = Client(server.port)
    if reset:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.send(
        message(
            "POST",
            "/v2/models/slow/infer",
            b'{"inputs":[{"name":"INPUT0","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}',
        )
    )
    assert server.plane.started.wait(10)
    client.close()
    assert server.plane.cancelled.wait(10)


def test_client_that_goes_away_within_a_body_leaves_nothing(server: RunningServer) -> None:
    for sent in (b"POST /v2/models/big/infer HTTP/1.1\r\nContent-Length: 5000\r\n\r\nabc",):
        for length in (b"5000", b"50000000"):
            with Client(server.port) as client:
                client.send(sent.replace(b"5000", length))
    with Client(server.port) as client:
        assert client.ask("GET", "/v2/health/live").status == 200


def test_flood_of_pipelined_requests_is_held_back_and_answered(server: RunningServer, client: Client) -> None:
    body = b'{"inputs":[{"name":"INPUT0","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}'
    count = 12_000
    live = message("GET", "/v2/health/live", padding="a" * 1000)
    sender = threading.Thread(
        target=client.send, args=(message("POST", "/v2/models/slow/infer", body) + live * count,), daemon=True
    )
    sender.start()
    assert server.plane.started.wait(10)
    (connection,) = server.server._connections
    sender.join(0.3)
    assert sender.is_alive()  # 12 MB do not fit into the sockets and the buffer
    assert len(connection._buffer) < 1_000_000
    server.call(server.plane.release)
    assert [client.read().status for _ in range(count + 1)] == [200] * (count + 1)
    sender.join(10)


def test_clients_that_do_not_read_do_not_hinder_others(server: RunningServer) -> None:
    document, binary = big_request(1_000_000)
    slow = [Client(server.port, receive_buffer=4096) for _ in range(5)]
    json = str(document).replace("'", '"').replace("True", "true").encode()
    request = message("POST", "/v2/models/big/infer", json + binary, inference_header_content_length=str(len(json)))
    for client in slow:
        client.send(request + LIVE)
    with Client(server.port) as other:
        for _ in range(20):
            assert other.infer("id", ONE).status == 200
    for client in slow:
        assert client.read().body.endswith(binary)
        assert client.read().status == 200
        client.close()


def test_defect_of_a_model_is_500_and_tells_no_details(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    answer = client.infer("break", ONE)
    assert answer.status == 500
    assert "ZeroDivisionError" in answer.error
    assert "secret" not in answer.error
    assert "a secret of the server" in caplog.text
    assert client.infer("id", ONE).status == 200
