"""A service with probes for Kubernetes: liveness, readiness, and the reason.

``HealthServer`` runs in its own thread. In a Deployment it listens on ``0.0.0.0`` and a fixed port. Here the service
sends the requests itself. ``reliable-mq health URL`` sends one from the command line.

Prints::

    before it starts: 503, not started: `with`, `connect()` or the first call connects
    while it runs: 200
    while it stops: 503, stopping
    and it lives: 200
"""

from __future__ import annotations

import json
import os
import threading
from urllib.error import HTTPError
from urllib.request import urlopen

from reliable_mq import Consumer, Delivery, Message, Publisher, Queue
from reliable_mq.health import HealthServer

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
ORDERS = Queue("example.probes")

begun, go_on = threading.Event(), threading.Event()


def ask(url: str) -> str:
    try:
        with urlopen(url, timeout=10) as response:
            return str(response.status)
    except HTTPError as error:
        with error:
            reasons = {part["reason"] for part in json.load(error)["parts"]} - {""}
            return f"{error.code}, {', '.join(reasons)}"


def handle(_delivery: Delivery) -> None:
    begun.set()
    go_on.wait(30)


publisher = Publisher(URL, topology=[ORDERS], name="shop")
consumer = Consumer(URL, ORDERS, handle, name="billing")

with HealthServer(publisher, consumer, port=0) as server:  # any free port; use a fixed one in a service
    print("before it starts:", ask(f"{server.url}/readyz"))
    with publisher, consumer:
        publisher.publish(Message(b"an order"), routing_key="example.probes")
        begun.wait(30)
        print("while it runs:", ask(f"{server.url}/readyz"))
        consumer.stop()  # as SIGTERM does to consumer.run()
        print("while it stops:", ask(f"{server.url}/readyz"))
        print("and it lives:", ask(f"{server.url}/livez"))
        go_on.set()
