"""The confirming publisher: what a user calls.

It validates before anything is sent, hands each publish to its
:class:`~reliable_mq.sync.publisher_channel.PublisherChannel`, and turns outcomes into receipts and errors. Everything
it promises about delivery is decided in :mod:`reliable_mq.core.publisher.session`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Literal, Self

from reliable_mq._util.hooks import ExitStage, ForkStage, at_exit, at_fork
from reliable_mq._util.validation import Duration, seconds
from reliable_mq.core.new_queues import NEW_QUEUE_GRACE
from reliable_mq.core.outbox import NewRow
from reliable_mq.core.publisher.publication import PublishReport, summary
from reliable_mq.core.statistics import PublisherStatistics, PublisherStatus
from reliable_mq.engine.publisher_options import DEFAULT_RETRY, PublisherOptions
from reliable_mq.errors import ConfigurationError, PublishError, ReliableMQError, UsageError
from reliable_mq.message import Message
from reliable_mq.metrics.families import outbox_readings, publisher_readings
from reliable_mq.metrics.registry import register
from reliable_mq.outbox.protocol import Outbox
from reliable_mq.retry import RetryPolicy
from reliable_mq.sync.confirmation import Confirmation
from reliable_mq.sync.outbox_channel import OutboxChannel, RelayPublisher, StoredConfirmation
from reliable_mq.sync.publisher_channel import PublisherChannel
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

    from prometheus_client import CollectorRegistry
    from tenacity.stop import stop_base
    from tenacity.wait import wait_base

    from reliable_mq.core.outbox import OutboxRow
    from reliable_mq.core.publisher.publication import Receipt
    from reliable_mq.metrics.registry import Reading
    from reliable_mq.settings import Credentials, CredentialsCallback
    from reliable_mq.tls import TLSOptions
    from reliable_mq.topology import Declaration

__all__ = ["PublishReport", "Publisher"]

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT = 30.0
_FOR_EVER = float("inf")


class Publisher:
    """Publishes messages and knows of each whether the broker has it. Thread-safe; one connection, one I/O thread.

    Construction does not connect. ``with``, ``connect`` or the first publish does; from then on the publisher
    reconnects by itself, declares ``topology`` again, and publishes again, with the same ``message_id``, all that the
    broker has not confirmed. An attempt that may be a duplicate carries the header
    ``x-reliable-mq-possible-duplicate``.

    Args:
        url: ``amqp://`` or ``amqps://``, with several hosts separated by commas, or a sequence of URLs that differ in
            their hosts only.
        topology: queues, exchanges and bindings to declare at every connect.
        max_outstanding: messages that may be unconfirmed at a time. At the limit ``submit`` waits.
        max_outstanding_bytes: the sum of their bodies, likewise. A larger message is published alone.
        max_message_bytes: a larger body is refused before anything is sent. RabbitMQ's own default is 16 MiB.
        mandatory: whether a message that no queue is bound for fails (``PublishReturned``) or is dropped by the broker.
        confirm_timeout: seconds without any confirm, while some are owed, after which the connection is replaced and
            all that is unconfirmed is published again.
        delivery_timeout: seconds from ``submit`` after which a message is given up (``PublishUnconfirmed``).
        retry: how a nacked message is tried again before it is reported (``PublishNacked``); without ``retry_on``,
            ``give_up_on`` and ``backend``, which are for consumers.
        on_blocked: while the broker blocks publishing (memory or disk alarm), ``"wait"`` until the deadline, or
            ``"raise"`` ``PublishBlocked`` at once for new messages.
        new_queue_grace: seconds after this process has made a quorum queue for which a confirm of it is not final:
            RabbitMQ loses what is in a queue younger than a second if it is killed. Until then, and until the broker
            has answered a question asked after that, the message counts as outstanding, and is published again where
            the connection is lost. 0 for confirms that are final at once.
        outbox: where messages are made durable before they are published (`reliable_mq.outbox`). ``publish`` then
            returns once a message is stored there, whether or not the broker is there; a relay in this process
            publishes it, again and again until it is confirmed, and at the next start what this process has left.
        reconnect_wait: a tenacity wait, asked after each round over the hosts; default exponential from 0.2 s to 30 s
            with jitter.
        reconnect_stop: a tenacity stop; default never. When it stops, all that is unconfirmed fails and the publisher
            is over.
        credentials: a callable that returns ``(username, password)``, asked at every connect, for rotated passwords and
            tokens.
        tls: a ``TLSOptions``, for certificates and authorities; ``amqps`` always verifies unless it says otherwise.
        heartbeat: seconds.
        connect_timeout: seconds for one attempt on one host, the handshakes and the declarations included.
        name: of the thread and in metrics, and of the connection in RabbitMQ's management UI unless the URL names it.
        registry: where to register Prometheus metrics; None for none.

    Raises:
        ConfigurationError: an argument is wrong; the message names it.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        topology: Iterable[Declaration] = (),
        max_outstanding: int = 2000,
        max_outstanding_bytes: int = 64 * 1024 * 1024,
        max_message_bytes: int = 16 * 1024 * 1024,
        mandatory: bool = True,
        confirm_timeout: Duration = 30.0,
        delivery_timeout: Duration = 120.0,
        retry: RetryPolicy = DEFAULT_RETRY,
        on_blocked: Literal["wait", "raise"] = "wait",
        new_queue_grace: Duration = NEW_QUEUE_GRACE,
        outbox: Outbox | None = None,
        reconnect_wait: wait_base | None = None,
        reconnect_stop: stop_base | None = None,
        credentials: Credentials | CredentialsCallback | None = None,
        tls: TLSOptions | None = None,
        heartbeat: int | None = None,
        connect_timeout: Duration | None = None,
        name: str = "publisher",
        registry: CollectorRegistry | None = None,
    ) -> None:
        if outbox is not None and not isinstance(outbox, Outbox):
            raise ConfigurationError(f"outbox must be an outbox of reliable_mq.outbox, not {outbox!r}")
        self._options = PublisherOptions(
            parse_url(url, tls=tls, credentials=credentials, heartbeat=heartbeat, connect_timeout=connect_timeout),
            name=name,
            topology=topology,
            max_outstanding=max_outstanding,
            max_outstanding_bytes=max_outstanding_bytes,
            max_message_bytes=max_message_bytes,
            mandatory=mandatory,
            confirm_timeout=confirm_timeout,
            delivery_timeout=delivery_timeout,
            retry=retry,
            on_blocked=on_blocked,
            new_queue_grace=new_queue_grace,
            reconnect_wait=reconnect_wait,
            reconnect_stop=reconnect_stop,
        )
        self._outbox = outbox
        self._made_in = os.getpid()
        self._lock = threading.RLock()  # for the seven below; held for moments only
        self._storing: OutboxChannel | None = None  # the way into the outbox
        self._storing_opens: OutboxChannel | None = None  # the same, also before it is open
        self._starting = False  # the owner of the lock is starting a lane
        self._opening: PublisherChannel | None = None  # which becomes _lane, too, with its first verdict
        self._openers = 0  # callers that wait for it
        self._lane: PublisherChannel | None = None
        self._closed = False  # no more is to be published
        self._registration = None if registry is None else register(registry, self._readings)

    # Publishing

    def publish(
        self, message: Message, *, exchange: str = "", routing_key: str = "", timeout: Duration | None = None
    ) -> Receipt:
        """Publish a message and wait until the broker has it, or the outbox, where there is one.

        Blocks for a round trip to the broker, and as long as the window is full or the broker away, up to ``timeout``.
        With an outbox: until its transaction is on disk.

        Args:
            message: what to publish.
            exchange: the default exchange routes to the queue named by the routing key.
            routing_key: at most 255 bytes in UTF-8.
            timeout: seconds after which it is given up; None for the publisher's ``delivery_timeout``.

        Returns:
            A receipt, with the message's id and the number of attempts; its ``status`` is ``"confirmed"``, or
            ``"stored"`` with an outbox.

        Raises:
            OutboxError: with an outbox alone: it could not be stored.
            PublishError: it was not confirmed; the subclass says why. After ``PublishUnconfirmed`` it may have arrived
                all the same.
            BrokerUnavailable, TopologyMismatch: this was the first call, and connecting cannot succeed.
            ConfigurationError, UsageError: a wrong argument; closed, or on the wrong side of a fork.
        """
        return self.submit(message, exchange=exchange, routing_key=routing_key, timeout=timeout).result()

    def submit(
        self, message: Message, *, exchange: str = "", routing_key: str = "", timeout: Duration | None = None
    ) -> Confirmation:
        """Publish a message without waiting for its confirm. Blocks only while the window is full.

        Args and errors are those of :meth:`publish`, except that the broker's verdict comes through the confirmation.
        """
        return self._submit(message, exchange, routing_key, timeout)

    def publish_many(
        self,
        messages: Iterable[Message],
        *,
        exchange: str = "",
        routing_key: str = "",
        timeout: Duration | None = None,
    ) -> PublishReport:
        """Publish messages, pipelined, and wait until every one has settled.

        Args:
            messages: any iterable; it is consumed as the window has room.
            exchange: for each, as in :meth:`publish`.
            routing_key: for each.
            timeout: for each, seconds.

        Returns:
            How many were confirmed, and each of the others with its error. Nothing is raised for a message that failed.
        """
        well = 0
        failures: list[tuple[Message, PublishError]] = []
        pending: deque[Confirmation] = deque()

        def collect(confirmation: Confirmation) -> None:
            nonlocal well
            error = confirmation.exception()
            if error is None:
                well += 1
            else:
                failures.append((confirmation.message, error))

        try:
            for message in messages:
                try:
                    pending.append(self._submit(message, exchange, routing_key, timeout, reported=True))
                except PublishError as error:
                    failures.append((message, error))
                while pending and pending[0].outcome is not None:
                    collect(pending.popleft())
                if len(pending) > 2 * self._options.max_outstanding:  # a slow one is in front: keep what is outstanding
                    for confirmation in pending:
                        if confirmation.outcome is not None:
                            collect(confirmation)
                    pending = deque(confirmation for confirmation in pending if confirmation.outcome is None)
            for confirmation in pending:
                collect(confirmation)
        except BaseException:
            if self._lane is not None and self._outbox is None:
                self._lane.not_reported(pending)
            raise
        if self._outbox is not None:
            return PublishReport(0, tuple(failures), stored=well)
        return PublishReport(well, tuple(failures))

    def flush(self, timeout: Duration | None = None) -> None:
        """Wait until everything submitted before is settled, well or not.

        With an outbox: until everything that was in it at this moment is confirmed, also of earlier processes, or is
        set aside, or waits behind what is.

        Args:
            timeout: seconds; None for as long as it takes, which the messages' own deadlines bound, unless there is an
                outbox.

        Raises:
            TimeoutError: some are still outstanding, and still being published; or the outbox does not say.
            OutboxError: the outbox cannot be read.
            UsageError: with an outbox alone: closed, and what is left waits for the next start.
        """
        if self._outbox is not None:
            limit = None if timeout is None else seconds("timeout", timeout)
            storing = self._store_lane(self._outbox, limit)
            left = storing.flush(_FOR_EVER if limit is None else limit)
            if left:
                text = f"{left} messages are still in {self._outbox!r} after {timeout} s"
                raise TimeoutError(text) from storing.relay.error
            return
        lane = self._lane
        if lane is not None and not lane.flush(_FOR_EVER if timeout is None else seconds("timeout", timeout)):
            raise TimeoutError(f"{lane.outstanding} messages are still outstanding after {timeout} s")

    # Life cycle

    def connect(self) -> None:
        """Connect, and wait until the topology is declared and the broker takes messages.

        Does nothing where it is connected. With an outbox, open that first, and start the relay, which goes on where
        connecting fails.

        Raises:
            OutboxError: with an outbox alone: it cannot be opened.
            BrokerUnavailable: no host could be reached; with ``permanent`` where trying again cannot help.
            TopologyMismatch: what is declared differs from what the broker has.
            UsageError: it was closed.
        """
        self._check_not_closed()
        if self._outbox is not None:
            self._store_lane(self._outbox, None)
        first = self._lane is None
        lane = self._lane or self._open(_FOR_EVER, required=True)
        error = None if first else lane.wait_connected(self._options.first_verdict)
        if error is not None:
            raise error

    def close(self, timeout: Duration = _CLOSE_TIMEOUT) -> None:
        """Wait until everything is settled, up to ``timeout`` seconds; give up the rest; disconnect.

        Does nothing where it is closed, and waits with whoever is closing it. A closing that was interrupted is taken
        up again. Does nothing in a forked child.

        Raises:
            PublishError: messages failed, or were given up, and nobody has looked at their confirmations.
            UsageError: called from a callback of this publisher, which would wait for itself.
        """
        limit = seconds("timeout", timeout)
        if os.getpid() != self._made_in:
            return
        with self._lock:
            if self._storing is None and self._storing_opens is not None and self._storing_opens.begun:
                self._storing = self._storing_opens  # who opened it was interrupted, or is about to say so
        if self._storing is not None:
            self._close_storing(self._storing, limit)
            limit = 0.0  # what the relay has not got confirmed is still in the outbox
        elif self._storing_opens is not None:  # it is not open yet
            self._storing_opens.abort()
        lane = self._opening
        if lane is not None:
            lane.check_closable()
        with self._lock:
            self._closed = True
            lane = self._opening
        if lane is not None:
            lane.close(limit)
        _open_publishers.discard(self)
        if self._registration is not None:
            self._registration.close()
        failed: Sequence[Confirmation]
        failed, count = ([], 0) if lane is None else lane.take_failures()
        if self._storing is not None:
            failed, count = self._storing.take_failures()
        if count:
            raise summary([error for confirmation in failed if (error := confirmation.failure())], count)

    def __enter__(self) -> Self:
        """Connect.

        Where no host can be reached now, the publisher goes on trying, and publishes wait; what time cannot heal is
        raised. With an outbox it is opened, and connecting is left to the relay.
        """
        self._check_not_closed()
        try:
            if self._outbox is not None:
                self._store_lane(self._outbox, None)
            else:
                self._lane or self._open(_FOR_EVER)
        except ReliableMQError:
            raise
        except BaseException:  # of a signal handler, say: nobody leaves what was not entered
            self._give_up()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Flush and close. Raises what failed unseen, but never in place of an exception of the body."""
        try:
            self.close()
        except PublishError:
            if exc_type is None:
                raise
            logger.exception("leaving a publisher because of %s, with messages unconfirmed", exc_type.__name__)
        except ReliableMQError:
            raise
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Close at once, where an exception from outside has ended an entering or a closing."""
        try:
            self.close(0)
        except PublishError:
            logger.exception("a publisher was interrupted, with messages unconfirmed")

    # What can be seen

    @property
    def outstanding(self) -> int:
        """Messages submitted and not settled: with an outbox, not stored."""
        if self._storing is not None:
            return self._storing.outstanding
        lane = self._lane
        return 0 if lane is None else lane.outstanding

    @property
    def connected(self) -> bool:
        """Whether the broker takes messages now, as far as is known."""
        lane = self._lane
        return lane is not None and lane.connected

    @property
    def blocked(self) -> str | None:
        """The broker's reason while it blocks publishing on this connection (memory or disk alarm); else None."""
        lane = self._lane
        return None if lane is None else lane.session.blocked_reason

    @property
    def statistics(self) -> PublisherStatistics:
        """Counts since the publisher was opened."""
        lane = self._lane
        return PublisherStatistics() if lane is None else lane.session.statistics

    def __repr__(self) -> str:
        state = "closed" if self._closed else "connected" if self.connected else "not connected"
        return f"<Publisher {self._options.name!r} to {', '.join(map(str, self._options.settings.endpoints))}: {state}>"

    def _submit(
        self, message: Message, exchange: str, routing_key: str, timeout: Duration | None, *, reported: bool = False
    ) -> Confirmation:
        """Submit. ``reported``: a failure will be in a report, and nobody else need be told."""
        accepted_at = time.monotonic()
        limit = None if timeout is None else seconds("timeout", timeout)
        if self._outbox is not None:
            return self._store(message, exchange, routing_key, accepted_at, limit, self._outbox)
        options = self._options
        lane = self._lane or self._open(options.delivery_timeout if limit is None else limit)
        size = options.check(message, exchange, routing_key, lane.frame_max)
        confirmation = Confirmation(message, exchange, routing_key, options.mandatory, size, accepted_at, limit, lane)
        confirmation.seen = reported
        lane.submit(confirmation)
        return confirmation

    def _check_not_closed(self) -> None:
        if self._closed:
            raise UsageError("this publisher is closed: make another")

    # With an outbox

    def _store_lane(self, outbox: Outbox, timeout: float | None) -> OutboxChannel:
        """Open the outbox, and start the relay, where that is not done.

        In no more than ``timeout`` seconds; None for as long as a message may take.
        """
        if os.getpid() != self._made_in:
            raise UsageError("this publisher was made before fork(), which may have left it half open; make one here")
        with self._lock:
            if self._storing is not None:
                return self._storing
            if self._closed:
                raise UsageError("this publisher is closed; nothing was stored")
            if self._storing_opens is None:
                carrier = RelayPublisher(self._connect_relay, self._relay)
                measured = self._registration is not None
                self._storing_opens = OutboxChannel(outbox, carrier, self._options, measured=measured)
            storing = self._storing_opens
        storing.start(self._options.delivery_timeout if timeout is None else timeout)  # without the lock: it may hang
        with self._lock:
            if self._storing is None and not self._closed:
                self._storing = storing
                _open_publishers.add(self)
        return storing

    def _store(
        self,
        message: Message,
        exchange: str,
        routing_key: str,
        accepted_at: float,
        limit: float | None,
        outbox: Outbox,
    ) -> StoredConfirmation:
        storing, options, lane = self._storing or self._store_lane(outbox, limit), self._options, self._lane
        frame_max = options.settings.frame_max if lane is None else lane.frame_max
        size = options.check(message, exchange, routing_key, frame_max)
        key = outbox.ordering_key(message, exchange, routing_key)
        mandatory = options.mandatory
        confirmation = StoredConfirmation(message, exchange, routing_key, mandatory, size, accepted_at, limit, storing)
        storing.submit(confirmation, NewRow(message, exchange, routing_key, mandatory, key))
        return confirmation

    def _connect_relay(self) -> None:
        self._lane or self._open(_FOR_EVER)

    def _relay(self, row: OutboxRow) -> Confirmation:
        """Publish a row of the outbox, on the relay's thread."""
        lane = self._lane or self._open(_FOR_EVER)
        if lane.fatal is not None:  # what it ended over may be mended; rows wait for that
            with self._lock:
                if self._lane is lane:
                    self._lane = self._opening = None
            lane.close(0)
            lane = self._open(_FOR_EVER)
        size = self._options.check(row.message, row.exchange, row.routing_key, lane.frame_max)
        confirmation = Confirmation(
            row.message, row.exchange, row.routing_key, row.mandatory, size, time.monotonic(), None, lane
        )
        confirmation.in_doubt = row.possible_duplicate
        confirmation.seen = True
        confirmation.watchers = []  # the relay looks by itself
        lane.submit(confirmation)
        return confirmation

    def _close_storing(self, storing: OutboxChannel, limit: float) -> None:
        """Close the way into the outbox, and the relay."""
        storing.check_closable()

        def worth_waiting() -> bool:
            """Whether the broker is there, or may be: it has had no chance to answer yet."""
            lane = self._opening
            return self.connected or (lane is not None and not lane.tried)

        storing.close(limit, worth_waiting)

    # Private

    def _open(self, timeout: float, *, required: bool = False) -> PublisherChannel:
        """Open, and wait for up to ``timeout`` seconds until every host has had its first attempt.

        Raises where no further attempt can help, or where a connection is ``required`` and there is none.
        """
        if os.getpid() != self._made_in:
            raise UsageError("this publisher was made before fork(), which may have left it half open; make one here")
        with self._lock:
            if self._closed:
                raise UsageError("this publisher is closed; nothing was sent")
            lane = self._opening or self._start()
            self._openers += 1
        try:
            options = self._options
            firm = timeout < options.first_verdict
            wait, hosts = min(options.first_verdict, timeout), len(options.settings.endpoints)
            error = lane.wait_connected(wait, hosts, firm=firm)
        except BaseException:
            with self._lock:
                self._openers -= 1
            raise
        with self._lock:
            self._openers -= 1
            if error is None or not (required or lane.fatal is not None):
                self._lane = lane
                return lane
            useless = self._opening is lane and self._lane is None and not self._openers
            if useless:
                self._opening = None
                _open_publishers.discard(self)
        if useless:
            lane.close(0)
        raise error

    def _start(self) -> PublisherChannel:
        if self._starting:
            raise UsageError("this publisher is just being opened, by what this signal handler has interrupted")
        self._starting = True
        try:
            lane = self._opening = PublisherChannel(self._options)  # known before it runs: who is interrupted closes it
            _open_publishers.add(self)
            lane.start()
        except BaseException:
            self._opening = None
            raise
        finally:
            self._starting = False
        return lane

    def _readings(self) -> Iterator[Reading]:
        lane = self._lane
        if lane is not None:
            yield from publisher_readings(
                self._options.name,
                PublisherStatus(
                    outstanding=lane.outstanding,
                    oldest_age=lane.oldest_age,
                    connected=lane.connected,
                    blocked=lane.session.blocked_reason is not None,
                    blocked_seconds=lane.blocked_seconds,
                    reconnects=lane.reconnects,
                    stale_confirms=lane.session.stale_confirms,
                ),
                lane.session.statistics,
            )
        if self._storing is not None:
            relay = self._storing.relay
            yield from outbox_readings(self._options.name, relay.status, relay.statistics)


# Open publishers are kept alive until they are closed: what is outstanding in one that was forgotten is still
# published, at the latest when the interpreter exits. In a forked child they are the parent's.
_open_publishers: set[Publisher] = set()
at_fork(ForkStage.FORGET, _open_publishers.clear)


def _close_at_exit() -> None:
    deadline = time.monotonic() + _CLOSE_TIMEOUT
    for publisher in list(_open_publishers):
        logger.warning("%r was not closed; closing it at exit", publisher)
        try:
            publisher.close(max(deadline - time.monotonic(), 0.0))
        except PublishError:
            logger.exception("messages were lost at exit")


at_exit(ExitStage.PUBLISHERS, _close_at_exit)
