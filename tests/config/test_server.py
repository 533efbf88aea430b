from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rebind.config.server import CompileMode, ModelControlMode, ServerConfig, default_plan_cache_dir
from rebind.errors import Faulty

REPOSITORY = (Path("/models"),)


def faults_of(**flags: Any) -> list[str]:
    with pytest.raises(Faulty) as caught:
        ServerConfig(**{"model_repository": REPOSITORY, **flags}).validate()
    return [str(fault) for fault in caught.value.faults]


def test_defaults_are_tritons() -> None:
    config = ServerConfig(model_repository=REPOSITORY)
    config.validate()
    assert (config.http_address, config.http_port, config.http_max_input_size) == ("0.0.0.0", 8000, 67108864)
    assert (config.model_control_mode, config.repository_poll_secs) == (ModelControlMode.NONE, 15)
    assert (config.exit_timeout_secs, config.model_load_thread_count) == (30, 4)
    assert config.exit_on_error
    assert config.strict_readiness
    assert config.allow_http
    assert not config.disable_auto_complete_config
    assert config.compile is CompileMode.BACKGROUND
    assert config.spare_weights_idle_secs == 60


def test_a_repository_is_needed() -> None:
    assert faults_of(model_repository=()) == ["--model-repository must be specified"]


@pytest.mark.parametrize("mode", [ModelControlMode.NONE, ModelControlMode.POLL])
def test_load_model_needs_explicit_mode(mode: ModelControlMode) -> None:  # case C12
    assert faults_of(load_model=("m",), model_control_mode=mode) == [
        "Use of '--load-model' requires setting '--model-control-mode=explicit' as well."
    ]


def test_the_wildcard_stands_alone() -> None:  # case C12
    assert faults_of(load_model=("*", "m"), model_control_mode=ModelControlMode.EXPLICIT) == [
        "Wildcard model name '*' must be the ONLY startup model if specified at all."
    ]


@pytest.mark.parametrize("names", [("*",), ("a", "b"), ()])
def test_models_to_load_in_explicit_mode(names: tuple[str, ...]) -> None:
    config = ServerConfig(model_repository=REPOSITORY, load_model=names, model_control_mode=ModelControlMode.EXPLICIT)
    config.validate()
    assert config.load_model == names


@pytest.mark.parametrize(
    ("flag", "bad", "edge"),
    [
        ("http_port", -1, 0),
        ("http_port", 65536, 65535),
        ("http_max_input_size", 0, 1),
        ("exit_timeout_secs", -1, 0),
        ("repository_poll_secs", 0, 0.1),
        ("repository_poll_secs", float("nan"), 15),
        ("model_load_thread_count", 0, 1),
        ("log_verbose", -1, 0),
        ("weights_settle_secs", -0.1, 0),
        ("spare_weights_idle_secs", float("nan"), 0),
    ],
)
def test_numbers_out_of_range_name_their_flag(flag: str, bad: float, edge: float) -> None:
    [fault] = faults_of(**{flag: bad})
    assert fault.startswith(f"--{flag.replace('_', '-')}: {bad} is out of range; give ")
    ServerConfig(model_repository=REPOSITORY, **{flag: edge}).validate()  # type: ignore[arg-type]


def test_all_faults_come_in_one_report() -> None:
    faults = faults_of(model_repository=(), load_model=("*", "", "m"), http_port=-3, backend_config=("x",))
    assert len(faults) == 6
    with pytest.raises(Faulty, match=r"^command line: 6 faults: --model-repository must be specified \| "):
        ServerConfig(load_model=("*", "", "m"), http_port=-3, backend_config=("x",)).validate()


@pytest.mark.parametrize(
    ("settings", "backend", "size"),
    [
        ((), "pytorch", 4),
        (("default-max-batch-size=8",), "pytorch", 8),
        (("pytorch,default-max-batch-size=8",), "pytorch", 8),
        (("pytorch,default-max-batch-size=8",), "onnxruntime", 4),
        (("pytorch,default-max-batch-size=8", "default-max-batch-size=2"), "pytorch", 8),
        (("default-max-batch-size=8", "default-max-batch-size=0"), "pytorch", 0),
        (("python,shm-region-prefix-name=p", "tensorrt,plugins=a.so;b=c.so"), "python", 4),
    ],
)
def test_default_max_batch_size_of_a_backend(settings: tuple[str, ...], backend: str, size: int) -> None:
    config = ServerConfig(model_repository=REPOSITORY, backend_config=settings)
    config.validate()
    assert config.default_max_batch_size(backend) == size


@pytest.mark.parametrize("setting", ["", "x", "pytorch,", "pytorch,=3", "=3"])
def test_backend_config_of_a_wrong_form(setting: str) -> None:
    [fault] = faults_of(backend_config=(setting,))
    assert fault.startswith("--backend-config: ")
    assert "--backend-config=<backend>,<key>=<value>" in fault


@pytest.mark.parametrize("value", ["", "-1", "many", "1.5"])
def test_default_max_batch_size_that_is_no_number(value: str) -> None:
    [fault] = faults_of(backend_config=(f"default-max-batch-size={value}",))
    assert fault == f"--backend-config: default-max-batch-size={value} is no integer >= 0"


@pytest.mark.parametrize(
    ("xdg", "expected"),
    [("/caches", "/caches/rebind"), ("", "/home/me/.cache/rebind"), ("caches", "/home/me/.cache/rebind")],
)
def test_plan_cache_lies_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, xdg: str, expected: str) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert default_plan_cache_dir() == Path(expected)
    assert ServerConfig().plan_cache_dir == Path(expected)
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_plan_cache_dir() == Path("/home/me/.cache/rebind")
