"""A publisher of either API: results, errors, closing, threads and memory."""

from __future__ import annotations

import gc
import linecache
import logging
import threading
import time
import tracemalloc
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.support.publishing import book, submit
from integration.support.seeds import soaking
from reliable_mq import (
    BrokerUnavailable,
    Message,
    Publisher,
    PublishError,
    PublishReturned,
    PublishUnconfirmed,
    Queue,
    UsageError,
)
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliable_mq.testing import Audit, FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline", "publisher_api")

ORDERS = Queue("orders", dead_letter=None)


def test_f50_32_threads_share_a_publisher(vhost: VirtualHost, checker: Audit) -> None:
    """32 threads use all methods of one publisher; no message is lost or doubled."""
    with Publisher(vhost.url, topology=[ORDERS], max_outstanding=100) as publisher:

        def work(number: int) -> None:
            for _ in range(20):
                book(checker, submit(checker, publisher, "orders", b"%d" % number))
            sizes = [number * 100] * 19 + [140_000]  # the last takes more than one frame
            messages = [Message(b"x" * size) for size in sizes]
            for message in messages:
                checker.attempted(message.message_id)
            assert publisher.publish_many(messages, routing_key="orders").confirmed == 20
            for message in messages:
                checker.confirmed(message.message_id)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    checker.drain(vhost, ["orders"])
    balance = checker.close()
    assert balance.confirmed == 32 * 40
    assert not balance.duplicated


@pytest.mark.timeout(1200)
def test_f55_reconnects_leave_memory_and_descriptors_flat(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, publisher_api: str
) -> None:
    """Memory and descriptors do not grow with reconnects and publishes."""
    limit = 100_000 if publisher_api == "sync" else 250_000  # the caches of asyncio and aiormq fill up once
    proxy = fault_proxy(vhost.url)
    messages = 3
    cycles, warm_up = (1000, 100) if soaking() else (50, 10)
    with Publisher(proxy.url, topology=[ORDERS]) as publisher, vhost.connect() as consuming, without_logs():
        consumer = consuming.channel()

        def cycle() -> None:
            confirmations = [publisher.submit(Message(b"x" * 1000), routing_key="orders") for _ in range(messages)]
            proxy.cut()
            for confirmation in confirmations:
                confirmation.result(30)
            while consumer.basic_get("orders", auto_ack=True)[0] is not None:
                pass

        for _ in range(warm_up):
            cycle()
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.take_snapshot()
        files = descriptors()
        for _ in range(cycles):
            cycle()
        linecache.clearcache()  # filled once, by the first traceback that a driver formats
        gc.collect()
        after = tracemalloc.take_snapshot()
        tracemalloc.stop()
        grown = sum(difference.size_diff for difference in after.compare_to(before, "filename"))
        most = "\n".join(map(str, after.compare_to(before, "lineno")[:10]))
        assert grown < limit, f"{grown} bytes more after {cycles} reconnects, most of all here:\n{most}"
        wait_until(lambda: descriptors() <= files + 3, timeout=10, what="descriptors to be closed")
        assert publisher.statistics.confirmed == messages * (warm_up + cycles)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def without_logs() -> Iterator[None]:
    """Disable logging in the block, because pytest keeps every record."""
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def test_publish_returns_a_receipt_and_publish_many_a_report(vhost: VirtualHost) -> None:
    """A receipt says how a message was stored; a report lists failures and reasons."""
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        message = Message(b"x")
        receipt = publisher.publish(message, routing_key="orders")
        assert (receipt.message_id, receipt.status, receipt.attempts) == (message.message_id, "confirmed", 1)
        report = publisher.publish_many((Message(b"x") for _ in range(2000)), routing_key="orders")
        assert (report.ok, report.confirmed) == (True, 2000)
        failed = Message(b"x")
        report = publisher.publish_many([failed], routing_key="nowhere")
        assert report.confirmed == 0
        assert [(one, type(error)) for one, error in report.failures] == [(failed, PublishReturned)]


def test_leaving_the_block_raises_what_nobody_has_seen(vhost: VirtualHost) -> None:
    """A failure is raised on leaving the block unless it was looked at."""

    def fail(times: int) -> None:
        with Publisher(vhost.url, topology=[ORDERS]) as publisher:
            for _ in range(times):
                publisher.submit(Message(b"x"), routing_key="nowhere")
            publisher.submit(Message(b"x"), routing_key="orders")

    with pytest.raises(PublishReturned):
        fail(1)
    with pytest.raises(PublishError, match="3 messages were not confirmed") as caught:
        fail(3)
    assert len(caught.value.failures) == 3
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        assert publisher.submit(Message(b"x"), routing_key="nowhere").exception() is not None


def test_leaving_the_block_never_masks_the_bodys_own_exception(vhost: VirtualHost) -> None:
    """The body's exception is raised even if messages failed as well."""

    def fail() -> None:
        with Publisher(vhost.url, topology=[ORDERS]) as publisher:
            publisher.submit(Message(b"x"), routing_key="nowhere")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_use_after_close_is_refused(vhost: VirtualHost) -> None:
    """Every publishing call raises; closing again does nothing."""
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        publisher.publish(Message(b"x"), routing_key="orders")
    with pytest.raises(UsageError, match="closed"):
        publisher.publish(Message(b"x"), routing_key="orders")
    publisher.close()
    unused = Publisher(vhost.url)
    unused.close()
    with pytest.raises(UsageError, match="closed"):
        unused.publish(Message(b"x"), routing_key="orders")


def test_close_and_connect_report_an_outage_and_with_waits(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """close() gives up after its timeout and reports the unconfirmed messages.

    connect() raises at once; publishes in a with block wait for the broker.
    """
    proxy = fault_proxy(vhost.url)
    publisher = Publisher(proxy.url, topology=[ORDERS])
    publisher.connect()
    proxy.refuse_connections()
    proxy.cut()
    confirmation = publisher.submit(Message(b"x"), routing_key="orders")
    started = time.monotonic()
    with pytest.raises(PublishUnconfirmed):
        publisher.close(timeout=1)
    assert time.monotonic() - started < 20  # by default, close waits for 30 s
    assert confirmation.done()
    publisher = Publisher(proxy.url, topology=[ORDERS])
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1"):
        publisher.connect()
    publisher.close()
    with Publisher(proxy.url, topology=[ORDERS]) as publisher:
        confirmation = publisher.submit(Message(b"x"), routing_key="orders")
        proxy.accept_connections()
        assert confirmation.result(60).attempts == 1


def test_a_full_window_blocks_submit_and_times_out(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """After its timeout, submit raises that the message was never sent."""
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS], max_outstanding=10) as publisher:
        publisher.connect()
        proxy.hold_confirms()
        confirmations = [publisher.submit(Message(b"x"), routing_key="orders") for _ in range(10)]
        with pytest.raises(PublishUnconfirmed, match="window") as caught:
            publisher.submit(Message(b"x"), routing_key="orders", timeout=0.3)
        assert caught.value.sent is False
        proxy.release_confirms()
        proxy.heal()
        for confirmation in confirmations:
            confirmation.result(20)
        publisher.publish(Message(b"x"), routing_key="orders")
