"""Positions in streams in Spark's format, with limits and splits.

A position is the offset of the next message to read. The checkpoint stores positions by stream as JSON, like Spark's
Kafka source: ``{"events": 1200}``. The initial position of a query is marked: ``{"initial": {"events": 1200}}``. Spark
does not record it and may request it again when "latest" has changed. The first batch of a query is therefore empty,
and its end is where the query begins.

Invariants: no I/O. A limit admits at least one message, because a query would make no progress otherwise. Ranges are
split without a gap and without an overlap. Gaps in the offsets themselves are normal, so the size of a range is the
maximum number of its messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final, TypeVar

from pyspark.sql.datasource import InputPartition

from reliable_mq.codec.tables import MAX_TIMESTAMP
from reliable_mq.errors import ConfigurationError

#: The next offset to read, by stream.
Positions = Mapping[str, int]

_Key = TypeVar("_Key", str, int)

_INITIAL: Final = "initial"
_FREE: Final = 16  # tasks
_WORTH: Final = 10_000  # messages


@dataclass(frozen=True)
class StreamRange(InputPartition):
    """The offsets that one task reads, from ``start`` up to ``end``, exclusive."""

    stream: str
    start: int
    end: int

    @property
    def size(self) -> int:
        """The maximum number of messages in the range."""
        return self.end - self.start

    def __str__(self) -> str:
        return f"offsets {self.start} to {self.end - 1} of stream {self.stream!r}"


def marked_initial(positions: Positions) -> dict[str, Any]:
    """Return the positions where a query begins, in the form for `initialOffset`."""
    return {_INITIAL: dict(positions)}


def from_checkpoint(offset: object) -> tuple[dict[str, int], bool]:
    """Decode a Spark offset: the positions, and whether the query begins there."""
    inner = offset.get(_INITIAL) if isinstance(offset, dict) else None
    initial = isinstance(inner, dict)
    positions = inner if initial else offset
    if not isinstance(positions, dict) or not all(type(value) is int for value in positions.values()):
        raise ConfigurationError(
            f"the checkpoint holds an offset that is not one of streams: {str(offset)[:200]}; it belongs to another "
            "source or to a newer version of reliable-mq: give the query a checkpointLocation of its own"
        )
    return dict(positions), initial


def limited(
    start: Positions,
    end: Positions,
    *,
    messages: int | None = None,
    size: int | None = None,
    average: Mapping[str, float] | None = None,
) -> dict[str, int]:
    """Return the end of a limited batch, in which each stream has its share.

    The batch admits at least one message if there is one. The accuracy of the byte limit depends on ``average``, the
    average size of a message in bytes, by stream.
    """
    backlog = {name: end[name] - start[name] for name in end if end[name] > start[name]}
    total = sum(backlog.values())
    factor = 1.0
    if total and messages is not None:
        factor = min(factor, messages / total)
    if total and size is not None:
        factor = min(
            factor, size / sum(count * max((average or {}).get(name, 1.0), 1.0) for name, count in backlog.items())
        )
    if factor >= 1.0:
        return dict(end)
    shares = _shares(backlog, max(int(total * factor), 1))
    return {name: start[name] + shares[name] if name in shares else end[name] for name in end}


def ranges_of(start: Positions, end: Positions) -> list[StreamRange]:
    return [StreamRange(name, start[name], end[name]) for name in sorted(end) if end[name] > start.get(name, end[name])]


def split(whole: Sequence[StreamRange], least: int | None, most_records: int | None = None) -> list[StreamRange]:
    """Split ranges by size into ``least`` pieces, as far as they are `worth_having`."""
    counts = [1 if most_records is None else -(-each.size // most_records) for each in whole]
    wanted = 0 if least is None else worth_having(least, sum(each.size for each in whole))
    if wanted > sum(counts):
        extra = _shares({index: each.size - counts[index] for index, each in enumerate(whole)}, wanted - sum(counts))
        counts = [count + extra[index] for index, count in enumerate(counts)]
    return [piece for each, count in zip(whole, counts, strict=True) for piece in _pieces(each, count)]


def worth_having(least: int, messages: int) -> int:
    """Return the number of tasks to create if ``least`` are requested.

    A task costs Spark and the broker some 0.2 s, in which it could read thousands of messages. Up to `_FREE` tasks are
    always created, for rows that take long to process. Above that, each task has `_WORTH` messages.
    """
    return min(least, max(_FREE, messages // _WORTH))


def _pieces(each: StreamRange, count: int) -> Iterable[StreamRange]:
    bounds = [each.start + each.size * piece // count for piece in range(count + 1)]
    return [StreamRange(each.stream, *pair) for pair in pairwise(bounds)]


def _shares(sizes: Mapping[_Key, int], total: int) -> dict[_Key, int]:
    """Distribute ``total`` proportionally. The remainder first fills empty shares."""
    whole = sum(sizes.values())
    if total >= whole:
        return dict(sizes)
    shares = {name: size * total // whole for name, size in sizes.items()}
    left = total - sum(shares.values())
    by_need = sorted(sizes, key=lambda name: (shares[name] > 0, -(sizes[name] * total % whole), name))
    for name in by_need:
        if left and shares[name] < sizes[name]:
            shares[name] += 1
            left -= 1
    return shares


def second(milliseconds: int, *, up: bool = False) -> datetime:
    """Return a time as AMQP transmits it: in whole seconds."""
    seconds = -(-milliseconds // 1000) if up else milliseconds // 1000
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=min(seconds, MAX_TIMESTAMP))
