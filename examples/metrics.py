"""Prometheus metrics: pass a registry, and expose it as usual.

A scrape reads counts that are kept in any case. The number of label values is limited: the ``name`` of a publisher or
consumer, the queue, and the outcome.

Prints::

    reliable_mq_publisher_settled_total{outcome="confirmed",publisher="shop"} 3.0
    reliable_mq_publisher_outstanding{publisher="shop"} 0.0
    reliable_mq_consumer_handled_total{consumer="billing",queue="example.metrics"} 3.0
"""

from __future__ import annotations

import os
import threading
from urllib.request import urlopen

from prometheus_client import CollectorRegistry, start_http_server

from reliable_mq import Consumer, Delivery, Message, Publisher, Queue

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
ORDERS = Queue("example.metrics")

registry = CollectorRegistry()  # or prometheus_client.REGISTRY
server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)  # any free port

handled = 0
last = threading.Event()


def handle(_delivery: Delivery) -> None:
    global handled  # noqa: PLW0603
    handled += 1
    if handled == 3:
        last.set()


with Publisher(URL, topology=[ORDERS], name="shop", registry=registry) as publisher:
    publisher.publish_many((Message.json({"order": n}) for n in range(3)), routing_key="example.metrics")
    with Consumer(URL, ORDERS, handle, name="billing", registry=registry):
        last.wait(30)
    with urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as response:
        exposed = response.read().decode().splitlines()

for name in ('publisher_settled_total{outcome="confirmed"', "publisher_outstanding{", "consumer_handled_total{"):
    print(*(line for line in exposed if line.startswith(f"reliable_mq_{name}")), sep="\n")

server.shutdown()
server.server_close()
thread.join()
