"""``convert``, ``inspect``, ``diff`` and ``publish`` on weights files of every format, and on model files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rebind.cli.convert import parse_size
from rebind.weights.formats import open_weights
from rebind.weights.writing import FORMATS, write_weights
from tests.engines.models import PACKAGE_OPTIONS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Cli

INDEX = ".safetensors.index.json"


class Net(torch.nn.Module):
    """A network with all that is no plain weight: tied weights, a counter that is not used, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4, bias=False)
        self.again = torch.nn.Linear(4, 4, bias=False)
        self.again.weight = self.layer.weight
        self.norm = torch.nn.BatchNorm1d(4)
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 0.0]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.again(self.norm(self.layer(x))) * self.mask
        return result


NAMES = ["layer.weight", *(f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var"))]
COUNTER = "norm.num_batches_tracked"
NAMES_IN = {"archive": {*NAMES, COUNTER}, "script": {*NAMES, COUNTER, "mask"}}
"""Of the model files; TorchScript keeps no record of which buffers state dicts leave out."""


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def weights(net: Net) -> dict[str, torch.Tensor]:
    """What a weights file for the network has."""
    return {name: net.state_dict()[name] for name in [*NAMES, COUNTER]}


@pytest.fixture(scope="module")
def archive(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "net.pt2"
    torch.export.save(torch.export.export(net, (torch.rand(2, 4),)), path)
    return path


@pytest.fixture(scope="module")
def script(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripted") / "net.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # users go on writing these files
        traced: Any = torch.jit.trace(net, torch.rand(2, 4))  # type: ignore[no-untyped-call]
        torch.jit.save(traced, path)
    return path


@pytest.fixture
def source(weights: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    save_file(weights, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


@pytest.fixture
def floats(weights: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    """A file that every format can hold."""
    save_file({name: weights[name] for name in NAMES}, tmp_path / "floats.safetensors")
    return tmp_path / "floats.safetensors"


@pytest.fixture
def model_dir(archive: Path, tmp_path: Path) -> Path:
    version = tmp_path / "models" / "net" / "1"
    version.mkdir(parents=True)
    (version / "model.pt2").write_bytes(archive.read_bytes())
    return version.parent


def write(source: Path, target: Path) -> Path:
    with open_weights(source) as opened:
        write_weights(opened, target)
    return target


class TestConvert:
    def test_it_says_what_it_wrote(self, source: Path, weights: dict[str, torch.Tensor], cli: Cli) -> None:
        target = source.with_name("out.pt")

        assert cli("convert", source, target) == (0, f"{target}: 6 tensors, 136 B\n", "")

        found = torch.load(target, weights_only=True)
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)

    def test_shards_of_a_size(self, source: Path, cli: Cli) -> None:
        code, out, _ = cli("convert", source, source.with_name(f"out{INDEX}"), "--max-shard-size", "72")

        assert code == 0
        lines = [line.removeprefix(f"{source.parent}/") for line in out.splitlines()]
        assert [line.partition(":")[0] for line in lines] == [
            "out-00001-of-00002.safetensors",
            "out-00002-of-00002.safetensors",
            f"out{INDEX}",
        ]
        assert lines[-1] == f"out{INDEX}: 6 tensors, 136 B"

    @pytest.mark.parametrize("kind", ["archive", "script"])
    def test_weights_of_a_model_file(
        self, request: pytest.FixtureRequest, kind: str, net: Net, cli: Cli, tmp_path: Path
    ) -> None:
        code, _, err = cli("convert", request.getfixturevalue(kind), tmp_path / "out.safetensors")

        assert (code, err) == (0, "")
        found = load_file(tmp_path / "out.safetensors")
        assert found.keys() == NAMES_IN[kind], "tied tensors once"
        expected = {**net.state_dict(), "mask": net.mask}
        assert all(torch.equal(found[name], expected[name]) for name in found)

    def test_a_model_file_without_weights(self, archive: Path, cli: Cli, tmp_path: Path) -> None:
        assert cli("split", archive, "-o", tmp_path / "apart")[0] == 0

        code, _, err = cli("convert", tmp_path / "apart" / "model.pt2", tmp_path / "out.npz")

        assert code == 1
        assert err == f"error: {tmp_path}/apart/model.pt2: has no weights inside; name its weights file instead\n"

    def test_what_is_there_is_kept_without_force(self, source: Path, cli: Cli) -> None:
        target = source.with_name("out.npz")
        target.write_text("mine")

        assert cli("convert", source, target) == (1, "", f"error: {target} exists already; --force replaces it\n")
        assert target.read_text() == "mine"

        assert cli("convert", source, target, "--force")[0] == 0
        with np.load(target) as arrays:
            assert len(arrays) == 6

    def test_sigterm_leaves_nothing_behind(self, tmp_path: Path) -> None:
        source, target = tmp_path / "in.safetensors", tmp_path / "out.wts"
        header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 30], "data_offsets": [0, 4 << 30]}}).encode()
        with source.open("wb") as file:  # sparse
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + (4 << 30))
        process = subprocess.Popen([sys.executable, "-m", "rebind.cli", "convert", source, target])
        aside = tmp_path / ".out.wts.aside" / "out.wts"
        try:
            while not (aside.exists() and aside.stat().st_size):
                assert process.poll() is None
                time.sleep(0.01)
            process.terminate()
            assert process.wait(20) == 128 + signal.SIGTERM
        finally:
            process.kill()
        assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]

    def test_what_the_format_cannot_hold_is_named(self, source: Path, cli: Cli) -> None:
        code, _, err = cli("convert", source, source.with_name("out.wts"))

        assert code == 1
        assert f"'{COUNTER}': is I64, but such a file holds F32 and F16 only" in err

    def test_flat_tensors_are_told_of(self, floats: Path, cli: Cli) -> None:
        text = write(floats, floats.with_suffix(".wts"))

        code, _, err = cli("convert", text, text.with_name("flat.safetensors"))

        assert code == 0
        assert err == f"warning: {text} has no shapes: all tensors are written with one dimension\n"
        assert load_file(text.with_name("flat.safetensors"))["layer.weight"].shape == (16,)
        assert cli("convert", text, text.with_name("again.wts"))[2] == ""

    def test_files_of_no_known_kind(self, source: Path, cli: Cli, tmp_path: Path) -> None:
        foreign = source.rename(tmp_path / "model.gguf")

        code, _, err = cli("convert", foreign, tmp_path / "out.npz")

        assert code == 1
        assert err.startswith(f"error: {foreign} is no weights file, which end with .safetensors, ")
        assert "known model files end with .pt" in err

    @pytest.mark.parametrize("suffix", FORMATS)
    def test_a_file_that_is_not_there(self, cli: Cli, tmp_path: Path, suffix: str) -> None:
        code, _, err = cli("convert", tmp_path / f"in{suffix}", tmp_path / "out.npz")

        assert code == 1
        assert err == f"error: {tmp_path}/in{suffix}: cannot be opened: No such file or directory\n"

    def test_a_size_of_shards_where_there_are_none(self, source: Path, cli: Cli) -> None:
        code, _, err = cli("convert", source, source.with_name("out.npz"), "--max-shard-size=5GB")

        assert code == 2
        assert "--max-shard-size is for targets that end with .safetensors.index.json" in err

    @pytest.mark.parametrize(
        ("text", "nbytes"),
        [("5GB", 5_000_000_000), ("5 GiB".replace(" ", ""), 5 << 30), ("300mb", 300_000_000), ("2K", 2000), ("7", 7)],
    )
    def test_sizes(self, text: str, nbytes: int) -> None:
        assert parse_size(text) == nbytes

    @pytest.mark.parametrize("text", ["", "0", "-1", "1.5GB", "5 GB", "5TB", "GB", "٣"])
    def test_what_is_no_size(self, source: Path, cli: Cli, text: str) -> None:
        code, _, err = cli("convert", source, source.with_name(f"out{INDEX}"), f"--max-shard-size={text}")

        assert code == 2
        assert "is no size such as 5GB" in err


class TestInspectFile:
    @pytest.mark.parametrize("suffix", [suffix for suffix in FORMATS if suffix != ".wts"])
    def test_a_table_of_tensors_whatever_the_format(
        self, source: Path, weights: dict[str, torch.Tensor], cli: Cli, suffix: str
    ) -> None:
        path = write(source, source.with_name(f"other{suffix}"))

        code, out, _ = cli("inspect", path, "--json")

        assert code == 0
        found = json.loads(out)
        assert (found["file"], found["bytes"]) == (str(path), 136)
        assert {tensor.pop("name"): tensor for tensor in found["tensors"]} == {
            name: {
                "dtype": "I64" if name == COUNTER else "F32",
                "shape": list(tensor.shape),
                "bytes": tensor.nbytes,
            }
            for name, tensor in weights.items()
        }

    def test_flat_tensors_have_no_shape(self, floats: Path, cli: Cli) -> None:
        path = write(floats, floats.with_suffix(".wts"))

        tensors = json.loads(cli("inspect", path, "--json")[1])["tensors"]

        assert {"name": "layer.weight", "dtype": "F32", "shape": None, "bytes": 64} in tensors

    @pytest.mark.parametrize("kind", ["archive", "script"])
    def test_a_model_file(self, request: pytest.FixtureRequest, kind: str, cli: Cli) -> None:
        path = request.getfixturevalue(kind)

        code, out, _ = cli("inspect", path, "--json")

        assert code == 0
        assert {tensor["name"] for tensor in json.loads(out)["tensors"]} == NAMES_IN[kind]

    def test_for_people(self, tmp_path: Path, cli: Cli) -> None:
        path = tmp_path / "[b]old.safetensors"
        save_file({"a\x1b[31mred": torch.ones(2, 3), "[b]": torch.ones(1)}, path)

        code, out, _ = cli("inspect", path)

        assert code == 0
        lines = [line.rstrip() for line in out.splitlines()]
        assert lines[0] == f"{path}: 2 tensors, 28 B"
        assert {tuple(line.split()) for line in lines[-2:]} == {
            (r"a\x1b[31mred", "F32", "[2,3]", "24", "B"),
            ("[b]", "F32", "[1]", "4", "B"),
        }

    def test_a_damaged_file(self, source: Path, cli: Cli) -> None:
        source.write_bytes(source.read_bytes()[:-1])

        code, out, err = cli("inspect", source)

        assert (code, out) == (1, "")
        assert err.startswith(f"error: {source}: truncated")


class Buffers(torch.nn.Module):
    """A weight, and buffers that a compiled package does not call weights; ``persistent`` or not, it does not tell."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 4)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.full((4,), factor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x) * self.scale + torch.tensor([0.5, 1.5, 2.5, 3.5])
        return result


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packages") / "buffers.pt2"
    exported = torch.export.export(Buffers().eval(), (torch.rand(2, 4),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about itself
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=PACKAGE_OPTIONS)
    return path


class TestBuffers:
    """Buffers are weights also where a model file does not say so."""

    def test_weights_of_a_package_are_its_state_dict(self, package: Path, cli: Cli, tmp_path: Path) -> None:
        save_file(Buffers().state_dict(), tmp_path / "same.safetensors")
        save_file(Buffers(3.0).state_dict(), tmp_path / "other.safetensors")

        assert cli("diff", package, tmp_path / "same.safetensors")[0] == 0
        code, out, _ = cli("diff", package, tmp_path / "other.safetensors")

        assert code == 1
        assert out.splitlines() == [
            "~ 'scale': 4 of 4 values differ, by at most 1 (relative 0.333)",
            "0 added, 0 removed, 0 of another dtype or shape, 1 with other values, 2 equal",
        ]

    def test_state_of_a_script_is_written(self, cli: Cli, tmp_path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.save(torch.jit.script(Counts()), tmp_path / "counts.pt")

        assert cli("convert", tmp_path / "counts.pt", tmp_path / "out.safetensors")[0] == 0
        assert load_file(tmp_path / "out.safetensors").keys() == {"count", "weight"}


class Counts(torch.nn.Module):
    """Writes to a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.weight + self.count


class TestDiff:
    @pytest.mark.parametrize("a", FORMATS)
    @pytest.mark.parametrize("b", FORMATS)
    def test_equal_tensors_in_any_two_formats_are_equal(self, floats: Path, cli: Cli, a: str, b: str) -> None:
        old, new = write(floats, floats.with_name(f"a{a}")), write(floats, floats.with_name(f"b{b}"))

        assert cli("diff", old, new) == (
            0,
            "0 added, 0 removed, 0 of another dtype or shape, 0 with other values, 5 equal\n",
            "",
        )

    def test_flat_tensors_are_compared_by_their_elements(self, cli: Cli, tmp_path: Path) -> None:
        save_file({"w": torch.ones(2, 2), "size": torch.ones(3)}, tmp_path / "a.safetensors")
        (tmp_path / "b.wts").write_text("2\nw 0 4 3f800000 3f800000 40000000 3f800000\nsize 0 2 3f800000 3f800000\n")

        code, out, _ = cli("diff", tmp_path / "a.safetensors", tmp_path / "b.wts")

        assert code == 1
        assert out.splitlines() == [
            "! 'size': F32 [3] -> 2 elements of F32",
            "~ 'w': 1 of 4 values differ, by at most 1 (relative 0.5)",
            "0 added, 0 removed, 1 of another dtype or shape, 1 with other values, 0 equal",
        ]

    def test_a_model_file_against_its_weights_file(self, archive: Path, source: Path, cli: Cli) -> None:
        code, out, _ = cli("diff", archive, source)

        assert code == 0
        assert out.startswith("0 added, 0 removed,")

    def test_other_trouble_is_told_apart(self, source: Path, cli: Cli, tmp_path: Path) -> None:
        assert cli("diff", source, tmp_path / "gone.gguf")[0] == 2


class TestPublish:
    @pytest.mark.parametrize("suffix", [suffix for suffix in FORMATS if suffix != ".pt"])
    def test_weights_of_every_format(
        self, model_dir: Path, floats: Path, cli: Cli, tmp_path: Path, suffix: str
    ) -> None:
        target = model_dir / "1" / f"model{suffix}"

        assert cli("publish", write(floats, floats.with_name(f"new{suffix}")), model_dir) == (0, f"{target}\n", "")
        code, out, _ = cli("inspect", model_dir, "--plan-cache-dir", tmp_path)

        assert code == 0
        assert f"weights     {target}" in out
        assert out.splitlines()[-1] == "The weights fit."

    def test_a_state_dict_where_the_configuration_names_it(self, model_dir: Path, floats: Path, cli: Cli) -> None:
        config = 'parameters { key: "WEIGHTS_FILENAME" value { string_value: "weights.pt" } }'
        (model_dir / "config.pbtxt").write_text(config)

        code, out, _ = cli("publish", write(floats, floats.with_name("new.pt")), model_dir)

        assert (code, out) == (0, f"{model_dir}/1/weights.pt\n")

    def test_flat_tensors_of_another_size_do_not_fit(self, model_dir: Path, cli: Cli, tmp_path: Path) -> None:
        (tmp_path / "new.wts").write_text("1\nlayer.weight 3 3f800000 3f800000 3f800000\n")

        code, _, err = cli("publish", tmp_path / "new.wts", model_dir)

        assert code == 1
        assert "'layer.weight': expected F32 [4,4], got 3 elements of F32" in err


class TestNames:
    """Names behind a wrapper's prefix fit for these commands as they do for a server."""

    @pytest.fixture
    def wrapped(self, weights: dict[str, torch.Tensor], tmp_path: Path) -> Path:
        save_file({f"module._orig_mod.{name}": tensor for name, tensor in weights.items()}, tmp_path / "w.safetensors")
        return tmp_path / "w.safetensors"

    def test_publish_and_inspect_know_prefixes(self, model_dir: Path, wrapped: Path, cli: Cli, tmp_path: Path) -> None:
        target = model_dir / "1" / "model.safetensors"

        assert cli("publish", wrapped, model_dir) == (0, f"{target}\n", "")
        assert target.read_bytes() == wrapped.read_bytes()
        assert cli("inspect", model_dir, "--plan-cache-dir", tmp_path)[1].splitlines()[-1] == "The weights fit."

    def test_publish_tells_of_names_that_do_not_fit_behind_the_prefix(
        self, model_dir: Path, weights: dict[str, torch.Tensor], cli: Cli, tmp_path: Path
    ) -> None:
        tensors = {f"module.{name}": tensor for name, tensor in weights.items()}
        tensors["module.norm.bais"] = tensors.pop("module.norm.bias")
        save_file(tensors, tmp_path / "w.safetensors")

        code, _, err = cli("publish", tmp_path / "w.safetensors", model_dir)

        assert code == 1
        assert err.startswith(f"error: {tmp_path}/w.safetensors (names without 'module.'): 2 faults: ")
        assert "'norm.bais': unexpected: the model has no such slot; did you mean 'norm.bias'?" in err


class TestSplit:
    def test_a_torchscript_file(self, script: Path, cli: Cli, tmp_path: Path) -> None:
        code, out, _ = cli("split", script, "-o", tmp_path / "apart")

        assert code == 0
        assert out.splitlines() == [f"{tmp_path}/apart/model.pt", f"{tmp_path}/apart/model.safetensors"]
        assert load_file(tmp_path / "apart" / "model.safetensors").keys() == NAMES_IN["script"]
        assert cli("diff", script, tmp_path / "apart" / "model.safetensors")[0] == 0
        whole, apart = script.stat().st_size, (tmp_path / "apart" / "model.pt").stat().st_size
        assert apart < whole
