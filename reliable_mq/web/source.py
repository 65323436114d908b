"""The queues of a page: their names, depths, and a `DeadLetterQueue` for each.

Thread-safe. Names and depths are kept for a few seconds, since every page that is open asks for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from reliable_mq.deadletters import DeadLetterQueue
from reliable_mq.deadletters.queue import depths
from reliable_mq.errors import ConfigurationError, ReliableMQError
from reliable_mq.topology import Queue
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from reliable_mq.settings import Credentials, CredentialsCallback
    from reliable_mq.tls import TLSOptions

__all__ = ["Source"]

_DEPTHS_KEPT: Final = 2.0  # seconds
_NAMES_KEPT: Final = 15.0  # seconds
_REMEMBERED: Final = 50  # queues that were opened by their names


class Source:
    """Where dead letters come from.

    Args:
        url: of the broker.
        queues: names, or queues whose dead-letter queues are meant; or a function that returns names, which may raise
            `ReliableMQError`.
        any_queue: whether a queue may be opened by its name, too.
        credentials, tls: as for ``Publisher``.

    Raises:
        ConfigurationError: an argument is wrong; the message names it.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        queues: Sequence[Queue | str] | Callable[[], Sequence[str]],
        *,
        any_queue: bool,
        credentials: Credentials | CredentialsCallback | None,
        tls: TLSOptions | None,
    ) -> None:
        self._settings = parse_url(url, tls=tls, credentials=credentials)
        self.broker = str(self._settings)
        self._url = url
        self._credentials = credentials
        self._tls = tls
        self._any_queue = any_queue
        self._find = queues if callable(queues) else None
        self._lock = threading.Lock()
        self._names: list[str] = [] if callable(queues) else [_name(queue) for queue in queues]
        self._names_until = 0.0
        self._opened: dict[str, None] = {}
        self._depths: dict[str, int | None] = {}
        self._depths_until = 0.0
        self.any_queue = any_queue
        self.problem = ""  # with finding queues; shown above the list
        if not any_queue and not callable(queues) and not self._names:
            raise ConfigurationError("queues must name at least one, or any_queue=True let users name them")

    def open(self, queue: str) -> DeadLetterQueue:
        """Return a queue, not connected yet."""
        return DeadLetterQueue(self._url, queue, credentials=self._credentials, tls=self._tls)

    def allows(self, queue: str) -> bool:
        """Whether this page may open the queue. May block for a search of queues."""
        return bool(queue) and (self._any_queue or queue in self.names())

    def remember(self, queue: str) -> None:
        """List a queue that was opened by its name."""
        with self._lock:
            self._opened[queue] = None
            while len(self._opened) > _REMEMBERED:
                del self._opened[next(iter(self._opened))]

    def names(self) -> list[str]:
        """Return the names of the queues, each once. May block for a search."""
        with self._lock:
            due = self._find is not None and time.monotonic() >= self._names_until
            if due:
                self._names_until = time.monotonic() + _NAMES_KEPT
        if due and self._find is not None:
            try:
                found, problem = sorted(self._find()), ""
            except ReliableMQError as error:
                found, problem = self._names, str(error)
            with self._lock:
                self._names, self.problem = found, problem
        with self._lock:
            return [*dict.fromkeys([*self._names, *self._opened])]

    def depths(self) -> dict[str, int | None]:
        """Return the number of ready messages of each queue. Blocks for a connection.

        It is None if there is no such queue.

        Raises:
            BrokerUnavailable: no host could be reached, or none accepted the login.
        """
        names = self.names()
        with self._lock:
            if time.monotonic() < self._depths_until and self._depths.keys() >= set(names):
                return {name: self._depths[name] for name in names}
        found = depths(self._settings, names)
        with self._lock:
            self._depths, self._depths_until = found, time.monotonic() + _DEPTHS_KEPT
        return found

    def changed(self) -> None:
        """Forget the depths: a queue was changed."""
        with self._lock:
            self._depths_until = 0.0


def _name(queue: Queue | str) -> str:
    name = queue.dead_letter_name if isinstance(queue, Queue) else queue
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"queues must hold names, or queues that have a dead-letter queue, not {queue!r}")
    return name
