"""Weights that arrive as a request's body: from the socket straight into the memory where they are to serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rebind.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

    from rebind.http.reply import Outcome
    from rebind.weights.incoming import IncomingFile
    from rebind.weights.spool import SpooledFile


class Upload:
    """The sink of a weights file: ``answer`` is asked once ``file`` is whole, ``abandon`` drops what has arrived."""

    def __init__(
        self, file: IncomingFile | SpooledFile, answer: Callable[[], Outcome], abandon: Callable[[], None]
    ) -> None:
        self.received = file.received
        self.abandon = abandon
        self._file = file
        self._answer = answer

    def buffer(self) -> memoryview:
        """Where the next bytes go: memory of the weights. Raises InvalidArgument after the end of the file."""
        if self._file.complete:
            raise InvalidArgument(
                "the body has bytes after the last tensor of its safetensors file; send no more than that"
            )
        return self._file.buffer()

    def finish(self) -> Outcome:
        """Raises WeightsRefused when the file is cut short."""
        try:
            self._file.finish()
        except BaseException:
            self.abandon()
            raise
        return self._answer()
