"""The border between a model's configuration and its graph: which configured tensor is which argument or result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rebind.config.naming import input_order, output_order
from rebind.errors import InvalidArgument
from rebind.serving.validate import ModelIO
from rebind.tensor import Tensor, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from rebind.config.model import ModelConfig, ModelTensor
    from rebind.engines.contract import Graph
    from rebind.errors import InputRefused
    from rebind.inference import InferRequest


class Signature:
    """Inputs and outputs of one version, by the names of its configuration.

    ``warnings`` are Triton's about names that say nothing about a position.
    Raises :class:`rebind.errors.ConfigInvalid` when a configured name is no argument or result of the graph.
    """

    def __init__(self, config: ModelConfig, graph: Graph) -> None:
        self.io = ModelIO(
            inputs={tensor.name: _wire_spec(tensor, config) for tensor in config.inputs},
            outputs={tensor.name: _wire_spec(tensor, config) for tensor in config.outputs},
            max_batch_size=config.max_batch_size,
        )
        arguments = input_order(config.name, [tensor.name for tensor in config.inputs], graph.inputs)
        results = output_order(config.name, [tensor.name for tensor in config.outputs], graph.outputs)
        self.warnings = tuple(text for text in (arguments.warning, results.warning) if text)
        self._arguments = tuple(
            tensor for _, tensor in sorted(zip(arguments.positions, config.inputs, strict=True), key=_position)
        )
        self._results = {
            tensor.name: (tensor, position) for tensor, position in zip(config.outputs, results.positions, strict=True)
        }

    def arrange(self, inputs: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
        """The arrays of a validated request, in the order and with the shapes of the graph's inputs."""
        arrays = {tensor.name: tensor.array for tensor in inputs}
        return [self._reshaped(arrays[tensor.name], tensor.reshape) for tensor in self._arguments]

    def reworded(self, request: InferRequest, refusal: InputRefused) -> InvalidArgument:
        """A graph's refusal of one of the arranged inputs, by the name on the wire."""
        tensor = self._arguments[refusal.position]
        note = "" if tensor.reshape is None else " after reshape"
        return InvalidArgument(
            f"{request.log_prefix}input '{tensor.name}' for model '{request.model_name}'{note}: {refusal.problem}"
        )

    def name_outputs(self, arrays: Sequence[npt.NDArray[Any]], wanted: Sequence[str] | None) -> tuple[Tensor, ...]:
        """The graph's results as configured outputs, all or those ``wanted``, in the order of the configuration."""
        return tuple(
            self._output(arrays, *result) for name, result in self._results.items() if not wanted or name in wanted
        )

    def batch_size(self, request: InferRequest) -> int:
        """How many items a validated request carries; 1 for a model without a batch dimension."""
        return request.inputs[0].shape[0] if self.io.max_batch_size > 0 and request.inputs else 1

    def _output(self, arrays: Sequence[npt.NDArray[Any]], tensor: ModelTensor, position: int) -> Tensor:
        array = arrays[position]
        return Tensor(
            tensor.name, tensor.datatype, array if tensor.reshape is None else self._reshaped(array, tensor.dims)
        )

    def _reshaped(self, array: npt.NDArray[Any], shape: tuple[int, ...] | None) -> npt.NDArray[Any]:
        if shape is None:
            return array
        return array.reshape((array.shape[0], *shape) if self.io.max_batch_size > 0 else shape)


def _wire_spec(tensor: ModelTensor, config: ModelConfig) -> TensorSpec:
    return TensorSpec(tensor.name, tensor.datatype, tensor.shape(config.max_batch_size))


def _position(pair: tuple[int, ModelTensor]) -> int:
    return pair[0]
