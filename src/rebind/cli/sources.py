"""Files with weights in them, as commands take them: weights files of every format, and model files."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rebind.config.server import default_plan_cache_dir
from rebind.engines.contract import EngineOptions
from rebind.engines.registry import engine_for_file
from rebind.errors import Fault, InvalidArgument, ModelInvalid, Unsupported, WeightsRefused
from rebind.plans.cache import PlanCache
from rebind.weights.formats import open_weights
from rebind.weights.names import selected
from rebind.weights.writing import FORMATS
from rebind.weights.zipped import ZipArchive

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rebind.engines.contract import Engine, Graph
    from rebind.weights.slots import Slot
    from rebind.weights.source import WeightsSource

_TORCHSCRIPT = "/constants.pkl"
"""How the name of a record ends that TorchScript files have, and state dicts with the same suffix have not."""

_CONSTANT = re.compile(r"(.*\.)?(lifted_tensor_|_tensor_constant|constant)\d+", re.DOTALL)
"""What torch.export and its compiler call tensors that the code made; a user's have the names of attributes."""


@contextmanager
def open_source(path: Path) -> Iterator[WeightsSource]:
    """The tensors of a weights file; those of a model file are what a weights file for it has to have.

    Raises :class:`rebind.errors.RebindError` for a file of another kind, and one that is damaged.
    """
    if not _is_model_file(path):
        with open_weights(path) as source:
            yield source
        return
    graph = _engine_for(path).open(path, EngineOptions(PlanCache(default_plan_cache_dir())))
    with graph.embedded_weights() as embedded:
        wanted = [group for group in graph.slots.tensors if any(_is_weight(slot, graph) for slot in group)]
        found = [[slot.name for slot in group if slot.name in embedded.tensors] for group in wanted]
        names = [group[0] for group in found if group]  # tied tensors once
        if wanted and not names:
            raise ModelInvalid(str(path), [Fault("", "has no weights inside", "name its weights file instead")])
        yield selected(embedded, names)


def _is_weight(slot: Slot, graph: Graph) -> bool:
    """Whether a weights file for the model has this tensor; one that need not be there may be state, or a constant.

    A graph that is compiled knows the state dict: what is optional and used is not in it. Other model files do not
    tell buffers that a state dict has from those that it lacks; there, constants of the code go by their names alone.
    """
    if slot.required or not slot.used:
        return True
    return not graph.compiles and _CONSTANT.fullmatch(slot.name) is None


def _is_model_file(path: Path) -> bool:
    if path.suffix != ".pt":
        return not path.name.endswith(tuple(FORMATS))
    try:
        with ZipArchive(path) as archive:
            return any(name.endswith(_TORCHSCRIPT) for name in archive.members)
    except WeightsRefused:
        return False  # its reader says more about what is wrong


def _engine_for(path: Path) -> Engine:
    try:
        # Engines know their files by the names of the repository; here the suffix has to do.
        engine = engine_for_file(f"model{path.suffix}")
    except Unsupported as error:
        known = ", ".join(FORMATS)
        raise InvalidArgument(f"{path} is no weights file, which end with {known}, and {error}") from error
    reason = engine.unavailable_reason()
    if reason is not None:
        raise Unsupported(f"{path} cannot be opened by engine '{engine.name}': {reason}")
    return engine
