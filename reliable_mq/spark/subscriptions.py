"""Which queues the broker delivers from, on one channel at a time, with one prefetch for each.

It gives steps for a connection to carry out, and knows what is consumed once they are. No consumer tag is used twice:
what the broker sends of a consumer that was cancelled is told from what comes of its successor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reliable_mq.core.setup import Cancel, CheckQueue, Consume, SetPrefetch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from reliable_mq.core.setup import Step
    from reliable_mq.spark.appetite import Appetite

__all__ = ["Subscriptions"]


class Subscriptions:
    """See the module. Of the I/O thread alone.

    Args:
        name: what consumer tags begin with.
        queues: to be consumed.
        wanted: whether a queue is to be consumed now.
        appetite: says the prefetch.
    """

    def __init__(self, name: str, queues: Sequence[str], wanted: Callable[[str], bool], appetite: Appetite) -> None:
        self._name = name
        self._queues = queues
        self._wanted = wanted
        self._appetite = appetite
        self._queue_of: dict[str, str] = {}  # by consumer tag, of this channel
        self._active: list[str] = []  # the tags that the broker delivers to now
        self._made = 0  # so far

    def queue(self, consumer_tag: str) -> str:
        """Answer whose consumer has, or had, this tag on this channel."""
        return self._queue_of[consumer_tag]

    @property
    def queues(self) -> set[str]:
        """Those that the broker delivers from now."""
        return {self._queue_of[tag] for tag in self._active}

    def begin(self) -> Generator[Step, Any, None]:
        """Consume what is wanted, on a new channel."""
        self._queue_of.clear()
        self._active.clear()
        yield from self._consume_wanted()

    def renew(self) -> Generator[Step, Any, None]:
        """Consume what is wanted, with the prefetch of now."""
        yield from self.end()
        yield from self._consume_wanted()

    def resume(self, queue: str) -> Generator[Step, Any, None]:
        """Consume a queue again that the broker has `cancelled`."""
        yield CheckQueue(queue)
        yield SetPrefetch(self._appetite.granted)
        yield self._consume(queue)

    def end(self, queue: str | None = None) -> Generator[Step, Any, None]:
        """Cancel every consumer, or that of a queue, that there is when this is carried out."""
        tags = [tag for tag in self._active if queue in (None, self._queue_of[tag])]
        self._active = [tag for tag in self._active if tag not in tags]
        for tag in tags:
            yield Cancel(tag)

    def cancelled(self, consumer_tag: str) -> str | None:
        """The broker has ended one: give its queue; None where it was to end anyway."""
        if consumer_tag not in self._active:
            return None
        self._active.remove(consumer_tag)
        return self._queue_of[consumer_tag]

    def lost(self) -> None:
        """The channel is gone, and all of them with it."""
        self._active.clear()

    def _consume_wanted(self) -> Generator[Step, Any, None]:
        yield SetPrefetch(self._appetite.prefetch)
        self._appetite.renewed()
        for queue in filter(self._wanted, self._queues):
            yield self._consume(queue)

    def _consume(self, queue: str) -> Consume:
        self._made += 1
        tag = f"{self._name}-{self._made}"
        self._queue_of[tag] = queue
        self._active.append(tag)
        return Consume(queue, tag)
