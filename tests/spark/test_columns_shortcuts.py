"""Shortcuts for batches produce the same rows as single messages."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from reliable_mq import Message
from reliable_mq.codec import RawDelivery, encode_properties, encode_table, join_properties
from reliable_mq.spark.columns import READ_SCHEMA, record_batch

EVERYTHING = tuple(READ_SCHEMA.fieldNames())
OFFSET = b"\x0fx-stream-offsetl" + (41).to_bytes(8)


def delivery(properties: bytes) -> RawDelivery:
    return RawDelivery("", 1, False, "e", "k", properties, b"body")


def table(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return len(body).to_bytes(4) + body


MESSAGES = [
    delivery(encode_properties(Message(b"", **given)))  # type: ignore[arg-type]
    for given in (
        {},
        {"content_type": "text/plain"},
        {"content_encoding": "gzip", "reply_to": "r"},
        {"headers": {"x-delivery-count": 3, "a": "b"}},
        {"priority": 7, "expiration": 1.5},
        {"timestamp": datetime(2026, 1, 2, tzinfo=UTC), "type": "t"},
        {"user_id": "u", "app_id": "a", "correlation_id": "c"},
        {"persistent": False},
    )
] + [delivery(b"\0\0"), delivery(b"\xff"), delivery(b""), delivery(b"\xff\xff")]


@pytest.mark.parametrize("count", range(1, len(MESSAGES) + 1))
def test_a_column_that_some_have_is_read_for_all(count: int) -> None:
    """It is null for messages that lack it or have it damaged."""
    together = record_batch(MESSAGES[:count], "q", EVERYTHING).to_pylist()
    assert together == [record_batch([each], "q", EVERYTHING).to_pylist()[0] for each in MESSAGES[:count]]


def test_a_column_that_none_has_is_null() -> None:
    """It has the type that Spark expects, even without rows."""
    for deliveries in ([], [delivery(b"\0\0")] * 3):
        batch = record_batch(deliveries, "q", EVERYTHING)
        assert batch.num_rows == len(deliveries)
        assert batch.column("priority").null_count == len(deliveries)
        assert batch.schema == record_batch(MESSAGES, "q", EVERYTHING).schema


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (table(OFFSET), []),
        (table(OFFSET, b"\x01aS\0\0\0\x01b"), [("a", "b")]),
        (table(b"\x01aF" + table(OFFSET), OFFSET), [("a", '{"x-stream-offset": 41}')]),
        (table(b"\x01aF" + table(OFFSET)), [("a", '{"x-stream-offset": 41}')]),
        (encode_table({"x-stream-offset": "7"}), []),
    ],
)
def test_the_offset_is_no_header(headers: bytes, expected: list[tuple[str, str]]) -> None:
    """It has its own column. An equal entry in a nested table stays there."""
    batch = record_batch([delivery(join_properties({"headers": headers}))], "q", ("headers", "offset"))
    assert batch.column("headers").to_pylist() == [expected]
