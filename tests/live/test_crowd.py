"""Many clients who do anything at once: no answer is a mixture or mislabelled, no call fails without cause, none hangs.

Takes a few seconds. With ``REBIND_CROWD_S=600`` each policy has ten minutes.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.life.models import expected, inputs, same_bits
from tests.live import region
from tests.live.conftest import SOON_S
from tests.live.models import SMALL, arrays, part
from tests.live.trainer import Trainer
from tests.server import Client, Failed, eventually, safetensors_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.life.repository import Home, Live

RUN_S = float(os.environ.get("REBIND_CROWD_S", "2"))
SEEDS = range(1, 7)
KEEP_TWO = 'parameters { key: "WEIGHTS_KEEP_GENERATIONS" value { string_value: "2" } }'
IN_PLACE = 'parameters { key: "WEIGHT_UPDATE_POLICY" value { string_value: "in_place" } }'
MAY_BE = {400, 404, 409, 503}
"""Bad weights; a stage or version that is gone; one that another call changes; a model that is not loaded."""

pytestmark = pytest.mark.timeout(180 + 4 * RUN_S)


class Crowd:
    """Clients in threads until ``RUN_S`` is over; ``faults`` is what must not have happened, with how often it did."""

    def __init__(self, live: Live, home: Home, config: str) -> None:
        self.faults: Counter[str] = Counter()
        self.answers = 0
        self._live = live
        self._home = home
        self._config = config
        self._writing = threading.Lock()
        for seed in SEEDS:  # made before the threads begin: torch has one source of random numbers
            live.gallery.weights(SMALL, seed)
        self._weights = {seed: arrays(SMALL, seed) for seed in SEEDS}
        self._bytes = {seed: safetensors_bytes(weights) for seed, weights in self._weights.items()}
        self._right = {str(seed): expected(SMALL, seed) for seed in SEEDS} | {"": expected(SMALL, 0)}
        self._acts: list[Callable[[Client, random.Random, int], object]] = [
            *[self._push] * 4,
            *[self._stage, self._share] * 2,
            *[self._push_bad, self._roll_back, self._hang_up, self._publish],
            *[self._configure, self._reload],
        ]

    def run(self) -> None:
        """Returns when all are done."""
        self._until_s = time.monotonic() + RUN_S
        threads = [threading.Thread(target=self._act, args=(number,)) for number in range(4)]
        threads += [threading.Thread(target=self._ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _act(self, number: int) -> None:
        choose = random.Random(number)
        with self._live.server.client() as client:
            while time.monotonic() < self._until_s:
                act, seed = choose.choice(self._acts), choose.choice(SEEDS)
                try:
                    act(client, choose, seed)
                except Failed as failed:
                    if failed.status not in MAY_BE:
                        self.faults[f"{act.__name__}: {failed.status} {failed}"] += 1
                except Exception as error:  # noqa: BLE001 - the test says that there are none
                    self.faults[f"{act.__name__}: {error!r}"] += 1
                    return

    def _ask(self) -> None:
        with self._live.server.client() as client:
            while time.monotonic() < self._until_s:
                try:
                    answer = client.infer(self._home.name, inputs(SMALL))
                except Failed as failed:
                    if failed.status not in {404, 503}:
                        self.faults[f"infer: {failed.status} {failed}"] += 1
                except Exception as error:  # noqa: BLE001
                    self.faults[f"infer: {error!r}"] += 1
                    return
                else:
                    self.answers += 1
                    if not same_bits(answer.outputs, self._right[answer.label]):
                        self.faults[f"an answer labelled '{answer.label}' is {answer.output[0].tolist()}"] += 1

    def _push(self, client: Client, choose: random.Random, seed: int) -> None:
        dry_run, persist = choose.random() < 0.1, choose.random() < 0.1
        client.push(self._home.name, self._bytes[seed], label=str(seed), dry_run=dry_run, persist=persist)

    def _push_bad(self, client: Client, _: random.Random, seed: int) -> None:
        client.push(self._home.name, self._bytes[seed][:-5], label="bad")

    def _hang_up(self, _: Client, choose: random.Random, seed: int) -> None:
        trainer = Trainer(self._live.server.port, self._home.name, self._bytes[seed])
        trainer.push(choose.randrange(len(self._bytes[seed])), "?label=bad")
        trainer.close()

    def _stage(self, client: Client, choose: random.Random, seed: int) -> None:
        stage = client.open_stage(self._home.name, lease_s=1)
        names = sorted(self._weights[seed])
        for first in range(0, len(names), 4):
            client.put(stage, part(SMALL, seed, *names[first : first + 4]))
        if choose.random() < 0.3:
            client.prepare(stage)
        if choose.random() < 0.2:
            client.abort(stage)
        else:
            client.commit(stage, label=str(seed))

    def _share(self, client: Client, choose: random.Random, seed: int) -> None:
        stage = client.open_stage(self._home.name, shm=True, lease_s=1)
        try:
            region.write(stage, self._weights[seed])
        except FileNotFoundError:
            return  # the model was unloaded, or loaded anew
        client.commit(stage, label=str(seed), keep=choose.random() < 0.3)

    def _roll_back(self, client: Client, _: random.Random, __: int) -> None:
        client.rollback(self._home.name)

    def _publish(self, client: Client, _: random.Random, seed: int) -> None:
        self._home.publish(seed, label=str(seed))
        client.load(self._home.name)

    def _configure(self, client: Client, choose: random.Random, _: int) -> None:
        with self._writing:
            self._home.write_config(f"{self._config} instance_group {{ count: {choose.choice([1, 2])} }}")
        client.load(self._home.name)

    def _reload(self, client: Client, choose: random.Random, _: int) -> None:
        if choose.random() < 0.2:
            client.unload(self._home.name)
            client.load(self._home.name)


@pytest.mark.parametrize("config", [KEEP_TWO, IN_PLACE], ids=["double buffer", "in place"])
def test_many_clients_at_once_find_nothing_wrong_and_leave_nothing_behind(
    config: str, live: Live, client: Client
) -> None:
    time.sleep(SOON_S)
    idle_bytes = live.server.weights_memory_bytes()
    home = live.load(client, SMALL, config=config)
    crowd = Crowd(live, home, config)
    crowd.run()
    assert not crowd.faults
    assert crowd.answers > 50
    client.unload(home.name)
    eventually(lambda: live.server.weights_memory_bytes() <= idle_bytes, "all memory is given back")
