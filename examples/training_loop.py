"""A plain PyTorch loop that pushes its weights every few steps, and the same as a callback of Hugging Face's Trainer.

    python examples/training_loop.py                     # a few seconds; the served accuracy rises to 0.97
    python examples/training_loop.py --steps 96 --compile never
    python examples/training_loop.py --trainer           # needs `pip install transformers accelerate`

A small network learns to read scikit-learn's handwritten digits. After each push the server is asked about images that
the network never trained on, so what is printed is the accuracy of what is served.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import tritonclient.http as triton
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional

from rebind.client import WeightsClient
from serving import ask, export, serving

try:
    from transformers import TrainerCallback
except ImportError:  # only the Trainer needs it
    TrainerCallback = object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from rebind.client import Update

MODEL = "digits"
BATCH_SIZE = 64
LEARNING_RATE = 3e-4


class DigitsNet(nn.Module):
    """``float32 [n, 1, 8, 8]`` images to ``scores [n, 10]``."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(32 * 4 * 4, 10)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """The key becomes the name of the served model's output."""
        return {"scores": self.classifier(self.features(image).flatten(1))}


class PushWeights(TrainerCallback):
    """Pushes the model every ``every`` steps and at the end: ``Trainer(..., callbacks=[PushWeights(...)])``.

    ``after_push`` is called with what the server answered.
    """

    def __init__(
        self, client: WeightsClient, model_name: str, every: int, after_push: Callable[[Update], object] = print
    ) -> None:
        self._client, self._model_name, self._every, self._after_push = client, model_name, every, after_push

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Called by the Trainer after each step of the optimizer."""
        if state.global_step % self._every == 0:
            self._push(state, model)

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Called by the Trainer after the last step."""
        if state.global_step % self._every != 0:
            self._push(state, model)

    def on_save(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Called after each checkpoint: the server keeps these weights as well, for when it is started again."""
        self._push(state, model, persist=True)

    def _push(self, state: Any, model: nn.Module, *, persist: bool = False) -> None:
        if state.is_world_process_zero:
            label = f"step-{state.global_step}"
            self._after_push(self._client.push(self._model_name, model, label=label, persist=persist))


class Evaluator:
    """Measures the accuracy of the served network on held-out images after each push."""

    def __init__(self, url: str, images: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> None:
        self._server = triton.InferenceServerClient(url)
        self._images, self._labels = images, labels
        self.accuracies: list[float] = []

    def __call__(self, update: Update) -> None:
        """Asks about all of them; the answer must come from the weights of ``update`` or newer ones."""
        answer, parameters = ask(self._server, MODEL, self._images, min_weights_generation=update.generation)
        assert parameters["weights_generation"] == update.generation
        accuracy = float((answer["scores"].argmax(1) == self._labels).mean())
        self.accuracies.append(accuracy)
        label, refit_ms = parameters["weights_label"], update.durations_ms["total"]
        kept = "  persisted" if update.persisted else ""
        print(f"{label:>9}  generation {update.generation:3}  accuracy {accuracy:.3f}  refit {refit_ms:6.2f} ms{kept}")


def batches(images: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random batches without end."""
    while True:
        for rows in torch.randperm(len(images)).split(BATCH_SIZE):
            yield images[rows], labels[rows]


def train(
    net: DigitsNet,
    data: tuple[torch.Tensor, torch.Tensor],
    steps: int,
    every: int,
    client: WeightsClient,
    evaluate: Evaluator,
) -> None:
    """A plain training loop: pushing is one more line."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE)
    net.train()
    for step, (images, labels) in zip(range(1, steps + 1), batches(*data), strict=False):
        loss = functional.cross_entropy(net(images)["scores"], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % every == 0 or step == steps:
            evaluate(client.push(MODEL, net, label=f"step-{step}"))


def train_with_trainer(
    net: DigitsNet, data: tuple[torch.Tensor, torch.Tensor], steps: int, callback: PushWeights
) -> None:
    """The same training by Hugging Face's Trainer."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output,
            label_names=["labels"],
            max_steps=steps,
            per_device_train_batch_size=BATCH_SIZE,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            save_steps=steps // 2,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        examples = [{"image": image, "labels": label} for image, label in zip(*data, strict=True)]
        Trainer(net, arguments, train_dataset=examples, compute_loss_func=_loss, callbacks=[callback]).train()


def _loss(outputs: dict[str, torch.Tensor], labels: torch.Tensor, **_: Any) -> torch.Tensor:
    return functional.cross_entropy(outputs["scores"], labels)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--push-every", type=int, default=16)
    parser.add_argument("--trainer", action="store_true", help="train with Hugging Face's Trainer")
    parser.add_argument("--compile", default="background", help="when the server compiles the network: `never` if not")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[:, np.newaxis]
    train_x, test_x, train_y, test_y = train_test_split(images, digits.target, stratify=digits.target, random_state=0)
    data = torch.from_numpy(train_x), torch.from_numpy(train_y)
    net = DigitsNet()
    with tempfile.TemporaryDirectory() as repository:
        export(net.eval(), torch.zeros(2, 1, 8, 8), Path(repository, MODEL), max_batch_size=512)
        with serving(Path(repository), f"--compile={arguments.compile}") as url, WeightsClient(url) as client:
            evaluator = Evaluator(url, test_x, test_y)
            if arguments.trainer:
                callback = PushWeights(client, MODEL, arguments.push_every, after_push=evaluator)
                train_with_trainer(net, data, arguments.steps, callback)
            else:
                train(net, data, arguments.steps, arguments.push_every, client, evaluator)
    first, *_, last = evaluator.accuracies
    print(f"served accuracy: {first:.3f} after the first push, {last:.3f} after the last")


if __name__ == "__main__":
    main()
