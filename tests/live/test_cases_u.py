"""The cases U of past reports, on weights that are pushed: what went wrong elsewhere while weights were updated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.life.models import EVERYTHING, LOOPS, LOOPS_ROWS, MLP, Form, eager, expected, inputs, loops_inputs, same_bits
from tests.life.test_lifecycle import start_long_request
from tests.life.traffic import Traffic
from tests.live.models import BIGGER_HUNDRED, HUNDRED, SMALL, arrays, nbytes, part
from tests.server import Client, Failed

if TYPE_CHECKING:
    from tests.life.repository import Live

pytestmark = pytest.mark.timeout(180)


def test_weights_of_a_bigger_sibling_are_refused_and_the_old_ones_answer_on(live: Live, client: Client) -> None:
    """Case U1."""
    home = live.load(client, HUNDRED)
    before = client.weights(home.name)
    with pytest.raises(Failed, match=r"100 faults(?s:.*)parts\.0': expected shape \[256\], got \[512\]") as refused:
        client.push(home.name, arrays(BIGGER_HUNDRED, 1), label="bigger")
    assert refused.value.status == 400
    home.expect(client, 0, generation=1)
    assert client.weights(home.name)["digest"] == before["digest"]


def test_any_number_of_failed_updates_leave_none_under_way(live: Live, client: Client) -> None:
    """Case U3."""
    home = live.load(client)
    for _ in range(20):
        with pytest.raises(Failed, match="missing"):
            client.push(home.name, part(MLP, 1, "first.bias"))
        stage = client.put(client.open_stage(home.name), part(MLP, 1, "first.bias"))
        with pytest.raises(Failed, match="missing"):
            client.commit(stage)
        client.abort(stage)
    assert client.stages(home.name) == []
    assert client.weights(home.name)["state"] == "SERVING"
    client.push(home.name, arrays(MLP, 1))
    home.expect(client, 1, generation=2)


def test_nothing_live_is_written_before_the_last_bucket_is_in(live: Live, client: Client) -> None:
    """Case U4."""
    home = live.load(client, SMALL)
    names = sorted(arrays(SMALL, 1))
    stage = client.put(client.open_stage(home.name), part(SMALL, 1, *names[:8]))
    home.expect(client, 0, generation=1)
    with pytest.raises(Failed, match=r"parts\.9': expected shape"):
        client.put(stage, {"parts.9": np.zeros(7, np.float32)})
    home.expect(client, 0, generation=1)
    assert sorted(client.stage(stage)["received"]) == names[:8]
    client.put(stage, part(SMALL, 1, *names[8:]))
    home.expect(client, 0, generation=1)
    client.commit(stage)
    home.expect(client, 1, generation=2)


def test_label_changes_only_with_the_weights(live: Live, client: Client) -> None:
    """Case U5."""
    home = live.load(client)
    client.push(home.name, arrays(MLP, 1), label="step-1")
    nan = {**arrays(MLP, 2), "first.bias": np.full(64, np.nan, np.float32)}
    with pytest.raises(Failed, match=r"first\.bias"):
        client.push(home.name, nan, label="step-2")
    stage = client.put(client.open_stage(home.name), nan)
    with pytest.raises(Failed, match=r"first\.bias"):
        client.commit(stage, label="step-2")
    client.abort(stage)
    client.push(home.name, arrays(MLP, 2), label="step-2", dry_run=True)
    with pytest.raises(Failed, match="label"):
        client.push(home.name, arrays(MLP, 2), label="no\nlabel")
    assert home.expect(client, 1, generation=2).label == "step-1"
    report = client.weights(home.name)
    assert report["label"] == "step-1"
    assert [entry["label"] for entry in report["history"]] == ["", "step-1"]


def test_cached_answers_are_those_of_the_weights_that_they_name(live: Live, client: Client) -> None:
    """Case U6: the same question all the time, before, during and after updates."""
    home = live.load(client, config="response_cache { enable: true }")
    with Traffic(live.server, home.name, [inputs(MLP)]) as traffic:
        for generation in range(2, 12):
            client.push(home.name, arrays(MLP, generation % 3), label=f"seed-{generation % 3}")
            home.expect(client, generation % 3, generation)
            traffic.wait_for(20)
    assert not traffic.failures
    for _, answer in traffic.answers:
        seed = 0 if answer.generation == 1 else answer.generation % 3
        assert same_bits(answer.outputs, expected(MLP, seed))
        assert answer.label == ("" if answer.generation == 1 else f"seed-{seed}")
    assert home.executions(client) < len(traffic.answers) / 2, "the cache was not used"


@pytest.mark.parametrize("form", [Form.EXPORTED, Form.SCRIPTED], ids=lambda form: form.value)
def test_what_is_derived_from_weights_is_derived_anew_each_time(form: Form, live: Live, client: Client) -> None:
    """Case U7: batch norm, a tied pair, a scalar, a constant; the second update begins as the first one did."""
    home = live.load(client, EVERYTHING, form=form, config=EVERYTHING_CONFIG if form is Form.SCRIPTED else "")
    for generation, seed in enumerate((1, 2, 1, 0), start=2):
        client.push(home.name, arrays(EVERYTHING, seed))
        home.expect(client, seed, generation)


EVERYTHING_CONFIG = """
    platform: "pytorch_libtorch"
    max_batch_size: 64
    input { name: "INPUT__0" data_type: TYPE_FP32 dims: [1, 8, 8] }
    output [
        { name: "OUTPUT__0" data_type: TYPE_FP32 dims: 10 },
        { name: "OUTPUT__1" data_type: TYPE_INT64 dims: 1 reshape { shape: [] } }
    ]
"""


def test_request_that_waited_during_the_update_is_answered_and_labelled_by_the_new_weights(
    live: Live, client: Client
) -> None:
    """Case U8."""
    home = live.load(client, LOOPS, config=f"max_batch_size: {LOOPS_ROWS}")
    long, short = loops_inputs(512), loops_inputs(2)
    with live.server.client() as runs, live.server.client() as waits:
        start_long_request(live, runs, home, long)
        waits.send_infer(home.name, short)
        client.push(home.name, arrays(LOOPS, 1), label="new")
        before, after = runs.read_infer(), waits.read_infer()
    assert (before.generation, before.label) == (1, "")
    assert same_bits(before.outputs, eager(LOOPS, 0, long))
    assert (after.generation, after.label) == (2, "new")
    assert same_bits(after.outputs, eager(LOOPS, 1, short))


def test_equal_weights_are_told_and_cost_nothing(live: Live, client: Client) -> None:
    """Case U9."""
    home = live.load(client)
    first = client.push(home.name, arrays(MLP, 1), label="one")
    again = client.push(home.name, arrays(MLP, 1), label="two")
    assert again["outcome"] == "unchanged"
    assert (again["generation"], again["label"], again["digest"]) == (2, "one", first["digest"])
    assert again["copied_bytes"] == 0
    assert len(client.weights(home.name)["history"]) == 2
    home.expect(client, 1, generation=2)


@pytest.mark.parametrize("mode", ["full", "patch"])
def test_one_changed_tensor_of_a_hundred_is_all_that_is_copied(mode: str, live: Live, client: Client) -> None:
    """Case U9."""
    home = live.load(client, HUNDRED)
    seed = 70 if mode == "full" else 71  # as no other model has it: equal tensors are shared by all
    changed = part(HUNDRED, seed, "parts.42")
    report = client.push(home.name, changed if mode == "patch" else {**arrays(HUNDRED, 0), **changed}, mode=mode)
    assert report["outcome"] == "committed"
    assert report["copied_bytes"] == nbytes(changed)
    assert report["shared_bytes"] == 99 * nbytes(changed)
    bounds = home.answer(client).output[0].reshape(100, 2)
    right = [[index + 1] * 2 for index in range(100)]
    right[42] = [1000 * seed + 43] * 2
    assert bounds.tolist() == right


def test_a_reload_without_an_unload_leaves_no_gap_and_keeps_what_was_pushed(live: Live, client: Client) -> None:
    """Case U10; until the repository has other weights."""
    home = live.load(client)
    with Traffic(live.server, home.name, [inputs(MLP)]) as traffic:
        for count, seed in ((2, 1), (3, 2), (1, 3)):
            generation = client.push(home.name, arrays(MLP, seed), label=f"seed {seed}")["generation"]
            home.write_config(f"instance_group {{ count: {count} }}")
            client.load(home.name)
            assert home.expect(client, seed, generation + 1).label == f"seed {seed}"
            traffic.wait_for(10)
        home.add_weights(4)
        home.write_config("instance_group { count: 2 }")
        client.load(home.name)
        assert home.expect(client, 4, generation=8).label == ""
    assert not traffic.failures
    for _, answer in traffic.answers:
        assert same_bits(answer.outputs, expected(MLP, int(answer.label[5:] or (4 if answer.generation == 8 else 0))))
    assert [entry["generation"] for entry in client.weights(home.name)["history"]] == list(range(1, 9))
