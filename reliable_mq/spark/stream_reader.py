"""The task of stream mode: read one range of offsets, exactly, at every attempt.

Invariants:

- The result is every message of the range that the stream still has, in order, each once, however often the connection
  is lost meanwhile.
- A range ends only when an offset at or after its end was seen, so it never ends early. A range that does not fill in
  time is an error. With a filter, which leaves offsets out, the range ends when the broker has read to the end of the
  stream: as far as acks allow, the broker does so before it answers the next method of the channel.
- Messages that the stream dropped before they were read are data loss, which is an error unless ``failOnDataLoss`` is
  false.
- Memory is bounded by twice the prefetch. It is also bounded by twice `_HELD` bytes, as far as the sizes of earlier
  messages predict those of later ones.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa

from reliable_mq._util.logs import get_logger
from reliable_mq.codec import CodecError, Properties, RawDelivery
from reliable_mq.codec.methods import CheckQueue
from reliable_mq.core.stage.envelope import messages_in
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, ConsumeError, ReliableMQError, TopologyMismatch
from reliable_mq.spark.columns import record_batch
from reliable_mq.spark.metrics import exporter
from reliable_mq.spark.options import StreamOptions
from reliable_mq.spark.queue_batches import size_of
from reliable_mq.spark.queue_subscriptions import PrefetchChoice, PrefetchController
from reliable_mq.spark.stream_broker import StreamChannel, end_of, first_offsets, from_host, is_shorter, offset_of
from reliable_mq.spark.stream_offsets import StreamRange

logger = get_logger(__name__)

_ROWS: Final = 2000  # rows of an Arrow batch, and deliveries to wait for
_HELD: Final = 32 * 2**20  # approximate maximum bytes in transit or in an Arrow batch
_FIRST: Final = 64  # deliveries to request while their size is unknown
_GATHER: Final = 0.05  # seconds to gather a batch
_PATIENCE: Final = 60.0  # seconds without a message or a broker before a task fails
_RENEWAL: Final = 5.0  # seconds for which a certificate that is missing before the first row may be being renewed
_PROBE: Final = 5.0  # seconds to wait for the first message when only the ends are looked up
_BETWEEN_ATTEMPTS: Final = 0.5
_FILTER_VALUE: Final = "x-stream-filter-value"


class RangeReader:
    """A reader of one range. It can be used once."""

    def __init__(
        self, options: StreamOptions, each: StreamRange, names: tuple[str, ...], *, patience: float = _PATIENCE
    ) -> None:
        self._options = options
        self._settings = options.settings()
        self._range = each
        self._names = names
        self._position = each.start  # all messages before it were returned
        self._prefetch = PrefetchController(PrefetchChoice(options.prefetch, first=_FIRST), most_bytes=_HELD)
        self._passed = 0  # hosts at which reading failed
        self._stalled = 0  # hosts from which nothing came since the last progress
        self._patience = patience
        self._waited = 0.0  # seconds without progress
        self._counted_at = time.monotonic()
        self._metrics = exporter(options.metrics_directory)
        self._filter = (
            None
            if options.stream_filter is None
            else ValueFilter(options.stream_filter, unfiltered=options.match_unfiltered)
        )

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Return the range in batches. Blocks up to a minute while the broker is away.

        Raises:
            ConsumeError: If the range cannot be read because of data loss, or did not fill in time.
            BrokerUnavailable, ConfigurationError, TopologyMismatch: If connecting or consuming cannot succeed.
        """
        try:
            yield from self._batches()
        finally:
            if self._metrics is not None:
                self._metrics.write()  # the process may end at any time

    def _batches(self) -> Iterator[pa.RecordBatch]:
        while self._position < self._range.end:
            try:
                with self._connected("range") as channel:
                    yield from self._read(channel)
            except TopologyMismatch as error:  # the stream was deleted
                if self._options.fail_on_data_loss:
                    raise
                logger.warning("%s: %s; continuing because failOnDataLoss is false", self._range, error)
                return
            except ConfigurationError as error:  # a certificate may be being renewed
                if self._position == self._range.start and self._count_wait() >= _RENEWAL:
                    raise
                self._retry(error)
            except BrokerUnavailable as error:
                if error.permanent:
                    raise
                self._retry(error)

    def _retry(self, error: ReliableMQError) -> None:
        """Wait before the next attempt, or raise an error after too many."""
        if self._count_wait() >= self._patience:
            raise ConsumeError(f"{self._left} could not be read within {self._patience:g} s: {error}") from error
        logger.warning("%s: %s; continuing at offset %d", self._range, error, self._position)
        self._passed += 1
        if self._metrics is not None:
            self._metrics.streams.reconnects[self._range.stream] += 1
        time.sleep(_BETWEEN_ATTEMPTS)

    def _read(self, channel: StreamChannel) -> Iterator[pa.RecordBatch]:
        stream, end = self._range.stream, self._range.end
        if self._filter is not None and end_of(channel, stream, _PROBE).position < end:  # the replica here lags behind
            self._wait_on()
            time.sleep(_BETWEEN_ATTEMPTS)
            return
        while self._position < end:
            yield from self._subscription(channel)

    def _subscription(self, channel: StreamChannel) -> Iterator[pa.RecordBatch]:
        """Read to the end, or until message sizes require a much different prefetch."""
        stream, end, prefetch = self._range.stream, self._range.end, self._prefetch.prefetch
        arguments = None if self._filter is None else self._filter.arguments
        tag = channel.consume(stream, self._position, prefetch, arguments)
        while self._position < end:
            deliveries = channel.take(_GATHER, min(max(prefetch // 2, 1), _ROWS, end - self._position))
            if not deliveries and self._filter is not None:
                channel.carry_out(CheckQueue(stream))  # answered after all messages that pass the filter
                deliveries = channel.take(0.0)
                if not deliveries:
                    channel.cancel(tag)
                    self._check_truncated(channel, self._position)
                    self._position = end
                    return
            if not deliveries:
                self._wait_on()
                continue
            self._progressed()
            offsets = [offset_of(delivery, stream) for delivery in deliveries]
            channel.ack()
            missing = self._missing(offsets)
            if missing is not None:
                self._check_truncated(channel, missing)
            self._prefetch.received(len(deliveries), sum(map(size_of, deliveries)))
            wanted = self._prefetch.prefetch
            of_rows = _ROWS * len(deliveries) // max(_rows_in(deliveries), 1)
            after, step = bisect_left(offsets, end), min(max(of_rows, 1), wanted)
            for first in range(bisect_left(offsets, self._position), after, step):
                last = min(first + step, after)
                chosen = deliveries[first:last]
                if self._filter is not None:
                    chosen = [delivery for delivery in chosen if self._filter.passes(delivery)]
                if chosen:
                    batch = record_batch(chosen, stream, self._names)
                    yield batch
                    if self._metrics is not None:
                        self._metrics.streams.rows[stream] += batch.num_rows
                self._progressed()  # time that the caller spends on the rows does not count
                self._position = offsets[last - 1] + 1
            if offsets[-1] >= end - 1:
                self._position = end
            elif 2 * wanted <= prefetch or (2 * prefetch <= wanted and prefetch < end - self._position):
                channel.cancel(tag)
                return

    def _wait_on(self) -> None:
        """Raise an error with the cause if nothing has arrived for too long.

        The patience is divided among the hosts, because the replica of one may lag behind.
        """
        waited = self._count_wait()
        if waited < self._patience:
            if waited >= self._patience * (self._stalled + 1) / len(self._settings.endpoints):
                self._stalled += 1
                raise BrokerUnavailable(f"{self._left} did not come from this host")
            return
        with self._connected("end") as channel:
            found = end_of(channel, self._range.stream, _PROBE)
            end = found.position
            gone = end <= self._position and is_shorter(channel, self._range.stream, found, self._position + 1, _PROBE)
        if not gone:
            has = "has them" if end >= self._range.end else f"has those up to {end - 1} on this node, so far"
            raise ConsumeError(f"{self._left} did not come within {self._patience:g} s, and the stream {has}")
        self._lost(f"{self._left} are not there: the stream ends at offset {end - 1}. Was it deleted and made anew?")
        self._position = self._range.end

    def _missing(self, offsets: Sequence[int]) -> int | None:
        """Return the first offset of the range that was left out, or None."""
        expected = self._position
        if offsets[0] == expected and offsets[-1] - expected < len(offsets):
            return None
        for offset in offsets:
            if offset > expected:
                return expected if expected < self._range.end else None
            expected = max(expected, offset + 1)
        return None

    def _check_truncated(self, channel: StreamChannel, missing: int) -> None:
        """Check for data loss where an offset did not come.

        It is a normal gap, or messages were dropped: at any time, since RabbitMQ silently continues at the first
        message that it still has. Each replica drops its own messages, so the replica that was read is queried.
        """
        stream = self._range.stream
        left = StreamRange(stream, missing, self._range.end)
        first = first_offsets(channel, (stream,), _PROBE).get(stream)
        if first is None:
            raise BrokerUnavailable(f"{left} may be gone: the first offset of the stream did not come")
        if first > missing:
            self._lost(f"{left} are gone, at least up to {first - 1}: the stream now begins at offset {first}")

    def _lost(self, what: str) -> None:
        if self._options.fail_on_data_loss:
            raise ConsumeError(
                f"{what}. Messages were dropped before they were read: let the stream keep them longer (max-age, "
                "max-length-bytes; of a stage, stageRetention and stageMaxBytes), read more often, or set "
                "failOnDataLoss to false to go on without them"
            )
        logger.warning("%s; continuing because failOnDataLoss is false", what)

    def _connected(self, what: str) -> StreamChannel:
        return StreamChannel(from_host(self._settings, self._passed), name=f"spark-{what}")

    def _progressed(self) -> None:
        self._stalled, self._waited, self._counted_at = 0, 0.0, time.monotonic()

    def _count_wait(self) -> float:
        """Return the seconds without progress, including those since the last call.

        One wait counts as half of the patience at most: the process may have been frozen.
        """
        now = time.monotonic()
        self._waited += min(now - self._counted_at, self._patience / 2)
        self._counted_at = now
        return self._waited

    @property
    def _left(self) -> StreamRange:
        return StreamRange(self._range.stream, self._position, self._range.end)


def _rows_in(deliveries: Iterable[RawDelivery]) -> int:
    counts = (messages_in(delivery.properties) for delivery in deliveries)
    return sum(1 if count is None else count for count in counts)


class ValueFilter:
    """A filter of stream messages by their ``x-stream-filter-value``.

    Messages without a value pass if ``unfiltered`` is true. RabbitMQ keeps a Bloom filter of the values of each chunk,
    and skips chunks that contain none of a consumer's values. Chunks that it sends contain other messages too, which
    this filter removes.
    """

    def __init__(self, values: Sequence[str], *, unfiltered: bool) -> None:
        self._values = frozenset(values)
        self._unfiltered = unfiltered

    @property
    def arguments(self) -> Mapping[str, object]:
        return {"x-stream-filter": sorted(self._values), "x-stream-match-unfiltered": self._unfiltered}

    def passes(self, delivery: RawDelivery) -> bool:
        raw = delivery.properties
        if _FILTER_VALUE.encode() not in raw:
            return self._unfiltered
        try:
            value = Properties(raw).headers_beginning(_FILTER_VALUE).get(_FILTER_VALUE)
        except CodecError:
            return self._unfiltered
        return value in self._values if isinstance(value, str) else self._unfiltered
