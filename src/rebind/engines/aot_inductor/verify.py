"""The proof that a new plan may be trusted: random weights, random inputs, and eager execution to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rebind.engines.aot_inductor.symbols import Symbol
from rebind.errors import CompileFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rebind.engines.aot_inductor.plan import FlatFunction
    from rebind.engines.aot_inductor.program import Argument, Program

    Tensors = Sequence[torch.Tensor]

_BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest ``max|compiled - eager| / max|eager|`` of an output, by the coarsest type that takes part in the computation.

Compiled code sums in another order, and keeps intermediates wider than eager execution does, which costs a few units in
the last place per layer (1e-6 for a ResNet-50 in float32); a stale, swapped or misread weight costs 1e-2 and more. """
_EXOTIC_BOUND = 2e-1  # eight-bit floats
_MOST_UNEQUAL = 0.2
"""Whole numbers and truth values may differ where a rounding tips the scale: ten times the bound, but no more than this
share of them, and always one."""
_SCALES = (1.0, 0.1, 0.01)
"""Of the random weights, tried in this order until eager execution gives finite numbers."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Values out of the model file: weights that cannot be random (whole numbers) or should not, and inputs."""

    weights: Mapping[str, torch.Tensor]
    inputs: Tensors


@torch.inference_mode()
def verify(program: Program, compiled: FlatFunction, eager: FlatFunction, samples: Samples) -> dict[str, float]:
    """Compares the tiers on two random weight sets, and on a third that moves every weight of the second a bit.

    Each at two batch sizes, if the batch size varies. Returns the figures for the manifest: ``largest_error`` and
    ``error_bound`` (relative), ``unequal`` (share of whole numbers), and ``largest_move``, how far the third weight set
    moved an output from the second. Raises :class:`rebind.errors.CompileFailed`.
    """
    batches = [_inputs(program, sizes, samples) for sizes in _size_choices(program)]
    scale = _finite_scale(program, eager, samples, batches[0])
    comparison = _Comparison(program)
    previous: list[Tensors] = []
    for weights in _weight_sets(program, samples, scale):
        expected = [eager([*weights, *inputs]) for inputs in batches]
        for inputs, want in zip(batches, expected, strict=True):
            comparison.add(compiled([*weights, *inputs]), want)
        comparison.note_moves(expected, previous)
        previous = expected
    return comparison.figures()


class _Comparison:
    """What was seen of the differences between the tiers."""

    def __init__(self, program: Program) -> None:
        self._names = [result.name for result in program.results]
        self._bound = max((_bound(a) for a in (*program.used, *program.arguments, *program.results)), default=0.0)
        self._error = self._move = 0.0
        self._unequal = self._whole = 0

    def add(self, actual: Tensors, expected: Tensors) -> None:
        """Raises :class:`CompileFailed` when an output has another shape, type or, beyond the bound, other values."""
        for name, got, want in zip(self._names, actual, expected, strict=True):
            if (got.shape, got.dtype) != (want.shape, want.dtype):
                raise CompileFailed(
                    f"the compiled plan gives {name} as {got.dtype} {list(got.shape)}, "
                    f"eager execution as {want.dtype} {list(want.shape)}"
                )
            if want.is_floating_point():
                error = _relative_difference(got, want)
                if not error <= self._bound:
                    raise CompileFailed(
                        f"the compiled plan does not agree with eager execution: {name} is off by {error:.3g} "
                        f"of its largest value on random weights, more than {self._bound:g}"
                    )
                self._error = max(self._error, error)
            else:
                self._unequal += int((got != want).sum())
                self._whole += want.numel()

    def note_moves(self, now: Sequence[Tensors], before: Sequence[Tensors]) -> None:
        """Takes note of how far outputs moved from one weight set to the next; the last step is the one that counts."""
        pairs = [pair for new, old in zip(now, before, strict=False) for pair in zip(new, old, strict=True)]
        self._move = max((_relative_difference(new, old) for new, old in pairs if new.is_floating_point()), default=0.0)

    def figures(self) -> dict[str, float]:
        """The sums. Raises :class:`CompileFailed` when too many whole numbers differ."""
        allowed = 1 + min(10 * self._bound, _MOST_UNEQUAL) * self._whole
        if self._unequal > allowed:
            raise CompileFailed(
                f"the compiled plan does not agree with eager execution: {self._unequal} of {self._whole} "
                "whole numbers differ on random weights"
            )
        return {
            "largest_error": self._error,
            "error_bound": self._bound,
            "unequal": self._unequal / max(1, self._whole),
            "largest_move": self._move,
        }


def _bound(argument: Argument) -> float:
    return _BOUNDS.get(getattr(torch, argument.element.torch), _EXOTIC_BOUND) if argument.element.is_float else 0.0


def _relative_difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """``max|got - want| / max|want|`` over the finite elements; infinite when other elements are not finite."""
    got, want = got.double(), want.double()
    finite = want.isfinite()
    if not torch.equal(got.isfinite(), finite) or not torch.equal(
        got[~finite].nan_to_num(), want[~finite].nan_to_num()
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    difference = float((got[finite] - want[finite]).abs().max())
    return difference / max(float(want[finite].abs().max()), torch.finfo(torch.float32).tiny)


def _size_choices(program: Program) -> list[dict[str, int]]:
    """A few, and as few as may be, along the batch dimension; other sizes as when the model was exported."""
    hints = {name: max(hint, program.ranges[name].minimum) for name, hint in program.hints.items()}
    if program.batch is None:
        return [hints]
    first = program.arguments[0].shape[0]
    assert isinstance(first, Symbol)
    most = program.batch.maximum or 3
    sizes = sorted({program.batch.minimum, min(max(3, program.batch.minimum), most)}, reverse=True)
    return [{**hints, first.name: size} for size in sizes]


def _inputs(program: Program, sizes: Mapping[str, int], samples: Samples) -> list[torch.Tensor]:
    return [_input(argument, index, sizes, samples.inputs) for index, argument in enumerate(program.arguments)]


def _input(argument: Argument, index: int, sizes: Mapping[str, int], samples: Tensors) -> torch.Tensor:
    """Random real numbers; for whole numbers, which may be indices, those of the sample in another order."""
    shape = [
        sizes[size.name] if isinstance(size, Symbol) else size
        for size in argument.shape
        if isinstance(size, int | Symbol)
    ]
    dtype = getattr(torch, argument.element.torch)
    generator = torch.Generator().manual_seed(1000 + index)
    if argument.element.is_float:
        return torch.randn(shape, generator=generator).to(dtype)
    known = samples[index].flatten() if index < len(samples) else torch.arange(2).to(dtype)
    if known.numel() == 0:
        return torch.zeros(shape, dtype=dtype)
    return known[torch.randint(known.numel(), shape, generator=generator)]


def _finite_scale(program: Program, eager: FlatFunction, samples: Samples, inputs: Tensors) -> float:
    """The largest of the scales at which eager execution gives a finite number in each output."""
    for scale in _SCALES:
        weights = next(_weight_sets(program, samples, scale))
        outputs = eager([*weights, *inputs])
        if all(bool(o.isfinite().any()) or o.numel() == 0 for o in outputs):
            return scale
    raise CompileFailed("the plan cannot be verified: eager execution gives no finite numbers on random weights")


def _weight_sets(program: Program, samples: Samples, scale: float) -> Iterator[Tensors]:
    """Three weight sets; the next may reuse the memory of the last. The first has constants as they are."""
    yield [_weight(argument, 100_000 + i, scale, samples, moved=False) for i, argument in enumerate(program.used)]
    weights = [_weight(argument, 200_000 + i, scale, samples, moved=True) for i, argument in enumerate(program.used)]
    yield weights
    for index, weight in enumerate(weights):
        _move(weight, torch.Generator().manual_seed(300_000 + index))
    yield weights


def _weight(argument: Argument, seed: int, scale: float, samples: Samples, *, moved: bool) -> torch.Tensor:
    shape = [size for size in argument.shape if isinstance(size, int)]
    dtype = getattr(torch, argument.element.torch)
    generator = torch.Generator().manual_seed(seed)
    if argument.name in samples.weights:
        known = samples.weights[argument.name].clone()
        if moved:
            _move(known, generator)
        return known
    if not argument.element.is_float:
        return torch.zeros(shape, dtype=dtype)
    if len(shape) < 2:
        return ((torch.rand(shape, generator=generator) + 0.5) * scale).to(dtype)
    fan_in = max(1, torch.Size(shape[1:]).numel())
    weight: torch.Tensor = (torch.randn(shape, generator=generator) * (scale / fan_in**0.5)).to(dtype)
    return weight


def _move(weight: torch.Tensor, generator: torch.Generator) -> None:
    """Changes every real number of ``weight`` by about a tenth of itself and a hundredth of the others."""
    if weight.is_complex():
        weight = torch.view_as_real(weight)
    if weight.is_floating_point() and weight.numel() > 0:
        values = weight.float()
        typical = float(values.abs().nan_to_num(0, 0, 0).mean()) or 1.0
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(values + 0.1 * noise * (values.abs() + 0.1 * typical))
