"""Instances: what a scheduler's threads call to run requests on the weights that serve at that moment."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rebind.errors import InputRefused
from rebind.inference import InferResponse
from rebind.scheduling.contract import Execution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rebind.inference import InferRequest, Parameter
    from rebind.serving.generation import Generation
    from rebind.serving.version import ModelVersion
    from rebind.tensor import Tensor


class ModelInstance:
    """One executor of a version, the one with the number ``index``. What it runs is the version's to say."""

    def __init__(self, name: str, version: ModelVersion, index: int) -> None:
        self.name = name
        self._version = version
        self._index = index

    def execute(self, requests: Sequence[InferRequest]) -> list[Execution]:
        """Runs ``requests`` as one batch on exactly one generation, which the answers name.

        That is the one that serves now, or the one that the requests ask for: all of them the same.
        """
        started_ns = time.monotonic_ns()
        version = self._version
        generation, signature = version.resident_generation(requests[0].parameters), version.signature
        inputs = signature.arrange(requests)
        inputs_ready_ns = time.monotonic_ns()
        try:
            results = generation.bounds[self._index].execute(inputs)
        except InputRefused as refusal:
            raise signature.reworded(requests, refusal) from refusal
        computed_ns = time.monotonic_ns()
        answers = signature.name_outputs(results, requests)
        return [
            Execution(
                self._response(request, outputs, generation),
                signature.batch_size(request),
                started_ns,
                inputs_ready_ns,
                computed_ns,
            )
            for request, outputs in zip(requests, answers, strict=True)
        ]

    def _response(self, request: InferRequest, outputs: tuple[Tensor, ...], generation: Generation) -> InferResponse:
        return InferResponse(
            model_name=self._version.name,
            model_version=self._version.number,
            outputs=outputs,
            id=request.id,
            parameters=weights_parameters(generation),
        )


def weights_parameters(generation: Generation) -> dict[str, Parameter]:
    """The response parameters that say which weights made an answer."""
    parameters: dict[str, Parameter] = {"weights_generation": generation.number}
    if generation.label:
        parameters["weights_label"] = generation.label
    return parameters
