"""The commands that speak to a running server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import safetensors.torch

from tests.life.conftest import Start, eager_cache, gallery, start
from tests.life.repository import Live
from tests.live.models import SMALL, arrays, part
from tests.server import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cli.conftest import Cli
    from tests.life.models import Gallery
    from tests.life.repository import Home
    from tests.server import Client

__all__ = ["eager_cache", "gallery", "start"]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def live(start: Start, gallery: Gallery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("live")
    with start(root, flags=("--model-control-mode=explicit",)) as server:
        yield Live(server, root, gallery)
        assert server.stop() == 0


@pytest.fixture
def infer(live: Live) -> Iterator[Client]:
    with live.server.client() as client:
        yield client


@pytest.fixture
def home(live: Live, infer: Client) -> Home:
    return live.load(infer, SMALL)


@pytest.fixture
def live_cli(live: Live, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("REBIND_URL", f"http://127.0.0.1:{live.server.port}")
    return cli


def test_push_serves_the_file_and_says_what(live: Live, infer: Client, home: Home, live_cli: Cli) -> None:
    code, out, err = live_cli("push", live.gallery.weights(SMALL, 1), home.name, "--label", "step-1")
    assert (code, err) == (0, "")
    digest = infer.weights(home.name)["digest"]
    assert out.startswith(f"{home.name} version 1: generation 2 (step-1), digest {digest[:12]}, ")
    assert " copied, " in out
    assert home.expect(infer, 1, generation=2).label == "step-1"
    code, out, _ = live_cli("push", live.gallery.weights(SMALL, 1), home.name, "--if-match", digest)
    assert (code, out) == (
        0,
        f"{home.name} version 1: unchanged, generation 2 (step-1) has these weights (digest {digest[:12]})\n",
    )


def test_push_without_a_change(live: Live, infer: Client, home: Home, live_cli: Cli) -> None:
    weights = live.gallery.weights(SMALL, 1)
    code, out, _ = live_cli("push", weights, home.name, "--dry-run", "--version", "1")
    assert code == 0
    assert "would accept them" in out
    code, _, err = live_cli("push", weights, home.name, "--if-match", "0" * 64)
    assert code == 1
    assert "digest" in err
    home.expect(infer, 0, generation=1)


def test_push_of_a_patch_into_the_repository(infer: Client, home: Home, live_cli: Cli, tmp_path: Path) -> None:
    first, *others = arrays(SMALL, 1)
    for number, names in enumerate(([first], others)):
        path = tmp_path / f"{number}.safetensors"
        state = {name: tensor for name, tensor in SMALL.state(1).items() if name in part(SMALL, 1, *names)}
        safetensors.torch.save_file(state, path)
        code, out, _ = live_cli("push", path, home.name, "--patch", "--persist")
        assert code == 0
        assert out.endswith("in the repository\n")
    home.expect(infer, 1, generation=3)
    infer.unload(home.name)
    infer.load(home.name)
    home.expect(infer, 1, generation=1)


def test_push_that_is_refused_says_why_in_one_line(infer: Client, home: Home, live_cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"no weights")
    code, out, err = live_cli("push", tmp_path / "bad.safetensors", home.name)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert live_cli("push", tmp_path / "w.pt", home.name)[2].count("rebind convert") == 1
    code, _, err = live_cli("push", tmp_path / "none.safetensors", home.name)
    assert (code, err) == (1, f"error: {tmp_path / 'none.safetensors'}: No such file or directory\n")
    home.expect(infer, 0, generation=1)


def test_rollback_and_history(live: Live, infer: Client, home: Home, live_cli: Cli) -> None:
    live_cli("push", live.gallery.weights(SMALL, 1), home.name, "--label", "step-1")
    before, serves = live_cli("history", home.name)[1].splitlines()[2:]
    assert (before.split()[-1], serves.split()[-1]) == ("kept", "serves")
    code, out, _ = live_cli("rollback", home.name, "--label", "back")
    assert code == 0
    assert out.startswith(f"{home.name} version 1: generation 3 (back), ")
    home.expect(infer, 0, generation=3)
    code, out, _ = live_cli("history", home.name)
    assert code == 0
    lines = out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert "step-1" in lines[1]
    assert lines[2].split()[-1] == "serves"


def test_pull_writes_what_serves(infer: Client, home: Home, live_cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "w.safetensors"
    code, out, _ = live_cli("pull", home.name, target)
    assert code == 0
    assert out.startswith(f"{target}: generation 1, digest {infer.weights(home.name)['digest'][:12]}, ")
    received = safetensors.torch.load_file(target)
    assert all((received[name] == tensor).all() for name, tensor in SMALL.state(0).items())


def test_watch_prints_a_line_for_each_generation_until_it_is_interrupted(
    live: Live, infer: Client, home: Home, tmp_path: Path
) -> None:
    # A shell makes programs in its background, and so their children, ignore Ctrl-C.
    interruptible = (
        "import signal, sys; from rebind.cli import main; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main())"
    )
    command = [sys.executable, "-c", interruptible, "watch", home.name, "--url", f"127.0.0.1:{live.server.port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().rstrip().split(" ", 1)[1].startswith(f"{home.name} version 1: generation 1, ")
        for seed in (1, 2):
            infer.push(home.name, arrays(SMALL, seed), label=f"step {seed}")
            assert f"generation {seed + 1} (step {seed}), digest " in process.stdout.readline()
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err.strip()) == (130, "", "")


def test_server_that_is_not_there_is_named(cli: Cli) -> None:
    for command in (["history", "m"], ["rollback", "m"], ["watch", "m"]):
        code, _, err = cli(*command, "--url", "http://127.0.0.1:1")
        assert (code, err.count("\n")) == (1, 1)
        assert "cannot connect to http://127.0.0.1:1" in err
