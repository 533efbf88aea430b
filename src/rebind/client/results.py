"""What calls about weights return: the server's JSON as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Update:
    """What became of a push, a commit or a rollback.

    ``outcome``: ``committed``; ``unchanged`` when the weights are those that serve already, so that nothing was done
    (``generation`` and ``label`` are those that serve); ``valid`` for a dry run that would have been accepted.
    ``received_bytes`` came over the network; ``copied_bytes`` are those that the server stored, ``shared_bytes`` those
    that it had already. ``durations_ms``: ``receive``, ``stage``, ``persist``, ``commit``, ``total``.
    """

    model: str
    version: int
    outcome: str
    generation: int
    label: str
    digest: str
    copied_bytes: int
    shared_bytes: int
    received_bytes: int
    persisted: bool
    durations_ms: Mapping[str, float]

    @property
    def committed(self) -> bool:
        """Whether a new generation serves."""
        return self.outcome == "committed"

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Update:
        """Of the server's report; keys that are not known are left out."""
        return cls(
            model=document["model_name"],
            version=int(document["model_version"]),
            outcome=document["outcome"],
            generation=document["generation"],
            label=document["label"],
            digest=document["digest"],
            copied_bytes=document["copied_bytes"],
            shared_bytes=document["shared_bytes"],
            received_bytes=document["received_bytes"],
            persisted=document["persisted"],
            durations_ms=dict(document["durations_ms"]),
        )


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """One line of a version's history: ``cause`` made ``generation`` serve. ``committed_at``: seconds of the epoch."""

    generation: int
    label: str
    digest: str
    cause: str
    committed_at: float
    refit_ms: float
    copied_bytes: int
    shared_bytes: int

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> GenerationRecord:
        """Of an entry of the server's ``history``."""
        return cls(**{name: document[name] for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """A place for one weight tensor: its name in the state dict, safetensors' name of its dtype, its shape.

    ``required``: a full set must have it. ``used``: the graph reads it; the value of another one is accepted and
    dropped. ``tied_to``: the slot whose tensor this one shares, if any.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    required: bool = True
    used: bool = True
    tied_to: str | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SlotInfo:
        """Of an entry of the server's ``slots``, of the weights or of a region."""
        return cls(
            name=document["name"],
            dtype=document["dtype"],
            shape=tuple(document["shape"]),
            required=document.get("required", True),
            used=document.get("used", True),
            tied_to=document.get("tied_to"),
        )


@dataclass(frozen=True, slots=True)
class WeightsInfo:
    """The weights of a version that serve, and which did.

    ``state``: ``SERVING``, ``STAGING``, ``COMMITTING``, ``PENDING`` (none yet; generation 0) or ``PAGED``.
    ``retained``: the generations that a rollback or a request can still ask for. ``refusal``: why the newest weights in
    the repository do not serve, if so. ``history`` is in the order of time. ``slots`` is empty unless asked for.
    """

    model: str
    version: int
    generation: int
    label: str
    digest: str
    state: str
    total_bytes: int
    shared_bytes: int
    plan_key: str
    tier: str
    refusal: str | None = None
    retained: tuple[int, ...] = ()
    history: tuple[GenerationRecord, ...] = ()
    slots: tuple[SlotInfo, ...] = field(default=(), repr=False)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> WeightsInfo:
        """Of the body of ``GET .../weights``; keys that are not known are left out."""
        return cls(
            model=document["model_name"],
            version=int(document["model_version"]),
            generation=document["generation"],
            label=document["label"],
            digest=document["digest"],
            state=document["state"],
            total_bytes=document["bytes"]["total"],
            shared_bytes=document["bytes"]["shared"],
            plan_key=document["plan_key"],
            tier=document["tier"],
            refusal=document.get("refusal"),
            retained=tuple(document.get("retained", ())),
            history=tuple(map(GenerationRecord.from_json, document["history"])),
            slots=tuple(map(SlotInfo.from_json, document.get("slots", ()))),
        )


@dataclass(frozen=True, slots=True)
class Pulled:
    """Weights that were downloaded: the file, its size, and which generation it holds."""

    path: Path
    nbytes: int
    generation: int
    digest: str
