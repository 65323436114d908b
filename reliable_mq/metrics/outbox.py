"""The metrics of a publisher with an outbox, on either face."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliable_mq.metrics.registry import Family, Reading

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliable_mq.core.outbox_statistics import OutboxStatistics, OutboxStatus

__all__ = ["outbox_readings"]

_LABELS = ("publisher",)

# Publishers of one name may share an outbox: what is in it is no sum.
GAUGES = {
    name: Family(f"outbox_{metric}", "gauge", documentation, _LABELS, "highest")
    for name, metric, documentation in (
        ("rows", "waiting", "Messages that wait to be published, delayed and held ones included."),
        ("delayed", "delayed", "Of these, those that were not confirmed and wait for another attempt."),
        ("held", "held", "Of these, those behind a message of their ordering key that is set aside or unreadable."),
        ("set_aside", "set_aside", "Messages that will not be published until somebody decides."),
        ("unreadable", "unreadable", "Rows of a newer format, for a relay of a newer version."),
        ("oldest_age", "oldest_age_seconds", "Age of the oldest message that waits; 0 where none does."),
    )
}
STORED = Family("outbox_stored", "counter", "Messages that this publisher made durable.", _LABELS)
RELAYED = Family("outbox_relayed", "counter", "Attempts to publish a row, by what became of it.", (*_LABELS, "fate"))
FAILURES = Family(
    "outbox_failures",
    "counter",
    "Messages that could not be stored; times that the relay had to pause, as the broker or the outbox was away.",
    (*_LABELS, "what"),
)


def outbox_readings(name: str, statistics: OutboxStatistics, status: OutboxStatus | None) -> Iterator[Reading]:
    """One scrape of the outbox of the publisher called ``name``; ``status`` is None where the outbox cannot say."""
    labels = (name,)
    if status is not None:
        for attribute, family in GAUGES.items():
            yield Reading(family, labels, getattr(status, attribute))
    yield Reading(STORED, labels, statistics.stored)
    for fate in ("confirmed", "delayed", "set_aside"):
        yield Reading(RELAYED, (name, fate), getattr(statistics, fate))
    yield Reading(FAILURES, (name, "store"), statistics.not_stored)
    yield Reading(FAILURES, (name, "relay"), statistics.interruptions)
