"""The tail of a stage: entries whose messages may not be acked.

A relay that dies between the confirm of an entry and the ack of its messages leaves these in stage and queue. So each
epoch of a relay (the time from one channel to its loss) begins by reading the end of each partition of the stage. The
mark of every entry says where to begin: its ``low`` is an offset below which everything was settled when the entry was
made.

An epoch first publishes a marker. Once the marker is confirmed, all entries of an earlier epoch are before it, and none
can follow: the channel of that epoch is gone, or this relay could not have become the active one. The ``low`` of this
marker is unknown. So the mark before it counts, and if that is also such a marker, the one before it. A relay that
closes publishes another marker, with its ``low``, so that the next epoch reads no entries that are settled by then.

`Moved` finds messages that a quorum queue delivers again while the channel lives. Its leader takes all deliveries of a
channel back when it loses the link to the channel's node, ignores later acks of them, and delivers the messages again
when the link is back. They are the unacked ones, and the latest acked ones, whose acks came too late: at most as many
as the prefetch.

`Settled` computes ``low``. It is the ``low`` of the tail until all messages of earlier epochs are accounted for, by
acks that are old enough. After that, it is one more than the offset of the marker, plus one for each entry whose
messages were acked long enough ago. Other programs may publish into a partition, which only increases offsets, so
``low`` is never too high. An ack has no answer. A queue may lose an ack with its channel, and a classic queue forgets
acks of its last second or more when its broker is killed.

Invariants:

- Every unsettled entry of an earlier epoch lies between ``low`` and the marker.
- ``low`` never decreases within an epoch.
- Memory is bounded by the number of unsettled messages, and of acked ones that `Moved` keeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, Literal

from reliable_mq.core.stage.envelope import Mark

SETTLED_AFTER: Final = 10.0
"""Seconds after which an ack counts as certain: twice what a classic queue was seen to forget."""

_BACK: Final = 64  # how many offsets before the marker to begin if the last chunk has no mark
_FURTHER: Final = 16  # the factor by which that grows with each further read
_HISTORY: Final = 0.25  # the minimum seconds between two entries


class Tail:
    """The tail of one partition, which takes one or several reads.

    Args:
        epoch: The epoch of the present relay, whose marker ends a read.

    Attributes:
        start: Where the next read begins: an offset, or ``"last"`` for the last chunk. None once the tail is read.
        low: The lowest offset that may be unsettled, once the tail is read.
        marker: The offset of the marker, once the tail is read.
        identities: The identities of the messages in the entries between ``low`` and the marker, in order, once the
            tail is read. Messages without an id have none.
        is_empty: Whether the partition never had an entry as far as is known, once the tail is read.
    """

    def __init__(self, epoch: bytes) -> None:
        self.start: int | Literal["last"] | None = "last"
        self.low = 0
        self.marker = 0
        self.identities: list[bytes] = []
        self.is_empty = False
        self._epoch = epoch
        self._back = _BACK
        self._last = False  # whether this read is the last one
        self._before: int | None = None  # the first offset of the previous read, if that began at an offset
        self._begin_read()

    def _begin_read(self) -> None:
        self._first: int | None = None  # the first offset of this read
        self._known: int | None = None  # the latest known low
        self._entries: list[tuple[int, Sequence[bytes]]] = []

    def read(self, offset: int, mark: Mark | None, identities: Sequence[bytes] = ()) -> bool:
        """Process the next message of a read. Return whether the read is over.

        ``mark`` is None for a message that is no entry.
        """
        if self._first is None:
            self._first = offset
        if mark is not None and mark.is_marker and mark.epoch == self._epoch:
            self.marker = offset
            self._next(self._first)
            return True
        if mark is not None:
            if mark.low >= 0:
                self._known = mark.low
            if not mark.is_marker:
                self._entries.append((offset, identities))
        return False

    def _next(self, first: int) -> None:
        start, known = self.start, self._known
        # A read may begin later than requested: at a gap, or where retention has cut the stream. It is a cut if the
        # next read, which goes further back, begins at the same offset.
        cut = isinstance(start, int) and start < first == self._before
        complete = start == 0 or first == 0 or self._last or cut
        self._before = first if isinstance(start, int) else None
        if known is None and not complete:
            self.start = max(self.marker - self._back, 0)
            self._back *= _FURTHER
        elif known is not None and known < first and not complete:
            self.start, self._last = known, True
        else:
            self.low = known or 0
            self.is_empty = not self.low and not self._entries
            self.identities = [each for offset, found in self._entries if offset >= self.low for each in found]
            self.start = None
        self._begin_read()


class Settled:
    """The computation of ``low`` for one partition in one epoch."""

    def __init__(self, low: int, marker: int) -> None:
        self._low = low
        self._marker = marker
        self._published = 0
        self._prefix = 0  # entries at the beginning whose messages are acked
        self._ahead: set[int] = set()
        self._certain = 0
        self._history: deque[tuple[float, float, int]] = deque()  # first time, last time, and the prefix at the last

    def published(self) -> int:
        """Count an entry. Return its number, from 1."""
        self._published += 1
        return self._published

    def acked(self, number: int, now: float) -> None:
        if number != self._prefix + 1:
            self._ahead.add(number)
            return
        self._prefix += 1
        while self._ahead and self._prefix + 1 in self._ahead:
            self._prefix += 1
            self._ahead.remove(self._prefix)
        history = self._history
        if not history or now - history[-1][0] >= _HISTORY:
            history.append((now, now, self._prefix))
        else:
            history[-1] = (history[-1][0], now, self._prefix)

    def low(self, now: float, *, resolved: bool) -> int:
        """Return the offset below which everything is settled.

        ``resolved`` means that no message of the tail can be delivered any more.
        """
        history = self._history
        while history and now - history[0][1] >= SETTLED_AFTER:
            self._certain = history.popleft()[2]
        return self._marker + 1 + self._certain if resolved else self._low

    def unsettled(self, now: float, *, resolved: bool) -> int:
        """Return the number of entries from ``low`` to the last one."""
        return self._marker + 1 + self._published - self.low(now, resolved=resolved)


class Moved:
    """The messages that one epoch has moved and may receive again.

    A message is known by a ``key``, which equal messages share. They are told apart by how often the queue has returned
    them before: a message that comes again has been returned once more.

    Args:
        kept: The number of acked messages to keep, the latest ones.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._known: dict[int, tuple[int, int]] = {}  # by key: how many, and the fewest returns of any
        self._acked: deque[int] = deque()

    def add(self, key: int, returns: int) -> None:
        number, fewest = self._known.get(key, (0, returns))
        self._known[key] = (number + 1, min(fewest, returns))

    def acked(self, key: int) -> None:
        """Record the ack of a message. The oldest one beyond the limit is forgotten."""
        self._acked.append(key)
        if len(self._acked) <= self._kept:
            return
        oldest = self._acked.popleft()
        number, fewest = self._known.pop(oldest)
        if number > 1:
            self._known[oldest] = (number - 1, fewest)

    def has(self, key: int, returns: int) -> bool:
        """Return whether the message was moved before it was returned so often."""
        known = self._known.get(key)
        return known is not None and known[1] < returns
