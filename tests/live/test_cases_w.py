"""The cases W and T4 of past reports, on weights that are pushed: damaged, hostile, or of another model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.life.models import EVERYTHING, MLP
from tests.live import region
from tests.live.models import HUNDRED, arrays, part
from tests.server import Client, Failed, safetensors_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.life.repository import Home, Live
    from tests.live.models import Arrays

    Way = Callable[[Client, Home, bytes], object]

pytestmark = pytest.mark.timeout(180)

Document = dict[str, Any]


@pytest.fixture(scope="module")
def home(live: Live) -> Home:
    """The model that all bad pushes go to: each shows as well that those before it have changed nothing."""
    with live.server.client() as client:
        return live.load(client)


def good() -> bytes:
    return safetensors_bytes(arrays(MLP, 1))


def parse(content: bytes) -> tuple[Document, bytes]:
    """The header of a safetensors file, and what is behind it."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def build(header: Document | str, data: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text)) + text + data


def edit(change: Callable[[Document], object]) -> bytes:
    """The good file with a change in its header."""
    header, data = parse(good())
    change(header)
    return build(header, data)


def with_tensor(name: str, tensor: torch.Tensor) -> bytes:
    """The good weights with another tensor under one of the names."""
    state: dict[str, Any] = {**MLP.state(1), name: tensor.contiguous()}
    return safetensors.torch.save(state)


def _named(name: str) -> Callable[[], bytes]:
    """The good weights, one of them under another name."""
    return lambda: edit(lambda header: header.update({name: header.pop("first.bias")}))


def _twice(same: bool) -> bytes:
    """The header with a name twice: an identical entry, or one that would read other bytes."""
    header, data = parse(good())
    entry = dict(header["first.bias"])
    if not same:
        entry["data_offsets"] = header["second.bias"]["data_offsets"]
    return build(f'{json.dumps(header)[:-1]}, "first.bias": {json.dumps(entry)}}}', data)


def _overlapping(header: Document) -> None:
    """Case W15: two names over one byte range."""
    header["alias"] = dict(header["first.bias"])


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "W1: 1000 bytes of header in 100": (lambda: struct.pack("<Q", 1000) + bytes(92), "truncated|header"),
    "W1: a header of 2^63 bytes": (lambda: struct.pack("<Q", 1 << 63) + bytes(92), "header"),
    "W1: a header of 100,000,001 bytes": (lambda: struct.pack("<Q", 100_000_001) + bytes(92), "header"),
    "W1: no header": (lambda: struct.pack("<Q", 0), "header"),
    "W1: an empty body": (lambda: b"", "0 bytes"),
    "W1: 7 bytes": (lambda: b"\1" * 7, "7 bytes"),
    "W3: a name twice": (lambda: _twice(same=False), "duplicate"),
    "W3: an entry twice": (lambda: _twice(same=True), "duplicate"),
    "W4: a shape larger than its bytes": (
        lambda: edit(lambda header: header["first.bias"].update(shape=[1000, 1000])),
        r"first\.bias",
    ),
    "W6: no tensors": (lambda: build({"__metadata__": {"a": "b"}}, b""), "missing all 4"),
    "W7: short by a byte": (lambda: good()[:-1], "truncated|ends after"),
    "W7: short by a tensor": (lambda: good()[:-256], "truncated|ends after"),
    "W7: four bytes too long": (lambda: good() + bytes(4), "4 bytes|behind|after"),
    "W15: two names for one range": (lambda: edit(_overlapping), "alias"),
    "W16: not finite": (
        lambda: with_tensor("first.bias", torch.full((64,), torch.inf)),
        r"first\.bias.*64 of its values",
    ),
    "W18: a name that is a path": (_named("../../etc/passwd"), r"\.\./\.\./etc/passwd': unexpected"),
    "W18: no name": (_named(""), "unexpected"),
    "W18: a name of 1 MB": (_named("x" * 1_000_000), "unexpected"),
    "W18: a name of control characters": (_named("\x1b[2J\r\n\0"), "unexpected"),
    "T4: a shape of as many elements": (
        lambda: with_tensor("second.weight", torch.zeros(2, 128)),
        r"second\.weight.*\[4,64\].*\[2,128\]",
    ),
    "T4: a shape of fewer elements": (lambda: with_tensor("second.weight", torch.zeros(2, 2)), r"\[4,64\].*\[2,2\]"),
    "T4: transposed": (lambda: with_tensor("second.weight", torch.zeros(64, 4)), r"\[4,64\].*\[64,4\]"),
    "T4: a row for all rows": (lambda: with_tensor("second.weight", torch.zeros(1, 64)), r"\[4,64\].*\[1,64\]"),
    "T4: no dimensions": (lambda: with_tensor("second.bias", torch.tensor(1.0)), r"\[4\].*\[\]"),
    "T4: float64": (
        lambda: with_tensor("first.weight", torch.zeros(64, 16, dtype=torch.float64)),
        "dtype F32, got F64",
    ),
    "T4: bfloat16": (
        lambda: with_tensor("first.weight", torch.zeros(64, 16, dtype=torch.bfloat16)),
        "dtype F32, got BF16",
    ),
    "T4: int32, which has as many bytes": (
        lambda: with_tensor("second.bias", torch.zeros(4, dtype=torch.int32)),
        "dtype F32, got I32",
    ),
    "an unknown name, nearly right": (_named("first.baIs"), r"did you mean 'first\.bias'"),
    "a pickle": (lambda: b"\x80\x02" + bytes(1000), "header|safetensors"),
    "a zip file": (lambda: b"PK\3\4" + bytes(1000), "header|safetensors"),
}


def _by_stage(client: Client, home: Home, content: bytes) -> None:
    client.commit(client.put(client.open_stage(home.name), content), label="bad")


WAYS: dict[str, Way] = {
    "push": lambda client, home, content: client.push(home.name, content, label="bad"),
    "patch": lambda client, home, content: client.push(home.name, content, label="bad", mode="patch"),
    "stage": _by_stage,
}


@pytest.mark.parametrize(
    ("way", "kind"),
    # A patch may lack any tensor, and all.
    [(way, kind) for way in WAYS for kind in BAD if way != "patch" or not kind.startswith("W6")],
)
def test_bad_weights_are_refused_by_name_and_nothing_changes(kind: str, way: str, home: Home, client: Client) -> None:
    """The connection is the same for the refused request and the questions that follow."""
    make, reason = BAD[kind]
    before = client.weights(home.name)
    with pytest.raises(Failed, match=f"(?s){reason}") as refused:
        WAYS[way](client, home, make())
    assert refused.value.status == 400
    assert len(str(refused.value)) < 4000
    for stage in client.stages(home.name):
        client.abort(stage)
    home.expect(client, 0, generation=1)
    after = client.weights(home.name)
    assert after["digest"] == before["digest"]
    assert after["history"] == before["history"]
    assert client.stages(home.name) == []


def test_the_next_good_push_serves(home: Home, live: Live, client: Client) -> None:
    """After every bad one of the test before, in a model that has seen some of them."""
    other = live.load(client)
    for make, _ in BAD.values():
        with pytest.raises(Failed):
            client.push(other.name, make())
    report = client.push(other.name, good(), label="good")
    assert (report["outcome"], report["generation"]) == ("committed", 2)
    assert other.expect(client, 1, generation=2).label == "good"
    assert client.weights(other.name)["refusal"] is None


def test_a_stage_goes_on_after_a_bad_file(live: Live, client: Client) -> None:
    home = live.load(client)
    stage = client.put(client.open_stage(home.name), good())

    def put_and_commit(content: bytes) -> None:
        client.commit(client.put(stage, content))

    for kind, (make, _) in BAD.items():
        if not kind.startswith("W6"):  # no more tensors: the stage has them all
            with pytest.raises(Failed):
                put_and_commit(make())
            client.put(stage, good())
    client.commit(stage)
    home.expect(client, 1, generation=2)


def test_tied_weights_come_under_either_name_or_both_if_they_are_equal(live: Live, client: Client) -> None:
    """Cases W15 and T14."""
    home = live.load(client, EVERYTHING)
    tied = arrays(EVERYTHING, 1)["inner.weight"]
    inner = {**arrays(EVERYTHING, 1)}
    outer = {name: array for name, array in inner.items() if name != "inner.weight"} | {"outer.weight": tied}
    digest = client.push(home.name, inner)["digest"]
    home.expect(client, 1, generation=2)
    for either in (outer, {**inner, "outer.weight": tied}):
        assert client.push(home.name, either)["outcome"] == "unchanged"
    with pytest.raises(Failed, match=r"(?s)inner\.weight.*outer\.weight|outer\.weight.*inner\.weight"):
        client.push(home.name, {**inner, "outer.weight": tied + 1})
    client.push(home.name, arrays(EVERYTHING, 2))
    assert client.push(home.name, outer)["digest"] == digest
    home.expect(client, 1, generation=4)


def test_names_with_what_wrappers_put_before_them_are_known(live: Live, client: Client) -> None:
    home = live.load(client)
    for seed, prefix in enumerate(("module.", "_orig_mod.", "model."), start=1):
        client.push(home.name, {f"{prefix}{name}": array for name, array in arrays(MLP, seed).items()})
        home.expect(client, seed, generation=seed + 1)


@pytest.mark.parametrize("bucket", [1, 7, 10, 100])
def test_buckets_of_any_size_give_the_same_weights(bucket: int, live: Live, client: Client) -> None:
    """Case W19: in any order, and a tensor that is sent twice counts as the last time."""
    home = live.load(client, HUNDRED)
    digest = client.push(home.name, arrays(HUNDRED, 1), dry_run=True)["digest"]
    names = [str(name) for name in np.random.default_rng(bucket).permutation(sorted(arrays(HUNDRED, 1)))]
    stage = client.put(client.open_stage(home.name), part(HUNDRED, 2, *names[:bucket]))
    for start in range(0, len(names), bucket):
        stage = client.put(stage, part(HUNDRED, 1, *names[start : start + bucket]))
    assert client.commit(stage)["digest"] == digest
    home.expect(client, 1, generation=2)


def test_region_can_be_neither_cut_nor_used_to_change_what_serves(live: Live, client: Client) -> None:
    """Cases W9 and W10 for shared memory: the trainer keeps its mapping, and does its worst."""
    home = live.load(client)
    stage = client.open_stage(home.name, shm=True)
    mapped = region.views(stage)
    _fill(mapped, arrays(MLP, 1))
    with Path(stage["region"]["path"]).open("r+b") as file:
        for size in (0, stage["region"]["nbytes"] // 2, 2 * stage["region"]["nbytes"]):
            with pytest.raises(OSError, match="not permitted"):
                file.truncate(size)
    client.commit(stage, keep=True)
    home.expect(client, 1, generation=2)
    _fill(mapped, arrays(MLP, 2))
    home.expect(client, 1, generation=2)
    client.commit(stage)
    home.expect(client, 2, generation=3)
    _fill(mapped, arrays(MLP, 3))
    home.expect(client, 2, generation=3)


def _fill(mapped: Arrays, weights: Arrays) -> None:
    for name, array in weights.items():
        mapped[name][...] = array
