"""The weights inside a torch.export archive, as a source for the weight store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rebind.weights.strided import StridedSource

if TYPE_CHECKING:
    from rebind.engines.aot_inductor.archive import Archive


class EmbeddedWeights(StridedSource):
    """Every tensor whose values an archive has: state dict, lifted constants and non-persistent buffers.

    The archive stays open when this source is closed. Tensors that were saved in another layout (channels last, a
    transposed view, a slice) are read in row-major order.
    """

    def __init__(self, archive: Archive) -> None:
        views = {name: payload.view for name, payload in archive.payloads.items() if payload.present}
        super().__init__(str(archive.path), archive.zipped, views, keeps_archive=True)
        self._model = archive  # whose file closes when nothing refers to it
