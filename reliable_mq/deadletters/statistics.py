"""What is in a dead-letter queue, counted: by cause, by the queue of origin, by age."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from reliable_mq.deadletters.message import DeadMessage

__all__ = ["AGES", "Statistics"]

_AGES: Final = (
    ("up to a minute", timedelta(minutes=1)),
    ("up to an hour", timedelta(hours=1)),
    ("up to a day", timedelta(days=1)),
    ("up to a week", timedelta(weeks=1)),
)
_OLDER: Final = "older"
_UNKNOWN: Final = "unknown"

#: The ages that are told apart, the youngest first.
AGES: Final = (*(name for name, _ in _AGES), _OLDER, _UNKNOWN)


class Statistics:
    """Counts of dead letters. Not thread-safe.

    Attributes:
        messages: how many.
        bytes: of their bodies.
        by_cause: by the class of the exception or, where there is none, by the reason.
        by_queue: by the queue they were in before; the empty name where nobody said.
        by_age: by the names of `AGES`.
        oldest, newest: when the first and the last of them died, of those of which it is known.
    """

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0
        self.by_cause: Counter[str] = Counter()
        self.by_queue: Counter[str] = Counter()
        self.by_age: Counter[str] = Counter()
        self.oldest: datetime | None = None
        self.newest: datetime | None = None

    def add(self, message: DeadMessage, now: datetime) -> None:
        """Count one; `now` is aware."""
        self.messages += 1
        self.bytes += len(message.body)
        self.by_cause[message.cause] += 1
        self.by_queue["" if message.origin is None else message.origin.queue] += 1
        died_at = message.died_at
        self.by_age[_age(died_at, now)] += 1
        if died_at is not None:
            self.oldest = died_at if self.oldest is None else min(self.oldest, died_at)
            self.newest = died_at if self.newest is None else max(self.newest, died_at)

    def __repr__(self) -> str:
        return f"<Statistics of {self.messages} dead letters>"


def _age(died_at: datetime | None, now: datetime) -> str:
    if died_at is None:
        return _UNKNOWN
    return next((name for name, longest in _AGES if now - died_at <= longest), _OLDER)
