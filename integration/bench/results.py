"""What a run has measured so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from integration.bench.contender import Sample
from integration.bench.plan import Point

__all__ = ["MEMORY", "STREAM", "Results"]

MEMORY = "memory"  # stands where others have a queue type: outstanding messages are measured without a queue
STREAM = "stream"  # the type of the queue that readers of streams are given


@dataclass(slots=True)
class Results:
    """What was measured.

    Attributes:
        samples: by queue type and contender, one for each round.
        curves: by queue type, contender and point.
        failures: what failed, in words.
        busy: how many runs began while the machine was not at rest.
    """

    samples: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)
    curves: dict[tuple[str, str, Point], list[Sample]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    busy: int = 0
