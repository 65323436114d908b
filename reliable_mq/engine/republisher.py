"""Publish dead letters and retries for a consumer, confirmed.

The publisher has a connection of its own, since the broker blocks publishing connections under an alarm. An API adds
the calls. Invariant: the outcome of each publish is reported exactly once.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from reliable_mq.core.consumer.delivery import message_names
from reliable_mq.errors import PublishError, ReliableMQError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from reliable_mq.core.retry.dead_letters import RepublishRequest
    from reliable_mq.tracing.consuming import ConsumerTracer

__all__ = ["BaseRepublisher"]

logger = logging.getLogger(__name__)


class BaseRepublisher:
    """Publishes dead letters and retries, confirmed. An API adds the calls.

    Args:
        publisher: not opened yet; closed by ``close``.
        report: called once with the outcome of each publish, on any thread: None if it is confirmed, else an error.

    Attributes:
        tracer: of the consumer, for the context of an attempt; None without traces.
    """

    def __init__(self, publisher: Any, report: Callable[[RepublishRequest, ReliableMQError | None], None]) -> None:
        self._publisher = publisher
        self._report = report
        self.tracer: ConsumerTracer | None = None

    def put(self, republish: RepublishRequest) -> None:
        """Publish a message. Does not block."""
        raise NotImplementedError

    def _attempt(self, republish: RepublishRequest) -> AbstractContextManager[object]:
        """Return a block in the context of the last attempt."""
        return nullcontext() if self.tracer is None else self.tracer.attempt(republish.delivery)

    def _settled(self, republish: RepublishRequest, confirmation: Any) -> None:
        self._report(republish, confirmation.exception())

    def _not_submitted(self, republish: RepublishRequest, error: Exception) -> None:
        if not isinstance(error, ReliableMQError):
            logger.error("the copy of %s cannot be published", message_names([republish.delivery]), exc_info=error)
            error = PublishError(f"it cannot be published: {error!r}")
        self._report(republish, error)
