"""Weights out of a training program into a real server: by every road the same, bit for bit that of eager PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import rebind
from rebind.client import WeightsClient
from rebind.errors import (
    DigestMismatch,
    InvalidArgument,
    NotFound,
    Unavailable,
    WeightsRefused,
)
from tests.client.conftest import far, load_warm, near, new_seeds
from tests.life.models import EVERYTHING, MLP, expected, inputs, same_bits
from tests.life.traffic import Traffic
from tests.live.models import SMALL, THIRD, arrays, nbytes, part

if TYPE_CHECKING:
    from tests.life.repository import Live
    from tests.server import Client

pytestmark = pytest.mark.timeout(120)


def test_pushed_module_answers_as_eager_pytorch(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer)
    update = client.push(home.name, MLP.model(1), label="step-1")
    assert (update.model, update.version, update.generation, update.label) == (home.name, 1, 2, "step-1")
    assert update.committed
    assert home.expect(infer, 1, generation=2).label == "step-1"


def test_both_roads_give_one_digest(live: Live, infer: Client, here: WeightsClient, away: WeightsClient) -> None:
    home = load_warm(live, infer, here, THIRD)
    shared = here.push(home.name, arrays(THIRD, 1))
    home.expect(infer, 1, generation=2)
    assert shared.received_bytes == 0
    assert away.push(home.name, arrays(THIRD, 2)).received_bytes > nbytes(arrays(THIRD, 2))
    home.expect(infer, 2, generation=3)
    streamed = away.push(home.name, arrays(THIRD, 1))
    home.expect(infer, 1, generation=4)
    assert shared.digest == streamed.digest


def test_pushes_that_follow_each_other_share_memory(
    live: Live, infer: Client, client: WeightsClient, road: str
) -> None:
    home, other = live.load(infer, SMALL), live.load(infer, SMALL)
    received = []
    for generation, seed in enumerate((1, 2, 3), start=2):
        received.append(client.push(home.name, SMALL.model(seed)).received_bytes)
        home.expect(infer, seed, generation)
    assert [count > 0 for count in received] == [True, road == "far", road == "far"]
    assert len(infer.stages(home.name)) == (road == "near")

    client.push(other.name, SMALL.model(1))
    client.push(other.name, SMALL.model(2))
    assert (infer.stages(home.name), len(infer.stages(other.name))) == ([], road == "near")
    client.close()
    assert infer.stages(other.name) == []


def test_lapsed_region_is_no_matter(live: Live, infer: Client, here: WeightsClient) -> None:
    home = load_warm(live, infer, here, SMALL)
    here.push(home.name, SMALL.model(1))
    (stage,) = infer.stages(home.name)
    infer.abort(stage)
    assert here.push(home.name, SMALL.model(2)).received_bytes > 0
    home.expect(infer, 2, generation=3)
    assert here.push(home.name, SMALL.model(3)).received_bytes == 0
    home.expect(infer, 3, generation=4)


def test_tensor_that_is_left_out_is_missing_whatever_was_pushed_before(
    live: Live, infer: Client, here: WeightsClient
) -> None:
    home = load_warm(live, infer, here, SMALL)
    here.push(home.name, arrays(SMALL, 1))
    with pytest.raises(WeightsRefused, match=r"'parts\.3': missing"):
        here.push(home.name, {name: array for name, array in arrays(SMALL, 2).items() if name != "parts.3"})
    home.expect(infer, 1, generation=2)


def test_ties_scalars_and_values_that_nobody_reads_go_by_every_road(
    live: Live, infer: Client, client: WeightsClient
) -> None:
    home = load_warm(live, infer, client, EVERYTHING)
    for generation, seed in enumerate((1, 2), start=2):
        client.push(home.name, EVERYTHING.model(seed))  # its state dict has tied names, and num_batches_tracked
        home.expect(infer, seed, generation)


def test_wrappers_prefixes_do_not_matter(live: Live, infer: Client, client: WeightsClient) -> None:
    home = load_warm(live, infer, client)
    wrapped = nn.Module()
    wrapped.module = MLP.model(1)
    client.push(home.name, wrapped)
    home.expect(infer, 1, generation=2)


def test_tensors_in_any_layout_are_pushed_as_their_values(live: Live, infer: Client, client: WeightsClient) -> None:
    home = load_warm(live, infer, client)
    state = {
        name: tensor.t().contiguous().t() if tensor.dim() == 2 else torch.stack([tensor, tensor], 1)[:, 0]
        for name, tensor in MLP.state(1).items()
    }
    assert not any(tensor.is_contiguous() for tensor in state.values())
    client.push(home.name, state)
    home.expect(infer, 1, generation=2)


def test_push_of_what_serves_is_reported_as_no_change(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer, SMALL)
    update = client.push(home.name, arrays(SMALL, 0), label="again")
    assert (update.outcome, update.generation, update.label, update.copied_bytes) == ("unchanged", 1, "", 0)
    assert not update.committed


def test_patch_copies_what_it_has_only(live: Live, infer: Client, client: WeightsClient) -> None:
    home = load_warm(live, infer, client, SMALL)
    seed = next(new_seeds)
    names = list(arrays(SMALL, seed))
    half = part(SMALL, seed, *names[:8])
    update = client.push(home.name, half, mode="patch")
    assert (update.generation, update.copied_bytes, update.shared_bytes) == (2, nbytes(half), nbytes(half))
    update = client.push(home.name, part(SMALL, seed, *names[8:]), mode="patch")
    home.expect(infer, seed, generation=3)
    assert update.digest == client.push(home.name, arrays(SMALL, seed)).digest


def test_dry_run_changes_nothing(live: Live, infer: Client, client: WeightsClient) -> None:
    home = load_warm(live, infer, client, SMALL)
    update = client.push(home.name, arrays(SMALL, 1), dry_run=True)
    assert update.outcome == "valid"
    home.expect(infer, 0, generation=1)
    assert client.push(home.name, arrays(SMALL, 1)).digest == update.digest
    client.close()
    assert infer.stages(home.name) == []


def test_condition_that_does_not_hold_is_refused(live: Live, infer: Client, client: WeightsClient) -> None:
    home = load_warm(live, infer, client, SMALL)
    digest = client.weights(home.name).digest
    assert client.push(home.name, arrays(SMALL, 1), if_match=digest).generation == 2
    with pytest.raises(DigestMismatch) as refused:
        client.push(home.name, arrays(SMALL, 2), if_match=digest)
    assert refused.value.digest == client.weights(home.name).digest
    home.expect(infer, 1, generation=2)
    client.close()
    assert infer.stages(home.name) == []
    with pytest.raises(InvalidArgument, match="expected a digest"):
        client.push(home.name, arrays(SMALL, 2), if_match="")


def test_weights_that_do_not_fit_are_refused_with_all_their_faults(
    live: Live, infer: Client, client: WeightsClient
) -> None:
    home = load_warm(live, infer, client, SMALL)
    weights = dict(arrays(SMALL, 1))
    first, second, *_ = weights
    weights[first] = weights[first].astype(np.float64)
    weights[second] = weights[second][:3]
    weights["stray"] = np.zeros(1)
    with pytest.raises(WeightsRefused) as refused:
        client.push(home.name, weights)
    text = str(refused.value)
    assert "expected dtype F32, got F64" in text
    assert "expected shape [1024], got [3]" in text
    assert len(refused.value.faults) == 3
    home.expect(infer, 0, generation=1)
    client.close()
    assert infer.stages(home.name) == []


def test_values_that_are_no_numbers_are_refused_and_leave_nothing(
    live: Live, infer: Client, client: WeightsClient
) -> None:
    home = load_warm(live, infer, client, SMALL)
    weights = {name: array.copy() for name, array in arrays(SMALL, 1).items()}
    next(iter(weights.values()))[7] = np.nan
    with pytest.raises(WeightsRefused, match=r"(?i)nan"):
        client.push(home.name, weights)
    home.expect(infer, 0, generation=1)
    client.close()
    assert infer.stages(home.name) == []


def test_model_that_is_not_there_is_not_found(client: WeightsClient) -> None:
    for weights in (arrays(SMALL, 0), arrays(SMALL, 0)):
        with pytest.raises(NotFound, match="no such model"):
            client.push("no such model", weights)


def test_label_that_is_none_is_refused(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer, SMALL)
    with pytest.raises(InvalidArgument, match="label"):
        client.push(home.name, arrays(SMALL, 1), label="two\nlines")
    home.expect(infer, 0, generation=1)


def test_progress_ends_with_all(live: Live, infer: Client, client: WeightsClient) -> None:
    home = load_warm(live, infer, client, THIRD)
    seen: list[tuple[int, int]] = []
    client.push(home.name, arrays(THIRD, 1), progress=lambda *counts: seen.append(counts))
    assert len(seen) > 1
    done, totals = zip(*seen, strict=True)
    assert list(done) == sorted(done)
    assert done[-1] == totals[-1] >= nbytes(arrays(THIRD, 1))


def test_file_is_sent_as_it_is(live: Live, infer: Client, client: WeightsClient) -> None:
    home = load_warm(live, infer, client, SMALL)
    client.push(home.name, str(live.gallery.weights(SMALL, 1)), label="file")
    assert home.expect(infer, 1, generation=2).label == "file"


def test_shards_of_an_index_are_one_set(live: Live, infer: Client, client: WeightsClient, tmp_path: Path) -> None:
    home = load_warm(live, infer, client, SMALL)
    state = SMALL.state(1)
    weight_map = {name: f"model-{index % 3}.safetensors" for index, name in enumerate(state)}
    for shard in set(weight_map.values()):
        part = {name: tensor for name, tensor in state.items() if weight_map[name] == shard}
        safetensors.torch.save_file(part, tmp_path / shard)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    seen: list[tuple[int, int]] = []
    client.push(home.name, index, progress=lambda *counts: seen.append(counts))
    home.expect(infer, 1, generation=2)
    assert seen[-1][0] == seen[-1][1]

    (tmp_path / "model-2.safetensors").write_bytes(b"damaged")
    with pytest.raises(WeightsRefused):
        client.push(home.name, index)
    home.expect(infer, 1, generation=2)
    client.close()
    assert infer.stages(home.name) == []


def test_persisted_push_is_in_the_directory(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer, SMALL)
    assert client.push(home.name, arrays(SMALL, 1), label="kept", persist=True).persisted
    infer.unload(home.name)
    infer.load(home.name)
    assert home.expect(infer, 1, generation=1).label == "kept"


def test_rollback_and_history(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer, SMALL)
    client.push(home.name, arrays(SMALL, 1), label="one")
    update = client.rollback(home.name, label="back")
    assert (update.generation, update.label, update.outcome) == (3, "back", "committed")
    home.expect(infer, 0, generation=3)
    records = client.history(home.name)
    assert [(record.generation, record.label) for record in records] == [(1, ""), (2, "one"), (3, "back")]
    assert records[0].digest == records[2].digest == client.weights(home.name).digest


def test_slots_tell_what_the_model_needs(live: Live, infer: Client, client: WeightsClient) -> None:
    home = live.load(infer, EVERYTHING)
    info = client.weights(home.name, slots=True)
    slots = {slot.name: slot for slot in info.slots}
    assert (slots["conv.weight"].dtype, slots["conv.weight"].shape) == ("F32", (8, 1, 3, 3))
    assert (info.state, info.generation, info.model, info.version) == ("SERVING", 1, home.name, 1)
    assert client.weights(home.name, version=1).slots == ()


def test_tied_names_with_different_tensors_are_refused_by_every_road(
    live: Live, infer: Client, client: WeightsClient
) -> None:
    home = load_warm(live, infer, client, EVERYTHING)
    state = EVERYTHING.model(1).state_dict()
    state["outer.weight"] = state["outer.weight"] + 1
    with pytest.raises(WeightsRefused, match="the model ties it"):
        client.push(home.name, state)
    home.expect(infer, 0, generation=1)


def test_trainers_at_once_each_get_a_generation(live: Live, infer: Client) -> None:
    home = live.load(infer, THIRD)

    def train(trainer: int) -> list[int]:
        with WeightsClient((near, far)[trainer % 2](live)) as client:
            return [client.push(home.name, arrays(THIRD, 1 + trainer), label=f"{trainer}").generation for _ in range(3)]

    with Traffic(live.server, home.name, [inputs(THIRD)]) as traffic, ThreadPoolExecutor(3) as pool:
        generations = [generation for each in pool.map(train, range(3)) for generation in each]
    assert not traffic.failures
    labels = {record["generation"]: record["label"] for record in infer.weights(home.name)["history"]}
    assert max(generations) == max(labels)
    for _, answer in traffic.answers:
        seed = 1 + int(labels[answer.generation]) if answer.generation > 1 else 0
        assert same_bits(answer.outputs, expected(THIRD, seed))


def test_client_needs_nothing_but_numpy(live: Live, infer: Client, tmp_path: Path) -> None:
    home = live.load(infer, THIRD)
    np.savez(tmp_path / "weights.npz", **arrays(THIRD, 1))  # type: ignore[arg-type]
    program = f"""
import sys
before = set(sys.modules)  # a machine's site packages bring modules of their own
sys.path.insert(0, {str(Path(rebind.__file__).parents[1])!r})
import numpy
from rebind.client import WeightsClient
client, weights = WeightsClient({near(live)!r}), dict(numpy.load({str(tmp_path / "weights.npz")!r}))
client.push({home.name!r}, weights)
update = client.push({home.name!r}, {{name: array + 1000 for name, array in weights.items()}})
client.close()
loaded = {{name.partition(".")[0] for name in sys.modules.keys() - before}} - sys.stdlib_module_names
print(update.received_bytes, sorted(name for name in loaded if not name.startswith("_")))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (result.stdout, result.stderr) == ("0 ['numpy', 'rebind']\n", "")
    home.expect(infer, 2, generation=3)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a program as somebody else")
def test_trainer_of_another_user_streams(live: Live, infer: Client) -> None:
    """The region's path cannot be opened: nothing is shared, and the push is made all the same."""
    home = live.load(infer, THIRD)
    program = """
import encodings.idna, os, sys
sys.path.insert(0, sys.argv[3])
import numpy
from rebind.client import WeightsClient
os.setgroups([]); os.setgid(65534); os.setuid(65534)
with WeightsClient(sys.argv[1]) as client:
    for seed in 1, 2, 3:
        weights = {f"parts.{n}": numpy.full(1 << 19, 1000 * seed + n + 1, "f4") for n in range(16)}
        print(client.push(sys.argv[2], weights).received_bytes > 0)
"""
    command = [sys.executable, "-c", program, near(live), home.name, str(Path(rebind.__file__).parents[1])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.stdout, result.stderr) == ("True\n" * 3, "")
    home.expect(infer, 3, generation=4)
    assert infer.stages(home.name) == []


def test_server_that_is_not_there_is_named() -> None:
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:1.*refused.*rebind serve"):
        WeightsClient("http://127.0.0.1:1").weights("policy")
