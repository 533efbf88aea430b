from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from rebind.config.model import All, Latest, Specific
from rebind.errors import Code, ConfigInvalid, InvalidArgument, NotFound, RepositoryInvalid, Unavailable
from rebind.repository.versions import PLAN_FILES, Choice, Fingerprint, Layout, choose, resolve
from tests.repository.repositories import model, write, write_index

if TYPE_CHECKING:
    from pathlib import Path

    from rebind.config.model import VersionPolicy


@pytest.mark.parametrize(
    ("policy", "numbers"),
    [
        (Latest(), (9,)),
        (Latest(2), (3, 9)),
        (Latest(10), (1, 3, 9)),
        (All(), (1, 3, 9)),
        (Specific((9, 1)), (1, 9)),
    ],
)
def test_policy_chooses_among_what_is_there(policy: VersionPolicy, numbers: tuple[int, ...]) -> None:
    assert choose(policy, {9, 1, 3}, "m") == Choice(numbers)


def test_missing_specific_version_is_told_and_the_others_load() -> None:
    assert choose(Specific((7, 1)), {1, 2}, "m") == Choice(
        (1,), ("version 7 is specified for model 'm', but the version directory is not present",)
    )


@pytest.mark.parametrize(("policy", "available"), [(Latest(), set[int]()), (All(), set[int]()), (Specific((5,)), {1})])
def test_no_version_left(policy: VersionPolicy, available: set[int]) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        choose(policy, available, "m")
    assert str(refusal.value) == "at least one version must be available under the version policy of model 'm'"


@pytest.mark.parametrize("plan", PLAN_FILES)
def test_plan_with_weights_inside(tmp_path: Path, plan: str) -> None:
    write(tmp_path / "m/1" / plan)
    write(tmp_path / "m/1/labels.txt")

    source = resolve(model(tmp_path / "m"), 1)

    assert (source.number, source.plan_version) == (1, 1)
    assert source.plan_file == tmp_path / "m/1" / plan
    assert source.weights_file is None


@pytest.mark.parametrize("weights", ["model.safetensors", "model.wts", "model.npz"])
def test_weights_beside_the_plan(tmp_path: Path, weights: str) -> None:
    write(tmp_path / "m/1/model.pt2")
    write(tmp_path / "m/1" / weights)
    write(tmp_path / "m/1/other.safetensors")

    assert resolve(model(tmp_path / "m"), 1).weights_file == tmp_path / "m/1" / weights


def test_index_with_its_shards_is_one_candidate(tmp_path: Path) -> None:
    write(tmp_path / "m/1/model.pt2")
    index = write_index(tmp_path / "m/1/model.safetensors.index.json", "model-1.safetensors", "model.safetensors")
    write(tmp_path / "m/1/model-1.safetensors")
    write(tmp_path / "m/1/model.safetensors")
    write(tmp_path / "m/1/stray.safetensors")

    assert resolve(model(tmp_path / "m"), 1).weights_file == index


def test_stray_weights_beside_an_index_that_does_not_name_them(tmp_path: Path) -> None:
    write(tmp_path / "m/1/model.pt2")
    write_index(tmp_path / "m/1/model.safetensors.index.json", "model-1.safetensors")
    write(tmp_path / "m/1/model.safetensors")

    with pytest.raises(
        RepositoryInvalid, match=r"'model.safetensors.index.json' and 'model.safetensors'.*WEIGHTS_FILENAME"
    ):
        resolve(model(tmp_path / "m"), 1)


def test_damaged_index_settles_no_ambiguity(tmp_path: Path) -> None:
    write(tmp_path / "m/1/model.pt2")
    write(tmp_path / "m/1/model.safetensors.index.json", '{"weight_map": ["model.safetensors"]}')
    write(tmp_path / "m/1/model.safetensors")

    with pytest.raises(RepositoryInvalid, match="remove all but one"):
        resolve(model(tmp_path / "m"), 1)


def test_two_plan_files_are_refused_and_the_config_decides(tmp_path: Path) -> None:
    write(tmp_path / "m/1/model.pt2")
    write(tmp_path / "m/1/model.onnx")

    with pytest.raises(RepositoryInvalid, match=r"'model.pt2' and 'model.onnx'.*default_model_filename"):
        resolve(model(tmp_path / "m"), 1)

    layout = Layout(default_model_filename="model.onnx")
    assert resolve(model(tmp_path / "m"), 1, layout).plan_file.name == "model.onnx"


@pytest.mark.parametrize(
    ("layout", "plan"),
    [
        (Layout(platform="pytorch_libtorch"), "model.pt"),
        (Layout(platform="libtorch", backend="pytorch"), "model.pt"),
        (Layout(platform="torch_aoti"), "model.pt2"),
        (Layout(platform="onnxruntime_onnx"), "model.onnx"),
        (Layout(backend="onnxruntime"), "model.onnx"),
        (Layout(platform="tensorrt_plan", backend="tensorrt"), "model.plan"),
        (Layout(backend="openvino"), "model.xml"),
        (Layout(backend="python"), "model.py"),
    ],
)
def test_platform_and_backend_restrict_which_files_are_plans(tmp_path: Path, layout: Layout, plan: str) -> None:
    for name in PLAN_FILES:
        write(tmp_path / "m/1" / name)
    assert resolve(model(tmp_path / "m"), 1, layout).plan_file.name == plan


def test_both_files_of_the_pytorch_backend_are_refused_and_one_will_do(tmp_path: Path) -> None:
    layout = Layout(backend="pytorch")
    for name in ("model.pt", "model.pt2", "model.onnx"):
        write(tmp_path / "m/1" / name)
    with pytest.raises(RepositoryInvalid, match=r"plan files 'model.pt2' and 'model.pt' are there"):
        resolve(model(tmp_path / "m"), 1, layout)

    (tmp_path / "m/1/model.pt2").unlink()
    assert resolve(model(tmp_path / "m"), 1, layout).plan_file.name == "model.pt"


def test_unknown_platform_restricts_nothing(tmp_path: Path) -> None:
    write(tmp_path / "m/1/model.onnx")
    assert resolve(model(tmp_path / "m"), 1, Layout(platform="onnx")).plan_file.name == "model.onnx"


def test_plan_file_of_any_name_with_a_platform(tmp_path: Path) -> None:
    write(tmp_path / "m/1/silero_vad.jit")
    write(tmp_path / "m/2/silero_vad.safetensors")
    layout = Layout(default_model_filename="silero_vad.jit", platform="pytorch_libtorch")

    source = resolve(model(tmp_path / "m"), 2, layout)

    assert (source.plan_file.name, source.plan_version) == ("silero_vad.jit", 1)
    assert source.weights_file == tmp_path / "m/2/silero_vad.safetensors"


@pytest.mark.parametrize(
    ("layout", "missing"),
    [
        (Layout(platform="pytorch_libtorch"), "model.pt"),
        (Layout(platform="torch_aoti"), "model.pt2"),
        (Layout(default_model_filename="net.jit", platform="libtorch"), "net.jit"),
    ],
)
def test_missing_file_of_a_configured_platform_is_told_in_tritons_words(
    tmp_path: Path, layout: Layout, missing: str
) -> None:
    write(tmp_path / "m/1/model.onnx")
    with pytest.raises(Unavailable) as refusal:
        resolve(model(tmp_path / "m"), 1, layout)
    assert str(refusal.value) == f"unable to find '{tmp_path}/m/1/{missing}' for model instance 'm'"
    assert refusal.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "ema.pt", "ema.pth"])
def test_state_dict_that_is_named_is_weights_and_no_plan(tmp_path: Path, name: str) -> None:
    layout = Layout(weights_filename=name)
    write(tmp_path / "m/1/model.pt2")
    weights = write(tmp_path / "m/1" / name)
    write(tmp_path / "m/2" / name)
    before = resolve(model(tmp_path / "m"), 1, layout)
    assert (before.plan_file.name, before.weights_file) == ("model.pt2", weights)
    assert resolve(model(tmp_path / "m"), 2, layout).plan_version == 1

    write(weights, b"other content")

    after = resolve(model(tmp_path / "m"), 1, layout)
    assert after.plan_print == before.plan_print
    assert after.weights_print != before.weights_print


def test_state_dict_that_is_not_named_is_a_plan(tmp_path: Path) -> None:
    write(tmp_path / "m/1/model.pt2")
    write(tmp_path / "m/1/model.pt")
    with pytest.raises(RepositoryInvalid, match=r"plan files 'model.pt2' and 'model.pt' are there"):
        resolve(model(tmp_path / "m"), 1)


@pytest.mark.parametrize(
    "names",
    [
        {"weights_filename": "model.pt", "platform": "pytorch_libtorch"},
        {"weights_filename": "net.pt", "default_model_filename": "net.pt"},
    ],
)
def test_one_file_is_not_both_model_and_weights(names: dict[str, str]) -> None:
    with pytest.raises(
        ConfigInvalid, match=r"WEIGHTS_FILENAME: '(model|net).pt' is the model file; name the file that"
    ):
        Layout(**names)


def test_two_weights_files_are_refused_and_the_config_decides(tmp_path: Path) -> None:
    write(tmp_path / "m/1/model.pt2")
    write(tmp_path / "m/1/model.safetensors")
    write(tmp_path / "m/1/model.npz")
    write(tmp_path / "m/1/ema.safetensors")

    with pytest.raises(RepositoryInvalid, match=r"'model.safetensors' and 'model.npz'.*WEIGHTS_FILENAME"):
        resolve(model(tmp_path / "m"), 1)

    layout = Layout(weights_filename="ema.safetensors")
    assert resolve(model(tmp_path / "m"), 1, layout).weights_file == tmp_path / "m/1/ema.safetensors"


def test_weights_are_called_after_the_plan(tmp_path: Path) -> None:
    write(tmp_path / "m/1/net.v2.pt2")
    write(tmp_path / "m/1/net.v2.safetensors")
    write(tmp_path / "m/1/model.safetensors")

    source = resolve(model(tmp_path / "m"), 1, Layout(default_model_filename="net.v2.pt2"))

    assert source.weights_file == tmp_path / "m/1/net.v2.safetensors"


def test_named_weights_have_to_be_there(tmp_path: Path) -> None:
    write(tmp_path / "m/1/model.pt2")
    write(tmp_path / "m/1/model.safetensors")

    with pytest.raises(RepositoryInvalid, match=r"WEIGHTS_FILENAME names 'ema.safetensors', which is not there"):
        resolve(model(tmp_path / "m"), 1, Layout(weights_filename="ema.safetensors"))


def test_weights_only_version_takes_the_nearest_lower_plan(tmp_path: Path) -> None:
    write(tmp_path / "m/1/model.onnx")
    write(tmp_path / "m/3/model.pt2")
    write(tmp_path / "m/4/model.safetensors")
    write(tmp_path / "m/5/model.safetensors")
    write(tmp_path / "m/6/model.onnx")

    source = resolve(model(tmp_path / "m"), 5)

    assert (source.number, source.plan_version) == (5, 3)
    assert source.plan_file == tmp_path / "m/3/model.pt2"
    assert source.weights_file == tmp_path / "m/5/model.safetensors"


def test_no_plan_at_or_below(tmp_path: Path) -> None:
    for number in (1, 2, 4):
        write(tmp_path / f"m/{number}/model.safetensors")
    write(tmp_path / "m/5/model.pt2")

    with pytest.raises(
        RepositoryInvalid, match=r"version 4 has no plan file.*looked at: 4, 2, 1.*put one of model.pt2"
    ):
        resolve(model(tmp_path / "m"), 4)


def test_version_with_nothing_usable_says_what_it_found(tmp_path: Path) -> None:
    write(tmp_path / "m/1/model.pt2")
    write(tmp_path / "m/2/weights.safetensors")
    (tmp_path / "m/3").mkdir()

    with pytest.raises(
        RepositoryInvalid, match=r"found: weights.safetensors\).*expected one of model.pt2.*model.safetensors"
    ):
        resolve(model(tmp_path / "m"), 2)
    with pytest.raises(RepositoryInvalid, match="found: no files"):
        resolve(model(tmp_path / "m"), 3)


def test_absent_version(tmp_path: Path) -> None:
    write(tmp_path / "m/1/model.pt2")

    with pytest.raises(NotFound, match=r"model 'm' has no version 2 .*there are: 1"):
        resolve(model(tmp_path / "m"), 2)


@pytest.mark.parametrize("name", ["../w.safetensors", "/w.safetensors", "a\\b.npz", "..", ".w.npz", "a\n.npz", "x.tmp"])
def test_configured_names_stay_in_the_version_directory(name: str) -> None:
    with pytest.raises(ConfigInvalid, match="is not a plain file name"):
        Layout(weights_filename=name)
    with pytest.raises(ConfigInvalid, match=r"default_model_filename: .* is not a plain file name"):
        Layout(default_model_filename=name)


def test_weights_of_an_unknown_format_are_refused_by_name() -> None:
    with pytest.raises(ConfigInvalid, match=r"'w.bin' does not end as a weights file; known: .*\.safetensors"):
        Layout(weights_filename="w.bin")


def test_prints_tell_plan_from_weights(tmp_path: Path) -> None:
    write(tmp_path / "m/1/model.onnx")
    write(tmp_path / "m/1/model.onnx.data")
    write_index(tmp_path / "m/1/model.safetensors.index.json", "a.safetensors")
    shard = write(tmp_path / "m/1/a.safetensors")
    before = resolve(model(tmp_path / "m"), 1)

    write(shard, b"other content")
    new_weights = resolve(model(tmp_path / "m"), 1)
    write(tmp_path / "m/1/model.onnx.data", b"other content")
    new_plan = resolve(model(tmp_path / "m"), 1)

    assert new_weights.plan_print == before.plan_print
    assert new_weights.weights_print != before.weights_print
    assert new_plan.plan_print != new_weights.plan_print
    assert new_plan.weights_print == new_weights.weights_print


def test_older_file_of_the_same_size_has_another_print(tmp_path: Path) -> None:
    served = write(tmp_path / "served", b"1234")
    older = write(tmp_path / "older", b"5678")
    os.utime(older, (1000, 1000))
    before = Fingerprint.of([served])

    shutil.copy2(older, served)

    assert served.stat().st_mtime == 1000
    assert Fingerprint.of([served]) != before


def test_copy_in_place_that_restores_the_time_has_another_print(tmp_path: Path) -> None:
    served = write(tmp_path / "served", b"1234")
    other = write(tmp_path / "other", b"5678")
    for path in (served, other):
        os.utime(path, (1, 1))
    before = Fingerprint.of([served])
    # The change time comes from the kernel's clock, which ticks every few milliseconds: wait for the next tick.
    while write(tmp_path / "clock").stat().st_ctime_ns <= served.stat().st_ctime_ns:
        pass

    shutil.copy2(other, served)

    assert (served.stat().st_size, served.stat().st_mtime) == (4, 1)
    assert Fingerprint.of([served]) != before


def test_replaced_file_has_another_print(tmp_path: Path) -> None:
    served = write(tmp_path / "served", b"1234")
    other = write(tmp_path / "other", b"5678")
    for path in (served, other):
        os.utime(path, (1000, 1000))
    before = Fingerprint.of([served])

    other.rename(served)

    assert Fingerprint.of([served]) != before


def test_absence_is_part_of_a_print(tmp_path: Path) -> None:
    path = write(tmp_path / "file")
    before = Fingerprint.of([path])

    path.unlink()

    assert Fingerprint.of([path]) != before
    assert Fingerprint.of([path]) == Fingerprint.of([path])
