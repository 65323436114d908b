"""The options of the data source, and the errors for wrong ones."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle

from reliable_mq.errors import ConfigurationError
from reliable_mq.spark import options as module
from reliable_mq.spark.columns import READ_SCHEMA
from reliable_mq.spark.datasource import RabbitMQDataSource
from reliable_mq.spark.options import QueueOptions, StreamOptions, read_options, write_options

URL = "amqp://user:s3cret@localhost/"


def read(*, streaming: bool = True, **given: str) -> Any:
    return read_options({"url": URL, **given}, streaming=streaming)


def test_queues_are_named_in_one_option() -> None:
    """The names are separated by commas, and option names ignore case."""
    options = read_options({"URL": URL, "Queue": "a, b"}, streaming=True)
    assert isinstance(options, QueueOptions)
    assert options.queues == ("a", "b")
    assert (options.max_messages, options.max_bytes, options.prefetch) == (65535, 32 * 2**20, None)
    assert options.min_partitions is None
    assert options.fail_on_data_loss is True


def test_every_option_of_a_queue_is_taken() -> None:
    """Values are parsed as numbers and booleans."""
    options = read(
        queue="a", maxMessagesPerTrigger="5", maxBytesPerTrigger="1000", prefetch="7", minPartitions="3",
        failOnDataLoss="False", missingQueueTimeout="5m",
    )  # fmt: skip
    assert options.missing_queue_timeout == 300
    assert (options.max_messages, options.max_bytes, options.prefetch, options.min_partitions) == (5, 1000, 7, 3)
    assert options.fail_on_data_loss is False


def test_streams_begin_where_kafka_topics_do() -> None:
    """A query begins at the end, and a batch at the beginning."""
    query = read(stream="s")
    assert isinstance(query, StreamOptions)
    assert (query.starting_offsets, query.ending_offsets) == ("latest", "latest")
    assert read(stream="s", streaming=False).starting_offsets == "earliest"


def test_every_option_of_a_stream_is_taken() -> None:
    """Offsets per stream are JSON."""
    options = read(
        stream="s,t", startingOffsets='{"s": 5, "t": "earliest"}', endingOffsets='{"s": 9, "t": "latest"}',
        prefetch="7", minPartitions="3", streaming=False,
    )  # fmt: skip
    assert options.streams == ("s", "t")
    assert options.starting_offsets == {"s": 5, "t": "earliest"}
    assert options.ending_offsets == {"s": 9, "t": "latest"}
    assert (options.prefetch, options.min_partitions) == (7, 3)
    limited = read(stream="s", maxMessagesPerTrigger="5", maxBytesPerTrigger="1000")
    assert (limited.max_messages, limited.max_bytes) == (5, 1000)
    assert read(stream="s", startingTimestamp="1700000000000").starting_timestamp == 1_700_000_000_000
    assert read(stream="s", startingOffsetsByTimestamp='{"s": 5}').starting_timestamp == {"s": 5}
    lenient = read(stream="s", startingTimestamp="5", startingOffsetsByTimestampStrategy="Latest")
    assert lenient.latest_without_match
    assert read(stream="s", endingTimestamp="7", streaming=False).ending_timestamp == 7
    assert read(stream="s", startingTimestamp="7", endingTimestamp="7", streaming=False).starting_timestamp == 7
    filtered = read(stream="s", streamFilter="eu, us", streamFilterMatchUnfiltered="true")
    assert (filtered.stream_filter, filtered.match_unfiltered) == (("eu", "us"), True)
    waiting = read(stream="s", minMessagesPerTrigger="7", maxTriggerDelay="30s")
    assert (waiting.min_messages, waiting.max_trigger_delay) == (7, 30.0)
    assert read(stream="s", startingOffsets="EARLIEST").starting_offsets == "earliest"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prefetch": "1"}, "neither is there"),
        ({"queue": "a", "stream": "b"}, "both are there"),
        ({"queue": " "}, "queue is empty"),
        ({"queue": "a,,b"}, "empty name"),
        ({"queue": "a,a"}, "names one twice"),
        ({"queue": "a" * 256}, "more than 255 bytes"),
        ({"queue": "a", "startingOffsets": "earliest"}, "startingOffsets is an option of stream mode"),
        ({"queue": "a", "prefetch": "0"}, "prefetch must be a whole number from 1 to 65535, not '0'"),
        ({"queue": "a", "maxMessagesPerTrigger": "ten"}, "maxMessagesPerTrigger must be a whole number of at least 1"),
        ({"queue": "a", "maxBytesPerTrigger": "128000000"}, "maxBytesPerTrigger must be a whole number from 1 to"),
        ({"queue": "a", "failOnDataLoss": "yes"}, "failOnDataLoss must be true or false, not 'yes'"),
        ({"queue": "a", "missingQueueTimeout": "60"}, "missingQueueTimeout must be a time with its unit, as 500ms"),
        ({"queue": "a", "prefetsh": "1"}, "unknown option 'prefetsh'; did you mean prefetch?"),
        ({"queue": "a", "nonsense": "1"}, r"unknown option 'nonsense' \(known: url"),
        ({"queue": "a", "path": "/x"}, "a path is given"),
        ({"stream": "s", "startingOffsets": "first"}, "startingOffsets must be 'earliest', 'latest' or JSON"),
        ({"stream": "s", "startingOffsets": "[1]"}, "startingOffsets must be"),
        ({"stream": "s", "startingOffsets": '{"s": -1}'}, "for 's' it is -1"),
        ({"stream": "s", "startingOffsets": '{"s": true}'}, "for 's' it is True"),
        ({"stream": "s", "startingOffsets": '{"s": 1, "s": 2}'}, "^startingOffsets: the key 's' occurs twice"),
        ({"stream": "s", "startingOffsetsByTimestamp": '{"s": 1, "s": 2}'}, "^startingOffsetsByTimestamp: the key 's'"),
        ({"stream": "s", "startingOffsets": "[" * 100_000}, "startingOffsets must be"),
        ({"stream": "s", "startingOffsets": "latest", "startingTimestamp": "1"}, "are both given"),
        ({"stream": "s", "startingTimestamp": "1700000000000000"}, "startingTimestamp must be .* to 253402300799999"),
        ({"stream": "s", "startingTimestamp": "2026-01-01"}, "startingTimestamp must be milliseconds since 1970"),
        ({"stream": "s", "endingOffsets": "latest"}, "endingOffsets and endingTimestamp are for batch reads"),
        ({"stream": "s", "endingTimestamp": "5"}, "endingOffsets and endingTimestamp are for batch reads"),
        ({"stream": "s", "startingTimestamp": "1", "startingOffsetsByTimestamp": "{}"}, "are both given"),
        ({"stream": "s", "startingOffsetsByTimestamp": "{}"}, "startingOffsetsByTimestamp must be JSON with"),
        ({"stream": "s", "startingOffsetsByTimestamp": '{"s": "x"}'}, "for 's' it is 'x'"),
        ({"stream": "s", "startingOffsetsByTimestampStrategy": "first"}, "must be 'error' or 'latest', not 'first'"),
        ({"stream": "s", "startingOffsetsByTimestampStrategy": "latest"}, "is given without startingTimestamp"),
        ({"stream": "s", "maxTriggerDelay": "5s"}, "maxTriggerDelay is given without minMessagesPerTrigger"),
        ({"queue": "a", "minMessagesPerTrigger": "9", "maxMessagesPerTrigger": "8"}, "is 9, and maxMessagesPerTrigger"),
        ({"queue": "a", "minMessagesPerTrigger": "9", "prefetch": "8"}, "is 9, and prefetch lets 8"),
        ({"stream": "s", "managementUrl": "localhost"}, "^managementUrl must be http"),
        ({"stream": "s", "streamFilterMatchUnfiltered": "true"}, "is given without streamFilter"),
        ({"stream": "s", "streamFilter": "eu,,us"}, "streamFilter has an empty name"),
        ({"stream": "s", "exchange": "x"}, "exchange is an option of a sink, and this is stream mode: leave it out"),
        (
            {"stream": "s", "missingqueuetimeout": "1s"},
            "missingQueueTimeout is an option of queue mode and staged mode, and this is",
        ),
        ({"queue": "q", "stageBy": "none"}, "stageBy is an option of staged mode, and this is queue mode"),
        ({"queue": "q", "missingQueueTimeout": "99999d"}, "missingQueueTimeout is '99999d', and 1000000000s is the"),
    ],
)
def test_what_is_not_understood_is_refused(given: dict[str, str], says: str) -> None:
    """The error names the option and the accepted values."""
    with pytest.raises(ConfigurationError, match=says):
        read(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"maxMessagesPerTrigger": "5"},
        {"maxbytespertrigger": "5"},
        {"minMessagesPerTrigger": "5"},
        {"minMessagesPerTrigger": "5", "maxTriggerDelay": "1m"},
    ],
)
def test_a_batch_has_no_triggers_to_limit(given: dict[str, str]) -> None:
    """It would read the whole stream although it looks limited."""
    with pytest.raises(ConfigurationError, match=r"^m\w+Trigger is for readStream: a batch read ends at endingOffsets"):
        read(stream="s", streaming=False, **given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"startingOffsets": "latest"}, "must not be 'latest' in a batch"),
        ({"startingOffsets": '{"s": "latest"}'}, "must not be 'latest' in a batch"),
        ({"endingOffsets": "earliest"}, "'earliest'"),
        ({"endingOffsets": '{"s": "earliest"}'}, "'earliest'"),
        ({"startingTimestamp": "8", "endingTimestamp": "7"}, "startingTimestamp is 8, and endingTimestamp is 7"),
        (
            {"startingOffsetsByTimestamp": '{"s": 8}', "endingOffsetsByTimestamp": '{"s": 7}'},
            "startingTimestamp of stream 's' is 8, and endingTimestamp is 7: nothing lies between",
        ),
        ({"startingOffsetsByTimestamp": '{"s": 8}', "endingTimestamp": "7"}, "startingTimestamp of stream 's' is 8"),
    ],
)
def test_a_batch_has_a_beginning_and_an_end(given: dict[str, str], says: str) -> None:
    """An empty range is refused."""
    with pytest.raises(ConfigurationError, match=says):
        read(stream="s", streaming=False, **given)


@pytest.mark.parametrize("url", ["", "http://user:s3cret@h/", "amqp://user:s3cret@h:port/", "amqp://:s3cret@h/"])
def test_a_wrong_url_is_refused_without_showing_it(url: str) -> None:
    """The URL may contain a password."""
    with pytest.raises(ConfigurationError) as raised:
        read_options({"url": url, "queue": "a"}, streaming=True)
    assert "s3cret" not in str(raised.value)


def test_without_any_option_a_table_is_explained() -> None:
    """Spark passes no options to a table of a Python data source."""
    with pytest.raises(ConfigurationError, match="CREATE TEMPORARY VIEW"):
        read_options({}, streaming=False)
    with pytest.raises(ConfigurationError, match="INSERT INTO a view made by CREATE TEMPORARY VIEW"):
        write_options({})


def test_each_call_of_spark_at_a_refused_query_raises_why() -> None:
    """The first call varies. The refused reader can still be pickled and stopped."""
    source: Any = RabbitMQDataSource({"url": URL, "queue": "orders", "prefetch": "0"}).streamReader(READ_SCHEMA)
    calls: dict[str, tuple[object, ...]] = {
        "initialOffset": (),
        "getDefaultReadLimit": (),
        "prepareForTriggerAvailableNow": (),
        "latestOffset": ({}, None),
        "partitions": ({}, {}),
        "read": (None,),
        "commit": ({},),
    }
    for reader in (source, cloudpickle.loads(cloudpickle.dumps(source))):
        for name, arguments in calls.items():
            with pytest.raises(ConfigurationError, match="prefetch must be a whole number"):
                getattr(reader, name)(*arguments)
        reader.stop()


def test_options_show_no_url_and_can_be_pickled() -> None:
    """They are sent to other processes."""
    for options in (read(queue="a"), read(stream="s"), write_options({"url": URL})):
        assert "s3cret" not in repr(options)
        assert pickle.loads(pickle.dumps(options)) == options


def test_a_sink_takes_where_to_write() -> None:
    """Spark adds its own option. The empty exchange is the default one."""
    options = write_options({"url": URL, "exchange": "", "routingKey": "k", "checkpointLocation": "/c"})
    assert (options.exchange, options.routing_key) == ("", "k")
    assert write_options({"url": URL}).exchange is None
    assert write_options({"url": URL}).publisher == ()
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    assert write_options({"url": URL, "traceparent": trace}).traceparent == trace


def test_a_sink_takes_a_queue_for_dead_letters() -> None:
    """It needs the mode that sends rows there. In other modes the task fails."""
    options = write_options({"url": URL, "onUnsendableRow": "DeadLetter", "deadLetterQueue": "orders.dead"})
    assert options.dead_letter_queue == "orders.dead"
    assert write_options({"url": URL, "onUnsendableRow": "fail"}).dead_letter_queue is None


def test_a_sink_passes_options_on_to_its_publishers() -> None:
    given = {"maxOutstanding": "500", "confirmTimeout": "10s", "deliveryTimeout": "5m", "mandatory": "false"}
    options = write_options({"url": URL, **{f"publisher.{name}": value for name, value in given.items()}})
    assert dict(options.publisher) == {
        "max_outstanding": 500, "confirm_timeout": 10.0, "delivery_timeout": 300.0, "mandatory": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"queue": "a"}, "queue is an option of queue mode and staged mode, and this is a sink"),
        ({"publisher.confirmTimeout": "99999d"}, "publisher.confirmTimeout is '99999d', and 1000000000s is the most"),
        ({"asyncProgressTrackingEnabled": "true"}, "asyncProgressTrackingEnabled is on"),
        ({"path": "x"}, "a path is given"),
        ({"onUnsendableRow": "skip"}, "onUnsendableRow must be 'fail' or 'deadLetter', not 'skip'"),
        ({"onUnsendableRow": "deadLetter"}, "give deadLetterQueue"),
        ({"deadLetterQueue": "d"}, "give onUnsendableRow=deadLetter"),
        ({"onUnsendableRow": "deadLetter", "deadLetterQueue": "amq.d"}, "deadLetterQueue is wrong: .*amq"),
        (
            {"onUnsendableRow": "deadLetter", "deadLetterQueue": "d", "publisher.mandatory": "false"},
            "would drop dead letters",
        ),
        ({"routingKey": "\N{SNOWMAN}" * 100}, "routingKey has 300 bytes in UTF-8, and AMQP allows 255"),
        ({"exchange": "x" * 256}, "exchange has 256 bytes"),
        (
            {"traceparent": "0af7"},
            "traceparent must be a W3C trace context, such as 00-TRACE-SPAN-01, not '0af7': correct it, or give none",
        ),
        ({"traceparent": f"00-{'0' * 32}-{'b' * 16}-01"}, "traceparent must be a W3C trace context"),
        ({"publisher.confirmTimeout": "10"}, "publisher.confirmTimeout must be a time with its unit"),
        ({"publisher.deliveryTimeout": "0s"}, "publisher.deliveryTimeout must be longer than '0s'"),
        ({"publisher.maxOutstandin": "10"}, "did you mean publisher.maxOutstanding?"),
    ],
)
def test_a_sink_refuses_what_it_does_not_know(given: dict[str, str], says: str) -> None:
    """The error names the option."""
    with pytest.raises(ConfigurationError, match=says):
        write_options({"url": URL, **given})


def test_the_guide_describes_every_option() -> None:
    """This includes an option of Spark that is refused."""
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "spark.md").read_text()
    for option in {*module._QUEUE, *module._STREAM, *module._STAGED, *module._SINK}:
        assert f"`{option.name}" in guide, option.name
