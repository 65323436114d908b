"""The options of ``format("rabbitmq")``, checked strictly before connecting.

Each option is declared once, with its mode, the field that it sets and the function that parses its text.
`docs/guides/spark.md` describes the options. A value that cannot be parsed causes an error that names the option and
the accepted values; it is never replaced with a default. Option names are case-insensitive, as in Spark.

Invariants: no error, ``repr`` or log line made from the options shows the URL, which may hold a password. Only text and
numbers are sent to executors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, NoReturn, overload

from reliable_mq._util.validation import LONGEST, SHORT_STRING_BYTES, decode_json, unique_keys
from reliable_mq.codec.tables import MAX_TIMESTAMP
from reliable_mq.core.headers import checked_traceparent
from reliable_mq.core.stage.envelope import MOST_MESSAGES
from reliable_mq.errors import ConfigurationError
from reliable_mq.monitoring.management import ManagementAPI
from reliable_mq.settings import ConnectionSettings
from reliable_mq.spark.connection_options import ConnectionOptions
from reliable_mq.stage import MissingId, StageOptions
from reliable_mq.topology import Queue

LARGEST_PREFETCH: Final = 65535  # AMQP transmits it in 16 bits
_LARGEST_BYTES: Final = 100 * 2**20  # in a batch in queue mode: Spark's spark.rpc.message.maxSize is 128 MiB
_LATEST: Final = 1000 * MAX_TIMESTAMP + 999  # milliseconds
_WHOLE: Final = re.compile(r"[0-9]{1,18}")
_DURATION: Final = re.compile(r"([0-9]{1,9})(ms|s|m|min|h|d)")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

#: ``earliest``, ``latest``, or a mapping from stream to an offset or one of these two words.
StartingPositions = str | Mapping[str, int | str]
#: Milliseconds since 1970, for all streams or by stream.
Timestamps = int | Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadOptions:
    """Source options of both modes. None means no limit, or no directory."""

    url: str = field(repr=False)
    connection: ConnectionOptions = field(default_factory=ConnectionOptions)
    min_partitions: int | None = None  # None: as many as the size of a batch requires, or one per stream
    max_records: int | None = None  # per task
    min_messages: int | None = None  # rows that a micro-batch waits for, at most `max_trigger_delay` seconds
    max_trigger_delay: float = 900.0
    fail_on_data_loss: bool = True
    metrics_directory: str | None = None

    def settings(self) -> ConnectionSettings:
        return self.connection.settings(self.url)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions(_ReadOptions):
    queues: tuple[str, ...]
    max_messages: int = LARGEST_PREFETCH
    max_bytes: int = 32 * 2**20  # total size of the bodies of a batch; the reader holds up to twice that in memory
    prefetch: int | None = None  # per queue, including the running batch; None: as many as are safe for the queue
    missing_queue_timeout: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions(_ReadOptions):
    streams: tuple[str, ...]  # may include super streams
    starting_offsets: StartingPositions
    starting_timestamp: Timestamps | None = None  # replaces `starting_offsets`
    latest_without_match: bool = False  # whether to begin at the end if no message is as new as `starting_timestamp`
    ending_offsets: StartingPositions = "latest"
    ending_timestamp: Timestamps | None = None  # replaces `ending_offsets`
    management_url: str | None = field(default=None, repr=False)  # None: partition names identify super streams
    stream_filter: tuple[str, ...] | None = None
    match_unfiltered: bool = False
    max_messages: int | None = None
    max_bytes: int | None = None
    prefetch: int = 2000


@dataclass(frozen=True, slots=True)
class StagedOptions:
    """Options of staged mode: those for the relay and those for the stage.

    ``relay`` configures the relay in the reader's process. It is None if another process fills the stage.
    """

    relay: StageOptions | None
    stream: StreamOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options of a sink. Exchange and routing key override their columns."""

    url: str = field(repr=False)
    connection: ConnectionOptions = field(default_factory=ConnectionOptions)
    exchange: str | None = None
    routing_key: str | None = None
    traceparent: str | None = None  # for rows without a trace context
    dead_letter_queue: str | None = None  # None: a row that cannot be sent fails its task
    metrics_directory: str | None = None
    publisher: tuple[tuple[str, float | bool], ...] = ()  # the `Publisher` arguments that are given


# -- the text of a value -----------------------------------------------------------------------------------------------


class _Option(NamedTuple):
    name: str
    field: str
    read: Callable[[str, str], Any]  # arguments: the option's name and its text


def _refuse(text: str) -> NoReturn:
    raise ConfigurationError(text)


def _verbatim(_name: str, text: str) -> str:
    return text


def _stripped(_name: str, text: str) -> str:
    return text.strip()


def _text(name: str, text: str) -> str:
    return text if text.strip() else _refuse(f"{name} is empty")


def _short_text(name: str, text: str) -> str:
    """Return a text that fits into an AMQP short string. It may be empty."""
    if len(text.encode()) > SHORT_STRING_BYTES:
        _refuse(f"{name} has {len(text.encode())} bytes in UTF-8, and AMQP allows {SHORT_STRING_BYTES}")
    return text


def _names(name: str, text: str) -> tuple[str, ...]:
    names = tuple(each.strip() for each in _text(name, text).split(","))
    if not all(names):
        _refuse(f"{name} has an empty name in its list: {text!r}")
    if len(set(names)) < len(names):
        _refuse(f"{name} names one twice: {text!r}")
    for each in names:
        if len(each.encode()) > SHORT_STRING_BYTES:
            _refuse(f"{name} has a name of more than 255 bytes: {each[:40]!r}...")
    return names


def _whole(least: int, most: int | None = None, kind: str = "a whole number") -> Callable[[str, str], int]:
    def read(name: str, text: str) -> int:
        if not _WHOLE.fullmatch(text) or int(text) < least or (most is not None and int(text) > most):
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            _refuse(f"{name} must be {kind} {limits}, not {text[:40]!r}")
        return int(text)

    return read


def _duration(name: str, text: str) -> float:
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        _refuse(f"{name} must be a time with its unit, as 500ms, 30s, 5m, 2h or 1d, not {text[:40]!r}")
    seconds = int(match[1]) * _SECONDS[match[2]]
    return seconds if seconds <= LONGEST else _refuse(f"{name} is {text[:40]!r}, and {LONGEST:.0f}s is the most")


def _heartbeat(name: str, text: str) -> int:
    seconds = _duration(name, text)
    if seconds not in range(1, 65535):
        _refuse(f"{name} must be whole seconds, 1s to 65534s, not {text[:40]!r}: heartbeats cannot be switched off")
    return int(seconds)


def _positive(name: str, text: str) -> float:
    return _duration(name, text) or _refuse(f"{name} must be longer than {text[:40]!r}")


def _one_of(wanted: str, values: Mapping[str, Any]) -> Callable[[str, str], Any]:
    def read(name: str, text: str) -> Any:
        if text.lower() not in values:
            _refuse(f"{name} must be {wanted}, not {text[:40]!r}")
        return values[text.lower()]

    return read


_truth: Final = _one_of("true or false", {"true": True, "false": False})


def _by_stream(name: str, text: str, wanted: str, is_wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """Parse a JSON object that maps each stream to a value."""
    try:
        parsed = decode_json(text, object_pairs_hook=unique_keys)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from error
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict) or not parsed:
        _refuse(f"{name} must be {wanted}, not {text[:40]!r}")
    for stream, value in parsed.items():
        if not is_wanted(value):
            _refuse(f"{name} must be {wanted}; for {stream!r} it is {value!r}")
    return parsed


def _positions(name: str, text: str) -> StartingPositions:
    if text.lower() in ("earliest", "latest"):
        return text.lower()
    wanted = '\'earliest\', \'latest\' or JSON like {"stream": 1200, "other": "latest"}'
    return _by_stream(
        name, text, wanted, lambda value: value in ("earliest", "latest") or (type(value) is int and 0 <= value < 2**63)
    )


def _timestamps(name: str, text: str) -> dict[str, int]:
    wanted = 'JSON with milliseconds since 1970 by stream, like {"stream": 1700000000000}'
    return _by_stream(name, text, wanted, lambda value: type(value) is int and 0 <= value <= _LATEST)


def _off(name: str, text: str) -> None:
    if _truth(name, text):
        _refuse(f"{name} is on: Spark would record a batch as done before its offsets are durable; leave it out")


def _retention(_name: str, text: str) -> str | None:
    return None if text == "0" else text


def _number(name: str, text: str) -> int:
    """Return a number. `StageOptions` checks its limits."""
    if not _WHOLE.fullmatch(text):
        _refuse(f"{name} must be a whole number of at least 1, not {text[:40]!r}")
    return int(text)


# -- the options -------------------------------------------------------------------------------------------------------

_CONNECTION: Final = (
    _Option("url", "url", _verbatim),
    _Option("connection.heartbeat", "connection.heartbeat", _heartbeat),
    _Option("connection.timeout", "connection.timeout", _positive),
    _Option("connection.caFile", "connection.ca_file", _text),
    _Option("connection.certFile", "connection.cert_file", _text),
    _Option("connection.keyFile", "connection.key_file", _text),
    _Option("connection.serverName", "connection.server_name", _text),
    _Option("credentialsProvider", "connection.provider", _text),
)


def _of_triggers(most_bytes: int | None) -> tuple[_Option, ...]:
    return (
        _Option("maxMessagesPerTrigger", "max_messages", _whole(1)),
        _Option("maxBytesPerTrigger", "max_bytes", _whole(1, most_bytes)),
        _Option("minMessagesPerTrigger", "min_messages", _whole(1)),
        _Option("maxTriggerDelay", "max_trigger_delay", _duration),
    )


def _of_sources(most_bytes: int | None) -> tuple[_Option, ...]:
    return (
        *_CONNECTION,
        *_of_triggers(most_bytes),
        _Option("minPartitions", "min_partitions", _whole(1)),
        _Option("maxRecordsPerPartition", "max_records", _whole(1)),
        _Option("prefetch", "prefetch", _whole(1, LARGEST_PREFETCH)),
        _Option("failOnDataLoss", "fail_on_data_loss", _truth),
        _Option("metricsDirectory", "metrics_directory", _text),
    )


_QUEUE: Final = (
    *_of_sources(_LARGEST_BYTES),
    _Option("queue", "queues", _names),
    _Option("missingQueueTimeout", "missing_queue_timeout", _duration),
)
_MILLISECONDS: Final = _whole(0, _LATEST, "milliseconds since 1970,")
_STREAM: Final = (
    *_of_sources(None),
    _Option("stream", "streams", _names),
    _Option("startingOffsets", "starting_offsets", _positions),
    _Option("startingTimestamp", "starting_timestamp", _MILLISECONDS),
    _Option("startingOffsetsByTimestamp", "starting_timestamp", _timestamps),
    _Option(
        "startingOffsetsByTimestampStrategy",
        "latest_without_match",
        _one_of("'error' or 'latest'", {"error": False, "latest": True}),
    ),
    _Option("endingOffsets", "ending_offsets", _positions),
    _Option("endingTimestamp", "ending_timestamp", _MILLISECONDS),
    _Option("endingOffsetsByTimestamp", "ending_timestamp", _timestamps),
    _Option("streamFilter", "stream_filter", _names),
    _Option("streamFilterMatchUnfiltered", "match_unfiltered", _truth),
    _Option("managementUrl", "management_url", _text),
)
_STAGE: Final = (
    _Option("stage", "stage", _stripped),
    _Option("stageBy", "by", _one_of("query or none", {"query": "query", "none": "none"})),
    _Option("stagePartitions", "partitions", _number),
    _Option("stageKey", "key", _verbatim),
    _Option("stageRetention", "retention", _retention),
    _Option("stageMaxBytes", "max_bytes", _number),
    _Option("stageMissingId", "missing_id", _one_of("refuse or repeat", {each.value: each for each in MissingId})),
    _Option("missingQueueTimeout", "missing_queue_timeout", _duration),
    _Option("stageMessagesPerEntry", "messages_per_entry", _number),
    _Option("publisher.maxOutstanding", "max_outstanding", _number),
    _Option("publisher.confirmTimeout", "confirm_timeout", _positive),
    _Option("queue", "queue", _stripped),
)
_STAGED: Final = (*_STAGE, *(option for option in _STREAM if option.name != "stream"))
_SINK: Final = (
    *_CONNECTION,
    _Option("exchange", "exchange", _short_text),
    _Option("routingKey", "routing_key", _short_text),
    _Option("traceparent", "traceparent", checked_traceparent),
    _Option("onUnsendableRow", "mode", _one_of("'fail' or 'deadLetter'", {"fail": "fail", "deadletter": "deadLetter"})),
    _Option("deadLetterQueue", "dead_letter_queue", _text),
    _Option("metricsDirectory", "metrics_directory", _text),
    _Option("publisher.maxOutstanding", "publisher.max_outstanding", _whole(1)),
    _Option("publisher.confirmTimeout", "publisher.confirm_timeout", _positive),
    _Option("publisher.deliveryTimeout", "publisher.delivery_timeout", _positive),
    _Option("publisher.mandatory", "publisher.mandatory", _truth),
    _Option("asyncProgressTrackingEnabled", "async_progress", _off),
)
# Spark passes these to a sink in addition to the sink's options.
_SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname"})


# -- sources and sinks -------------------------------------------------------------------------------------------------


@overload
def read_options(given: Mapping[str, str], *, streaming: Literal[False]) -> StreamOptions: ...


@overload
def read_options(given: Mapping[str, str], *, streaming: bool) -> QueueOptions | StreamOptions | StagedOptions: ...


def read_options(given: Mapping[str, str], *, streaming: bool) -> QueueOptions | StreamOptions | StagedOptions:
    """Check the options of a source for ``readStream`` or ``read``.

    Raises:
        ConfigurationError: If an option is invalid, unknown or conflicts with another. The message names the option.
    """
    if not given:
        _refuse(
            "no options: give url, and queue or stream. A table made by CREATE TABLE ... USING rabbitmq is given none "
            "by Spark: use CREATE TEMPORARY VIEW name USING rabbitmq OPTIONS (url '...', stream '...')"
        )
    given = {name.lower(): text for name, text in given.items()}
    if "stage" in given and not streaming:
        stage = given["stage"].strip()
        _refuse(f"stage is for spark.readStream: spark.read reads the stage with the option stream={stage!r}")
    if "stage" in given:
        return _staged_options(given)
    if ("queue" in given) == ("stream" in given):
        _refuse(
            "give one of the options queue and stream: "
            + ("both are there, and a query reads either queues or streams" if "queue" in given else "neither is there")
        )
    if "stream" in given:
        return _stream_options(given, streaming=streaming)
    if not streaming:
        # A batch read has no commit. Spark does not tell its source whether the job has succeeded, reads partitions
        # again when a task is retried or a plan is run twice, and keeps no checkpoint.
        _refuse(
            f"queue {given['queue']!r} cannot be read with spark.read: a batch read never says that it is done, so "
            "nothing could be acked without losing messages. Use spark.readStream with trigger(availableNow=True), "
            "which reads what is there and ends; or read a stream, with the option stream"
        )
    return _queue_options(given)


def _queue_options(given: Mapping[str, str]) -> QueueOptions:
    options = QueueOptions(**_source_values(given, _QUEUE))
    least, prefetch = options.min_messages, options.prefetch
    if least is not None and prefetch is not None and least > prefetch:
        _refuse(f"minMessagesPerTrigger is {least}, and prefetch lets {prefetch} messages wait")
    return options


def _has(positions: StartingPositions | None, word: str) -> bool:
    """Return whether one of the positions is this word."""
    return word in (positions.values() if isinstance(positions, Mapping) else (positions,))


def _stream_options(given: Mapping[str, str], *, streaming: bool) -> StreamOptions:
    for place, article in (("starting", "a"), ("ending", "an")):
        one, by_stream = f"{place}Timestamp", f"{place}OffsetsByTimestamp"
        if {one.lower(), by_stream.lower()} <= given.keys():
            _refuse(f"{one} and {by_stream} are both given: leave one of them out")
        if f"{place}offsets" in given and given.keys() & {one.lower(), by_stream.lower()}:
            _refuse(f"{place}Offsets and {article} {one} are both given: leave one of them out")
    for option in () if streaming else _of_triggers(None):
        if option.name.lower() in given:
            _refuse(f"{option.name} is for readStream: a batch read ends at endingOffsets, and is one batch")
    values = _source_values(given, _STREAM)
    if streaming and values.keys() & {"ending_offsets", "ending_timestamp"}:
        _refuse("endingOffsets and endingTimestamp are for batch reads: a streaming query has no end")
    if _has(values.get("ending_offsets"), "earliest"):
        _refuse("endingOffsets must be 'latest' or JSON with an offset by stream, not 'earliest'")
    if _has(values.get("starting_offsets"), "latest") and not streaming:
        _refuse("startingOffsets must not be 'latest' in a batch read, which would be empty")
    if "latest_without_match" in values and "starting_timestamp" not in values:
        _refuse("startingOffsetsByTimestampStrategy is given without startingTimestamp: there is nothing to match")
    _check_period(values.get("starting_timestamp"), values.get("ending_timestamp"))
    values.setdefault("starting_offsets", "latest" if streaming else "earliest")
    options = StreamOptions(**values)
    if options.match_unfiltered and options.stream_filter is None:
        _refuse("streamFilterMatchUnfiltered is given without streamFilter: all messages are read")
    if options.management_url is not None:
        ManagementAPI.check(options.management_url, options.settings(), option="managementUrl")
    return options


def _check_period(begin: Timestamps | None, end: Timestamps | None) -> None:
    """Refuse a beginning after the end, which would look like an empty stream."""
    begins = begin if isinstance(begin, Mapping) else {}
    ends = end if isinstance(end, Mapping) else {}
    for name in sorted(begins.keys() | ends.keys() | {""}):
        first, last = begins.get(name, begin), ends.get(name, end)
        if isinstance(first, int) and isinstance(last, int) and first > last:
            of = f" of stream {name!r}" if name else ""
            _refuse(f"startingTimestamp{of} is {first}, and endingTimestamp is {last}: nothing lies between")


def _staged_options(given: Mapping[str, str]) -> StagedOptions:
    if "stream" in given:
        _refuse("stream and stage are both given: with stage, the option queue says where messages come from")
    _check_known(given, _STAGED)
    of_relay = {option.name.lower() for option in _STAGE}
    values = _values({name: text for name, text in given.items() if name in of_relay}, _STAGED)
    stage, queue, by = values["stage"], values.setdefault("queue", ""), values.pop("by", "query")
    if not stage or "," in stage or len(stage.encode()) > SHORT_STRING_BYTES:
        _refuse(f"stage must name one stream, in at most {SHORT_STRING_BYTES} bytes, not {stage[:40]!r}")
    if not queue or "," in queue:
        _refuse("with stage, the option queue must name one queue; give each queue a stage and a query of its own")
    rest = {name: text for name, text in given.items() if name not in of_relay}
    if not rest.keys() & {"startingoffsets", "startingtimestamp", "startingoffsetsbytimestamp"}:
        rest["startingoffsets"] = "earliest"  # the query also owns messages moved before it began
    stream = _stream_options({**rest, "stream": stage}, streaming=True)
    if by == "none":
        for option in _STAGE:
            if option.field in values and option.name not in ("stage", "queue"):
                _refuse(f"{option.name} is for the relay of the query, and stageBy is none")
        return StagedOptions(None, stream)
    if stream.stream_filter is not None:
        _refuse("streamFilter needs stageBy=none and a binding or shovel: entries have no header for it")
    limits = (stream.max_messages, stream.max_bytes, stream.min_messages, stream.max_records)
    values.setdefault("messages_per_entry", MOST_MESSAGES if limits == (None,) * 4 else 1)  # they count entries
    names = {option.field: option.name for option in _STAGE}
    lenient = not stream.fail_on_data_loss
    relay = StageOptions(url=stream.url, fewer_partitions=lenient, names=names, **values)
    return StagedOptions(relay, replace(stream, streams=relay.streams))  # excludes other streams of these names


def write_options(given: Mapping[str, str]) -> WriteOptions:
    """Check the options of a sink. See `read_options`."""
    if not given:
        _refuse(
            "no options: give url. A table made by CREATE TABLE ... USING rabbitmq is given none by Spark: INSERT INTO "
            "a view made by CREATE TEMPORARY VIEW name (body binary) USING rabbitmq "
            "OPTIONS (url '...', routingKey '...')"
        )
    given = {name.lower(): text for name, text in given.items()}
    values = _values({name: text for name, text in given.items() if name not in _SPARKS_OWN}, _SINK)
    values.pop("async_progress", None)
    _connect(values)
    mode, queue = values.pop("mode", "fail"), values.get("dead_letter_queue")
    publisher = _apart(values, "publisher.")
    if mode == "fail" and queue is not None:
        _refuse("deadLetterQueue is given, and nothing goes there: give onUnsendableRow=deadLetter, too")
    if mode == "deadLetter":
        if queue is None:
            _refuse("onUnsendableRow is deadLetter: give deadLetterQueue, the queue for such rows, which is declared")
        if not publisher.get("mandatory", True):
            _refuse("publisher.mandatory is false, and RabbitMQ would drop dead letters, too: leave it out")
        try:
            Queue(queue, dead_letter=None)
        except ConfigurationError as error:
            raise ConfigurationError(f"deadLetterQueue is wrong: {error}") from error
    return WriteOptions(**values, publisher=tuple(publisher.items()))


def _check_known(given: Mapping[str, str], options: Sequence[_Option]) -> None:
    by_name = {option.name.lower(): option.name for option in options}
    for name in given:
        if name == "path":
            _refuse("a path is given to load() or start(): RabbitMQ has none; name the queue in an option")
        if name not in by_name:
            _refuse_other_mode(name, options)
            near = difflib.get_close_matches(name, by_name, n=1)
            hint = f"; did you mean {by_name[near[0]]}?" if near else ""
            _refuse(f"unknown option {name[:40]!r}{hint} (known: {', '.join(by_name.values())})")


def _refuse_other_mode(name: str, options: Sequence[_Option]) -> None:
    """Raise if the option belongs to other modes, and name them."""
    modes = {"queue mode": _QUEUE, "stream mode": _STREAM, "staged mode": _STAGED, "a sink": _SINK}
    own = next(mode for mode, each in modes.items() if each is options)
    found = {mode: option.name for mode, each in modes.items() for option in each if option.name.lower() == name}
    if found:
        _refuse(f"{next(iter(found.values()))} is an option of {' and '.join(found)}, and this is {own}: leave it out")


def _values(given: Mapping[str, str], options: Sequence[_Option]) -> dict[str, Any]:
    """Return the parsed values of the given options, by field."""
    _check_known(given, options)
    return {
        option.field: option.read(option.name, given[option.name.lower()])
        for option in options
        if option.name.lower() in given
    }


def _source_values(given: Mapping[str, str], options: Sequence[_Option]) -> dict[str, Any]:
    values = _values(given, options)
    _connect(values)
    least, most = values.get("min_messages"), values.get("max_messages")
    if least is None and "max_trigger_delay" in values:
        _refuse("maxTriggerDelay is given without minMessagesPerTrigger: there is nothing to wait for")
    if least is not None and most is not None and least > most:
        _refuse(f"minMessagesPerTrigger is {least}, and maxMessagesPerTrigger is {most}")
    return values


def _connect(values: dict[str, Any]) -> None:
    """Check the URL and the connection options; combine the latter in one field."""
    if not values.get("url"):
        _refuse("the option url is missing: give the broker's, e.g. amqp://user:password@host/")
    values["connection"] = ConnectionOptions(**_apart(values, "connection."))
    values["connection"].settings(values["url"])


def _apart(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Remove the values whose field has the prefix; return them without it."""
    return {name.removeprefix(prefix): values.pop(name) for name in list(values) if name.startswith(prefix)}
