"""The protocol that outboxes implement for publishers, relays and operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar, runtime_checkable

from reliable_mq._util.validation import is_text
from reliable_mq.core.outbox import NewRow, OutboxRow, RowSettlement
from reliable_mq.core.statistics import OutboxStatus
from reliable_mq.errors import ConfigurationError
from reliable_mq.message import Message

__all__ = [
    "LARGEST_NUMBER",
    "FailedRow",
    "Outbox",
    "OutboxStatus",
    "RowBatch",
    "RowLeases",
    "check_ids",
    "check_target",
    "failed_row",
    "ordering_by",
    "portions",
    "text_or_bytes",
]

T = TypeVar("T")

LARGEST_NUMBER: Final = 2**63 - 1
"""The largest number of rows, and the largest id of a row."""

_ITEMS_PER_STATEMENT: Final = 500  # some databases allow only few bound parameters

OrderingKey = Callable[["Message", str, str], "str | None"]
"""Returns the ordering key of a message, its exchange and its routing key; None for no order."""


class FailedRow(NamedTuple):
    """A message that is set aside until an operator retries or purges it.

    Attributes:
        message_id, exchange, routing_key: The message's id, exchange and routing key.
        attempts: How often the message was delayed, because it was not confirmed or had no place, or was set aside.
        reason: The reason why the message was set aside.
        age: The time since the message was stored, in seconds.
    """

    message_id: str
    exchange: str
    routing_key: str
    attempts: int
    reason: str
    age: float


class RowBatch(NamedTuple):
    """The rows that a relay takes in one call.

    Attributes:
        rows: The rows to publish, in order.
        damaged: The settlements of rows that cannot be published, and of the rows that they hold.
    """

    rows: list[OutboxRow]
    damaged: list[RowSettlement]


class RowLeases(Protocol):
    """The rows that one relay has leased. Not thread-safe.

    Unless documented otherwise, methods may block, and raise `OutboxError` if the outbox cannot be read or written.
    A call that failed may be repeated.
    """

    keep_every: float
    """Seconds after which to call ``keep`` again."""

    def take(self, limit: int, retries: int | None = None) -> RowBatch:
        """Take about ``limit`` rows that are due and that no other relay has, in order.

        Fewer rows may be returned even if more are due. More may be returned if they are behind others of their keys.

        Args:
            limit: The maximum number of rows, apart from those behind others of their keys.
            retries: The maximum number of rows among them that were delayed before; None for no maximum. Rows that were
                never delayed are taken in place of the others.
        """
        ...

    def decided(self, settlements: Sequence[RowSettlement]) -> None:
        """Note outcomes that are about to be written. Does not block."""
        ...

    def written(self, settlements: Sequence[RowSettlement]) -> None:
        """Forget the rows whose outcomes were written. Does not block."""
        ...

    def keep(self) -> None:
        """Renew the leases. The relay calls this every ``keep_every`` seconds."""
        ...

    def close(self) -> None:
        """Release the remaining rows to other relays.

        A released row may have been published, unless ``decided`` received the outcome ``RowOutcome.BACK`` for it.
        """
        ...


@runtime_checkable
class Outbox(Protocol):
    """A durable store of messages that are not confirmed yet.

    Outboxes are thread-safe. Every method may block. Methods raise `OutboxError` if the outbox cannot be read or
    written, and `UsageError` in a forked child.
    """

    poll_interval: float
    """Seconds after which an idle relay looks for rows of other processes."""

    def open(self) -> None:
        """Prepare the outbox for the other calls. Do nothing if it is already open."""
        ...

    def ordering_key(self, message: Message, exchange: str, routing_key: str) -> str | None:
        """Return the ordering key of a message that a publisher is about to store.

        Texts that no row can hold are refused here. In the transaction, they would make other messages fail, too.

        Raises:
            ConfigurationError: If the ordering key or a text of the message cannot be stored, or no queue can get the
                message.
        """
        ...

    def write(self, rows: Sequence[NewRow], settlements: Sequence[RowSettlement]) -> None:
        """Store messages and write the outcomes of rows in one durable transaction.

        Raises:
            OutboxError: If the write failed. Nothing was written, or perhaps everything if ``may_have_arrived`` is set.
        """
        ...

    def claims(self) -> RowLeases:
        """Return new leases for one relay."""
        ...

    def backlog(self, up_to: int | None = None) -> tuple[int, int]:
        """Count the rows that will be published.

        Rows that are set aside, and rows that such rows hold, are not counted.

        Args:
            up_to: The id of the last row to count; None for all rows.

        Returns:
            The count, and the id of the last row that was stored.
        """
        ...

    def status(self) -> OutboxStatus:
        """Return the number of rows in each state."""
        ...

    def set_aside(self, limit: int = 100) -> list[FailedRow]:
        """Return the messages that are set aside, the oldest first.

        Raises:
            ConfigurationError: If the limit is not a whole number from 0 to 2**63 - 1.
        """
        ...

    def retry(self, message_ids: Sequence[str] | None = None) -> int:
        """Put messages that are set aside back for the relay, and return their number.

        Args:
            message_ids: The ids of the messages; None for all.
        """
        ...

    def purge(self, message_ids: Sequence[str] | None = None) -> int:
        """Delete messages that are set aside, and return their number.

        The argument is the same as for `retry`. Rows that the deleted messages held are published.
        """
        ...

    def close(self) -> None:
        """Close files and connections. The next call opens them. Stored messages stay."""
        ...


def check_target(message: Message, exchange: str, routing_key: str) -> None:
    """Refuse a message that no queue can get.

    Raises:
        ConfigurationError: If the message has neither an exchange nor a routing key, nor headers that name queues.
    """
    if not exchange and not routing_key and not message.headers.keys() & {"CC", "BCC"}:
        raise ConfigurationError("routing_key is missing: give the name of a queue, or an exchange")


def ordering_by(function: OrderingKey | None, message: Message, exchange: str, routing_key: str) -> str | None:
    """Return the ordering key of a message by the user's function.

    Raises:
        ConfigurationError: If the function returns neither None nor text that can be encoded in UTF-8.
    """
    key = None if function is None else function(message, exchange, routing_key)
    if key is not None and not is_text(key):
        raise ConfigurationError(f"ordering_key must give text that can be encoded, or None, not {key!r}")
    return key


def text_or_bytes(value: bytes) -> str | bytes:
    """Decode a text of SQLite, which holds any bytes as text; return others unchanged."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def failed_row(values: Sequence[Any], age: float) -> FailedRow:
    """Return a set-aside row from its values, which may have other types if damaged."""
    *texts, attempts, reason = values
    message_id, exchange, routing_key, reason = (
        value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
        for value in (*texts, reason or "")
    )
    return FailedRow(message_id, exchange, routing_key, attempts, reason, max(age, 0.0))


def check_ids(message_ids: Sequence[str] | None) -> list[str] | None:
    """Return message ids as a list, or None for all messages.

    Raises:
        ConfigurationError: If the argument is a single text, whose characters would be taken for ids, or if an id is
            not text that can be encoded.
    """
    if message_ids is None:
        return None
    if isinstance(message_ids, (str, bytes)):
        raise ConfigurationError(f"message_ids must be a sequence of ids, not one: [{message_ids!r}]")
    ids = list(message_ids)
    for message_id in ids:
        if not is_text(message_id):
            raise ConfigurationError(f"message_ids must be texts that can be encoded, not {message_id!r}")
    return ids


def portions(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split a list into portions that fit into one statement each."""
    for start in range(0, len(items), _ITEMS_PER_STATEMENT):
        yield items[start : start + _ITEMS_PER_STATEMENT]
