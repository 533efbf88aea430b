"""The two JSON files that lie beside weights: safetensors' shard index, and the manifest that ``publish`` writes.

A manifest vouches for one exact file: it holds that file's size and modification time, which a rename keeps. It lists
the file it was written for and the one that is being replaced; the reader takes the entry that fits the file it has. So
at any moment of a publication, and after a crash at any moment, the file is accepted with its own label or with none.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

INDEX_SUFFIX = ".safetensors.index.json"
LABEL_CHARACTERS = 256
_JSON_BYTES = 16 << 20
_SIGNS = 1 << 20
"""No index or manifest has more bytes, or more colons and opening brackets; those of weights' readers are the same.

They name more than 100,000 tensors. Python's parser lets no other thread run until it is done.
"""
_MOST_SHARDS = 1024


@dataclass(frozen=True, slots=True)
class Content:
    """One file as it was published: bytes, modification time, hex blake3 of its bytes."""

    size: int
    mtime_ns: int
    digest: str

    def fits(self, stat: os.stat_result) -> bool:
        """True when ``stat`` is that of this very file, or of a copy that kept the modification time."""
        return (stat.st_size, stat.st_mtime_ns) == (self.size, self.mtime_ns)


@dataclass(frozen=True, slots=True)
class Manifest(Content):
    """What was published: the weights file, its label, and by name the shards when it is an index."""

    label: str | None = None
    shards: Mapping[str, Content] = field(default_factory=dict)


def is_label(text: str) -> bool:
    """Whether ``text`` can be a label: 1 to 256 printable characters, as it goes into logs and JSON."""
    return text.isprintable() and 0 < len(text) <= LABEL_CHARACTERS


def manifest_path(weights_file: Path) -> Path:
    """Where the manifest of a weights file lies; its name begins with a dot, so it is no part of the model."""
    return weights_file.with_name(f".{weights_file.name}.manifest.json")


def read_manifest(weights_file: Path) -> Manifest | None:
    """The manifest of the file that lies there now and of its shards; None: there is none, it is stale, or damaged."""
    try:
        stat = weights_file.stat()
        document: Any = _read_json(manifest_path(weights_file))
        manifests = [_from_json(entry) for entry in document["files"]]
        return next((entry for entry in manifests if entry.fits(stat) and _shards_fit(entry, weights_file)), None)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def published_label(weights_file: Path | None) -> str:
    """The label that the file which lies there now was published under; empty for one without, and for no file."""
    manifest = None if weights_file is None else read_manifest(weights_file)
    return (manifest.label if manifest else None) or ""


def encode_manifests(manifests: Sequence[Manifest]) -> bytes:
    """The manifest file that vouches for each of ``manifests``."""
    return json.dumps({"files": [asdict(manifest) for manifest in manifests]}, indent=1).encode()


def shard_names(index_file: Path) -> frozenset[str]:
    """The shards that a shard index names; none when the file is no such index (whoever reads its weights says why)."""
    try:
        document: Any = _read_json(index_file)
        names = frozenset(map(str, document["weight_map"].values()))
        return names if len(names) <= _MOST_SHARDS else frozenset()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return frozenset()


def _shards_fit(manifest: Manifest, index_file: Path) -> bool:
    return all(content.fits((index_file.parent / name).stat()) for name, content in manifest.shards.items())


def _read_json(path: Path) -> object:
    # O_NONBLOCK: opening a FIFO must not wait for a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        text = file.read(_JSON_BYTES + 1)
    if len(text) > _JSON_BYTES or sum(map(text.count, (b":", b"[", b"{"))) > _SIGNS:
        raise ValueError(f"{path} is too large")
    return json.loads(text)


def _from_json(entry: dict[str, Any]) -> Manifest:
    label = entry["label"]
    if not (label is None or is_label(label)):
        raise ValueError(f"{label!r} is no label")
    shards = {name: Content(**content) for name, content in entry["shards"].items()}
    return Manifest(**{**entry, "shards": shards})
