"""Publisher confirms: the publishes that an ack or a nack of the broker settles.

In confirm mode both sides count the publishes on a channel, from 1. The broker confirms every publish exactly once, in
any order and at any time. It confirms a single publish or, with ``multiple``, all outstanding publishes up to and
including the tag. The count starts again on every new channel, so a tag means nothing without its channel generation.

Invariants of `ConfirmTracker`:

- Every item passed to `ConfirmTracker.published` is returned exactly once: by `ConfirmTracker.settle` or, in the order
  of publishing, by `ConfirmTracker.channel_lost`.
- A confirm that is unknown (beyond the last publish, with ``multiple`` too), repeated, or of another generation settles
  nothing, changes nothing, and is counted in ``stale``.
- Nothing is outstanding between `ConfirmTracker.channel_lost` and the next `ConfirmTracker.channel_opened`.

`SequencedItems` holds items under contiguous numbers, which are settled in any order. Its invariants:

- Numbers are assigned contiguously, from 1 on, and never twice.
- An item is removed once. A second removal of its number finds nothing.
- ``pop_through`` and ``clear`` follow the order of the numbers.
- Every operation is O(1) amortised per item, however many are held.
- Memory is proportional to the number of items held, however far apart the oldest and the newest number are.

The items are in a list indexed by number, 8 bytes each. Its settled front is cut off once it is half of the list. If
the list is mostly settled but its front is not (one publish whose queue has lost its majority, while a million others
are confirmed), the remaining items move to a dictionary. Each item is written once, cleared once and moved at most
twice on average.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

from reliable_mq.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

T = TypeVar("T")

_TIDY_EVERY = 1024  # slots
_SPARSE = 4  # slots per held item from which a dictionary is smaller


class SequencedItems(Generic[T]):
    """Items, none of them None, under contiguous numbers. Not thread-safe."""

    def __init__(self) -> None:
        self._slots: list[T | None] = []
        self._base = 1  # the number of _slots[0]
        self._head = 0  # no slot before this index holds an item
        self._held = 0  # items in _slots
        self._stragglers: OrderedDict[int, T] = OrderedDict()  # items with numbers below _base

    def __len__(self) -> int:
        return self._held + len(self._stragglers)

    @property
    def next_number(self) -> int:
        return self._base + len(self._slots)

    def extend(self, items: Iterable[T]) -> None:
        slots = self._slots
        before = len(slots)
        slots.extend(items)
        self._held += len(slots) - before
        if before // _TIDY_EVERY != len(slots) // _TIDY_EVERY:
            self._tidy()

    def pop(self, number: int) -> T | None:
        """Remove and return the item with this number, or None without one."""
        index = number - self._base
        slots = self._slots
        if index < 0:
            return self._stragglers.pop(number, None)
        if index >= len(slots):
            return None
        item = slots[index]
        if item is not None:
            slots[index] = None
            self._held -= 1
            if not self._held:
                self._restart()
        return item

    def pop_through(self, number: int) -> list[T]:
        """Remove and return all items up to and including ``number``, in order."""
        items: list[T] = []
        stragglers = self._stragglers
        while stragglers and next(iter(stragglers)) <= number:
            items.append(stragglers.popitem(last=False)[1])
        head = self._head
        end = min(number - self._base + 1, len(self._slots))
        if head < end:
            settled = [item for item in self._slots[head:end] if item is not None]
            self._slots[head:end] = [None] * (end - head)
            self._head = end
            self._held -= len(settled)
            if not self._held:
                self._restart()
            items += settled
        return items

    def all(self) -> list[T]:
        """Return all items, in order."""
        return [*self._stragglers.values(), *(item for item in self._slots[self._head :] if item is not None)]

    def clear(self) -> list[T]:
        """Remove and return all items, in order. The numbering continues."""
        return self.pop_through(self.next_number - 1)

    def _restart(self) -> None:
        """Drop all slots, none of which holds an item."""
        self._base += len(self._slots)
        self._head = 0
        self._slots.clear()

    def _tidy(self) -> None:
        """Shrink the list in proportion to its items, at least one."""
        slots = self._slots
        head = self._head
        while slots[head] is None:
            head += 1
        self._head = head
        if head * 2 >= len(slots):
            del slots[:head]
            self._base += head
            self._head = 0
        elif self._held * _SPARSE <= len(slots):
            for number, item in enumerate(slots, self._base):
                if item is not None:
                    self._stragglers[number] = item
            self._held = 0
            self._restart()


class ConfirmTracker(Generic[T]):
    """The outstanding publishes of one confirming channel at a time. Not thread-safe."""

    def __init__(self) -> None:
        self.generation: int | None = None  # the generation of the open channel
        self.stale = 0  # confirms that settled nothing, counted over all generations
        self.settled_through = 0  # the latest number of this channel that is settled
        self._items: SequencedItems[T] = SequencedItems()

    def __len__(self) -> int:
        """Return the number of outstanding publishes."""
        return len(self._items)

    @property
    def open(self) -> bool:
        return self.generation is not None

    @property
    def none_settled(self) -> bool:
        """Whether every publish on this channel is outstanding."""
        return len(self._items) == self._items.next_number - 1

    def channel_opened(self, generation: int) -> None:
        """Begin a new channel in confirm mode, whose sequence numbers start at 1.

        Raises:
            UsageError: If the previous channel was not reported lost.
        """
        if self.open:
            raise UsageError(f"channel {self.generation} is still open: report it lost before opening {generation}")
        self.generation = generation
        self.settled_through = 0
        self._items = SequencedItems()

    def published(self, items: Sequence[T]) -> int:
        """Record publishes, in order. Return the sequence number of the next publish.

        Raises:
            UsageError: If no channel is open.
        """
        if not self.open:
            raise UsageError("no channel is open: nothing can be published")
        self._items.extend(items)
        return self._items.next_number

    def settle(self, generation: int, tag: int, multiple: bool) -> list[T]:
        """Return the publishes settled by a confirm of ``tag``, in publish order.

        As the protocol defines, ``multiple`` with tag 0 means all outstanding publishes.
        """
        settled: list[T] = []
        if generation == self.generation:
            if not multiple:
                item = self._items.pop(tag)
                if item is not None:
                    settled.append(item)
            elif not tag:
                settled = self._items.clear()
                tag = self._items.next_number - 1
            elif tag < self._items.next_number:
                settled = self._items.pop_through(tag)
        if not settled:
            self.stale += 1
        elif tag > self.settled_through:
            self.settled_through = tag
        return settled

    @property
    def outstanding(self) -> list[T]:
        """The publishes that `channel_lost` would return."""
        return self._items.all()

    def channel_lost(self) -> list[T]:
        """Return the unsettled publishes of the lost channel, in publish order."""
        self.generation = None
        return self._items.clear()
