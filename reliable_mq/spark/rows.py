"""Convert the rows of a DataFrame to messages, in one pass over each Arrow batch.

A row without a message id gets one. The id is the same at every attempt at its task, and different for different rows.
A task that fails, or that is slow under speculation, runs again and publishes its rows again; consumers recognise them
by the id. A retried attempt may see its rows in another order, so an id does not depend on a row's number but on its
content: it consists of a digest and the number of equal rows before it. Equal rows are interchangeable.

Invariants:

- A header that is not text has the corresponding AMQP type: an array becomes a list, a map or a struct becomes a table.
  Entries of maps are sorted, because Spark guarantees no order. No value that a column of its type can hold raises an
  error, except text that is not UTF-8.
- A row that cannot be a message becomes an `UnsendableRow` in its place. The rows around it are unaffected.
- Within one partition no two rows have the same id. Attempts that see the same rows, in any order, make the same ids.
  Ids contain nothing random and nothing that differs between processes (as ``hash`` does).

A row that cannot be sent becomes a dead letter that states the reason. The dead letter keeps as much of its row as a
message can carry: the body, and every valid property and header. Invalid columns are stored as text in a header of this
package. The destination and the reason are in the headers that every dead letter of this package has, so the
dead-letter tools can read them. A dead letter can always be encoded, whatever the row holds. It is persistent. It has
the message id of its row if that id is valid, else an id that is the same at every attempt. Nothing in it routes it
elsewhere or lets it expire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import repeat
from operator import itemgetter
from typing import Any, Final, NamedTuple

import pyarrow as pa

from reliable_mq._util.version import OWN_VERSION
from reliable_mq.codec import Properties, encode_properties, encode_property, encode_table
from reliable_mq.core import headers
from reliable_mq.core.publisher.publication import Publication
from reliable_mq.core.publisher.window import is_too_large
from reliable_mq.errors import ConfigurationError, PublishError, PublishRefused
from reliable_mq.message import Message
from reliable_mq.spark.options import WriteOptions

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_name: Final = itemgetter(0)  # of an entry of a map


class UnsendableRow(NamedTuple):
    number: int  # in its partition, from 0
    message_id: str | None
    reason: str
    values: Mapping[str, Any]  # times are in microseconds; bytes that are not UTF-8 are surrogate escapes


class Outgoing(NamedTuple):
    message: Message
    exchange: str
    routing_key: str


class RowPlan:
    """The meaning of each column. The driver creates it and pickles it for executors."""

    def __init__(self, options: WriteOptions, names: tuple[str, ...]) -> None:
        self._positions = {name: position for position, name in enumerate(names)}
        if options.exchange is not None:
            self._positions.pop("exchange", None)
        if options.routing_key is not None:
            self._positions.pop("routing_key", None)
        self._exchange = options.exchange or ""
        self._routing_key = options.routing_key or ""
        self._traceparent = options.traceparent  # not part of an id: a row keeps its id in another trace
        self._routed = "exchange" in self._positions or "routing_key" in self._positions
        self._properties = tuple(
            sorted(self._positions.keys() - {"body", "exchange", "routing_key", "message_id"})  # in any column order
        )

    @property
    def constant(self) -> tuple[str, ...]:
        """The content that all rows share, for `MessageIds`."""
        return self._exchange, self._routing_key, *self._properties

    @property
    def chooses_exchange(self) -> bool:
        """Whether each row names its exchange."""
        return "exchange" in self._positions

    @property
    def chooses_route(self) -> bool:
        """Whether a row determines its queues, as headers do at some exchanges.

        Headers have no effect at the default exchange, which uses only the routing key.
        """
        return self._routed or ("headers" in self._positions and self._exchange != "")

    def messages(self, batch: pa.RecordBatch, ids: MessageIds, first: int) -> Iterator[Outgoing | UnsendableRow]:
        """Return the messages of a batch in order, with `UnsendableRow` for bad rows."""
        try:
            yield from self._messages(batch, ids, first)
        except UnicodeDecodeError:  # raised for a whole column, before the first message
            if batch.num_rows == 1:
                yield self._undecodable(batch, first)
                return
            half = batch.num_rows // 2
            yield from self.messages(batch.slice(0, half), ids, first)
            yield from self.messages(batch.slice(half), ids, first + half)

    def _messages(self, batch: pa.RecordBatch, ids: MessageIds, first: int) -> Iterator[Outgoing | UnsendableRow]:
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
                properties = _properties(names, values, self._traceparent) if values or self._traceparent else {}
                message = Message(body, message_id=message_id, **properties)
            except (ConfigurationError, UnicodeError) as error:
                reason = str(error)
                if body is None:
                    reason = "column body is null: leave such rows out, or give them an empty one"
                given = dict(zip(names, values, strict=True)) if values else {}
                given |= {"body": body, "exchange": exchange, "routing_key": routing_key, "message_id": message_id}
                yield self._unsendable(number, message_id, reason, given)
            else:
                yield Outgoing(message, exchange or "", routing_key or "")

    def _undecodable(self, row: pa.RecordBatch, number: int) -> UnsendableRow:
        """Return a row whose text is not UTF-8. It is the only row of its batch."""
        given: dict[str, Any] = {"exchange": self._exchange, "routing_key": self._routing_key}
        unfit = []
        for name in sorted(self._positions, key=lambda name: name != "message_id"):
            try:
                (given[name],) = self._values(row, name)
            except UnicodeDecodeError:
                unfit.append(name)
                given[name] = _escaped(row.column(self._positions[name]))
        message_id = None if "message_id" in unfit else given.get("message_id")
        reason = f"column {unfit[0]} holds bytes that are not UTF-8: decode them, or put them into body"
        return self._unsendable(number, message_id, reason, given)

    def _unsendable(self, number: int, message_id: str | None, reason: str, given: dict[str, Any]) -> UnsendableRow:
        if self._traceparent is not None and given.get("traceparent") is None:
            given["traceparent"] = self._traceparent
        return UnsendableRow(number, message_id, reason, given)

    def _values(self, batch: pa.RecordBatch, name: str, otherwise: object = None) -> Iterable[Any]:
        position = self._positions.get(name)
        return repeat(otherwise) if position is None else _CONVERTERS.get(name, _plain)(batch.column(position))


def _properties(names: tuple[str, ...], values: tuple[Any, ...], traceparent: str | None) -> dict[str, Any]:
    """Return the properties of a row. ``traceparent`` applies if it has no context."""
    properties = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    if "headers" in properties:
        properties["headers"] = dict(properties["headers"])
    if "traceparent" in properties:
        traceparent = headers.checked_traceparent("traceparent", properties.pop("traceparent"))
    if traceparent is not None:  # a context among the row's headers takes precedence
        properties["headers"] = {"traceparent": traceparent, **properties.get("headers", {})}
    if "timestamp" in properties:
        properties["timestamp"] = moment(properties["timestamp"])
    return properties


def _plain(column: pa.Array) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return values


def _binary(column: pa.Array) -> list[Any]:
    """Return text as its UTF-8 bytes, which is how Arrow stores it."""
    if pa.types.is_string(column.type):
        column = column.cast(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    return _plain(column)


def _microseconds(column: pa.Array) -> list[Any]:
    """Return times as numbers, because zone names differ between sessions."""
    return _plain(column.cast(pa.timestamp("us", "UTC")).cast(pa.int64()))


def _entries(column: pa.Array) -> list[Any]:
    """Return headers. Map entries are sorted: Spark guarantees no order."""
    if not pa.types.is_map(column.type) or not pa.types.is_string(column.type.item_type):
        return written_values(column)
    return [None if entries is None else sorted(entries, key=_name) for entries in _plain(column)]


def moment(microseconds: int) -> datetime:
    """Return the time that many microseconds since 1970, in whole seconds."""
    try:
        return _EPOCH + timedelta(seconds=microseconds // 1_000_000)
    except OverflowError as error:  # Spark's timestamps end in the year 294247
        raise ConfigurationError("timestamp lies outside of the years 1 to 9999: correct it, or null it") from error


class _NoTime:
    """A time outside Python's range. No message can carry it."""

    def __init__(self, microseconds: int) -> None:
        self._microseconds = microseconds

    def __repr__(self) -> str:
        return f"{self._microseconds} microseconds since 1970"


def written_values(column: pa.Array, *, escaped: bool = False) -> list[dict[str, Any] | None]:
    """Return headers in the form that `Message` accepts, without null struct fields.

    Raises:
        UnicodeDecodeError: If text is not UTF-8 and ``escaped`` is false.
    """
    plain = column.cast(_plain_type(column.type, escaped))
    return [_written(column.type, value) for value in plain.to_pylist()]


def _plain_type(kind: pa.DataType, escaped: bool) -> pa.DataType:
    """Return the type with numbers for times, and bytes for text to be escaped."""
    if pa.types.is_map(kind):
        return pa.map_(_plain_type(kind.key_type, escaped), _plain_type(kind.item_type, escaped))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _plain_type(field.type, escaped)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_plain_type(kind.value_type, escaped))
    if pa.types.is_timestamp(kind):
        return pa.int64()
    if escaped and pa.types.is_large_string(kind):
        return pa.large_binary()
    return pa.binary() if escaped and pa.types.is_string(kind) else kind


def _written(kind: pa.DataType, value: Any) -> Any:
    if value is None:
        return None
    if pa.types.is_map(kind):
        entries = [(_written(kind.key_type, name), _written(kind.item_type, each)) for name, each in value]
        return dict(sorted(entries, key=_name))
    if pa.types.is_struct(kind):
        return {field.name: _written(field.type, value[field.name]) for field in kind if value[field.name] is not None}
    if pa.types.is_list(kind):
        return [_written(kind.value_type, each) for each in value]
    if pa.types.is_timestamp(kind):
        try:
            return moment(value)
        except ConfigurationError:
            return _NoTime(value)
    if isinstance(value, bytes) and (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return value.decode("utf-8", "surrogateescape")
    return value


def _escaped(column: pa.Array) -> Any:
    """Return the only value of a text or header column, with surrogate escapes."""
    if pa.types.is_map(column.type) or pa.types.is_struct(column.type):
        (value,) = written_values(column, escaped=True)
        return value
    (encoded,) = _binary(column)
    return encoded.decode("utf-8", "surrogateescape")


_CONVERTERS: Final[dict[str, Callable[[pa.Array], list[Any]]]] = {
    "body": _binary,
    "timestamp": _microseconds,
    "headers": _entries,
}


_DIGEST_BYTES: Final = 16


class MessageIds:
    """A generator of the message ids of one partition.

    It stores about 70 bytes for each row until the task has ended. The prefix is unique for this partition. The
    constant is the content that all rows share, such as their exchange and routing key.
    """

    __slots__ = ("_base", "_prefix", "_repeated", "_seen")

    def __init__(self, prefix: str, constant: Sequence[object] = ()) -> None:
        self._prefix = prefix
        self._base = blake2b(repr(tuple(constant)).encode(), digest_size=_DIGEST_BYTES)
        self._seen: set[int] = set()  # the first half of each digest: 64 bits
        self._repeated: dict[int, int] = {}

    def of(self, body: bytes, values: tuple[object, ...] = ()) -> str:
        """Return the id of the next row.

        ``values`` holds the row's other columns in a fixed order: text, numbers, None, and lists or tuples of these.
        """
        digest = self._base.copy()
        if values:
            # The length of the other columns is included, so that two different rows never have the same bytes.
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


# -- dead letters ------------------------------------------------------------------------------------------------------

_SHOWN: Final = 200  # maximum bytes of a header name inside another name, which may have 255
_TEXT: Final = 1024  # maximum characters of a value that is not stored as a property or header
_HEADERS: Final = 48 * 2**10  # maximum bytes; a frame holds 128 KiB, or 8 KiB if the broker requires it
_LARGEST: Final = 16 * 2**20  # maximum bytes of a body, as in a publisher's default
_CUT: Final = 64 * 2**10  # bytes kept of a body that is too large
_MOVED: Final = {"user_id": headers.ORIGINAL_USER_ID, "expiration": headers.ORIGINAL_EXPIRATION}
_DIRECT_REPLY: Final = "amq.rabbitmq.reply-to"  # RabbitMQ refuses it on a channel that does not consume replies
_COPIES: Final = {"CC": headers.ORIGINAL_CC, "BCC": headers.ORIGINAL_BCC}


def letter_of_row(row: UnsendableRow, ids: MessageIds) -> Message:
    """Return the dead letter of a row that cannot be made into a message."""
    values = dict(row.values)
    body = values.pop("body", None)
    exchange, routing_key = values.pop("exchange", None), values.pop("routing_key", None)
    given = dict(values.pop("headers", None) or ())
    if (traceparent := values.pop("traceparent", None)) is not None:
        given.setdefault("traceparent", traceparent)
    table, unfit = _fit_headers(given)
    fit: dict[str, Any] = {}
    for name, value in values.items():
        if value is None or name == "persistent":
            continue
        if _fits(name, value):
            fit[name] = moment(value) if name == "timestamp" else value
        else:
            unfit[name] = _header_text(f"{value} microseconds since 1970" if name == "timestamp" else value)
    if "message_id" not in fit:
        others = sorted((name, value) for name, value in row.values.items() if name != "body")
        fit["message_id"] = ids.of(body or b"", (body is None, others))
    message = Message(body or b"", headers=table, **fit)
    refused = Outgoing(message, exchange or "", routing_key or "")
    return _letter(refused, row.reason, unfit, cut=len(message.body) > _LARGEST)


def letter_of_message(refused: Outgoing | Publication, error: PublishError | ConfigurationError) -> Message:
    """Return the dead letter of a message that cannot go to its row's destination."""
    too_large = isinstance(error, PublishRefused) and is_too_large(error.reply_code, error.reply_text)
    return _letter(refused, str(error), {}, cut=too_large)


def _letter(refused: Outgoing | Publication, reason: str, unfit: dict[str, Any], *, cut: bool) -> Message:
    """Return a letter that fits into a frame, with a body that a broker accepts.

    ``unfit`` holds the text of columns that are not in the message.
    """
    view = Properties(encode_properties(refused.message))
    table: dict[str, Any] = {_COPIES.get(name, name): value for name, value in view.headers.items()}
    table |= {original: getattr(view, name) for name, original in _MOVED.items() if getattr(view, name) is not None}
    letter = refused.message.replace(user_id=None, expiration=None, persistent=True)
    if view.reply_to == _DIRECT_REPLY:
        unfit = {**unfit, "reply_to": _DIRECT_REPLY}
        letter = letter.replace(reply_to=None)
    table |= {
        headers.FORMAT: headers.FORMAT_VERSION,
        headers.DEAD_LETTER_REASON: _header_text(reason),
        headers.CONSUMER: "spark-sink",
        headers.PACKAGE_VERSION: OWN_VERSION,
        headers.ORIGINAL_EXCHANGE: _header_text(refused.exchange),
        headers.ORIGINAL_ROUTING_KEY: _header_text(refused.routing_key),
    }
    if not refused.exchange:  # the default exchange: the routing key names the queue that a replay uses
        table[headers.ORIGINAL_QUEUE] = _header_text(refused.routing_key)
    if unfit:
        table[headers.ORIGINAL_COLUMNS] = unfit
    if len(encode_table(table)) > _HEADERS:
        table = {name: value for name, value in table.items() if name.startswith(headers.PREFIX)}
        table[headers.ORIGINAL_COLUMNS] = {"headers": "headers, which are too large for a dead letter"}
    if cut and len(letter.body) > _CUT:
        table[headers.ORIGINAL_SIZE] = len(letter.body)
        letter = letter.replace(body=letter.body[:_CUT])
    return letter.replace(headers=table)


def _fit_headers(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split headers into those that can be sent, and the text of the others."""
    fit: dict[str, Any] = {}
    unfit: dict[str, Any] = {}
    for name, value in given.items():
        try:
            name.encode()
            encode_property("headers", {name: value})
        except (ConfigurationError, UnicodeError):
            unfit[f"headers[{_shown(name)}]"] = _header_text(value)
        else:
            fit[name] = value
    return fit, unfit


def _shown(name: str) -> str:
    """Return a header's name as part of another name: short and printable."""
    printable = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in name
    )
    return printable.encode()[:_SHOWN].decode(errors="ignore")


def _fits(name: str, value: Any) -> bool:
    try:
        if isinstance(value, str):
            value.encode()
        encode_property(name, moment(value) if name == "timestamp" else value)
    except (ConfigurationError, UnicodeError):
        return False
    return True


def _header_text(value: Any) -> str | bytes:
    """Return a value as the text of a header, or as bytes if it is not UTF-8."""
    text = value if isinstance(value, str) else repr(value)
    return headers.wire_text(text[:_TEXT])
