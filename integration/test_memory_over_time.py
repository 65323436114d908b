"""Memory, threads and descriptors stay flat while publisher and consumer work.

This runs only in `make soak`, for an hour (``RELIABLE_MQ_SOAK_SECONDS``).
"""

from __future__ import annotations

import gc
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from reliable_mq import Consumer, Message, Publisher, Queue, RetryPolicy

if TYPE_CHECKING:
    from reliable_mq import Delivery
    from reliable_mq.testing import FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline", "publisher_api", "consumer_api")

SECONDS = float(os.environ.get("RELIABLE_MQ_SOAK_SECONDS", "3600"))
ROUND = 2000  # messages per failure and reconnect
MOST_GROWTH = 16 * 1024 * 1024  # bytes of RSS: memory that the allocator keeps, whatever the duration


def rss() -> int:
    """Return the resident memory of this process in bytes."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.soak
@pytest.mark.parametrize(("publisher_api", "consumer_api"), [("sync", "sync"), ("aio", "aio")], indirect=True)
@pytest.mark.timeout(SECONDS * 1.5 + 120)
def test_f55_memory_is_flat_amid_failures_and_lost_connections(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of messages a second, failures and reconnects leave no trace.

    One message in a hundred fails once, and every round reconnects.
    """
    for name, value in {"propagate": False, "handlers": [logging.NullHandler()]}.items():
        monkeypatch.setattr(logging.getLogger("reliable_mq"), name, value)  # pytest would keep the records
    proxy = fault_proxy(vhost.url)
    orders = Queue("orders")
    left: set[bytes] = set()

    def handle(delivery: Delivery) -> None:
        if delivery.body.startswith(b"fail") and delivery.attempt == 1:
            raise ValueError("once")
        left.discard(delivery.body)

    with (
        Publisher(proxy.url, topology=[orders]) as publisher,
        Consumer(proxy.url, orders, handle, retry=RetryPolicy(3, delays=(0.01,))) as consumer,
    ):
        rounds = 0

        def work() -> None:
            """Publish a round and cut the connection while it is handled.

            The next round starts when all messages are handled, because the queue would grow otherwise.
            """
            nonlocal rounds
            rounds += 1
            bodies = [
                b"fail %d %d" % (rounds, number) if number % 100 == 0 else b"%d %d %s" % (rounds, number, b"x" * 500)
                for number in range(ROUND)
            ]
            left.update(bodies)
            report = publisher.publish_many(map(Message, bodies), routing_key="orders")
            report.raise_for_failures()
            proxy.cut()
            proxy.wait_for(lambda: not left, 60, what="every message to be handled")

        for _ in range(3):
            work()
        before, ends = rss(), time.monotonic() + SECONDS
        while time.monotonic() < ends:
            work()
        grown = rss() - before
        print(f"{rounds * ROUND} messages, {publisher.statistics.in_doubt} in doubt, {consumer.reconnects} reconnects")
        assert grown < MOST_GROWTH, f"{grown} bytes more after {rounds} rounds"
