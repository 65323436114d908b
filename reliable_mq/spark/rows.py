"""Convert the rows of a DataFrame to messages, in one pass over each Arrow batch.

A row without a message id gets one: the same at every attempt at its task, different for different rows. A task that
fails, or is slow under speculation, runs again and publishes its rows again; consumers recognise them by the id. A
retried attempt may see its rows in another order, so an id is made not of a row's number but of its content: a digest,
and how many equal rows came before. Equal rows are interchangeable.

Invariants:

- A row that cannot be a message is an error that names the row; the messages of the rows before it were returned.
- Within one partition no two rows have the same id. Attempts that see the same rows, in whatever order, make the same
  ids. They contain nothing random, and nothing that differs between processes (``hash`` does).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from reliable_mq.errors import ConfigurationError
from reliable_mq.message import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from reliable_mq.spark.options import WriteOptions

__all__ = ["MessageIds", "Outgoing", "RowPlan", "UnsendableRow"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class UnsendableRow(Exception):
    """A row cannot be a message. The sink turns it into an error with the partition.

    Attributes:
        number: of the row in its partition, from 0.
        message_id: of its message, where it has one.
        reason: the error.
    """

    def __init__(self, number: int, message_id: str | None, reason: str) -> None:
        super().__init__(reason)
        self.number = number
        self.message_id = message_id
        self.reason = reason


class Outgoing(NamedTuple):
    """A message and where to publish it to."""

    message: Message
    exchange: str
    routing_key: str


class RowPlan:
    """The meaning of each column. Made on the driver, used on executors: picklable.

    Args:
        options: ``exchange`` and ``routing_key`` come before the columns of these names.
        names: of the columns, in their order; checked by `reliable_mq.spark.columns.check_written_schema`.
    """

    def __init__(self, options: WriteOptions, names: tuple[str, ...]) -> None:
        self._positions = {name: position for position, name in enumerate(names)}
        if options.exchange is not None:
            self._positions.pop("exchange", None)
        if options.routing_key is not None:
            self._positions.pop("routing_key", None)
        self._exchange = options.exchange or ""
        self._routing_key = options.routing_key or ""
        self._routed = "exchange" in self._positions or "routing_key" in self._positions
        self._properties = tuple(
            sorted(self._positions.keys() - {"body", "exchange", "routing_key", "message_id"})  # whatever their order
        )

    @property
    def constant(self) -> tuple[str, ...]:
        """The content that all rows share, for `MessageIds`."""
        return self._exchange, self._routing_key, *self._properties

    def messages(self, batch: pa.RecordBatch, ids: MessageIds, first: int) -> Iterator[Outgoing]:
        """Return the messages of a batch, in order.

        Args:
            batch: with the columns that the plan was made for.
            ids: for the rows whose ``message_id`` is null or missing.
            first: the number of the batch's first row in its partition.

        Raises:
            UnsendableRow: a row cannot be a message.
        """
        try:
            yield from self._messages(batch, ids, first)
        except UnicodeDecodeError as error:  # of a whole column, before the first message
            unfit, name, message_id = self._first_without_text(batch)
            yield from self._messages(batch.slice(0, unfit), ids, first)
            reason = f"column {name} holds bytes that are not UTF-8: decode them, or put them into body"
            raise UnsendableRow(first + unfit, message_id, reason) from error

    def _messages(self, batch: pa.RecordBatch, ids: MessageIds, first: int) -> Iterator[Outgoing]:
        names = self._properties
        columns = [self._values(batch, name) for name in names]
        rows: Iterable[tuple[Any, ...]] = zip(*columns, strict=True) if columns else repeat(())
        numbered = zip(
            self._values(batch, "body"),
            self._values(batch, "exchange", self._exchange),
            self._values(batch, "routing_key", self._routing_key),
            self._values(batch, "message_id"),
            rows,
            strict=False,
        )
        for number, (body, exchange, routing_key, message_id, values) in enumerate(numbered, first):
            try:
                if message_id is None and body is not None:
                    message_id = ids.of(body, (exchange, routing_key, *values) if self._routed else values)  # noqa: PLW2901
                properties = _properties(names, values) if values else {}
                message = Message(body, message_id=message_id, **properties)
            except (ConfigurationError, UnicodeError) as error:
                if body is None:
                    reason = "column body is null: leave such rows out, or give them an empty one"
                    raise UnsendableRow(number, message_id, reason) from error
                raise UnsendableRow(number, message_id, str(error)) from error
            yield Outgoing(message, exchange or "", routing_key or "")

    def _first_without_text(self, batch: pa.RecordBatch) -> tuple[int, str, str | None]:
        """Return the first row whose text is not UTF-8, its column and its message id."""
        names = sorted(self._positions, key=lambda name: name != "message_id")
        for number in range(batch.num_rows):
            row = batch.slice(number, 1)
            message_id = None
            for name in names:
                try:
                    (value,) = self._values(row, name)
                except UnicodeDecodeError:
                    return number, name, message_id
                if name == "message_id":
                    message_id = value
        raise AssertionError("every row can be decoded, and all of them together cannot")

    def _values(self, batch: pa.RecordBatch, name: str, otherwise: object = None) -> Iterable[Any]:
        position = self._positions.get(name)
        return repeat(otherwise) if position is None else _CONVERTERS.get(name, _plain)(batch.column(position))


def _properties(names: tuple[str, ...], values: tuple[Any, ...]) -> dict[str, Any]:
    properties = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    if "headers" in properties:
        properties["headers"] = dict(properties["headers"])
    if "timestamp" in properties:
        properties["timestamp"] = _moment(properties["timestamp"])
    return properties


def _moment(microseconds: int) -> datetime:
    try:
        return _EPOCH + timedelta(seconds=microseconds // 1_000_000)
    except OverflowError as error:  # Spark's timestamps end in the year 294247
        raise ConfigurationError("timestamp lies outside of the years 1 to 9999: correct it, or null it") from error


def _plain(column: pa.Array) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return values


def _binary(column: pa.Array) -> list[Any]:
    """Return text as its bytes in UTF-8, which Arrow stores."""
    if pa.types.is_string(column.type):
        column = column.cast(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    return _plain(column)


def _microseconds(column: pa.Array) -> list[Any]:
    """Return times as numbers: the name of a zone differs between sessions."""
    return _plain(column.cast(pa.timestamp("us", "UTC")).cast(pa.int64()))


def _entries(column: pa.Array) -> list[Any]:
    """Return the entries of maps, sorted: Spark promises no order."""
    return [None if entries is None else sorted(entries, key=_name) for entries in _plain(column)]


def _name(entry: tuple[str, str | None]) -> str:
    return entry[0]


_CONVERTERS: Final[dict[str, Callable[[pa.Array], list[Any]]]] = {
    "body": _binary,
    "timestamp": _microseconds,
    "headers": _entries,
}


_DIGEST_BYTES: Final = 16


class MessageIds:
    """Make the message ids of one partition.

    It remembers some 70 bytes for each row until the task has ended.

    Args:
        prefix: unique for this partition: the query and the batch, or the write, and its number.
        constant: content that all rows share, e.g. their exchange and routing key.
    """

    __slots__ = ("_base", "_prefix", "_repeated", "_seen")

    def __init__(self, prefix: str, constant: Sequence[object] = ()) -> None:
        self._prefix = prefix
        self._base = blake2b(repr(tuple(constant)).encode(), digest_size=_DIGEST_BYTES)
        self._seen: set[int] = set()  # the first half of each digest: 64 bits
        self._repeated: dict[int, int] = {}

    def of(self, body: bytes, values: tuple[object, ...] = ()) -> str:
        """Return the id of the next row.

        Args:
            body: of the message.
            values: its other columns, in a fixed order; text, numbers, None, and lists or tuples of these.
        """
        digest = self._base.copy()
        if values:
            # With the length of the other columns, two different rows never have the same bytes.
            columns = repr(values).encode("utf-8", "surrogatepass")
            digest.update(len(columns).to_bytes(8))
            digest.update(columns)
        digest.update(body)
        name = digest.digest()
        key = int.from_bytes(name[:8])
        if key not in self._seen:
            self._seen.add(key)
            return f"{self._prefix}/{name.hex()}"
        count = self._repeated.get(key, 0) + 1
        self._repeated[key] = count
        return f"{self._prefix}/{name.hex()}/{count}"
