from __future__ import annotations

import gc
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from rebind.errors import MemoryExceeded, StorageFailed, WeightsRefused
from rebind.weights.formats import open_weights
from rebind.weights.in_memory import MemorySource
from rebind.weights.reading import PIECE_BYTES
from rebind.weights.safetensors import RecordSource
from rebind.weights.slots import Slot, SlotTable, TensorInfo
from rebind.weights.store import WeightStore
from tests.weights.files import Arrays, arrays_of, descriptors, entry, floats, put, raw_safetensors, save, table_of

if TYPE_CHECKING:
    from pathlib import Path

    from rebind.weights.store import PutResult, WeightSet

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@pytest.fixture
def store() -> WeightStore:
    return WeightStore()


def assert_holds(weights: WeightSet, arrays: Arrays) -> None:
    for name, array in arrays.items():
        assert bytes(weights.buffer(name)) == array.tobytes(), name


def in_memory(arrays: Arrays) -> MemorySource:
    infos = {name: slot.info for name, slot in table_of(arrays).by_name.items()}
    return MemorySource("memory", {name: (infos[name], memoryview(array.tobytes())) for name, array in arrays.items()})


def address(weights: WeightSet, name: str) -> int:
    return np.frombuffer(weights.buffer(name), np.uint8).ctypes.data


class TestPut:
    def test_set_holds_what_the_file_holds(self, store: WeightStore, path: Path) -> None:
        arrays = arrays_of(0, a=(7, 3), b=(5,)) | {"n": np.array(3), "e": np.zeros((0, 4), np.float32)}
        result = put(store, path, arrays)
        assert_holds(result.weights, arrays)
        assert result.weights.nbytes == result.copied_bytes == 7 * 3 * 4 + 5 * 4 + 8
        assert result.shared_bytes == 0
        assert result.weights.slots == table_of(arrays)

    def test_buffers_are_aligned(self, store: WeightStore, path: Path) -> None:
        weights = put(store, path, arrays_of(0, a=(7,), b=(5,), c=(1000,))).weights
        for name in "abc":
            assert address(weights, name) % 64 == 0

    def test_tensor_of_several_pieces_is_whole(self, store: WeightStore, path: Path) -> None:
        arrays = arrays_of(0, big=(2 * PIECE_BYTES // 4 + 5,), small=(3,))
        weights = put(store, path, arrays).weights
        assert_holds(weights, arrays)
        data = arrays["big"].tobytes()
        pieces = [blake3(data[at : at + PIECE_BYTES]).digest() for at in range(0, len(data), PIECE_BYTES)]
        assert weights.tensors["big"].digest == blake3(b"".join(pieces)).hexdigest()

    def test_progress_is_told_in_bytes_up_to_the_whole(self, store: WeightStore, path: Path) -> None:
        calls: list[tuple[int, int]] = []
        put(store, path, arrays_of(0, a=(100,), b=(50,)), report=lambda done, total: calls.append((done, total)))
        assert calls[-1] == (600, 600)
        assert calls == sorted(calls)

    def test_file_may_change_or_vanish_once_it_is_in(self, store: WeightStore, path: Path) -> None:  # W9, W10
        arrays = arrays_of(0, a=(1000,))
        weights = put(store, path, arrays).weights
        with path.open("r+b") as file:
            file.write(bytes(2000))
        assert_holds(weights, arrays)
        os.truncate(path, 0)
        assert_holds(weights, arrays)

    def test_unused_slots_are_dropped(self, store: WeightStore, path: Path) -> None:
        arrays = arrays_of(0, a=(4,)) | {"count": np.array(1)}
        slots = SlotTable((Slot("a", "F32", (4,)), Slot("count", "I64", (), used=False)))
        with open_weights(save(path, arrays)) as source:
            weights = store.put(slots, source).weights
        assert weights.nbytes == 16
        with pytest.raises(KeyError):
            weights.buffer("count")

    def test_optional_slot_comes_from_the_model_file(self, store: WeightStore, path: Path, tmp_path: Path) -> None:
        slots = SlotTable((Slot("a", "F32", (2,)), Slot("c", "F32", (2,), required=False)))
        archive = tmp_path / "model.pt2"
        archive.write_bytes(b"...." + floats(8, 9).tobytes())
        fallback = RecordSource("model.pt2", archive, {"c": (TensorInfo("F32", (2,), 8), 4)})
        with open_weights(save(path, {"a": floats(1, 2)})) as source, fallback:
            assert_holds(store.put(slots, source, fallback).weights, {"a": floats(1, 2), "c": floats(8, 9)})
            with pytest.raises(WeightsRefused, match="'c': missing"):
                store.put(slots, source)
        with open_weights(save(path, {"a": floats(1, 2), "c": floats(3, 4)})) as source:
            assert_holds(store.put(slots, source).weights, {"c": floats(3, 4)})


class TestTies:
    SLOTS = SlotTable((Slot("embed", "F32", (4,)), Slot("head", "F32", (4,), tied_to="embed")))
    VALUE = floats(1, 2, 3, 4)

    @pytest.mark.parametrize("names", [("embed",), ("head",), ("embed", "head")])
    def test_either_name_or_both_fill_both_slots_once(
        self, store: WeightStore, path: Path, names: tuple[str, ...]
    ) -> None:
        with open_weights(save(path, {name: self.VALUE.copy() for name in names})) as source:
            weights = store.put(self.SLOTS, source).weights
        assert_holds(weights, {"embed": self.VALUE, "head": self.VALUE})
        assert weights.nbytes == 16
        assert address(weights, "embed") == address(weights, "head")

    def test_tied_tensors_that_differ_are_refused(self, store: WeightStore, path: Path) -> None:
        with (
            open_weights(save(path, {"embed": self.VALUE, "head": self.VALUE + 1})) as source,
            pytest.raises(WeightsRefused, match="'head': differs from 'embed'"),
        ):
            store.put(self.SLOTS, source)


class TestRefusal:
    def test_non_finite_values_are_refused_by_name_and_number_all_at_once(self, store: WeightStore, path: Path) -> None:
        arrays = arrays_of(0, a=(100,), b=(100,), c=(100,))  # W16
        arrays["a"][[3, 4]] = np.nan, -np.inf
        arrays["c"][99] = np.inf
        with pytest.raises(WeightsRefused) as refused:
            put(store, path, arrays)
        assert [f"{fault.where}: {fault.problem}" for fault in refused.value.faults] == [
            "'a': 2 of its values are NaN or infinite",
            "'c': 1 of its values are NaN or infinite",
        ]
        weights = put(store, path, arrays, allow_non_finite=True).weights
        assert_holds(weights, arrays)

    def test_what_the_graph_brings_itself_may_be_infinite(self, store: WeightStore, path: Path) -> None:
        slots = SlotTable((Slot("mask", "F32", (4,), required=False),))
        mask = np.array([0, 0, -np.inf, -np.inf], np.float32)
        with open_weights(save(path, {"mask": mask})) as source:
            assert_holds(store.put(slots, source).weights, {"mask": mask})

    def test_weights_file_may_repeat_but_not_replace_what_is_infinite_in_the_graph(
        self, store: WeightStore, path: Path, tmp_path: Path
    ) -> None:
        slots = SlotTable((Slot("mask", "F32", (2,), required=False),))
        with open_weights(save(tmp_path / "graph.safetensors", {"mask": floats(0, -np.inf)})) as graphs:
            with open_weights(save(path, {"mask": floats(0, -np.inf)})) as source:
                assert store.put(slots, source, graphs).borrowed == ()
            spoilt = save(path, {"mask": floats(np.nan, -np.inf)})
            with open_weights(spoilt) as source, pytest.raises(WeightsRefused, match="'mask': 2 of its values are NaN"):
                store.put(slots, source, graphs)

    def test_what_came_from_the_model_file_is_told(self, store: WeightStore, path: Path, tmp_path: Path) -> None:
        slots = SlotTable((Slot("a", "F32", (2,)), Slot("scale", "F32", (1,), required=False)))
        save(path, {"a": floats(1, 2)})
        save(tmp_path / "graph.safetensors", {"scale": floats(3)})
        with open_weights(path) as source, open_weights(tmp_path / "graph.safetensors") as graphs:
            assert store.put(slots, source, graphs).borrowed == ("scale",)

    def test_tensor_allowed_before_is_still_refused_where_it_is_not(self, store: WeightStore, path: Path) -> None:
        arrays = arrays_of(0, a=(100,))
        arrays["a"][7] = np.nan
        allowed = put(store, path, arrays, allow_non_finite=True).weights
        with pytest.raises(WeightsRefused, match="'a': 1 of its values"):
            put(store, path, arrays)
        assert_holds(allowed, arrays)

    def test_misfit_is_refused_before_a_byte_is_read(self, store: WeightStore, path: Path) -> None:
        arrays = arrays_of(0, a=(1000,))
        with open_weights(save(path, arrays)) as source:
            os.truncate(path, 100)
            with pytest.raises(WeightsRefused, match=r"expected shape \[3\], got \[1000\]"):
                store.put(SlotTable((Slot("a", "F32", (3,)),)), source)

    @pytest.mark.parametrize("kept", [False, True])
    def test_failure_in_the_middle_leaves_nothing_behind(self, store: WeightStore, path: Path, kept: bool) -> None:
        """Not even while the error, with its traceback, is kept."""
        arrays = arrays_of(0, a=(PIECE_BYTES // 4,), b=(PIECE_BYTES // 4,), c=(PIECE_BYTES // 4,))
        serving = put(store, path, arrays_of(1, a=(10,))).weights if kept else None
        before = store.usage()
        with open_weights(save(path, arrays)) as source:
            os.truncate(path, 2 * PIECE_BYTES + 1000)
            with pytest.raises(WeightsRefused, match="changed while it was read") as refused:
                store.put(table_of(arrays), source)
        assert refused.value.__traceback__ is not None
        store.trim()
        after = store.usage()
        assert (after.sets, after.segment_bytes, after.unique_bytes) == (
            before.sets,
            before.segment_bytes,
            before.unique_bytes,
        )
        assert after.spare_bytes <= before.segment_bytes
        if serving is not None:
            assert_holds(serving, arrays_of(1, a=(10,)))

    def test_overwritten_while_it_is_read_is_refused(self, store: WeightStore, path: Path) -> None:  # W10
        arrays = arrays_of(0, a=(PIECE_BYTES // 4,), b=(PIECE_BYTES // 4,))
        save(path, arrays)

        def overwrite(done: int, total: int) -> None:
            with path.open("r+b") as file:
                file.seek(-8, os.SEEK_END)
                file.write(bytes(8))

        with open_weights(path) as source, pytest.raises(WeightsRefused, match="changed while it was read"):
            store.put(table_of(arrays), source, report=overwrite)
        assert store.usage().sets == 0

    def test_failing_report_ends_the_put(self, store: WeightStore, path: Path) -> None:
        def fail(done: int, total: int) -> None:
            raise RuntimeError("the caller gave up")

        with pytest.raises(RuntimeError, match="gave up"):
            put(store, path, arrays_of(0, a=(1000,), b=(1000,)), report=fail)
        assert store.usage().segment_bytes == 0

    def test_want_of_memory_is_a_storage_failure_and_others_serve_on(self, store: WeightStore, path: Path) -> None:
        arrays = arrays_of(0, a=(10,))
        weights = put(store, path, arrays).weights
        huge = 1 << 43  # 8 TiB; the file is sparse, and ext4 has none above 16
        sparse = path.with_name("huge.safetensors")
        header = raw_safetensors({"w": entry([huge], 0, huge, "U8")})
        sparse.write_bytes(header)
        os.truncate(sparse, len(header) + huge)
        with open_weights(sparse) as source, pytest.raises(StorageFailed, match=rf"need {huge} bytes"):
            store.put(SlotTable((Slot("w", "U8", (huge,)),)), source)
        assert_holds(weights, arrays)


class TestSharing:
    def test_same_set_again_copies_nothing(self, store: WeightStore, path: Path) -> None:
        arrays = arrays_of(0, a=(PIECE_BYTES // 4 + 3,), b=(5,), c=(5,))
        first = put(store, path, arrays)
        again = put(store, path, arrays)
        assert (again.copied_bytes, again.shared_bytes) == (0, first.copied_bytes)
        assert again.weights.digest == first.weights.digest
        usage = store.usage()
        assert (usage.sets, usage.unique_bytes, usage.referenced_bytes) == (
            2,
            first.weights.nbytes,
            2 * first.weights.nbytes,
        )

    def test_one_changed_tensor_of_a_hundred_is_the_one_that_is_copied(self, store: WeightStore, path: Path) -> None:
        arrays = arrays_of(0, **{f"t{index}": (50,) for index in range(100)})
        first = put(store, path, arrays).weights
        changed = arrays | {"t42": arrays["t42"] + 1}
        result = put(store, path, changed)
        assert (result.copied_bytes, result.shared_bytes) == (200, 99 * 200)
        assert_holds(result.weights, changed)
        assert_holds(first, arrays)

    @pytest.mark.parametrize("index", [0, 255, 70_000, 299_999])
    def test_change_anywhere_in_a_tensor_is_seen(self, store: WeightStore, path: Path, index: int) -> None:
        arrays = arrays_of(0, a=(300_000,))
        kept = put(store, path, arrays).weights
        arrays["a"][index] += 1
        result = put(store, path, arrays)
        assert result.shared_bytes == 0
        assert_holds(result.weights, arrays)
        assert result.weights.digest != kept.digest

    def test_equal_bytes_of_another_dtype_or_shape_are_another_tensor(self, store: WeightStore, path: Path) -> None:
        one = put(store, path, {"a": np.zeros(4, np.float32)}).weights
        other = put(store, path, {"a": np.zeros((2, 2), np.float32)})
        third = put(store, path, {"a": np.zeros(2, np.float64)})
        assert other.shared_bytes == third.shared_bytes == 0
        assert len({one.digest, other.weights.digest, third.weights.digest}) == 3

    def test_shared_tensors_outlive_the_set_that_brought_them(self, store: WeightStore, path: Path) -> None:
        arrays = arrays_of(0, a=(50,), b=(50,))
        first = put(store, path, arrays).weights
        changed = arrays | {"b": arrays["b"] + 1}
        second = put(store, path, changed).weights
        del first
        third = put(store, path, arrays_of(7, a=(50,), b=(50,))).weights
        assert_holds(second, changed)
        assert_holds(third, arrays_of(7, a=(50,), b=(50,)))

    def test_a_few_equal_tensors_do_not_keep_the_old_generation_alive(self, store: WeightStore, path: Path) -> None:
        """Zero biases stay zero: sharing them would hold a segment of dead weights each, in every generation."""
        shapes = {f"w{index}": (MIB // 2,) for index in range(12)}
        biases = {f"b{index}": np.zeros(4, np.float32) for index in range(12)}
        weights = None
        for seed in range(5):
            arrays = {
                name: array
                for pair in zip(arrays_of(seed, **shapes).items(), biases.items(), strict=True)
                for name, array in pair
            }
            weights = put(store, path, arrays).weights
            usage = store.usage()
            assert usage.segment_bytes <= 1.05 * weights.nbytes + 1.2 * MIB
            assert usage.segment_bytes + usage.spare_bytes <= 2.1 * weights.nbytes
        assert weights is not None

    def test_two_generations_never_take_more_than_promised_whatever_is_changed(
        self, store: WeightStore, path: Path
    ) -> None:
        generator = np.random.default_rng(0)
        arrays = arrays_of(0, **{f"t{index}": (MIB // 16,) for index in range(96)})  # 24 MiB in tensors of 256 KiB
        weights = put(store, path, arrays).weights
        for _ in range(20):
            for name in generator.choice(list(arrays), size=int(generator.integers(1, 96)), replace=False):
                arrays[name] = arrays[name] + 1
            following = put(store, path, arrays)
            usage = store.usage()
            assert usage.segment_bytes + usage.spare_bytes <= 2.1 * weights.nbytes + MIB
            weights = following.weights
            assert_holds(weights, arrays)
            del following
            assert store.usage().segment_bytes <= 1.05 * weights.nbytes + 1.2 * MIB


class TestPatch:
    def base(self, store: WeightStore, path: Path, count: int, size: int) -> tuple[Arrays, WeightSet]:
        arrays = arrays_of(0, **{f"t{index}": (size,) for index in range(count)})
        return arrays, put(store, path, arrays).weights

    def patch(self, store: WeightStore, path: Path, base: WeightSet, changed: Arrays, **options: Any) -> PutResult:
        with open_weights(save(path, changed)) as source:
            return store.put(base.slots, source, base=base, **options)

    def test_other_tensors_are_shared_with_the_base(self, store: WeightStore, path: Path) -> None:
        arrays, base = self.base(store, path, 100, MIB // 16)
        changed = arrays_of(7, t42=(MIB // 16,))
        result = self.patch(store, path, base, changed)
        assert (result.copied_bytes, result.shared_bytes) == (MIB // 4, 99 * MIB // 4)
        assert_holds(result.weights, arrays | changed)
        assert_holds(base, arrays)
        assert result.weights.digest == put(WeightStore(), path, arrays | changed).weights.digest
        assert address(result.weights, "t41") == address(base, "t41")

    def test_others_are_copied_where_sharing_would_keep_too_much_alive(self, store: WeightStore, path: Path) -> None:
        arrays, base = self.base(store, path, 24, MIB // 4)  # a megabyte each, alone in its segment
        small = arrays_of(1, **{f"s{index}": (1000,) for index in range(4)})
        arrays |= small
        base = put(store, path, dict(sorted(arrays.items()))).weights
        changed = {name: array + 1 for name, array in arrays.items() if name[0] == "t"}
        result = self.patch(store, path, base, changed)
        assert_holds(result.weights, arrays | changed)
        del base
        assert store.usage().segment_bytes <= 1.05 * result.weights.nbytes + 1.2 * MIB

    def test_bad_names_and_shapes_are_refused_with_near_matches(self, store: WeightStore, path: Path) -> None:
        _, base = self.base(store, path, 3, 10)
        with pytest.raises(WeightsRefused) as refused:
            self.patch(store, path, base, arrays_of(0, t1=(11,), tt2=(10,)))
        assert [str(fault) for fault in refused.value.faults] == [
            "'t1': expected shape [10], got [11]",
            "'tt2': unexpected: the model has no such slot; did you mean 't2'?",
        ]

    def test_values_of_the_base_are_not_looked_at_again_but_those_of_the_patch_are(
        self, store: WeightStore, path: Path
    ) -> None:
        arrays = {"a": floats(np.nan), "b": floats(1)}
        base = put(store, path, arrays, allow_non_finite=True).weights
        assert_holds(self.patch(store, path, base, {"b": floats(2)}).weights, {"a": arrays["a"], "b": floats(2)})
        with pytest.raises(WeightsRefused, match="'b': 1 of its values are NaN"):
            self.patch(store, path, base, {"b": floats(np.inf)})

    def test_base_for_other_slots_is_a_defect(self, store: WeightStore, path: Path) -> None:
        _, base = self.base(store, path, 3, 10)
        with open_weights(path) as source, pytest.raises(ValueError, match="same slots"):
            store.put(SlotTable((Slot("t0", "F32", (10,)),)), source, base=base)

    @settings(max_examples=25, deadline=None)
    @given(st.data())
    def test_whatever_is_patched_a_set_keeps_little_more_than_its_own_bytes(self, data: st.DataObject) -> None:
        """At most a twentieth and a megabyte, and each of its segments ends with a page that may be part empty."""
        sizes = data.draw(st.lists(st.sampled_from([0, 1, 500, 20_000, 70_000, 150_000, 400_000]), max_size=40))
        values = {f"t{index}": np.full(size, -1, np.float32) for index, size in enumerate(sizes)}
        slots, store = table_of(values), WeightStore()
        weights = store.put(slots, in_memory(values)).weights
        patches = st.sets(st.sampled_from(sorted(values)), max_size=4) if values else st.just(set())
        for step, names in enumerate(data.draw(st.lists(patches, max_size=60))):
            values |= {name: np.full_like(values[name], step) for name in names}
            weights = store.put(slots, in_memory({name: values[name] for name in names}), base=weights).weights
            segments = {tensor.segment for tensor in weights.tensors.values()}
            padding = 64 * len(values) + 4096 * len(segments)
            held = sum(segment.nbytes for segment in segments)
            assert held <= 1.05 * (weights.nbytes + padding) + MIB
            assert store.usage().segment_bytes == held
        assert_holds(weights, values)


class TestExamine:
    def test_finds_the_digest_and_stores_nothing(self, store: WeightStore, path: Path) -> None:
        arrays = arrays_of(0, big=(PIECE_BYTES // 4 + 9,), a=(10,)) | {"e": np.zeros((0, 4), np.float32)}
        with open_weights(save(path, arrays)) as source:
            digest = store.examine(table_of(arrays), source)
        assert store.usage().segment_bytes == store.usage().spare_bytes == 0
        assert digest == put(store, path, arrays).weights.digest

    def test_finds_the_digest_of_a_patch(self, store: WeightStore, path: Path) -> None:
        arrays = arrays_of(0, a=(10,), b=(20,))
        base = put(store, path, arrays).weights
        changed = arrays_of(1, b=(20,))
        with open_weights(save(path, changed)) as source:
            digest = store.examine(base.slots, source, base=base)
            assert digest == store.put(base.slots, source, base=base).weights.digest != base.digest

    def test_refuses_what_put_refuses(self, store: WeightStore, path: Path) -> None:
        slots = SlotTable((Slot("a", "F32", (2,)), Slot("b", "F32", (2,), tied_to="a")))
        for arrays, problem in (
            ({"a": floats(1)}, "expected shape"),
            ({"a": floats(1, 2), "b": floats(1, 3)}, "'b': differs from 'a'"),
            ({"a": floats(1, np.inf)}, "'a': 1 of its values are NaN or infinite"),
        ):
            with open_weights(save(path, arrays)) as source, pytest.raises(WeightsRefused, match=problem):
                store.examine(slots, source)


class TestManyPuts:
    def test_neither_memory_nor_time_grows_with_their_number(self) -> None:
        """Patches of ever other tensors, on and on: as many objects and bytes after thousands as after hundreds."""
        values = arrays_of(0, **{f"t{index}": (64,) for index in range(32)})
        slots, store = table_of(values), WeightStore()
        weights = store.put(slots, in_memory(values)).weights
        found = []
        for step in range(4000):
            name = f"t{step % 32}"
            values[name] = values[name] + np.float32(1)
            weights = store.put(slots, in_memory({name: values[name]}), base=weights).weights
            if step % 1000 == 999:
                gc.collect()
                usage = store.usage()
                found.append((len(gc.get_objects()), usage.segment_bytes + usage.spare_bytes, len(descriptors())))
        assert_holds(weights, values)
        assert found[-1][0] <= found[0][0] + 1000  # of 3000 puts; the index of live tensors is swept now and then
        assert [counts[1:] for counts in found] == [found[0][1:]] * 4

    def test_index_of_live_tensors_forgets_the_dead(self) -> None:
        slots, store = SlotTable((Slot("a", "F32", (4,)),)), WeightStore()
        for step in range(1500):
            store.put(slots, in_memory({"a": floats(step, 1, 2, 3)}))
        assert len(store._assembler._live) <= 300


class TestLimit:
    def test_set_that_does_not_fit_is_refused_with_the_numbers_and_others_stay(self, path: Path) -> None:
        store = WeightStore(limit_bytes=6 * MIB)
        arrays = arrays_of(0, a=(MIB,))
        weights = put(store, path, arrays).weights
        with pytest.raises(MemoryExceeded) as refused:
            put(store, path, arrays_of(1, a=(MIB,)))
        error = refused.value
        assert (error.needed_bytes, error.free_bytes, error.limit_bytes) == (4 * MIB, 2 * MIB, 6 * MIB)
        assert_holds(weights, arrays)
        assert put(store, path, arrays).copied_bytes == 0  # sharing needs no room

    def test_spare_memory_counts_but_never_stands_in_the_way(self, path: Path) -> None:
        store = WeightStore(limit_bytes=10 * MIB)
        weights = [put(store, path, arrays_of(seed, a=(MIB,))).weights for seed in range(2)]
        weights.pop(0)
        assert store.usage().spare_bytes == 4 * MIB
        assert store.free_bytes() == 6 * MIB
        put(store, path, arrays_of(3, b=(5 * MIB // 4,)))
        assert store.usage().segment_bytes + store.usage().spare_bytes <= 10 * MIB


class TestDigest:
    def test_does_not_depend_on_how_the_tensors_came(self, path: Path, tmp_path: Path) -> None:  # W19
        arrays = arrays_of(0, **{f"t{index}": (100 + index,) for index in range(30)}, big=(PIECE_BYTES // 4 + 1,))
        slots = table_of(arrays)
        digests = {put(WeightStore(), path, arrays).weights.digest}
        with open_weights(save(path, dict(reversed(arrays.items())))) as source:
            digests.add(WeightStore().put(slots, source).weights.digest)
        for count in (3, 11):
            shards = {f"{count}-{i}.safetensors": list(arrays)[i::count] for i in range(count)}
            for shard, names in shards.items():
                save(tmp_path / shard, {name: arrays[name] for name in names})
            index = tmp_path / f"{count}.safetensors.index.json"
            index.write_text(
                json.dumps({"weight_map": {name: shard for shard, names in shards.items() for name in names}})
            )
            with open_weights(index) as source:
                digests.add(WeightStore().put(slots, source).weights.digest)
        store = WeightStore()
        partial = put(store, path, arrays | {"t3": arrays["t3"] + 1}).weights
        digests.add(put(store, path, arrays).weights.digest)
        assert partial.digest not in digests
        assert len(digests) == 1


class TestRecycling:
    def test_old_generation_is_where_the_next_but_one_goes(self, store: WeightStore, path: Path) -> None:
        shape = (MIB // 4,)
        weights, places = None, []
        for seed in range(20):
            arrays = arrays_of(seed, a=shape, b=shape)
            weights = put(store, path, arrays).weights
            assert_holds(weights, arrays)
            places.append(address(weights, "b"))
            usage = store.usage()
            assert usage.segment_bytes == 2 * MIB
            assert usage.spare_bytes == (0 if seed == 0 else 2 * MIB)
        assert weights is not None
        assert places == places[:2] * 10
        assert store.trim() == 0

    def test_spare_memory_goes_back_after_its_idle_time(self, path: Path) -> None:
        now = [0.0]
        store = WeightStore(spare_idle_s=60.0, clock=lambda: now[0])
        weights = [put(store, path, arrays_of(seed, a=(MIB // 4,))).weights for seed in range(2)]
        weights.pop(0)
        now[0] = 59.0
        assert store.trim() == 0
        now[0] = 60.0
        assert store.trim() == MIB
        assert store.usage().spare_bytes == 0

    def test_nothing_is_recycled_under_a_view(self, store: WeightStore, path: Path) -> None:
        """Of numpy or torch, long after the set is gone."""
        torch = pytest.importorskip("torch")
        arrays = arrays_of(0, a=(1000,), b=(1000,))
        weights = put(store, path, arrays).weights
        array = np.frombuffer(weights.buffer("a"), np.float32)[10:]
        tensor = torch.frombuffer(weights.buffer("b"), dtype=torch.float32).view(10, 100)[1:]
        del weights
        gc.collect()
        for seed in range(1, 4):
            put(store, path, arrays_of(seed, a=(1000,), b=(1000,)))
        assert array.tobytes() == arrays["a"][10:].tobytes()
        assert tensor.numpy().tobytes() == arrays["b"][100:].tobytes()
        assert store.usage().segment_bytes > 0
        del array
        assert store.usage().segment_bytes > 0
        del tensor
        assert store.usage().segment_bytes == 0

    def test_released_buffer_does_not_harm_the_set(self, store: WeightStore, path: Path) -> None:
        arrays = arrays_of(0, a=(10,))
        weights = put(store, path, arrays).weights
        weights.buffer("a").release()
        assert_holds(weights, arrays)


class TestConcurrency:
    def test_puts_of_one_set_from_many_threads_store_it_once(self, store: WeightStore, path: Path) -> None:
        arrays = arrays_of(0, a=(MIB,), b=(1000,))
        save(path, arrays)
        start = threading.Barrier(4)

        def load() -> WeightSet:
            start.wait()
            with open_weights(path) as source:
                return store.put(table_of(arrays), source).weights

        with ThreadPoolExecutor(4) as pool:
            sets = [future.result() for future in [pool.submit(load) for _ in range(4)]]
        assert len({weights.digest for weights in sets}) == 1
        assert store.usage().unique_bytes == sets[0].nbytes

    def test_refits_and_failures_of_several_models_do_not_mix(self, store: WeightStore, tmp_path: Path) -> None:
        def life(model: int) -> None:
            path = tmp_path / f"{model}.safetensors"
            serving, expected = None, {}
            for step in range(15):
                arrays = arrays_of(1000 * model + step, a=(20_000 + model,), b=(3, 50), c=(17,))
                if step % 5 == 4:
                    arrays["b"][0, 0] = np.nan
                    with pytest.raises(WeightsRefused):
                        put(store, path.with_suffix(".bad.safetensors"), arrays)
                else:
                    serving = put(store, path, arrays).weights
                    expected = arrays
                assert serving is not None
                assert_holds(serving, expected)

        with ThreadPoolExecutor(3) as pool:
            for future in [pool.submit(life, model) for model in range(3)]:
                future.result()
        gc.collect()
        assert store.usage().segment_bytes == 0


class TestCopy:
    def test_copy_is_equal_in_memory_of_its_own(self, store: WeightStore, path: Path) -> None:
        arrays = arrays_of(0, a=(1000,), b=(7, 3)) | {"e": np.zeros((0, 4), np.float32)}
        weights = put(store, path, arrays).weights
        copied = store.copy(weights)
        assert_holds(copied, arrays)
        assert (copied.digest, copied.nbytes) == (weights.digest, weights.nbytes)
        for name in "ab":
            assert address(copied, name) != address(weights, name)
            assert address(copied, name) % 64 == 0
        assert store.usage().unique_bytes == 2 * weights.nbytes

    def test_tied_slots_have_one_tensor_in_the_copy_too(self, store: WeightStore, path: Path) -> None:
        slots = SlotTable((Slot("a", "F32", (4,)), Slot("b", "F32", (4,), tied_to="a")))
        with open_weights(save(path, {"a": floats(1, 2, 3, 4)})) as source:
            copied = store.copy(store.put(slots, source).weights)
        assert address(copied, "a") == address(copied, "b")
        assert copied.nbytes == 16

    def test_no_later_set_shares_a_copy(self, store: WeightStore, path: Path) -> None:
        arrays = arrays_of(0, a=(1000,))
        copied = store.copy(put(store, path, arrays).weights)
        again = put(store, path, arrays)
        assert again.copied_bytes == 4000
        assert address(again.weights, "a") != address(copied, "a")

    def test_copy_outlives_the_original_and_its_memory_is_used_again(self, store: WeightStore, path: Path) -> None:
        arrays = arrays_of(0, a=(1000,))
        original = put(store, path, arrays).weights
        first = store.copy(original)
        del original
        assert_holds(first, arrays)
        assert store.usage().spare_bytes > 0
        second = store.copy(first)
        assert_holds(second, arrays)
        assert store.usage().spare_bytes == 0
