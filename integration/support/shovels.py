"""A RabbitMQ shovel from a queue into a stream, on the broker of a single test."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reliable_mq.testing import RabbitMQ, VirtualHost


def shovel(broker: RabbitMQ, vhost: VirtualHost, queue: str, stream: str) -> None:
    """Enable the plugin, and start a dynamic shovel that acks confirmed messages."""
    broker.execute("rabbitmq-plugins", "--quiet", "enable", "rabbitmq_shovel")
    uri = f"amqp:///{vhost.name}"
    definition = {
        "src-protocol": "amqp091",
        "src-uri": uri,
        "src-queue": queue,
        "dest-protocol": "amqp091",
        "dest-uri": uri,
        "dest-queue": stream,
        "ack-mode": "on-confirm",
    }
    broker.rabbitmqctl("set_parameter", "-p", vhost.name, "shovel", stream, json.dumps(definition))
