"""The confirming publisher of the asyncio API.

It checks arguments before anything is sent, passes each publish to its
:class:`~reliable_mq.aio.publisher_channel.AsyncPublisherChannel`, and returns outcomes as receipts and errors. As for
the sync API, the delivery guarantees are implemented in :mod:`reliable_mq.core.publisher.session`.
"""

from __future__ import annotations

import asyncio
import warnings
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Self

from reliable_mq._util.validation import Duration
from reliable_mq.aio.confirmation import AsyncConfirmation
from reliable_mq.aio.outbox_channel import AsyncOutboxChannel, AsyncRelayPublisher, AsyncStoredConfirmation
from reliable_mq.aio.publisher_channel import AsyncPublisherChannel
from reliable_mq.engine.publisher import CLOSE_TIMEOUT, BasePublisher, ReportBuilder
from reliable_mq.engine.steps import awaiting
from reliable_mq.errors import PublishError

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Iterable
    from types import TracebackType

    from reliable_mq.core.outbox import OutboxRow
    from reliable_mq.core.publisher.publication import PublishReport, Receipt
    from reliable_mq.message import Message
    from reliable_mq.outbox.protocol import Outbox


class AsyncPublisher(
    BasePublisher[AsyncConfirmation, AsyncStoredConfirmation, AsyncPublisherChannel, AsyncOutboxChannel]
):
    """A publisher that reports for each message whether the broker has it.

    For one event loop and any number of its tasks. Construction does not connect. ``async with``, ``connect`` or the
    first publish connects. From then on the publisher reconnects by itself, declares ``topology`` again, and
    republishes unconfirmed messages with the same ``message_id``. An attempt that may be a duplicate carries the header
    ``x-reliable-mq-possible-duplicate``.

    Cancelling a task that awaits does not withdraw a message that was admitted to the window. The message stays
    outstanding until it is settled or its deadline passes. A message that still waits for the window is not sent.

    Close the publisher, or use ``async with``. Messages that are outstanding when the event loop ends are lost.
    """

    _confirmation = AsyncConfirmation
    _stored_confirmation = AsyncStoredConfirmation
    _channel_type = AsyncPublisherChannel

    # Publishing

    async def publish(
        self, message: Message, *, exchange: str = "", routing_key: str = "", timeout: Duration | None = None
    ) -> Receipt:
        """Publish a message and wait until the broker, or the outbox, has it.

        Takes a round trip to the broker. While the window is full or the broker is unreachable, takes up to
        ``timeout``. With an outbox, waits until its transaction is on disk.

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
            ConfigurationError, UsageError: If an argument is invalid, or the publisher is closed, used on another event
                loop, or on the wrong side of a fork.
        """
        return await (await self.submit(message, exchange=exchange, routing_key=routing_key, timeout=timeout))

    async def submit(
        self, message: Message, *, exchange: str = "", routing_key: str = "", timeout: Duration | None = None
    ) -> AsyncConfirmation:
        """Publish a message without waiting for its confirm.

        Waits only while the window is full, and in the first call, until each host has had one attempt to connect. See
        :meth:`publish` for the arguments and errors. The confirmation reports the outcome.
        """
        return await self._submit(message, exchange, routing_key, timeout)

    async def publish_many(
        self,
        messages: Iterable[Message] | AsyncIterable[Message],
        *,
        exchange: str = "",
        routing_key: str = "",
        timeout: Duration | None = None,
    ) -> PublishReport:
        """Publish messages, pipelined, and wait until every one is settled.

        Args:
            messages: The messages. The iterable, which may be asynchronous, is consumed as the window has room.
            exchange: The exchange for each message, as in :meth:`publish`.
            routing_key: The routing key for each message.
            timeout: The timeout for each message, in seconds.

        Returns:
            The number of confirmed messages, and each of the others with its error. Nothing is raised for a failed
            message.
        """

        async def publish_one(report: ReportBuilder[AsyncConfirmation], message: Message) -> None:
            try:
                report.submitted(await self._submit(message, exchange, routing_key, timeout, reported=True))
            except PublishError as error:
                report.failed(message, error)
                await asyncio.sleep(0)  # otherwise the loop stands still, and the publisher cannot reconnect

        with self._reporting() as report:
            if hasattr(messages, "__aiter__"):
                async for message in messages:
                    await publish_one(report, message)
            else:
                for message in messages:
                    await publish_one(report, message)
            for confirmation in report.outstanding:
                if confirmation.outcome is None:
                    with suppress(PublishError):  # the report will have it
                        await confirmation
            return report.report()

    async def flush(self, timeout: Duration | None = None) -> None:
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
        await awaiting(self._flush(timeout))

    # Life cycle

    async def connect(self) -> None:
        """Connect, and wait until the topology is declared and the broker takes messages.

        Does nothing while it is connected. With an outbox, opens the outbox first and starts the relay, which continues
        if connecting fails.

        Raises:
            OutboxError: With an outbox only: if it cannot be opened.
            BrokerUnavailable: If no host can be reached. It has ``permanent`` set if trying again cannot help.
            TopologyMismatch: If a declaration differs from the broker's.
            UsageError: If the publisher was closed.
        """
        await awaiting(self._connect())

    async def close(self, timeout: Duration = CLOSE_TIMEOUT) -> None:
        """Wait until everything is settled, for up to ``timeout`` seconds, and disconnect.

        Messages that are not settled by then are given up. Does nothing if it is already closed, or in a forked child.
        If another task is closing it, waits for that. A call after a cancelled one continues the closing.

        Raises:
            PublishError: If messages failed or were given up, and no user has seen their outcome.
            UsageError: If called on another event loop.
        """
        await awaiting(self._close(timeout))

    async def __aenter__(self) -> Self:
        """Connect.

        If no host can be reached now, the publisher keeps trying, and publishes wait. An error that further attempts
        cannot fix is raised. With an outbox, opens the outbox, and the relay connects.
        """
        try:
            await awaiting(self._enter())
        except asyncio.CancelledError:
            try:
                await self._leave(0)
            except PublishError as error:  # of a message of another task
                self._left_unconfirmed(error, asyncio.CancelledError)
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Flush and close.

        Raises unseen failures, but never in place of an exception of the body.
        """
        try:
            await self._leave(CLOSE_TIMEOUT)
        except PublishError as error:
            self._left_unconfirmed(error, exc_type)

    def __del__(self) -> None:
        if self._started_channel is not None and not self._is_closed and not self._is_forked:
            text = f"{self!r} was not closed: what is outstanding when its event loop ends is lost"
            warnings.warn(text, ResourceWarning, source=self, stacklevel=1)

    async def _leave(self, timeout: float) -> None:
        """Close. If that is cancelled, end without waiting, as no one continues the close."""
        try:
            await self.close(timeout)
        except asyncio.CancelledError:
            self._abort()
            raise

    def _abort(self) -> None:
        """Abandon outstanding messages, and disconnect without waiting."""
        if not self._is_closed:
            self._leave_open()
        for channel in (self._started_outbox_channel, self._started_channel):
            if channel is not None:
                channel.abort()
        self._release()

    def _check_usable(self) -> None:
        """Raise UsageError if the publisher is closed or used on another event loop."""
        super()._check_usable()
        for channel in (self._started_channel, self._outbox_channel):
            if channel is not None:
                channel.check_usable()

    # Messages in flight

    async def _submit(
        self, message: Message, exchange: str, routing_key: str, timeout: Duration | None, *, reported: bool = False
    ) -> AsyncConfirmation:
        """Submit a message. ``reported`` means that the caller receives the failure."""
        channel = self._channel if self._outbox is None else self._outbox_channel
        if channel is None:
            steps = self._first_confirmation(message, exchange, routing_key, timeout, reported)
            confirmation = await awaiting(steps)
        else:
            confirmation = self._new_confirmation(channel, message, exchange, routing_key, timeout, reported)
        owner = confirmation.owner
        try:
            if not owner.take(confirmation):
                await owner.wait_for_window(confirmation)
        except BaseException as error:
            self._not_accepted(confirmation, error)
            raise
        return confirmation

    async def _connect_relay(self) -> None:
        await awaiting(self._open_for_relay())

    async def _relay(
        self, row: OutboxRow, taken: Callable[[], object], done: Callable[[AsyncConfirmation], None]
    ) -> None:
        """Publish a row of the outbox. Call ``taken`` when the channel takes it."""
        channel = self._channel
        if channel is None or channel.fatal is not None:
            channel = await awaiting(self._open_for_relay())
        confirmation = self._new_relayed(channel, row)
        confirmation.callbacks = [*(confirmation.callbacks or ()), partial(done, confirmation)]
        with self._relaying(confirmation):
            if channel.take(confirmation):
                taken()
            else:
                await channel.wait_for_window(confirmation, taken)

    def _outbox_channel_to_start(self, outbox: Outbox) -> AsyncOutboxChannel:
        started = self._started_outbox_channel
        if started is not None and started.loop is asyncio.get_running_loop():
            return started
        relay = AsyncRelayPublisher(self._connect_relay, self._relay, self._kept_places)
        return AsyncOutboxChannel(outbox, relay, self._options, measured=self._registration is not None)
