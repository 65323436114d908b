"""Map pika's exceptions to ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pika.exceptions
from pika.adapters.utils import connection_workflow

from reliable_mq.connection.errors import Aborted, broker_unavailable, system_problem, unreachable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliable_mq.errors import BrokerUnavailable
    from reliable_mq.settings import Endpoint


def broker_error(
    cause: BaseException | None,
    endpoint: Endpoint,
    closed_with: tuple[int, str] | None,
    *,
    opened: bool,
    addresses: Sequence[str] = (),
) -> BrokerUnavailable:
    """Return the error for an exception of pika, as `broker_unavailable` does.

    ``addresses`` are those of the host, in the order in which they were tried.
    """
    root = _root(cause, endpoint.host, addresses)
    return broker_unavailable(
        endpoint,
        root,
        closed_with,
        opened=opened,
        otherwise=system_problem(root) or _what_happened(root),
        permanent=isinstance(root, pika.exceptions.AuthenticationError),
    )


def _what_happened(root: BaseException | None) -> str:
    match root:
        case pika.exceptions.AuthenticationError():
            return f"the broker does not offer SASL mechanism {root.args[0]}"
        case pika.exceptions.AMQPHeartbeatTimeout():
            return "no heartbeat: the connection is dead"
        case pika.exceptions.IncompatibleProtocolError():
            return "closed before the handshake (does the broker start or stop, or expect TLS on this port?)"
        case pika.exceptions.ConnectionClosedByClient():
            return "closed by us"
        case Aborted() | pika.exceptions.StreamLostError(args=(_,)):
            return str(root.args[0])
        case _:
            return f"connection lost: {root!r}"


def _root(error: BaseException | None, host: str, addresses: Sequence[str]) -> BaseException | None:
    """Return the root cause of a failed attempt, which pika wraps in other exceptions.

    The attempt ends at the first address with which the AMQP handshake begins.
    """
    while True:
        match error:
            case connection_workflow.AMQPConnectionWorkflowFailed(
                exceptions=(*_, connection_workflow.AMQPConnectorAMQPHandshakeError() as last)
            ):
                error = last
            case connection_workflow.AMQPConnectionWorkflowFailed(exceptions=(*_, last)) if not addresses:
                error = last
            case connection_workflow.AMQPConnectionWorkflowFailed(exceptions=failures):
                roots = (_root(failure, host, ()) or failure for failure in failures)
                return unreachable(host, list(zip(addresses, roots, strict=False)))
            case connection_workflow.AMQPConnectorPhaseErrorBase(exception=inner):
                error = inner
            case pika.exceptions.AMQPConnectionError(args=(BaseException() as inner,)):
                error = inner
            case _:
                return error
