"""The networks that are measured, and what a server and its check need of them on disk.

This module imports torch; the benchmarks call it in other processes (:func:`benchmarks.harness.prepare`).
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.harness import Prepared
from rebind.demo import digits
from rebind.engines.contract import EngineOptions
from rebind.engines.registry import engine_for_file
from rebind.plans.cache import PlanCache

if TYPE_CHECKING:
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
    """16 layers of 4096 x 4096: 1.07 GB of weights, and next to nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4096, 4096, bias=False) for _ in range(16)])

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Features ``[n, 4096]`` of features ``[n, 4096]``."""
        for layer in self.layers:
            features = torch.relu(layer(features))
        return features


NETWORKS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "resnet50": (ResNet50, (1, 3, 224, 224)),
    "stack": (LinearStack, (1, 4096)),
    "digits": (digits.DigitsNet, (4, 1, 8, 8)),
}
"""By name: the class, and the shape of a request."""

OWNS_TWO_CORES = ("resnet50",)
"""Has the only instance of its server, and enough to compute for two threads: it is served with two."""


def write(name: str, work_dir: Path, *, weight_sets: int, requests: int, instances: int) -> Prepared:
    """Writes the model into a repository, ``weight_sets`` weights files beside it, and eager PyTorch's answers.

    The model file has the weights of seed 0, the weights files those of 1, 2, ...
    """
    torch.set_num_threads(1)  # as an instance of the server has; the other processors are in use
    network, shape = NETWORKS[name]
    version_dir = work_dir / "models" / name / "1"
    version_dir.mkdir(parents=True)
    config = f"instance_group [{{ count: {instances} kind: KIND_CPU }}]\n"
    if name in OWNS_TWO_CORES:
        config += 'parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "2" } }\n'
    (version_dir.parent / "config.pbtxt").write_text(config)
    plan_file = version_dir / "model.pt2"
    inputs = torch.randn((requests, *shape), generator=torch.Generator().manual_seed(1))
    net = network().eval()
    set_weights(net, seed=0)
    if isinstance(net, digits.DigitsNet):
        digits.export(net, plan_file)
    else:
        torch.export.save(torch.export.export(net, (inputs[0],)), plan_file)
    files, answers = [], [_answers(net, inputs)]
    for seed in range(1, weight_sets + 1):
        set_weights(net, seed)
        files.append(work_dir / f"{name}-{seed}.safetensors")
        save_file(net.state_dict(), files[-1])
        answers.append(_answers(net, inputs))
    return Prepared(
        name=name,
        repository=work_dir / "models",
        plan_file=plan_file,
        weights_files=tuple(files),
        weights_nbytes=sum(tensor.nbytes for tensor in net.state_dict().values()),
        inputs=inputs.numpy(),
        answers=np.stack(answers),
    )


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
