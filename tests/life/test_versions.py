"""Which versions serve: the three policies, while versions come and go under traffic."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.life.models import MLP, inputs
from tests.life.traffic import Traffic
from tests.server import Client, Failed, eventually

if TYPE_CHECKING:
    from tests.life.repository import Home, Live

pytestmark = pytest.mark.timeout(180)


def served(client: Client, home: Home) -> list[str]:
    versions: list[str] = client.get(f"/v2/models/{home.name}")["versions"]
    return versions


def test_latest_version_takes_over_without_a_failed_request(polled: Live, watcher: Client) -> None:
    home = polled.poll(watcher)
    with Traffic(polled.server, home.name, [inputs(MLP)]) as traffic:
        for version in (2, 3, 10):
            home.publish(version % 3, version=version)
            alone = [str(version)]
            eventually(lambda: served(watcher, home) == alone, "the new version serves alone")  # noqa: B023 - at once
            traffic.wait_for(20)
        shutil.rmtree(home.path / "10")
        eventually(lambda: served(watcher, home) == ["3"], "the version before serves again")
    assert not traffic.failures
    home.expect(watcher, 0, generation=1, version=3)


def test_all_versions_serve_each_with_its_weights(polled: Live, watcher: Client) -> None:
    home = polled.poll(watcher, config="version_policy { all {} }")
    requests = [inputs(MLP)]
    with (
        Traffic(polled.server, home.name, requests) as latest,
        Traffic(polled.server, home.name, requests, version=1) as first,
    ):
        home.publish(1, version=2)
        eventually(lambda: served(watcher, home) == ["1", "2"], "version 2 is added")
        home.publish(2, version=5)
        eventually(lambda: served(watcher, home) == ["1", "2", "5"], "version 5 is added")
        for version, seed in ((1, 0), (2, 1), (5, 2)):
            assert home.answers_as(watcher, seed, version)
        home.expect(watcher, 2, generation=1, version=5)
        home.publish(1, version=1, label="refit of one")
        eventually(lambda: home.answers_as(watcher, 1, version=1), "version 1 alone is refitted")
        assert watcher.weights(home.name, 1)["generation"] == 2
        assert watcher.weights(home.name, 5)["generation"] == 1
        shutil.rmtree(home.path / "2")
        eventually(lambda: served(watcher, home) == ["1", "5"], "version 2 is removed")
        with pytest.raises(Failed, match="version 2 is not at ready state"):
            home.answer(watcher, version=2)
        with pytest.raises(Failed, match="version 7 is not found"):
            home.answer(watcher, version=7)
    assert not latest.failures
    assert not first.failures
    assert {answer.version for _, answer in first.answers} == {1}


def test_policy_that_is_edited_changes_the_versions_without_a_failed_request(explicit: Live, client: Client) -> None:
    home = explicit.load(client, config="version_policy { latest { num_versions: 2 } }")
    for version, seed in ((2, 1), (3, 2)):
        home.publish(seed, version=version)
    with Traffic(explicit.server, home.name, [inputs(MLP)]) as traffic:
        client.load(home.name)
        assert served(client, home) == ["2", "3"]
        home.write_config("version_policy { specific { versions: [1, 3, 9] } }")
        client.load(home.name)
        assert served(client, home) == ["1", "3"]
        explicit.server.wait_for_log(f"version 9 is specified for model '{home.name}'")
        home.write_config("version_policy { specific { versions: [2] } }")
        client.load(home.name)
        assert served(client, home) == ["2"]
        traffic.wait_for(10)
    assert not traffic.failures
    home.expect(client, 1, generation=1, version=2)


def test_one_bad_version_of_several_changes_nothing(explicit: Live, client: Client) -> None:
    """Triton's rule: all new versions or none."""
    home = explicit.load(client, config="version_policy { all {} }")
    home.publish(1, version=2)
    home.publish(2, version=3).write_bytes(b"bad")
    with pytest.raises(Failed, match="version 3 is at UNAVAILABLE state"):
        client.load(home.name)
    assert served(client, home) == ["1"]
    assert "because version 3 failed" in client.index()[home.name, "2"]["reason"]
    home.publish(2, version=3)
    client.load(home.name)
    assert served(client, home) == ["1", "2", "3"]
