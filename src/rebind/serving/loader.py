"""Turning files of a repository into something that answers: the blocking part of loads and refits.

Everything here runs on loader threads and touches nothing that serves.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rebind.config.complete import DEFAULT_MAX_BATCH_SIZE, GraphFacts, complete, skipped_note
from rebind.config.model import ModelConfig, intra_op_thread_count
from rebind.config.server import CompileMode
from rebind.serving.compiling import log_stages
from rebind.serving.signature import Signature
from rebind.serving.staging import Target, borrowed_note, has_weights
from rebind.serving.wanted import model_options
from rebind.serving.weights_check import load_checks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rebind.config.schema import ConfigMessage
    from rebind.config.server import ServerConfig
    from rebind.engines.contract import Engine, EngineOptions, Graph, Plan
    from rebind.repository.versions import VersionSource
    from rebind.serving.generation import Generation
    from rebind.serving.staging import Staged, Stager

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A version that could serve. ``staged`` None: it has no weights, and waits for the first to be pushed.

    ``from_files``: the weights are those of ``source``.
    """

    source: VersionSource
    config: ModelConfig
    graph: Graph
    signature: Signature
    plan: Plan
    staged: Staged | None
    from_files: bool
    load_s: float


class Loader:
    """Opens graphs and stages their first weights. Thread-safe."""

    def __init__(
        self,
        config: ServerConfig,
        stager: Stager,
        find_engine: Callable[[Path, ConfigMessage], Engine],
        options: EngineOptions,
    ) -> None:
        self._config = config
        self._stager = stager
        self._find_engine = find_engine
        self._options = options
        self._exempt_modules = 0

    def open(self, name: str, written: ConfigMessage, source: VersionSource) -> Graph:
        """Opens the plan file of ``source``; ``written`` is the model's configuration before completion."""
        engine = self._find_engine(source.plan_file, written)
        threads = intra_op_thread_count(written) or self._options.intra_op_threads
        model = model_options(name, written, engine.backend)
        return engine.open(source.plan_file, replace(self._options, intra_op_threads=threads, model=model))

    def load(
        self, name: str, written: ConfigMessage, source: VersionSource, graph: Graph, serving: Generation | None = None
    ) -> Loaded:
        """Completes the configuration, puts the weights into the store, binds them to the best plan at hand.

        ``serving``: weights to be taken instead of those of ``source``, where the graph has slots for them.
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
        plan = self._first_plan(graph, log_stages(name, source.number))
        target = Target(config, graph, signature, source.model_dir)
        staged: Staged | None = None
        from_files = serving is None or not _fits(graph, serving)
        if serving is not None and not from_files:
            staged = self._stager.from_serving(target, plan, serving)
        elif has_weights(graph, source):
            staged = self._stager.from_files(target, plan, source)
        else:
            load_checks(target.model_dir, signature)  # what is wrong with them is not to be told at the first push
        self._exempt_modules_from_collection()
        _log_parameters(graph, len(config.instance_names))
        _log_weights(name, source.number, staged)
        load_s = time.monotonic() - started_s
        return Loaded(source, config, graph, signature, plan, staged, from_files, load_s)

    def with_weights(self, loaded: Loaded, serving: Generation) -> Loaded:
        """``loaded`` with the weights of ``serving``, where its graph has slots for them; else as it is."""
        if not _fits(loaded.graph, serving):
            return loaded
        target = Target(loaded.config, loaded.graph, loaded.signature, loaded.source.model_dir)
        staged = self._stager.from_serving(target, loaded.plan, serving)
        return replace(loaded, staged=staged, from_files=False)

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


def _fits(graph: Graph, serving: Generation) -> bool:
    return serving.weights.slots.digest == graph.slots.digest


def _log_weights(name: str, number: int, staged: Staged | None) -> None:
    if staged is None:
        _log.info("'%s' version %d has no weights: WEIGHTS_PENDING, it waits for the first push", name, number)
    elif note := borrowed_note(staged.put):
        _log.info("weights of '%s' version %d%s", name, number, note)


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
