"""Probes over HTTP: ``/livez``, ``/readyz``, ``/progressz`` and ``/metrics``.

`HealthServer` serves them from a daemon thread, and `HealthApp` as an ASGI application. Both call ``health()`` of
their publishers and consumers at each request, and never between requests.

Invariants:

- A probe is answered while the program is stuck. The thread of a `HealthServer` shares no loop with a publisher or
  consumer, and no lock that is held for longer than a moment. Collectors of metrics, which may block, run on another
  daemon thread.
- A client that sends nothing, sends too much, or does not read its response holds up no other client, and is dropped
  after a few seconds.
- The socket is closed in a forked child. At exit it is closed after all publishers and consumers.
- A response names hosts and reasons, and never credentials.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import Any, Final, NamedTuple, Protocol, Self, cast

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from reliable_mq._util.hooks import ExitStage, ForkStage, at_exit, each_at_fork
from reliable_mq._util.logs import get_logger
from reliable_mq._util.threads import DaemonExecutor, start_daemon
from reliable_mq._util.validation import is_text, is_whole_number
from reliable_mq.core.health import Health
from reliable_mq.errors import ConfigurationError, UsageError

__all__ = ["Health", "HealthApp", "HealthServer", "Part"]

logger = get_logger(__name__)

_PATIENCE: Final = 5.0  # seconds to receive one request, to render metrics, and to send the response
_HEAD_BYTES: Final = 16 * 1024
_CONNECTIONS: Final = 100  # at a time; the oldest connection is dropped for another one
_END_TIMEOUT: Final = 2.0  # seconds for the thread to end
_QUESTIONS: Final = {"/livez": "live", "/readyz": "ready", "/progressz": "progressing"}
_METRICS: Final = "/metrics"
_READS: Final = ("GET", "HEAD")
_TEXT, _JSON = "text/plain; charset=utf-8", "application/json"


class Part(Protocol):
    """A publisher, a consumer, or any other part of a program that reports its health."""

    def health(self) -> Health:
        """Return the state of the part. Must not block."""


class _Answer(NamedTuple):
    status: HTTPStatus
    content_type: str
    body: bytes


class _Probes:
    """The responses to probes, independent of their transport."""

    def __init__(self, *parts: Part | Callable[[], Health], registry: CollectorRegistry | None = None) -> None:
        for part in parts:
            if not callable(part) and not callable(getattr(part, "health", None)):
                raise ConfigurationError(f"a part must have a method health(), or be callable, not {part!r}")
        if not parts:
            raise ConfigurationError("parts: give at least one publisher or consumer")
        if registry is not None and not isinstance(registry, CollectorRegistry):
            raise ConfigurationError(f"registry must be a prometheus_client.CollectorRegistry, not {registry!r}")
        self._parts = parts
        self._registry = registry
        self._draining = False

    def drain(self) -> None:
        """Report "not ready" from now on, because no new work is wanted.

        Thread-safe, and safe in signal handlers.
        """
        self._draining = True

    def _answer(self, method: str, path: str, accept: str) -> _Answer:
        """Return the response to a request."""
        if method not in _READS:
            return _Answer(HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, b"only GET and HEAD\n")
        question = _QUESTIONS.get(path)
        if question is not None:
            return self._judged(question)
        if path == _METRICS and self._registry is not None:
            return _exposed(self._registry, accept)
        known = ", ".join([*_QUESTIONS, *([_METRICS] if self._registry is not None else [])])
        return _Answer(HTTPStatus.NOT_FOUND, _TEXT, f"there are {known}\n".encode())

    def _judged(self, question: str) -> _Answer:
        parts = [_report(part) for part in self._parts]
        if question == "ready" and self._draining:
            parts.append(_entry("this process", Health(True, False, True, time.time(), "draining")))
        ok = all(part[question] for part in parts)
        body = json.dumps({question: ok, "parts": parts}, indent=2).encode() + b"\n"
        return _Answer(HTTPStatus.OK if ok else HTTPStatus.SERVICE_UNAVAILABLE, _JSON, body)


def _exposed(registry: CollectorRegistry, accept: str) -> _Answer:
    """Return the metrics, as text if the ``Accept`` header is not understood."""
    try:
        encode, content_type = choose_encoder(accept)
    except Exception as error:  # noqa: BLE001  # of a header that anybody may write
        logger.debug("failed to parse the Accept header, sending text: %r", error)
        encode, content_type = choose_encoder("")
    try:
        return _Answer(HTTPStatus.OK, content_type, encode(registry))
    except (Exception, SystemExit) as error:  # noqa: BLE001  # of a collector, which is the user's own code
        logger.error("failed to render the metrics: a collector raised %s: %s", type(error).__name__, error)  # noqa: TRY400  # one line
        return _Answer(HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, b"a collector of the metrics raised an error\n")


def _report(part: Part | Callable[[], Health]) -> dict[str, Any]:
    """Return the entry of a part. A part whose health cannot be shown is not live."""
    try:
        name = repr(part)
    except (Exception, SystemExit):  # noqa: BLE001  # it is the user's own code, and the health counts
        name = object.__repr__(part)
    try:
        method: Any = getattr(part, "health", None)
        found: object = method() if callable(method) else cast("Callable[[], Health]", part)()
        if isinstance(found, Health):
            return _entry(name, found)
        reason = f"its health() returned {type(found).__name__}, not Health"
    except (Exception, SystemExit) as error:  # sys.exit() would end the probes and not the program
        logger.exception("health() of %s raised", name)
        reason = f"its health() raised {type(error).__name__}"
    return _entry(name, Health(False, False, False, time.time(), reason))


def _entry(name: str, health: Health) -> dict[str, Any]:
    return {
        "part": name,
        "live": health.live,
        "ready": health.ready,
        "progressing": health.progressing,
        "since": datetime.fromtimestamp(health.since, UTC).isoformat(timespec="seconds"),
        "reason": health.reason,
    }


class HealthServer(_Probes):
    """A server that answers probes from a daemon thread.

    Args:
        parts: Publishers, consumers, other objects with a ``health()`` method, or functions that return a `Health`.
        host: The address to listen at. Loopback is enough for probes that run a command. HTTP probes of Kubernetes and
            Prometheus need ``"0.0.0.0"`` or ``"::"``.
        port: The port to listen at; 0 for any free port.
        registry: The registry of the metrics; None to serve no metrics.

    Raises:
        ConfigurationError: If an argument is invalid.
    """

    def __init__(
        self,
        *parts: Part | Callable[[], Health],
        host: str = "127.0.0.1",
        port: int = 8080,
        registry: CollectorRegistry | None = None,
    ) -> None:
        super().__init__(*parts, registry=registry)
        if not is_text(host) or not host:
            raise ConfigurationError(f"host must be an address to listen at, not {host!r}")
        if not is_whole_number(port, 0) or port > 65535:
            raise ConfigurationError(f"port must be a whole number from 0 to 65535, not {port!r}")
        self._host, self._port = host, port
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None  # of the start
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._scrapes = DaemonExecutor("reliable_mq scrape", 1)
        self._clients: dict[asyncio.WriteTransport, None] = {}  # the oldest first

    @property
    def url(self) -> str:
        """The address of the server, as a URL without a path."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def start(self) -> None:
        """Listen, and answer probes from now on.

        Raises:
            ConfigurationError: If the server cannot listen at the address.
            OSError: If the event loop cannot be started, for example because too many files are open.
            UsageError: If the server was started before.
        """
        if self._thread is not None:
            raise UsageError("this HealthServer was started before: make another")
        try:
            listener = _listen(self._host, self._port)
        except (OSError, UnicodeError) as error:  # UnicodeError: a host name that no resolver accepts
            why = getattr(error, "strerror", None) or error
            raise ConfigurationError(f"host {self._host!r}, port {self._port}: cannot be listened at: {why}") from error
        self._port = listener.getsockname()[1]
        started = threading.Event()
        try:
            if self._registry is not None:
                self._scrapes.start()
            self._thread = start_daemon("reliable_mq health", self._serve, listener, started)
        except BaseException:  # for example, no thread can be started at the moment
            listener.close()
            raise
        self._listener = listener
        _servers.add(self)
        started.wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            self._listener = self._thread = None
            _servers.discard(self)
            raise failure

    def close(self) -> None:
        """Stop listening. Do nothing if the server is closed."""
        loop, over = self._loop, self._over
        if self._listener is None or loop is None or over is None:
            return
        self._listener = None
        _servers.discard(self)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(over.set)
        self._scrapes.close()
        if self._thread is not None:
            self._thread.join(_END_TIMEOUT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget(self) -> None:
        """Close the socket's copy in a forked child, where the thread does not exist."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.close()

    # On the thread

    def _serve(self, listener: socket.socket, started: threading.Event) -> None:
        try:
            asyncio.run(self._main(listener, started))
        except Exception as error:
            if started.is_set():
                logger.exception("the probe server at %s failed and has stopped", self.url)
            else:
                self._failure = error
        finally:
            listener.close()
            started.set()

    async def _main(self, listener: socket.socket, started: threading.Event) -> None:
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._connected, sock=listener, limit=_HEAD_BYTES)
        started.set()
        await self._over.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transport = writer.transport
        self._clients[transport] = None
        if len(self._clients) > _CONNECTIONS:
            # The oldest connection is dropped: the newest may be a probe, which takes only a moment.
            oldest = next(iter(self._clients))
            del self._clients[oldest]
            oldest.abort()
        try:
            async with asyncio.timeout(_PATIENCE):
                head = await reader.readuntil(b"\r\n\r\n")
            writer.write(await self._response(head))
            writer.close()
            async with asyncio.timeout(_PATIENCE):
                await writer.wait_closed()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as error:
            logger.debug(
                "a client of the probe server disconnected, sent no request, or did not read the response: %r", error
            )
        finally:
            self._clients.pop(transport, None)
            transport.abort()  # drop the part of a response that the client did not read

    async def _response(self, head: bytes) -> bytes:
        line, *headers = head.decode("latin-1").split("\r\n")
        match line.split(" "):
            case [method, target, version] if version.startswith("HTTP/1."):
                path, accept = target.partition("?")[0], _header(headers, "accept")
                if path == _METRICS and method in _READS and self._registry is not None:
                    answer = await self._scraped(self._registry, accept)
                else:
                    answer = self._answer(method, path, accept)
            case _:
                method, answer = "GET", _Answer(HTTPStatus.BAD_REQUEST, _TEXT, b"this is no HTTP/1 request\n")
        status = answer.status
        return (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(answer.body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
        ).encode() + (b"" if method == "HEAD" else answer.body)

    async def _scraped(self, registry: CollectorRegistry, accept: str) -> _Answer:
        """Return the metrics, or an error while a collector does not return."""
        if not self._scrapes.hanging:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE):
                    return await self._scrapes.future(partial(_exposed, registry, accept))
        return _Answer(HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, b"a collector of the metrics has not returned\n")


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _header(headers: list[str], wanted: str) -> str:
    for header in headers:
        name, _, value = header.partition(":")
        if name.lower() == wanted:
            return value.strip()
    return ""


class HealthApp(_Probes):
    """The probes as an ASGI application, served alone or mounted into another one.

    The application answers on the event loop of its server. While something blocks that loop, no probe is answered,
    which is a sign of the problem as well.

    Args:
        parts: The same as for `HealthServer`.
        registry: The registry of the metrics; None to serve no metrics.

    Raises:
        ConfigurationError: If an argument is invalid.
    """

    async def __call__(self, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        """Serve one request, as ASGI defines it."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        if scope["type"] != "http":
            raise UsageError(f"probes are asked by HTTP, not by {scope['type']}")
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        accept = next((value for name, value in scope["headers"] if name == b"accept"), b"")
        answer = self._answer(scope["method"], path, accept.decode("latin-1"))
        headers = [
            (b"content-type", answer.content_type.encode()),
            (b"content-length", str(len(answer.body)).encode()),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": answer.status.value, "headers": headers})
        body = b"" if scope["method"] == "HEAD" else answer.body
        await send({"type": "http.response.body", "body": body})


async def _live(receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    """Acknowledge the start and the end of the server; nothing else is needed."""
    while True:
        event = (await receive())["type"]
        await send({"type": f"{event}.complete"})
        if event == "lifespan.shutdown":
            return


# The thread does not exist in a forked child, whose copy of the socket would keep the port open after the parent's end.
_servers = each_at_fork(ForkStage.RELEASE, HealthServer._forget)  # noqa: SLF001  # of this module


def _close_at_exit() -> None:
    for server in list(_servers):
        server.close()


at_exit(ExitStage.PROBES, _close_at_exit)
