"""The demo's real data and its small network: scikit-learn's handwritten digits, and a CNN that reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

MAX_BATCH_SIZE = 64


@dataclass(frozen=True, slots=True)
class Digits:
    """Images ``float32 [n, 1, 8, 8]`` in 0..1 and their labels ``int64 [n]``."""

    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


def load(held_out_share: float = 0.25, seed: int = 0) -> tuple[Digits, Digits]:
    """The 1797 images as (training, held-out) sets; the held-out ones are never trained on."""
    bunch = load_digits()
    images = (bunch.images / 16.0).astype(np.float32)[:, np.newaxis]
    labels = bunch.target.astype(np.int64)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=held_out_share, stratify=labels, random_state=seed
    )
    return Digits(train_x, train_y), Digits(test_x, test_y)


class DigitsNet(nn.Module):
    """Two convolutions and a linear layer; its batch norms have buffers that training changes as well."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, kernel_size=3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, kernel_size=3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(16 * 4 * 4, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Scores ``[n, 10]`` of images ``[n, 1, 8, 8]``."""
        scores: torch.Tensor = self.classifier(self.features(image).flatten(1))
        return scores


def export(net: DigitsNet, path: Path) -> None:
    """Writes ``net`` as a ``torch.export`` archive whose batch size may be 1 to ``MAX_BATCH_SIZE``."""
    net.eval()
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH_SIZE)
    program = torch.export.export(net, (torch.zeros(2, 1, 8, 8),), dynamic_shapes={"image": {0: batch}})
    torch.export.save(program, path)
