"""``inspect``, ``publish`` and ``split`` on a real exported model."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rebind.demo.digits import DigitsNet, export
from rebind.engines.aot_inductor import ENGINE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Cli


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[DigitsNet, Path]:
    torch.manual_seed(0)
    net = DigitsNet()
    path = tmp_path_factory.mktemp("exported") / "model.pt2"
    export(net, path)
    return net, path


@pytest.fixture
def net(exported: tuple[DigitsNet, Path]) -> DigitsNet:
    return exported[0]


@pytest.fixture
def model_dir(exported: tuple[DigitsNet, Path], tmp_path: Path) -> Path:
    """A model directory with one version, whose weights are inside the model file."""
    version = tmp_path / "models" / "digits" / "1"
    version.mkdir(parents=True)
    shutil.copy(exported[1], version)
    return version.parent


@pytest.fixture
def inspect(cli: Cli, tmp_path: Path) -> Any:
    """``rebind inspect --json``: (exit code, document)."""

    def run(*arguments: object) -> tuple[int, dict[str, Any]]:
        code, out, err = cli("inspect", "--json", "--plan-cache-dir", tmp_path / "plans", *arguments)
        assert err == ""
        return code, json.loads(out)

    return run


def test_inspect_tells_slots_inputs_and_outputs(model_dir: Path, net: DigitsNet, inspect: Any) -> None:
    code, found = inspect(model_dir)

    assert code == 0
    assert (found["model"], found["version"], found["engine"]) == ("digits", 1, "aot_inductor")
    assert found["max_batch_size"] == 4
    assert found["inputs"] == [{"name": "INPUT__0", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]
    assert found["outputs"] == [{"name": "OUTPUT__0", "datatype": "FP32", "shape": [-1, 10]}]
    assert found["batch"] == {"minimum": 1, "maximum": 64}
    slots = {slot["name"]: slot for slot in found["slots"]}
    assert {name: slot["shape"] for name, slot in slots.items()} == {
        name: list(tensor.shape) for name, tensor in net.state_dict().items()
    }
    assert slots["classifier.weight"] == {
        "name": "classifier.weight",
        "dtype": "F32",
        "shape": [10, 256],
        "required": True,
        "used": True,
        "tied_to": None,
        "bytes": 10240,
    }
    assert not slots["features.1.num_batches_tracked"]["used"]
    assert found["bytes"] == sum(slot["bytes"] for slot in slots.values() if slot["used"])


def test_inspect_shows_names_and_shapes_as_configured(model_dir: Path, inspect: Any) -> None:
    (model_dir / "config.pbtxt").write_text(
        'input { name: "image" data_type: TYPE_FP32 dims: [ 2, 1, 8, 8 ] } output { name: "logits" }'
    )
    _, found = inspect(model_dir)

    assert found["max_batch_size"] == 0
    assert found["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [2, 1, 8, 8]}]
    assert found["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, 10]}]


def test_inspect_takes_the_weights_inside_the_model_file_when_there_are_no_others(
    model_dir: Path, inspect: Any
) -> None:
    _, found = inspect(model_dir)

    assert found["weights_file"] == found["plan_file"] == str(model_dir / "1" / "model.pt2")
    assert found["faults"] == []
    assert not found["plan_cached"]


def test_inspect_lists_everything_that_does_not_fit(model_dir: Path, net: DigitsNet, inspect: Any) -> None:
    weights = net.state_dict()
    weights["classifier.wieght"] = weights.pop("classifier.weight")
    weights["classifier.bias"] = torch.zeros(11)
    save_file(weights, model_dir / "1" / "model.safetensors")

    code, found = inspect(model_dir)

    assert code == 1
    assert found["weights_file"] == str(model_dir / "1" / "model.safetensors")
    problems = {fault["where"].strip("'"): fault["problem"] for fault in found["faults"]}
    assert problems.keys() == {"classifier.wieght", "classifier.weight", "classifier.bias"}
    assert problems["classifier.bias"] == "expected shape [10], got [11]"


def test_inspect_names_tensors_with_values_that_a_server_refuses(model_dir: Path, net: DigitsNet, inspect: Any) -> None:
    weights = net.state_dict()
    weights["classifier.bias"] = torch.tensor([1.0, float("nan"), float("inf"), *[0.0] * 7])
    save_file(weights, model_dir / "1" / "model.safetensors")

    code, found = inspect(model_dir)

    assert code == 1
    (fault,) = found["faults"]
    assert (fault["where"], fault["problem"]) == ("'classifier.bias'", "2 of its values are NaN or infinite")

    (model_dir / "config.pbtxt").write_text(
        'parameters { key: "ALLOW_NON_FINITE_WEIGHTS" value { string_value: "true" } }'
    )
    code, found = inspect(model_dir)
    assert (code, found["faults"]) == (0, [])


def test_inspect_for_people_has_the_verdict_last(model_dir: Path, net: DigitsNet, cli: Cli, tmp_path: Path) -> None:
    code, out, _ = cli("inspect", model_dir, "--plan-cache-dir", tmp_path)
    assert code == 0
    assert out.splitlines()[-1] == "The weights fit."
    assert "batches     up to 4 (max_batch_size); the model takes 1 to 64" in out
    assert "input       INPUT__0 FP32 [-1,1,8,8]" in out
    assert "num_batches_tracked" in out

    save_file({"classifier.bias": torch.zeros(10)}, model_dir / "1" / "model.safetensors")
    code, out, _ = cli("inspect", model_dir, "--plan-cache-dir", tmp_path)
    assert code == 1
    assert "The weights do not fit" in out
    assert "'classifier.weight': missing, expected F32 [10,256]" in out


def test_inspect_of_the_highest_version_or_of_the_one_asked_for(
    model_dir: Path, net: DigitsNet, cli: Cli, inspect: Any, tmp_path: Path
) -> None:
    save_file(net.state_dict(), tmp_path / "new.safetensors")
    assert cli("publish", tmp_path / "new.safetensors", model_dir, "--version", "new", "--label", "fine")[0] == 0

    _, newest = inspect(model_dir)
    _, first = inspect(model_dir, "--version", "1")

    assert (newest["version"], newest["label"]) == (2, "fine")
    assert newest["plan_file"] == first["plan_file"] == str(model_dir / "1" / "model.pt2")
    assert newest["plan_key"] == first["plan_key"]
    assert (first["version"], first["label"]) == (1, "")


def test_inspect_of_an_empty_directory_says_what_is_missing(cli: Cli, tmp_path: Path) -> None:
    assert cli("inspect", tmp_path) == (
        1,
        "",
        f"error: {tmp_path} has no version directories; the first is called 1\n",
    )


def test_publish_replaces_the_weights_of_a_version(model_dir: Path, net: DigitsNet, cli: Cli, tmp_path: Path) -> None:
    save_file(net.state_dict(), tmp_path / "new.safetensors")

    code, out, _ = cli("publish", tmp_path / "new.safetensors", model_dir, "--version", "1")

    assert (code, out) == (0, f"{model_dir}/1/model.safetensors\n")
    assert (model_dir / "1" / "model.safetensors").read_bytes() == (tmp_path / "new.safetensors").read_bytes()


def test_publish_replaces_the_weights_of_the_highest_version_or_adds_a_new_one(
    model_dir: Path, net: DigitsNet, cli: Cli, tmp_path: Path
) -> None:
    save_file(net.state_dict(), tmp_path / "new.safetensors")

    assert cli("publish", tmp_path / "new.safetensors", model_dir)[1] == f"{model_dir}/1/model.safetensors\n"
    assert cli("publish", tmp_path / "new.safetensors", model_dir, "--version=new")[1].startswith(f"{model_dir}/2/")
    assert cli("publish", tmp_path / "new.safetensors", model_dir)[1] == f"{model_dir}/2/model.safetensors\n"


def test_publish_refuses_a_damaged_file_before_it_replaces_anything(
    model_dir: Path, net: DigitsNet, cli: Cli, tmp_path: Path
) -> None:
    save_file(net.state_dict(), tmp_path / "new.safetensors")
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes((tmp_path / "new.safetensors").read_bytes()[:-1])

    code, _, err = cli("publish", damaged, model_dir)

    assert code == 1
    assert str(damaged) in err
    assert not (model_dir / "1" / "model.safetensors").exists()


@pytest.mark.parametrize("version", ["1", "new"])
def test_publish_refuses_weights_that_do_not_fit_before_it_replaces_anything(
    model_dir: Path, net: DigitsNet, cli: Cli, tmp_path: Path, version: str
) -> None:
    good = model_dir / "1" / "model.safetensors"
    save_file(net.state_dict(), good)
    before = good.read_bytes()
    weights = net.state_dict()
    weights["classifier.wieght"] = weights.pop("classifier.weight")
    weights["classifier.bias"] = torch.zeros(11)
    save_file(weights, tmp_path / "wrong.safetensors")

    code, out, err = cli("publish", tmp_path / "wrong.safetensors", model_dir, f"--version={version}")

    assert (code, out) == (1, "")
    assert err.startswith(f"error: {tmp_path}/wrong.safetensors: 3 faults: ")
    assert "'classifier.bias': expected shape [10], got [11]" in err
    assert "'classifier.weight': missing" in err
    assert "'classifier.wieght': unexpected" in err
    assert good.read_bytes() == before
    assert [path.name for path in model_dir.iterdir()] == ["1"]


def test_publish_refuses_nan_unless_the_model_takes_it(
    model_dir: Path, net: DigitsNet, cli: Cli, tmp_path: Path
) -> None:
    weights = net.state_dict()
    weights["classifier.bias"] = torch.full((10,), torch.nan)
    save_file(weights, tmp_path / "nan.safetensors")

    code, _, err = cli("publish", tmp_path / "nan.safetensors", model_dir)

    assert code == 1
    assert "'classifier.bias': 10 of its values are NaN or infinite" in err
    assert not (model_dir / "1" / "model.safetensors").exists()
    parameter = 'parameters { key: "ALLOW_NON_FINITE_WEIGHTS" value { string_value: "true" } }'
    (model_dir / "config.pbtxt").write_text(parameter)
    assert cli("publish", tmp_path / "nan.safetensors", model_dir)[0] == 0


class Masked(torch.nn.Module):
    """A layer with a constant, which state dicts leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 0.0]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.layer(x) * self.mask)


def test_publish_takes_weights_without_the_constants_that_the_model_file_has(cli: Cli, tmp_path: Path) -> None:
    net = Masked().eval()
    version = tmp_path / "masked" / "1"
    version.mkdir(parents=True)
    torch.export.save(torch.export.export(net, (torch.ones(2, 4),)), version / "model.pt2")
    save_file(net.state_dict(), tmp_path / "new.safetensors")

    code, out, err = cli("publish", tmp_path / "new.safetensors", version.parent)

    assert (code, out, err) == (0, f"{version}/model.safetensors\n", "")


def test_publish_without_the_engine_says_that_nothing_was_checked(
    model_dir: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "new.safetensors")
    monkeypatch.setattr(ENGINE, "unavailable_reason", lambda: "torch is not installed")

    code, out, err = cli("publish", tmp_path / "new.safetensors", model_dir)

    assert (code, out) == (0, f"{model_dir}/1/model.safetensors\n")
    assert err == (
        "warning: not checked whether the weights fit: engine 'aot_inductor', which serves model.pt2, cannot run here:"
        " torch is not installed\n"
    )


def test_publish_names_the_file_as_the_configuration_says(
    model_dir: Path, net: DigitsNet, cli: Cli, tmp_path: Path
) -> None:
    config = 'parameters { key: "WEIGHTS_FILENAME" value { string_value: "policy.safetensors" } }'
    (model_dir / "config.pbtxt").write_text(config)
    save_file(net.state_dict(), tmp_path / "new.safetensors")

    code, out, _ = cli("publish", tmp_path / "new.safetensors", model_dir, "--version=1")

    assert (code, out) == (0, f"{model_dir}/1/policy.safetensors\n")


@pytest.mark.parametrize("version", ["latest", "-1", "1.0", ""])
def test_publish_refuses_what_is_no_version(model_dir: Path, cli: Cli, version: str) -> None:
    code, _, err = cli("publish", "weights.safetensors", model_dir, f"--version={version}")

    assert code == 2
    assert err == f"error: Invalid value: {version!r} is neither a version number nor 'new'\n"


def test_split_gives_a_graph_and_weights_that_fit_each_other(
    model_dir: Path, net: DigitsNet, cli: Cli, inspect: Any, tmp_path: Path
) -> None:
    _, whole = inspect(model_dir)
    target = tmp_path / "apart" / "digits" / "1"

    code, out, _ = cli("split", model_dir / "1" / "model.pt2", "-o", target)

    assert code == 0
    assert out.splitlines() == [str(target / "model.pt2"), str(target / "model.safetensors")]
    weights = load_file(target / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in net.state_dict().items())
    code, apart = inspect(target.parent)
    assert code == 0
    assert apart["plan_key"] == whole["plan_key"]
    (target / "model.safetensors").unlink()
    assert inspect(target.parent)[0] == 1, "the graph has weights left inside"


def test_split_takes_any_name_of_a_model_file(model_dir: Path, cli: Cli, tmp_path: Path) -> None:
    shutil.copy(model_dir / "1" / "model.pt2", tmp_path / "policy.pt2")

    assert cli("split", tmp_path / "policy.pt2", "-o", tmp_path / "out")[0] == 0


def test_split_of_another_kind_of_file_is_refused(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli("split", tmp_path / "model.gguf", "-o", tmp_path)

    assert code == 1
    assert err.startswith("error: no engine serves 'model.gguf'")


def test_engines_are_listed_with_their_state(cli: Cli) -> None:
    code, out, _ = cli("engines")

    assert code == 0
    (line,) = (line for line in out.splitlines() if "aot_inductor" in line)
    assert "OK" in line
    assert "model.pt2" in line
