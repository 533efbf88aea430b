from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save as to_bytes

from rebind.errors import WeightsRefused
from rebind.weights.slots import Slot, SlotTable
from rebind.weights.store import WeightStore
from tests.weights.arriving import TIED, address, assert_holds, reception_of, send
from tests.weights.files import arrays_of, entry, floats, raw_safetensors, table_of

MIB = 1 << 20


@pytest.fixture
def store() -> WeightStore:
    return WeightStore()


class TestBuffer:
    @pytest.mark.parametrize("step", [1, 7, 1000, MIB])
    def test_cut_of_the_stream_makes_no_difference(self, store: WeightStore, step: int) -> None:
        arrays = arrays_of(0, **{f"t{index}": (index % 5, 3) for index in range(40)}, w=(300, 100))
        if step < 1000:
            arrays.pop("w")
        reception = reception_of(store, table_of(arrays))
        send(reception, arrays, step)
        assert_holds(reception.finish(None).weights, arrays)

    def test_large_tensor_is_written_once_to_where_it_serves(self, store: WeightStore) -> None:
        arrays = arrays_of(0, w=(MIB,))
        content = to_bytes(arrays)
        incoming = (reception := reception_of(store, table_of(arrays))).incoming()
        incoming.feed(content[: len(content) - 4 * MIB])
        begin = address(incoming.buffer())
        assert len(incoming.buffer()) == MIB
        incoming.feed(content[-4 * MIB :])
        weights = reception.finish(None).weights
        assert address(weights.buffer("w")) == begin
        assert begin % 64 == 0

    def test_small_tensors_take_one_read_together(self, store: WeightStore) -> None:
        arrays = arrays_of(0, **{f"t{index}": (500,) for index in range(100)})  # 200 kB
        content = memoryview(to_bytes(arrays))
        incoming = (reception := reception_of(store, table_of(arrays))).incoming()
        reads = 0
        while not incoming.complete:
            buffer = incoming.buffer()
            assert 0 < len(buffer) <= MIB
            count = min(len(buffer), len(content))
            buffer[:count] = content[:count]
            content = content[count:]
            incoming.received(count)
            reads += 1
        assert reads == 3  # length, header, tensors
        assert not incoming.buffer()
        assert_holds(reception.finish(None).weights, arrays)


class TestRefused:
    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (raw_safetensors(b"", length=1000), r"truncated: it ends after 8 bytes, within its header"),  # W1
            (raw_safetensors(b"x" * 92, length=1000), r"truncated: it ends after 100 bytes, within its header"),
            (raw_safetensors(b"", length=1 << 63), r"header is too long: 9223372036854775808 bytes"),
            (raw_safetensors(b"", length=100_000_001), r"header is too long: 100000001 bytes"),
            (raw_safetensors(b"", length=0), "no JSON"),
            (b"", "truncated: it ends after 0 bytes"),
            (b"1234567", "truncated: it ends after 7 bytes"),
            (
                raw_safetensors(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' * 2 + b'"b":0}'),
                "",
            ),
            (
                raw_safetensors(
                    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                    b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
                ),
                r"'a': is in the header twice",  # W3
            ),
            (raw_safetensors({"a": entry([1000, 1000], 0, 4)}), r"'a': its dtype and shape take 4000000 bytes"),  # W4
            (
                raw_safetensors({"a": entry([4], 0, 16), "b": entry([4], 0, 16)}),
                r"'b': begins at byte 0, within 'a'",  # W15
            ),
            (raw_safetensors({"a": entry([4], 16, 32)}), "bytes 0 to 16 belong to no tensor"),
            (
                raw_safetensors({"x" * MIB: entry([0], 0, 0)}),
                r"'xxx.*' *\.\.\. \(1048576 characters\): unexpected",
            ),  # W18
            (
                raw_safetensors({"../../etc/x": entry([0], 0, 0), "": entry([0], 0, 0)}),
                r"'\.\./\.\./etc/x': unexpected",
            ),
        ],
    )
    def test_bad_file_is_refused_before_a_tensor_arrives(
        self, store: WeightStore, content: bytes, problem: str
    ) -> None:
        reception = reception_of(store, SlotTable((Slot("a", "F32", (4,)), Slot("b", "F32", (4,)))))
        with pytest.raises(WeightsRefused, match=f"^the push: .*{problem}"):
            send(reception, content)
        assert store.usage().segment_bytes == 0
        assert reception.received_names == []

    @pytest.mark.parametrize("missing", [1, 16, 17])  # W7: a byte, a tensor, more
    def test_truncated_body_is_refused_and_the_retry_is_not(self, store: WeightStore, missing: int) -> None:
        arrays = {"a": floats(1, 2, 3, 4), "b": floats(5, 6, 7, 8)}
        content = to_bytes(arrays)
        reception = reception_of(store, table_of(arrays))
        with pytest.raises(WeightsRefused, match=f"truncated: {missing} of {len(content)} bytes are missing"):
            send(reception, content[:-missing])
        with pytest.raises(WeightsRefused, match="missing"):
            reception.finish(None)
        send(reception, content)
        assert_holds(reception.finish(None).weights, arrays)

    def test_bytes_after_the_end_are_refused(self, store: WeightStore) -> None:
        content = to_bytes({"a": floats(1)})
        incoming = reception_of(store, SlotTable((Slot("a", "F32", (1,)),))).incoming()
        incoming.feed(content)
        with pytest.raises(WeightsRefused, match="bytes follow the last tensor, 4 or more"):
            incoming.feed(b"more")

    def test_file_without_tensors_lacks_them_all(self, store: WeightStore) -> None:  # W6
        reception = reception_of(store, TIED)
        send(reception, raw_safetensors({"__metadata__": {"format": "pt"}}))
        with pytest.raises(WeightsRefused, match="missing all 1"):
            reception.finish(None)
        with pytest.raises(WeightsRefused, match="missing all 1"):
            reception_of(store, TIED).incoming(whole=True).feed(raw_safetensors({}))

    @pytest.mark.parametrize(
        ("array", "problem"),
        [
            (np.zeros((4, 16), np.float32), r"expected shape \[8,8\], got \[4,16\]"),
            (np.zeros((2, 2), np.float32), r"expected shape \[8,8\], got \[2,2\]"),
            (np.zeros((8, 8), np.float64), "expected dtype F32, got F64"),
            (np.zeros((8, 8), np.float16), "expected dtype F32, got F16"),
        ],
    )
    def test_tensor_that_does_not_fit_is_refused_with_its_header(  # T4
        self, store: WeightStore, array: Any, problem: str
    ) -> None:
        slots = SlotTable((Slot("a.weight", "F32", (8, 8)), Slot("b", "F32", (1,))))
        content = to_bytes({"a.weight": array, "b": floats(1)})
        header_nbytes = 8 + int.from_bytes(content[:8], "little")
        incoming = reception_of(store, slots).incoming()
        incoming.feed(content[: header_nbytes - 1])
        with pytest.raises(WeightsRefused, match=f"'a.weight': {problem}"):
            incoming.feed(content[header_nbytes - 1 : header_nbytes])
        assert store.usage().segment_bytes == 0

    def test_whole_file_tells_all_faults_at_once_with_near_matches(self, store: WeightStore) -> None:
        incoming = reception_of(store, table_of(arrays_of(0, first=(1,), second=(2,), third=(3,)))).incoming(whole=True)
        with pytest.raises(WeightsRefused) as refused:
            incoming.feed(to_bytes({"first": floats(1, 2), "secnd": floats(1, 2)}))
        assert [str(fault) for fault in refused.value.faults] == [
            "'first': expected shape [1], got [2]",
            "'second': missing, expected F32 [2]",
            "'third': missing, expected F32 [3]",
            "'secnd': unexpected: the model has no such slot; did you mean 'second'?",
        ]
