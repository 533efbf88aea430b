"""The forms of a model file: how torch makes each of a trained module, and how it loads one without a server.

This module imports torch, as :mod:`benchmarks.models` does.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._C._aoti import AOTIModelPackageLoader
from torch._inductor import aoti_compile_and_package

from benchmarks.harness import REPETITIONS, Answer, Prepared, median
from rebind.demo import digits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_TORCH_LOADS = 3
"""Not more: torch never closes the library of a package, which has the weights inside."""


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of model file: how torch makes one of a module, and how it loads one by itself.

    ``platform`` is empty when a file tells all that a configuration would have to. Of ``builds`` the median counts.
    """

    file_name: str
    platform: str
    save: Callable[[nn.Module, torch.Tensor, Path], None]
    load: Callable[[Path], Callable[[torch.Tensor], torch.Tensor]]
    builds: int = 1


def warm_up_compiler() -> None:
    """Has Inductor precompile its headers, which it does once, and not for every model that a trainer compiles."""
    with tempfile.TemporaryDirectory(prefix="rebind-bench-") as directory:
        _save_package(nn.Linear(2, 2), torch.zeros(1, 2), Path(directory, "model.pt2"))


def build_s(form: Form, net: nn.Module, request: torch.Tensor, plan_file: Path) -> float:
    """Writes ``plan_file``; returns the seconds of that."""
    seconds = []
    for _ in range(form.builds):
        started_s = time.perf_counter()
        form.save(net, request, plan_file)
        seconds.append(time.perf_counter() - started_s)
    return median(seconds)


@torch.inference_mode()
def torch_load_s(prepared: Prepared, form: str) -> float:
    """Seconds that torch takes to load a model file without a server, to its first answer, which is checked."""
    torch.set_num_threads(1)
    request = torch.from_numpy(prepared.inputs[0])
    seconds = []
    for _ in range(_TORCH_LOADS):
        started_s = time.perf_counter()
        output = FORMS[form].load(prepared.plan_file)(request)
        seconds.append(time.perf_counter() - started_s)
        prepared.check(Answer(output.numpy(), generation=1), seed=0)
    return median(seconds)


def config_text(
    platform: str, shape: Sequence[int], output_shape: Sequence[int], instances: int, parameters: Mapping[str, str]
) -> str:
    """The text of a ``config.pbtxt``; with inputs and outputs where there is a platform."""
    lines = [f"instance_group [{{ count: {instances} kind: KIND_CPU }}]"]
    for key, value in parameters.items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    if platform:
        lines.append(f'platform: "{platform}"')
        for kind, dims in (("INPUT", shape), ("OUTPUT", output_shape)):
            lines.append(f'{kind.lower()} [{{ name: "{kind}__0" data_type: TYPE_FP32 dims: {list(dims)} }}]')
    return "\n".join(lines) + "\n"


def _save_archive(net: nn.Module, request: torch.Tensor, plan_file: Path) -> None:
    if isinstance(net, digits.DigitsNet):
        digits.export(net, plan_file)
    else:
        torch.export.save(torch.export.export(net, (request,)), plan_file)


def _load_archive(plan_file: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.export.load(plan_file).module()


def _save_torchscript(net: nn.Module, _request: torch.Tensor, plan_file: Path) -> None:
    torch.jit.save(torch.jit.script(net), plan_file)


def _load_torchscript(plan_file: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    loaded: Callable[[torch.Tensor], torch.Tensor] = torch.jit.load(plan_file)  # type: ignore[no-untyped-call]
    return loaded


def _save_package(net: nn.Module, request: torch.Tensor, plan_file: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about a call of torch's
        aoti_compile_and_package(torch.export.export(net, (request,)), package_path=str(plan_file))


def _load_package(plan_file: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    # As Triton's backend does. aoti_load_package would look for the processor's vector units first, with a compiler.
    loader = AOTIModelPackageLoader(str(plan_file), "model", False, 1, -1)
    return lambda request: loader.boxed_run([request])[0]


FORMS = {
    "archive": Form("model.pt2", "", _save_archive, _load_archive),
    "package": Form("model.pt2", "torch_aoti", _save_package, _load_package),
    "torchscript": Form("model.pt", "pytorch_libtorch", _save_torchscript, _load_torchscript, builds=REPETITIONS),
}
"""By name: ``archive`` is one of torch.export, ``package`` what AOTInductor compiled, with the weights inside."""
