"""Publishing under faults: load in the background, and a record of every outcome."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from reliable_mq import Message, PublishError
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from types import TracebackType

    from reliable_mq import Confirmation, Publisher
    from reliable_mq.testing.audit import Audit


def book(account: Audit, confirmation: Confirmation, timeout: float = 60) -> PublishError | None:
    """Wait for the outcome of a publish, record it, and return its error."""
    error = confirmation.exception(timeout)
    if error is None:
        account.confirmed(confirmation.message_id)
    elif not error.may_have_arrived:
        account.failed(confirmation.message_id)
    return error


def submit(
    account: Audit, publisher: Publisher, routing_key: str, body: bytes = b"x" * 200, *, timeout: float | None = None
) -> Confirmation:
    """Record the attempt, and submit one message."""
    message = Message(body)
    account.attempted(message.message_id)
    return publisher.submit(message, routing_key=routing_key, timeout=timeout)


class Load:
    """A thread that publishes messages as fast as the window allows.

    It ends at `stop`, at the end of the block, or after `count` messages.

    Args:
        account: Where attempts and outcomes are recorded.
        publisher: Publishes the messages.
        routing_key: The name of the queue.
        count: The number of messages after which the load ends by itself.
        body: The body of each message.

    Attributes:
        errors: The errors of the messages that failed. Complete at the end of the block.
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
        """Submit no more messages."""
        self._stop.set()

    @property
    def confirmed(self) -> int:
        """The number of messages that the publisher has reported as confirmed so far."""
        return self._publisher.statistics.confirmed

    def wait_for_confirms(self, more: int) -> None:
        """Wait until the publisher has reported this many more messages as confirmed."""
        count = self.confirmed + more
        wait_until(lambda: self.confirmed >= count, timeout=120, what=lambda: f"{self.confirmed} of {count} confirms")

    def _run(self) -> None:
        try:
            for _ in range(self._count):
                if self._stop.is_set():
                    return
                self._confirmations.append(submit(self._account, self._publisher, self._routing_key, self._body))
        except BaseException as error:  # passed to the test
            self._failure = error
