"""LoRA adapters that are merged as they are pushed: only the adapted layers travel and are stored.

    python examples/lora.py                              # a few seconds on one core
    python examples/lora.py --steps 20 --compile never

One graph is served, that of the base model. Two adapters are trained for images that the base model cannot read:
inverted ones, and transposed ones. To switch the server to an adapter, the layers that it changes are merged,
``W + scale * B @ A``, and pushed as a patch; all other tensors stay those that the server has. To switch back to the
previous adapter copies nothing, because the server keeps it for a rollback. Inference is as fast as without adapters.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import tritonclient.http as triton
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional

from rebind.client import WeightsClient
from serving import ask, export, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rebind.client import Update

MODEL = "digits"
WIDTH = 512
ADAPTED = ["embed", "hidden.0"]
"""Both adapters change the same layers, so that one replaces the other whole."""
TASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "base": lambda images: images,
    "inverted": lambda images: 1 - images,
    "transposed": lambda images: images.transpose(1, 2),
}


class Reader(nn.Module):
    """The base model: ``float32 [n, 8, 8]`` images to ``scores [n, 10]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, WIDTH)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.classifier = nn.Linear(WIDTH, 10)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """The key becomes the name of the served model's output."""
        values = functional.relu(self.embed(image.flatten(1)))
        for layer in self.hidden:
            values = values + functional.relu(layer(values))
        return {"scores": self.classifier(values)}


class LoRA(nn.Module):
    """A frozen linear layer with a trainable change of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 16, alpha: float = 32.0) -> None:
        super().__init__()
        self.base = base
        self.A = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Not merged yet, the change costs two more matrix products."""
        change: torch.Tensor = functional.linear(functional.linear(values, self.A), self.B)
        return self.base(values) + self.scale * change

    def merged(self) -> torch.Tensor:
        """The one matrix that has the same effect."""
        return (self.base.weight + self.scale * self.B @ self.A).detach()


def with_adapter(base: Reader) -> Reader:
    """A copy of ``base`` in which nothing but new adapters can be trained."""
    adapted = copy.deepcopy(base).requires_grad_(False)
    for name in ADAPTED:
        layer = adapted.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        adapted.set_submodule(name, LoRA(layer))
    return adapted


def merged_weights(adapted: Reader) -> dict[str, torch.Tensor]:
    """The patch: the adapted layers' matrices, under their names in the served graph."""
    return {f"{name}.weight": layer.merged() for name, layer in adapted.named_modules() if isinstance(layer, LoRA)}


def batches(images: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random batches without end."""
    while True:
        for rows in torch.randperm(len(images)).split(64):
            yield images[rows], labels[rows]


def train(net: Reader, images: torch.Tensor, labels: torch.Tensor, steps: int) -> None:
    """Trains what can be trained."""
    optimizer = torch.optim.AdamW([weight for weight in net.parameters() if weight.requires_grad], lr=2e-3)
    for _, (some_images, some_labels) in zip(range(steps), batches(images, labels), strict=False):
        loss = functional.cross_entropy(net(some_images)["scores"], some_labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Evaluator:
    """Measures the accuracy of the served model on held-out images in all three forms."""

    def __init__(self, url: str, images: torch.Tensor, labels: torch.Tensor) -> None:
        self._server = triton.InferenceServerClient(url)
        self._images, self._labels = images, labels
        print(f"{'pushed':>12}{'copied bytes':>14}{'shared bytes':>14}" + "".join(f"{task:>12}" for task in TASKS))

    def __call__(self, name: str, update: Update, expected: Reader) -> None:
        """Prints the accuracies by task; the served scores must be those of ``expected``, computed here."""
        accuracies = []
        for form in TASKS.values():
            images = form(self._images)
            answer, parameters = ask(self._server, MODEL, images.numpy(), min_weights_generation=update.generation)
            assert parameters["weights_generation"] == update.generation
            with torch.no_grad():
                scores = expected(images)["scores"].numpy()
            np.testing.assert_allclose(answer["scores"], scores, rtol=1e-4, atol=1e-4)
            accuracies.append(float((answer["scores"].argmax(1) == self._labels.numpy()).mean()))
        columns = "".join(f"{accuracy:12.3f}" for accuracy in accuracies)
        print(f"{name:>12}{update.copied_bytes:14,}{update.shared_bytes:14,}{columns}")


def serve_adapters(
    client: WeightsClient, base: Reader, data: tuple[torch.Tensor, torch.Tensor], evaluate: Evaluator, steps: int
) -> None:
    """Trains and pushes the base model and each adapter, and then switches between the adapters."""
    images, labels = data
    train(base, images, labels, steps)
    full = client.push(MODEL, base, label="base")
    evaluate("base", full, base)

    patches: dict[str, dict[str, torch.Tensor]] = {}
    updates: dict[str, Update] = {}
    for task in ["inverted", "transposed"]:
        adapted = with_adapter(base)
        train(adapted, TASKS[task](images), labels, steps)
        patches[task] = merged_weights(adapted)
        updates[task] = client.push(MODEL, patches[task], label=task, mode="patch")
        evaluate(task, updates[task], adapted)

    copied_again = 0
    for task, patch in patches.items():
        merged = copy.deepcopy(base)
        merged.load_state_dict(base.state_dict() | patch)
        update = client.push(MODEL, patch, label=task, mode="patch")
        evaluate(task, update, merged)
        assert update.digest == updates[task].digest
        copied_again += update.copied_bytes
    share = updates["inverted"].copied_bytes / full.copied_bytes
    print(f"an adapter: {share:.0%} of the bytes of a full push; the two once more: {copied_again} bytes")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of training, for the base model and for each adapter")
    parser.add_argument("--compile", default="background", help="when the server compiles the network: `never` if not")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, stratify=labels, random_state=0)
    base = Reader()
    with tempfile.TemporaryDirectory() as repository:
        export(base, torch.zeros(2, 8, 8), Path(repository, MODEL), max_batch_size=512)
        with serving(Path(repository), f"--compile={arguments.compile}") as url, WeightsClient(url) as client:
            serve_adapters(client, base, (train_x, train_y), Evaluator(url, test_x, test_y), arguments.steps)


if __name__ == "__main__":
    main()
