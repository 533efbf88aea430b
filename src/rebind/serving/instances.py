"""Instances: what a scheduler's threads call to run one request on the weights that serve at that moment."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rebind.errors import InputRefused
from rebind.inference import InferResponse
from rebind.scheduling.contract import Execution

if TYPE_CHECKING:
    from rebind.inference import InferRequest, Parameter
    from rebind.serving.version import Generation, ModelVersion


class ModelInstance:
    """One executor of a version. Weights and plan are the version's: an instance holds none of its own."""

    def __init__(self, name: str, version: ModelVersion) -> None:
        self.name = name
        self._version = version

    def execute(self, request: InferRequest) -> Execution:
        """Runs ``request`` on exactly one generation: the one that serves now, which the answer names."""
        started_ns = time.monotonic_ns()
        version = self._version
        generation = version.generation
        inputs = version.signature.arrange(request.inputs)
        inputs_ready_ns = time.monotonic_ns()
        try:
            results = generation.bound.execute(inputs)
        except InputRefused as refusal:
            raise version.signature.reworded(request, refusal) from refusal
        computed_ns = time.monotonic_ns()
        response = InferResponse(
            model_name=version.name,
            model_version=version.number,
            outputs=version.signature.name_outputs(results, request.output_names),
            id=request.id,
            parameters=weights_parameters(generation),
        )
        return Execution(response, version.signature.batch_size(request), started_ns, inputs_ready_ns, computed_ns)


def weights_parameters(generation: Generation) -> dict[str, Parameter]:
    """The response parameters that say which weights made an answer."""
    parameters: dict[str, Parameter] = {"weights_generation": generation.number}
    if generation.label:
        parameters["weights_label"] = generation.label
    return parameters
