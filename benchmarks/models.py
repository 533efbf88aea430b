"""The networks that are measured, and what a server and its check need of them on disk.

This module imports torch; the benchmarks call it in other processes (:func:`benchmarks.harness.prepare`).
"""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.forms import FORMS, build_s, config_text, warm_up_compiler
from benchmarks.harness import Prepared
from rebind.demo import digits
from rebind.engines.contract import EngineOptions
from rebind.engines.registry import engine_for_file
from rebind.plans.cache import PlanCache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut (He et al. 2015, with the stride on the 3x3, as is usual now)."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, channels_out, 1, bias=False),
            nn.BatchNorm2d(channels_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Features of four times ``width`` channels."""
        return torch.relu(self.body(features) + self.shortcut(features))


class ResNet50(nn.Module):
    """25.6 million parameters, 102 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
        )
        blocks: list[nn.Module] = []
        channels = 64
        for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for index in range(count):
                blocks.append(Bottleneck(channels, width, stride=2 if index == 0 and width > 64 else 1))
                channels = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, 1000)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Scores ``[n, 1000]`` of images ``[n, 3, height, width]``."""
        scores: torch.Tensor = self.classifier(self.blocks(self.stem(image)).mean((2, 3)))
        return scores


class LinearStack(nn.Module):
    """``layers`` times ``width`` x ``width`` weights, and next to nothing else."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(layers)])

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Features ``[n, width]`` of features ``[n, width]``."""
        for layer in self.layers:
            features = torch.relu(layer(features))
        return features


class Table(nn.Module):
    """50,000 rows of 510 values, 102 MB, of which a request reads 8: weights as large as ResNet-50's, and no work."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(510, 50_000, bias=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """The rows ``[n, 8, 510]`` that the fractions of ``numbers``, ``[n, 8]``, point to."""
        return self.rows.weight[(numbers.frac().abs() * 49_999).long()]


def policy() -> nn.Module:
    """16 -> 256 -> 256 -> 4, as reinforcement learning has it: 71,172 parameters, 285 kB."""
    return nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet50": (ResNet50, (1, 3, 224, 224)),
    "stack_10mb": (functools.partial(LinearStack, 10, 512), (1, 512)),
    "stack_100mb": (functools.partial(LinearStack, 6, 2048), (1, 2048)),
    "stack_1gb": (functools.partial(LinearStack, 16, 4096), (1, 4096)),
    "stack_of_100": (functools.partial(LinearStack, 100, 505), (1, 505)),
    "table": (Table, (1, 8)),
    "digits": (digits.DigitsNet, (4, 1, 8, 8)),
    "policy": (policy, (1, 16)),
}
"""By name: what makes it, and the shape of a request. Stacks have 10.5, 100.7, 1,074 and 102 MB of weights."""

OWNS_TWO_CORES = ("resnet50",)
"""Has the only instance of its server, and enough to compute for two threads: it is served with two."""


def write(
    name: str,
    work_dir: Path,
    forms: Sequence[str],
    *,
    weight_sets: int,
    requests: int = 1,
    instances: int = 1,
    parameters: Mapping[str, str] | None = None,
) -> dict[str, Prepared]:
    """Writes the model into a repository for each of ``forms``, ``weight_sets`` weights files, and eager answers.

    The model files have the weights of seed 0, the weights files those of 1, 2, ... ``instances`` and ``parameters``
    are for the configuration.
    """
    torch.set_num_threads(1)  # as an instance of the server has; the other processors are in use
    network, shape = NETWORKS[name]
    inputs = torch.randn((requests, *shape), generator=torch.Generator().manual_seed(1))
    net = network().eval()
    set_weights(net, seed=0)
    answers = [_answers(net, inputs)]
    if "package" in forms:
        warm_up_compiler()
    parameters = dict(parameters or {}) | ({"INTRA_OP_THREAD_COUNT": "2"} if name in OWNS_TWO_CORES else {})
    built: dict[str, tuple[Path, float]] = {}
    for form in forms:
        plan_file = work_dir / form / "models" / name / "1" / FORMS[form].file_name
        plan_file.parent.mkdir(parents=True)
        text = config_text(FORMS[form].platform, shape, answers[0].shape[1:], instances, parameters)
        (plan_file.parents[1] / "config.pbtxt").write_text(text)
        built[form] = plan_file, build_s(FORMS[form], net, inputs[0], plan_file)
    files = []
    for seed in range(1, weight_sets + 1):
        set_weights(net, seed)
        files.append(work_dir / f"{name}-{seed}.safetensors")
        save_file(net.state_dict(), files[-1])
        answers.append(_answers(net, inputs))
    weights_nbytes = sum(tensor.nbytes for tensor in net.state_dict().values())
    return {
        form: Prepared(name, plan_file, tuple(files), weights_nbytes, inputs.numpy(), np.stack(answers), seconds)
        for form, (plan_file, seconds) in built.items()
    }


@torch.no_grad()
def set_weights(net: nn.Module, seed: int) -> None:
    """Random weights under which signals neither fade nor explode, and batch norms that look trained."""
    generator = torch.Generator().manual_seed(seed)
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
            if module.bias is not None:
                module.bias.uniform_(-0.1, 0.1, generator=generator)
        elif isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.weight.uniform_(0.5, 1.0, generator=generator)
            module.bias.uniform_(-0.1, 0.1, generator=generator)
            module.running_mean.uniform_(-0.1, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)


def fresh_compile_s(plan_file: Path) -> float:
    """Seconds that the product takes to build the plan of ``plan_file`` with an empty plan cache."""
    engine = engine_for_file(plan_file.name)
    with tempfile.TemporaryDirectory(prefix="rebind-bench-") as cache:
        graph = engine.open(plan_file, EngineOptions(PlanCache(Path(cache))))
        started_s = time.perf_counter()
        graph.build_plan(lambda line: print(f"    {line}", flush=True))
        return time.perf_counter() - started_s


@torch.no_grad()
def _answers(net: nn.Module, inputs: torch.Tensor) -> npt.NDArray[np.float32]:
    """One row of outputs for each request: ``[requests, *output shape]``."""
    return torch.stack([net(request) for request in inputs]).numpy()
