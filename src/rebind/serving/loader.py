"""Turning files of a repository into something that answers: the blocking part of loads and refits.

Everything here runs on loader threads and touches nothing that serves.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rebind.config.complete import GraphFacts, complete
from rebind.config.model import ModelConfig, intra_op_thread_count
from rebind.config.server import CompileMode
from rebind.repository.manifest import read_manifest
from rebind.serving.signature import Signature
from rebind.weights.formats import open_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rebind.config.schema import ConfigMessage
    from rebind.config.server import ServerConfig
    from rebind.engines.contract import BoundPlan, Engine, EngineOptions, Graph, Plan
    from rebind.repository.versions import VersionSource
    from rebind.weights.store import PutResult, WeightStore

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Staged:
    """A weight set that was read, checked and bound, and does not serve yet. ``label``: as published, or ""."""

    put: PutResult
    bound: BoundPlan
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

    def open(self, written: ConfigMessage, source: VersionSource) -> Graph:
        """Opens the plan file of ``source``; ``written`` is the model's configuration before completion."""
        threads = intra_op_thread_count(written) or self._options.intra_op_threads
        options = replace(self._options, intra_op_threads=threads)
        return self._find_engine(source.plan_file, written).open(source.plan_file, options)

    def load(self, name: str, written: ConfigMessage, source: VersionSource, graph: Graph) -> Loaded:
        """Completes the configuration, puts the weights into the store, binds them to the best plan at hand.

        With ``--compile=wait`` the plan is built here. Raises ConfigInvalid, WeightsRefused, CompileFailed ...
        """
        started_s = time.monotonic()
        config = self._complete(name, written, source, graph)
        signature = Signature(config, graph)
        staged = self.stage(config, graph, self._first_plan(graph), source)
        return Loaded(source, config, graph, signature, staged, (time.monotonic() - started_s) * 1e3)

    def stage(self, config: ModelConfig, graph: Graph, plan: Plan, source: VersionSource) -> Staged:
        """Reads the weights of ``source``, checks them against the slots of ``graph``, and binds them to ``plan``.

        The label belongs to the very bytes that were read: when the file is replaced meanwhile, it is read again.
        """
        while True:
            label = _label(source)
            put = self._put(graph, source, allow_non_finite=config.allow_non_finite_weights)
            if _label(source) == label:
                return Staged(put, plan.bind(put.weights), label)

    def _put(self, graph: Graph, source: VersionSource, *, allow_non_finite: bool) -> PutResult:
        with ExitStack() as stack:
            embedded = stack.enter_context(graph.embedded_weights())
            if source.weights_file is None:
                return self._store.put(graph.slots, embedded, allow_non_finite=allow_non_finite)
            weights = stack.enter_context(open_weights(source.weights_file))
            return self._store.put(graph.slots, weights, embedded, allow_non_finite=allow_non_finite)

    def _complete(self, name: str, written: ConfigMessage, source: VersionSource, graph: Graph) -> ModelConfig:
        engine = self._find_engine(source.plan_file, written)
        facts = GraphFacts(
            inputs=graph.inputs,
            outputs=graph.outputs,
            batch=graph.batch,
            platform=engine.platform,
            backend=engine.backend,
            model_filename=source.plan_file.name,
        )
        message = complete(
            written,
            facts,
            name,
            auto_complete=not self._config.disable_auto_complete_config,
            default_max_batch_size=self._config.default_max_batch_size(engine.backend),
        )
        return ModelConfig.from_message(message, name)

    def _first_plan(self, graph: Graph) -> Plan:
        cached = graph.cached_plan()
        if cached is not None:
            return cached
        return graph.build_plan(_log.info) if self._config.compile is CompileMode.WAIT else graph.eager_plan()


def _label(source: VersionSource) -> str:
    manifest = None if source.weights_file is None else read_manifest(source.weights_file)
    return (manifest.label if manifest else None) or ""
