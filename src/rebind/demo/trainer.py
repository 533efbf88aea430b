"""The demo's training process: ``python -m rebind.demo.trainer WORK_DIR --refits N --seconds S``.

1. writes the untrained network into the repository, and the held-out images where the client finds them;
2. prints ``{"exported": ...}`` and waits for a line on stdin, while the server starts;
3. trains; every few steps it publishes the weights, and prints ``{"published": ...}``.

The training itself takes a second; it is spread over the demo's minute, so that there is something to see.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional

from rebind.demo.digits import Digits, DigitsNet, export, load
from rebind.demo.layout import Layout
from rebind.demo.timeline import Publication
from rebind.repository.publish import publish

if TYPE_CHECKING:
    from collections.abc import Iterator

TRAINING_STEPS = 288
"""Enough for an accuracy of 0.97 on the held-out images."""
BATCH_SIZE = 64
LEARNING_RATE = 0.003
"""Small, so that the accuracy climbs over several publications."""


def training_steps(net: DigitsNet, digits: Digits, seed: int = 0) -> Iterator[float]:
    """Trains ``net`` in place without end; yields the loss after each step."""
    generator = np.random.default_rng(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=0.9)
    while True:
        chosen = generator.choice(len(digits.images), BATCH_SIZE, replace=False)
        images, labels = torch.from_numpy(digits.images[chosen]), torch.from_numpy(digits.labels[chosen])
        net.train()
        loss = functional.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield loss.item()


def publish_weights(net: DigitsNet, layout: Layout, step: int, loss: float) -> Publication:
    """Puts the network's weights of now into the repository, as weights of the served version."""
    save_file(net.state_dict(), layout.fresh_weights)
    label = f"step-{step}"
    publish(layout.fresh_weights, layout.model, version=layout.version, label=label)
    return Publication(label=label, step=step, loss=loss, published_at=time.time())


def train(net: DigitsNet, digits: Digits, layout: Layout, publications: int, seconds: float) -> None:
    """Trains for ``TRAINING_STEPS``, and publishes ``publications`` times on the way, evenly over ``seconds``."""
    losses = training_steps(net, digits)
    steps = max(1, round(TRAINING_STEPS / publications))
    begin = time.monotonic()
    for number in range(1, publications + 1):
        loss = next(itertools.islice(losses, steps - 1, None))
        time.sleep(max(0.0, begin + number * seconds / publications - time.monotonic()))
        publication = publish_weights(net, layout, number * steps, loss)
        tell({"published": asdict(publication)})


def tell(event: dict[str, object]) -> None:
    """One event as one line of JSON."""
    print(json.dumps(event), flush=True)


def main() -> int:
    """The process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--refits", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layout = Layout(arguments.work_dir)
    training, held_out = load()
    net = DigitsNet()
    layout.plan_file.parent.mkdir(parents=True)
    export(net, layout.plan_file)
    np.savez(layout.held_out, images=held_out.images, labels=held_out.labels)
    tell({"exported": str(layout.plan_file)})
    if sys.stdin.readline():
        train(net, training, layout, arguments.refits, arguments.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
