"""The metrics of publishers, consumers, outboxes, queues and stages.

Derived from the fields of `reliable_mq.core.statistics`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Final, NamedTuple

from reliable_mq.core.statistics import (
    ConsumerStatistics,
    ConsumerStatus,
    MetricOfField,
    OutboxStatistics,
    OutboxStatus,
    PublisherStatistics,
    PublisherStatus,
    QueueDepthStatistics,
    QueueStatus,
    StageStatistics,
    StageStatus,
)
from reliable_mq.metrics.registry import Family, Reading

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "FAMILIES",
    "consumer_readings",
    "outbox_readings",
    "publisher_readings",
    "queue_readings",
    "stage_readings",
]

_PUBLISHER: Final = ("publisher",)
_CONSUMER: Final = ("consumer", "queue")
_QUEUE: Final = ("queue", "role")
_STAGE: Final = ("queue", "stage")


class _Shown(NamedTuple):
    """A field with the family that shows it, and the value of its further label."""

    field: str
    family: Family
    label_value: tuple[str, ...]


def _derive(counts: type, owner: str, labels: tuple[str, ...]) -> Iterator[_Shown]:
    for field in fields(counts):
        metric = MetricOfField.of(field.metadata)
        if metric is not None:
            family = Family(
                f"{owner}_{metric.name or field.name}",
                metric.kind,
                metric.documentation,
                (*labels, *metric.label[:1]),
                metric.merged,
            )
            yield _Shown(field.name, family, metric.label[1:])


_SHOWN: Final[Mapping[type, tuple[_Shown, ...]]] = {
    counts: tuple(_derive(counts, owner, labels))
    for counts, owner, labels in (
        (PublisherStatus, "publisher", _PUBLISHER),
        (PublisherStatistics, "publisher", _PUBLISHER),
        (ConsumerStatus, "consumer", _CONSUMER),
        (ConsumerStatistics, "consumer", _CONSUMER),
        (OutboxStatus, "outbox", _PUBLISHER),
        (OutboxStatistics, "outbox", _PUBLISHER),
        (QueueStatus, "queue", _QUEUE),
        (QueueDepthStatistics, "queue", _QUEUE),
        (StageStatus, "stage", _STAGE),
        (StageStatistics, "stage", _STAGE),
    )
}

FAMILIES: Final = {shown.family.full_name: shown.family for every in _SHOWN.values() for shown in every}
"""Every metric, by its name."""


def publisher_readings(name: str, status: PublisherStatus, statistics: PublisherStatistics) -> Iterator[Reading]:
    """Yield one scrape of the publisher called ``name``."""
    return _readings((name,), status, statistics)


def consumer_readings(
    name: str, queue: str, status: ConsumerStatus, statistics: ConsumerStatistics
) -> Iterator[Reading]:
    """Yield one scrape of the consumer called ``name`` on ``queue``."""
    return _readings((name, queue), status, statistics)


def outbox_readings(name: str, status: OutboxStatus | None, statistics: OutboxStatistics) -> Iterator[Reading]:
    """Yield one scrape of the outbox of the publisher called ``name``.

    `status` is None while the outbox does not answer: a gauge that is made up would hide that.
    """
    return _readings((name,), status, statistics)


def queue_readings(
    name: str, role: str, status: QueueStatus | None, statistics: QueueDepthStatistics
) -> Iterator[Reading]:
    """Yield one scrape of the queue called ``name``.

    `status` is None while its depth is not known: a gauge that is made up would hide that.
    """
    return _readings((name, role), status, statistics)


def stage_readings(queue: str, stage: str, status: StageStatus, statistics: StageStatistics) -> Iterator[Reading]:
    """Yield one scrape of the relay from ``queue`` into ``stage``."""
    return _readings((queue, stage), status, statistics)


def _readings(labels: tuple[str, ...], *readable: object) -> Iterator[Reading]:
    for one in readable:
        for shown in _SHOWN.get(type(one), ()):
            value = getattr(one, shown.field)
            if value is not None:
                yield Reading(shown.family, (*labels, *shown.label_value), value)
