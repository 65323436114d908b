"""HTTP for ``reliable-mq web``, with limits that uvicorn lacks.

Invariants:

- A connection is closed if no complete request head arrives within `HEAD_TIMEOUT` seconds, or if its request is not
  complete `BODY_TIMEOUT` seconds after the head.
- A connection is closed if its client does not read a part of a response within `WRITE_TIMEOUT` seconds. Until it has
  read that part, the other two deadlines do not apply.
- Above `CONNECTIONS` connections, the one that has waited longest for its client (to send a head or a body, or to read)
  is closed, so that clients that stop midway do not exclude others. If none waits, uvicorn's ``limit_concurrency``
  responds with 503.
"""

from __future__ import annotations

import asyncio
import queue as queues
import signal
import socket
from typing import Any, ClassVar, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from reliable_mq._util.signals import next_signal
from reliable_mq._util.threads import start_daemon
from reliable_mq.errors import ConfigurationError

CONNECTIONS: Final = 100
HEAD_TIMEOUT: Final = 10.0  # seconds
BODY_TIMEOUT: Final = 60.0  # seconds
WRITE_TIMEOUT: Final = 60.0  # seconds
_READING: Final = "the client reads a response"


class BoundedHTTP(H11Protocol):
    """The protocol of one connection."""

    _waiting: ClassVar[dict[BoundedHTTP, None]] = {}  # connections that wait for their clients, the longest first
    _deadline: asyncio.TimerHandle | None = None
    _awaited: object = None  # the part of a request to which the deadline applies, or `_READING`

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # so that the end of a response is awaited, too
        if len(self.connections) > CONNECTIONS:
            longest = next(iter(self._waiting), None)
            if longest is not None:
                longest.drop()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_wait()
        self._wait_for(_READING, WRITE_TIMEOUT)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_wait()
        self._watch()

    def drop(self) -> None:
        """Close the connection in any state."""
        self._end_wait()
        self.connections.discard(self)
        self.transport.abort()

    def _watch(self) -> None:
        """Set the deadline for the client's next message, unless it is set."""
        state = self.conn.their_state
        if self._awaited in (_READING, state):  # `resume_writing` continues
            return
        self._end_wait()
        timeout = {h11.IDLE: HEAD_TIMEOUT, h11.SEND_BODY: BODY_TIMEOUT}.get(state)
        if timeout is not None:
            self._wait_for(state, timeout)

    def _wait_for(self, part: object, timeout: float) -> None:
        self._awaited = part
        self._deadline = self.loop.call_later(timeout, self.drop)
        self._waiting[self] = None

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._awaited = None
        self._waiting.pop(self, None)


def serve(app: Any, listening: socket.socket, grace: float) -> int:
    """Serve until a signal arrives and return its number.

    Requests that are running at that time have ``grace`` seconds.
    """
    config = uvicorn.Config(
        app,
        http=BoundedHTTP,
        limit_concurrency=CONNECTIONS + 1,  # that many exist if all of them are busy
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        lifespan="off",
    )
    server = uvicorn.Server(config)
    received: queues.SimpleQueue[int] = queues.SimpleQueue()  # a signal handler may use this queue
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, lambda number, _frame: received.put(number))

    def run() -> None:
        try:
            server.run(sockets=[listening])
        finally:
            received.put(0)

    # Outside of the main thread, uvicorn does not handle signals.
    serving = start_daemon("web server", run)
    number = next_signal(received)
    server.should_exit = True
    serving.join(grace)
    if number == 0:
        raise ConfigurationError("the server ended unexpectedly: -v shows its log")
    return number
