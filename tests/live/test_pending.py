"""Versions without weights: the server is up, the model is not ready, and the first push makes it so."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from rebind.engines.aot_inductor import ENGINE as EXPORTED
from rebind.engines.torchscript import ENGINE as TORCHSCRIPT
from tests.life.models import MLP, Form, inputs
from tests.life.repository import Home
from tests.life.test_torchscript import MLP_CONFIG as SCRIPT_CONFIG
from tests.live import region
from tests.live.conftest import EXPLICIT
from tests.live.models import arrays, part
from tests.server import Client, eventually, refused

if TYPE_CHECKING:
    from pathlib import Path

    from tests.life.conftest import Start
    from tests.life.models import Gallery
    from tests.life.repository import Live

pytestmark = pytest.mark.timeout(180)


def place(root: Path, gallery: Gallery, name: str, form: Form, version: int = 1) -> Home:
    """A model file without weights, as ``rebind split`` makes it."""
    engine = TORCHSCRIPT if form.is_torchscript else EXPORTED
    home = Home(MLP, root / name, gallery, form)
    directory = home.path / str(version)
    engine.split(gallery.model_file(MLP, 0, form), directory)
    (directory / "model.safetensors").unlink()
    if form.is_torchscript:
        home.write_config(SCRIPT_CONFIG)
    return home


@pytest.mark.parametrize("form", [Form.EXPORTED, Form.SCRIPTED], ids=lambda form: form.value)
def test_model_without_weights_is_ready_after_the_first_push(
    form: Form, live: Live, gallery: Gallery, client: Client
) -> None:
    home = place(live.root, gallery, f"pending_{form.value}", form)
    client.load(home.name)
    weights = client.weights(home.name)
    assert (weights["state"], weights["generation"], weights["digest"]) == ("PENDING", 0, "")
    assert weights["history"] == []
    assert not client.is_ready(f"/v2/models/{home.name}/ready")
    with refused(503, "WEIGHTS_PENDING"):
        home.answer(client)
    with refused(400, "missing"):
        client.push(home.name, part(MLP, 1, "first.bias"))
    with refused(409, "patch"):
        client.push(home.name, arrays(MLP, 1), mode="patch")
    with refused(404):
        client.rollback(home.name)
    with refused(503, "WEIGHTS_PENDING"):
        home.answer(client)
    report = client.push(home.name, arrays(MLP, 1), label="first")
    assert (report["outcome"], report["generation"]) == ("committed", 1)
    assert client.is_ready(f"/v2/models/{home.name}/ready")
    assert home.expect(client, 1, generation=1).label == "first"
    assert client.weights(home.name)["state"] == "SERVING"
    client.unload(home.name)
    eventually(lambda: client.index()[home.name, "1"]["state"] == "UNAVAILABLE", "it is unloaded")


def test_pending_model_is_filled_through_shared_memory_and_persisted(
    live: Live, gallery: Gallery, client: Client
) -> None:
    home = place(live.root, gallery, "pending_persisted", Form.EXPORTED)
    client.load(home.name)
    stage = client.open_stage(home.name, shm=True)
    region.write(stage, arrays(MLP, 2))
    assert client.commit(stage, persist=True, label="kept")["persisted"]
    home.expect(client, 2, generation=1)
    client.unload(home.name)
    client.load(home.name)
    assert home.expect(client, 2, generation=1).label == "kept"


def test_request_waits_for_the_first_weights_when_it_says_so(live: Live, gallery: Gallery, client: Client) -> None:
    home = place(live.root, gallery, "pending_awaited", Form.EXPORTED)
    client.load(home.name)
    with live.server.client() as waits:
        waits.send_infer(home.name, inputs(MLP), min_weights_generation=1)
        client.push(home.name, arrays(MLP, 1))
        assert waits.read_infer().generation == 1


def test_version_with_weights_answers_while_a_higher_one_has_none(live: Live, gallery: Gallery, client: Client) -> None:
    home = live.load(client, config="version_policy { all {} }")
    shutil.copytree(place(live.root, gallery, ".aside_for_version_2", Form.EXPORTED).path / "1", home.path / "2")
    client.load(home.name)
    home.expect(client, 0, generation=1, version=1)
    with refused(503, "WEIGHTS_PENDING"):
        home.answer(client, version=2)
    client.push(home.name, arrays(MLP, 1), version=2)
    home.expect(client, 1, generation=1, version=2)


def test_server_starts_with_a_model_that_waits_for_its_weights(start: Start, gallery: Gallery, tmp_path: Path) -> None:
    """It is live, it is not ready, and the model of another is served."""
    home = place(tmp_path, gallery, "pending", Form.EXPORTED)
    with start(tmp_path, flags=(*EXPLICIT, "--load-model=pending")) as server, server.client() as client:
        assert client.is_ready("/v2/health/live")
        assert not client.is_ready()
        client.push(home.name, arrays(MLP, 1))
        assert client.is_ready()
        home.expect(client, 1, generation=1)
        assert server.stop() == 0
