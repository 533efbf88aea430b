"""Turning files of a repository into something that answers: the blocking part of loads and refits.

Everything here runs on loader threads and touches nothing that serves.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rebind.config.complete import DEFAULT_MAX_BATCH_SIZE, GraphFacts, complete, skipped_note
from rebind.config.model import ModelConfig, intra_op_thread_count
from rebind.config.server import CompileMode
from rebind.repository.manifest import published_label
from rebind.serving.compiling import log_stages
from rebind.serving.signature import Signature
from rebind.serving.wanted import model_options
from rebind.weights.formats import open_weights
from rebind.weights.names import renamed
from rebind.weights.slots import shown

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rebind.config.schema import ConfigMessage
    from rebind.config.server import ServerConfig
    from rebind.engines.contract import BoundPlan, Engine, EngineOptions, Graph, Plan
    from rebind.repository.versions import VersionSource
    from rebind.weights.store import PutResult, WeightSet, WeightStore

_log = logging.getLogger(__name__)

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Staged:
    """A weight set that was read, checked and bound, and does not serve yet.

    ``bounds`` has a bound plan for each instance, see :class:`rebind.serving.version.Generation`; none where the same
    weights serve. ``label``: as published, or "".
    """

    put: PutResult
    bounds: tuple[BoundPlan, ...]
    label: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A version that could serve."""

    source: VersionSource
    config: ModelConfig
    graph: Graph
    signature: Signature
    staged: Staged
    load_ms: float


class Loader:
    """Opens graphs, puts weights into the store, binds. Thread-safe."""

    def __init__(
        self,
        config: ServerConfig,
        store: WeightStore,
        find_engine: Callable[[Path, ConfigMessage], Engine],
        options: EngineOptions,
    ) -> None:
        self._config = config
        self._store = store
        self._find_engine = find_engine
        self._options = options
        self._exempt_modules = 0

    def open(self, name: str, written: ConfigMessage, source: VersionSource) -> Graph:
        """Opens the plan file of ``source``; ``written`` is the model's configuration before completion."""
        engine = self._find_engine(source.plan_file, written)
        threads = intra_op_thread_count(written) or self._options.intra_op_threads
        model = model_options(name, written, engine.backend)
        return engine.open(source.plan_file, replace(self._options, intra_op_threads=threads, model=model))

    def load(self, name: str, written: ConfigMessage, source: VersionSource, graph: Graph) -> Loaded:
        """Completes the configuration, puts the weights into the store, binds them to the best plan at hand.

        With ``--compile=wait`` the plan is built here. Raises ConfigInvalid, WeightsRefused, CompileFailed ...
        """
        started_s = time.monotonic()
        engine = self._find_engine(source.plan_file, written)
        config = complete_config(
            name,
            written,
            source,
            graph,
            engine,
            auto_complete=not self._config.disable_auto_complete_config,
            default_max_batch_size=self._config.default_max_batch_size(engine.backend),
        )
        signature = Signature(config, graph)
        staged = self.stage(config, graph, self._first_plan(graph, log_stages(name, source.number)), source)
        self._exempt_modules_from_collection()
        _log_parameters(graph, len(config.instance_names))
        if note := borrowed_note(staged.put):
            _log.info("weights of '%s' version %d%s", name, source.number, note)
        return Loaded(source, config, graph, signature, staged, (time.monotonic() - started_s) * 1e3)

    def stage(
        self, config: ModelConfig, graph: Graph, plan: Plan, source: VersionSource, serving_digest: str = ""
    ) -> Staged:
        """Reads the weights of ``source``, checks them against the slots of ``graph``, and binds them to ``plan``.

        Weights that turn out to be those of ``serving_digest`` are not bound. The label belongs to the very bytes that
        were read: when the file is replaced meanwhile, it is read again.
        """
        while True:
            label = published_label(source.weights_file)
            put = self._put(graph, source, allow_non_finite=config.allow_non_finite_weights)
            if published_label(source.weights_file) == label:
                same = put.weights.digest == serving_digest
                return Staged(put, () if same else self._bind(plan, put.weights, graph, config), label)

    def _bind(self, plan: Plan, weights: WeightSet, graph: Graph, config: ModelConfig) -> tuple[BoundPlan, ...]:
        """What each instance runs: one bound plan for all, or each its own on a copy of the weights."""
        first, instances = plan.bind(weights), len(config.instance_names)
        if graph.shares_weights:
            return (first,) * instances
        return (first, *(plan.bind(self._store.copy(weights)) for _ in range(instances - 1)))

    def _put(self, graph: Graph, source: VersionSource, *, allow_non_finite: bool) -> PutResult:
        with ExitStack() as stack:
            embedded = stack.enter_context(graph.embedded_weights())
            if source.weights_file is None:
                return self._store.put(graph.slots, embedded, allow_non_finite=allow_non_finite)
            weights = stack.enter_context(open_weights(source.weights_file))
            weights = renamed(weights, graph.slots)
            return self._store.put(graph.slots, weights, embedded, allow_non_finite=allow_non_finite)

    def _first_plan(self, graph: Graph, report: Callable[[str], None]) -> Plan:
        cached = graph.cached_plan()
        if cached is not None:
            return cached
        return graph.build_plan(report) if self._config.compile is CompileMode.WAIT else graph.eager_plan()

    def _exempt_modules_from_collection(self) -> None:
        """Keeps the garbage collector away from what an engine has imported, which never dies.

        With torch that is 170,000 objects, and a full collection walks them all with the GIL held: every request would
        wait for the 90 ms that it takes. The exemption is for all objects that are alive now, so it is made only when
        modules have been imported since the last one; those that die are still freed, but for cycles.
        """
        modules = len(sys.modules)
        if modules > self._exempt_modules:
            self._exempt_modules = modules
            gc.freeze()


def borrowed_note(put: PutResult) -> str:
    """For a line of the log: which weights are the model file's own, as the weights file lacks them; else ""."""
    if not put.borrowed:
        return ""
    named = ", ".join(map(shown, put.borrowed[:_MOST_NAMED]))
    more = len(put.borrowed) - _MOST_NAMED
    return f"; from the model file: {named}" + (f" and {more} more" if more > 0 else "")


def _log_parameters(graph: Graph, instances: int) -> None:
    """The lines by which users of Triton see that a model's parameters took effect (spec 04 section 1.2)."""
    for level, text in graph.log_lines():
        _log.log(level, "%s", text)
    if graph.shares_weights:
        for _ in range(instances - 1):
            _log.info("%s", graph.reuse_line)


def complete_config(
    name: str,
    written: ConfigMessage,
    source: VersionSource,
    graph: Graph,
    engine: Engine,
    *,
    auto_complete: bool = True,
    default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
) -> ModelConfig:
    """The configuration that a version is served with: what is ``written``, and the rest from its graph.

    Logs Triton's warning when neither says it all. Raises :class:`rebind.errors.ConfigInvalid`.
    """
    facts = GraphFacts(
        inputs=graph.inputs,
        outputs=graph.outputs,
        batch=graph.batch,
        platform=engine.platform,
        backend=engine.backend,
        model_filename=source.plan_file.name,
    )
    if auto_complete and (note := skipped_note(written, facts, name)):
        _log.warning("%s", note)
    message = complete(written, facts, name, auto_complete=auto_complete, default_max_batch_size=default_max_batch_size)
    return ModelConfig.from_message(message, name)
