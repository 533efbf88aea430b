"""The parser on its own, and against the library on what either accepts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebind.errors import WeightsRefused
from rebind.weights.header import MOST_JSON_BYTES, parse_header
from rebind.weights.slots import DTYPES, TensorInfo
from tests.weights.files import entry, longest_silence_s, raw_safetensors, read_by_library


def parse(header: Any, data_nbytes: int) -> dict[str, tuple[TensorInfo, int]]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return dict(parse_header(text, data_nbytes, "file"))


def faults_of(header: Any, data_nbytes: int) -> list[str]:
    with pytest.raises(WeightsRefused) as refused:
        parse(header, data_nbytes)
    return [str(fault) for fault in refused.value.faults]


def test_tensors_metadata_and_padding_are_read() -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}, "b": entry([2], 4, 12), "a": entry([], 0, 4)}) + "   "
    assert parse(header.encode(), 12) == {"b": (TensorInfo("F32", (2,), 8), 4), "a": (TensorInfo("F32", (), 4), 0)}


def test_empty_tensors_may_lie_anywhere() -> None:
    header = {"a": entry([1], 0, 4), "e": entry([0, 1 << 62, 1 << 62], 4, 4), "f": entry([0], 0, 0)}
    assert set(parse(header, 4)) == {"a", "e", "f"}


def test_duplicate_key_is_refused_even_when_identical() -> None:  # W3: the library accepts this
    one = json.dumps(entry([1], 0, 4))
    header = f'{{"a":{one},"a":{one}}}'.encode()
    assert read_by_library(raw_safetensors(header, bytes(4))) == {"a": "F32"}
    assert faults_of(header, 4) == ["'a': is in the header twice (duplicate key)"]


def test_duplicate_key_within_an_entry_is_refused() -> None:
    header = b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    assert faults_of(header, 4) == ["'dtype': is in the header twice (duplicate key)"]


def test_two_names_over_one_range_are_refused() -> None:  # W15
    assert faults_of({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, 4) == [
        "'b': begins at byte 0, within 'a'; store tied tensors once"
    ]


def test_overlap_hole_and_remainder_are_found_together() -> None:
    header = {"a": entry([2], 0, 8), "b": entry([2], 4, 12), "c": entry([1], 16, 20)}
    assert faults_of(header, 24) == [
        "'b': begins at byte 4, within 'a'; store tied tensors once",
        "'c': begins at byte 16; bytes 12 to 16 belong to no tensor",
        "4 bytes follow the last tensor; copy it again",
    ]


def test_faults_of_all_entries_are_found_together() -> None:
    header = {
        "__metadata__": {"epoch": 3},
        "shape": entry([1000, 1000], 0, 4),  # W4
        "dtype": entry([1], 0, 4, "F33"),
        "negative": entry([-1], 0, 4),
        "true": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        "fraction": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        "overflow": entry([1 << 40, 1 << 40], 0, 4),
        "backwards": entry([1], 4, 0),
        "packed": entry([1], 0, 1, "F4"),
        "list": [1],
        "nothing": {},
    }
    assert faults_of(header, 4) == [
        "__metadata__: must be an object of strings",
        "'shape': its dtype and shape take 4000000 bytes, its data_offsets span 4",
        "'dtype': unknown dtype 'F33'",
        "'negative': its shape must be a list of whole numbers, none negative",
        "'true': its shape must be a list of whole numbers, none negative",
        "'fraction': its shape must be a list of whole numbers, none negative",
        "'overflow': its shape has more elements than any file",
        "'backwards': its data_offsets must be two whole numbers, begin and end",
        "'packed': its 1 elements of F4 do not end at a byte",
        "'list': must be an object of dtype, shape and data_offsets",
        "'nothing': unknown dtype 'None'",
    ]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"", "is no JSON"),
        (b"{", "is no JSON"),
        (b"\xff{}", "is no JSON"),
        (b"[]", "must be a JSON object"),
        (b" {}", "must be a JSON object and begin with '{'"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
        (b'{"a":' + b"1" * 5_000 + b"}", "is no JSON"),
        (b'{"\\ud800":{}}', "no valid Unicode"),
        (b'{"a":{"x":NaN}}', "is no JSON: NaN"),
    ],
)
def test_what_is_no_header_is_refused(header: bytes, expected: str) -> None:
    assert expected in faults_of(header, 0)[0]


def test_tensors_have_at_most_64_dimensions() -> None:
    assert set(parse({"a": entry([1] * 64, 0, 4)}, 4)) == {"a"}
    assert faults_of({"a": entry([1] * 65, 0, 4)}, 4) == ["'a': has 65 dimensions, more than 64"]
    assert faults_of({"a": entry([1 << 9] * 1_000_000, 0, 4)}, 4) == ["'a': has 1000000 dimensions, more than 64"]


NUMBER_OF_KEYS = 1 << 20
HOSTILE = {
    "keys": lambda: b"{" + b",".join(b'"%x":0' % number for number in range(NUMBER_OF_KEYS - 1)) + b"}",
    "too many keys": lambda: b"{" + b",".join(b'"%x":0' % number for number in range(1_400_000)) + b"}",
    "a shape": lambda: b'{"x":{"dtype":"F32","shape":[' + b"1," * (8 << 20) + b'1],"data_offsets":[0,4]}}',
    "lists": lambda: b'{"x":[' + b"[]," * (5 << 20) + b"1]}",
    "lists in lists": lambda: b'{"x":[' + (b"[" * 900 + b"]" * 900 + b",") * 9_000 + b"1]}",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_header_within_the_limit_keeps_other_threads_waiting_for_long(kind: str) -> None:
    """Half a second when alone; a server answers nobody meanwhile."""
    header = HOSTILE[kind]()
    assert len(header) < MOST_JSON_BYTES + 100

    with longest_silence_s() as silence:
        faults_of(header, 4)

    assert silence[-1] < 1.5


def test_a_hundred_thousand_tensors_with_long_names_are_read() -> None:
    count = 100_000
    names = [f"model.layers[{number}].mlp.experts[{number}].down_proj.weight_scale" for number in range(count)]
    header = json.dumps({name: entry([1, 1, 1], 4 * n, 4 * n + 4) for n, name in enumerate(names)}).encode()
    assert MOST_JSON_BYTES * 0.7 < len(header) <= MOST_JSON_BYTES

    assert len(parse(header, 4 * count)) == count


sizes = st.integers(min_value=-2, max_value=9) | st.just(True) | st.just(1 << 62)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*DTYPES, "F33"]) | st.none(),
        "shape": st.lists(sizes, max_size=3) | st.just("x"),
        "data_offsets": st.lists(st.integers(min_value=-1, max_value=40), max_size=3),
    },
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
headers = st.binary(max_size=200) | st.dictionaries(st.text(max_size=5), entries | json_values, max_size=4).map(
    lambda document: json.dumps(document).encode()
)


@settings(max_examples=300, deadline=None)
@given(headers, st.integers(min_value=0, max_value=64))
def test_any_header_is_read_or_refused_and_never_more_is_accepted_than_by_the_library(header: bytes, size: int) -> None:
    try:
        records = parse_header(header, size, "file")
    except WeightsRefused:
        return
    dtypes = {name: info.dtype for name, (info, _) in records.items()}
    assert read_by_library(raw_safetensors(header, bytes(size))) == dtypes


@st.composite
def valid_headers(draw: st.DrawFn) -> tuple[bytes, int, dict[str, tuple[TensorInfo, int]]]:
    names = draw(st.lists(st.text(max_size=8).filter(lambda name: name != "__metadata__"), unique=True, max_size=6))
    position, document, expected = 0, {}, {}
    for name in names:
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = [*draw(st.lists(st.integers(min_value=0, max_value=3), max_size=2)), 8]
        nbytes = DTYPES[dtype]
        for dim in shape[:-1]:
            nbytes *= dim
        document[name] = entry(shape, position, position + nbytes, dtype)
        expected[name] = (TensorInfo(dtype, tuple(shape), nbytes), position)
        position += nbytes
    shuffled = dict(draw(st.permutations(list(document.items()))))
    return json.dumps(shuffled, ensure_ascii=draw(st.booleans())).encode(), position, expected


@settings(max_examples=150, deadline=None)
@given(valid_headers())
def test_every_valid_header_is_read_exactly(case: tuple[bytes, int, dict[str, tuple[TensorInfo, int]]]) -> None:
    header, size, expected = case
    assert parse_header(header, size, "file") == parse_header(header, None, "file") == expected
    with pytest.raises(WeightsRefused):
        parse_header(header, size + 1, "file")
