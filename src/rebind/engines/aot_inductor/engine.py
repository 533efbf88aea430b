"""The engine and its graphs: which plan serves a model file, and where it comes from."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import re
import shutil
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from blake3 import blake3

from rebind.engines.aot_inductor.archive import GRAPH, SAMPLE_INPUTS, Archive
from rebind.engines.aot_inductor.embedded import EmbeddedWeights
from rebind.engines.aot_inductor.package import PackageGraph
from rebind.engines.aot_inductor.package_archive import is_package
from rebind.engines.aot_inductor.program import mutation_fault, read_program
from rebind.engines.aot_inductor.split import split
from rebind.engines.aot_inductor.strip import write_weight_free
from rebind.engines.contract import Refit, Tier
from rebind.engines.pytorch.loaded import Loaded
from rebind.engines.pytorch.parameters import Settings
from rebind.errors import CompileFailed, Fault, Internal, ModelInvalid, Unsupported
from rebind.plans.build import ChildDied, ChildError, ChildTimeout, run_child
from rebind.plans.key import package_version, plan_key, target_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from rebind.engines.aot_inductor.archive import Payload
    from rebind.engines.aot_inductor.plan import FlatFunction, FlatPlan
    from rebind.engines.aot_inductor.program import Program
    from rebind.engines.contract import EngineOptions
    from rebind.engines.pytorch.execution import Execution
    from rebind.plans.cache import PlanEntry
    from rebind.tensor import GraphTensor, SizeRange
    from rebind.weights.slots import SlotTable

_log = logging.getLogger(__name__)

REVISION = 1
"""Part of every key. To be raised when plans or examined graphs of older code must not be used any more."""

_PLAIN_LOOPS: Mapping[str, Any] = {
    "aot_inductor.package": False,
    # A header compiled in advance costs more than it gives to the one compile that uses it: 22 s against 14 s.
    "aot_inductor.precompile_headers": False,
    # Matrix products and convolutions are library calls, and use the thread count of the caller in any case.
    "cpp.threads": 1,
}
_PARALLEL_LOOPS: Mapping[str, Any] = {**_PLAIN_LOOPS, "cpp.threads": -1, "cpp.dynamic_threads": True}
"""Inductor's options: loops in generated code are plain ones, or ask OpenMP for the thread count of the caller."""
_WEIGHT_FREE = "graph.pt2"
_SAMPLES = "samples.pt"
_MOST_SAMPLE_BYTES = 64 << 20
_EXAMINE_TIMEOUT_S = 300.0
_EXAMINE_MEMORY_BYTES = 32 << 30
"""Of address space: torch maps several GiB that it never touches."""
_COMPILE_TIMEOUT_S = 3600.0
_COMPILE_NICE = 15
_LONGEST_REASON = 600
_TELLING = re.compile(r"\b(error|failed|cannot|no space)\b", re.IGNORECASE)


class AotInductor:
    """A :class:`rebind.engines.contract.Engine` for torch.export archives."""

    name = "aot_inductor"
    model_files = ("model.pt2",)
    platform = "torch_aoti"
    backend = "pytorch"

    def unavailable_reason(self) -> str | None:
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed: pip install 'rebind[torch]'"
        return None

    def limitation(self) -> str | None:
        return (
            None if _compiler() else "no C++ compiler on PATH (g++, or what CXX names): models stay on the eager tier"
        )

    def open(self, model_file: Path, options: EngineOptions) -> AotInductorGraph | PackageGraph:
        """Reads the graph's description only: no torch, and nothing of the file is executed.

        A compiled package, whose description is code, is loaded and run once in a child process.

        Raises also :class:`rebind.errors.Unsupported` where torch is not installed, since there are no plans then.
        """
        reason = self.unavailable_reason()
        if reason is not None:
            raise Unsupported(f"{model_file} cannot be served: {reason}")
        if is_package(model_file):
            return PackageGraph(model_file, options)
        return AotInductorGraph(model_file, options)

    def split(self, model_file: Path, directory: Path) -> tuple[Path, Path]:
        """As :func:`rebind.engines.aot_inductor.split.split`; a compiled package is refused."""
        if is_package(model_file):
            problem = "is a compiled package, and code cannot be written anew without the weights in it"
            remedy = (
                "take the weights with `rebind convert`; to have a package without any, compile it with "
                "inductor_configs={'aot_inductor.package_constants_in_so': False}"
            )
            raise ModelInvalid(str(model_file), [Fault("", problem, remedy)])
        return split(model_file, directory)


class AotInductorGraph:
    """A :class:`rebind.engines.contract.Graph`: an opened torch.export archive."""

    refit = Refit.INPUTS
    compiles = True

    def __init__(self, model_file: Path, options: EngineOptions) -> None:
        self.model_file = model_file
        self._options = options
        self._settings = Settings.from_options(options.model.parameters)
        self._archive = Archive(model_file)
        self.program: Program = _program_of(self._archive)
        self.slots: SlotTable = self.program.slots
        self._compile_options = dict(_PLAIN_LOOPS if options.intra_op_threads == 1 else _PARALLEL_LOOPS)
        self.key = plan_key({**self._source_parts(), "options": json.dumps(self._compile_options), **target_parts()})

    def __repr__(self) -> str:
        return f"<graph {self.program.digest} of {self.model_file}>"

    @property
    def inputs(self) -> tuple[GraphTensor, ...]:
        return self.program.inputs

    @property
    def outputs(self) -> tuple[GraphTensor, ...]:
        return self.program.outputs

    @property
    def batch(self) -> SizeRange | None:
        return self.program.batch

    @property
    def shares_weights(self) -> bool:
        """Triton does not serve such files, and a plan has no state that instances could disturb."""
        return self._settings.enable_weight_sharing is not False

    @property
    def reuse_line(self) -> str:
        return f'Reusing Inductor model loader for instance "{self._options.model.name}".'

    def log_lines(self) -> list[tuple[int, str]]:
        return self._execution.log_lines(self._options.model.name, jit=False)

    def embedded_weights(self) -> EmbeddedWeights:
        """Those of the file that was opened, whatever has taken its place since."""
        return EmbeddedWeights(self._archive)

    def eager_plan(self) -> FlatPlan:
        """Loads the graph, after a child process has done so if no process on this machine ever did.

        Raises :class:`rebind.errors.ModelInvalid` for a graph that torch cannot load, that ends the process which loads
        it, or that writes to its weights or inputs.
        """
        return self._plan(self._eager_key, Tier.EAGER, self._eager_function())

    def cached_plan(self) -> FlatPlan | None:
        if self.program.unclear:
            return None
        entry = self._options.cache.plans.get(self.key)
        if entry is None:
            return None
        try:
            return self._compiled_plan(entry)
        except Internal:
            _log.warning("plan %s is in the cache but cannot be loaded", self.key, exc_info=True)
            return None

    def build_plan(self, report: Callable[[str], None]) -> FlatPlan:
        if self.program.unclear:
            conditions = ", ".join(self.program.unclear)
            raise CompileFailed(f"{self.model_file}: its graph has conditions that are not understood: {conditions}")
        entry = self._options.cache.plans.get_or_build(
            self.key, lambda directory: self._compile(directory, report), report, self._options.cancelled
        )
        return self._compiled_plan(entry)

    def _source_parts(self) -> dict[str, str]:
        """What the examination of the graph depends on."""
        version = package_version("torch")
        return {"engine": AotInductor.name, "revision": str(REVISION), "graph": self.program.digest, "torch": version}

    def _examined(self) -> PlanEntry:
        """The graph's entry in the cache of sources: its archive without weights, which a child process has loaded."""
        return self._options.cache.sources.get_or_build(
            plan_key(self._source_parts()), self._examine, _log.info, self._options.cancelled
        )

    def _examine(self, directory: Path) -> dict[str, Any]:
        weight_free = directory / _WEIGHT_FREE
        archive = self._archive
        write_weight_free(archive, weight_free, keep=lambda payload: _is_kept(archive, payload))
        samples = archive.records.get(SAMPLE_INPUTS)
        if samples is not None and 0 < samples.nbytes <= _MOST_SAMPLE_BYTES:
            (directory / _SAMPLES).write_bytes(archive.read_record(samples))
        try:
            found = run_child(
                "rebind.engines.aot_inductor.examine_child",
                {"archive": str(weight_free)},
                _log.debug,
                timeout_s=_EXAMINE_TIMEOUT_S,
                memory_limit_bytes=_EXAMINE_MEMORY_BYTES,
                cancelled=self._options.cancelled,
            )
        except ChildError as error:
            self._refuse(
                Fault("", f"torch cannot load its graph: {error.kind}: {error.message}", "export it again"), error
            )
        except (ChildDied, ChildTimeout) as error:
            self._refuse(Fault("", f"torch does not survive loading its graph: {error}", "export it again"), error)
        if found["writes"]:
            raise ModelInvalid(str(self.model_file), [mutation_fault(name) for name in found["writes"]])
        return {"graph": self.program.digest, "model_file": str(self.model_file)}

    def _compile(self, directory: Path, report: Callable[[str], None]) -> dict[str, Any]:
        if _compiler() is None:
            raise CompileFailed(f"{self.model_file}: {ENGINE.limitation()}")
        source = self._examined().directory
        request = {
            "archive": str(source / _WEIGHT_FREE),
            "samples": str(source / _SAMPLES),
            "directory": str(directory),
            "options": self._compile_options,
            "plain_options": dict(_PLAIN_LOOPS),
        }
        try:
            figures = run_child(
                "rebind.engines.aot_inductor.compile_child",
                request,
                report,
                timeout_s=_COMPILE_TIMEOUT_S,
                nice=_COMPILE_NICE,
                cancelled=self._options.cancelled,
            )
        except ChildError as error:
            _log.info("what the compiler of %s said: %s", self.model_file, error.message)
            raise CompileFailed(f"{self.model_file}: no plan: {_in_brief(error.message)}") from error
        except (ChildDied, ChildTimeout) as error:
            raise CompileFailed(f"{self.model_file}: no plan: {error}") from error
        return {
            **figures,
            **self._source_parts(),
            "target": dict(target_parts()),
            "options": self._compile_options,
            "slots": self.slots.to_json(),
            "inputs": [spec.to_json() for spec in self.inputs],
            "outputs": [spec.to_json() for spec in self.outputs],
        }

    @property
    def _eager_key(self) -> str:
        return f"eager-{self.program.digest}"

    def _eager_function(self) -> FlatFunction:
        archive = self._examined().directory / _WEIGHT_FREE
        return _loaded.get(self._eager_key, lambda: _load_eager(archive, self.program))

    def _compiled_plan(self, entry: PlanEntry) -> FlatPlan:
        function = _loaded.get(self.key, lambda: _load_compiled(entry.directory))
        return self._plan(self.key, Tier.COMPILED, function, functools.cache(self._eager_function))

    def _plan(
        self, key: str, tier: Tier, function: FlatFunction, checked: Callable[[], FlatFunction] | None = None
    ) -> FlatPlan:
        from rebind.engines.aot_inductor.plan import FlatPlan

        return FlatPlan(key, tier, self.program, function, self._execution, checked)

    @functools.cached_property
    def _execution(self) -> Execution:
        from rebind.engines.pytorch.execution import Execution

        return Execution(self._settings, self._options.intra_op_threads)

    def _refuse(self, fault: Fault, cause: Exception) -> NoReturn:
        raise ModelInvalid(str(self.model_file), [fault]) from cause


def _program_of(archive: Archive) -> Program:
    """The program of an archive; one object for all archives that are alive and differ in weights only.

    What it is read from is compared, and not read again: that takes longer than to open the rest of the file.
    """
    tensors = tuple(
        (payload.name, payload.element, payload.shape, payload.present) for payload in archive.payloads.values()
    )
    key = blake3(archive.read_text(GRAPH)).digest(), tensors, tuple(archive.ties.items())
    program = _programs.get(key)
    if program is None:
        program = _programs[key] = read_program(archive)
    return program


def _in_brief(message: str) -> str:
    """A compiler's report without its command line and the code around each error: one line."""
    first, *lines = message.strip().splitlines() or [""]
    telling = [line.strip() for line in lines if _TELLING.search(line)] or [line.strip() for line in lines[-2:]]
    return "; ".join([first, *telling])[:_LONGEST_REASON]


def _load_eager(archive: Path, program: Program) -> FlatFunction:
    from rebind.engines.aot_inductor.eager import EagerFunction, load_flat

    return EagerFunction(load_flat(archive, program))


def _load_compiled(directory: Path) -> FlatFunction:
    from rebind.engines.aot_inductor.compile_child import LIBRARY
    from rebind.engines.aot_inductor.native import NativeFunction

    return NativeFunction(directory / LIBRARY)


_loaded: Loaded[FlatFunction] = Loaded()
_programs: weakref.WeakValueDictionary[tuple[object, ...], Program] = weakref.WeakValueDictionary()
ENGINE = AotInductor()


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _is_kept(archive: Archive, payload: Payload) -> bool:
    """What the proof of a plan cannot make up: constants, and whole numbers, which may be indices."""
    return payload.name in archive.constants or not payload.element.is_float
