"""Failed attempts: their description, and their counts from several sources.

An attempt is described where it fails, on the thread or task that ran the handler. ``str(exception)`` runs the user's
code, which an I/O thread must not run, and a stored exception keeps every frame of its traceback alive.

Each exception in an exception group counts, at any depth, and the strictest wins. The first `DeadLetter` is the
verdict. Without one, the policy gives up if it would for any of the others. Otherwise the longest delay of a
`RetryLater` applies, or without one the delay of the policy.

RabbitMQ's own counts differ in meaning between versions (``x-delivery-count`` counts lost connections on 4.0 to 4.2 and
skips ``basic.nack`` on 4.3), and a client can send them and ``x-death`` itself, so they are not read. Attempts are
counted by a header of ours, within bounds and in a known format, by the idempotency store, and by this process.

Invariants:

- A description is bounded, printable, and encodable as UTF-8. Making one never raises, whatever the exception's class,
  text or attributes do.
- A count never decreases while it is remembered.
- A header that is out of range, of the wrong type or without a known format is ignored.
- At most ``capacity`` messages are remembered, the ones that failed last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from reliable_mq._util.validation import seconds
from reliable_mq.codec import integer_header
from reliable_mq.core import headers
from reliable_mq.errors import ConsumeError
from reliable_mq.retry import MOST_ATTEMPTS, DeadLetter, RetryLater

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reliable_mq.core.consumer.delivery import Delivery

#: RabbitMQ's counts of the deliveries from one queue. They are not part of the message, and would mislead in another
#: queue.
BROKER_COUNTS: Final = ("x-delivery-count", "x-acquired-count")
_delivery_count, _acquired_count = map(integer_header, BROKER_COUNTS)
_MOST_COUNTED: Final = 2**32  # a larger count is forged; with the attempts in our headers, it might exceed 64 bits
MESSAGE_LIMIT: Final = 512  # characters
_TYPE_LIMIT: Final = 128
_SHOWN: Final = 5  # exceptions of a group that its description shows
_NO_TEXT: Final = "(its text cannot be shown)"
_NO_NAME: Final = "(a class that cannot be named)"
_WRONG_DELAY: Final = " (its delay is not a number of seconds: the delay of the policy is used)"
_INSIDE: Final = BaseExceptionGroup.__dict__["exceptions"]  # a subclass may hide the attribute

#: The class of an exception and the classes of its groups, from the inside out.
Kinds = tuple[type[BaseException], ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt: the exception of the handler."""

    exception_type: str  # the class, with its module
    exception_message: str  # its text, printable and cut
    at: float  # when it failed, in seconds since 1970
    delay: float | None = None  # seconds to the next attempt, if the handler chose a delay
    verdict: str | None = None  # why the message is dead-lettered at once, if the handler decided that
    #: The exceptions on which the policy decides. Another attempt follows only if the policy retries all of them.
    kinds: tuple[Kinds, ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.exception_type}: {self.exception_message}"


class _Leaf(NamedTuple):
    error: BaseException
    kinds: Kinds

    def is_a(self, kind: type[BaseException]) -> bool:
        return issubclass(self.kinds[0], kind)  # not isinstance, which reads the exception's __class__


def describe(error: BaseException, at: float) -> Failure:
    """Describe an exception that a handler raised, or returned as a verdict."""
    name, text = _name(error), _text(error)
    leaves = _leaves(error)
    if leaves[0].error is not error:
        text += ": " + "; ".join(shown(leaf.error) for leaf in leaves[:_SHOWN])
        if len(leaves) > _SHOWN:
            text += f"; and {len(leaves) - _SHOWN} more"
    delays, usable = _delays(leaf.error for leaf in leaves if leaf.is_a(RetryLater))
    if not usable:
        text = text[: MESSAGE_LIMIT - len(_WRONG_DELAY)] + _WRONG_DELAY
    return Failure(
        name,
        printable(text),
        at,
        delay=max(delays, default=None),
        verdict=next((_reason(leaf.error) for leaf in leaves if leaf.is_a(DeadLetter)), None),
        kinds=tuple(leaf.kinds for leaf in leaves if not leaf.is_a(RetryLater) and not leaf.is_a(DeadLetter)),
    )


def shown(error: BaseException) -> str:
    """Return the name and the text of an exception, even of a broken one."""
    name = _guarded(lambda: printable(type(error).__name__, _TYPE_LIMIT), _NO_NAME)
    text = _text(error)
    return printable(f"{name}: {text}") if text else name


def _leaves(error: BaseException) -> list[_Leaf]:
    """Return the exceptions of a group in order, or any other exception itself."""
    found: list[_Leaf] = []
    waiting: list[_Leaf] = [_Leaf(error, (type(error),))]
    while waiting:
        leaf = waiting.pop()
        if leaf.is_a(BaseExceptionGroup) and not leaf.is_a(RetryLater) and not leaf.is_a(DeadLetter):
            inside: tuple[BaseException, ...] = _INSIDE.__get__(leaf.error)
            waiting += [_Leaf(one, (type(one), *leaf.kinds)) for one in reversed(inside)]
        else:
            found.append(leaf)
    return found


def _delays(errors: Iterable[BaseException]) -> tuple[list[float], bool]:
    """Return the delays of `RetryLater` exceptions, and whether all are valid."""
    delays: list[float] = []
    usable = True
    for error in errors:
        try:
            asked = error.delay  # type: ignore[attr-defined]  # a RetryLater
            if asked is not None:
                delays.append(seconds("delay", asked))
        except BaseException:  # noqa: BLE001 -- the attribute may be anything by now
            usable = False
    return delays, usable


def _reason(error: BaseException) -> str:
    given = _guarded(lambda: printable(str(error.reason)), _NO_TEXT)  # type: ignore[attr-defined]  # a DeadLetter
    return given or _text(error) or _name(error)


def _name(error: BaseException) -> str:
    return _guarded(lambda: printable(_qualified(type(error)), _TYPE_LIMIT), _NO_NAME)


def _qualified(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _text(error: BaseException) -> str:
    return _guarded(lambda: printable(str(error)), _NO_TEXT)


def _guarded(make: Callable[[], str], instead: str) -> str:
    """Call user code that returns a text. Return ``instead`` if it raises."""
    try:
        return make()
    except BaseException:  # noqa: BLE001 -- whatever it raises: SystemExit would end the worker
        return instead


def printable(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """Escape control characters and surrogates, and cut at ``limit`` characters."""
    text = str.__str__(text)[: limit + 1]  # a subclass may override the methods below
    if not text.isprintable():
        text = "".join(
            char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii")
            for char in text
        )
    return text if len(text) <= limit else text[: limit - 3] + "..."


class NewerFormat(Exception):
    """The message has headers of ours in a newer format than this package knows."""

    def __init__(self, version: int) -> None:
        super().__init__(f"headers of format {version}, and {headers.FORMAT_VERSION} is the newest that is known here")
        self.version = version


@dataclass(eq=False, slots=True)
class AttemptHistory:
    """The failed attempts of one message."""

    count: int = 0
    first_at: float | None = None  # when the first attempt failed, in seconds since 1970; None if unknown
    last: Failure | None = None  # the last failure, if known
    lost: int = 0  # the number of attempts that ended with the loss of their consumer
    due: float = 0.0  # the earliest time of the next attempt, on the monotonic clock
    verdict: str | None = None  # why the message is dead-lettered, once that is decided
    alone: bool = False  # whether to handle the message alone, because its batch did not end

    def add(self, failure: Failure) -> None:
        self.count += 1
        self.last = failure
        if self.first_at is None:
            self.first_at = failure.at


def failures_from_headers(table: Mapping[str, object]) -> AttemptHistory | None:
    """Read earlier attempts from our headers. Return None without valid ones.

    Raises:
        NewerFormat: If the headers are from a newer version of this package and cannot be understood.
    """
    version = _whole(table.get(headers.FORMAT))
    if version > headers.FORMAT_VERSION:
        raise NewerFormat(version)
    attempt = _whole(table.get(headers.ATTEMPT))
    if version < 1 or not 1 < attempt <= MOST_ATTEMPTS:
        return None
    retry = table.get(headers.RETRY)
    said = retry if isinstance(retry, Mapping) else {}
    failures = AttemptHistory(attempt - 1, _time(said.get("first-failure")))
    failures.lost = min(max(_whole(said.get("lost")), 0), failures.count)
    failures.alone = said.get("alone") is True
    kind, text, at = said.get("exception-type"), said.get("exception-message"), _time(said.get("last-failure"))
    if isinstance(kind, str) and isinstance(text, str) and at is not None:
        failures.last = Failure(printable(kind), printable(text), at)
    return failures


def _time(value: object) -> float | None:
    return value.timestamp() if isinstance(value, datetime) else None


def _whole(value: object) -> int:
    """Return a count from a table of headers, 0 for any other value."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def broker_counts(properties: bytes) -> tuple[int, int]:
    """Return RabbitMQ's counts of failures and of all returns, 0 for a missing one."""
    return _bounded(_delivery_count(properties)), _bounded(_acquired_count(properties))


def _bounded(count: int | None) -> int:
    return min(max(count or 0, 0), _MOST_COUNTED)


class AttemptTracker:
    """The failed attempts of messages, by ``message_id``. Not thread-safe.

    A message without an id is not remembered.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self._failures: OrderedDict[str, AttemptHistory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._failures)

    def find(self, delivery: Delivery) -> AttemptHistory | None:
        """Return the remembered attempts of a message, or those of its delivery."""
        claimed = delivery.failures
        known = self._failures.get(_identity(delivery)) if self._failures else None
        if known is None:
            return claimed
        if claimed is not None:
            known.count = max(known.count, claimed.count)
            known.lost = max(known.lost, claimed.lost)
        return known

    def remember(self, delivery: Delivery, failures: AttemptHistory) -> None:
        """Remember a failed message. The one that failed longest ago may be forgotten."""
        message_id = _identity(delivery)
        if not message_id:
            return
        self._failures[message_id] = failures
        self._failures.move_to_end(message_id)
        if len(self._failures) > self._capacity:
            self._failures.popitem(last=False)

    def forget(self, delivery: Delivery) -> None:
        """Forget a message that was handled or dead-lettered, or is a new copy."""
        if self._failures:
            self._failures.pop(_identity(delivery), None)


def _identity(delivery: Delivery) -> str:
    flaw = delivery.flaw
    try:
        return delivery.message_id or ""
    except ConsumeError:
        delivery.flaw = flaw  # the handler has not read the broken part
        return ""
