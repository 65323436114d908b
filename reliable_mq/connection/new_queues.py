"""The new queues of this process, by broker and virtual host.

All connections of the process share these records. They are thread-safe, and safe in a forked child, which keeps its
parent's records.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from reliable_mq._util.hooks import ForkStage, at_fork
from reliable_mq.core.new_queues import NewQueues

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from reliable_mq.core.channel_setup import ServerInfo


class SharedNewQueues(NewQueues):
    """A thread-safe `NewQueues`."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def use(self, grace: float) -> None:
        """Keep the record of each queue for at least ``grace`` seconds."""
        with self.lock:
            self.longest = max(self.longest, grace)

    def begin(self, names: Iterable[str]) -> None:
        with self.lock:
            super().begin(names)

    def end(self, names: Iterable[str], now: float) -> None:
        with self.lock:
            super().end(names, now)

    def made(self, names: Iterable[str], now: float) -> None:
        with self.lock:
            super().made(names, now)

    def prove(self, broker: str, grace: float, moment: float) -> None:
        with self.lock:
            super().prove(broker, grace, moment)

    def new(self, proven: float, grace: float) -> list[str]:
        with self.lock:
            return super().new(proven, grace)

    def final_at(
        self, exchange: str, routing_key: str, now: float, proven: float, grace: float, *, copied: bool
    ) -> float | None:
        with self.lock:
            return super().final_at(exchange, routing_key, now, proven, grace, copied=copied)

    def forked(self, now: float) -> None:
        """Renew the lock and end running declarations in a forked child.

        The parent's threads do not exist there.
        """
        self.lock = threading.Lock()
        self.given_up(now)


class QueueRecord:
    """A record of the new queues of one connection. On its loop only."""

    def __init__(self, virtual_host: str, grace: float) -> None:
        self.queues: NewQueues = NewQueues()  # on the broker of the last connection
        self._virtual_host = virtual_host
        self._grace = grace  # the seconds for which a queue is new; 0 to record nothing
        self._server: ServerInfo | None = None  # of the last ready channel; each connection has another object
        self._new_before: list[str] = []  # the new queues when the channel was lost

    def listener_for(self, server: ServerInfo) -> QueueRecord | None:
        """Return the listener for the queues that a set-up declares on this broker.

        Returns None if nothing is recorded.
        """
        if not self._grace:
            return None
        # Brokers whose cluster has no name share one record, which only costs time.
        queues = _registers.setdefault((server.cluster_name, self._virtual_host), SharedNewQueues())
        queues.use(self._grace)
        self.queues = queues
        return self

    def begin(self, names: Collection[str]) -> None:
        """Record queues that are about to be declared."""
        self.queues.begin(names)

    def end(self, names: Collection[str]) -> None:
        """Record queues that exist now, or may exist."""
        self.queues.end(names, time.monotonic())

    def ready(self, server: ServerInfo) -> bool:
        """Record a ready channel; return whether its connection has replaced another one.

        A broker that was killed in between registers its new queues again when it starts, so they are new again.
        """
        before, self._server = self._server, server
        replaced = before is not None and before is not server
        if replaced:
            self.queues.made(self._new_before, time.monotonic())
        self._new_before = []
        return replaced

    def lost(self, proven: float) -> None:
        """Record the loss of the channel.

        Queues that were made more than the grace before ``proven`` are no longer new.
        """
        self._new_before = self.queues.new(proven, self._grace)


_registers: dict[tuple[str, str], SharedNewQueues] = {}


def _after_fork() -> None:
    for queues in _registers.values():
        queues.forked(time.monotonic())


at_fork(ForkStage.RENEW, _after_fork)
