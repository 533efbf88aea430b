"""Writing weights files: any source to any format, in pieces, written aside and renamed into place."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rebind.errors import AlreadyExists, Fault, InvalidArgument, StorageFailed
from rebind.weights.header import size_problem
from rebind.weights.progress import Progress
from rebind.weights.sharded import MOST_SHARDS
from rebind.weights.slots import DTYPES, NUMPY_DTYPES, refusal, shown
from rebind.weights.zip_writing import TORCH, npz_problem, torch_problem, write_npz, write_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from rebind.weights.progress import Report
    from rebind.weights.slots import TensorInfo
    from rebind.weights.source import WeightsSource

MOST_SHARD_BYTES = 5_000_000_000
"""Bytes of tensors in one shard, where nobody says otherwise; as Hugging Face's libraries write them."""

INDEX_SUFFIX = ".safetensors.index.json"

_PIECE_BYTES = 1 << 20  # a whole number of elements of any dtype
_HEADER_ALIGNMENT = 64
"""Of the first tensor in a safetensors file: the widest loads of a CPU, and the line of its cache."""
_WTS_DTYPES: Mapping[str, tuple[int, str]] = {"F32": (0, "<u4"), "F16": (1, "<u2")}
"""TensorRT's numbers of the dtypes (``nvinfer1::DataType``), and their bits as numpy reads them."""


@dataclass(frozen=True, slots=True)
class Written:
    """One file that has been written, how many tensors are in it, and their bytes."""

    path: Path
    tensors: int
    nbytes: int


class Selection:
    """Tensors of a source that are to be written, in that order, row-major; ``advance`` gets the sizes of pieces."""

    def __init__(self, source: WeightsSource, names: Iterable[str], advance: Callable[[int], None]) -> None:
        self.tensors: Mapping[str, TensorInfo] = {name: source.tensors[name] for name in names}
        self.nbytes = sum(info.nbytes for info in self.tensors.values())
        self._source = source
        self._advance = advance

    def part(self, names: Sequence[str]) -> Selection:
        """Those of ``names`` alone."""
        return Selection(self._source, names, self._advance)

    def pieces(self, name: str) -> Iterator[memoryview]:
        """A tensor's bytes, a few MiB at a time; each piece is gone with the next."""
        nbytes = self.tensors[name].nbytes
        buffer = memoryview(bytearray(min(nbytes, _PIECE_BYTES)))
        for start in range(0, nbytes, _PIECE_BYTES):
            piece = buffer[: min(nbytes - start, _PIECE_BYTES)]
            self._source.read_into(name, start, piece)
            yield piece
            self._advance(len(piece))


@dataclass(frozen=True, slots=True)
class Format:
    """How tensors become one file, and what such a file cannot hold.

    ``dtypes`` are safetensors' names of those it can, ``holds`` says the same in words; ``problem`` says why a tensor
    of such a name, or of such a shape, cannot be in it, "" if it can.
    """

    write: Callable[[BinaryIO, Selection], None]
    holds: str
    dtypes: frozenset[str]
    problem: Callable[[str, TensorInfo], str]


def write_weights(
    source: WeightsSource,
    target: Path,
    *,
    overwrite: bool = False,
    most_shard_bytes: int = MOST_SHARD_BYTES,
    report: Report | None = None,
) -> list[Written]:
    """Writes the tensors of ``source`` to ``target``, in the format that its suffix names.

    An index (``.safetensors.index.json``) gets shards beside it, of at most ``most_shard_bytes`` each unless one tensor
    has more. What was there stays until everything is written, durable and checked; then it is replaced. An index goes
    first and comes last, so that none ever names shards of different makes. Memory: a few MiB, whatever the tensors
    have. Returns the files, the one called ``target`` last.

    Raises :class:`rebind.errors.InvalidArgument` for a suffix that is none of ours, for a directory of that name, and
    for more shards than an index may have, ``AlreadyExists`` unless ``overwrite``, ``WeightsRefused`` for tensors that
    the format cannot hold and for a source that changes meanwhile, and ``StorageFailed`` when the disk refuses.
    """
    format = _format_of(target)
    progress = Progress(sum(info.nbytes for info in source.tensors.values()), report)
    selection = Selection(source, source.tensors, progress.advance)
    _require_expressible(selection, format, target)
    if target.name.endswith(INDEX_SUFFIX):
        parts = _shards(selection, target, most_shard_bytes)
    else:
        parts = {target.name: list(selection.tensors)}
    files = [target.with_name(name) for name in {**parts, target.name: []}]
    _require_free(files, overwrite=overwrite)
    with _storage_errors(target, selection.nbytes), _aside(target) as aside:
        written = [_write_part(selection, part, target.with_name(name), aside, format) for name, part in parts.items()]
        if target.name not in parts:
            written.append(_write_index(selection, parts, target, aside))
        source.check_unchanged()
        if target.name not in parts:
            target.unlink(missing_ok=True)
            _sync(target.parent)
        for path in files:
            (aside / path.name).replace(path)
        _sync(target.parent)
    return written


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A path to write a file to, which becomes ``target`` when the block has run, and is gone when the block fails."""
    with _aside(target) as directory:
        yield directory / target.name
        (directory / target.name).replace(target)


def _format_of(target: Path) -> Format:
    for suffix, format in FORMATS.items():
        if target.name.endswith(suffix):
            return format
    raise InvalidArgument(f"{target}: unknown kind of weights file; known suffixes are {', '.join(FORMATS)}")


def _require_free(files: Sequence[Path], *, overwrite: bool) -> None:
    """Raises what :func:`write_weights` does for files that are there, and for directories in their places."""
    for path in files:
        if path.is_dir():
            raise InvalidArgument(f"{path} is a directory")
    taken = [str(path) for path in files if path.exists()]
    if taken and not overwrite:
        raise AlreadyExists(f"{', '.join(taken)} exists already")


def _require_expressible(selection: Selection, format: Format, target: Path) -> None:
    """Raises :class:`rebind.errors.WeightsRefused` with everything that files of this format cannot hold."""
    faults = []
    for name, info in selection.tensors.items():
        if info.dtype not in format.dtypes:
            problem = f"is {info.dtype}, but such a file holds {format.holds} only"
            faults.append(Fault(shown(name), problem, "safetensors files hold every dtype"))
        if problem := _problem_of_text(name) or format.problem(name, info):
            faults.append(Fault(shown(name), problem))
    if faults:
        raise refusal(f"{target} cannot be written", faults)


def _problem_of_text(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        return "its name is no valid Unicode text"
    return ""


def _shards(selection: Selection, target: Path, most_bytes: int) -> dict[str, list[str]]:
    """Names of files, and of the tensors that go into each: filled one after another, in the order of the source."""
    shards: list[list[str]] = []
    room = 0
    for name, info in selection.tensors.items():
        if not shards or info.nbytes > room:
            shards.append([])
            room = most_bytes
        shards[-1].append(name)
        room -= info.nbytes
    if len(shards) > MOST_SHARDS:
        raise InvalidArgument(f"{target} would have {len(shards)} shards, more than {MOST_SHARDS}: allow larger ones")
    stem = target.name.removesuffix(INDEX_SUFFIX)
    return {f"{stem}-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, start=1)}


def _write_part(whole: Selection, names: Sequence[str], path: Path, aside: Path, format: Format) -> Written:
    part = whole.part(names)
    with _durable(aside / path.name) as file:
        format.write(file, part)
    return Written(path, len(part.tensors), part.nbytes)


def _write_index(selection: Selection, parts: Mapping[str, Sequence[str]], target: Path, aside: Path) -> Written:
    weight_map = {name: shard for shard, names in parts.items() for name in names}
    document = {"metadata": {"total_size": selection.nbytes}, "weight_map": weight_map}
    with _durable(aside / target.name) as file:
        text = json.dumps(document, indent=1).encode()
        _require_readable(text, "its index")
        file.write(text)
    return Written(target, len(weight_map), selection.nbytes)


def safetensors_head(tensors: Mapping[str, TensorInfo]) -> tuple[bytes, list[str]]:
    """What a safetensors file of these tensors begins with, and the order in which their bytes follow.

    Wide elements first, as the library writes them, so that every tensor begins at a multiple of its element. Raises
    :class:`rebind.errors.InvalidArgument` for a header that we would not read.
    """
    order = sorted(tensors, key=lambda name: -DTYPES[tensors[name].dtype])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # Hugging Face's libraries refuse a file without
    end = 0
    for name in order:
        info = tensors[name]
        header[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": (end, end + info.nbytes)}
        end += info.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT)
    _require_readable(text, "its header")
    return len(text).to_bytes(8, "little") + text, order


def _write_safetensors(file: BinaryIO, selection: Selection) -> None:
    head, order = safetensors_head(selection.tensors)
    file.write(head)
    for name in order:
        file.writelines(selection.pieces(name))


def _require_readable(text: bytes, what: str) -> None:
    """Nothing is written that we would not read."""
    if problem := size_problem(text):
        raise InvalidArgument(f"{what} cannot be written: it {problem}")


def _write_wts(file: BinaryIO, selection: Selection) -> None:
    """The text form of TensorRT's samples: the number of tensors; then of each a line with its name, size and bits.

    The form that most programs read has no dtypes, and means float32; with float16 there, each line has one. Readers
    tell the two by the counts, and need one tensor that fits one of them only.
    """
    if selection.tensors and all(info.dtype == "F16" and not info.nbytes for info in selection.tensors.values()):
        raise InvalidArgument("a .wts file of F16 tensors that all have no elements would read as F32 of one each")
    typed = any(info.dtype != "F32" for info in selection.tensors.values())
    file.write(f"{len(selection.tensors)}\n".encode())
    for name, info in selection.tensors.items():
        number, bits = _WTS_DTYPES[info.dtype]
        itemsize = np.dtype(bits).itemsize
        dtype = f"{number} " if typed else ""
        file.write(f"{name} {dtype}{info.nbytes // itemsize}".encode())
        for piece in selection.pieces(name):
            # As numbers, so the most significant digit first.
            swapped = np.frombuffer(piece, bits).byteswap().tobytes()
            file.write(b" " + swapped.hex(" ", itemsize).encode())
        file.write(b"\n")


def _wts_problem(name: str, _: TensorInfo) -> str:
    if not name or any(map(str.isspace, name)) or "\0" in name:
        return "white space ends a name there, and a NUL the file"
    return ""


def _safetensors_problem(name: str, _: TensorInfo) -> str:
    return "its name stands for the file's metadata there" if name == "__metadata__" else ""


@contextmanager
def _durable(path: Path) -> Iterator[BinaryIO]:
    """A new file, safe on the disk when the block has run."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """A directory beside ``target``, so that files move out of it by a rename; gone afterwards.

    What a killed process left there goes first: the kernel drops the lock of one that ends. Raises ``StorageFailed``
    while another one writes the same target.
    """
    directory = target.with_name(f".{target.name}.aside")
    directory.mkdir(exist_ok=True)
    path = directory / ".lock"  # no target's name: it ends with no suffix of ours
    with path.open("wb") as lock:
        if not _holds(lock, path):
            raise StorageFailed(f"another process is writing {target}")
        try:
            for left in directory.iterdir():
                if left != path:
                    left.unlink()
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _holds(lock: BinaryIO, path: Path) -> bool:
    """Takes the lock, unless another process has it, or just removed it when it was done."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _sync(directory: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _storage_errors(target: Path, nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"cannot write {target} ({nbytes} bytes of tensors): {error.strerror}") from error


_SAFETENSORS = Format(_write_safetensors, "all dtypes", frozenset(DTYPES), _safetensors_problem)
_TORCH = Format(write_torch, "torch's dtypes", TORCH, torch_problem)
FORMATS: Mapping[str, Format] = {
    ".safetensors": _SAFETENSORS,
    INDEX_SUFFIX: _SAFETENSORS,
    ".wts": Format(_write_wts, "F32 and F16", frozenset(_WTS_DTYPES), _wts_problem),
    ".npz": Format(write_npz, "numpy's dtypes", frozenset(NUMPY_DTYPES), npz_problem),
    ".pt": _TORCH,
    ".pth": _TORCH,
}
"""The formats that can be written, by the suffix of the file's name."""
