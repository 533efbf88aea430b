"""How a model's calls run under its settings, and no other model's.

Where torch 2.13 keeps what the parameters set (measured on Linux with OpenMP, see ``tests/engines/test_execution.py``):

* for each thread: inference mode, grad mode, the optimisation of TorchScript graphs, and the number of intra-op
  threads. A thread takes the number that was set last in the process when it first asks for one, even after it set its
  own, so it has to ask first. Threads that run ``torch.jit.fork`` take over the first two only;
* for the process: TorchScript's tensor-expression fuser, profiling mode and profiling executor. They are read when a
  graph runs, until it is optimised for good, and not when it is loaded; hence the gate;
* for the process, once: the number of inter-op threads, fixed by whoever sets it or forks first; later attempts raise.

cuDNN and the CUDA cache are not there on a CPU, and can stay as they are.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch._C import (
    _get_graph_executor_optimize,
    _jit_set_profiling_executor,
    _jit_set_profiling_mode,
    _jit_set_texpr_fuser_enabled,
    _jit_texpr_fuser_enabled,
    _set_graph_executor_optimize,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from rebind.engines.pytorch.parameters import Settings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JitSwitches:
    """What torch keeps for the whole process."""

    tensor_fuser: bool
    profiling: bool
    executor: bool

    def apply(self) -> JitSwitches:
        """Sets them; returns what was set before."""
        before = _jit_texpr_fuser_enabled()
        _jit_set_texpr_fuser_enabled(self.tensor_fuser)
        return JitSwitches(before, _jit_set_profiling_mode(self.profiling), _jit_set_profiling_executor(self.executor))


class Gate:
    """Lets calls run together whose process-wide switches are equal; others wait until none of those runs.

    Groups take turns: once a call of another group waits, no more are let into the one that runs, and all that wait
    with the same switches are let in together. So a call waits for at most one turn of each other group.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set: JitSwitches | None = None
        self._running = 0
        self._waiting: dict[JitSwitches, list[threading.Event]] = {}  # a group's place is that of its first call
        self._told = False

    def __repr__(self) -> str:
        with self._lock:
            return f"<gate: {self._running} running, {sum(map(len, self._waiting.values()))} waiting>"

    def enter(self, switches: JitSwitches) -> None:
        """Returns when ``switches`` are set, and stay so until :meth:`leave`."""
        with self._lock:
            # Someone waits only while a call runs.
            if self._running == 0 or (switches == self._set and not self._waiting):
                self._admit(switches, 1)
                return
            turn = threading.Event()
            self._waiting.setdefault(switches, []).append(turn)
            tell, self._told = not self._told, True
        if tell:
            _log.warning(
                "models with different ENABLE_TENSOR_FUSER, ENABLE_JIT_PROFILING or ENABLE_JIT_EXECUTOR take turns: "
                "torch keeps these for the whole process"
            )
        turn.wait()

    def leave(self) -> None:
        """Ends what :meth:`enter` began."""
        with self._lock:
            self._running -= 1
            if self._running == 0 and self._waiting:
                switches = next(iter(self._waiting))
                turns = self._waiting.pop(switches)
                self._admit(switches, len(turns))
                for turn in turns:
                    turn.set()

    def _admit(self, switches: JitSwitches, calls: int) -> None:
        if switches != self._set:
            switches.apply()
            self._set = switches
        self._running += calls


_defaults = JitSwitches(True, True, True).apply()
_defaults.apply()
_gate = Gate()


class Execution:
    """The settings of one model, around its calls; from any number of threads at once. Blocks do not nest.

    ``intra_op_threads`` is the number of threads of one call. Asking for a number of inter-op threads takes effect here
    or never; where it does not, :attr:`limitation` says so.
    """

    def __init__(self, settings: Settings, intra_op_threads: int) -> None:
        self.settings = settings
        self.intra_op_threads = intra_op_threads
        self.switches = JitSwitches(
            _or_default(settings.enable_tensor_fuser, _defaults.tensor_fuser),
            _or_default(settings.enable_jit_profiling, _defaults.profiling),
            _or_default(settings.enable_jit_executor, _defaults.executor),
        )
        self._mode = torch.inference_mode if settings.inference_mode else torch.no_grad
        self._optimized = not settings.disable_optimized_execution
        self.limitation = _use_inter_op_threads(settings.inter_op_thread_count)

    def log_lines(self, model: str, *, jit: bool = True, forks: bool = False) -> list[tuple[int, str]]:
        """Those of :meth:`rebind.engines.pytorch.parameters.Settings.log_lines`, and what torch does not allow.

        ``forks``: the graph has ``torch.jit.fork`` in it.
        """
        return self.settings.log_lines(model, jit=jit) + [
            (logging.WARNING, f"{limitation}, for model '{model}'") for limitation in self._limitations(forks=forks)
        ]

    def _limitations(self, *, forks: bool) -> Iterator[str]:
        if self.limitation is not None:
            yield self.limitation
        if forks and (self.settings.disable_optimized_execution or self.settings.intra_op_thread_count is not None):
            yield (
                "DISABLE_OPTIMIZED_EXECUTION and INTRA_OP_THREAD_COUNT have no effect on what torch.jit.fork runs: "
                "torch does not hand them to its threads"
            )

    def modes(self) -> AbstractContextManager[None]:
        """What torch keeps for each thread, and all that matters without TorchScript; to be entered at once: 1.1 us."""
        torch.get_num_threads()  # or the thread's first parallel operator would undo the next line
        torch.set_num_threads(self.intra_op_threads)
        mode: AbstractContextManager[None] = self._mode()
        return mode

    @contextmanager
    def guard(self) -> Iterator[None]:
        """All settings, for a call of a TorchScript module; waits for calls under other process-wide switches.

        To load one takes :meth:`modes` only.
        """
        with self.modes():
            _gate.enter(self.switches)
            optimized = _get_graph_executor_optimize()
            _set_graph_executor_optimize(self._optimized)
            try:
                yield
            finally:
                _set_graph_executor_optimize(optimized)
                _gate.leave()


def _or_default(value: bool | None, default: bool) -> bool:
    return default if value is None else value


def _use_inter_op_threads(count: int | None) -> str | None:
    """None when the process has ``count`` inter-op threads now, or none were asked for; else why not."""
    if count is None:
        return None
    try:
        torch.set_num_interop_threads(count)
    except RuntimeError:
        fixed = torch.get_num_interop_threads()
        if fixed != count:
            return f"INTER_OP_THREAD_COUNT {count} has no effect: this process already has {fixed} inter-op threads"
    return None
