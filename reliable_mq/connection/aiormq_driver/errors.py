"""Map aiormq's exceptions to ours."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiormq.exceptions

from reliable_mq.connection.errors import Aborted, broker_unavailable, system_problem

if TYPE_CHECKING:
    from reliable_mq.errors import BrokerUnavailable
    from reliable_mq.settings import Endpoint


class MechanismNotOffered(Exception):
    """The broker does not offer our SASL mechanism."""


def link_error(
    cause: BaseException | None, endpoint: Endpoint, closed_with: tuple[int, str] | None, *, opened: bool
) -> BrokerUnavailable:
    """Return the error for an exception of aiormq, as `broker_unavailable` does."""
    if isinstance(cause, aiormq.exceptions.AMQPConnectionError) and isinstance(cause.__cause__, OSError):
        cause = cause.__cause__
    otherwise = _what_happened(cause, opened=opened)
    permanent = isinstance(cause, MechanismNotOffered)
    return broker_unavailable(endpoint, cause, closed_with, opened=opened, otherwise=otherwise, permanent=permanent)


def _what_happened(cause: BaseException | None, *, opened: bool) -> str:
    match cause:
        case MechanismNotOffered() | Aborted():
            return str(cause)
        case aiormq.exceptions.InvalidFrameError():
            return f"an unexpected frame during the handshake: {cause}"
        case aiormq.exceptions.ProtocolSyntaxError() | aiormq.exceptions.IncompatibleProtocolError():
            return "the broker wants another version of the protocol"
        case aiormq.exceptions.AMQPConnectionError() if not opened:
            return "closed before the handshake (does the broker start or stop, or expect TLS on this port?)"
        case None | asyncio.CancelledError() | aiormq.exceptions.AMQPConnectionError():
            return "the connection was closed"
        case _:
            return system_problem(cause) or f"connection lost: {cause!r}"
