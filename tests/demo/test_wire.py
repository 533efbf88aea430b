from __future__ import annotations

import asyncio
import itertools
import json
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rebind.demo.client import ask, batches, send_at_rate
from rebind.demo.session import HOST, free_port
from rebind.demo.timeline import Answer
from rebind.demo.wire import InferCall, Prediction, RequestFailed, Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    import numpy.typing as npt

    Handler = Callable[[str, bytes], Awaitable[bytes]]

CALL = InferCall("/v2/models/digits/infer", "image", "scores")
IMAGES = np.arange(2 * 64, dtype=np.float32).reshape(2, 1, 8, 8)


@asynccontextmanager
async def answering(
    handler: Handler,
    connections: list[asyncio.StreamWriter] | None = None,
    close_after_response: bool = False,
    timeout_s: float = 5.0,
) -> AsyncIterator[Server]:
    """A client of a server whose ``handler`` turns (request line, body) into the bytes of a response."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if connections is not None:
            connections.append(writer)
        with suppress(asyncio.IncompleteReadError, asyncio.CancelledError):
            while not writer.is_closing():
                line, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                length = next(header for header in headers if header.startswith("Content-Length:"))
                body = await reader.readexactly(int(length.partition(":")[2]))
                writer.write(await handler(line, body))
                if close_after_response:
                    break
        writer.close()

    listener = await asyncio.start_server(converse, HOST, 0)
    client = Server(HOST, listener.sockets[0].getsockname()[1], timeout_s=timeout_s)
    try:
        yield client
    finally:
        client.close()
        listener.close()


def response(body: bytes, status: str = "200 OK", **headers: object) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def inference(scores: npt.NDArray[np.float32], **parameters: object) -> bytes:
    output = {
        "name": "scores",
        "datatype": "FP32",
        "shape": scores.shape,
        "parameters": {"binary_data_size": scores.nbytes},
    }
    header = json.dumps({"model_name": "digits", "parameters": parameters, "outputs": [output]}).encode()
    return response(header + scores.tobytes(), Inference_Header_Content_Length=len(header))


def scores_for(labels: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Scores whose largest is that of the label."""
    return np.eye(10, dtype=np.float32)[labels]


def test_images_go_out_and_scores_come_back_as_binary_tensors() -> None:
    seen: list[tuple[str, bytes]] = []
    scores = np.random.default_rng(0).random((2, 10), dtype=np.float32)

    async def handler(line: str, body: bytes) -> bytes:
        seen.append((line, body))
        return inference(scores, weights_generation=7, weights_label="step-56")

    async def story() -> Prediction:
        async with answering(handler) as server:
            return await CALL.predict(server, IMAGES)

    prediction = asyncio.run(story())

    ((line, body),) = seen
    assert line == "POST /v2/models/digits/infer HTTP/1.1"
    assert body.endswith(IMAGES.tobytes())
    assert json.loads(body.removesuffix(IMAGES.tobytes()))["inputs"][0]["shape"] == [2, 1, 8, 8]
    np.testing.assert_array_equal(prediction.scores, scores)
    assert (prediction.generation, prediction.label) == (7, "step-56")


def test_names_of_the_tensors_come_from_the_metadata() -> None:
    async def handler(line: str, _: bytes) -> bytes:
        assert line == "GET /v2/models/digits HTTP/1.1"
        return response(json.dumps({"inputs": [{"name": "image"}], "outputs": [{"name": "scores"}]}).encode())

    async def story() -> InferCall:
        async with answering(handler) as server:
            return await InferCall.of(server, "digits")

    assert asyncio.run(story()) == CALL


def test_a_refusal_is_told_in_the_words_of_the_server() -> None:
    async def handler(_line: str, _body: bytes) -> bytes:
        return response(b'{"error":"no such model"}', status="404 Not Found")

    async def story() -> None:
        async with answering(handler) as server:
            await CALL.predict(server, IMAGES)

    with pytest.raises(RequestFailed, match=r"HTTP 404.*no such model"):
        asyncio.run(story())


def test_a_connection_that_breaks_off_fails_the_request() -> None:
    async def handler(_line: str, _body: bytes) -> bytes:
        return b"HTTP/1.1 200 OK\r\nContent-Le"

    async def story() -> None:
        async with answering(handler, close_after_response=True) as server:
            await server.get("/v2")

    with pytest.raises(RequestFailed, match="IncompleteReadError"):
        asyncio.run(story())


def test_no_answer_in_time_fails_the_request() -> None:
    async def handler(_line: str, _body: bytes) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    async def story() -> None:
        async with answering(handler, timeout_s=0.05) as server:
            await server.get("/v2")

    with pytest.raises(RequestFailed, match=r"no answer within 0\.05 s"):
        asyncio.run(story())


def test_nobody_listening_fails_the_request() -> None:
    with pytest.raises(RequestFailed, match="ConnectionRefusedError"):
        asyncio.run(Server(HOST, free_port()).get("/v2"))


def test_connections_are_used_again_and_never_by_two_requests_at_once() -> None:
    connections: list[asyncio.StreamWriter] = []
    both_asked = asyncio.Barrier(2)

    async def handler(_line: str, _body: bytes) -> bytes:
        await both_asked.wait()
        return response(b"{}")

    async def story() -> None:
        async with answering(handler, connections=connections) as server:
            for _ in range(3):
                await asyncio.gather(server.get("/a"), server.get("/b"))

    asyncio.run(story())

    assert len(connections) == 2


def test_an_answer_counts_the_images_that_were_recognised() -> None:
    async def handler(_line: str, _body: bytes) -> bytes:
        return inference(scores_for(np.array([3, 5])), weights_generation=2)

    async def story() -> Answer:
        async with answering(handler) as server:
            return await ask(server, CALL, IMAGES, np.array([3, 4]))

    answer = asyncio.run(story())

    assert (answer.images, answer.correct, answer.generation, answer.label, answer.error) == (2, 1, 2, "", "")
    assert answer.latency_s > 0


def test_a_failed_request_is_an_answer_with_an_error() -> None:
    async def story() -> Answer:
        return await ask(Server(HOST, free_port()), CALL, IMAGES, np.array([3, 4]))

    answer = asyncio.run(story())

    assert answer.error
    assert answer.images == 0


def test_requests_go_on_at_their_rate_while_one_is_not_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first request is answered only after ten more have been: an open loop does not wait for it."""
    np.savez(tmp_path / "held_out.npz", images=np.zeros((6, 1, 8, 8), np.float32), labels=np.arange(6))
    stop, answered = asyncio.Event(), itertools.count(1)

    async def handler(line: str, _: bytes) -> bytes:
        if line.startswith("GET"):
            return response(json.dumps({"inputs": [{"name": "image"}], "outputs": [{"name": "scores"}]}).encode())
        number = next(answered)
        if number == 1:
            await stop.wait()
        if number == 11:
            stop.set()
        return inference(scores_for(np.array([0, 1, 2, 3])), weights_generation=number)

    async def story() -> None:
        async with answering(handler) as server:
            await send_at_rate(server, "digits", tmp_path / "held_out.npz", 200.0, stop)

    asyncio.run(story())

    answers = [Answer(**json.loads(line)) for line in capsys.readouterr().out.splitlines()]
    assert len(answers) >= 11
    assert not [answer.error for answer in answers if answer.error]
    slowest = max(answers, key=lambda answer: answer.latency_s)
    assert slowest.generation == 1
    # Ten requests, 5 ms apart, were sent and answered meanwhile.
    assert slowest.latency_s > 10 * 0.005 * 0.8


def test_held_out_images_are_sent_in_turn() -> None:
    assert [batch.tolist() for batch in itertools.islice(batches(5, 2), 4)] == [[0, 1], [2, 3], [4, 0], [1, 2]]
