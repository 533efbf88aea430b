"""``kill -9``, of the trainer and of the server, at each step of an update: old weights or new, never a mixture."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import time
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rebind.repository.manifest import manifest_path
from tests.life.conftest import FAST_POLLING
from tests.life.models import expected, same_bits
from tests.life.repository import Live
from tests.live.conftest import EXPLICIT, SOON_FREE, SOON_S
from tests.live.models import LARGE, SMALL, arrays
from tests.live.trainer import STEPS, Trainer, TrainerProcess
from tests.server import PATIENCE_S, Client, eventually, safetensors_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.life.conftest import Start
    from tests.life.models import Gallery
    from tests.life.repository import Home
    from tests.server import ServerProcess

pytestmark = pytest.mark.timeout(180)

MAY_COMMIT = {"before the answer", "while it commits", "while it persists"}
"""Steps at which all that the server needs has been sent."""
KEEP_NONE = 'parameters { key: "WEIGHTS_KEEP_GENERATIONS" value { string_value: "0" } }'


def seed_of(home: Home, client: Client) -> int:
    """Which weights serve; fails for a mixture, and when generation and label are not theirs."""
    answer = home.answer(client)
    seed = int(answer.output[0, 0]) // 1000
    assert same_bits(answer.outputs, expected(home.case, seed))
    weights = client.weights(home.name)
    assert (answer.generation, answer.label) == (weights["generation"], weights["label"])
    assert weights["state"] == "SERVING"
    assert weights["history"][-1]["digest"] == weights["digest"]
    return seed


# The trainer


@pytest.fixture(scope="module")
def large(live: Live) -> Home:
    """64 MiB of weights, of which no second set is kept: what is left behind would be seen."""
    with live.server.client() as client:
        return live.load(client, LARGE, config=KEEP_NONE)


@pytest.fixture(scope="module")
def idle_bytes(large: Home, live: Live) -> int:
    """The server's memory for weights when none are on their way, and none is spare."""
    time.sleep(SOON_S)
    return live.server.weights_memory_bytes()


@pytest.mark.parametrize("step", STEPS)
def test_trainer_that_is_killed_leaves_old_or_new_weights_and_no_memory(
    step: str, large: Home, idle_bytes: int, live: Live, client: Client, tmp_path: Path
) -> None:
    old, new, next_one = seed_of(large, client), *(2 * list(STEPS).index(step) + each for each in (1, 2))
    generation = client.weights(large.name)["generation"]
    file = tmp_path / "weights.safetensors"
    file.write_bytes(safetensors_bytes(arrays(LARGE, new)))
    with TrainerProcess(live.server, large.name, step, file) as trainer:
        if step not in MAY_COMMIT:
            large.expect(client, old, generation)
        trainer.kill()
    eventually(lambda: client.weights(large.name)["state"] == "SERVING", "what had all been sent is committed")
    eventually(lambda: live.server.weights_memory_bytes() <= idle_bytes, "the memory is given back")
    eventually(lambda: client.stages(large.name) == [], "the stage has ended")
    serving = seed_of(large, client)
    assert serving in ((old, new) if step in MAY_COMMIT else (old,))
    weights = client.weights(large.name)
    assert (weights["generation"], weights["label"] == "killed") == (generation + (serving == new), serving == new)
    client.push(large.name, arrays(LARGE, next_one), label="next")
    large.expect(client, next_one, weights["generation"] + 1)


@pytest.mark.parametrize("step", ["with a stage, within a tensor", "with half a region"])
def test_trainer_that_hangs_loses_its_stage_when_the_lease_is_over(
    step: str, large: Home, idle_bytes: int, live: Live, client: Client, tmp_path: Path
) -> None:
    """Its connections are open and its region is mapped, and still the memory is given back."""
    old, generation = seed_of(large, client), client.weights(large.name)["generation"]
    file = tmp_path / "weights.safetensors"
    file.write_bytes(safetensors_bytes(arrays(LARGE, 100)))
    with TrainerProcess(live.server, large.name, step, file) as trainer:
        assert live.server.weights_memory_bytes() > idle_bytes
        trainer.freeze()
        eventually(lambda: live.server.weights_memory_bytes() <= idle_bytes, "the memory is given back")
        assert client.stages(large.name) == []
        large.expect(client, old, generation)


# The server


def kill(server: ServerProcess) -> None:
    os.kill(server.pid, signal.SIGKILL)
    server.wait()


def test_server_that_is_killed_at_any_step_serves_what_the_repository_has(
    start: Start, gallery: Gallery, tmp_path: Path
) -> None:
    """One model for each step, all of them there when the server dies; and one whose update was answered."""
    flags = (*EXPLICIT, "--load-model=*")
    with start(tmp_path, flags=flags) as server, server.client() as client:
        live = Live(server, tmp_path, gallery)
        homes = {step: live.load(client, SMALL) for step in STEPS}
        answered, pushed = live.load(client, SMALL), live.load(client, SMALL)
        client.push(answered.name, arrays(SMALL, 1), persist=True, label="answered")
        client.push(pushed.name, arrays(SMALL, 1), label="not persisted")
        with ExitStack() as trainers:
            for step, home in homes.items():
                STEPS[step](trainers.enter_context(closing(Trainer(server.port, home.name, content(1)))))
            kill(server)
    with start(tmp_path, flags=flags) as server, server.client() as client:
        for step, home in homes.items():
            seed = seed_of(home, client)
            assert seed in ((0, 1) if step == "while it persists" else (0,)), step
            assert client.weights(home.name)["label"] == ("killed" if seed else "")
            client.push(home.name, arrays(SMALL, 2))
            home.expect(client, 2, generation=2)
        assert answered.expect(client, 1, generation=1).label == "answered"
        pushed.expect(client, 0, generation=1)


def test_server_that_is_killed_while_it_persists_serves_one_or_the_other(
    start: Start, gallery: Gallery, tmp_path: Path
) -> None:
    """And what was persisted is not taken for a change by the server that polls, neither before nor after."""
    flags = (*FAST_POLLING, *SOON_FREE)
    with start(tmp_path, flags=flags) as server, server.client() as client:
        live = Live(server, tmp_path, gallery)
        answered, stalled, halfway = (live.poll(client, SMALL, weights=0) for _ in range(3))
        assert client.push(answered.name, arrays(SMALL, 1), persist=True, label="killed")["persisted"]
        live.poll(client)  # so the server has looked at the files since
        assert len(client.weights(answered.name)["history"]) == 2
        with publication_stalled(server, stalled):  # written aside, nothing moved
            kill_when_replaced(server, halfway, manifest_path(halfway.file("model.safetensors")))
    with start(tmp_path, flags=flags) as server, server.client() as client:
        live = Live(server, tmp_path, gallery)
        assert seed_of(answered, client) == 1
        assert seed_of(stalled, client) == 0
        assert seed_of(halfway, client) in (0, 1)
        for home in (answered, stalled, halfway):
            weights = client.weights(home.name)
            assert weights["generation"] == 1
            assert weights["label"] == ("killed" if seed_of(home, client) else "")
            client.push(home.name, arrays(SMALL, 2), persist=True, label="next")
        kill_when_replaced(server, stalled, stalled.file("model.safetensors"))
    with start(tmp_path, flags=flags) as server, server.client() as client:
        assert stalled.expect(client, 1, generation=1).label == "killed"
        for home in (answered, halfway):
            assert home.expect(client, 2, generation=1).label == "next"


@contextmanager
def publication_stalled(server: ServerProcess, home: Home) -> Iterator[None]:
    """In the context, the server has written weights aside and waits for a lock that we hold to move them."""
    with (
        (home.path / ".publish.lock").open("w") as lock,
        closing(Trainer(server.port, home.name, content(1))) as trainer,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiter = re.compile(rf"-> FLOCK .*:{os.fstat(lock.fileno()).st_ino} ")
        STEPS["while it persists"](trainer)
        eventually(lambda: waiter.search(Path("/proc/locks").read_text()), "the server waits for the lock")
        yield


def kill_when_replaced(server: ServerProcess, home: Home, path: Path) -> None:
    """Persists weights, and kills the server as soon as ``path`` is another file than before."""
    before = inode_of(path)
    deadline_s = time.monotonic() + PATIENCE_S
    with closing(Trainer(server.port, home.name, content(1))) as trainer:
        STEPS["while it persists"](trainer)
        while inode_of(path) == before:  # without a pause: what follows comes within milliseconds
            assert time.monotonic() < deadline_s
        kill(server)


def inode_of(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def content(seed: int) -> bytes:
    """A safetensors file for :data:`SMALL`."""
    return safetensors_bytes(arrays(SMALL, seed))
