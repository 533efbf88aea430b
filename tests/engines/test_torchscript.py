"""TorchScript files beyond what the suite asks of every engine: state, slots, arguments, results, keys."""

# mypy: disallow-untyped-calls=False, warn-return-any=False
from __future__ import annotations

import logging
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from rebind.engines.contract import Tier
from rebind.engines.registry import engine
from rebind.errors import (
    AlreadyExists,
    InputRefused,
    Internal,
    InvalidArgument,
    ModelInvalid,
    StorageFailed,
    WeightsRefused,
)
from rebind.weights.formats import open_weights
from rebind.weights.store import WeightStore
from tests.engines.tampering import rewrite
from tests.engines.torchscript_models import (
    Dictionary,
    Opener,
    Optionals,
    Raises,
    Recurrent,
    Scalars,
    Scaled,
    Stateful,
    Words,
    WritesToInput,
    bind,
    called,
    floats,
    load,
    numbers,
    put,
    same,
    script,
    trace,
)

if TYPE_CHECKING:
    from pathlib import Path

    from rebind.plans.cache import PlanCache


@pytest.fixture
def opener(plan_cache: PlanCache) -> Opener:
    return Opener(plan_cache)


class TestState:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        return script(Stateful(), tmp_path / "model.pt")

    def test_calls_answer_as_torch_does_one_after_another(self, opener: Opener, file: Path) -> None:
        bound, expected = opener.bind(file), load(file)
        for seed in range(6):
            x = floats(2, 4, seed=seed)
            assert same(bound.execute([x]), called(expected, x))

    def test_two_bound_plans_never_see_each_others_state(self, opener: Opener, file: Path) -> None:
        graph = opener.open(file)
        with graph.embedded_weights() as embedded:
            weights = WeightStore().put(graph.slots, embedded).weights
        first, second = bind(graph, weights), bind(graph, weights)
        expected = load(file)
        for seed in range(3):
            first.execute([floats(2, 4, seed=seed)])
        x = floats(2, 4)
        assert same(second.execute([x]), called(expected, x))

    def test_a_plan_that_is_bound_later_starts_as_the_file_does(self, opener: Opener, file: Path) -> None:
        x = floats(2, 4)
        opener.bind(file).execute([x])
        assert same(opener.bind(file).execute([x]), called(load(file), x))

    def test_the_stores_memory_is_never_written_to(self, opener: Opener, file: Path) -> None:
        graph = opener.open(file)
        with graph.embedded_weights() as embedded:
            weights = WeightStore().put(graph.slots, embedded).weights
        before = {name: bytes(weights.buffer(name)) for name in weights.tensors}
        assert "calls" in before
        bound = bind(graph, weights)
        for _ in range(3):
            bound.execute([floats(2, 4)])
        assert {name: bytes(weights.buffer(name)) for name in weights.tensors} == before

    def test_answers_stay_as_they_were_when_the_state_goes_on(self, opener: Opener, file: Path) -> None:
        bound = opener.bind(file)
        _, calls = bound.execute([floats(2, 4)])
        bound.execute([floats(2, 4)])
        assert calls.tolist() == [1.0]

    def test_weights_files_need_not_have_state(self, opener: Opener, file: Path, tmp_path: Path) -> None:
        graph, state = opener.open(file), Stateful().state_dict()
        del state["calls"]
        x = floats(2, 4)
        expected = load(file)
        with torch.inference_mode():
            expected.load_state_dict({**expected.state_dict(), **state})
        assert same(bind(graph, put(graph, state, tmp_path / "w.safetensors")).execute([x]), called(expected, x))

    def test_sharing_it_is_warned_of_by_name(self, opener: Opener, file: Path) -> None:
        quiet = opener.open(file)
        assert not quiet.shares_weights
        assert [text for level, text in quiet.log_lines() if level > logging.INFO] == []
        shared = opener.open(file, parameters={"ENABLE_WEIGHT_SHARING": "true"})
        assert shared.shares_weights
        (warning,) = [text for level, text in shared.log_lines() if level == logging.WARNING]
        assert "model 'm' writes to calls, count, history, last when it runs" in warning
        assert shared.reuse_line == "Reusing TorchScript model for instance 'm'"

    def test_a_stateless_model_is_shared_without_a_warning(self, opener: Opener, tmp_path: Path) -> None:
        graph = opener.open(script(Scaled(), tmp_path / "m.pt"), parameters={"ENABLE_WEIGHT_SHARING": "ON"})
        assert {level for level, _ in graph.log_lines()} == {logging.INFO}


class TestSlots:
    def test_what_is_learned_is_required_and_lists_follow(self, opener: Opener, tmp_path: Path) -> None:
        file = script(Recurrent(), tmp_path / "model.pt")
        graph = opener.open(file)
        slots = graph.slots.by_name
        assert set(slots) == set(Recurrent().state_dict())
        assert [name for name in slots if not slots[name].required] == ["positions"]
        assert all(slot.used for slot in slots.values())
        new = Recurrent()
        state = {name: tensor for name, tensor in new.state_dict().items() if name != "positions"}
        ids = np.arange(8).reshape(2, 4)
        bound = bind(graph, put(graph, state, tmp_path / "w.safetensors"))
        assert same(bound.execute([ids]), called(load(script(new, tmp_path / "new.pt")), ids))

    def test_buffers_that_state_dicts_lack_come_from_the_model_file(self, opener: Opener, tmp_path: Path) -> None:
        """Case T13."""
        file, new = script(Rotary(), tmp_path / "model.pt"), Rotary()
        graph = opener.open(file)
        assert {slot.name for slot in graph.slots.slots if not slot.required} == {
            "frequencies",
            "norm.num_batches_tracked",
        }
        nn.init.uniform_(new.norm.running_mean)  # type: ignore[arg-type]
        state, x = new.state_dict(), floats(3, 4)
        assert "frequencies" not in state
        del state["norm.num_batches_tracked"]
        new.frequencies = load(file).frequencies
        expected = called(load(script(new, tmp_path / "new.pt")), x)
        assert same(bind(graph, put(graph, state, tmp_path / "w.safetensors")).execute([x]), expected)
        for name in state:
            with pytest.raises(WeightsRefused, match=rf"'{name}': missing"):
                put(graph, {n: t for n, t in state.items() if n != name}, tmp_path / "bad.safetensors")

    def test_tied_names_share_one_tensor(self, opener: Opener, tmp_path: Path) -> None:
        graph = opener.open(script(Tied(), tmp_path / "m.pt"))
        assert graph.slots.by_name["outer.weight"].tied_to == "inner.weight"
        assert [len(group) for group in graph.slots.tensors] == [2]
        new = Tied()
        x = floats(3, 4)
        weights = put(graph, {"outer.weight": new.outer.weight}, tmp_path / "w.safetensors")
        assert same(bind(graph, weights).execute([x]), called(new, x))
        with pytest.raises(WeightsRefused, match="to which the model ties it"):
            put(
                graph,
                {"outer.weight": torch.ones(4, 4), "inner.weight": torch.zeros(4, 4)},
                tmp_path / "bad.safetensors",
            )

    def test_a_module_with_two_names_has_its_weights_under_both(self, opener: Opener, tmp_path: Path) -> None:
        graph = opener.open(script(SharedModule(), tmp_path / "m.pt"))
        slots = graph.slots.by_name
        assert {name: slots[name].tied_to for name in slots} == {
            "first.weight": None,
            "first.bias": None,
            "second.weight": "first.weight",
            "second.bias": "first.bias",
        }
        new, x = SharedModule(), floats(3, 4)
        weights = put(graph, {f"first.{n}": t for n, t in new.first.state_dict().items()}, tmp_path / "w.safetensors")
        assert same(bind(graph, weights).execute([x]), called(new, x))

    def test_what_forward_does_not_read_is_unused(self, opener: Opener, tmp_path: Path) -> None:
        graph = opener.open(script(Normalised(), tmp_path / "m.pt"))
        assert [slot.name for slot in graph.slots.slots if not slot.used] == ["spare", "norm.num_batches_tracked"]

    def test_tensors_that_overlap_in_other_ways_are_refused(self, opener: Opener, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match="'columns': shares memory with 'weight'"):
            opener.open(script(Overlapping(), tmp_path / "m.pt"))

    def test_state_that_shares_memory_with_a_weight_is_refused(self, opener: Opener, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match="'calls': is written to by forward, and shares memory with 'weight'"):
            opener.open(script(WritesToAPart(), tmp_path / "m.pt"))

    def test_parts_of_a_slot_in_a_list_follow_it(self, opener: Opener, tmp_path: Path) -> None:
        graph = opener.open(script(Rows(), tmp_path / "m.pt"))
        new, x = Rows(), floats(3, 4)
        weights = put(graph, {"weight": new.weight}, tmp_path / "w.safetensors")
        assert same(bind(graph, weights).execute([x]), called(new, x))

    def test_behind_an_interface_all_may_be_state(self, opener: Opener, tmp_path: Path) -> None:
        from tests.engines.test_torchscript_analysis import BehindAnInterface

        file = script(BehindAnInterface(), tmp_path / "m.pt")
        graph, x = opener.open(file), floats(3, 4)
        assert graph.slots.by_name["scores.weight"].required
        assert same(opener.bind(file).execute([x]), called(load(file), x))


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", torch.rand(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * self.frequencies


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)
        self.outer = nn.Linear(4, 4, bias=False)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))


class SharedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.spare = nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Overlapping(nn.Module):
    """A list has columns of a weight that is itself a part of something, so they cannot be views of new memory."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.rand(4, 6)
        self.weight = nn.Parameter(whole[:, :4])
        self.columns = [whole[:, 3:5].detach()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.columns[0].sum()


class WritesToAPart(nn.Module):
    """Two slots, of which one is a part of the other; with memory of its own for each, ``weight`` would not count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))
        self.calls: torch.Tensor
        self.register_buffer("calls", self.weight.detach()[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x @ self.weight


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 4))
        self.rows = [self.weight.detach()[2], self.weight.detach()[3:5, 1:3]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.rows[0] + self.rows[1].t().sum() + self.weight.sum()


class TestArguments:
    def test_strings_come_in_and_go_out_as_bytes(self, opener: Opener, tmp_path: Path) -> None:
        bound = opener.bind(script(Words(), tmp_path / "m.pt"))
        words = np.array(["zwölf".encode(), b""], object)
        total, out = bound.execute([np.ones((2, 3), np.float32), words])
        assert total.shape == ()
        assert total == 6
        assert out.dtype == object
        assert list(out) == ["zwölf!".encode(), b"!"]

    @pytest.mark.parametrize(
        ("words", "problem"),
        [
            (np.array([b"\xff"], object), "not UTF-8"),
            (np.array([[b"a"]], object), "list of strings here, got object of 2 dimensions"),
            (np.ones(2, np.float32), "list of strings here, got float32"),
        ],
    )
    def test_what_is_no_list_of_strings_is_refused(
        self, opener: Opener, tmp_path: Path, words: Any, problem: str
    ) -> None:
        bound = opener.bind(script(Words(), tmp_path / "m.pt"))
        with pytest.raises(InputRefused, match=problem) as refused:
            bound.execute([np.ones(2, np.float32), words])
        assert refused.value.position == 1

    def test_results_in_a_named_tuple_have_its_names_too(self, opener: Opener, tmp_path: Path) -> None:
        outputs = opener.open(script(Words(), tmp_path / "m.pt")).outputs
        assert [(o.name, o.paths) for o in outputs] == [("OUTPUT__0", ("total",)), ("OUTPUT__1", ("words",))]

    def test_numbers_are_taken_from_tensors_of_one_element(self, opener: Opener, tmp_path: Path) -> None:
        bound = opener.bind(script(Scalars(), tmp_path / "m.pt"))
        x = floats(2, 3)
        answer = bound.execute([x, np.array([[3]]), np.array([0.5], np.float32), np.array(True)])
        assert same(answer, [-(x * np.float32(0.5) * np.float32(3))])

    @pytest.mark.parametrize("times", [np.array([1, 2]), np.array([1.5]), np.array([b"1"], object)])
    def test_what_is_not_one_number_of_the_kind_is_refused(self, opener: Opener, tmp_path: Path, times: Any) -> None:
        bound = opener.bind(script(Scalars(), tmp_path / "m.pt"))
        with pytest.raises(InputRefused, match="forward takes one int here"):
            bound.execute([floats(2), times, np.array(1.0), np.array(False)])

    def test_arguments_that_are_not_configured_take_their_defaults(self, opener: Opener, tmp_path: Path) -> None:
        file = script(Optionals(), tmp_path / "m.pt")
        x, two = floats(2, 3), numbers(2, 2, 2)
        assert [i.name for i in opener.open(file).inputs] == ["x", "mask", "shift", "by"]
        assert same(opener.bind(file, input_names=("x",)).execute([x]), [x + 3])
        assert same(opener.bind(file, input_names=("INPUT__0", "INPUT__1")).execute([x, two]), [(x + 3) * 2])
        by_name = opener.bind(file, input_names=("shift", "x"))
        assert same(by_name.execute([x, two]), [x + 3 + 2])

    def test_too_many_or_too_few_inputs_have_tritons_text(self, opener: Opener, tmp_path: Path) -> None:
        file = script(Scalars(), tmp_path / "m.pt")
        expected = "unable to load model 'm', configuration expects {} inputs, model provides {}"
        with pytest.raises(InvalidArgument, match=expected.format(2, 3)):
            opener.open(file, input_names=("a", "b"))
        with pytest.raises(InvalidArgument, match=expected.format(5, 4)):
            opener.open(file, input_names=("a", "b", "c", "d", "e"))

    def test_one_dictionary_has_all_inputs_by_their_configured_names(self, opener: Opener, tmp_path: Path) -> None:
        bound = opener.bind(script(Dictionary(), tmp_path / "m.pt"), input_names=("b", "a"))
        assert same(bound.execute([numbers(1), numbers(5)]), [numbers(4)])

    def test_inputs_that_forward_writes_to_are_copied(self, opener: Opener, tmp_path: Path) -> None:
        bound = opener.bind(script(WritesToInput(), tmp_path / "m.pt"))
        x = np.zeros(3, np.float32)
        x.flags.writeable = False
        assert bound.execute([x])[0].tolist() == [1, 1, 1]
        assert x.tolist() == [0, 0, 0]

    @pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64, np.complex64, object])
    def test_types_that_triton_does_not_take_are_refused(self, opener: Opener, tmp_path: Path, dtype: Any) -> None:
        bound = opener.bind(script(Scaled(), tmp_path / "m.pt"))
        with pytest.raises(InputRefused, match="cannot be made from elements of type"):
            bound.execute([np.zeros(4, dtype)])
        with pytest.raises(InvalidArgument, match="takes 1 inputs, got 2"):
            bound.execute([floats(4), floats(4)])


class TestResults:
    """Case T16."""

    def test_a_tensor_without_dimensions_is_an_answer(self, opener: Opener, tmp_path: Path) -> None:
        bound = opener.bind(trace(Sum(), tmp_path / "m.pt", torch.ones(3)))
        (answer,) = bound.execute([np.ones(3, np.float32)])
        assert (answer.shape, float(answer)) == ((), 3.0)

    def test_an_optional_result_that_is_none_fails_that_call(self, opener: Opener, tmp_path: Path) -> None:
        bound = opener.bind(script(MaybeNone(), tmp_path / "m.pt"))
        assert bound.execute([numbers(1)])[0].tolist() == [1]
        with pytest.raises(Internal, match="output 0 of the model is NoneType, where a tensor was promised"):
            bound.execute([numbers(-1)])

    @pytest.mark.parametrize(("number", "name"), [(15, "bfloat16"), (9, "complex64"), (27, "uint16")])
    def test_results_that_triton_has_no_type_for_fail(
        self, opener: Opener, tmp_path: Path, number: int, name: str
    ) -> None:
        bound = opener.bind(script(Cast(), tmp_path / "m.pt"))
        with pytest.raises(Internal, match=f"a tensor of a kind that cannot be answered: {name}, strided"):
            bound.execute([np.ones(2, np.float32), np.array(number)])

    def test_the_text_of_a_failing_module_is_passed_on(self, opener: Opener, tmp_path: Path) -> None:
        bound = opener.bind(script(Raises(), tmp_path / "m.pt"))
        with pytest.raises(Internal, match=r"(?s)^PyTorch execute failure: .*nothing positive, please"):
            bound.execute([np.ones(2, np.float32)])
        assert bound.execute([-np.ones(2, np.float32)])[0].tolist() == [-1, -1]


class Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


class MaybeNone(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor | None:
        return x if bool(x.sum() > 0) else None


class Cast(nn.Module):
    """To a type by torch's number of it."""

    def forward(self, x: torch.Tensor, dtype: int) -> torch.Tensor:
        return x.to(dtype)


class TestKeysAndCache:
    def test_a_second_open_needs_neither_a_child_nor_torch(self, opener: Opener, tmp_path: Path) -> None:
        file = script(Recurrent(), tmp_path / "model.pt")
        opener.open(file)
        code = (
            "import sys\nfrom pathlib import Path\nimport rebind.engines.torchscript.engine as e\n"
            "from rebind.engines.contract import EngineOptions\nfrom rebind.plans.cache import PlanCache\n"
            "del e.run_child\n"
            f"graph = e.ENGINE.open(Path({str(file)!r}), EngineOptions(PlanCache(Path({str(opener.cache.root)!r}))))\n"
            "sys.exit('torch' in sys.modules or len(graph.slots.slots) != 11)"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0

    def test_equal_graphs_share_a_plan_and_what_torch_compiled(self, opener: Opener, tmp_path: Path) -> None:
        first, second = (opener.open(script(Scaled(), tmp_path / f"{n}.pt")) for n in "ab")
        assert first.key == second.key
        plans = [graph.eager_plan() for graph in (first, second)]
        assert plans[0].template is plans[1].template  # type: ignore[attr-defined]
        assert {plan.tier for plan in plans} == {Tier.COMPILED}

    def test_settings_that_change_the_compiled_code_change_the_key(self, opener: Opener, tmp_path: Path) -> None:
        file = script(Scaled(), tmp_path / "m.pt")
        assert opener.open(file).key != opener.open(file, parameters={"INFERENCE_MODE": "false"}).key
        assert opener.open(file).key == opener.open(file, parameters={"ENABLE_WEIGHT_SHARING": "true"}).key

    def test_splitting_keeps_the_key_and_the_answers(self, opener: Opener, tmp_path: Path) -> None:
        file = script(Recurrent(), tmp_path / "model.pt")
        plan_source, weights = engine("torchscript").split(file, tmp_path / "out")  # type: ignore[attr-defined]
        assert plan_source.stat().st_size < file.stat().st_size
        graph = opener.open(plan_source)
        assert graph.key == opener.open(file).key
        with open_weights(weights) as source, graph.embedded_weights() as embedded:
            stored = WeightStore().put(graph.slots, source, embedded).weights
        ids = np.arange(8).reshape(2, 4)
        assert same(bind(graph, stored).execute([ids]), called(load(file), ids))
        with pytest.raises(AlreadyExists):
            engine("torchscript").split(file, tmp_path / "out")  # type: ignore[attr-defined]

    def test_a_directory_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        file = script(Scaled(), tmp_path / "model.pt")
        with pytest.raises(StorageFailed, match=r"model\.pt/1: cannot write"):
            engine("torchscript").split(file, file / "1")  # type: ignore[attr-defined]

    def test_zeros_of_a_split_model_are_never_taken_for_weights(self, opener: Opener, tmp_path: Path) -> None:
        file = script(Recurrent(), tmp_path / "model.pt")
        plan_source, _ = engine("torchscript").split(file, tmp_path / "out")  # type: ignore[attr-defined]
        graph = opener.open(plan_source)
        with graph.embedded_weights() as embedded, pytest.raises(WeightsRefused, match="no tensors: missing all"):
            WeightStore().put(graph.slots, embedded)
        with pytest.raises(WeightsRefused, match="weights were split off"):
            open_weights(plan_source)
        with pytest.raises(ModelInvalid, match="no weights inside"):
            engine("torchscript").split(plan_source, tmp_path / "again")  # type: ignore[attr-defined]

    def test_without_inference_mode_answers_are_the_same(self, opener: Opener, tmp_path: Path) -> None:
        file, x = script(Stateful(), tmp_path / "m.pt"), floats(2, 4)
        bound, expected = opener.bind(file, parameters={"INFERENCE_MODE": "false"}), load(file)
        for _ in range(3):
            assert same(bound.execute([x]), called(expected, x))


class TestDevices:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        """A file that was saved on a GPU."""

        def move(records: dict[str, bytes]) -> None:
            cpu, gpu = b"X\3\0\0\0cpu", b"X\6\0\0\0cuda:0"
            assert cpu in records["data.pkl"]
            records["data.pkl"] = records["data.pkl"].replace(cpu, gpu)

        return rewrite(script(Scaled(), tmp_path / "cpu.pt"), tmp_path / "model.pt", move)

    def test_tensors_are_brought_to_the_cpu(self, opener: Opener, file: Path, tmp_path: Path) -> None:
        x = floats(4)
        assert same(opener.bind(file).execute([x]), called(load(tmp_path / "cpu.pt"), x))

    def test_devices_that_are_to_be_kept_and_are_not_there_are_torchs_reason(self, opener: Opener, file: Path) -> None:
        with pytest.raises(Internal, match=r"(?s)^failed to load model 'm': .*(CUDA|cuda)"):
            opener.open(file, keeps_devices=True)


def test_the_first_calls_of_many_threads_are_exact(opener: Opener, tmp_path: Path) -> None:
    """Case T15: TorchScript compiles in its first calls."""
    file = script(Recurrent(), tmp_path / "model.pt")
    graph = opener.open(file)
    with graph.embedded_weights() as embedded:
        weights = WeightStore().put(graph.slots, embedded).weights
    plans = [bind(graph, weights) for _ in range(4)]
    expected = load(file)
    inputs = [np.random.default_rng(seed).integers(0, 10, (1 + seed % 3, 5)) for seed in range(16)]
    wanted = [called(expected, ids)[0].tobytes() for ids in inputs]
    together = threading.Barrier(16)
    answers: list[set[bytes]] = [set() for _ in inputs]

    def run(number: int) -> None:
        together.wait()
        answers[number] |= {plans[number % 4].execute([inputs[number]])[0].tobytes() for _ in range(5)}

    threads = [threading.Thread(target=run, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [{want} for want in wanted]
