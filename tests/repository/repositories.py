"""Building repositories of real files for these tests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rebind.repository.scan import ModelDirectory, scan_model

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, content: bytes | str = b"content") -> Path:
    """A file, and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_index(path: Path, *shards: str) -> Path:
    """A shard index that names ``shards``, one tensor in each."""
    return write(
        path, json.dumps({"metadata": {"total_size": 8}, "weight_map": {f"t.{name}": name for name in shards}})
    )


def model(path: Path) -> ModelDirectory:
    """The model directory ``path``, scanned."""
    return scan_model(path, path.parent)
