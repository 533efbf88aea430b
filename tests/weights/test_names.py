from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_model

from rebind.errors import WeightsRefused
from rebind.weights.formats import open_weights
from rebind.weights.names import Renaming, find_renaming, renamed, selected
from rebind.weights.slots import Slot, SlotTable, check
from rebind.weights.store import WeightStore
from tests.weights.files import arrays_of, floats, save, table_of

if TYPE_CHECKING:
    from pathlib import Path

SLOTS = table_of(arrays_of(0, **{"layer.weight": (3, 2), "layer.bias": (3,), "scale": (1,)}))


def prefixed(prefix: str, *names: str) -> list[str]:
    return [prefix + name for name in names]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w.safetensors"


class TestChoice:
    NAMES = ("layer.weight", "layer.bias", "scale")

    def test_exact_names_stay(self) -> None:
        assert find_renaming(self.NAMES, self.NAMES) == Renaming()

    @pytest.mark.parametrize(
        "prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod.", "_orig_mod.module.model."]
    )
    def test_known_prefixes_are_stripped_or_added(self, prefix: str) -> None:
        assert find_renaming(prefixed(prefix, *self.NAMES), self.NAMES) == Renaming(stripped=prefix)
        assert find_renaming(self.NAMES, prefixed(prefix, *self.NAMES)) == Renaming(added=prefix)

    def test_only_the_outer_prefix_goes_when_the_model_has_the_inner_one(self) -> None:
        file = prefixed("module.model.", *self.NAMES)

        assert find_renaming(file, prefixed("model.", *self.NAMES)) == Renaming(stripped="module.")

    def test_a_prefix_of_some_names_of_a_model_is_added_to_all(self) -> None:
        """A language model's own network is called ``model``, its head lies beside that; another class wraps both."""
        file = ["model.layers.0.weight", "model.norm.weight", "lm_head.weight"]

        assert find_renaming(file, prefixed("model.", *file)) == Renaming(added="model.")
        assert find_renaming(prefixed("model.", *file), file) == Renaming(stripped="model.")

    def test_exact_names_win_a_tie(self) -> None:
        assert find_renaming(["a", "module.b"], ["a", "b"]) == Renaming(stripped="module.")
        assert find_renaming(["a", "module.x"], ["a", "b"]) == Renaming()

    def test_names_that_are_all_slots_stay_even_if_others_would_hit_more(self) -> None:
        assert find_renaming(["model.a"], ["model.a", "a", "model.model.a"]) == Renaming()

    def test_no_other_prefix_is_known(self) -> None:
        assert find_renaming(prefixed("encoder.", *self.NAMES), self.NAMES) == Renaming()

    @given(st.lists(st.sampled_from(["module.", "_orig_mod.", "model."]), max_size=4).map("".join), st.data())
    def test_hits_are_the_slots_that_renamed_names_are(self, prefix: str, data: st.DataObject) -> None:
        some = st.sets(
            st.builds(
                "{}{}".format, st.sampled_from(["", "module.", "module.model.", "model."]), st.sampled_from("abc")
            )
        )
        names, slots = data.draw(some), data.draw(some)
        for renaming in (Renaming(stripped=prefix), Renaming(added=prefix)):
            applied = {renaming.apply(name) for name in names}
            assert {slot for slot in slots if renaming.hits(slot, names)} == slots & applied


class TestSource:
    def test_file_with_the_names_of_the_model_is_itself(self, path: Path) -> None:
        with open_weights(save(path, arrays_of(0, **{"layer.weight": (3, 2), "scale": (1,)}))) as source:
            assert renamed(source, SLOTS) is source

    def test_tensors_are_read_under_the_names_of_the_slots(self, path: Path) -> None:
        with open_weights(save(path, {"module.scale": floats(1, 2, 3), "module.layer.bias": floats(4)})) as source:
            view = renamed(source, SLOTS)
            buffer = bytearray(8)
            view.read_into("scale", 4, memoryview(buffer))
        assert set(view.tensors) == {"scale", "layer.bias"}
        assert buffer == floats(2, 3).tobytes()

    def test_names_without_the_prefix_stay_and_are_refused_with_near_matches(self, path: Path) -> None:
        arrays = arrays_of(0, **{"module.layer.weight": (3, 2), "module.layer.bias": (3,), "scales": (1,)})
        with open_weights(save(path, arrays)) as source:
            view = renamed(source, SLOTS)
        with pytest.raises(WeightsRefused) as refused:
            check(SLOTS, view.tensors, view.subject)
        assert refused.value.subject == f"{path} (names without 'module.')"
        assert [str(fault) for fault in refused.value.faults] == [
            "'scale': missing, expected F32 [1]",
            "'scales': unexpected: the model has no such slot; did you mean 'scale'?",
        ]

    def test_names_of_no_known_kind_are_refused_as_they_are_with_near_matches(self, path: Path) -> None:
        arrays = arrays_of(0, **{"net.layer.weight": (3, 2), "net.layer.bias": (3,), "net.scale": (1,)})
        with open_weights(save(path, arrays)) as source:
            view = renamed(source, SLOTS)
        with pytest.raises(WeightsRefused) as refused:
            check(SLOTS, view.tensors, view.subject)
        assert refused.value.subject == str(path)
        assert "'net.layer.bias': unexpected: the model has no such slot; did you mean 'layer.bias'?" in str(
            refused.value
        )

    def test_two_tensors_of_one_name_are_refused_and_both_named(self, path: Path) -> None:
        arrays = arrays_of(
            0, **{"module.layer.weight": (3, 2), "module.layer.bias": (3,), "scale": (1,), "module.scale": (1,)}
        )
        with open_weights(save(path, arrays)) as source, pytest.raises(WeightsRefused) as refused:
            renamed(source, SLOTS)
        assert str(refused.value) == (
            f"{path}: 'scale': the file has both 'module.scale' and 'scale', which are one name for this model;"
            " remove one of them"
        )

    def test_a_change_of_the_file_is_still_noticed(self, path: Path) -> None:
        with open_weights(save(path, {"module.scale": floats(1)})) as source:
            view = renamed(source, SLOTS)
            view.check_unchanged()
            path.write_bytes(path.read_bytes() + b" ")
            with pytest.raises(WeightsRefused, match="it was written to"):
                view.check_unchanged()

    def test_closing_it_closes_the_file(self, path: Path) -> None:
        source = open_weights(save(path, {"module.scale": floats(1)}))
        with renamed(source, SLOTS):
            pass
        with pytest.raises(WeightsRefused, match="cannot be read"):
            source.read_into("module.scale", 0, memoryview(bytearray(4)))

    def test_selected_tensors_are_all_that_there_are(self, path: Path) -> None:
        with open_weights(save(path, {"a": floats(1), "b": floats(2)})) as source:
            view = selected(source, ["b"])
            buffer = bytearray(4)
            view.read_into("b", 0, memoryview(buffer))
        assert list(view.tensors) == ["b"]
        assert buffer == floats(2).tobytes()


class Tied(torch.nn.Module):
    """A language model in small: embedding and head are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


class TestWrappers:
    SLOTS = SlotTable((Slot("embed.weight", "F32", (5, 3)), Slot("head.weight", "F32", (5, 3), tied_to="embed.weight")))

    @pytest.fixture
    def net(self) -> Tied:
        return Tied()

    @pytest.fixture(params=["compiled", "parallel", "compiled in parallel"])
    def wrapper(self, request: pytest.FixtureRequest, net: Tied) -> Any:
        wrapped: Any = net
        if "compiled" in request.param:
            wrapped = torch.compile(wrapped, backend="eager")  # which names do not depend on
        return torch.nn.DataParallel(wrapped) if "parallel" in request.param else wrapped

    def test_a_wrapped_model_with_tied_weights_fits_the_plain_one(self, net: Tied, wrapper: Any, path: Path) -> None:
        save_model(wrapper, str(path))  # stores tied tensors once
        with open_weights(path) as source:
            assert len(source.tensors) == 1
            assert set(source.tensors).isdisjoint(self.SLOTS.by_name)
            weights = WeightStore().put(self.SLOTS, renamed(source, self.SLOTS)).weights

        for name in self.SLOTS.by_name:
            value = np.frombuffer(weights.buffer(name), np.float32).reshape(5, 3)
            np.testing.assert_array_equal(value, net.state_dict()[name])
        assert weights.nbytes == 60

    def test_a_plain_model_with_tied_weights_fits_the_wrapped_one(self, net: Tied, wrapper: Any, path: Path) -> None:
        embed, head = wrapper.state_dict()
        slots = SlotTable((Slot(embed, "F32", (5, 3)), Slot(head, "F32", (5, 3), tied_to=embed)))
        save_model(net, str(path))
        with open_weights(path) as source:
            weights = WeightStore().put(slots, renamed(source, slots)).weights

        assert weights.buffer(head) == net.head.weight.detach().numpy().tobytes()

    def test_both_tied_names_must_agree_behind_a_prefix_too(self, path: Path) -> None:
        value = floats(*range(15)).reshape(5, 3)
        names = ("_orig_mod.embed.weight", "_orig_mod.head.weight")
        with open_weights(save(path, dict.fromkeys(names, value))) as source:
            assert WeightStore().put(self.SLOTS, renamed(source, self.SLOTS)).weights.nbytes == 60
        with (
            open_weights(save(path, dict(zip(names, (value, value + 1), strict=True)))) as source,
            pytest.raises(WeightsRefused) as refused,
        ):
            WeightStore().put(self.SLOTS, renamed(source, self.SLOTS))
        assert str(refused.value) == (
            f"{path} (names without '_orig_mod.'):"
            " 'head.weight': differs from 'embed.weight', to which the model ties it; store one"
        )
