"""Compiled packages through a real server: with weights inside and without, names, batches and refits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.life.models import EVERYTHING, MLP, Case, Form, Inputs, expected, inputs
from tests.life.traffic import Traffic
from tests.server import Client, Failed, eventually

if TYPE_CHECKING:
    from tests.life.repository import Home, Live

pytestmark = [pytest.mark.compiles, pytest.mark.timeout(300)]

MLP_CONFIG = """
    platform: "torch_aoti"
    max_batch_size: 64
    input { name: "INPUT__0" data_type: TYPE_FP32 dims: 16 }
    output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: 4 }
"""


def is_near(answer: Inputs, case: Case, seed: int) -> bool:
    """Whether it is the answer of eager PyTorch but for the order of sums."""
    want = expected(case, seed)
    return answer.keys() == want.keys() and all(
        np.abs(answer[name] - want[name]).max() <= case.compiled_bound * np.abs(want[name]).max() for name in want
    )


def answers_as(home: Home, client: Client, seed: int) -> bool:
    try:
        return is_near(home.answer(client).outputs, home.case, seed)
    except Failed:
        return False


def load(live: Live, client: Client, form: Form, weights: int | None = None, config: str = MLP_CONFIG) -> Home:
    return live.load(client, MLP, weights=weights, config=config, form=form)


def test_weights_inside_a_package_serve_until_there_is_a_file(explicit: Live, client: Client) -> None:
    before = len(explicit.server.log)
    home = load(explicit, client, Form.EMBEDDED)
    assert answers_as(home, client, 0)
    explicit.server.wait_for_log(f"Inference Mode is enabled for model instance '{home.name}'", after=before)
    assert client.get(f"/v2/models/{home.name}")["platform"] == "torch_aoti"
    home.add_weights(1)
    client.load(home.name)
    assert answers_as(home, client, 1)
    assert client.weights(home.name)["generation"] == 2
    home.file("model.safetensors").unlink()
    client.load(home.name)
    assert answers_as(home, client, 0)


def test_a_package_without_weights_is_not_ready_before_there_is_a_file(explicit: Live, client: Client) -> None:
    """Case T3: torch runs it all the same, which ends the process."""
    home = explicit.home(MLP, config=MLP_CONFIG, form=Form.WEIGHTLESS)
    client.load(home.name)
    assert client.index()[home.name, "1"]["reason"].startswith("WEIGHTS_PENDING")
    assert not client.is_ready(f"/v2/models/{home.name}/ready")
    with pytest.raises(Failed, match="WEIGHTS_PENDING"):
        home.answer(client)
    home.add_weights(1)
    client.load(home.name)
    assert answers_as(home, client, 1)


def test_a_replaced_weights_file_refits_under_traffic(polled: Live, watcher: Client) -> None:
    config = f"{MLP_CONFIG} instance_group {{ count: 2 }}"
    home = polled.home(MLP, config=config, weights=1, form=Form.WEIGHTLESS)
    eventually(lambda: answers_as(home, watcher, 1), "the weights file serves")
    with Traffic(polled.server, home.name, [inputs(MLP)]) as traffic:
        for seed in (2, 3, 4):
            home.add_weights(seed)
            eventually(lambda seed=seed: answers_as(home, watcher, seed), "the new weights answer")  # type: ignore[misc]
        traffic.wait_for(10)
    assert not traffic.failures
    assert {answer.generation for _, answer in traffic.answers} == {1, 2, 3, 4}
    assert all(is_near(answer.outputs, MLP, answer.generation) for _, answer in traffic.answers)


def test_a_version_of_weights_alone_runs_on_the_package_below(explicit: Live, client: Client) -> None:
    home = load(explicit, client, Form.EMBEDDED)
    home.publish(1, version=2)
    client.load(home.name)
    answer = home.answer(client)
    assert (answer.version, answer.generation) == (2, 1)
    assert is_near(answer.outputs, MLP, 1)


@pytest.mark.parametrize("name", ["INPUT__0", "ARGS[0]"])
@pytest.mark.parametrize("result", ["OUTPUT__0", "RESULT"])
def test_inputs_and_outputs_have_the_names_of_triton(name: str, result: str, explicit: Live, client: Client) -> None:
    config = MLP_CONFIG.replace("INPUT__0", name).replace("OUTPUT__0", result)
    home = load(explicit, client, Form.EMBEDDED, config=config)
    answer = client.infer(home.name, {name: inputs(MLP)["INPUT__0"]})
    assert is_near({"OUTPUT__0": answer.outputs[result]}, MLP, 0)


def test_batches_of_any_size_are_served_and_wrong_sizes_refused(explicit: Live, client: Client) -> None:
    home = load(explicit, client, Form.EMBEDDED)
    rows = np.random.default_rng(5).standard_normal((64, 16), np.float32)
    whole = client.infer(home.name, {"INPUT__0": rows}).output
    assert whole.shape == (64, 4)
    np.testing.assert_allclose(client.infer(home.name, {"INPUT__0": rows[:1]}).output, whole[:1], rtol=1e-5, atol=1e-6)
    with pytest.raises(Failed, match="unexpected shape"):
        client.infer(home.name, {"INPUT__0": rows[:, :15]})


def test_a_configuration_of_sizes_that_the_package_was_not_compiled_for_is_refused(
    explicit: Live, client: Client
) -> None:
    """Compiled code would read what is not there."""
    with pytest.raises(Failed, match=r"'INPUT__0' is configured as \[-1,-1\]"):
        load(explicit, client, Form.EMBEDDED, config=MLP_CONFIG.replace("dims: 16", "dims: -1"))


def test_a_package_with_everything_is_served(explicit: Live, client: Client) -> None:
    home = explicit.load(client, EVERYTHING, form=Form.EMBEDDED, config=EVERYTHING_CONFIG)
    assert answers_as(home, client, 0)


EVERYTHING_CONFIG = """
    platform: "torch_aoti"
    max_batch_size: 64
    input { name: "INPUT__0" data_type: TYPE_FP32 dims: [1, 8, 8] }
    output [
        { name: "OUTPUT__0" data_type: TYPE_FP32 dims: 10 },
        { name: "OUTPUT__1" data_type: TYPE_INT64 dims: 1 reshape { shape: [] } }
    ]
"""
