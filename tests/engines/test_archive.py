"""Files that are no torch.export archives, or damaged ones: refused with what, where and what to do."""

from __future__ import annotations

import struct
import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rebind.engines.aot_inductor import archive as archive_module
from rebind.engines.aot_inductor.archive import Archive
from rebind.engines.aot_inductor.embedded import EmbeddedWeights
from rebind.engines.aot_inductor.program import read_program
from rebind.errors import ModelInvalid, StorageFailed, WeightsRefused
from rebind.weights.zipped import Member
from tests.engines.models import MLP, Mlp, Strided, export
from tests.engines.tampering import GRAPH, WEIGHTS_CONFIG, edit_json, rewrite, with_two_records_of_one_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def read_all(path: Path) -> dict[str, bytes]:
    """The graph and every weight of an archive."""
    with Archive(path) as archive:
        read_program(archive)
    with Archive(path) as archive, EmbeddedWeights(archive) as weights:
        values = {}
        for name, info in weights.tensors.items():
            buffer = bytearray(info.nbytes)
            weights.read_into(name, 0, memoryview(buffer))
            values[name] = bytes(buffer)
        return values


def script(path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(Mlp()), path)
    return path


def compiled_package(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr("model/data/aotinductor/model/plan.so", b"\x7fELF")
    return path


def saved(path: Path) -> Path:
    torch.save(Mlp().state_dict(), path)
    return path


def written(data: bytes) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        path.write_bytes(data)
        return path

    return write


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (written(b""), "cannot be read as a zip file"),
        (written(b"not a model at all"), "cannot be read as a zip file"),
        (written(struct.pack("<Q", 2) + b"{}"), "cannot be read as a zip file"),
        (script, "it is a TorchScript file"),
        (saved, "it is a torch.save file"),
        (compiled_package, "it is a compiled AOTInductor package"),
    ],
    ids=["empty", "text", "safetensors", "torchscript", "torch.save", "aoti package"],
)
def test_foreign_files_are_named_for_what_they_are(make: Callable[[Path], Path], what: str, tmp_path: Path) -> None:
    path = make(tmp_path / "model.pt2")
    with pytest.raises(ModelInvalid, match=what) as refusal:
        Archive(path)
    assert str(path) in str(refusal.value)
    assert "torch.export.save" in str(refusal.value)


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match="No such file"):
        Archive(tmp_path / "model.pt2")


def set_first(**changes: Any) -> Callable[[Any], None]:
    """Changes the description of ``first.weight``; values go to ``tensor_meta`` if it has that key."""

    def change(document: Any) -> None:
        payload = document["config"]["first.weight"]
        for key, value in changes.items():
            (payload["tensor_meta"] if key in payload["tensor_meta"] else payload)[key] = value

    return change


HUGE = [{"as_int": 1 << 40}, {"as_int": 16}]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (set_first(sizes=HUGE), r"first\.weight.*claims sizes \[1099511627776, 16\]"),
        (
            set_first(sizes=HUGE, strides=[{"as_int": 0}, {"as_int": 0}]),
            r"first\.weight.*but its record has 4096 bytes",
        ),
        (set_first(storage_offset={"as_int": 1}), r"first\.weight.*but its record has 4096 bytes"),
        (set_first(storage_offset={"as_int": -1}), r"first\.weight.*offset -1"),
        (set_first(strides=[{"as_int": -16}, {"as_int": 1}]), r"first\.weight.*strides \[-16, 1\]"),
        (set_first(sizes=[{"as_int": 64.0}, {"as_int": 16}]), r"first\.weight.*no integers"),
        (set_first(sizes=[{"as_int": 1024}]), r"first\.weight.*claims sizes"),
        (set_first(sizes=[{"as_int": 16}, {"as_int": 64}]), r"F32 \[16, 64\] in the archive, but F32 \[64, 16\]"),
        (set_first(dtype=11), r"first\.weight.*complex128, which is not supported"),
        (set_first(dtype=6, sizes=[{"as_int": 64}, {"as_int": 16}]), r"F16 .* in the archive, but F32"),
        (set_first(use_pickle=True), r"first\.weight.*pickled Python"),
        (set_first(path_name="../../../etc/passwd"), r"first\.weight.*missing"),
        (lambda document: document["config"]["first.weight"].clear(), r"first\.weight.*torch.export does not write"),
        (lambda document: document.clear(), "has no member 'config'"),
    ],
)
def test_false_claims_about_a_tensor_are_refused(
    change: Callable[[Any], None], what: str, archives: dict[str, Path], tmp_path: Path
) -> None:
    path = edit_json(archives["mlp"], tmp_path / "model.pt2", WEIGHTS_CONFIG, change)
    with pytest.raises(ModelInvalid, match=what):
        read_all(path)


def test_compressed_records_are_read_as_plain_ones(archives: dict[str, Path], tmp_path: Path) -> None:
    path = rewrite(archives["mlp"], tmp_path / "model.pt2", lambda records: None, zipfile.ZIP_DEFLATED)
    assert read_all(path) == expected_values()


def test_two_records_of_one_name_are_refused(archives: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match="two members of this name"):
        Archive(with_two_records_of_one_name(archives["mlp"], tmp_path / "model.pt2"))


def test_a_missing_graph_record_is_refused(archives: dict[str, Path], tmp_path: Path) -> None:
    path = rewrite(archives["mlp"], tmp_path / "model.pt2", lambda records: records.__delitem__(GRAPH))
    with pytest.raises(ModelInvalid, match=GRAPH):
        Archive(path)


def test_no_claim_about_the_size_of_the_directory_costs_memory(tmp_path: Path) -> None:
    """A file may claim terabytes, and have them, without taking room on the disk."""
    path, nbytes = tmp_path / "model.pt2", 1 << 40
    end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, nbytes, 0)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, nbytes, 1)
    old_end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    with path.open("wb") as file:
        file.seek(nbytes)
        file.write(end + locator + old_end)
    with pytest.raises(ModelInvalid, match="its directory has 1099511627776 bytes"):
        Archive(path)


def test_a_record_that_does_not_fit_into_memory_is_refused(archives: dict[str, Path]) -> None:
    with Archive(archives["mlp"]) as archive, pytest.raises(StorageFailed, match="big takes 1099511627776 bytes"):
        archive.read_record(Member("big", 0, 1 << 40, 0, False, 1 << 40))


def test_a_graph_that_would_not_fit_into_memory_when_parsed_is_refused(
    archives: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Archive(archives["mlp"]) as archive:
        monkeypatch.setattr(archive_module, "_MOST_JSON_BYTES", 1000)
        with pytest.raises(ModelInvalid, match=r"models/model\.json: has \d+ bytes, more than 1000"):
            archive.read_json(GRAPH)


def test_flipped_bytes_of_graph_and_weights_are_found(archives: dict[str, Path], tmp_path: Path) -> None:
    data = archives["mlp"].read_bytes()
    path = tmp_path / "model.pt2"
    with Archive(archives["mlp"]) as archive:
        graph, weight = archive.records[GRAPH], archive.weights["first.weight"].view.member
    for record, error in ((graph, ModelInvalid), (weight, WeightsRefused)):
        middle = record.offset + record.nbytes // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        with pytest.raises(error, match="CRC does not match"):
            read_all(path)


def test_an_expression_that_is_code_is_never_evaluated(archives: dict[str, Path], tmp_path: Path) -> None:
    """torch would ``eval`` it."""
    stain = tmp_path / "stain"

    def inject(document: Any) -> None:
        sizes = document["graph_module"]["graph"]["tensor_values"]["features"]["sizes"]
        sizes[0]["as_expr"]["expr_str"] = f"__import__('pathlib').Path({str(stain)!r}).touch()"

    path = edit_json(archives["mlp"], tmp_path / "model.pt2", GRAPH, inject)
    with pytest.raises(ModelInvalid, match="no expression"):
        read_all(path)
    assert not stain.exists()


def test_another_version_of_the_format_is_named(archives: dict[str, Path], tmp_path: Path) -> None:
    path = edit_json(
        archives["mlp"], tmp_path / "model.pt2", GRAPH, lambda document: document["schema_version"].update(major=9)
    )
    with pytest.raises(ModelInvalid, match=r"version 9 of torch\.export's format by torch 2"):
        read_all(path)


@pytest.fixture(scope="module")
def fuzzed(archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    return archives["mlp"].read_bytes(), tmp_path_factory.mktemp("fuzz") / "model.pt2"


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damage_of_any_kind_is_refused_or_harmless(fuzzed: tuple[bytes, Path], data: st.DataObject) -> None:
    original, path = fuzzed
    damaged = bytearray(original)
    for position in data.draw(st.lists(st.integers(0, len(original) - 1), max_size=8)):
        damaged[position] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged[: data.draw(st.integers(len(original) // 2, len(original)))])
    try:
        values = read_all(path)
    except (ModelInvalid, WeightsRefused):
        return
    assert values == expected_values()


def expected_values() -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in MLP.model(0).state_dict().items()}


@pytest.mark.filterwarnings("ignore:No complete tensor found:UserWarning")
def test_strided_tensors_are_read_in_row_major_order(tmp_path: Path) -> None:
    """W13, T13: a transposed view, a slice of a larger storage, channels last, and no elements."""
    model = Strided()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = export(model, tmp_path / "model.pt2", torch.zeros(4, 4))
    values = read_all(path)
    assert values == {name: t.contiguous().numpy().tobytes() for name, t in model.state_dict().items()}


def test_parts_of_a_tensor_are_read_where_they_are(archives: dict[str, Path]) -> None:
    whole = expected_values()["first.weight"]
    with Archive(archives["mlp"]) as archive, EmbeddedWeights(archive) as weights:
        for start, nbytes in ((0, 100), (100, 7), (4000, 96), (0, 4096)):
            buffer = bytearray(nbytes)
            weights.read_into("first.weight", start, memoryview(buffer))
            assert buffer == whole[start : start + nbytes]


def test_a_file_that_was_replaced_is_read_to_the_end_and_one_that_was_overwritten_is_refused(
    archives: dict[str, Path], tmp_path: Path
) -> None:
    path = rewrite(archives["mlp"], tmp_path / "model.pt2", lambda records: None)
    with Archive(path) as archive, EmbeddedWeights(archive) as weights:
        rewrite(archives["everything"], tmp_path / "new.pt2", lambda records: None).rename(path)
        buffer = bytearray(4096)
        weights.read_into("first.weight", 0, memoryview(buffer))
        weights.check_unchanged()
        assert buffer == expected_values()["first.weight"]
    with Archive(path) as archive, EmbeddedWeights(archive) as weights:
        path.write_bytes(b"short")
        with pytest.raises(WeightsRefused, match="changed while it was read"):
            weights.read_into("conv.weight", 0, memoryview(bytearray(288)))
        with pytest.raises(WeightsRefused, match="it was written to"):
            weights.check_unchanged()
