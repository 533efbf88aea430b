from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from rebind.repository.manifest import manifest_path, read_manifest, shard_names
from rebind.repository.publish import publish
from tests.repository.repositories import write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def published(tmp_path: Path) -> Path:
    write(tmp_path / "m/1/model.pt2")
    return publish(write(tmp_path / "trained.safetensors", b"1234"), tmp_path / "m", 1, "step-1")


def test_file_without_a_manifest(tmp_path: Path) -> None:
    assert read_manifest(write(tmp_path / "model.safetensors")) is None
    assert read_manifest(tmp_path / "absent.safetensors") is None


@pytest.mark.timeout(10)
def test_nobody_waits_for_a_fifo_where_a_manifest_should_be(tmp_path: Path) -> None:
    weights = write(tmp_path / "model.safetensors")
    os.mkfifo(manifest_path(weights))
    os.mkfifo(tmp_path / "model.safetensors.index.json")

    assert read_manifest(weights) is None
    assert shard_names(tmp_path / "model.safetensors.index.json") == frozenset()


def test_manifest_of_another_file_is_stale(published: Path) -> None:
    write(published, b"5678")

    assert published.stat().st_size == 4
    assert read_manifest(published) is None


def test_copy_that_keeps_the_time_keeps_the_label(published: Path) -> None:
    copy = published.parent.with_name("2")
    shutil.copytree(published.parent, copy)

    manifest = read_manifest(copy / published.name)

    assert manifest is not None
    assert manifest.label == "step-1"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda _: "",
        lambda _: "[" * 100_000,
        lambda _: "[]",
        lambda _: '{"files": 3}',
        lambda text: text.replace('"step-1"', "17"),
        lambda text: text.replace('"label"', '"name"'),
        lambda text: text.replace('"shards": {}', '"shards": 3'),
        lambda text: text.replace('"digest"', '"surplus": 1, "digest"'),
    ],
)
def test_damaged_manifest_is_ignored(published: Path, damage: Callable[[str], str]) -> None:
    path = manifest_path(published)
    whole = path.read_text()
    assert read_manifest(published) is not None

    path.write_text(damage(whole))

    assert path.read_text() != whole
    assert read_manifest(published) is None


@pytest.mark.parametrize("document", [[], {}, {"weight_map": []}, {"weight_map": 3}, None])
def test_file_that_is_no_index_names_no_shards(tmp_path: Path, document: Any) -> None:
    assert shard_names(write(tmp_path / "x.safetensors.index.json", json.dumps(document))) == frozenset()
    assert shard_names(tmp_path / "absent.safetensors.index.json") == frozenset()
