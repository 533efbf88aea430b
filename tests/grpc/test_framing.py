from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebind.grpc.chunks import only_field
from rebind.grpc.framing import Message, MessageReader, prefix
from rebind.grpc.status import RpcFailed, Status
from rebind.grpc.weights_pb2 import PushRequest

CONTENTS = st.lists(st.tuples(st.booleans(), st.binary(max_size=40)), max_size=6)


@given(contents=CONTENTS, cuts=st.lists(st.integers(0, 300)))
def test_messages_are_the_same_wherever_they_are_split(contents: list[tuple[bool, bytes]], cuts: list[int]) -> None:
    data = b"".join(prefix(len(content), compressed=compressed) + content for compressed, content in contents)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    reader = MessageReader(100)
    read: list[Message] = []
    for start, stop in itertools.pairwise(edges):
        reader.feed(data[start:stop])
        while (message := reader.next()) is not None:
            read.append(message)
    assert [(compressed, bytes(content)) for compressed, content in read] == contents
    assert reader.taken_bytes == len(data)
    assert not reader.partial
    assert not reader.unread


@given(contents=CONTENTS)
def test_nothing_is_taken_before_it_is_asked_for(contents: list[tuple[bool, bytes]]) -> None:
    reader = MessageReader(100)
    taken = 0
    for _, content in contents:
        reader.feed(prefix(len(content)) + content)
    for _, content in contents:
        assert reader.taken_bytes == taken
        assert reader.next() is not None
        taken += 5 + len(content)


def test_what_has_come_of_a_message_is_taken_when_it_is_asked_for() -> None:
    reader = MessageReader(1000)
    reader.feed(prefix(1000) + bytes(600))
    assert reader.next() is None
    assert (reader.taken_bytes, reader.partial) == (605, True)
    reader.feed(bytes(405))
    message = reader.next()
    assert message is not None
    assert isinstance(message.content, memoryview)
    assert (len(message.content), reader.taken_bytes, reader.unread) == (1000, 1005, True)


def test_a_message_that_is_too_large_is_refused_by_its_prefix() -> None:
    for pieces in ([prefix(101)], [prefix(101)[:2], prefix(101)[2:]]):
        reader = MessageReader(100)
        for piece in pieces:
            reader.feed(piece)
        with pytest.raises(RpcFailed, match=r"larger than max \(101 vs. 100\)") as refused:
            reader.next()
        assert refused.value.status is Status.RESOURCE_EXHAUSTED


@given(data=st.binary(max_size=300))
def test_the_bytes_of_a_chunk_are_found_where_they_lie(data: bytes) -> None:
    for size in (0, 127, 128, 20_000):
        content = PushRequest(data=data + bytes(size)).SerializeToString()
        found = only_field(content, PushRequest.DATA_FIELD_NUMBER)
        assert found is not None
        assert found == data + bytes(size)
        assert only_field(memoryview(content), PushRequest.DATA_FIELD_NUMBER) == found


@given(content=st.binary(max_size=30))
def test_only_field_finds_nothing_that_protobuf_does_not(content: bytes) -> None:
    found = only_field(content, PushRequest.DATA_FIELD_NUMBER)
    if found is not None:
        assert PushRequest.FromString(content) == PushRequest(data=bytes(found))


def test_only_field_leaves_other_messages_to_protobuf() -> None:
    chunk = PushRequest(data=b"abc").SerializeToString()
    for content in (b"", chunk + chunk, chunk[:-1], b"\x0a\x00", chunk + b"\x18\x01"):
        assert only_field(content, PushRequest.DATA_FIELD_NUMBER) is None
