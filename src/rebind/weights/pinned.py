"""One file held open: read by ``pread`` only, and known to be the one that was opened.

A file of the repository is never mapped: one that is overwritten in place would change the weights that serve, and
one that is truncated would end the process (``cases.md`` W9, W10). A read that finds less than was promised, or a
file that is not the one that was opened, is a :class:`rebind.errors.WeightsRefused` like any other.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from rebind.errors import Fault, WeightsRefused

if TYPE_CHECKING:
    from pathlib import Path


class PinnedFile:
    """A regular file held open, with its size and time of change as they were then.

    Raises :class:`WeightsRefused` when it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # O_NONBLOCK: opening a FIFO must not wait for a writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise self.refusal(f"cannot be opened: {_reason(error)}") from error
        self._opened = os.fstat(self._descriptor)
        if not stat.S_ISREG(self._opened.st_mode):
            self.close()
            raise self.refusal("is no regular file")

    @property
    def nbytes(self) -> int:
        """Its size when it was opened."""
        return self._opened.st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from ``offset`` on; errors as :meth:`read_into`."""
        data = bytearray(nbytes)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills ``buffer`` from ``offset`` on; :class:`WeightsRefused` when the file ends before."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise self.refusal(f"cannot be read: {_reason(error)}") from error
            if count == 0:
                raise self._changed(f"it has {os.fstat(self._descriptor).st_size} bytes now")
            done += count

    def check_unchanged(self) -> None:
        """Raises :class:`WeightsRefused` when the file has been written to since it was opened.

        A file that another one has replaced by a rename is still there for us, whole and as it was.
        """
        now = os.fstat(self._descriptor)
        if (now.st_size, now.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
            raise self._changed("it was written to")

    def check_in_place(self) -> None:
        """Raises :class:`WeightsRefused` when the path names another file by now, or none."""
        try:
            now = self.path.stat()
        except OSError:
            raise self._changed("it is gone") from None
        if (now.st_dev, now.st_ino) != (self._opened.st_dev, self._opened.st_ino):
            raise self._changed("another file took its place")

    def close(self) -> None:
        """Gives the descriptor back; later reads fail rather than reach whatever gets its number."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def refusal(self, problem: str, remedy: str = "") -> WeightsRefused:
        """The error that says one thing of the file as a whole."""
        return WeightsRefused(str(self.path), [Fault("", problem, remedy)])

    def _changed(self, how: str) -> WeightsRefused:
        return self.refusal(f"changed while it was read: {how}", "write aside and rename, as `rebind publish` does")


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
