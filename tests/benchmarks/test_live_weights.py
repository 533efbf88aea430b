"""The benchmarks of live weights on a real server, made small: what they check, and that they see what is wrong."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from safetensors.numpy import load_file

from benchmarks import models, stream
from benchmarks.closed_loop import Asked, Phases, ask
from benchmarks.harness import HOST, Client, Options, Report, serving
from benchmarks.push import copied_bytes
from benchmarks.roads import bare_socket, grpc_push, raw_http, streaming_client
from benchmarks.soak import Roads, Sample, Soak, report_handles, report_memory, report_time
from rebind.client import WeightsClient
from rebind.demo.session import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.harness import Prepared, Server

GRPC_PORT, METRICS_PORT = free_port(), free_port()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return models.write("policy", tmp_path_factory.mktemp("policy"), ("archive",), weight_sets=3, requests=2)["archive"]


@pytest.fixture(scope="module")
def server(policy: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = Options(json=None, plan_cache_dir=tmp_path_factory.mktemp("plans"))
    ports = (f"--grpc-port={GRPC_PORT}", f"--metrics-port={METRICS_PORT}")
    flags = ("--compile=never", "--http-address=0.0.0.0", "--allow-grpc=true", "--allow-metrics=true")
    with serving(policy, options, *flags, *ports) as running:
        yield running


@pytest.fixture
def client(server: Server, policy: Prepared) -> Iterator[Client]:
    """The weights of the model file serve, whatever served before."""
    with closing(Client(server.port, policy.name)) as connected:
        connected.unload()
        connected.load()
        yield connected


def test_every_road_brings_the_weights_that_it_is_given(server: Server, policy: Prepared, client: Client) -> None:
    request = policy.inputs[0]
    with (
        raw_http(server.port, policy.name) as raw,
        streaming_client(server.port, policy.name) as streaming,
        grpc_push(GRPC_PORT, policy.name) as over_grpc,
    ):
        assert raw(policy.weights_files[0].read_bytes()) == 2
        policy.check(client.infer(request), seed=1, generation=2)
        assert streaming(load_file(policy.weights_files[1])) == 3
        policy.check(client.infer(request), seed=2, generation=3)
        assert over_grpc(policy.weights_files[2].read_bytes()) == 4
        policy.check(client.infer(request), seed=3, generation=4)


def test_a_push_that_is_refused_is_an_error(server: Server, policy: Prepared, client: Client) -> None:
    with raw_http(server.port, policy.name) as raw, pytest.raises(RuntimeError, match="400"):
        raw(b"no weights")


def test_the_bare_socket_reads_all_that_is_written() -> None:
    data = bytes(1 << 20)
    with bare_socket(len(data)) as send:
        assert [send(data), send(data)] == [0, 0]


def test_copied_bytes_are_those_that_the_server_counts(server: Server, policy: Prepared, client: Client) -> None:
    before = copied_bytes(METRICS_PORT)
    with WeightsClient(f"http://{HOST}:{server.port}") as pushing:
        update = pushing.push(policy.name, load_file(policy.weights_files[0]))
    assert copied_bytes(METRICS_PORT) - before == update.copied_bytes == policy.weights_nbytes


def test_answers_under_load_are_kept_with_their_generation(
    server: Server, policy: Prepared, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    def asked() -> Asked:
        phases = Phases(time.monotonic(), 0.1, 1)
        return ask(server.port, policy.name, client.input_name, list(policy.inputs), phases)

    collected = asked()
    assert collected.answers.total() == collected.per_phase[0]
    assert {key[:2] for key in collected.answers} == {(0, 1), (1, 1)}
    with WeightsClient(f"http://{HOST}:{server.port}") as pushing:
        pushing.push(policy.name, load_file(policy.weights_files[0]))
    collected.answers += asked().answers

    report = Report("stream", "")
    stream.report_answers(report, collected, policy)
    stream.report_eager(report, collected, policy)
    assert report.finish(Options(None, policy.plan_file)) == 0, capsys.readouterr().out

    ((request, _, output), *_) = collected.answers
    collected.answers[request, 3, output] += 1  # as if the weights after it had answered so
    stream.report_answers(report, collected, policy)
    assert report.finish(Options(None, policy.plan_file)) == 1
    assert "FAIL  largest difference from eager PyTorch" in capsys.readouterr().out


def test_refusals_under_load_are_kept(server: Server, policy: Prepared) -> None:
    asked = ask(server.port, "absent", "x", list(policy.inputs), Phases(time.monotonic(), 0.05, 1))
    assert not asked.answers
    assert asked.failures[0].startswith(b"HTTP/1.1 404 ")


def test_soak_goes_by_all_roads(server: Server, policy: Prepared, client: Client) -> None:
    weights = load_file(policy.weights_files[0])
    with WeightsClient(f"http://{HOST}:{server.port}") as pushing, closing(Roads(pushing, policy.name)) as roads:
        soak = Soak(roads, client, weights)
        for number in range(10):
            soak.refit(number, policy.inputs[0])
    causes = [record["cause"] for record in client.weights()["history"]]
    assert causes[-10:] == 2 * ["push", "stage", "push", "stage", "push"]
    assert (len(soak.seconds), soak.patches, soak.wrong_patches) == (10, 2, 0)


def test_soak_ends_when_other_weights_answer(server: Server, policy: Prepared, client: Client) -> None:
    weights = load_file(policy.weights_files[0])
    with WeightsClient(f"http://{HOST}:{server.port}") as pushing, closing(Roads(pushing, policy.name)) as roads:
        soak = Soak(roads, client, weights)
        pushing.push(policy.name, weights)
        with pytest.raises(RuntimeError, match="expected generation 2, got 3"):
            soak.refit(0, policy.inputs[0])


def test_a_sample_counts_threads_and_descriptors(server: Server) -> None:
    sample = Sample.of(server)
    assert sample.nbytes > 50_000_000
    assert sample.threads > 1
    assert sample.descriptors > 3


def test_growth_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("soak", "")
    report_memory(report, [Sample(1000 + 2 * number, 9, 9) for number in range(20)])
    report_handles(report, [Sample(1000, 9 + number // 19, 9) for number in range(20)])
    report_time(report, [0.001 + 0.0001 * number for number in range(20)])
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert [line.split(":")[0] for line in failed] == [
        "FAIL  memory in the second half, most / least",
        "FAIL  descriptors, growth of the most",
        "FAIL  time of the last refits / of the first",
    ]
