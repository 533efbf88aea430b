"""The methods of rebind.v1.Weights as a client calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rebind.grpc import weights_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import grpc
    from google.protobuf.message import Message

TIMEOUT_S = 30

_UNARY = {
    "Get": (pb.GetRequest, pb.WeightsReport),
    "OpenStage": (pb.OpenStageRequest, pb.Stage),
    "GetStage": (pb.StageReference, pb.Stage),
    "ListStages": (pb.ListStagesRequest, pb.ListStagesResponse),
    "Prepare": (pb.PrepareRequest, pb.Stage),
    "Commit": (pb.CommitRequest, pb.UpdateReport),
    "Abort": (pb.StageReference, pb.AbortResponse),
    "Rollback": (pb.RollbackRequest, pb.UpdateReport),
    "Wait": (pb.WaitRequest, pb.WeightsReport),
}


class Weights:
    """The service, for one model."""

    def __init__(self, channel: grpc.Channel, model: str) -> None:
        self._channel = channel
        self._model = model

    def call(self, name: str, **fields: Any) -> Any:
        """A unary call; the request names the model."""
        request, reply = _UNARY[name]
        return self._stub(self._channel.unary_unary, name, request, reply)(
            request(model_name=self._model, **fields), timeout=TIMEOUT_S
        )

    def on_stage(self, name: str, stage: pb.Stage, **fields: Any) -> Any:
        """A unary call about a stage."""
        request, reply = _UNARY[name]
        named = reference(stage) if request is pb.StageReference else request(stage=reference(stage), **fields)
        return self._stub(self._channel.unary_unary, name, request, reply)(named, timeout=TIMEOUT_S)

    def push(self, data: bytes, size: int = 1_000_000, *, mode: str = "", **update: Any) -> Any:
        """A push in pieces of ``size`` bytes."""
        options = self.options(mode=mode, **update)
        return self.push_stub()(iter([options, *pieces(pb.PushRequest, data, size)]), timeout=TIMEOUT_S)

    def push_stub(self) -> Any:
        return self._stub(self._channel.stream_unary, "Push", pb.PushRequest, pb.UpdateReport)

    def options(self, *, mode: str = "", **update: Any) -> pb.PushRequest:
        return pb.PushRequest(
            options=pb.PushOptions(model_name=self._model, mode=mode, update=pb.UpdateOptions(**update))
        )

    def put(self, stage: pb.Stage, data: bytes, size: int = 1_000_000) -> Any:
        first = pb.PutRequest(stage=reference(stage))
        stub = self._stub(self._channel.stream_unary, "Put", pb.PutRequest, pb.Stage)
        return stub(iter([first, *pieces(pb.PutRequest, data, size)]), timeout=TIMEOUT_S)

    def watch(self) -> Iterator[Any]:
        stub = self._stub(self._channel.unary_stream, "Watch", pb.WatchRequest, pb.WeightsReport)
        watching: Iterator[Any] = stub(pb.WatchRequest(model_name=self._model), timeout=TIMEOUT_S)
        return watching

    @staticmethod
    def _stub(kind: Any, name: str, request: type[Message], reply: type[Message]) -> Any:
        return kind(f"/rebind.v1.Weights/{name}", request.SerializeToString, reply.FromString)


def reference(stage: pb.Stage) -> pb.StageReference:
    return pb.StageReference(model_name=stage.model_name, model_version=stage.model_version, id=stage.id)


def pieces(kind: type[pb.PushRequest | pb.PutRequest], data: bytes, size: int) -> Iterable[Any]:
    return [kind(data=data[start : start + size]) for start in range(0, len(data), size)]
