"""Which engines there are, and which one a model is for.

Built-in engines are known by name and imported when they are first asked for; others announce themselves by an entry
point of the group ``rebind.engines`` whose object is a :class:`rebind.engines.contract.Engine`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from rebind.config.validation import canonical_platform
from rebind.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rebind.config.schema import ConfigMessage
    from rebind.engines.contract import Engine

GROUP = "rebind.engines"
_BUILT_IN = {
    "aot_inductor": "rebind.engines.aot_inductor:ENGINE",
    "torchscript": "rebind.engines.torchscript:ENGINE",
}


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine as ``rebind engines`` prints it.

    ``engine`` None: it could not be imported. ``reason``: why it cannot run, None if it can. ``limitation``: what it
    cannot do here although it runs.
    """

    name: str
    engine: Engine | None
    reason: str | None
    limitation: str | None


@functools.cache
def engine_names() -> tuple[str, ...]:
    """The names of all engines, sorted. Nothing is imported."""
    return tuple(sorted(_references()))


@functools.cache
def engine(name: str) -> Engine:
    """The engine ``name``, imported now if it was not.

    Raises :class:`rebind.errors.InvalidArgument` for an unknown name, and :class:`rebind.errors.Unsupported` for an
    engine that cannot be imported. One that can be imported may still be unavailable: ask it.
    """
    reference = _references().get(name)
    if reference is None:
        raise InvalidArgument(f"unknown engine '{name}'; known are {', '.join(engine_names())}")
    try:
        module, _, attribute = reference.partition(":")
        found: Engine = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # third parties fail in any way
        raise Unsupported(f"engine '{name}' cannot be imported from {reference}: {error!r}") from error
    return found


def engines() -> tuple[EngineStatus, ...]:
    """Every engine with OK or the reason why not."""
    return tuple(_status(name) for name in engine_names())


def find_engine(model_file: Path, config: ConfigMessage) -> Engine:
    """The engine that serves a model: the one its configuration asks for, else the one whose kind of file it has.

    Raises :class:`rebind.errors.Unsupported` when there is none, or when it cannot run here, with the reason.
    """
    found = engine_for_config(config.platform, config.backend) or engine_for_file(model_file.name, config.backend)
    reason = found.unavailable_reason()
    if reason is not None:
        raise Unsupported(f"engine '{found.name}', which serves {model_file.name}, cannot run here: {reason}")
    return found


def engine_for_file(file_name: str, backend: str = "") -> Engine:
    """The engine, of those of ``backend`` if one is given, whose plan sources have the suffix of ``file_name``.

    Raises :class:`rebind.errors.Unsupported`.
    """
    known = {
        PurePath(name).suffix: candidate
        for candidate in _available()
        if backend in ("", candidate.backend)
        for name in candidate.model_files
    }
    suffix = PurePath(file_name).suffix
    if suffix not in known:
        which = f"no engine of backend '{backend}'" if backend else "no engine"
        raise Unsupported(f"{which} serves '{file_name}'; known model files end with {', '.join(sorted(known))}")
    return known[suffix]


def engine_for_config(platform: str, backend: str) -> Engine | None:
    """The engine that a configuration asks for by ``platform`` and ``backend``.

    None when it leaves the choice to the model file: both are empty, or the backend alone is given and has several
    engines. Raises :class:`rebind.errors.Unsupported` when no engine has what is given, naming what there is.
    """
    if not (platform or backend):
        return None
    wanted = canonical_platform(platform)
    fitting = [
        candidate
        for candidate in _available()
        if wanted in ("", candidate.platform) and backend in ("", candidate.backend)
    ]
    if not fitting:
        known = ", ".join(f"platform '{e.platform}' (backend '{e.backend}')" for e in _available())
        raise Unsupported(f"no engine for platform '{platform}' and backend '{backend}'; there are {known}")
    return fitting[0] if platform or len(fitting) == 1 else None


def _available() -> list[Engine]:
    return [status.engine for status in engines() if status.engine]


def _references() -> Mapping[str, str]:
    announced = {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)}
    return {**announced, **_BUILT_IN}


def _status(name: str) -> EngineStatus:
    try:
        found = engine(name)
    except Unsupported as error:
        return EngineStatus(name, None, str(error), None)
    return EngineStatus(name, found, found.unavailable_reason(), found.limitation())
