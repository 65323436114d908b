"""Computes medians and ratios from samples, and checks the bars.

A ratio is the ratio of two medians over the same rounds of the same run, on the same queue type.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from integration.bench.contender import Bar, Limit, Measure, Sample

__all__ = ["Judgement", "Verdict", "figure", "judge", "ratio"]


class Verdict(enum.StrEnum):
    PASS = "reached"
    FAIL = "MISSED"
    UNKNOWN = "not measured"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of one bar on one queue type.

    Attributes:
        values: The measured value for each limit of the bar. None if not measured.
    """

    bar: Bar
    queue_type: str
    values: tuple[float | None, ...]
    verdict: Verdict


def figure(samples: Sequence[Sample], measure: Measure) -> float | None:
    """Return the median of a measure, or None without samples."""
    return statistics.median(measure.of(sample) for sample in samples) if samples else None


def ratio(value: float | None, of: float | None) -> float | None:
    return None if value is None or not of else value / of


def judge(bar: Bar, queue_type: str, samples: Mapping[str, Sequence[Sample]]) -> Judgement:
    """Judge a bar by the samples of one queue type, given by contender."""

    def measured(limit: Limit) -> float | None:
        value = figure(samples.get(bar.contender, ()), limit.measure)
        return value if limit.of is None else ratio(value, figure(samples.get(limit.of, ()), limit.measure))

    values = tuple(measured(limit) for limit in bar.any_of)
    if any(value is not None and limit.keeps(value) for limit, value in zip(bar.any_of, values, strict=True)):
        verdict = Verdict.PASS
    elif None in values:
        verdict = Verdict.UNKNOWN
    else:
        verdict = Verdict.FAIL
    return Judgement(bar, queue_type, values, verdict)
