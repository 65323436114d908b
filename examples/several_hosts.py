"""Several hosts, of which one is down, and credentials that change.

Hosts are tried in order, and after a lost connection the next one is tried at once. A callback returns the user and the
password for every connect, so each connect uses the current ones. Without a callback they are in the URL.

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
    """Return the credentials, for example from a vault.

    The callback may block, because it runs in a separate thread.
    """
    global asked  # noqa: PLW0603
    asked += 1
    user, _, password = user_and_password.partition(":")
    return user, password


hosts = f"amqp://127.0.0.1:1,{where}"  # the first host is down
with Publisher(hosts, credentials=credentials, topology=[Queue("example.hosts")], name="orders") as publisher:
    publisher.publish(Message(b"hello"), routing_key="example.hosts")
    print("connected past a host that is down")
    print(f"asked for credentials {asked} times: once per attempt")
    print(publisher)  # never shows the password
