"""A data plane of numpy functions, and a server on it in a thread of its own: what the front end is tested against."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import uvloop

from rebind.errors import Internal, NotFound, Unavailable
from rebind.http.routes import V2_ROUTES
from rebind.http.server import HttpServer
from rebind.inference import InferResponse
from rebind.serving.dataplane import DataPlane, WeightsReport
from rebind.serving.updates import Outcome, UpdateReport
from rebind.serving.validate import ModelIO, validate
from rebind.tensor import DataType, Tensor, TensorSpec
from tests.http.stages import DIGEST, KeptStage, KeptStages, check

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from rebind.http.limits import Limits
    from rebind.http.routes import Routes
    from rebind.inference import InferRequest
    from rebind.serving.updates import Mode, StageOptions, UpdateOptions

Function = "Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]"


def _io(max_batch_size: int, inputs: list[TensorSpec], outputs: list[TensorSpec]) -> ModelIO:
    return ModelIO({spec.name: spec for spec in inputs}, {spec.name: spec for spec in outputs}, max_batch_size)


def _identity_io(datatype: DataType, *shape: int, max_batch_size: int = 8) -> ModelIO:
    shape = (-1, *shape) if max_batch_size else shape
    return _io(max_batch_size, [TensorSpec("INPUT0", datatype, shape)], [TensorSpec("OUTPUT0", datatype, shape)])


def _identity(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {"OUTPUT0": inputs["INPUT0"]}


def _add_sub(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {"OUTPUT0": inputs["INPUT0"] + inputs["INPUT1"], "OUTPUT1": inputs["INPUT0"] - inputs["INPUT1"]}


def _non_finite(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {"OUTPUT0": np.array([[np.nan, np.inf, -np.inf, 0.5]], np.float32)}


def _not_utf8(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {"OUTPUT0": np.array([[b"\xff\xfe"]], object)}


def _fail(inputs: Mapping[str, Any]) -> dict[str, Any]:
    raise Internal("the model says no")


def _break(inputs: Mapping[str, Any]) -> dict[str, Any]:
    raise ZeroDivisionError("a secret of the server")


_INT32_16 = [TensorSpec(name, DataType.INT32, (-1, 16)) for name in ("INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1")]


@dataclass
class NumpyPlane:
    """The methods of DataPlane over numpy functions.

    Models ``slow*`` answer when ``release`` is called; ``started`` and ``cancelled`` say what became of their requests.
    """

    loads: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    unloads: list[tuple[str, bool]] = field(default_factory=list)
    seen: list[InferRequest] = field(default_factory=list)
    started: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    stages_: KeptStages = field(default_factory=KeptStages)
    waiting: list[tuple[asyncio.Future[InferResponse], InferRequest]] = field(default_factory=list)
    stopping: bool = False
    parameters: dict[str, Any] = field(default_factory=lambda: {"weights_generation": 7, "weights_label": "step-1200"})

    def __post_init__(self) -> None:
        self.models: dict[str, tuple[ModelIO, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
            "id": (_identity_io(DataType.FP32, 4), _identity),
            "slow": (_identity_io(DataType.FP32, 4), _identity),
            "big": (_identity_io(DataType.FP32, -1), _identity),
            "vector": (_identity_io(DataType.FP32, -1, max_batch_size=0), _identity),
            "add": (_io(8, _INT32_16[:2], _INT32_16[2:]), _add_sub),
            "non_finite": (_identity_io(DataType.FP32, 4), _non_finite),
            "not_utf8": (_identity_io(DataType.BYTES, 1), _not_utf8),
            "fail": (_identity_io(DataType.FP32, 4), _fail),
            "break": (_identity_io(DataType.FP32, 4), _break),
            "pending": (_identity_io(DataType.FP32, 4), _identity),
            "a/b": (_identity_io(DataType.FP32, 4), _identity),
            "über": (_identity_io(DataType.FP32, 4), _identity),
            "100%25": (_identity_io(DataType.FP32, 4), _identity),
        }
        for datatype in DataType:
            self.models[f"any_{datatype.value}"] = (_identity_io(datatype, -1), _identity)

    def io(self, name: str, version: int | None) -> ModelIO:
        if name not in self.models:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        if version not in {None, 1}:
            raise NotFound(f"Request for unknown model: '{name}' version {version} is not found")
        return self.models[name][0]

    def infer(self, request: InferRequest) -> asyncio.Future[InferResponse]:
        self.seen.append(validate(request, self.io(request.model_name, request.model_version)))
        future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
        if request.model_name == "slow":
            self.waiting.append((future, request))
            future.add_done_callback(lambda done: self.cancelled.set() if done.cancelled() else None)
            self.started.set()
        else:
            self._answer(future, request)
        return future

    def release(self) -> None:
        """Answers what waits; on the server's loop."""
        for future, request in self.waiting:
            if not future.done():
                self._answer(future, request)
        self.waiting.clear()

    def _answer(self, future: asyncio.Future[InferResponse], request: InferRequest) -> None:
        io, function = self.models[request.model_name]
        try:
            arrays = function({tensor.name: tensor.array for tensor in request.inputs})
        except Exception as error:  # noqa: BLE001 - as a scheduler does
            future.set_exception(error)
            return
        outputs = tuple(
            Tensor(name, io.outputs[name].datatype, arrays[name]) for name in request.output_names or tuple(io.outputs)
        )
        future.set_result(InferResponse(request.model_name, 1, outputs, request.id, self.parameters))

    def server_live(self) -> bool:
        if self.stopping:
            raise Unavailable("Server exiting")
        return True

    def server_ready(self) -> bool:
        return self.server_live()

    def model_ready(self, name: str, version: int | None) -> bool:
        return name in self.models and version in {None, 1}

    def server_metadata(self) -> dict[str, Any]:
        return {"name": "numpy", "version": "1", "extensions": ["binary_tensor_data"]}

    def model_metadata(self, name: str, version: int | None) -> dict[str, Any]:
        io = self.io(name, version)
        return {
            "name": name,
            "versions": ["1"],
            "platform": "numpy",
            "inputs": [_json(spec) for spec in io.inputs.values()],
            "outputs": [_json(spec) for spec in io.outputs.values()],
        }

    def model_config(self, name: str, version: int | None) -> dict[str, Any]:
        return {"name": name, "max_batch_size": self.io(name, version).max_batch_size}

    def statistics(self, name: str | None, version: int | None) -> dict[str, Any]:
        return {"model_stats": [{"name": each} for each in self.models if name in {None, each}]}

    def weights(self, name: str, version: int | None, *, slots: bool = False) -> WeightsReport:
        self.io(name, version)
        digest = "" if name == "pending" else DIGEST
        return WeightsReport(digest, {"digest": digest, **({"slots": []} if slots else {})})

    def open_push(self, name: str, version: int | None, mode: Mode, options: UpdateOptions) -> KeptStage:
        self.io(name, version)
        return self.stages_.push(name, mode, options)

    def open_stage(self, name: str, version: int | None, options: StageOptions) -> KeptStage:
        self.io(name, version)
        return self.stages_.open(name, options)

    def stages(self, name: str, version: int | None) -> list[KeptStage]:
        self.io(name, version)
        return self.stages_.opened

    def stage(self, name: str, version: int | None, stage_id: str) -> KeptStage:
        for stage in self.stages(name, version):
            if stage.id == stage_id:
                return stage
        raise NotFound(f"no stage '{stage_id}'")

    async def rollback(self, name: str, version: int | None, options: UpdateOptions) -> UpdateReport:
        self.io(name, version)
        check(options)
        self.stages_.rollbacks.append(options)
        return UpdateReport(name, 1, Outcome.COMMITTED, 9, options.label, DIGEST)

    async def wait_weights(self, name: str, version: int | None, generation: int, timeout_s: float) -> WeightsReport:
        await self.stages_.wait(generation, timeout_s)
        return self.weights(name, version)

    async def repository_index(self, *, ready: bool = False) -> list[dict[str, str]]:
        await asyncio.sleep(0)
        return [{"name": "id", "version": "1", "state": "READY"}] + ([] if ready else [{"name": "off"}])

    async def load_model(self, name: str, parameters: Mapping[str, str]) -> None:
        await asyncio.sleep(0)
        self.loads.append((name, dict(parameters)))
        if name == "broken":
            raise Internal("failed to load 'broken', no version is available")

    async def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        await asyncio.sleep(0)
        self.unloads.append((name, unload_dependents))


def _json(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype.value, "shape": list(spec.shape)}


class RunningServer:
    """A server on 127.0.0.1 in a thread with a loop of its own; ``port`` is set once it listens."""

    def __init__(
        self,
        plane: NumpyPlane,
        limits: Limits | None = None,
        loop_factory: Any = uvloop.new_event_loop,
        routes: Routes = V2_ROUTES,
    ) -> None:
        self.plane = plane
        self.server = HttpServer(cast("DataPlane", plane), limits, routes=routes)
        self.loop = loop_factory()
        self.problems: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _loop, context: self.problems.append(context))
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.run(self.server.start("127.0.0.1", 0))
        (self.port,) = self.server.ports

    def run(self, coroutine: Any, timeout_s: float = 10) -> Any:
        """Runs a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def call(self, function: Callable[[], Any]) -> None:
        """Calls a function on the server's loop and waits for it."""

        async def call() -> None:
            function()

        self.run(call())

    def begin_drain(self, timeout_s: float) -> Future[None]:
        """Lets the server come to its end; the result is there when it has."""
        return asyncio.run_coroutine_threadsafe(self.server.drain(timeout_s), self.loop)

    def close(self) -> None:
        """Drains, and checks that nothing went wrong unseen."""
        self.run(self.server.drain(0.2))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()
        assert self.problems == []
