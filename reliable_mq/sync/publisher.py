"""The confirming publisher of the sync API.

It checks arguments before anything is sent, passes each publish to its
:class:`~reliable_mq.sync.publisher_channel.PublisherChannel`, and returns outcomes as receipts and errors. Its promises
about delivery are kept by :mod:`reliable_mq.core.publisher.session`.

A signal handler may interrupt any call here, and use or close the same publisher: so each channel is known before it
runs, and a call that an exception ends leaves nothing behind that nobody would close.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Self

from reliable_mq._util.hooks import ExitStage, ForkStage, at_exit, at_fork
from reliable_mq._util.validation import Duration, seconds
from reliable_mq.core.publisher.publication import PublishReport
from reliable_mq.engine.publisher import CLOSE_TIMEOUT, FOR_EVER, BasePublisher, PublisherState
from reliable_mq.errors import PublishError, ReliableMQError, UsageError
from reliable_mq.message import Message
from reliable_mq.sync.confirmation import Confirmation
from reliable_mq.sync.outbox_channel import OutboxChannel, RelayPublisher, StoredConfirmation
from reliable_mq.sync.publisher_channel import PublisherChannel

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from reliable_mq.core.outbox import OutboxRow
    from reliable_mq.core.publisher.publication import Receipt
    from reliable_mq.outbox.protocol import Outbox

__all__ = ["PublishReport", "Publisher"]

logger = logging.getLogger(__name__)


class Publisher(BasePublisher[Confirmation, StoredConfirmation, PublisherChannel, OutboxChannel]):
    """Publishes messages and knows of each whether the broker has it.

    Thread-safe; one connection, one I/O thread.

    Construction does not connect. ``with``, ``connect`` or the first publish does; from then on the publisher
    reconnects by itself, declares ``topology`` again, and publishes again, with the same ``message_id``, every message
    that the broker has not confirmed. An attempt that may be a duplicate carries the header
    ``x-reliable-mq-possible-duplicate``.
    """

    _confirmation = Confirmation
    _stored_confirmation = StoredConfirmation

    # Publishing

    def publish(
        self, message: Message, *, exchange: str = "", routing_key: str = "", timeout: Duration | None = None
    ) -> Receipt:
        """Publish a message and wait until the broker, or the outbox, has it.

        Blocks for a round trip to the broker, and while the window is full or the broker away, up to ``timeout``. With
        an outbox: until its transaction is on disk.

        Args:
            message: the message.
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
        confirmation = self._submit(message, exchange, routing_key, timeout, reported=True)
        try:
            return confirmation.result()
        except ReliableMQError:
            raise
        except BaseException:  # an exception of a signal handler: nobody has seen what became of it
            if self._channel is not None:
                self._channel.not_reported((confirmation,))
            raise

    def submit(
        self, message: Message, *, exchange: str = "", routing_key: str = "", timeout: Duration | None = None
    ) -> Confirmation:
        """Publish a message without waiting for its confirm.

        Blocks only while the window is full.

        Args and errors are those of :meth:`publish`, except that the outcome comes through the confirmation.
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
        with self._reporting() as report:
            for message in messages:
                try:
                    report.submitted(self._submit(message, exchange, routing_key, timeout, reported=True))
                except PublishError as error:
                    report.failed(message, error)
            return report.report()  # which waits for each

    def flush(self, timeout: Duration | None = None) -> None:
        """Wait until everything submitted before is settled, well or not.

        With an outbox: until everything that was in it at this moment is confirmed, also of earlier processes, or is
        set aside, or waits behind a message that is.

        Args:
            timeout: seconds; None for as long as it takes, which the messages' own deadlines bound, unless there is an
                outbox.

        Raises:
            TimeoutError: some are still outstanding, and still being published; or the outbox does not say.
            OutboxError: the outbox cannot be read.
            UsageError: with an outbox alone: closed, and its rows wait for the next start.
        """
        limit = None if timeout is None else seconds("timeout", timeout)
        if self._outbox is not None:
            outbox_channel = self._open_outbox(self._outbox, limit)
            self._check_relayed(outbox_channel, outbox_channel.flush(FOR_EVER if limit is None else limit), timeout)
        elif (channel := self._channel) is not None:
            self._check_flushed(channel, channel.flush(FOR_EVER if limit is None else limit), timeout)

    # Life cycle

    def connect(self) -> None:
        """Connect, and wait until the topology is declared and the broker takes messages.

        Does nothing while it is connected. With an outbox, open that first, and start the relay, which goes on if
        connecting fails.

        Raises:
            OutboxError: with an outbox alone: it cannot be opened.
            BrokerUnavailable: no host could be reached; with ``permanent`` if trying again cannot help.
            TopologyMismatch: a declaration differs from what the broker has.
            UsageError: it was closed.
        """
        self._check_open()
        if self._outbox is not None:
            self._open_outbox(self._outbox, None)
        if self._channel is None:
            self._open(FOR_EVER, required=True)
        elif (error := self._channel.wait_connected(self._options.settings.first_attempts_timeout)) is not None:
            raise error

    def close(self, timeout: Duration = CLOSE_TIMEOUT) -> None:
        """Wait until everything is settled, for up to ``timeout`` seconds; disconnect.

        What is not settled by then is given up. Does nothing when it is closed, and waits with another caller that is
        closing it. A closing that was interrupted is taken up again. Does nothing in a forked child.

        Raises:
            PublishError: messages failed, or were given up, and nobody has looked at their confirmations.
            UsageError: called from a callback of this publisher, which would wait for itself.
        """
        limit = seconds("timeout", timeout)
        if self._is_over:
            return
        with self._lock:
            started = self._started_outbox_channel
            if self._outbox_channel is None and started is not None and started.begun:
                self._outbox_channel = started  # its opening was interrupted, or is about to end
        if self._outbox_channel is not None:
            self._outbox_channel.check_closable()
            self._outbox_channel.close(limit, self._broker_may_answer)
            limit = 0.0  # messages that the relay has not published are still in the outbox
        elif started is not None:  # it is not open yet
            started.abort()
        if self._started_channel is not None:
            self._started_channel.check_closable()
        with self._lock:
            self._leave_open()
            channel = self._started_channel
        if channel is not None:
            channel.close(limit)
        _open_publishers.discard(self)
        self._raise_unobserved()

    def __enter__(self) -> Self:
        """Connect.

        If no host can be reached now, the publisher goes on trying, and publishes wait; an error that time cannot heal
        is raised. With an outbox that is opened, and connecting is left to the relay.
        """
        self._check_open()
        try:
            if self._outbox is not None:
                self._open_outbox(self._outbox, None)
            elif self._channel is None:
                self._open(FOR_EVER)
        except ReliableMQError:
            raise
        except BaseException:  # of a signal handler, say: nobody leaves a block that was not entered
            self._give_up()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Flush and close.

        Raises failures that nobody has seen, but never in place of an exception of the body.
        """
        try:
            self.close()
        except PublishError as error:
            self._left_unconfirmed(error, exc_type)
        except ReliableMQError:
            raise
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Close at once: an exception from outside has ended an entering or a closing."""
        try:
            self.close(0)
        except PublishError:
            logger.exception("a publisher was interrupted, with messages unconfirmed")

    # Messages on their way

    def _submit(
        self, message: Message, exchange: str, routing_key: str, timeout: Duration | None, *, reported: bool = False
    ) -> Confirmation:
        """Submit. ``reported``: its caller is told of a failure, the end raises none."""
        accepted_at = time.monotonic()
        limit = None if timeout is None else seconds("timeout", timeout)
        if self._outbox is not None:
            outbox_channel = self._outbox_channel or self._open_outbox(self._outbox, limit)
            stored, row = self._new_stored(outbox_channel, message, exchange, routing_key, accepted_at, limit)
            try:
                outbox_channel.submit(stored, row)
            except BaseException as error:
                if stored.trace is not None:
                    stored.trace.failed(error)
                raise
            return stored
        options = self._options
        trace = None if self._tracer is None else self._tracer.begin(message, exchange, routing_key)
        try:
            channel = self._channel or self._open(options.delivery_timeout if limit is None else limit)
            size = options.check(message, exchange, routing_key, channel.frame_max)
            confirmation = Confirmation(
                message, exchange, routing_key, options.mandatory, size, accepted_at, limit, channel
            )
            confirmation.result_observed = reported
            if trace is not None:
                channel.observe(confirmation, trace)
            channel.submit(confirmation)
        except BaseException as error:
            if trace is not None:
                trace.failed(error)
            raise
        return confirmation

    def _relay(self, row: OutboxRow) -> Confirmation:
        """Publish a row of the outbox, on the relay's thread."""
        channel = self._channel or self._open(FOR_EVER)
        if channel.fatal is not None:  # its cause may be mended; rows wait for that
            with self._lock:
                if self._channel is channel:
                    self._channel = self._started_channel = None
            channel.close(0)
            channel = self._open(FOR_EVER)
        confirmation = self._new_relayed(channel, row)
        confirmation.callbacks = confirmation.callbacks or []  # the relay looks at the outcome by itself
        try:
            channel.submit(confirmation)
        except BaseException as error:
            if confirmation.trace is not None:
                confirmation.trace.failed(error)
            raise
        return confirmation

    # Opening

    def _open_outbox(self, outbox: Outbox, timeout: float | None) -> OutboxChannel:
        """Return the channel to the outbox, open, with its relay.

        In no more than ``timeout`` seconds; None for as long as a message may take.
        """
        self._check_process()
        with self._lock:
            if self._outbox_channel is not None:
                return self._outbox_channel
            self._check_open("; nothing was stored")
            if self._started_outbox_channel is None:
                self._started_outbox_channel = OutboxChannel(
                    outbox,
                    RelayPublisher(lambda: self._channel or self._open(FOR_EVER), self._relay),
                    self._options,
                    measured=self._registration is not None,
                )
            channel = self._started_outbox_channel
        channel.start(self._options.delivery_timeout if timeout is None else timeout)  # without the lock: it may hang
        with self._lock:
            if self._outbox_channel is None and not self._is_closed:
                self._outbox_channel = channel
                _open_publishers.add(self)
        return channel

    def _open(self, timeout: float, *, required: bool = False) -> PublisherChannel:
        """Connect, and wait until every host has had its first attempt.

        For up to ``timeout`` seconds.

        Raises an error if no further attempt can help, or if a connection is ``required`` and there is none.
        """
        self._check_process()
        with self._lock:
            self._check_open("; nothing was sent")
            channel = self._started_channel or self._start()
            self._openers += 1
        try:
            wait, attempts, firm = self._first_wait(timeout)
            error = channel.wait_connected(wait, attempts, firm=firm)
        except BaseException:
            with self._lock:
                self._openers -= 1
            raise
        with self._lock:
            self._openers -= 1
            if error is None or not (required or channel.fatal is not None):
                self._channel = channel
                return channel
            useless = self._started_channel is channel and self._channel is None and not self._openers
            if useless:
                self._started_channel = None
                _open_publishers.discard(self)
        if useless:
            channel.close(0)
        raise error

    def _start(self) -> PublisherChannel:
        """Start a channel. Under the lock."""
        if self._state is PublisherState.STARTING:
            raise UsageError("this publisher is just being opened, by what this signal handler has interrupted")
        self._state = PublisherState.STARTING
        try:
            channel = self._started_channel = PublisherChannel(self._options)  # known before it runs
            _open_publishers.add(self)
            channel.start()
        except BaseException:
            self._started_channel = None
            raise
        finally:
            if self._state is PublisherState.STARTING:  # else a signal handler has closed the publisher
                self._state = PublisherState.OPEN
        return channel


# Open publishers are kept alive until they are closed: the outstanding messages of one that was forgotten are still
# published, at the latest when the interpreter exits. In a forked child they are the parent's.
_open_publishers: set[Publisher] = set()
at_fork(ForkStage.FORGET, _open_publishers.clear)


def _close_at_exit() -> None:
    deadline = time.monotonic() + CLOSE_TIMEOUT
    for publisher in list(_open_publishers):
        logger.warning("%r was not closed; closing it at exit", publisher)
        try:
            publisher.close(max(deadline - time.monotonic(), 0.0))
        except PublishError:
            logger.exception("messages were lost at exit")


at_exit(ExitStage.PUBLISHERS, _close_at_exit)
