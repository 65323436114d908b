"""The consumers of a query's queues, on one channel at a time.

Invariant: no consumer tag is used twice: deliveries of a cancelled consumer are told from those of its successor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reliable_mq.codec.methods import Cancel, CheckQueue, Consume, SetPrefetch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from reliable_mq.codec.methods import Step

__all__ = ["Subscriptions"]


class Subscriptions:
    """The consumers on one channel at a time: one for each queue, with one prefetch.

    Its generators are the steps for a connection to carry out. Of the I/O thread alone.

    Args:
        name: prefix of consumer tags.
        queues: to be consumed.
        wanted: whether a queue is to be consumed now.
        grant: decides the prefetch of new consumers.
    """

    def __init__(
        self, name: str, queues: Sequence[str], wanted: Callable[[str], bool], grant: Callable[[], int]
    ) -> None:
        self._name = name
        self._queues = queues
        self._wanted = wanted
        self._grant = grant
        self._granted = 1
        self._queue_of: dict[str, str] = {}  # by consumer tag, of this channel
        self._active: list[str] = []  # the tags that the broker delivers to now
        self._made = 0  # so far

    def queue(self, consumer_tag: str) -> str:
        """Return the queue of a consumer of this channel, active or cancelled."""
        return self._queue_of[consumer_tag]

    @property
    def queues(self) -> set[str]:
        """The queues that the broker delivers from now."""
        return {self._queue_of[tag] for tag in self._active}

    def begin(self) -> Generator[Step, Any, None]:
        """Consume all wanted queues, on a new channel."""
        self._queue_of.clear()
        self._active.clear()
        yield from self._consume_wanted()

    def renew(self) -> Generator[Step, Any, None]:
        """Consume all wanted queues anew, with the present prefetch."""
        yield from self.end()
        yield from self._consume_wanted()

    def resume(self, queue: str) -> Generator[Step, Any, None]:
        """Consume a queue again whose consumer the broker has cancelled."""
        yield CheckQueue(queue)
        yield SetPrefetch(self._granted)
        yield self._consume(queue)

    def end(self, queue: str | None = None) -> Generator[Step, Any, None]:
        """Cancel the consumer of a queue, or all that exist when this is carried out."""
        tags = [tag for tag in self._active if queue in (None, self._queue_of[tag])]
        self._active = [tag for tag in self._active if tag not in tags]
        for tag in tags:
            yield Cancel(tag)

    def cancelled(self, consumer_tag: str) -> str | None:
        """Forget a consumer that the broker has cancelled.

        Returns:
            Its queue; None if the consumer was being cancelled here anyway.
        """
        if consumer_tag not in self._active:
            return None
        self._active.remove(consumer_tag)
        return self._queue_of[consumer_tag]

    def lost(self) -> None:
        """Forget all consumers: their channel is gone."""
        self._active.clear()

    def _consume_wanted(self) -> Generator[Step, Any, None]:
        self._granted = self._grant()
        yield SetPrefetch(self._granted)
        for queue in filter(self._wanted, self._queues):
            yield self._consume(queue)

    def _consume(self, queue: str) -> Consume:
        self._made += 1
        tag = f"{self._name}-{self._made}"
        self._queue_of[tag] = queue
        self._active.append(tag)
        return Consume(queue, tag)
