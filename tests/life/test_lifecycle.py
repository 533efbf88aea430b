"""Loading, reloading and unloading while others look on: the cases R of past reports."""

from __future__ import annotations

import os
import shutil
import threading
from typing import TYPE_CHECKING

import pytest

from tests.life.models import EVERYTHING, LOOPS, LOOPS_ROWS, MLP, Inputs, eager, inputs, loops_inputs, same_bits
from tests.life.repository import Home, Live, copy_over
from tests.life.traffic import Traffic
from tests.server import PATIENCE_S, Client, Failed, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(180)

ROWS = 1024
"""A request of so many rows runs for seconds."""
LONG_CONFIG = f"max_batch_size: {LOOPS_ROWS}"


def test_file_with_an_older_time_is_a_change(explicit: Live, client: Client) -> None:
    """Case R9: rsync -t; and, by the inode or the time of change, even the very same time (cp -p)."""
    home = explicit.load(client, weights=0)
    time_ns = home.file("model.safetensors").stat().st_mtime_ns
    home.add_weights(1, mtime_ns=time_ns - 3600 * 10**9)
    client.load(home.name)
    home.expect(client, 1, generation=2)
    home.add_weights(2, mtime_ns=time_ns - 3600 * 10**9)
    client.load(home.name)
    home.expect(client, 2, generation=3)
    copy_over(home.gallery.weights(MLP, 0), home.file("model.safetensors"))
    os.utime(home.file("model.safetensors"), ns=(time_ns, time_ns - 3600 * 10**9))
    client.load(home.name)
    home.expect(client, 0, generation=4)


def test_polling_finds_a_file_with_an_older_time(polled: Live, watcher: Client) -> None:
    """Case R9."""
    home = polled.poll(watcher, weights=0)
    home.add_weights(1, mtime_ns=home.file("model.safetensors").stat().st_mtime_ns - 3600 * 10**9)
    eventually(lambda: home.answers_as(watcher, 1), "the file with the older time is served")


def test_two_loads_at_once_are_one_load(explicit: Live, client: Client) -> None:
    """Case R13."""
    home = explicit.home()
    before = len(explicit.server.log)
    failures = _at_once(*[lambda: _with_client(explicit, lambda own: own.load(home.name))] * 4)
    assert failures == []
    home.expect(client, 0, generation=1)
    assert explicit.server.log[before:].count(f"loading: {home.name}:1") == 1


def test_loads_unloads_requests_and_questions_at_once_all_make_progress(explicit: Live, client: Client) -> None:
    """Case R15."""
    home = explicit.load(client)
    unavailable = {404, 503}

    def ask(question: Callable[[Client], object]) -> Callable[[], None]:
        def repeat(own: Client) -> None:
            for _ in range(40):
                try:
                    question(own)
                except Failed as failed:
                    assert failed.status in unavailable or "is not available" in str(failed), failed  # noqa: PT017

        return lambda: _with_client(explicit, repeat)

    failures = _at_once(
        ask(lambda own: own.load(home.name)),
        ask(lambda own: own.unload(home.name)),
        ask(lambda own: home.expect(own, 0, generation=1)),
        ask(lambda own: own.get(f"/v2/models/{home.name}/stats")),
        ask(lambda own: own.get("/v2/models/stats")),
        ask(lambda own: own.index()),
    )
    assert failures == []
    client.load(home.name)
    home.expect(client, 0, generation=1)


def test_edited_config_is_taken_over_under_traffic_and_a_bad_one_is_not(polled: Live, watcher: Client) -> None:
    """Case R18."""
    home = polled.poll(watcher, weights=1)
    path = f"/v2/models/{home.name}/config"
    with Traffic(polled.server, home.name, [inputs(MLP)]) as traffic:
        home.write_config("instance_group { count: 3 }")
        eventually(lambda: watcher.get(path)["instance_group"][0]["count"] == 3, "the new config is in force")
        home.write_config("max_batch_size: -1")
        eventually(lambda: "max_batch_size" in watcher.index()[home.name, "1"].get("reason", ""), "it is refused")
        traffic.wait_for(20)
        assert watcher.get(path)["instance_group"][0]["count"] == 3
        home.write_config("instance_group { count: 2 }")
        eventually(lambda: watcher.get(path)["instance_group"][0]["count"] == 2, "the next config is in force")
        traffic.wait_for(20)
    assert not traffic.failures


def test_generations_go_on_when_a_config_changes(explicit: Live, client: Client) -> None:
    """No number ever stands for two weight sets of a version that serves without a gap."""
    home = explicit.load(client)
    home.publish(1, label="one")
    client.load(home.name)
    home.write_config("instance_group { count: 2 }")
    client.load(home.name)
    home.expect(client, 1, generation=3)
    home.publish(2)
    client.load(home.name)
    home.expect(client, 2, generation=4)
    history = client.weights(home.name)["history"]
    assert [entry["generation"] for entry in history] == [1, 2, 3, 4]
    assert [entry["label"] for entry in history] == ["", "one", "one", ""]


def test_files_that_belong_to_no_model_cause_no_reload(polled: Live, watcher: Client) -> None:
    """Case R21."""
    home = polled.poll(watcher)
    home.expect(watcher, 0, generation=1)
    (home.path / ".config.pbtxt.swp").write_bytes(b"vim")
    (home.path / "config.pbtxt~").write_text("max_batch_size: -1")
    (home.path / "1" / "__pycache__").mkdir()
    (home.path / "1" / "__pycache__" / "model.pyc").write_bytes(b"pyc")
    (home.path / "1" / "model.safetensors.tmp").write_bytes(b"half")
    marker = polled.poll(watcher)  # seen by a later look, so the server has looked at those files as well
    marker.expect(watcher, 0, generation=1)
    assert home.executions(watcher) == 1
    assert "reason" not in watcher.index()[home.name, "1"]


def test_removed_version_directory_unloads_the_version_when_polling(polled: Live, watcher: Client) -> None:
    """Case R24: per policy, and requests go on without a failure."""
    home = polled.poll(watcher)
    home.publish(1, version=2)
    eventually(lambda: home.answers_as(watcher, 1), "version 2 answers")
    with Traffic(polled.server, home.name, [inputs(MLP)]) as traffic:
        shutil.rmtree(home.path / "2")
        eventually(lambda: home.answers_as(watcher, 0), "version 1 answers again")
    assert not traffic.failures
    shutil.rmtree(home.path)
    eventually(lambda: not any(name == home.name for name, _ in watcher.index()), "the model is forgotten")
    with pytest.raises(Failed, match="is not found"):
        home.answer(watcher)


def test_version_that_is_copied_in_pieces_is_served_when_it_is_whole(polled: Live, watcher: Client) -> None:
    """Case R25: the graph first, in two halves, and its weights later."""
    home = polled.poll(watcher)
    content = home.gallery.archive(EVERYTHING, 1).read_bytes()
    (home.path / "2").mkdir()
    eventually(lambda: (home.name, "2") in watcher.index(), "the empty directory is seen")
    home.expect(watcher, 0, generation=1)
    with home.file("model.pt2", 2).open("wb", buffering=0) as file:
        file.write(content[: len(content) // 2])
        eventually(lambda: "model.pt2" in watcher.index()[home.name, "2"].get("reason", ""), "the half is seen")
        home.expect(watcher, 0, generation=1)
        file.write(content[len(content) // 2 :])
    other = Home(EVERYTHING, home.path, home.gallery)
    eventually(lambda: other.answers_as(watcher, 1), "the whole version is served")
    other.add_weights(2, version=2)
    eventually(lambda: other.answers_as(watcher, 2), "its weights are served")
    other.expect(watcher, 2, generation=2, version=2)


def test_unload_lets_a_running_request_finish_and_refuses_new_ones(explicit: Live, client: Client) -> None:
    """Case R30; and another version can be loaded at that moment (R31)."""
    home = explicit.load(client, LOOPS, config=LONG_CONFIG)
    request = loops_inputs(ROWS)
    with explicit.server.client() as runner, explicit.server.client() as loader:
        start_long_request(explicit, runner, home, request)
        client.unload(home.name)
        assert client.index()[home.name, "1"]["state"] == "UNLOADING"
        assert not client.is_ready(f"/v2/models/{home.name}/ready")
        assert not client.is_ready()
        with pytest.raises(Failed, match="has no available versions") as refused:
            home.answer(client)
        assert refused.value.status == 404
        with pytest.raises(Failed, match="is not at ready state") as refused:
            home.answer(client, version=1)
        assert refused.value.status == 503
        shutil.rmtree(home.path / "1")
        home.add_weights(1, version=2)
        home.add_plan(0, version=2)
        loader.load(home.name)
        home.expect(client, 1, generation=1, version=2)
        answer = runner.read_infer()
        assert answer.version == 1
        assert same_bits(answer.outputs, eager(LOOPS, 0, request))
    assert client.index()[home.name, "1"] == {
        "name": home.name,
        "version": "1",
        "state": "UNAVAILABLE",
        "reason": "unloaded",
    }


def test_model_directory_that_is_replaced_as_a_whole_is_served_as_it_is_now(explicit: Live, client: Client) -> None:
    """Case R34: nothing of the old directory is used any more."""
    home = explicit.load(client, weights=1, config='parameters { key: "old" value { string_value: "yes" } }')
    home.expect(client, 1, generation=1)
    shutil.rmtree(home.path)
    home.path.mkdir()
    other = Home(EVERYTHING, home.path, home.gallery)
    other.add_plan(2)
    client.load(home.name)
    assert other.answers_as(client, 2)
    assert "old" not in client.get(f"/v2/models/{home.name}/config").get("parameters", {})
    with pytest.raises(Failed):
        home.answer(client)


def test_model_directory_that_is_replaced_while_polling_leaves_no_gap(polled: Live, watcher: Client) -> None:
    """Case R34."""
    home = polled.poll(watcher)
    new = Home(MLP, polled.root / ".new", polled.gallery)
    new.path.mkdir()
    new.add_plan(1)
    with Traffic(polled.server, home.name, [inputs(MLP)]) as traffic:
        home.path.rename(polled.root / ".old")
        new.path.rename(home.path)
        eventually(lambda: home.answers_as(watcher, 1), "the new directory is served")
    assert not traffic.failures


def start_long_request(live: Live, client: Client, home: Home, request: Inputs) -> None:
    """Returns when the request runs."""
    before = live.server.cpu_seconds()
    client.send_infer(home.name, request)
    eventually(lambda: live.server.cpu_seconds() > before + 0.2, "the request runs")


def _with_client(live: Live, work: Callable[[Client], object]) -> None:
    with live.server.client() as client:
        work(client)


def _at_once(*works: Callable[[], None]) -> list[Exception]:
    """Runs everything in threads that start together, within bounds; what they raised."""
    failures: list[Exception] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        barrier.wait()
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the test says that there are none
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "no progress"
    return failures
