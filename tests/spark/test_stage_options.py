"""Options of staged mode, and the rows of staged messages."""

from __future__ import annotations

import pytest

from reliable_mq.codec import RawDelivery, encode_table, join_properties, split_properties
from reliable_mq.core.stage.envelope import marker, original_parts, staged
from reliable_mq.errors import ConfigurationError, Difference
from reliable_mq.spark.columns import record_batch
from reliable_mq.spark.options import StagedOptions, read_options
from reliable_mq.stage import MissingId
from reliable_mq.topology import mismatch_from_differences
from tests.core.deliveries import properties

GIVEN = {"url": "amqp://localhost/", "queue": "orders", "stage": "orders.stage"}


def given_options(**given: str) -> StagedOptions:
    options = read_options({**GIVEN, **given}, streaming=True)
    assert isinstance(options, StagedOptions)
    return options


def test_a_stage_is_read_from_its_beginning() -> None:
    """Messages that were moved before the query began belong to it."""
    options = given_options()
    assert options.stream.streams == ("orders.stage",)
    assert options.stream.starting_offsets == "earliest"
    assert options.relay is not None
    assert (options.relay.queue, options.relay.stage, options.relay.partitions) == ("orders", "orders.stage", None)
    assert options.relay.missing_id is MissingId.REFUSE
    assert "amqp" not in repr(options)


def test_the_options_of_the_stage_and_of_stream_mode_hold() -> None:
    """Option names ignore case."""
    more = {
        "STAGEPARTITIONS": "3",
        "stageKey": "header:customer",
        "stageRetention": "0",
        "stageMaxBytes": "1000000",
        "stageMissingId": "repeat",
        "missingQueueTimeout": "5m",
        "publisher.maxOutstanding": "100",
        "publisher.confirmTimeout": "1500ms",
        "startingOffsets": "latest",
        "maxMessagesPerTrigger": "10",
    }
    options = given_options(**more)
    assert options.relay is not None
    assert options.relay.streams == ("orders.stage-0", "orders.stage-1", "orders.stage-2")
    assert (options.relay.key, options.relay.retention, options.relay.max_bytes) == ("header:customer", None, 1_000_000)
    assert options.relay.missing_id is MissingId.REPEAT
    assert (options.relay.missing_queue_timeout, options.relay.confirm_timeout) == (300.0, 1.5)
    assert options.relay.max_outstanding == 100
    assert (options.stream.starting_offsets, options.stream.max_messages) == ("latest", 10)
    assert options.stream.streams == options.relay.streams


@pytest.mark.parametrize("lenient", [False, True])
def test_a_part_of_a_stage_is_read_only_by_a_lenient_query(lenient: bool) -> None:
    relay = given_options(failOnDataLoss=str(not lenient)).relay
    assert relay is not None
    assert relay.fewer_partitions is lenient


def test_a_stage_may_start_at_a_time_with_batch_and_task_sizes() -> None:
    """A starting time replaces the default start."""
    more = {"startingTimestamp": "1700000000000", "minMessagesPerTrigger": "5", "maxRecordsPerPartition": "100"}
    stream = given_options(**more).stream
    assert (stream.starting_timestamp, stream.starting_offsets) == (1_700_000_000_000, "latest")
    assert (stream.min_messages, stream.max_records) == (5, 100)


def test_without_a_relay_there_are_no_options_of_one() -> None:
    """Such options would have no effect."""
    assert given_options(stageBy="none").relay is None
    for option, value in (("stageKey", "routing_key"), ("publisher.confirmTimeout", "1s")):
        with pytest.raises(ConfigurationError, match=f"{option} is for the relay of the query, and stageBy is none"):
            given_options(stageBy="none", **{option: value})


def test_a_stage_that_others_fill_is_filtered_as_a_stream() -> None:
    """A binding or a shovel keeps the header that the filter uses."""
    stream = given_options(stageBy="none", streamFilter="eu,us", streamFilterMatchUnfiltered="true").stream
    assert (stream.stream_filter, stream.match_unfiltered) == (("eu", "us"), True)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"stageRetension": "1D"}, r"did you mean stageRetention\?"),
        ({"retention": "1D"}, r"unknown option 'retention'; did you mean stageRetention\? \(known: stage, stageBy"),
        ({"missingQueueTimeout": "1"}, "missingQueueTimeout must be a time with its unit"),
        ({"publisher.confirmTimeout": "0s"}, "publisher.confirmTimeout must be longer than '0s'"),
        ({"publisher.maxOutstanding": "65536"}, "publisher.maxOutstanding must be a whole number from 1 to 65535"),
        ({"publisher.mandatory": "true"}, "publisher.mandatory is an option of a sink, and this is staged mode"),
        ({"stage": " "}, "stage must name one stream, in at most 255 bytes, not ''"),
        ({"stage": "a,b"}, "stage must name one stream, in at most 255 bytes, not 'a,b'"),
        ({"stage": "s" * 241}, "stage must be a name of 1 to 240 bytes"),
        ({"stage": "s" * 256, "stageBy": "none"}, "stage must name one stream, in at most 255 bytes, not 's"),
        ({"stageby": "me"}, "stageBy must be query or none"),
        ({"queue": "a,b"}, "must name one queue"),
        ({"queue": ""}, "must name one queue"),
        ({"stream": "other"}, "stream and stage are both given"),
        ({"stagePartitions": "9" * 5000}, "stagePartitions must be a whole number"),
        ({"stagePartitions": "-1"}, "stagePartitions must be a whole number"),
        ({"stagePartitions": "0"}, "stagePartitions must be a whole number from 1 to 1000"),
        ({"stageRetention": "7 days"}, "stageRetention must be a number with a unit of Y, M, D, h, m or s, such as 7D"),
        ({"stageMaxBytes": "0"}, "stageMaxBytes must be a whole number from 1 to 9223372036854775807, not 0"),
        ({"stageMissingId": "maybe"}, "stageMissingId must be refuse or repeat"),
        ({"stageMessagesPerEntry": "65"}, "stageMessagesPerEntry must be a whole number from 1 to 64"),
        ({"stageKey": "body"}, "stageKey must be message_id"),
        ({"stage": "orders"}, "queue and stage are both"),
        ({"endingOffsets": "latest"}, "endingOffsets"),
        (
            {"streamFilter": "eu"},
            "streamFilter needs stageBy=none and a binding or shovel: entries have no",
        ),
    ],
)
def test_a_wrong_option_is_refused_by_name(changed: dict[str, str], text: str) -> None:
    """The error includes the fix."""
    with pytest.raises(ConfigurationError, match=text):
        given_options(**changed)


def test_a_stage_mismatch_is_explained_by_its_options() -> None:
    """A difference without an option has the text for all queues."""
    relay = given_options().relay
    assert relay is not None
    names = ("x-max-age", "x-max-length-bytes", "x-stream-max-segment-size-bytes")
    differences = [Difference(name, "1", "2") for name in names]
    explained = relay.explained(mismatch_from_differences("queue", "orders.stage", differences))
    assert "The stage has this of stageRetention and stageMaxBytes: give what it exists with" in str(explained)
    assert (explained.kind, explained.name, len(explained.differences)) == ("queue", "orders.stage", 3)
    other = mismatch_from_differences("queue", "orders.stage", [Difference("x-queue-type", "stream", "quorum")])
    assert relay.explained(other) is other


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 64),
        ({"maxMessagesPerTrigger": "100000"}, 1),
        ({"minMessagesPerTrigger": "100"}, 1),
        ({"maxBytesPerTrigger": "1000000"}, 1),
        ({"maxRecordsPerPartition": "1000"}, 1),
        ({"maxRecordsPerPartition": "1000", "stageMessagesPerEntry": "8"}, 8),
        ({"stageMessagesPerEntry": "1"}, 1),
    ],
)
def test_limits_count_messages_by_default(changed: dict[str, str], expected: int) -> None:
    """They count entries, so by default these have one message then."""
    relay = given_options(**changed).relay
    assert relay is not None
    assert relay.messages_per_entry == expected


def test_a_stage_is_for_streaming_queries() -> None:
    """A batch reads the stream directly."""
    with pytest.raises(ConfigurationError, match=r"option stream='orders\.stage'"):
        read_options(GIVEN, streaming=False)


def test_rows_of_an_entry_are_those_of_its_messages() -> None:
    """Markers produce no rows, and messages of other programs are unchanged.

    The offset is that of the entry, and the delivery count comes from the message.
    """
    raw = properties(message_id="m", headers={"items": [1, 2], "x-delivery-count": 3}, user_id=b"\5guest")
    original = RawDelivery("work", 1, True, "exchange", "key", raw, b"body")
    second = RawDelivery("work", 2, False, "", "orders", properties(), b"second")
    parts = [*original_parts(original), *original_parts(second)]
    entry, body = staged("orders", parts, 2, 0, low=0, epoch=bytes(8))
    deliveries = [
        RawDelivery("task", 1, False, "", "stage", with_offset(marker(bytes(8)), 4), b""),
        RawDelivery("task", 2, False, "", "stage", with_offset(entry, 5), body),
        RawDelivery("task", 3, False, "", "stage", with_offset(properties(message_id="other", headers={}), 6), b"x"),
    ]
    names = ("body", "queue", "offset", "exchange", "routing_key", "redelivered", "headers", "message_id", "user_id")
    names += ("delivery_count",)
    counted = ("x-delivery-count", "3")
    rows = record_batch(deliveries, "stage", names).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        (b"body", "orders", 5, "exchange", "key", True, [("items", "[1, 2]"), counted], "m", "guest", 3),
        (b"second", "orders", 5, "", "orders", False, [], None, None, None),
        (b"x", "stage", 6, "", "stage", False, [], "other", None, None),
    ]
    assert record_batch(deliveries[:1], "stage", ("body",)).num_rows == 0


def with_offset(raw: bytes, offset: int) -> bytes:
    segments = split_properties(raw)
    entry = encode_table({"x-stream-offset": 2**40})[4:-8] + offset.to_bytes(8)
    table = segments["headers"]
    segments["headers"] = (len(table) - 4 + len(entry)).to_bytes(4) + entry + table[4:]
    return join_properties(segments)
