"""The protocol of outboxes, for publishers, relays and operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from reliable_mq._util.validation import is_text, is_whole_number
from reliable_mq.core.outbox import NewRow, OutboxRow, RowSettlement
from reliable_mq.core.statistics import OutboxStatus
from reliable_mq.errors import ConfigurationError
from reliable_mq.message import Message

__all__ = ["FailedRow", "Outbox", "OutboxStatus", "RowBatch", "RowLeases", "check_ids", "check_number", "ordering_by"]

OrderingKey = Callable[["Message", str, str], "str | None"]
"""Returns the ordering key of a message, its exchange and its routing key; None for no order."""


class FailedRow(NamedTuple):
    """A message that is set aside until an operator decides.

    Attributes:
        message_id, exchange, routing_key: of the message.
        attempts: how often it was published without a confirm.
        reason: why it was set aside.
        age: seconds since it was stored.
    """

    message_id: str
    exchange: str
    routing_key: str
    attempts: int
    reason: str
    age: float


class RowBatch(NamedTuple):
    """Rows that a relay takes in one call.

    Attributes:
        rows: to publish, in order.
        damaged: settlements of rows that cannot be published, and of the rows that they hold.
    """

    rows: list[OutboxRow]
    damaged: list[RowSettlement]


class RowLeases(Protocol):
    """The rows that one relay has leased. For one thread; every method may block.

    Each raises `OutboxError` if the outbox cannot be read or written; the call may be repeated.
    """

    keep_every: float
    """Seconds after which to call ``keep`` again."""

    def take(self, limit: int) -> RowBatch:
        """Take up to ``limit`` rows that are due and that no other relay has, in order.

        Fewer may be taken while others are due.
        """
        ...

    def decided(self, settlements: Sequence[RowSettlement]) -> None:
        """Note outcomes that will be written. Does not block."""
        ...

    def written(self, settlements: Sequence[RowSettlement]) -> None:
        """Forget rows whose outcomes are written. Does not block."""
        ...

    def keep(self) -> None:
        """Renew the leases. Called every ``keep_every`` seconds."""
        ...

    def close(self) -> None:
        """Release all rows that are left, for other relays.

        They may have been published, unless ``decided`` was given the outcome ``RowOutcome.BACK`` for them.
        """
        ...


@runtime_checkable
class Outbox(Protocol):
    """Stores messages durably until they are confirmed.

    Thread-safe; every method may block. Each raises `OutboxError` if the outbox cannot be read or written, and
    `UsageError` in a forked child.
    """

    poll_interval: float
    """Seconds after which an idle relay looks for rows of other processes."""

    def open(self) -> None:
        """Prepare for the other calls; do nothing if that is done."""
        ...

    def ordering_key(self, message: Message, exchange: str, routing_key: str) -> str | None:
        """Return the ordering key of a message that a publisher stores."""
        ...

    def write(self, rows: Sequence[NewRow], settlements: Sequence[RowSettlement]) -> None:
        """Store messages and write the outcomes of rows, in one durable transaction.

        Raises:
            OutboxError: nothing is written; if ``may_have_arrived`` is set, everything may be.
        """
        ...

    def claims(self) -> RowLeases:
        """Return new leases, for one relay."""
        ...

    def backlog(self, up_to: int | None = None) -> tuple[int, int]:
        """Count the rows that will be published: not those set aside, nor those held.

        Args:
            up_to: only rows up to this one.

        Returns:
            The count, and the id of the last row that was stored.
        """
        ...

    def status(self) -> OutboxStatus:
        """Count the rows by state."""
        ...

    def set_aside(self, limit: int = 100) -> list[FailedRow]:
        """Return the messages that are set aside, the oldest first.

        Raises:
            ConfigurationError: the limit is no whole number from 0 on.
        """
        ...

    def retry(self, message_ids: Sequence[str] | None = None) -> int:
        """Put messages that are set aside back, and return how many.

        Args:
            message_ids: their ids; None for all.
        """
        ...

    def purge(self, message_ids: Sequence[str] | None = None) -> int:
        """Delete messages that are set aside, and return how many; see `retry`.

        Rows that they held are published.
        """
        ...

    def close(self) -> None:
        """Close files and connections, until the next call. Stored messages stay."""
        ...


def ordering_by(function: OrderingKey | None, message: Message, exchange: str, routing_key: str) -> str | None:
    """Return the ordering key that a user's function has for a message.

    Raises:
        ConfigurationError: it is neither None nor text that can be encoded in UTF-8.
    """
    if function is None:
        return None
    key = function(message, exchange, routing_key)
    if key is not None and not isinstance(key, str):
        raise ConfigurationError(f"ordering_key must give text or None, not {type(key).__name__}")
    if key is not None and not is_text(key):
        raise ConfigurationError(f"ordering_key must give text that can be encoded, not {key!r}")
    return key


def check_number(field: str, value: object) -> int:
    """Return a number of rows, or of one row.

    Raises:
        ConfigurationError: it is no whole number from 0 to 2**63 - 1.
    """
    if not is_whole_number(value, 0, 2**63 - 1):
        raise ConfigurationError(f"{field} must be a whole number from 0 to 2**63 - 1, not {value!r}")
    return value


def check_ids(message_ids: Sequence[str] | None) -> list[str] | None:
    """Return the ids of messages as a list; None for all.

    Raises:
        ConfigurationError: it is one text, whose characters would be taken for ids, or one of them is no text that can
            be encoded.
    """
    if message_ids is None:
        return None
    if isinstance(message_ids, (str, bytes)):
        raise ConfigurationError(f"message_ids must be a sequence of ids, not one: [{message_ids!r}]")
    ids = list(message_ids)
    for message_id in ids:
        if not isinstance(message_id, str):
            raise ConfigurationError(f"message_ids must be texts, not {message_id!r}")
        if not is_text(message_id):
            raise ConfigurationError(f"message_ids must be texts that can be encoded, not {message_id!r}")
    return ids
