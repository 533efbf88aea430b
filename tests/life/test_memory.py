"""Promise 5: any number of instances holds one copy of the weights."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from rebind.engines.aot_inductor import ENGINE
from rebind.engines.contract import EngineOptions
from rebind.plans.cache import PlanCache
from rebind.plans.lock import lock
from tests.life.models import WIDE, Gallery, inputs
from tests.life.repository import Live
from tests.life.traffic import Traffic
from tests.server import ServerProcess, eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.life.conftest import Start

pytestmark = pytest.mark.timeout(180)

MB = 1_000_000


def test_four_instances_hold_one_copy_and_refits_at_most_one_more(
    start: Start, gallery: Gallery, tmp_path: Path
) -> None:
    flags = ("--model-control-mode=explicit", "--spare-weights-idle-secs=1")
    with start(tmp_path, flags=flags) as server, server.client() as client:
        live = Live(server, tmp_path, gallery)
        live.load(client).expect(client, 0, generation=1)  # brings torch in, which is large itself
        empty = server.pss_bytes()
        home = live.load(client, WIDE, config="instance_group { count: 4 }")
        weights = client.weights(home.name)["bytes"]["total"]
        assert weights > 100 * MB

        def used() -> int:
            return server.pss_bytes() - empty

        with Traffic(server, home.name, [inputs(WIDE)], threads=4) as traffic:
            traffic.wait_for(40)
            assert used() < 1.1 * weights + 40 * MB
            for generation, seed in ((2, 1), (3, 0), (4, 1)):
                home.publish(seed)
                client.load(home.name)
                assert client.weights(home.name)["generation"] == generation
                assert used() < 2.1 * weights + 40 * MB
            eventually(lambda: used() < 1.1 * weights + 40 * MB, "the memory of replaced weights is given back")
        assert not traffic.failures


def test_unloaded_model_is_freed_although_its_plan_is_still_being_built(
    gallery: Gallery, tmp_path: Path, eager_cache: Path
) -> None:
    root, cache = tmp_path / "models", tmp_path / "cache"
    root.mkdir()
    cache.mkdir()
    (eager_cache / "sources").mkdir(exist_ok=True)  # so that what is known of the graph is not found out again
    (cache / "sources").symlink_to(eager_cache / "sources")
    flags = (f"--model-repository={root}", f"--plan-cache-dir={cache}", "--model-control-mode=explicit")
    key = ENGINE.open(gallery.archive(WIDE, 0), EngineOptions(PlanCache(cache))).key
    (cache / "locks").mkdir()
    with (
        lock(cache / "locks" / f"plans-{key}.lock", print, threading.Event()),  # as another process that builds it has
        ServerProcess(*flags, "--spare-weights-idle-secs=0") as server,
        server.client() as client,
    ):
        home = Live(server, root, gallery).load(client, WIDE)
        weights = client.weights(home.name)["bytes"]["total"]
        server.wait_for_log("waiting for .*, which is building plans/")
        loaded = server.pss_bytes()
        client.unload(home.name)
        eventually(lambda: server.pss_bytes() < loaded - 0.9 * weights, "the weights are freed")
