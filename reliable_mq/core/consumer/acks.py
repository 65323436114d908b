"""The batching of acks into few frames, and the offsets of streams.

The broker numbers the deliveries of a channel 1, 2, 3, ..., and handlers finish them in any order. ``basic.ack`` with
``multiple`` settles every outstanding delivery up to its tag, so its tag must not pass an unfinished delivery. A
delivery finished beyond such a gap is acked by a separate frame, but later, so that a gap that closes soon costs
nothing and a slow handler cannot starve the prefetch. The state of a channel whose tags 1 to 3 are acked::

    tag     1 2 3 | 4 5 6 | 7 8 9 10
            acked | done  | * + *  +      done, +: finished and not acked yet; *: unfinished
                  | _run=3| `- first_unfinished = 7; _ahead = {8, 10}; _unfinished = {7, 9}; _last_tag = 10
                        `- _run_end = 6
    acks    one frame for the run: (6, multiple); one for each tag ahead of it: (8), (10)

Invariants:

- A tag is acked only after it was finished, and never under a ``multiple`` that reaches an unfinished one.
- A tag is settled by at most one frame: acked, rejected or requeued, never twice.
- A tag that is unknown, finished before, or of another channel is refused and counted, and changes nothing. `finished`
  and `requeue` are called only with tags of the open channel, and `take_out` compares the generation.
- A finished delivery is acked at the latest ``ack_interval`` after it was finished, or when finished and unacked
  deliveries fill half of the prefetch, whichever is first. Contiguous ones are also acked when there are ``ack_every``
  of them.
- While no handler runs, finished deliveries are acked as soon as ``rest`` seconds have passed without an ack. So a
  consumer that keeps up with its queue leaves almost no handled delivery unacked if it dies.
- ``acked == acks_sent + acks_saved``.
- Every operation is O(1) amortised per delivery, and memory is bounded by the outstanding deliveries.
"""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from math import inf
from typing import TYPE_CHECKING, Final, TypeAlias

from reliable_mq.codec import stream_offset
from reliable_mq.core.statistics import ConsumerStatistics
from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from reliable_mq.core.consumer.delivery import Delivery

_LARGEST_BATCH = 100  # the maximum number of acks that one frame replaces, unless ``ack_every`` is larger
_STEPS = 64  # tags that are always worth stepping through
_CLOCK_SKEW: Final = 5.0  # seconds by which the clocks of the broker and of this process may differ

#: Frames to send, in this order: (delivery tag, multiple).
Frames: TypeAlias = list[tuple[int, bool]]


def check_prefetch(prefetch: int, *, ack_every: int | None = None, batch_size: int | None = None) -> None:
    """Refuse a prefetch that is reached before an ack or a batch is complete.

    Raises:
        ConfigurationError: If ``ack_every`` or ``batch_size`` is above the prefetch, unless that is 0, which is none.
    """
    if ack_every is not None and 0 < prefetch < ack_every:
        raise ConfigurationError(f"ack_every={ack_every} does not fit prefetch={prefetch}: lower it")
    if batch_size is not None and 0 < prefetch < batch_size:
        raise ConfigurationError(
            f"batch_size={batch_size} does not fit prefetch={prefetch}: one of the two must change"
        )


class AckBatcher:
    """The acks of one channel at a time. Not thread-safe.

    Args:
        ack_every: The number of finished contiguous deliveries that are acked together. It fits every prefetch
            (`check_prefetch`). None for half of the current prefetch, and at most a hundred.
        ack_interval: The maximum seconds that a finished delivery waits for its ack.
        prefetch: The prefetch of the consumer, 0 for none.
        rest: The minimum seconds without an ack before an ack is sent because no handler runs. None for no such acks.
    """

    def __init__(
        self,
        *,
        ack_every: int | None = None,
        ack_interval: float,
        prefetch: int,
        rest: float | None = None,
    ) -> None:
        self.statistics = ConsumerStatistics()
        self._fits = ack_every is None  # whether ack_every follows the prefetch
        self._ack_every = _LARGEST_BATCH if ack_every is None else ack_every
        self.interval = ack_interval
        self._rest = inf if rest is None else rest
        self.generation = 0  # 0: no channel
        self._clear()
        self.set_prefetch(prefetch)

    def _clear(self) -> None:
        self._unfinished: set[int] = set()
        self._ahead: set[int] = set()  # finished and not acked, above first_unfinished
        self._last_tag = 0  # the newest tag delivered
        self.first_unfinished = 1  # no tag below is unfinished, and none below is in _ahead
        self._run = 0  # deliveries finished and not acked, below first_unfinished
        self._run_end = 0  # the highest tag of the run
        self._finished_at = inf  # not later than the oldest unacked delivery was finished; infinity without one
        self._sent_at = 0.0  # when the last frame was sent

    @property
    def outstanding(self) -> int:
        """The number of unsettled deliveries, including finished ones."""
        return len(self._unfinished) + len(self._ahead) + self._run

    @property
    def deadline(self) -> float:
        """The time to call `due` again if no event comes first, infinity for never."""
        return self._finished_at + self.interval

    @property
    def rested_at(self) -> float:
        """The time after which acks are sent when no handler runs, infinity for never."""
        return self._sent_at + self._rest

    def deadline_if(self, *, idle: bool) -> float:
        """Return `deadline`, or if no handler runs (``idle``) an earlier `rested_at`."""
        deadline = self.deadline
        return min(deadline, self.rested_at) if idle and deadline < inf else deadline

    @property
    def due_after(self) -> int:
        """The number of deliveries that must finish before a frame is due, at least 1."""
        left = self._ack_every - self._run
        if self._half:
            left = min(left, self._half - self._run - len(self._ahead))
        return max(left, 1)

    def unfinished_of(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """Return the unfinished ones among these deliveries of the open channel."""
        unfinished = self._unfinished
        return [delivery for delivery in deliveries if delivery.delivery_tag in unfinished]

    def set_prefetch(self, prefetch: int) -> None:
        """Fit the acks to this prefetch from now on."""
        self._half = max(1, prefetch // 2) if prefetch else 0
        if self._fits:
            self._ack_every = min(self._half, _LARGEST_BATCH) or _LARGEST_BATCH

    def opened(self, generation: int) -> None:
        """Begin a new channel, whose tags start at 1."""
        self._clear()
        self.generation = generation

    def lost(self) -> int:
        """Forget the channel. Return the number of its unsettled deliveries."""
        outstanding = self.outstanding
        self._clear()
        self.generation = 0
        return outstanding

    def delivered(self, first: int, last: int) -> None:
        """Add the tags ``first`` to ``last``.

        Raises:
            ValueError: If ``first`` does not follow the previous tag. A delivery was missed, and the channel cannot be
                trusted.
        """
        if first != self._last_tag + 1:
            raise ValueError(f"delivery tag {first} follows {self._last_tag}")
        self._unfinished.update(range(first, last + 1))
        self._last_tag = last

    def finished(self, tags: Collection[int], now: float) -> int:
        """Mark tags of the open channel as finished. Return the number of new ones."""
        unfinished = self._unfinished
        accepted = set(tags)
        if not accepted <= unfinished:
            accepted &= unfinished
        count = len(accepted)
        self.statistics.stale += len(tags) - count
        if not count:
            return 0
        unfinished -= accepted
        self._finished_at = min(self._finished_at, now)
        low = self.first_unfinished
        if not self._ahead and max(accepted) == low + count - 1:
            self.first_unfinished = low + count
            self._run += count
            self._run_end = low + count - 1
        else:
            self._ahead |= accepted
        self._advance()
        return count

    def take_out(self, generation: int, tag: int) -> bool:
        """Remove a tag that another frame will settle.

        Return False if that frame must not be sent.
        """
        if generation != self.generation or tag not in self._unfinished:
            self.statistics.stale += 1
            return False
        self._unfinished.remove(tag)
        self._advance()
        return True

    def due(self, now: float, *, idle: bool = False) -> Frames:
        """Return the acks to send now. ``idle`` means that no handler runs."""
        frames: Frames = []
        if self._finished_at == inf:
            return frames
        if now >= self._finished_at + self.interval or (idle and now >= self.rested_at):
            self._sent_at = now
            return self.flush()
        half = self._half
        if self._run >= self._ack_every or (half and self._run + len(self._ahead) >= half):
            self._ack_run(frames)
            if half and len(self._ahead) >= half:
                self._ack_ahead(frames)
            self._sent_at = now
        return frames

    def flush(self) -> Frames:
        """Return the acks of all finished deliveries, to send now."""
        frames: Frames = []
        self._ack_run(frames)
        self._ack_ahead(frames)
        return frames

    def requeue(self, tags: Collection[int]) -> tuple[Frames, Frames]:
        """Return the acks to send first, and the ``basic.nack`` frames that requeue tags.

        The tags are of the open channel.
        """
        accepted = self._unfinished.intersection(tags)
        self.statistics.stale += len(tags) - len(accepted)
        self.statistics.requeued += len(accepted)
        acks = self.flush()
        self._unfinished -= accepted
        self._advance()
        nacks: Frames = []
        reachable = [tag for tag in accepted if tag < self.first_unfinished]
        if reachable:
            nacks.append((max(reachable), len(reachable) > 1))
        nacks.extend((tag, False) for tag in sorted(accepted) if tag > self.first_unfinished)
        return acks, nacks

    def _advance(self) -> None:
        """Move `first_unfinished` up to the next unfinished tag.

        It moves step by step, which costs one step per delivery in total. After a long gap behind a straggler, so many
        steps would stall the thread. If a search through all outstanding tags is cheaper, it is used instead.
        """
        low, unfinished, ahead = self.first_unfinished, self._unfinished, self._ahead
        end = self._last_tag + 1
        near = min(end, low + len(unfinished) + len(ahead) + _STEPS)
        while low < near and low not in unfinished:
            if low in ahead:
                ahead.remove(low)
                self._run += 1
                self._run_end = low
            low += 1
        if low == near < end:
            low = min(unfinished, default=end)
            passed = [tag for tag in ahead if tag < low]
            if passed:
                ahead.difference_update(passed)
                self._run += len(passed)
                self._run_end = max(passed)
        self.first_unfinished = low

    def _ack_run(self, frames: Frames) -> None:
        count = self._run
        if not count:
            return
        frames.append((self._run_end, count > 1))
        self._count(1, count)
        self._run = 0
        if not self._ahead:
            self._finished_at = inf

    def _ack_ahead(self, frames: Frames) -> None:
        count = len(self._ahead)
        frames.extend((tag, False) for tag in sorted(self._ahead))
        self._count(count, count)
        self._ahead.clear()
        self._finished_at = inf

    def _count(self, frames: int, deliveries: int) -> None:
        statistics = self.statistics
        statistics.acks_sent += frames
        statistics.acks_saved += deliveries - frames
        statistics.acked += deliveries


class StreamOffset:
    """The offset at which to resume a stream after a loss. Not thread-safe.

    A stream keeps consumed messages and does not track acks.

    Invariants: The offset is never beyond an unsettled delivery, so no message is skipped. A settled delivery behind an
    unsettled one is delivered again and marked as redelivered, which RabbitMQ does not do for streams. Memory is
    bounded by the deliveries between the oldest unsettled one and the newest. A start position that moves with the
    stream is not used twice, because that would skip the messages in between.

    RabbitMQ cancels a consumer when its stream is deleted. The next stream of that name begins at offset 0, and an
    offset of the old one would skip its first messages. RabbitMQ also cancels when the replica of the node is deleted,
    and then refuses the next subscription there. So if another node may be tried, the stream counts as the old one.

    Args:
        start_moves: Whether the start position is another message in each subscription, as with ``"next"``.
    """

    def __init__(self, *, start_moves: bool = False) -> None:
        self._start_moves = start_moves
        #: Where to resume in this stream: an offset, or a time before the first delivery. None for the start position.
        self.following: int | datetime | None = None
        self.upcoming: int | None = None  # the lowest offset of the next delivery here; None before the first
        self._offsets: deque[int | None] = deque()  # the offsets of deliveries, from delivery tag _first on
        self._first = 1
        self._unseen = 0  # offsets below were delivered on this channel or an earlier one
        self._deleted = False  # whether the next stream of this name is another one

    def cancelled(self) -> None:
        """Assume that the stream was deleted, as RabbitMQ cancelled its consumer."""
        self._deleted = True

    def refused(self) -> None:
        """Drop the assumption of `cancelled`, as RabbitMQ refused the consumer."""
        self._deleted = False

    def subscribed(self, at: float) -> None:
        """Record a subscription. ``at`` is its time, in seconds since 1970."""
        if self._deleted:
            self.following, self.upcoming, self._unseen, self._deleted = 0, None, 0, False
        if self._start_moves and self.following is None:
            self.following = datetime.fromtimestamp(at - _CLOCK_SKEW, UTC)

    @property
    def start(self) -> int | datetime | None:
        """Where the next channel begins."""
        return 0 if self._deleted else self.following

    @property
    def here(self) -> int | datetime | None:
        """Where another subscription on the same channel begins."""
        return self.following if self.upcoming is None else self.upcoming

    def delivered(self, deliveries: Iterable[Delivery], lowest: int) -> None:
        """Add deliveries, in order. All with a tag below ``lowest`` are settled."""
        self._forget(lowest)
        for delivery in deliveries:
            offset = stream_offset(delivery.properties)
            if offset is None:
                offset = self.upcoming
            self._offsets.append(offset)
            if offset is not None:
                self.upcoming = offset + 1
                if offset < self._unseen:
                    delivery.redelivered = True
                else:
                    self._unseen = self.upcoming

    def lost(self, lowest: int) -> None:
        """Resume at the first delivery from tag ``lowest`` on after a lost channel."""
        self._forget(lowest)
        self.upcoming = self._offsets[0] if self._offsets else self.upcoming
        if self.upcoming is not None:
            self.following = self.upcoming
        self._offsets.clear()
        self._first = 1

    def _forget(self, lowest: int) -> None:
        while self._first < lowest and self._offsets:
            self._offsets.popleft()
            self._first += 1
