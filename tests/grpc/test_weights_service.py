"""rebind.v1.Weights against a whole server: the calls of HTTP, with the same answers, and what only streams can do."""

from __future__ import annotations

import itertools
import json
import queue
import struct
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
import torch
from google.protobuf.json_format import MessageToDict
from torch import nn

from rebind.grpc import weights_pb2 as pb
from rebind.grpc.weights_service import _message
from tests.engines.models import Case
from tests.grpc.service import Weights, pieces
from tests.life.models import Gallery, expected, same_bits
from tests.life.repository import Home
from tests.server import Client, ServerProcess, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Middle(nn.Module):
    """4 MB of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 1000)
        self.second = nn.Linear(1000, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.second(torch.relu(self.first(x)))
        return scores[:, :8]


MIDDLE = Case("middle", Middle, (torch.zeros(4, 16),), lambda random: [random.standard_normal((2, 16), np.float32)])
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    return Gallery(tmp_path_factory.mktemp("gallery"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def service(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = (
        f"--model-repository={root}",
        "--model-control-mode=explicit",
        "--grpc-address=127.0.0.1",
        "--compile=never",
        f"--plan-cache-dir={tmp_path_factory.mktemp('plans')}",
    )
    with ServerProcess(*flags) as server:
        yield server


@pytest.fixture(scope="module")
def client(service: ServerProcess) -> Iterator[Client]:
    with service.client() as connected:
        yield connected


@pytest.fixture(scope="module")
def channel(service: ServerProcess) -> Iterator[grpc.Channel]:
    port = service.wait_for_log(r"Started GRPCInferenceService at 127.0.0.1:(\d+)")[1]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as connected:
        yield connected


@pytest.fixture
def home(root: Path, gallery: Gallery, client: Client) -> Home:
    """A model of its own for each test, with the weights of seed 0."""
    home = Home(MIDDLE, root / f"middle_{next(_numbers)}", gallery)
    home.path.mkdir()
    home.add_plan(0)
    client.load(home.name)
    return home


@pytest.fixture
def weights(channel: grpc.Channel, home: Home) -> Weights:
    return Weights(channel, home.name)


@pytest.fixture(scope="module")
def files(gallery: Gallery) -> dict[int, bytes]:
    """A safetensors file for each seed."""
    return {seed: gallery.weights(MIDDLE, seed).read_bytes() for seed in (1, 2, 3)}


@contextmanager
def refused(code: grpc.StatusCode, text: str = "") -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as failed:
        yield
    assert (failed.value.code(), text in failed.value.details()) == (code, True), failed.value.details()


def as_json(message: Any) -> Any:
    """All fields of a message by their names, numbers as numbers."""
    document = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return json.loads(json.dumps(document), parse_int=int)


def patch(files: dict[int, bytes], seed: int, name: str) -> bytes:
    """A safetensors file with one tensor of the file of ``seed``."""
    data = files[seed]
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    start, stop = header[name]["data_offsets"]
    header = {name: {**header[name], "data_offsets": [0, stop - start]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length + start : 8 + length + stop]


def test_get_says_what_http_says(weights: Weights, home: Home, client: Client) -> None:
    by_http = client.get(f"/v2/models/{home.name}/weights?slots=true")
    by_grpc = as_json(weights.call("Get", slots=True))
    for slot in by_http["slots"]:
        slot["shape"] = [str(size) for size in slot["shape"]]
    assert by_grpc["slots"] == [
        {key: value for key, value in slot.items() if value is not None} for slot in by_http["slots"]
    ]
    assert by_grpc.keys() == {key for key, value in by_http.items() if value is not None}
    assert [each.keys() for each in by_grpc["history"]] == [each.keys() for each in by_http["history"]]
    for name in ("model_name", "model_version", "digest", "label", "state", "plan_key", "tier"):
        assert by_grpc[name] == by_http[name]
    assert int(by_grpc["bytes"]["total"]) == by_http["bytes"]["total"] > 4_000_000


@pytest.mark.parametrize("size", [1, 7_777, 1_000_000, 10_000_000])
def test_push_commits(weights: Weights, home: Home, client: Client, files: dict[int, bytes], size: int) -> None:
    data = files[1]
    if size == 1:  # the header byte by byte
        options = weights.options(label="step-1")
        head = 8 + struct.unpack("<Q", data[:8])[0] + 3
        requests = [options, *pieces(pb.PushRequest, data[:head], 1), pb.PushRequest(data=data[head:])]
        report = weights.push_stub()(iter(requests), timeout=30)
    else:
        report = weights.push(data, size, label="step-1")
    assert (report.outcome, report.generation, report.label) == ("committed", 2, "step-1")
    assert report.received_bytes == len(data)
    assert {"receive", "stage", "commit", "total"} <= report.durations_ms.keys()
    assert home.expect(client, 1, 2).label == "step-1"


def test_push_of_the_same_weights_changes_nothing(weights: Weights, files: dict[int, bytes]) -> None:
    weights.push(files[1])
    report = weights.push(files[1], label="again")
    assert (report.outcome, report.generation, report.label) == ("unchanged", 2, "")


def test_dry_run_and_condition(weights: Weights, home: Home, client: Client, files: dict[int, bytes]) -> None:
    assert weights.push(files[1], dry_run=True).outcome == "valid"
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "digest"):
        weights.push(files[1], if_match="0" * 64)
    digest = weights.call("Get").digest
    assert weights.push(files[1], if_match=digest).generation == 2
    assert weights.push(files[2], persist=True).persisted
    home.expect(client, 2, 3)


def test_patch(weights: Weights, files: dict[int, bytes]) -> None:
    report = weights.push(patch(files, 1, "first.bias"), mode="patch")
    assert (report.outcome, report.generation) == ("committed", 2)
    assert report.copied_bytes < 100_000
    assert report.shared_bytes > 4_000_000


def test_weights_that_do_not_fit_are_refused_with_every_fault(
    weights: Weights, home: Home, client: Client, files: dict[int, bytes]
) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "second.weight"):
        weights.push(patch(files, 1, "first.bias"))
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "truncated"):
        weights.push(files[1][:-1])
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "bytes follow"):
        weights.push(files[1] + b"x")
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "no safetensors"):
        weights.push(b"no safetensors at all" * 100_000)
    home.expect(client, 0, 1)
    assert weights.push(files[1]).generation == 2


def test_a_push_needs_its_options_first(weights: Weights, files: dict[int, bytes]) -> None:
    push = weights.push_stub()
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a Push"):
        push(iter(pieces(pb.PushRequest, files[1], 1_000_000)), timeout=30)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a Push"):
        push(iter([]), timeout=30)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "every message after the first"):
        push(iter([weights.options(), weights.options()]), timeout=30)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "mode must be 'full' or 'patch'"):
        push(iter([weights.options(mode="half")]), timeout=30)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "label"):
        push(iter([weights.options(label="a\nb")]), timeout=30)


def test_a_push_that_is_cut_off_leaves_nothing(
    service: ServerProcess, weights: Weights, home: Home, client: Client, files: dict[int, bytes]
) -> None:
    weights.push(files[1])
    weights.push(files[2])
    eventually(lambda: weights.call("Get").state == "SERVING", "the last push is over")
    before = service.weights_memory_bytes()
    half = pieces(pb.PushRequest, files[3][: len(files[3]) // 2], 500_000)
    for _ in range(3):
        sent, go_on = threading.Event(), threading.Event()

        def requests(sent: threading.Event = sent, go_on: threading.Event = go_on) -> Iterator[pb.PushRequest]:
            yield weights.options(label="never")
            yield from half
            sent.set()
            go_on.wait(30)

        push = weights.push_stub().future(requests(), timeout=30)
        assert sent.wait(30)
        push.cancel()
        go_on.set()
    home.expect(client, 2, 3)
    assert weights.push(files[3]).generation == 4
    left = before + len(files[3]) // 4  # small segments may be spare, of which the pool keeps some
    eventually(lambda: service.weights_memory_bytes() < left, "the memory of the stages is back")
    assert [commit.label for commit in weights.call("Get").history] == [""] * 4


def test_stages(weights: Weights, home: Home, client: Client, files: dict[int, bytes]) -> None:
    stage = weights.call("OpenStage", lease_s=30)
    assert (stage.mode, stage.shm, stage.lease_s, stage.prepared) == ("full", False, 30, False)
    assert weights.put(stage, patch(files, 2, "first.bias")).received == ["first.bias"]
    assert len(weights.put(stage, files[1]).received) == 4
    assert [each.id for each in weights.call("ListStages").stages] == [stage.id]
    assert weights.on_stage("GetStage", stage).received_bytes > len(files[1])
    home.expect(client, 0, 1)
    prepared = weights.on_stage("Prepare", stage)
    assert prepared.prepared
    report = weights.on_stage("Commit", stage, update=pb.UpdateOptions(label="staged"))
    assert (report.outcome, report.generation, report.digest) == ("committed", 2, prepared.digest)
    assert home.expect(client, 1, 2).label == "staged"
    with refused(grpc.StatusCode.NOT_FOUND, "no open stage"):
        weights.on_stage("GetStage", stage)


def test_a_stage_is_as_http_tells_it(weights: Weights, client: Client, files: dict[int, bytes]) -> None:
    stage = weights.call("OpenStage", shm=True)
    by_http, by_grpc = client.stage(as_json(stage)), as_json(weights.on_stage("GetStage", stage))
    assert by_grpc.keys() == {key for key, value in by_http.items() if value is not None}
    assert by_grpc["region"].keys() == by_http["region"].keys()
    assert [each["name"] for each in by_grpc["region"]["slots"]] == [
        each["name"] for each in by_http["region"]["slots"]
    ]
    assert [int(each["offset"]) for each in by_grpc["region"]["slots"]] == [
        each["offset"] for each in by_http["region"]["slots"]
    ]
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "shared memory"):
        weights.put(stage, files[1])
    weights.on_stage("Abort", stage)
    assert not weights.call("ListStages").stages


def test_rollback(weights: Weights, home: Home, client: Client, files: dict[int, bytes]) -> None:
    with refused(grpc.StatusCode.NOT_FOUND):
        weights.call("Rollback")
    weights.push(files[1])
    with refused(grpc.StatusCode.FAILED_PRECONDITION):
        weights.call("Rollback", if_match="0" * 64)
    report = weights.call("Rollback", label="back")
    assert (report.outcome, report.generation, report.label) == ("committed", 3, "back")
    home.expect(client, 0, 3)


def test_wait(weights: Weights, channel: grpc.Channel, home: Home, files: dict[int, bytes]) -> None:
    assert weights.call("Wait", generation=1).generation == 1
    with refused(grpc.StatusCode.DEADLINE_EXCEEDED, "generation 2"):
        weights.call("Wait", generation=2, timeout_s=0.05)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    waiting = threading.Thread(target=lambda: answers.put(weights.call("Wait", generation=2)))
    waiting.start()
    weights.push(files[1])
    assert answers.get(timeout=30).generation == 2
    waiting.join()


def test_watch_tells_the_state_and_every_commit(
    weights: Weights, client: Client, home: Home, files: dict[int, bytes]
) -> None:
    watching = weights.watch()
    first = next(watching)
    assert (first.generation, [commit.generation for commit in first.history]) == (1, [1])
    seen: list[int] = []
    for seed in (1, 2, 3):
        weights.push(files[seed], label=f"step-{seed}")
    while not seen or seen[-1] < 4:
        report = next(watching)
        assert report.label == report.history[-1].label == f"step-{report.generation - 1}"
        seen.extend(commit.generation for commit in report.history)
    assert seen == [2, 3, 4]
    client.unload(home.name)
    with refused(grpc.StatusCode.NOT_FOUND, home.name):
        next(watching)
    client.load(home.name)


def test_unknown_models_and_versions(channel: grpc.Channel, home: Home) -> None:
    unknown = Weights(channel, "nobody")
    with refused(grpc.StatusCode.NOT_FOUND, "nobody"):
        unknown.call("Get")
    with refused(grpc.StatusCode.NOT_FOUND, "nobody"):
        unknown.push(bytes(3_000_000))
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "version"):
        Weights(channel, home.name).call("Get", model_version="one")


def test_texts_without_utf8_are_told_all_the_same() -> None:
    report = _message({"retained": [1], "refusal": "no '\ud800'", "label": "x"}, pb.WeightsReport())
    assert (report.refusal, list(report.retained), report.label) == ("no '?'", [1], "x")


def test_a_message_of_another_kind_is_refused(channel: grpc.Channel) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "rebind.v1.GetRequest"):
        channel.unary_unary("/rebind.v1.Weights/Get")(b"\xff\xff\xff", timeout=30)


def test_answers_stay_those_of_one_generation_while_weights_are_pushed(
    weights: Weights, home: Home, client: Client, files: dict[int, bytes]
) -> None:
    done = threading.Event()

    def push() -> None:
        try:
            for seed in (1, 2, 3) * 3:
                weights.push(files[seed])
        finally:
            done.set()

    pushing = threading.Thread(target=push)
    pushing.start()
    while not done.is_set():
        answer = home.answer(client)
        seed = 0 if answer.generation == 1 else (answer.generation - 2) % 3 + 1
        assert same_bits(answer.outputs, expected(MIDDLE, seed))
    pushing.join()


def test_the_server_stops_at_once_though_somebody_watches(
    service: ServerProcess, channel: grpc.Channel, weights: Weights
) -> None:
    """The last test: it ends the server."""
    watching = weights.watch()
    assert next(watching).generation == 1
    began = time.monotonic()
    assert service.stop() == 0
    assert time.monotonic() - began < 20  # of the 30 s that requests are given
    with refused(grpc.StatusCode.UNAVAILABLE, "shutting down"):
        next(watching)
