"""Weights as the body of a request: into the stage while they arrive, whatever their form, whatever goes wrong."""

from __future__ import annotations

import socket
import struct
import threading
from typing import TYPE_CHECKING

import pytest

from rebind.http.limits import MAX_CHUNKS, Limits
from rebind.serving.updates import Mode, UpdateOptions
from tests.http.plane import NumpyPlane, RunningServer
from tests.http.stages import END, KeptStages
from tests.http.wire import Client, message

if TYPE_CHECKING:
    from tests.http.stages import KeptStage

PATH = "/v2/models/id/weights"
LIVE = message("GET", "/v2/health/live")
LARGE = bytes(range(256)) * 20_000 + END  # 5 MB, in several pieces and turns
PATIENCE_S = 10


def chunked(body: bytes, size: int, path: str = PATH, method: str = "POST") -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    wire = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    return f"{method} {path} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + wire


@pytest.fixture
def stages(server: RunningServer) -> KeptStages:
    return server.plane.stages_


@pytest.mark.parametrize("body", [END, b"weights" + END, LARGE], ids=["1", "8", "5 MB"])
def test_push_arrives_as_it_was_sent_and_is_committed(stages: KeptStages, client: Client, body: bytes) -> None:
    answer = client.ask("POST", PATH, body)
    assert answer.status == 200
    assert answer.json["received_bytes"] == len(body)
    assert answer.json["outcome"] == "committed"
    assert stages.last.content == body
    assert stages.last.ended.is_set()


@pytest.mark.parametrize("size", [1, 1000, 100_000, 3_000_000])
def test_chunks_of_any_size(stages: KeptStages, client: Client, size: int) -> None:
    body = LARGE if size > 1 else LARGE[-1000:]
    client.send(chunked(body, size) + LIVE)
    assert client.read().status == 200
    assert client.read().status == 200
    assert stages.last.content == body


def test_more_chunks_than_other_bodies_may_have(stages: KeptStages, client: Client) -> None:
    body = bytes(MAX_CHUNKS) + END
    client.send(chunked(body, 1))
    assert client.read().status == 200
    assert stages.last.content == body


def test_body_may_arrive_byte_by_byte(stages: KeptStages, client: Client) -> None:
    client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for wire in (message("POST", PATH, b"weights" + END), chunked(b"weights" + END, 3)):
        for byte in wire:
            client.send(bytes([byte]))
        assert client.read().status == 200
        assert stages.last.content == b"weights" + END


@pytest.mark.parametrize("body", [b"weights" + END, LARGE], ids=["small", "large"])
def test_requests_after_a_push_in_the_same_segment_are_answered_in_order(
    stages: KeptStages, client: Client, body: bytes
) -> None:
    wire = message("POST", PATH, body) + LIVE + message("PUT", f"{PATH}/stages/s1", body) + LIVE
    client.send(wire)
    assert [client.read().status for _ in range(4)] == [200] * 4
    assert [bytes(file.content) for file in stages.last.files] == [body, body]


def test_options_reach_the_stage(stages: KeptStages, client: Client) -> None:
    query = "?label=step+1%2F2&mode=patch&dry_run=true&persist=True"
    assert client.ask("POST", PATH + query, END, if_match='"abc123"').status == 200
    options = UpdateOptions("step 1/2", dry_run=True, persist=True, if_match="abc123")
    assert (stages.last.options.mode, stages.last.update) == (Mode.PATCH, options)
    assert stages.last.committed == [(options, False)]
    assert client.ask("POST", PATH, END).status == 200
    assert (stages.last.options.mode, stages.last.update) == (Mode.FULL, UpdateOptions())


@pytest.mark.parametrize("value", ["*", '"abc123"'])
def test_if_match_that_holds(stages: KeptStages, client: Client, value: str) -> None:
    assert client.ask("POST", PATH, END, if_match=value).status == 200


@pytest.mark.parametrize("value", ["abc123", 'W/"abc123"', '"abc123", "other"', '""', "", '"a"b"', '"abc123'])
def test_if_match_that_is_not_one_strong_tag_is_400(stages: KeptStages, client: Client, value: str) -> None:
    answer = client.ask("POST", PATH, END, if_match=value)
    assert answer.status == 400
    assert answer.error.startswith("If-Match must be one strong entity tag")
    assert stages.opened == []


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("lable=x", "unknown query parameter 'lable'; this call takes: mode, label, dry_run, persist"),
        ("keep=true", "unknown query parameter 'keep'"),
        ("dry_run=yes", "query parameter 'dry_run' must be true or false, got 'yes'"),
        ("dry_run", "query parameter 'dry_run' must be true or false, got ''"),
        ("mode=merge", "query parameter 'mode' must be full or patch, got 'merge'"),
        ("label=a&label=b", "query parameter 'label' is given twice"),
        ("label=%ff", "malformed query"),
        ("&".join("label=a" for _ in range(100)), "malformed query"),
        ("label=" + "x" * 2000, "a label is"),
        ("label=%00", "a label is"),
    ],
)
def test_wrong_query_is_400_and_says_what_is_allowed(stages: KeptStages, client: Client, query: str, text: str) -> None:
    answer = client.ask("POST", f"{PATH}?{query}", LARGE)
    assert answer.status == 400
    assert text in answer.error
    assert stages.opened == []
    assert client.ask("GET", "/v2/health/live").status == 200


REFUSALS = [
    ("/v2/models/no/weights", b"weights", "", 404, "unknown model: 'no'"),
    ("/v2/models/id/versions/2/weights", b"weights", "", 404, "version 2 is not found"),
    (PATH, b"weights", '"other"', 412, "the weights that serve have the digest 'abc123', not 'other'"),
    (PATH, b"FAULTY", "*", 400, "2 faults: tensor 'a': is wrong | tensor 'b': is missing"),
    (PATH, b"HUGE", "*", 507, "the weights need 1000 bytes of memory, 10 are available of the limit of 100 bytes"),
    (PATH, b"FULL", "*", 400, "bytes after the last tensor of its safetensors file"),
    (PATH, b"BROKEN", "*", 500, "internal error (ZeroDivisionError)"),
]


@pytest.mark.parametrize(("path", "begin", "tag", "status", "text"), REFUSALS)
@pytest.mark.parametrize("form", ["sized", "chunks of 100 kB", "chunks of 1 kB"])
def test_refused_body_is_read_to_its_end_and_the_connection_goes_on(
    stages: KeptStages, client: Client, path: str, begin: bytes, tag: str, status: int, text: str, form: str
) -> None:
    body = begin + LARGE
    wire = message("POST", path, body) if form == "sized" else chunked(body, 100_000 if "100" in form else 1000, path)
    wire = wire.replace(b"\r\n", f"\r\nIf-Match: {tag}\r\n".encode(), 1) if tag else wire
    client.send(wire + LIVE)
    answer = client.read()
    assert answer.status == status
    assert text in answer.error
    assert "connection" not in answer.headers
    assert client.read().status == 200
    for stage in stages.opened:
        assert stage.ended.is_set()
        assert stage.committed == []


def test_body_that_is_no_whole_file_is_400(stages: KeptStages, client: Client) -> None:
    for body in (b"", b"weights", LARGE[:-1]):
        answer = client.ask("POST", PATH, body)
        assert answer.status == 400
        assert f"cut short after {len(body)} bytes" in answer.error
        assert stages.last.ended.is_set()
        assert stages.last.committed == []


def test_commit_that_is_refused_ends_the_stage(stages: KeptStages, client: Client) -> None:
    answer = client.ask("POST", f"{PATH}?label=busy", END)
    assert (answer.status, answer.error) == (409, "a reload has replaced the version")
    assert stages.last.ended.is_set()


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br"])
def test_compressed_weights_are_501(stages: KeptStages, client: Client, coding: str) -> None:
    answer = client.ask("POST", PATH, LARGE, content_encoding=coding)
    assert answer.status == 501
    assert "without Content-Encoding" in answer.error
    assert stages.opened == []
    assert client.ask("POST", PATH, END, content_encoding="identity").status == 200


@pytest.mark.parametrize("body", [b"weights" + END, LARGE], ids=["small", "large"])
def test_expect_continue_is_answered_before_the_body(stages: KeptStages, client: Client, body: bytes) -> None:
    wire = message("POST", PATH, body, expect="100-continue")
    head = wire.index(b"\r\n\r\n") + 4
    client.send(wire[:head])
    assert client.read().status == 100
    assert stages.last.files[0].content == b""
    client.send(wire[head:] + LIVE)
    assert [client.read().status for _ in range(2)] == [200, 200]
    assert stages.last.content == body


@pytest.mark.parametrize(("path", "begin", "tag", "status", "text"), REFUSALS[:3])
def test_expect_continue_is_refused_before_the_body(
    client: Client, path: str, begin: bytes, tag: str, status: int, text: str
) -> None:
    headers = {"if_match": tag} if tag else {}
    wire = message("POST", path, begin + LARGE, expect="100-continue", **headers)
    client.send(wire[: wire.index(b"\r\n\r\n") + 4])
    answer = client.read()
    assert (answer.status, answer.headers["connection"]) == (status, "close")
    assert text in answer.error
    assert client.at_end()


def test_client_that_expects_but_does_not_wait_is_refused_after_the_body(client: Client) -> None:
    client.send(message("POST", "/v2/models/no/weights", LARGE, expect="100-continue") + LIVE)
    assert [client.read().status for _ in range(2)] == [404, 200]


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("form", ["sized", "chunked"])
@pytest.mark.parametrize("sent", [1, 3_000_000])
def test_client_that_goes_away_within_a_body_leaves_nothing(
    server: RunningServer, stages: KeptStages, *, form: str, sent: int, reset: bool
) -> None:
    with Client(server.port) as client:
        if reset:
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wire = message("POST", PATH, LARGE) if form == "sized" else chunked(LARGE, 500_000)
        client.send(wire[: wire.index(b"\r\n\r\n") + 4 + sent])
        begun(server).began.wait(PATIENCE_S)
    assert stages.last.ended.wait(PATIENCE_S)
    assert stages.last.committed == []


def begun(server: RunningServer) -> KeptStage:
    """The only stage, once it is there."""
    with Client(server.port) as other:
        while not server.plane.stages_.opened:
            other.ask("GET", "/v2/health/live")
    return server.plane.stages_.last


def test_client_that_goes_away_during_the_commit_does_not_end_it(server: RunningServer) -> None:
    with Client(server.port) as client:
        client.send(message("POST", "/v2/models/slow/weights", END))
        stage = begun(server)
        assert stage.committing.wait(PATIENCE_S)
    with Client(server.port) as other:
        assert other.ask("GET", "/v2/health/live").status == 200
    server.call(stage.held.set)
    assert stage.done.wait(PATIENCE_S)
    assert stage.ended.wait(PATIENCE_S)


def test_body_cut_off_by_malformed_chunks_leaves_nothing(stages: KeptStages, client: Client) -> None:
    client.send(chunked(LARGE, 1_000_000)[:-5] + b"x\r\n")
    answer = client.read()
    assert (answer.status, answer.headers["connection"]) == (400, "close")
    assert client.at_end()
    assert stages.last.ended.is_set()
    assert stages.last.committed == []


def test_content_length_that_is_too_short_is_refused_and_the_rest_is_no_request(
    stages: KeptStages, client: Client
) -> None:
    rest = b"the rest\r\n\r\n"
    wire = message("POST", PATH, LARGE[:-1] + rest)
    client.send(wire.replace(b"%d" % (len(LARGE) - 1 + len(rest)), b"%d" % (len(LARGE) - 1), 1))
    assert "cut short" in client.read().error
    assert "malformed HTTP request" in client.read().error
    assert client.at_end()
    assert stages.last.ended.is_set()


def test_http_1_0_client_is_answered_and_closed(stages: KeptStages, client: Client) -> None:
    client.send(message("POST", PATH, LARGE).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    assert client.read().headers["connection"] == "close"
    assert client.at_end()
    assert stages.last.content == LARGE


def test_limits_of_other_bodies_are_not_those_of_weights() -> None:
    running = RunningServer(NumpyPlane(), Limits(input_bytes=1000, body_bytes=10_000))
    with Client(running.port) as client:
        assert client.ask("POST", PATH, LARGE).status == 200
        client.send(chunked(LARGE, 100_000))
        assert client.read().status == 200
        assert client.ask("PUT", f"{PATH}/stages/s1", LARGE).status == 200
    running.close()


class Turns:
    """Counts the turns of a server's loop while it lives, and what every turn received."""

    def __init__(self, server: RunningServer, stage: KeptStage) -> None:
        self._loop = server.loop
        self._file = stage.files[-1]
        self._seen = 0
        self._goes_on = True
        self.most_bytes = 0
        server.call(self._turn)

    def _turn(self) -> None:
        self.most_bytes = max(self.most_bytes, len(self._file.content) - self._seen)
        self._seen = len(self._file.content)
        if self._goes_on:
            self._loop.call_soon(self._turn)

    def end(self) -> None:
        self._goes_on = False


@pytest.mark.parametrize("form", ["sized", "chunks of 9 MB", "chunks of 10 kB"])
def test_others_have_a_turn_after_each_mebibyte(
    server: RunningServer, stages: KeptStages, client: Client, form: str
) -> None:
    body = bytes(30_000_000) + END
    sizes = {"chunks of 9 MB": 9_000_000, "chunks of 10 kB": 10_000}
    wire = message("POST", PATH, body) if form == "sized" else chunked(body, sizes[form])
    head = wire.index(b"\r\n\r\n") + 4
    client.send(wire[:head])
    turns = Turns(server, begun(server))
    client.send(wire[head:])
    assert client.read().status == 200
    turns.end()
    assert stages.last.content == body
    # One read more may be under way when the share is used up.
    assert turns.most_bytes <= 2 * 1024 * 1024
    assert max(stages.last.files[0].pieces) <= 1024 * 1024


def test_clients_that_send_slowly_or_much_do_not_hold_up_others(server: RunningServer) -> None:
    stalled = Client(server.port)
    stalled.send(message("POST", PATH, LARGE)[:4_000_000])
    sender = Client(server.port)
    wire = message("POST", PATH, bytes(160_000_000) + END)
    sending = threading.Thread(target=sender.send, args=(wire,), daemon=True)
    sending.start()
    with Client(server.port) as other:
        answered = 0
        while sending.is_alive():
            assert other.ask("GET", "/v2/health/live").status == 200
            answered += 1
    assert answered >= 10
    assert sender.read().status == 200
    sender.close()
    stalled.close()


def test_push_that_arrives_during_the_stop_is_answered() -> None:
    running = RunningServer(NumpyPlane())
    wire = message("POST", PATH, LARGE)
    with Client(running.port) as client:
        client.send(wire[:1000])
        begun(running)
        draining = running.begin_drain(PATIENCE_S)
        running.call(lambda: None)
        client.send(wire[1000:])
        answer = client.read()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        draining.result(PATIENCE_S)
    running.close()


def test_push_that_does_not_end_is_cut_at_the_stop_and_leaves_nothing() -> None:
    running = RunningServer(NumpyPlane())
    with Client(running.port) as client:
        client.send(message("POST", PATH, LARGE)[:2_000_000])
        stage = begun(running)
        running.begin_drain(0.05).result(PATIENCE_S)
        assert stage.ended.wait(PATIENCE_S)
    running.close()


@pytest.fixture
def open_stage(server: RunningServer) -> KeptStage:
    with Client(server.port) as client:
        assert client.ask("POST", f"{PATH}/stages").status == 201
    return server.plane.stages_.last


def test_files_for_a_stage_arrive_one_after_another(open_stage: KeptStage, client: Client) -> None:
    bodies = [LARGE, b"more" + END]
    for body in bodies:
        answer = client.ask("PUT", f"{PATH}/stages/s1", body)
        assert (answer.status, answer.json["id"]) == (200, "s1")
    assert [bytes(file.content) for file in open_stage.files] == bodies
    assert not open_stage.ended.is_set()
    assert open_stage.committed == []


@pytest.mark.parametrize("body", [b"FAULTY" + LARGE, b"HUGE" + LARGE, b"cut short", LARGE[:-1]])
def test_refused_file_leaves_its_stage_open(open_stage: KeptStage, client: Client, body: bytes) -> None:
    assert client.ask("PUT", f"{PATH}/stages/s1", body).status in {400, 507}
    assert not open_stage.ended.is_set()
    assert client.ask("PUT", f"{PATH}/stages/s1", LARGE).status == 200


def test_client_that_goes_away_within_a_file_leaves_the_stage_open(
    server: RunningServer, open_stage: KeptStage
) -> None:
    with Client(server.port) as client:
        client.send(message("PUT", f"{PATH}/stages/s1", LARGE)[:3_000_000])
        assert open_stage.began.wait(PATIENCE_S)
    with Client(server.port) as client:
        assert client.ask("PUT", f"{PATH}/stages/s1", LARGE).status == 200
    assert open_stage.content == LARGE
    assert not open_stage.ended.is_set()
