"""The window of a publisher, and one outstanding publish per ``message_id``.

A full window makes ``submit`` wait, so that neither the process nor the broker is flooded. A returned message names its
``message_id`` and nothing else, so two outstanding publishes with the same id could not be told apart: the second one
waits until the first is settled.

Invariants:

- `PublishWindow` never holds more than ``max_count`` messages, nor more than ``max_bytes``, except for a single message
  larger than ``max_bytes``, which is admitted alone (else it could never be sent);
- an admitted message is released once, so an empty publisher has an empty window;
- `MessageIdQueue` admits one publication per id at a time; the others follow in the order in which they came.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from reliable_mq._util.validation import whole_number
from reliable_mq.core.publisher.publication import Publication, PublicationState

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MessageIdQueue", "PublishWindow"]

P = TypeVar("P", bound=Publication)


class PublishWindow:
    """Admission by count and by bytes. Not thread-safe: the caller holds a lock."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_count = whole_number("max_outstanding", max_count, 1)
        self.max_bytes = whole_number("max_outstanding_bytes", max_bytes, 1)
        self.count = 0
        self.bytes = 0

    def fits(self, size: int) -> bool:
        return self.count < self.max_count and (not self.count or self.bytes + size <= self.max_bytes)

    def take(self, size: int) -> None:
        self.count += 1
        self.bytes += size

    def release(self, count: int, size: int) -> None:
        self.count -= count
        self.bytes -= size

    def worth_waking(self, on_wire: int) -> bool:
        """Whether to wake the callers that wait for a place.

        Waking a thread for every single place would cost more than the publish itself, so it is done when the channel
        owes half a window of confirms at most. Publishes that wait for another attempt do not count: they would keep
        the callers waiting, too.
        """
        return on_wire * 2 <= self.max_count


class MessageIdQueue(Generic[P]):
    """One publication per ``message_id`` at a time; the others wait. Not thread-safe.

    A publication that waits is `PublicationState.WAITING`.
    """

    def __init__(self) -> None:
        self._admitted: dict[str, P] = {}
        self._waiting: dict[str, deque[P]] = {}

    def __len__(self) -> int:
        return len(self._admitted)

    def enter(self, publications: Iterable[P]) -> list[P]:
        """Admit publications whose id is free, and return them in order; the others wait."""
        admitted: list[P] = []
        enter = self._admitted.setdefault
        for publication in publications:
            key = publication.message.message_id
            if enter(key, publication) is publication:
                admitted.append(publication)
            else:
                publication.state = PublicationState.WAITING
                self._waiting.setdefault(key, deque()).append(publication)
        return admitted

    def holder(self, message_id: str) -> P | None:
        return self._admitted.get(message_id)

    def leave(self, publications: Iterable[P]) -> list[P]:
        """Free the ids of publications off the channel; admit and return the next of each."""
        holders, waiting = self._admitted, self._waiting
        admitted: list[P] = []
        for publication in publications:
            key = publication.message.message_id
            if key in waiting:
                holders[key] = following = waiting[key].popleft()
                following.state = PublicationState.READY
                admitted.append(following)
                if not waiting[key]:
                    del waiting[key]
            else:
                del holders[key]
        return admitted

    def withdraw(self, publication: P) -> bool:
        """Remove a publication that waits; return whether it did."""
        key = publication.message.message_id
        queue = self._waiting.get(key)
        if queue is None or publication not in queue:
            return False
        queue.remove(publication)
        if not queue:
            del self._waiting[key]
        return True
