"""What is written is read back by the libraries that own the formats, and by our own readers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rebind.errors import AlreadyExists, InvalidArgument, StorageFailed, WeightsRefused
from rebind.weights.formats import open_weights
from rebind.weights.writing import FORMATS, Written, write_weights
from tests.weights.files import entry, raw_safetensors

if TYPE_CHECKING:
    from collections.abc import Callable

    Tensors = dict[str, torch.Tensor]
    Read = Callable[[Path], Tensors]

INDEX = ".safetensors.index.json"
KINDS: dict[str, list[torch.dtype]] = {
    ".wts": [torch.float32, torch.float16],
    ".npz": [
        torch.float64, torch.float32, torch.float16, torch.complex64, torch.bool, torch.uint8, torch.int8,
        torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    ],
}  # fmt: skip
KINDS[".safetensors"] = KINDS[".pt"] = [
    *KINDS[".npz"], torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]  # fmt: skip


def tensors_of(dtypes: list[torch.dtype]) -> Tensors:
    """Of each dtype random bytes in a matrix, and a scalar, a tensor without elements, and one of an odd size."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        highest = 2 if dtype == torch.bool else 256
        for shape in ((3, 5), (), (0, 4), (7,)):
            count = dtype.itemsize * torch.Size(shape).numel()
            data = torch.randint(highest, (count,), dtype=torch.uint8, generator=generator)
            tensors[f"{name}.{len(shape)}.{'x'.join(map(str, shape))}"] = data.view(dtype).reshape(shape)
    return tensors


def save(directory: Path, tensors: Tensors, name: str = "in.safetensors") -> Path:
    save_file(tensors, directory / name)
    return directory / name


def convert(source: Path, target: Path, **options: Any) -> list[Written]:
    with open_weights(source) as weights:
        return write_weights(weights, target, **options)


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert raw(found[name]) == raw(tensor)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def load_npz(path: Path) -> Tensors:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def load_torch(path: Path) -> Tensors:
    found: Tensors = torch.load(path, weights_only=True)
    return found


LIBRARIES: dict[str, Read] = {".safetensors": load_file, ".npz": load_npz, ".pt": load_torch}
# numpy itself takes a name that ends with .npy for another's file.
NAMES = st.text(max_size=20).filter(lambda name: "\0" not in name and not name.endswith(".npy"))


def load_index(path: Path) -> Tensors:
    weight_map = json.loads(path.read_bytes())["weight_map"]
    shards = {shard: load_file(path.with_name(shard)) for shard in set(weight_map.values())}
    return {name: shards[shard][name] for name, shard in weight_map.items()}


class TestOwnLibraries:
    @pytest.mark.parametrize(("suffix", "load"), LIBRARIES.items())
    def test_the_library_of_the_format_reads_every_dtype_and_shape(
        self, tmp_path: Path, suffix: str, load: Read
    ) -> None:
        tensors = tensors_of(KINDS[suffix])

        (written,) = convert(save(tmp_path, tensors), tmp_path / f"out{suffix}")

        assert_same(load(tmp_path / f"out{suffix}"), tensors)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        assert written == Written(tmp_path / f"out{suffix}", len(tensors), nbytes)

    def test_torch_reads_a_state_dict_by_mapping_it_too(self, tmp_path: Path) -> None:
        tensors = tensors_of(KINDS[".pt"])
        convert(save(tmp_path, tensors), tmp_path / "out.pth")

        mapped = torch.load(tmp_path / "out.pth", weights_only=True, mmap=True)

        assert_same(mapped, tensors)
        assert {tensor.data_ptr() % 64 for tensor in mapped.values() if tensor.nbytes} == {0}

    def test_a_module_takes_the_state_dict(self, tmp_path: Path) -> None:
        net, other = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
        net(torch.rand(8, 4))
        convert(save(tmp_path, net.state_dict()), tmp_path / "out.pt")

        other.load_state_dict(load_torch(tmp_path / "out.pt"))

        assert_same(other.state_dict(), net.state_dict())

    @pytest.mark.parametrize(
        ("dtype", "shape", "torch_dtype", "torch_shape"),
        [
            ("F8_E8M0", [2, 2], torch.float8_e8m0fnu, (2, 2)),
            ("F4", [4, 2], torch.float4_e2m1fn_x2, (4, 1)),
        ],
    )
    def test_dtypes_that_torch_has_but_its_safetensors_does_not_write(
        self, tmp_path: Path, dtype: str, shape: list[int], torch_dtype: torch.dtype, torch_shape: tuple[int, ...]
    ) -> None:
        data = bytes([0, 1, 127, 255])
        (tmp_path / "in.safetensors").write_bytes(raw_safetensors({"w": entry(shape, 0, 4, dtype)}, data))

        convert(tmp_path / "in.safetensors", tmp_path / "out.pt")

        expected = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(torch_dtype).reshape(torch_shape)
        assert_same(load_torch(tmp_path / "out.pt"), {"w": expected})

    def test_wts_is_the_text_of_tensorrts_samples(self, tmp_path: Path) -> None:
        tensors = {"a.half": torch.tensor([[1.5, -2.0]]).half(), "b": torch.tensor([1.0, -0.0, torch.inf])}

        convert(save(tmp_path, tensors), tmp_path / "out.wts")

        lines = (tmp_path / "out.wts").read_text().splitlines()
        assert lines[0] == "2"
        assert set(lines[1:]) == {"a.half 1 2 3e00 c000", "b 0 3 3f800000 80000000 7f800000"}

    def test_wts_of_float32_alone_names_no_dtypes(self, tmp_path: Path) -> None:
        convert(save(tmp_path, {"b": torch.tensor([[1.0], [-0.0]])}), tmp_path / "out.wts")

        assert (tmp_path / "out.wts").read_text() == "1\nb 2 3f800000 80000000\n"

    def test_first_tensor_of_a_safetensors_file_is_aligned_and_each_to_its_elements(self, tmp_path: Path) -> None:
        (tmp_path / "in.safetensors").write_bytes(
            raw_safetensors({"odd": entry([3], 0, 3, "BOOL"), "wide": entry([2], 3, 19, "F64")}, bytes(19))
        )
        convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors")

        content = (tmp_path / "out.safetensors").read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        assert (8 + length) % 64 == 0
        assert header["wide"]["data_offsets"][0] % 8 == 0
        with safe_open(tmp_path / "out.safetensors", "pt") as opened:
            assert opened.metadata() == {"format": "pt"}

    def test_arrays_of_any_layout_keep_their_values(self, tmp_path: Path) -> None:  # W13
        value = np.arange(6, dtype=np.float32).reshape(2, 3)
        np.savez(tmp_path / "in.npz", fortran=np.asfortranarray(value), plain=value)
        torch.save({"columns": torch.from_numpy(value).T, "steps": torch.arange(6.0)[::2]}, tmp_path / "in.pt")

        convert(tmp_path / "in.npz", tmp_path / "numpy.safetensors")
        convert(tmp_path / "in.pt", tmp_path / "torch.npz")

        expected = torch.from_numpy(value)
        assert_same(load_file(tmp_path / "numpy.safetensors"), {"fortran": expected, "plain": expected})
        assert_same(load_npz(tmp_path / "torch.npz"), {"columns": expected.T, "steps": torch.tensor([0.0, 2.0, 4.0])})


class TestRoundTrips:
    SUFFIXES = (*(suffix for suffix in FORMATS if suffix != ".wts"), ".wts")

    @pytest.mark.parametrize("there", SUFFIXES)
    @pytest.mark.parametrize("back", SUFFIXES)
    def test_any_format_to_any_other_and_back_keeps_bytes(self, tmp_path: Path, there: str, back: str) -> None:
        kinds = min((KINDS.get(suffix, KINDS[".pt"]) for suffix in (there, back)), key=len)
        tensors = {f"{name} é/[0]".replace(" ", "." if ".wts" in (there, back) else " "): tensor
                   for name, tensor in tensors_of(kinds).items()}  # fmt: skip

        convert(save(tmp_path, tensors), tmp_path / f"a{there}", most_shard_bytes=64)
        convert(tmp_path / f"a{there}", tmp_path / f"b{back}", most_shard_bytes=200)
        with open_weights(tmp_path / f"b{back}") as source:
            found = {}
            for name, info in source.tensors.items():
                buffer = bytearray(info.nbytes)
                source.read_into(name, 0, memoryview(buffer))
                found[name] = (info, bytes(buffer))

        assert {name: data for name, (_, data) in found.items()} == {name: raw(t) for name, t in tensors.items()}
        if ".wts" not in (there, back):
            assert {name: info.shape for name, (info, _) in found.items()} == {
                name: tuple(t.shape) for name, t in tensors.items()
            }

    @settings(max_examples=30, deadline=None)  # each example waits for the disk several times
    @given(st.dictionaries(NAMES, st.integers(0, 1 << 40), max_size=5))
    def test_names_and_values_are_those_that_the_libraries_read(self, values: dict[str, int]) -> None:
        tensors = {name: torch.tensor([value]) for name, value in values.items()}
        with tempfile.TemporaryDirectory() as directory:
            source = save(Path(directory), tensors)
            for suffix, load in LIBRARIES.items():
                convert(source, Path(directory) / f"out{suffix}")
                assert_same(load(Path(directory) / f"out{suffix}"), tensors)

    @pytest.mark.parametrize("suffix", FORMATS)
    def test_equal_tensors_give_equal_files(self, tmp_path: Path, suffix: str) -> None:
        source = save(tmp_path, tensors_of(KINDS[".wts"]))

        convert(source, tmp_path / f"a{suffix}")
        first = {path.name: path.read_bytes() for path in tmp_path.glob("a*")}
        convert(source, tmp_path / f"a{suffix}", overwrite=True)

        assert {path.name: path.read_bytes() for path in tmp_path.glob("a*")} == first

    @pytest.mark.parametrize("suffix", FORMATS)
    def test_a_file_may_replace_its_own_source(self, tmp_path: Path, suffix: str) -> None:
        tensors = tensors_of(KINDS[".wts"])
        path = tmp_path / f"w{suffix}"
        convert(save(tmp_path, tensors), path)

        convert(path, path, overwrite=True)

        with open_weights(path) as source:
            assert source.tensors.keys() == tensors.keys()


class TestShards:
    def test_shards_are_filled_up_to_the_size_given(self, tmp_path: Path) -> None:
        tensors = {"a": torch.rand(5), "b": torch.rand(5), "huge": torch.rand(50), "z": torch.rand(1)}
        index = tmp_path / f"out{INDEX}"

        written = convert(save(tmp_path, tensors), index, most_shard_bytes=40)

        shards = [f"out-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
        assert [(part.path.name, part.tensors, part.nbytes) for part in written] == [
            (shards[0], 2, 40), (shards[1], 1, 200), (shards[2], 1, 4), (index.name, 4, 244),
        ]  # fmt: skip
        assert json.loads(index.read_bytes()) == {
            "metadata": {"total_size": 244},
            "weight_map": {"a": shards[0], "b": shards[0], "huge": shards[1], "z": shards[2]},
        }
        assert_same(load_index(index), tensors)
        assert names_in(tmp_path) == sorted(["in.safetensors", index.name, *shards])

    def test_one_shard_by_default(self, tmp_path: Path) -> None:
        convert(save(tmp_path, {"a": torch.rand(5)}), tmp_path / f"out{INDEX}")

        assert (tmp_path / "out-00001-of-00001.safetensors").exists()

    def test_existing_shards_are_not_overwritten_either(self, tmp_path: Path) -> None:
        (tmp_path / "out-00001-of-00001.safetensors").write_text("mine")

        with pytest.raises(AlreadyExists, match="out-00001-of-00001"):
            convert(save(tmp_path, {"a": torch.rand(5)}), tmp_path / f"out{INDEX}")

        assert (tmp_path / "out-00001-of-00001.safetensors").read_text() == "mine"


class TestRefusals:
    def test_dtypes_that_a_format_lacks_are_all_named(self, tmp_path: Path) -> None:
        tensors = {"w": torch.ones(2), "b": torch.ones(2).bfloat16(), "n": torch.tensor(1)}

        with pytest.raises(WeightsRefused) as refused:
            convert(save(tmp_path, tensors), tmp_path / "out.wts")

        assert refused.value.subject == f"{tmp_path}/out.wts cannot be written"
        assert sorted(map(str, refused.value.faults)) == [
            "'b': is BF16, but such a file holds F32 and F16 only; safetensors files hold every dtype",
            "'n': is I64, but such a file holds F32 and F16 only; safetensors files hold every dtype",
        ]
        assert names_in(tmp_path) == ["in.safetensors"]

    def test_numpy_has_no_bfloat16(self, tmp_path: Path) -> None:
        with pytest.raises(WeightsRefused, match="'b': is BF16, but such a file holds numpy's dtypes only"):
            convert(save(tmp_path, {"b": torch.ones(2).bfloat16()}), tmp_path / "out.npz")

    @pytest.mark.parametrize(
        ("name", "suffix", "reason"),
        [
            ("two words", ".wts", "white space ends a name there"),
            ("nul\0inside", ".wts", "and a NUL the file"),
            ("", ".wts", "white space ends a name there"),
            ("nul\0inside", ".npz", "a NUL ends a name there"),
            ("x" * 70_000, ".npz", "its name is too long for a zip archive"),
        ],
    )
    def test_names_that_a_format_cannot_have(self, tmp_path: Path, name: str, suffix: str, reason: str) -> None:
        with pytest.raises(WeightsRefused, match=reason):
            convert(save(tmp_path, {name: torch.ones(2)}), tmp_path / f"out{suffix}")

    def test_wts_has_no_form_of_empty_float16_alone(self, tmp_path: Path) -> None:
        """``x 1 0`` alone is one value of float32, 0; another tensor tells."""
        empty, target = {"x": torch.empty(0, 3).half(), "y": torch.empty(0).half()}, tmp_path / "out.wts"

        with pytest.raises(InvalidArgument, match="would read as F32 of one each"):
            convert(save(tmp_path, empty), target)

        assert names_in(tmp_path) == ["in.safetensors"]
        convert(save(tmp_path, {**empty, "z": torch.empty(0)}), target)
        with open_weights(target) as source:
            assert {name: (info.dtype, info.nbytes) for name, info in source.tensors.items()} == {
                "x": ("F16", 0),
                "y": ("F16", 0),
                "z": ("F32", 0),
            }

    @pytest.mark.parametrize("overwrite", [False, True])
    @pytest.mark.parametrize("name", ["out.npz", f"out{INDEX}", "out-00001-of-00001.safetensors"])
    def test_a_directory_in_the_place_of_a_file_is_found_before_anything_is_written(
        self, tmp_path: Path, name: str, overwrite: bool
    ) -> None:
        source = save(tmp_path, {"w": torch.ones(1)})
        (tmp_path / name).mkdir()

        with pytest.raises(InvalidArgument, match=re.escape(f"{tmp_path / name} is a directory")):
            convert(source, tmp_path / (name if name.endswith(".npz") else f"out{INDEX}"), overwrite=overwrite)

        assert names_in(tmp_path) == ["in.safetensors", name]

    def test_no_more_shards_than_are_read(self, tmp_path: Path) -> None:
        tensors = {str(number): torch.ones(1) for number in range(1025)}

        with pytest.raises(InvalidArgument, match="would have 1025 shards, more than 1024: allow larger ones"):
            convert(save(tmp_path, tensors), tmp_path / f"out{INDEX}", most_shard_bytes=4)

    @pytest.mark.parametrize("suffix", [".safetensors", INDEX])
    def test_no_longer_header_than_is_read(self, tmp_path: Path, suffix: str) -> None:
        torch.save({f"{number}{'x' * 50_000}": torch.ones(1) for number in range(340)}, tmp_path / "in.pt")

        with pytest.raises(
            InvalidArgument, match=r"its header cannot be written: it has 170\d+ bytes, of 16777216 at most"
        ):
            convert(tmp_path / "in.pt", tmp_path / f"out{suffix}")

        assert names_in(tmp_path) == ["in.pt"]

    @pytest.mark.parametrize("shape", [[2, 3], [3, 2, 1]])
    def test_torch_has_pairs_of_float4_only(self, tmp_path: Path, shape: list[int]) -> None:
        (tmp_path / "in.safetensors").write_bytes(raw_safetensors({"w": entry(shape, 0, 3, "F4")}, bytes(3)))

        with pytest.raises(WeightsRefused, match="its last dimension is no even number"):
            convert(tmp_path / "in.safetensors", tmp_path / "out.pt")

    def test_torch_has_no_float6(self, tmp_path: Path) -> None:
        (tmp_path / "in.safetensors").write_bytes(raw_safetensors({"w": entry([4], 0, 3, "F6_E2M3")}, bytes(3)))

        with pytest.raises(WeightsRefused, match="'w': is F6_E2M3, but such a file holds torch's dtypes only"):
            convert(tmp_path / "in.safetensors", tmp_path / "out.pt")

    def test_the_name_of_safetensors_metadata(self, tmp_path: Path) -> None:
        torch.save({"__metadata__": torch.ones(1)}, tmp_path / "in.pt")

        with pytest.raises(WeightsRefused, match="'__metadata__': its name stands for the file's metadata there"):
            convert(tmp_path / "in.pt", tmp_path / "out.safetensors")

    def test_unknown_suffixes(self, tmp_path: Path) -> None:
        with pytest.raises(
            InvalidArgument, match=r"known suffixes are \.safetensors, \.safetensors\.index\.json, \.wts"
        ):
            convert(save(tmp_path, {"w": torch.ones(1)}), tmp_path / "out.gguf")

    def test_an_existing_file_stays_unless_it_is_to_be_overwritten(self, tmp_path: Path) -> None:
        source, target = save(tmp_path, {"w": torch.ones(1)}), tmp_path / "out.pt"
        target.write_text("mine")

        with pytest.raises(AlreadyExists, match=re.escape(f"{target} exists already")):
            convert(source, target)
        assert target.read_text() == "mine"

        convert(source, target, overwrite=True)
        assert_same(load_torch(target), {"w": torch.ones(1)})

    def test_a_source_that_changes_meanwhile_replaces_nothing(self, tmp_path: Path) -> None:
        source, target = save(tmp_path, {"w": torch.ones(1)}), tmp_path / "out.npz"
        target.write_text("mine")
        with open_weights(source) as weights:
            source.write_bytes(source.read_bytes() + b" ")
            with pytest.raises(WeightsRefused, match="it was written to"):
                write_weights(weights, target, overwrite=True)

        assert target.read_text() == "mine"
        assert names_in(tmp_path) == ["in.safetensors", "out.npz"]

    def test_a_directory_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(StorageFailed, match=r"cannot write .*/gone/out\.pt .*: No such file or directory"):
            convert(save(tmp_path, {"w": torch.ones(1)}), tmp_path / "gone" / "out.pt")


KILLED = """
import os, pathlib, sys
from rebind.weights.formats import open_weights
from rebind.weights.writing import write_weights

renames = int(sys.argv[3])

def replace(old, new, replace=pathlib.Path.replace):
    global renames
    renames -= 1
    if renames < 0:
        os.kill(os.getpid(), 9)
    return replace(old, new)

pathlib.Path.replace = replace
with open_weights(pathlib.Path(sys.argv[1])) as source:
    write_weights(source, pathlib.Path(sys.argv[2]), overwrite=True, most_shard_bytes=40)
"""


class TestKilled:
    @pytest.mark.parametrize("renames", [0, 1, 2])
    def test_no_index_names_shards_of_different_makes(self, tmp_path: Path, renames: int) -> None:
        index = tmp_path / f"out{INDEX}"
        old, new = ({"a": torch.full((10,), value), "b": torch.full((10,), value)} for value in (1.0, 2.0))
        convert(save(tmp_path, old), index, most_shard_bytes=40)
        source = save(tmp_path, new, "new.safetensors")

        ended = subprocess.run([sys.executable, "-c", KILLED, source, index, str(renames)], check=False)

        assert ended.returncode == -9
        assert not index.exists() or load_index(index)["a"][0] == load_index(index)["b"][0]
        convert(source, index, overwrite=True, most_shard_bytes=40)
        assert_same(load_index(index), new)
        shards = [f"out-0000{n}-of-00002.safetensors" for n in (1, 2)]
        assert names_in(tmp_path) == sorted(["in.safetensors", source.name, index.name, *shards]), (
            "what it left is gone"
        )

    def test_two_that_write_the_same_file_do_not_meet(self, tmp_path: Path) -> None:
        source, target = save(tmp_path, {"w": torch.ones(4)}), tmp_path / "out.npz"

        def write_again(_done: int, _total: int) -> None:
            with pytest.raises(StorageFailed, match=re.escape(f"another process is writing {target}")):
                convert(source, target)

        convert(source, target, report=write_again)

        assert_same(load_npz(target), {"w": torch.ones(4)})
        assert names_in(tmp_path) == ["in.safetensors", "out.npz"]


@pytest.mark.parametrize("suffix", FORMATS)
def test_memory_does_not_grow_with_the_file(tmp_path: Path, suffix: str) -> None:
    nbytes = (16 if suffix == ".wts" else 64) << 20
    header = {"w": entry([nbytes // 4], 0, nbytes)}
    with (tmp_path / "in.safetensors").open("wb") as file:  # sparse
        file.write(raw_safetensors(header))
        file.truncate(file.tell() + nbytes)
    seen: list[tuple[int, int]] = []
    with open_weights(tmp_path / "in.safetensors") as source:
        tracemalloc.start()
        try:
            write_weights(source, tmp_path / f"out{suffix}", report=lambda done, total: seen.append((done, total)))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert peak < 12 << 20
    assert seen == [(done << 20, nbytes) for done in range(1, (nbytes >> 20) + 1)]
