"""Delay queues: the queues in which the messages of a queue wait for their retry.

A message expires at the head of its queue only, so each delay queue has one delay, and dead-letters expired messages to
the queue, at least once. The delays of the policy have queues of their own, declared with the queue. Any other delay
(of ``RetryLater``, or with jitter) goes through a few queues of a fixed series, one after the other, declared when one
is first needed: 1, 2, 5, 10, 20, 50, ... times a tenth of a second.

A series that is fixed needs no cleaning up. Nor could it be done: ``x-expires`` deletes a quorum queue with the
messages that wait in it, publishing and declaring again do not renew it, there is no "delete if empty" for quorum
queues, and messages that have expired and wait to be dead-lettered to their queue are in no count that AMQP shows (all
of it on 4.0 and 4.3).

Invariants: a path takes at least the delay that was asked for, and more than that by a second or a tenth of it at most;
it has no more than a handful of steps; whatever a message says, there are no queues but those of the policy and of the
series.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from math import ceil
from typing import TYPE_CHECKING, Final, NamedTuple

from reliable_mq.errors import ConfigurationError
from reliable_mq.topology import Queue
from reliable_mq.topology.arguments import SHORT_STRING_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliable_mq.retry import RetryPolicy

__all__ = ["LONGEST_PATH", "DelayQueue", "DelayQueues"]

#: Milliseconds, up to RabbitMQ's longest time to live: ten years.
LONGEST: Final = 315_360_000_000
SERIES: Final = tuple(step * 10**power for power in range(2, 12) for step in (1, 2, 5) if step * 10**power <= LONGEST)
#: No path of ours is longer; one that is was made by somebody else.
LONGEST_PATH: Final = 16
_MOST_OWN: Final = 16  # delays of a policy that have queues of their own
_TOLERANCE: Final = 1000  # milliseconds, or a tenth
_NAMED: Final = re.compile(r"(?P<queue>.+)\.retry\.(?P<milliseconds>[1-9]\d*)", re.DOTALL)


class DelayQueue(NamedTuple):
    """The name of a delay queue, decoded."""

    queue: str  # that its messages return to
    milliseconds: int

    @classmethod
    def of(cls, name: str) -> DelayQueue | None:
        """Decode a name; None if it is not the name of a delay queue."""
        match = _NAMED.fullmatch(name)
        return None if match is None else cls(match["queue"], int(match["milliseconds"]))

    @property
    def name(self) -> str:
        return f"{self.queue}.retry.{self.milliseconds}"


class DelayQueues:
    """The delay queues of one queue, in milliseconds.

    The delays of the policy have queues of their own, unless they are many, or a matter of chance.

    Raises:
        ConfigurationError: the queue's name leaves no room for theirs.
    """

    def __init__(self, queue: str, policy: RetryPolicy) -> None:
        own = {milliseconds(delay) for delay in policy.schedule if delay > 0}
        if policy.jitter or len(own) > _MOST_OWN:
            own.clear()
        self._queue = queue
        self.own: Final = tuple(sorted(own))  # the delays of the policy
        self._known: Final = frozenset({*SERIES, *own})
        self._steps: Final = sorted(self._known)
        longest = DelayQueue(queue, self._steps[-1]).name
        if len(longest.encode()) > SHORT_STRING_BYTES:
            raise ConfigurationError(
                f"the name of queue {queue!r} leaves no room for those of its delay queues, such as {longest!r}: "
                "shorten it, or give the retry policy backend='memory'"
            )

    def path(self, delay: float) -> tuple[int, ...]:
        """Return the path for a delay in seconds: the milliseconds of each delay queue."""
        left = milliseconds(min(delay, LONGEST / 1000))
        tolerance = max(_TOLERANCE, left // 10)
        path: list[int] = []
        while left > 0:
            at = bisect_left(self._steps, left)
            if at == len(self._steps) or (at and self._steps[at] - left > tolerance):
                at -= 1
            path.append(self._steps[at])
            left -= self._steps[at]
        return tuple(path)

    def through(self, path: Sequence[int]) -> tuple[int, ...]:
        """Return a path through our delay queues that takes as long as ``path``.

        A path travels in a header, which any client can send: it must not make queues, which stay.
        """
        return tuple(path) if self._known.issuperset(path) else self.path(sum(path) / 1000)

    def queue(self, step: int) -> Queue:
        """Return the delay queue of so many milliseconds."""
        return Queue(DelayQueue(self._queue, step).name, message_ttl=step / 1000, dead_letter=self._queue)


def milliseconds(delay: float) -> int:
    """Return a delay in milliseconds, rounded up: it is never cut short."""
    return ceil(round(delay * 1000, 6))
