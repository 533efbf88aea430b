"""The results of calls about weights: the server's JSON as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Update:
    """The result of a push, a commit or a rollback.

    ``outcome``: ``"committed"``; ``"unchanged"`` if equal weights served already, so that nothing was done and
    ``generation`` and ``label`` are theirs; ``"valid"`` for a dry run that succeeded. ``received_bytes`` came over the
    network; ``copied_bytes`` were stored anew, ``shared_bytes`` were in the server's memory already. Keys of
    ``durations_ms``: ``receive``, ``stage``, ``persist``, ``commit``, ``total``.
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
        """True if a new generation serves."""
        return self.outcome == "committed"

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Update:
        """From the server's report; ignores keys that it does not know."""
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
    """One generation in a version's history. ``cause``: what made it serve, such as ``push``.

    ``committed_at`` is in seconds since the epoch.
    """

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
        """From an entry of the server's ``history``."""
        return cls(**{name: document[name] for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """A slot: the place of one weight tensor in a model.

    ``name`` is its name in the state dict; ``dtype`` is safetensors' name of its element type, such as ``F32``.
    ``required``: a full set of weights must have it. ``used``: the model reads it; the value of a slot that it does not
    read is accepted and dropped. ``tied_to``: the slot that it shares its tensor with, if any.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    required: bool = True
    used: bool = True
    tied_to: str | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SlotInfo:
        """From an entry of the server's ``slots``, of the weights or of a stage's region."""
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
    """The weights that a version of a model serves, and its history.

    ``state``: ``SERVING``, ``STAGING``, ``COMMITTING``, ``PENDING`` (no weights yet; generation 0) or ``PAGED`` (out of
    memory until the next request). ``retained``: the generations that can be rolled back to, or asked for by a request.
    ``refusal``: why the newest weights in the repository were refused, if they were. ``history``: oldest first.
    ``slots``: empty unless asked for.
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
        """From the body of ``GET .../weights``; ignores keys that it does not know."""
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
    """A file of downloaded weights: its size, and the generation and digest of its weights."""

    path: Path
    nbytes: int
    generation: int
    digest: str
