"""Where streams begin and end, found out by consuming: AMQP 0-9-1 has no other way.

The newest offset is the last one of the last chunk. RabbitMQ sends that chunk in one go when ``x-stream-offset`` is
``last``, so a method that is answered after its first message is answered after all of it, unless the prefetch cuts it.

Invariants: an end is one more than an offset that was seen, never a guess; nothing is consumed from a queue that is no
stream (RabbitMQ refuses an offset there); every wait is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from reliable_mq.core.setup import CheckQueue, QueueState, StepRefused, is_away, refusal
from reliable_mq.errors import BrokerUnavailable, ConfigurationError
from reliable_mq.spark.stream_channel import offset_of

if TYPE_CHECKING:
    from datetime import datetime

    from reliable_mq.core.codec import RawDelivery
    from reliable_mq.spark.stream_channel import StreamChannel

__all__ = ["End", "end_of", "first_offset", "offset_at", "partitions_of"]

_PREFETCH: Final = 2000  # of the search for the end; a chunk has some thousand messages at most, or many small ones
_LOOKS: Final = 100  # so many times the prefetch, where messages come in as fast as they are looked at
_SLOWEST: Final = 30.0  # seconds for the first message of a stream that has some
_NOT_FOUND: Final = 404
_MOST_PARTITIONS: Final = 1000


@dataclass(frozen=True, slots=True)
class End:
    """The end of a stream.

    Attributes:
        position: the offset after the newest one; 0 for a stream that nothing was ever in.
        average: bytes of a message, body and properties, in the last chunk; 0 where there is none.
    """

    position: int
    average: float


def end_of(channel: StreamChannel, stream: str, patience: float) -> End:
    """Find the end of a stream. Takes some milliseconds, or ``patience`` seconds where the stream is empty.

    Raises:
        BrokerUnavailable, ConfigurationError, TopologyMismatch: as `StreamChannel.consume`; or nothing comes.
    """
    tag = channel.consume(stream, "last", _PREFETCH)
    found = End(0, 0.0)
    last_tag = 0
    for look in range(_LOOKS):
        arrived = channel.take(patience) if look else _first_of(channel, stream, patience)
        if not arrived:
            break
        channel.carry_out(CheckQueue(stream))  # answered after the rest of what was on its way
        arrived += channel.take(0.0)
        last_tag = arrived[-1].delivery_tag
        size = sum(len(delivery.body) + len(delivery.properties) for delivery in arrived)
        found = End(_offset(arrived[-1], stream) + 1, size / len(arrived))
        if len(arrived) < _PREFETCH:
            break
        channel.ack(last_tag)  # the prefetch may have held the rest of the chunk back
    channel.cancel(tag, last_tag)
    return found


def first_offset(channel: StreamChannel, stream: str, patience: float) -> int | None:
    """Give the oldest offset that the stream still has; None where it is empty. Errors as for `end_of`."""
    return _first_from(channel, stream, "first", patience)


def offset_at(channel: StreamChannel, stream: str, when: datetime, patience: float) -> int | None:
    """Give the offset of the first message of the chunk that a time lies in; None where nothing is as new.

    Errors as for `end_of`.
    """
    return _first_from(channel, stream, when, patience)


def partitions_of(channel: StreamChannel, name: str) -> list[str]:
    """Give the streams that a name means: itself, or the partitions of a super stream, ``name-0`` and so on.

    Raises:
        ConfigurationError: there is neither.
        BrokerUnavailable: the connection is lost.
    """
    if _exists(channel, name):
        return [name]
    partitions = []
    for number in range(_MOST_PARTITIONS):
        partition = f"{name}-{number}"
        if not _exists(channel, partition):
            break
        partitions.append(partition)
    if not partitions:
        raise ConfigurationError(
            f"there is no stream {name!r}, and no super stream with a partition '{name}-0': create it, or, where the "
            "partitions of a super stream have other names, give these, separated by commas"
        )
    return partitions


def _first_from(channel: StreamChannel, stream: str, offset: str | datetime, patience: float) -> int | None:
    tag = channel.consume(stream, offset, 1)
    arrived = _first_of(channel, stream, patience) if offset == "first" else channel.take(patience)
    channel.cancel(tag, arrived[-1].delivery_tag if arrived else 0)
    return _offset(arrived[0], stream) if arrived else None


def _first_of(channel: StreamChannel, stream: str, patience: float) -> list[RawDelivery]:
    """What comes first: nothing where the stream is empty, not where the broker only takes its time.

    A count above 0 is certain; it lags behind, so 0 is certain only after a while.
    """
    arrived = channel.take(patience)
    if arrived:
        return arrived
    state = channel.carry_out(CheckQueue(stream))
    if not isinstance(state, QueueState) or not state.messages:
        return channel.take(0.0)
    arrived = channel.take(_SLOWEST)
    if not arrived:
        raise BrokerUnavailable(f"stream {stream!r} has messages, and none came within {_SLOWEST:g} s")
    return arrived


def _offset(delivery: RawDelivery, stream: str) -> int:
    offset = offset_of(delivery)
    if offset is None:
        raise ConfigurationError(f"a message of {stream!r} came without an offset: it is no stream")
    return offset


def _exists(channel: StreamChannel, queue: str) -> bool:
    try:
        channel.perform(CheckQueue(queue))
    except StepRefused as refused:
        if refused.code == _NOT_FOUND and not is_away(refused):
            return False
        raise refusal(CheckQueue(queue), refused) from refused
    return True
