"""The metrics of publishers, consumers, outboxes, queues and stages.

They are derived from the fields of `reliable_mq.core.statistics`.
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
    RelayStatus,
    StageStatistics,
    StageStatus,
)
from reliable_mq.metrics.registry import Family, Reading

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class _Shown(NamedTuple):
    """A field, the family that shows it, and the value of its additional label."""

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
        (PublisherStatus, "publisher", ("publisher",)),
        (PublisherStatistics, "publisher", ("publisher",)),
        (ConsumerStatus, "consumer", ("consumer", "queue")),
        (ConsumerStatistics, "consumer", ("consumer", "queue")),
        (RelayStatus, "outbox", ("publisher",)),
        (OutboxStatus, "outbox", ("publisher",)),
        (OutboxStatistics, "outbox", ("publisher",)),
        (QueueStatus, "queue", ("queue", "role")),
        (QueueDepthStatistics, "queue", ("queue", "role")),
        (StageStatus, "stage", ("queue", "stage")),
        (StageStatistics, "stage", ("queue", "stage")),
    )
}

FAMILIES: Final = {shown.family.full_name: shown.family for every in _SHOWN.values() for shown in every}
"""Every metric, by its name."""


def readings(labels: tuple[str, ...], *counts: object) -> Iterator[Reading]:
    """Yield one scrape: the metrics in the fields of statuses and statistics.

    Args:
        labels: The values of the labels that the classes of ``counts`` have above, in their order.
        counts: The statuses and statistics. None stands for an unknown state, which a made-up gauge would hide.
    """
    for one in counts:
        for shown in _SHOWN.get(type(one), ()):
            value = getattr(one, shown.field)
            if value is not None:
                yield Reading(shown.family, (*labels, *shown.label_value), value)
