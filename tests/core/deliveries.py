"""Deliveries for consumer tests.

They are built from raw properties, as any other publisher might send them.
"""

from __future__ import annotations

from collections.abc import Mapping

from reliable_mq.codec import encode_table, join_properties
from reliable_mq.core import headers
from reliable_mq.core.consumer.attempts import AttemptHistory, Failure
from reliable_mq.core.consumer.delivery import TRANSITIONS, ChannelGeneration, Delivery
from tests.transitions import follows

#: A table whose length ends before its entries do. The properties are valid, the headers are not.
BROKEN_TABLE = b"\x00\x00\x00\x05\x03foo?"
#: The source of deliveries until a session sets another one.
SOURCE = ChannelGeneration(0, 0, "orders")
#: If a message has a header of our publisher or consumer, the session checks it more closely.
OURS = {headers.FORMAT: headers.FORMAT_VERSION}


class CheckedDelivery(follows(TRANSITIONS), Delivery):  # type: ignore[misc]
    """A delivery that only allows the state changes of the table."""

    __slots__ = ()


def short(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogateescape")
    return bytes((len(encoded),)) + encoded


def too_deep(table: bytes) -> bytes:
    """Return the table with one more entry, nested too deeply to be decoded."""
    inner = bytes(4)
    for _ in range(200):
        inner = (len(inner) + 3).to_bytes(4) + b"\x01nF" + inner
    entries = table[4:] + b"\x01nF" + inner
    return len(entries).to_bytes(4) + entries


def properties(
    *,
    headers: Mapping[str, object] | bytes | None = None,
    message_id: str | None = None,
    **others: bytes,
) -> bytes:
    segments = dict(others)
    if headers is not None:
        segments["headers"] = headers if isinstance(headers, bytes) else encode_table(headers)
    if message_id is not None:
        segments["message_id"] = short(message_id)
    return join_properties(segments)


def delivery(
    tag: int = 1,
    *,
    redelivered: bool = False,
    exchange: str = "",
    routing_key: str = "orders",
    body: bytes = b"body",
    message_id: str | None = "m1",
    headers: Mapping[str, object] | bytes | None = None,
    source: ChannelGeneration = SOURCE,
    **others: bytes,
) -> Delivery:
    raw = properties(headers=headers, message_id=message_id, **others)
    made = CheckedDelivery("ctag", tag, redelivered, exchange, routing_key, raw, body)
    made.came_from(source)
    return made


def failure(*, at: float = 1_000.0, delay: float | None = None, verdict: str | None = None) -> Failure:
    return Failure("ValueError", "no", at, delay, verdict)


def failures(count: int, *, at: float = 1_000.0) -> AttemptHistory:
    made = AttemptHistory()
    for _ in range(count):
        made.add(failure(at=at))
    return made
