"""Slots: the places in a plan where weight tensors go, and the check that a set of tensors fits them.

The check is complete before anything is read or touched, and reports every fault at once, since the engines accept
wrong shapes and dtypes and then answer wrongly or crash (``cases.md`` T3, T4).
"""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from rebind.errors import Fault, WeightsRefused
from rebind.tensor import format_shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

DTYPES: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "C64": 64,
        "F64": 64,
        "I64": 64,
        "U64": 64,
    }
)
"""safetensors' dtype names (all that its release 0.8 knows) and the bits of one element of each."""

NUMPY_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "BOOL": "|b1",
        "U8": "|u1",
        "I8": "|i1",
        "I16": "<i2",
        "U16": "<u2",
        "F16": "<f2",
        "I32": "<i4",
        "U32": "<u4",
        "F32": "<f4",
        "C64": "<c8",
        "F64": "<f8",
        "I64": "<i8",
        "U64": "<u8",
    }
)
"""numpy's names of those dtypes that it has, little-endian."""

_MOST_FAULTS = 100  # listed in one report; a wholly foreign file would otherwise give a message of megabytes
_MOST_HINTS = 20  # near matches are quadratic in the number and the length of names
_LONGEST_HINT = 200
_LONGEST_SHOWN = 120


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor; ``ValueError`` for an unknown dtype, or packed elements that end within a byte."""
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {shown(dtype)}")
    whole, rest = divmod(math.prod(shape) * DTYPES[dtype], 8)
    if rest:
        raise ValueError(f"{dtype} {format_shape(tuple(shape))} does not end at a byte")
    return whole


def shown(name: str) -> str:
    """A tensor's or file's name for a message: quoted, escaped and shortened, as names may be any string (W18)."""
    if len(name) <= _LONGEST_SHOWN:
        return repr(name)
    return f"{name[:_LONGEST_SHOWN]!r}... ({len(name)} characters)"


def refusal(subject: str, faults: Sequence[Fault]) -> WeightsRefused:
    """The error of ``faults``, at least one; of very many it lists a hundred and gives the number of the rest."""
    listed = list(faults[:_MOST_FAULTS])
    if len(faults) > _MOST_FAULTS:
        listed.append(Fault("", f"and {len(faults) - _MOST_FAULTS} more"))
    return WeightsRefused(subject, listed)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a weights file says of one tensor; ``nbytes`` follows from ``dtype`` and ``shape``.

    Not ``shaped``: the file tells only how many elements there are; ``shape`` is that one number.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    shaped: bool = True

    def fits(self, wanted: TensorInfo) -> bool:
        """Whether such a tensor can be taken for one that is described by ``wanted``, which has a shape."""
        if self.shaped:
            return self == wanted
        return (self.dtype, math.prod(self.shape)) == (wanted.dtype, math.prod(wanted.shape))

    def __str__(self) -> str:
        if self.shaped:
            return f"{self.dtype} {format_shape(self.shape)}"
        return f"{math.prod(self.shape)} elements of {self.dtype}"


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a plan for one weight tensor.

    ``name`` is its name in the model's state dict; ``dtype`` is safetensors' name of the dtype (``F32``, ``BF16``,
    ``I64``); the tensor is row-major. ``required``: a weights file must have it. An optional slot that the file lacks
    is filled from the model file (constants, non-persistent buffers). ``used``: the graph reads it; the value of an
    unused slot is accepted and dropped (``num_batches_tracked``). ``tied_to``: the slot whose tensor this one shares;
    a file may have either name, both must be equal if both are there.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    required: bool = True
    used: bool = True
    tied_to: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return tensor_nbytes(self.dtype, self.shape)

    @property
    def info(self) -> TensorInfo:
        """What a file must offer for this slot."""
        return TensorInfo(self.dtype, self.shape, self.nbytes)


@dataclass(frozen=True)
class SlotTable:
    """All slots of a plan, in the plan's order.

    Names are unique; ``tied_to`` names a slot of the table that is itself untied, of the same dtype and shape.
    ``ValueError`` otherwise. ``foreign`` is what the plan has to say of tensors without a slot, if anything.
    """

    slots: tuple[Slot, ...]
    foreign: str = ""

    def __post_init__(self) -> None:
        if len(self.by_name) != len(self.slots):
            raise ValueError("two slots have one name")
        for slot in self.slots:
            if slot.nbytes < 0:
                raise ValueError(f"slot {shown(slot.name)} has the shape {format_shape(slot.shape)}")
            if slot.tied_to is not None:
                self._require_tie(slot, self.by_name.get(slot.tied_to))

    @staticmethod
    def _require_tie(slot: Slot, target: Slot | None) -> None:
        if target is None or target.tied_to is not None or target.info != slot.info:
            raise ValueError(f"slot {shown(slot.name)} is tied to {slot.tied_to!r}, no untied slot of its kind")

    @cached_property
    def by_name(self) -> Mapping[str, Slot]:
        """The slots by their names."""
        return MappingProxyType({slot.name: slot for slot in self.slots})

    @cached_property
    def tensors(self) -> tuple[tuple[Slot, ...], ...]:
        """The slots of each distinct tensor, in the order of the table: the untied slot, then those tied to it."""
        groups = {slot.name: [slot] for slot in self.slots if slot.tied_to is None}
        for slot in self.slots:
            if slot.tied_to is not None:
                groups[slot.tied_to].append(slot)
        return tuple(map(tuple, groups.values()))

    @cached_property
    def used_tensors(self) -> tuple[tuple[Slot, ...], ...]:
        """Those of :attr:`tensors` that the graph reads by one of their slots."""
        return tuple(group for group in self.tensors if any(slot.used for slot in group))

    @cached_property
    def infos(self) -> Mapping[str, TensorInfo]:
        """What a file must offer for each slot."""
        return MappingProxyType({slot.name: slot.info for slot in self.slots})

    @property
    def nbytes(self) -> int:
        """Bytes of one weight set: every used tensor once, without padding."""
        return sum(group[0].nbytes for group in self.used_tensors)

    @cached_property
    def digest(self) -> str:
        """Hex blake3 over all that the table says, order included."""
        return blake3(json.dumps(self.to_json(), separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> list[dict[str, Any]]:
        """A JSON-ready form for plan manifests."""
        return [asdict(slot) | {"shape": list(slot.shape)} for slot in self.slots]

    @classmethod
    def from_json(cls, document: Sequence[Mapping[str, Any]]) -> SlotTable:
        """The inverse of :meth:`to_json`; ``ValueError`` or ``TypeError`` for anything else."""
        return cls(tuple(Slot(**{**entry, "shape": tuple(entry.get("shape", ()))}) for entry in document))


def check(
    slots: SlotTable,
    offered: Mapping[str, TensorInfo],
    subject: str,
    fallback: Mapping[str, TensorInfo] | None = None,
    *,
    partial: bool = False,
) -> None:
    """Refuses tensors that do not fit the slots; returns quietly when every slot can be filled.

    ``offered`` is what the weights file has, ``fallback`` what the model file has for optional slots. ``partial``: no
    slot is missing, as the others are filled from elsewhere. Raises :class:`WeightsRefused` with every missing,
    unexpected, and misfitting tensor. Ties and values need the bytes and are checked by the store.
    """
    fallback = fallback or {}
    unexpected = [name for name in offered if name not in slots.by_name]
    missing = list(_missing(slots, offered, fallback)) if unexpected or not partial else []
    if missing and not offered:
        remedy = "give a weights file that has them, beside the model file"
        raise refusal(subject, [Fault("", f"it has no tensors: missing all {len(missing)}", remedy)])
    if offered and slots.foreign and not slots.slots:
        raise refusal(subject, [Fault("", slots.foreign)])
    faults = [
        *_misfits(slots, offered),
        *(() if partial else _missing_faults(missing, fallback)),
        *_unexpected_faults(unexpected, missing),
    ]
    if unexpected and slots.foreign:
        faults.append(Fault("", slots.foreign))
    if faults:
        raise refusal(subject, faults)


def _missing(
    slots: SlotTable, offered: Mapping[str, TensorInfo], fallback: Mapping[str, TensorInfo]
) -> Iterator[tuple[Slot, ...]]:
    """The tensors that neither the file nor, for optional slots, a fitting entry of the model file fills."""
    for group in slots.tensors:
        if any(slot.name in offered for slot in group):
            continue
        optional = not any(slot.required for slot in group)
        unused = not any(slot.used for slot in group)
        if not (optional and (unused or any(_fits(fallback.get(slot.name), slot) for slot in group))):
            yield group


def _fits(info: TensorInfo | None, slot: Slot) -> bool:
    return info is not None and info.fits(slot.info)


def _missing_faults(missing: Iterable[tuple[Slot, ...]], fallback: Mapping[str, TensorInfo]) -> Iterator[Fault]:
    for first, *tied in missing:
        remedy = f"{' or '.join(shown(slot.name) for slot in tied)}, tied to it, will do as well" if tied else ""
        problem = f"missing, expected {first.info}"
        if first.name in fallback:
            problem += f" (the model file has {fallback[first.name]})"
        yield Fault(shown(first.name), problem, remedy)


def _misfits(slots: SlotTable, offered: Mapping[str, TensorInfo]) -> Iterator[Fault]:
    used = {slot.name for group in slots.used_tensors for slot in group}
    for name, info in offered.items():
        if name not in used or info.fits(slots.infos[name]):
            continue
        slot = slots.by_name[name]
        if slot.dtype == info.dtype and info.shaped:
            yield Fault(shown(name), f"expected shape {format_shape(slot.shape)}, got {format_shape(info.shape)}")
        elif slot.shape == info.shape:
            yield Fault(shown(name), f"expected dtype {slot.dtype}, got {info.dtype}")
        else:
            yield Fault(shown(name), f"expected {slot.info}, got {info}")


def _unexpected_faults(unexpected: Sequence[str], missing: Iterable[tuple[Slot, ...]]) -> Iterator[Fault]:
    wanted = [slot.name for group in missing for slot in group if len(slot.name) <= _LONGEST_HINT]
    for position, name in enumerate(unexpected):
        near: list[str] = []
        if position < _MOST_HINTS and len(name) <= _LONGEST_HINT:
            near = difflib.get_close_matches(name, wanted, n=1)
        remedy = f"did you mean {shown(near[0])}?" if near else ""
        yield Fault(shown(name), "unexpected: the model has no such slot", remedy)
