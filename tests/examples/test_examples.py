"""The examples, run small as README says; each of them fails by itself when what it claims is not so."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rebind.plans.cache import PlanCache

ROOT = Path(__file__).parents[2]
README = (ROOT / "examples/README.md").read_text(encoding="utf-8")
SMALL = {
    Path(words[1]).name: words for words in map(shlex.split, re.findall(r"^python .*never$", README, re.MULTILINE))
}

pytestmark = pytest.mark.timeout(240)


class Example:
    """A process that runs an example small."""

    def __init__(self, name: str, *more: str, cache: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *SMALL[name][1:], *more],
            cwd=ROOT,
            env=os.environ | {"XDG_CACHE_HOME": str(cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def printed(self) -> str:
        """All of it, when it has ended well."""
        output, errors = self._process.communicate()
        assert self._process.returncode == 0, output + errors
        return output

    def end(self) -> None:
        """Ends it, and its server."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@contextmanager
def running(*names: str, more: tuple[str, ...] = (), cache: Path) -> Iterator[Mapping[str, Example]]:
    """Examples that run at the same time."""
    examples = {name: Example(name, *more, cache=cache) for name in names}
    try:
        yield examples
    finally:
        for example in examples.values():
            example.end()


@pytest.fixture(scope="module")
def examples(plan_cache: PlanCache) -> Iterator[Mapping[str, Example]]:
    """All of them: most of their time goes into imports, and one leaves a core to another."""
    with running(*SMALL, cache=plan_cache.root) as processes:
        yield processes


@pytest.mark.parametrize("name", SMALL)
def test_first_lines_of_an_example_say_how_it_is_run_small(name: str) -> None:
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    assert f"    {shlex.join(SMALL[name])}\n" in text.partition('"""\n\nfrom')[0]


def test_every_example_has_a_small_run() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {*SMALL, "serving.py"}


def test_ppo_acts_by_the_weights_of_its_last_update(examples: Mapping[str, Example]) -> None:
    output = examples["ppo_cartpole.py"].printed()
    rows = [line.split() for line in output.splitlines()[1:9]]
    assert [int(step) for step, *_ in rows] == [512 * number for number in range(1, 9)]
    # The first weights are those of the file: to push them changes nothing.
    assert [int(generation) for _, _, generation, _ in rows] == list(range(1, 9))
    assert float(rows[-1][1]) > float(rows[0][1])
    assert "520 requests in 8 rollouts, each answered by the weights of the last update" in output
    assert "generation 9 serves" in output


def test_served_actions_are_those_of_stable_baselines(examples: Mapping[str, Example]) -> None:
    output = examples["sb3_callback.py"].printed()
    assert re.findall(r"(\S+)  generation +(\d+)", output) == [
        ("exported", "1"),
        ("step-1024", "2"),
        ("step-2048", "3"),
    ]
    assert "3072 actions of 3 generations equal to model.predict" in output


def test_served_accuracy_rises_while_a_loop_trains(examples: Mapping[str, Example]) -> None:
    rows = re.findall(r"step-(\d+)  generation +(\d+)  accuracy (\S+)", examples["training_loop.py"].printed())
    assert [(int(step), int(generation)) for step, generation, _ in rows] == [(16 * n, n + 1) for n in range(1, 7)]
    assert float(rows[-1][2]) > 0.9 > float(rows[0][2])


def test_an_adapter_travels_alone_and_comes_back(examples: Mapping[str, Example]) -> None:
    output = examples["lora.py"].printed()
    rows = [line.replace(",", "").split() for line in output.splitlines()[1:6]]
    assert [name for name, *_ in rows] == ["base", "inverted", "transposed", "inverted", "transposed"]
    copied, shared = zip(*((int(copied), int(shared)) for _, copied, shared, *_ in rows), strict=True)
    adapted = 4 * (64 * 512 + 512 * 512)
    # Full; an adapter and another one; back to the first, which the server still has for a rollback, and forth.
    assert copied == (copied[0], adapted, adapted, 0, 0)
    assert {sum(pair) for pair in zip(copied, shared, strict=True)} == {copied[0]}
    assert "an adapter: 18% of the bytes of a full push; the two once more: 0 bytes" in output


def test_trainer_pushes_every_few_steps_and_persists_its_checkpoints(plan_cache: PlanCache) -> None:
    pytest.importorskip("transformers")
    with running("training_loop.py", more=("--trainer",), cache=plan_cache.root) as processes:
        output = processes["training_loop.py"].printed()
    assert re.findall(r"step-(\d+) .* ms\n", output) == ["16", "32", "48", "64", "80", "96"]
    assert re.findall(r"step-(\d+) .* persisted\n", output) == ["48", "96"]


class Recorder:
    """A client that notes what would be pushed."""

    def __init__(self) -> None:
        self.pushed: list[tuple[str, bool]] = []

    def push(self, model_name: str, weights: object, *, label: str, persist: bool) -> None:
        assert (model_name, weights) == ("digits", "weights")
        self.pushed.append((label, persist))


@pytest.mark.parametrize(
    ("is_first_process", "pushed"),
    [(True, [("step-2", False), ("step-4", False), ("step-4", True), ("step-5", False)]), (False, [])],
)
def test_callback_pushes_as_the_trainer_calls_it(
    monkeypatch: pytest.MonkeyPatch, *, is_first_process: bool, pushed: list[tuple[str, bool]]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    training_loop: Any = importlib.import_module("training_loop")
    client = Recorder()
    callback = training_loop.PushWeights(client, "digits", every=2)
    state = SimpleNamespace(is_world_process_zero=is_first_process)
    for state.global_step in range(1, 6):
        callback.on_step_end(None, state, None, model="weights", optimizer=None)
        if state.global_step == 4:
            callback.on_save(None, state, None, model="weights")
    callback.on_train_end(None, state, None, model="weights")
    assert client.pushed == pushed
