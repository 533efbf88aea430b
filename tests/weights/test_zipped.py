from __future__ import annotations

import struct
import tracemalloc
import warnings
import zipfile
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebind.errors import WeightsRefused
from rebind.weights.zipped import Member, ZipArchive

if TYPE_CHECKING:
    from pathlib import Path

CONTENTS = {"a/data.pkl": b"pickle" * 100, "a/data/0": bytes(range(256)) * 300, "a/empty": b""}
_CENTRAL = b"PK\1\2"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.pt"


def write(path: Path, contents: dict[str, bytes] = CONTENTS, method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as zipped:
        zipped.mkdir("a")
        for name, content in contents.items():
            zipped.writestr(name, content)
    return path


def patch_central(path: Path, name: str, field: int, form: str, value: int) -> None:
    """Changes one field of a member's entry in the directory at the end of the file."""
    content = bytearray(path.read_bytes())
    start = content.rfind(_CENTRAL, 0, content.rfind(name.encode()))
    struct.pack_into(form, content, start + field, value)
    path.write_bytes(content)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_members_are_read_where_they_are(path: Path, method: int) -> None:
    with ZipArchive(write(path, method=method)) as archive:
        assert list(archive.members) == list(CONTENTS)
        assert {name: archive.read(member, 1 << 20) for name, member in archive.members.items()} == CONTENTS
        member = archive.members["a/data/0"]
        assert member.compressed == (method == zipfile.ZIP_DEFLATED)
        assert (member.nbytes, member.crc) == (76_800, zlib.crc32(CONTENTS["a/data/0"]))
        assert archive.read_start(member, 300) == CONTENTS["a/data/0"][:300]
        assert archive.read_start(archive.members["a/data.pkl"], 1 << 20) == CONTENTS["a/data.pkl"]
        assert archive.read_start(archive.members["a/empty"], 10) == b""


def test_more_than_the_limit_is_refused_before_it_takes_memory(path: Path) -> None:
    with ZipArchive(write(path, {"zeros": bytes(50_000_000)}, zipfile.ZIP_DEFLATED)) as archive:
        tracemalloc.start()
        with pytest.raises(WeightsRefused, match="'zeros': has 50000000 bytes, more than 1000"):
            archive.read(archive.members["zeros"], 1000)
        assert len(archive.read_start(archive.members["zeros"], 100)) == 100
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_flipped_bytes_are_found(path: Path, method: int) -> None:
    content = bytearray(write(path, method=method).read_bytes())
    with ZipArchive(path) as archive:
        member = archive.members["a/data/0"]
    content[member.offset + 5] ^= 1
    path.write_bytes(content)
    with ZipArchive(path) as archive, pytest.raises(WeightsRefused, match="'a/data/0': is damaged"):
        archive.read(archive.members["a/data/0"], 1 << 20)


def test_pieces_are_the_member_and_flipped_bytes_are_found_at_their_end(path: Path) -> None:
    contents = {**CONTENTS, "large": bytes(range(256)) * 10_000}
    content = bytearray(write(path, contents).read_bytes())
    with ZipArchive(path) as archive:
        assert {name: b"".join(archive.pieces(member)) for name, member in archive.members.items()} == contents
        assert len(list(archive.pieces(archive.members["large"]))) == 3
        member = archive.members["large"]
    content[member.offset] ^= 1
    path.write_bytes(content)
    with ZipArchive(path) as archive:
        pieces = archive.pieces(archive.members["large"])
        assert len([next(pieces) for _ in range(3)]) == 3
        with pytest.raises(WeightsRefused, match="'large': is damaged"):
            next(pieces)


def test_a_member_of_another_length_than_it_says_is_refused(path: Path) -> None:
    with ZipArchive(write(path, method=zipfile.ZIP_DEFLATED)) as archive:
        member = archive.members["a/data/0"]
        for nbytes in (member.nbytes - 1, member.nbytes + 1):
            with pytest.raises(WeightsRefused, match=f"does not inflate to {nbytes} bytes"):
                archive.read(replace(member, nbytes=nbytes, crc=None), 1 << 20)
        with pytest.raises(WeightsRefused, match="does not inflate"):
            archive.read(replace(member, stored_nbytes=member.stored_nbytes - 1), 1 << 20)


@pytest.mark.parametrize(
    ("field", "form", "value", "expected"),
    [
        (8, "<H", 1, "'a/data/0': is encrypted"),
        (10, "<H", 12, "'a/data/0': is compressed by method 12"),
        (20, "<L", 76_799, "'a/data/0': has another size than it takes"),
        (24, "<L", 2_200_000_000, "'a/data/0': has another size than it takes"),
        (42, "<L", 0, "overlaps 'a/data/0'"),
        (42, "<L", 77_500, "'a/data/0': lies outside of the file"),
        (42, "<L", 7, "'a/data/0': lies outside of the file"),
    ],
)
def test_a_directory_that_cannot_be_is_refused(path: Path, field: int, form: str, value: int, expected: str) -> None:
    patch_central(write(path), "a/data/0", field, form, value)
    with pytest.raises(WeightsRefused, match=expected):
        ZipArchive(path)


def test_a_record_of_gigabytes_in_a_short_file_is_refused(path: Path) -> None:  # T1
    write(path, {"data/0": bytes(100)}, zipfile.ZIP_STORED)
    for field in (20, 24):
        patch_central(path, "data/0", field, "<L", 2_200_000_000)
    with pytest.raises(WeightsRefused, match="'data/0': lies outside of the file; copy the file again"):
        ZipArchive(path)


def test_a_claim_that_deflate_cannot_keep_is_refused(path: Path) -> None:
    write(path, {"data/0": bytes(100_000)}, zipfile.ZIP_DEFLATED)
    patch_central(path, "data/0", 24, "<L", 2_200_000_000)
    with pytest.raises(WeightsRefused, match=r"'data/0': claims to inflate from \d+ to 2200000000 bytes"):
        ZipArchive(path)


def test_all_faults_are_told_at_once(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(write(path), "a") as zipped:
            zipped.writestr("a/empty", b"again")
    patch_central(path, "a/data/0", 8, "<H", 1)
    with pytest.raises(WeightsRefused, match="two members of this name") as refused:
        ZipArchive(path)
    assert "'a/data/0': is encrypted" in str(refused.value)


@pytest.mark.parametrize(
    ("content", "remedy"), [(b"", ""), (b"not a zip file", ""), (b"PK\3\4 and no more", "; copy the file again")]
)
def test_what_is_no_zip_file_is_refused(path: Path, content: bytes, remedy: str) -> None:
    path.write_bytes(content)
    with pytest.raises(WeightsRefused) as refused:
        ZipArchive(path)
    assert str(refused.value) == f"{path}: cannot be read as a zip file (File is not a zip file){remedy}"


def test_a_member_of_unknown_crc_is_read_unchecked(path: Path) -> None:
    with ZipArchive(write(path)) as archive:
        place = archive.members["a/data/0"].offset
        member = Member("x", place, 4, None, False, 4)
        assert archive.read(member, 4) == b"".join(archive.pieces(member)) == bytes(range(4))


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    path = tmp_path_factory.mktemp("fuzz") / "model.pt"
    contents = {name: content[:200] for name, content in CONTENTS.items()}
    with zipfile.ZipFile(path, "w") as zipped:
        for name, content in contents.items():
            zipped.writestr(name, content)
            zipped.writestr(f"{name}.deflated", content, zipfile.ZIP_DEFLATED)
    return path.read_bytes(), path


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damage_of_any_kind_is_refused_or_harmless(fuzzed: tuple[bytes, Path], data: st.DataObject) -> None:
    original, path = fuzzed
    damaged = bytearray(original)
    for position in data.draw(st.lists(st.integers(0, len(original) - 1), max_size=6)):
        damaged[position] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged[: data.draw(st.integers(len(original) // 2, len(original)))])
    try:
        with ZipArchive(path) as archive:
            found = [archive.read(member, 1 << 20) for member in archive.members.values()]
    except WeightsRefused:
        return
    assert all(content in {value[:200] for value in CONTENTS.values()} for content in found)
