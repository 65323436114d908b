"""Take messages from a queue in batches, and requeue the unacked ones in order.

The first message of a batch is taken by ``basic.get``, which replies at once if the queue is empty and also returns the
number of messages. The others are taken by a consumer whose prefetch is exactly the rest of the batch, and which is
cancelled after they arrived. A consumer alone cannot detect an empty queue. Gets alone are too slow: for each get, a
quorum queue traverses all unacked gets, so n messages cost n². If a consumer could do harm (an auto-delete queue is
deleted with its last consumer), all messages are taken by ``basic.get``.

Invariants:

- A delivery is acked on its own channel or not at all. When `ack` returns, the queue has the acks: RabbitMQ's channel
  holds back those beyond 32 commands to a quorum queue, and they end with it if its connection is lost.
- When the channel or the process is lost, RabbitMQ requeues all unacked messages.
- A channel is closed with unacked deliveries only on a classic queue, which has seen the acks by then.
- When `finish` returns, the queue has the other messages back in their places. (RabbitMQ replies for a queue before the
  queue itself has the requeued messages.)
- Every delivery is in a batch or in the next one.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from itertools import count, groupby
from operator import attrgetter

from reliable_mq._util.generators import drive
from reliable_mq.codec import RawDelivery, encode_ack, encode_get, encode_nack
from reliable_mq.codec.methods import (
    Cancel,
    CheckQueue,
    Consume,
    DeclareQueue,
    QueueState,
    ReplyCode,
    SetPrefetch,
    Step,
)
from reliable_mq.core.channel_setup import ServerInfo, StepRefused, compare, refusal
from reliable_mq.core.consumer.delivery import ChannelGeneration, Delivery
from reliable_mq.core.idempotency import namespace_of
from reliable_mq.core.reconnect import ConnectionLoss
from reliable_mq.errors import BrokerUnavailable, ConsumeError, StaleDelivery, UsageError
from reliable_mq.settings import ConnectionSettings
from reliable_mq.sync.admin_channel import AdminChannel
from reliable_mq.topology import Queue

_BATCH_BYTES = 32 * 1024 * 1024  # if all bodies are as large as the first; 200 of 16 MiB would take 3 GB
_ANSWER = 60.0  # seconds for the replies to one batch of requests; they start again while data arrives
_PATIENCE = 60.0  # seconds for reconnecting after a connection was lost
# A queue keeps the order of any number of messages that one consumer requeues with one nack. Of messages taken by
# basic.get, it keeps the order of up to 32 per nack, because larger Erlang maps have no order. The nack of one consumer
# is one command to a quorum queue. While more than 32 commands are on their way to the queue, further ones are merged,
# and their order is lost.
_NACKED_GETS = 32
_COMMANDS = 16
_SEEN = 2.0  # seconds within which a queue sees the acks
_POLL_EVERY = 0.002  # seconds between two counts while the queue takes requeued messages
_QUIET = 5.0  # seconds without an expected delivery, after which a basic.get shows whether any message is left
_REPORTED = 1.0  # seconds within which the I/O thread reports a loss that ended a step
# RESOURCE_LOCKED: the queue is exclusive, or has a single active consumer. NOT_IMPLEMENTED: it is a stream.
_REFUSALS = frozenset(
    {ReplyCode.ACCESS_REFUSED, ReplyCode.NOT_FOUND, ReplyCode.RESOURCE_LOCKED, ReplyCode.NOT_IMPLEMENTED}
)
# No queue has this value, which RabbitMQ also refuses for a new queue, so nothing is ever declared. For each nack, a
# classic queue traverses all messages that were requeued before, so n nacks cost n². But it requeues all messages of a
# closed channel in one pass, in order. (A quorum queue may count that as failed deliveries.)
_REFUSED = {"x-max-priority": -1}


class GetChannel(AdminChannel):
    """A channel for a queue of dead letters. Only one thread at a time may use it.

    Attributes:
        by_consumers: Whether messages are taken by consumers, which is faster than ``basic.get``.
        left: The number of messages in the queue when the first message of the latest batch was taken, including it.
        doubtful: The number of acks that were sent on lost channels, of which RabbitMQ may have seen any or none.
    """

    def __init__(self, settings: ConnectionSettings, queue: str, *, name: str) -> None:
        super().__init__(settings, name=name, patience=_PATIENCE)
        self._queue = queue
        self._virtual_host = settings.virtual_host
        self._source = ChannelGeneration(0, 0, queue)
        self.by_consumers = False
        self._closing: Step | None = None  # a step whose refusal closes the channel; None unless the queue is classic
        self._consumers = count(1)
        self._prefetch = 0  # the prefetch of the next consumer on this channel
        self._arrived: list[Delivery] = []
        self._outstanding = 0
        self._unacked: list[array[int]] = []  # the tags of unacked deliveries, in groups that one nack requeues
        self.left = 0
        self.doubtful = 0
        self._loss: ConnectionLoss | None = None
        self._gone = False  # deliveries were lost with their channel, and no caller has got an error for that yet

    def check(self) -> QueueState:
        """Return the numbers of ready messages and consumers.

        They may be in doubt (`QueueState.in_doubt`).

        Raises:
            TopologyMismatch: If the queue does not exist.
            BrokerUnavailable: If RabbitMQ refuses for another reason, or does not respond.
        """
        return self._known(self._count(self._queue))

    def count(self) -> QueueState:
        """Return the same as `check`, counted again while in doubt."""
        return self._known(self.counts([self._queue])[self._queue])

    def _known(self, count: QueueState | StepRefused) -> QueueState:
        if isinstance(count, StepRefused):
            raise refusal(CheckQueue(self._queue), count) from count
        return count

    def find_declaration(self) -> DeclareQueue | None:
        """Return how the queue was declared, or None if unknown. Changes nothing.

        From now on, messages are taken by consumers if that is harmless: if the queue is certainly not auto-delete. A
        client detects this by declarations that RabbitMQ refuses, which require the permission to configure the queue.

        Raises:
            BrokerUnavailable: If the connection is lost.
        """
        if self._queue.startswith("amq."):  # a client may not declare such a queue
            return None
        arguments = Queue(self._queue, dead_letter=None).arguments_for(self.server.version_tuple)
        found = drive(compare(DeclareQueue(self._queue, arguments=arguments)), self.perform)
        existing = found.existing if isinstance(found.existing, DeclareQueue) else None
        different = {difference.argument for difference in found.differences}
        # RabbitMQ compares durable first, then auto_delete, then arguments.
        compared = existing is not None or bool(different - {"durable"})
        self.by_consumers = compared and "auto_delete" not in different
        is_classic = existing is not None and existing.arguments.get("x-queue-type", "classic") == "classic"
        if is_classic and self.by_consumers:
            self._closing = DeclareQueue(self._queue, arguments=_REFUSED)
        return existing

    def take(self, most: int) -> list[Delivery]:
        """Take up to ``most`` messages, or fewer if they are large, and set `left`.

        Returns:
            The messages. The list is empty only if the queue is empty.

        Raises:
            StaleDelivery: If the channel was lost. Its unacked deliveries are back in the queue.
            ConsumeError: If RabbitMQ does not deliver from this queue.
            BrokerUnavailable: If the broker does not respond.
        """
        self._wait_ready()
        with self._lock:
            source = self._source
            if not self._arrived:
                self.left = 0
            if self._gone:
                raise self._stale()
            if self._ready:
                self._loss = None  # an earlier one
        if self._outstanding or not self._arrived:  # an interrupted batch may still get replies
            self._get(source, 1)
        if (wanted := min(most, self.left, self._fitting()) - len(self._arrived)) > 0:
            take_others = self._consume if self.by_consumers else self._get
            take_others(source, wanted)
        with self._lock:
            self._check(source)
            taken, self._arrived = self._arrived, []
            self._add_unacked(taken)
        return taken

    def ack(self, deliveries: Iterable[Delivery]) -> None:
        """Ack deliveries, and wait until the queue has the acks.

        This also takes a message, for the next batch.

        Raises:
            StaleDelivery: If the channel was lost. Some of the deliveries may be redelivered.
        """
        source = self._source
        with self._lock:
            self._check(source)  # sending would wait for another channel first
        given = [delivery for delivery in deliveries if delivery.source is source]
        if not given:
            return
        frames = [encode_ack(source.channel, delivery.delivery_tag, multiple=False) for delivery in given]
        self.doubtful += len(given)
        self._send(source, b"".join(frames))
        with self._lock:
            self.left = 0
        self._get(source, 1)  # the queue replies to this after the acks that it was sent
        self._send(source, b"")  # RabbitMQ's channel sends the acks that it held back before it replies to this
        self.doubtful -= len(given)
        self._remove_unacked({delivery.delivery_tag for delivery in given})

    def finish(self) -> None:
        """Requeue all unacked messages in order, and wait until the queue has them.

        If the channel is lost, RabbitMQ has already requeued them in its own order, and this does not wait.
        """
        try:
            with self._lock:
                if self._loss is not None:
                    self._gone = False
                    return
            taken = self.take(1)  # the queue itself replies to this, after it has seen the acks
            source = self._source  # read only now: take() may have waited for another channel
            ready = max(self.left - len(taken), 0)
            groups = [tags for tags in self._unacked if tags]
            if self._closing is not None and len(groups) > 1:  # one nack costs less than a channel
                self._requeue_by_closing(source, self._closing, ready)
                return
            together = _COMMANDS if self.by_consumers else 1
            for start in range(0, len(groups), together):
                some = groups[start : start + together]
                frames = [encode_nack(source.channel, tags[-1], multiple=True, requeue=True) for tags in some]
                self._send(source, b"".join(frames))
                ready += sum(map(len, some))
                self._wait_for(ready, source)
        except (ConsumeError, BrokerUnavailable, UsageError):
            return
        finally:
            self._unacked = []

    def _requeue_by_closing(self, source: ChannelGeneration, closing: Step, ready: int) -> None:
        """Requeue all unacked messages at once by making RabbitMQ close the channel."""
        with self._lock:
            self._check(source)
            ready += sum(map(len, self._unacked))
            self._unacked = []  # so that their intended loss is not reported
        with suppress(StepRefused):
            self.perform(closing)
        self._wait_for(ready)

    def _fitting(self) -> int:
        """Return the number of messages per batch if all are as large as the first."""
        return max(_BATCH_BYTES // max(sum(len(delivery.body) for delivery in self._arrived), 1), 1)

    def _get(self, source: ChannelGeneration, most: int) -> None:
        """Send gets and wait for the replies."""
        with self._lock:
            self._check(source)
            self._outstanding += most
        self._io.call_soon(partial(self._ask, source, most))
        with self._lock:
            self._wait_for_reply("basic.get", lambda: not self._outstanding or self._is_lost(source), _ANSWER)
            self._check(source)

    def _consume(self, source: ChannelGeneration, wanted: int) -> None:
        """Take messages by a consumer, or fewer if another consumer gets them first."""
        tag = f"dead-letters-{next(self._consumers)}"
        with self._lock:
            enough = len(self._arrived) + wanted
        if self._prefetch != wanted:
            self._perform(source, SetPrefetch(wanted))
            self._prefetch = wanted
        try:
            self._perform(source, Consume(self._queue, tag))
            complete = self._wait_for_arrivals(source, enough)
        except BaseException:
            if self._ready:  # otherwise, the consumer has ended with its channel
                with suppress(StepRefused, BrokerUnavailable):
                    self.perform(Cancel(tag))  # otherwise, the consumer would get requeued messages
            raise
        self._perform(source, Cancel(tag))
        if not complete:
            self._perform(source, CheckQueue(self._queue))  # the reply follows deliveries that were on their way
            if missing := max(enough - len(self._arrived), 0):
                self._get(source, missing)

    def _wait_for_arrivals(self, source: ChannelGeneration, enough: int) -> bool:
        """Wait until enough messages have arrived; return False if no more arrive."""
        seen, until = -1, 0.0
        with self._lock:
            while len(self._arrived) < enough:
                self._check(source)
                now = time.monotonic()
                if len(self._arrived) != seen:
                    seen, until = len(self._arrived), now + _QUIET
                elif now >= until:
                    return False
                self._changed.wait(until - now)
            return True

    def _perform(self, source: ChannelGeneration, step: Step) -> None:
        """Perform a step on this channel only; raise its refusal or the channel's loss."""
        try:
            self.perform(step)
        except StepRefused as refused:
            raise ConsumeError(f"RabbitMQ does not deliver from queue {self._queue!r}: {refused}") from refused
        except BrokerUnavailable:
            self._check_soon(source)
            raise
        with self._lock:
            if not self._is_lost(source):
                return
        if isinstance(step, Consume):
            # The step may have reached the next channel, where no consumer must remain.
            self._io.call_soon(self._io.reopen_channel)
        with self._lock:
            self._check(source)

    def _add_unacked(self, deliveries: list[Delivery]) -> None:
        """Store the tags for `finish`, in groups whose order one nack keeps."""
        for consumer, some in groupby(deliveries, attrgetter("consumer_tag")):
            tags = array("Q", (delivery.delivery_tag for delivery in some))
            most = len(tags) if consumer else _NACKED_GETS
            self._unacked.extend(tags[start : start + most] for start in range(0, len(tags), most))

    def _wait_for(self, ready: int, source: ChannelGeneration | None = None) -> None:
        """Wait a limited time for so many ready messages; others may get some of them.

        If the channel ``source`` is lost meanwhile, raise its loss.
        """
        deadline = time.monotonic() + _SEEN
        while self.check().messages < ready and time.monotonic() < deadline:
            time.sleep(_POLL_EVERY)
            if source is not None:
                with self._lock:
                    self._check(source)

    def _send(self, source: ChannelGeneration, frames: bytes) -> None:
        """Write frames on this channel only, and wait until the broker has read them."""
        self._io.call_soon(lambda: self._io.write(frames) if self._source is source else None)
        try:
            self.check()  # the broker handles frames in order
        except BrokerUnavailable:
            self._check_soon(source)
            raise
        with self._lock:
            self._check(source)

    def _check_soon(self, source: ChannelGeneration) -> None:
        """Raise the loss of the channel if it ended the last step."""
        with self._lock:
            self._changed.wait_for(lambda: self._is_lost(source), _REPORTED)
            self._check(source)

    def _remove_unacked(self, acked: set[int]) -> None:
        """Remove acked tags, which are mostly the latest ones."""
        with self._lock:
            for tags in reversed(self._unacked):
                if not acked:
                    break
                kept = array("Q", (tag for tag in tags if tag not in acked))
                acked.difference_update(tags)
                tags[:] = kept

    def _is_lost(self, source: ChannelGeneration) -> bool:
        return self._source is not source or self._loss is not None

    def _check(self, source: ChannelGeneration) -> None:
        if not self._is_lost(source):
            return
        loss = self._loss
        if loss is not None and loss.by_broker and loss.code in _REFUSALS:
            self._gone = False
            raise ConsumeError(f"RabbitMQ does not deliver from queue {self._queue!r}: {loss.code} {loss.text}")
        raise self._stale()

    def _stale(self) -> StaleDelivery:
        self._gone = False
        loss = self._loss
        reason = "" if loss is None else f" ({loss.text})" if loss.code is None else f" ({loss.code} {loss.text})"
        return StaleDelivery(
            f"the connection was lost{reason}; the messages taken from queue {self._queue!r} are back in it"
        )

    # -- on the I/O thread ---------------------------------------------------------------------------------------------

    def _ask(self, source: ChannelGeneration, most: int) -> None:
        if self._source is source:
            self._io.write(encode_get(source.channel, self._queue) * most)

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        with self._lock:
            namespace = namespace_of(server.cluster_name, self._virtual_host)
            self._source = ChannelGeneration(generation, channel, self._queue, namespace)
        super().ready(generation, channel, frame_max, server)

    def lost(self, generation: int, loss: ConnectionLoss) -> None:
        with self._lock:
            self._loss = loss
            self._gone = self._gone or any(self._unacked)
            self._unacked, self._arrived, self._outstanding = [], [], 0
            self._prefetch = 0
            super().lost(generation, loss)
            self._changed.notify_all()

    def got(self, delivery: RawDelivery, message_count: int) -> None:
        with self._lock:
            self.left = self.left or message_count + 1
            self._arrived.append(self._ours(delivery))
            self._answered()

    def delivered(self, deliveries: list[RawDelivery]) -> None:
        with self._lock:
            self._arrived.extend(map(self._ours, deliveries))
            self._changed.notify_all()

    def got_empty(self) -> None:
        with self._lock:
            self._answered()

    def _answered(self) -> None:
        self._outstanding -= 1
        if not self._outstanding:
            self._changed.notify_all()

    def _ours(self, delivery: RawDelivery) -> Delivery:
        if not isinstance(delivery, Delivery):
            raise TypeError("the reader makes another kind of delivery")
        delivery.came_from(self._source)
        return delivery
