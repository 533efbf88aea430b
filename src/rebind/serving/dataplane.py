"""The data plane: everything that a front end can ask for, free of any protocol.

HTTP and gRPC handlers are about ten lines each onto these methods. All belong to the event loop and never block it; all
raise :class:`rebind.errors.RebindError`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rebind.config.pbtxt import to_json
from rebind.errors import InvalidArgument, RebindError, Unavailable, WaitTimeout, WeightsPending
from rebind.serving.validate import validate
from rebind.weights.in_memory import StoredSource

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from rebind.inference import InferRequest, InferResponse
    from rebind.serving.control import RepositoryControl
    from rebind.serving.generation import Generation
    from rebind.serving.models import Model, Models
    from rebind.serving.paging import Pager
    from rebind.serving.refit import Refitter
    from rebind.serving.stages import Stage, Stages
    from rebind.serving.updates import Mode, StageOptions, UpdateOptions, UpdateReport
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
        self,
        server_id: str,
        server_version: str,
        models: Models,
        control: RepositoryControl,
        stages: Stages,
        refitter: Refitter,
        pager: Pager,
        *,
        strict_readiness: bool,
    ) -> None:
        self._server_id = server_id
        self._server_version = server_version
        self._models = models
        self._control = control
        self._stages = stages
        self._refitter = refitter
        self._pager = pager
        self._strict_readiness = strict_readiness
        self._started = False
        self._ending = False
        self._stopping = False

    def start(self) -> None:
        """Start-up models are loaded: the server is ready from now on."""
        self._started = True

    def end_waits(self) -> None:
        """Refuses requests that wait for weights: nobody pushes any to a server that is about to stop."""
        self._ending = True
        for version in [version for model in self._models for version in model.ready()]:
            version.wake()

    def stop(self) -> None:
        """Refuses requests from now on."""
        self._stopping = True

    def infer(self, request: InferRequest) -> asyncio.Future[InferResponse]:
        """Validates and queues a request; cancel the future when the client is gone.

        With the parameter ``min_weights_generation`` it is queued once that generation serves; with
        ``weights_generation`` it is answered by exactly that one.
        """
        if self._stopping:
            raise Unavailable("Server is stopping, scheduler for model has stopped accepting new inference requests")
        version = self._models.lease(request.model_name, request.model_version)
        request = validate(request, version.signature.io)
        generation = version.generation
        if request.parameters and generation.number < _minimum(request):
            return asyncio.ensure_future(self._infer_later(request))
        if version.can_page_in:
            return asyncio.ensure_future(self._infer_paged(version, request))
        return version.infer(request)

    async def responses(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        """All responses of a request, as they come: exactly one, as no model is decoupled yet. Raises as :meth:`infer`.

        Who stops early, or is cancelled, abandons the request.
        """
        yield await self.infer(request)

    async def _infer_later(self, request: InferRequest) -> InferResponse:
        await self._reached(request.model_name, request.model_version, _minimum(request))
        return await self.infer(request)

    async def _infer_paged(self, version: ModelVersion, request: InferRequest) -> InferResponse:
        with version.pinned():
            await self._pager.page_in(version)
            return await version.infer(request)

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
            return self._models.lease(name, version).has_weights
        except RebindError:
            return False

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

    async def weights_file(self, name: str, version: int | None) -> tuple[Generation, StoredSource]:
        """The weights that serve, tensor by tensor; their memory stays as it is while the source is alive."""
        leased = self._models.lease(name, version)
        with leased.pinned():
            if leased.can_page_in:
                await self._pager.page_in(leased)
            generation = leased.generation
            if not generation.resident:
                raise WeightsPending(name, leased.number)
            return generation, StoredSource(f"the weights of '{name}'", generation.weights)

    def open_push(self, name: str, version: int | None, mode: Mode, options: UpdateOptions) -> Stage:
        """A stage for one body, to be committed with the same options when it has arrived, or else aborted.

        Raises before the body is there what it would be refused for whatever is in it.
        """
        self._refuse_when_stopping()
        return self._stages.open_push(self._models.lease(name, version), mode, options)

    def open_stage(self, name: str, version: int | None, options: StageOptions) -> Stage:
        """A stage for tensors that come bit by bit; it ends with its commit, or when its lease lapses."""
        self._refuse_when_stopping()
        return self._stages.open(self._models.lease(name, version), options)

    def stage(self, name: str, version: int | None, stage_id: str) -> Stage:
        """The open stage of that id, its lease renewed; raises NotFound when there is none."""
        return self._stages.find(self._models.lease(name, version), stage_id)

    def stages(self, name: str, version: int | None) -> list[Stage]:
        """The open stages of a version."""
        return list(self._models.lease(name, version).stages.values())

    async def rollback(self, name: str, version: int | None, options: UpdateOptions) -> UpdateReport:
        """Back to the newest weights that are kept, as a new generation; raises NotFound when none are."""
        return await self._refitter.roll_back(self._models.lease(name, version), options)

    async def wait_weights(self, name: str, version: int | None, generation: int, timeout_s: float) -> WeightsReport:
        """Which weights serve, once ``generation`` or a later one does; WaitTimeout when it does not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._reached(name, version, generation)
        except TimeoutError:
            now = self._models.lease(name, version).generation.number
            text = f"generation {generation} of model '{name}' did not serve within {timeout_s:g} s; {now} serves"
            raise WaitTimeout(text) from None
        return self.weights(name, version)

    async def _reached(self, name: str, version: int | None, generation: int) -> None:
        """Returns when the version's generation is that or a later one; a reload on the way does not matter."""
        while (leased := self._models.lease(name, version)).generation.number < generation:
            if self._ending:
                raise Unavailable("Server exiting")
            await leased.change()

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


def _minimum(request: InferRequest) -> int:
    wanted = request.parameters.get("min_weights_generation", 0)
    assert isinstance(wanted, int)  # validated
    return wanted


def _weights_json(version: ModelVersion) -> dict[str, Any]:
    generation = version.generation
    return {
        "model_name": version.name,
        "model_version": str(version.number),
        "generation": generation.number,
        "label": generation.label,
        "digest": generation.digest,
        "state": version.weights_state.value,
        "bytes": {
            "total": generation.weights.nbytes if generation.resident else 0,
            "shared": version.history[-1].shared_bytes if version.history else 0,
        },
        "plan_key": version.graph.key,
        "tier": generation.plan.tier.value,
        "compile_error": version.compile_error,
        "refusal": version.refusal or version.lost,
        "retained": [each.number for each in version.retained],
        "history": [commit.to_json() for commit in version.history],
    }
