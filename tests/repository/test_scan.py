from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from rebind.errors import InvalidArgument, RepositoryInvalid
from rebind.repository.scan import ModelDirectory, check_model_name, scan
from tests.repository.repositories import model, write

if TYPE_CHECKING:
    from pathlib import Path


def test_models_are_the_directories_of_the_root(tmp_path: Path) -> None:
    write(tmp_path / "a/config.pbtxt")
    write(tmp_path / "a/1/model.pt2")
    write(tmp_path / "b/2/model.onnx")
    write(tmp_path / "README.md")

    found = scan([tmp_path])

    assert list(found) == ["a", "b"]
    a, b = found["a"], found["b"]
    assert isinstance(a, ModelDirectory)
    assert isinstance(b, ModelDirectory)
    assert (a.path, a.root, a.config_path) == (tmp_path / "a", tmp_path, tmp_path / "a/config.pbtxt")
    assert a.versions[1].files == {"model.pt2"}
    assert (b.config_path, list(b.versions)) == (None, [2])


@pytest.mark.parametrize(
    "name", [".git", "__pycache__", "old.tmp", "model~", ".config.pbtxt.swp", "#model#", "x.partial", "x.swp"]
)
def test_side_products_of_tools_are_ignored_everywhere(tmp_path: Path, name: str) -> None:
    write(tmp_path / "m/1/model.pt2")
    for place in (tmp_path, tmp_path / "m"):
        write(place / name / "x")
    write(tmp_path / "m/1" / name)

    found = scan([tmp_path])

    assert list(found) == ["m"]
    m = found["m"]
    assert isinstance(m, ModelDirectory)
    assert m.versions[1].files == {"model.pt2"}
    assert m.warnings == ()


def test_links_count_as_what_they_lead_to(tmp_path: Path) -> None:
    blob = write(tmp_path / "blobs/0123")
    write(tmp_path / "real/1/model.pt2")
    root = tmp_path / "root"
    (root / "m/2").mkdir(parents=True)
    (root / "m/1").symlink_to(tmp_path / "real/1")
    (root / "m/2/model.pt2").symlink_to(blob)
    (root / "loop").symlink_to(root / "loop")

    found = scan([root])

    assert list(found) == ["m"]
    m = found["m"]
    assert isinstance(m, ModelDirectory)
    assert {number: version.files for number, version in m.versions.items()} == {1: {"model.pt2"}, 2: {"model.pt2"}}


def test_link_that_leads_nowhere_is_a_file_and_not_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "m/1/model.pt2")
    (tmp_path / "m/1/model.safetensors").symlink_to(tmp_path / "nowhere")
    (tmp_path / "m/config.pbtxt").symlink_to(tmp_path / "m/config.pbtxt")

    m = scan([tmp_path])["m"]

    assert isinstance(m, ModelDirectory)
    assert m.config_path == tmp_path / "m/config.pbtxt"
    assert m.versions[1].files == {"model.pt2", "model.safetensors"}


def test_model_in_two_roots_names_both_paths_and_harms_no_other(tmp_path: Path) -> None:
    for path in ("r1/same/1/model.pt2", "r2/same/1/model.pt2", "r2/other/1/model.pt2"):
        write(tmp_path / path)

    found = scan([tmp_path / "r1", tmp_path / "r2"])

    assert isinstance(found["other"], ModelDirectory)
    assert isinstance(found["same"], RepositoryInvalid)
    text = str(found["same"])
    assert text.startswith("failed to poll model 'same': not unique across all model repositories")
    assert str(tmp_path / "r1/same") in text
    assert str(tmp_path / "r2/same") in text


def test_root_given_twice_counts_once(tmp_path: Path) -> None:
    write(tmp_path / "r/m/1/model.pt2")
    (tmp_path / "link").symlink_to(tmp_path / "r")

    assert isinstance(scan([tmp_path / "r", tmp_path / "link"])["m"], ModelDirectory)


def test_missing_root_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        RepositoryInvalid, match=f"{tmp_path}/nowhere: cannot be listed: No such file.*--model-repository"
    ):
        scan([tmp_path, tmp_path / "nowhere"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list every directory")
def test_model_that_cannot_be_listed_harms_no_other(tmp_path: Path) -> None:
    write(tmp_path / "closed/1/model.pt2")
    write(tmp_path / "open/1/model.pt2")
    (tmp_path / "closed").chmod(0)

    found = scan([tmp_path])

    (tmp_path / "closed").chmod(0o755)
    assert isinstance(found["open"], ModelDirectory)
    assert isinstance(found["closed"], RepositoryInvalid)
    assert "Permission denied" in str(found["closed"])


@pytest.mark.parametrize(("raw", "shown"), [(b"a\nb", r"a\nb"), (b"a\xffb", r"a\udcffb"), (b"a\\b", r"a\b")])
def test_directory_whose_name_cannot_be_a_models_is_shown_printable(tmp_path: Path, raw: bytes, shown: str) -> None:
    (tmp_path / os.fsdecode(raw)).mkdir()

    found = scan([tmp_path])

    assert list(found) == [shown]
    assert isinstance(found[shown], RepositoryInvalid)
    assert str(found[shown]).isprintable()
    assert "rename the directory" in str(found[shown])


def test_version_names_follow_triton(tmp_path: Path) -> None:
    for name in ("0", "1", "003", "abc", "7tail", "-1", "18446744073709551615", "9223372036854775807"):
        write(tmp_path / "m" / name / "model.pt2")

    m = model(tmp_path / "m")

    assert list(m.versions) == [0, 1, 7, 9223372036854775807]
    assert m.versions[7].path == tmp_path / "m/7tail"
    where = f"(in {tmp_path}/m)"
    assert set(m.warnings) == {
        f"ignore version directory '003' which contains leading zeros in its directory name {where}",
        f"ignore version directory 'abc' which fails to convert to integral number {where}",
        f"ignore version directory '-1' which fails to convert to integral number {where}",
        f"ignore version directory '18446744073709551615' whose number does not fit into 64 bits {where}",
    }


def test_plain_number_goes_before_a_number_with_a_tail(tmp_path: Path) -> None:
    for name in ("1-old", "1", "2b", "2a"):
        write(tmp_path / "m" / name / "model.pt2")

    m = model(tmp_path / "m")

    assert {number: version.path.name for number, version in m.versions.items()} == {1: "1", 2: "2a"}
    assert [warning.split(" (in")[0] for warning in m.warnings] == [
        "ignore version directory '1-old' which names the same version as '1'",
        "ignore version directory '2b' which names the same version as '2a'",
    ]


def test_directories_with_a_known_purpose_are_no_wrong_versions(tmp_path: Path) -> None:
    for name in ("configs", "warmup", "initial_state", "weights_check"):
        write(tmp_path / "m" / name / "x")
    write(tmp_path / "m/1")  # a file, not a version

    m = model(tmp_path / "m")

    assert (m.versions, m.warnings) == ({}, ())


@pytest.mark.parametrize("name", ["..", ".", "../x", "a/../../x", "/etc", "a\\b", "a/"])
def test_names_that_are_paths_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        check_model_name(name)
    assert str(refusal.value) == f"invalid model name '{name}', model name must not contain path traversal characters"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "Model name cannot be empty. Please enter a valid name to deploy."),
        ("a\nb", r"invalid model name 'a\nb', model name must not contain control characters"),
        ("a\0", r"invalid model name 'a\x00', model name must not contain control characters"),
        ("\ud800", r"invalid model name '\ud800', model name must be valid UTF-8"),
        ("n" * 300, f"invalid model name '{'n' * 77}...', model name must not be longer than 255 bytes"),
        ("ü" * 128, f"invalid model name '{'ü' * 77}...', model name must not be longer than 255 bytes"),
    ],
)
def test_names_that_no_directory_can_have_are_refused(name: str, text: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        check_model_name(name)
    assert str(refusal.value) == text


@pytest.mark.parametrize("name", ["m", "a..b", "wide model", "größe", "n" * 255])
def test_other_names_pass(name: str) -> None:
    check_model_name(name)
