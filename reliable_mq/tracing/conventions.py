"""Names of spans and attributes: those of OpenTelemetry and of this package.

OpenTelemetry's names are from version 1.44.0 of its conventions, in which messaging is in development. Tests compare
them, and every span that the tests see, with the files of OpenTelemetry's model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliable_mq.settings import Endpoint

SYSTEM: Final = "messaging.system"
OPERATION_NAME: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION: Final = "messaging.destination.name"
ROUTING_KEY: Final = "messaging.rabbitmq.destination.routing_key"
DELIVERY_TAG: Final = "messaging.rabbitmq.message.delivery_tag"
MESSAGE_ID: Final = "messaging.message.id"
CONVERSATION_ID: Final = "messaging.message.conversation_id"
BODY_SIZE: Final = "messaging.message.body.size"
BATCH_COUNT: Final = "messaging.batch.message_count"
CLIENT_ID: Final = "messaging.client.id"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
PEER_ADDRESS: Final = "network.peer.address"
PEER_PORT: Final = "network.peer.port"
ERROR_TYPE: Final = "error.type"

OUTCOME: Final = "reliable_mq.outcome"
ATTEMPTS: Final = "reliable_mq.attempts"
ATTEMPT: Final = "reliable_mq.attempt"
POSSIBLE_DUPLICATE: Final = "reliable_mq.possible_duplicate"
REPLY_CODE: Final = "reliable_mq.reply.code"
REPLY_TEXT: Final = "reliable_mq.reply.text"
REDELIVERED: Final = "reliable_mq.redelivered"

RABBITMQ: Final = "rabbitmq"
_DEFAULT_EXCHANGE: Final = "amq.default"


def exportable(text: str) -> str:
    """Return a text with a question mark for each byte that is not UTF-8.

    An exporter loses an attribute with such a byte, and all spans of an export if a name or a status has one.
    """
    return text if text.isascii() else text.encode(errors="replace").decode()


def published_to(exchange: str, routing_key: str) -> str:
    """Return the name of a destination for a producer."""
    return exportable(":".join(part for part in (exchange, routing_key) if part)) or _DEFAULT_EXCHANGE


def consumed_from(exchange: str, routing_key: str, queue: str) -> str:
    """Return the name of a destination for a consumer."""
    parts = [exchange, routing_key] if routing_key == queue else [exchange, routing_key, queue]
    return exportable(":".join(part for part in parts if part))


def server(endpoints: Sequence[Endpoint]) -> Mapping[str, str | int]:
    """Return the attributes of the broker, empty unless it has a single endpoint."""
    if len(endpoints) != 1:
        return {}
    return {SERVER_ADDRESS: endpoints[0].host, SERVER_PORT: endpoints[0].port}


def peer(endpoint: Endpoint | None) -> Mapping[str, str | int]:
    """Return the attributes of the contacted host, empty if it is unknown."""
    return {} if endpoint is None else {PEER_ADDRESS: endpoint.host, PEER_PORT: endpoint.port}
