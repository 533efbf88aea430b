"""Starting and ending the process, its control modes, and what readiness means."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.life.conftest import NO_COMPILE, Start
from tests.life.models import LOOPS, MLP, Case, Gallery, eager, loops_inputs, same_bits
from tests.life.repository import Home, Live
from tests.life.test_lifecycle import LONG_CONFIG, ROWS, start_long_request
from tests.server import Client, Failed, ServerProcess, eventually

pytestmark = pytest.mark.timeout(180)


def make(root: Path, name: str, gallery: Gallery, case: Case = MLP, *, config: str = "") -> Home:
    home = Home(case, root / name, gallery)
    home.path.mkdir(parents=True)
    home.write_config(config)
    home.add_plan(0)
    return home


def test_sigterm_answers_the_running_request_takes_no_other_and_exits_with_0(
    start: Start, gallery: Gallery, tmp_path: Path
) -> None:
    home = make(tmp_path, "loops", gallery, LOOPS, config=LONG_CONFIG)
    with start(tmp_path) as server, server.client() as client, server.client() as other:
        assert other.is_ready()
        request = loops_inputs(ROWS)
        start_long_request(Live(server, tmp_path, gallery), client, home, request)
        server.terminate()
        server.wait_for_log("Waiting for in-flight requests to complete")
        with pytest.raises(OSError):  # noqa: PT011 - refused, or reset while the listener closes
            eventually(lambda: not other.is_ready(), "connections are refused")
        assert same_bits(client.read_infer().outputs, eager(LOOPS, 0, request))
        assert server.wait() == 0
        assert "successfully unloaded 'loops' version 1" in server.log


def test_process_ends_when_the_exit_timeout_is_over_whatever_still_runs(
    start: Start, gallery: Gallery, tmp_path: Path
) -> None:
    home = make(tmp_path, "loops", gallery, LOOPS, config=LONG_CONFIG)
    with start(tmp_path, flags=("--exit-timeout-secs=0.5",)) as server, server.client() as client:
        start_long_request(Live(server, tmp_path, gallery), client, home, loops_inputs(20 * ROWS))
        assert server.stop() == 1
        assert "Exit timeout expired" in server.log
        assert "successfully unloaded" not in server.log
        with pytest.raises(OSError):  # noqa: PT011 - cut
            client.read_infer()


@pytest.mark.parametrize("compile_mode", ["wait", "background"])
def test_sigterm_ends_a_compile_with_all_its_processes(compile_mode: str, gallery: Gallery, tmp_path: Path) -> None:
    """With ``wait`` the server is still starting: it has not opened its port, and is not going to."""
    make(tmp_path / "models", "mlp", gallery)
    cache = tmp_path / "cache"
    flags = (f"--model-repository={tmp_path / 'models'}", f"--plan-cache-dir={cache}", f"--compile={compile_mode}")
    with ServerProcess(*flags, ready=False) as server:
        server.wait_for_log(": compiling")
        compiling = eventually(lambda: processes_of_group(child_of(server.pid)), "a compiler runs")
        server.terminate()
        assert server.wait() == 0
        assert [pid for pid in compiling if is_running(pid)] == []
    assert [path for path in cache.rglob("*") if path.suffix != ".lock" and "plans" in path.parts] == [cache / "plans"]


def child_of(pid: int) -> int:
    """The only child process of a server: the leader of the group that compiles."""
    (child,) = {pid for task in Path(f"/proc/{pid}/task").iterdir() for pid in (task / "children").read_text().split()}
    return int(child)


def processes_of_group(group: int) -> list[int]:
    """Its leader and what that has started; empty while it is alone."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    found = [pid for pid in pids if group_of(pid) == group]
    return found if len(found) > 1 else []


def is_running(pid: int) -> bool:
    """False too for one that was killed, and of which the system's init has not taken note yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def test_process_ends_when_a_model_fails_at_the_start(start: Start, gallery: Gallery, tmp_path: Path) -> None:
    make(tmp_path, "broken", gallery).file("model.pt2").write_bytes(b"no model")
    with start(tmp_path, ready=False) as server:
        assert server.wait() == 1
        assert server.log.splitlines()[-1].endswith("failed to load all models")
        assert "Traceback" not in server.log


def test_server_starts_despite_a_failed_model_and_tries_again_when_there_is_room(
    start: Start, gallery: Gallery, tmp_path: Path, eager_cache: Path
) -> None:
    root = tmp_path / "models"
    good = make(root, "good", gallery)
    broken = make(root, "broken", gallery)
    broken.file("model.pt2").write_bytes(b"no model")
    cache = tmp_path / "cache"
    cache.write_text("in the way of the cache's directory, as a full disk would be")
    flags = (
        "--model-control-mode=poll",
        "--repository-poll-secs=0.1",
        "--weights-settle-secs=0.3",
        "--exit-on-error=false",
        f"--model-repository={root}",
        f"--plan-cache-dir={cache}",
    )
    with ServerProcess(*flags, environment=NO_COMPILE) as server, server.client() as client:
        assert client.is_ready("/v2/health/live")
        assert not client.is_ready()
        assert str(cache) in client.index()["good", "1"]["reason"]
        cache.unlink()
        cache.symlink_to(eager_cache)
        eventually(lambda: good.answers_as(client, 0), "the load is tried again")
        assert not client.is_ready()
        assert client.index()["broken", "1"]["state"] == "UNAVAILABLE"
        broken.add_plan(1)
        eventually(client.is_ready, "all models are ready")
        broken.expect(client, 1, generation=1)


def test_mode_none_takes_no_calls_and_lax_readiness_minds_no_failed_model(
    start: Start, gallery: Gallery, tmp_path: Path
) -> None:
    good = make(tmp_path, "good", gallery)
    make(tmp_path, "broken", gallery).file("model.pt2").write_bytes(b"no model")
    flags = ("--exit-on-error=false", "--strict-readiness=false")
    with start(tmp_path, flags=flags) as server, server.client() as client:
        assert client.is_ready()
        good.expect(client, 0, generation=1)
        _expect_no_control(client, "none")


def test_mode_poll_takes_no_calls(polled: Live, watcher: Client) -> None:
    _expect_no_control(watcher, "poll")


def _expect_no_control(client: Client, mode: str) -> None:
    """Case C15."""
    for call in (client.load, client.unload):
        with pytest.raises(Failed, match="not allowed if polling is enabled") as refused:
            call("good")
        assert f"--model-control-mode={mode};" in str(refused.value)
        assert refused.value.status == 503


def test_mode_explicit_starts_empty_and_ready_or_with_what_it_is_told(
    start: Start, gallery: Gallery, tmp_path: Path
) -> None:
    make(tmp_path, "mine", gallery)
    with start(tmp_path, flags=("--model-control-mode=explicit",)) as server, server.client() as client:
        assert client.is_ready()
        assert client.index() == {("mine", ""): {"name": "mine"}}
        assert client.index(ready=True) == {}
    flags = ("--model-control-mode=explicit", "--load-model=mine", "--load-model=yours")
    with start(tmp_path, flags=flags, ready=False) as server:
        assert server.wait() == 1
        assert "'yours' is in no model repository" in server.log


def test_unloaded_model_hinders_readiness_only_while_it_drains(explicit: Live, client: Client) -> None:
    home = explicit.load(client)
    client.unload(home.name)
    client.unload("nobody")
    eventually(lambda: client.index()[home.name, "1"]["state"] == "UNAVAILABLE", "it is unloaded")
    assert client.index()[home.name, "1"]["reason"] == "unloaded"
    assert (home.name, "1") not in client.index(ready=True)
    client.load(home.name)
    assert client.index(ready=True)[home.name, "1"]["state"] == "READY"


def test_repository_that_is_not_there_ends_the_start_with_one_line(start: Start, tmp_path: Path) -> None:
    with start(tmp_path / "nowhere", ready=False) as server:
        assert server.wait() == 1
        (line,) = server.log.splitlines()[-1:]
        assert str(tmp_path / "nowhere") in line
        assert "Traceback" not in server.log


def test_port_that_is_taken_ends_the_start_with_triton_s_text(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with start(tmp_path, flags=(f"--http-port={port}",), ready=False) as server:
            assert server.wait() == 1
            assert server.log.splitlines()[-1].endswith(f"Socket '127.0.0.1:{port}' already in use")


def test_repository_that_disappears_for_a_while_takes_nothing_with_it(
    start: Start, gallery: Gallery, tmp_path: Path
) -> None:
    """A mount that is lost: what cannot be seen is not gone."""
    root = tmp_path / "models"
    home = make(root, "mine", gallery)
    flags = ("--model-control-mode=poll", "--repository-poll-secs=0.05", "--weights-settle-secs=0.1")
    with start(root, flags=flags) as server, server.client() as client:
        root.rename(tmp_path / "lost")
        server.wait_for_log("cannot be listed")
        home.expect(client, 0, generation=1)
        (tmp_path / "lost").rename(root)
        home.add_weights(1)
        eventually(lambda: home.answers_as(client, 1), "polling goes on")
        home.expect(client, 1, generation=2)
