from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from rebind.grpc.call import Call
from tests.grpc.echo import SERVICE
from tests.server import eventually

if TYPE_CHECKING:
    import grpc

    from tests.grpc.echo import RunningGrpc


def test_calls_leave_no_cycles_behind(server: RunningGrpc, channel: grpc.Channel) -> None:
    """Large messages hang on them; their memory must not wait for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        for method in ("Unary", "Later"):
            channel.unary_unary(SERVICE + method)(bytes(200_000), timeout=20)
        for method in ("Count", "Refuse"):
            channel.stream_unary(SERVICE + method).future(iter([bytes(200_000)]), timeout=20).exception()
        list(channel.unary_stream(SERVICE + "Repeat")(b"3 200000", timeout=20))
        eventually(lambda: server.open_calls() == 0, "the calls are over")
        eventually(lambda: not [each for each in gc.get_objects() if type(each) is Call], "they are gone")
    finally:
        gc.enable()
