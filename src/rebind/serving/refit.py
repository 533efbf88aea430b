"""Refit: give a version that serves another weight set, without touching its plan.

Staging (read, check, copy, bind) runs on a thread beside the serving ones and changes nothing that serves. The commit
is one assignment on the event loop. Requests that run keep the generation that they began with; its weights are freed
when the last of them ends. A refused stage leaves no trace but the reason.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from rebind.errors import as_rebind_error
from rebind.serving.loader import borrowed_note
from rebind.serving.version import rebound

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from rebind.engines.contract import Graph
    from rebind.repository.versions import VersionSource
    from rebind.serving.loader import Loader, Staged
    from rebind.serving.version import ModelVersion
    from rebind.weights.store import PutResult

_log = logging.getLogger(__name__)


class Refitter:
    """Performs refits: one at a time per version, others wait."""

    def __init__(self, loader: Loader, executor: Executor) -> None:
        self._loader = loader
        self._executor = executor

    async def refit(self, version: ModelVersion, graph: Graph, source: VersionSource, cause: str) -> None:
        """Makes the weights of ``source`` the next generation; weights equal to those that serve commit nothing.

        ``graph`` is the version's own, or a newly opened one with the same key. Raises why the weights are refused; the
        version then answers as before, and :attr:`ModelVersion.refusal` tells the reason.
        """
        async with version.refit_lock:
            started_s = time.monotonic()
            version.step("stage")
            staged = await self._stage(version, graph, source)
            version.graph, version.source, version.refusal = graph, source, None
            if not staged.bounds:
                version.step("unchanged")
                return
            version.step("validated")
            version.commit(_on_current_plan(version, staged), cause, (time.monotonic() - started_s) * 1e3)
            _log_refit(version, staged.put)

    async def _stage(self, version: ModelVersion, graph: Graph, source: VersionSource) -> Staged:
        plan, digest = version.generation.plan, version.generation.weights.digest
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._executor, self._loader.stage, version.config, graph, plan, source, digest
            )
        except Exception as error:
            version.step("refused")
            refusal = as_rebind_error(error)
            version.refusal = refusal.status_text
            _log.error(
                "refit of '%s' version %d refused, generation %d keeps serving: %s",
                version.name,
                version.number,
                version.generation.number,
                refusal,
            )
            raise refusal from error


def _on_current_plan(version: ModelVersion, staged: Staged) -> Staged:
    """The staged weights on the plan that serves now, which may have been promoted while they were read."""
    plan = version.generation.plan
    return staged if staged.bounds[0].plan is plan else replace(staged, bounds=rebound(staged.bounds, plan))


def _log_refit(version: ModelVersion, put: PutResult) -> None:
    generation, commit = version.generation, version.history[-1]
    label = f" ({generation.label})" if generation.label else ""
    _log.info(
        "refitted '%s' version %d: generation %d%s in %.1f ms, %d bytes copied, %d shared%s",
        version.name,
        version.number,
        generation.number,
        label,
        commit.refit_ms,
        commit.copied_bytes,
        commit.shared_bytes,
        borrowed_note(put),
    )
