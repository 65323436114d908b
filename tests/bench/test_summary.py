"""Medians, ratios and bars of the benchmark."""

from __future__ import annotations

import pytest

from integration.bench.contender import Bar, Limit, Measure, Sample
from integration.bench.summary import Verdict, figure, judge


def sample(rate: float, cpu: float = 10.0, growth: int | None = None) -> Sample:
    """Return a run of 1000 messages.

    `rate` is in msg/s, `cpu` in µs per message and `growth` in bytes per message.
    """
    return Sample(
        messages=1000,
        wall_seconds=1000 / rate,
        cpu_seconds=cpu / 1000,
        peak_rss_bytes=1,
        rss_growth_bytes=None if growth is None else growth * 1000,
    )


def test_a_figure_is_the_median_of_the_rounds() -> None:
    rounds = [sample(100, cpu=1), sample(900, cpu=30), sample(200, cpu=5)]
    assert figure(rounds, Measure.RATE) == pytest.approx(200)
    assert figure(rounds, Measure.CPU) == pytest.approx(5)
    assert figure([], Measure.RATE) is None


@pytest.mark.parametrize(
    ("limits", "verdict"),
    [
        ((Limit(Measure.RATE, 1.2, "slow"),), Verdict.PASS),
        ((Limit(Measure.RATE, 2.1, "slow"),), Verdict.FAIL),
        ((Limit(Measure.RATE, 2.1, "slow"), Limit(Measure.RATE, 0.4, "fast")), Verdict.PASS),
        ((Limit(Measure.RATE, 2.1, "slow"), Limit(Measure.RATE, 0.6, "fast")), Verdict.FAIL),
        ((Limit(Measure.RATE, 2.1, "slow"), Limit(Measure.RATE, 0.9, "absent")), Verdict.UNKNOWN),
        ((Limit(Measure.RATE, 1.2, "slow"), Limit(Measure.RATE, 0.9, "absent")), Verdict.PASS),
        ((Limit(Measure.CPU, 0.5, "slow"),), Verdict.PASS),
        ((Limit(Measure.CPU, 0.4, "slow"),), Verdict.FAIL),
        ((Limit(Measure.MEMORY, 600),), Verdict.PASS),
        ((Limit(Measure.MEMORY, 499),), Verdict.FAIL),
    ],
)
def test_a_bar_is_reached_where_one_of_its_limits_is_kept(limits: tuple[Limit, ...], verdict: Verdict) -> None:
    samples = {"ours": [sample(200, 10, 500)], "slow": [sample(100, 20)], "fast": [sample(400)]}
    assert judge(Bar("ours", limits), "classic", samples).verdict is verdict


def test_a_bar_of_a_contender_that_did_not_run_is_not_measured() -> None:
    bar = Bar("ours", (Limit(Measure.RATE, 1, "slow"),))
    assert judge(bar, "classic", {"slow": [sample(100)]}).verdict is Verdict.UNKNOWN
