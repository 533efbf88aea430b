"""What a weights file is to those who read it: named tensors, whatever form it has on the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rebind.weights.slots import TensorInfo


class WeightsSource(Protocol):
    """An opened weights file whose header has been validated; a context manager, safe to read from any threads at once.

    ``subject`` is what messages call it, the path; ``tensors`` are all its tensors by name.
    """

    subject: str
    tensors: Mapping[str, TensorInfo]

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fills ``buffer`` with the tensor's bytes, row-major and little-endian, from ``start`` on; both lie within it.

        Raises :class:`rebind.errors.WeightsRefused` when the file has become shorter or cannot be read.
        """
        ...

    def check_unchanged(self) -> None:
        """Raises :class:`rebind.errors.WeightsRefused` when what was read may not be what was opened."""
        ...

    def close(self) -> None:
        """Gives the file back; harmless when repeated."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
