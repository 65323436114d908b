"""A link to a broker, on pika's connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliable_mq.connection.errors import Aborted
from reliable_mq.connection.link import BaseLink
from reliable_mq.connection.pika_driver.connection import Connection, connection_parameters
from reliable_mq.connection.pika_driver.errors import broker_error

if TYPE_CHECKING:
    from reliable_mq.connection.interfaces import ConnectAttempt, LinkEvents
    from reliable_mq.connection.pika_driver.loop import EventLoop
    from reliable_mq.settings import Endpoint


class Link(BaseLink):
    """An attempt to connect, and the connection if it succeeds. On its loop only."""

    def __init__(self, loop: EventLoop, attempt: ConnectAttempt, events: LinkEvents) -> None:
        super().__init__(attempt, events)
        self._over = False
        self._connection = Connection(connection_parameters(attempt), loop, self)
        self.write = self._connection.send
        self.write_buffer_size = self._connection.buffered

    @property
    def bytes_received(self) -> int:
        return int(self._connection.bytes_received)

    @property
    def peer(self) -> Endpoint | None:
        return self._connection.peer()

    def close(self) -> None:
        if self._over:
            return
        if self._connection.is_open:
            self.channels.close(self._close_connection)
        elif not self._connection.is_closing:
            self.abort("closed while it was opening")

    def abort(self, reason: str) -> None:
        if not self._over and self.aborted is None:
            self.aborted = Aborted(reason)
            self.reader.reset()
            self._connection.abort(self.aborted)

    def _close_connection(self) -> None:
        if self._connection.is_open:
            self._connection.close()

    def closed(self, connection: Connection, cause: BaseException | None) -> None:
        """Report the end of the connection, or of the attempt to connect."""
        if self._over:
            return
        self._over = True
        error = broker_error(
            connection.broken_by or cause,
            self.endpoint,
            self.closed_with,
            opened=connection.was_open,
            addresses=connection.addresses,
        )
        self.report_closed(error)

    def drained(self) -> None:
        """Report that the write buffer is empty again."""
        self._events.link_drained(self)

    def _pass_on(self, frame: bytes) -> None:
        self._connection.process(frame)
