"""Taking a model file apart: a plan source without weights, and the weights as a safetensors file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rebind.engines.aot_inductor.archive import Archive
from rebind.engines.aot_inductor.embedded import EmbeddedWeights
from rebind.engines.aot_inductor.program import read_program
from rebind.engines.aot_inductor.strip import write_weight_free
from rebind.errors import AlreadyExists, Fault, ModelInvalid, StorageFailed
from rebind.weights.names import selected
from rebind.weights.writing import write_weights, written_aside

if TYPE_CHECKING:
    from pathlib import Path


def split(model_file: Path, directory: Path) -> tuple[Path, Path]:
    """Writes ``model.pt2`` and ``model.safetensors`` into ``directory``; returns their paths.

    The first has the graph, its constants and non-persistent buffers, and the same plan key as ``model_file``; the
    second has the state dict, each tensor in row-major order, tied ones once. Raises
    :class:`rebind.errors.ModelInvalid` for a file that is no model or has no weights inside,
    :class:`rebind.errors.AlreadyExists`, and :class:`rebind.errors.StorageFailed`.
    """
    plan_source, weights = directory / "model.pt2", directory / "model.safetensors"
    for path in (plan_source, weights):
        if path.exists():
            raise AlreadyExists(f"{path} exists already; name another directory or remove it")
    with Archive(model_file) as archive, EmbeddedWeights(archive) as embedded:
        read_program(archive)
        names = [name for name in archive.weights if name not in archive.ties and name in embedded.tensors]
        if not names:
            raise ModelInvalid(str(model_file), [Fault("", "has no weights inside that could be split off")])
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_weights(selected(embedded, names), weights)
            with written_aside(plan_source) as path:
                write_weight_free(archive, path, keep=lambda payload: payload.name in archive.constants)
        except OSError as error:
            raise StorageFailed(f"{directory}: cannot write the parts of the model: {error.strerror}") from error
    return plan_source, weights
