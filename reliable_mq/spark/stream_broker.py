"""Read streams on one connection; find streams, and their first and last offsets.

An ack removes nothing from a stream: it allows the broker to send more. Nothing is retried here. A lost connection is
an error for the reader, which knows the offset to continue at.

AMQP 0-9-1 has no method for the offsets of a stream, so they are found by consuming. The newest offset is the last one
of the last chunk. RabbitMQ sends that chunk without interruption if ``x-stream-offset`` is ``last``. A method that is
answered after the chunk's first message is therefore answered after all of the chunk, unless the prefetch limits it.

Invariants:

- Deliveries come in the order of the broker, and none after their channel is lost. A step on a later channel is an
  error while subscriptions are left.
- Memory is bounded by the prefetch. A wait ends with its event, at its deadline, or with the connection.
- An end is one more than an offset that was seen, never a guess.
- Nothing is consumed from a queue that is not a stream, because RabbitMQ refuses an offset for it.
"""

from __future__ import annotations

import http
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Final

from reliable_mq._util.logs import get_logger
from reliable_mq._util.threads import CancelHandle, DaemonExecutor
from reliable_mq.codec import RawDelivery, encode_ack, stream_offset
from reliable_mq.codec.methods import (
    STREAM_OFFSET,
    Cancel,
    CheckQueue,
    Consume,
    MethodReply,
    QueueState,
    ReplyCode,
    SetPrefetch,
    Step,
)
from reliable_mq.core.channel_setup import ServerInfo, StepGenerator, StepRefused, is_away, refusal
from reliable_mq.core.reconnect import MOST_UNANSWERED, ConnectionLoss
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, ConsumeError
from reliable_mq.monitoring.management import ManagementAPI, ManagementError, rows
from reliable_mq.settings import ConnectionSettings
from reliable_mq.sync.admin_channel import AdminChannel

logger = get_logger(__name__)


class StreamChannel(AdminChannel):
    """A channel to consume streams. A context manager: entering it connects.

    Only one thread at a time may use it.
    """

    def __init__(self, settings: ConnectionSettings, *, name: str) -> None:
        super().__init__(settings, name=name)
        self._channel = 0
        self._arrived: list[RawDelivery] = []  # guarded by _lock, like _ended
        self._arriving: list[RawDelivery] = []  # I/O thread only: the deliveries of the current read
        self._ended = ""  # why the subscriptions have ended
        self._taken = self._acked = 0  # delivery tags, up to which deliveries were taken and acked
        self._tags = 0
        self._subscribed: set[str] = set()  # consumer tags; a loss affects all of them
        self._watches: set[str] = set()  # those of `watch`

    @property
    def usable(self) -> bool:
        """Whether the channel is connected and nothing was lost."""
        with self._lock:
            return self._ready and not self._ended

    def consume(
        self,
        stream: str,
        offset: int | str | datetime,
        prefetch: int,
        arguments: Mapping[str, object] | None = None,
    ) -> str:
        """Subscribe and return the consumer tag. Deliveries may come before it returns.

        Blocks for two round trips. The offset is a number, a time, ``"first"``, ``"last"`` (the last chunk) or
        ``"next"``.

        Raises:
            ConfigurationError: If the queue is not a stream. Other queue types refuse an offset, so nothing was
                consumed.
            TopologyMismatch: If the queue does not exist.
            BrokerUnavailable: If the broker refuses for another reason, or the connection is lost.
        """
        self._tags += 1
        tag = f"spark-{self._tags}"
        if not self._subscribed:
            with self._lock:
                self._ended = ""
        step = Consume(stream, tag, arguments={**(arguments or {}), STREAM_OFFSET: offset})
        try:
            self._run(_subscription(prefetch, step), "Consume")
        except StepRefused as refused:
            if refused.code == ReplyCode.PRECONDITION_FAILED and STREAM_OFFSET in refused.text:
                raise ConfigurationError(
                    f"{stream!r} is not a stream: read it with the option queue ({refused.text})"
                ) from refused
            raise refusal(step, refused) from refused
        self._check_subscriptions()
        self._subscribed.add(tag)
        return tag

    def watch(self, stream: str, position: int) -> str:
        """Subscribe to one message from a position on. Return the consumer tag.

        Acks of other subscriptions may include this message.
        """
        tag = self.consume(stream, position, 1)
        self._watches.add(tag)
        return tag

    def cancel(self, *consumer_tags: str) -> None:
        """Unsubscribe, and drop the deliveries of these subscriptions.

        Ack them if no other subscription is left but watches, whose acks would include these.
        """
        for tag in consumer_tags:
            self.carry_out(Cancel(tag))
            self._subscribed.remove(tag)
            self._watches.discard(tag)
        with self._lock:
            if self._arrived:
                self._taken = max(self._taken, self._arrived[-1].delivery_tag)
            self._arrived = [delivery for delivery in self._arrived if delivery.consumer_tag in self._subscribed]
        if self._subscribed == self._watches:
            self.ack()

    def take(self, timeout: float, least: int = 1, of: Collection[str] = ()) -> list[RawDelivery]:
        """Wait for ``least`` deliveries, for ``timeout`` seconds at most; return them all.

        With the consumer tags ``of``, the deliveries of other subscriptions are kept for a later call.

        Raises:
            BrokerUnavailable: If the channel is lost or the stream was deleted, and no delivery is left.
        """

        def arrived() -> list[RawDelivery]:
            return [delivery for delivery in self._arrived if delivery.consumer_tag in of] if of else self._arrived

        with self._lock:
            self._changed.wait_for(lambda: len(arrived()) >= least or self._ended, timeout)
            taken = arrived()
            self._arrived = [delivery for delivery in self._arrived if delivery.consumer_tag not in of] if of else []
            if taken:
                self._taken = max(self._taken, taken[-1].delivery_tag)
            else:
                self._check_ended()
        return taken

    def carry_out(self, step: Step) -> MethodReply:
        """Perform a step on the channel of the subscriptions.

        Raises:
            BrokerUnavailable: Also if a subscription was lost before the reply. A reply on the next channel, perhaps of
                another node, says nothing about the deliveries of this one.
        """
        reply = super().carry_out(step)
        self._check_subscriptions()
        return reply

    def ack(self) -> None:
        """Ack the deliveries taken so far, so that the broker sends more. Does not wait."""
        with self._lock:
            is_new = self._taken > self._acked  # the broker closes the channel over a second ack
            self._acked = self._taken
        if is_new:
            self._io.call_soon(partial(self._write_ack, self._acked))

    def _check_subscriptions(self) -> None:
        if self._subscribed:
            with self._lock:
                self._check_ended()

    def _check_ended(self) -> None:
        if self._ended:
            raise BrokerUnavailable(self._ended)

    # On the I/O thread

    def _write_ack(self, delivery_tag: int) -> None:
        """Send an ack, unless its channel is lost.

        The broker would close the next channel, which does not know the delivery.
        """
        if not self._ended:
            self._io.write(encode_ack(self._channel, delivery_tag, multiple=True))

    def _performed(self, outcome: list[Any], result: object) -> None:
        """Show arrived deliveries to the caller before the reply that it waits for."""
        self.read_finished()
        super()._performed(outcome, result)

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        """Record a new channel without a subscription. The reader still sees the loss."""
        with self._lock:
            self._channel, self._taken, self._acked = channel, 0, 0
        super().ready(generation, channel, frame_max, server)

    def lost(self, generation: int, loss: ConnectionLoss) -> None:
        """Keep the arrived deliveries for `take`. No more will come."""
        super().lost(generation, loss)
        with self._lock:
            self._ended, self._arriving = f"the channel is lost: {loss.text}", []
            self._changed.notify_all()

    def cancelled(self, consumer_tag: str) -> None:
        with self._lock:
            self._ended = "the broker ended the subscription: the stream was deleted or moved"
            self._changed.notify_all()

    def delivered(self, deliveries: list[RawDelivery]) -> None:
        self._arriving += deliveries

    def read_finished(self) -> None:
        """Wake the reader once for all deliveries of one read."""
        if self._arriving:
            with self._lock:
                self._arrived += self._arriving
                self._changed.notify_all()
            self._arriving = []


def _subscription(prefetch: int, consume: Consume) -> StepGenerator:
    """Subscribe on one channel.

    RabbitMQ refuses to read a stream on a channel that has set no prefetch.
    """
    yield SetPrefetch(prefetch)
    yield consume


def from_host(settings: ConnectionSettings, number: int) -> ConnectionSettings:
    """Return settings that begin with another host: the first may have no replica."""
    first = number % len(settings.endpoints)
    return replace(settings, endpoints=settings.endpoints[first:] + settings.endpoints[:first])


_SAMPLE: Final = 64  # offsets
_PREFETCH: Final = 2000  # for the search for the end; a chunk has at most some thousand messages, or many small ones
_LOOKS: Final = 100  # maximum rounds of the search if messages arrive as fast as they are read
_SLOWEST: Final = 30.0  # seconds for the first message of a non-empty stream
_LOOK_AGAIN: Final = 30.0  # seconds
_LOOK_ANYWAY: Final = 10.0  # seconds
_MOST: Final = 1000
_LAST: Final = 2**63


@dataclass(frozen=True, slots=True)
class StreamEnd:
    position: int  # after the newest message; 0 for a stream that never had a message
    average: float  # bytes of body and properties per message; without markers, of which a last chunk may consist
    messages: int = 0  # as the stream's leader counts; 0 if it has not counted yet, or does not respond to this node
    newest: int = 0  # a hash of the newest body, valid in this process


def end_of(channel: StreamChannel, stream: str, patience: float) -> StreamEnd:
    """Return the end of a stream on this node, whose replica may lag behind.

    Takes some milliseconds, or ``patience`` seconds if the stream is empty.
    """
    tag = channel.consume(stream, "last", _PREFETCH)
    found = StreamEnd(0, 0.0)
    for look in range(_LOOKS):
        arrived = channel.take(patience, of=(tag,)) if look else _first_of(channel, stream, tag, patience)
        if not arrived:
            break
        messages = _counted(channel, stream)  # answered after all deliveries that were on their way
        arrived += channel.take(0.0, of=(tag,))
        found = StreamEnd(offset_of(arrived[-1], stream) + 1, _average(arrived), messages, hash(arrived[-1].body))
        if len(arrived) < _PREFETCH:
            break
        channel.ack()  # the prefetch may have held back the rest of the chunk
    channel.cancel(tag)
    if found.average or not found.position:
        return found
    tag = channel.consume(stream, max(found.position - _SAMPLE, 0), _SAMPLE)
    arrived = channel.take(patience, of=(tag,))
    _counted(channel, stream)
    arrived += channel.take(0.0, of=(tag,))
    channel.cancel(tag)
    return replace(found, average=_average(arrived))


def _average(deliveries: Sequence[RawDelivery]) -> float:
    sizes = [len(delivery.body) + len(delivery.properties) for delivery in deliveries if delivery.body]
    return sum(sizes) / len(sizes) if sizes else 0.0


class EndWatch:
    """The ends of streams, which are read again only after a message came.

    A look at the end reads the last chunk, which may have megabytes. Spark asks for the end several times a second, so
    a subscription after the end that was found shows whether there is a newer one.
    """

    def __init__(self, channel: StreamChannel) -> None:
        self._channel = channel
        self._watched: dict[str, tuple[str, StreamEnd, float]] = {}  # by stream: consumer tag, end, time of the look

    def end_of(self, stream: str, patience: float) -> StreamEnd:
        """Return the end of a stream. Without a newer message, look every 10 s only."""
        if stream in self._watched:
            tag, end, looked_at = self._watched[stream]
            if not self._channel.take(0.0, of=(tag,)) and time.monotonic() - looked_at < _LOOK_ANYWAY:
                return end
            del self._watched[stream]
            self._channel.cancel(tag)
        end = end_of(self._channel, stream, patience)
        if end.position:
            tag = self._channel.watch(stream, end.position)
            self._watched[stream] = tag, end, time.monotonic()
        return end


def is_shorter(channel: StreamChannel, stream: str, end: StreamEnd, position: int, patience: float) -> bool:
    """Return whether the leader also has a stream end before a position.

    The leader counts every five seconds. Its count begins at its own first message, which may be later than here: look
    at other nodes as well, if there are any.
    """
    first = first_offsets(channel, (stream,), patience).get(stream, 0)
    return first + end.messages < position if end.messages else not end.position


def has_newest(channel: StreamChannel, stream: str, end: StreamEnd, patience: float) -> bool | None:
    """Return whether a stream still has the newest message of an earlier look.

    Return None if the stream ends before its offset. A message that was dropped since counts as one that it has.
    """
    tag = channel.consume(stream, end.position - 1, 1)
    arrived = channel.take(patience, of=(tag,))
    channel.cancel(tag)
    if not arrived:
        return None
    return offset_of(arrived[0], stream) >= end.position or hash(arrived[0].body) == end.newest


def first_offsets(channel: StreamChannel, streams: Collection[str], patience: float) -> dict[str, int]:
    """Return the oldest offset of each stream, without those that are empty.

    Takes some milliseconds for each stream, and ``patience`` seconds in total if some are empty. Other subscriptions of
    the channel continue.
    """
    found = offsets_at(channel, dict.fromkeys(streams, "first"), patience)
    for name in streams:
        if name not in found and (slow := _first_offset(channel, name)) is not None:
            found[name] = slow
    return found


def first_offsets_and_next(
    channel: StreamChannel, streams: Collection[str], latest: Collection[str], patience: float
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the result of `first_offsets`, and the offsets that came meanwhile.

    The latter has, for each stream of ``latest``, the offset of the first message after the call, if there is one. The
    broker finds the place of "next" in the log of its replica, also while that replica does not deliver yet.
    """
    tags = {channel.consume(name, "next", 1): name for name in latest}
    first = first_offsets(channel, streams, patience)  # ends with a round trip, after the deliveries of the same event
    arrived = channel.take(0.0, of=tags) if tags else []
    channel.cancel(*tags)
    return first, {tags[each.consumer_tag]: offset_of(each, tags[each.consumer_tag]) for each in arrived}


def offsets_at(channel: StreamChannel, places: Mapping[str, str | datetime], patience: float) -> dict[str, int]:
    """Return the first offset at each place, without streams that end before it.

    For a time, this is the first offset of its chunk.
    """
    tags = {channel.consume(name, place, 1): name for name, place in places.items()}
    found: dict[str, int] = {}
    until = time.monotonic() + patience
    while len(found) < len(tags) and (left := until - time.monotonic()) > 0:
        for delivery in channel.take(left, of=tags):
            name = tags[delivery.consumer_tag]
            found[name] = offset_of(delivery, name)
    channel.cancel(*tags)
    return found


def _first_offset(channel: StreamChannel, stream: str) -> int | None:
    """Return the oldest offset of a stream that has not delivered so far."""
    tag = channel.consume(stream, "first", 1)
    arrived = _first_of(channel, stream, tag, 0.0)
    channel.cancel(tag)
    return offset_of(arrived[0], stream) if arrived else None


def _first_of(channel: StreamChannel, stream: str, tag: str, patience: float) -> list[RawDelivery]:
    """Return the first deliveries, or none if the stream is empty.

    A slow stream is not treated as empty. A message count above 0 is certain, with one exception: RabbitMQ may count 1
    if one write was larger than the stream's limit and was dropped at once. The count lags behind, so 0 is certain only
    after a while.
    """
    arrived = channel.take(patience, of=(tag,))
    if arrived:
        return arrived
    if not _counted(channel, stream):
        return channel.take(0.0, of=(tag,))
    arrived = channel.take(_SLOWEST, of=(tag,))
    if not arrived:
        channel.cancel(tag)
        raise BrokerUnavailable(
            f"stream {stream!r} has messages as RabbitMQ counts, and none came within {_SLOWEST:g} s: it is slow, or "
            "its limits have dropped them all, which the next message will show"
        )
    return arrived


def _counted(channel: StreamChannel, stream: str) -> int:
    state = channel.carry_out(CheckQueue(stream))
    return state.messages if isinstance(state, QueueState) else 0


def offset_of(delivery: RawDelivery, stream: str) -> int:
    offset = stream_offset(delivery.properties)
    if offset is None:
        raise ConsumeError(f"a message of {stream!r} came without an offset: it is not a stream")
    return offset


def exists(channel: StreamChannel, queue: str) -> bool:
    """Return whether a queue of this name exists."""
    try:
        channel.perform(CheckQueue(queue))
    except StepRefused as refused:
        if refused.code == ReplyCode.NOT_FOUND and not is_away(refused):
            return False
        raise refusal(CheckQueue(queue), refused) from refused
    return True


# -- super streams -----------------------------------------------------------------------------------------------------


class PartitionFinder:
    """A finder of streams and of the partitions of super streams, including new ones.

    A super stream is an exchange. Its partitions are bound to it, in the order of ``x-stream-partition-order``. AMQP
    cannot list bindings: they are read through the management API if it is configured. Otherwise the partitions are the
    streams named ``name-0``, ``name-1`` and so on, up to the first missing one after those that are known to the query.
    A stream that was found keeps its place. If a later lookup fails, the streams found before are kept, except deleted
    partitions.
    """

    def __init__(self, settings: ConnectionSettings, names: Sequence[str], management_url: str | None) -> None:
        self._settings = settings
        self._names = names
        self._management_url = management_url
        self._calls = DaemonExecutor("spark-management", MOST_UNANSWERED)  # a credentials callback may hang
        self._calls.close()  # each call has its own thread
        self._found: dict[str, list[str]] = {}  # by name; a stream is its own only partition
        self._looked_at = float("-inf")

    def streams(self, channel: StreamChannel, read: Collection[str] = ()) -> list[str]:
        """Return the streams in order, each once. The query has read those of ``read``."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_AGAIN:
            for name in self._names:
                if self._found.get(name) != [name]:
                    self._look(channel, name, read)
            self._looked_at = now
        return list(dict.fromkeys(stream for name in self._names for stream in self._found[name]))

    def forget(self, partition: str) -> bool:
        """Leave out a deleted partition. Return whether its super stream has others."""
        for name, known in self._found.items():
            if partition != name and partition in known and len(known) > 1:
                known.remove(partition)
                return True
        return False

    def _look(self, channel: StreamChannel, name: str, read: Collection[str]) -> None:
        known = self._found.get(name, [])
        if not known and exists(channel, name):
            self._found[name] = [name]
            return
        try:
            found = (
                _numbered(channel, name, known, [stream for stream in read if stream not in self._names])
                if self._management_url is None
                else self._bound(self._management_url, name)
            )
        except BrokerUnavailable as error:
            if not known or self._management_url is None:
                raise
            logger.warning("failed to look up the partitions of super stream %r: %s", name, error)
            return
        for stream in found:
            if known and stream not in known:
                logger.info("super stream %r has a new partition %r: reading it from its first message", name, stream)
        self._found[name] = found

    def _bound(self, management_url: str, name: str) -> list[str]:
        timeout = self._settings.connect_timeout

        def create(_: CancelHandle) -> ManagementAPI:
            return ManagementAPI.at(management_url, self._settings, option="managementUrl")

        try:  # each time, because a token may have expired
            api = self._calls.call(create, timeout)
        except TimeoutError as error:
            raise BrokerUnavailable(f"no credentials for managementUrl within {timeout:g} s: {error}") from error
        except ConfigurationError as error:
            if self._found.get(name):  # it was created before: a certificate is being renewed
                raise BrokerUnavailable(str(error)) from error
            raise
        try:
            bindings = rows(api, "exchanges", self._settings.virtual_host, name, "bindings", "source")
        except ManagementError as error:
            refused = error.status in {http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN}
            raise BrokerUnavailable(f"the bindings of {name!r} cannot be read: {error}", permanent=refused) from error
        found = bound_partitions(bindings)
        if not found:
            raise ConfigurationError(
                f"there is no stream {name!r}, and no super stream: no queue is bound to an exchange of that name"
            )
        return found


def bound_partitions(bindings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the queues of bindings in their order. Those without an order come last."""
    order: dict[str, int] = {}
    for binding in bindings:
        if binding.get("destination_type") == "queue":
            place = binding.get("arguments", {}).get("x-stream-partition-order")
            number = place if isinstance(place, int) else int(place) if str(place).isdecimal() else _LAST
            queue = str(binding["destination"])
            order[queue] = min(number, order.get(queue, _LAST))
    return sorted(order, key=lambda queue: (order[queue], queue))


def _numbered(channel: StreamChannel, name: str, known: Sequence[str], read: Sequence[str]) -> list[str]:
    streams = [f"{name}-{number}" for number in range(_MOST)]
    last = max((number for number, stream in enumerate(streams) if stream in known or stream in read), default=-1)
    found = list(known)
    for number, stream in enumerate(streams):
        if stream not in known:
            if exists(channel, stream):
                found.append(stream)
            elif number > last:
                break
    if not found:
        raise ConfigurationError(
            f"there is no stream {name!r}, and no super stream with a partition '{name}-0': create it, or, where the "
            "partitions of a super stream have other names, give managementUrl, or these, separated by commas"
        )
    return found
