"""What lies in the repositories: models, their versions, the names of their files. No file is opened here.

Names that come over the network never become paths: a request's model name is looked up among the names found here, and
:func:`check_model_name` refuses the unsafe ones before that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rebind.errors import Fault, InvalidArgument, NotFound, RepositoryInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

CONFIG_FILE = "config.pbtxt"
MODEL_NAME_BYTES = 255
"""The longest file name of Linux's file systems: no longer name can be a directory."""
LARGEST_VERSION = 2**63 - 1
"""Triton keeps version numbers in an int64."""

IGNORED_SUFFIXES = ("~", ".swp", ".swo", ".swx", ".tmp", ".part", ".partial")
"""Editors' backup and swap files, and what copying tools write before they rename."""
_SIDE_DIRECTORIES = frozenset({"configs", "initial_state", "warmup", "weights_check"})
"""Directories of a model that are known not to be versions: no warning about their names."""
_LEADING_DIGITS = re.compile("[0-9]+")
_VERSION_LIKE = re.compile("[+-]?[0-9]")
_CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class VersionDirectory:
    """A version's directory; ``files`` are the names of the files directly in it, without the ignored ones."""

    number: int
    path: Path
    files: frozenset[str]


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A model's directory below ``root``; ``warnings`` are for the log, about directories that were passed over."""

    name: str
    path: Path
    root: Path
    config_path: Path | None
    versions: Mapping[int, VersionDirectory]
    warnings: tuple[str, ...] = field(default=(), compare=False)


def is_ignored(name: str) -> bool:
    """True for names that are never part of a model (case R21): dot-names, ``__pycache__``, swap files."""
    return name.startswith((".", "#")) or name == "__pycache__" or name.endswith(IGNORED_SUFFIXES)


def looks_like_version(name: str) -> bool:
    """True for directory names that are, or were meant to be, version numbers (``3``, ``003``, ``-1``)."""
    return _VERSION_LIKE.match(name) is not None


def check_model_name(name: str) -> None:
    """Refuses names that are no plain directory name; every load and unload passes here first (cases R1, R6).

    Raises :class:`InvalidArgument` with Triton's texts (spec 03 section 5).
    """
    if not name:
        raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
    if name in {".", ".."} or "/" in name or "\\" in name:
        raise InvalidArgument(
            f"invalid model name '{printable(name)}', model name must not contain path traversal characters"
        )
    if _CONTROL_CHARACTERS.search(name):
        raise InvalidArgument(f"invalid model name '{printable(name)}', model name must not contain control characters")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"invalid model name '{printable(name)}', model name must be valid UTF-8") from error
    if size > MODEL_NAME_BYTES:
        raise InvalidArgument(
            f"invalid model name '{printable(name)}', model name must not be longer than {MODEL_NAME_BYTES} bytes"
        )


def printable(name: str) -> str:
    """A name for messages: control and broken characters escaped, long names cut."""
    shown = name if len(name) <= 80 else name[:77] + "..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown)


def scan(roots: Sequence[Path]) -> dict[str, ModelDirectory | RepositoryInvalid]:
    """Every model below ``roots``, by name; what is wrong with a model stands in its place and harms no other.

    A root given twice counts once. A model in two roots is invalid, both paths named (case R7). A directory whose name
    cannot be a model's is invalid too, and listed under its :func:`printable` name.
    Raises :class:`RepositoryInvalid` when a root cannot be listed.
    """
    places: dict[str, list[tuple[Path, Path]]] = {}
    for root in {root.resolve(): root for root in roots}.values():
        for path in _model_paths(root):
            places.setdefault(path.name, []).append((path, root))
    models = ((name, _scan_places(name, found)) for name, found in sorted(places.items()))
    return {printable(name): model for name, model in models if model is not None}


def scan_model(path: Path, root: Path) -> ModelDirectory:
    """One model's directory, which lies below ``root``; ``OSError`` when it cannot be listed."""
    directories, files = _listing(path)
    numbers, warnings = _version_numbers(path, directories)
    versions: dict[int, VersionDirectory] = {}
    for number, name in sorted(numbers.items()):
        try:
            versions[number] = VersionDirectory(number, path / name, frozenset(_listing(path / name)[1]))
        except FileNotFoundError:
            continue  # removed since the model's directory was listed
    return ModelDirectory(
        name=path.name,
        path=path,
        root=root,
        config_path=path / CONFIG_FILE if CONFIG_FILE in files else None,
        versions=versions,
        warnings=tuple(warnings),
    )


def list_model(path: Path) -> ModelDirectory:
    """The model's directory that somebody names; :class:`NotFound` when it cannot be listed."""
    try:
        return scan_model(path, path.parent)
    except OSError as error:
        raise NotFound(f"{path} is no model directory that can be listed: {error.strerror}") from error


def _model_paths(root: Path) -> list[Path]:
    try:
        return [path for path in root.iterdir() if not is_ignored(path.name) and _may_be_directory(path)]
    except OSError as error:
        fault = Fault("", f"cannot be listed: {error.strerror}", "check --model-repository and its permissions")
        raise RepositoryInvalid(f"model repository {root}", [fault]) from error


def _may_be_directory(path: Path) -> bool:
    """False for what is known to be no directory; a later listing tells why one is out of reach."""
    try:
        return path.is_dir()
    except OSError:
        return True


def _scan_places(name: str, places: Sequence[tuple[Path, Path]]) -> ModelDirectory | RepositoryInvalid | None:
    """The model called ``name`` from the places where a directory of that name lies; None when it has just vanished."""
    if len(places) > 1:
        paths = " and ".join(str(path) for path, _ in places)
        fault = Fault("", f"not unique across all model repositories: {paths}", "remove or rename all but one")
        return RepositoryInvalid(f"failed to poll model '{printable(name)}'", [fault])
    path, root = places[0]
    try:
        check_model_name(name)
        return scan_model(path, root)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return RepositoryInvalid(str(path), [Fault("", f"cannot be listed: {error.strerror}", "check its permissions")])
    except InvalidArgument as error:
        return RepositoryInvalid(printable(str(path)), [Fault("", str(error), "rename the directory")])


def _listing(path: Path) -> tuple[list[str], list[str]]:
    """Sorted names of the directories and of the files in ``path``; symbolic links count as what they lead to.

    A link that leads nowhere counts as a file: who needs it fails to open it, and does not go on without it.
    """
    directories: list[str] = []
    files: list[str] = []
    for entry in sorted(path.iterdir()):
        if is_ignored(entry.name):
            continue
        if entry.is_dir():
            directories.append(entry.name)
        elif entry.is_file() or (entry.is_symlink() and not entry.exists()):
            files.append(entry.name)
    return directories, files


def _version_numbers(path: Path, directories: Sequence[str]) -> tuple[dict[int, str], list[str]]:
    """Version number -> directory name, and the warnings about names that were passed over.

    Where both ``1`` and ``1abc`` are there, the plain number is the version.
    """
    numbers: dict[int, str] = {}
    warnings: list[str] = []
    for name in sorted(set(directories) - _SIDE_DIRECTORIES, key=lambda name: (not name.isdecimal(), name)):
        try:
            number = _version_number(name, numbers)
        except ValueError as reason:
            warnings.append(f"ignore version directory '{printable(name)}' {reason} (in {path})")
        else:
            numbers[number] = name
    return numbers, warnings


def _version_number(name: str, taken: Mapping[int, str]) -> int:
    """The number that a directory name stands for; ``ValueError`` with the rest of the warning when there is none.

    Triton's rules and texts (spec 03 section 1): no leading zeros, and digits with something behind them count as the
    number. Negative numbers and those over 64 bits end Triton or freeze it (case C7); here they are skipped.
    """
    if name.startswith("0") and name != "0":
        raise ValueError("which contains leading zeros in its directory name")
    digits = _LEADING_DIGITS.match(name)
    if digits is None:
        raise ValueError("which fails to convert to integral number")
    number = int(digits.group())
    if number > LARGEST_VERSION:
        raise ValueError("whose number does not fit into 64 bits")
    if number in taken:
        raise ValueError(f"which names the same version as '{taken[number]}'")
    return number
