"""What bounds a publisher: how much may be outstanding, and that no two outstanding publishes share a ``message_id``.

A full window makes ``submit`` wait, so that neither the process nor the broker is flooded. A returned message names its
``message_id`` and nothing else, so two outstanding publishes with the same id could not be told apart: the second one
waits until the first is settled.

Invariants:

- :class:`PublishWindow` never holds more than ``max_count`` messages, nor more than ``max_bytes``, except for a single
  message larger than ``max_bytes``, which is admitted alone (else it could never be sent);
- what is admitted is released once, so an empty publisher has an empty window;
- :class:`MessageIdQueue` lets one item per id through at a time, and the ones that wait follow in the order in which
  they came.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from reliable_mq.core.publisher.publication import Publication
from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MessageIdQueue", "PublishWindow"]

P = TypeVar("P", bound=Publication)


class PublishWindow:
    """Admission by count and by bytes. Not thread-safe: the caller holds a lock.

    Attributes:
        count: messages admitted and not yet released.
        bytes: their sizes, summed.
    """

    __slots__ = ("bytes", "count", "max_bytes", "max_count")

    def __init__(self, max_count: int, max_bytes: int) -> None:
        for name, value in (("max_outstanding", max_count), ("max_outstanding_bytes", max_bytes)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(f"{name} must be a whole number of at least 1, not {value!r}")
        self.max_count = max_count
        self.max_bytes = max_bytes
        self.count = 0
        self.bytes = 0

    def fits(self, size: int) -> bool:
        """Whether there is a place for a message of ``size`` bytes."""
        return self.count < self.max_count and (not self.count or self.bytes + size <= self.max_bytes)

    def take(self, size: int) -> None:
        """Take a place for a message of ``size`` bytes, which fits."""
        self.count += 1
        self.bytes += size

    def release(self, count: int, size: int) -> None:
        """Give back the places of ``count`` messages of ``size`` bytes together."""
        self.count -= count
        self.bytes -= size

    def worth_waking(self, on_wire: int) -> bool:
        """Whether those who wait for a place should look again, with so many publishes ``on_wire``.

        Waking a thread for every single place would cost more than the publish itself, so it is done when the channel
        owes half a window at most. What does not count: publishes that wait for another attempt, which would keep the
        others waiting, too.
        """
        return on_wire * 2 <= self.max_count


class MessageIdQueue(Generic[P]):
    """At most one publication per ``message_id`` at a time; the others wait their turn. Not thread-safe."""

    __slots__ = ("_inside", "_waiting")

    def __init__(self) -> None:
        self._inside: dict[str, P] = {}
        self._waiting: dict[str, deque[P]] = {}

    def __len__(self) -> int:
        """How many publications are inside."""
        return len(self._inside)

    def enter(self, publications: Iterable[P]) -> list[P]:
        """Let in those whose id is not inside; the others wait. Returns those let in, in order."""
        let_in: list[P] = []
        enter = self._inside.setdefault
        for publication in publications:
            key = publication.message.message_id
            if enter(key, publication) is publication:
                let_in.append(publication)
            else:
                self._waiting.setdefault(key, deque()).append(publication)
        return let_in

    def holder(self, message_id: str) -> P | None:
        """The publication inside with this id, if there is one."""
        return self._inside.get(message_id)

    def leave(self, publications: Iterable[P]) -> list[P]:
        """Those inside are off the channel. Returns the ones whose turn it is now; they are inside from here on."""
        inside, waiting = self._inside, self._waiting
        following: list[P] = []
        for publication in publications:
            key = publication.message.message_id
            if key in waiting:
                inside[key] = waiting[key].popleft()
                following.append(inside[key])
                if not waiting[key]:
                    del waiting[key]
            else:
                del inside[key]
        return following

    def withdraw(self, publication: P) -> bool:
        """Take out a publication that waits for its turn. False if it does not wait."""
        key = publication.message.message_id
        queue = self._waiting.get(key)
        if queue is None or publication not in queue:
            return False
        queue.remove(publication)
        if not queue:
            del self._waiting[key]
        return True
