from __future__ import annotations

from typing import TYPE_CHECKING

from rebind.console.progress import busy, byte_progress

if TYPE_CHECKING:
    import pytest


def test_nothing_is_written_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with byte_progress("copying") as report:
        report(5, 10)
    with busy("thinking") as say:
        say("still thinking")

    assert capsys.readouterr() == ("", "")


def test_in_a_terminal_progress_is_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich's way to be told that this is a terminal

    with byte_progress("copying") as report:
        report(5_000_000, 10_000_000)

    out, err = capsys.readouterr()
    assert out == ""
    assert "copying" in err
    assert "5.0/10.0 MB" in err
