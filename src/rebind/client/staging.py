"""Stages: tensors on their way into a server, and the arrays that a user writes them into."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy.typing as npt

from rebind.client.bodies import TensorsBody, json_body
from rebind.client.calls import abort, commit, open_stage, send, stage_path, weights
from rebind.client.flow import CheckLocal, Request, Work
from rebind.client.slot_memory import Buffers, SharedRegion
from rebind.client.tensors import total_nbytes
from rebind.errors import Fault, MemoryExceeded, WeightsRefused
from rebind.tensor import format_shape

if TYPE_CHECKING:
    from rebind.client.bodies import Progress
    from rebind.client.calls import Target, UpdateOptions
    from rebind.client.flow import Flow
    from rebind.client.results import SlotInfo, Update
    from rebind.client.slot_memory import SlotMemory
    from rebind.client.tensors import BufferTensor, WeightTensor

View = TypeVar("View")

_BATCH_BYTES = 16 << 20
"""Tensors are copied in batches of about this size; progress is reported after each."""


class OpenStage:
    """A stage that the server has opened, and the memory for its tensors.

    A slot counts as written once its memory was asked for, until :meth:`clear`.
    """

    def __init__(self, target: Target, document: Mapping[str, Any], memory: SlotMemory) -> None:
        self.path = stage_path(target, document)
        self.open = True
        self._memory = memory
        self._written: dict[str, BufferTensor] = {}
        self._prepared = False

    @property
    def slots(self) -> Mapping[str, SlotInfo]:
        """The model's slots by name."""
        return self._memory.slots

    @property
    def shared(self) -> bool:
        """Whether the memory is the server's."""
        return isinstance(self._memory, SharedRegion)

    def tensor(self, name: str) -> BufferTensor:
        """The memory of a slot, which counts as written from now on; ``KeyError``."""
        if name not in self.slots:
            near = difflib.get_close_matches(name, self.slots, n=1)
            raise KeyError(f"the model has no slot {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        if name not in self._written:
            self._written[name] = self._memory.tensor(name)
        return self._written[name]

    def clear(self) -> None:
        """From now on no slot counts as written."""
        self._written.clear()
        self._prepared = False

    def misfits(self, tensors: Sequence[WeightTensor]) -> list[Fault]:
        """Why ``tensors`` cannot be written to the slots of their names; empty if they can."""
        faults = []
        at_place: dict[object, WeightTensor] = {}
        for tensor in tensors:
            slot = self.slots.get(tensor.name)
            if slot is None:
                faults.append(Fault(repr(tensor.name), "the model has no such slot"))
            elif (slot.dtype, slot.shape) != (tensor.element.name, tensor.shape):
                expected = f"{slot.dtype} {format_shape(slot.shape)}"
                got = f"{tensor.element.name} {format_shape(tensor.shape)}"
                faults.append(Fault(repr(tensor.name), f"expected {expected}, got {got}"))
            elif at_place.setdefault(self._memory.place(tensor.name), tensor).memory != tensor.memory:
                faults.append(Fault(repr(tensor.name), "is tied to another slot, for which there is another tensor"))
        return faults

    def write(self, tensors: Sequence[WeightTensor], progress: Progress | None) -> Flow[None]:
        """Copies ``tensors``, tied ones once; :class:`rebind.errors.WeightsRefused`, and none, if any does not fit."""
        faults = self.misfits(tensors)
        if faults:
            raise WeightsRefused("weights to stage", faults)
        untied = {self._memory.place(tensor.name): tensor for tensor in reversed(tensors)}.values()
        done, total = 0, total_nbytes(untied)
        for batch in _batches(list(untied)):
            yield Work(partial(self._copy, batch))
            done += total_nbytes(batch)
            if progress is not None:
                progress(done, total)

    def prepare(self) -> Flow[None]:
        """Sends what was written, unless it is in shared memory, and has the server check, copy and bind it."""
        names = sorted(self._written.keys() - self._memory.unsent)
        if not self.shared:
            tensors = TensorsBody([self._written[name] for name in names])
            yield from send(Request("PUT", self.path, body=tensors, idempotent=True), weights_sent=True)
        body = json_body({"names": names} if self.shared else {})
        yield from send(Request("POST", f"{self.path}/prepare", body=body, idempotent=True), weights_sent=True)
        self._prepared = True

    def commit(self, options: UpdateOptions, *, keep: bool) -> Flow[Update]:
        """Makes what was prepared serve; prepares first if need be. Ends the stage, unless ``keep`` or a dry run."""
        prepared = self._prepared
        if not prepared:
            yield from self.prepare()
            self._prepared = False  # only who has asked for it wants what is written later left out
        update = yield from commit(self.path, options, keep=keep)
        self._prepared = prepared and options.dry_run
        self.open = keep or options.dry_run
        return update

    def abort(self) -> Flow[None]:
        """Ends the stage, if it is open."""
        if self.open:
            self.open = False
            yield from abort(self.path)

    def _copy(self, tensors: Sequence[WeightTensor]) -> None:
        for tensor in tensors:
            tensor.copy_to(self.tensor(tensor.name).data())


class StageOpener:
    """Opens stages for one client. Remembers whether the server's memory can be mapped here."""

    def __init__(self) -> None:
        self._can_share = True

    def open(self, target: Target, settings: Mapping[str, Any]) -> Flow[OpenStage]:
        """Opens a stage, in shared memory if possible; ``settings``: ``mode``, ``lease_s``, ``time_limit_s``."""
        stage = yield from self.open_shared(target, settings)
        if stage is not None:
            return stage
        info = yield from weights(target, slots=True)
        document = yield from open_stage(target, {**settings, "shm": False})
        return OpenStage(target, document, Buffers(info.slots))

    def open_shared(self, target: Target, settings: Mapping[str, Any]) -> Flow[OpenStage | None]:
        """Opens a stage in shared memory; None if the server is elsewhere or has no memory to spare."""
        if not (self._can_share and (yield CheckLocal())):
            return None
        try:
            document = yield from open_stage(target, {**settings, "shm": True})
        except MemoryExceeded:
            return None
        try:
            return OpenStage(target, document, SharedRegion(document["region"]))
        except OSError:
            self._can_share = False
            yield from abort(stage_path(target, document))
            return None


class _Views(Mapping[str, View]):
    """One view of each slot's memory, made when it is asked for."""

    def __init__(self, stage: OpenStage, view: Callable[[BufferTensor], View]) -> None:
        self._stage = stage
        self._view = view

    def __getitem__(self, name: str) -> View:
        return self._view(self._stage.tensor(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._stage.slots)

    def __len__(self) -> int:
        return len(self._stage.slots)

    def __contains__(self, name: object) -> bool:
        return name in self._stage.slots


class StageViews(_Views[npt.NDArray[Any]]):
    """What both clients' stages have in common: a mapping of the model's slots to arrays."""

    def __init__(self, stage: OpenStage) -> None:
        super().__init__(stage, lambda tensor: tensor.array())

    def torch(self) -> Mapping[str, Any]:
        """The same memory as torch tensors of the slots' own dtypes: ``stage.torch()["fc.weight"].copy_(weight)``."""
        return _Views(self._stage, lambda tensor: tensor.torch())

    @property
    def slots(self) -> Mapping[str, SlotInfo]:
        """The model's slots by name: dtype, shape, and whether it is required."""
        return self._stage.slots

    @property
    def shared(self) -> bool:
        """True if the arrays are the server's own memory; else they are sent when the stage is prepared."""
        return self._stage.shared


def _batches(tensors: Sequence[WeightTensor]) -> Iterator[list[WeightTensor]]:
    batch: list[WeightTensor] = []
    nbytes = 0
    for tensor in tensors:
        batch.append(tensor)
        nbytes += tensor.nbytes
        if nbytes >= _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
