"""Publisher and consumer at work for a long time: memory, threads and descriptors stay where they are.

Part of `make soak` alone, which looks for an hour (``RELIABLE_MQ_SOAK_SECONDS``).
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
ROUND = 2000  # messages between two looks at a failure and a reconnect
MOST_GROWTH = 16 * 1024 * 1024  # bytes of RSS: what the allocator keeps, independent of the time that passes


def rss() -> int:
    """Resident memory of this process, in bytes."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.soak
@pytest.mark.parametrize(("publisher_api", "consumer_api"), [("sync", "sync"), ("aio", "aio")], indirect=True)
@pytest.mark.timeout(SECONDS * 1.5 + 120)
def test_f55_memory_is_flat_amid_failures_and_lost_connections(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of messages a second, one in a hundred failing once, and a reconnect every round leave no trace."""
    for name, value in {"propagate": False, "handlers": [logging.NullHandler()]}.items():
        monkeypatch.setattr(logging.getLogger("reliable_mq"), name, value)  # pytest would keep what is logged
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
            """Cut in the middle of the handling; the next round begins when all is handled, or the queue would grow."""
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
