"""What an outbox does: for the publisher that stores in it, the relay that empties it, and who looks after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from reliable_mq._util.validation import is_whole_number
from reliable_mq.core.outbox import NewRow, OutboxRow, RowSettlement
from reliable_mq.core.statistics import OutboxStatus
from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from reliable_mq.message import Message

__all__ = ["FailedRow", "Outbox", "OutboxStatus", "RowBatch", "RowLeases", "check_ids", "check_number", "ordering_by"]

OrderingKey = Callable[["Message", str, str], "str | None"]
"""From a message, its exchange and its routing key to the key of its order; None for no order."""


class FailedRow(NamedTuple):
    """A message that will not be published until somebody decides.

    Attributes:
        message_id, exchange, routing_key: of the message.
        attempts: how often it was tried.
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
    """What a relay gets at a time.

    Attributes:
        rows: to publish, in order.
        damaged: fates of rows that cannot be published, and of those that they hold back.
    """

    rows: list[OutboxRow]
    damaged: list[RowSettlement]


class RowLeases(Protocol):
    """One relay's hold on rows. For one thread; every method may block.

    Each raises `OutboxError` where the outbox cannot answer; the same call may be made again.
    """

    keep_every: float
    """Seconds after which ``keep`` is to be called again."""

    def take(self, limit: int) -> RowBatch:
        """Take up to ``limit`` rows that no other relay has and that are due, in order. Fewer says nothing."""
        ...

    def decided(self, settlements: Sequence[RowSettlement]) -> None:
        """Fates are decided, and will be carried out. Does not block."""
        ...

    def written(self, settlements: Sequence[RowSettlement]) -> None:
        """Fates are carried out: these rows are no longer ours. Does not block."""
        ...

    def keep(self) -> None:
        """See to it that no other relay gets what this one has. Called every ``keep_every`` seconds."""
        ...

    def close(self) -> None:
        """Let go of all that is left; other relays may have it."""
        ...


@runtime_checkable
class Outbox(Protocol):
    """Where messages are durable until they are confirmed. Thread-safe; every method may block.

    Each raises `OutboxError` where it cannot answer, and `UsageError` in a forked child.
    """

    poll_interval: float
    """Seconds after which a relay that has nothing to do looks for rows of other processes."""

    def open(self) -> None:
        """Make ready; does nothing where it is. The other methods do it, too."""
        ...

    def ordering_key(self, message: Message, exchange: str, routing_key: str) -> str | None:
        """Give the ordering key of a message that a publisher stores."""
        ...

    def write(self, rows: Sequence[NewRow], settlements: Sequence[RowSettlement]) -> None:
        """Store messages and carry out fates, in one transaction that is durable when this returns.

        Raises:
            OutboxError: nothing is done; where ``may_have_arrived`` is set, everything may be.
        """
        ...

    def claims(self) -> RowLeases:
        """Make what one relay takes its rows from."""
        ...

    def backlog(self, up_to: int | None = None) -> tuple[int, int]:
        """Count the rows that are still to be published by themselves: not those set aside, nor those held.

        Args:
            up_to: only rows up to this one.

        Returns:
            The count, and the id of the last row that was stored.
        """
        ...

    def status(self) -> OutboxStatus:
        """Count what is in it."""
        ...

    def set_aside(self, limit: int = 100) -> list[FailedRow]:
        """Give the messages that were set aside, the oldest first.

        Raises:
            ConfigurationError: the limit is no whole number from 0 on.
        """
        ...

    def retry(self, message_ids: Sequence[str] | None = None) -> int:
        """Put messages that were set aside back; all of them where no ids are given. Returns how many that were."""
        ...

    def purge(self, message_ids: Sequence[str] | None = None) -> int:
        """Remove messages that were set aside, likewise. What waited behind them in their order goes on."""
        ...

    def close(self) -> None:
        """Let go of files and connections, until the next call. What is stored stays."""
        ...


def ordering_by(function: OrderingKey | None, message: Message, exchange: str, routing_key: str) -> str | None:
    """Ask a user's function for the ordering key of a message.

    Raises:
        ConfigurationError: it answers something else than text, which has a form in UTF-8, or None.
    """
    if function is None:
        return None
    key = function(message, exchange, routing_key)
    if key is None:
        return None
    if not isinstance(key, str):
        raise ConfigurationError(f"ordering_key must give text or None, not {type(key).__name__}")
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"ordering_key must give text that can be encoded, not {key!r}") from error
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
        try:
            message_id.encode()
        except UnicodeEncodeError as error:
            raise ConfigurationError(f"message_ids must be texts that can be encoded, not {message_id!r}") from error
    return ids
