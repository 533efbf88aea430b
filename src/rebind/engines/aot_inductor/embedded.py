"""The weights inside a torch.export archive, as a source for the weight store."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Self

import numpy as np

from rebind.engines.aot_inductor.archive import DAMAGED
from rebind.engines.aot_inductor.crc import PiecewiseCrc
from rebind.errors import Fault, ModelInvalid, WeightsRefused
from rebind.weights.slots import TensorInfo, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rebind.engines.aot_inductor.archive import Archive, Payload


class EmbeddedWeights:
    """Every tensor whose values an archive has: state dict, lifted constants and non-persistent buffers.

    A :class:`rebind.weights.formats.WeightsSource` over an open archive, which stays open. Tensors that were saved in
    another layout (channels last, a transposed view, a slice) are read in row-major order.
    """

    def __init__(self, archive: Archive) -> None:
        self.subject = str(archive.path)
        self._archive = archive
        self._payloads = {name: payload for name, payload in archive.payloads.items() if payload.present}
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(payload.element.slot, payload.shape, payload.nbytes)
            for name, payload in self._payloads.items()
        }
        self._gathered: tuple[str, bytes] = ("", b"")
        """The last tensor that had to be brought into row-major order."""
        self._crcs: dict[str, PiecewiseCrc] = {}
        """Of the tensors that are being read."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drops what was kept for the next read; the archive is not ours to close."""
        self._gathered = ("", b"")

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fills ``buffer`` with the bytes of the tensor from ``start`` on.

        Raises :class:`rebind.errors.WeightsRefused` when the file ends early, or when a tensor of which all has been
        read does not have the CRC that the archive claims.
        """
        payload = self._payloads[name]
        if payload.row_major:
            self._archive.file.read_into(payload.data_offset + start, buffer)
            self._check(payload, start, buffer)
        else:
            buffer[:] = self._gather(payload)[start : start + len(buffer)]

    def check_unchanged(self) -> None:
        """Raises :class:`rebind.errors.WeightsRefused` when the file was written to since it was opened."""
        self._archive.file.check_unchanged()

    def _refuse(self, where: str, problem: str, remedy: str) -> NoReturn:
        raise WeightsRefused(self.subject, [Fault(where, problem, remedy)])

    def _check(self, payload: Payload, start: int, buffer: memoryview) -> None:
        if payload.nbytes != payload.record.nbytes:  # a slice of a record; the CRC is that of the whole
            return
        crc = self._crcs.setdefault(payload.name, PiecewiseCrc(payload.nbytes))
        crc.add(start, buffer)
        value = crc.value()
        if value is not None:
            self._crcs.pop(payload.name, None)
            if value != payload.record.crc:
                self._refuse(f"tensor {shown(payload.name)}", *DAMAGED)

    def _gather(self, payload: Payload) -> bytes:
        """All bytes of a strided tensor in row-major order."""
        name, data = self._gathered
        if name != payload.name:
            try:
                data = gather(self._archive.read_record(payload.record), payload)
            except ModelInvalid as error:
                raise WeightsRefused(self.subject, error.faults) from error
            self._gathered = (payload.name, data)
        return data


def gather(record: bytes, payload: Payload) -> bytes:
    """The bytes of a tensor in row-major order, from those of its record, which was checked to hold them."""
    itemsize = payload.element.itemsize
    storage = np.frombuffer(record, f"V{itemsize}")
    view = np.lib.stride_tricks.as_strided(
        storage[payload.offset :], payload.shape, [stride * itemsize for stride in payload.strides], writeable=False
    )
    return view.tobytes()
