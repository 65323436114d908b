"""The asyncio driver without a broker: its mapping of errors, and its event loop."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections import deque
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import aiormq.exceptions as aiormq_errors
import pytest

from reliable_mq.connection.aiormq_driver.connection import Connection, Transports
from reliable_mq.connection.aiormq_driver.errors import MechanismNotOffered, link_error
from reliable_mq.connection.aiormq_driver.link import Link, LinkState, _Protocol
from reliable_mq.connection.aiormq_driver.loop import EventLoop
from reliable_mq.connection.errors import Aborted, unreachable
from reliable_mq.connection.interfaces import ConnectAttempt, ConnectCredentials
from reliable_mq.errors import BrokerUnavailable
from reliable_mq.settings import ConnectionSettings, Credentials, Endpoint

ENDPOINT = Endpoint("broker.example", 5671)


def certificate_error() -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_message = "unable to get local issuer certificate"
    return error


REFUSED = "::1", ConnectionRefusedError(111, "Connect call failed ('::1', 5671, 0, 0)")
FORGED = "192.0.2.1", certificate_error()
UNVERIFIED = "the certificate does not verify: unable to get local issuer certificate"


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("cause", "opened", "text", "permanent"),
    [
        (ConnectionRefusedError(111, "Connection refused"), False, "Connection refused", False),
        (ConnectionRefusedError(111, "Connect call failed ('::1', 5672)"), False, "Connection refused", False),
        (OSError("the host name has no address"), False, "the host name has no address", False),
        (
            caused(aiormq_errors.AMQPConnectionError("x"), ConnectionResetError(104, "Connection reset by peer")),
            False,
            "Connection reset by peer",
            False,
        ),
        (socket.gaierror(-2, "Name or service not known"), False, "does not resolve: Name or service", False),
        (TimeoutError(), False, "no answer in time", False),
        (certificate_error(), False, "does not verify: unable to get local issuer certificate", True),
        (ssl.SSLError(1, "wrong version number"), False, "TLS failed", False),
        (MechanismNotOffered("the broker does not offer SASL mechanism EXTERNAL"), False, "mechanism EXTERNAL", True),
        (aiormq_errors.ProtocolSyntaxError(), False, "another version of the protocol", False),
        (aiormq_errors.InvalidFrameError("Expected OpenOk"), False, "during the handshake: Expected OpenOk", False),
        (aiormq_errors.AMQPConnectionError("eof"), False, "closed before the handshake", False),
        (aiormq_errors.AMQPConnectionError("eof"), True, "connection was closed", False),
        (Aborted("our reason"), True, "our reason", False),
        (asyncio.CancelledError(), True, "connection was closed", False),
        (ValueError("odd"), True, "connection lost: ValueError", False),
        (None, True, "connection was closed", False),
    ],
)
def test_an_aiormq_error_becomes_one_that_names_the_host(
    cause: BaseException | None, opened: bool, text: str, permanent: bool
) -> None:
    error = link_error(cause, ENDPOINT, None, opened=opened)
    assert isinstance(error, BrokerUnavailable)
    assert str(error).startswith("broker.example:5671: ")
    assert text in str(error)
    assert error.permanent is permanent


@pytest.mark.parametrize(
    ("failures", "text", "permanent"),
    [
        ([REFUSED], "Connection refused (at ::1)", False),
        ([REFUSED, ("127.0.0.1", ConnectionRefusedError(111, "x"))], "Connection refused (at ::1, 127.0.0.1)", False),
        ([REFUSED, FORGED], f"Connection refused (at ::1); {UNVERIFIED} (at 192.0.2.1)", False),
        ([FORGED, REFUSED], f"{UNVERIFIED} (at 192.0.2.1); Connection refused (at ::1)", False),
        ([FORGED], f"{UNVERIFIED} (at 192.0.2.1)", True),
        ([("broker.example", REFUSED[1])], "Connection refused", False),  # the host is an address
    ],
)
def test_each_address_of_a_host_and_its_failure_are_named(
    failures: list[tuple[str, OSError]], text: str, permanent: bool
) -> None:
    """Certificates that do not verify are permanent only if no address fails in another way."""
    error = link_error(unreachable(ENDPOINT.host, failures), ENDPOINT, None, opened=False)
    assert str(error) == f"{ENDPOINT}: {text}"
    assert error.permanent is permanent
    assert error.__cause__ is failures[-1][1]


@pytest.mark.parametrize(
    ("code", "opened", "permanent"), [(403, False, True), (530, False, True), (320, True, False), (403, True, False)]
)
def test_only_the_broker_itself_can_refuse_for_good(code: int, opened: bool, permanent: bool) -> None:
    guess = aiormq_errors.ProbableAuthenticationError("aiormq has lost the code")
    error = link_error(guess, ENDPOINT, (code, "WHY"), opened=opened)
    assert f"{code} WHY" in str(error)
    assert error.permanent is permanent


def test_the_longest_heartbeat_does_not_switch_heartbeats_off() -> None:
    """aiormq makes 0 of a longer one."""

    async def main() -> float:
        settings = ConnectionSettings(endpoints=(ENDPOINT,), credentials=Credentials("u", "p"), heartbeat=65534)
        secrets = ConnectCredentials(settings.credentials, None)
        attempt = ConnectAttempt(ENDPOINT, settings, secrets, "name")
        return Connection(attempt, Transports(dict)).heartbeat_timeout

    assert asyncio.run(main()) == 65534


def test_callback_exceptions_reach_the_handler_and_stop_nothing() -> None:
    async def main() -> tuple[list[str], list[str]]:
        errors: list[str] = []
        ran: list[str] = []
        loop = EventLoop(lambda error: errors.append(str(error)))

        def fail(text: str) -> None:
            raise RuntimeError(text)

        loop.call_soon(lambda: fail("call"))
        loop.call_soon(lambda: ran.append("call"))
        loop.call_later(0, lambda: fail("timer"))
        loop.call_later(0, lambda: ran.append("cancelled")).cancel()
        done = asyncio.Event()
        thread = threading.Thread(target=loop.call_soon, args=(lambda: loop.call_later(0.01, done.set),))
        thread.start()
        await asyncio.wait_for(done.wait(), 5)
        thread.join()
        return errors, ran

    assert asyncio.run(main()) == (["call", "timer"], ["call"])


def test_callbacks_have_the_context_in_which_the_loop_was_made() -> None:
    """Otherwise a timer that a handler's result sets would keep the variables of that handler."""
    order: ContextVar[str] = ContextVar("order", default="")
    seen: list[str] = []

    def note() -> None:
        seen.append(order.get())
        order.set("a callback's")

    async def main() -> None:
        loop = EventLoop(lambda error: pytest.fail(str(error)))
        order.set("a handler's")
        loop.call_soon(note)
        loop.call_later(0, note)
        await asyncio.to_thread(loop.call_soon, note)
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert seen == ["", "", ""]


def test_a_call_for_a_loop_that_is_closed_does_nothing() -> None:
    async def make() -> EventLoop:
        return EventLoop(lambda _: None)

    asyncio.run(make()).call_soon(lambda: None)


class _Resetting(socket.socket):
    """Sends the first data in two parts, then loses the peer.

    The event loop sends the rest with ``send``, and from Python 3.12 on with ``sendmsg``.
    """

    sent = 0

    def send(self, data: Any, flags: int = 0, /) -> int:
        self.sent += 1
        if self.sent > 2:
            raise ConnectionResetError(104, "Connection reset by peer")
        return super().send(data[:100] if self.sent == 1 else data, flags)

    def sendmsg(self, buffers: Any, *_: Any) -> int:
        return self.send(b"".join(buffers))


class _Writing:
    """A link that writes more as soon as there is space."""

    def __init__(self) -> None:
        self.lost: list[BaseException | None] = []
        self.ended = asyncio.Event()

    def _transport_made(self, transport: asyncio.Transport, _stream: asyncio.StreamReader) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(10, 0)

    def _drained(self) -> None:
        self.transport.write(b"more")

    def _transport_lost(self, _stream: asyncio.StreamReader, cause: BaseException | None) -> None:
        self.lost.append(cause)
        self.ended.set()


def test_a_peer_gone_when_writing_resumes_is_lost_only_once() -> None:
    """asyncio resumes writing before it checks whether the transport is closing."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        complaints: list[object] = []
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        peer, ours = socket.socketpair()
        link = _Writing()
        stream = asyncio.StreamReader()
        with peer:
            sock = _Resetting(fileno=ours.detach())
            transport, _ = await loop.create_connection(lambda: _Protocol(link, stream, loop), sock=sock)  # type: ignore[arg-type]
            transport.write(b"x" * 1000)
            await asyncio.wait_for(link.ended.wait(), 10)
            await asyncio.sleep(0)
        assert [type(error) for error in link.lost] == [ConnectionResetError]
        assert complaints == []

    asyncio.run(main())


class _Encrypting:
    """asyncio's transport over TLS, which tells what it holds only after the one below has paused it."""

    def __init__(self) -> None:
        self.below = 0
        self.held = 0
        self.pieces: deque[bytes] = deque()

    def write(self, data: bytes) -> None:
        self.pieces.append(bytes(data))
        if self.below:
            self.held += len(data)
        else:
            self.below = len(data)

    def drain(self) -> None:
        self.below, self.held = self.held, 0

    def get_write_buffer_size(self) -> int:
        return self.held

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        pass


def test_what_a_large_message_leaves_unsent_over_tls_is_told() -> None:
    """The frames stay whole, because aiormq may write a heartbeat between two pieces."""

    async def main() -> None:
        drained: list[Link] = []
        ended = asyncio.Event()
        events: Any = SimpleNamespace(link_drained=drained.append, link_closed=lambda *_: ended.set())
        settings = ConnectionSettings(endpoints=(ENDPOINT,), credentials=Credentials("guest", "guest"))
        secrets = ConnectCredentials(settings.credentials, ssl.create_default_context())
        attempt = ConnectAttempt(ENDPOINT, settings, secrets, "name")
        link = Link(EventLoop(lambda error: pytest.fail(str(error))), attempt, events)
        transport: Any = _Encrypting()
        link._transport, link._state = transport, LinkState.OPEN
        frame = b"\x03\0\x01" + (100_000).to_bytes(4, "big") + bytes(100_000) + b"\xce"
        small = b"\x08\0\x01\0\0\0\0\xce"
        link.write(frame * 20)
        link.write(small)  # behind the rest of the message
        sizes = [link.write_buffer_size()]
        while link._kept:
            assert not drained
            transport.drain()
            link._drained()
            sizes.append(link.write_buffer_size())
        assert drained == [link]
        assert sizes == sorted(sizes, reverse=True)
        assert len(set(sizes)) == len(sizes) > 4
        assert sizes[0] > 15 * len(frame)
        assert b"".join(transport.pieces) == frame * 20 + small
        assert set(transport.pieces) == {frame, small}
        link._state = LinkState.NEW
        link.abort("the test is over")
        await asyncio.wait_for(ended.wait(), 10)

    asyncio.run(main())


def test_the_zone_of_a_link_local_address_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses to connect without it."""
    connected: list[Any] = []
    index, interface = socket.if_nameindex()[0]

    async def sock_connect(_loop: object, _sock: object, address: object) -> None:
        connected.append(address)
        raise ConnectionRefusedError

    async def main() -> None:
        monkeypatch.setattr(type(asyncio.get_running_loop()), "sock_connect", sock_connect)
        endpoint = Endpoint(f"fe80::1%{interface}", 5672)
        settings = ConnectionSettings(endpoints=(endpoint,), credentials=Credentials("guest", "guest"))
        ended = asyncio.Event()
        events: Any = SimpleNamespace(link_closed=lambda *_: ended.set())
        secrets = ConnectCredentials(settings.credentials, None)
        Link(EventLoop(lambda _: None), ConnectAttempt(endpoint, settings, secrets, "name"), events)
        await asyncio.wait_for(ended.wait(), 10)

    asyncio.run(main())
    assert connected == [("fe80::1", 5672, 0, index)]


def test_a_call_from_another_thread_survives_the_loop_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop may close between the check and the call.

    An example is the answer of a name server when the program ends.
    """

    async def make() -> EventLoop:
        return EventLoop(lambda error: pytest.fail(str(error)))

    loop = asyncio.run(make())
    monkeypatch.setattr(loop.asyncio, "is_closed", lambda: False)
    loop.call_soon(lambda: pytest.fail("it is closed"))
