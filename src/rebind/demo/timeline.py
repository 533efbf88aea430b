"""What happened in a demo, and the figures that follow from it. Pure: no clock, no I/O.

All moments are seconds since the epoch, from processes of one machine.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as the client saw it; ``error`` is empty when it was answered.

    ``correct`` of ``images`` were classified rightly, by the weights that the response named.
    """

    sent_at: float
    latency_s: float
    generation: int
    label: str
    images: int
    correct: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Publication:
    """Weights that the trainer put into the repository after ``step`` training steps.

    ``published_at`` is just after the rename.
    """

    label: str
    step: int
    loss: float
    published_at: float


@dataclass(frozen=True, slots=True)
class Generation:
    """Weights that the server committed.

    ``refit_ms`` is None for the first ones, which came with the load and are no refit.
    """

    number: int
    label: str
    committed_at: float
    refit_ms: float | None

    @classmethod
    def from_history(cls, entry: Mapping[str, Any]) -> Generation:
        """From one entry of the history in the body of ``GET .../weights``."""
        refit_ms = None if entry["cause"] == "load" else entry["refit_ms"]
        return cls(entry["generation"], entry["label"], entry["committed_at"], refit_ms)


@dataclass(frozen=True, slots=True)
class GenerationFigures:
    """One row of the table: a generation and what its answers were like; None where nothing is known (yet)."""

    number: int
    label: str
    images: int
    accuracy: float | None
    refit_ms: float | None
    publish_to_serving_ms: float | None
    p50_ms: float | None
    p99_ms: float | None


@dataclass(slots=True)
class Timeline:
    """Everything observed so far; grows by the ``add`` methods, and is read by the view, the plot and the summary."""

    started_at: float
    answers: list[Answer] = field(default_factory=list)
    by_generation: dict[int, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    """The requests that were answered, by the generation that they name."""
    publications: dict[str, Publication] = field(default_factory=dict)
    generations: dict[int, Generation] = field(default_factory=dict)
    compiled_since: float | None = None
    """When the compiled plan was first seen to answer; None while the eager tier does."""
    compile_error: str | None = None
    """Why there will be no compiled plan, in the server's words; None if nothing has failed."""

    def add_answer(self, answer: Answer) -> None:
        """Notes a request."""
        self.answers.append(answer)
        if not answer.error:
            self.by_generation[answer.generation].append(answer)

    def add_publication(self, publication: Publication) -> None:
        """Notes a publication under its label."""
        self.publications[publication.label] = publication

    def add_generation(self, generation: Generation) -> None:
        """Notes a generation; the same one may be told any number of times."""
        self.generations[generation.number] = generation

    @property
    def refits(self) -> list[Generation]:
        """The generations that replaced another, oldest first."""
        return [known for _, known in sorted(self.generations.items()) if known.refit_ms is not None]

    @property
    def failed(self) -> list[Answer]:
        """The requests that got no answer."""
        return [answer for answer in self.answers if answer.error]

    def images_answered_by(self, label: str) -> int:
        """How many images the weights with ``label`` have classified so far."""
        known = [generation.number for generation in self.generations.values() if generation.label == label]
        return sum(answer.images for number in known for answer in self.by_generation.get(number, []))

    def figures(self, generation: int) -> GenerationFigures:
        """The row of ``generation``, which has been noted before."""
        known, answers = self.generations[generation], self.by_generation.get(generation, [])
        latencies_ms = latencies(answers)
        return GenerationFigures(
            number=generation,
            label=known.label,
            images=sum(answer.images for answer in answers),
            accuracy=accuracy(answers),
            refit_ms=known.refit_ms,
            publish_to_serving_ms=self.publish_to_serving_ms(known),
            p50_ms=percentile(latencies_ms, 50),
            p99_ms=percentile(latencies_ms, 99),
        )

    def publish_to_serving_ms(self, generation: Generation) -> float | None:
        """From the trainer's rename to the server's commit, poll interval included.

        None for weights that the trainer did not publish.
        """
        publication = self.publications.get(generation.label)
        return None if publication is None else (generation.committed_at - publication.published_at) * 1e3


@dataclass(frozen=True, slots=True)
class Summary:
    """The outcome of a demo in figures.

    ``duration_s`` goes from before the first request to after the last answer. Latencies are those of answered
    requests; ``accuracy`` is that of the last generation.
    """

    duration_s: float
    requests: int
    failed_requests: int
    images: int
    published: int
    refits: int
    final_generation: int
    final_label: str
    accuracy: float
    p50_ms: float
    p99_ms: float
    median_refit_ms: float | None
    median_publish_to_serving_ms: float | None
    compiled_plan_served: bool
    compile_error: str | None
    """In one line; None if nothing failed."""

    @classmethod
    def of(cls, timeline: Timeline) -> Summary:
        """Sums up a finished demo, which has at least one good answer."""
        ended_at = max(answer.sent_at + answer.latency_s for answer in timeline.answers)
        final = timeline.figures(max(timeline.by_generation))
        latencies_ms = latencies(timeline.answers)
        refits = timeline.refits
        return cls(
            duration_s=ended_at - timeline.started_at,
            requests=len(timeline.answers),
            failed_requests=len(timeline.failed),
            images=sum(answer.images for answer in timeline.answers),
            published=len(timeline.publications),
            refits=len(refits),
            final_generation=final.number,
            final_label=final.label,
            accuracy=final.accuracy or 0.0,
            p50_ms=percentile(latencies_ms, 50) or 0.0,
            p99_ms=percentile(latencies_ms, 99) or 0.0,
            median_refit_ms=median(refit.refit_ms for refit in refits),
            median_publish_to_serving_ms=median(timeline.publish_to_serving_ms(refit) for refit in refits),
            compiled_plan_served=timeline.compiled_since is not None,
            compile_error=None if timeline.compile_error is None else one_line(timeline.compile_error),
        )

    @property
    def why_eager(self) -> str:
        """Why no compiled plan took over; empty when one did."""
        if self.compiled_plan_served:
            return ""
        return self.compile_error or "the compile had not ended yet"

    def shortfalls(self, *, accuracy_above: float, refits_at_least: int) -> list[str]:
        """What keeps the demo from being a success, in words; empty when it is one."""
        faults = []
        if self.failed_requests:
            faults.append(f"{self.failed_requests} of {self.requests} requests failed")
        if self.accuracy <= accuracy_above:
            faults.append(f"final accuracy {self.accuracy:.3f} is not above {accuracy_above}")
        if self.refits < refits_at_least:
            faults.append(f"only {self.refits} refits were seen, at least {refits_at_least} were to be")
        return faults


def accuracy(answers: Sequence[Answer]) -> float | None:
    """The share of rightly classified images; None without images."""
    images = sum(answer.images for answer in answers)
    return sum(answer.correct for answer in answers) / images if images else None


def latencies(answers: Iterable[Answer]) -> list[float]:
    """Latencies in milliseconds of the requests that were answered."""
    return [answer.latency_s * 1e3 for answer in answers if not answer.error]


def one_line(text: str, at_most: int = 240) -> str:
    """``text`` with each run of white space as one blank, and without its middle if longer than ``at_most``.

    A compile error begins with what failed and ends with the linker's reason; the command between them is long.
    """
    line = " ".join(text.split())
    half = (at_most - len(" ... ")) // 2
    return line if len(line) <= at_most else f"{line[:half]} ... {line[-half:]}"


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value that ``percent`` percent of ``values`` do not exceed (nearest rank, so always one of them)."""
    return float(np.percentile(values, percent, method="inverted_cdf")) if values else None


def median(values: Iterable[float | None]) -> float | None:
    """The median of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
