"""What is in an outbox, and what a publisher with one has counted: plain numbers that others may read at any moment."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OutboxStatistics", "OutboxStatus"]


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """What is in an outbox.

    Attributes:
        rows: messages that wait to be published, those that are just being published included.
        delayed: of these, the ones that were not confirmed and wait for another attempt.
        held: of these, the ones that wait behind a row of their ordering key that is set aside or not readable.
        set_aside: messages that will not be published until somebody decides.
        unreadable: rows of a newer format, for a relay of a newer version.
        oldest_age: seconds since the oldest message that waits was stored; 0 where none waits. By the wall clock.
    """

    rows: int
    delayed: int = 0
    held: int = 0
    set_aside: int = 0
    unreadable: int = 0
    oldest_age: float = 0.0

    def after(self, elapsed: float) -> OutboxStatus:
        """Say the same of ``elapsed`` seconds later, as far as is known: what waits has grown older."""
        if not self.rows:
            return self
        age = self.oldest_age + elapsed
        return OutboxStatus(self.rows, self.delayed, self.held, self.set_aside, self.unreadable, age)


@dataclass(slots=True)
class OutboxStatistics:
    """Counts of one publisher with an outbox; they only grow.

    Attributes:
        stored: messages made durable.
        not_stored: messages that could not be, as far as is known.
        confirmed, delayed, set_aside: rows of its relay, by what became of each attempt.
        interruptions: times that its relay had to pause: nothing can be published, or the outbox does not answer.
    """

    stored: int = 0
    not_stored: int = 0
    confirmed: int = 0
    delayed: int = 0
    set_aside: int = 0
    interruptions: int = 0
