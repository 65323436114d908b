"""What is published, mandatory and confirmed, before its original may be acked: dead letters and retries.

A retry goes to the first delay queue of its path. One that is not known to exist on this channel's broker is declared
first, and what is to go there waits for that; one that turns out to be missing is declared again.

Invariants: a `Republish` is in one place at a time: waiting for a declaration, ready to be taken, or taken; nothing of
a channel that is lost is published; a queue that may not be declared is asked for once per channel, and what would have
waited there is held in the process.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from reliable_mq.core.deadletters import Purpose, Republish, Target
from reliable_mq.core.transit import pack

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reliable_mq.core.deadletters import DeadLetters
    from reliable_mq.core.delivery import Delivery, Source
    from reliable_mq.core.ladder import Ladder
    from reliable_mq.topology import Queue

__all__ = ["Republishing"]


class Republishing:
    """See the module. Not thread-safe.

    Args:
        dead_letters: makes the dead letters; None where there is no queue for them.
        ladder: the delay queues; None where there are none.
    """

    def __init__(self, dead_letters: DeadLetters | None, ladder: Ladder | None) -> None:
        self._dead_letters = dead_letters
        self._ladder = ladder
        self._known: set[str] = set()
        self._refused: set[str] = set()
        self._undeclared: dict[str, list[Republish]] = {}
        self._declarations: list[Queue] = []
        self._ready: list[Republish] = []
        self._taken: set[Republish] = set()

    def opened(self) -> None:
        """A channel is open, and what belongs to the policy is declared."""
        self._known = set() if self._ladder is None else {self._ladder.queue(step).name for step in self._ladder.own}
        self._refused.clear()

    def lost(self) -> None:
        """The channel is gone."""
        self._ready.clear()
        self._undeclared.clear()
        self._declarations.clear()

    def dead_letter(self, delivery: Delivery, reason: str) -> bool:
        """Dead-letter it; False where there is no queue for that."""
        if self._dead_letters is None:
            return False
        self._ready.append(self._dead_letters.make(delivery, reason))
        return True

    def delay(self, delivery: Delivery, delay: float, *, suspect: bool = False) -> bool:
        """Have it wait for ``delay`` seconds in delay queues; False where it has to be held instead."""
        return self._ladder is not None and self.forward(delivery, self._ladder.path(delay), suspect=suspect)

    def forward(self, delivery: Delivery, path: Sequence[int], *, suspect: bool = False) -> bool:
        """Have it wait in these delay queues, one after the other; False where it has to be held instead."""
        if self._ladder is None or not path:
            return False
        path = self._ladder.through(path)
        queue = self._ladder.queue(path[0])
        if queue.name in self._refused:
            return False
        properties = pack(delivery, path[1:], suspect=suspect)
        if properties is None:
            return False
        target = Target("", queue.name)
        self.again(Republish(delivery, target, properties, "", purpose=Purpose.RETRY, queue=queue))
        return True

    def isolate(self, delivery: Delivery, queue: Queue, delay: float = 0.0) -> bool:
        """Move it to quarantine, which was declared with the policy's delay queues; False where it cannot be.

        With a ``delay``, in seconds, it waits in delay queues first, and comes back from there as what it is.
        """
        path = () if self._ladder is None else self._ladder.path(delay)
        properties = pack(delivery, path[1:], suspect=True)
        if properties is None:
            return False
        if self._ladder is not None and path and self._ladder.queue(path[0]).name not in self._refused:
            queue = self._ladder.queue(path[0])
        else:
            self._known.add(queue.name)
        target = Target("", queue.name)
        self.again(Republish(delivery, target, properties, "", purpose=Purpose.QUARANTINE, queue=queue))
        return True

    def again(self, republish: Republish) -> None:
        """Publish one, once its queue is declared."""
        queue = republish.queue
        if queue is None or queue.name in self._known:
            self._ready.append(republish)
            return
        if queue.name not in self._undeclared:
            self._declarations.append(queue)
        self._undeclared.setdefault(queue.name, []).append(republish)

    def missing(self, republish: Republish) -> None:
        """The queue that it was to go to does not exist (any more): publish it again once that is declared."""
        if republish.queue is not None:
            self._known.discard(republish.queue.name)
        self.again(republish)

    def declared(self, name: str, *, ok: bool) -> list[Republish]:
        """A declaration that was taken has ended; answer what cannot be published for want of that queue."""
        waiting = self._undeclared.pop(name, [])
        if not ok:
            self._refused.add(name)
            return waiting
        self._known.add(name)
        self._ready += waiting
        return []

    def settled(self, republish: Republish) -> None:
        """One that was taken is confirmed, or it is known that it is not."""
        self._taken.discard(republish)

    def take(self) -> list[Republish]:
        """Take what to publish."""
        ready, self._ready = self._ready, []
        self._taken.update(ready)
        return ready

    def take_declarations(self) -> Iterable[Queue]:
        """Take what to declare; each is to be answered with `declared`, unless the channel is lost."""
        declarations, self._declarations = self._declarations, []
        return declarations

    def tags(self, source: Source | None) -> Iterable[int]:
        """The delivery tags of what is published from this channel, or is to be."""
        for republish in chain(self._ready, self._taken, *self._undeclared.values()):
            if republish.delivery.source is source:
                yield republish.delivery.delivery_tag

    def isolating(self, source: Source | None) -> bool:
        """Whether something of this channel is being moved to quarantine, and its original is not acked yet."""
        return any(one.purpose is Purpose.QUARANTINE and one.delivery.source is source for one in self._taken)

    @property
    def idle(self) -> bool:
        """Whether nothing is being published, or is to be."""
        return not (self._taken or self._ready or self._undeclared)
