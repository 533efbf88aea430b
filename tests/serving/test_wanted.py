from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rebind.errors import ConfigInvalid, Unsupported
from rebind.repository.scan import scan_model
from rebind.serving.wanted import find_wanted

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "m"
    (directory / "1").mkdir(parents=True)
    return directory


@pytest.mark.parametrize("text", ['platform: "ensemble"', 'ensemble_scheduling { step { model_name: "a" } }'])
def test_ensemble_is_refused_as_what_it_is(model: Path, text: str) -> None:
    (model / "config.pbtxt").write_text(text)
    with pytest.raises(Unsupported, match=r"m/config.pbtxt: model 'm' is an ensemble, which is not served yet$"):
        find_wanted(scan_model(model, model.parent), need_config=False)


def test_configuration_is_needed_where_nothing_is_completed(model: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"config.pbtxt: is not there; write one, or start without --disable-auto"):
        find_wanted(scan_model(model, model.parent), need_config=True)


def test_log_says_what_has_no_effect_yet(model: Path) -> None:
    (model / "1" / "model.pt2").write_bytes(b"")
    (model / "config.pbtxt").write_text('dynamic_batching { } model_warmup { name: "zeros" batch_size: 1 }')
    notes = find_wanted(scan_model(model, model.parent), need_config=False).notes
    assert notes == (
        "model 'm' asks for dynamic_batching, which has no effect yet",
        "model 'm' asks for model_warmup, which has no effect yet",
    )
