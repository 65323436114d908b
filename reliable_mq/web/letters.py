"""The queues of a page and their dead letters, to filter, group and show.

RabbitMQ cannot query messages. A client must take and requeue them to read them. That marks them as redelivered, hides
them from other consumers meanwhile, and on some queues counts against a delivery limit. Therefore, a queue is read
once, as ``dlq list`` does. All pages about the queue use this reading until a user reads the queue again.

Invariants:

- A reading holds at most `MOST` letters, and at most `KEPT_BYTES` of their content. Content beyond this limit is read
  from the queue again when a user opens the letter.
- The texts by which letters are listed and grouped are bounded, because a publisher may forge them. Those of this
  package are shorter.
- Any thread may use a complete reading. The only later change is the content of one letter that was read again.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from reliable_mq.core.consumer.attempts import MESSAGE_LIMIT, printable
from reliable_mq.deadletters import DeadLetterQueue, DeadMessage, Filter, Origin
from reliable_mq.deadletters.queue import depths
from reliable_mq.errors import ConfigurationError, ReliableMQError
from reliable_mq.topology import Queue
from reliable_mq.url import parse_url
from reliable_mq.web.address import group_of

if TYPE_CHECKING:
    from reliable_mq.core.consumer.delivery import Delivery
    from reliable_mq.settings import Credentials, CredentialsCallback
    from reliable_mq.tls import TLSOptions

#: The maximum number of letters in a reading.
MOST: Final = 200_000
#: The maximum total size of properties and bodies in a reading, in bytes.
KEPT_BYTES: Final = 64 * 1024 * 1024
_KEPT_EACH: Final = 1024 * 1024  # bytes: larger content is not kept
_DEPTHS_KEPT: Final = 2.0  # seconds
_NAMES_KEPT: Final = 15.0  # seconds
_REMEMBERED: Final = 50  # queues that were opened by name
_NOTE: Final = 300  # characters of the exception's message


class Source:
    """The queues of a page: their names, depths, and a `DeadLetterQueue` for each.

    Thread-safe. Names and depths are cached for a few seconds, since every open page requests them. The arguments are
    those of `DeadLetterApp`. A function that returns names may raise `ReliableMQError`.

    Raises:
        ConfigurationError: If an argument is invalid. The message names the argument.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        queues: Sequence[Queue | str] | Callable[[], Sequence[str]],
        *,
        any_queue: bool,
        credentials: Credentials | CredentialsCallback | None,
        tls: TLSOptions | None,
    ) -> None:
        self._settings = parse_url(url, tls=tls, credentials=credentials)
        self.broker = str(self._settings)
        self._url = url
        self._credentials = credentials
        self._tls = tls
        self._find = queues if callable(queues) else None
        self._lock = threading.Lock()
        self._names: list[str] = [] if callable(queues) else [_name(queue) for queue in queues]
        self._names_until = 0.0
        self._searching = threading.Lock()
        self._found = False  # whether a search has succeeded
        self._error: Exception | None = None  # of the last search
        self._opened: dict[str, None] = {}
        self._depths: dict[str, int | None] = {}
        self._depths_until = 0.0
        self.any_queue = any_queue
        if not any_queue and not callable(queues) and not self._names:
            raise ConfigurationError("queues must name at least one, or any_queue=True let users name them")

    def open(self, queue: str) -> DeadLetterQueue:
        """Return a dead-letter queue that is not connected."""
        return DeadLetterQueue(self._url, queue, credentials=self._credentials, tls=self._tls)

    def named(self, given: str) -> str:
        """Return a name unchanged if a queue has it, else without surrounding spaces.

        May block to search for queues.
        """
        stripped = given.strip()
        return stripped if stripped == given or given not in self.names() else given

    def allows(self, queue: str) -> bool:
        """Return whether the page may open a queue. May block to search for queues.

        Raises the error of the search if none has succeeded: the queue may be one of the page's.
        """
        if not queue or self.any_queue or queue in self.names():
            return bool(queue)
        if self._error is not None and not self._found:
            raise self._error.with_traceback(None)
        return False

    def remember(self, queue: str) -> None:
        """Add a queue that was opened by name to the list, if users may name queues."""
        if not self.any_queue:
            return
        with self._lock:
            self._opened[queue] = None
            while len(self._opened) > _REMEMBERED:
                del self._opened[next(iter(self._opened))]

    def names(self) -> list[str]:
        """Return the names of the queues, each once. May block to search for queues.

        During a search, others get the names of the previous one. Until a search has succeeded, they wait for it.
        """
        if self._find is not None and self._searching.acquire(blocking=not self._found):
            try:
                if time.monotonic() >= self._names_until:
                    self._search(self._find)
            finally:
                self._searching.release()
        with self._lock:
            return [*dict.fromkeys([*self._names, *self._opened])]

    def depths(self) -> dict[str, int | None]:
        """Return the number of ready messages of each queue, None for a missing queue.

        Blocks to connect to the broker, unless the depths are cached.

        Raises:
            BrokerUnavailable: If no host can be reached or no host accepts the login.
        """
        names = self.names()
        with self._lock:
            if time.monotonic() < self._depths_until and self._depths.keys() >= set(names):
                return {name: self._depths[name] for name in names}
        found = depths(self._settings, names)
        with self._lock:
            self._depths, self._depths_until = found, time.monotonic() + _DEPTHS_KEPT
        return found

    @property
    def problem(self) -> str:
        """The error of the last search for queues, shown above the list."""
        error = self._error
        return "" if error is None else str(error)

    def changed(self) -> None:
        """Discard the cached depths, because a queue has changed."""
        with self._lock:
            self._depths_until = 0.0

    def _search(self, find: Callable[[], Sequence[str]]) -> None:
        try:
            names = sorted(find())
        except Exception as error:
            self._error = error
            if not isinstance(error, ReliableMQError):
                raise
        else:
            with self._lock:
                self._names, self._error, self._found = names, None, True
        finally:
            self._names_until = time.monotonic() + _NAMES_KEPT


def _name(queue: Queue | str) -> str:
    name = queue.dead_letter_name if isinstance(queue, Queue) else queue
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"queues must hold names, or queues that have a dead-letter queue, not {queue!r}")
    return name


class Letter:
    """A dead letter in a list.

    Attributes with the same name as in `DeadMessage` have the same value; of a text, its beginning.

    Args:
        keep: Whether to keep the content.
        shared: A function that returns the same object for equal texts, which save memory then.

    Attributes:
        size: The size of the body, in bytes.
        note: The beginning of the exception's message.
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

    def __init__(self, message: DeadMessage, *, keep: bool, shared: Callable[[str], str]) -> None:
        self.position = message.position
        self.fingerprint = message.fingerprint
        self.message_id = message.message_id
        self.exception_type = shared(message.exception_type[:MESSAGE_LIMIT])
        self.reason = shared(message.reason[:MESSAGE_LIMIT])
        self.note = shared(printable(message.exception_message, _NOTE))
        self.unreadable = message.unreadable
        self.died_at = message.died_at
        self.attempts = message.attempts
        self.size = len(message.body)
        self._origin = None if message.origin is None else shared(message.origin.queue[:MESSAGE_LIMIT])
        self._delivery: Delivery | None = message.delivery if keep else None

    @property
    def origin(self) -> Origin | None:
        """The queue that the letter was in before it died."""
        return None if self._origin is None else Origin(self._origin)

    @property
    def headers(self) -> Mapping[str, object]:
        """The letter's headers, empty if its content is not kept."""
        message = self.message()
        return {} if message is None else message.headers

    def message(self) -> DeadMessage | None:
        """Return the complete message, or None if its content is not kept."""
        return None if self._delivery is None else DeadMessage(self._delivery, self.position)

    def keep(self, message: DeadMessage) -> None:
        self._delivery = message.delivery

    def drop(self) -> None:
        self._delivery = None


@dataclass(frozen=True, slots=True)
class LetterGroup:
    """The letters that share one exception and one reason.

    `exception` is empty for letters without an exception, `reason` if it is unknown. `oldest` and `newest` are
    the times at which the first and the last letter died, or None if no such time is known.
    """

    exception: str
    reason: str
    count: int
    oldest: datetime | None
    newest: datetime | None


@dataclass(frozen=True, slots=True)
class QueueSummary:
    """A row in the list of queues: the oldest letter and the largest group."""

    oldest: datetime | None
    largest: LetterGroup


class QueueReading:
    """One reading of a queue, with its letters in queue order.

    `total` is the number of messages in the queue when it was read, including those beyond `MOST`.
    """

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.letters: list[Letter] = []
        self.total = 0
        self.not_kept = 0
        self.read_at = datetime.now(UTC)
        self._kept = 0
        self._texts: dict[str, str] = {}  # not interned: some versions of Python never free such texts
        self._extra: Letter | None = None
        self._by_fingerprint: dict[str, Letter] = {}  # of letters that are equal in every byte, the first

    def add(self, message: DeadMessage) -> None:
        """Add the next letter. Called only during the reading."""
        size = len(message.properties) + len(message.body)
        keep = size <= _KEPT_EACH and self._kept + size <= KEPT_BYTES
        self._kept += size if keep else 0
        self.not_kept += not keep
        letter = Letter(message, keep=keep, shared=self._shared)
        self.letters.append(letter)
        self._by_fingerprint.setdefault(letter.fingerprint, letter)
        self.total = max(self.total, len(self.letters))

    def find(self, fingerprint: str) -> Letter | None:
        """Return the first letter with a fingerprint, or None if there is none."""
        return self._by_fingerprint.get(fingerprint)

    def keep(self, message: DeadMessage) -> None:
        """Keep the content of a letter that was read again, in place of the previous one."""
        letter = self.find(message.fingerprint)
        if letter is not None:
            if self._extra is not None and self._extra is not letter:
                self._extra.drop()
            self._extra = letter
            letter.keep(message)

    def matching(self, chosen: Filter, now: datetime) -> Sequence[Letter]:
        """Return the letters that match a filter. `now` must be timezone-aware."""
        if chosen.everything:
            return self.letters
        return [letter for letter in self.letters if chosen.matches(letter, now)]

    def groups(self, letters: Sequence[Letter]) -> list[LetterGroup]:
        """Group letters by exception and reason, the largest group first."""
        counts: Counter[tuple[str, str]] = Counter()
        oldest: dict[tuple[str, str], datetime] = {}
        newest: dict[tuple[str, str], datetime] = {}
        for letter in letters:
            key = group_of(letter)
            counts[key] += 1
            if letter.died_at is not None:
                oldest[key] = min(letter.died_at, oldest.get(key, letter.died_at))
                newest[key] = max(letter.died_at, newest.get(key, letter.died_at))
        return [LetterGroup(*key, count, oldest.get(key), newest.get(key)) for key, count in counts.most_common()]

    @property
    def oldest(self) -> datetime | None:
        """The time at which the first letter died, or None if no such time is known."""
        return min((letter.died_at for letter in self.letters if letter.died_at is not None), default=None)

    def summary(self) -> QueueSummary | None:
        """Return the summary, or None if there are no letters."""
        return QueueSummary(self.oldest, self.groups(self.letters)[0]) if self.letters else None

    def _shared(self, text: str) -> str:
        return self._texts.setdefault(text, text)
