"""The demo's client process: ``python -m rebind.demo.client HELD_OUT --port P --model M --rate R``.

Open loop: a request is sent every ``1 / rate`` seconds whether or not earlier ones have been answered, so a server
that stalls cannot slow its own load down. Each request carries ``IMAGES_PER_REQUEST`` of the held-out images in turn.
One line of JSON, an :class:`~rebind.demo.timeline.Answer`, is printed for each. Ends when stdin does, after the last
answer.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rebind.demo.timeline import Answer
from rebind.demo.wire import InferCall, RequestFailed, Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

IMAGES_PER_REQUEST = 4


def batches(count: int, size: int) -> Iterator[npt.NDArray[np.int64]]:
    """Indices of ``count`` images in groups of ``size``, round and round without end."""
    for start in itertools.count(0, size):
        yield np.arange(start, start + size) % count


async def ask(
    server: Server, call: InferCall, images: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]
) -> Answer:
    """One request; its latency is from the first byte sent to the answer decoded."""
    sent_at, begin = time.time(), time.perf_counter()
    try:
        prediction = await call.predict(server, images)
    except RequestFailed as error:
        latency_s = time.perf_counter() - begin
        return Answer(sent_at, latency_s, generation=0, label="", images=0, correct=0, error=str(error))
    latency_s = time.perf_counter() - begin
    correct = int((prediction.scores.argmax(axis=1) == labels).sum())
    return Answer(sent_at, latency_s, prediction.generation, prediction.label, len(images), correct)


async def ask_and_tell(
    server: Server, call: InferCall, images: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]
) -> None:
    """One request, told on stdout."""
    print(json.dumps(asdict(await ask(server, call, images, labels))), flush=True)


async def send_at_rate(server: Server, model: str, held_out: Path, rate: float, stop: asyncio.Event) -> None:
    """Sends until ``stop``, then waits for the answers that are still out."""
    with np.load(held_out) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    call = await InferCall.of(server, model)
    begin = time.monotonic()
    async with asyncio.TaskGroup() as requests:
        for number, chosen in enumerate(batches(len(images), IMAGES_PER_REQUEST)):
            await asyncio.sleep(begin + number / rate - time.monotonic())
            if stop.is_set():
                break
            requests.create_task(ask_and_tell(server, call, images[chosen], labels[chosen]))


async def run(arguments: argparse.Namespace) -> None:
    """The process, inside its event loop."""
    server, stop, loop = Server(arguments.host, arguments.port), asyncio.Event(), asyncio.get_running_loop()

    def on_stdin_end() -> None:
        loop.remove_reader(sys.stdin)
        stop.set()

    loop.add_reader(sys.stdin, on_stdin_end)
    try:
        await send_at_rate(server, arguments.model, arguments.held_out, arguments.rate, stop)
    finally:
        server.close()


def main() -> int:
    """The process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rate", type=float, required=True)
    asyncio.run(run(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
