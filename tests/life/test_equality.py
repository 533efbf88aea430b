"""Promise 4: after refits, the answer is that of a fresh process with the same plan and weights, bit for bit."""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest

from rebind.engines.aot_inductor import ENGINE
from rebind.engines.contract import EngineOptions
from rebind.plans.cache import PlanCache
from rebind.weights.formats import open_weights
from rebind.weights.store import WeightStore
from tests.life.conftest import NO_COMPILE, Start
from tests.life.models import EVERYTHING, MLP, Gallery, Inputs, eager, same_bits
from tests.life.repository import Home, Live
from tests.life.traffic import Traffic
from tests.server import Client, ServerProcess, eventually

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

pytestmark = pytest.mark.timeout(180)


def test_refitted_server_answers_as_a_fresh_one(explicit: Live, client: Client, start: Start, tmp_path: Path) -> None:
    """A model with all that goes stale elsewhere: batch norm, ties, constants, small and scalar parameters."""
    home = explicit.load(client, EVERYTHING)
    for seed in (1, 2, 0, 3):
        home.add_weights(seed)
        client.load(home.name)
    refitted = home.expect(client, 3, generation=5)
    (tmp_path / home.name).symlink_to(home.path)
    with start(tmp_path) as server, server.client() as fresh:
        answer = home.expect(fresh, 3, generation=1)
        assert fresh.weights(home.name)["digest"] == client.weights(home.name)["digest"]
        assert fresh.weights(home.name)["plan_key"] == client.weights(home.name)["plan_key"]
    assert same_bits(answer.outputs, refitted.outputs)


class Builder:
    """A plan, and another builder of it who began before the server, for which it is another process."""

    def __init__(self, finished: PlanCache, cache: PlanCache, archive: Path) -> None:
        """The plan is compiled into ``finished``, unless it is there; the other builder brings it into ``cache``."""
        self._graph = ENGINE.open(archive, EngineOptions(finished))
        self._plan = self._graph.build_plan(print)
        self._store = WeightStore()
        self._begun, self._released = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._build, args=(finished, cache))

    def __enter__(self) -> Self:
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Lets the other builder finish."""
        self._released.set()
        self._thread.join()

    def compiled(self, weights: Path, request: Inputs) -> Inputs:
        """What the plan answers in this process."""
        with open_weights(weights) as source, self._graph.embedded_weights() as embedded:
            bound = self._plan.bind(self._store.put(self._graph.slots, source, embedded).weights)
        return {f"OUTPUT__{position}": array for position, array in enumerate(bound.execute(list(request.values())))}

    def _build(self, finished: PlanCache, cache: PlanCache) -> None:
        entry = finished.plans.get(self._graph.key)
        assert entry is not None

        def build(directory: Path) -> Mapping[str, Any]:
            self._begun.set()
            self._released.wait()
            shutil.copytree(entry.directory, directory, dirs_exist_ok=True, ignore=lambda *_: ["manifest.json"])
            return entry.manifest

        cache.plans.get_or_build(self._graph.key, build, print)


@pytest.mark.compiles
@pytest.mark.timeout(300)
def test_compiled_plan_takes_over_without_a_failed_request_and_is_refitted(
    plan_cache: PlanCache, gallery: Gallery, tmp_path: Path
) -> None:
    root, cache = tmp_path / "models", tmp_path / "cache"
    root.mkdir()
    flags = (f"--model-repository={root}", f"--plan-cache-dir={cache}", "--model-control-mode=explicit")
    requests = [{"INPUT__0": np.random.default_rng(rows).standard_normal((rows, 16), np.float32)} for rows in (1, 2, 4)]
    seeds = {1: 0, 2: 1, 3: 2, 4: 0, 5: 3}
    with (
        Builder(plan_cache, PlanCache(cache), gallery.archive(MLP, 0)) as builder,
        ServerProcess(*flags) as server,
        server.client() as client,
    ):
        home = Live(server, root, gallery).load(client)
        with Traffic(server, home.name, requests) as traffic:
            server.wait_for_log("waiting for .*, which is building plans/")
            _refit(home, client, seeds, 2)
            home.expect(client, 1, generation=2)
            assert client.weights(home.name)["tier"] == "eager"
            builder.finish()
            eventually(lambda: client.weights(home.name)["tier"] == "compiled", "the compiled plan has taken over")
            for generation in (3, 4, 5):
                _refit(home, client, seeds, generation)
                traffic.wait_for(20)
        assert not traffic.failures
        for request, answer in traffic.answers:
            seed = seeds[answer.generation]
            by_plan = builder.compiled(gallery.weights(MLP, seed), requests[request])
            before = answer.generation <= 2 and same_bits(answer.outputs, eager(MLP, seed, requests[request]))
            assert before or same_bits(answer.outputs, by_plan)
        refitted = home.answer(client)
        report = client.weights(home.name)
        assert (report["generation"], report["tier"]) == (5, "compiled")

    with ServerProcess(*flags, f"--load-model={home.name}", environment=NO_COMPILE) as server, server.client() as fresh:
        assert fresh.weights(home.name)["tier"] == "compiled"
        assert same_bits(home.answer(fresh).outputs, refitted.outputs)


def _refit(home: Home, client: Client, seeds: Mapping[int, int], generation: int) -> None:
    home.publish(seeds[generation])
    client.load(home.name)
    assert client.weights(home.name)["generation"] == generation
