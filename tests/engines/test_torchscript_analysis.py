"""What the analysis of a graph finds, each against what eager PyTorch is seen to do."""

# mypy: disallow-untyped-calls=False, warn-return-any=False

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from rebind.engines.torchscript.analysis import Effects, effects
from rebind.engines.torchscript.module import cpp_module


def found(model: nn.Module) -> Effects | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return effects(cpp_module(torch.jit.script(model.eval())), "forward")


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x)
        return y


def test_a_norm_in_eval_mode_reads_its_statistics_and_does_not_count() -> None:
    result = found(Normalised())
    assert result is not None
    assert not result.writes
    assert result.reads == {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}


def test_a_norm_in_training_mode_writes_its_statistics() -> None:
    model = Normalised().eval()
    model.norm.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = effects(cpp_module(torch.jit.script(model)), "forward")
    assert result is not None
    assert result.writes == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_a_traced_norm_in_training_mode_writes_its_statistics() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(Normalised().train(), torch.rand(3, 4), check_trace=False)
    result = effects(cpp_module(traced), "forward")
    assert result is not None
    assert {"norm.running_mean", "norm.running_var"} <= result.writes


class State(nn.Module):
    """``seen`` is what the subclasses write to, ``weight`` what they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.ones(4))


class InPlace(State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return x * self.weight


class ThroughViews(State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.view(2, 2)[0].unsqueeze(1).squeeze(1).mul_(2)
        return x * self.weight


class Assigned(State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen * 0.5 + x.sum(0)
        return self.seen * self.weight


class ThroughAList(State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held: list[torch.Tensor] = []
        also = (held, 1)
        held.append(self.seen)
        also[0][0].add_(1)
        return x * self.weight


class ThroughADictionary(State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = {"seen": self.seen}
        for name in list(held.keys()):
            held[name].add_(1)
        return x * self.weight


class InABranch(State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.seen
        if x.size(0) > 3:
            chosen = chosen[1:]
        chosen.zero_()
        return x * self.weight


class InALoop(State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = x.clone()
        for _ in range(x.size(0)):
            part.add_(1)
            part = self.seen
        return x * self.weight


class Sliced(State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen[1:3] = x[0, 1:3] * 2
        return x * self.weight


def _add(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.add_(1)


class Forked(State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.jit.wait(torch.jit.fork(_add, self.seen))
        return x * self.weight


class Waited(State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = torch.jit.wait(torch.jit.fork(torch.reshape, self.seen, [2, 2]))
        held.add_(1)
        return x * self.weight


class Dropped(State):
    """Dropout that drops nothing returns its very input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same = torch.dropout(self.seen, 0.5, False)
        same.add_(1)
        return x * self.weight + same


class Joined(State):
    """The concatenation of two lists has the very tensors of both."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = [x], [self.seen]
        both = first + second
        both[1].add_(1)
        return x * self.weight


WRITERS = [InPlace, ThroughViews, Assigned, ThroughAList, ThroughADictionary, InABranch, InALoop, Sliced, Forked]
WRITERS += [Waited, Dropped, Joined]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_write_to_a_buffer_is_found_and_weights_are_none(kind: type[State]) -> None:
    model = kind().eval()
    before = model.seen.clone()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.ones(4, 4))
    assert not torch.equal(model.seen, before), "eager PyTorch does not write to it"
    result = found(kind())
    assert result is not None
    assert result.writes == {"seen"}
    assert "weight" in result.reads


class Activated(State):
    """In-place operators on results are no writes to what these were made of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * self.weight + self.seen).relu_()
        y += torch.cat([self.weight, self.seen])[:4]
        return y.clamp_(0, 1)


def test_in_place_operators_on_results_are_no_writes() -> None:
    result = found(Activated())
    assert result is not None
    assert result.writes == set()
    assert result.written_arguments == set()
    assert result.reads == {"weight", "seen"}


class WritesToInput(State):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.transpose(0, 1).mul_(self.weight)
        return x + y


def test_arguments_that_are_written_to_are_found() -> None:
    result = found(WritesToInput())
    assert result is not None
    assert result.written_arguments == {"x"}
    assert result.writes == set()


class NeverRead(State):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4)
        self.switched_off = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.switched_off:
            x = self.spare(x)
        return x * self.weight


def test_branches_that_are_never_taken_read_nothing() -> None:
    result = found(NeverRead())
    assert result is not None
    assert result.reads == {"weight"}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


def test_an_lstm_reads_the_list_of_its_weights() -> None:
    result = found(Recurrent())
    assert result is not None
    assert result.reads == {"rnn._flat_weights"}
    assert result.writes == set()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    @torch.jit.interface
    class Scores(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[empty-body]
            pass


class Weighs(State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class BehindAnInterface(nn.Module):
    __annotations__ = {"scores": Scores}  # torch wants the class itself, not its name

    def __init__(self) -> None:
        super().__init__()
        self.scores = Weighs()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores.forward(x)


def test_nothing_is_known_of_calls_behind_an_interface() -> None:
    assert found(BehindAnInterface()) is None
