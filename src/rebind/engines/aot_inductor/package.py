"""Compiled packages as graphs: their inputs, results and slots, the weights inside, and their one plan."""

from __future__ import annotations

import functools
import logging
import math
from typing import TYPE_CHECKING, Any

from rebind.engines.aot_inductor.call_spec import input_names, input_paths, result_names, result_paths
from rebind.engines.aot_inductor.package_archive import LIBRARY, TRYING_ONE, WEIGHTS, PackageArchive
from rebind.engines.aot_inductor.package_source import NOT_ONE
from rebind.engines.contract import Refit
from rebind.engines.pytorch.dtypes import BY_TORCH
from rebind.engines.pytorch.loaded import Loaded
from rebind.engines.pytorch.parameters import Settings
from rebind.errors import Fault, ModelInvalid
from rebind.plans.build import ChildDied, ChildError, ChildTimeout, run_child
from rebind.plans.key import package_version, plan_key, target_parts
from rebind.tensor import GraphTensor
from rebind.weights.formats import open_weights
from rebind.weights.slots import Slot, SlotTable, TensorInfo, shown
from rebind.weights.source import WeightsSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rebind.engines.aot_inductor.c_interface import Library
    from rebind.engines.aot_inductor.package_plan import PackagePlan
    from rebind.engines.aot_inductor.package_source import PackageSource
    from rebind.engines.contract import EngineOptions
    from rebind.engines.pytorch.execution import Execution
    from rebind.plans.cache import PlanEntry
    from rebind.tensor import SizeRange

_log = logging.getLogger(__name__)

_REVISION = 2
"""Part of every key. To be raised when entries of older code must not be used any more."""
_TIMEOUT_S = 600.0
_MEMORY_BYTES = 64 << 30
"""Of address space, of which torch maps several GiB that it never touches, and weights count three times."""
_REFITTABLE = "inductor_configs={'always_keep_tensor_constants': True, 'joint_graph_constant_folding': False}"
_NO_SLOT = (
    "a compiled package has no slots for weights that were compiled in, as small ones are unless it is compiled with "
    f"{_REFITTABLE}, and knows tied ones by one name only"
)
_ELSEWHERE = "compile it again here, or serve the torch.export archive, which is compiled here"
_FROZEN = "the package was compiled with freezing"
_REMEDY = f"compile it with {_REFITTABLE}, and without freezing and max_autotune, or serve the torch.export archive"


class PackageGraph:
    """A :class:`rebind.engines.contract.Graph`: an opened package, which a child process has loaded and run."""

    refit = Refit.NEW_HANDLE
    compiles = False
    batch: SizeRange | None = None

    def __init__(self, model_file: Path, options: EngineOptions) -> None:
        self.model_file = model_file
        self._options = options
        self._settings = Settings.from_options(options.model.parameters)
        self._archive = PackageArchive(model_file)
        self.source: PackageSource = self._archive.source
        self._fixed = _FROZEN if self.source.frozen else self._archive.built_in
        """Why it serves the weights that are in it, and no others; empty if it takes others."""
        if self._fixed and not self._has_values:
            raise self._invalid(f"has no weights, and can take none: {self._fixed}", _REMEDY)
        self.slots = self._slot_table()
        parts = {"engine": "aot_inductor package", "revision": str(_REVISION), "package": self._archive.digest}
        self.key = plan_key({**parts, "torch": package_version("torch"), **target_parts()})
        self._entry: PlanEntry = options.cache.sources.get_or_build(
            self.key, self._examine, _log.info, options.cancelled
        )
        self._archive.close()
        if self._entry.manifest["takes_one"]:
            self.source = self.source.taking_one()
        self.inputs, self.outputs = self._inputs(), self._outputs(self._entry.manifest["results"])

    def __repr__(self) -> str:
        return f"<package {self.key} of {self.model_file}>"

    @property
    def shares_weights(self) -> bool:
        return self._settings.enable_weight_sharing is True

    @property
    def reuse_line(self) -> str:
        return f'Reusing Inductor model loader for instance "{self._options.model.name}".'

    def log_lines(self) -> list[tuple[int, str]]:
        """Also a warning of weights that a refit may reach in part only, which the package does not tell.

        Measured with torch 2.13: a weight of one element that the model reads as it is, and through a view too, is read
        from its slot in one place and compiled in in the other, unless that was switched off.
        """
        name = self._options.model.name
        lines = self._execution.log_lines(name, jit=False)
        single = [shown(slot.name) for slot in self.slots.slots if slot.used and math.prod(slot.shape) == 1]
        if single:
            text = (
                f"the package of model '{name}' has weights of one element ({', '.join(single)}): parts of their values"
                " may be compiled in, and outlive a refit, unless it was compiled with"
                " inductor_configs={'joint_graph_constant_folding': False}"
            )
            lines.append((logging.WARNING, text))
        if self._fixed:
            lines.append((logging.INFO, f"the package of model '{name}' serves its own weights only: {self._fixed}"))
        if self.source.may_take_one:
            lines.append((logging.INFO, f"the package of model '{name}' takes no batch of one: {NOT_ONE}"))
        return lines

    def embedded_weights(self) -> WeightsSource:
        """Those of the file that was opened, as the child took them out; none if it takes no others."""
        if self._fixed or self._own_weights is None:
            return _NoWeights(str(self.model_file))
        source = open_weights(self._own_weights)
        source.subject = str(self.model_file)
        return source

    @property
    def _own_weights(self) -> Path | None:
        """The file with the values of all constants that can be set, if the package has them."""
        path = self._entry.directory / WEIGHTS
        return path if path.exists() else None

    @property
    def _has_values(self) -> bool:
        """Whether it has weights that can serve: those of a frozen package only within its library."""
        return self.source.embedded or (self._archive.has_weights_aside and not self.source.frozen)

    def eager_plan(self) -> PackagePlan:
        return self.build_plan(lambda _: None)

    def cached_plan(self) -> PackagePlan:
        return self.build_plan(lambda _: None)

    def build_plan(self, report: Callable[[str], None]) -> PackagePlan:  # noqa: ARG002 - there is nothing to build
        return self._plan

    @functools.cached_property
    def _plan(self) -> PackagePlan:
        library = _loaded.get(self.key, functools.partial(_load, self._entry.directory / LIBRARY))

        from rebind.engines.aot_inductor.package_plan import PackagePlan

        own, instances = self._own_weights if self._fixed else None, self._options.model.instances
        return PackagePlan(self.key, library, self.source, self.slots, self._execution, instances, own)

    @functools.cached_property
    def _execution(self) -> Execution:
        from rebind.engines.pytorch.execution import Execution

        return Execution(self._settings, self._options.intra_op_threads)

    def _slot_table(self) -> SlotTable:
        if self._fixed:
            return SlotTable((), foreign=f"the package serves its own weights only: {self._fixed}; {_REMEDY}")
        slots = {slot.name: slot for slot in self._slots()}
        return SlotTable(tuple(slots.values()), foreign=_NO_SLOT)

    def _slots(self) -> Iterator[Slot]:
        """One for each constant that can be set, and unused ones for what batch norms count but never read."""
        for constant in self.source.settable:
            if constant.element is None:
                self._archive.refuse(f"its weight {shown(constant.slot)} has a dtype that no weights file can have")
            shape = constant.element.slot_shape(constant.shape)
            required = constant.from_state_dict or not self._has_values
            yield Slot(constant.slot, constant.element.slot, shape, required)
            if constant.slot.endswith(".running_mean"):
                yield Slot(constant.slot.removesuffix("running_mean") + "num_batches_tracked", "I64", (), False, False)

    def _inputs(self) -> tuple[GraphTensor, ...]:
        names, paths = input_names(self.source.in_spec), input_paths(self.source.in_spec)
        if len(names) != len(self.source.arguments):  # arguments that are no tensors are leaves of the spec as well
            names, paths = tuple(argument.name for argument in self.source.arguments), ((),) * len(names)
        return tuple(
            GraphTensor(
                name,
                argument.element.wire,
                tuple(size if isinstance(size, int) else -1 for size in argument.shape),
                path,
            )
            for name, path, argument in zip(names, paths, self.source.arguments, strict=False)
        )

    def _outputs(self, results: list[tuple[str, list[int]]]) -> tuple[GraphTensor, ...]:
        """With the dtypes that results had when the child ran the package; with their shapes if no size varies."""
        count = self.source.result_count
        names, paths = result_names(self.source.out_spec), result_paths(self.source.out_spec)
        if len(names) != count:
            names, paths = tuple(f"OUTPUT__{index}" for index in range(count)), ((),) * count
        outputs = []
        for index, (name, path) in enumerate(zip(names, paths, strict=True)):
            dtype, shape = results[index] if results else (None, None)
            element = BY_TORCH.get(dtype) if dtype else None
            if dtype is not None and (element is None or element.wire is None):
                raise self._invalid(f"its output {index} has the dtype {dtype}, which no protocol carries")
            known = None if shape is None or self.source.ranges else tuple(shape)
            outputs.append(GraphTensor(name, element.wire if element else None, known, path))
        return tuple(outputs)

    def _examine(self, directory: Path) -> dict[str, Any]:
        """Fills the package's entry in the cache of sources, with what a child process has loaded and run."""
        request = {**self._archive.extract(directory), "directory": str(directory)}
        try:
            found = self._run_child(request)
        except ChildError as error:
            raise self._invalid(*_wording(error)) from error
        except (ChildDied, ChildTimeout) as error:
            raise self._invalid(f"does not survive being loaded and run once: {error}", _ELSEWHERE) from error
        return {**found, "model_file": str(self.model_file)}

    def _run_child(self, request: dict[str, Any]) -> dict[str, Any]:
        """What a child found; of one that did not survive a batch of one, all but that."""
        reports: list[str] = []

        def report(text: str) -> None:
            _log.debug(text)
            reports.append(text)

        run = functools.partial(
            run_child,
            "rebind.engines.aot_inductor.examine_package_child",
            report=report,
            timeout_s=_TIMEOUT_S,
            memory_limit_bytes=_MEMORY_BYTES,
            cancelled=self._options.cancelled,
        )
        try:
            return run({**request, "try_one": self.source.may_take_one})
        except ChildDied:
            if reports[-1:] != [TRYING_ONE]:
                raise
            return run({**request, "try_one": False})

    def _invalid(self, problem: str, remedy: str = "") -> ModelInvalid:
        return ModelInvalid(str(self.model_file), [Fault("", problem, remedy)])


class _NoWeights(WeightsSource):
    """Of a package without weights."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.tensors: dict[str, TensorInfo] = {}

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:  # noqa: ARG002 - there are none
        raise KeyError(name)

    def check_unchanged(self) -> None:
        pass

    def close(self) -> None:
        pass


_loaded: Loaded[Library] = Loaded()


def _load(path: Path) -> Library:
    from rebind.engines.aot_inductor.c_interface import Library

    return Library(path)


def _wording(error: ChildError) -> tuple[str, str]:
    """Problem and remedy of what a child found."""
    if "undefined symbol" in error.message:
        version = package_version("torch")
        return f"was compiled by another torch than {version}, which is installed here: {error.message}", _ELSEWHERE
    return f"cannot be loaded: {error.kind}: {error.message}", _ELSEWHERE
