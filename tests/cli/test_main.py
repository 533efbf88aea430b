from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

from rebind.cli import main

if TYPE_CHECKING:
    from tests.cli.conftest import Cli


def rebind(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """``rebind`` in a process of its own; ``code`` is run after it."""
    program = f"from rebind.cli import main; code = main(); {code or 'raise SystemExit(code)'}"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


def test_version_is_that_of_the_package(cli: Cli) -> None:
    assert cli("--version") == (0, f"rebind {version('rebind')}\n", "")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["serve", "--help"], ["demo", "--help"], ["inspect", "--help"]])
def test_help_imports_neither_torch_nor_other_heavy_packages(arguments: list[str]) -> None:
    heavy = "[name for name in ('torch', 'matplotlib', 'sklearn', 'safetensors') if name in sys.modules]"

    done = rebind(*arguments, code=f"import sys; print({heavy}, file=sys.stderr)")

    assert done.stdout.startswith("Usage: ")
    assert done.stderr == "[]\n"


def test_every_command_says_what_it_does_in_its_help(cli: Cli) -> None:
    _, out, _ = cli("--help")

    commands = out[out.index("Commands:") :].splitlines()[1:]
    assert [line.split()[0] for line in commands] == [
        "serve", "demo", "inspect", "publish", "push", "pull", "rollback", "history", "watch", "diff", "convert",
        "split", "engines", "plans",
    ]  # fmt: skip
    assert not [line for line in commands if line.endswith("...")]


def test_unknown_option_is_named_last_with_a_near_match(cli: Cli) -> None:
    code, out, err = cli("serve", "--model-repository", "/models", "--http-prot", "8000")

    assert code == 2
    assert out == ""
    near = "--grpc-port, --http-address, --http-port"
    assert err.splitlines()[-1] == f"error: No such option: --http-prot (Possible options: {near})"


def test_unknown_command_is_named_with_a_near_match(cli: Cli) -> None:
    assert cli("srve") == (2, "", "error: No such command 'srve'. Did you mean 'serve'?\n")


def test_failure_is_one_line_without_a_traceback(tmp_path: Path, cli: Cli) -> None:
    code, out, err = cli("publish", tmp_path / "absent.safetensors", tmp_path)

    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("place", [0, 1, 3])
def test_debug_shows_the_traceback_wherever_it_stands(tmp_path: Path, place: int) -> None:
    arguments = ["publish", str(tmp_path / "absent.safetensors"), str(tmp_path)]

    done = rebind(*arguments[:place], "--debug", *arguments[place:])

    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "WeightsRefused" in done.stderr.splitlines()[-1]


def test_full_disk_behind_the_output_is_no_fault_of_our_own() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rebind.cli", "--version"], stdout=full, stderr=subprocess.PIPE, check=False
        )

    assert (done.returncode, done.stderr) == (1, b"error: input or output: No space left on device\n")


def test_characters_that_the_terminal_lacks_are_escaped(tmp_path: Path) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({}, a)
    save_file({"größe": np.zeros(1)}, b)
    done = subprocess.run(
        [sys.executable, "-m", "rebind.cli", "diff", a, b],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (1, b"")
    assert done.stdout.splitlines()[0] == b"+ 'gr\\xf6\\xdfe'"


def test_a_fault_of_our_own_says_so(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("1/0")

    monkeypatch.setattr("rebind.engines.registry.engines", broken)

    code, _, err = cli("engines")

    assert code == 1
    assert err == "error: ZeroDivisionError: 1/0 (this is a fault of rebind's own; --debug shows where)\n"


def test_main_takes_its_arguments_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rebind", "--version"])

    assert main() == 0
    assert capsys.readouterr().out.startswith("rebind ")


def test_demo_refuses_a_file_that_it_could_not_write_in_the_end(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli("demo", "--summary", tmp_path / "absent" / "summary.json")
    assert code == 2
    assert err == f"error: Invalid value: {tmp_path}/absent is not there to write summary.json into\n"
