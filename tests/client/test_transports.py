"""Connections that break, hang, and refuse: what is sent again, what is not, and what is said."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest

import rebind
from rebind.client import AsyncWeightsClient, WeightsClient
from rebind.errors import Conflict, Unavailable
from tests.client.conftest import Blocking, far, near
from tests.live.models import THIRD, arrays
from tests.server import PATIENCE_S, Client, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.life.repository import Live

pytestmark = pytest.mark.timeout(120)

UPDATE = (
    b'{"model_name":"m","model_version":"1","outcome":"committed","generation":2,"label":"","digest":"d",'
    b'"copied_bytes":1,"shared_bytes":0,"received_bytes":1,"persisted":false,"durations_ms":{}}'
)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(UPDATE), UPDATE)
SMALL = {"w": np.zeros(4, np.float32)}
LARGE = {"w": np.zeros(1 << 20, np.float32)}


class Script:
    """A server that does with each connection, one after the other, what it is told; ``heads`` are those it has got."""

    def __init__(self, *scenes: Callable[[Script, socket.socket], None]) -> None:
        self.heads: list[bytes] = []
        self.bodies: list[int] = []
        self.closed = threading.Event()
        self._scenes = scenes
        self._socket = socket.create_server(("127.0.0.2", 0))
        self.url = f"http://127.0.0.2:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._play)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(PATIENCE_S)
        self._socket.close()

    def read_head(self, connection: socket.socket) -> bytes:
        head = b""
        while b"\r\n\r\n" not in head:
            byte = connection.recv(1)
            assert byte, "the client closed the connection"
            head += byte
        self.heads.append(head)
        return head

    def read(self, connection: socket.socket) -> None:
        """A request, all of it."""
        head = self.read_head(connection)
        if b"100-continue" in head:
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        found = re.search(rb"Content-Length: (\d+)", head)
        left = int(found[1]) if found else 0
        self.bodies.append(left)
        while left:
            left -= len(connection.recv(left))

    def _play(self) -> None:
        for scene in self._scenes:
            connection, _ = self._socket.accept()
            with connection:
                scene(self, connection)
            self.closed.set()


def answers(script: Script, connection: socket.socket) -> None:
    script.read(connection)
    connection.sendall(OK)


def answers_and_waits(script: Script, connection: socket.socket) -> None:
    answers(script, connection)
    assert connection.recv(1) == b""


def swallows(script: Script, connection: socket.socket) -> None:
    script.read(connection)


def answers_and_swallows(script: Script, connection: socket.socket) -> None:
    answers(script, connection)
    script.read(connection)


def answers_and_breaks_off(script: Script, connection: socket.socket) -> None:
    """The next body is not read to its end: closing then resets the connection."""
    answers(script, connection)
    script.read_head(connection)
    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    connection.recv(1000)


def says_nothing(script: Script, connection: socket.socket) -> None:
    script.read(connection)
    connection.recv(1)


def refuses_at_once(script: Script, connection: socket.socket) -> None:
    script.read_head(connection)
    text = b'{"error":"not now"}'
    connection.sendall(b"HTTP/1.1 409 Conflict\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
    assert connection.recv(1) == b"", "the body came all the same"


def knows_no_continue(script: Script, connection: socket.socket) -> None:
    head = script.read_head(connection)
    left = int(re.findall(rb"Content-Length: (\d+)", head)[0])
    while left:
        left -= len(connection.recv(left))
    connection.sendall(OK)


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., WeightsClient]]:
    made: list[Any] = []

    def make(url: str, timeout_s: float = PATIENCE_S) -> Any:
        kind: Any = WeightsClient if request.param == "sync" else Blocking
        made.append(kind(url, timeout_s))
        return made[-1]

    yield make
    for client in made:
        client.close()
        if isinstance(client, Blocking):
            client.end()


def test_connection_is_kept(make: Callable[..., WeightsClient]) -> None:
    def answers_three(script: Script, connection: socket.socket) -> None:
        for _ in range(3):
            answers(script, connection)

    with Script(answers_three) as server:
        client = make(server.url)
        for _ in range(3):
            assert client.push("m", SMALL).generation == 2
    assert len(server.heads) == 3


def test_connection_that_the_server_has_closed_is_made_anew(make: Callable[..., WeightsClient]) -> None:
    with Script(answers, answers) as server:
        client = make(server.url)
        client.push("m", SMALL)
        server.closed.wait(PATIENCE_S)
        assert client.push("m", SMALL).generation == 2
    assert len(server.heads) == 2


def test_program_with_many_open_files_can_push(make: Callable[..., WeightsClient]) -> None:
    """select() would refuse descriptors from 1024 on."""

    def answers_twice(script: Script, connection: socket.socket) -> None:
        answers(script, connection)
        answers(script, connection)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with Script(answers_twice) as server, ExitStack() as files:
        for _ in range(1024):
            files.enter_context(Path(os.devnull).open("rb"))
        client = make(server.url)
        for _ in range(2):
            assert client.push("m", SMALL).generation == 2
        client.close()


def test_push_whose_answer_is_lost_is_not_done_again(make: Callable[..., WeightsClient]) -> None:
    with Script(answers_and_swallows) as server:
        client = make(server.url)
        client.push("m", SMALL)
        with pytest.raises(Unavailable, match=r"POST /v2/models/m/weights.*is not known.*generation and digest"):
            client.push("m", SMALL)
    assert len(server.heads) == 2


def test_question_whose_answer_is_lost_is_asked_again_once(make: Callable[..., WeightsClient]) -> None:
    with Script(answers_and_swallows, swallows) as server:
        client = make(server.url)
        client.push("m", SMALL)
        with pytest.raises(Unavailable, match=r"GET /v2/models/m/weights.*nothing has been changed"):
            client.weights("m")
    assert [head.split()[0] for head in server.heads] == [b"POST", b"GET", b"GET"]


def test_push_that_broke_off_goes_out_again_as_it_cannot_have_been_done(make: Callable[..., WeightsClient]) -> None:
    with Script(answers_and_breaks_off, answers_and_waits) as server:
        client = make(server.url)
        client.push("m", SMALL)
        assert client.push("m", LARGE, mode="patch").generation == 2
        client.close()
    assert server.bodies[-1] > LARGE["w"].nbytes


def test_new_connection_that_breaks_off_is_not_tried_again(make: Callable[..., WeightsClient]) -> None:
    def breaks_off(script: Script, connection: socket.socket) -> None:
        script.read_head(connection)
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        connection.recv(1000)

    with Script(breaks_off) as server, pytest.raises(Unavailable, match="nothing has been changed"):
        make(server.url).push("m", LARGE)
    assert len(server.heads) == 1


def test_server_that_says_nothing_is_given_up(make: Callable[..., WeightsClient]) -> None:
    with Script(says_nothing) as server, pytest.raises(Unavailable, match=r"timed out.*is not known"):
        make(server.url, 0.2).push("m", SMALL)


def test_refusal_before_the_body_saves_the_body(make: Callable[..., WeightsClient]) -> None:
    with Script(refuses_at_once) as server, pytest.raises(Conflict, match="not now"):
        make(server.url).push("m", LARGE)
    assert b"Expect: 100-continue" in server.heads[0]


def test_body_is_sent_after_a_while_where_nobody_asks_for_it(
    make: Callable[..., WeightsClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rebind.client.socket_transport.CONTINUE_TIMEOUT_S", 0.05)
    monkeypatch.setattr("rebind.client.asyncio_transport.CONTINUE_TIMEOUT_S", 0.05)
    with Script(knows_no_continue) as server:
        assert make(server.url).push("m", LARGE).generation == 2


def test_answer_of_something_else_is_said_to_be_none(make: Callable[..., WeightsClient]) -> None:
    def welcomes(script: Script, connection: socket.socket) -> None:
        script.read(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n<h1>Hello</h1")

    with Script(welcomes) as server, pytest.raises(Unavailable, match=r"check the address.*Hello"):
        make(server.url).weights("m")


def test_refusal_in_the_middle_of_a_body_is_heard(make: Callable[..., WeightsClient]) -> None:
    """The body is larger than what the sockets between take: the client finds the connection closed while it sends."""

    def refuses_later(script: Script, connection: socket.socket) -> None:
        script.read_head(connection)
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        connection.recv(1000)
        text = b'{"error":"no room"}'
        connection.sendall(
            b"HTTP/1.1 409 Conflict\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(text) + text
        )
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass

    with Script(refuses_later) as server, pytest.raises(Conflict, match="no room"):
        make(server.url).push("m", LARGE)


def test_real_servers_refusals_leave_the_connection_usable(
    live: Live, infer: Client, make: Callable[..., WeightsClient]
) -> None:
    home = live.load(infer, THIRD)
    client = make(far(live))
    for _ in range(3):
        with pytest.raises(Exception, match="unexpected"):
            client.push(home.name, {"stray": np.zeros(1 << 20, np.float32)})
        with pytest.raises(Exception, match="digest"):
            client.push(home.name, arrays(THIRD, 1), if_match="0" * 64)
    assert client.push(home.name, arrays(THIRD, 1)).generation == 2


DIES = """
import os, sys, signal
sys.path.insert(0, sys.argv[3])
import numpy
from rebind.client import WeightsClient
weights = {f"parts.{n}": numpy.full(1 << 19, 1000 + n + 1, "f4") for n in range(16)}
client = WeightsClient(sys.argv[1])
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[4] == "push":
    client.push(sys.argv[2], weights, progress=lambda done, total: die() if done * 2 > total else None)
with client.stage(sys.argv[2], lease_s=0.5) as stage:
    stage.write(weights, progress=lambda done, total: die() if sys.argv[4] == "write" and done * 2 >= total else None)
    if sys.argv[4] == "prepared":
        stage.prepare()
    die()
"""


@pytest.mark.parametrize(("address", "moment"), [(far, "push"), (near, "write"), (far, "prepared"), (near, "prepared")])
def test_trainer_that_is_killed_leaves_the_server_as_it_was(
    live: Live, infer: Client, address: Callable[[Live], str], moment: str
) -> None:
    home = live.load(infer, THIRD)
    command = [sys.executable, "-c", DIES, address(live), home.name, str(Path(rebind.__file__).parents[1]), moment]
    result = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (-signal.SIGKILL, b"")
    eventually(lambda: infer.stages(home.name) == [], "the stage lapses")
    home.expect(infer, 0, generation=1)
    with WeightsClient(address(live)) as client:
        client.push(home.name, arrays(THIRD, 1))
    home.expect(infer, 1, generation=2)


@pytest.mark.parametrize("address", [near, far])
def test_cancelled_push_leaves_nothing(live: Live, infer: Client, address: Callable[[Live], str]) -> None:
    home = live.load(infer, THIRD)

    async def cancel() -> None:
        async with AsyncWeightsClient(address(live)) as client:
            await client.push(home.name, arrays(THIRD, 0))
            cancelled = asyncio.Event()

            def progress(done: int, total: int) -> None:
                if done * 2 >= total:
                    cancelled.set()
                    task.cancel()

            task = asyncio.create_task(client.push(home.name, arrays(THIRD, 1), progress=progress))
            with pytest.raises(asyncio.CancelledError):
                await task
            assert cancelled.is_set()
            assert (await client.weights(home.name)).generation == 1

    asyncio.run(cancel())
    home.expect(infer, 0, generation=1)
    assert infer.stages(home.name) == []


MEASURED = """
import resource, sys
sys.path.insert(0, sys.argv[3])
import numpy
from rebind.client import WeightsClient
with WeightsClient(sys.argv[1]) as client:
    client.weights(sys.argv[2])
    weights = {f"parts.{n}": numpy.full(1 << 19, 1000 + n + 1, "f4") for n in range(16)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    client.push(sys.argv[2], weights)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_streaming_holds_no_second_copy(live: Live, infer: Client) -> None:
    home = live.load(infer, THIRD)
    command = [sys.executable, "-c", MEASURED, far(live), home.name, str(Path(rebind.__file__).parents[1])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert int(result.stdout) < 4096, "KiB more than the 32 MiB of weights"
