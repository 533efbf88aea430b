"""What the analysis of a graph finds, each against what eager PyTorch is seen to do."""

# mypy: disallow-untyped-calls=False, warn-return-any=False

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from rebind.engines.torchscript.analysis import Effects, effects
from rebind.engines.torchscript.module import cpp_module
from tests.engines.real_models import SILERO_FILE


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


class Residual(nn.Module):
    """A block of a ResNet: in-place operators follow everything that has weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.body = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU6(inplace=True), nn.GroupNorm(2, 4))
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.head = nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(4, 8), nn.SiLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.body(x)
        y += x
        return self.head(torch.flatten(torch.relu_(self.pool(y)), 1)).clamp_(0, 1)


class Attentive(nn.Module):
    """A transformer, with embeddings that are scaled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.positions = nn.Parameter(torch.rand(6, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).mul_(8**0.5)
        x += self.positions[: ids.size(1)]
        x = self.encoder(x)
        return torch.relu_(self.norm(self.attention(x, x, x)[0].add_(x)))


class Decoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.first = nn.GRU(4, 4, batch_first=True)
        self.second = nn.LSTM(4, 4, bidirectional=True, batch_first=True)
        self.cell = nn.LSTMCell(8, 4)
        self.up = nn.ConvTranspose1d(4, 4, 2)
        self.slope = nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(self.norm(x).relu_())[0].relu_())[0].relu_()
        hidden = self.cell(x[:, 0])[0].relu_()
        return self.slope(self.up(hidden.unsqueeze(2)).relu_()).add_(1)


@pytest.mark.parametrize(
    ("kind", "example"),
    [(Residual, torch.rand(2, 3, 8, 8)), (Attentive, torch.arange(8).view(2, 4)), (Decoded, torch.rand(2, 4, 4))],
)
@pytest.mark.parametrize("traced", [False, True])
def test_models_whose_operators_work_in_place_on_results_write_nothing(
    kind: type[nn.Module], example: torch.Tensor, traced: bool
) -> None:
    model = kind().eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.jit.trace(model, example) if traced else torch.jit.script(model)
    result = effects(cpp_module(module), "forward")
    assert result is not None
    assert result.writes == set()
    assert result.written_arguments == set()


def test_a_detector_of_speech_writes_its_state_only() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = effects(cpp_module(torch.jit.load(SILERO_FILE)), "forward")
    assert result is not None
    assert result.writes == {"_state", "_context", "_last_sr", "_last_batch_size"}


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
