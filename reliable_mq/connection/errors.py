"""Map the end of a connection, or of an attempt, to `BrokerUnavailable`.

The cause is a code of the broker or a system error. Each driver maps its own exceptions. No text contains a credential.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
from typing import TYPE_CHECKING

from reliable_mq.codec.methods import ReplyCode
from reliable_mq.core.channel_setup import backend_failed
from reliable_mq.errors import BrokerUnavailable, ReliableMQError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliable_mq.core.reconnect import ConnectionLoss
    from reliable_mq.settings import Endpoint

_OF_CLIENT_CERTIFICATE = re.compile("_ALERT_(.*CERTIFICATE|UNKNOWN_CA)")  # an alert is always the peer's
_LIMIT = re.compile(r": (node |user )?connection limit [^']*$")  # behind the names of the virtual host and the user


class Aborted(Exception):
    """We closed the socket."""


class Unreachable(OSError):
    """No address of a host could be connected to."""

    def __init__(self, failures: Sequence[tuple[str, BaseException]]) -> None:
        super().__init__("no address could be connected to")
        self.failures = failures  # each address that was tried, and how it failed; at least one


def unreachable(host: str, failures: Sequence[tuple[str, BaseException]]) -> BaseException:
    """Return one error for the failures of all addresses of a host, at least one."""
    addresses = [address for address, _ in failures]
    return failures[0][1] if addresses == [host] else Unreachable(failures)


def broker_unavailable(
    endpoint: Endpoint,
    cause: BaseException | None,
    closed_with: tuple[int, str] | None,
    *,
    opened: bool,
    otherwise: str,
    permanent: bool,
) -> BrokerUnavailable:
    """Return the error for the end of a connection.

    Args:
        endpoint: The endpoint that the message names.
        cause: The exception of the driver or the system, which becomes the error's ``__cause__``.
        closed_with: The code and text of the broker's ``connection.close``, if the broker sent one.
        opened: Whether the handshake was completed.
        otherwise: The text to use without a ``connection.close``.
        permanent: Whether a retry cannot help, without a ``connection.close``. Nor can it if the broker's certificate
            does not verify.
    """
    permanent = permanent or _is_certificate_problem(cause)
    if closed_with is not None:
        code, text = closed_with
        # ACCESS_REFUSED: the credentials are wrong. NOT_ALLOWED: the virtual host does not exist, or the user may not
        # access it. A limit on the number of connections, and a failed authorization backend, are temporary.
        temporary = _LIMIT.search(text) is not None or backend_failed(text)
        refused = code == ReplyCode.ACCESS_REFUSED or (code == ReplyCode.NOT_ALLOWED and not temporary)
        permanent = not opened and refused
        otherwise = f"{'refused' if permanent else 'closed'} by the broker: {code} {text}"
    error = BrokerUnavailable(f"{endpoint}: {otherwise}", permanent=permanent)
    if isinstance(cause, Unreachable):
        _, cause = cause.failures[-1]
    if cause is not None:
        error.__cause__ = cause.with_traceback(None)  # the frames would keep the connection alive as long as the error
    return error


def _is_certificate_problem(cause: BaseException | None) -> bool:
    if isinstance(cause, Unreachable):  # each address of a host may have another certificate
        return all(_is_certificate_problem(failure) for _, failure in cause.failures)
    return isinstance(cause, ssl.SSLCertVerificationError)


def system_problem(cause: BaseException | None) -> str | None:
    """Return a text for an error of a socket, TLS or a name lookup; else None."""
    match cause:
        case Unreachable(failures=failures):
            return _at_addresses(failures)
        case ssl.SSLCertVerificationError():
            return f"the certificate does not verify: {getattr(cause, 'verify_message', None) or cause.strerror}"
        case ssl.SSLError(reason=str(reason)) if _OF_CLIENT_CERTIFICATE.search(reason):
            return f"the broker refused the client certificate (cert_file): {cause.strerror}"
        case ssl.SSLError():
            return f"TLS failed: {cause.strerror}"
        case socket.gaierror():
            return f"the host name does not resolve: {cause.strerror}"
        case TimeoutError():
            return "no answer in time"
        case OSError(errno=int(number)) if number in errno.errorcode:
            return os.strerror(number)  # asyncio replaces the text by one with the address
        case OSError():
            return cause.strerror or str(cause) or type(cause).__name__
        case _:
            return None


def _at_addresses(failures: Sequence[tuple[str, BaseException]]) -> str:
    addresses: dict[str, list[str]] = {}
    for address, failure in failures:
        addresses.setdefault(system_problem(failure) or repr(failure), []).append(address)
    return "; ".join(f"{text} (at {', '.join(those)})" for text, those in addresses.items())


def is_refusal(loss: ConnectionLoss) -> bool:
    """Return whether the broker closed the connection over an outstanding method."""
    return loss.by_broker and loss.code != ReplyCode.CONNECTION_FORCED  # with which the broker shuts down


def as_ours(error: Exception, otherwise: str) -> ReliableMQError:
    """Return the error if it is ours, else another one with the text ``otherwise``."""
    if isinstance(error, ReliableMQError):
        return error
    ours = BrokerUnavailable(otherwise)
    ours.__cause__ = error
    return ours
