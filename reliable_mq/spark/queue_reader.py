"""Read queues for a query, on one connection in the driver's reader process.

An I/O thread sends heartbeats and receives deliveries, however long a batch takes. Spark's thread requests batches and
reports which batches are committed. All queues share one channel, with a consumer for each queue.

Invariants:

- A delivery is acked only after its batch was committed, and only on the channel that it came on. If that channel is
  lost, the ack is dropped and counted, and the broker redelivers the message.
- Deliveries of a lost channel that are in no batch are dropped at once.
- The held bytes are bounded (`queue_subscriptions`), whatever the prefetch.
- Closing requeues uncommitted deliveries by ``basic.nack`` after the subscriptions have ended, because the broker would
  otherwise redeliver them to the same subscriptions.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Final, cast

from reliable_mq._util.logs import get_logger
from reliable_mq.codec import RawDelivery, encode_ack, encode_nack
from reliable_mq.codec.methods import CheckQueue, QueueState
from reliable_mq.connection.interfaces import ConnectionListener
from reliable_mq.core.channel_setup import ServerInfo, SetupGenerator, StepRefused, carry_out, is_missing
from reliable_mq.core.consumer.acks import AckBatcher
from reliable_mq.core.consumer.attempts import broker_counts
from reliable_mq.core.consumer.consumer_timeout import consumer_timeout_of
from reliable_mq.core.consumer.delivery import ChannelGeneration, Delivery
from reliable_mq.core.reconnect import ConnectionLoss, ReconnectPolicy
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, ConsumeError, ReliableMQError
from reliable_mq.metrics.registry import Reading, register
from reliable_mq.spark.metrics import QueueStatistics, exporter
from reliable_mq.spark.options import QueueOptions
from reliable_mq.spark.queue_batches import Batches, QueuePosition
from reliable_mq.spark.queue_intervals import LINGER, IntervalMonitor, longest_linger
from reliable_mq.spark.queue_subscriptions import PrefetchChange, PrefetchChoice, PrefetchController, Subscriptions
from reliable_mq.sync.io_thread import IOThread

logger = get_logger(__name__)

_CLOSE_GRACE: Final = 3.0  # seconds for the closing handshake
_SETTLING: Final = 0.02  # seconds without a delivery after which a batch is considered full
_REQUESTED: Final = 1.0  # maximum seconds to wait after a prefetch request, which takes the broker some round trips
_COUNT_EVERY: Final = 1.0  # seconds between two counts of the backlog
_SUBSCRIBE_AGAIN: Final = 0.5  # seconds after the broker has cancelled a consumer


class QueueReader(ConnectionListener):
    """A reader that subscribes to queues, plans batches and acks them.

    The constructor does not connect.
    """

    def __init__(
        self, options: QueueOptions, session: str, prefetch: PrefetchChoice, single_active: Collection[str] = ()
    ) -> None:
        self.error: ReliableMQError | None = None  # the error that ended reading
        queues = dict.fromkeys(options.queues, 0)
        self.statistics = QueueStatistics(Counter(queues), Counter(queues), Counter(queues))
        self._options = options
        self._settings = settings = options.settings()
        # Shared by both threads, guarded by `_changed`.
        self._changed = threading.Condition()
        self._batches = Batches(session)
        self._ready: dict[str, int] = {}  # ready messages by queue, from the last count
        self._found: dict[str, int] = {}  # the same, before the subscription
        self._in_doubt: dict[str, int] = {}  # earlier deliveries of each queue whose count there is in doubt
        self._connected = False
        self._attempts_left = len(settings.endpoints)
        self._last_error: ReliableMQError | None = None
        self._missing_since: float | None = None  # when a queue was first found missing
        self._first_at = self._last_at = 0.0  # arrival of the oldest and the newest waiting delivery
        self._planned_at = time.monotonic()  # of the newest batch
        self._intervals = IntervalMonitor()
        self._requested_at: float | None = None  # when a larger prefetch was requested
        self._requeued = threading.Event()
        # Used by the I/O thread only.
        self._prefetch = PrefetchController(prefetch, most_bytes=2 * options.max_bytes, queues=len(options.queues))
        self._limited = prefetch.limit is not None
        self._returned: dict[int, int] = {}  # earlier returns of each unacked delivery, by delivery tag
        self._sources: dict[str, ChannelGeneration] = {}  # by queue
        self._changing = False  # whether the subscriptions are changing
        self._closing = False
        self._count_again = 0.0  # earliest time of the next backlog count
        self._read: list[Delivery] = []  # not yet visible to Spark's thread
        self._metrics = exporter(options.metrics_directory)
        self._registration = self._metrics and register(self._metrics.registry, self._readings)
        self._io = IOThread(
            name=f"spark-{session}",
            settings=settings,
            setup=self._set_up,
            client=self,
            reconnect_policy=ReconnectPolicy(hosts=len(settings.endpoints)),
        )
        self._acks = AckBatcher(ack_interval=0.0, prefetch=0)
        self._channel = 0
        self._subscriptions = Subscriptions(f"spark-{session}", options.queues, self._wants, self._grant, single_active)

    # -- for Spark's thread --------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect and begin to read.

        Blocks until the connection is ready, or each host had its first attempt.

        Raises:
            BrokerUnavailable: If no host could be reached.
            TopologyMismatch: If a queue does not exist.
        """
        self._io.start()
        patience = self._settings.first_attempts_timeout
        with self._changed:
            self._changed.wait_for(
                lambda: self._connected or self.error is not None or self._attempts_left <= 0, patience
            )
            if self._connected:
                return
            error = self.error or self._last_error or BrokerUnavailable(f"no answer within {patience:g} s")
        self.close(0.0)
        raise error

    def plan(self, start: QueuePosition, *, most: int, timeout: float) -> QueuePosition:
        """Plan the batch after ``start``.

        The batch holds the waiting deliveries, or the first ones that arrive within ``timeout`` seconds.

        Raises:
            ConsumeError: If a queue has been missing for ``missingQueueTimeout``.
            ReliableMQError: If an error has ended reading.
        """
        called = time.monotonic()
        with self._changed:
            while True:
                if self.error is not None:
                    raise self.error
                self._check_missing()
                wait = self._wait_for_more(start, most, called, called + timeout)
                if wait <= 0:
                    return self._plan(start, 0 if self._too_few() else most, called)
                self._changed.wait(wait)

    def deliveries(self, start: QueuePosition, end: QueuePosition) -> list[Delivery]:
        """Return a planned batch. It is empty if another process planned it."""
        with self._changed:
            return self._batches.deliveries(start, end)

    def committed(self, end: QueuePosition) -> None:
        """Ack the batch that ends at ``end``. Does not wait for the broker.

        Raises:
            ConsumeError: If consecutive batches were redelivered before their acks.
        """
        with self._changed:
            done = self._batches.committed(end)
            if done:
                self._io.call_soon(partial(self._ack, done))
                self._intervals.committed(time.monotonic() - self._planned_at)

    def limit_to_ready(self) -> None:
        """Limit each queue to the messages that were ready before the subscription."""
        with self._changed:
            self._batches.remaining = dict(self._found)
        self._leave([queue for queue, ready in self._found.items() if not ready])

    @property
    def exhausted(self) -> bool:
        """Whether all messages that were ready at the beginning are planned."""
        with self._changed:
            return self._batches.remaining is not None and not any(self._batches.remaining.values())

    def count(self, timeout: float) -> dict[str, int] | None:
        """Count ready messages by queue, for queues within the limit.

        Return None on timeout, or without a connection.
        """
        counted = self._ask(self._count, timeout)
        return counted if isinstance(counted, dict) else None

    def settled(self, timeout: float) -> bool:
        """Subscribe anew. Return whether nothing is ready, or on its way to this reader."""
        return self._ask(self._settle, timeout) is True

    def _ask(self, ask: Callable[[Callable[[object], None]], None], timeout: float) -> object:
        """Return the answer that ``ask`` gets on the I/O thread; None on timeout."""
        answers: list[object] = []

        def answer(outcome: object) -> None:
            with self._changed:
                answers.append(outcome)
                self._changed.notify_all()

        self._io.call_soon(partial(ask, answer))
        with self._changed:
            self._changed.wait_for(lambda: answers or self.error is not None, timeout)
            if self.error is not None:
                raise self.error
            return answers[0] if answers else None

    def backlog(self) -> QueuePosition:
        """Return the position after all known messages. Start a count for the next call."""
        self._io.call_soon(self._count_if_due)
        with self._changed:
            return self._batches.horizon(self._ready)

    def close(self, timeout: float) -> None:
        """Requeue uncommitted deliveries and disconnect.

        Blocks at most a few seconds longer than ``timeout`` seconds.
        """
        if self._io.call_soon(self._begin_to_close):
            self._requeued.wait(timeout)
        self._io.close(_CLOSE_GRACE)
        if self._metrics is not None and self._registration is not None:
            self._registration.close()
            self._metrics.write()

    def _readings(self) -> Iterator[Reading]:
        with self._changed:
            self.statistics.ready = dict.fromkeys(self._options.queues, 0) | self._ready
            self.statistics.held_bytes, self.statistics.connected = self._batches.held, self._connected
        yield from self.statistics.readings()

    def _check_missing(self) -> None:
        patience = self._options.missing_queue_timeout
        if self._missing_since is not None and time.monotonic() - self._missing_since >= patience:
            raise ConsumeError(
                f"a queue of this query is missing for {patience:g} s (missingQueueTimeout): {self._last_error}. A "
                "query that is started again on the same checkpoint reads on"
            ) from self._last_error

    def _wait_for_more(self, start: QueuePosition, most: int, called: float, deadline: float) -> float:
        """Return the seconds to wait before the batch after ``start`` is planned.

        The latest acks allow the broker to send more messages, which are already on their way. A fuller batch is worth
        a wait of some milliseconds.
        """
        batches, now = self._batches, time.monotonic()
        if batches.knows(start):
            return 0.0
        if not batches.waits() or self._too_few():
            return deadline - now
        if len(batches.waiting) >= most or batches.held >= self._options.max_bytes:
            return 0.0
        if self._requested_at is not None:
            return max(self._requested_at, called) + _REQUESTED - now
        linger = longest_linger(called - self._planned_at, backlog=any(self._ready.values()))
        return min(max(self._last_at, called) + _SETTLING, max(self._first_at, called) + linger) - now

    def _too_few(self) -> bool:
        """Return whether to wait for ``minMessagesPerTrigger``, while more can be held."""
        least, waiting, held = self._options.min_messages, len(self._batches.waiting), self._batches.held
        if least is None or waiting >= least or self._batches.remaining is not None:
            return False
        full = held >= self._options.max_bytes or waiting >= self._prefetch.granted or self._prefetch.paused
        return not full and time.monotonic() - self._planned_at < self._options.max_trigger_delay

    def _plan(self, start: QueuePosition, most: int, called: float) -> QueuePosition:
        known = self._batches.knows(start)
        end = self._batches.plan(start, most=most, most_bytes=self._options.max_bytes)
        if end != start and not known:
            self.statistics.batches += 1
            self._leave([queue for queue in end.queues if self._batches.planned(queue) and not self._has_more(queue)])
            backlog = sum(self._ready.values()) if self._batches.remaining is None else 0  # from the end of the batch
            self._intervals.planned(end.sequence - start.sequence, called - self._planned_at, backlog)
            self._planned_at = time.monotonic()
        return end

    def _has_more(self, queue: str) -> bool:
        """Return whether deliveries of this queue are within the limit."""
        return self._batches.remaining is None or self._batches.remaining[queue] > 0

    def _leave(self, queues: Sequence[str]) -> None:
        """Unsubscribe from queues whose limit is reached; leave the rest to others."""
        for queue in queues:
            self._io.call_soon(partial(self._stop_reading, queue))

    # -- on the I/O thread: the connection -----------------------------------------------------------------------------

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        """Begin on a new channel, which is subscribed."""
        self._acks.opened(generation)
        self._channel = channel
        self._sources = {queue: ChannelGeneration(generation, channel, queue) for queue in self._options.queues}
        self._changing = False
        logger.info("reading %s on %s %s", ", ".join(self._options.queues), server.product, server.version)
        if self._in_doubt:
            self._count_anew()
        else:
            self._subscribed()

    def _subscribed(self) -> None:
        with self._changed:
            self._connected = True
            self._missing_since = None
            self._changed.notify_all()

    def lost(self, generation: int, loss: ConnectionLoss) -> None:
        """Forget the channel: the broker redelivers unacked messages."""
        self.statistics.reconnects += not self._closing
        self._acks.lost()
        self._subscriptions.lost()
        self._returned.clear()
        self._prefetch.lost()
        self._read = []
        self._changing = False
        self._request_ended()
        with self._changed:
            self._connected = False
            self._in_doubt = {}
            planned = self._batches.lost()
            self._intervals.taken_back |= bool(planned) and consumer_timeout_of(loss) is not None
            for delivery in planned:
                if self._batches.remaining is not None and delivery.source.generation == generation:
                    self._batches.remaining[delivery.queue] += 1  # the redelivery must not count twice
            self._changed.notify_all()
        if self._closing:
            self._requeued.set()

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        """Record that an attempt to connect or to subscribe failed."""
        with self._changed:
            self._last_error = error
            self._attempts_left -= 1
            if not is_missing(error):
                self._missing_since = None  # unknown
            elif self._missing_since is None:
                self._missing_since = time.monotonic()
            became_stream = isinstance(error, ConfigurationError) and isinstance(error.__cause__, StepRefused)
            if not will_retry or became_stream:
                self.error = error
            self._changed.notify_all()

    def cancelled(self, consumer_tag: str) -> None:
        """Recall the waiting deliveries of a queue whose consumer the broker cancelled.

        The queue or its leader is gone, or a batch took longer than the consumer timeout.
        """
        queue = self._subscriptions.cancelled(consumer_tag)
        if queue is None or self._closing:
            return
        with self._changed:
            self._intervals.taken_back |= self._batches.planned(queue)
        logger.warning(
            "the broker cancelled the consumer of queue %r: the queue was deleted or moved, or a batch took "
            "longer than the consumer timeout and will be delivered again; subscribing again once the batch is "
            "committed",
            queue,
        )
        self._recall(queue)
        self._io.call_later(_SUBSCRIBE_AGAIN, partial(self._subscribe_again, queue))

    def delivered(self, deliveries: list[RawDelivery]) -> None:
        """Accept the deliveries of one read."""
        self._acks.delivered(deliveries[0].delivery_tag, deliveries[-1].delivery_tag)
        for delivery in cast("list[Delivery]", deliveries):
            delivery.came_from(self._sources[self._subscriptions.queue(delivery.consumer_tag)])
            self._read.append(delivery)
            if self._limited and delivery.redelivered:
                self._returned[delivery.delivery_tag], _ = broker_counts(delivery.properties)

    def read_finished(self) -> None:
        """Make the deliveries of one read visible to Spark's thread."""
        read, self._read = self._read, []
        if not read:
            return
        now = time.monotonic()
        with self._changed:
            if not self._batches.waiting:
                self._first_at = now
            self._last_at = now
            size = self._batches.arrived(read)
            for queue, count in Counter(delivery.queue for delivery in read).items():
                self._ready[queue] = max(0, self._ready.get(queue, 0) - count)
                self.statistics.delivered[queue] += count
            self._prefetch.received(len(read), size)
            self._adjust()  # before Spark's thread is notified: requested deliveries are worth a wait
            self._changed.notify_all()

    # -- on the I/O thread: subscriptions ------------------------------------------------------------------------------

    def _wants(self, queue: str) -> bool:
        return not self._closing and self._has_more(queue)

    def _grant(self) -> int:
        return self._prefetch.grant(self._acks.outstanding)

    def _set_up(self, server: ServerInfo) -> SetupGenerator:
        counted: dict[str, int] = {}
        in_doubt: dict[str, int] = {}
        for queue in filter(self._wants, self._options.queues):
            state: QueueState = yield from carry_out(CheckQueue(queue))
            counted[queue] = state.messages
            self._subscriptions.found(state)
            if state.in_doubt:
                in_doubt[queue] = self.statistics.delivered[queue]
        yield from self._subscriptions.begin()
        with self._changed:
            self._ready, self._found, self._in_doubt = self._ready | counted, counted, in_doubt

    def _count_anew(self) -> None:
        if self._in_doubt:
            self._io.run(self._subscriptions.certain_counts(list(self._in_doubt)), self._checked)

    def _checked(self, counted: object) -> None:
        if isinstance(counted, dict) and counted.keys() == self._in_doubt.keys():
            with self._changed:
                for queue, ready in counted.items():
                    read = sum(delivery.queue == queue for delivery in self._read)
                    self._found[queue] = ready + self.statistics.delivered[queue] + read - self._in_doubt[queue]
                    self._ready[queue] = ready
                self._in_doubt = {}
            self._subscribed()
        elif counted is None:
            self._io.call_later(_SUBSCRIBE_AGAIN, self._count_anew)

    def _stop_reading(self, queue: str) -> None:
        if not self._closing:
            self._io.run(self._subscriptions.end(queue), partial(self._stopped_reading, queue))

    def _stopped_reading(self, queue: str, _outcome: object) -> None:
        self._recall(queue)
        self._adjust()

    def _recall(self, queue: str) -> None:
        self.read_finished()  # the last deliveries may have come in the same read as the end of the subscription
        with self._changed:
            recalled = self._batches.recall(queue)
        self._requeue(recalled)
        self._forget(recalled)

    def _subscribe_again(self, queue: str) -> None:
        """Consume a queue again once no batch has deliveries of it.

        If the consumer timeout has expired, the broker redelivers them. The end of a pause consumes all queues again.
        """
        open_ = self._connected or self._in_doubt  # a certain count needs the subscription
        if not open_ or self._closing or self._prefetch.paused or queue in self._subscriptions.queues:
            return
        with self._changed:
            planned = self._batches.planned(queue)
        if planned:
            self._io.call_later(_SUBSCRIBE_AGAIN, partial(self._subscribe_again, queue))
        else:
            self._io.run(self._subscriptions.resume(queue), self._changed_subscriptions)

    def _adjust(self) -> None:
        if self._changing or self._closing or not self._connected:
            return
        self._prefetch.returned = max(self._returned.values(), default=0)
        change = self._prefetch.next_change(self._batches.held, self._acks.outstanding)
        if change is not PrefetchChange.STAY:
            self._changing = True
            if change is PrefetchChange.RENEW:
                with self._changed:
                    self._requested_at = time.monotonic()
            steps = self._subscriptions.end() if change is PrefetchChange.PAUSE else self._subscriptions.renew()
            self._io.run(steps, self._changed_subscriptions)

    def _settle(self, answer: Callable[[object], None]) -> None:
        if self._connected and not self._closing and not self._changing:
            self._changing = True
            self._io.run(self._subscriptions.settled(), partial(self._settle_ended, answer))
        else:
            answer(False)

    def _settle_ended(self, answer: Callable[[object], None], outcome: object) -> None:
        answer(outcome)
        self._changed_subscriptions(outcome)

    def _request_ended(self) -> None:
        """Record that the requested deliveries are on their way, or will not come."""
        with self._changed:
            if self._requested_at is not None:
                self._requested_at = None
                self._first_at = time.monotonic()
                self._last_at = self._first_at + LINGER  # until the first of them arrives
                self._changed.notify_all()

    def _changed_subscriptions(self, outcome: object) -> None:
        self._changing = False
        self._request_ended()
        if isinstance(outcome, Exception):
            logger.warning("failed to change the subscriptions; the next channel will have them: %s", outcome)
        else:
            self._adjust()

    # -- on the I/O thread: acks ---------------------------------------------------------------------------------------

    def _ack(self, deliveries: Sequence[Delivery]) -> None:
        """Ack the deliveries of a committed batch that came on this channel."""
        own, tags = self._of_this_channel(deliveries)
        stale = len(deliveries) - len(own)
        if stale:
            self.statistics.stale_acks += stale
            logger.warning(
                "cannot ack %d of %d deliveries of a committed batch, because their channel is closed: they will "
                "be delivered again",
                stale,
                len(deliveries),
            )
        if own:
            self.statistics.acked.update(delivery.queue for delivery in own)
            self._acks.finished(tags, time.monotonic())
            self._io.write(b"".join(encode_ack(self._channel, *frame) for frame in self._acks.flush()))
        self._forget(deliveries)
        self._adjust()

    def _requeue(self, deliveries: Sequence[Delivery]) -> None:
        """Requeue deliveries that are, and will be, in no committed batch."""
        own, tags = self._of_this_channel(deliveries)
        if not own:
            return
        self.statistics.requeued.update(delivery.queue for delivery in own)
        logger.info("requeueing %d deliveries that are in no committed batch", len(own))
        acks, nacks = self._acks.requeue(tags)
        frames = [encode_ack(self._channel, *frame) for frame in acks]
        frames += [encode_nack(self._channel, *frame, requeue=True) for frame in nacks]
        self._io.write(b"".join(frames))

    def _of_this_channel(self, deliveries: Sequence[Delivery]) -> tuple[list[Delivery], list[int]]:
        generation = self._acks.generation
        own = [delivery for delivery in deliveries if delivery.source.generation == generation]
        return own, [delivery.delivery_tag for delivery in own]

    def _forget(self, deliveries: Sequence[Delivery]) -> None:
        """Drop the return counts of deliveries that are no longer unacked."""
        if self._returned:
            generation = self._acks.generation
            for delivery in deliveries:
                if delivery.source.generation == generation:
                    self._returned.pop(delivery.delivery_tag, None)

    # -- on the I/O thread: counts -------------------------------------------------------------------------------------

    def _count(self, answer: Callable[[object], None]) -> None:
        if self._connected and not self._closing:
            self._io.run(self._subscriptions.ready(self._ready), partial(self._counted, answer))
        else:
            answer(None)

    def _count_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._count_again:
            self._count_again = now + _COUNT_EVERY
            self._count(lambda _counted: None)

    def _counted(self, answer: Callable[[object], None], outcome: object) -> None:
        if isinstance(outcome, dict):
            with self._changed:
                self._ready |= outcome
                self._changed.notify_all()
        answer(outcome)

    # -- on the I/O thread: the end ------------------------------------------------------------------------------------

    def _begin_to_close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._io.run(self._subscriptions.end(), self._requeue_all)

    def _requeue_all(self, _outcome: object) -> None:
        """Requeue everything after the subscriptions have ended."""
        with self._changed:
            everything = self._batches.take_all()
            self._changed.notify_all()
        self._requeue([*everything, *self._read])
        self._requeued.set()
