"""Pushes to models of every form: TorchScript and compiled packages take them as exported graphs do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.engines.models import model_file
from tests.life.models import COUNTER, MLP, Form, expected, inputs, same_bits
from tests.life.repository import Home
from tests.life.test_package import MLP_CONFIG as PACKAGE_CONFIG
from tests.life.test_package import is_near
from tests.life.test_torchscript import COUNTER_CONFIG, count
from tests.life.test_torchscript import MLP_CONFIG as SCRIPT_CONFIG
from tests.life.traffic import Traffic
from tests.live import region
from tests.live.models import arrays, nbytes, part
from tests.server import Answer, Client, refused

if TYPE_CHECKING:
    from pathlib import Path

    from tests.life.repository import Live

pytestmark = pytest.mark.timeout(300)

FORMS = [
    Form.SCRIPTED,
    Form.TRACED,
    pytest.param(Form.EMBEDDED, marks=pytest.mark.compiles),
    pytest.param(Form.WEIGHTLESS, marks=pytest.mark.compiles),
]


@pytest.fixture(params=FORMS, ids=lambda form: form.value)
def home(request: pytest.FixtureRequest, live: Live, client: Client, compiled_directory: Path) -> Home:
    """A loaded model of each form, which has the weights of seed 0, and two instances."""
    form: Form = request.param
    config = SCRIPT_CONFIG if form.is_torchscript else PACKAGE_CONFIG
    home = Home(MLP, live.root / f"{form.value}_pushed", live.gallery, form)
    if not home.path.exists():
        home.path.mkdir()
        home.write_config(f"{config} instance_group {{ count: 2 }}")
        home.place(model_file(compiled_directory, MLP, form), home.file(form.file_name))
        home.add_weights(0)
    client.unload(home.name)
    client.load(home.name)
    return home


def is_right(home: Home, answer: Answer, seed: int) -> bool:
    """Compiled packages sum in another order than eager PyTorch."""
    if home.form.is_torchscript:
        return same_bits(answer.outputs, expected(MLP, seed))
    return is_near(answer.outputs, MLP, seed)


def test_pushes_patches_stages_and_rollbacks_serve_under_traffic(home: Home, live: Live, client: Client) -> None:
    seeds = {1: 0}
    with Traffic(live.server, home.name, [inputs(MLP)]) as traffic:
        for generation, seed in ((2, 1), (3, 2)):
            client.push(home.name, arrays(MLP, seed))
            seeds[generation] = seed
            assert is_right(home, home.answer(client), seed)
        stage = client.open_stage(home.name, shm=True)
        region.write(stage, arrays(MLP, 3))
        client.commit(stage, label="staged")
        seeds[4] = 3
        answer = home.answer(client)
        assert answer.label == "staged"
        assert is_right(home, answer, 3)
        client.rollback(home.name)
        seeds[5] = 2
        assert is_right(home, home.answer(client), 2)
        traffic.wait_for(6)
    assert not traffic.failures
    assert all(is_right(home, answer, seeds[answer.generation]) for _, answer in traffic.answers)


def test_patch_copies_what_it_brings(home: Home, client: Client) -> None:
    seed = 80 + list(Form).index(home.form)  # as no other model has it: equal tensors are shared by all
    report = client.push(home.name, part(MLP, seed, "second.bias"), mode="patch")
    assert report["copied_bytes"] == nbytes(part(MLP, seed, "second.bias"))
    rest = {name: array for name, array in arrays(MLP, seed).items() if name != "second.bias"}
    client.push(home.name, rest, mode="patch")
    assert is_right(home, home.answer(client), seed)


def test_weights_that_do_not_fit_are_refused(home: Home, client: Client) -> None:
    before = home.answer(client)
    for bad in (np.zeros((4, 4), np.float32), np.zeros((4, 64), np.float64), np.zeros((64, 4), np.float32)):
        with refused(400, r"second\.weight"):
            client.push(home.name, {**arrays(MLP, 1), "second.weight": bad})
    after = home.answer(client)
    assert same_bits(after.outputs, before.outputs)
    assert after.generation == before.generation == 1


def test_state_of_a_torchscript_model_begins_with_the_weights_that_are_pushed(live: Live, client: Client) -> None:
    home = live.load(client, COUNTER, config=COUNTER_CONFIG, form=Form.SCRIPTED)
    assert [count(client, home) for _ in range(3)] == [1, 2, 3]
    pushed = {"step": np.full(1, 10, np.float32), "calls": np.full(1, 5, np.float32)}
    client.push(home.name, pushed)
    assert [count(client, home) for _ in range(3)] == [15, 25, 35]
    assert client.push(home.name, pushed)["outcome"] == "unchanged"
    client.push(home.name, {**pushed, "step": np.full(1, 100, np.float32)})
    assert [count(client, home) for _ in range(2)] == [105, 205]
    client.rollback(home.name)
    assert [count(client, home) for _ in range(2)] == [15, 25]
