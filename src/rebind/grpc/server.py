"""The gRPC listener: a port on which methods are served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rebind.grpc.connection import Connection
from rebind.listener import Listener

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rebind.grpc.methods import Method

MAX_MESSAGE_BYTES = 2**31 - 1
"""The largest message, received or inflated (Triton's limit, spec 02 section 3)."""


class GrpcServer(Listener[Connection]):
    """Serves ``methods``, which are named by their paths."""

    def __init__(self, methods: Mapping[str, Method], max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        super().__init__("GRPCInferenceService", lambda: Connection(methods, max_message_bytes, self._connections))
