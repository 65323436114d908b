"""The pika driver without a broker: its mapping of errors, and its event loop.

Exceptions do not end the loop.
"""

from __future__ import annotations

import socket
import ssl
import threading

import pika.exceptions as pika_errors
import pytest
from pika.adapters.utils import connection_workflow as workflow

from reliable_mq.connection.pika_driver import EventLoop, broker_error
from reliable_mq.connection.pika_driver.connection import Connection
from reliable_mq.errors import BrokerUnavailable
from reliable_mq.settings import Endpoint

ENDPOINT = Endpoint("broker.example", 5671)


def wrapped(cause: BaseException) -> BaseException:
    """Wrap an error like pika does for a failed attempt, two or three times."""
    phase = workflow.AMQPConnectorSocketConnectError(cause)
    return pika_errors.AMQPConnectionError(workflow.AMQPConnectionWorkflowFailed([OSError("first address"), phase]))


def certificate_error() -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_message = "unable to get local issuer certificate"
    return error


def alert(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, "an alert")
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("cause", "text", "permanent"),
    [
        (wrapped(ConnectionRefusedError(111, "Connection refused")), "Connection refused", False),
        (wrapped(OSError("odd")), "odd", False),
        (wrapped(socket.gaierror(-2, "Name or service not known")), "does not resolve: Name or service", False),
        (wrapped(TimeoutError("timed out")), "no answer in time", False),
        (wrapped(certificate_error()), "does not verify: unable to get local issuer certificate", True),
        (wrapped(ssl.SSLError(1, "wrong version number")), "TLS failed", False),
        (wrapped(alert("SSLV3_ALERT_HANDSHAKE_FAILURE")), "TLS failed", False),
        (wrapped(alert("TLSV1_ALERT_UNKNOWN_CA")), "refused the client certificate (cert_file): an alert", False),
        (wrapped(ssl.SSLEOFError(8, "EOF occurred")), "TLS failed", False),
        (pika_errors.AuthenticationError("EXTERNAL"), "does not offer SASL mechanism EXTERNAL", True),
        (pika_errors.ProbableAuthenticationError("StreamLostError"), "ProbableAuthenticationError", False),
        (pika_errors.ProbableAccessDeniedError("StreamLostError"), "ProbableAccessDeniedError", False),
        (pika_errors.IncompatibleProtocolError("StreamLostError"), "closed before the handshake", False),
        (pika_errors.AMQPHeartbeatTimeout("stale"), "no heartbeat", False),
        (pika_errors.ConnectionClosedByClient(200, "bye"), "closed by us", False),
        (pika_errors.StreamLostError("Transport indicated EOF"), "Transport indicated EOF", False),
        (pika_errors.StreamLostError(), "connection lost", False),
        (None, "connection lost", False),
    ],
)
def test_what_pika_reports_becomes_an_error_that_names_the_host(
    cause: BaseException | None, text: str, permanent: bool
) -> None:
    error = broker_error(cause, ENDPOINT, None, opened=False)
    assert isinstance(error, BrokerUnavailable)
    assert str(error).startswith("broker.example:5671: ")
    assert text in str(error)
    assert error.permanent is permanent
    assert error.__cause__ is None or error.__cause__.__traceback__ is None


def failed(*failures: Exception) -> Exception:
    """Wrap the failures of all addresses, as pika does."""
    return pika_errors.AMQPConnectionError(workflow.AMQPConnectionWorkflowFailed(failures))


TCP, TLS = workflow.AMQPConnectorSocketConnectError, workflow.AMQPConnectorTransportSetupError
AMQP = workflow.AMQPConnectorAMQPHandshakeError
REFUSED = TCP(ConnectionRefusedError(111, "Connection refused"))
FORGED = TLS(certificate_error())
UNVERIFIED = "the certificate does not verify: unable to get local issuer certificate"


@pytest.mark.parametrize(
    ("cause", "text", "permanent"),
    [
        (failed(REFUSED), "Connection refused (at a)", False),
        (failed(REFUSED, FORGED), f"Connection refused (at a); {UNVERIFIED} (at b)", False),
        (failed(FORGED, REFUSED, FORGED), f"{UNVERIFIED} (at a, c); Connection refused (at b)", False),
        (failed(FORGED, FORGED), f"{UNVERIFIED} (at a, b)", True),
        (failed(REFUSED, AMQP(pika_errors.AuthenticationError("PLAIN"))), "the broker does not offer SASL ", True),
    ],
)
def test_each_address_of_a_host_and_its_failure_are_named(cause: Exception, text: str, permanent: bool) -> None:
    """Certificates that do not verify are permanent only if no address fails in another way."""
    error = broker_error(cause, ENDPOINT, None, opened=False, addresses=["a", "b", "c"])
    assert str(error).startswith(f"{ENDPOINT}: {text}")
    assert error.permanent is permanent


LIMIT_UNKNOWN = "connection limit cannot be queried, timeout"
UNDECIDED = "backend b returned an error: timeout"


@pytest.mark.parametrize(
    ("code", "text", "opened", "permanent"),
    [
        (403, "ACCESS_REFUSED - Login was refused", False, True),
        (530, "NOT_ALLOWED - vhost x not found", False, True),
        (530, "NOT_ALLOWED - vhost rate-limits not found", False, True),
        (530, "NOT_ALLOWED - access to vhost '/' refused for user 'limit-service'", False, True),
        (530, "NOT_ALLOWED - access to vhost '/' refused for user 'u': connection limit (1) is reached", False, False),
        (530, "NOT_ALLOWED - connection refused: node connection limit (1) is reached", False, False),
        (530, "NOT_ALLOWED - connection refused for user 'u': user connection limit (1) is reached", False, False),
        (530, "NOT_ALLOWED - access to vhost '/' refused for user 'u': " + LIMIT_UNKNOWN, False, False),
        (530, "NOT_ALLOWED - access to vhost '/' refused for user 'u', " + UNDECIDED, False, False),
        (530, "NOT_ALLOWED - access to vhost 'x', backend y' refused for user 'u'", False, True),
        (541, "INTERNAL_ERROR - vhost is down", False, False),
        (320, "CONNECTION_FORCED - broker forced connection closure", True, False),
        (530, "NOT_ALLOWED - vhost x deleted", True, False),
    ],
)
def test_only_the_broker_itself_can_refuse_for_good(code: int, text: str, opened: bool, permanent: bool) -> None:
    guess = pika_errors.ProbableAuthenticationError("pika has lost code and text")
    error = broker_error(guess, ENDPOINT, (code, text), opened=opened)
    assert f"{code} {text}" in str(error)
    assert error.permanent is permanent


def test_a_large_message_is_sent_over_tls_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS sends a piece or tells nothing of it, and the publisher must see that the network takes data."""
    pieces: list[bytes] = []
    monkeypatch.setattr(Connection, "_output_marshaled_frames", lambda _, frames: pieces.extend(map(bytes, frames)))
    monkeypatch.setattr(Connection, "_is_active", lambda _: True)
    connection = Connection.__new__(Connection)
    connection._plaintext, connection._transport = False, None
    data = bytes(range(256)) * 4000
    connection.send(data)
    assert b"".join(pieces) == data
    assert len(pieces) > 10
    connection.send(b"small")
    assert pieces[-1] == b"small"


class TestEventLoop:
    def test_exceptions_go_to_the_handler_and_everything_else_runs(self) -> None:
        errors: list[str] = []
        ran: list[str] = []
        loop = EventLoop(lambda error: errors.append(str(error)))

        def fail(text: str) -> None:
            raise RuntimeError(text)

        loop.call_soon(lambda: fail("call"))
        loop.call_soon(lambda: ran.append("call"))
        loop.call_later(0, lambda: fail("timer"))
        loop.call_later(0, lambda: ran.append("timer"))
        loop.call_later(0, lambda: ran.append("cancelled")).cancel()
        done = loop.call_later(0.01, loop.stop)
        loop.run()
        done.cancel()
        loop.call_soon(lambda: loop.call_soon(lambda: ran.append("late")))
        loop.drain()
        loop.close()
        assert errors == ["call", "timer"]
        assert ran == ["call", "timer", "late"]

    def test_a_call_queued_before_the_close_can_be_withdrawn(self) -> None:
        """Otherwise a thread that queues it at this moment believes that it will run."""
        loop = EventLoop(lambda _: None)
        call = loop.call_soon(lambda: None)
        loop.close()
        assert loop.withdraw(call)

    def test_a_call_from_another_thread_wakes_it(self) -> None:
        loop = EventLoop(lambda _: None)
        threading.Timer(0.05, lambda: loop.call_soon(loop.stop)).start()
        loop.run()
        loop.close()

    def test_host_lookup_uses_a_daemon_thread_and_can_be_cancelled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        daemons: list[bool] = []
        results: list[object] = []
        loop = EventLoop(lambda _: None)

        def resolve(*arguments: object) -> list[object]:
            if arguments[-1] == socket.AI_NUMERICHOST:
                raise socket.gaierror(-2, "no address")
            daemons.append(threading.current_thread().daemon)
            if arguments[0] == "unknown":
                raise socket.gaierror(-2, "unknown")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", arguments[:2])]

        def got(result: object) -> None:
            results.append(result)
            if len(results) == 2:
                loop.stop()

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        services = loop.services(lambda _: None)
        cancelled = services.getaddrinfo("host", 1, lambda _: results.append("cancelled"))
        assert cancelled.cancel() is True
        assert cancelled.cancel() is False
        services.getaddrinfo("host", 2, got)
        services.getaddrinfo("unknown", 3, got)
        loop.run()
        loop.close()
        assert all(daemons)
        assert [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("host", 2))] in results
        assert "cancelled" not in results
        assert any(isinstance(result, socket.gaierror) for result in results)
