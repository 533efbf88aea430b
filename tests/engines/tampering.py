"""Archives that are not as torch wrote them."""

from __future__ import annotations

import json
import warnings
import zipfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GRAPH = "models/model.json"
WEIGHTS_CONFIG = "data/weights/model_weights_config.json"


def rewrite(
    source: Path,
    target: Path,
    edit: Callable[[dict[str, bytes]], None],
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    """``source`` with its records, by their names below the archive's directory, as ``edit`` changes them."""
    with zipfile.ZipFile(source) as zipped:
        root = zipped.namelist()[0].split("/")[0]
        records = {name.removeprefix(f"{root}/"): zipped.read(name) for name in zipped.namelist()}
    edit(records)
    with zipfile.ZipFile(target, "w", compression) as zipped:
        for name, data in records.items():
            zipped.writestr(f"{root}/{name}", data)
    return target


def edit_json(source: Path, target: Path, record: str, edit: Callable[[Any], None]) -> Path:
    """``source`` with one JSON record changed in place by ``edit``."""

    def change(records: dict[str, bytes]) -> None:
        document = json.loads(records[record])
        edit(document)
        records[record] = json.dumps(document).encode()

    return rewrite(source, target, change)


def with_two_records_of_one_name(source: Path, target: Path) -> Path:
    rewrite(source, target, lambda records: None)
    with zipfile.ZipFile(target, "a") as zipped, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zipped.writestr(zipped.namelist()[0], b"again")
    return target
