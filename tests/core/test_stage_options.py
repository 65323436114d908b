"""The options of a relay into a stage: validation, topology, partition keys."""

from __future__ import annotations

from typing import Any

import pytest

from reliable_mq.codec import RawDelivery
from reliable_mq.core.stage.options import MissingId, StageOptions, shard
from reliable_mq.errors import ConfigurationError, Difference
from reliable_mq.topology import Binding, Exchange, Queue, mismatch_from_differences
from tests.core.deliveries import properties


def options(**arguments: Any) -> StageOptions:
    return StageOptions(**{"url": "amqp://localhost/", "queue": "orders", "stage": "orders.stage", **arguments})


def delivery(raw: bytes, *, routing_key: str = "key") -> RawDelivery:
    return RawDelivery("", 1, False, "exchange", routing_key, raw, b"body")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"queue": ""}, "queue must be a name of 1 to 240 bytes"),
        ({"queue": "ü" * 121}, "queue must be a name of 1 to 240 bytes"),
        ({"stage": 1}, "stage must be a name"),
        ({"stage": "orders"}, "queue and stage are both 'orders'"),
        ({"partitions": 0}, "partitions must be"),
        ({"fewer_partitions": 1}, "fewer_partitions must be"),
        ({"max_outstanding": 65_536}, "max_outstanding must be"),
        ({"retention": "7 days"}, "retention must be a number with a unit"),
        ({"retention": 7}, "retention must be a number with a unit"),
        ({"retention": "32Y"}, "retention must be .* at most 31Y"),
        ({"max_bytes": 2**63}, "max_bytes must be a whole number from 1 to 9223372036854775807"),
        ({"key": "header:"}, "key must be message_id, routing_key or header:NAME"),
        ({"key": 1}, "key must be message_id"),
        ({"missing_id": "refuse"}, "missing_id must be a MissingId"),
        ({"confirm_timeout": 0}, "confirm_timeout must be"),
        ({"missing_queue_timeout": -1}, "missing_queue_timeout must be"),
        ({"new_stage_grace": -1}, "new_stage_grace must be"),
    ],
)
def test_a_wrong_option_is_named(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        options(**wrong)


def test_an_error_calls_an_option_as_its_user_does() -> None:
    with pytest.raises(ConfigurationError, match="--retention must be"):
        options(retention="x", names={"retention": "--retention"})


@pytest.mark.parametrize(("partitions", "further"), [(None, "orders.stage-0"), (2, "orders.stage-2")])
def test_a_stage_with_more_partitions_has_the_next_one(partitions: int | None, further: str) -> None:
    made = options(partitions=partitions, names={"partitions": "--partitions"})
    assert made.next_partition == further
    assert f"has a partition '{further}', which would not be read: give --partitions" in made.more_partitions


def test_a_plain_stage_is_a_stream_and_a_lock() -> None:
    made = options()
    stream, lock = made.topology()
    assert made.streams == ("orders.stage",)
    assert isinstance(stream, Queue)
    assert (stream.name, stream.type, stream.max_age) == ("orders.stage", "stream", 7 * 86_400)
    assert isinstance(lock, Queue)
    assert (lock.name, lock.type, made.missing_id) == ("orders.stage.relay", "classic", MissingId.REFUSE)


def test_a_partitioned_stage_is_a_super_stream() -> None:
    made = options(partitions=2, retention=None)
    assert made.max_age is None
    exchange, first, second, *bindings, lock = made.topology()
    assert isinstance(exchange, Exchange)
    assert exchange.arguments == {"x-super-stream": True}
    assert [queue.name for queue in (first, second, lock) if isinstance(queue, Queue)] == [*made.streams, made.lock]
    assert [binding.routing_key for binding in bindings if isinstance(binding, Binding)] == ["0", "1"]


@pytest.mark.parametrize(
    ("most", "segment", "kept"),
    [
        (1, 1_000_000, 0),
        (80_000_000, 10_000_000, 70_000_000),
        (8_000_000_000, 500_000_000, 7_500_000_000),
    ],
)
def test_a_limit_of_bytes_drops_whole_segments(most: int, segment: int, kept: int) -> None:
    """A segment has an eighth of the limit, within the bounds of RabbitMQ.

    The other segments are kept.
    """
    limited = options(max_bytes=most)
    stream, _ = limited.topology()
    assert isinstance(stream, Queue)
    assert stream.max_length_bytes == most
    assert stream.arguments == {"x-stream-max-segment-size-bytes": segment}
    assert limited.kept_bytes == kept
    assert options().kept_bytes is None


def test_a_stage_that_exists_otherwise_names_its_option() -> None:
    difference = Difference("x-max-age", "604800s", "60s")
    explained = options(names={"retention": "stageRetention"}).explained(
        mismatch_from_differences("queue", "orders.stage", [difference])
    )
    assert "The stage has this of stageRetention" in str(explained)
    assert explained.differences == (difference,)


def test_a_difference_that_is_of_no_option_stays_as_it_is() -> None:
    mismatch = mismatch_from_differences("queue", "orders.stage", [Difference("durable", "True", "False")])
    assert options().explained(mismatch) is mismatch


def test_messages_are_divided_by_their_id() -> None:
    read = options().key_reader()
    assert read(delivery(b""), b"id") == b"id"
    assert read(delivery(b""), None) == b"body"


def test_messages_are_divided_by_their_routing_key() -> None:
    read = options(key="routing_key").key_reader()
    assert read(delivery(b"", routing_key="a\udcff"), b"id") == b"a\xff"


def test_messages_are_divided_by_a_header() -> None:
    """Without that header, or with unreadable headers, the body decides."""
    read = options(key="header:customer").key_reader()
    assert read(delivery(properties(headers={"customer": 7})), b"id") == b"7"
    assert read(delivery(properties(headers={"other": 7})), b"id") == b"body"
    assert read(delivery(properties(headers=b"\0\0\0\1x")), b"id") == b"body"


def test_equal_keys_go_to_one_partition() -> None:
    assert {shard(b"customer", 4) for _ in range(3)} == {shard(b"customer", 4)}
    assert {shard(str(number).encode(), 4) for number in range(100)} == {0, 1, 2, 3}
