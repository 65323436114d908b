"""The relay's decision on each delivery: publish it, ack it, or stop. No I/O.

A session lives as long as the relay. An epoch lives as long as one channel, on which the relay both consumes the queue
and publishes into the stage. When the broker gives the lock of the stage to another channel, this channel is gone and
can publish nothing more. The steps of an epoch::

    opened        FENCING   publishes a marker into each partition
    confirmed     READING   reads the tail of each partition (`reliable_mq.core.stage.tail`)
    tail_read     MOVING    publishes the deliveries in entries; acks them once their entry is confirmed
    repeated      ENDING    writes nothing more: the queue delivers a message of this epoch again
    lost          CLOSED    forgets everything: the broker requeues unacked deliveries

While MOVING, a redelivered message that is in the tail is acked but not published, because an earlier epoch has moved
it. The same message has the same id, routing and body. Messages without an id cannot be distinguished. So the relay
stops at such a message or, with `MissingId.REPEAT`, publishes it again when it is redelivered.

Nothing else may bring a message into the stage twice. So a publish is never repeated within an epoch. A publish that is
nacked, returned, or not confirmed in time ends the epoch, and the next epoch reads the tail. So does a message that the
queue delivers again on the same channel (`reliable_mq.core.stage.tail.Moved`).

Invariants:

- A delivery is acked only after an entry that holds it was confirmed, in this epoch or in an earlier one.
- A message in the tail accounts for at most one redelivered message.
- An entry holds deliveries that came together, so none waits for others. In each partition, they keep their order.
- The tail is given up only when none of its messages can be delivered any more. Either all were delivered or, after a
  while, the queue was empty with nothing unacked, or so many messages were delivered for the first time (`PASSED`) that
  the requeued ones, which a queue delivers first, must have been delivered before. The while is longer
  (`REQUEUED_AFTER`) if the queue had other consumers at first, whose deliveries it may requeue later.
- At most `prefetch` deliveries are read ahead. It is bounded in bytes, and decreases the more often a delivery was
  returned.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from reliable_mq.codec import RawDelivery, append_publish, encode_ack, publish_head
from reliable_mq.core.consumer.acks import AckBatcher
from reliable_mq.core.consumer.attempts import broker_counts
from reliable_mq.core.publisher.confirms import ConfirmTracker
from reliable_mq.core.stage.envelope import (
    UNKNOWN,
    Mark,
    identity,
    marker,
    message_id_of,
    original_parts,
    staged,
    unstaged,
)
from reliable_mq.core.stage.options import MissingId, StageOptions, shard
from reliable_mq.core.stage.tail import SETTLED_AFTER, Moved, Settled, Tail
from reliable_mq.core.statistics import PeakAverage, StageStatistics
from reliable_mq.errors import ConfigurationError, ConsumeError, ReliableMQError

PASSED: Final = 20_000
"""Messages never delivered before, after which those that were requeued at the head of the queue have come."""

REQUEUED_AFTER: Final = 180.0
"""Seconds in which a queue requeues the deliveries of a relay whose node is away.

A cluster notices the death of a node after up to 75 s. RabbitMQ 4.3 requeues after another minute
(``consumer_disconnected_timeout``).
"""

_FIRST: Final = 8  # the prefetch while sizes are unknown: 128 MiB at the very most
_MORE: Final = 8  # the maximum factor by which the prefetch grows as sizes become known
_MOST_BYTES: Final = 65_536  # of an entry with more than one message
_SLACK: Final = 1.1  # the multiple of the limit of bytes above which reading pauses
_KEPT: Final = 2  # the acked messages that may come again, as a multiple of the maximum prefetch


class EpochState(enum.Enum):
    CLOSED = "no channel, or not the active relay"
    FENCING = "the markers are published, and not all confirmed"
    READING = "the tails of the partitions are read"
    MOVING = "deliveries are published and acked"
    ENDING = "the epoch is over; its channel is to be replaced"


_S = EpochState
_OPEN: Final = (_S.FENCING, _S.READING, _S.MOVING)
#: Event -> state before -> states after. For tests and documentation, not read at run time.
TRANSITIONS: Final[Mapping[str, Mapping[EpochState, set[EpochState]]]] = {
    "opened": {_S.CLOSED: {_S.FENCING}},
    "acks": {_S.FENCING: {_S.FENCING, _S.READING}, _S.MOVING: {_S.MOVING}},
    "tail_read": {_S.READING: {_S.READING, _S.MOVING}},
    "delivered": {_S.MOVING: {_S.MOVING, _S.ENDING}},
    "failed": {state: {_S.ENDING} for state in _OPEN},
    "lost": {state: {_S.CLOSED} for state in _S},
}
del _S


@dataclass(slots=True)
class _SentEntry:
    partition: int
    number: int = 0  # the number in `Settled`; 0 for a marker
    size: int = 0
    parts: list[bytes] = field(default_factory=list)  # of the body, until it is published
    delivery_tags: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)  # in `Moved`; of the messages with an id


@dataclass(slots=True)
class _PartitionEpoch:
    head: bytes
    tail: Tail
    settled: Settled | None = None


@dataclass(slots=True)
class _Epoch:
    """The state that is dropped with a lost channel."""

    number: int
    channel: int
    frame_max: int
    name: bytes
    partitions: list[_PartitionEpoch]
    moved: Moved
    tail: Counter[bytes] = field(default_factory=Counter)
    passed: int = 0
    returned: dict[int, int] = field(default_factory=dict)  # how often a delivery was returned, by its tag
    held: int = 0  # bytes of entries that are not confirmed
    unmarked: int = 0  # markers that are not confirmed
    confirmed: list[_SentEntry] = field(default_factory=list)  # confirmed entries whose deliveries are not acked
    moving_since: float = 0.0
    accounted_at: float = float("-inf")  # when a message of the tail was last acked


class StageSession:
    """The decisions of one relay. Not thread-safe."""

    def __init__(self, options: StageOptions) -> None:
        self.state = EpochState.CLOSED
        self.statistics = StageStatistics()
        self.prefetch_granted = 0  # the prefetch of the present subscription, set by the owner
        self.shared = False  # whether the queue had other consumers at first (`QueueCounts`), set by the owner
        self.error: ReliableMQError | None = None  # why nothing more can be moved
        self.tail_messages = 0  # entries of tails read so far, in all epochs
        self._options = options
        self._key_of = options.key_reader()
        self._confirms: ConfirmTracker[_SentEntry] = ConfirmTracker()
        self._acks = AckBatcher(ack_interval=0.0, prefetch=0)
        self._epoch: _Epoch | None = None
        self._average = PeakAverage()
        self._progress_at = 0.0

    # -- the epoch

    def opened(self, number: int, channel: int, frame_max: int, name: bytes, now: float) -> bytes:
        """Begin an epoch on a channel that has the lock. Return the markers to write.

        ``number`` is the channel generation. ``name`` is eight bytes that are unique to this epoch.
        """
        heads = [publish_head(channel, "", partition, mandatory=True) for partition in self._options.streams]
        partitions = [_PartitionEpoch(head, Tail(name)) for head in heads]
        epoch = _Epoch(number, channel, frame_max, name, partitions, Moved(_KEPT * self._options.max_outstanding))
        self._epoch = epoch
        self._confirms.channel_opened(number)
        self._acks.opened(number)
        self._progress_at = now
        self.state = EpochState.FENCING
        self.statistics.epochs += 1
        return self._markers([UNKNOWN] * len(heads))

    def lost(self) -> None:
        """Forget the channel, whose unacked deliveries the broker requeues."""
        self.state = EpochState.CLOSED
        self._confirms.channel_lost()
        self._acks.lost()
        self._epoch = None
        self.prefetch_granted = 0

    def ending(self, now: float) -> bytes:
        """Return markers for the end of the epoch, to write last.

        The next epoch begins to read at their ``low``. There are none as long as messages of the tail may come.
        """
        if self.state is not EpochState.MOVING or not self._is_resolved(now):
            return b""
        self._progress_at = now
        return self._markers([_settled(each).low(now, resolved=True) for each in self._opened.partitions])

    def failed(self) -> None:
        """End the epoch after a nack, a return or a cancelled subscription."""
        if self.state in _OPEN:
            self.state = EpochState.ENDING

    # -- the tail

    @property
    def next_read(self) -> tuple[str, int | str] | None:
        """The next partition to read and where to begin, None without one to read."""
        if self.state is not EpochState.READING:
            return None
        partitions = zip(self._options.streams, self._opened.partitions, strict=True)
        return next((name, each.tail.start) for name, each in partitions if each.tail.start is not None)

    def tail_read(self, partition: str, messages: Sequence[tuple[int, RawDelivery]], now: float) -> tuple[bool, bytes]:
        """Process messages of a tail. A message of a newer version sets `error`.

        A read of the last chunk makes progress at its end only. If other programs publish into the stage, it may begin
        behind the marker, which would then never come.

        Returns:
            Whether the read is over, so that its subscription can be cancelled, and the acks to write.
        """
        epoch = self._opened
        self.tail_messages += len(messages)
        each = epoch.partitions[self._options.streams.index(partition)]
        self._acks.delivered(messages[0][1].delivery_tag, messages[-1][1].delivery_tag)
        self._acks.finished([delivery.delivery_tag for _, delivery in messages], now)
        over = each.tail.start is None
        try:
            for offset, delivery in messages:
                if not over:
                    over = each.tail.read(offset, *_recognised(delivery))
        except ConfigurationError as error:
            self.error = error
        if over and each.tail.start is None and each.settled is None:
            each.settled = Settled(each.tail.low, each.tail.marker)
            epoch.tail.update(each.tail.identities)
            each.tail.identities.clear()
        if over or each.tail.start != "last":
            self._progress_at = now
        if all(every.settled is not None for every in epoch.partitions):
            self.state = EpochState.MOVING
            epoch.moving_since = now
        return over, self._ack_frames()

    def passed_over(self, deliveries: Sequence[RawDelivery], now: float) -> bytes:
        """Process messages received after the end of a read. Return the acks to write."""
        self._acks.delivered(deliveries[0].delivery_tag, deliveries[-1].delivery_tag)
        self._acks.finished([delivery.delivery_tag for delivery in deliveries], now)
        return self._ack_frames()

    # -- moving

    def delivered(self, deliveries: Sequence[RawDelivery], now: float) -> bytes:
        """Process deliveries of the queue. Return the entries and acks to write.

        A message that cannot be moved sets `error`, and nothing behind it is moved. A message that this epoch has moved
        ends it: its owner writes these frames and opens another channel.
        """
        epoch = self._opened
        self._acks.delivered(deliveries[0].delivery_tag, deliveries[-1].delivery_tag)
        if self.state is not EpochState.MOVING or self.error is not None:
            return b""
        if not len(self._confirms):
            self._progress_at = now
        options = self._options
        frames: list[bytes] = []
        entries: dict[int, _SentEntry] = {}  # by partition: the entry that takes more
        done: list[int] = []
        size = messages = 0
        count, most = len(options.streams), options.messages_per_entry
        resolved = self._is_resolved(now)
        lows = [_settled(each).low(now, resolved=resolved) for each in epoch.partitions]
        for delivery in deliveries:
            message_id = message_id_of(delivery.properties)
            if not message_id and options.missing_id is MissingId.REFUSE:
                self.error = _without_id(options.queue, delivery)
                break
            key = hash((message_id, delivery.exchange, delivery.routing_key, delivery.body)) if message_id else None
            returns = 0
            if delivery.redelivered:
                failed, acquired = broker_counts(delivery.properties)
                if failed:
                    epoch.returned[delivery.delivery_tag] = failed
                returns = failed + acquired
                if key is not None and epoch.moved.has(key, returns):
                    self.failed()
                    break
                if epoch.tail and message_id and key is not None:
                    moved = identity(message_id, delivery.exchange, delivery.routing_key, delivery.body)
                    if epoch.tail[moved]:
                        epoch.tail[moved] -= 1
                        if not epoch.tail[moved]:
                            del epoch.tail[moved]
                        done.append(delivery.delivery_tag)
                        epoch.moved.add(key, returns)
                        epoch.moved.acked(key)
                        continue
            elif epoch.tail:
                epoch.passed += 1
            index = shard(self._key_of(delivery, message_id), count) if count > 1 else 0
            parts = original_parts(delivery)
            held = sum(map(len, parts))
            entry = entries.get(index)
            if entry is None or entry.size + held > _MOST_BYTES or len(entry.delivery_tags) == most:
                if entry is not None:
                    self._publish(frames, entry, lows[index])
                entry = entries[index] = _SentEntry(index)
            entry.size += held
            entry.parts += parts
            entry.delivery_tags.append(delivery.delivery_tag)
            size += held
            messages += 1
            if key is not None:
                epoch.moved.add(key, returns)
                entry.keys.append(key)
        for entry in entries.values():
            self._publish(frames, entry, lows[entry.partition])
        if epoch.passed >= PASSED and self._is_late(now):
            epoch.tail.clear()
        if messages:
            self._average.observe(size / messages)
        self.statistics.moved_before += len(done)
        if done:
            epoch.accounted_at = now
            self._acked(done, now)
            frames.append(self._ack_frames())
        return b"".join(frames)

    def _publish(self, frames: list[bytes], entry: _SentEntry, low: int) -> None:
        epoch = self._opened
        each = epoch.partitions[entry.partition]
        messages = len(entry.delivery_tags)
        properties, body = staged(
            self._options.queue, entry.parts, messages, epoch.frame_max, low=low, epoch=epoch.name
        )
        entry.parts.clear()
        entry.number = _settled(each).published()
        epoch.held += entry.size
        self._confirms.published([entry])
        append_publish(frames, each.head, epoch.channel, properties, body, epoch.frame_max)

    def confirmed(self, number: int, tag: int, multiple: bool) -> None:
        """Process a confirm of the broker. `acks` is called once after all of one read."""
        settled = self._confirms.settle(number, tag, multiple)
        if self.state in _OPEN:
            self._opened.confirmed += settled

    def acks(self, now: float) -> bytes:
        """Return the acks of the deliveries in confirmed entries, to write."""
        if self._epoch is None or not self._epoch.confirmed:
            return b""
        epoch = self._epoch
        confirmed, epoch.confirmed = epoch.confirmed, []
        self._progress_at = now
        tags: list[int] = []
        for entry in confirmed:
            if not entry.number:
                epoch.unmarked -= 1
                continue
            _settled(epoch.partitions[entry.partition]).acked(entry.number, now)
            epoch.held -= entry.size
            for key in entry.keys:
                epoch.moved.acked(key)
            tags += entry.delivery_tags
        if not epoch.unmarked and self.state is EpochState.FENCING:
            self.state = EpochState.READING
        self.statistics.moved += len(tags)
        self._acked(tags, now)
        return self._ack_frames()

    def drained(self, now: float) -> None:
        """Record that the queue had no message, ready or unacked."""
        if self.state is EpochState.MOVING and self._is_late(now):
            self._opened.tail.clear()

    def overdue(self, now: float) -> bool:
        """Return whether no confirm or message of a tail has arrived for too long."""
        waits = self.state is EpochState.READING or bool(len(self._confirms))
        return waits and now - self._progress_at >= self._options.confirm_timeout

    def waited(self, now: float) -> None:
        """Restart the time for confirms, because the broker did not read until now."""
        self._progress_at = now

    # -- reading ahead

    @property
    def outstanding(self) -> int:
        return self._acks.outstanding

    @property
    def is_new(self) -> bool:
        """Whether a partition had no entry before this epoch, apart from markers."""
        return any(each.tail.is_empty for each in self._opened.partitions)

    @property
    def unconfirmed(self) -> int:
        """The number of entries that are not confirmed, or whose deliveries are not acked."""
        return len(self._confirms) + (0 if self._epoch is None else len(self._epoch.confirmed))

    @property
    def held(self) -> int:
        """The bytes of the deliveries whose entries are not confirmed."""
        return 0 if self._epoch is None else self._epoch.held

    @property
    def tail(self) -> int:
        """The number of messages of earlier epochs that are not accounted for."""
        return 0 if self._epoch is None else self._epoch.tail.total()

    def unsettled(self, now: float) -> int:
        """Return the number of entries that another epoch would read. State: MOVING."""
        resolved = self._is_resolved(now)
        return sum(_settled(each).unsettled(now, resolved=resolved) for each in self._opened.partitions)

    @property
    def prefetch(self) -> int:
        """The prefetch that the subscription should have."""
        most = self._options.max_outstanding
        if self._epoch is not None and self._epoch.returned:
            most >>= 2 * max(self._epoch.returned.values())  # 2000, 500, 125, 31, 7, 1
        if self._average.value is None:
            return max(min(most, _FIRST), 1)
        fits = int(self._options.max_outstanding_bytes / max(self._average.value, 1.0))
        grown = _MORE * self.prefetch_granted if self.prefetch_granted else _FIRST
        return max(min(most, fits, grown), 1)

    @property
    def wants_subscription(self) -> bool:
        """Whether the subscription should be renewed with the present `prefetch`."""
        if self.state is not EpochState.MOVING:
            return False
        wanted, granted = self.prefetch, self.prefetch_granted
        return 2 * granted <= wanted or 2 * wanted <= granted

    @property
    def wants_pause(self) -> bool:
        """Whether reading should pause because too many bytes are held."""
        return self.held > _SLACK * self._options.max_outstanding_bytes

    def _is_resolved(self, now: float) -> bool:
        """Return whether no message of the tail can be delivered any more."""
        return not self._opened.tail and now - self._opened.accounted_at >= SETTLED_AFTER

    def _is_late(self, now: float) -> bool:
        """Return whether the queue must have requeued the deliveries of earlier epochs."""
        return now - self._opened.moving_since >= (REQUEUED_AFTER if self.shared else SETTLED_AFTER)

    def _markers(self, lows: Sequence[int]) -> bytes:
        epoch = self._opened
        epoch.unmarked += len(lows)
        self._confirms.published([_SentEntry(index) for index in range(len(lows))])
        frames: list[bytes] = []
        for each, low in zip(epoch.partitions, lows, strict=True):
            append_publish(frames, each.head, epoch.channel, marker(epoch.name, low), b"", epoch.frame_max)
        return b"".join(frames)

    def _acked(self, tags: Sequence[int], now: float) -> None:
        self._acks.finished(tags, now)
        returned = self._opened.returned
        if returned:
            for tag in tags:
                returned.pop(tag, None)

    def _ack_frames(self) -> bytes:
        channel = self._opened.channel
        return b"".join(encode_ack(channel, *frame) for frame in self._acks.flush())

    @property
    def _opened(self) -> _Epoch:
        assert self._epoch is not None, "there is no epoch"  # noqa: S101
        return self._epoch


def _settled(partition: _PartitionEpoch) -> Settled:
    assert partition.settled is not None, "the tail is not read"  # noqa: S101
    return partition.settled


def _recognised(delivery: RawDelivery) -> tuple[Mark | None, list[bytes]]:
    """Return the mark of an entry, and the identities of its messages that have an id."""
    entry = unstaged(delivery.properties, delivery.body)
    if entry is None:
        return None, []
    ids = [(message_id_of(each.properties), each) for each in entry.originals]
    identities = [identity(known, each.exchange, each.routing_key, each.body) for known, each in ids if known]
    return entry.mark, identities


def _without_id(queue: str, delivery: RawDelivery) -> ConsumeError:
    return ConsumeError(
        f"a message of queue {queue!r}, published to exchange {delivery.exchange!r} with routing key "
        f"{delivery.routing_key!r}, has no message_id: once a relay has died, it is not known whether it was moved. "
        "Have the publisher set message_id (reliable_mq does), or allow such messages to come twice: "
        "stageMissingId=repeat, --missing-id repeat"
    )
