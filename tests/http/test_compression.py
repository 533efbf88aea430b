"""Compressed request bodies."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.http.wire import fp32, refused, split

if TYPE_CHECKING:
    from tests.http.wire import Client

ROW = np.array([[1.5, -2, 0, 3]], np.float32)
BINARY_OUT: dict[str, Any] = {"parameters": {"binary_data_output": True}}


@pytest.mark.parametrize(
    ("coding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP", zlib.compress)]
)
@pytest.mark.parametrize("count", [4, 200_000])
def test_compressed_request(client: Client, coding: str, compress: Any, count: int) -> None:
    array = np.random.default_rng(0).random((1, count), np.float32)
    head = json.dumps({**BINARY_OUT, "inputs": [fp32(None, (1, count), array.nbytes)]}).encode()
    answer = client.ask(
        "POST",
        "/v2/models/big/infer",
        compress(head + array.tobytes()),
        content_encoding=coding,
        inference_header_content_length=str(len(head)),
    )
    assert split(answer)[1] == array.tobytes()


@pytest.mark.parametrize("repeat", [65 * 1024 * 1024, 700 * 1024 * 1024])
def test_bomb_is_refused_at_the_limit(client: Client, repeat: int) -> None:
    compressor = zlib.compressobj(1)
    block = b" " * 1_048_576
    body = b"".join(compressor.compress(block) for _ in range(repeat // len(block))) + compressor.flush()
    answer = client.ask("POST", "/v2/models/id/infer", body, content_encoding="deflate")
    assert refused(answer, 400).startswith(
        "Decompressed data size exceeds the maximum allowed value of 67108864 bytes."
    )


EMPTY_OBJECT = gzip.compress(b"{}", mtime=0)  # the time would be another one in each process that collects the tests


@pytest.mark.parametrize("body", [b"", b"not compressed", EMPTY_OBJECT[:-4], EMPTY_OBJECT + b"x"])
def test_damaged_compressed_body_is_400(client: Client, body: bytes) -> None:
    assert client.ask("POST", "/v2/models/id/infer", body, content_encoding="gzip").status == 400


def test_other_codings_are_501(client: Client) -> None:
    answer = client.ask("POST", "/v2/models/id/infer", b"{}", content_encoding="br")
    assert answer.status == 501
    assert answer.error == "Unsupported compression type"
    assert answer.headers["accept-encoding"] == "gzip, deflate"
