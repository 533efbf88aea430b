"""One inference, free of any protocol: what front ends decode into and encode from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rebind.tensor import Tensor

Parameter = bool | int | float | str
"""A request or response parameter's value."""


@dataclass(slots=True)
class InferRequest:
    """A decoded request. ``model_version`` None is Triton's default: the highest version that is READY.

    ``output_names`` lists the outputs wanted; None is all of them.
    """

    model_name: str
    model_version: int | None
    inputs: tuple[Tensor, ...]
    output_names: tuple[str, ...] | None = None
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    @property
    def log_prefix(self) -> str:
        """Triton's prefix of errors that concern one request."""
        return f"[request id: {self.id or '<id_unknown>'}] "


@dataclass(slots=True)
class InferResponse:
    """An answer. ``parameters`` hold ``weights_generation`` and, if the weights have one, ``weights_label``."""

    model_name: str
    model_version: int
    outputs: tuple[Tensor, ...]
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
