"""The parameters of a PyTorch model: what its ``config.pbtxt`` asks of torch (spec 04 section 1.2)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from rebind.config.validation import SWITCH_VALUES, switch_faults, thread_count_faults
from rebind.errors import ConfigInvalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rebind.errors import Fault

_JIT = ("disable_optimized_execution", "enable_tensor_fuser", "enable_jit_profiling", "enable_jit_executor")
"""Settings of TorchScript's graph executor, which other models do not have."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Each field is the parameter of that name in upper case; None is not set, so that torch's own default holds."""

    disable_optimized_execution: bool = False
    enable_cache_cleaning: bool = False
    inference_mode: bool = True
    disable_cudnn: bool = False
    enable_tensor_fuser: bool | None = None
    enable_weight_sharing: bool | None = None
    enable_jit_profiling: bool | None = None
    enable_jit_executor: bool | None = None
    intra_op_thread_count: int | None = None
    inter_op_thread_count: int | None = None
    enable_nvfuser: str | None = None
    """Any value: Triton ignores this one since torch lost the fuser."""

    @classmethod
    def from_options(cls, parameters: Mapping[str, str]) -> Settings:
        """The settings that ``parameters`` name; others in there are ignored, as by Triton.

        Raises :class:`rebind.errors.ConfigInvalid` with one fault for each value that cannot be read.
        """
        given = {field.name: parameters[key] for field in fields(cls) if (key := field.name.upper()) in parameters}
        faults = [fault for name, text in given.items() for fault in _faults(name, text)]
        if faults:
            raise ConfigInvalid("parameters", faults)
        return cls(**{name: _value(name, text) for name, text in given.items()})

    def key_parts(self) -> dict[str, str]:
        """Of a plan's key: the settings that decide how TorchScript rewrites a graph, by parameter."""
        return {name.upper(): str(getattr(self, name)) for name in (*_JIT, "inference_mode")}

    def log_lines(self, model: str, *, jit: bool = True) -> list[tuple[int, str]]:
        """Triton's lines for the log, with their levels: all switches that have a default, and what else is set.

        ``jit``: the model is TorchScript. Of a model that is not, parameters of the graph executor that are set get a
        line which says that they do nothing.
        """
        lines = [(logging.INFO, f"{text} for model instance '{model}'") for text in self._statements(jit=jit)]
        ignored = {"ENABLE_NVFUSER": "torch has no nvFuser any more"} if self.enable_nvfuser is not None else {}
        if not jit:
            unset, reason = Settings(), "only TorchScript has a graph executor"
            ignored |= {name.upper(): reason for name in _JIT if getattr(self, name) != getattr(unset, name)}
        return lines + [(logging.WARNING, f"{key} has no effect on model '{model}': {ignored[key]}") for key in ignored]

    def _statements(self, *, jit: bool) -> Iterator[str]:
        switches = {
            "Optimized execution": not self.disable_optimized_execution if jit else None,
            "Cache Cleaning": self.enable_cache_cleaning,
            "Inference Mode": self.inference_mode,
            "cuDNN": not self.disable_cudnn,
            "Tensor fuser": self.enable_tensor_fuser if jit else None,
            "Weight sharing": self.enable_weight_sharing,
            "Jit profiling": self.enable_jit_profiling if jit else None,
            "Jit executor": self.enable_jit_executor if jit else None,
        }
        for what, on in switches.items():
            if on is not None:
                yield f"{what} is {'enabled' if on else 'disabled'}"
        for what, count in (("Intra", self.intra_op_thread_count), ("Inter", self.inter_op_thread_count)):
            if count is not None:
                yield f"{what} op thread count is set to {count}"


def _is_count(name: str) -> bool:
    return name.endswith("_thread_count")


def _faults(name: str, text: str) -> Iterator[Fault]:
    if _is_count(name):
        yield from thread_count_faults(name.upper(), text)
    elif name != "enable_nvfuser":
        yield from switch_faults(name.upper(), text)


def _value(name: str, text: str) -> Any:
    if _is_count(name):
        return int(text)
    return text if name == "enable_nvfuser" else SWITCH_VALUES[text.lower()]
