"""Which versions of a model are wanted, and which files make a version.

A version's plan is the plan file in its directory, or, when the directory holds weights only, that of the nearest lower
version which has one (architecture section 4). Its weights are the weights file in its own directory, or else those
inside the plan file. Where two files could be meant, neither is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rebind.config.model import All, Latest, Specific
from rebind.config.validation import canonical_platform
from rebind.errors import ConfigInvalid, Fault, InvalidArgument, NotFound, RepositoryInvalid, Unavailable
from rebind.repository.manifest import INDEX_SUFFIX, shard_names
from rebind.repository.scan import is_ignored, printable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from rebind.config.model import VersionPolicy
    from rebind.repository.scan import ModelDirectory, VersionDirectory

PLAN_FILES = {
    "model.pt2": ("torch_aoti", "pytorch"),
    "model.pt": ("pytorch_libtorch", "pytorch"),
    "model.onnx": ("onnxruntime_onnx", "onnxruntime"),
    "model.xml": ("", "openvino"),
    "model.plan": ("tensorrt_plan", "tensorrt"),
    "model.py": ("", "python"),
}
"""Names of plan files, where the configuration has no ``default_model_filename``; platform and backend of each."""
WEIGHTS_SUFFIXES = (INDEX_SUFFIX, ".safetensors", ".wts", ".npz", ".pth")
_STATE_DICT = ".pt"
"""A suffix of weights files too, but of plan files first: such weights have to be named in the configuration."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The file names that a model's configuration sets; empty: the usual ones of its ``platform`` and ``backend``.

    Each is a plain name in the version directory, never a path: no separators, no dot in front. The *file* may be a
    symbolic link to anywhere, as stores that keep one copy of equal files make them: who can write links into the
    repository can as well write the weights, and names that come over the network never reach a path.

    Raises :class:`ConfigInvalid`.
    """

    default_model_filename: str = ""
    weights_filename: str = ""
    platform: str = ""
    backend: str = ""

    def __post_init__(self) -> None:
        faults = [
            Fault(where, f"'{printable(name)}' is not a plain file name", "name a file of the version directory")
            for where, name in (
                ("default_model_filename", self.default_model_filename),
                ("parameters.WEIGHTS_FILENAME", self.weights_filename),
            )
            if name and not _is_plain(name)
        ]
        if self.weights_filename and weights_suffix(self.weights_filename) is None:
            known = ", ".join((*WEIGHTS_SUFFIXES, _STATE_DICT))
            problem = f"'{printable(self.weights_filename)}' does not end as a weights file"
            faults.append(Fault("parameters.WEIGHTS_FILENAME", problem, f"known: {known}"))
        if not self.plan_names:
            problem = f"'{printable(self.weights_filename)}' is the model file"
            faults.append(Fault("parameters.WEIGHTS_FILENAME", problem, "name the file that holds weights only"))
        if faults:
            raise ConfigInvalid("model configuration", faults)

    @property
    def plan_names(self) -> tuple[str, ...]:
        """The names that make a file a plan. What the configuration calls weights is none."""
        names = (self.default_model_filename,) if self.default_model_filename else self._usual_plan_names()
        return tuple(name for name in names if name != self.weights_filename)

    def weights_names(self, plan_name: str) -> tuple[str, ...]:
        """The names that make a file the weights of the plan file called ``plan_name``."""
        if self.weights_filename:
            return (self.weights_filename,)
        stem = plan_name.rpartition(".")[0] or plan_name
        return tuple(stem + suffix for suffix in WEIGHTS_SUFFIXES)

    def _usual_plan_names(self) -> tuple[str, ...]:
        """Those of the platform and backend; all, if these are unknown, which is then said when an engine is chosen."""
        platform = canonical_platform(self.platform)
        names = [
            name
            for name, (its_platform, its_backend) in PLAN_FILES.items()
            if platform in ("", its_platform) and self.backend in ("", its_backend)
        ]
        return tuple(names or PLAN_FILES)


USUAL_LAYOUT = Layout()
"""The file names of a model whose configuration sets none."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells that a file may have changed, in any direction (cases R9, R10); a hint, the content is the truth.

    The change time is there for copies in place that restore the modification time (``cp -p`` of files from tool chains
    that give every file the same one): weights of one model all have the same size.
    """

    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> Stamp | None:
        """The stamp of the file that ``path`` leads to; None when there is none."""
        try:
            stat = path.stat()
        except OSError:
            return None
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The stamps of several files; equal fingerprints mean that the files need not be read again."""

    stamps: frozenset[tuple[Path, Stamp | None]]

    @classmethod
    def of(cls, paths: Iterable[Path]) -> Fingerprint:
        """The fingerprint of ``paths`` now; a file that is not there counts too."""
        return cls(frozenset((path, Stamp.of(path)) for path in paths))


@dataclass(frozen=True, slots=True)
class VersionSource:
    """The files that make version ``number``.

    ``plan_file`` lies in the directory of ``plan_version``, which is ``number`` or a lower one. ``weights_file`` None:
    the weights are those inside ``plan_file``. ``plan_print`` covers the plan file and what lies beside it except
    weights, ``weights_print`` the weights file and its shards; both were taken before the caller opens a file.
    """

    number: int
    plan_file: Path
    weights_file: Path | None
    plan_version: int
    plan_print: Fingerprint
    weights_print: Fingerprint

    @property
    def model_dir(self) -> Path:
        """The directory of the model, above those of its versions."""
        return self.plan_file.parent.parent


@dataclass(frozen=True, slots=True)
class Choice:
    """Versions that a policy wants and that are there, ascending; ``errors`` are for the log, about missing ones."""

    numbers: tuple[int, ...]
    errors: tuple[str, ...] = ()


def choose(policy: VersionPolicy, available: Collection[int], model: str) -> Choice:
    """The versions to serve among ``available``, which should be those that are completely written (``watch``).

    Raises :class:`InvalidArgument` when none is left. The texts are Triton's (spec 03 section 1).
    """
    numbers = _wanted(policy, available)
    if not numbers:
        raise InvalidArgument(f"at least one version must be available under the version policy of model '{model}'")
    missing = sorted(set(policy.versions).difference(available)) if isinstance(policy, Specific) else []
    errors = (
        f"version {number} is specified for model '{model}', but the version directory is not present"
        for number in missing
    )
    return Choice(tuple(numbers), tuple(errors))


def _wanted(policy: VersionPolicy, available: Collection[int]) -> list[int]:
    match policy:
        case Latest(num_versions):
            return sorted(sorted(available, reverse=True)[:num_versions])
        case All():
            return sorted(available)
        case Specific(versions):
            return sorted(set(versions).intersection(available))


def resolve(directory: ModelDirectory, number: int, layout: Layout = USUAL_LAYOUT) -> VersionSource:
    """The files that make version ``number``, whether a policy wants the version that the plan comes from or not.

    Raises :class:`NotFound` when there is no such version, :class:`RepositoryInvalid` when its files do not make one,
    :class:`Unavailable` when the plan file of the configured platform is missing.
    """
    version = directory.versions.get(number)
    if version is None:
        there = ", ".join(map(str, sorted(directory.versions))) or "none"
        raise NotFound(f"model '{directory.name}' has no version {number} in {directory.path}; there are: {there}")
    home, plan_file = nearest_plan(directory, number, layout)
    weights_file = _weights_file(version, plan_file.name, layout)
    if weights_file is None and home is not version:
        expected = ", ".join((*layout.plan_names, *layout.weights_names(plan_file.name)))
        found = ", ".join(map(printable, sorted(version.files))) or "no files"
        problem = f"neither a plan nor weights for {plan_file} are there (found: {found})"
        raise RepositoryInvalid(str(version.path), [Fault("", problem, f"expected one of {expected}")])
    return VersionSource(
        number=number,
        plan_file=plan_file,
        weights_file=weights_file,
        plan_version=home.number,
        plan_print=Fingerprint.of(home.path / name for name in home.files - weights_among(home.files, layout)),
        weights_print=Fingerprint.of(_with_shards(weights_file)),
    )


def nearest_plan(
    directory: ModelDirectory, number: int, layout: Layout = USUAL_LAYOUT
) -> tuple[VersionDirectory, Path]:
    """The highest version up to ``number`` that has a plan file, and that file.

    Raises :class:`RepositoryInvalid` when there is none, or when that version has two; :class:`Unavailable` with
    Triton's text (spec 04 section 1.1) when there is none with the one name that the configured platform allows.
    """
    looked_at = sorted((version for version in directory.versions if version <= number), reverse=True)
    for candidate in looked_at:
        version = directory.versions[candidate]
        plans = [name for name in layout.plan_names if name in version.files]
        if len(plans) > 1:
            remedy = "remove all but one, or name one as default_model_filename in config.pbtxt"
            raise RepositoryInvalid(str(version.path), [Fault("", f"plan files {_both(plans)} are there", remedy)])
        if plans:
            return version, version.path / plans[0]
    if layout.platform and len(layout.plan_names) == 1:
        home = directory.versions[number].path if number in directory.versions else directory.path / str(number)
        raise Unavailable(f"unable to find '{home / layout.plan_names[0]}' for model instance '{directory.name}'")
    names = ", ".join(layout.plan_names)
    problem = f"version {number} has no plan file, nor has a lower one (looked at: {', '.join(map(str, looked_at))})"
    raise RepositoryInvalid(str(directory.path), [Fault("", problem, f"put one of {names} into a version directory")])


def weights_suffix(name: str) -> str | None:
    """The suffix that tells a weights file's format; None when ``name`` has none of them."""
    return next((suffix for suffix in (*WEIGHTS_SUFFIXES, _STATE_DICT) if name.endswith(suffix)), None)


def _weights_candidates(version: VersionDirectory, plan_name: str, layout: Layout) -> list[str]:
    """The names in ``version`` that could be the weights of ``plan_name``; an index counts with its shards.

    Reads the index when there is another candidate beside it (case W12).
    """
    names = [name for name in layout.weights_names(plan_name) if name in version.files]
    if len(names) > 1 and names[0].endswith(INDEX_SUFFIX):
        shards = shard_names(version.path / names[0])
        names = [name for name in names if name not in shards]
    return names


def weights_among(files: Collection[str], layout: Layout) -> frozenset[str]:
    """Those of a version's ``files`` that hold weights only, by their names; with an index, every possible shard."""
    names = {name for plan in layout.plan_names for name in layout.weights_names(plan)}.intersection(files)
    if any(name.endswith(INDEX_SUFFIX) for name in names):
        names |= {name for name in files if name.endswith(".safetensors")}
    return frozenset(names)


def _weights_file(version: VersionDirectory, plan_name: str, layout: Layout) -> Path | None:
    if layout.weights_filename and layout.weights_filename not in version.files:
        problem = f"the configuration's WEIGHTS_FILENAME names '{layout.weights_filename}', which is not there"
        raise RepositoryInvalid(str(version.path), [Fault("", problem, "add the file or remove the parameter")])
    candidates = _weights_candidates(version, plan_name, layout)
    if len(candidates) > 1:
        remedy = "remove all but one, or name one in the parameter WEIGHTS_FILENAME of config.pbtxt"
        raise RepositoryInvalid(str(version.path), [Fault("", f"weights files {_both(candidates)} are there", remedy)])
    return version.path / candidates[0] if candidates else None


def _with_shards(weights_file: Path | None) -> list[Path]:
    if weights_file is None:
        return []
    shards = shard_names(weights_file) if weights_file.name.endswith(INDEX_SUFFIX) else ()
    return [weights_file, *(weights_file.parent / name for name in shards)]


def _both(names: Collection[str]) -> str:
    return " and ".join(f"'{name}'" for name in names)


def _is_plain(name: str) -> bool:
    return name.isprintable() and "/" not in name and "\\" not in name and not is_ignored(name)
