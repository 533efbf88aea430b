"""Model directories, filled as users and tools fill them."""

from __future__ import annotations

import itertools
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rebind.repository.publish import publish
from tests.life.models import MLP, Case, Form, Gallery, expected, inputs, same_bits
from tests.server import Answer, Client, Failed, ServerProcess, eventually

if TYPE_CHECKING:
    from pathlib import Path

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Home:
    """The directory of one model, which ``case`` is the kind of; its model files have one form."""

    case: Case
    path: Path
    gallery: Gallery
    form: Form = Form.EXPORTED

    @property
    def name(self) -> str:
        return self.path.name

    def file(self, name: str, version: int = 1) -> Path:
        return self.path / str(version) / name

    def add_plan(self, seed: int, version: int = 1) -> Path:
        """The model file, with its weights inside if it has any, in place of the one that is there."""
        source = self.gallery.model_file(self.case, seed, self.form)
        return self.place(source, self.file(self.form.file_name, version))

    def add_weights(self, seed: int, version: int = 1, *, mtime_ns: int | None = None) -> Path:
        """``model.safetensors``, in place of the one that is there."""
        return self.place(self.gallery.weights(self.case, seed), self.file("model.safetensors", version), mtime_ns)

    def publish(self, seed: int, version: int = 1, label: str | None = None) -> Path:
        """What ``rebind publish`` does."""
        return publish(self.gallery.weights(self.case, seed), self.path, version, label)

    def write_config(self, text: str) -> Path:
        """``config.pbtxt``, in place of the one that is there."""
        path = self.path / "config.pbtxt"
        aside = path.with_name(".config.pbtxt.new")
        aside.write_text(text)
        return aside.replace(path)

    def place(self, source: Path, target: Path, mtime_ns: int | None = None) -> Path:
        """A copy of ``source`` at ``target``, whole at any moment."""
        target.parent.mkdir(exist_ok=True)
        aside = target.with_name(f".{target.name}.new")
        shutil.copyfile(source, aside)
        if mtime_ns is not None:
            os.utime(aside, ns=(mtime_ns, mtime_ns))
        return aside.replace(target)

    def answer(self, client: Client, version: int | None = None) -> Answer:
        """The answer to the request that all tests use."""
        return client.infer(self.name, inputs(self.case), version)

    def answers_as(self, client: Client, seed: int, version: int | None = None) -> bool:
        """Whether the model is there and answers, bit for bit, as eager PyTorch does with the weights of ``seed``."""
        try:
            return same_bits(self.answer(client, version).outputs, expected(self.case, seed))
        except Failed:
            return False

    def expect(self, client: Client, seed: int, generation: int, version: int = 1) -> Answer:
        """The answer, which is that of ``seed`` and names ``generation`` and ``version``."""
        answer = self.answer(client)
        assert same_bits(answer.outputs, expected(self.case, seed))
        assert (answer.version, answer.generation) == (version, generation)
        return answer

    def executions(self, client: Client) -> int:
        """How many requests the only loaded version has run; one that is loaded anew begins with 0."""
        (statistics,) = client.get(f"/v2/models/{self.name}/stats")["model_stats"]
        count: int = statistics["execution_count"]
        return count


@dataclass(frozen=True)
class Live:
    """A running server and its (first) model repository."""

    server: ServerProcess
    root: Path
    gallery: Gallery

    def home(
        self, case: Case = MLP, *, weights: int | None = None, config: str = "", form: Form = Form.EXPORTED
    ) -> Home:
        """A new model directory, which appears at one stroke.

        Version 1 is a model file with the weights of seed 0 inside, and a weights file with those of ``weights``.
        """
        name = f"{case.name}_{next(_numbers)}"
        aside = Home(case, self.root / f".{name}", self.gallery, form)
        aside.path.mkdir()
        aside.add_plan(0)
        if weights is not None:
            aside.add_weights(weights)
        if config:
            aside.write_config(config)
        return Home(case, aside.path.rename(self.root / name), self.gallery, form)

    def load(
        self,
        client: Client,
        case: Case = MLP,
        *,
        weights: int | None = None,
        config: str = "",
        form: Form = Form.EXPORTED,
    ) -> Home:
        """A new model, loaded by an explicit call."""
        home = self.home(case, weights=weights, config=config, form=form)
        client.load(home.name)
        return home

    def poll(self, client: Client, case: Case = MLP, *, weights: int | None = None, config: str = "") -> Home:
        """A new model, loaded because the server found it."""
        home = self.home(case, weights=weights, config=config)
        eventually(lambda: client.is_ready(f"/v2/models/{home.name}/ready"), f"{home.name} is ready")
        return home


def copy_over(source: Path, target: Path) -> None:
    """Overwrites ``target`` in place, as ``cp`` does."""
    with target.open("r+b") as file:
        file.write(source.read_bytes())
        file.truncate()
