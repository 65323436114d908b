"""Publishing under faults: load in the background, and every outcome in the account."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from reliable_mq import Message, PublishError

if TYPE_CHECKING:
    from types import TracebackType

    from reliable_mq import Confirmation, Publisher
    from reliable_mq.testing.audit import Audit


def book(account: Audit, confirmation: Confirmation, timeout: float = 60) -> PublishError | None:
    """Wait for the outcome of a publish, book it, and return its error."""
    error = confirmation.exception(timeout)
    if error is None:
        account.confirmed(confirmation.message_id)
    elif not error.may_have_arrived:
        account.failed(confirmation.message_id)
    return error


def submit(account: Audit, publisher: Publisher, routing_key: str, body: bytes = b"x" * 200) -> Confirmation:
    """Submit one message and book the attempt first."""
    message = Message(body)
    account.attempted(message.message_id)
    return publisher.submit(message, routing_key=routing_key)


class Load:
    """Messages published as fast as the window lets them, from a thread, until `stop` or the end of the block.

    Args:
        account: where attempts and outcomes are booked.
        publisher: to publish with.
        routing_key: of the queue.
        count: after how many it ends by itself.
        body: of each message.

    Attributes:
        errors: of the messages that failed; complete at the end of the block.
    """

    def __init__(
        self,
        account: Audit,
        publisher: Publisher,
        routing_key: str,
        *,
        count: int = 1_000_000,
        body: bytes = b"x" * 200,
    ) -> None:
        self.errors: list[PublishError] = []
        self._account = account
        self._publisher = publisher
        self._routing_key = routing_key
        self._count = count
        self._body = body
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._confirmations: list[Confirmation] = []
        self._thread = threading.Thread(target=self._run, name="load")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self._thread.join(120)
        assert not self._thread.is_alive(), "a publish hangs"
        if self._failure is not None and exc_type is None:
            raise self._failure
        for confirmation in self._confirmations:
            error = book(self._account, confirmation)
            if error is not None:
                self.errors.append(error)

    def stop(self) -> None:
        """Submit no more."""
        self._stop.set()

    @property
    def confirmed(self) -> int:
        """How many the publisher has reported as confirmed so far."""
        return self._publisher.statistics.confirmed

    def _run(self) -> None:
        try:
            for _ in range(self._count):
                if self._stop.is_set():
                    return
                self._confirmations.append(submit(self._account, self._publisher, self._routing_key, self._body))
        except BaseException as error:  # handed to the test
            self._failure = error
