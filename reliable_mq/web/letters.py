"""The dead letters of a queue as they were read once, to filter, group and show.

RabbitMQ has no query for messages: to see them is to take and to requeue them, which marks them as redelivered, hides
them from others meanwhile, and on some queues counts against a delivery limit. So a queue is read once, like
``dlq list`` does, and all pages about it are made of that, until somebody reads it again.

Invariants:

- A reading holds `MOST` letters at most, and of their contents `KEPT_BYTES` at most. Beyond that, the content of a
  letter is read from the queue when somebody looks at it.
- Once it is complete, any thread may read it. Nothing changes but the content of one letter that is kept, too.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from reliable_mq.core.consumer.attempts import printable
from reliable_mq.deadletters import DeadMessage, Filter, Origin
from reliable_mq.web.address import encoded, exception_pattern

if TYPE_CHECKING:
    from reliable_mq.core.consumer.delivery import Delivery

__all__ = ["KEPT_BYTES", "MOST", "Letter", "LetterGroup", "QueueReading"]

#: Letters that a reading holds.
MOST: Final = 200_000
#: Bytes of properties and bodies that a reading holds.
KEPT_BYTES: Final = 64 * 1024 * 1024
_KEPT_EACH: Final = 1024 * 1024  # bytes: the content of a larger one is not kept
_NOTE: Final = 300  # characters of the exception's message


class Letter:
    """A dead letter in a list.

    Attributes that `DeadMessage` has, too, are the same there.

    Attributes:
        size: bytes of its body.
        note: the beginning of the exception's message.
    """

    __slots__ = (
        "_delivery",
        "_origin",
        "attempts",
        "died_at",
        "exception_type",
        "fingerprint",
        "message_id",
        "note",
        "position",
        "reason",
        "size",
        "unreadable",
    )

    def __init__(self, message: DeadMessage, *, keep: bool) -> None:
        self.position = message.position
        self.fingerprint = message.fingerprint
        self.message_id = message.message_id
        self.exception_type = sys.intern(message.exception_type)
        self.reason = sys.intern(message.reason)
        self.note = sys.intern(printable(message.exception_message, _NOTE))
        self.unreadable = message.unreadable
        self.died_at = message.died_at
        self.attempts = message.attempts
        self.size = len(message.body)
        self._origin = None if message.origin is None else sys.intern(message.origin.queue)
        self._delivery: Delivery | None = message.delivery if keep else None

    @property
    def origin(self) -> Origin | None:
        """The queue that it was in before it died."""
        return None if self._origin is None else Origin(self._origin)

    @property
    def headers(self) -> Mapping[str, object]:
        """Its headers; none if its content is not kept."""
        message = self.message()
        return {} if message is None else message.headers

    def message(self) -> DeadMessage | None:
        """Return it in full; None if its content is not kept."""
        return None if self._delivery is None else DeadMessage(self._delivery, self.position)

    def keep(self, message: DeadMessage) -> None:
        """Keep its content."""
        self._delivery = message.delivery

    def drop(self) -> None:
        """Keep its content no longer."""
        self._delivery = None


@dataclass(frozen=True, slots=True)
class LetterGroup:
    """Letters with one exception and one reason.

    Attributes:
        exception: the class; empty without one.
        reason: as it is in the letters.
        count: how many.
        oldest, newest: when the first and the last of them died, as far as known.
    """

    exception: str
    reason: str
    count: int
    oldest: datetime | None
    newest: datetime | None

    @property
    def query(self) -> str:
        """The filter that selects them, as a part of an address."""
        pairs = [("exception", exception_pattern(self.exception)), ("reason", self.reason)]
        return encoded((name, value) for name, value in pairs if value)


class QueueReading:
    """One reading of a queue.

    Args:
        queue: its name.

    Attributes:
        queue: its name.
        letters: in the order of the queue.
        total: messages in the queue when it was read, those beyond `MOST` included.
        not_kept: how many letters' content is not kept.
        read_at: when it began.
    """

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.letters: list[Letter] = []
        self.total = 0
        self.not_kept = 0
        self.read_at = datetime.now(UTC)
        self._kept = 0
        self._extra: Letter | None = None
        self._by_fingerprint: dict[str, Letter] = {}

    def add(self, message: DeadMessage) -> None:
        """Add the next letter, while it is read."""
        size = len(message.properties) + len(message.body)
        keep = size <= _KEPT_EACH and self._kept + size <= KEPT_BYTES
        self._kept += size if keep else 0
        self.not_kept += not keep
        letter = Letter(message, keep=keep)
        self.letters.append(letter)
        self._by_fingerprint.setdefault(letter.fingerprint, letter)
        self.total = max(self.total, len(self.letters))

    def find(self, fingerprint: str) -> Letter | None:
        """Return the letter with this fingerprint; None if there is none."""
        return self._by_fingerprint.get(fingerprint)

    def keep(self, message: DeadMessage) -> None:
        """Keep the content of one letter that was read again, in place of the one before."""
        letter = self.find(message.fingerprint)
        if letter is not None:
            if self._extra is not None and self._extra is not letter:
                self._extra.drop()
            self._extra = letter
            letter.keep(message)

    def matching(self, chosen: Filter, now: datetime) -> Sequence[Letter]:
        """Return the letters that match; `now` is aware."""
        if chosen.everything:
            return self.letters
        if chosen.fingerprints and len(chosen.fingerprints) < len(self.letters):
            found = (self._by_fingerprint.get(each) for each in chosen.fingerprints)
            there = sorted((letter for letter in found if letter is not None), key=lambda letter: letter.position)
            return [letter for letter in there if chosen.matches(letter, now)]
        return [letter for letter in self.letters if chosen.matches(letter, now)]

    def groups(self, letters: Sequence[Letter]) -> list[LetterGroup]:
        """Count letters by exception and reason, the largest group first."""
        counts: Counter[tuple[str, str]] = Counter()
        oldest: dict[tuple[str, str], datetime] = {}
        newest: dict[tuple[str, str], datetime] = {}
        for letter in letters:
            key = (letter.exception_type, letter.reason)
            counts[key] += 1
            when = letter.died_at
            if when is not None:
                if key not in oldest or when < oldest[key]:
                    oldest[key] = when
                if key not in newest or when > newest[key]:
                    newest[key] = when
        return [LetterGroup(*key, count, oldest.get(key), newest.get(key)) for key, count in counts.most_common()]

    @property
    def oldest(self) -> datetime | None:
        """When the first of them died, as far as known."""
        return min((letter.died_at for letter in self.letters if letter.died_at is not None), default=None)
