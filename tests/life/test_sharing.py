"""What ``ENABLE_WEIGHT_SHARING`` is for: sixteen instances of a large model, with sixteen copies of it or with one."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.life.models import WIDE, Form, Gallery, Inputs, same_bits
from tests.life.repository import Live
from tests.server import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

    from tests.life.conftest import Start
    from tests.life.repository import Home
    from tests.server import Client

pytestmark = pytest.mark.timeout(300)

MB = 1_000_000
INSTANCES = 16
REQUESTS = 128
COPY = 100 * MB
"""At least: the weights of :data:`WIDE`."""
SHARING = 'parameters { key: "ENABLE_WEIGHT_SHARING" value { string_value: "true" } }'
CONFIG = f"""
    max_batch_size: 8
    input {{ name: "INPUT__0" data_type: TYPE_FP32 dims: 16 }}
    output {{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: 8 }}
    instance_group {{ count: {INSTANCES} }}
"""
REUSE_LINES = {
    Form.TRACED: "Reusing TorchScript model for instance '{}'",
    Form.WEIGHTLESS: r"Reusing Inductor model loader for instance \"{}\".",  # the log escapes quotation marks
}
PLATFORMS = {Form.TRACED: "pytorch_libtorch", Form.WEIGHTLESS: "torch_aoti"}
FORMS = [Form.TRACED, pytest.param(Form.WEIGHTLESS, marks=pytest.mark.compiles)]


@pytest.fixture
def live(start: Start, gallery: Gallery, tmp_path: Path) -> Iterator[Live]:
    """A server of its own, which has torch imported already: that is large itself."""
    flags = ("--model-control-mode=explicit", "--spare-weights-idle-secs=0")
    with start(tmp_path, flags=flags) as server:
        live = Live(server, tmp_path, gallery)
        with server.client() as client:
            live.load(client).expect(client, 0, generation=1)
        yield live
        assert server.stop() == 0


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.value)
def test_sixteen_instances_with_weight_sharing_hold_one_copy(form: Form, live: Live) -> None:
    server = live.server
    with server.client() as client:
        before, logged = server.pss_bytes(), len(server.log)
        home = load(live, client, form, SHARING)
        server.wait_for_log(f"successfully loaded '{home.name}'", after=logged)
        check(ask_all_at_once(live, home), seed=0, form=form)
        weights = client.weights(home.name)["bytes"]["total"]
        assert weights > COPY
        assert server.pss_bytes() - before < 1.1 * weights + 400 * MB
        assert server.log[logged:].count(REUSE_LINES[form].format(home.name)) == INSTANCES - 1

        refit(client, home)
        check(ask_all_at_once(live, home), seed=1, form=form)
        eventually(
            lambda: server.pss_bytes() - before < 1.1 * weights + 400 * MB,
            "that of the old weights is given back",
        )
        client.unload(home.name)
        eventually(lambda: server.pss_bytes() - before < 400 * MB, "the memory is given back with the last instance")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.value)
def test_sixteen_instances_without_weight_sharing_hold_sixteen_copies(form: Form, live: Live) -> None:
    server = live.server
    with server.client() as client:
        before, logged = server.pss_bytes(), len(server.log)
        home = load(live, client, form)
        server.wait_for_log(f"successfully loaded '{home.name}'", after=logged)
        check(ask_all_at_once(live, home), seed=0, form=form)
        copies = INSTANCES * client.weights(home.name)["bytes"]["total"]
        assert 0.95 * copies < server.pss_bytes() - before < 1.1 * copies + 400 * MB
        assert "Reusing" not in server.log[logged:]


def load(live: Live, client: Client, form: Form, settings: str = "") -> Home:
    platform = f'platform: "{PLATFORMS[form]}"'
    weights = 0 if form is Form.WEIGHTLESS else None
    return live.load(client, WIDE, form=form, weights=weights, config=f"{platform} {CONFIG} {settings}")


def refit(client: Client, home: Home) -> None:
    home.add_weights(1)
    client.load(home.name)
    assert client.weights(home.name)["generation"] == 2


def ask_all_at_once(live: Live, home: Home) -> list[Inputs]:
    """The answers to :func:`requests`, all of which are sent before any is read. They are those given one by one."""
    with ExitStack() as stack:
        clients = [stack.enter_context(live.server.client()) for _ in range(REQUESTS)]
        for client, request in zip(clients, requests(), strict=True):
            client.send_infer(home.name, request)
        answers = [client.read_infer().outputs for client in clients]
        for answer, request in zip(answers, requests(), strict=True):
            assert same_bits(answer, clients[0].infer(home.name, request).outputs)
    return answers


@functools.cache
def requests() -> list[Inputs]:
    random = np.random.default_rng(0)
    return [{"INPUT__0": random.standard_normal((2, 16), np.float32)} for _ in range(REQUESTS)]


@functools.cache
def expected_answers(seed: int) -> list[npt.NDArray[np.float32]]:
    model = WIDE.model(seed)
    torch.set_num_threads(1)
    with torch.inference_mode():
        return [model(torch.from_numpy(request["INPUT__0"])).numpy() for request in requests()]


def check(answers: list[Inputs], *, seed: int, form: Form) -> None:
    for answer, want in zip(answers, expected_answers(seed), strict=True):
        if form.is_torchscript:
            assert answer["OUTPUT__0"].tobytes() == want.tobytes()
        else:
            assert np.abs(answer["OUTPUT__0"] - want).max() <= WIDE.compiled_bound * np.abs(want).max()
