"""Staging: weights from anywhere are checked, brought into the store, bound to a plan, and tried out.

The blocking part of loads, refits and pushes. It runs on threads beside the serving ones and touches nothing that
serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rebind.repository.manifest import published_label
from rebind.serving.canary import run_checks
from rebind.weights.formats import open_weights
from rebind.weights.in_memory import MemorySource, StoredSource
from rebind.weights.names import renamed
from rebind.weights.slots import shown
from rebind.weights.store import PutResult

if TYPE_CHECKING:
    from pathlib import Path

    from rebind.config.model import ModelConfig
    from rebind.engines.contract import BoundPlan, Graph, Plan
    from rebind.repository.versions import VersionSource
    from rebind.serving.generation import Generation
    from rebind.serving.signature import Signature
    from rebind.weights.reception import Reception
    from rebind.weights.source import WeightsSource
    from rebind.weights.store import WeightSet, WeightStore

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Target:
    """What weights are staged for: a version that serves, or is being loaded."""

    config: ModelConfig
    graph: Graph
    signature: Signature
    model_dir: Path


@dataclass(frozen=True, slots=True)
class Staged:
    """A weight set that was read, checked and bound, and does not serve yet.

    ``bounds`` has a bound plan for each instance, see :class:`rebind.serving.generation.Generation`; none where the
    same weights serve. ``label``: as published, or "". ``serving_digest``: of what served when they were staged.
    """

    put: PutResult
    bounds: tuple[BoundPlan, ...]
    label: str = ""
    serving_digest: str = ""

    @property
    def digest(self) -> str:
        """Names the weights."""
        return self.put.weights.digest


class Stager:
    """Puts weights into the store, binds them, and runs the model's checks on them. Thread-safe; every call blocks.

    Weights that turn out to be those of ``serving_digest`` are not bound. All raise
    :class:`rebind.errors.WeightsRefused` with what is wrong, and then leave nothing behind.
    """

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    def from_files(self, target: Target, plan: Plan, source: VersionSource, serving_digest: str = "") -> Staged:
        """The weights of ``source``.

        The label belongs to the very bytes that were read: when the file is replaced meanwhile, it is read again.
        """
        while True:
            label = published_label(source.weights_file)
            put = self._put_files(target, source)
            if published_label(source.weights_file) == label:
                return self.bound(target, plan, put, serving_digest, label)

    def from_serving(self, target: Target, plan: Plan, serving: Generation) -> Staged:
        """The weights that serve already, for another load of their version."""
        put = PutResult(serving.weights, 0, serving.weights.nbytes, ())
        return self.bound(target, plan, put, label=serving.label)

    def put_sent(self, target: Target, source: WeightsSource, serving: WeightSet | None, *, patch: bool) -> PutResult:
        """Tensors that a client has sent; what it did not send is as it serves, see :class:`.updates.Mode`."""
        if patch:
            named, slots = renamed(source, target.graph.slots), target.graph.slots
            return self._store.put(slots, named, base=serving, allow_non_finite=target.config.allow_non_finite_weights)
        with _fallback(target, serving) as fallback:
            return self.put_source(target, source, fallback)

    def finish(self, target: Target, reception: Reception, serving: WeightSet | None) -> PutResult:
        """As :meth:`put_sent`, for tensors that are in memory already."""
        with _fallback(target, serving) as fallback:
            return reception.finish(fallback, allow_non_finite=target.config.allow_non_finite_weights)

    def put_source(self, target: Target, source: WeightsSource, fallback: WeightsSource) -> PutResult:
        """Tensors for all required slots, with what is optional and absent from ``fallback``."""
        return self._store.put(
            target.graph.slots,
            renamed(source, target.graph.slots),
            fallback,
            allow_non_finite=target.config.allow_non_finite_weights,
        )

    def examine(self, target: Target, source: WeightsSource, fallback: WeightsSource) -> str:
        """The digest that :meth:`put_source` would find; everything is checked and nothing stored."""
        return self._store.examine(
            target.graph.slots,
            renamed(source, target.graph.slots),
            fallback,
            allow_non_finite=target.config.allow_non_finite_weights,
        )

    def bound(self, target: Target, plan: Plan, put: PutResult, serving_digest: str = "", label: str = "") -> Staged:
        """Binds stored weights to ``plan``, and tries them out on the model's ``weights_check``."""
        if put.weights.digest == serving_digest:
            return Staged(put, (), label, serving_digest)
        bounds = self.bind(target, plan, put.weights)
        run_checks(target.model_dir, target.signature, bounds[0])
        return Staged(put, bounds, label, serving_digest)

    def bind(self, target: Target, plan: Plan, weights: WeightSet) -> tuple[BoundPlan, ...]:
        """What each instance runs: one bound plan for all, or each its own on a copy of the weights."""
        bounds, instances = [plan.bind(weights)], len(target.config.instance_names)
        if target.graph.shares_weights:
            return tuple(bounds * instances)
        while len(bounds) < instances:
            bounds.append(plan.bind(self._store.copy(weights)))
        return tuple(bounds)

    def _put_files(self, target: Target, source: VersionSource) -> PutResult:
        with target.graph.embedded_weights() as embedded:
            if source.weights_file is None:
                allow_non_finite = target.config.allow_non_finite_weights
                return self._store.put(target.graph.slots, embedded, allow_non_finite=allow_non_finite)
            with open_source(source, target.graph) as weights:
                return self.put_source(target, weights, embedded)


def open_source(source: VersionSource, graph: Graph) -> WeightsSource:
    """The weights of a version as they lie on the disk: in its weights file, or else in its model file."""
    return graph.embedded_weights() if source.weights_file is None else open_weights(source.weights_file)


def has_weights(graph: Graph, source: VersionSource) -> bool:
    """Whether there is anything to load: a weights file, or one of the required tensors in the model file."""
    required = [slot.name for slot in graph.slots.slots if slot.required]
    if source.weights_file is not None or not required:
        return True
    with graph.embedded_weights() as embedded:
        return any(name in embedded.tensors for name in required)


def keeps_values(graph: Graph) -> bool:
    """Whether there are slots that clients may leave out, and that then keep the values that serve."""
    return any(slot.used and not slot.required for slot in graph.slots.slots)


def kept_values(target: Target, serving: WeightSet | None) -> WeightsSource:
    """Copies of the values of optional slots, for a refit that has to let ``serving`` go before it is done."""
    with _fallback(target, serving) as source:
        optional = {slot.name for slot in target.graph.slots.slots if slot.used and not slot.required}
        copies = {}
        for name in optional & source.tensors.keys():
            buffer = memoryview(bytearray(source.tensors[name].nbytes))
            source.read_into(name, 0, buffer)
            copies[name] = (source.tensors[name], buffer)
        return MemorySource(source.subject, copies)


def _fallback(target: Target, serving: WeightSet | None) -> WeightsSource:
    """Where optional slots come from that a client does not send: what serves, else the model file."""
    if serving is None:
        return target.graph.embedded_weights()
    return StoredSource("the weights that serve", serving)


def borrowed_note(put: PutResult) -> str:
    """For a line of the log: which weights are the model file's own, as the weights file lacks them; else ""."""
    if not put.borrowed:
        return ""
    named = ", ".join(map(shown, put.borrowed[:_MOST_NAMED]))
    more = len(put.borrowed) - _MOST_NAMED
    return f"; from the model file: {named}" + (f" and {more} more" if more > 0 else "")
