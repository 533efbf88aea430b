"""Zip files whose whole directory is checked before anything in them is read: what torch, numpy and exporters write.

Whoever wrote the file is not trusted. Every place and size is held against the file, no two members overlap or share
a name, and nothing that a file claims costs memory before it is checked (``cases.md`` T1). The format is PKWARE's
APPNOTE 6.3.10; ``zipfile`` reads the directory, members are read by ``pread``.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Self

from rebind.errors import Fault
from rebind.weights.pinned import PinnedFile
from rebind.weights.slots import refusal, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from rebind.errors import WeightsRefused

DAMAGED = ("is damaged: its CRC does not match", "copy the file again")
"""Problem and remedy of bytes that are not those that were written."""

_COPY_AGAIN = "copy the file again"
_LOCAL_MAGIC = b"PK\3\4"
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENCRYPTED = 0x1
_MOST_DIRECTORY_BYTES = 16 << 20
"""Of the zip file's directory, which names 150,000 members in that."""
_MOST_INFLATION = 1032
"""How many times as long as before something is when inflated, at most (RFC 1951: 258 bytes of two bits)."""
_CHUNK_BYTES = 1 << 20
_LEAST_READ_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Member:
    """One member: where its bytes are in the file, how many they are, and the CRC-32 of them (None: unknown).

    ``stored_nbytes`` lie in the file from ``offset`` on; they are deflated if ``compressed``, and else the ``nbytes``
    bytes of the member themselves.
    """

    name: str
    offset: int
    nbytes: int
    crc: int | None
    compressed: bool
    stored_nbytes: int


class MemberFile:
    """Members at known places of one file, which it owns. Safe to read from any threads at once."""

    def __init__(self, file: PinnedFile) -> None:
        self.file = file

    def read(self, member: Member, limit_bytes: int) -> bytes:
        """The bytes of a member, inflated if they are not stored plain, with their CRC checked.

        Raises :class:`rebind.errors.WeightsRefused` for a member of more than ``limit_bytes``, before it takes any
        memory, and for a damaged one.
        """
        if member.nbytes > limit_bytes:
            raise self.refusal(member, f"has {member.nbytes} bytes, more than {limit_bytes}")
        data = self._read_deflated(member) if member.compressed else self.file.read(member.offset, member.nbytes)
        if member.crc is not None and zlib.crc32(data) != member.crc:
            raise self.refusal(member, *DAMAGED)
        return data

    def read_start(self, member: Member, nbytes: int) -> bytes:
        """The first ``nbytes`` bytes of a member, or all if it has fewer; not checked against the CRC."""
        nbytes = min(nbytes, member.nbytes)
        if member.compressed:
            return self._inflate(member, nbytes)[0]
        return self.file.read(member.offset, nbytes)

    def pieces(self, member: Member) -> Iterator[bytes]:
        """All bytes of a member that is stored plain, a MiB at a time.

        Raises :class:`rebind.errors.WeightsRefused` after the last piece if the CRC is another one.
        """
        crc = 0
        for start in range(0, member.nbytes, _CHUNK_BYTES):
            piece = self.file.read(member.offset + start, min(_CHUNK_BYTES, member.nbytes - start))
            crc = zlib.crc32(piece, crc)
            yield piece
        if member.crc is not None and crc != member.crc:
            raise self.refusal(member, *DAMAGED)

    def refusal(self, member: Member, problem: str, remedy: str = "") -> WeightsRefused:
        """The error that says one thing of one member."""
        return refusal(str(self.file.path), [Fault(shown(member.name), problem, remedy)])

    def close(self) -> None:
        """Closes the file; harmless when repeated."""
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_deflated(self, member: Member) -> bytes:
        # One byte more than there should be shows that there are too many.
        data, ended = self._inflate(member, member.nbytes + 1)
        if len(data) != member.nbytes or not ended:
            raise self.refusal(member, f"is damaged: it does not inflate to {member.nbytes} bytes", _COPY_AGAIN)
        return data

    def _inflate(self, member: Member, most: int) -> tuple[bytes, bool]:
        """The first ``most`` bytes of a deflated member, and whether the end of it was seen."""
        data = bytearray()
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        step = min(max(most, _LEAST_READ_BYTES), _CHUNK_BYTES)
        try:
            for start in range(0, member.stored_nbytes, step):
                if len(data) == most:
                    break
                chunk = self.file.read(member.offset + start, min(step, member.stored_nbytes - start))
                data += inflater.decompress(chunk, most - len(data))
        except zlib.error as error:
            raise self.refusal(member, f"is damaged: {error}", _COPY_AGAIN) from error
        return bytes(data), inflater.eof


class ZipArchive(MemberFile):
    """An open zip file; ``members`` are those that are no directories, by their names, in the order of the file.

    ``file`` is a path, or a file that the caller has pinned already; the archive owns it from then on.

    Raises :class:`rebind.errors.WeightsRefused` when it cannot be opened, is no zip file, or has a directory that is
    damaged: members that lie outside of the file, overlap or are encrypted, names that come twice.
    """

    def __init__(self, file: Path | PinnedFile) -> None:
        super().__init__(file if isinstance(file, PinnedFile) else PinnedFile(file))
        try:
            self.members: Mapping[str, Member] = self._read_directory()
        except BaseException:
            self.close()
            raise

    def _read_directory(self) -> dict[str, Member]:
        try:
            with zipfile.ZipFile(_DirectoryView(self.file)) as zipped:
                infos = [info for info in zipped.infolist() if not info.is_dir()]
        except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OSError, struct.error) as error:
            was_zip = self.file.nbytes >= len(_LOCAL_MAGIC) and self.file.read(0, len(_LOCAL_MAGIC)) == _LOCAL_MAGIC
            problem = f"cannot be read as a zip file ({error})"
            raise self.file.refusal(problem, _COPY_AGAIN if was_zip else "") from error
        faults = [
            Fault(shown(name), "there are two members of this name", "write the file anew")
            for name, count in Counter(info.filename for info in infos).items()
            if count > 1
        ]
        members = []
        for info in infos:
            problem = _problem(info)
            place = None if problem else self._place(info)
            if place is None:
                faults.append(Fault(shown(info.filename), problem or "lies outside of the file", _COPY_AGAIN))
            else:
                members.append(place)
        faults = faults or list(_overlaps(members))
        if faults:
            raise refusal(str(self.file.path), faults)
        return {member.name: member for member in members}

    def _place(self, info: zipfile.ZipInfo) -> Member | None:
        """Where a member's bytes are; None if that is not within the file, or nothing of a zip file is there."""
        start = info.header_offset
        if not 0 <= start <= self.file.nbytes - _LOCAL_HEADER.size:
            return None
        magic, name_length, extra_length = _LOCAL_HEADER.unpack(self.file.read(start, _LOCAL_HEADER.size))
        offset = start + _LOCAL_HEADER.size + name_length + extra_length
        if magic != _LOCAL_MAGIC or offset + info.compress_size > self.file.nbytes:
            return None
        compressed = info.compress_type != zipfile.ZIP_STORED
        # torch writes zero when it was told to compute none (torch.serialization.set_crc32_options).
        return Member(info.filename, offset, info.file_size, info.CRC or None, compressed, info.compress_size)


def _problem(info: zipfile.ZipInfo) -> str:
    """What the directory itself says that cannot be, or cannot be read."""
    if info.flag_bits & _ENCRYPTED:
        return "is encrypted"
    if info.compress_type == zipfile.ZIP_STORED:
        return "has another size than it takes" if info.file_size != info.compress_size else ""
    if info.compress_type != zipfile.ZIP_DEFLATED:
        return f"is compressed by method {info.compress_type}, which is neither none nor deflate"
    if info.file_size > _MOST_INFLATION * info.compress_size:
        return f"claims to inflate from {info.compress_size} to {info.file_size} bytes"
    return ""


def _overlaps(members: list[Member]) -> Iterator[Fault]:
    for member, following in pairwise(sorted(members, key=lambda member: (member.offset, member.stored_nbytes))):
        if member.offset + member.stored_nbytes > following.offset:
            yield Fault(shown(following.name), f"overlaps {shown(member.name)}", _COPY_AGAIN)


class _DirectoryView(io.RawIOBase):
    """A pinned file as ``zipfile`` wants it, for reading the directory: never more than that may have at a time.

    ``zipfile`` would read as many bytes as the file claims that its directory has.
    """

    def __init__(self, file: PinnedFile) -> None:
        self._file = file
        self._position = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.nbytes}[whence]
        if position < 0:
            raise OSError("before the beginning of the file")
        self._position = position
        return position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._file.nbytes - self._position)
        size = rest if size < 0 else min(size, rest)
        if size > _MOST_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"its directory has {size} bytes, more than {_MOST_DIRECTORY_BYTES}")
        data = self._file.read(self._position, size)
        self._position += size
        return data
