"""The tail of a stage: copies whose originals may not be acked.

A relay that dies between the confirm of a copy and the ack of its original leaves the message in both. So each epoch of
a relay (the time from one channel to its loss) begins by reading the end of each partition of the stage. Where to
begin is in the mark of every copy: ``low``, an offset below which everything was settled when the copy was made.

An epoch publishes a marker first. Once it is confirmed, everything that an earlier epoch had published is before it,
and nothing of that comes later: the channel of that epoch is gone, or the relay could not have become the active one.
The marker's own ``low`` is unknown; so the mark before it counts, and where that is a marker, too, the one before.

`Settled` computes ``low``: until the copies of earlier epochs are all accounted for, by acks that are old enough, that
of the tail; then one more than the offset of the marker, and one more for each copy whose original was acked long
enough ago. Others may publish into a partition, which makes offsets greater, so that ``low`` is never too high. An ack
has no answer: a queue may lose one with its channel, and a classic queue forgets acks of its last second or more when
its broker is killed.

Invariants: every copy of an earlier epoch that is not settled lies between ``low`` and the marker; ``low`` never falls
within an epoch; memory is bounded by the copies that are not settled.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Literal

from reliable_mq.core.stage.envelope import Mark

__all__ = ["SETTLED_AFTER", "Settled", "Tail"]

SETTLED_AFTER: Final = 10.0
"""Seconds after which an ack counts as certain: twice what a classic queue was seen to forget."""

_BACK: Final = 64  # offsets before the marker that are looked at first, where no mark is in its chunk
_FURTHER: Final = 16
_HISTORY: Final = 0.25  # seconds between two entries, at least


class Tail:
    """Read the tail of one partition, in one or several reads.

    Args:
        epoch: of the present relay, whose marker ends a read.

    Attributes:
        start: where the next read begins: an offset, or ``"last"`` for the last chunk; None once all is read.
        low: the lowest offset that may not be settled; once all is read.
        marker: the offset of the marker; likewise.
        identities: of the copies between them, in order; likewise. None for one that cannot be recognised.
    """

    def __init__(self, epoch: bytes) -> None:
        self.start: int | Literal["last"] | None = "last"
        self.low = 0
        self.marker = 0
        self.identities: list[bytes | None] = []
        self._epoch = epoch
        self._back = _BACK
        self._last = False  # whether this read is the last one
        self._before: int | None = None  # first offset of the read before, if that began at an offset
        self._begin_read()

    def _begin_read(self) -> None:
        self._first: int | None = None  # offset of this read
        self._known: int | None = None  # the latest low
        self._copies: list[tuple[int, bytes | None]] = []

    def read(self, offset: int, mark: Mark | None, identity: bytes | None) -> bool:
        """Take in the next message of a read; return whether the read is over.

        There is no mark if it is not ours, and no identity, either, of a message without an id.
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
                self._copies.append((offset, identity))
        return False

    def _next(self, first: int) -> None:
        start, known = self.start, self._known
        # A read may begin later than asked for: at a gap, or where retention has cut. It is a cut if the next read,
        # which looks further back, begins there, too.
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
            self.identities = [identity for offset, identity in self._copies if offset >= self.low]
            self.start = None
        self._begin_read()


class Settled:
    """Compute ``low`` for one partition in one epoch."""

    def __init__(self, low: int, marker: int) -> None:
        self._low = low
        self._marker = marker
        self._published = 0
        self._prefix = 0  # copies at the beginning whose originals are acked
        self._ahead: set[int] = set()
        self._certain = 0
        self._history: deque[tuple[float, float, int]] = deque()  # from when, until when, and the prefix by then

    def published(self) -> int:
        """Count a copy; return its number, from 1."""
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

        ``resolved`` says that nothing of the tail can come any more.
        """
        history = self._history
        while history and now - history[0][1] >= SETTLED_AFTER:
            self._certain = history.popleft()[2]
        return self._marker + 1 + self._certain if resolved else self._low
