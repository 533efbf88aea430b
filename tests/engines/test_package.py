"""Compiled packages: what is refused before it can do harm, and that weights are what was given, all of them."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import shutil
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch

from rebind.engines.aot_inductor.package import PackageGraph
from rebind.engines.aot_inductor.package_archive import PackageArchive
from rebind.engines.aot_inductor.package_batch import takes_one
from rebind.engines.aot_inductor.package_source import read_source, tensor_numbers
from rebind.engines.contract import EngineOptions, ModelOptions, Refit, Tier
from rebind.engines.registry import engine
from rebind.errors import InputRefused, InvalidArgument, ModelInvalid, WeightsRefused
from rebind.plans.cache import PlanCache
from rebind.tensor import DataType
from rebind.weights.formats import open_weights
from rebind.weights.store import WeightStore
from tests.engines.models import EVERYTHING, MLP, Arrays, Case
from tests.engines.packages import NORMED, Nested, Packages
from tests.engines.tampering import edit_json, rewrite

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rebind.engines.aot_inductor.package_plan import PackageBoundPlan
    from rebind.weights.store import WeightSet

pytestmark = [pytest.mark.compiles, pytest.mark.timeout(300)]

WITH_WEIGHTS = ["default", "kept", "pickled", "blob", "folded"]
Records = dict[str, bytes]


@pytest.fixture(scope="session")
def packages(compiled_directory: Path) -> Packages:
    return Packages(compiled_directory)


class Desk:
    """Opens packages, and binds weights to them."""

    def __init__(self, cache: PlanCache, directory: Path) -> None:
        self.cache = cache
        self.directory = directory
        self.store = WeightStore()

    def open(self, path: Path, **model: Any) -> PackageGraph:
        graph = engine("aot_inductor").open(path, EngineOptions(self.cache, model=ModelOptions(**model)))
        assert isinstance(graph, PackageGraph)
        return graph

    def put(self, graph: PackageGraph, state: Mapping[str, torch.Tensor] | None = None) -> WeightSet:
        """The weights of ``state``, completed by those of the package; or the latter alone."""
        with graph.embedded_weights() as embedded:
            if state is None:
                return self.store.put(graph.slots, embedded).weights
            path = self.directory / "weights.safetensors"
            safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
            with open_weights(path) as source:
                return self.store.put(graph.slots, source, embedded).weights

    def bind(self, graph: PackageGraph, state: Mapping[str, torch.Tensor] | None = None) -> PackageBoundPlan:
        return graph.cached_plan().bind(self.put(graph, state))


@pytest.fixture
def desk(plan_cache: PlanCache, tmp_path: Path) -> Desk:
    return Desk(plan_cache, tmp_path)


def inputs(seed: int = 0) -> Arrays:
    return MLP.inputs(np.random.default_rng(seed))


def assert_close(answers: Arrays, expected: Arrays) -> None:
    for answer, want in zip(answers, expected, strict=True):
        assert answer.shape == want.shape
        assert answer.dtype == want.dtype
        assert np.abs(answer.astype(np.float64) - want).max() <= 1e-5 * np.abs(want).max()


def bits(answers: Arrays) -> list[bytes]:
    return [answer.tobytes() for answer in answers]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- answers and weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WITH_WEIGHTS)
def test_weights_in_the_package_serve(packages: Packages, desk: Desk, kind: str) -> None:
    answers = desk.bind(desk.open(packages.of(kind))).execute(inputs())
    assert_close(answers, MLP.expected(MLP.state(0), inputs()))


@pytest.mark.parametrize("kind", ["kept", "weightless", "pickled", "blob", "folded"])
def test_a_refit_reaches_every_weight(packages: Packages, desk: Desk, kind: str) -> None:
    graph, state = desk.open(packages.of(kind)), MLP.state(1)
    before = bits(desk.bind(graph, state).execute(inputs()))
    for name in state:
        changed = {**state, name: state[name] * 1.5 + 1}
        answers = desk.bind(graph, changed).execute(inputs())
        assert_close(answers, MLP.expected(changed, inputs()))
        assert bits(answers) != before, name


@pytest.mark.parametrize(
    ("kind", "case", "why"),
    [
        # Case T5: what has at most 8 elements are numbers in the code.
        ("default", MLP, r"its code holds numbers that were weights, or were computed from them \(.*and 1 more\)"),
        # Cases T7 and T9: the convolution has taken in the batch norm; what is left has other names and layouts.
        ("frozen", EVERYTHING, "the package was compiled with freezing"),
        # The norm of its weight is a number in the code, and the weight is read as well.
        ("frozen to a number", NORMED, r"its code holds numbers that were weights, or were computed from them \(\d"),
        # Weights have been packed for multiplications; the originals are there too, and unread.
        ("autotuned", MLP, "its code does not read 'first.weight', but what was computed from it"),
    ],
)
def test_a_package_with_anything_built_in_serves_its_own_weights_and_refuses_others(
    packages: Packages, desk: Desk, kind: str, case: Case, why: str
) -> None:
    """Torch takes the file, and answers with a mixture of old weights and new ones."""
    graph = desk.open(packages.of(kind), name="m")
    arrays = case.inputs(np.random.default_rng(0))
    bound = desk.bind(graph)
    assert_close(bound.execute(arrays), case.expected(case.state(0), arrays))
    assert graph.slots.slots == ()
    with pytest.raises(WeightsRefused, match=f"{why}.*always_keep_tensor_constants"):
        desk.put(graph, case.state(1))
    assert any(re.search(f"'m' serves its own weights only: {why}", text) for _, text in graph.log_lines())


def test_one_weight_alone_is_refused_too(packages: Packages, desk: Desk) -> None:
    """Of a package with anything built in, since nobody knows what that was computed from."""
    with pytest.raises(WeightsRefused, match="serves its own weights"):
        desk.put(desk.open(packages.of("default")), {"first.bias": MLP.state(1)["first.bias"]})


def test_a_package_with_anything_built_in_and_no_weights_is_refused(
    packages: Packages, desk: Desk, tmp_path: Path
) -> None:
    path = rewrite(packages.of("autotuned"), tmp_path / "m.pt2", without("_weights.blob"))
    assert "has no weights, and can take none: its code does not read 'first.weight'" in refusal_of(desk, path)


def test_numbers_that_programs_have_are_no_elements_of_tensors() -> None:
    program = "x / 784.0; 1e-05; 0.7071067811865476 * x; 0.0009765625; 1.1920928955078125e-07; -3.4028234663852886e+38"
    assert tensor_numbers([program, "// 0.10000000149011612"]) == []
    elements = "static_cast<float>(0.10000000149011612); -23.01077651977539; 0.10009765625"
    assert tensor_numbers([elements]) == ["0.10000000149011612", "23.01077651977539", "0.10009765625"]


def test_a_package_without_weights_does_not_run_without(packages: Packages, desk: Desk) -> None:
    """Case T3: torch ends the process."""
    graph = desk.open(packages.of("weightless"))
    assert {slot.required for slot in graph.slots.slots} == {True}
    with pytest.raises(WeightsRefused, match="no tensors: missing all 4"):
        desk.put(graph)


@pytest.mark.parametrize(
    "misfit",
    [
        lambda weight: weight.reshape(32, 32),
        lambda weight: weight[:2],
        lambda weight: weight.double(),
        lambda weight: weight.bfloat16(),
        lambda weight: weight.t(),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    packages: Packages, desk: Desk, misfit: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Case T4: torch takes all of these, and answers wrongly or crashes."""
    graph, state = desk.open(packages.of("kept")), MLP.state(1)
    bound = desk.bind(graph, state)
    before = bits(bound.execute(inputs()))
    with pytest.raises(WeightsRefused, match=r"'first.weight': expected"):
        desk.put(graph, {**state, "first.weight": misfit(state["first.weight"])})
    assert bits(bound.execute(inputs())) == before


def test_a_plan_refuses_the_weights_of_another_graph(packages: Packages, desk: Desk) -> None:
    other = desk.put(desk.open(packages.of("nested")))
    with pytest.raises(WeightsRefused, match=r"'first.weight': missing, expected F32 \[64,16\]"):
        desk.open(packages.of("kept")).cached_plan().bind(other)


def test_layouts_that_are_not_row_major_keep_their_values(packages: Packages, desk: Desk) -> None:
    """Of weights and of inputs: compiled code has the example's strides built in."""
    torch.manual_seed(1)
    graph, model = desk.open(packages.of("nested")), Nested().eval()
    bound = desk.bind(graph, model.state_dict())
    for sizes in ((4, 7, 9), (2, 2, 3)):
        x, parts, keywords = Nested.arguments(*sizes)
        with torch.inference_mode():
            mixed, rest = model(x, parts, **keywords)
        arrays = [tensor.contiguous().numpy() for tensor in (x, *parts["p"], *keywords.values())]
        assert_close(bound.execute(arrays), [tensor.numpy() for tensor in (mixed, *rest["a"])])


# --- interface --------------------------------------------------------------------------------------------------------


def test_a_package_tells_its_inputs_and_outputs(packages: Packages, desk: Desk) -> None:
    graph = desk.open(packages.of("nested"))
    assert [(tensor.name, tensor.paths[:1], tensor.shape) for tensor in graph.inputs] == [
        ("INPUT__0", ("ARGS[0]",), (-1, -1, 24)),
        ("INPUT__1", ("ARGS[1][p][0]",), (-1, -1, 24)),
        ("INPUT__2", ("ARGS[1][p][1]",), (2, 3, 8, 8)),
        ("scale", ("KWARGS[scale]",), ()),
        ("unused", ("KWARGS[unused]",), (3,)),
    ]
    assert [(tensor.name, tensor.paths[:1], tensor.datatype) for tensor in graph.outputs] == [
        ("OUTPUT__0", ("RESULT[0]",), DataType.FP32),
        ("OUTPUT__1", ("RESULT[1][a][0]",), DataType.FP32),
        ("OUTPUT__2", ("RESULT[1][a][1]",), DataType.INT64),
    ]
    assert {tensor.shape for tensor in graph.outputs} == {None}, "sizes vary"
    assert graph.refit is Refit.NEW_HANDLE
    assert graph.eager_plan() is graph.cached_plan() is graph.build_plan(lambda _: None)
    assert graph.cached_plan().tier is Tier.COMPILED


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ([np.zeros((3, 16))], "expected data of type float32, got float64"),
        ([np.zeros(16, np.float32)], r"expected shape \[-1,16\].* got \[16\]"),
        ([np.zeros((), np.float32)], r"expected shape \[-1,16\].* got \[\]"),
        ([np.zeros((3, 17), np.float32)], r"got \[3,17\]"),
        ([np.zeros((65, 16), np.float32)], "dimension 0 has the size 65, but the model was exported for 1 to 64"),
        ([np.zeros((0, 16), np.float32)], "dimension 0 has the size 0"),
        ([], "expected 1 inputs, got 0"),
    ],
)
def test_inputs_that_were_not_compiled_for_are_refused(
    packages: Packages, desk: Desk, arrays: Arrays, problem: str
) -> None:
    """Compiled code takes them all, and reads what is not there."""
    with pytest.raises(InvalidArgument, match=problem):
        desk.bind(desk.open(packages.of("kept"))).execute(arrays)


def test_sizes_that_are_one_in_the_model_must_be_equal(packages: Packages, desk: Desk) -> None:
    x, parts, keywords = Nested.arguments(4, 7, 9)
    arrays = [tensor.contiguous().numpy() for tensor in (x, *parts["p"], *keywords.values())]
    bound = desk.bind(desk.open(packages.of("nested")))
    bound.execute(arrays)
    with pytest.raises(InputRefused, match="INPUT__1"):
        bound.execute([arrays[0][:3], *arrays[1:]])


def test_a_batch_of_one_is_answered(packages: Packages, desk: Desk) -> None:
    """The checks in the code, which are off, would refuse it: export notes no minimum below 2."""
    batch = [inputs()[0][:1]]
    assert_close(desk.bind(desk.open(packages.of("kept"))).execute(batch), MLP.expected(MLP.state(0), batch))


def test_a_batch_of_one_that_would_read_beyond_it_is_refused(
    packages: Packages, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may end the process, and ends that of the child."""
    desk = Desk(PlanCache(tmp_path / "cache"), tmp_path)
    caplog.set_level(logging.DEBUG, "rebind.engines.aot_inductor.package")
    graph = desk.open(packages.of("neighbour"), name="m")
    assert caplog.messages.count("loading the library") == 2, "the first child died, of what the second did not try"
    bound = desk.bind(graph)
    batch = np.ones((2, 1 << 22), np.float32)
    assert_close(bound.execute([batch]), [np.full((2, 2), 1 << 22, np.float32)])
    with pytest.raises(InputRefused, match=r"has the size 1, but .* for 2 to 64; .* batch of one"):
        bound.execute([batch[:1]])
    assert any("'m' takes no batch of one" in text for level, text in graph.log_lines() if level == logging.INFO)
    assert not any("batch of one" in text for _, text in desk.open(packages.of("kept")).log_lines())


@pytest.mark.parametrize(
    ("function", "safe"),
    [
        (lambda x: [x.relu(), x.sum(1), x.T], True),
        (lambda x: [x, torch.arange(3)], True),
        (lambda x: [x.relu() - x.relu()[-1]], False),  # what it would read lies in memory of its own
        (lambda x: [x, x.sum()], False),
        (lambda x: [x / 0], False),  # no number shows what it read
        (lambda x: [x if len(x) > 1 else x + 1], False),
    ],
)
def test_only_a_first_row_that_does_not_depend_on_the_second_is_safe_alone(
    packages: Packages, function: Callable[[torch.Tensor], list[torch.Tensor]], safe: bool
) -> None:
    source = read_source(content(packages.of("kept"), ".wrapper.cpp")[1].decode())
    assert source.may_take_one
    assert takes_one(lambda tensors: function(*tensors), source) is safe


def test_parameters_are_those_of_triton(packages: Packages, desk: Desk) -> None:
    path = packages.of("kept")
    assert not desk.open(path).shares_weights
    graph = desk.open(path, name="m", parameters={"ENABLE_WEIGHT_SHARING": "on", "INFERENCE_MODE": "false"})
    assert graph.shares_weights
    assert graph.reuse_line == 'Reusing Inductor model loader for instance "m".'
    assert (logging.INFO, "Inference Mode is disabled for model instance 'm'") in graph.log_lines()


def test_weights_of_one_element_are_warned_of(packages: Packages, desk: Desk, tmp_path: Path) -> None:
    def one_element(records: Records) -> None:
        source = record(records, ".wrapper.cpp")
        records[source] = records[source].replace(b"shape = {4};", b"shape = {1};")

    assert not [text for level, text in desk.open(packages.of("kept"), name="m").log_lines() if level > logging.INFO]
    path = rewrite(packages.of("weightless"), tmp_path / "one.pt2", one_element)
    warnings = [text for level, text in desk.open(path, name="m").log_lines() if level == logging.WARNING]
    assert len(warnings) == 1
    assert "'second.bias'" in warnings[0]


def test_messages_about_weights_in_a_package_name_its_file(packages: Packages, desk: Desk) -> None:
    for kind in ("kept", "frozen", "weightless"):
        with desk.open(packages.of(kind)).embedded_weights() as source:
            assert source.subject == str(packages.of(kind))


def test_a_package_cannot_be_split(packages: Packages, tmp_path: Path) -> None:
    split = engine("aot_inductor").split  # type: ignore[attr-defined]
    with pytest.raises(ModelInvalid, match="is a compiled package, and code cannot be written anew"):
        split(packages.of("kept"), tmp_path / "parts")


# --- refused before it can do harm ------------------------------------------------------------------------------------


def record(records: Records, suffix: str) -> str:
    """The name of the only record that ends so."""
    (name,) = [name for name in records if name.endswith(suffix)]
    return name


def refusal_of(desk: Desk, path: Path) -> str:
    with pytest.raises(ModelInvalid) as refused:
        desk.open(path)
    return str(refused.value)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("AOTI_DEVICE_KEY", "cuda", "was compiled for device cuda, this is cpu"),
        ("AOTI_PLATFORM", "win32", "was compiled for platform win32, this is linux"),
        ("AOTI_MACHINE", "aarch64", "was compiled for machine aarch64, this is x86_64"),
        ("AOTI_CPU_ISA", "ASIMD", "was compiled for a processor with ASIMD, this is one without asimd"),
    ],
)
def test_a_package_for_another_machine_is_refused_unopened(
    packages: Packages, tmp_path: Path, key: str, value: str, problem: str
) -> None:
    desk = Desk(PlanCache(tmp_path / "cache"), tmp_path)
    metadata, _ = content(packages.of("kept"), ".wrapper_metadata.json")
    path = edit_json(packages.of("kept"), tmp_path / "m.pt2", metadata, lambda document: document.update({key: value}))
    assert problem in refusal_of(desk, path)
    assert not (tmp_path / "cache").exists(), "no child was started, and nothing was taken out of the file"


def content(path: Path, suffix: str) -> tuple[str, bytes]:
    """Name, below the archive's directory, and bytes of the only record that ends so."""
    with zipfile.ZipFile(path) as zipped:
        (name,) = [name for name in zipped.namelist() if name.endswith(suffix)]
        return name.partition("/")[2], zipped.read(name)


def edited(suffix: str, old: bytes, new: bytes) -> Callable[[Records], None]:
    def edit(records: Records) -> None:
        name = record(records, suffix)
        assert old in records[name]
        records[name] = records[name].replace(old, new)

    return edit


def without(suffix: str) -> Callable[[Records], None]:
    return lambda records: records.pop(record(records, suffix))  # type: ignore[return-value]


def cut(records: Records) -> None:
    records[record(records, ".so")] = records[record(records, ".so")][:200_000]


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (edited(".wrapper.cpp", b"AOTInductorModelCreateV2(", b"AOTInductorModelCreateV3("), "by another torch than"),
        (edited(".so", b"aoti_torch_empty_strided\0", b"aoti_torch_empty_strideX\0"), "by another torch than"),
        (edited("byteorder", b"little", b"big"), "another byte order"),
        (without(".so"), "has 0 files *.so"),
        (without(".wrapper.cpp"), "has 0 files *.wrapper.cpp"),
        (cut, "does not survive being loaded"),
        (edited(".wrapper.cpp", b"cached_torch_dtype_float32;", b"cached_torch_dtype_int32;"), "where its source has"),
        (edited(".wrapper.cpp", b"shape = {64, 16};", b"shape = {32, 32};"), "where its source has"),
        (edited(".wrapper.cpp", b"stride = {16, 1};", b"stride = {1, 64};"), "where its source has"),
        (edited(".wrapper.cpp", b"_size[0];", b"_size[0]; aoti_torch_proxy_executor_call_function"), "own runner"),
    ],
)
def test_a_package_that_is_not_for_this_torch_is_refused(
    packages: Packages, desk: Desk, tmp_path: Path, edit: Callable[[Records], None], problem: str
) -> None:
    assert problem in refusal_of(desk, rewrite(packages.of("kept"), tmp_path / "m.pt2", edit))


def test_a_library_that_ends_the_process_ends_that_of_the_child(packages: Packages, desk: Desk, tmp_path: Path) -> None:
    """Case T1, for packages."""
    (tmp_path / "bad.c").write_text("void abort(void); __attribute__((constructor)) static void f(void) { abort(); }")
    subprocess.run(["gcc", "-shared", "-o", "bad.so", "bad.c"], cwd=tmp_path, check=True)

    def replace(records: Records) -> None:
        records[record(records, ".so")] = (tmp_path / "bad.so").read_bytes()

    text = refusal_of(desk, rewrite(packages.of("kept"), tmp_path / "m.pt2", replace))
    assert "does not survive being loaded and run once" in text
    assert "signal 6" in text


def test_a_damaged_package_is_refused(packages: Packages, desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    shutil.copy(packages.of("kept"), path)
    data = path.read_bytes()
    place = data.index(b"\x7fELF") + 100_000
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    assert "damaged: its CRC does not match" in refusal_of(desk, path)


def test_an_empty_file_in_a_package_is_no_damage(packages: Packages, tmp_path: Path) -> None:
    with_note = rewrite(packages.of("kept"), tmp_path / "m.pt2", lambda records: records.update({"extra/note": b""}))
    PackageArchive(with_note).close()


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("writing", "writes to 'calls'"),
        ("writing", "writes to 'INPUT__0'"),
        ("parallel", "one index out of range would end the server"),
    ],
)
def test_packages_that_one_request_could_ruin_are_refused(
    packages: Packages, desk: Desk, kind: str, problem: str
) -> None:
    assert problem in refusal_of(desk, packages.of(kind))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("{s77, ", "{2L*s77, ", "is computed"),
        ("{s77, 16L}, {16L, 1L}", "{s77, 16L}, {32L, 1L}", "no dense tensor"),
        ("{s77, 16L}, {16L, 1L}", "{s77, 16L}, {std::abs(16L), 1L}", "not understood"),
        ("_size[1]) {", "_sized[1]) {", "1 dimensions and 2"),
        ("_size[0] ", "_sized[0] ", "all dimensions"),
    ],
)
def test_a_source_that_says_too_little_is_not_guessed_at(packages: Packages, old: str, new: str, problem: str) -> None:
    text = content(packages.of("kept"), ".wrapper.cpp")[1].decode()
    symbol = read_source(text).arguments[0].shape[0].name  # type: ignore[union-attr]
    old, new = old.replace("s77", symbol), new.replace("s77", symbol)
    assert old in text
    with pytest.raises(ValueError, match=problem):
        read_source(text.replace(old, new))


def test_the_file_may_change_once_it_is_open(packages: Packages, desk: Desk, tmp_path: Path) -> None:
    """Nothing in the repository is mapped (promise 7)."""
    path = tmp_path / "m.pt2"
    shutil.copy(packages.of("kept"), path)
    graph = desk.open(path)
    with path.open("r+b") as file:
        file.truncate(1000)
        file.write(b"\0" * 1000)
    assert_close(desk.bind(graph).execute(inputs()), MLP.expected(MLP.state(0), inputs()))


# --- many at once, and again and again --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kept", "folded"])
def test_more_threads_than_instances_never_mix_two_weight_sets(packages: Packages, desk: Desk, kind: str) -> None:
    """Promise 2, while weights are bound and dropped beside them."""
    graph = desk.open(packages.of(kind), instances=2)
    weights = [desk.put(graph, MLP.state(seed)) for seed in (1, 2)]
    plan = graph.cached_plan()
    serving = [plan.bind(each) for each in weights]
    pure = [bits(bound.execute(inputs())) for bound in serving]
    assert pure[0] != pure[1]
    wrong: list[int] = []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            for index, bound in enumerate(list(serving)):
                if bits(bound.execute(inputs())) != pure[index]:
                    wrong.append(index)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for refit in range(100):
        serving[refit % 2] = plan.bind(weights[refit % 2])
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("kind", ["kept", "folded"])
def test_refits_leave_nothing_behind(packages: Packages, desk: Desk, kind: str) -> None:
    graph = desk.open(packages.of(kind))
    plan, weights = graph.cached_plan(), [desk.put(graph, MLP.state(seed)) for seed in (1, 2)]

    def refit(times: int) -> None:
        for number in range(times):
            plan.bind(weights[number % 2]).execute(inputs())
        gc.collect()

    refit(100)
    before = resident_bytes()
    refit(200)
    assert resident_bytes() - before < 2_000_000


def test_what_a_bound_plan_held_goes_with_it(packages: Packages, desk: Desk) -> None:
    graph = desk.open(packages.of("kept"), instances=3)
    bound = desk.bind(graph, MLP.state(1))
    bound.execute(inputs())
    assert desk.store.usage().sets == 1
    del bound
    gc.collect()
    assert desk.store.usage().sets == 0
    assert desk.store.usage().segment_bytes == 0


def test_instances_run_over_one_set_of_weights(packages: Packages, desk: Desk, tmp_path: Path) -> None:
    graph = desk.open(packages.of("kept"), instances=16)
    bound = desk.bind(graph, MLP.state(1))
    barrier = threading.Barrier(16)
    answers: list[list[bytes]] = []

    def run() -> None:
        barrier.wait()
        answers.extend(bits(bound.execute(inputs())) for _ in range(8))

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 128
    assert {tuple(answer) for answer in answers} == {tuple(bits(bound.execute(inputs())))}
    assert desk.store.usage().referenced_bytes == desk.store.usage().unique_bytes == graph.slots.nbytes


def test_the_entry_of_a_package_is_found_again(packages: Packages, plan_cache: PlanCache, tmp_path: Path) -> None:
    first, second = (Desk(plan_cache, tmp_path).open(packages.of("kept")) for _ in range(2))
    assert first.key == second.key != Desk(plan_cache, tmp_path).open(packages.of("default")).key
    entry = plan_cache.sources.get(first.key)
    assert entry is not None
    assert {path.name for path in entry.directory.iterdir()} == {
        "manifest.json",
        "model.so",
        "model.cpp",
        "weights.safetensors",
    }
    assert json.loads((entry.directory / "manifest.json").read_text())["record"]["manifest"]["results"]
