from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rebind.demo.digits import Digits, DigitsNet, export, load
from rebind.demo.layout import Layout
from rebind.demo.trainer import TRAINING_STEPS, publish_weights, train, training_steps
from rebind.repository.manifest import read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the trainer's process; threads that wait for each other are many times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def net() -> DigitsNet:
    torch.manual_seed(0)
    return DigitsNet()


@pytest.fixture
def layout(tmp_path: Path, net: DigitsNet) -> Layout:
    """A working directory whose repository holds the untrained network."""
    layout = Layout(tmp_path)
    layout.plan_file.parent.mkdir(parents=True)
    export(net, layout.plan_file)
    return layout


def accuracy(net: DigitsNet, digits: Digits) -> float:
    net.eval()
    with torch.inference_mode():
        guesses = net(torch.from_numpy(digits.images)).argmax(dim=1).numpy()
    return float((guesses == digits.labels).mean())


def test_held_out_images_are_not_trained_on() -> None:
    training, held_out = load()

    assert len(training.images) + len(held_out.images) == 1797
    # A few digits of the data set are pixel for pixel the same; the sets do not share more than those.
    seen = {image.tobytes() for image in training.images}
    assert sum(image.tobytes() in seen for image in held_out.images) <= 5
    assert set(held_out.labels) == set(range(10))
    assert held_out.images.dtype == np.float32
    assert (held_out.images.min(), held_out.images.max()) == (0.0, 1.0)


def test_training_reaches_more_than_the_demo_asks_for(net: DigitsNet) -> None:
    training, held_out = load()
    assert accuracy(net, held_out) < 0.3

    losses = list(itertools.islice(training_steps(net, training), TRAINING_STEPS))

    assert losses[-1] < losses[0] / 5
    assert accuracy(net, held_out) > 0.96


def test_published_weights_are_those_of_the_network_buffers_included(net: DigitsNet, layout: Layout) -> None:
    training, _ = load()
    next(training_steps(net, training))

    publication = publish_weights(net, layout, step=1, loss=2.0)

    weights_file = layout.model / "1" / "model.safetensors"
    weights = load_file(weights_file)
    assert all(torch.equal(weights[name], tensor) for name, tensor in net.state_dict().items())
    assert weights["features.1.running_mean"].any()
    manifest = read_manifest(weights_file)
    assert manifest is not None
    assert manifest.label == publication.label == "step-1"


def test_publications_are_spread_over_the_time_and_the_training(
    net: DigitsNet, layout: Layout, capsys: pytest.CaptureFixture[str]
) -> None:
    training, _ = load()

    train(net, training, layout, publications=4, seconds=0.4)

    steps = [int(line.split('"step": ')[1].split(",")[0]) for line in capsys.readouterr().out.splitlines()]
    assert steps == [TRAINING_STEPS // 4 * number for number in (1, 2, 3, 4)]
