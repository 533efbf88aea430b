"""Metrics as text: the format of Prometheus, and OpenMetrics; written at once, as a server may have 50,000 series.

(prometheus_client takes 3 to 8 us for each, and knows no counters whose names do not end in ``_total``, as Triton's.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rebind.serving.refit_statistics import BOUNDS_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rebind.serving.refit_statistics import Histogram

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_LE = (*map(str, BOUNDS_S), "+Inf")


@dataclass(frozen=True, slots=True)
class Family:
    """All series of one name. ``kind`` is ``counter``, ``gauge``, ``info`` or ``histogram``; ``lines`` its samples.

    ``name`` is what samples are called, but for the suffixes of a histogram's.
    """

    name: str
    kind: str
    help: str
    lines: list[str]

    def head(self, *, openmetrics: bool) -> str:
        """The lines before the samples. OpenMetrics asks for names without the suffixes of counters and infos."""
        name, kind = self.name, self.kind
        if not openmetrics:
            kind = "gauge" if kind == "info" else kind
        elif kind == "counter" and not name.endswith("_total"):
            kind = "unknown"
        elif kind in {"counter", "info"}:
            name = name.rpartition("_")[0]
        return f"# HELP {name} {self.help}\n# TYPE {name} {kind}\n"


def write(families: Iterable[Family], content_type: str) -> bytes:
    """The body of an answer: ``content_type`` is one of those of this module."""
    openmetrics = content_type == OPENMETRICS
    parts = [part for family in families for part in (family.head(openmetrics=openmetrics), *family.lines)]
    if openmetrics:
        parts.append("# EOF\n")
    return "".join(parts).encode()


def negotiate(accept: str) -> str:
    """The content type for a request with the header ``Accept: <accept>``: OpenMetrics for those who know it."""
    offers = (offer.partition(";")[0].strip() for offer in accept.split(","))
    return OPENMETRICS if "application/openmetrics-text" in offers else TEXT


def label(name: str, value: str) -> str:
    """``name="value"``, whatever is in the value. What UTF-8 cannot carry (names of directories) becomes ``?``."""
    return f'{name}="{value.translate(_ESCAPES).encode(errors="replace").decode()}"'


def family(name: str, kind: str, help: str, series: Iterable[tuple[str, float]]) -> Family:
    """A family of single numbers: ``series`` are the labels, as :func:`label` writes them, and the number."""
    return Family(name, kind, help, [f"{name}{{{labels}}} {value}\n" for labels, value in series])


def histograms(name: str, help: str, series: Iterable[tuple[str, Histogram]]) -> Family:
    """A family of histograms: those that have seen anything."""
    return Family(name, "histogram", help, [line for labels, seen in series for line in _histogram(name, labels, seen)])


def _histogram(name: str, labels: str, seen: Histogram) -> Iterator[str]:
    counts = seen.cumulative()
    if counts[-1] == 0:
        return
    for bound, count in zip(_LE, counts, strict=True):
        yield f'{name}_bucket{{{labels},le="{bound}"}} {count}\n'
    yield f"{name}_sum{{{labels}}} {seen.sum_s}\n"
    yield f"{name}_count{{{labels}}} {counts[-1]}\n"
