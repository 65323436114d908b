"""The measurements of a run so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from integration.bench.contender import Sample
from integration.bench.plan import Point

__all__ = ["MEMORY", "STREAM", "Results"]

MEMORY = "memory"  # in place of a queue type: outstanding messages are measured without a queue
STREAM = "stream"  # the queue type of stream readers


@dataclass(slots=True)
class Results:
    """The measurements.

    Attributes:
        samples: By queue type and contender, one for each round.
        curves: By queue type, contender and point.
        failures: Descriptions of the failures.
        busy: How many runs began while the machine was not idle.
    """

    samples: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)
    curves: dict[tuple[str, str, Point], list[Sample]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    busy: int = 0
