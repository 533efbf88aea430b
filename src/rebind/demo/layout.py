"""Where the demo's processes find each other's files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Layout:
    """The files below a demo's working directory."""

    work_dir: Path

    model_name = "digits"
    version = 1

    @property
    def repository(self) -> Path:
        """What the server watches."""
        return self.work_dir / "models"

    @property
    def model(self) -> Path:
        """The model's directory; it needs no ``config.pbtxt``."""
        return self.repository / self.model_name

    @property
    def plan_file(self) -> Path:
        """The exported network, with its untrained weights inside."""
        return self.model / str(self.version) / "model.pt2"

    @property
    def fresh_weights(self) -> Path:
        """Where the trainer writes weights before it publishes them."""
        return self.work_dir / "fresh.safetensors"

    @property
    def held_out(self) -> Path:
        """Images and labels for the client."""
        return self.work_dir / "held_out.npz"

    def log(self, process: str) -> Path:
        """What ``process`` wrote on stderr."""
        return self.work_dir / f"{process}.log"
