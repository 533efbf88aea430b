"""The data plane: everything that a front end can ask for, free of any protocol.

HTTP and gRPC handlers are about ten lines each onto these methods. All belong to the event loop and never block it; all
raise :class:`rebind.errors.RebindError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rebind.config.pbtxt import to_json
from rebind.errors import InvalidArgument, RebindError, Unavailable
from rebind.serving.validate import validate

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from rebind.inference import InferRequest, InferResponse
    from rebind.serving.control import RepositoryControl
    from rebind.serving.models import Model, Models
    from rebind.serving.validate import ModelIO
    from rebind.serving.version import ModelVersion

EXTENSIONS = (
    "model_repository",
    "model_repository(unload_dependents)",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "weights",
)
"""What ``GET /v2`` lists: Triton's names for what is there, in Triton's order, and ours."""


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """The weights that serve: ``digest`` names them (the ETag), ``body`` is JSON-ready."""

    digest: str
    body: dict[str, Any]


class DataPlane:
    """The one implementation under all front ends."""

    def __init__(
        self, server_id: str, server_version: str, models: Models, control: RepositoryControl, *, strict_readiness: bool
    ) -> None:
        self._server_id = server_id
        self._server_version = server_version
        self._models = models
        self._control = control
        self._strict_readiness = strict_readiness
        self._started = False
        self._stopping = False

    def start(self) -> None:
        """Start-up models are loaded: the server is ready from now on."""
        self._started = True

    def stop(self) -> None:
        """Refuses requests from now on."""
        self._stopping = True

    def infer(self, request: InferRequest) -> asyncio.Future[InferResponse]:
        """Validates and queues a request; cancel the future when the client is gone."""
        if self._stopping:
            raise Unavailable("Server is stopping, scheduler for model has stopped accepting new inference requests")
        version = self._models.lease(request.model_name, request.model_version)
        return version.infer(validate(request, version.signature.io))

    def io(self, name: str, version: int | None) -> ModelIO:
        """Inputs and outputs of the version that :meth:`infer` would use."""
        return self._models.lease(name, version).signature.io

    def server_live(self) -> bool:
        """True while the process answers at all."""
        self._refuse_when_stopping()
        return True

    def server_ready(self) -> bool:
        """True once start-up is over and, with strict readiness, while all models are ready."""
        self._refuse_when_stopping()
        return self._started and (not self._strict_readiness or self._models.all_ready())

    def model_ready(self, name: str, version: int | None) -> bool:
        """False also for models and versions that do not exist, as released Tritons answer (spec 01 section 2)."""
        try:
            self._models.lease(name, version)
        except RebindError:
            return False
        return True

    def server_metadata(self) -> dict[str, Any]:
        """The body of ``GET /v2``."""
        return {"name": self._server_id, "version": self._server_version, "extensions": list(EXTENSIONS)}

    def model_metadata(self, name: str, version: int | None) -> dict[str, Any]:
        """The body of ``GET /v2/models/M``."""
        leased = self._models.lease(name, version)
        ready = self._ready_model(name).ready() if version is None else [leased]
        return {
            "name": name,
            "versions": [str(each.number) for each in ready],
            "platform": leased.config.platform or leased.config.backend,
            "inputs": [spec.to_json() for spec in leased.signature.io.inputs.values()],
            "outputs": [spec.to_json() for spec in leased.signature.io.outputs.values()],
        }

    def model_config(self, name: str, version: int | None) -> dict[str, Any]:
        """The completed configuration as Triton writes it in JSON."""
        return to_json(self._models.lease(name, version).config.message)

    def statistics(self, name: str | None, version: int | None) -> dict[str, Any]:
        """The statistics of all READY versions, of one model's, or of one version."""
        models = list(self._models) if name is None else [self._ready_model(name)]
        found = [each for model in models for each in model.ready() if version in (None, each.number)]
        if version is not None and not found:
            raise InvalidArgument(f"requested model version is not available for model '{name}'")
        return {"model_stats": [each.statistics.to_json(each.name, each.number) for each in found]}

    def weights(self, name: str, version: int | None, *, slots: bool = False) -> WeightsReport:
        """Which weights serve, and which did: the body of ``GET .../weights``."""
        leased = self._models.lease(name, version)
        body = _weights_json(leased)
        if slots:
            body["slots"] = leased.graph.slots.to_json()
        return WeightsReport(body["digest"], body)

    async def repository_index(self, *, ready: bool = False) -> list[dict[str, str]]:
        """The repository index; ``ready`` lists READY versions only."""
        return await self._control.index(ready=ready)

    async def load_model(self, name: str, parameters: Mapping[str, str]) -> None:
        """Loads or refits a model; returns when it serves."""
        await self._control.load(name, parameters)

    async def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:  # noqa: ARG002 - part of the call
        """Begins to unload a model and returns. No model depends on another yet: ``unload_dependents`` adds nothing."""
        await self._control.unload(name)

    def _refuse_when_stopping(self) -> None:
        if self._stopping:
            raise Unavailable("Server exiting")

    def _ready_model(self, name: str) -> Model:
        model = self._models.get(name)
        if model is None or not model.ready():
            raise InvalidArgument(f"requested model '{name}' is not available")
        return model


def _weights_json(version: ModelVersion) -> dict[str, Any]:
    generation = version.generation
    latest = version.history[-1]
    return {
        "model_name": version.name,
        "model_version": str(version.number),
        "generation": generation.number,
        "label": generation.label,
        "digest": generation.weights.digest,
        "state": version.weights_state.value,
        "bytes": {"total": generation.weights.nbytes, "shared": latest.shared_bytes},
        "plan_key": version.graph.key,
        "tier": generation.plan.tier.value,
        "compile_error": version.compile_error,
        "refusal": version.refusal,
        "history": [commit.to_json() for commit in version.history],
    }
