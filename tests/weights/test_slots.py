from __future__ import annotations

import json
import time

import pytest

from rebind.errors import WeightsRefused
from rebind.weights.slots import DTYPES, Slot, SlotTable, TensorInfo, check, shown, tensor_nbytes
from tests.weights.files import raw_safetensors, read_by_library

TABLE = SlotTable(
    (
        Slot("conv.weight", "F32", (8, 3, 3, 3)),
        Slot("conv.bias", "F32", (8,)),
        Slot("bn.num_batches_tracked", "I64", (), used=False),
        Slot("scale", "F32", (1,), required=False),
        Slot("embed.weight", "F16", (10, 4)),
        Slot("head.weight", "F16", (10, 4), tied_to="embed.weight"),
    )
)
FALLBACK = {"scale": TensorInfo("F32", (1,), 4)}


def offered(**changes: TensorInfo | None) -> dict[str, TensorInfo]:
    tensors = {slot.name: slot.info for slot in TABLE.slots} | {
        name.replace("__", "."): info for name, info in changes.items()
    }
    return {name: info for name, info in tensors.items() if info is not None}


def faults_of(tensors: dict[str, TensorInfo], fallback: dict[str, TensorInfo] | None = None) -> list[str]:
    with pytest.raises(WeightsRefused) as refused:
        check(TABLE, tensors, "model.safetensors", fallback)
    assert refused.value.subject == "model.safetensors"
    return [str(fault) for fault in refused.value.faults]


def test_every_dtype_of_the_library_is_known() -> None:
    for name, bits in DTYPES.items():
        document = {"t": {"dtype": name, "shape": [8], "data_offsets": [0, bits]}}
        assert read_by_library(raw_safetensors(document, bytes(bits))) == {"t": name}


def test_size_of_packed_elements() -> None:
    assert tensor_nbytes("F6_E2M3", (4,)) == 3
    assert tensor_nbytes("F4", (0, 3)) == 0
    with pytest.raises(ValueError, match="does not end at a byte"):
        tensor_nbytes("F4", (3,))


def test_fitting_tensors_pass() -> None:
    check(TABLE, offered(), "model.safetensors")


def test_all_faults_are_reported_at_once() -> None:
    faults = faults_of(
        offered(
            conv__weight=TensorInfo("F32", (8, 3, 5, 5), 2400),
            conv__bias=None,
            conv__bais=TensorInfo("F32", (8,), 32),
            embed__weight=TensorInfo("F32", (4, 10), 160),
        )
    )
    assert faults == [
        "'conv.weight': expected shape [8,3,3,3], got [8,3,5,5]",
        "'embed.weight': expected F16 [10,4], got F32 [4,10]",
        "'conv.bias': missing, expected F32 [8]",
        "'conv.bais': unexpected: the model has no such slot; did you mean 'conv.bias'?",
    ]


def test_what_the_graph_does_not_read_may_be_of_any_kind() -> None:
    """It is dropped: `.wts` files have the count of batches as a float."""
    for count in (TensorInfo("F32", (1,), 4, shaped=False), TensorInfo("I32", (), 4)):
        check(TABLE, offered(bn__num_batches_tracked=count), "model.wts")


def test_either_name_of_a_tied_tensor_will_do_but_not_none() -> None:
    check(TABLE, offered(embed__weight=None), "model.safetensors")
    check(TABLE, offered(head__weight=None), "model.safetensors")
    assert faults_of(offered(embed__weight=None, head__weight=None)) == [
        "'embed.weight': missing, expected F16 [10,4]; 'head.weight', tied to it, will do as well"
    ]


def test_optional_slot_comes_from_the_model_file_or_is_missing() -> None:
    tensors = offered(scale=None)
    check(TABLE, tensors, "model.safetensors", FALLBACK)
    assert faults_of(tensors) == ["'scale': missing, expected F32 [1]"]
    assert faults_of(tensors, {"scale": TensorInfo("F64", (1,), 8)}) == [
        "'scale': missing, expected F32 [1] (the model file has F64 [1])"
    ]


def test_unused_slot_is_required_like_any_other_unless_optional() -> None:
    assert faults_of(offered(bn__num_batches_tracked=None)) == ["'bn.num_batches_tracked': missing, expected I64 []"]
    optional = SlotTable((Slot("counter", "I64", (), required=False, used=False),))
    check(optional, {}, "model.safetensors")


def test_file_without_tensors_is_missing_all() -> None:  # W6
    assert faults_of({}, FALLBACK) == [
        "it has no tensors: missing all 4; give a weights file that has them, beside the model file"
    ]


def test_foreign_file_of_ten_thousand_tensors_is_refused_in_a_bounded_message_and_time() -> None:
    foreign = {f"model.layers.{index}.weight": TensorInfo("F32", (1,), 4) for index in range(10_000)}
    wide = SlotTable(tuple(Slot(f"blocks.{index}.weight", "F32", (1,)) for index in range(2_000)))
    began = time.process_time()
    with pytest.raises(WeightsRefused) as refused:
        check(wide, foreign, "model.safetensors")
    assert time.process_time() - began < 10
    assert len(refused.value.faults) == 101
    assert refused.value.faults[-1].problem == "and 11900 more"
    assert len(str(refused.value)) < 20_000


def test_hostile_names_are_escaped_and_shortened() -> None:  # W18
    names = ["../../etc/x", "", "\x1b[31m\n", "n" * (1 << 20)]
    with pytest.raises(WeightsRefused) as refused:
        check(TABLE, offered() | {name: TensorInfo("F32", (1,), 4) for name in names}, "model.safetensors")
    message = str(refused.value)
    assert "''" in message
    assert "'\\x1b[31m\\n'" in message
    assert "(1048576 characters)" in message
    assert len(message) < 1000
    assert message.isprintable()
    assert shown("a") == "'a'"


def test_patch_may_lack_anything_and_is_held_to_the_slots_that_it_has() -> None:
    check(TABLE, {}, "patch", partial=True)
    check(TABLE, {"head.weight": TensorInfo("F16", (10, 4), 80)}, "patch", partial=True)
    with pytest.raises(WeightsRefused) as refused:
        check(TABLE, {"conv.bias": TensorInfo("F32", (9,), 36), "conv.wieght": FALLBACK["scale"]}, "p", partial=True)
    assert [str(fault) for fault in refused.value.faults] == [
        "'conv.bias': expected shape [8], got [9]",
        "'conv.wieght': unexpected: the model has no such slot; did you mean 'conv.weight'?",
    ]


def test_table_round_trips_through_json() -> None:
    document = json.loads(json.dumps(TABLE.to_json()))
    assert SlotTable.from_json(document) == TABLE
    assert SlotTable.from_json(document).digest == TABLE.digest
    assert SlotTable(TABLE.slots[::-1]).digest != TABLE.digest


def test_table_counts_used_tensors_once() -> None:
    assert TABLE.nbytes == 8 * 27 * 4 + 8 * 4 + 4 + 10 * 4 * 2
    assert [tuple(slot.name for slot in group) for group in TABLE.tensors][-1] == ("embed.weight", "head.weight")


@pytest.mark.parametrize(
    "slots",
    [
        (Slot("a", "F32", (1,)), Slot("a", "F32", (1,))),
        (Slot("a", "F33", (1,)),),
        (Slot("a", "F32", (-1,)),),
        (Slot("a", "F32", (1,), tied_to="b"),),
        (Slot("a", "F32", (1,), tied_to="a"),),
        (Slot("a", "F32", (2,)), Slot("b", "F32", (1,), tied_to="a")),
    ],
)
def test_contradictory_tables_cannot_be_made(slots: tuple[Slot, ...]) -> None:
    with pytest.raises(ValueError, match=r"slot|dtype"):
        SlotTable(slots)


class TestShapeless:
    """A tensor of which the file gives the number of elements only (``.wts``)."""

    @staticmethod
    def elements(count: int, dtype: str = "F32") -> TensorInfo:
        return TensorInfo(dtype, (count,), 4 * count, shaped=False)

    @pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 6, 1)])
    def test_fits_any_slot_of_so_many_elements(self, shape: tuple[int, ...]) -> None:
        check(SlotTable((Slot("w", "F32", shape),)), {"w": self.elements(6)}, "m.wts")
        optional = SlotTable((Slot("w", "F32", shape, required=False),))
        check(optional, {}, "m.wts", fallback={"w": self.elements(6)})

    def test_of_another_number_or_dtype_is_refused(self) -> None:
        table = SlotTable((Slot("a", "F32", (2, 3)), Slot("b", "F16", (2, 3)), Slot("c", "F32", (), required=False)))
        with pytest.raises(WeightsRefused) as refused:
            check(table, {"a": self.elements(7), "b": self.elements(6)}, "m.wts", fallback={"c": self.elements(2)})
        message = str(refused.value)
        assert "'a': expected F32 [2,3], got 7 elements of F32" in message
        assert "'b': expected F16 [2,3], got 6 elements of F32" in message
        assert "'c': missing, expected F32 [] (the model file has 2 elements of F32)" in message

    def test_one_with_a_shape_is_held_to_it(self) -> None:
        with pytest.raises(WeightsRefused, match=r"'w': expected shape \[2,3\], got \[6\]"):
            check(SlotTable((Slot("w", "F32", (2, 3)),)), {"w": TensorInfo("F32", (6,), 24)}, "m.npz")
