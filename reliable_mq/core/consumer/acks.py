"""When to acknowledge which deliveries, and with how few frames.

The broker numbers the deliveries of a channel 1, 2, 3, ...; handlers finish them in any order. ``basic.ack`` with
``multiple`` settles every outstanding delivery up to its tag, so it may only reach as far as everything below is
finished; what is finished beyond such a gap gets a frame of its own, but later, so that a gap that closes soon costs
nothing and a slow handler cannot starve the prefetch.

Invariants:

- a tag is acked only after it was finished, and never under a ``multiple`` that reaches an unfinished one;
- a tag is settled by at most one frame: acked, or rejected or handed back (which takes it off the ledger), never twice;
- a tag that is unknown, finished before, or of another generation than the open channel's is refused, counted and
  changes nothing;
- what is finished is acked at the latest ``ack_interval`` after it was finished, or when finished and unacked
  deliveries fill half of the prefetch, whichever is first; contiguous ones also when there are ``ack_every`` of them;
- while no handler runs, there is nothing to wait for: what is finished is acked as soon as nothing was for ``rest``
  seconds. So a consumer that keeps up with its queue leaves next to nothing behind that was handled, if it dies;
- ``acked == acks_sent + acks_saved``;
- every operation is O(1) amortised per delivery, and memory is bounded by what is outstanding.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, TypeAlias

from reliable_mq.core.statistics import ConsumerStatistics
from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from reliable_mq.core.consumer.delivery import Delivery

__all__ = ["AckBatcher", "Frames"]

_LARGEST_BATCH = 100  # acks that one frame stands for, unless more are asked for
_STEPS = 64  # of tags that are worth walking over, at any size

#: What to send, in this order: (delivery tag, multiple).
Frames: TypeAlias = list[tuple[int, bool]]


class AckBatcher:
    """Acknowledgements of one channel at a time; see the module.

    Not thread-safe: one thread, or one event loop, owns it.

    Args:
        ack_every: finished contiguous deliveries that are acked together; None for half of the prefetch, whatever that
            is, and a hundred at most.
        ack_interval: seconds that a finished delivery waits for its ack at most.
        prefetch: the consumer's prefetch; 0 for none.
        rest: seconds from one ack to the next, at least, that is sent since no handler runs; None for no such acks.
        statistics: where to count.

    Raises:
        ConfigurationError: ``ack_every`` is below 1 or does not fit the prefetch, or ``ack_interval`` is negative.
    """

    __slots__ = (
        "_ack_every",
        "_ack_interval",
        "_beyond",
        "_finished_at",
        "_fits",
        "_half",
        "_last",
        "_low",
        "_prefix",
        "_rest",
        "_sent_at",
        "_top",
        "_unfinished",
        "generation",
        "statistics",
    )

    def __init__(
        self,
        *,
        ack_every: int | None = None,
        ack_interval: float,
        prefetch: int,
        rest: float | None = None,
        statistics: ConsumerStatistics | None = None,
    ) -> None:
        if ack_every is not None and ack_every < 1:
            raise ConfigurationError(f"ack_every must be at least 1, not {ack_every}")
        if not ack_interval >= 0:
            raise ConfigurationError(f"ack_interval must be a number of seconds, at least 0, not {ack_interval}")
        self.statistics = statistics or ConsumerStatistics()
        self._fits = ack_every is None  # whether ack_every follows the prefetch
        self._ack_every = _LARGEST_BATCH if ack_every is None else ack_every
        self._ack_interval = ack_interval
        self._rest = inf if rest is None else rest
        self.generation = 0  # 0: no channel
        self._clear()
        self.set_prefetch(prefetch)

    def _clear(self) -> None:
        self._unfinished: set[int] = set()
        self._beyond: set[int] = set()  # finished, not acked, above _low
        self._last = 0  # the newest tag delivered
        self._low = 1  # no tag below is unfinished, and none below is in _beyond
        self._prefix = 0  # finished, not acked, below _low
        self._top = 0  # the highest of those
        self._finished_at: float | None = None  # not later than when the oldest unacked one was finished
        self._sent_at = 0.0  # when there was a frame last

    @property
    def outstanding(self) -> int:
        """Deliveries that are not settled yet, finished ones included."""
        return len(self._unfinished) + len(self._beyond) + self._prefix

    @property
    def deadline(self) -> float | None:
        """When `due` wants to be asked again, though nothing happens until then; None for never."""
        return None if self._finished_at is None else self._finished_at + self._ack_interval

    @property
    def rested_at(self) -> float:
        """From when on what is finished is acked if no handler runs; infinite for never."""
        return self._sent_at + self._rest

    def deadline_if(self, *, idle: bool) -> float | None:
        """Answer as `deadline` does, where a handler runs or, ``idle``, none does."""
        deadline = self.deadline
        return min(deadline, self.rested_at) if idle and deadline is not None else deadline

    @property
    def due_after(self) -> int:
        """How many more deliveries must finish, at least, for a frame to be due by their number; 1 where one is."""
        left = self._ack_every - self._prefix
        if self._half:
            left = min(left, self._half - self._prefix - len(self._beyond))
        return max(left, 1)

    @property
    def lowest(self) -> int:
        """The tag below which every delivery of the channel was finished or settled."""
        return self._low

    def unfinished(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """Answer which of these deliveries of the channel no handler is done with."""
        unfinished = self._unfinished
        return [delivery for delivery in deliveries if delivery.delivery_tag in unfinished]

    def set_prefetch(self, prefetch: int) -> None:
        """The prefetch is ``prefetch`` from now on.

        Raises:
            ConfigurationError: the ``ack_every`` that was given does not fit it.
        """
        half = max(1, prefetch // 2) if prefetch else 0
        if self._fits:
            self._ack_every = min(half, _LARGEST_BATCH) or _LARGEST_BATCH
        elif prefetch and self._ack_every > prefetch:
            raise ConfigurationError(f"ack_every={self._ack_every} does not fit prefetch={prefetch}: lower it")
        self._half = half

    def opened(self, generation: int) -> None:
        """A channel was opened: its tags begin at 1."""
        self._clear()
        self.generation = generation

    def lost(self) -> int:
        """The channel is gone. Answers how many deliveries were not settled; the broker delivers them again."""
        outstanding = self.outstanding
        self._clear()
        self.generation = 0
        return outstanding

    def delivered(self, first: int, last: int) -> None:
        """The deliveries ``first`` to ``last`` came in.

        Raises:
            ValueError: ``first`` does not follow the last one before: a delivery was missed, and the channel cannot be
            trusted.
        """
        if first != self._last + 1:
            raise ValueError(f"delivery tag {first} follows {self._last}")
        self._unfinished.update(range(first, last + 1))
        self._last = last

    def finished(self, generation: int, tags: Collection[int], now: float) -> int:
        """Handlers are done with these tags. Answers how many of them are new and of this channel."""
        unfinished = self._unfinished
        accepted = set(tags)
        if generation != self.generation:
            accepted.clear()
        elif not accepted <= unfinished:
            accepted &= unfinished
        count = len(accepted)
        self.statistics.stale += len(tags) - count
        if not count:
            return 0
        unfinished -= accepted
        if self._finished_at is None:
            self._finished_at = now
        low = self._low
        if not self._beyond and max(accepted) == low + count - 1:
            self._low = low + count
            self._prefix += count
            self._top = low + count - 1
        else:
            self._beyond |= accepted
        self._advance()
        return count

    def taken(self, generation: int, tag: int) -> bool:
        """The caller settles this tag with a frame of its own. False: it must not be sent."""
        if generation != self.generation or tag not in self._unfinished:
            self.statistics.stale += 1
            return False
        self._unfinished.remove(tag)
        self._advance()
        return True

    def due(self, now: float, *, idle: bool = False) -> Frames:
        """The acks to send now; ``idle``: no handler runs."""
        frames: Frames = []
        if self._finished_at is None:
            return frames
        if now >= self._finished_at + self._ack_interval or (idle and now >= self.rested_at):
            self._sent_at = now
            return self.flush()
        half = self._half
        if self._prefix >= self._ack_every or (half and self._prefix + len(self._beyond) >= half):
            self._ack_prefix(frames)
            if half and len(self._beyond) >= half:
                self._ack_beyond(frames)
            self._sent_at = now
        return frames

    def flush(self) -> Frames:
        """The acks of everything that is finished, to send now."""
        frames: Frames = []
        self._ack_prefix(frames)
        self._ack_beyond(frames)
        return frames

    def hand_back(self, generation: int, tags: Collection[int]) -> tuple[Frames, Frames]:
        """These tags go back to the broker unhandled: the acks to send first, then the ``basic.nack``."""
        accepted = set(tags)
        if generation != self.generation:
            accepted.clear()
        else:
            accepted &= self._unfinished
        self.statistics.stale += len(tags) - len(accepted)
        self.statistics.handed_back += len(accepted)
        acks = self.flush()
        self._unfinished -= accepted
        self._advance()
        nacks: Frames = []
        reachable = [tag for tag in accepted if tag < self._low]
        if reachable:
            nacks.append((max(reachable), len(reachable) > 1))
        nacks.extend((tag, False) for tag in sorted(accepted) if tag > self._low)
        return acks, nacks

    def _advance(self) -> None:
        """Move `_low` up to the next unfinished tag.

        Step by step, which costs one step per delivery in all; but where a straggler has held `_low` back for so long
        that looking at everything that is left is cheaper, by that: a pause as long as the gap would stall the thread.
        """
        low, unfinished, beyond = self._low, self._unfinished, self._beyond
        end = self._last + 1
        near = min(end, low + len(unfinished) + len(beyond) + _STEPS)
        while low < near and low not in unfinished:
            if low in beyond:
                beyond.remove(low)
                self._prefix += 1
                self._top = low
            low += 1
        if low == near < end:
            low = min(unfinished, default=end)
            passed = [tag for tag in beyond if tag < low]
            if passed:
                beyond.difference_update(passed)
                self._prefix += len(passed)
                self._top = max(passed)
        self._low = low

    def _ack_prefix(self, frames: Frames) -> None:
        count = self._prefix
        if not count:
            return
        frames.append((self._top, count > 1))
        self._count(1, count)
        self._prefix = 0
        if not self._beyond:
            self._finished_at = None

    def _ack_beyond(self, frames: Frames) -> None:
        count = len(self._beyond)
        frames.extend((tag, False) for tag in sorted(self._beyond))
        self._count(count, count)
        self._beyond.clear()
        self._finished_at = None

    def _count(self, frames: int, deliveries: int) -> None:
        statistics = self.statistics
        statistics.acks_sent += frames
        statistics.acks_saved += deliveries - frames
        statistics.acked += deliveries
