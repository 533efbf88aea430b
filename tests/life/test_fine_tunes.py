"""Many fine-tunes of one graph: one plan, a weight set for each, and those in memory that are asked for."""

from __future__ import annotations

import random
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.life.models import MLP, Case, expected, inputs
from tests.life.repository import Home, Live, copy_over
from tests.server import ServerProcess, refused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rebind.plans.cache import PlanCache
    from tests.life.conftest import Start
    from tests.life.models import Gallery
    from tests.server import Client

pytestmark = pytest.mark.timeout(180)

FINE_TUNES = 12
IN_MEMORY = 4
SET_NBYTES = 8192
"""What a weight set of the MLP takes: whole pages."""


@pytest.fixture(scope="module")
def fleet(start: Start, gallery: Gallery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with memory for four weight sets."""
    root = tmp_path_factory.mktemp("fleet")
    flags = ("--model-control-mode=explicit", f"--weights-memory-limit={IN_MEMORY * SET_NBYTES}")
    with start(root, flags=flags) as server:
        yield Live(server, root, gallery)
        assert server.stop() == 0


@pytest.fixture
def client(fleet: Live) -> Iterator[Client]:
    with fleet.server.client() as client:
        yield client


@pytest.fixture
def homes(fleet: Live, client: Client) -> Iterator[list[Home]]:
    """Twelve models; those with an even number have their weights in the model file, the others in a file beside it."""
    homes = []
    for seed in range(FINE_TUNES):
        home = fleet.home(weights=seed if seed % 2 else None)
        if not seed % 2:
            home.add_plan(seed)
        client.load(home.name)
        homes.append(home)
    yield homes
    for home in homes:
        client.unload(home.name)


def pages(server: ServerProcess) -> tuple[int, int]:
    """How many weight sets have left memory, and how many have come back, as the metrics say."""
    port = server.wait_for_log(r"Started Metrics Service at \S+:(\d+)")[1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    out, back = (
        re.search(rf'^rebind_weights_page_total{{direction="{direction}"}} (\d+)', text, re.MULTILINE)
        for direction in ("out", "in")
    )
    assert out is not None
    assert back is not None
    return int(out[1]), int(back[1])


def expect(client: Client, home: Home, seed: int) -> None:
    home.expect(client, seed, generation=1)


def test_each_answers_with_its_own_weights_within_the_limit(fleet: Live, client: Client, homes: list[Home]) -> None:
    assert all(client.is_ready(f"/v2/models/{home.name}/ready") for home in homes)
    out, back = pages(fleet.server)

    for _ in range(2):
        for seed, home in enumerate(homes):
            expect(client, home, seed)
            assert fleet.server.weights_memory_bytes() <= IN_MEMORY * SET_NBYTES
    assert pages(fleet.server) == (out + 2 * FINE_TUNES, back + 2 * FINE_TUNES)

    for _ in range(20):
        expect(client, homes[-1], FINE_TUNES - 1)
    assert pages(fleet.server) == (out + 2 * FINE_TUNES, back + 2 * FINE_TUNES), "what is in memory stays there"


def test_paged_out_weights_keep_their_names_and_history(client: Client, homes: list[Home]) -> None:
    homes[1].publish(5, label="five")
    client.load(homes[1].name)
    before = client.weights(homes[1].name)
    assert (before["state"], before["generation"], before["label"]) == ("SERVING", 2, "five")
    for seed, home in enumerate(homes[2:], start=2):
        expect(client, home, seed)

    out = client.weights(homes[1].name)
    assert out["state"] == "PAGED"
    homes[1].expect(client, 5, generation=2)
    back = client.weights(homes[1].name)

    assert back["state"] == "SERVING"
    for report in (out, back):
        assert [report[key] for key in ("generation", "label", "digest", "history")] == [
            before[key] for key in ("generation", "label", "digest", "history")
        ]


def test_traffic_over_more_models_than_fit_has_no_failure(fleet: Live, homes: list[Home]) -> None:
    popularity = [1 / rank for rank in range(1, FINE_TUNES + 1)]

    def ask(number: int) -> None:
        order = random.Random(number).choices(range(FINE_TUNES), popularity, k=100)
        with fleet.server.client() as own:
            for seed in order:
                expect(own, homes[seed], seed)

    out, _ = pages(fleet.server)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert pages(fleet.server)[0] > out
    assert fleet.server.weights_memory_bytes() <= IN_MEMORY * SET_NBYTES


def test_overwritten_file_is_refused_by_name_and_a_reload_heals(client: Client, homes: list[Home]) -> None:
    home = homes[1]
    digest = client.weights(home.name)["digest"]
    for seed, other in enumerate(homes[2:], start=2):
        expect(client, other, seed)
    path = home.file("model.safetensors")
    copy_over(home.gallery.weights(MLP, 20), path)

    with refused(503, rf"{path} has weights with the digest \w+ now, not {digest}"):
        home.answer(client)
    assert not client.is_ready(f"/v2/models/{home.name}/ready")
    assert digest in client.weights(home.name)["refusal"]

    client.load(home.name)
    home.expect(client, 20, generation=2)
    assert client.is_ready(f"/v2/models/{home.name}/ready")


def test_file_replaced_while_the_weights_are_out_gives_the_old_ones_until_it_is_loaded(
    client: Client, homes: list[Home]
) -> None:
    home = homes[1]
    for seed, other in enumerate(homes[2:], start=2):
        expect(client, other, seed)
    home.add_weights(20)

    home.expect(client, 1, generation=1)
    client.load(home.name)
    home.expect(client, 20, generation=2)


def test_pushed_weights_stay_in_memory_until_they_are_persisted(client: Client, homes: list[Home]) -> None:
    pushed, persisted = homes[0], homes[1]
    for home, seed, persist in ((pushed, 20, False), (persisted, 21, True)):
        client.push(home.name, {name: tensor.numpy() for name, tensor in MLP.state(seed).items()}, persist=persist)
    for _ in range(2):
        for seed, home in enumerate(homes[2:], start=2):
            expect(client, home, seed)

    assert client.weights(pushed.name)["state"] == "SERVING"
    assert client.weights(persisted.name)["state"] == "PAGED"
    persisted.expect(client, 21, generation=2)
    pushed.expect(client, 20, generation=2)


def test_fine_tunes_of_one_graph_have_one_compile_and_one_plan(
    gallery: Gallery, plan_cache: PlanCache, tmp_path: Path
) -> None:
    for seed in range(FINE_TUNES):
        home = Home(MLP, tmp_path / f"m{seed}", gallery)
        home.path.mkdir()
        home.add_plan(seed)
    versions = Home(MLP, tmp_path / "versions", gallery)
    versions.path.mkdir()
    versions.write_config("version_policy { all {} }")
    versions.add_plan(0)
    for seed in range(1, FINE_TUNES):
        (versions.path / str(seed + 1)).mkdir()
        versions.add_weights(seed, version=seed + 1)

    flags = (f"--model-repository={tmp_path}", f"--plan-cache-dir={plan_cache.root}", "--compile=wait")
    with ServerProcess(*flags) as server, server.client() as client:
        for seed in range(FINE_TUNES):
            for answer in (client.infer(f"m{seed}", inputs(MLP)), client.infer("versions", inputs(MLP), seed + 1)):
                assert close(MLP, answer.output, expected(MLP, seed)["OUTPUT__0"])
        tiers = {client.weights(f"m{seed}")["tier"] for seed in range(FINE_TUNES)}
        libraries = set(re.findall(rf"{plan_cache.root}/\S+", Path(f"/proc/{server.pid}/maps").read_text()))

        assert tiers == {"compiled"}
        assert len(libraries) == 1
        assert server.log.count(": compiling") <= 1, "none if another test has had it compiled"
        assert server.stop() == 0


def close(case: Case, answer: np.ndarray, right: np.ndarray) -> bool:
    """Within what compiled code may differ by."""
    return bool(np.abs(answer - right).max() <= case.compiled_bound * np.abs(right).max())
