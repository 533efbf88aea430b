"""What becomes of the flags; that a server runs with them is shown where servers are tested."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rebind.cli import serve as serve_module
from rebind.cli.switch import Switch, parse_switch
from rebind.config.server import CompileMode, ModelControlMode, ServerConfig
from rebind.errors import Internal
from rebind.observability.logs import LogFormat, LogSettings

if TYPE_CHECKING:
    from tests.cli.conftest import Cli


class Started(list[tuple[ServerConfig, LogSettings]]):
    """The (server, log) settings with which a server would have been started."""

    @property
    def config(self) -> ServerConfig:
        """Of the one server."""
        ((config, _),) = self
        return config


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    started = Started()
    monkeypatch.setattr(serve_module, "start", lambda config, logs: started.append((config, logs)))
    return started


def test_without_flags_everything_has_the_default(cli: Cli, started: Started) -> None:
    assert cli("serve", "--model-repository", "/models") == (0, "", "")
    assert started == [(ServerConfig(model_repository=(Path("/models"),)), LogSettings())]


def test_every_flag_reaches_the_server(cli: Cli, started: Started) -> None:
    code, _, err = cli(
        "serve",
        "--model-repository=/a",
        "--model-store=/b",
        "--model-control-mode=explicit",
        "--load-model=x",
        "--load-model=y",
        "--repository-poll-secs=0.5",
        "--exit-on-error=false",
        "--strict-readiness=off",
        "--disable-auto-complete-config",
        "--model-load-thread-count=2",
        "--backend-config=default-max-batch-size=8",
        "--id=mine",
        "--exit-timeout-secs=5",
        "--allow-http=1",
        "--http-address=127.0.0.1",
        "--http-port=0",
        "--http-max-input-size=1000",
        "--compile=never",
        "--plan-cache-dir=/plans",
        "--weights-settle-secs=0.1",
        "--spare-weights-idle-secs=2",
        "--log-verbose=1",
        "--log-info=0",
        "--log-warning=0",
        "--log-error=0",
        "--log-format=ISO8601",
        "--log-file=/log",
    )

    assert (code, err) == (0, "")
    config = ServerConfig(
        model_repository=(Path("/a"), Path("/b")),
        model_control_mode=ModelControlMode.EXPLICIT,
        load_model=("x", "y"),
        repository_poll_secs=0.5,
        exit_on_error=False,
        strict_readiness=False,
        disable_auto_complete_config=True,
        model_load_thread_count=2,
        backend_config=("default-max-batch-size=8",),
        id="mine",
        exit_timeout_secs=5,
        allow_http=True,
        http_address="127.0.0.1",
        http_port=0,
        http_max_input_size=1000,
        compile=CompileMode.NEVER,
        plan_cache_dir=Path("/plans"),
        weights_settle_secs=0.1,
        spare_weights_idle_secs=2,
        log_verbose=1,
    )
    logs = LogSettings(1, info=False, warning=False, error=False, format=LogFormat.ISO8601, file=Path("/log"))
    assert started == [(config, logs)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--exit-on-error"], True),
        (["--exit-on-error", "--http-port=1"], True),
        (["--exit-on-error=false"], False),
        (["--exit-on-error", "false"], False),
        (["--exit-on-error", "OFF", "--http-port=1"], False),
        (["--exit-on-error=0"], False),
        (["--exit-on-error=on"], True),
        (["--exit-on-error=false", "--exit-on-error"], True),
    ],
)
def test_switches_are_written_as_for_triton(cli: Cli, started: Started, arguments: list[str], expected: bool) -> None:
    assert cli("serve", "--model-repository=/models", *arguments) == (0, "", "")
    assert started.config.exit_on_error is expected


def test_a_switch_is_nothing_else(cli: Cli, started: Started) -> None:
    code, _, err = cli("serve", "--model-repository=/models", "--strict-readiness=maybe")

    assert (code, started) == (2, [])
    assert err == ("error: Invalid value for '--strict-readiness': 'maybe' is none of true, on, 1, false, off, 0\n")


def test_a_value_that_is_not_on_the_list_is_refused_with_the_list(cli: Cli, started: Started) -> None:
    code, _, err = cli("serve", "--model-repository=/models", "--model-control-mode=polll")

    assert (code, started) == (2, [])
    assert err == "error: Invalid value for '--model-control-mode': 'polll' is not one of 'none', 'poll', 'explicit'.\n"


@pytest.mark.parametrize(
    "flag", ["--allow-gpu-metrics", "--metrics-interval-ms", "--trace-config", "--http-thread-count"]
)
@pytest.mark.parametrize("rest", [[], ["8001"], None])
def test_flags_of_triton_that_are_not_there_yet_say_so(
    cli: Cli, started: Started, flag: str, rest: list[str] | None
) -> None:
    given = [f"{flag}=1"] if rest is None else [flag, *rest]
    code, out, err = cli("serve", "--model-repository=/models", *given)

    assert (code, out, started) == (2, "", [])
    assert err == f"error: {flag} is a flag of Triton's for a part that is not there yet in rebind; leave it out\n"


def test_a_switch_prints_as_it_is_written() -> None:
    assert [parse_switch(str(switch)) for switch in Switch] == list(Switch)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "--model-repository must be specified"),
        (
            ["--model-repository=/m", "--load-model=x"],
            "Use of '--load-model' requires setting '--model-control-mode=explicit' as well.",
        ),
        (
            ["--model-repository=/m", "--model-control-mode=explicit", "--load-model=*", "--load-model=x"],
            "Wildcard model name '*' must be the ONLY startup model if specified at all.",
        ),
    ],
)
def test_flags_that_contradict_each_other_are_refused_before_anything_starts(
    cli: Cli, started: Started, arguments: list[str], reason: str
) -> None:
    code, out, err = cli("serve", *arguments)

    assert (code, out, started) == (1, "", [])
    assert err == f"error: command line: {reason}\n"


def test_a_server_that_cannot_start_is_one_line_and_exit_code_1(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise Internal("failed to load all models")

    monkeypatch.setattr(serve_module, "start", fail)

    assert cli("serve", "--model-repository=/m") == (1, "", "error: failed to load all models\n")
