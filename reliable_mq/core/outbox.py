"""The rows of an outbox: their format, their order in a relay, their outcomes.

A row is a durable, unconfirmed message with its exchange and routing key. A relay leases rows, publishes them and
settles each of them. `RelaySession` makes all decisions of the relay.

Invariants:

- A row of a newer format is never decoded. It stays in the outbox for a relay that knows the format.
- At most one row of an ordering key is outstanding at a time, in the order in which the rows were leased. If a row is
  not confirmed, the rows behind it are returned untouched, so that none ever overtakes it.
- Every leased row is settled exactly once.
- Suspect rows (that failed before, or go where a publish stays without an answer) never take more than half of the
  places of a relay, so that other rows go on.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from reliable_mq.codec import CodecError, split_properties
from reliable_mq.errors import (
    ConfigurationError,
    PublishError,
    PublishNacked,
    PublishRefused,
    PublishReturned,
    PublishUnconfirmed,
)
from reliable_mq.message import Message

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from reliable_mq.errors import ReliableMQError

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

_MESSAGE_ID: Final = COLUMNS.index("message_id")
_DELAYS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0)
LONGEST_DELAY: Final = _DELAYS[-1]
"""Seconds; a row that is due later than this was written by a clock that has jumped since, or began anew."""

_REASON_CHARACTERS: Final = 1000
_NO_LIMIT: Final = 2**63
_SILENT_KEPT: Final = 10_000  # destinations
_NO_PLACE: Final = "it was not tried: half of the relay's places have messages that the broker does not confirm"


class NewRow(NamedTuple):
    """A message on its way into an outbox.

    Attributes:
        message, exchange, routing_key: The message, its exchange and its routing key.
        mandatory: Whether the message is set aside if no queue is bound for it. If False, the broker drops it.
        ordering_key: Rows with the same key are published one after the other. None means no order.
    """

    message: Message
    exchange: str
    routing_key: str
    mandatory: bool
    ordering_key: str | None


class OutboxRow(NamedTuple):
    """A row that a relay has leased.

    Attributes:
        id: The position in the order of acceptance.
        message: The message, with its ``message_id``, its properties and its body as accepted, byte for byte.
        exchange, routing_key, mandatory, ordering_key: The values of the `NewRow`.
        attempts: How often the row was delayed or set aside.
        possible_duplicate: Whether the message may have been published before.
        claim: The lease, if relays share the outbox. It must hold when the row is settled.
    """

    id: int
    message: Message
    exchange: str
    routing_key: str
    mandatory: bool
    ordering_key: str | None
    attempts: int
    possible_duplicate: bool
    claim: str | None = None

    def __str__(self) -> str:
        target = f"exchange {self.exchange!r} with routing key {self.routing_key!r}"
        return f"message {self.message.message_id} to {target}"


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


def damaged_row(
    id: int,  # noqa: A002
    values: Sequence[Any],
    *,
    key: str | None = None,
    claim: str | None = None,
) -> OutboxRow:
    """Return a damaged row, to set it aside. Of its message, it has only the id."""
    message_id = values[_MESSAGE_ID]
    return OutboxRow(id, Message._from_wire(b"", None, str(message_id)), "", "", True, key, 0, False, claim)  # noqa: SLF001


class RowOutcome(enum.Enum):
    """The outcome of a row that a relay has leased.

    Attributes:
        CONFIRMED: The broker has the message: remove the row.
        LATER: The message was not confirmed, but another attempt may succeed: publish it again after a delay.
        SET_ASIDE: The message cannot be confirmed unchanged: keep it with the reason until an operator decides.
        BACK: The message was not published: leave the row unchanged.
    """

    CONFIRMED = "confirmed"
    LATER = "later"
    SET_ASIDE = "set aside"
    BACK = "back"


class RowSettlement(NamedTuple):
    """The settlement of one row.

    Attributes:
        row: The row.
        outcome: Its outcome.
        delay: The time until the row may be published again, in seconds.
        reason: The reason why the message was not confirmed.
        possible_duplicate: Whether the message may have arrived although it was not confirmed.
    """

    row: OutboxRow
    outcome: RowOutcome
    delay: float = 0.0
    reason: str | None = None
    possible_duplicate: bool = False


def delay_after(attempts: int) -> float:
    """Return the seconds that a row waits after ``attempts`` failures."""
    return _DELAYS[min(attempts, len(_DELAYS)) - 1]


class KeptPlaces(NamedTuple):
    """The places that a publisher keeps for rows whose confirms it no longer awaits."""

    rows: int = 0
    bytes: int = 0
    connected: bool = True  # whether the publisher has a channel to the broker


def is_answer(error: ReliableMQError | None) -> bool:
    """Return whether the broker has answered a publish that ended so."""
    return error is None or isinstance(error, (PublishNacked, PublishReturned))


class RelaySession:
    """The leased rows of a relay, their order and settlements. Not thread-safe.

    Args:
        places: The number of rows that may be outstanding.
        max_bytes: The total size of their bodies, in bytes.
    """

    def __init__(self, places: int = _NO_LIMIT, max_bytes: int = _NO_LIMIT) -> None:
        self.ready: deque[OutboxRow] = deque()  # rows to publish now, in order; the relay removes them
        self.settlements: list[RowSettlement] = []  # settlements to carry out, in order; the relay removes them
        #: The error that prevents all publishing. The relay pauses until the broker answers, which clears it.
        self.trouble: ReliableMQError | None = None
        self._behind: dict[str, deque[OutboxRow]] = {}  # by ordering key, the rows behind the outstanding one
        self.waiting = 0  # the number of rows that wait for another row of their ordering key
        self.waiting_bytes = 0  # the total size of their bodies
        self._suspects: dict[int, int] = {}  # by id, the sizes of suspect rows that are ready or outstanding
        self._suspect_bytes = 0
        self._most = max(places // 2, 1)  # suspect rows
        self._most_bytes = max_bytes // 2
        self._silent: set[tuple[str, str]] = set()  # exchange and routing key of rows that were not answered

    @property
    def suspects(self) -> int:
        """The number of suspect rows that are ready or outstanding."""
        return len(self._suspects)

    def suspects_to_take(self, kept: KeptPlaces) -> int:
        """Return how many rows that failed before may be taken now."""
        free = self._most - self.suspects - kept.rows
        return free if free >= max(self._most // 4, 1) else 0  # few rows cost a query, too

    def has(self, ordering_key: str) -> bool:
        return ordering_key in self._behind

    def add(self, rows: Iterable[OutboxRow], kept: KeptPlaces = KeptPlaces()) -> None:  # noqa: B008  # it is immutable
        """Add leased rows, in the order of the outbox. Delay suspect rows without a place."""
        delayed: set[str] = set()  # keys whose first row is delayed
        for row in rows:
            key = row.ordering_key
            if key is not None and key in self._behind:
                self._behind[key].append(row)
                self.waiting += 1
                self.waiting_bytes += len(row.message.body)
            elif key is not None and key in delayed:
                self.settlements.append(RowSettlement(row, RowOutcome.BACK))
            elif self._is_suspect(row) and self._is_full(row, kept):
                self.settlements.append(
                    RowSettlement(row, RowOutcome.LATER, delay_after(row.attempts + 1), _NO_PLACE, False)
                )
                if key is not None:
                    delayed.add(key)
            else:
                if key is not None:
                    self._behind[key] = deque()
                self._make_ready(row)

    def settled(self, row: OutboxRow, error: ReliableMQError | None) -> None:
        """Settle a row whose publish failed with ``error``, or was confirmed if None."""
        self._suspect_bytes -= self._suspects.pop(row.id, 0)
        self._note_answer(row, error)
        if is_answer(error):
            self.trouble = None
        if error is None:
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
            self._suspect_bytes -= self._suspects.pop(row.id, 0)
            self.settlements.append(RowSettlement(row, RowOutcome.BACK))
            self._return_rows_behind(row)
        for behind in self._behind.values():
            self._return(behind)
            behind.clear()

    def _is_suspect(self, row: OutboxRow) -> bool:
        return row.attempts > 0 or (row.exchange, row.routing_key) in self._silent

    def _is_full(self, row: OutboxRow, kept: KeptPlaces) -> bool:
        """Return whether a suspect row has no place. Without a channel, no row is tried."""
        used = self.suspects + kept.rows
        size = self._suspect_bytes + kept.bytes + len(row.message.body)
        return kept.connected and (used >= self._most or (used > 0 and size > self._most_bytes))

    def _make_ready(self, row: OutboxRow) -> None:
        self.ready.append(row)
        if self._is_suspect(row):
            size = len(row.message.body)
            self._suspect_bytes += size - self._suspects.get(row.id, 0)  # an earlier attempt may be outstanding
            self._suspects[row.id] = size

    def _note_answer(self, row: OutboxRow, error: ReliableMQError | None) -> None:
        """Remember whether the broker answers publishes to the row's destination."""
        destination = row.exchange, row.routing_key
        if isinstance(error, PublishUnconfirmed) and error.sent:
            if len(self._silent) >= _SILENT_KEPT:
                self._silent.clear()
            self._silent.add(destination)
        elif self._silent and is_answer(error):
            self._silent.discard(destination)

    def _next(self, row: OutboxRow) -> None:
        if row.ordering_key is None:
            return
        behind = self._behind[row.ordering_key]
        if behind:
            following = behind.popleft()
            self.waiting -= 1
            self.waiting_bytes -= len(following.message.body)
            self._make_ready(following)
        else:
            del self._behind[row.ordering_key]

    def _return_rows_behind(self, row: OutboxRow) -> None:
        if row.ordering_key is None:
            return
        self._return(self._behind.pop(row.ordering_key))

    def _return(self, rows: Collection[OutboxRow]) -> None:
        self.waiting -= len(rows)
        self.waiting_bytes -= sum(len(row.message.body) for row in rows)
        self.settlements.extend(RowSettlement(row, RowOutcome.BACK) for row in rows)
