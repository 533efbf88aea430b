"""``rebind serve``: the server, with Triton's flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rebind.cli.switch import Switch, switch_option
from rebind.config.server import CompileMode, ModelControlMode, ServerConfig
from rebind.observability.logs import LogFormat, LogSettings

DEFAULTS = ServerConfig()
LOG_DEFAULTS = LogSettings()


def serve(
    model_repository: Annotated[
        list[Path] | None,
        typer.Option(
            "--model-repository",
            "--model-store",
            metavar="DIR",
            help="A directory of model directories; may be given more than once. [required]",
        ),
    ] = None,
    model_control_mode: Annotated[
        ModelControlMode,
        typer.Option(help="Load at the start only; when files change; or when a client asks."),
    ] = DEFAULTS.model_control_mode,
    repository_poll_secs: Annotated[
        float, typer.Option(help="Seconds between two looks at the repository in poll mode.")
    ] = DEFAULTS.repository_poll_secs,
    load_model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Load this model at the start in explicit mode; repeat it, or give *."),
    ] = None,
    exit_on_error: Annotated[Switch, switch_option(help="End if a model cannot be loaded at the start.")] = Switch(
        DEFAULTS.exit_on_error
    ),
    strict_readiness: Annotated[Switch, switch_option(help="Be ready only while all models are.")] = Switch(
        DEFAULTS.strict_readiness
    ),
    disable_auto_complete_config: Annotated[
        Switch, switch_option(help="Require a complete config.pbtxt of every model.")
    ] = Switch(DEFAULTS.disable_auto_complete_config),
    model_load_thread_count: Annotated[
        int, typer.Option(help="Models that are loaded at the same time.")
    ] = DEFAULTS.model_load_thread_count,
    backend_config: Annotated[
        list[str] | None,
        typer.Option(metavar="[BACKEND,]KEY=VALUE", help="A backend's setting, e.g. default-max-batch-size=8."),
    ] = None,
    id: Annotated[str, typer.Option("--id", help="The server's name in its metadata.")] = DEFAULTS.id,
    exit_timeout_secs: Annotated[
        float, typer.Option(help="Seconds that requests in flight have to finish after SIGTERM or Ctrl-C.")
    ] = DEFAULTS.exit_timeout_secs,
    allow_http: Annotated[Switch, switch_option(help="Serve HTTP.")] = Switch(DEFAULTS.allow_http),
    http_address: Annotated[str, typer.Option(help="The address to listen on.")] = DEFAULTS.http_address,
    http_port: Annotated[int, typer.Option(help="The port to listen on; 0 is any free one.")] = DEFAULTS.http_port,
    http_max_input_size: Annotated[
        int, typer.Option(metavar="BYTES", help="The largest JSON, and the largest tensor in it or without it.")
    ] = DEFAULTS.http_max_input_size,
    allow_grpc: Annotated[Switch, switch_option(help="Serve gRPC: so far the service rebind.v1.Weights.")] = Switch(
        DEFAULTS.allow_grpc
    ),
    grpc_address: Annotated[str, typer.Option(help="The address to listen on for gRPC.")] = DEFAULTS.grpc_address,
    grpc_port: Annotated[int, typer.Option(help="The port for gRPC; 0 is any free one.")] = DEFAULTS.grpc_port,
    allow_metrics: Annotated[Switch, switch_option(help="Serve metrics for Prometheus.")] = Switch(
        DEFAULTS.allow_metrics
    ),
    metrics_address: Annotated[
        str, typer.Option(show_default=False, help="The address to listen on for metrics. [default: that of HTTP]")
    ] = DEFAULTS.metrics_address,
    metrics_port: Annotated[int, typer.Option(help="The port for metrics; 0 is any free one.")] = DEFAULTS.metrics_port,
    cache_config: Annotated[
        list[str] | None, typer.Option(metavar="local,size=BYTES", help="Keep answers, for models that ask for it.")
    ] = None,
    compile: Annotated[
        CompileMode,
        typer.Option(
            "--compile",
            help="Build missing plans while the eager tier answers; before a model is ready; or not at all.",
        ),
    ] = DEFAULTS.compile,
    plan_cache_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default=False, help="Compiled plans. [default: $XDG_CACHE_HOME/rebind]"),
    ] = None,
    weights_settle_secs: Annotated[
        float,
        typer.Option(help="Seconds without a change after which unpublished files count as complete."),
    ] = DEFAULTS.weights_settle_secs,
    spare_weights_idle_secs: Annotated[
        float,
        typer.Option(help="Seconds to keep replaced weights for a rollback, and then their memory for the next refit."),
    ] = DEFAULTS.spare_weights_idle_secs,
    weights_memory_limit: Annotated[
        int, typer.Option(metavar="BYTES", help="Memory that the weights of all models may take; 0 is no limit.")
    ] = DEFAULTS.weights_memory_limit,
    log_verbose: Annotated[int, typer.Option(help="Level of verbose logs; 0 is none.")] = LOG_DEFAULTS.verbose,
    log_info: Annotated[Switch, switch_option(help="Log information.")] = Switch(LOG_DEFAULTS.info),
    log_warning: Annotated[Switch, switch_option(help="Log warnings.")] = Switch(LOG_DEFAULTS.warning),
    log_error: Annotated[Switch, switch_option(help="Log errors.")] = Switch(LOG_DEFAULTS.error),
    log_format: Annotated[LogFormat, typer.Option(help="How a line begins.")] = LOG_DEFAULTS.format,
    log_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Append logs to this file instead.")] = None,
) -> None:
    """Serve the models of a repository.

    The names and meanings of the flags are Triton's. Ends after SIGTERM or Ctrl-C, when the requests in flight
    are answered.
    """
    config = ServerConfig(
        id=id,
        exit_timeout_secs=exit_timeout_secs,
        log_verbose=log_verbose,
        model_repository=tuple(model_repository or ()),
        model_control_mode=model_control_mode,
        repository_poll_secs=repository_poll_secs,
        load_model=tuple(load_model or ()),
        exit_on_error=exit_on_error.value,
        strict_readiness=strict_readiness.value,
        disable_auto_complete_config=disable_auto_complete_config.value,
        model_load_thread_count=model_load_thread_count,
        backend_config=tuple(backend_config or ()),
        allow_http=allow_http.value,
        http_address=http_address,
        http_port=http_port,
        http_max_input_size=http_max_input_size,
        allow_grpc=allow_grpc.value,
        grpc_address=grpc_address,
        grpc_port=grpc_port,
        allow_metrics=allow_metrics.value,
        metrics_address=metrics_address,
        metrics_port=metrics_port,
        cache_config=tuple(cache_config or ()),
        compile=compile,
        plan_cache_dir=plan_cache_dir or DEFAULTS.plan_cache_dir,
        weights_settle_secs=weights_settle_secs,
        spare_weights_idle_secs=spare_weights_idle_secs,
        weights_memory_limit=weights_memory_limit,
    )
    config.validate()
    start(
        config,
        LogSettings(log_verbose, log_info.value, log_warning.value, log_error.value, log_format, log_file),
    )


def start(config: ServerConfig, logs: LogSettings) -> None:
    """Runs the server in this process until it is told to end."""
    from rebind.observability.logs import configure
    from rebind.server import run

    configure(logs)
    run(config)
