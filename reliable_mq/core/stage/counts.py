"""Counts of a queue: whether it is empty, and who else consumes it. No I/O.

AMQP shows how many messages of a queue are ready, and how many consumers it has; not which messages are unacked, nor
whether one consumer at a time is active. That one is another than the relay, or becomes so when the relay changes its
subscription, so a warning of other consumers holds there, too. A quorum queue counts a cancelled consumer until its
deliveries are acked, and of those of which one at a time is active that one alone.

Invariants: a queue is empty only by two counts in a row, between which nothing was delivered; other consumers are
warned of once, until they are gone, and by two counts in a row: one that has just gone may be counted once.
"""

from __future__ import annotations

from typing import Final

__all__ = ["QueueCounts"]

_IN_A_ROW: Final = 2


class QueueCounts:
    """The counts of one queue. Not thread-safe.

    ``moved`` is a number of messages since the relay began.

    Attributes:
        ready: messages, by the last count; None before.
    """

    def __init__(self) -> None:
        self.ready: int | None = None
        self._ready_before = 0  # when the channel was set up
        self._moved_before = 0  # when the relay became active
        self._empty = 0  # in a row
        self._delivered = 0
        self._delivered_before = 0  # at the last count
        self._own_until = 0  # moved messages before which cancelled consumers of the relay may be counted
        self._crowded = 0  # in a row
        self._warned = False

    def set_up(self, ready: int) -> None:
        """Note the count when a channel is set up."""
        self.ready = self._ready_before = ready

    def activated(self, moved: int) -> None:
        """Note that the relay became active."""
        self._moved_before = moved
        self._empty = 0

    def delivered(self, number: int) -> None:
        self._delivered += number

    def subscribed(self, moved: int, outstanding: int) -> None:
        """Note another subscription; the earlier ones end with what is outstanding."""
        self._own_until = moved + outstanding

    def counted(self, ready: int, outstanding: int) -> None:
        """Take in the messages of a count."""
        empty = not ready and not outstanding and self._delivered == self._delivered_before
        self._delivered_before = self._delivered
        self._empty = self._empty + 1 if empty else 0
        self.ready = ready

    def others(self, consumers: int, moved: int, *, subscribed: bool) -> int:
        """Take in the consumers of a count; return how many others to warn of.

        ``subscribed`` says that the relay is one of them, and changes nothing.
        """
        if not subscribed or moved < self._own_until:
            self._crowded = 0
            return 0
        if consumers <= 1:
            self._crowded, self._warned = 0, False
            return 0
        self._crowded += 1
        if self._crowded < _IN_A_ROW or self._warned:
            return 0
        self._warned = True
        return consumers - 1

    @property
    def drained(self) -> bool:
        """Whether the queue had no message, ready or unacked."""
        return self._empty >= _IN_A_ROW

    def has_moved(self, moved: int) -> bool:
        """Whether messages that were ready when the relay became active are moved.

        Others may have taken some: so the queue may be empty, too.
        """
        return self.drained or moved - self._moved_before >= self._ready_before
