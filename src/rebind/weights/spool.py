"""Weights files that arrive and wait on the disk, for models whose memory holds one weight set only."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rebind.errors import Fault, StorageFailed, WeightsRefused
from rebind.weights.header import MOST_JSON_BYTES
from rebind.weights.incoming import IncomingFile
from rebind.weights.safetensors import open_safetensors
from rebind.weights.slots import refusal
from rebind.weights.source import WeightsSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rebind.weights.slots import SlotTable, TensorInfo

_BUFFER_BYTES = 1 << 20


class Spool:
    """What :class:`rebind.weights.reception.Reception` is for memory, for the disk: files without names.

    They lie in the system's directory for temporary files (``TMPDIR``), and are gone with :meth:`close`, or with the
    process. All together may be as large as the weights of ``slots`` with one header.
    """

    def __init__(self, slots: SlotTable, subject: str) -> None:
        self._most_bytes = slots.nbytes + MOST_JSON_BYTES
        self.subject = subject
        self._files: list[WeightsSource] = []
        self.received_bytes = 0

    @property
    def received_names(self) -> set[str]:
        """The tensors of all files that have arrived whole."""
        return {name for file in self._files for name in file.tensors}

    def incoming(self) -> SpooledFile:
        """Where another safetensors file goes."""
        return SpooledFile(self)

    def source(self) -> WeightsSource:
        """All tensors; of one that came twice, the later."""
        return _Merged(self.subject, self._files)

    def close(self) -> None:
        """Gives the disk's room back."""
        for file in self._files:
            file.close()

    def count(self, nbytes: int) -> None:
        """Counts bytes that have arrived; WeightsRefused when they are more than the weights can have."""
        self.received_bytes += nbytes
        if self.received_bytes > self._most_bytes:
            raise refusal(self.subject, [Fault("", f"more than the {self._most_bytes} bytes that it can have")])

    def add(self, path: Path) -> None:
        """A file is complete; WeightsRefused when it is damaged."""
        try:
            self._files.append(open_safetensors(path))
        except WeightsRefused as refused:
            raise WeightsRefused(self.subject, refused.faults) from None  # the path is none that a client knows


class SpooledFile(IncomingFile):
    """One file of a :class:`Spool`: its bytes go to the disk."""

    def __init__(self, spool: Spool) -> None:
        self.subject = spool.subject
        self.complete = False
        self._spool = spool
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._file = tempfile.TemporaryFile(prefix="rebind-weights-")  # noqa: SIM115 - it outlives this call

    def buffer(self) -> memoryview:
        return self._buffer

    def received(self, count: int) -> None:
        """See :meth:`IncomingFile.received`; StorageFailed when the disk does not take them."""
        self._spool.count(count)
        try:
            # On the event loop: into the page cache a MiB takes 0.2 ms (median; 2 to 5 ms for one in a hundred), which
            # is less than to hand it to a thread, and to hold the connection up until that is done.
            self._file.write(self._buffer[:count])
        except OSError as error:
            raise StorageFailed(f"cannot keep arriving weights in {tempfile.gettempdir()}: {error}") from error

    def finish(self) -> None:
        with self._file:
            self._file.flush()
            self._spool.add(Path(f"/proc/self/fd/{self._file.fileno()}"))
        self.complete = True


class _Merged(WeightsSource):
    """Several files as one, which owns none of them."""

    def __init__(self, subject: str, files: list[WeightsSource]) -> None:
        self.subject = subject
        self._homes = {name: file for file in files for name in file.tensors}
        self.tensors: Mapping[str, TensorInfo] = {name: home.tensors[name] for name, home in self._homes.items()}

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self._homes[name].read_into(name, start, buffer)

    def check_unchanged(self) -> None:
        """Nobody else can write to them: they have no names."""

    def close(self) -> None:
        """They stay open for another try."""
