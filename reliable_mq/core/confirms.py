"""Publisher confirms: which publish does a ``basic.ack`` or ``basic.nack`` from the broker settle?

In confirm mode both sides count the publishes on a channel, from 1. The broker answers every publish exactly once, in
any order and at any time, singly or with ``multiple``: everything outstanding up to and including the tag. The count
starts again on every new channel, so a tag means nothing without the generation of its channel.

Invariants:

- every item handed to :meth:`ConfirmTracker.published` comes back exactly once: from :meth:`~ConfirmTracker.settle` or,
  in the order of publishing, from :meth:`~ConfirmTracker.channel_lost`;
- a confirm that is unknown (beyond the last publish, with ``multiple`` too), repeated, or of another generation settles
  nothing, changes nothing, and is counted in ``stale``;
- nothing is outstanding between :meth:`~ConfirmTracker.channel_lost` and the next
  :meth:`~ConfirmTracker.channel_opened`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from reliable_mq.core.ledger import Ledger
from reliable_mq.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ConfirmTracker"]

T = TypeVar("T")


class ConfirmTracker(Generic[T]):
    """The outstanding publishes of one confirming channel at a time. Not thread-safe.

    Attributes:
        generation: of the channel that is open; None while none is.
        stale: confirms that settled nothing, counted over all generations.
    """

    __slots__ = ("_ledger", "generation", "stale")

    def __init__(self) -> None:
        self.generation: int | None = None
        self.stale = 0
        self._ledger: Ledger[T] = Ledger()

    def __len__(self) -> int:
        """How many publishes are outstanding."""
        return len(self._ledger)

    @property
    def open(self) -> bool:
        """Whether a channel is open."""
        return self.generation is not None

    @property
    def none_settled(self) -> bool:
        """Whether everything that was published on this channel is outstanding."""
        return len(self._ledger) == self._ledger.next_number - 1

    def channel_opened(self, generation: int) -> None:
        """A new channel is in confirm mode; its sequence numbers start at 1.

        Raises:
            UsageError: the previous channel was not reported lost.
        """
        if self.open:
            raise UsageError(f"channel {self.generation} is still open: report it lost before opening {generation}")
        self.generation = generation
        self._ledger = Ledger()

    def published(self, items: Sequence[T]) -> int:
        """``items`` are published now, in this order. Returns the sequence number that the next publish will have.

        Raises:
            UsageError: no channel is open.
        """
        if not self.open:
            raise UsageError("no channel is open: nothing can be published")
        self._ledger.extend(items)
        return self._ledger.next_number

    def settle(self, generation: int, tag: int, multiple: bool) -> list[T]:
        """The broker confirmed ``tag``, positively or negatively. Returns what that settles, in publish order.

        ``multiple`` with tag 0 means everything outstanding, as the protocol has it.
        """
        settled: list[T] = []
        if generation == self.generation:
            if not multiple:
                item = self._ledger.pop(tag)
                if item is not None:
                    settled.append(item)
            elif not tag:
                settled = self._ledger.clear()
            elif tag < self._ledger.next_number:
                settled = self._ledger.pop_through(tag)
        if not settled:
            self.stale += 1
        return settled

    def numbers(self, generation: int, tag: int, multiple: bool) -> list[int]:
        """The sequence numbers of what `settle` would return for the same confirm, in its order."""
        if generation != self.generation:
            return []
        if not multiple:
            return [tag] if self._ledger.holds(tag) else []
        last = tag or self._ledger.next_number - 1
        return self._ledger.numbers_through(last) if last < self._ledger.next_number else []

    @property
    def outstanding_numbers(self) -> list[int]:
        """The sequence numbers of what `channel_lost` would return, in its order."""
        return self._ledger.numbers_through(self._ledger.next_number - 1)

    def channel_lost(self) -> list[T]:
        """The channel is gone. Returns everything unsettled, in publish order: its outcome is unknown."""
        self.generation = None
        return self._ledger.clear()
