"""The metrics of a publisher, on either face."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliable_mq.metrics.registry import Family, Reading

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliable_mq.core.statistics import PublisherStatistics

__all__ = ["publisher_readings"]

_LABELS = ("publisher",)

OUTSTANDING = Family("publisher_outstanding", "gauge", "Messages submitted and not settled.", _LABELS)
OLDEST_AGE = Family(
    "publisher_outstanding_oldest_age_seconds", "gauge", "Age of the oldest unsettled message.", _LABELS, "highest"
)
CONNECTED = Family("publisher_connected", "gauge", "1 while the broker takes messages.", _LABELS)
BLOCKED = Family("publisher_blocked", "gauge", "1 while the broker blocks publishing (memory or disk alarm).", _LABELS)
BLOCKED_SECONDS = Family(
    "publisher_blocked_seconds", "counter", "Time for which the broker has blocked publishing.", _LABELS
)
RECONNECTS = Family("publisher_reconnects", "counter", "Connections lost and made again.", _LABELS)
LOOP_STALLED_SECONDS = Family(
    "publisher_event_loop_stalled_seconds",
    "counter",
    "Time for which the event loop stood still, half a heartbeat or more at a time (asyncio only).",
    _LABELS,
)
SETTLED = Family("publisher_settled", "counter", "Messages settled, by outcome.", (*_LABELS, "outcome"))
CONFIRM_SECONDS = Family("publisher_confirm_seconds", "histogram", "From submission to the broker's confirm.", _LABELS)
NACKS = Family("publisher_nacks", "counter", "basic.nack received, tried again or reported.", _LABELS)
IN_DOUBT = Family(
    "publisher_in_doubt", "counter", "Attempts whose channel was lost before their confirm came.", _LABELS
)
REPUBLISHED = Family("publisher_republished", "counter", "Attempts beyond a message's first.", _LABELS)
STALE_CONFIRMS = Family(
    "publisher_stale_confirms", "counter", "Confirms that were unknown, repeated or of an older channel.", _LABELS
)
STRAY_RETURNS = Family("publisher_stray_returns", "counter", "Returns that matched no outstanding message.", _LABELS)


def publisher_readings(
    name: str,
    statistics: PublisherStatistics,
    *,
    outstanding: int,
    oldest_age: float,
    connected: bool,
    blocked: bool,
    blocked_seconds: float,
    reconnects: int,
    stale_confirms: int,
    stalled_seconds: float | None = None,
) -> Iterator[Reading]:
    """One scrape of the publisher called ``name``."""
    labels = (name,)
    yield Reading(OUTSTANDING, labels, outstanding)
    yield Reading(OLDEST_AGE, labels, oldest_age)
    yield Reading(CONNECTED, labels, connected)
    yield Reading(BLOCKED, labels, blocked)
    yield Reading(BLOCKED_SECONDS, labels, blocked_seconds)
    yield Reading(RECONNECTS, labels, reconnects)
    if stalled_seconds is not None:
        yield Reading(LOOP_STALLED_SECONDS, labels, stalled_seconds)
    for outcome in ("confirmed", "nacked", "returned", "refused", "unknown"):
        yield Reading(SETTLED, (name, outcome), getattr(statistics, outcome))
    yield Reading(CONFIRM_SECONDS, labels, statistics.confirm_seconds)
    yield Reading(NACKS, labels, statistics.nacks)
    yield Reading(IN_DOUBT, labels, statistics.in_doubt)
    yield Reading(REPUBLISHED, labels, statistics.republished)
    yield Reading(STALE_CONFIRMS, labels, stale_confirms)
    yield Reading(STRAY_RETURNS, labels, statistics.stray_returns)
