"""Delay queues: the queues in which the messages of a queue wait for their retry.

A message expires only at the head of its queue. So each delay queue has a single delay, and dead-letters expired
messages to their own queue, at least once. Each delay of the policy has a dedicated queue, which is declared with the
queue. For any other delay (of ``RetryLater``, or with jitter) a message passes through a few queues of a fixed series,
one after the other: 1, 2, 5, 10, 20, 50, ... times a tenth of a second. Each is declared when it is first needed.

A fixed series needs no cleanup. Cleanup would not even be possible (on 4.0 and 4.3): ``x-expires`` deletes a quorum
queue with its waiting messages, and neither publishing nor declaring again renews it. Quorum queues have no "delete if
empty". Expired messages that wait to be dead-lettered to their queue are in no count that AMQP shows.

Invariants:

- A path takes at least the requested delay, and exceeds it by at most a second or a tenth of the delay. Before RabbitMQ
  4.3, it takes longer while messages of a higher priority (above 4) keep coming.
- A path has no more than a handful of steps.
- No message can cause other queues than those of the policy and of the series.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from math import ceil
from typing import TYPE_CHECKING, Final, NamedTuple

from reliable_mq._util.validation import SHORT_STRING_BYTES
from reliable_mq.errors import ConfigurationError
from reliable_mq.topology import Queue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliable_mq.retry import RetryPolicy

#: RabbitMQ's longest time to live, ten years, in milliseconds.
LONGEST: Final = 315_360_000_000
SERIES: Final = tuple(step * 10**power for power in range(2, 12) for step in (1, 2, 5) if step * 10**power <= LONGEST)
#: The maximum number of steps of our paths. A longer path was made by another program.
LONGEST_PATH: Final = 16
_MOST_OWN: Final = 16  # the maximum number of policy delays with dedicated queues
_TOLERANCE: Final = 1000  # milliseconds; longer delays tolerate a tenth
_NAMED: Final = re.compile(r"(?P<queue>.+)\.retry\.(?P<milliseconds>[1-9]\d{0,11})", re.DOTALL)


class DelayQueue(NamedTuple):
    """The name of a delay queue, decoded."""

    queue: str  # the queue to which its messages return
    milliseconds: int

    @classmethod
    def of(cls, name: str) -> DelayQueue | None:
        """Decode a name. Return None if it is not the name of a delay queue."""
        match = _NAMED.fullmatch(name)
        return None if match is None else cls(match["queue"], int(match["milliseconds"]))

    @property
    def name(self) -> str:
        return f"{self.queue}.retry.{self.milliseconds}"


class DelayQueues:
    """The delay queues of one queue, in milliseconds.

    The delays of the policy have dedicated queues, unless there are too many or the policy has jitter.

    Raises:
        ConfigurationError: If the name of the queue is too long for the names of its delay queues.
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

        A path travels in a header, which any client can send. It must not cause new queues, since these are permanent.
        """
        return tuple(path) if self._known.issuperset(path) else self.path(sum(path) / 1000)

    def queue(self, step: int) -> Queue:
        """Return the delay queue for ``step`` milliseconds."""
        return Queue(DelayQueue(self._queue, step).name, message_ttl=step / 1000, dead_letter=self._queue)


def milliseconds(delay: float) -> int:
    """Return a delay in milliseconds, rounded up so that it is never too short."""
    return ceil(round(delay * 1000, 6))
