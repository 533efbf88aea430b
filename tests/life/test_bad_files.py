"""Promises 7 and 8: whatever lies in the repository, or comes to lie there, the process and all other models go on."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from rebind.repository.manifest import manifest_path
from tests.life.models import EVERYTHING, MLP, Gallery
from tests.life.repository import Home, Live, copy_over
from tests.server import Client, Failed, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.life.conftest import Start

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def bystander(explicit: Live) -> Home:
    with explicit.server.client() as client:
        return explicit.load(client)


@pytest.fixture(autouse=True)
def _others_go_on(explicit: Live, bystander: Home) -> Iterator[None]:
    """After each test: the server lives, and another model answers as before."""
    yield
    with explicit.server.client() as client:
        assert client.is_ready("/v2/health/live")
        bystander.expect(client, 0, generation=1)


def _scramble(path: Path) -> None:
    content = random.Random(0).randbytes(path.stat().st_size)
    with path.open("r+b") as file:
        file.write(content)


def _truncate(path: Path) -> None:
    os.truncate(path, 100)


def _delete_directory(path: Path) -> None:
    shutil.rmtree(path.parent)


@pytest.mark.parametrize("harm", [_scramble, _truncate, Path.unlink, _delete_directory])
def test_harm_to_served_files_does_not_reach_what_serves(
    explicit: Live, client: Client, harm: Callable[[Path], None]
) -> None:
    """Cases R24, R27, W9, W10: the model file, and with it the weights, the graph and the source of a reload."""
    home = explicit.load(client, EVERYTHING)
    harm(home.file("model.pt2"))
    for _ in range(3):
        home.expect(client, 0, generation=1)
    with pytest.raises(Failed) as refused:
        client.load(home.name)
    assert home.name in str(refused.value)
    home.expect(client, 0, generation=1)
    home.add_plan(1)
    client.load(home.name)
    home.expect(client, 1, generation=2)


def test_served_version_whose_directory_is_gone_says_so_in_the_index(explicit: Live, client: Client) -> None:
    """Case R24."""
    home = explicit.load(client)
    shutil.rmtree(home.path)
    home.expect(client, 0, generation=1)
    entry = client.index()[home.name, "1"]
    assert entry["state"] == "READY"
    assert "gone" in entry["reason"]


def _flip_a_bit_of_the_graph(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b'"graph_module"') + 3] ^= 1
    path.write_bytes(content)


def _write(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


BAD_MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (_write(b""), "cannot be read as a zip file"),
    "noise": (_scramble, "cannot be read as a zip file"),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size // 2), "cannot be read as a zip file"),
    "damaged graph": (_flip_a_bit_of_the_graph, "CRC"),
    "weights only": (lambda path: torch.save({"weight": torch.zeros(3)}, path), r"torch\.save file"),
    "text": (_write(b"hello"), "cannot be read as a zip file"),
}


@pytest.mark.parametrize("kind", BAD_MODELS)
def test_model_file_that_is_no_model_is_named_with_the_reason(explicit: Live, client: Client, kind: str) -> None:
    make, reason = BAD_MODELS[kind]
    home = explicit.home()
    make(home.file("model.pt2"))
    for _ in range(2):  # case R12: the second attempt is no success
        with pytest.raises(Failed, match=reason) as refused:
            client.load(home.name)
        assert refused.value.status == 400
        assert str(home.file("model.pt2")) in str(refused.value)
    entry = client.index()[home.name, "1"]
    assert entry["state"] == "UNAVAILABLE"
    assert re.search(reason, entry["reason"])
    home.add_plan(0)
    client.load(home.name)
    home.expect(client, 0, generation=1)


BAD_CONFIGS: dict[str, tuple[str, list[str]]] = {
    "unknown field": ("\nmax_batchsize: 4", ["config.pbtxt:2:", "max_batchsize", "max_batch_size"]),
    "negative batch": ("max_batch_size: -4", ["max_batch_size", "-4|non-negative"]),
    "placeholder": ("max_batch_size: ${batch}", ["config.pbtxt:1:", "placeholder"]),  # case C1
    "other name": ('name: "somebody_else"', ["somebody_else", "mlp_"]),  # case C9
    "unknown platform": ('platform: "tea_pot"', ["tea_pot", "torch_aoti"]),
    "wrong dims": ('input { name: "INPUT__0" data_type: TYPE_FP32 dims: [17] }', ["INPUT__0", "17", "16"]),
    "path as file name": ('default_model_filename: "../model.pt2"', ["default_model_filename", "plain file name"]),
    "weights file not there": (
        'parameters { key: "WEIGHTS_FILENAME" value { string_value: "w.safetensors" } }',
        ["WEIGHTS_FILENAME", "w.safetensors"],
    ),
    "no such version": ("version_policy { specific { versions: [5] } }", ["at least one version must be available"]),
    "not text": ("\x00\x01", ["config.pbtxt"]),
}


@pytest.mark.parametrize("kind", BAD_CONFIGS)
def test_bad_config_is_refused_and_the_good_one_serves_on(explicit: Live, client: Client, kind: str) -> None:
    config, reasons = BAD_CONFIGS[kind]
    home = explicit.load(client)
    home.write_config(config)
    with pytest.raises(Failed) as refused:
        client.load(home.name)
    for reason in reasons:
        assert re.search(reason, str(refused.value)), (reason, str(refused.value))
    home.expect(client, 0, generation=1)
    entry = client.index()[home.name, "1"]
    assert entry["state"] == "READY"
    assert re.search(reasons[0], entry["reason"])
    home.write_config("")
    client.load(home.name)
    home.expect(client, 0, generation=1)
    assert "reason" not in client.index()[home.name, "1"]


def test_directories_that_are_no_versions_are_passed_over_with_a_warning(explicit: Live, client: Client) -> None:
    """Case C7: Triton froze at -1."""
    names = ["-1", "01", "abc", "99999999999999999999"]
    home = explicit.home()
    for name in names:
        shutil.copytree(home.path / "1", home.path / name)
    client.load(home.name)
    home.expect(client, 0, generation=1)
    assert client.get(f"/v2/models/{home.name}")["versions"] == ["1"]
    for name in names:
        explicit.server.wait_for_log(rf"ignore version directory '{re.escape(name)}'.*{home.name}")


def test_two_plan_files_are_refused_and_both_named(explicit: Live, client: Client) -> None:
    home = explicit.home()
    home.file("model.onnx").write_bytes(b"onnx")
    with pytest.raises(Failed, match=r"'model\.pt2' and 'model\.onnx'"):
        client.load(home.name)
    assert "model.onnx" in client.index()[home.name, ""]["reason"]
    home.write_config('default_model_filename: "model.pt2"')
    client.load(home.name)
    home.expect(client, 0, generation=1)


def test_two_weights_files_are_refused_and_both_named(explicit: Live, client: Client) -> None:
    home = explicit.load(client, weights=1)
    shutil.copyfile(home.file("model.safetensors"), home.file("model.npz"))
    with pytest.raises(Failed, match=r"'model\.safetensors' and 'model\.npz'"):
        client.load(home.name)
    home.expect(client, 1, generation=1)


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "..%2Fmlp", "a%2F..%2F..%2Fx", "%2Fetc", "a%5Cb", "%0A", "x" * 300, "%00"]
)
def test_model_name_that_is_no_plain_name_is_refused(explicit: Live, client: Client, name: str) -> None:
    """Case R1: over the network, for both calls."""
    for call in (client.load, client.unload):
        with pytest.raises(Failed) as refused:
            call(name)
        assert refused.value.status == 400, str(refused.value)
    with pytest.raises(Failed) as unknown:
        client.get(f"/v2/models/{name}")
    assert unknown.value.status == 404


def test_load_of_an_unknown_model_is_an_error_that_says_why(explicit: Live, client: Client) -> None:
    with pytest.raises(
        Failed, match=r"failed to load 'nobody', failed to poll from model repository: .*nobody"
    ) as failed:
        client.load("nobody")
    assert failed.value.status == 500


def test_model_in_two_repositories_is_refused_and_the_others_serve(
    start: Start, gallery: Gallery, tmp_path: Path
) -> None:
    """Case R7; and a file, a broken link and a name that is no text beside the models."""
    roots = [tmp_path / "a", tmp_path / "b"]
    homes = [_home(root, name, gallery) for root in roots for name in ("twin", f"only_{root.name}")]
    (roots[0] / "notes.txt").write_text("not a model")
    (roots[0] / "dangling").symlink_to(tmp_path / "nowhere")
    (roots[0] / os.fsdecode(b"\xff\xfe")).mkdir()
    flags = ("--model-control-mode=poll", "--repository-poll-secs=0.1", "--exit-on-error=false")
    with start(*roots, flags=flags) as server, server.client() as client:
        homes[1].expect(client, 0, generation=1)
        homes[3].expect(client, 0, generation=1)
        reason = client.index()["twin", ""]["reason"]
        assert str(roots[0] / "twin") in reason
        assert str(roots[1] / "twin") in reason
        with pytest.raises(Failed) as missing:
            homes[0].answer(client)
        assert missing.value.status == 404
        shutil.rmtree(roots[0] / "twin")
        eventually(lambda: homes[2].answers_as(client, 0), "the one that is left is served")
        shutil.copytree(roots[1] / "twin", roots[0] / "twin")
        eventually(lambda: "reason" in client.index()["twin", "1"], "the conflict is told")
        homes[2].expect(client, 0, generation=1)


def _home(root: Path, name: str, gallery: Gallery) -> Home:
    home = Home(MLP, root / name, gallery)
    home.path.mkdir(parents=True)
    home.add_plan(0)
    return home


@pytest.mark.parametrize("label", ["\ud800", "a\nb", "", "x" * 10_000, 5, ["list"]])
def test_manifest_with_a_label_that_is_none_vouches_for_nothing(explicit: Live, client: Client, label: object) -> None:
    home = explicit.load(client)
    weights = home.publish(1, label="good")
    path = manifest_path(weights)
    manifest = json.loads(path.read_text())
    manifest["files"][0]["label"] = label
    path.write_text(json.dumps(manifest))
    client.load(home.name)
    assert home.expect(client, 1, generation=2).label == ""


def test_plan_file_overwritten_in_place_is_a_refit_when_it_is_whole(explicit: Live, client: Client) -> None:
    home = explicit.load(client)
    copy_over(home.gallery.archive(MLP, 1), home.file("model.pt2"))
    home.expect(client, 0, generation=1)
    client.load(home.name)
    home.expect(client, 1, generation=2)


def test_the_index_tells_the_newest_reason_and_none_when_all_is_well(explicit: Live, client: Client) -> None:
    home = explicit.load(client)

    def reason_after(harm: Callable[[], object]) -> str:
        harm()
        with pytest.raises(Failed, match="version 1 is at READY state with its weights of generation 1"):
            client.load(home.name)
        return client.index()[home.name, "1"]["reason"]

    assert "safetensors" in reason_after(lambda: home.file("model.safetensors").write_bytes(b"hello"))
    home.file("model.safetensors").unlink()
    assert "zip file" in reason_after(lambda: home.file("model.pt2").write_bytes(b"hello"))
    home.add_plan(0)
    client.load(home.name)
    assert "reason" not in client.index()[home.name, "1"]
    home.expect(client, 0, generation=1)
