"""What reads queues for a query: one connection in the driver's reader process, for as long as the query lives.

An I/O thread of its own keeps heartbeats going and takes in deliveries, however long a batch takes. Spark's thread asks
for batches and says which are committed. All queues share a channel, with a consumer for each.

Invariants:

- a delivery is acked only after its batch was committed, and only on the channel that it came on: where that is gone,
  its ack is dropped and counted, and the broker delivers it again;
- what came on a channel that is lost and is in no batch is dropped at once;
- bytes that are held are bounded (see `appetite`), whatever the prefetch;
- when it is closed, what was not committed is handed back by ``basic.nack``, after the subscriptions have ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from reliable_mq.connection.client import Client
from reliable_mq.core.acks import AckBatcher
from reliable_mq.core.codec import encode_ack, encode_nack
from reliable_mq.core.delivery import Delivery, Source
from reliable_mq.core.recovery import Recovery
from reliable_mq.core.setup import Cancel, CheckQueue, Consume, SetPrefetch, StepRefused, refusal
from reliable_mq.errors import BrokerUnavailable
from reliable_mq.metrics.registry import register
from reliable_mq.spark.appetite import Appetite, Move
from reliable_mq.spark.batches import Batches, Position
from reliable_mq.spark.metrics import QueueStatistics, exporter, queue_readings
from reliable_mq.sync.io_thread import IOThread
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliable_mq.core.codec import RawDelivery
    from reliable_mq.core.recovery import Loss
    from reliable_mq.core.setup import QueueState, ServerInfo, SetupGenerator, Step, StepGenerator
    from reliable_mq.errors import ReliableMQError
    from reliable_mq.metrics.registry import Reading
    from reliable_mq.spark.options import QueueOptions

__all__ = ["Pump"]

logger = logging.getLogger(__name__)

_CLOSE_GRACE: Final = 3.0  # seconds for the closing handshake
_SETTLING: Final = 0.02  # seconds without a delivery after which a batch is as full as it will be
_LINGER: Final = 0.1  # seconds that a batch waits for more at most
_ASKING: Final = 1.0  # likewise, while more is being asked for, which takes the broker some answers
_COUNT_EVERY: Final = 1.0  # seconds, for the backlog
_SUBSCRIBE_AGAIN: Final = 0.5  # seconds after the broker has cancelled a consumer


class Pump(Client):
    """See the module. Making it does not connect.

    Args:
        options: of the source.
        session: a name that no other process has.

    Attributes:
        error: why it has ended by itself, if it has.
        stale: acks that were dropped, since their channel was gone.
        reconnects: channels lost and made again.
        statistics: what it counts.
    """

    def __init__(self, options: QueueOptions, session: str) -> None:
        self.error: ReliableMQError | None = None
        self.stale = 0
        self.reconnects = 0
        self.statistics = QueueStatistics()
        self._options = options
        self._settings = settings = parse_url(options.url)
        # Shared by both threads, and guarded by this.
        self._changed = threading.Condition()
        self._batches = Batches(session)
        self._remaining: dict[str, int] | None = None  # by queue, where there is a limit
        self._ready: dict[str, int] = {}  # messages that are ready, by queue, when last counted
        self._found: dict[str, int] = {}  # likewise, before the subscription
        self._counts = 0  # how often they were counted
        self._connected = False
        self._attempts_left = len(settings.endpoints)
        self._last_error: ReliableMQError | None = None
        self._first_at = self._last_at = 0.0  # when the oldest and the newest of what waits came
        self._asked_at: float | None = None  # since when more is being asked for
        self._handed_back = threading.Event()
        # Of the I/O thread alone.
        self._appetite = Appetite(most=options.prefetch, most_bytes=2 * options.max_bytes, queues=len(options.queues))
        self._acks = AckBatcher(ack_interval=0.0, prefetch=0)
        self._channel = 0
        self._sources: dict[str, Source] = {}  # by queue
        self._consumers: dict[str, str] = {}  # queues, by the consumer tags of this channel
        self._subscribed: list[str] = []  # the tags that the broker delivers to now
        self._subscriptions = 0  # so far: no tag is used twice
        self._busy = False  # the subscriptions are being changed
        self._closing = False
        self._count_again = 0.0  # not before, for the backlog
        self._read: list[Delivery] = []  # not yet shown to Spark's thread
        self._metrics = exporter(options.metrics_directory)
        self._registration = self._metrics and register(self._metrics.registry, self._readings)
        self._name = f"spark-{session}"
        self._io = IOThread(
            name=self._name,
            settings=settings,
            setup=self._set_up,
            client=self,
            recovery=Recovery(hosts=len(settings.endpoints)),
        )

    # -- for Spark's thread --------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect and begin to read. Blocks until that has succeeded, or each host had its first attempt.

        Raises:
            BrokerUnavailable: no host could be reached.
            TopologyMismatch: there is no such queue.
        """
        self._io.start()
        patience = self._settings.connect_timeout * len(self._settings.endpoints) + 1.0
        with self._changed:
            self._changed.wait_for(
                lambda: self._connected or self.error is not None or self._attempts_left <= 0, patience
            )
            if self._connected:
                return
            error = self.error or self._last_error or BrokerUnavailable(f"no answer within {patience:g} s")
        self.close(0.0)
        raise error

    def plan(self, start: Position, *, most: int, timeout: float) -> Position:
        """Plan the batch after ``start`` of what is there, or of what comes first within ``timeout`` seconds.

        Raises:
            ReliableMQError: reading has ended by itself.
        """
        called = time.monotonic()
        with self._changed:
            while True:
                if self.error is not None:
                    raise self.error
                wait = self._wait_for_more(start, most, called, called + timeout)
                if wait <= 0:
                    return self._plan(start, most)
                self._changed.wait(wait)

    def deliveries(self, start: Position, end: Position) -> list[Delivery]:
        """Give what lies between two positions; nothing where this process has not planned it."""
        with self._changed:
            return self._batches.deliveries(start, end)

    def committed(self, end: Position) -> None:
        """Ack every batch up to ``end``. Does not wait for the broker."""
        with self._changed:
            done = self._batches.committed(end)
        if done:
            self._io.call_soon(partial(self._ack, done))

    def limit_to_ready(self) -> None:
        """Take no more from each queue than was ready in it before it was consumed."""
        with self._changed:
            self._remaining = dict(self._found)
        self._leave([queue for queue, ready in self._found.items() if not ready])

    @property
    def exhausted(self) -> bool:
        """Whether all has been taken that was ready when it began."""
        with self._changed:
            return self._remaining is not None and not any(self._remaining.values())

    def count(self, timeout: float) -> dict[str, int] | None:
        """Ask how many messages are ready in the queues that may be taken from; None where nobody answers in time."""
        with self._changed:
            before = self._counts
            if not self._io.call_soon(self._count) or not self._changed.wait_for(
                lambda: self._counts > before or self.error is not None, timeout
            ):
                return None
            if self.error is not None:
                raise self.error
            wanted = self._remaining
            return {queue: ready for queue, ready in self._ready.items() if wanted is None or wanted.get(queue, 0) > 0}

    def backlog(self) -> Position:
        """Have what is ready counted, for the next call; give the position behind all that is known to be there."""
        self._io.call_soon(self._count_now_and_then)
        with self._changed:
            return self._batches.horizon(self._ready)

    def close(self, timeout: float) -> None:
        """Hand back what is not committed, and disconnect. Blocks for ``timeout`` seconds and a few at most."""
        if self._io.call_soon(self._begin_to_close):
            self._handed_back.wait(timeout)
        self._io.close(_CLOSE_GRACE)
        if self._metrics is not None and self._registration is not None:
            self._registration.close()
            self._metrics.write()

    def _readings(self) -> Iterator[Reading]:
        """On the thread that writes metrics, or on any."""
        with self._changed:
            ready, held, connected = dict(self._ready), self._batches.held, self._connected
        yield from queue_readings(
            self._options.queues,
            self.statistics,
            ready=ready,
            held_bytes=held,
            connected=connected,
            reconnects=self.reconnects,
            stale_acks=self.stale,
        )

    def _wait_for_more(self, start: Position, most: int, called: float, deadline: float) -> float:
        """Give the seconds to wait before the batch after ``start`` is planned.

        The acks that went before have made room for more, which is on its way; a batch is worth some milliseconds.
        """
        batches, now = self._batches, time.monotonic()
        if batches.knows(start):
            return 0.0
        if not batches.waits(self._remaining):
            return deadline - now
        if len(batches.waiting) >= most or batches.held >= self._options.max_bytes:
            return 0.0
        if self._asked_at is not None:
            return max(self._asked_at, called) + _ASKING - now
        return min(max(self._last_at, called) + _SETTLING, max(self._first_at, called) + _LINGER) - now

    def _plan(self, start: Position, most: int) -> Position:
        known = self._batches.knows(start)
        end = self._batches.plan(start, most=most, most_bytes=self._options.max_bytes, remaining=self._remaining)
        if not known and end != start:
            self.statistics.batches += 1
        if self._remaining is not None and not known:
            before = {queue for queue, count in self._remaining.items() if count > 0}
            for queue in before:
                self._remaining[queue] -= end.queues.get(queue, 0) - start.queues.get(queue, 0)
            self._leave([queue for queue in before if self._remaining[queue] <= 0])
        return end

    def _leave(self, queues: Sequence[str]) -> None:
        """Let others have what is in these queues: enough was taken."""
        for queue in queues:
            self._io.call_soon(partial(self._stop_reading, queue))

    # -- on the I/O thread: what the connection tells ------------------------------------------------------------------

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        """A channel is set up, and subscribed."""
        self._channel = channel
        self._acks.opened(generation)
        self._sources = {queue: Source(generation, channel, queue) for queue in self._options.queues}
        self._busy = False
        logger.info("reading %s on %s %s", ", ".join(self._options.queues), server.product, server.version)
        with self._changed:
            self._connected = True
            self._changed.notify_all()

    def lost(self, generation: int, loss: Loss) -> None:
        """The channel is gone; the broker delivers again what was not acked."""
        self.reconnects += not self._closing
        self._acks.lost()
        self._subscribed = []
        self._read = []
        self._busy = False
        self._answered()
        with self._changed:
            self._connected = False
            for delivery in self._batches.lost():
                if self._remaining is not None and delivery.source.generation == generation:
                    self._remaining[delivery.queue] += 1  # it comes again, and must not stand for another
            self._changed.notify_all()
        if self._closing:
            self._handed_back.set()

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        """An attempt to connect or to subscribe failed."""
        with self._changed:
            self._last_error = error
            self._attempts_left -= 1
            if not will_retry:
                self.error = error
            self._changed.notify_all()

    def cancelled(self, consumer_tag: str) -> None:
        """The broker ended a subscription: the queue is gone or its leader, or a batch took too long."""
        if consumer_tag not in self._subscribed or self._closing:
            return
        queue = self._consumers[consumer_tag]
        self._subscribed.remove(consumer_tag)
        logger.warning(
            "the broker cancelled the consumer of queue %r: the queue was deleted or moved, or a batch took longer "
            "than the consumer timeout, and will come again; subscribing again once the batch is committed",
            queue,
        )
        with self._changed:
            withdrawn = self._batches.withdraw(queue)
        self._give_back(withdrawn)
        self._io.call_later(_SUBSCRIBE_AGAIN, partial(self._subscribe_again, queue))

    def delivered(self, deliveries: list[RawDelivery]) -> None:
        """``basic.deliver``, as many as one read held."""
        self._acks.delivered(deliveries[0].delivery_tag, deliveries[-1].delivery_tag)
        for delivery in cast("list[Delivery]", deliveries):
            delivery.source = self._sources[self._consumers[delivery.consumer_tag]]
            self._read.append(delivery)

    def read_finished(self) -> None:
        """All that was read at once has been reported."""
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
            self._changed.notify_all()
        self._appetite.fed(len(read), size)
        self._adjust()

    def blocked(self, reason: str) -> None:
        """Of no concern to a connection that publishes nothing."""

    def unblocked(self) -> None:
        """Of no concern."""

    def write_drained(self) -> None:
        """Nothing waits for that."""

    def acked(self, tag: int, multiple: bool) -> None:
        """Never: nothing is published here."""

    def nacked(self, tag: int, multiple: bool) -> None:
        """Never: nothing is published here."""

    def returned(self, code: int, text: str, exchange: str, routing_key: str, properties: bytes, body: bytes) -> None:
        """Never: nothing is published here."""

    def got(self, delivery: RawDelivery, message_count: int) -> None:
        """Never: nothing is asked for."""

    def got_empty(self) -> None:
        """Never: nothing is asked for."""

    # -- on the I/O thread: the work -----------------------------------------------------------------------------------

    def _set_up(self, server: ServerInfo) -> SetupGenerator:
        """Count what is ready, and subscribe."""
        self._consumers = {}
        self._subscribed = []
        step: Step
        steps = self._subscribe() if not self._closing else _nothing()
        counted: dict[str, int] = {}
        try:
            for queue in self._options.queues:
                step = CheckQueue(queue)
                state: QueueState = yield step
                counted[queue] = state.messages
            for step in steps:
                yield step
        except StepRefused as refused:
            raise refusal(step, refused) from refused
        with self._changed:
            self._ready, self._found = dict(counted), counted

    def _subscribe(self) -> StepGenerator:
        """Consume every queue, with the prefetch of now."""
        yield SetPrefetch(self._appetite.prefetch)
        self._appetite.renewed()
        for queue in self._options.queues:
            if self._remaining is None or self._remaining.get(queue, 0) > 0:
                yield self._consume(queue)

    def _consume(self, queue: str) -> Consume:
        self._subscriptions += 1
        tag = f"{self._name}-{self._subscriptions}"
        self._consumers[tag] = queue
        self._subscribed.append(tag)
        return Consume(queue, tag)

    def _unsubscribe(self, queue: str | None = None) -> StepGenerator:
        """Cancel every consumer, or those of a queue, that there is when this is carried out."""
        tags = [tag for tag in self._subscribed if queue in (None, self._consumers[tag])]
        self._subscribed = [tag for tag in self._subscribed if tag not in tags]
        for tag in tags:
            yield Cancel(tag)

    def _stop_reading(self, queue: str) -> None:
        if self._connected and not self._closing:
            self._io.run(self._unsubscribe(queue), partial(self._stopped_reading, queue))

    def _stopped_reading(self, queue: str, _outcome: object) -> None:
        with self._changed:
            withdrawn = self._batches.withdraw(queue)
        self._give_back(withdrawn)
        self._adjust()

    def _renew(self) -> StepGenerator:
        yield from self._unsubscribe()
        if not self._closing:
            yield from self._subscribe()

    def _subscribe_again(self, queue: str) -> None:
        """Consume a queue again once no batch has any of it: a broker that lost patience gives that out again."""
        if not self._connected or self._closing or queue in map(self._consumers.get, self._subscribed):
            return
        with self._changed:
            waits = self._batches.planned(queue)
        if waits:
            self._io.call_later(_SUBSCRIBE_AGAIN, partial(self._subscribe_again, queue))
        else:
            self._io.run(self._consume_again(queue), self._changed_subscriptions)

    def _consume_again(self, queue: str) -> StepGenerator:
        yield CheckQueue(queue)
        yield SetPrefetch(self._appetite.granted)
        yield self._consume(queue)

    def _adjust(self) -> None:
        """Change the subscriptions where what is held asks for it."""
        if self._busy or self._closing or not self._connected:
            return
        move = self._appetite.move(self._batches.held, self._acks.outstanding)
        if move is not Move.STAY:
            self._busy = True
            if move is Move.RENEW:
                with self._changed:
                    self._asked_at = time.monotonic()
            steps = self._unsubscribe() if move is Move.PAUSE else self._renew()
            self._io.run(steps, self._changed_subscriptions)

    def _answered(self) -> None:
        """What was asked for is on its way, or will not come."""
        with self._changed:
            if self._asked_at is not None:
                self._asked_at = None
                self._first_at = time.monotonic()
                self._last_at = self._first_at + _LINGER  # until the first of it is here
                self._changed.notify_all()

    def _changed_subscriptions(self, outcome: object) -> None:
        self._busy = False
        self._answered()
        if isinstance(outcome, Exception):
            logger.warning(
                "the subscriptions could not be changed; the next channel has them as they should be: %s", outcome
            )
        else:
            self._adjust()

    def _ack(self, deliveries: Sequence[Delivery]) -> None:
        generation = self._acks.generation
        own = [delivery for delivery in deliveries if delivery.source.generation == generation]
        tags = [delivery.delivery_tag for delivery in own]
        if len(tags) < len(deliveries):
            self.stale += len(deliveries) - len(tags)
            logger.warning(
                "%d of %d deliveries of a committed batch came on a channel that is gone: they will come again",
                len(deliveries) - len(tags),
                len(deliveries),
            )
        if tags:
            self.statistics.acked.update(delivery.queue for delivery in own)
            self._acks.finished(generation, tags, time.monotonic())
            self._io.write(b"".join(encode_ack(self._channel, *frame) for frame in self._acks.flush()))
        self._adjust()

    def _count(self) -> None:
        if self._connected and not self._closing:
            self._io.run(self._check_queues(), self._counted)

    def _count_now_and_then(self) -> None:
        now = time.monotonic()
        if now >= self._count_again:
            self._count_again = now + _COUNT_EVERY
            self._count()

    def _check_queues(self) -> StepGenerator:
        counted: dict[str, int] = {}
        for queue in self._options.queues:
            state: QueueState = yield CheckQueue(queue)
            counted[queue] = state.messages
        return counted

    def _counted(self, outcome: object) -> None:
        if isinstance(outcome, dict):
            with self._changed:
                self._ready = outcome
                self._counts += 1
                self._changed.notify_all()

    def _begin_to_close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if self._connected:
            self._io.run(self._unsubscribe(), self._hand_back)
        else:
            self._handed_back.set()

    def _hand_back(self, _outcome: object) -> None:
        """Give back everything: after the subscriptions have ended, or the broker would deliver it here again."""
        with self._changed:
            everything = self._batches.give_back()
            self._changed.notify_all()
        self._give_back([*everything, *self._read])
        self._handed_back.set()

    def _give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Return to the broker what is of this channel."""
        generation = self._acks.generation
        own = [delivery for delivery in deliveries if delivery.source.generation == generation]
        tags = [delivery.delivery_tag for delivery in own]
        if not tags:
            return
        self.statistics.handed_back.update(delivery.queue for delivery in own)
        logger.info("handing back %d deliveries that are in no committed batch", len(tags))
        acks, nacks = self._acks.hand_back(generation, tags)
        frames = [encode_ack(self._channel, *frame) for frame in acks]
        frames += [encode_nack(self._channel, *frame, requeue=True) for frame in nacks]
        self._io.write(b"".join(frames))


def _nothing() -> StepGenerator:
    yield from ()
