from __future__ import annotations

import gc
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save as to_bytes

from rebind.errors import Conflict, MemoryExceeded, WeightsRefused
from rebind.weights.in_memory import MemorySource
from rebind.weights.reading import PIECE_BYTES
from rebind.weights.slots import DTYPES, Slot, SlotTable, TensorInfo
from rebind.weights.store import WeightStore
from tests.weights.arriving import (
    TIED,
    address,
    assert_holds,
    received,
    reception_of,
    segment_bytes,
    send,
    wait_for_digests,
)
from tests.weights.files import Arrays, arrays_of, entry, floats, put, raw_safetensors, table_of

if TYPE_CHECKING:
    from pathlib import Path

    from rebind.weights.weight_set import WeightSet

MIB = 1 << 20


@pytest.fixture
def store() -> WeightStore:
    return WeightStore()


class TestReceived:
    def test_set_equals_that_of_the_same_file(self, store: WeightStore, tmp_path: Path) -> None:
        arrays = arrays_of(0, big=(2 * PIECE_BYTES // 4 + 5,), a=(7, 3), b=(5,)) | {
            "n": np.array(3),
            "empty": np.zeros((0, 4), np.float32),
            "flag": np.array([True, False]),
        }
        reception = reception_of(store, table_of(arrays))
        send(reception, arrays, 1 << 20)
        result = reception.finish(None)
        assert_holds(result.weights, arrays)
        assert (result.copied_bytes, result.shared_bytes, result.borrowed) == (result.weights.nbytes, 0, ())
        assert result.weights.digest == put(WeightStore(), tmp_path / "w.safetensors", arrays).weights.digest
        assert reception.received_bytes == len(to_bytes(arrays))
        assert sorted(reception.received_names) == sorted(arrays)

    @pytest.mark.parametrize("dtype", [dtype for dtype, bits in DTYPES.items() if bits >= 8])
    def test_bytes_of_any_dtype_are_kept(self, store: WeightStore, dtype: str) -> None:
        data = bytes(range(48))
        count = len(data) * 8 // DTYPES[dtype]
        reception = reception_of(store, SlotTable((Slot("w", dtype, (count,)),)))
        send(reception, raw_safetensors({"w": entry([count], 0, len(data), dtype)}, data))
        assert bytes(reception.finish(None, allow_non_finite=True).weights.buffer("w")) == data

    def test_file_order_is_not_the_tables(self, store: WeightStore) -> None:
        arrays = arrays_of(0, a=(3,), b=(4,), c=(5,))
        header = {"c": entry([5], 0, 20), "a": entry([3], 20, 32), "b": entry([4], 32, 48)}
        reception = reception_of(store, table_of(arrays))
        send(reception, raw_safetensors(header, b"".join(arrays[name].tobytes() for name in "cab")))
        assert_holds(reception.finish(None).weights, arrays)

    def test_strided_and_fortran_arrays_arrive_row_major_as_their_writer_says(self, store: WeightStore) -> None:  # W13
        wide = np.arange(12, dtype=np.float32).reshape(3, 4)
        arrays = {name: np.ascontiguousarray(array) for name, array in {"t": wide.T, "s": wide[:, ::2]}.items()}
        weights = received(store, arrays)
        assert np.frombuffer(weights.buffer("t"), np.float32).reshape(4, 3).tolist() == wide.T.tolist()
        assert np.frombuffer(weights.buffer("s"), np.float32).reshape(3, 2).tolist() == wide[:, ::2].tolist()

    def test_names_with_a_wrappers_prefix_are_those_of_the_slots(self, store: WeightStore) -> None:
        arrays = arrays_of(0, **{"fc.weight": (3,), "fc.bias": (4,)})
        reception = reception_of(store, table_of(arrays))
        send(reception, {f"module._orig_mod.{name}": array for name, array in arrays.items()})
        assert_holds(reception.finish(None).weights, arrays)

    def test_unused_slots_are_accepted_and_dropped(self, store: WeightStore) -> None:
        slots = SlotTable((Slot("a", "F32", (4,)), Slot("steps", "I64", (), used=False)))
        reception = reception_of(store, slots)
        large: Arrays = {"a": floats(1, 2, 3, 4), "steps": np.zeros(100_000)}  # its shape is nobody's business
        send(reception, large)
        assert sorted(reception.received_names) == ["a", "steps"]
        weights = reception.finish(None).weights
        assert weights.nbytes == 16
        with pytest.raises(KeyError):
            weights.buffer("steps")

    def test_optional_slots_come_from_the_fallback_unless_they_were_sent(self, store: WeightStore) -> None:
        slots = SlotTable((Slot("a", "F32", (2,)), Slot("scale", "F32", (2,), required=False)))
        own = MemorySource("graph", {"scale": (TensorInfo("F32", (2,), 8), memoryview(floats(8, np.inf).tobytes()))})
        reception = reception_of(store, slots)
        send(reception, {"a": floats(1, 2)})
        result = reception.finish(own)
        assert_holds(result.weights, {"a": floats(1, 2), "scale": floats(8, np.inf)})
        assert result.borrowed == ("scale",)
        with pytest.raises(WeightsRefused, match="'scale': missing"):
            reception.finish(None)
        send(reception, {"scale": floats(3, 4)})
        result = reception.finish(own)
        assert_holds(result.weights, {"a": floats(1, 2), "scale": floats(3, 4)})
        assert result.borrowed == ()

    @pytest.mark.parametrize("names", [("embed",), ("head",), ("embed", "head"), ("head", "embed")])
    def test_either_name_of_tied_slots_or_both_fill_both(self, store: WeightStore, names: tuple[str, ...]) -> None:
        value = floats(1, 2, 3, 4)
        reception = reception_of(store, TIED)
        for name in names:
            send(reception, {name: value.copy()})
        weights = reception.finish(None).weights
        assert_holds(weights, {"embed": value, "head": value})
        assert weights.nbytes == 16
        assert address(weights.buffer("embed")) == address(weights.buffer("head"))


class TestGrouping:  # W19
    SHAPES: ClassVar = {f"t{index}": (index % 70, 11) for index in range(60)}

    @settings(max_examples=30, deadline=None)
    @given(st.permutations(list(SHAPES)), st.lists(st.integers(1, 20), min_size=1, max_size=60), st.data())
    def test_any_grouping_and_order_gives_the_same_set(
        self, names: list[str], groups: list[int], data: st.DataObject
    ) -> None:
        arrays = arrays_of(0, **self.SHAPES)
        store = WeightStore()
        reception = reception_of(store, table_of(arrays))
        rest = list(names)
        while rest:
            count = data.draw(st.sampled_from(groups))
            send(reception, {name: arrays[name] for name in rest[:count]}, 4000)
            rest = rest[count:]
        weights = reception.finish(None).weights
        assert_holds(weights, arrays)
        assert weights.digest == received(WeightStore(), arrays).digest
        assert store.usage().segment_bytes <= weights.nbytes + 64 * len(arrays) + 4096

    def test_tensor_sent_again_counts_as_sent_last_and_costs_no_more_in_the_end(self, store: WeightStore) -> None:
        arrays = arrays_of(0, a=(MIB,), b=(MIB,))
        reception = reception_of(store, table_of(arrays))
        for seed in range(3):
            send(reception, arrays_of(seed, a=(MIB,)), MIB)
        send(reception, {"a": arrays["a"]}, MIB)
        send(reception, {"b": arrays["b"]}, MIB)
        weights = reception.finish(None).weights
        assert_holds(weights, arrays)
        reception.close()
        assert store.usage().segment_bytes == 8 * MIB

    def test_files_may_arrive_side_by_side(self, store: WeightStore) -> None:
        arrays = arrays_of(0, a=(50_000,), b=(60_000,), c=(10,))
        contents = [
            to_bytes({"a": arrays["a"], "c": floats(*range(10))}),
            to_bytes({"b": arrays["b"], "c": arrays["c"]}),
        ]
        reception = reception_of(store, table_of(arrays))
        files = [reception.incoming() for _ in contents]
        for start in range(0, 300_000, 1000):
            for incoming, content in zip(files, contents, strict=True):
                incoming.feed(content[start : start + 1000])
        assert all(incoming.complete for incoming in files)
        assert_holds(reception.finish(None).weights, arrays)  # "c" was complete last in the second

    def test_more_may_follow_a_set_that_was_made(self, store: WeightStore) -> None:
        first, second = arrays_of(0, a=(1000,), b=(1000,)), arrays_of(1, a=(1000,), b=(1000,))
        reception = reception_of(store, table_of(first))
        send(reception, first)
        one = reception.finish(None)
        again = reception.finish(None)
        assert (again.copied_bytes, again.weights.digest) == (0, one.weights.digest)
        send(reception, {"b": second["b"]})
        two = reception.finish(None).weights
        assert_holds(one.weights, first)
        assert_holds(two, first | {"b": second["b"]})


class TestRefused:
    def test_finish_tells_all_faults_at_once_and_what_is_put_right_is_taken(self, store: WeightStore) -> None:
        slots = SlotTable((*TIED.slots, Slot("a", "F32", (3,)), Slot("b", "F32", (1,))))
        reception = reception_of(store, slots)
        send(reception, {"embed": floats(1, 2, 3, 4), "a": floats(np.nan, np.inf, 0)})  # W16
        send(reception, {"head": floats(1, 2, 3, 5)})
        with pytest.raises(WeightsRefused) as refused:
            reception.finish(None)
        assert [f"{fault.where}: {fault.problem}" for fault in refused.value.faults] == [
            "'b': missing, expected F32 [1]",
            "'head': differs from 'embed', to which the model ties it",
            "'a': 2 of its values are NaN or infinite",
        ]
        right = {"head": floats(1, 2, 3, 4), "a": floats(1, 2, 3), "b": floats(1)}
        send(reception, right)
        assert_holds(reception.finish(None).weights, right)

    def test_non_finite_values_are_taken_where_they_are_allowed(self, store: WeightStore) -> None:
        arrays = {"a": floats(np.nan, 1)}
        reception = reception_of(store, table_of(arrays))
        send(reception, arrays)
        assert_holds(reception.finish(None, allow_non_finite=True).weights, arrays)

    def test_what_does_not_fit_into_memory_is_refused_with_the_first_header(self) -> None:
        arrays = arrays_of(0, a=(MIB,), b=(MIB,))
        store = WeightStore(limit_bytes=6 * MIB)
        reception = reception_of(store, table_of(arrays))
        with pytest.raises(MemoryExceeded, match=rf"need {8 * MIB} bytes of memory, {6 * MIB} are available"):
            send(reception, {"a": arrays["a"]})
        assert store.usage().segment_bytes == 0

    def test_refused_file_leaves_what_arrived_before(self, store: WeightStore) -> None:
        arrays = arrays_of(0, a=(3,), b=(4,))
        reception = reception_of(store, table_of(arrays))
        send(reception, {"a": arrays["a"]})
        with pytest.raises(WeightsRefused, match="'c': unexpected"):
            send(reception, {"a": arrays["a"] + 1, "c": arrays["b"]})
        send(reception, {"b": arrays["b"]})
        assert_holds(reception.finish(None).weights, arrays)


class TestPatch:
    def base(self, store: WeightStore, count: int, size: int) -> tuple[Arrays, WeightSet]:
        arrays = arrays_of(0, **{f"t{index}": (size,) for index in range(count)})
        return arrays, received(store, arrays)

    def test_takes_what_was_sent_and_shares_the_rest(self, store: WeightStore) -> None:
        arrays, base = self.base(store, 100, MIB // 8)
        changed = arrays_of(7, t42=(MIB // 8,))
        reception = reception_of(store, base.slots, base)
        send(reception, changed)
        result = reception.finish(None)
        assert (result.copied_bytes, result.shared_bytes) == (MIB // 2, 99 * MIB // 2)
        assert_holds(result.weights, arrays | changed)
        assert_holds(base, arrays)
        assert result.weights.digest == received(WeightStore(), arrays | changed).digest
        assert address(result.weights.buffer("t3")) == address(base.buffer("t3"))

    def test_unknown_name_is_refused_with_a_near_match(self, store: WeightStore) -> None:
        arrays, base = self.base(store, 3, 10)
        with pytest.raises(WeightsRefused, match="'t22': unexpected: the model has no such slot; did you mean 't2'"):
            send(reception_of(store, base.slots, base), {"t22": arrays["t2"]})

    def test_tied_slots_follow_whichever_was_sent(self, store: WeightStore) -> None:
        base = received(store, {"embed": floats(1, 2, 3, 4)}, TIED)
        reception = reception_of(store, TIED, base)
        send(reception, {"head": floats(5, 6, 7, 8)})
        assert_holds(reception.finish(None).weights, {"embed": floats(5, 6, 7, 8), "head": floats(5, 6, 7, 8)})

    def test_base_for_other_slots_is_a_defect(self, store: WeightStore) -> None:
        _, base = self.base(store, 3, 10)
        with pytest.raises(ValueError, match="same slots"):
            reception_of(store, TIED, base)

    def test_sharing_never_keeps_more_than_promised_however_many_patches(self) -> None:
        """Of ever other tensors, large and small, each by itself or a few together."""
        generator = np.random.default_rng(0)
        store = WeightStore()
        shapes = {f"t{index}": (int(generator.choice([0, 3, 700, 20_000, 100_000])),) for index in range(150)}
        arrays = arrays_of(0, **shapes)
        weights = received(store, arrays)
        for step in range(300):
            names = generator.choice(list(arrays), size=int(generator.choice([1, 1, 2, 9])), replace=False)
            changed = {name: arrays[name] + np.float32(1) for name in names}
            reception = reception_of(store, weights.slots, weights)
            send(reception, changed, MIB)
            weights = reception.finish(None).weights
            reception.close()
            arrays |= changed
            padding = 64 * len(arrays) + 4096 * len({tensor.segment for tensor in weights.tensors.values()})
            assert segment_bytes(weights) <= 1.05 * (weights.nbytes + padding) + MIB
            if step % 50 == 0:
                assert_holds(weights, arrays)
        assert_holds(weights, arrays)
        assert store.usage().segment_bytes == segment_bytes(weights)

    def test_set_patched_tensor_by_tensor_does_not_lie_in_thousands_of_segments(self, store: WeightStore) -> None:
        arrays, weights = self.base(store, 400, 1024)  # each patch is a whole page, which wastes nothing
        for index in range(400):
            changed = {f"t{index}": arrays[f"t{index}"] + np.float32(1)}
            reception = reception_of(store, weights.slots, weights)
            send(reception, changed)
            weights = reception.finish(None).weights
            arrays |= changed
        assert len({tensor.segment for tensor in weights.tensors.values()}) <= 300
        assert_holds(weights, arrays)


class TestSharing:
    def test_equal_set_keeps_no_memory_of_its_own(self, store: WeightStore) -> None:
        arrays = arrays_of(0, a=(MIB,), b=(5,), c=(5,))
        first = received(store, arrays)
        reception = reception_of(store, table_of(arrays))
        send(reception, arrays, MIB)
        again = reception.finish(None)
        assert (again.copied_bytes, again.shared_bytes) == (0, first.nbytes)
        assert again.weights.digest == first.digest
        assert store.usage().segment_bytes == segment_bytes(first)

    def test_set_that_came_from_a_file_is_shared_too(self, store: WeightStore, tmp_path: Path) -> None:
        arrays = arrays_of(0, **{f"t{index}": (MIB // 16,) for index in range(64)})
        first = put(store, tmp_path / "w.safetensors", arrays).weights
        changed = arrays | {"t9": arrays["t9"] + 1}
        reception = reception_of(store, table_of(arrays))
        send(reception, changed, MIB)
        result = reception.finish(None)
        assert result.shared_bytes >= 60 * MIB // 4
        assert_holds(result.weights, changed)
        assert_holds(first, arrays)
        reception.close()
        assert store.usage().segment_bytes <= 1.1 * first.nbytes + MIB

    def test_a_few_equal_tensors_do_not_keep_the_old_generation_alive(self, store: WeightStore) -> None:
        weights = None
        for seed in range(5):
            arrays = arrays_of(seed, **{f"w{index}": (MIB // 2,) for index in range(8)})
            arrays |= {f"b{index}": np.zeros(4, np.float32) for index in range(8)}
            arrays = dict(sorted(arrays.items(), key=lambda item: item[0][1:]))
            weights = received(store, arrays)
            assert store.usage().segment_bytes <= 1.05 * weights.nbytes + 1.2 * MIB
        assert weights is not None

    def test_old_generation_is_where_the_next_but_one_goes(self, store: WeightStore, tmp_path: Path) -> None:
        """Whether it comes from a file or by the network."""
        weights, places = None, []
        for seed in range(10):
            arrays = arrays_of(seed, a=(MIB // 4,), b=(MIB // 4,), c=(7,))
            path = tmp_path / "w.safetensors"
            weights = received(store, arrays) if seed % 3 else put(store, path, arrays).weights
            assert_holds(weights, arrays)
            places.append(address(weights.buffer("b")))
        assert weights is not None
        assert places == places[:2] * 5


class TestEnd:
    def test_abandoned_file_gives_its_memory_back_and_the_retry_takes_it(self) -> None:
        arrays = arrays_of(0, a=(MIB,), b=(MIB,))
        content = to_bytes(arrays)
        store = WeightStore(limit_bytes=8 * MIB + 4096)
        reception = reception_of(store, table_of(arrays))
        for _ in range(3):
            incoming = reception.incoming()
            incoming.feed(content[: len(content) - 100])
            del incoming
        send(reception, content, MIB)
        assert_holds(reception.finish(None).weights, arrays)

    def test_memory_that_others_can_spare_is_asked_for_until_it_is_there(self) -> None:
        arrays = arrays_of(0, a=(MIB,), b=(MIB,))
        store = WeightStore(limit_bytes=12 * MIB)
        weights, spare = (
            received(store, arrays),
            [store.region(table_of(arrays_of(1, s=(MIB // 2,)))) for _ in range(2)],
        )
        asked: list[int] = []

        def make_room(missing_bytes: int) -> bool:
            asked.append(missing_bytes)
            if not spare:
                return False
            spare.pop().close()
            return True

        reception = store.receive(table_of(arrays), weights, subject="the push", make_room=make_room)
        send(reception, {"a": arrays["a"] + 1})
        assert asked == [4 * MIB, 2 * MIB]
        assert_holds(reception.finish(None).weights, {**arrays, "a": arrays["a"] + 1})
        with pytest.raises(MemoryExceeded, match=f"need {4 * MIB} bytes of memory, 0 are available"):
            send(reception, {"b": arrays["b"] + 1})

    def test_closed_reception_has_no_memory_and_refuses_what_still_arrives(self, store: WeightStore) -> None:
        arrays = arrays_of(0, a=(PIECE_BYTES // 4 + 1,), b=(10,))
        content = to_bytes(arrays)
        reception = reception_of(store, table_of(arrays))
        send(reception, {"a": arrays["a"]}, MIB)
        incoming = reception.incoming()
        incoming.feed(content[: len(content) - 1])
        reception.close()
        with pytest.raises(Conflict, match="the stage has ended"):
            incoming.feed(content[-1:])
        with pytest.raises(Conflict, match="the stage has ended"):
            reception.finish(None)
        with pytest.raises(Conflict, match="the stage has ended"):
            send(reception, {"b": arrays["b"]})
        del incoming
        wait_for_digests(store)
        assert store.usage().segment_bytes == 0

    def test_reception_dies_while_digests_run(self, store: WeightStore) -> None:
        arrays = {"a": np.ones(PIECE_BYTES // 2, np.float32)}
        for _ in range(5):
            send(reception_of(store, table_of(arrays)), arrays, MIB)
        wait_for_digests(store)
        gc.collect()
        assert store.usage().segment_bytes == 0

    def test_store_dies_while_digests_run(self) -> None:
        before = threading.active_count()
        store = WeightStore()
        arrays = arrays_of(0, a=(PIECE_BYTES,))
        reception = reception_of(store, table_of(arrays))
        send(reception, arrays, MIB)
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("weights-arriving")]
        assert threads
        del store, reception
        for thread in threads:
            thread.join(10)
        assert threading.active_count() <= before

    def test_failed_finish_leaves_nothing_behind_once_closed(self, store: WeightStore) -> None:
        """Not even while the error, with its traceback, is kept."""
        arrays = arrays_of(0, a=(MIB,), b=(10,))
        arrays["b"][0] = np.nan
        reception = reception_of(store, table_of(arrays))
        send(reception, arrays, MIB)
        with pytest.raises(WeightsRefused, match="'b': 1 of its values") as refused:
            reception.finish(None)
        reception.close()
        assert refused.value.__traceback__ is not None
        assert store.usage().segment_bytes == 0

    def test_sets_outlive_their_reception(self, store: WeightStore) -> None:
        arrays = arrays_of(0, a=(1000,))
        reception = reception_of(store, table_of(arrays))
        send(reception, arrays)
        weights = reception.finish(None).weights
        reception.close()
        received(store, arrays_of(1, a=(1000,)))
        assert_holds(weights, arrays)


class TestThreads:
    def test_receptions_of_several_models_and_their_files_do_not_mix(self, store: WeightStore, tmp_path: Path) -> None:
        def life(model: int) -> None:
            serving: WeightSet | None = None
            for step in range(15):
                arrays = arrays_of(1000 * model + step, a=(20_000 + model,), b=(3, 50), c=(17,))
                if step % 3 == 0:
                    serving = put(store, tmp_path / f"{model}.safetensors", arrays).weights
                elif step % 3 == 1 or serving is None:
                    serving = received(store, arrays)
                else:
                    reception = reception_of(store, serving.slots, serving)
                    send(reception, {"b": arrays["b"]})
                    arrays = {"b": arrays["b"]}
                    serving = reception.finish(None).weights
                assert_holds(serving, arrays)

        with ThreadPoolExecutor(3) as pool:
            for future in [pool.submit(life, model) for model in range(3)]:
                future.result()
        wait_for_digests(store)
        gc.collect()
        assert store.usage().segment_bytes == 0

    def test_file_arrives_while_another_thread_finishes(self, store: WeightStore) -> None:
        arrays = arrays_of(0, **{f"t{index}": (3000,) for index in range(200)})
        reception = reception_of(store, table_of(arrays))
        send(reception, arrays)
        done = threading.Event()
        digests: defaultdict[str, int] = defaultdict(int)

        def finish() -> None:
            while not done.is_set():
                digests[reception.finish(None).weights.digest] += 1

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(finish)
            try:
                for index in range(200):
                    send(reception, {f"t{index}": arrays[f"t{index}"]})
            finally:
                done.set()
            running.result()
        assert list(digests) == [received(WeightStore(), arrays).digest]
