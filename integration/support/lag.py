"""Measures how late threads run, and brokers answer, on a busy machine."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from reliable_mq.testing import VirtualHost

_STEP = 0.02  # seconds between two readings of the clock
_ASKED_EVERY = 10  # steps from one question to the broker to the next
_QUEUE = "lag"


class Lag:
    """A thread that wakes up every few milliseconds and records how late it was.

    A context manager. With a virtual host, the thread also publishes to a queue of its own now and then, and the time
    until the confirm counts as a delay: the broker may run late as well, or wait for its disk.

    Attributes:
        worst: The longest delay so far, in seconds.
    """

    def __init__(self, vhost: VirtualHost | None = None) -> None:
        self.worst = 0.0
        self._vhost = vhost
        self._connection: Any = None
        self._channel: Any = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lag")

    def __enter__(self) -> Self:
        if self._vhost is not None:
            self._connection = self._vhost.connect()
            self._channel = self._connection.channel()
            self._channel.confirm_delivery()
            arguments = {"x-queue-type": "quorum", "x-max-length": 1}
            self._channel.queue_declare(_QUEUE, durable=True, arguments=arguments)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()
        if self._connection is not None:
            self._channel.queue_delete(_QUEUE)
            self._connection.close()

    def _run(self) -> None:
        for step in itertools.count():
            due = time.monotonic() + _STEP
            over = self._over.wait(_STEP)
            if self._channel is not None and step % _ASKED_EVERY == 0:
                self._channel.basic_publish("", _QUEUE, b"")
            self.worst = max(self.worst, time.monotonic() - due)
            if over:
                return
