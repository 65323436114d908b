"""Filters on offset and queue, which become ranges, and the broker's by a header.

Spark hands over the filters of a batch that are joined by AND, and applies each of them to the rows again. So a filter
that is not understood here costs time and nothing else.

RabbitMQ keeps a Bloom filter of the ``x-stream-filter-value`` of each chunk, and leaves chunks out that have none of a
consumer's values. Chunks that it sends have other messages, too: `ValueFilter` leaves these out.

Invariant: no message that passes all filters is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from reliable_mq.codec import CodecError, Properties
from reliable_mq.spark.stream_offsets import StreamRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql.datasource import Filter

    from reliable_mq.codec import RawDelivery

__all__ = ["RangeFilters", "ValueFilter"]

_VALUE: Final = "x-stream-filter-value"


class ValueFilter:
    """Messages of a stream by their ``x-stream-filter-value``.

    Args:
        values: those to read.
        unfiltered: whether to read messages without one.
    """

    def __init__(self, values: Sequence[str], *, unfiltered: bool) -> None:
        self._values = frozenset(values)
        self._unfiltered = unfiltered

    @property
    def arguments(self) -> Mapping[str, object]:
        """The arguments of a consumer."""
        return {"x-stream-filter": sorted(self._values), "x-stream-match-unfiltered": self._unfiltered}

    def passes(self, delivery: RawDelivery) -> bool:
        """Whether to read a message."""
        raw = delivery.properties
        if _VALUE.encode() not in raw:
            return self._unfiltered
        try:
            value = Properties(raw).headers_beginning(_VALUE).get(_VALUE)
        except CodecError:
            return self._unfiltered
        return value in self._values if isinstance(value, str) else self._unfiltered


class RangeFilters:
    """Collects filters, and applies them to ranges. Picklable."""

    def __init__(self) -> None:
        self._first = 0
        self._end: int | None = None  # exclusive
        self._queues: frozenset[str] | None = None

    def note(self, each: Filter) -> None:
        """Take a filter into account, if it is one on ``offset`` or ``queue``."""
        if isinstance(each, (EqualTo, EqualNullSafe)):
            self._values(each.attribute, (each.value,))
        elif isinstance(each, In):
            self._values(each.attribute, each.value)
        elif isinstance(each, (GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)) and _whole(each.value):
            if each.attribute != ("offset",):
                return
            if isinstance(each, GreaterThan):
                self._between(each.value + 1, None)
            elif isinstance(each, GreaterThanOrEqual):
                self._between(each.value, None)
            elif isinstance(each, LessThan):
                self._between(0, each.value)
            else:
                self._between(0, each.value + 1)

    def applied(self, ranges: Iterable[StreamRange]) -> list[StreamRange]:
        """Return the parts of ranges that rows may pass the filters from."""
        cut = [
            StreamRange(
                each.stream, max(each.start, self._first), min(each.end, each.end if self._end is None else self._end)
            )
            for each in ranges
            if self._queues is None or each.stream in self._queues
        ]
        return [each for each in cut if each.size > 0]

    def _values(self, attribute: tuple[str, ...], values: tuple[Any, ...]) -> None:
        if attribute == ("queue",) and all(isinstance(value, str) for value in values):
            self._queues = frozenset(values) if self._queues is None else self._queues & frozenset(values)
        elif attribute == ("offset",) and values and all(map(_whole, values)):
            self._between(min(values), max(values) + 1)

    def _between(self, first: int, end: int | None) -> None:
        self._first = max(self._first, first)
        if end is not None:
            self._end = end if self._end is None else min(self._end, end)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
