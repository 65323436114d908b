"""Publishes dead letters on a connection of their own, confirmed, and says of each whether it was.

On a connection of their own, since the broker blocks publishing connections under an alarm, and a consumer's must go on
acking. On a thread of their own, since opening that connection and a full window block.

Invariants: each dead letter that is put is answered exactly once; nothing blocks the caller; the connection is opened
with the first dead letter.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from reliable_mq.core.ages import names
from reliable_mq.errors import PublishError, ReliableMQError
from reliable_mq.message import Message
from reliable_mq.sync.callbacks import CallbackThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.core.deadletters import Republish
    from reliable_mq.sync.confirmation import Confirmation
    from reliable_mq.sync.publisher import Publisher

__all__ = ["Republisher"]

logger = logging.getLogger(__name__)


class Republisher:
    """See the module. Thread-safe.

    Args:
        publisher: not opened yet; closed by `close`.
        answer: told of each dead letter: None where it is confirmed, else why not. Called on threads of this object.
    """

    def __init__(
        self, publisher: Publisher, answer: Callable[[Republish, ReliableMQError | None], None], name: str
    ) -> None:
        self._publisher = publisher
        self._answer = answer
        self._thread = CallbackThread(name)

    def put(self, republish: Republish) -> None:
        """Publish one. Does not block."""
        self._thread.put(partial(self._publish, republish))

    def close(self, timeout: float) -> None:
        """Give up what is not confirmed within ``timeout`` seconds; its originals stay unacked."""
        try:
            self._publisher.close(timeout)
        except PublishError:
            logger.exception("dead letters were given up; their originals stay in the queue")
        self._thread.stop()
        self._thread.join(timeout)

    def _publish(self, republish: Republish) -> None:
        try:
            message = Message.from_wire(republish.body, republish.properties)
            confirmation = self._publisher.submit(
                message, exchange=republish.exchange, routing_key=republish.routing_key
            )
        except ReliableMQError as error:
            self._answer(republish, error)
        except Exception as error:
            logger.exception("the copy of %s cannot be published", names([republish.delivery]))
            self._answer(republish, PublishError(f"it cannot be published: {error!r}"))
        else:
            confirmation.add_done_callback(partial(self._settled, republish))

    def _settled(self, republish: Republish, confirmation: Confirmation) -> None:
        self._answer(republish, confirmation.exception())
