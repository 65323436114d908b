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
from reliable_mq._util.validation import Duration
from reliable_mq.core.publisher.publication import PublishReport
from reliable_mq.engine.publisher import CLOSE_TIMEOUT, FOR_EVER, BasePublisher
from reliable_mq.engine.steps import blocking
from reliable_mq.errors import PublishError, ReliableMQError
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
    """Publishes messages, and reports for each whether the broker has it.

    Thread-safe; one connection, one I/O thread.

    Construction does not connect. ``with``, ``connect`` or the first publish does; from then on the publisher
    reconnects by itself, declares ``topology`` again, and publishes again, with the same ``message_id``, every message
    that the broker has not confirmed. An attempt that may be a duplicate carries the header
    ``x-reliable-mq-possible-duplicate``.
    """

    _confirmation = Confirmation
    _stored_confirmation = StoredConfirmation
    _channel_type = PublisherChannel

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
            A receipt with the message's id and the number of attempts. Its ``status`` is ``"confirmed"``; with an
            outbox it is ``"stored"``.

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
        """Wait until every message submitted before is settled: confirmed or failed.

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
        blocking(self._flush(timeout))

    # Life cycle

    def connect(self) -> None:
        """Connect, and wait until the topology is declared and the broker takes messages.

        Does nothing while it is connected. With an outbox, open that first, and start the relay, which goes on if
        connecting fails.

        Raises:
            OutboxError: with an outbox alone: it cannot be opened.
            BrokerUnavailable: no host could be reached; with ``permanent`` if trying again cannot help.
            TopologyMismatch: a declaration differs from the broker's.
            UsageError: it was closed.
        """
        blocking(self._connect())

    def close(self, timeout: Duration = CLOSE_TIMEOUT) -> None:
        """Wait until everything is settled, for up to ``timeout`` seconds; disconnect.

        Messages that are not settled by then are given up. Does nothing when it is closed, or in a forked child. If
        another caller is closing it, waits for that. A call after an interrupted one goes on with the closing.

        Raises:
            PublishError: messages failed, or were given up, and nobody has looked at their confirmations.
            UsageError: called from a callback of this publisher, which would wait for itself.
        """
        blocking(self._close(timeout))

    def __enter__(self) -> Self:
        """Connect.

        If no host can be reached now, the publisher goes on trying, and publishes wait; an error that time cannot heal
        is raised. With an outbox that is opened, and connecting is left to the relay.
        """
        try:
            blocking(self._enter())
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
        channel = self._channel if self._outbox is None else self._outbox_channel
        if channel is None:
            confirmation = blocking(self._first_confirmation(message, exchange, routing_key, timeout, reported))
        else:
            confirmation = self._new_confirmation(channel, message, exchange, routing_key, timeout, reported)
        try:
            confirmation.owner.submit(confirmation)
        except BaseException:
            if reported:
                self._not_reported((confirmation,))
            raise
        return confirmation

    def _relay(self, row: OutboxRow) -> Confirmation:
        """Publish a row of the outbox, on the relay's thread."""
        channel = self._channel
        if channel is None or channel.fatal is not None:
            channel = blocking(self._open_for_relay())
        confirmation = self._new_relayed(channel, row)
        confirmation.callbacks = confirmation.callbacks or []  # the relay looks at the outcome by itself
        channel.submit(confirmation)
        return confirmation

    # Opening and closing

    def _outbox_channel_to_start(self, outbox: Outbox) -> OutboxChannel:
        if self._started_outbox_channel is not None:
            return self._started_outbox_channel
        relay = RelayPublisher(lambda: self._channel or blocking(self._open(FOR_EVER)), self._relay)
        return OutboxChannel(outbox, relay, self._options, measured=self._registration is not None)

    def _keep(self) -> None:
        _open_publishers.add(self)

    def _release(self) -> None:
        _open_publishers.discard(self)


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
