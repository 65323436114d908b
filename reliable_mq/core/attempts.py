"""How often a message has failed, and which of those who claim to know are believed.

RabbitMQ's own counts say something else on every version (``x-delivery-count`` counts lost connections on 4.0 to 4.2
and skips ``basic.nack`` on 4.3), and a client can send them, and ``x-death``, itself: they are never read. What counts
is a header of ours, within bounds and in a format that is known, the count of the idempotency store, and what this
process remembers.

Invariants: a count never goes down for as long as it is remembered; a header that is out of range, of the wrong type or
without a known format counts as none; at most ``capacity`` messages are remembered, the ones that failed last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from reliable_mq.core import headers
from reliable_mq.core.failure import Failure, printable
from reliable_mq.errors import ConsumeError
from reliable_mq.retry import MOST_ATTEMPTS

if TYPE_CHECKING:
    from reliable_mq.core.delivery import Delivery

__all__ = ["FailureBook", "Failures", "NewerFormat", "failures_from_headers", "whole"]


class NewerFormat(Exception):
    """The message carries headers of ours in a format that is newer than this package knows."""

    def __init__(self, version: int) -> None:
        super().__init__(f"headers of format {version}, and {headers.FORMAT_VERSION} is the newest that is known here")
        self.version = version


class Failures:
    """The failed attempts of one message.

    Attributes:
        count: how many.
        first_at: when the first of them failed, in seconds since 1970; None where nobody said.
        lost: how many of them ended with the loss of their consumer.
        last: the last of them, as far as it is known.
        due: before when, on the monotonic clock, the next attempt must not be made.
        verdict: why the message is to be dead-lettered, once that is decided.
        alone: whether it is to be handled by itself, since the batch that it was in did not end.
    """

    __slots__ = ("alone", "count", "due", "first_at", "last", "lost", "verdict")

    def __init__(self, count: int = 0, first_at: float | None = None) -> None:
        self.count = count
        self.first_at = first_at
        self.last: Failure | None = None
        self.lost = 0
        self.due = 0.0
        self.verdict: str | None = None
        self.alone = False

    def add(self, failure: Failure) -> None:
        """One more attempt failed."""
        self.count += 1
        self.last = failure
        if self.first_at is None:
            self.first_at = failure.at


def failures_from_headers(table: Mapping[str, object]) -> Failures | None:
    """Read what our headers say of earlier attempts; None where they say nothing, or nothing to be trusted.

    Raises:
        NewerFormat: they are from a newer version of this package, and cannot be understood.
    """
    version = whole(table.get(headers.FORMAT))
    if version > headers.FORMAT_VERSION:
        raise NewerFormat(version)
    attempt = whole(table.get(headers.ATTEMPT))
    if version < 1 or not 1 < attempt <= MOST_ATTEMPTS:
        return None
    retry = table.get(headers.RETRY)
    said = retry if isinstance(retry, Mapping) else {}
    failures = Failures(attempt - 1, _time(said.get("first-failure")))
    failures.lost = min(max(whole(said.get("lost")), 0), failures.count)
    kind, text, at = said.get("exception-type"), said.get("exception-message"), _time(said.get("last-failure"))
    if isinstance(kind, str) and isinstance(text, str) and at is not None:
        failures.last = Failure(printable(kind), printable(text), at)
    return failures


def _time(value: object) -> float | None:
    return value.timestamp() if isinstance(value, datetime) else None


def whole(value: object) -> int:
    """Read a count from a table of headers; 0 where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


class FailureBook:
    """What this process remembers of messages that failed, by ``message_id``; without one, nothing. Not thread-safe.

    Args:
        capacity: messages that are remembered at most.
    """

    __slots__ = ("_capacity", "_failures")

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self._failures: OrderedDict[str, Failures] = OrderedDict()

    def __len__(self) -> int:
        return len(self._failures)

    def recall(self, delivery: Delivery) -> Failures | None:
        """Answer what is known of a message: what is remembered of it, or else what its delivery says."""
        claimed = delivery.failures
        known = self._failures.get(_identity(delivery)) if self._failures else None
        if known is None:
            return claimed
        if claimed is not None:
            known.count = max(known.count, claimed.count)
            known.lost = max(known.lost, claimed.lost)
        return known

    def remember(self, delivery: Delivery, failures: Failures) -> None:
        """A message failed; the one that failed longest ago may be forgotten for it."""
        message_id = _identity(delivery)
        if not message_id:
            return
        self._failures[message_id] = failures
        self._failures.move_to_end(message_id)
        if len(self._failures) > self._capacity:
            self._failures.popitem(last=False)

    def forget(self, delivery: Delivery) -> None:
        """A message was handled or dead-lettered."""
        if self._failures:
            self._failures.pop(_identity(delivery), None)


def _identity(delivery: Delivery) -> str:
    try:
        return delivery.message_id or ""
    except ConsumeError:
        return ""
