"""Fail fast: with ``on_disconnected="raise"``, a publish without a broker raises.

A service can then return status 503. A message that was accepted before the connection was lost is not given up: it is
published again once the broker is back. Here a fault proxy between the publisher and its broker simulates the outage.

Prints::

    order 1: confirmed
    order 3: PublishDisconnected at once, 127.0.0.1:...
    order 2: confirmed at attempt 2
    order 4: confirmed
"""

from __future__ import annotations

import os
import time

from reliable_mq import Message, PublishDisconnected, Publisher, Queue
from reliable_mq.testing import FaultProxy, wait_until

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
ORDERS = Queue("example.fail_fast")

with FaultProxy(URL) as proxy, Publisher(proxy.url, topology=[ORDERS], on_disconnected="raise") as publisher:
    publisher.publish(Message.json({"order": 1}), routing_key=ORDERS.name)
    print("order 1: confirmed")

    proxy.hold_confirms()
    outstanding = publisher.submit(Message.json({"order": 2}), routing_key=ORDERS.name)
    proxy.wait_for(lambda: proxy.held_confirms == 1)  # the broker has confirmed it, and the publisher does not know
    proxy.refuse_connections()
    proxy.cut()
    wait_until(lambda: not publisher.connected, timeout=30, what="the loss")  # detected at once

    began = time.monotonic()
    try:
        publisher.publish(Message.json({"order": 3}), routing_key=ORDERS.name)
    except PublishDisconnected as error:
        waited = time.monotonic() - began
        print(f"order 3: PublishDisconnected {'at once' if waited < 10 else f'after {waited:.0f} s'}, {error.reason}")

    proxy.heal()
    print(f"order 2: confirmed at attempt {outstanding.result(timeout=30).attempts}")
    publisher.publish(Message.json({"order": 4}), routing_key=ORDERS.name)
    print("order 4: confirmed")
