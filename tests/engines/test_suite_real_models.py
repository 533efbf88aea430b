"""Real models in every form, against the shared suite, and against what is known of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from rebind.engines.contract import BoundPlan, Tier
from rebind.errors import Internal
from rebind.weights.formats import open_weights
from tests.engines.models import Form
from tests.engines.real_models import (
    MINILM,
    MINILM_WEIGHTS,
    SENTENCES,
    SILERO_8K,
    SILERO_16K,
    SileroCase,
    WordPieces,
    speech,
)
from tests.engines.suite import Bench, EngineSuite

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from tests.engines.conftest import MakeBench

pytestmark = pytest.mark.timeout(300)

SIMILARITIES = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
"""Of the sentences in the documentation of sentence-transformers, which prints four digits."""


@pytest.fixture
def traced(make_bench: MakeBench) -> Bench:
    return make_bench(MINILM, Form.TRACED, Tier.COMPILED)


@pytest.fixture(params=[SILERO_16K, SILERO_8K], ids=lambda case: case.name)
def silero(request: pytest.FixtureRequest, make_bench: MakeBench) -> Bench:
    return make_bench(request.param, Form.SCRIPTED, Tier.COMPILED)


class TestMiniLmTraced(EngineSuite):
    @pytest.fixture
    def bench(self, traced: Bench) -> Bench:
        return traced


class TestSilero(EngineSuite):
    @pytest.fixture
    def bench(self, silero: Bench) -> Bench:
        return silero


@pytest.mark.compiles
class TestMiniLmCompiled(EngineSuite):
    @pytest.fixture
    def bench(self, make_bench: MakeBench) -> Bench:
        return make_bench(MINILM, Form.EXPORTED, Tier.COMPILED)


@pytest.mark.compiles
class TestMiniLmPackage(EngineSuite):
    @pytest.fixture
    def bench(self, make_bench: MakeBench) -> Bench:
        return make_bench(MINILM, Form.WEIGHTLESS, Tier.COMPILED)


@pytest.mark.parametrize(("form", "tier"), [(Form.EXPORTED, Tier.EAGER), (Form.TRACED, Tier.COMPILED)])
def test_minilm_knows_sentences_that_are_alike(form: Form, tier: Tier, make_bench: MakeBench) -> None:
    bound = make_bench(MINILM, form, tier).bind(0)
    embeddings = bound.execute(WordPieces()(SENTENCES))[0]
    np.testing.assert_array_equal(np.round(embeddings @ embeddings.T, 4), np.array(SIMILARITIES, np.float32))
    asked, same, other = bound.execute(
        WordPieces()(["How do I reset my password?", "I forgot my login credentials.", "Cats sleep on warm roofs."])
    )[0]
    assert asked @ same > 0.4
    assert asked @ other < 0.2


def test_minilm_is_refitted_from_the_file_that_it_was_published_in(traced: Bench) -> None:
    graph, inputs = traced.open(), traced.inputs()
    with open_weights(MINILM_WEIGHTS) as source, graph.embedded_weights() as embedded:
        weights = traced.store.put(graph.slots, source, embedded).weights
    traced.assert_as_eager(traced.plan(graph).bind(weights).execute(inputs), MINILM.state(0), inputs)


def test_silero_answers_call_by_call_as_the_original(silero: Bench) -> None:
    case = as_silero(silero)
    original, bound = case.model(0), silero.bind(0)
    frames = frames_of(speech(case.rate, 1.3), case.samples)
    with torch.inference_mode():
        expected = [original(torch.from_numpy(frame), case.rate).item() for frame in frames]
    assert probabilities(bound, frames, case) == expected


def test_silero_hears_speech_and_no_speech_in_silence(silero: Bench) -> None:
    case = as_silero(silero)
    spoken = probabilities(silero.bind(0), frames_of(speech(case.rate, 1.3), case.samples), case)
    silent = probabilities(silero.bind(0), [np.zeros((1, case.samples), np.float32)] * 10, case)
    assert np.median(spoken) > 0.6
    assert max(silent) < 0.05


def test_bound_plans_of_silero_share_no_state(silero: Bench) -> None:
    """Two sequences that take turns, each on a bound plan of its own over the same weights."""
    case = as_silero(silero)
    plan, weights = silero.plan(), silero.put(silero.state(0))
    frames = frames_of(speech(case.rate, 1.3), case.samples)
    alone = probabilities(plan.bind(weights), frames, case)
    left, right = plan.bind(weights), plan.bind(weights)
    in_turn = [[probabilities(left, [frame], case), probabilities(right, [frame[:, ::-1]], case)] for frame in frames]
    assert [left for (left,), _ in in_turn] == alone
    assert [right for _, (right,) in in_turn] != alone


def test_silero_refuses_what_the_original_refuses_in_its_words(silero: Bench) -> None:
    with pytest.raises(Internal, match=re.escape("Supported sampling rates: [8000, 16000]")):
        silero.bind(0).execute([silero.inputs()[0], np.array([11025], np.int64)])


def as_silero(bench: Bench) -> SileroCase:
    assert isinstance(bench.case, SileroCase)
    return bench.case


def frames_of(sound: npt.NDArray[np.float32], samples: int) -> list[npt.NDArray[np.float32]]:
    whole = len(sound) // samples * samples
    return [frame[None] for frame in sound[:whole].reshape(-1, samples)]


def probabilities(bound: BoundPlan, frames: Sequence[npt.NDArray[Any]], case: SileroCase) -> list[float]:
    rate = np.array([case.rate], np.int64)
    return [bound.execute([frame, rate])[0].item() for frame in frames]
