from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rebind.config.pbtxt import parse_pbtxt
from rebind.engines.contract import ModelOptions
from rebind.errors import ConfigInvalid, Unavailable, Unsupported
from rebind.repository.scan import scan_model
from rebind.serving.wanted import find_wanted, model_options

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
    (model / "config.pbtxt").write_text(
        'dynamic_batching { } model_warmup { name: "zeros" batch_size: 1 } batch_input { target_name: "B" }'
    )
    notes = find_wanted(scan_model(model, model.parent), need_config=False).notes
    assert notes == (
        "model 'm' asks for dynamic_batching, which has no effect yet",
        "model 'm' asks for model_warmup, which has no effect yet",
        "model 'm' asks for batch_input, which has no effect yet",
    )


def test_configuration_says_which_file_is_the_model(model: Path) -> None:
    for name in ("model.pt", "model.pt2", "model.onnx"):
        (model / "1" / name).write_bytes(b"")
    (model / "config.pbtxt").write_text('platform: "libtorch" cc_model_filenames { key: "9.0" value: "for_a_gpu.pt" }')
    wanted = find_wanted(scan_model(model, model.parent), need_config=False)
    assert wanted.versions[1].plan_file == model / "1/model.pt"


def test_missing_model_file_of_a_platform_is_unavailable(model: Path) -> None:
    (model / "1/model.pt2").write_bytes(b"")
    (model / "config.pbtxt").write_text('platform: "pytorch_libtorch"')
    with pytest.raises(Unavailable, match=rf"^unable to find '{model}/1/model.pt' for model instance 'm'$"):
        find_wanted(scan_model(model, model.parent), need_config=False)


def test_engine_hears_what_is_written() -> None:
    text = """
    input { name: "b" } input { name: "a" }
    instance_group [ { count: 3 }, { kind: KIND_MODEL } ]
    parameters { key: "ENABLE_WEIGHT_SHARING" value { string_value: "on" } }
    """
    assert model_options("m", parse_pbtxt(text, "m"), "pytorch") == ModelOptions(
        name="m",
        parameters={"ENABLE_WEIGHT_SHARING": "on"},
        input_names=("b", "a"),
        instances=4,
        keeps_devices=True,
    )


@pytest.mark.parametrize(("backend", "instances"), [("pytorch", 1), ("onnxruntime", 2)])
def test_engine_hears_of_the_instances_that_its_backend_has_by_default(backend: str, instances: int) -> None:
    written = parse_pbtxt("", "m")
    assert model_options("m", written, backend) == ModelOptions(name="m", instances=instances)
    assert written == parse_pbtxt("", "m")
