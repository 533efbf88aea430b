"""The engine and its graphs: what a model file needs and gives, and the plan that serves it."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING, Any

from rebind.engines.contract import Refit
from rebind.engines.pytorch.loaded import Loaded
from rebind.engines.pytorch.parameters import Settings
from rebind.engines.torchscript.archive import ScriptArchive
from rebind.engines.torchscript.attributes import Attributes
from rebind.engines.torchscript.examination import read_examination
from rebind.engines.torchscript.fingerprint import graph_digest
from rebind.engines.torchscript.signature import choose_inputs, read_results
from rebind.engines.torchscript.split import split
from rebind.engines.torchscript.strip import write_weight_free
from rebind.errors import Fault, Internal, ModelInvalid, StorageFailed, Unsupported
from rebind.plans.build import ChildDied, ChildError, ChildTimeout, run_child
from rebind.plans.key import package_version, plan_key
from rebind.weights.script_module import WEIGHT_FREE
from rebind.weights.segment import available_memory_bytes
from rebind.weights.strided import StridedSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rebind.engines.contract import EngineOptions
    from rebind.engines.pytorch.execution import Execution
    from rebind.engines.torchscript.plan import ScriptPlan
    from rebind.engines.torchscript.template import Template
    from rebind.plans.cache import PlanEntry

_log = logging.getLogger(__name__)

REVISION = 3
"""Part of every key. To be raised when what older code found out about files must not be used any more."""

_WEIGHT_FREE = "graph.pt"
_EXAMINE_TIMEOUT_S = 300.0
_EXAMINE_MEMORY_BYTES = 32 << 30
"""Of address space: torch maps several GiB that it never touches."""


class TorchScript:
    """A :class:`rebind.engines.contract.Engine` for TorchScript files."""

    name = "torchscript"
    model_files = ("model.pt",)
    platform = "pytorch_libtorch"
    backend = "pytorch"

    def unavailable_reason(self) -> str | None:
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed: pip install 'rebind[torch]'"
        return None

    def limitation(self) -> str | None:
        return None

    def open(self, model_file: Path, options: EngineOptions) -> ScriptGraph:
        """Reads the file, and has a child process load it if no process on this machine ever loaded its graph.

        Raises also :class:`rebind.errors.Unsupported` where torch is not installed, and
        :class:`rebind.errors.Internal` with torch's text for a file that it cannot load.
        """
        reason = self.unavailable_reason()
        if reason is not None:
            raise Unsupported(f"{model_file} cannot be served: {reason}")
        return ScriptGraph(model_file, options)

    def split(self, model_file: Path, directory: Path) -> tuple[Path, Path]:
        """As :func:`rebind.engines.torchscript.split.split`."""
        return split(model_file, directory)


class ScriptGraph:
    """A :class:`rebind.engines.contract.Graph`: an opened TorchScript file."""

    refit = Refit.NEW_HANDLE
    compiles = False
    batch = None

    def __init__(self, model_file: Path, options: EngineOptions) -> None:
        self.model_file = model_file
        self._options = options
        self._model = options.model.name or str(model_file)
        self._settings = Settings.from_options(options.model.parameters)
        self._archive = ScriptArchive(model_file)
        self._attributes = Attributes(self._archive)
        self._digest = graph_digest(self._archive, self._attributes)
        self.key = plan_key({**self._source_parts(), **self._settings.key_parts()})
        self._examination = read_examination(self._examined().manifest["found"], self._archive, self._attributes)
        self.slots = self._examination.slots
        self._inputs = choose_inputs(self._model, self._examination.arguments, options.model.input_names)
        self.inputs = self._inputs.tensors
        self.outputs = read_results(self._model, self._examination.result)

    def __repr__(self) -> str:
        return f"<graph {self._digest} of {self.model_file}>"

    @property
    def shares_weights(self) -> bool:
        return bool(self._settings.enable_weight_sharing)

    @property
    def reuse_line(self) -> str:
        return f"Reusing TorchScript model for instance '{self._model}'"

    def log_lines(self) -> Sequence[tuple[int, str]]:
        lines = self._execution().log_lines(self._model, forks=self._examination.forks)
        return [*lines, *self._sharing_warnings()]

    def embedded_weights(self) -> StridedSource:
        """Those of the file that was opened, whatever has taken its place since; none if they were split off."""
        slots = {} if WEIGHT_FREE in self._archive.members else self._attributes.slots
        return StridedSource(str(self.model_file), self._archive.zip, slots, keeps_archive=True)

    def eager_plan(self) -> ScriptPlan:
        return self._plan()

    def cached_plan(self) -> ScriptPlan:
        return self._plan()

    def build_plan(self, report: Callable[[str], None]) -> ScriptPlan:  # noqa: ARG002
        return self._plan()

    def _sharing_warnings(self) -> list[tuple[int, str]]:
        writes = sorted(self._examination.writes)
        if not (self.shares_weights and writes):
            return []
        text = (
            f"model '{self._model}' writes to {', '.join(writes)} when it runs, and its instances share them: requests "
            "that run at the same time see each other's state; without ENABLE_WEIGHT_SHARING each instance has its own"
        )
        return [(logging.WARNING, text)]

    def _source_parts(self) -> dict[str, str]:
        """What the examination of the graph depends on."""
        return {
            "engine": TorchScript.name,
            "revision": str(REVISION),
            "graph": self._digest,
            "torch": package_version("torch"),
            "devices": "kept" if self._options.model.keeps_devices else "cpu",
        }

    def _examined(self) -> PlanEntry:
        """The graph's entry in the cache of sources: its file without weights, which a child process has loaded."""
        return self._options.cache.sources.get_or_build(
            plan_key(self._source_parts()), self._examine, _log.info, self._options.cancelled
        )

    def _examine(self, directory: Path) -> dict[str, Any]:
        self._require_memory()
        source = directory / _WEIGHT_FREE
        write_weight_free(self._archive, self._attributes, source)
        try:
            found = run_child(
                "rebind.engines.torchscript.examine_child",
                {"source": str(source), "keeps_devices": self._options.model.keeps_devices},
                _log.debug,
                timeout_s=_EXAMINE_TIMEOUT_S,
                memory_limit_bytes=_EXAMINE_MEMORY_BYTES,
                cancelled=self._options.cancelled,
            )
        except ChildError as error:
            raise Internal(f"failed to load model '{self._model}': {error.message.strip()}") from error
        except (ChildDied, ChildTimeout) as error:
            fault = Fault("", f"torch does not survive loading it: {error}", "save the model again")
            raise ModelInvalid(str(self.model_file), [fault]) from error
        return {"graph": self._digest, "model_file": str(self.model_file), "found": found}

    def _require_memory(self) -> None:
        """Torch has zeros in place of all weights for a moment; a file may claim more of them than there is memory."""
        needed, available = sum(member.nbytes for member in self._attributes.weights), available_memory_bytes()
        if needed > available:
            raise StorageFailed(f"{self.model_file}: its weights take {needed} bytes, {available} are available")

    def _plan(self) -> ScriptPlan:
        # Torch is imported while the template is loaded, by one thread at a time.
        template = _loaded.get(self.key, self._load)
        from rebind.engines.torchscript.plan import ScriptPlan

        execution = self._execution()
        return ScriptPlan(self.key, template, self._examination, self._inputs, len(self.outputs), execution)

    def _load(self) -> Template:
        from rebind.engines.torchscript.module import cpp_module, load
        from rebind.engines.torchscript.template import Template

        self._require_memory()
        source, keeps_devices = self._examined().directory / _WEIGHT_FREE, self._options.model.keeps_devices
        with self._execution().modes():
            return Template(cpp_module(load(source, keeps_devices=keeps_devices)), self._attributes)

    def _execution(self) -> Execution:
        from rebind.engines.pytorch.execution import Execution

        return Execution(self._settings, self._options.intra_op_threads)


_loaded: Loaded[Template] = Loaded()
ENGINE = TorchScript()
