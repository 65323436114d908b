"""The options of ``format("rabbitmq")``, checked strictly before connecting.

A value that is not understood is an error that names the option and the accepted values, never a default. Names are
compared without case, as Spark does.

Invariant: no error, no ``repr`` and no log line made from these shows the URL, which may hold a password.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NoReturn

from reliable_mq.errors import ConfigurationError
from reliable_mq.monitoring.management import ManagementAPI
from reliable_mq.settings import SHORT_STRING_BYTES, ConnectionSettings
from reliable_mq.spark.connections import ConnectionOptions
from reliable_mq.spark.queue_prefetch import LARGEST_PREFETCH
from reliable_mq.topology import Queue

__all__ = [
    "STREAM_MODE_OPTIONS",
    "QueueOptions",
    "StartingPositions",
    "StreamOptions",
    "Timestamps",
    "WriteOptions",
    "check_known",
    "read_options",
    "write_options",
]

_CONNECTION: Final = (
    "connection.heartbeat",
    "connection.timeout",
    "connection.caFile",
    "connection.certFile",
    "connection.keyFile",
    "connection.serverName",
    "credentialsProvider",
)
_COMMON: Final = (
    "url",
    *_CONNECTION,
    "maxMessagesPerTrigger",
    "maxBytesPerTrigger",
    "minMessagesPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "prefetch",
    "failOnDataLoss",
    "metricsDirectory",
)
_QUEUE: Final = ("queue", "missingQueueTimeout")
_STREAM: Final = (
    "stream",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "filterPushdown",
    "streamFilter",
    "streamFilterMatchUnfiltered",
    "managementUrl",
)
#: The options that a source has in stream mode.
STREAM_MODE_OPTIONS: Final = (*_COMMON, *_STREAM)
_PUBLISHER: Final = (
    "publisher.maxOutstanding",
    "publisher.confirmTimeout",
    "publisher.deliveryTimeout",
    "publisher.mandatory",
)
_WRITE: Final = (
    "url",
    *_CONNECTION,
    "exchange",
    "routingKey",
    "onUnsendableRow",
    "deadLetterQueue",
    "metricsDirectory",
    *_PUBLISHER,
)
# Spark hands these to a sink beside the options that are its own.
_SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname"})
_ASYNC_PROGRESS: Final = "asyncprogresstrackingenabled"

_LARGEST_BYTES: Final = 100 * 2**20  # of a batch in queue mode: Spark's spark.rpc.message.maxSize is 128 MiB
_DEFAULT_BYTES: Final = 32 * 2**20
_DEFAULT_PREFETCH: Final = 2000  # of stream mode
_LATEST: Final = 253_402_300_799_999  # milliseconds: the end of the year 9999, Python's last
_WHOLE: Final = re.compile(r"[0-9]{1,18}")
_DURATION: Final = re.compile(r"([0-9]{1,9})(ms|s|m|min|h|d)")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

#: ``earliest``, ``latest``, or an offset (or one of these two) by stream.
StartingPositions = str | Mapping[str, int | str]
#: Milliseconds since 1970, of all streams or by stream.
Timestamps = int | Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadOptions:
    """Options of a source in both modes.

    Attributes:
        url: of the broker.
        connection: beside the URL.
        min_partitions: tasks that a batch is split into at least, as far as they are worth it; None for as many as its
            size requires, or one for each stream.
        max_records: messages of a task at most; None for no limit.
        min_messages: rows that a micro-batch waits for; None for any.
        max_trigger_delay: seconds for which it waits for them at most.
        fail_on_data_loss: whether to refuse a queue that drops messages which were delivered too often, and to fail
            where offsets that were to be read are gone.
        metrics_directory: where processes keep their metrics; None for nowhere.
    """

    url: str = field(repr=False)
    connection: ConnectionOptions = field(default_factory=ConnectionOptions)
    min_partitions: int | None = None
    max_records: int | None = None
    min_messages: int | None = None
    max_trigger_delay: float = 900.0
    fail_on_data_loss: bool = True
    metrics_directory: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions(_ReadOptions):
    """Options of queue mode.

    Attributes:
        queues: their names; each exists, and none is a stream.
        max_messages: rows of a batch at most.
        max_bytes: bytes of the bodies of a batch at most; the reader holds up to twice that in memory.
        prefetch: deliveries of a queue that may be unacked, those of the running batch included; None for as many as
            are safe for the queue.
        missing_queue_timeout: seconds for which a queue that was deleted may be missing before the query fails.
    """

    queues: tuple[str, ...]
    max_messages: int
    max_bytes: int = _DEFAULT_BYTES
    prefetch: int | None = None
    missing_queue_timeout: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions(_ReadOptions):
    """Options of stream mode.

    Attributes:
        streams: names of stream queues, or of super streams.
        starting_offsets: where a new query, or a batch, begins.
        starting_timestamp: in place of ``starting_offsets``.
        latest_without_match: whether a stream that has nothing as new as ``starting_timestamp`` is read from its end.
        ending_offsets: where a batch ends; ``latest`` where it is not given.
        ending_timestamp: in place of ``ending_offsets``.
        filter_pushdown: whether a batch takes filters of Spark's.
        management_url: of the API that lists the partitions of super streams; None to find them by their names.
        stream_filter: values of ``x-stream-filter-value`` that are read; None for all messages.
        match_unfiltered: whether messages without that header are read, too.
        max_messages: rows of a micro-batch at most; None for no limit.
        max_bytes: bytes of the bodies of a micro-batch at most; None for no limit.
        prefetch: deliveries of a task that may be unacked.
    """

    streams: tuple[str, ...]
    starting_offsets: StartingPositions
    starting_timestamp: Timestamps | None = None
    latest_without_match: bool = False
    ending_offsets: StartingPositions = "latest"
    ending_timestamp: Timestamps | None = None
    filter_pushdown: bool = False
    management_url: str | None = field(default=None, repr=False)
    stream_filter: tuple[str, ...] | None = None
    match_unfiltered: bool = False
    max_messages: int | None = None
    max_bytes: int | None = None
    prefetch: int = _DEFAULT_PREFETCH


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options of a sink.

    Attributes:
        url: of the broker.
        connection: beside the URL.
        exchange: for all rows, in place of the column of that name; None where it is not given.
        routing_key: likewise.
        dead_letter_queue: for rows that cannot be sent; None where such a row fails its task.
        metrics_directory: where processes keep their metrics; None for nowhere.
        publisher: arguments of each task's `Publisher`, as pairs; what is not given has its default.
    """

    url: str = field(repr=False)
    connection: ConnectionOptions = field(default_factory=ConnectionOptions)
    exchange: str | None = None
    routing_key: str | None = None
    dead_letter_queue: str | None = None
    metrics_directory: str | None = None
    publisher: tuple[tuple[str, float | bool], ...] = ()


def read_options(given: Mapping[str, str], *, streaming: bool) -> QueueOptions | StreamOptions:
    """Check the options of a source.

    Args:
        given: from Spark; names in any case.
        streaming: whether it is for ``readStream``.

    Raises:
        ConfigurationError: one is wrong, unknown, or does not go with another; the text names it.
    """
    options = _Options(given)
    queue, stream = options.text("queue"), options.text("stream")
    if not given:
        _refuse(
            "no options: give url, and queue or stream. A table made by CREATE TABLE ... USING rabbitmq is given none "
            "by Spark: use CREATE TEMPORARY VIEW name USING rabbitmq OPTIONS (url '...', stream '...')"
        )
    if (queue is None) == (stream is None):
        _refuse(
            "give one of the options queue and stream: "
            + ("neither is there" if queue is None else "both are there, and a query reads either queues or streams")
        )
    connection = options.connection()
    url = options.url(connection)
    if queue is not None:
        options.check_known((*_COMMON, *_QUEUE), others=_STREAM, why="an option of stream mode, and queue is given")
        given_messages, prefetch = (
            options.whole("maxMessagesPerTrigger", 1),
            options.whole("prefetch", 1, LARGEST_PREFETCH),
        )
        least, delay = options.least_messages(given_messages)
        if least is not None and prefetch is not None and least > prefetch:
            _refuse(f"minMessagesPerTrigger is {least}, and prefetch lets {prefetch} messages wait")
        return QueueOptions(
            url=url,
            connection=connection,
            queues=_names("queue", queue),
            max_messages=given_messages or LARGEST_PREFETCH,
            min_messages=least,
            max_trigger_delay=delay,
            max_bytes=options.whole("maxBytesPerTrigger", 1, _LARGEST_BYTES) or _DEFAULT_BYTES,
            prefetch=prefetch,
            missing_queue_timeout=options.duration("missingQueueTimeout", 60.0),
            min_partitions=options.whole("minPartitions", 1),
            max_records=options.whole("maxRecordsPerPartition", 1),
            fail_on_data_loss=options.truth("failOnDataLoss", default=True),
            metrics_directory=options.text("metricsDirectory"),
        )
    options.check_known(STREAM_MODE_OPTIONS)
    starting = options.positions("startingOffsets")
    since = options.timestamps("startingTimestamp", "startingOffsetsByTimestamp")
    if starting is not None and since is not None:
        _refuse("startingOffsets and a startingTimestamp are both given: leave one of them out")
    strategy = options.text("startingOffsetsByTimestampStrategy") or "error"
    if strategy.lower() not in ("error", "latest"):
        _refuse(f"startingOffsetsByTimestampStrategy must be 'error' or 'latest', not {strategy[:40]!r}")
    ending = options.positions("endingOffsets")
    until = options.timestamps("endingTimestamp", "endingOffsetsByTimestamp")
    if ending is not None and until is not None:
        _refuse("endingOffsets and an endingTimestamp are both given: leave one of them out")
    if streaming and not (ending is until is None):
        _refuse("endingOffsets and endingTimestamp are for batch reads: a streaming query has no end")
    if ending == "earliest":
        _refuse("endingOffsets must be 'latest' or JSON with an offset by stream, not 'earliest'")
    if starting == "latest" and not streaming:
        _refuse("startingOffsets must not be 'latest' in a batch read, which would be empty")
    pushdown = options.truth("filterPushdown", default=False)
    if pushdown and streaming:
        _refuse("filterPushdown is for batch reads: Spark pushes no filters into streaming sources")
    chosen, unfiltered = options.text("streamFilter"), options.truth("streamFilterMatchUnfiltered", default=False)
    if unfiltered and chosen is None:
        _refuse("streamFilterMatchUnfiltered is given without streamFilter: all messages are read")
    max_messages = options.whole("maxMessagesPerTrigger", 1)
    least, delay = options.least_messages(max_messages)
    return StreamOptions(
        url=url,
        connection=connection,
        streams=_names("stream", stream or ""),
        starting_offsets=starting if starting is not None else "latest" if streaming else "earliest",
        starting_timestamp=since,
        latest_without_match=strategy.lower() == "latest",
        ending_offsets="latest" if ending is None else ending,
        ending_timestamp=until,
        filter_pushdown=pushdown,
        management_url=options.management_url(connection.settings(url)),
        stream_filter=None if chosen is None else _names("streamFilter", chosen),
        match_unfiltered=unfiltered,
        max_messages=max_messages,
        min_messages=least,
        max_trigger_delay=delay,
        max_bytes=options.whole("maxBytesPerTrigger", 1),
        min_partitions=options.whole("minPartitions", 1),
        max_records=options.whole("maxRecordsPerPartition", 1),
        fail_on_data_loss=options.truth("failOnDataLoss", default=True),
        prefetch=options.whole("prefetch", 1, LARGEST_PREFETCH) or _DEFAULT_PREFETCH,
        metrics_directory=options.text("metricsDirectory"),
    )


def check_known(given: Mapping[str, str], known: tuple[str, ...]) -> None:
    """Refuse options that are not ``known``.

    Raises:
        ConfigurationError: one is not; the text names it, and the one that was perhaps meant.
    """
    _Options(given).check_known(known)


def write_options(given: Mapping[str, str]) -> WriteOptions:
    """Check the options of a sink.

    Raises:
        ConfigurationError: one is wrong or unknown; the text names it.
    """
    options = _Options(given)
    if options.truth("asyncProgressTrackingEnabled", default=False):
        _refuse(
            "asyncProgressTrackingEnabled is on: Spark would record a batch as done before its offsets are durable; "
            "leave it out"
        )
    options.check_known((*_WRITE, "asyncProgressTrackingEnabled"), allowed=_SPARKS_OWN)
    connection = options.connection()
    return WriteOptions(
        url=options.url(connection),
        connection=connection,
        exchange=options.short_text("exchange"),
        routing_key=options.short_text("routingKey"),
        dead_letter_queue=options.dead_letter_queue(),
        metrics_directory=options.text("metricsDirectory"),
        publisher=options.publisher(),
    )


class _Options:
    """The options of a user, by lower-case name."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}

    def check_known(
        self,
        known: tuple[str, ...],
        *,
        others: tuple[str, ...] = (),
        why: str = "",
        allowed: frozenset[str] = frozenset(),
    ) -> None:
        """Refuse options that are not ``known``; explain by ``why`` those of ``others``."""
        by_name = {name.lower(): name for name in known}
        for name in self._given:
            if name in by_name or name in allowed:
                continue
            for other in others:
                if name == other.lower():
                    _refuse(f"{other} is {why}")
            if name == "path":
                _refuse("a path is given to load() or start(): RabbitMQ has none; name the queue in an option")
            near = difflib.get_close_matches(name, by_name, n=1)
            hint = f"; did you mean {by_name[near[0]]}?" if near else ""
            _refuse(f"unknown option {name[:40]!r}{hint} (known: {', '.join(known)})")

    def connection(self) -> ConnectionOptions:
        """Return how to connect, beside the URL."""
        heartbeat, timeout, ca, cert, key, server, provider = _CONNECTION
        seconds = self.duration(heartbeat, 0.0)
        if seconds != int(seconds):
            _refuse(f"{heartbeat} must be whole seconds")
        return ConnectionOptions(
            heartbeat=int(seconds) if heartbeat.lower() in self._given else None,
            timeout=self.duration(timeout, 0.0) if timeout.lower() in self._given else None,
            ca_file=self.text(ca),
            cert_file=self.text(cert),
            key_file=self.text(key),
            server_name=self.text(server),
            provider=self.text(provider),
        )

    def url(self, connection: ConnectionOptions) -> str:
        """Return the URL, checked with the options beside it."""
        url = self._given.get("url", "")
        if not url:
            _refuse("the option url is missing: give the broker's, e.g. amqp://user:password@host/")
        connection.settings(url)
        return url

    def management_url(self, settings: ConnectionSettings) -> str | None:
        """Return the URL of the management API, checked."""
        given = self.text("managementUrl")
        if given is not None:
            ManagementAPI.check(given, settings)
        return given

    def text(self, name: str, *, empty: bool = False) -> str | None:
        """Return a text; an empty one only if that has a meaning."""
        value = self._given.get(name.lower())
        if value is not None and not value.strip() and not empty:
            _refuse(f"{name} is empty")
        return value

    def short_text(self, name: str) -> str | None:
        """Return a text that AMQP can carry as a name; it may be empty."""
        value = self.text(name, empty=True)
        if value is not None and len(value.encode()) > SHORT_STRING_BYTES:
            _refuse(f"{name} has {len(value.encode())} bytes in UTF-8, and AMQP allows {SHORT_STRING_BYTES}")
        return value

    def dead_letter_queue(self) -> str | None:
        """Return the queue for rows that cannot be sent; None where they fail their task."""
        mode, queue = self.text("onUnsendableRow") or "fail", self.text("deadLetterQueue")
        if mode.lower() not in ("fail", "deadletter"):
            _refuse(f"onUnsendableRow must be 'fail' or 'deadLetter', not {mode[:40]!r}")
        if mode.lower() == "fail":
            if queue is not None:
                _refuse("deadLetterQueue is given, and nothing goes there: give onUnsendableRow=deadLetter, too")
            return None
        if queue is None:
            _refuse("onUnsendableRow is deadLetter: give deadLetterQueue, the queue for such rows, which is declared")
        if not self.truth("publisher.mandatory", default=True):
            _refuse("publisher.mandatory is false, and RabbitMQ would drop dead letters, too: leave it out")
        try:
            return Queue(queue, dead_letter=None).name
        except ConfigurationError as error:
            raise ConfigurationError(f"deadLetterQueue is wrong: {error}") from error

    def duration(self, name: str, default: float) -> float:
        """Return a time with its unit, in seconds."""
        text = self._given.get(name.lower())
        if text is None:
            return default
        match = _DURATION.fullmatch(text.strip().lower())
        if match is None:
            _refuse(f"{name} must be a time with its unit, as 500ms, 30s, 5m, 2h or 1d, not {text[:40]!r}")
        return int(match[1]) * _SECONDS[match[2]]

    def whole(self, name: str, least: int, most: int | None = None) -> int | None:
        """Return a whole number."""
        text = self._given.get(name.lower())
        if text is None:
            return None
        if not _WHOLE.fullmatch(text) or int(text) < least or (most is not None and int(text) > most):
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            _refuse(f"{name} must be a whole number {limits}, not {text[:40]!r}")
        return int(text)

    def publisher(self) -> tuple[tuple[str, float | bool], ...]:
        """Return the arguments of a publisher that are given."""
        outstanding, confirm, delivery, mandatory = _PUBLISHER
        given = {
            "max_outstanding": self.whole(outstanding, 1),
            "confirm_timeout": self.duration(confirm, 0.0) or None,
            "delivery_timeout": self.duration(delivery, 0.0) or None,
            "mandatory": self.truth(mandatory, default=True) if mandatory.lower() in self._given else None,
        }
        return tuple((name, value) for name, value in given.items() if value is not None)

    def least_messages(self, most: int | None) -> tuple[int | None, float]:
        """Return the rows that a batch waits for, and for how many seconds."""
        least, delay = self.whole("minMessagesPerTrigger", 1), self.duration("maxTriggerDelay", 900.0)
        if least is None and self._given.get("maxtriggerdelay") is not None:
            _refuse("maxTriggerDelay is given without minMessagesPerTrigger: there is nothing to wait for")
        if least is not None and most is not None and least > most:
            _refuse(f"minMessagesPerTrigger is {least}, and maxMessagesPerTrigger is {most}")
        return least, delay

    def timestamps(self, one: str, by_stream: str) -> Timestamps | None:
        """Return a time for all streams, or one by stream."""
        common, text = self.whole(one, 0, _LATEST), self.text(by_stream)
        if text is None:
            return common
        if common is not None:
            _refuse(f"{one} and {by_stream} are both given: leave one of them out")
        wanted = f'{by_stream} must be JSON with milliseconds since 1970 by stream, like {{"stream": 1700000000000}}'
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict) or not parsed:
            _refuse(f"{wanted}, not {text[:40]!r}")
        for stream, when in parsed.items():
            if type(when) is not int or not 0 <= when <= _LATEST:
                _refuse(f"{wanted}; for {stream!r} it is {when!r}")
        return parsed

    def truth(self, name: str, *, default: bool) -> bool:
        """Return a truth value."""
        text = self._given.get(name.lower())
        if text is None:
            return default
        if text.lower() not in ("true", "false"):
            _refuse(f"{name} must be true or false, not {text[:40]!r}")
        return text.lower() == "true"

    def positions(self, name: str) -> StartingPositions | None:
        """Return ``earliest``, ``latest`` or a position by stream."""
        text = self._given.get(name.lower())
        if text is None:
            return None
        if text.lower() in ("earliest", "latest"):
            return text.lower()
        wanted = f'{name} must be \'earliest\', \'latest\' or JSON like {{"stream": 1200, "other": "latest"}}'
        try:
            parsed = json.loads(text)
        except ValueError:
            _refuse(f"{wanted}, not {text[:40]!r}")
        if not isinstance(parsed, dict) or not parsed:
            _refuse(f"{wanted}, not {text[:40]!r}")
        for stream, position in parsed.items():
            if position not in ("earliest", "latest") and (
                not isinstance(position, int) or isinstance(position, bool) or not 0 <= position < 2**63
            ):
                _refuse(f"{wanted}; for {stream!r} it is {position!r}")
        return parsed


def _names(option: str, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        _refuse(f"{option} has an empty name in its list: {text!r}")
    if len(set(names)) < len(names):
        _refuse(f"{option} names one twice: {text!r}")
    for name in names:
        if len(name.encode()) > SHORT_STRING_BYTES:
            _refuse(f"{option} has a name of more than 255 bytes: {name[:40]!r}...")
    return names


def _refuse(text: str) -> NoReturn:
    raise ConfigurationError(text)
