from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from rebind.errors import WeightsRefused
from rebind.weights.formats import open_weights
from tests.weights.files import arrays_of, read, refusal_of, save

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def index(tmp_path: Path) -> Path:
    save(tmp_path / "one.safetensors", arrays_of(1, a=(4,), b=(4,)))
    save(tmp_path / "two.safetensors", arrays_of(2, c=(4,)))
    return write(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})


def write(directory: Path, weight_map: object) -> Path:
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 48}, "weight_map": weight_map}))
    return path


def test_shards_read_as_one(index: Path) -> None:
    with open_weights(index) as source:
        assert set(source.tensors) == {"a", "b", "c"}
        assert read(source, "c") == arrays_of(2, c=(4,))["c"].tobytes()
        source.check_unchanged()


def test_index_decides_and_stray_files_do_not_matter(index: Path) -> None:  # W12
    save(index.with_name("stray.safetensors"), arrays_of(9, a=(4,), c=(4,)))
    with open_weights(index) as source:
        assert read(source, "a") == arrays_of(1, a=(4,))["a"].tobytes()


def test_all_absent_shards_are_listed_with_the_other_faults(tmp_path: Path, index: Path) -> None:
    os.truncate(tmp_path / "two.safetensors", 50)
    write(tmp_path, {"a": "one.safetensors", "c": "two.safetensors", "x": "x.safetensors", "y": "y.safetensors"})
    message = refusal_of(index)
    assert "'x.safetensors': absent; copy it beside the index" in message
    assert "'y.safetensors': absent" in message
    assert "'two.safetensors': truncated" in message
    assert "'b': is in 'one.safetensors', but not in the index" in message


def test_index_and_shards_must_agree(tmp_path: Path, index: Path) -> None:
    save(tmp_path / "two.safetensors", arrays_of(2, c=(4,), b=(4,)))
    write(
        tmp_path,
        {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors", "d": "two.safetensors"},
    )
    message = refusal_of(index)
    assert "'d': the index places it in 'two.safetensors', which lacks it" in message
    assert "'b': is in 'two.safetensors', but the index places it in 'one.safetensors'" in message


@pytest.mark.parametrize("name", ["../one.safetensors", "/etc/one.safetensors", "sub/one.safetensors", "..", "", "x"])
def test_shards_lie_beside_the_index_and_nowhere_else(tmp_path: Path, name: str) -> None:
    save(tmp_path / "one.safetensors", arrays_of(1, a=(4,)))
    (tmp_path / "sub").mkdir()
    save(tmp_path / "sub" / "one.safetensors", arrays_of(1, a=(4,)))
    assert "must be the plain name" in refusal_of(write(tmp_path, {"a": name}))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"weight_map":{"a":"x","a":"x"}}', "'a': is in the index twice"),
        (b'{"weight_map":{"a":1}}', "weight_map: must be an object"),
        (b"{}", "weight_map: must be an object"),
        (b"[]", "must be a JSON object"),
    ],
)
def test_what_is_no_index_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    assert expected in refusal_of(tmp_path / "model.safetensors.index.json", content)


def test_shard_replaced_while_read_is_refused(tmp_path: Path, index: Path) -> None:
    with open_weights(index) as source:
        save(tmp_path / "aside", arrays_of(3, c=(4,))).rename(tmp_path / "two.safetensors")
        with pytest.raises(WeightsRefused, match=r"two\.safetensors: changed while it was read: another file"):
            source.check_unchanged()
        (tmp_path / "two.safetensors").unlink()
        with pytest.raises(WeightsRefused, match="it is gone"):
            source.check_unchanged()


def test_index_of_too_many_bytes_or_shards_is_refused_before_any_is_looked_for(tmp_path: Path) -> None:
    few = write(tmp_path, {str(number): f"{number}.safetensors" for number in range(1024)})
    assert "'0.safetensors': absent" in refusal_of(few)
    many = write(tmp_path, {str(number): f"{number}.safetensors" for number in range(1025)})
    assert refusal_of(many) == f"{many}: names 1025 shards, and an index at most 1024; save larger shards"
    many.write_text('{"weight_map": {}}' + " " * (16 << 20))
    assert "has 16777234 bytes, and an index at most 16777216" in refusal_of(many)
