"""Several hosts, and credentials that change: what a connection does when a host is down or a password was rotated.

Hosts are tried in their order, and after a lost connection the next one is tried at once. A callback is asked for user
and password at every connect, so that the next one uses what is valid by then; without one they stand in the URL.

Prints::

    connected past a host that is down
    asked for credentials 2 times: once per attempt
    <Publisher 'orders' to 127.0.0.1:1, ...:...: connected>
"""

from __future__ import annotations

import os

from reliable_mq import Message, Publisher, Queue

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
user_and_password, _, where = URL.removeprefix("amqp://").rpartition("@")

asked = 0


def credentials() -> tuple[str, str]:
    """Ask a vault, say. It may block: it runs on a thread of its own."""
    global asked  # noqa: PLW0603
    asked += 1
    user, _, password = user_and_password.partition(":")
    return user, password


hosts = f"amqp://127.0.0.1:1,{where}"  # the first one is down; in life: amqps://rabbit-1.example.org,rabbit-2...
with Publisher(hosts, credentials=credentials, topology=[Queue("example.hosts")], name="orders") as publisher:
    publisher.publish(Message(b"hello"), routing_key="example.hosts")
    print("connected past a host that is down")
    print(f"asked for credentials {asked} times: once per attempt")
    print(publisher)  # never with a password in it
