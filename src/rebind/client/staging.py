"""Stages: tensors on their way into a server, in its own memory where that can be reached, else in buffers of ours."""

from __future__ import annotations

import difflib
from functools import partial
from typing import TYPE_CHECKING, Any

from rebind.client.calls import abort, ask, commit, stage_path, weights
from rebind.client.files import TensorsBody
from rebind.client.messages import Locate, Request, Work, json_body
from rebind.client.region import Region
from rebind.client.tensors import BY_NAME, BufferTensor, total_nbytes
from rebind.errors import Fault, MemoryExceeded, NotFound, WeightsRefused
from rebind.tensor import format_shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from rebind.client.calls import Options, Target
    from rebind.client.messages import Conversation, Progress, Reply
    from rebind.client.results import SlotInfo, Update
    from rebind.client.tensors import WeightTensor

_WORK_BYTES = 16 << 20
"""Copied between two reports of progress."""


class _Buffers:
    """In place of a :class:`rebind.client.region.Region`, for a server elsewhere: memory of ours, taken when needed."""

    def __init__(self, slots: Sequence[SlotInfo]) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self.unread: AbstractSet[str] = frozenset()  # the server drops what it does not need
        self._memory: dict[str, memoryview] = {}

    def place(self, name: str) -> object:
        return self.slots[name].tied_to or name

    def tensor(self, name: str) -> BufferTensor:
        slot = self.slots[name]
        place = slot.tied_to or name
        element = BY_NAME[slot.dtype]
        if place not in self._memory:
            self._memory[place] = memoryview(bytearray(element.nbytes(slot.shape)))
        return BufferTensor(name, element, slot.shape, self._memory[place])


class OpenStage:
    """A stage at the server and the memory for its tensors.

    The slots whose memory anybody has asked for count as written, from round to round: they go into the weights.
    """

    def __init__(self, target: Target, document: Mapping[str, Any], memory: Region | _Buffers) -> None:
        self.path = stage_path(target, document)
        self.open = True
        self._memory = memory
        self._lease_s: float = document["lease_s"]
        self._written: dict[str, BufferTensor] = {}
        self._prepared = False

    @property
    def slots(self) -> Mapping[str, SlotInfo]:
        """The model's, by name."""
        return self._memory.slots

    @property
    def shared(self) -> bool:
        """Whether what is written is the server's memory."""
        return isinstance(self._memory, Region)

    def tensor(self, name: str) -> BufferTensor:
        """The memory of a slot, which counts as written from now on; ``KeyError``."""
        if name not in self.slots:
            near = difflib.get_close_matches(name, self.slots, n=1)
            raise KeyError(f"the model has no slot {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        if name not in self._written:
            self._written[name] = self._memory.tensor(name)
        return self._written[name]

    def begin(self) -> None:
        """Nothing counts as written any more."""
        self._written.clear()
        self._prepared = False

    def misfits(self, tensors: Sequence[WeightTensor]) -> list[Fault]:
        """What keeps ``tensors`` from being written as they are."""
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

    def write(self, tensors: Sequence[WeightTensor], progress: Progress | None) -> Conversation[None]:
        """Copies ``tensors``, each once; :class:`rebind.errors.WeightsRefused`, before any, if one does not fit."""
        faults = self.misfits(tensors)
        if faults:
            raise WeightsRefused("weights to stage", faults)
        once = {self._memory.place(tensor.name): tensor for tensor in reversed(tensors)}
        done, total = 0, total_nbytes(once.values())
        for batch in _batches(list(once.values())):
            yield Work(partial(self._copy, batch))
            done += total_nbytes(batch)
            if progress is not None:
                progress(done, total)

    def prepare(self) -> Conversation[None]:
        """Has the server check, copy and bind what was written: all but the swap. A commit then takes that."""
        names = sorted(self._written.keys() - self._memory.unread)
        if not self.shared:
            body = TensorsBody([self._written[name] for name in names])
            yield from self._ask(Request("PUT", self.path, body=body, repeatable=True))
        document = {"names": names} if self.shared else {}
        yield from self._ask(Request("POST", f"{self.path}/prepare", body=json_body(document), repeatable=True))
        self._prepared = True

    def commit(self, options: Options, *, keep: bool) -> Conversation[Update]:
        """What was written serves. The stage is over unless ``keep`` or a dry run."""
        if not self._prepared:
            yield from self.prepare()
        try:
            update = yield from commit(self.path, options, keep=keep)
        except NotFound as error:
            raise self._lapsed(error) from None
        self._prepared = options.dry_run
        self.open = keep or options.dry_run
        return update

    def abort(self) -> Conversation[None]:
        """Ends the stage, if it is open."""
        if self.open:
            self.open = False
            yield from abort(self.path)

    def _copy(self, tensors: Sequence[WeightTensor]) -> None:
        for tensor in tensors:
            tensor.copy_to(self.tensor(tensor.name).data())

    def _ask(self, request: Request) -> Conversation[Reply]:
        try:
            return (yield from ask(request, weights_sent=True))
        except NotFound as error:
            raise self._lapsed(error) from None

    def _lapsed(self, error: NotFound) -> NotFound:
        self.open = False
        return NotFound(
            f"{error}; a stage lapses {self._lease_s:g} s after its last call, at its time limit, and when the server "
            "restarts: open a new one"
        )


class Opening:
    """Opens stages for one client, which learns here whether it can share memory with the server."""

    def __init__(self) -> None:
        self._reachable = True

    def stage(self, target: Target, settings: Mapping[str, Any]) -> Conversation[OpenStage]:
        """A stage, in shared memory if that can be; ``settings`` are ``mode``, ``lease_s``, ``time_limit_s``."""
        stage = yield from self.shared_stage(target, settings)
        if stage is not None:
            return stage
        info = yield from weights(target, slots=True)
        document = yield from _post_stage(target, {**settings, "shm": False})
        return OpenStage(target, document, _Buffers(info.slots))

    def shared_stage(self, target: Target, settings: Mapping[str, Any]) -> Conversation[OpenStage | None]:
        """A stage in shared memory; None where the server is elsewhere, or has no memory to spare for a region."""
        if not (self._reachable and (yield Locate())):
            return None
        try:
            document = yield from _post_stage(target, {**settings, "shm": True})
        except MemoryExceeded:
            return None
        try:
            return OpenStage(target, document, Region(document["region"]))
        except OSError:
            self._reachable = False
            yield from abort(stage_path(target, document))
            return None


def _post_stage(target: Target, settings: Mapping[str, Any]) -> Conversation[Mapping[str, Any]]:
    reply = yield from ask(Request("POST", target.path("stages"), body=json_body(settings)))
    document: Mapping[str, Any] = reply.json()
    return document


def _batches(tensors: Sequence[WeightTensor]) -> Iterator[list[WeightTensor]]:
    """Runs of tensors, each of about as many bytes as are copied between two reports."""
    batch: list[WeightTensor] = []
    nbytes = 0
    for tensor in tensors:
        batch.append(tensor)
        nbytes += tensor.nbytes
        if nbytes >= _WORK_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
