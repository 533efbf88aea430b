"""What a server with live weights should do, in a few lines over dictionaries; and the small network it does it with.

A weight set is written as ``Values``: by slot, which of its values it has. Value 0 of a slot is all zeros; the others
are small whole numbers, with which float32 counts exactly, in whatever order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

Values = Mapping[str, int]
Floats = npt.NDArray[np.float32]

SHAPES = {"first.weight": (3, 4), "first.bias": (3,), "second.weight": (2, 3), "second.bias": (2,), "scale": (1,)}
REQUIRED = frozenset(SHAPES) - {"scale"}
IN_THE_MODEL_FILE: Values = dict.fromkeys(SHAPES, 1)


class Network(nn.Module):
    """Two layers, and a factor that is no part of the state dict: an optional slot."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(3, 2)
        self.register_buffer("scale", torch.zeros(1), persistent=False)
        with torch.no_grad():
            for name, tensor in (*self.named_parameters(), *self.named_buffers()):
                tensor.copy_(torch.from_numpy(array(name, IN_THE_MODEL_FILE[name])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.second(self.first(x)) * self.scale
        return scores


@functools.cache
def array(name: str, value: int) -> Floats:
    """That value of a slot."""
    if value == 0:
        return np.zeros(SHAPES[name], np.float32)
    random = np.random.default_rng([value, list(SHAPES).index(name)])
    numbers: Floats = random.integers(-3, 4, SHAPES[name]).astype(np.float32)
    numbers.flat[0] = 3 + value  # no two are alike
    return numbers


def arrays(values: Values) -> dict[str, Floats]:
    """The tensors of a weight set, or of a part of one."""
    return {name: array(name, value) for name, value in values.items()}


def answer(values: Values, x: Floats) -> Floats:
    """What :class:`Network` answers."""
    weights = arrays(values)
    hidden: Floats = x @ weights["first.weight"].T + weights["first.bias"]
    scores: Floats = (hidden @ weights["second.weight"].T + weights["second.bias"]) * weights["scale"]
    return scores


@dataclass(frozen=True)
class Generation:
    """A committed weight set."""

    number: int
    label: str
    values: Values


@dataclass
class Version:
    """One version of a model. ``keep``: ``WEIGHTS_KEEP_GENERATIONS``, None where it is not set.

    ``disk`` is what its weights file has, and None while that is no good; ``disk_is_new`` until the server has taken
    it. While it is not loaded, ``history`` is empty.
    """

    keep: int | None
    disk: Values | None = field(default_factory=lambda: IN_THE_MODEL_FILE)
    disk_label: str = ""
    disk_is_new: bool = False
    history: list[Generation] = field(default_factory=list)
    retained: list[Generation] = field(default_factory=list)

    @property
    def loaded(self) -> bool:
        return bool(self.history)

    @property
    def serving(self) -> Generation:
        return self.history[-1]

    def find(self, number: int) -> Generation | None:
        """The generation of that number, if its weights are still there."""
        return next((each for each in (*self.retained, self.serving) if each.number == number), None)

    def completed(self, sent: Values) -> Values | None:
        """``sent`` as a whole weight set, whose optional slots are as they serve; None when required ones lack."""
        return {"scale": self.serving.values["scale"], **sent} if sent.keys() >= REQUIRED else None

    def outcome(self, values: Values, *, dry_run: bool = False) -> str:
        """What comes of an update with these weights."""
        if values == self.serving.values:
            return "unchanged"
        return "valid" if dry_run else "committed"

    def commit(self, values: Values, label: str, *, retain: bool = True) -> None:
        """An update that is no dry run."""
        if values == self.serving.values:
            return
        if retain:
            keep = 1 if self.keep is None else self.keep
            self.retained = [*self.retained, self.serving][-keep:] if keep else []
        self.history.append(Generation(self.serving.number + 1, label, values))

    def roll_back(self, label: str) -> None:
        """To the newest of what is kept."""
        kept = self.retained.pop()
        self.commit(kept.values, label or kept.label, retain=False)

    def persist(self, values: Values, label: str) -> None:
        """The server has written them into the repository."""
        self.disk, self.disk_label, self.disk_is_new = values, label, False

    def publish(self, values: Values | None, label: str) -> None:
        """Somebody else has; None for a file that is no good."""
        self.disk = None if values is None else {**IN_THE_MODEL_FILE, **values}
        self.disk_label, self.disk_is_new = label, True

    def load(self) -> None:
        """Takes the weights file, which is good: as the first generation, or as a refit if it is new."""
        assert self.disk is not None
        if not self.loaded:
            self.history.append(Generation(1, self.disk_label, self.disk))
        elif self.disk_is_new:
            self.commit(self.disk, self.disk_label)
        self.disk_is_new = False

    def replace(self) -> None:
        """Loaded anew, with another configuration, beside what served until then; what was pushed comes along."""
        assert self.disk is not None
        pushed = not self.disk_is_new and self.serving.values != self.disk
        label, values = (self.serving.label, self.serving.values) if pushed else (self.disk_label, self.disk)
        self.history.append(Generation(self.serving.number + 1, label, values))
        self.retained = []
        self.disk_is_new = False

    def unload(self) -> None:
        """Everything that is not on the disk is forgotten."""
        self.history, self.retained = [], []


@dataclass
class Stage:
    """An open stage. ``sent`` is what has arrived, or, with ``shm``, what is in the region.

    ``base``: what served when it, or its present round, began. ``prepared``: what a commit will make serve, once that
    is settled, and ``prepared_for``: what served then.
    """

    version: Version
    patch: bool
    shm: bool
    base: Values
    sent: dict[str, int] = field(default_factory=dict)
    names: Iterable[str] | None = None
    prepared: Values | None = None
    prepared_for: Values | None = None
    is_open: bool = True

    def __post_init__(self) -> None:
        if self.shm:
            self.sent = dict.fromkeys(SHAPES, 0)

    @property
    def written(self) -> Values:
        """What counts as sent."""
        if not self.shm:
            return self.sent
        return {name: self.sent[name] for name in (REQUIRED if self.names is None else self.names)}

    def receive(self, weights: Values) -> None:
        """A file has come over the network; what was prepared is to be prepared anew."""
        self.sent.update(weights)
        self.prepared = None

    def weights(self) -> Values | None:
        """What would serve; None when something is missing."""
        return {**self.base, **self.written} if self.patch else self.version.completed(self.written)

    def prepare(self) -> bool:
        """Settles what a commit makes serve; False when something is missing."""
        self.prepared, self.prepared_for = self.weights(), self.version.serving.values
        return self.prepared is not None

    @property
    def of_other_weights(self) -> bool:
        """It is a patch of weights that do not serve any more."""
        return self.patch and self.base != self.version.serving.values

    @property
    def outdated(self) -> bool:
        """It was prepared with values that it was not sent, and which do not serve any more."""
        borrows = not self.patch and "scale" not in self.written
        return self.prepared is not None and borrows and self.prepared_for != self.version.serving.values

    def begin(self) -> None:
        """Another round, after a commit."""
        self.base = self.version.serving.values
        self.prepared = None
        if not self.shm:
            self.sent = {}
