"""A token that expires, renewed on the open connection.

The callback returns a token and its lifetime. Before the token expires, the callback is called again, and the next
token is sent to the broker with ``connection.update-secret``: no connection is lost, and no message waits. With
RabbitMQ's OAuth 2 plugin, the token replaces the password. Here an unchanged password is renewed three times.

Prints::

    renewed 3 times, reconnected 0 times
"""

from __future__ import annotations

import os
import time

from prometheus_client import CollectorRegistry

from reliable_mq import Message, Publisher, Queue
from reliable_mq.settings import Credentials

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
user_and_password, _, where = URL.removeprefix("amqp://").rpartition("@")

calls = 0


def credentials() -> Credentials:
    """Return a token, for example from an identity provider.

    The callback may block, because it runs in a separate thread.
    """
    global calls  # noqa: PLW0603
    calls += 1
    user, _, password = user_and_password.partition(":")
    return Credentials(user, password, expires_in=2 if calls <= 3 else 3600)


registry = CollectorRegistry()
with Publisher(
    f"amqp://{where}", credentials=credentials, topology=[Queue("example.tokens")], name="shop", registry=registry
) as publisher:
    publisher.publish(Message(b"hello"), routing_key="example.tokens")
    labels = {"publisher": "shop"}
    accepted = {**labels, "outcome": "accepted"}
    while (renewed := registry.get_sample_value("reliable_mq_publisher_token_renewals_total", accepted) or 0) < 3:
        time.sleep(0.1)
    reconnected = registry.get_sample_value("reliable_mq_publisher_reconnects_total", labels) or 0
    print(f"renewed {renewed:.0f} times, reconnected {reconnected:.0f} times")
