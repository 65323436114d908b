"""What is in a queue, read with plain pika."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reliable_mq.testing import VirtualHost


def bodies(vhost: VirtualHost, queue: str) -> list[tuple[str, bytes]]:
    """Take everything out of a queue, in order, as (message id, body)."""
    found: list[tuple[str, bytes]] = []
    with vhost.connect() as connection:
        channel = connection.channel()
        while True:
            method, properties, body = channel.basic_get(queue, auto_ack=True)
            if method is None:
                return found
            found.append((properties.message_id, body))
