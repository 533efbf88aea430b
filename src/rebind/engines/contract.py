"""What an engine is: it opens model files as weight-free graphs, builds plans from them, and runs plans on weight sets.

The one idea: *a plan is a pure function of weights and inputs*. Weights are never state of a plan, so a refit is
:meth:`Plan.bind` on another weight set, beside the one that serves, and the move of one reference.

Life of a model version, in the order in which serving calls it:

1. ``graph = engine.open(model_file, options)``: slots, inputs, outputs, plan key; nothing is compiled;
2. ``weights = store.put(graph.slots, weights_file or graph.embedded_weights(), ...)``;
3. ``plan = graph.cached_plan()`` (the compiled tier), or ``graph.eager_plan()`` (the first tier, always at hand) while
   ``graph.build_plan()`` runs elsewhere;
4. ``bound = plan.bind(weights)``, then ``bound.execute(inputs)`` from any number of threads at once.
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from rebind.plans.cache import PlanCache
    from rebind.tensor import GraphTensor, SizeRange
    from rebind.weights.slots import SlotTable
    from rebind.weights.source import WeightsSource
    from rebind.weights.store import WeightSet


class Refit(enum.Enum):
    """How an engine gives a plan new weights."""

    INPUTS = "inputs"
    """Weights are arguments of every call: binding costs nothing."""
    NEW_HANDLE = "new_handle"
    """Binding makes a new executable beside the old one, in milliseconds."""
    REBUILD = "rebuild"
    """Binding builds again in the background."""


class Tier(enum.Enum):
    """Which form of a graph answers."""

    EAGER = "eager"
    COMPILED = "compiled"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What a model's configuration says to its engine; as it is here for a file without one.

    ``parameters`` are those of the configuration. ``input_names`` are the configured inputs, in order: those of a graph
    that takes a dictionary. ``instances`` is how many may execute one bound plan at once. ``keeps_devices``: tensors
    stay on the devices that the file names (``KIND_MODEL``), and are not brought to the CPU.
    """

    name: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    input_names: tuple[str, ...] = ()
    instances: int = 1
    keeps_devices: bool = False


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the server tells every engine.

    ``cache`` holds plans across processes and restarts. Once ``cancelled`` is set, whatever builds or examines gives up
    soon, and raises :class:`rebind.errors.Cancelled`.
    """

    cache: PlanCache
    intra_op_threads: int = 1
    cancelled: threading.Event = field(default_factory=threading.Event)
    model: ModelOptions = ModelOptions()


class BoundPlan(Protocol):
    """A plan with its weights: what instances run. It keeps both alive."""

    @property
    def plan(self) -> Plan: ...

    @property
    def weights(self) -> WeightSet: ...

    def execute(self, inputs: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """Outputs for ``inputs``; both in the order of the graph's ``inputs`` and ``outputs``.

        Safe from any number of threads at once; the GIL is released while the model runs, where the engine can.
        The caller has checked datatypes and shapes against the graph's specs. Raises
        :class:`rebind.errors.InputRefused` for sizes that the graph does not take, and :class:`rebind.errors.Internal`
        with the engine's text when the model fails.
        """
        ...


class Plan(Protocol):
    """The weight-free executable form of a graph for one target; immutable and shared."""

    @property
    def key(self) -> str:
        """Names the plan for good: a hex digest over graph, engine and its version, target and options."""
        ...

    @property
    def tier(self) -> Tier: ...

    def bind(self, weights: WeightSet) -> BoundPlan:
        """Checks that ``weights`` fit the plan's slots, and joins them; no effect on any other bound plan.

        Raises :class:`rebind.errors.WeightsRefused`.
        """
        ...


class Graph(Protocol):
    """An opened model file: the weight-free graph, what it needs and what it gives."""

    @property
    def key(self) -> str:
        """The key of the plan that :meth:`build_plan` makes; model files with equal keys differ in weights only."""
        ...

    @property
    def slots(self) -> SlotTable: ...

    @property
    def inputs(self) -> tuple[GraphTensor, ...]:
        """In positional order, with the names of ``forward``'s arguments."""
        ...

    @property
    def outputs(self) -> tuple[GraphTensor, ...]:
        """In positional order, named ``OUTPUT__<i>`` where the format has no names."""
        ...

    @property
    def batch(self) -> SizeRange | None:
        """The batch sizes; None unless the first dimensions of all inputs and outputs are one that varies (case C6)."""
        ...

    @property
    def refit(self) -> Refit: ...

    @property
    def compiles(self) -> bool:
        """Whether there is a plan to be compiled; else the file runs as it is, and has one tier."""
        ...

    @property
    def shares_weights(self) -> bool:
        """Whether the instances of a version run one bound plan; else each has its own, on a copy of the weights.

        What the model's ``ENABLE_WEIGHT_SHARING`` says. Without it: False for what Triton serves too, as it is there.
        """
        ...

    @property
    def reuse_line(self) -> str:
        """Triton's line for the log about an instance that shares what an earlier one uses."""
        ...

    def log_lines(self) -> Sequence[tuple[int, str]]:
        """What is logged once for each version that is loaded: logging levels and texts."""
        ...

    def embedded_weights(self) -> WeightsSource:
        """The weights inside the model file, if any; also its constants and non-persistent buffers."""
        ...

    def eager_plan(self) -> Plan:
        """The first tier: runs at once, without a compile."""
        ...

    def cached_plan(self) -> Plan | None:
        """The compiled plan if the plan cache has it, loaded and trusted; else None."""
        ...

    def build_plan(self, report: Callable[[str], None]) -> Plan:
        """Compiles in a child process of low priority, verifies, stores in the cache, loads. Blocks for 25-90 s.

        Safe to call in several processes: one compiles, the others wait for its result. ``report`` gets one line for
        each stage. Raises :class:`rebind.errors.CompileFailed`, ``CompileForbidden`` (``REBIND_FORBID_COMPILE=1``, and
        not in the cache) or ``StorageFailed``.
        """
        ...


class Engine(Protocol):
    """A compiler and runtime of plans, e.g. AOTInductor."""

    @property
    def name(self) -> str: ...

    @property
    def model_files(self) -> tuple[str, ...]:
        """File names in a version directory that are this engine's plan sources, e.g. ``("model.pt2",)``."""
        ...

    @property
    def platform(self) -> str:
        """Triton's platform name of its models, e.g. ``torch_aoti``."""
        ...

    @property
    def backend(self) -> str:
        """Triton's backend name of its models, e.g. ``pytorch``."""
        ...

    def unavailable_reason(self) -> str | None:
        """None when the engine can run here, else why not (a missing package, no compiler ...)."""
        ...

    def limitation(self) -> str | None:
        """What the engine cannot do here although it runs (e.g. compile), in words; None when it can do all."""
        ...

    def open(self, model_file: Path, options: EngineOptions) -> Graph:
        """Reads a plan source; never executes what is in it inside this process before a child has survived doing so.

        Raises :class:`rebind.errors.ModelInvalid` for a corrupt or foreign file, or a model that is no pure function.
        """
        ...
