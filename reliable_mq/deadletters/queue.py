"""A dead-letter queue: browse, count, replay, purge, export, import.

Invariants:

- An operation that only reads requeues all messages at its end, in the order of delivery.
- Only one operation at a time uses the connection.
- No message is removed from the queue before it is confirmed elsewhere, except by a purge.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import BinaryIO, Final, Self

from reliable_mq._util.hooks import OfOneProcess
from reliable_mq._util.logs import get_logger
from reliable_mq._util.validation import Duration, is_number, is_text, whole_number
from reliable_mq.codec import LARGEST_BODY
from reliable_mq.codec.methods import QueueState
from reliable_mq.deadletters.channel import GetChannel
from reliable_mq.deadletters.delivery_limit import DeliveryLimit
from reliable_mq.deadletters.filter import Filter, Statistics
from reliable_mq.deadletters.importing import Import, ImportReport
from reliable_mq.deadletters.jsonl import write_line
from reliable_mq.deadletters.message import DeadMessage
from reliable_mq.deadletters.replay import (
    BATCH,
    Progress,
    Replay,
    ReplayReport,
    Routing,
    Target,
    read_batches,
    warn_of_missing,
)
from reliable_mq.errors import ConfigurationError, PublishError, UsageError
from reliable_mq.retry import RetryPolicy
from reliable_mq.settings import ConnectionSettings, Credentials, CredentialsCallback
from reliable_mq.stores.protocol import ResettableStore, check_reset_options
from reliable_mq.sync.admin_channel import AdminChannel
from reliable_mq.sync.publisher import Publisher
from reliable_mq.tls import TLSOptions
from reliable_mq.topology import Queue
from reliable_mq.url import parse_url

logger = get_logger(__name__)

_NAME: Final = "dead letters"
_PUBLISH_TIMEOUT: Final = 60.0  # seconds
_EVERYTHING: Final = Filter()
_MANY: Final = 10_000  # the number of messages above which basic.get is too slow


class DeadLetterQueue(OfOneProcess):
    """The messages of a dead-letter queue. A context manager: entering connects.

    Only one operation may run at a time, on any thread. `browse`, `statistics` and `export` leave the same messages in
    the queue, in the same order if all of them were read. (A quorum queue puts requeued messages behind the others, so
    reading only some of them, with a limit, moves them.) RabbitMQ counts the deliveries: the messages are redelivered
    from then on. On a quorum queue of RabbitMQ 4.0 to 4.2, each operation counts against the delivery limit, and from
    4.3 on each lost connection, if the queue has a limit (the queues that this package declares have none). Reading is
    refused before the limit is reached. During an operation, no consumer gets the messages.

    Args:
        url: The broker's URL or URLs, as for ``Publisher``.
        queue: The name of the dead-letter queue, or the ``Queue`` whose dead letters are used, for example the
            ``Queue`` ``orders`` for ``orders.dead``.
        credentials: The credentials, as for ``Publisher``.
        tls: The TLS options, as for ``Publisher``.
        heartbeat: The heartbeat interval in seconds.
        connect_timeout: The timeout of the handshakes with one host in seconds, as for ``Publisher``.

    Raises:
        ConfigurationError: If an argument is invalid. The message names it.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        queue: Queue | str,
        *,
        credentials: Credentials | CredentialsCallback | None = None,
        tls: TLSOptions | None = None,
        heartbeat: int | None = None,
        connect_timeout: Duration | None = None,
    ) -> None:
        super().__init__()
        name = queue.dead_letter_name if isinstance(queue, Queue) else queue
        if not isinstance(name, str) or not name:
            raise ConfigurationError(
                f"queue must be the name of one, or a Queue with a dead-letter queue, not {queue!r}"
            )
        if not is_text(name):
            raise ConfigurationError("queue must be valid UTF-8")
        self._name = name
        settings = parse_url(
            url, tls=tls, credentials=credentials, heartbeat=heartbeat, connect_timeout=connect_timeout
        )
        self._new_publisher = partial(
            Publisher,
            url,
            delivery_timeout=_PUBLISH_TIMEOUT,
            retry=RetryPolicy(3, delays=(0.5,)),
            max_message_bytes=LARGEST_BODY,  # dead letters were on the broker before, whatever its limit is
            tls=tls,
            credentials=credentials,
            heartbeat=heartbeat,
            connect_timeout=connect_timeout,
            name=_NAME,
        )
        self._channel = GetChannel(settings, name, name=_NAME)
        self._busy: str | None = None
        self._limit = DeliveryLimit(name)

    @property
    def name(self) -> str:
        """The name of the queue."""
        return self._name

    def __enter__(self) -> Self:
        """Connect.

        Raises:
            BrokerUnavailable: If no host could be reached, or none accepted the login.
            TopologyMismatch: If the queue does not exist.
        """
        self._channel.__enter__()
        try:
            there = self._channel.check().messages
            declared = self._channel.find_declaration()
            self._limit = DeliveryLimit.of(self._name, self._channel.server.version_tuple, declared)
            if there > _MANY and not self._channel.by_consumers:
                logger.warning(
                    "reading the %d messages of queue %r one by one with basic.get, which is slow on a quorum "
                    "queue: this user has no configure permission on the queue, without which a delivery limit "
                    "cannot be ruled out; grant it",
                    there,
                    self._name,
                )
        except BaseException:
            self._channel.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._channel.__exit__(exc_type, exc, traceback)

    def __len__(self) -> int:
        """Return the number of ready messages.

        Blocks for a round trip, and 0.6 s longer if the queue is empty and without consumers: RabbitMQ says so, too,
        while the leader of a quorum queue does not respond, as during an election, and is asked again.
        """
        return self._channel.count().messages

    @property
    def counts_reads(self) -> bool:
        """Whether RabbitMQ may count each read against a delivery limit.

        The value is known after entering.
        """
        return self._limit.counts_reads

    # -- reading -------------------------------------------------------------------------------------------------------

    def browse(
        self, chosen: Filter = _EVERYTHING, *, limit: int | None = None, progress: Progress | None = None
    ) -> Iterator[DeadMessage]:
        """Return the dead letters that are in the queue now, starting from its head.

        This is a generator. The messages are requeued when it is exhausted or closed, or when the connection is closed.

        Args:
            chosen: The messages to return. The others are read, too.
            limit: The maximum number of messages to return.
            progress: A function that is called after every batch with the number of messages read so far and the total.

        Raises:
            StaleDelivery: If the connection was lost. All messages are back in the queue.
            ConsumeError: If RabbitMQ does not deliver, which is the case for a stream and for a quorum queue with a
                single active consumer, or if reading again might drop messages because of a delivery limit.
            UsageError: If another operation is in progress, or outside of the ``with`` block.
        """
        if limit is not None:
            whole_number("limit", limit, 1)
        size = BATCH if limit is None or not chosen.everything else min(limit, BATCH)
        given = 0
        with self._operation("browse"):
            for batch in self._batches(progress, size):
                now = datetime.now(UTC)
                for message in batch:
                    if chosen.matches(message, now):
                        yield message
                        given += 1
                        if given == limit:
                            return

    def statistics(self, chosen: Filter = _EVERYTHING, *, progress: Progress | None = None) -> Statistics:
        """Count dead letters by cause, queue and age. Raises the errors of `browse`."""
        counted, now = Statistics(), datetime.now(UTC)
        for message in self.browse(chosen, progress=progress):
            counted.add(message, now)
        return counted

    def export(
        self,
        file: BinaryIO,
        chosen: Filter = _EVERYTHING,
        *,
        limit: int | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Write dead letters as JSON lines, byte for byte. They stay in the queue.

        ``import_lines`` and ``reliable-mq publish --json`` read the lines. Raises the errors of `browse`.

        Returns:
            The number of messages written.
        """
        if isinstance(file, io.RawIOBase):  # without a buffer, a write may write only a part
            whole = io.BufferedWriter(file)
            try:
                return self.export(whole, chosen, limit=limit, progress=progress)
            finally:
                whole.detach()
        written = 0
        with closing(self.browse(chosen, limit=limit, progress=progress)) as messages:  # type: ignore[type-var]
            for message in messages:
                file.write(write_line(message) + b"\n")
                written += 1
        file.flush()
        return written

    # -- moving --------------------------------------------------------------------------------------------------------

    def replay(
        self,
        chosen: Filter = _EVERYTHING,
        *,
        to: str | Target | None = None,
        as_published: bool = False,
        limit: int | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        idempotency: ResettableStore | None = None,
        idempotency_namespace: str | None = None,
        body: bytes | None = None,
        progress: Progress | None = None,
        stop: threading.Event | None = None,
        report: ReplayReport | None = None,
    ) -> ReplayReport:
        """Publish dead letters again, each confirmed before it is removed from the queue.

        Blocks until done. The copy has no headers about failures, so the message has all its attempts again. The rest
        of the message is unchanged. A replay may be interrupted or killed, and run again, at any time. No message is
        lost, and at most one batch (200 messages, or the messages of one second with a ``rate``) is published twice.

        Args:
            chosen: The messages to replay.
            to: The target queue, or exchange and routing key. The default is the queue that each message was in before
                it died.
            as_published: Whether to publish each message to its original exchange with its original routing key,
                instead of to its queue. Every queue that is bound there gets the message again.
            limit: The maximum number of messages to try, including failures.
            rate: The maximum number of messages per second.
            dry_run: Whether to publish nothing and leave all messages in the queue.
            idempotency: The consumer's store, which also counts failed attempts. They are reset for the keys that a
                consumer of the original queue without an ``idempotency_key`` claims.
            idempotency_namespace: The consumer's namespace, if it was set.
            body: A body to publish instead of each message's body. The properties stay unchanged.
            progress: A function that is called after every batch with the number of messages read so far and the total.
            stop: An event. When another thread sets it, the replay ends after the current batch, as if that were the
                last one.
            report: A new `ReplayReport` for the counts, which another thread may read during the replay.

        Returns:
            The counts, and the dead letters that could not be published. These are still in the queue.

        Raises:
            ConfigurationError: If an argument is invalid. The message names it.
            BrokerUnavailable: If the connection is lost and does not come back, or if no message of a batch was settled
                within 60 s, as under an alarm of the broker. Those messages are still in the queue, count as failed,
                and may also be at their targets if they were sent.
            ConsumeError: If RabbitMQ does not deliver from this queue, or as for `browse`.
            StaleDelivery: If the connection was lost, and replayed messages may still be in the queue: RabbitMQ did not
                deliver them again within 60 s, or they have no message id, and the limit or the stop was reached.
            IdempotencyStoreError: If the store does not respond.
        """
        routing = _routing(self._name, to, as_published=as_published)
        if limit is not None:
            whole_number("limit", limit, 1)
        if rate is not None and (not is_number(rate) or not 0 < rate <= 1e6):
            raise ConfigurationError(f"rate must be a number of messages per second above 0, not {rate!r}")
        check_reset_options(idempotency, idempotency_namespace)
        publisher = None if dry_run else self._new_publisher()
        try:
            with self._operation("replay"):
                return Replay(
                    self._channel,
                    publisher,
                    chosen=chosen,
                    routing=routing,
                    limit=limit,
                    rate=rate,
                    store=None if dry_run else idempotency,
                    namespace=idempotency_namespace,
                    delivery_limit=self._limit,
                    progress=progress,
                    stop=threading.Event() if stop is None else stop,
                    body=body,
                    report=ReplayReport() if report is None else report,
                ).run()
        finally:
            if publisher is not None:
                _close(publisher)

    def purge(
        self,
        chosen: Filter = _EVERYTHING,
        *,
        limit: int | None = None,
        progress: Progress | None = None,
        stop: threading.Event | None = None,
        on_deleted: Callable[[int], object] | None = None,
    ) -> int:
        """Delete dead letters permanently.

        Raises the errors of `browse`. After an error, messages that were already deleted stay deleted.

        Args:
            chosen: The messages to delete.
            limit: The maximum number of messages to delete.
            progress: A function that is called after every batch with the number of messages read so far and the total.
            stop: An event. When another thread sets it, the purge ends after the current batch.
            on_deleted: A function that is called after every batch with the number of messages deleted so far. If the
                purge fails or is interrupted, at least so many messages are deleted.

        Returns:
            The number of deleted messages.
        """
        if limit is not None:
            whole_number("limit", limit, 1)
        deleted = 0
        with self._operation("purge"):
            for batch in self._batches(progress):
                now = datetime.now(UTC)
                matching = [message for message in batch if chosen.matches(message, now)]
                if limit is not None:
                    matching = matching[: limit - deleted]
                self._channel.ack(message.delivery for message in matching)
                deleted += len(matching)
                if on_deleted is not None:
                    on_deleted(deleted)
                if (limit is not None and deleted >= limit) or (stop is not None and stop.is_set()):
                    break
        return deleted

    def import_lines(
        self, lines: Iterable[bytes], *, progress: Progress | None = None, report: ImportReport | None = None
    ) -> ImportReport:
        """Publish JSON lines, as written by `export`, into this queue, byte for byte.

        Blocks until all messages are settled. Blank lines are skipped. A line whose message has a ``CC`` or ``BCC``
        header is refused, because RabbitMQ would also route the message to other queues. If no message of a batch
        (1000 messages or 32 MiB) was settled within 60 s, as under an alarm of the broker, or if the connection is lost
        and does not come back, the lines after it are not tried, and fail.

        Args:
            lines: The lines to publish.
            progress: A function that is called after every batch with the number of lines so far, as both arguments.
            report: A new `ImportReport` for the counts and failures. If the import is interrupted, it is complete up to
                the last batch.

        Returns:
            The number of confirmed messages, and the numbers of the failed lines, from 1, each with its error.

        Raises:
            BrokerUnavailable: If no host could be reached, or none accepted the login. No message was published.
        """
        publisher = self._new_publisher()
        try:
            return Import(
                publisher, self._name, progress=progress, report=ImportReport() if report is None else report
            ).run(lines)
        finally:
            _close(publisher)

    # -- private -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _operation(self, name: str) -> Iterator[None]:
        """Keep other operations out, and requeue the unacked messages at the end."""
        if self._busy is not None:
            raise UsageError(f"{self._busy}() is in progress: exhaust or close it before {name}()")
        self._limit.check()
        self._busy = name
        try:
            try:
                yield
            finally:
                self._channel.finish()
        finally:
            self._busy = None

    def _batches(self, progress: Progress | None, size: int = BATCH) -> Iterator[list[DeadMessage]]:
        """Read the messages that are in the queue now in batches; warn of missing ones."""
        read = total = 0
        for batch, total in read_batches(self._channel, self._limit, size):
            read = batch[-1].position
            yield batch
            if progress is not None:
                progress(read, total)
        warn_of_missing(self._name, read, total)


def depths(settings: ConnectionSettings, queues: Iterable[str]) -> dict[str, int | None]:
    """Return the number of ready messages of each queue.

    The number is None if the queue does not exist or the user may not check it. No message is taken. Blocks for
    connecting, for a round trip per queue, and 0.6 s longer if queues are empty (`AdminChannel.counts`).

    Raises:
        BrokerUnavailable: If no host could be reached, or none accepted the login.
    """
    with AdminChannel(settings, name=_NAME) as channel:
        counts = channel.counts(queues)
    return {queue: count.messages if isinstance(count, QueueState) else None for queue, count in counts.items()}


def _routing(own: str, to: str | Target | None, *, as_published: bool) -> Routing:
    if as_published and to is not None:
        raise ConfigurationError("to and as_published contradict each other: give one of them")
    if to is not None:
        target = Target("", to) if isinstance(to, str) else Target(*to)
        if target == Target("", ""):
            raise ConfigurationError("to is empty: name a queue, or an exchange")
        if target == Target("", own):
            raise ConfigurationError(f"to is {own!r} itself: what is replayed would come back forever")
        return lambda _message: target
    origin = _as_published if as_published else _to_queue

    def to_origin(message: DeadMessage) -> Target | None:
        target = origin(message)
        if target == Target("", own):
            raise ConfigurationError(f"its origin is {own!r} itself, where it would come back forever: name a target")
        return target

    return to_origin


def _to_queue(message: DeadMessage) -> Target | None:
    if message.origin is None or not message.origin.queue:
        return _as_published(message)  # the message has never been in a queue
    return Target("", message.origin.queue)


def _as_published(message: DeadMessage) -> Target | None:
    origin = message.origin
    if origin is None or origin.exchange is None or origin.routing_key is None:
        return None
    return Target(origin.exchange, origin.routing_key)


def _close(publisher: Publisher) -> None:
    with suppress(PublishError):  # each message is in a report or still in the dead-letter queue
        publisher.close(0)
