"""Weights that arrive as a request's body: read from the socket straight to where the stage wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rebind.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

    from rebind.http.reply import Outcome
    from rebind.weights.incoming import IncomingFile


class Upload:
    """The sink of a weights file: ``answer`` is asked once ``file`` is whole, ``abandon`` drops what has arrived."""

    def __init__(self, file: IncomingFile, answer: Callable[[], Outcome], abandon: Callable[[], None]) -> None:
        self.received = file.received
        self.abandon = abandon
        self._file = file
        self._answer = answer

    def buffer(self) -> memoryview:
        """Where the next bytes go: the file's own memory. Raises InvalidArgument after the end of the file."""
        if self._file.complete:
            raise InvalidArgument(
                "the body has bytes after the last tensor of its safetensors file; send no more than that"
            )
        return self._file.buffer()

    def finish(self) -> Outcome:
        """The answer; WeightsRefused when the file is cut short."""
        try:
            self._file.finish()
        except BaseException:
            self.abandon()
            raise
        return self._answer()
