"""Bodies that go into the real store: what the stand-in of test_push.py promises, IncomingFile and Reception hold."""

from __future__ import annotations

import socket
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.numpy

from rebind.errors import Conflict
from rebind.serving.updates import Mode, Outcome, StageOptions, UpdateOptions, UpdateReport
from rebind.weights.slots import Slot, SlotTable
from rebind.weights.store import WeightStore
from tests.http.plane import NumpyPlane, RunningServer
from tests.http.stages import KeptStage
from tests.http.test_push import LIVE, PATIENCE_S, chunked
from tests.http.wire import Client, message
from tests.server import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rebind.weights.assembly import PutResult
    from rebind.weights.incoming import IncomingFile

PATH = "/v2/models/id/weights"
STAGE = f"{PATH}/stages/s1"
_GENERATOR = np.random.default_rng(4)
ARRAYS = {
    "large": _GENERATOR.standard_normal((1024, 1025), np.float32),  # 4 MiB and more
    **{f"small.{index}": _GENERATOR.standard_normal(index + 1, np.float32) for index in range(40)},
    "step": np.array(7),
}
SLOTS = SlotTable(tuple(Slot(name, "I64" if name == "step" else "F32", array.shape) for name, array in ARRAYS.items()))
FILE = safetensors.numpy.save(ARRAYS)
WITHOUT = safetensors.numpy.save({name: array for name, array in ARRAYS.items() if name != "small.3"})
MISFIT = safetensors.numpy.save({**ARRAYS, "small.3": np.zeros(5, np.float32), "unknown": np.zeros(3000)})


class StoredStage(KeptStage):
    """A stage on a real reception, which ends as Stage does."""

    def __init__(self, model: str, options: StageOptions, store: WeightStore) -> None:
        super().__init__(model, options)
        self.reception = store.receive(SLOTS, subject="weights sent for 'id'")
        self.put: PutResult | None = None
        self._arriving: Callable[[], IncomingFile | None] = lambda: None

    def incoming(self) -> IncomingFile:  # type: ignore[override]
        arriving = self._arriving()
        if arriving is not None and not arriving.complete:
            raise Conflict("another file arrives")
        incoming = self.reception.incoming()
        self._arriving = weakref.ref(incoming)
        return incoming

    async def commit(self, options: UpdateOptions, *, keep: bool = False) -> UpdateReport:
        self.put = self.reception.finish(None)
        digest = self.put.weights.digest
        return UpdateReport(
            self.model, 1, Outcome.COMMITTED, 2, "", digest, received_bytes=self.reception.received_bytes
        )

    def end(self) -> None:
        self.reception.close()
        super().end()


class StorePlane(NumpyPlane):
    """Pushes and stages go into ``store``."""

    def __init__(self) -> None:
        super().__init__()
        self.store = WeightStore(spare_idle_s=0.0)

    def open_push(self, name: str, version: int | None, mode: Mode, options: UpdateOptions) -> KeptStage:
        return self.open_stage(name, version, StageOptions(mode))

    def open_stage(self, name: str, version: int | None, options: StageOptions) -> KeptStage:
        self.io(name, version)
        self.stages_.opened.append(StoredStage(name, options, self.store))
        return self.stages_.last


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    running = RunningServer(StorePlane())
    yield running
    running.close()


@pytest.fixture
def server(running: RunningServer) -> RunningServer:
    running.plane.stages_.opened.clear()
    return running


def last(server: RunningServer) -> StoredStage:
    stage = server.plane.stages_.last
    assert isinstance(stage, StoredStage)
    return stage


def expect_stored(server: RunningServer) -> None:
    """The last stage has made a weight set with exactly the tensors of ``ARRAYS``."""
    put = last(server).put
    assert put is not None
    tensors = put.weights.tensors
    assert tensors.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert bytes(tensors[name].view) == array.tobytes()


@pytest.mark.parametrize("chunk", [None, 5_000_000, 300_000, 4096, 100])
def test_weights_arrive_whole_in_any_form(server: RunningServer, client: Client, chunk: int | None) -> None:
    client.send((message("POST", PATH, FILE) if chunk is None else chunked(FILE, chunk)) + LIVE)
    assert client.read().json["received_bytes"] == len(FILE)
    assert client.read().status == 200
    expect_stored(server)


def test_weights_may_arrive_byte_by_byte(server: RunningServer, client: Client) -> None:
    client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire = message("POST", PATH, FILE)
    begin = wire.index(b"\r\n\r\n") + 4 + 5000  # into the header and the first tensors
    for at in range(begin):
        client.send(wire[at : at + 1])
    client.send(wire[begin:])
    assert client.read().status == 200
    expect_stored(server)


@pytest.mark.parametrize("chunk", [None, 1_000_000, 1000])
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (MISFIT, "2 faults"),
        (WITHOUT, "small.3"),
        (FILE[:-1], "truncated: 1 of"),
        (FILE[:100], "truncated: it ends after 100 bytes, within its header"),
        (b"", "truncated: it ends after 0 bytes"),
        (b"PK\x03\x04" * 1_000_000, "is no safetensors file, or its header is too long"),
        (FILE + b"\0", "bytes after the last tensor"),
        (FILE * 2, "bytes after the last tensor"),
    ],
    ids=["misfit", "missing", "1 byte less", "100 bytes", "none", "zip", "1 byte more", "twice"],
)
def test_weights_that_are_refused_leave_the_connection_and_no_memory(
    server: RunningServer, client: Client, body: bytes, text: str, chunk: int | None
) -> None:
    client.send((message("POST", PATH, body) if chunk is None else chunked(body, chunk)) + LIVE)
    answer = client.read()
    assert answer.status == 400
    assert text in answer.error
    assert client.read().status == 200
    stage = last(server)
    assert stage.ended.wait(PATIENCE_S)
    assert stage.put is None
    server.plane.stages_.opened.clear()
    del stage
    eventually(lambda: used_bytes(server) == 0, "memory comes back")  # threads may still look through it


def used_bytes(server: RunningServer) -> int:
    plane = server.plane
    assert isinstance(plane, StorePlane)
    plane.store.trim()
    return plane.store.usage().segment_bytes


@pytest.mark.parametrize("chunk", [None, 1_000_000])
def test_client_that_goes_away_gives_the_memory_back(server: RunningServer, chunk: int | None) -> None:
    wire = message("POST", PATH, FILE) if chunk is None else chunked(FILE, chunk)
    with Client(server.port) as client, Client(server.port) as other:
        client.send(wire[:3_000_000])
        while not server.plane.stages_.opened or last(server).reception.received_bytes < 2_000_000:
            other.ask("GET", "/v2/health/live")
        assert used_bytes(server) > 4_000_000
    assert last(server).ended.wait(PATIENCE_S)
    server.plane.stages_.opened.clear()
    eventually(lambda: used_bytes(server) == 0, "memory comes back")


@pytest.mark.parametrize("body", [MISFIT, FILE[:-1], FILE + b"\0", FILE[:3_000_000]])
def test_stage_takes_the_next_file_after_a_bad_one(server: RunningServer, client: Client, body: bytes) -> None:
    assert client.ask("POST", f"{PATH}/stages").status == 201
    assert client.ask("PUT", STAGE, body).status == 400
    assert client.ask("PUT", STAGE, FILE).status == 200
    assert client.ask("POST", f"{STAGE}/commit").status == 200
    expect_stored(server)


def test_stage_takes_the_next_file_after_a_client_that_went_away(server: RunningServer, client: Client) -> None:
    assert client.ask("POST", f"{PATH}/stages").status == 201
    stage = last(server)
    with Client(server.port) as gone:
        gone.send(message("PUT", STAGE, FILE)[:3_000_000])
        while stage.reception.received_bytes < 2_000_000:
            client.ask("GET", "/v2/health/live")
        assert client.ask("PUT", STAGE, FILE).status == 409
    eventually(lambda: client.ask("PUT", STAGE, FILE).status == 200, "the file is given up")
    assert client.ask("POST", f"{STAGE}/commit").status == 200
    expect_stored(server)


def test_stage_takes_tensors_in_any_number_of_files(server: RunningServer, client: Client) -> None:
    assert client.ask("POST", f"{PATH}/stages").status == 201
    names = list(ARRAYS)
    for part in (names[:1], names[1:20], names[20:]):
        body = safetensors.numpy.save({name: ARRAYS[name] for name in part})
        client.send(message("PUT", STAGE, body))
    assert [client.read().status for _ in range(3)] == [200] * 3
    assert client.ask("POST", f"{STAGE}/commit").status == 200
    expect_stored(server)
