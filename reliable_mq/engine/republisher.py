"""The confirmed publishing of dead letters and retries for a consumer.

The publisher has its own connection, because the broker blocks publishing connections under an alarm and the consumer's
connection must keep acking. It is opened with the first publish. Each API adds the calls.

Invariants: the outcome of each publish is reported exactly once, unless asyncio's loop ends first. Nothing blocks the
caller of `put`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from reliable_mq._util.logs import get_logger
from reliable_mq.core.consumer.delivery import message_names
from reliable_mq.core.statistics import TokenStatistics
from reliable_mq.errors import PublishError, ReliableMQError
from reliable_mq.message import Message

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.core.health import PublisherSigns
    from reliable_mq.core.retry.dead_letters import RepublishRequest
    from reliable_mq.engine.steps import Steps
    from reliable_mq.tracing.consuming import ConsumerTracer

logger = get_logger(__name__)


class BaseRepublisher:
    """A republisher that publishes dead letters and retries with confirms.

    Args:
        publisher: A publisher that is not open yet. ``close`` closes it.
        report: A callable that receives the outcome of each publish once, on any thread: None after a confirm, else an
            error.

    Attributes:
        tracer: The consumer's tracer, for the context of an attempt. None without tracing.
    """

    def __init__(self, publisher: Any, report: Callable[[RepublishRequest, ReliableMQError | None], None]) -> None:
        self._publisher = publisher
        self._report = report
        self.tracer: ConsumerTracer | None = None

    def put(self, republish: RepublishRequest) -> None:
        """Publish a message. Does not block."""
        raise NotImplementedError

    def close(self, timeout: float) -> Any:
        """Close the publisher. Originals of publishes not confirmed in time stay unacked."""
        raise NotImplementedError

    def signs(self, now: float, work: int) -> PublisherSigns | None:
        """Return the signs of health, or None before the first connection attempt.

        Thread-safe. Does not wait.

        Args:
            now: The current time in seconds, on the monotonic clock.
            work: The number of messages to be published.
        """
        publisher = self._publisher
        channel = publisher._started_channel  # noqa: SLF001  # no user has this publisher
        if channel is None or not channel.tried:
            return None
        signs: PublisherSigns = channel.signs(now, publisher._options.confirm_timeout, None)  # noqa: SLF001
        return replace(signs, work=max(signs.work, work))

    @property
    def tokens(self) -> TokenStatistics:
        """The counts of renewed tokens. Thread-safe."""
        channel = self._publisher._started_channel  # noqa: SLF001  # no user has this publisher
        tokens: TokenStatistics = TokenStatistics() if channel is None else channel.tokens
        return tokens

    def _publish(self, republish: RepublishRequest) -> Steps[None]:
        try:
            message = Message.from_wire(republish.body, republish.properties)
            tracer = self.tracer
            with nullcontext() if tracer is None else tracer.attempt(republish.delivery):
                confirmation = yield self._publisher.submit(message, routing_key=republish.routing_key)
            confirmation.add_done_callback(partial(self._settled, republish))
        except Exception as error:  # noqa: BLE001  # reported
            self._not_submitted(republish, error)

    def _close_publisher(self, timeout: float) -> Steps[None]:
        try:
            yield self._publisher.close(timeout)
        except PublishError:
            logger.exception("some dead letters were not confirmed; their originals stay in the queue")

    def _settled(self, republish: RepublishRequest, confirmation: Any) -> None:
        self._report(republish, confirmation.exception())

    def _not_submitted(self, republish: RepublishRequest, error: Exception) -> None:
        if not isinstance(error, ReliableMQError):
            logger.error("failed to publish the copy of %s", message_names([republish.delivery]), exc_info=error)
            error = PublishError(f"it cannot be published: {error!r}")
        self._report(republish, error)
