"""The server's own configuration: the values of the command line's flags, checked together."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rebind.config.complete import DEFAULT_MAX_BATCH_SIZE
from rebind.errors import Fault, Faulty

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEFAULT_MAX_BATCH_SIZE_KEY = "default-max-batch-size"
_LOCAL_CACHE = "local,size="


class ModelControlMode(enum.Enum):
    """When models are loaded and unloaded after the start."""

    NONE = "none"
    """Never."""
    POLL = "poll"
    """When their files change."""
    EXPLICIT = "explicit"
    """When a client asks for it; at the start, those of ``--load-model``."""


class CompileMode(enum.Enum):
    """When a plan that is not in the cache is built."""

    BACKGROUND = "background"
    """While the eager tier answers."""
    WAIT = "wait"
    """Before the version becomes READY."""
    NEVER = "never"
    """Not at all: what is not in the cache runs on the eager tier."""


def default_plan_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/rebind``, or ``~/.cache/rebind``; a relative ``XDG_CACHE_HOME`` does not count."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "rebind"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The flags of ``rebind serve`` but those of logs; the flag of ``model_repository`` is ``--model-repository``.

    Names, meanings and defaults are Triton's (spec 05 section 5) but for those in the last group, which are ours.
    """

    id: str = "rebind"
    """The server's name in its metadata (Triton: ``triton``)."""
    exit_timeout_secs: float = 30
    """How long requests in flight may take to finish after a SIGTERM."""
    log_verbose: int = 0
    """Level of verbose logging; 0 is none. Here only to be checked with the others; logs have settings of their own."""

    model_repository: tuple[Path, ...] = ()
    """Directories of model directories; at least one."""
    model_control_mode: ModelControlMode = ModelControlMode.NONE
    repository_poll_secs: float = 15
    """Pause between two looks at the repository in poll mode."""
    load_model: tuple[str, ...] = ()
    """Models to load at the start in explicit mode; ``*`` alone is all of them."""
    exit_on_error: bool = True
    """A model that fails at the start ends the process."""
    strict_readiness: bool = True
    """The server is ready only while all its models are."""
    disable_auto_complete_config: bool = False
    """Every model needs a ``config.pbtxt`` with all inputs and outputs."""
    model_load_thread_count: int = 4
    backend_config: tuple[str, ...] = ()
    """``[backend,]key=value``. Used: ``default-max-batch-size``; other keys are left to the backends."""

    allow_http: bool = True
    http_address: str = "0.0.0.0"  # noqa: S104 - Triton's default
    http_port: int = 8000
    """0 is any free port."""
    http_max_input_size: int = 64 * 1024 * 1024
    """Bytes that the JSON of a request, or one JSON tensor, may have."""

    allow_grpc: bool = True
    grpc_address: str = "0.0.0.0"  # noqa: S104 - Triton's default
    grpc_port: int = 8001
    """0 is any free port."""
    allow_metrics: bool = True
    metrics_address: str = ""
    """Empty: that of HTTP."""
    metrics_port: int = 8002
    """0 is any free port."""
    cache_config: tuple[str, ...] = ()
    """``local,size=BYTES``: the response cache."""

    compile: CompileMode = CompileMode.BACKGROUND
    plan_cache_dir: Path = field(default_factory=default_plan_cache_dir)
    """Where plans are kept across restarts; shared by all servers of a machine."""
    weights_settle_secs: float = 1.0
    """Files without a manifest count as complete when their sizes and times have not changed for so long."""
    spare_weights_idle_secs: float = 60.0
    """Replaced weights are kept so long for a rollback, and then their memory for the next refit."""
    weights_memory_limit: int = 0
    """Bytes of memory that weights may take, all models together; 0 is no limit."""

    def default_max_batch_size(self, backend: str) -> int:
        """The largest batch of models that give none: the value for ``backend``, else the one for all, else 4."""
        values = {who: value for who, key, value in self._backend_settings() if key == _DEFAULT_MAX_BATCH_SIZE_KEY}
        return int(values.get(backend, values.get("", DEFAULT_MAX_BATCH_SIZE)))

    @property
    def cache_bytes(self) -> int:
        """How large the response cache is; 0: there is none."""
        return sum(int(setting.removeprefix(_LOCAL_CACHE)) for setting in self.cache_config)

    def validate(self) -> None:
        """Raises :class:`Faulty` with every fault of the flags, in Triton's words where it has the rule."""
        faults = list(self._faults())
        if faults:
            raise Faulty("command line", faults)

    def _backend_settings(self) -> Iterator[tuple[str, str, str]]:
        """Backend (empty: all), key and value of each well-formed ``--backend-config``."""
        for setting in self.backend_config:
            name, equals, value = setting.partition("=")
            backend, _, key = name.rpartition(",")
            if key and equals:
                yield backend, key, value

    def _faults(self) -> Iterator[Fault]:
        yield from self._repository_faults()
        yield from self._backend_config_faults()
        yield from self._cache_faults()
        yield from self._number_faults()

    def _repository_faults(self) -> Iterator[Fault]:
        if not self.model_repository:
            yield Fault("", "--model-repository must be specified")
        if self.load_model and self.model_control_mode is not ModelControlMode.EXPLICIT:
            yield Fault("", "Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
        if "*" in self.load_model and set(self.load_model) != {"*"}:
            yield Fault("", "Wildcard model name '*' must be the ONLY startup model if specified at all.")
        if "" in self.load_model:
            yield Fault("--load-model", "a model name cannot be empty")

    def _backend_config_faults(self) -> Iterator[Fault]:
        if len(list(self._backend_settings())) != len(self.backend_config):
            form = "--backend-config=<backend>,<key>=<value> or --backend-config=<key>=<value>"
            yield Fault("--backend-config", f"{', '.join(self.backend_config)} has a wrong form", f"write {form}")
        for _, key, value in self._backend_settings():
            if key == _DEFAULT_MAX_BATCH_SIZE_KEY and not (value.isascii() and value.isdecimal()):
                yield Fault("--backend-config", f"{key}={value} is no integer >= 0")

    def _cache_faults(self) -> Iterator[Fault]:
        for setting in self.cache_config:
            size = setting.removeprefix(_LOCAL_CACHE)
            if size == setting or not (size.isascii() and size.isdecimal() and int(size) > 0):
                yield Fault("--cache-config", f"{setting} is no cache of this server", "give local,size=BYTES")
        if len(self.cache_config) > 1:
            yield Fault("--cache-config", "there can be only one cache", "give it once")

    def _number_faults(self) -> Iterator[Fault]:
        at_least = {
            "exit_timeout_secs": 0,
            "log_verbose": 0,
            "model_load_thread_count": 1,
            "http_max_input_size": 1,
            "weights_settle_secs": 0,
            "spare_weights_idle_secs": 0,
            "weights_memory_limit": 0,
        }
        for name, least in at_least.items():
            value = getattr(self, name)
            if not value >= least:
                yield Fault(_flag(name), f"{value} is out of range", f"give {least} or more")
        if not self.repository_poll_secs > 0:
            yield Fault(
                _flag("repository_poll_secs"), f"{self.repository_poll_secs} is out of range", "give more than 0"
            )
        for name in ("http_port", "grpc_port", "metrics_port"):
            port = getattr(self, name)
            if not 0 <= port <= 65535:
                yield Fault(_flag(name), f"{port} is out of range", "give a port of 0 (any free one) to 65535")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
