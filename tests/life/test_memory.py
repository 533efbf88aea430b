"""Promise 5: any number of instances holds one copy of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.life.conftest import Start
from tests.life.models import WIDE, Gallery, inputs
from tests.life.repository import Live
from tests.life.traffic import Traffic
from tests.server import eventually

pytestmark = pytest.mark.timeout(180)

MB = 1_000_000


def test_four_instances_hold_one_copy_and_refits_at_most_one_more(start: Start, gallery: Gallery, tmp_path: Path) -> None:
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
