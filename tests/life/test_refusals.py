"""Promise 3: refused weights leave the old ones answering, bit for bit, and the reason says what is wrong."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

import pytest
import torch

from tests.engines.models import export
from tests.life.models import EVERYTHING, MLP
from tests.life.repository import Home, Live, copy_over
from tests.server import Client, Failed, eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.timeout(180)

State = dict[str, torch.Tensor]


def save(change: Callable[[State], None]) -> Callable[[Path], None]:
    """Writes the weights of seed 1 with a change to them."""

    def write(path: Path) -> None:
        state = MLP.state(1)
        change(state)
        MLP.save(state, path)

    return write


def edit(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Writes the bytes of the weights of seed 1 with a change to them."""

    def write(path: Path) -> None:
        MLP.save(MLP.state(1), path)
        path.write_bytes(change(path.read_bytes()))

    return write


def _rename(state: State) -> None:
    state["first.weigth"] = state.pop("first.weight")


def _change_several(state: State) -> None:
    del state["first.bias"]
    state["extra"] = torch.zeros(3)
    state["second.weight"] = torch.zeros(4, 4)
    state["second.bias"] = state["second.bias"].double()


def _put_nan(state: State) -> None:
    state["first.weight"][0, :2] = torch.tensor([torch.nan, torch.inf])


def _repeat_key(content: bytes) -> bytes:
    """The header with its first entry once more, which a JSON parser would not mind."""
    header = content[8 : 8 + int.from_bytes(content[:8], "little")].rstrip()
    name = next(iter(json.loads(header)))
    entry = json.dumps({name: json.loads(header)[name]})[1:-1].encode()
    repeated = header[:-1] + b"," + entry + b"}"
    return len(repeated).to_bytes(8, "little") + repeated + content[8 + int.from_bytes(content[:8], "little") :]


BAD_WEIGHTS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "truncated by a byte": (edit(lambda content: content[:-1]), ["model.safetensors"]),
    "truncated within the header": (edit(lambda content: content[:100]), ["truncated", "100"]),
    "four bytes too long": (edit(lambda content: content + bytes(4)), ["model.safetensors"]),
    "empty": (edit(lambda _: b""), ["0 bytes"]),
    "another format": (edit(lambda _: b"PK\3\4" + bytes(60)), ["no safetensors file|truncated"]),
    "wrong shape": (
        save(lambda state: state.update({"second.weight": torch.zeros(64, 4)})),
        ["second.weight", r"expected shape \[4,64\], got \[64,4\]"],
    ),
    "wrong dtype": (
        save(lambda state: state.update({"second.bias": torch.zeros(4, dtype=torch.float64)})),
        ["second.bias", "expected dtype F32, got F64"],
    ),
    "wrong name": (save(_rename), ["weight': missing", "weigth': unexpected", "did you mean 'first.weight'"]),
    "several faults": (
        save(_change_several),
        [
            "4 faults",
            "first.bias': missing",
            "extra': unexpected",
            "d.weight': expected shape",
            "d.bias': expected dtype",
        ],
    ),
    "no tensors": (save(dict.clear), ["missing all 4"]),
    "duplicate key": (edit(_repeat_key), ["duplicate"]),
    "not finite": (save(_put_nan), ["first.weight", "2 of its values are NaN or infinite"]),
}


@pytest.mark.parametrize("kind", BAD_WEIGHTS)
def test_bad_weights_file_is_refused_with_its_faults(explicit: Live, client: Client, kind: str) -> None:
    write, reasons = BAD_WEIGHTS[kind]
    home = explicit.load(client, weights=0)
    write(home.file("model.safetensors"))
    text = _expect_refusal(home, client)
    for reason in reasons:
        assert re.search(reason, text), (reason, text)
    _expect_recovery(home, client)


def test_absent_shard_is_refused_by_its_name(explicit: Live, client: Client) -> None:
    home = explicit.load(client)
    shards = dict.fromkeys(MLP.state(1), "part-1.safetensors") | {"second.bias": "part-2.safetensors"}
    MLP.save({name: MLP.state(1)[name] for name in shards if name != "second.bias"}, home.file("part-1.safetensors"))
    index = home.file("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": shards}))
    text = _expect_refusal(home, client)
    assert "part-2.safetensors" in text
    assert "absent" in text
    MLP.save({"second.bias": MLP.state(1)["second.bias"]}, home.file("part-2.safetensors"))
    client.load(home.name)
    home.expect(client, 1, generation=2)


def test_link_to_weights_that_are_gone_does_not_bring_those_of_the_model_file_back(
    explicit: Live, client: Client, tmp_path: Path
) -> None:
    home = explicit.load(client)
    MLP.save(MLP.state(1), tmp_path / "weights.safetensors")
    home.file("model.safetensors").symlink_to(tmp_path / "weights.safetensors")
    client.load(home.name)
    home.expect(client, 1, generation=2)
    (tmp_path / "weights.safetensors").unlink()
    with pytest.raises(Failed, match=r"model.safetensors: cannot be opened: No such file"):
        client.load(home.name)
    home.expect(client, 1, generation=2)


def test_model_file_with_unusable_weights_is_refused_like_a_weights_file(explicit: Live, client: Client) -> None:
    home = explicit.load(client)
    model = MLP.model(1)
    with torch.no_grad():
        model.get_parameter("first.bias")[3] = torch.nan
    home.place(export(model, home.path.with_suffix(".aside"), *MLP.arguments), home.file("model.pt2"))
    text = _expect_refusal(home, client)
    assert "first.bias" in text
    home.add_plan(1)
    client.load(home.name)
    home.expect(client, 1, generation=2)


def test_tied_weights_that_differ_are_refused(explicit: Live, client: Client) -> None:
    home = explicit.load(client, EVERYTHING)
    state = EVERYTHING.state(1)
    state["outer.weight"] = state["inner.weight"] + 1
    EVERYTHING.save(state, home.file("model.safetensors"))
    text = _expect_refusal(home, client)
    assert "outer.weight" in text
    assert "inner.weight" in text


def test_bad_weights_only_version_is_not_loaded_and_the_lower_one_serves_on(explicit: Live, client: Client) -> None:
    home = explicit.load(client)
    save(_rename)(home.publish(1, version=2))
    for _ in range(2):  # case R12
        with pytest.raises(Failed, match=r"version 2 is at UNAVAILABLE state.*first\.weigth") as refused:
            client.load(home.name)
        assert refused.value.status == 400
        home.expect(client, 0, generation=1)
    assert "first.weigth" in client.index()[home.name, "2"]["reason"]
    home.publish(2, version=2)
    client.load(home.name)
    home.expect(client, 2, generation=1, version=2)


def test_polling_refuses_bad_weights_and_takes_the_next_good_ones(polled: Live, watcher: Client) -> None:
    home = polled.poll(watcher)
    save(_put_nan)(home.path / ".aside.safetensors")
    home.place(home.path / ".aside.safetensors", home.file("model.safetensors"))
    refusal = eventually(lambda: watcher.weights(home.name)["refusal"], "the weights are refused")
    assert "first.weight" in refusal
    assert "first.weight" in watcher.index()[home.name, "1"]["reason"]
    home.expect(watcher, 0, generation=1)
    home.publish(1)
    eventually(lambda: home.answers_as(watcher, 1), "good weights answer")
    home.expect(watcher, 1, generation=2)
    assert watcher.weights(home.name)["refusal"] is None


def test_file_that_is_overwritten_in_place_changes_nothing_until_it_is_loaded(explicit: Live, client: Client) -> None:
    home = explicit.load(client, weights=0)
    copy_over(home.gallery.weights(MLP, 1), home.file("model.safetensors"))
    home.expect(client, 0, generation=1)
    client.load(home.name)
    home.expect(client, 1, generation=2)


def test_file_that_is_truncated_while_served_changes_nothing(explicit: Live, client: Client) -> None:
    home = explicit.load(client, weights=0)
    for size in (4000, 8, 0):
        os.truncate(home.file("model.safetensors"), size)
        home.expect(client, 0, generation=1)
        _expect_refusal(home, client)
    _expect_recovery(home, client)


def test_file_that_is_copied_slowly_is_not_served_before_it_is_whole(polled: Live, watcher: Client) -> None:
    """Case R25: in place, while polling, with a pause in the middle that looks like the end."""
    home = polled.poll(watcher, weights=0)
    content = home.gallery.weights(MLP, 1).read_bytes()
    with home.file("model.safetensors").open("wb", buffering=0) as file:
        file.write(content[:3000])
        eventually(lambda: watcher.index()[home.name, "1"].get("reason"), "the server has seen half of the file")
        home.expect(watcher, 0, generation=1)
        refusal = eventually(lambda: watcher.weights(home.name)["refusal"], "the half is refused")
        assert "ends after the file does" in refusal or "truncated" in refusal
        home.expect(watcher, 0, generation=1)
        file.write(content[3000:])
    eventually(lambda: home.answers_as(watcher, 1), "the whole file is served")
    home.expect(watcher, 1, generation=2)
    eventually(lambda: "reason" not in watcher.index()[home.name, "1"], "nothing reminds of the half")


def _expect_refusal(home: Home, client: Client) -> str:
    """Loads; error, index and ``GET .../weights`` tell the same reason, which is returned; nothing else changes."""
    before = home.answer(client)
    with pytest.raises(Failed) as refused:
        client.load(home.name)
    assert refused.value.status == 400
    report = client.weights(home.name)
    assert str(home.path) in report["refusal"]
    assert report["refusal"] in str(refused.value)
    entry = client.index()[home.name, "1"]
    assert (entry["state"], entry["reason"]) == ("READY", report["refusal"])
    assert report["state"] == "SERVING"
    assert home.answer(client).outputs["OUTPUT__0"].tobytes() == before.outputs["OUTPUT__0"].tobytes()
    assert report["generation"] == before.generation == len(report["history"])
    refusal: str = report["refusal"]
    return refusal


def _expect_recovery(home: Home, client: Client) -> None:
    """The next good file serves, and nothing reminds of the bad one."""
    home.add_weights(2)
    client.load(home.name)
    home.expect(client, 2, generation=2)
    assert client.weights(home.name)["refusal"] is None
    assert "reason" not in client.index()[home.name, "1"]
