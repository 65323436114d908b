"""The confirming publisher: what a user calls.

It validates before anything is sent, hands each publish to its :class:`~reliable_mq.sync.lane.PublishingLane`, and
turns outcomes into receipts and errors. Everything it promises about delivery is decided in
:mod:`reliable_mq.core.publishing`.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Literal, Self

from reliable_mq.core.codec import header_frame_size, publish_head
from reliable_mq.core.recovery import Recovery
from reliable_mq.core.report import PublishReport, summary
from reliable_mq.core.window import PublishWindow
from reliable_mq.durations import Duration, seconds
from reliable_mq.errors import ConfigurationError, PublishError, PublishRefused, UsageError
from reliable_mq.message import Message
from reliable_mq.metrics.publisher import publisher_readings
from reliable_mq.metrics.registry import register
from reliable_mq.retry import RetryPolicy
from reliable_mq.sync.confirmation import Confirmation
from reliable_mq.sync.lane import PublishingLane
from reliable_mq.topology import declarations
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

    from prometheus_client import CollectorRegistry
    from tenacity.stop import stop_base
    from tenacity.wait import wait_base

    from reliable_mq.core.publication import Receipt
    from reliable_mq.core.statistics import PublisherStatistics
    from reliable_mq.metrics.registry import Reading
    from reliable_mq.settings import Credentials, CredentialsCallback
    from reliable_mq.tls import TLSOptions
    from reliable_mq.topology import Declaration

__all__ = ["PublishReport", "Publisher"]

logger = logging.getLogger(__name__)

DEFAULT_RETRY = RetryPolicy(max_attempts=6, delays=(0.1, 0.3, 1.0, 3.0, 5.0), jitter=0.5)
"""How a nacked publish is tried again: six attempts over about ten seconds, since a full queue empties or does not."""

_CONTENT_TOO_LARGE = 311  # the AMQP reply code for a body that is too large
_TARGETS_KEPT = 4096  # pairs of exchange and routing key known to be valid
_CLOSE_TIMEOUT = 30.0
_DUPLICATE_HEADER_BYTES = 64  # what the header of a possible duplicate adds, at most
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
        retry: how a nacked message is tried again before it is reported (``PublishNacked``).
        on_blocked: while the broker blocks publishing (memory or disk alarm), ``"wait"`` until the deadline, or
            ``"raise"`` ``PublishBlocked`` at once for new messages.
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
        reconnect_wait: wait_base | None = None,
        reconnect_stop: stop_base | None = None,
        credentials: Credentials | CredentialsCallback | None = None,
        tls: TLSOptions | None = None,
        heartbeat: int | None = None,
        connect_timeout: Duration | None = None,
        name: str = "publisher",
        registry: CollectorRegistry | None = None,
    ) -> None:
        if on_blocked not in ("wait", "raise"):
            raise ConfigurationError(f"on_blocked must be 'wait' or 'raise', not {on_blocked!r}")
        if not isinstance(retry, RetryPolicy):
            raise ConfigurationError(f"retry must be a RetryPolicy, not {retry!r}")
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"name must be text that is not empty, not {name!r}")
        if not isinstance(mandatory, bool):
            raise ConfigurationError(f"mandatory must be True or False, not {mandatory!r}")
        if not isinstance(max_message_bytes, int) or isinstance(max_message_bytes, bool) or max_message_bytes < 0:
            raise ConfigurationError(f"max_message_bytes must be a whole number, not {max_message_bytes!r}")
        self._settings = parse_url(
            url,
            tls=tls,
            credentials=credentials,
            heartbeat=heartbeat,
            connect_timeout=connect_timeout,
        )
        self._name = name
        self._topology = declarations(topology)
        self._mandatory = mandatory
        self._max_message_bytes = max_message_bytes
        self._retry = retry
        self._raise_when_blocked = on_blocked == "raise"
        self._confirm_timeout = seconds("confirm_timeout", confirm_timeout, positive=True)
        self._delivery_timeout = seconds("delivery_timeout", delivery_timeout, positive=True)
        self._window = PublishWindow(max_outstanding, max_outstanding_bytes)
        self._max_outstanding = max_outstanding
        self._reconnect = reconnect_wait, reconnect_stop
        self._new_recovery()  # so that a wrong reconnect_wait or reconnect_stop is refused here
        self._targets: set[tuple[str, str]] = set()
        self._made_in = os.getpid()
        self._lock = threading.RLock()  # for the six below; held for moments only
        self._starting = False  # the owner of the lock is starting a lane
        self._opening: PublishingLane | None = None  # which becomes _lane, too, with its first verdict
        self._openers = 0  # callers that wait for it
        self._lane: PublishingLane | None = None
        self._closed = False  # no more is to be published
        self._over = False  # what failed has been reported
        self._registration = None if registry is None else register(registry, self._readings)

    # Publishing

    def publish(
        self, message: Message, *, exchange: str = "", routing_key: str = "", timeout: Duration | None = None
    ) -> Receipt:
        """Publish a message and wait until the broker has it.

        Blocks for a round trip to the broker, and as long as the window is full or the broker away, up to ``timeout``.

        Args:
            message: what to publish.
            exchange: the default exchange routes to the queue named by the routing key.
            routing_key: at most 255 bytes in UTF-8.
            timeout: seconds after which it is given up; None for the publisher's ``delivery_timeout``.

        Returns:
            A receipt, with the message's id and the number of attempts.

        Raises:
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
        accepted_at = time.monotonic()
        limit = None if timeout is None else seconds("timeout", timeout)
        lane = self._lane or self._open(self._delivery_timeout if limit is None else limit)
        if not isinstance(message, Message):
            raise ConfigurationError(f"message must be a Message, not {type(message).__name__}: wrap it, Message(body)")
        if (exchange, routing_key) not in self._targets:
            self._check_target(exchange, routing_key)
        size = len(message.body)
        if size > self._max_message_bytes or message.encoded_properties is not None:
            self._check_size(message, lane)
        confirmation = Confirmation(
            message,
            exchange,
            routing_key,
            self._mandatory,
            size,
            accepted_at,
            limit,
            lane,
        )
        lane.submit(confirmation)
        return confirmation

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
        confirmed = 0
        failures: list[tuple[Message, PublishError]] = []
        pending: deque[Confirmation] = deque()

        def collect(confirmation: Confirmation) -> None:
            nonlocal confirmed
            error = confirmation.exception()
            if error is None:
                confirmed += 1
            else:
                failures.append((confirmation.message, error))

        for message in messages:
            try:
                pending.append(self.submit(message, exchange=exchange, routing_key=routing_key, timeout=timeout))
            except PublishError as error:
                failures.append((message, error))
            while pending and pending[0].outcome is not None:
                collect(pending.popleft())
            if len(pending) > 2 * self._max_outstanding:  # a slow one is in front: keep only what is outstanding
                for confirmation in pending:
                    if confirmation.outcome is not None:
                        collect(confirmation)
                pending = deque(confirmation for confirmation in pending if confirmation.outcome is None)
        for confirmation in pending:
            collect(confirmation)
        return PublishReport(confirmed, tuple(failures))

    def flush(self, timeout: Duration | None = None) -> None:
        """Wait until everything submitted before is settled, well or not.

        Args:
            timeout: seconds; None for as long as it takes, which the messages' own deadlines bound.

        Raises:
            TimeoutError: some are still outstanding. They are still being published.
        """
        lane = self._lane
        if lane is not None and not lane.flush(_FOR_EVER if timeout is None else seconds("timeout", timeout)):
            raise TimeoutError(f"{lane.outstanding} messages are still outstanding after {timeout} s")

    # Life cycle

    def connect(self) -> None:
        """Connect, and wait until the topology is declared and the broker takes messages.

        Does nothing where it is connected.

        Raises:
            BrokerUnavailable: no host could be reached; with ``permanent`` where trying again cannot help.
            TopologyMismatch: what is declared differs from what the broker has.
        """
        first = self._lane is None
        lane = self._lane or self._open(_FOR_EVER, required=True)
        error = None if first else lane.wait_connected(self._first_verdict)
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
        lane = self._opening
        if lane is not None:
            lane.check_closable()
        with self._lock:
            self._closed = True
            lane = self._opening
        if lane is not None:
            lane.close(limit)
        with self._lock:
            already, self._over = self._over, True
        if already:
            return
        _open_publishers.discard(self)
        if self._registration is not None:
            self._registration.close()
        failed, count = ([], 0) if lane is None else lane.take_failures()
        if count:
            raise summary([error for confirmation in failed if (error := confirmation.failure())], count)

    def __enter__(self) -> Self:
        """Connect.

        Where no host can be reached now, the publisher goes on trying, and publishes wait; what time cannot heal is
        raised.
        """
        try:
            self._lane or self._open(_FOR_EVER)
        except (KeyboardInterrupt, SystemExit):
            self.close(0)
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

    # What can be seen

    @property
    def outstanding(self) -> int:
        """Messages submitted and not settled."""
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
        return f"<Publisher {self._name!r} to {', '.join(map(str, self._settings.endpoints))}: {state}>"

    # Private

    def _open(self, timeout: float, *, required: bool = False) -> PublishingLane:
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
            error = lane.wait_connected(min(self._first_verdict, timeout), len(self._settings.endpoints))
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

    def _start(self) -> PublishingLane:
        if self._starting:
            raise UsageError("this publisher is just being opened, by what this signal handler has interrupted")
        self._starting = True
        try:
            lane = self._new_lane()
            lane.start()
            self._opening = lane
            _open_publishers.add(self)
        finally:
            self._starting = False
        return lane

    def _new_lane(self) -> PublishingLane:
        return PublishingLane(
            name=self._name,
            settings=self._settings,
            topology=self._topology,
            recovery=self._new_recovery(),
            retry=self._retry,
            window=self._window,
            confirm_timeout=self._confirm_timeout,
            delivery_timeout=self._delivery_timeout,
            raise_when_blocked=self._raise_when_blocked,
        )

    @property
    def _first_verdict(self) -> float:
        """Seconds after which every host has had its first attempt."""
        return self._settings.connect_timeout * len(self._settings.endpoints) + 1.0

    def _readings(self) -> Iterator[Reading]:
        lane = self._lane
        if lane is not None:
            yield from publisher_readings(
                self._name,
                lane.session.statistics,
                outstanding=lane.outstanding,
                oldest_age=lane.oldest_age,
                connected=lane.connected,
                blocked=lane.session.blocked_reason is not None,
                blocked_seconds=lane.blocked_seconds,
                reconnects=lane.reconnects,
                stale_confirms=lane.session.stale_confirms,
            )

    def _new_recovery(self) -> Recovery:
        wait, stop = self._reconnect
        return Recovery(hosts=len(self._settings.endpoints), wait=wait, stop=stop)

    def _check_target(self, exchange: str, routing_key: str) -> None:
        publish_head(1, exchange, routing_key, self._mandatory)  # refuses what cannot be encoded, naming it
        if len(self._targets) >= _TARGETS_KEPT:
            self._targets.clear()
        self._targets.add((exchange, routing_key))

    def _check_size(self, message: Message, lane: PublishingLane) -> None:
        size = len(message.body)
        if size > self._max_message_bytes:
            raise PublishRefused(
                f"message {message.message_id} was not sent: its body has {size} bytes, and max_message_bytes is "
                f"{self._max_message_bytes}; split it, or raise the limit here and in the broker (max_message_size)",
                message_id=message.message_id,
                reply_code=_CONTENT_TOO_LARGE,
                reply_text="refused before sending",
            )
        header, limit = header_frame_size(message.encoded_properties or b""), lane.frame_max
        if header + _DUPLICATE_HEADER_BYTES > limit:
            raise PublishRefused(
                f"message {message.message_id} was not sent: its properties and headers take {header} bytes, "
                f"and one frame of this connection holds {limit}; move data into the body",
                message_id=message.message_id,
                reply_code=_CONTENT_TOO_LARGE,
                reply_text="refused before sending",
            )


# Open publishers are kept alive until they are closed: what is outstanding in one that was forgotten is still
# published, at the latest when the interpreter exits. In a forked child they are the parent's.
_open_publishers: set[Publisher] = set()
os.register_at_fork(after_in_child=_open_publishers.clear)


@atexit.register
def _close_at_exit() -> None:
    deadline = time.monotonic() + _CLOSE_TIMEOUT
    for publisher in list(_open_publishers):
        logger.warning("%r was not closed; closing it at exit", publisher)
        try:
            publisher.close(max(deadline - time.monotonic(), 0.0))
        except PublishError:
            logger.exception("messages were lost at exit")
