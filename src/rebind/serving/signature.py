"""The border between a model's configuration and its graph: which configured tensor is which argument or result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rebind.config.naming import input_order, output_order
from rebind.errors import InvalidArgument
from rebind.serving.batching import join, split
from rebind.serving.validate import ModelIO, shape_fits
from rebind.tensor import DataType, Tensor, TensorSpec, format_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from rebind.config.model import ModelConfig, ModelTensor
    from rebind.engines.contract import Graph
    from rebind.errors import InputRefused
    from rebind.inference import InferRequest


_BY_DTYPE = {datatype.numpy: datatype for datatype in DataType if datatype is not DataType.BF16}
"""What a result is called by its dtype; bit patterns of 16 bits are BF16 only where that is configured."""


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
        self._batched = config.max_batch_size > 0
        arguments = input_order(config.name, [tensor.name for tensor in config.inputs], graph.inputs)
        results = output_order(config.name, [tensor.name for tensor in config.outputs], graph.outputs)
        self.warnings = tuple(text for text in (arguments.warning, results.warning) if text)
        self._arguments = tuple(
            tensor for _, tensor in sorted(zip(arguments.positions, config.inputs, strict=True), key=_position)
        )
        self._results = tuple(zip(config.outputs, results.positions, strict=True))

    def arrange(self, requests: Sequence[InferRequest]) -> list[npt.NDArray[Any]]:
        """The inputs of validated requests, joined, in the order and with the shapes of the graph's inputs.

        Several requests only for a model with a batch dimension; whoever batches sees to it that their shapes agree.
        """
        arrays = [{tensor.name: tensor.array for tensor in request.inputs} for request in requests]
        return [join([self._argument(tensor, each[tensor.name]) for each in arrays]) for tensor in self._arguments]

    def reworded(self, requests: Sequence[InferRequest], refusal: InputRefused) -> InvalidArgument:
        """A graph's refusal of one of the arranged inputs, by the name on the wire."""
        tensor = self._arguments[refusal.position]
        note = "" if tensor.reshape is None else " after reshape"
        prefix = requests[0].log_prefix if len(requests) == 1 else ""
        return InvalidArgument(
            f"{prefix}input '{tensor.name}' for model '{requests[0].model_name}'{note}: {refusal.problem}"
        )

    def name_outputs(
        self, results: Sequence[npt.NDArray[Any]], requests: Sequence[InferRequest]
    ) -> list[tuple[Tensor, ...]]:
        """For each request its part of the graph's results: the outputs it wants, in the order of the configuration.

        Raises InvalidArgument or Unsupported, with Triton's texts (spec 04 section 1.6), for results that cannot be
        split, or of another datatype than is configured: what a graph does not say beforehand is checked here.
        """
        sizes = [self.batch_size(request) for request in requests]
        answers: list[list[Tensor]] = [[] for _ in requests]
        for tensor, position in self._results:
            for answer, request, part in zip(
                answers, requests, self._parts(tensor, results[position], sizes), strict=True
            ):
                if not request.output_names or tensor.name in request.output_names:
                    answer.append(Tensor(tensor.name, tensor.datatype, part))
        return [tuple(answer) for answer in answers]

    def batch_size(self, request: InferRequest) -> int:
        """How many items a validated request carries; 1 for a model without a batch dimension."""
        return request.inputs[0].shape[0] if self._batched and request.inputs else 1

    def _argument(self, tensor: ModelTensor, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if tensor.ragged:
            return array.reshape(-1)
        return array if tensor.reshape is None else self._reshaped(array, tensor.dims, tensor.reshape)

    def _parts(self, tensor: ModelTensor, array: npt.NDArray[Any], sizes: Sequence[int]) -> list[npt.NDArray[Any]]:
        _check_datatype(tensor, array)
        parts = split(tensor.name, array, sizes) if self._batched else [array]
        if tensor.reshape is not None:
            return [self._unshaped(tensor, tensor.reshape, part) for part in parts]
        return parts if array.ndim else [array.reshape(1)]  # case C4

    def _unshaped(self, tensor: ModelTensor, reshape: tuple[int, ...], array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        pattern = (-1, *reshape) if self._batched else reshape
        if not shape_fits(array.shape, pattern):
            raise InvalidArgument(
                f"output '{tensor.name}' is configured as {format_shape(pattern)} (before reshape), "
                f"model provides {format_shape(array.shape)}"
            )
        return self._reshaped(array, reshape, tensor.dims)

    def _reshaped(self, array: npt.NDArray[Any], source: tuple[int, ...], target: tuple[int, ...]) -> npt.NDArray[Any]:
        """``array``, shaped as ``source`` says, in the shape ``target``; varying dimensions correspond in order."""
        lead = 1 if self._batched else 0
        varying = iter([size for size, dim in zip(array.shape[lead:], source, strict=True) if dim == -1])
        return array.reshape((*array.shape[:lead], *(next(varying) if dim == -1 else dim for dim in target)))


def _check_datatype(tensor: ModelTensor, array: npt.NDArray[Any]) -> None:
    if array.dtype == tensor.datatype.numpy:
        return
    found = _BY_DTYPE.get(array.dtype)
    raise InvalidArgument(
        f"configuration expects datatype {tensor.datatype.config_name} for output '{tensor.name}', "
        f"model provides {array.dtype if found is None else found.config_name}"
    )


def _wire_spec(tensor: ModelTensor, config: ModelConfig) -> TensorSpec:
    return TensorSpec(tensor.name, tensor.datatype, tensor.shape(config.max_batch_size))


def _position(pair: tuple[int, ModelTensor]) -> int:
    return pair[0]
