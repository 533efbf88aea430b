"""Files that wait on the disk: what messages call them, and what becomes of several."""

from __future__ import annotations

from contextlib import closing

import pytest
from safetensors.numpy import save as to_bytes

from rebind.errors import WeightsRefused
from rebind.weights.spool import Spool
from tests.weights.files import arrays_of, table_of

ARRAYS = arrays_of(0, a=(1000,), b=(7,))


def spool() -> Spool:
    return Spool(table_of(ARRAYS), "weights sent for 'm'")


def send(spool: Spool, content: bytes) -> None:
    incoming = spool.incoming()
    incoming.feed(content)
    incoming.finish()


def test_damaged_file_is_called_what_its_sender_knows_it_by() -> None:
    content = to_bytes(ARRAYS)
    for damaged in (content[:-1], content[:4], b"\xff" * 64):
        with closing(spool()) as files, pytest.raises(WeightsRefused, match=r"^weights sent for 'm': ") as refused:
            send(files, damaged)
        assert "/proc" not in str(refused.value)


def test_of_a_tensor_that_came_twice_the_later_counts() -> None:
    later = {"a": ARRAYS["a"] + 1}
    with closing(spool()) as files:
        for part in (ARRAYS, later):
            send(files, to_bytes(part))
        assert files.received_names == {"a", "b"}
        for name, array in {**ARRAYS, **later}.items():
            buffer = bytearray(array.nbytes)
            files.source().read_into(name, 0, memoryview(buffer))
            assert buffer == array.tobytes()
