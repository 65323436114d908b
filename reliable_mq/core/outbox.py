"""The rows of an outbox: their format, their order in a relay, their outcomes.

A row is a durable, unconfirmed message with its exchange and routing key. A relay leases rows, publishes them and
settles each of them. `RelaySession` makes all decisions of the relay.

Invariants:

- A row of a newer format is never decoded. It stays in the outbox for a relay that knows the format.
- At most one row of an ordering key is outstanding at a time, in the order in which the rows were leased. If a row is
  not confirmed, the rows behind it are returned untouched, so that none ever overtakes it.
- Every leased row is settled exactly once.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from reliable_mq.codec import CodecError, split_properties
from reliable_mq.errors import ConfigurationError, PublishError, PublishRefused, PublishReturned
from reliable_mq.message import Message

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from reliable_mq.errors import ReliableMQError

__all__ = [
    "COLUMNS",
    "FORMAT",
    "LONGEST_DELAY",
    "NewRow",
    "OutboxRow",
    "RelaySession",
    "RowOutcome",
    "RowSettlement",
    "UnreadableRow",
    "delay_after",
    "row_from",
    "values_of",
]

FORMAT: Final = 1
"""The format of the rows that are written here. Rows of a greater one are left alone."""

COLUMNS: Final = (
    "format",
    "message_id",
    "exchange",
    "routing_key",
    "mandatory",
    "ordering_key",
    "properties",
    "body",
    "attempts",
    "possible_duplicate",
)
"""The columns of a message; a backend has more, of its own."""

_DELAYS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0)
LONGEST_DELAY: Final = _DELAYS[-1]
"""Seconds; a row that is due later than this was written by a clock that has jumped since, or began anew."""

_REASON_CHARACTERS: Final = 1000


class NewRow(NamedTuple):
    """A message on its way into an outbox."""

    message: Message
    exchange: str
    routing_key: str
    mandatory: bool  # without a bound queue, a mandatory message is set aside; the broker drops any other
    ordering_key: str | None  # rows with the same key are published one after the other


class OutboxRow(NamedTuple):
    """A row that a relay has leased."""

    id: int  # the position in the order of acceptance
    message: Message  # with the `message_id` and the properties as accepted, byte for byte
    exchange: str
    routing_key: str
    mandatory: bool
    ordering_key: str | None
    attempts: int  # unconfirmed publishes of the row
    possible_duplicate: bool  # whether it may have been published before
    claim: str | None = None  # the lease, if relays share the outbox; it must hold when the row is settled


class UnreadableRow(Exception):
    """A row that cannot be decoded."""

    def __init__(self, reason: str, *, newer: bool = False) -> None:
        super().__init__(reason)
        self.newer = newer  # a newer version of this package wrote the row, which is not damaged


def values_of(row: NewRow) -> tuple[Any, ...]:
    message = row.message
    return (
        FORMAT,
        message.message_id,
        row.exchange,
        row.routing_key,
        int(row.mandatory),
        row.ordering_key,
        message.encoded_properties,
        message.body,
        0,
        0,
    )


def row_from(
    id: int,  # noqa: A002
    values: Sequence[Any],
    *,
    in_doubt: bool = False,
    claim: str | None = None,
) -> OutboxRow:
    """Decode the values of `COLUMNS`.

    ``in_doubt`` marks a row that may have been published before.

    Raises:
        UnreadableRow: If the row has a newer format or is damaged.
    """
    format_, message_id, exchange, routing_key, mandatory, key, properties, body, attempts, duplicate = values
    if not isinstance(format_, int) or format_ < 1:
        raise UnreadableRow(f"row {id} has format {format_!r}, which does not exist")
    if format_ > FORMAT:
        raise UnreadableRow(
            f"row {id} has format {format_}, and this version of reliable_mq knows {FORMAT}: it was written by a newer "
            "one; let that one relay it",
            newer=True,
        )
    if not (isinstance(message_id, str) and isinstance(exchange, str) and isinstance(routing_key, str)):
        raise UnreadableRow(f"row {id} is damaged: message_id, exchange and routing_key are text")
    if not isinstance(body, (bytes, memoryview)) or not isinstance(properties, (bytes, memoryview, type(None))):
        raise UnreadableRow(f"row {id} is damaged: body and properties are binary")
    if not isinstance(key, str | None) or not isinstance(attempts, int):
        raise UnreadableRow(f"row {id} is damaged: ordering_key is text or NULL, attempts is a number")
    if properties is not None:
        properties = bytes(properties)
        try:
            split_properties(properties)
        except CodecError as error:
            raise UnreadableRow(f"row {id} is damaged: its properties are not those of a message: {error}") from error
    return OutboxRow(
        id,
        Message._from_wire(bytes(body), properties, message_id),  # noqa: SLF001  # as it was, byte for byte
        exchange,
        routing_key,
        bool(mandatory),
        key,
        attempts,
        in_doubt or bool(duplicate),
        claim,
    )


class RowOutcome(enum.Enum):
    """The outcome of a row that a relay has leased."""

    CONFIRMED = "confirmed"  # the broker has the message: remove the row
    LATER = "later"  # not confirmed, but another attempt may succeed: publish it again after a delay
    SET_ASIDE = "set aside"  # it cannot be confirmed unchanged: keep it with the reason until an operator decides
    BACK = "back"  # it was not published: leave the row unchanged


class RowSettlement(NamedTuple):
    """The settlement of one row."""

    row: OutboxRow
    outcome: RowOutcome
    delay: float = 0.0  # the seconds until the row may be published again
    reason: str | None = None  # why it was not confirmed
    possible_duplicate: bool = False  # whether the message may have arrived although it was not confirmed


def delay_after(attempts: int) -> float:
    """Return the seconds that a row waits after ``attempts`` failures."""
    return _DELAYS[min(attempts, len(_DELAYS)) - 1]


class RelaySession:
    """The leased rows of a relay, their order and settlements. Not thread-safe."""

    def __init__(self) -> None:
        self.ready: deque[OutboxRow] = deque()  # rows to publish now, in order; the relay removes them
        self.settlements: list[RowSettlement] = []  # settlements to carry out, in order; the relay removes them
        #: The error that prevents all publishing. The relay pauses until a row is confirmed, which clears it.
        self.trouble: ReliableMQError | None = None
        self._behind: dict[str, deque[OutboxRow]] = {}  # by ordering key, the rows behind the outstanding one
        self.waiting = 0  # the number of rows that wait for another row of their ordering key

    def has(self, ordering_key: str) -> bool:
        return ordering_key in self._behind

    def add(self, rows: Iterable[OutboxRow]) -> None:
        """Add leased rows, in the order of the outbox."""
        for row in rows:
            if row.ordering_key is None:
                self.ready.append(row)
            elif row.ordering_key in self._behind:
                self._behind[row.ordering_key].append(row)
                self.waiting += 1
            else:
                self._behind[row.ordering_key] = deque()
                self.ready.append(row)

    def settled(self, row: OutboxRow, error: ReliableMQError | None) -> None:
        """Settle a row whose publish failed with ``error``, or was confirmed if None."""
        if error is None:
            self.trouble = None
            self.settlements.append(RowSettlement(row, RowOutcome.CONFIRMED))
            self._next(row)
            return
        reason = f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS]
        doubt = isinstance(error, PublishError) and error.may_have_arrived
        if isinstance(error, (PublishReturned, PublishRefused, ConfigurationError)):
            self.settlements.append(RowSettlement(row, RowOutcome.SET_ASIDE, 0.0, reason, doubt))
        elif isinstance(error, PublishError):
            delay = delay_after(row.attempts + 1)
            self.settlements.append(RowSettlement(row, RowOutcome.LATER, delay, reason, doubt))
        else:  # the error does not concern this row
            self.trouble = error
            self.settlements.append(RowSettlement(row, RowOutcome.BACK))
        self._return_rows_behind(row)

    def stopped(self) -> None:
        """Return all rows that are not outstanding, because the relay stops."""
        while self.ready:
            row = self.ready.popleft()
            self.settlements.append(RowSettlement(row, RowOutcome.BACK))
            self._return_rows_behind(row)
        for behind in self._behind.values():
            self._return(behind)
            behind.clear()

    def _next(self, row: OutboxRow) -> None:
        if row.ordering_key is None:
            return
        behind = self._behind[row.ordering_key]
        if behind:
            self.waiting -= 1
            self.ready.append(behind.popleft())
        else:
            del self._behind[row.ordering_key]

    def _return_rows_behind(self, row: OutboxRow) -> None:
        if row.ordering_key is None:
            return
        self._return(self._behind.pop(row.ordering_key))

    def _return(self, rows: Collection[OutboxRow]) -> None:
        self.waiting -= len(rows)
        self.settlements.extend(RowSettlement(row, RowOutcome.BACK) for row in rows)
