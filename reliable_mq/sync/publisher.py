"""The confirming publisher of the sync API.

It checks arguments before anything is sent, passes each publish to its
:class:`~reliable_mq.sync.publisher_channel.PublisherChannel`, and returns outcomes as receipts and errors. The delivery
guarantees are implemented in :mod:`reliable_mq.core.publisher.session`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from reliable_mq._util.hooks import ExitStage, ForkStage, at_exit, at_fork
from reliable_mq._util.logs import get_logger
from reliable_mq._util.validation import Duration
from reliable_mq.core.publisher.publication import PublishReport
from reliable_mq.engine.publisher import CLOSE_TIMEOUT, BasePublisher
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

logger = get_logger(__name__)


class Publisher(BasePublisher[Confirmation, StoredConfirmation, PublisherChannel, OutboxChannel]):
    """A publisher that reports for each message whether the broker has it.

    Thread-safe. It has one connection and one I/O thread.

    Construction does not connect. ``with``, ``connect`` or the first publish connects. From then on the publisher
    reconnects by itself, declares ``topology`` again, and republishes unconfirmed messages with the same
    ``message_id``. An attempt that may be a duplicate carries the header ``x-reliable-mq-possible-duplicate``.
    """

    _confirmation = Confirmation
    _stored_confirmation = StoredConfirmation
    _channel_type = PublisherChannel

    # Publishing

    def publish(
        self, message: Message, *, exchange: str = "", routing_key: str = "", timeout: Duration | None = None
    ) -> Receipt:
        """Publish a message and wait until the broker, or the outbox, has it.

        Blocks for a round trip to the broker. While the window is full or the broker is unreachable, blocks for up to
        ``timeout``. With an outbox, blocks until its transaction is on disk.

        Args:
            message: The message.
            exchange: The exchange. The default exchange routes to the queue named by the routing key.
            routing_key: The routing key, at most 255 bytes in UTF-8.
            timeout: Seconds after which the message is given up. None for the publisher's ``delivery_timeout``.

        Returns:
            A receipt with the message's id and the number of attempts. Its ``status`` is ``"confirmed"``, or
            ``"stored"`` with an outbox.

        Raises:
            OutboxError: With an outbox only: if the message could not be stored.
            PublishError: If the message was not confirmed. The subclass gives the reason. After ``PublishUnconfirmed``
                the message may still have arrived.
            BrokerUnavailable, TopologyMismatch: If this was the first call and connecting cannot succeed.
            ConfigurationError, UsageError: If an argument is invalid, or the publisher is closed or on the wrong side
                of a fork, or if called by a log handler on the publisher's I/O thread.
        """
        confirmation = self._submit(message, exchange, routing_key, timeout, reported=True)
        try:
            return confirmation.result()
        except ReliableMQError:
            raise
        except BaseException:  # an exception of a signal handler: no user has seen the outcome
            self._not_reported((confirmation,))
            raise

    def submit(
        self, message: Message, *, exchange: str = "", routing_key: str = "", timeout: Duration | None = None
    ) -> Confirmation:
        """Publish a message without waiting for its confirm.

        Blocks only while the window is full, and in the first call, until each host has had one attempt to connect. See
        :meth:`publish` for the arguments and errors. The confirmation reports the outcome.
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
        """Publish messages, pipelined, and wait until every one is settled.

        Args:
            messages: The messages. The iterable is consumed as the window has room.
            exchange: The exchange for each message, as in :meth:`publish`.
            routing_key: The routing key for each message.
            timeout: The timeout for each message, in seconds.

        Returns:
            The number of confirmed messages, and each of the others with its error. Nothing is raised for a failed
            message.
        """
        with self._reporting() as report:
            for message in messages:
                try:
                    report.submitted(self._submit(message, exchange, routing_key, timeout, reported=True))
                except PublishError as error:
                    report.failed(message, error)
            return report.report()  # waits for each confirmation

    def flush(self, timeout: Duration | None = None) -> None:
        """Wait until every message submitted before is settled: confirmed or failed.

        With an outbox, wait until every message in it at this moment is confirmed or set aside, or waits behind a
        message that is set aside. This includes messages of earlier processes.

        Args:
            timeout: The time to wait, in seconds. None waits as long as necessary. Without an outbox, the messages' own
                deadlines limit the wait.

        Raises:
            TimeoutError: If messages are still outstanding, and still being published, or the outbox does not answer.
            OutboxError: If the outbox cannot be read.
            UsageError: With an outbox only: if the publisher is closed. The rows wait for the next start.
        """
        blocking(self._flush(timeout))

    # Life cycle

    def connect(self) -> None:
        """Connect, and wait until the topology is declared and the broker takes messages.

        Does nothing while it is connected. With an outbox, opens the outbox first and starts the relay, which continues
        if connecting fails.

        Raises:
            OutboxError: With an outbox only: if it cannot be opened.
            BrokerUnavailable: If no host can be reached. It has ``permanent`` set if trying again cannot help.
            TopologyMismatch: If a declaration differs from the broker's.
            UsageError: If the publisher was closed.
        """
        blocking(self._connect())

    def close(self, timeout: Duration = CLOSE_TIMEOUT) -> None:
        """Wait until everything is settled, for up to ``timeout`` seconds, and disconnect.

        Messages that are not settled by then are given up. Does nothing if it is already closed, or in a forked child.
        If another caller is closing it, waits for that. A call after an interrupted one continues the closing.

        Raises:
            PublishError: If messages failed or were given up, and no user has seen their outcome, or if a blocked I/O
                thread has not settled messages.
            UsageError: If called from a callback of this publisher, which would wait for itself.
        """
        blocking(self._close(timeout))

    def __enter__(self) -> Self:
        """Connect.

        If no host can be reached now, the publisher keeps trying, and publishes wait. An error that further attempts
        cannot fix is raised. With an outbox, opens the outbox, and the relay connects.
        """
        try:
            blocking(self._enter())
        except ReliableMQError:
            raise
        except BaseException:  # for example from a signal handler; ``__exit__`` will not be called
            self._give_up()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Flush and close.

        Raises unseen failures, but never in place of an exception of the body.
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
        """Close at once, after an exception has interrupted entering or closing."""
        try:
            self.close(0)
        except PublishError as error:
            logger.error("a publisher was interrupted with unconfirmed messages: %s", error)  # noqa: TRY400  # the error says it all

    # Messages in flight

    def _submit(
        self, message: Message, exchange: str, routing_key: str, timeout: Duration | None, *, reported: bool = False
    ) -> Confirmation:
        """Submit a message. ``reported`` means that the caller receives the failure."""
        channel = self._channel if self._outbox is None else self._outbox_channel
        if channel is None:
            confirmation = blocking(self._first_confirmation(message, exchange, routing_key, timeout, reported))
        else:
            if reported:
                channel.check_may_wait()
            confirmation = self._new_confirmation(channel, message, exchange, routing_key, timeout, reported)
        try:
            confirmation.owner.submit(confirmation)
        except BaseException as error:
            self._not_accepted(confirmation, error)
            raise
        return confirmation

    def _relay(self, row: OutboxRow) -> Confirmation:
        """Publish a row of the outbox. Runs on the relay's thread."""
        channel = self._channel
        if channel is None or channel.fatal is not None:
            channel = blocking(self._open_for_relay())
        confirmation = self._new_relayed(channel, row)
        confirmation.callbacks = confirmation.callbacks or []  # the relay checks the outcome itself
        with self._relaying(confirmation):
            channel.submit(confirmation)
        return confirmation

    # Opening and closing

    def _outbox_channel_to_start(self, outbox: Outbox) -> OutboxChannel:
        if self._started_outbox_channel is not None:
            return self._started_outbox_channel
        relay = RelayPublisher(lambda: blocking(self._open_for_relay()), self._relay, self._kept_places)
        return OutboxChannel(outbox, relay, self._options, measured=self._registration is not None)

    def _keep(self) -> None:
        super()._keep()
        _open_publishers.add(self)

    def _release(self) -> None:
        super()._release()
        _open_publishers.discard(self)


# Open publishers are kept alive until they are closed. The outstanding messages of a forgotten publisher are still
# published, at the latest when the interpreter exits. In a forked child they belong to the parent.
_open_publishers: set[Publisher] = set()
at_fork(ForkStage.FORGET, _open_publishers.clear)


def _close_at_exit() -> None:
    deadline = time.monotonic() + CLOSE_TIMEOUT
    for publisher in list(_open_publishers):
        logger.warning("%r was not closed; closing it at exit", publisher)
        try:
            publisher.close(max(deadline - time.monotonic(), 0.0))
        except PublishError as error:
            logger.error("messages were lost at exit: %s", error)  # noqa: TRY400
        except Exception:
            logger.exception("failed to close %r at exit", publisher)  # the others must be closed, too


at_exit(ExitStage.PUBLISHERS, _close_at_exit)
