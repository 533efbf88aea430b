"""TorchScript models through a real server: what users of Triton's PyTorch backend know, and refits."""

from __future__ import annotations

import json
import re
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.life.models import COUNTER, EVERYTHING, MLP, NAMED, WORDS, Case, Form, expected, inputs, same_bits
from tests.life.traffic import Traffic
from tests.server import Client, Failed, eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.life.repository import Home, Live

pytestmark = pytest.mark.timeout(180)

PLATFORM = 'platform: "pytorch_libtorch"'
MLP_IO = """
    max_batch_size: 64
    input { name: "INPUT__0" data_type: TYPE_FP32 dims: 16 }
    output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: 4 }
"""
MLP_CONFIG = PLATFORM + MLP_IO
EVERYTHING_CONFIG = f"""
    {PLATFORM}
    max_batch_size: 64
    input {{ name: "INPUT__0" data_type: TYPE_FP32 dims: [1, 8, 8] }}
    output [
        {{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: 10 }},
        {{ name: "OUTPUT__1" data_type: TYPE_INT64 dims: 1 reshape {{ shape: [] }} }}
    ]
"""
COUNTER_CONFIG = f"""
    {PLATFORM}
    input {{ name: "rounds" data_type: TYPE_INT64 dims: 1 }}
    output {{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: 1 }}
"""
WORDS_CONFIG = f"""
    {PLATFORM}
    input [{{ name: "words" data_type: TYPE_STRING dims: -1 }}, {{ name: "times" data_type: TYPE_INT64 dims: 1 }}]
    output [
        {{ name: "OUTPUT__0" data_type: TYPE_STRING dims: -1 }}, {{ name: "OUTPUT__1" data_type: TYPE_FP32 dims: 1 }}
    ]
"""
NAMED_CONFIG = f"""
    {PLATFORM}
    input [{{ name: "right" data_type: TYPE_FP32 dims: 4 }}, {{ name: "left" data_type: TYPE_FP32 dims: 4 }}]
    output {{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: 4 }}
"""


def parameters(**values: str) -> str:
    return "\n".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in values.items()
    )


def load(live: Live, client: Client, case: Case = MLP, config: str = MLP_CONFIG, weights: int | None = None) -> Home:
    return live.load(client, case, config=config, weights=weights, form=Form.SCRIPTED)


def log_of_load(live: Live, home: Home, before: int) -> str:
    """What the server has printed since ``before`` until the model was loaded; it may arrive after the answer."""
    end = live.server.wait_for_log(f"successfully loaded '{home.name}'", after=before).end()
    return live.server.log[before:end]


def lines_about(home: Home, log: str) -> list[str]:
    """The messages of the log that are about the instances of a model, in order."""
    return re.findall(rf"([^\"\]]*) for model instance '{home.name}'", log)


# What is served


@pytest.mark.parametrize("form", [Form.SCRIPTED, Form.TRACED], ids=lambda form: form.value)
def test_answers_are_those_of_pytorch_bit_for_bit(form: Form, explicit: Live, client: Client) -> None:
    home = explicit.load(client, EVERYTHING, config=EVERYTHING_CONFIG, form=form)
    home.expect(client, 0, generation=1)
    metadata = client.get(f"/v2/models/{home.name}")
    assert metadata["platform"] == "pytorch_libtorch"
    assert client.weights(home.name)["tier"] == "compiled"


def test_backend_pytorch_without_a_platform_serves_model_pt(explicit: Live, client: Client) -> None:
    load(explicit, client, config=f'backend: "pytorch" {MLP_IO}').expect(client, 0, generation=1)


def test_inputs_may_be_named_as_the_arguments_of_forward(explicit: Live, client: Client) -> None:
    home = load(explicit, client, config=MLP_CONFIG.replace("INPUT__0", "features"))
    answer = client.infer(home.name, {"features": inputs(MLP)["INPUT__0"]})
    assert same_bits(answer.outputs, expected(MLP, 0))


def test_names_that_say_nothing_are_taken_in_order_with_a_warning(explicit: Live, client: Client) -> None:
    before = len(explicit.server.log)
    home = load(explicit, client, config=MLP_CONFIG.replace("INPUT__0", "image"))
    client.infer(home.name, {"image": inputs(MLP)["INPUT__0"]})
    assert (
        "input 'image' or previous input(s) are neither an input argument to the model "
        f"'{home.name}' nor do they follow the <name>__<index> naming convention. "
        "Falling back to enforcing strict ordering from model configuration."
    ) in log_of_load(explicit, home, before)


def test_a_dictionary_has_the_configured_inputs(explicit: Live, client: Client) -> None:
    home = load(explicit, client, NAMED, NAMED_CONFIG)
    left, right = (np.random.default_rng(seed).standard_normal(4).astype(np.float32) for seed in (1, 2))
    answer = client.infer(home.name, {"left": left, "right": right})
    with torch.inference_mode():
        want = NAMED.model(0)({"left": torch.from_numpy(left), "right": torch.from_numpy(right)})
    assert answer.output.tobytes() == want.numpy().tobytes()


def test_text_numbers_and_results_without_dimensions(explicit: Live, client: Client) -> None:
    home = load(explicit, client, WORDS, WORDS_CONFIG)
    assert ask_words(client, home, ["grüße", ""], 2) == (["grüßex2", "x2"], [4.0])


# Parameters


def test_every_model_logs_the_switches_that_have_a_default(explicit: Live, client: Client) -> None:
    before = len(explicit.server.log)
    home = load(explicit, client, config=f"{MLP_CONFIG} instance_group {{ count: 3 }}")
    assert lines_about(home, log_of_load(explicit, home, before)) == [
        "Optimized execution is enabled",
        "Cache Cleaning is disabled",
        "Inference Mode is enabled",
        "cuDNN is enabled",
    ]


def test_parameters_that_are_set_are_logged_as_triton_does(explicit: Live, client: Client) -> None:
    before = len(explicit.server.log)
    settings = parameters(
        DISABLE_OPTIMIZED_EXECUTION="On",
        ENABLE_CACHE_CLEANING="TRUE",
        INFERENCE_MODE="0",
        DISABLE_CUDNN="1",
        ENABLE_TENSOR_FUSER="false",
        ENABLE_WEIGHT_SHARING="true",
        ENABLE_JIT_PROFILING="off",
        ENABLE_JIT_EXECUTOR="true",
        INTRA_OP_THREAD_COUNT="2",
        ENABLE_NVFUSER="true",
    )
    home = load(explicit, client, config=f"{MLP_CONFIG} {settings}")
    log = log_of_load(explicit, home, before)
    assert lines_about(home, log) == [
        "Optimized execution is disabled",
        "Cache Cleaning is enabled",
        "Inference Mode is disabled",
        "cuDNN is disabled",
        "Tensor fuser is disabled",
        "Weight sharing is enabled",
        "Jit profiling is disabled",
        "Jit executor is enabled",
        "Intra op thread count is set to 2",
    ]
    assert f"ENABLE_NVFUSER has no effect on model '{home.name}'" in log
    home.expect(client, 0, generation=1)


def test_instances_of_a_model_with_state_have_their_own(explicit: Live, client: Client) -> None:
    home = load(explicit, client, COUNTER, f"{COUNTER_CONFIG} instance_group {{ count: 2 }}")
    assert two_counts_at_once(explicit, home) == [1, 1]


def test_weight_sharing_of_a_model_with_state_is_done_with_a_warning(explicit: Live, client: Client) -> None:
    before = len(explicit.server.log)
    sharing = parameters(ENABLE_WEIGHT_SHARING="true")
    home = load(explicit, client, COUNTER, f"{COUNTER_CONFIG} instance_group {{ count: 2 }} {sharing}")
    log = log_of_load(explicit, home, before)
    assert f"Reusing TorchScript model for instance '{home.name}'" in log
    assert f"model '{home.name}' writes to calls when it runs, and its instances share them" in log
    assert two_counts_at_once(explicit, home)[1] == 2
    assert [count(client, home) for _ in range(3)] == [3, 4, 5]


def test_a_refit_begins_with_the_state_of_the_new_weights(explicit: Live, client: Client) -> None:
    home = load(explicit, client, COUNTER, COUNTER_CONFIG)
    assert [count(client, home) for _ in range(3)] == [1, 2, 3]
    path = COUNTER.save(
        {"step": torch.full((1,), 10.0), "calls": torch.full((1,), 5.0)}, home.file("model.safetensors")
    )
    client.load(home.name)
    assert path.exists()
    assert [count(client, home) for _ in range(3)] == [15, 25, 35]


# Errors


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (f"{MLP_CONFIG} {parameters(INFERENCE_MODE='maybe')}", "failed to convert 'maybe' to boolean"),
        (MLP_CONFIG.replace("TYPE_FP32 dims: 16", "TYPE_UINT32 dims: 16"), "unsupported datatype TYPE_UINT32"),
        (
            f'{MLP_CONFIG} input {{ name: "INPUT__1" data_type: TYPE_FP32 dims: 1 }}',
            "configuration expects 2 inputs, model provides 1",
        ),
        (MLP_CONFIG.replace("OUTPUT__0", "OUTPUT__7"), "refers to an output index which doesn't exist"),
        (f"{MLP_CONFIG} instance_group {{ kind: KIND_GPU }}", "GPU"),
        (PLATFORM, "input"),
    ],
    ids=["boolean", "datatype", "input count", "output index", "gpu", "no inputs"],
)
def test_a_configuration_that_cannot_be_served_is_refused(
    config: str, reason: str, explicit: Live, client: Client
) -> None:
    home = explicit.home(config=config, form=Form.SCRIPTED)
    with pytest.raises(Failed, match=reason):
        client.load(home.name)
    assert reason in client.index()[home.name, "1"]["reason"]


def test_what_forward_raises_is_the_answer_and_the_model_goes_on(explicit: Live, client: Client) -> None:
    home = load(explicit, client, config=MLP_CONFIG.replace("dims: 16", "dims: -1"))
    with pytest.raises(Failed, match=r"(?s)^PyTorch execute failure: .*mat1 and mat2 shapes") as failure:
        client.infer(home.name, {"INPUT__0": np.zeros((1, 3), np.float32)})
    assert failure.value.status == 500
    home.expect(client, 0, generation=1)


def test_an_output_of_another_type_than_configured_is_refused(explicit: Live, client: Client) -> None:
    home = load(explicit, client, config=MLP_CONFIG.replace("TYPE_FP32 dims: 4", "TYPE_INT64 dims: 4"))
    with pytest.raises(
        Failed, match="configuration expects datatype TYPE_INT64 for output 'OUTPUT__0', model provides TYPE_FP32"
    ):
        home.answer(client)


@pytest.mark.parametrize("harm", ["cut", "noise", "claim", "empty"])
def test_a_damaged_model_file_is_refused_and_other_models_go_on(harm: str, explicit: Live, client: Client) -> None:
    """Case T1."""
    bystander = load(explicit, client)
    home = explicit.home(config=MLP_CONFIG, form=Form.SCRIPTED)
    path = home.file("model.pt")
    path.write_bytes(HARMS[harm](path.read_bytes()))
    with Traffic(explicit.server, bystander.name, [inputs(MLP)], threads=1) as traffic:
        with pytest.raises(Failed, match=r"model\.pt"):
            client.load(home.name)
        traffic.wait_for(3)
    assert not traffic.failures
    home.add_plan(0)
    client.load(home.name)
    home.expect(client, 0, generation=1)


def _claims_more(content: bytes) -> bytes:
    """Says in the archive's directory that the first tensor has 2.2 GB."""
    entry = content.index(b"/data/0", content.index(b"PK\x01\x02"))
    start = content.rindex(b"PK\x01\x02", 0, entry)
    sizes = struct.pack("<II", 2_200_000_000, 2_200_000_000)
    return content[: start + 20] + sizes + content[start + 28 :]


HARMS: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: len(content) // 2],
    "noise": lambda content: np.random.default_rng(0).bytes(len(content)),
    "claim": _claims_more,
    "empty": lambda _: b"",
}


# Weights


def test_a_replaced_weights_file_refits_under_traffic(polled: Live, watcher: Client) -> None:
    home = polled.home(config=f"{MLP_CONFIG} instance_group {{ count: 2 }}", weights=1, form=Form.SCRIPTED)
    eventually(lambda: home.answers_as(watcher, 1), "the weights file serves")
    with Traffic(polled.server, home.name, [inputs(MLP)]) as traffic:
        for seed in (2, 3, 4):
            home.add_weights(seed)
            eventually(lambda seed=seed: home.answers_as(watcher, seed), "the new weights answer")  # type: ignore[misc]
        traffic.wait_for(10)
    assert not traffic.failures
    pure = {generation: expected(MLP, generation) for generation in (1, 2, 3, 4)}
    assert all(same_bits(answer.outputs, pure[answer.generation]) for _, answer in traffic.answers)
    assert {answer.generation for _, answer in traffic.answers} == {1, 2, 3, 4}


def test_a_version_of_weights_alone_runs_on_the_model_file_below(explicit: Live, client: Client) -> None:
    home = load(explicit, client)
    key = client.weights(home.name)["plan_key"]
    home.publish(1, version=2, label="step-9")
    client.load(home.name)
    assert home.expect(client, 1, generation=1, version=2).label == "step-9"
    assert client.weights(home.name, 2)["plan_key"] == key


def test_a_model_file_that_differs_in_weights_only_is_a_refit(explicit: Live, client: Client) -> None:
    home = load(explicit, client)
    home.expect(client, 0, generation=1)
    home.add_plan(1)
    client.load(home.name)
    home.expect(client, 1, generation=2)


def write_npz(state: dict[str, torch.Tensor], path: Path) -> None:
    arrays: dict[str, Any] = {name: np.asfortranarray(tensor.numpy()) for name, tensor in state.items()}
    np.savez(path, **arrays)


def write_wts(state: dict[str, torch.Tensor], path: Path) -> None:
    """As TensorRT's samples do: names, counts, and the bits of each number in hexadecimal."""
    lines = [str(len(state))]
    for name, tensor in state.items():
        numbers = " ".join(struct.pack(">f", number).hex() for number in tensor.flatten().tolist())
        lines.append(f"{name} {tensor.numel()} {numbers}")
    path.write_text("\n".join(lines) + "\n")


def write_pth(state: dict[str, torch.Tensor], path: Path) -> None:
    torch.save({f"module.{name}": tensor.t().contiguous().t() for name, tensor in state.items()}, path)


@pytest.mark.parametrize("write", [write_npz, write_wts, write_pth], ids=["npz", "wts", "pth"])
def test_weights_files_of_every_format_refit(
    write: Callable[[dict[str, torch.Tensor], Path], None], explicit: Live, client: Client
) -> None:
    home = load(explicit, client)
    write(MLP.state(1), home.file(f"model.{write.__name__.removeprefix('write_')}"))
    client.load(home.name)
    home.expect(client, 1, generation=2)


def test_weights_that_do_not_fit_leave_the_old_ones_serving(explicit: Live, client: Client) -> None:
    home = load(explicit, client, weights=1)
    state: dict[str, Any] = MLP.state(2)
    MLP.save({**state, "second.bias": torch.zeros(5)}, home.file("model.safetensors"))
    with pytest.raises(Failed, match=r"second\.bias.*\[4\].*\[5\]"):
        client.load(home.name)
    home.expect(client, 1, generation=1)


def ask_words(client: Client, home: Home, words: list[str], times: int) -> tuple[list[str], list[float]]:
    request = {
        "inputs": [
            {"name": "words", "datatype": "BYTES", "shape": [len(words)], "data": words},
            {"name": "times", "datatype": "INT64", "shape": [1], "data": [times]},
        ]
    }
    _, content = client.call("POST", f"/v2/models/{home.name}/infer", json.dumps(request).encode())
    outputs = {output["name"]: output for output in json.loads(content)["outputs"]}
    assert outputs["OUTPUT__1"]["shape"] == [1]
    return outputs["OUTPUT__0"]["data"], outputs["OUTPUT__1"]["data"]


ROUNDS = np.array([500], np.int64)
"""Half a second or so: a request that is sent right after another arrives long before that is answered."""


def count(client: Client, home: Home) -> float:
    answer: float = client.infer(home.name, {"rounds": ROUNDS[:1] * 0}).output.item()
    return answer


def two_counts_at_once(live: Live, home: Home) -> list[float]:
    with live.server.client() as left, live.server.client() as right:
        for client in (left, right):
            client.send_infer(home.name, {"rounds": ROUNDS})
        return sorted(client.read_infer().output.item() for client in (left, right))
