from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rebind.engines import registry
from rebind.engines.contract import EngineOptions
from rebind.engines.registry import engine, engine_for_config, engine_for_file, engine_names, engines, find_engine
from rebind.errors import InvalidArgument, Unsupported
from rebind.plans.cache import PlanCache


@pytest.fixture(autouse=True)
def fresh() -> Any:
    yield
    engine.cache_clear()
    engine_names.cache_clear()


@pytest.mark.parametrize("name", ["aot_inductor", "torchscript"])
def test_the_built_in_engines_are_ok(name: str) -> None:
    (status,) = [status for status in engines() if status.name == name]
    assert status.engine is engine(name)
    assert status.reason is None
    assert status.limitation is None


def test_listing_and_opening_engines_imports_no_torch() -> None:
    code = "import sys, rebind.engines.registry as r; r.engines(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(InvalidArgument, match="known are aot_inductor, torchscript"):
        engine("tensorrt")


def asked(platform: str = "", backend: str = "") -> Any:
    return SimpleNamespace(platform=platform, backend=backend)


@pytest.mark.parametrize(
    ("name", "platform", "file_name"),
    [("aot_inductor", "torch_aoti", "model.pt2"), ("torchscript", "pytorch_libtorch", "model.pt")],
)
def test_engines_are_found_by_file_platform_and_backend(name: str, platform: str, file_name: str) -> None:
    found, file = engine(name), Path("m/1") / file_name
    assert engine_for_file(file_name) is found
    assert engine_for_file(file_name, "pytorch") is found
    for config in (asked(), asked(platform), asked(platform, "pytorch"), asked(backend="pytorch")):
        assert find_engine(file, config) is found


def test_the_platform_decides_whatever_the_file_is_called() -> None:
    assert find_engine(Path("m/1/model.bin"), asked("pytorch_libtorch")) is engine("torchscript")
    assert find_engine(Path("m/1/model.pt2"), asked("pytorch_libtorch", "pytorch")) is engine("torchscript")


def test_a_backend_of_several_engines_leaves_the_choice_to_the_file() -> None:
    assert engine_for_config("", "") is None
    assert engine_for_config("", "pytorch") is None
    with pytest.raises(Unsupported, match=r"no engine of backend 'pytorch' serves 'model\.bin'.* \.pt, \.pt2"):
        find_engine(Path("m/1/model.bin"), asked(backend="pytorch"))


@pytest.mark.parametrize(
    ("platform", "backend"), [("tensorrt_plan", ""), ("", "onnxruntime"), ("torch_aoti", "tensorrt")]
)
def test_what_no_engine_serves_is_unsupported(platform: str, backend: str) -> None:
    with pytest.raises(Unsupported, match="there are platform 'torch_aoti'"):
        engine_for_config(platform, backend)
    with pytest.raises(Unsupported, match=r"no engine serves 'model\.plan'"):
        engine_for_file("model.plan")


def test_a_missing_torch_is_the_reason_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    (status,) = [status for status in engines() if status.name == "aot_inductor"]
    assert status.reason == "torch is not installed: pip install 'rebind[torch]'"
    with pytest.raises(Unsupported, match="cannot run here: torch is not installed"):
        find_engine(tmp_path / "model.pt2", asked())
    for name, file_name in (("aot_inductor", "model.pt2"), ("torchscript", "model.pt")):
        with pytest.raises(Unsupported, match="cannot be served: torch is not installed"):
            engine(name).open(tmp_path / file_name, EngineOptions(PlanCache(tmp_path)))


def test_without_a_compiler_the_eager_tier_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    (status,) = [status for status in engines() if status.name == "aot_inductor"]
    assert status.reason is None
    assert status.limitation is not None
    assert "eager tier" in status.limitation


def announce(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    point = importlib.metadata.EntryPoint("third", value, registry.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [point] if group == registry.GROUP else [])
    engine_names.cache_clear()


def test_third_parties_announce_engines_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, "rebind.engines.aot_inductor:ENGINE")
    assert engine_names() == ("aot_inductor", "third", "torchscript")
    assert engine("third").platform == "torch_aoti"


def test_an_engine_that_cannot_be_imported_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, "no_such_module:ENGINE")
    (status,) = [status for status in engines() if status.name == "third"]
    assert status.engine is None
    assert status.reason is not None
    assert "No module named 'no_such_module'" in status.reason
