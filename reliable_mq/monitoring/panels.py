"""Dashboards, rows and panels as data, and the queries that many panels share.

``FILTER`` in an expression stands for the label matchers of the variables of its dashboard. ``$__rate_interval`` and
``$__range`` are Grafana's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Dashboard",
    "Panel",
    "PanelQuery",
    "Row",
    "Unit",
    "Variable",
    "growth",
    "quantiles",
    "rate",
    "rates",
    "stat",
]

Unit = Literal["short", "ops", "s", "percentunit"]
"""Grafana's name of a unit: a count, a number per second, seconds, a share of 1."""


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """A query of a panel.

    Attributes:
        expression: in PromQL, with ``FILTER``.
        legend: the name of a series; ``{{label}}`` stands for the value of a label.
    """

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel.

    Attributes:
        title: in the words of the metrics.
        help: what it shows, and when to worry.
        queries: at least one.
        unit: of all its values.
        kind: one number, or lines over time.
        warn, alarm: from these values on it is yellow, or red; None for never.
    """

    title: str
    help: str
    queries: tuple[PanelQuery, ...]
    unit: Unit = "short"
    kind: Literal["stat", "timeseries"] = "timeseries"
    warn: float | None = None
    alarm: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A row of panels under a title."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of a dashboard, of a label; it narrows the ones after it."""

    label: str
    metric: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard."""

    name: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]


def stat(
    title: str, description: str, expression: str, unit: Unit = "short", *, warn: float | None = None,
    alarm: float | None = None,
) -> Panel:  # fmt: skip
    """Return a panel with one number."""
    return Panel(title, description, (PanelQuery(expression, ""),), unit, "stat", warn, alarm)


def rate(metric: str, by: str, more: str = "") -> str:
    """Return the rate of a counter per second."""
    return f"sum by ({by}) (rate(reliable_mq_{metric}_total{{FILTER{more}}}[$__rate_interval]))"


def rates(by: str, *metrics: tuple[str, str], more: str = "") -> tuple[PanelQuery, ...]:
    """Return a query for the rate of each metric, given with its legend."""
    return tuple(PanelQuery(rate(metric, by, more), legend) for metric, legend in metrics)


def quantiles(metric: str, by: str, legend: str) -> tuple[PanelQuery, ...]:
    """Return the queries for the median and the 99th percentile of a histogram."""
    counted = f"sum by (le, {by}) (rate(reliable_mq_{metric}_bucket{{FILTER}}[$__rate_interval]))"
    return tuple(
        PanelQuery(f"histogram_quantile({quantile}, {counted})", f"{legend} p{quantile * 100:g}")
        for quantile in (0.5, 0.99)
    )


def growth(metric: str, more: str = "") -> str:
    """Return the growth of a counter over the time shown; 0 where it does not exist."""
    return f"sum(increase(reliable_mq_{metric}_total{{FILTER{more}}}[$__range])) or vector(0)"
