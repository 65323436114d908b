"""`AsyncConsumer`: behaviour on the event loop.

The tests of other modules run on each API in turn.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from integration.support.consuming import numbered, publish
from reliable_mq import AsyncConsumer, Publisher, Queue, RetryPolicy, UsageError
from reliable_mq.stores import MemoryStore
from reliable_mq.testing.waiting import until

if TYPE_CHECKING:
    from reliable_mq import Delivery
    from reliable_mq.testing import FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")

ORDERS = Queue("orders")


def left(vhost: VirtualHost) -> int:
    return vhost.live_counts(["orders"])["orders"]


def test_coroutine_handlers_are_awaited_and_acked(vhost: VirtualHost, run_async: Any) -> None:
    """With concurrency 1, they run in order."""
    handled: list[bytes] = []

    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        publisher.connect()
    publish(vhost, "orders", numbered(500))

    async def main() -> None:
        async def handle(delivery: Delivery) -> None:
            await until(lambda: consumer.statistics.delivered == 500)  # or some are acked before the next ones arrive
            await asyncio.sleep(0)
            handled.append(delivery.body)

        async with AsyncConsumer(vhost.url, ORDERS, handle, prefetch=500) as consumer:
            await until(lambda: consumer.statistics.acked == 500)
            assert consumer.statistics.acks_sent <= 50

    run_async(main())
    assert handled == numbered(500)
    assert left(vhost) == 0


def test_plain_handlers_run_in_threads_and_the_loop_goes_on(vhost: VirtualHost, run_async: Any) -> None:
    """Each of three handlers waits for the other two and for the loop."""

    async def main() -> None:
        together = threading.Barrier(4)
        threads: set[int] = set()

        def handle(_: Delivery) -> None:
            threads.add(threading.get_ident())
            together.wait(20)

        async with AsyncConsumer(vhost.url, ORDERS, handle, concurrency=3) as consumer:
            await asyncio.to_thread(publish, vhost, "orders", numbered(3))
            await until(lambda: together.n_waiting == 3)
            assert threading.get_ident() not in threads
            await asyncio.to_thread(together.wait, 20)
            await until(lambda: consumer.statistics.acked == 3)

    run_async(main())


def test_a_plain_function_that_returns_a_coroutine_has_failed(vhost: VirtualHost, run_async: Any) -> None:
    """The message must not be acked, because nothing was done."""
    errors: list[str] = []

    async def work() -> None:
        errors.append("it ran")

    async def main() -> None:
        async with AsyncConsumer(vhost.url, ORDERS, lambda _: work(), retry=RetryPolicy(1)) as consumer:
            await asyncio.to_thread(publish, vhost, "orders", numbered(1))
            await until(lambda: consumer.statistics.dead_lettered == 1)

    run_async(main())
    assert errors == []


def test_f47_a_signal_stops_every_run_and_handlers_are_restored(vhost: VirtualHost, run_async: Any) -> None:
    """Running handlers finish, then the earlier signal handlers are restored."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    done: list[bytes] = []

    async def handle(delivery: Delivery) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        done.append(delivery.body)

    async def main() -> None:
        other = AsyncConsumer(vhost.url, Queue("other"), handle)
        consumer = AsyncConsumer(vhost.url, ORDERS, handle)
        async with asyncio.TaskGroup() as group:
            group.create_task(other.run())
            group.create_task(consumer.run())
            await until(lambda: consumer.connected and other.connected)
            await asyncio.to_thread(publish, vhost, "orders", numbered(5))

    run_async(main())
    assert done == numbered(1)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    vhost.wait_for_messages("orders", 4)


def test_f47_a_signal_that_is_somebody_elses_is_left_to_them(vhost: VirtualHost, run_async: Any) -> None:
    """A server that runs the consumer has its own signal handler."""
    received: list[int] = []

    async def handle(_: Delivery) -> None: ...

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, received.append, 1)
        consumer = AsyncConsumer(vhost.url, ORDERS, handle)
        running = asyncio.create_task(consumer.run())
        await until(lambda: consumer.connected)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: received)
        assert not running.done()
        consumer.stop()
        await running
        loop.remove_signal_handler(signal.SIGTERM)

    run_async(main())


@pytest.mark.parametrize("store", [False, True])
def test_a_run_that_is_cancelled_takes_its_handlers_along(vhost: VirtualHost, run_async: Any, store: bool) -> None:
    """Their deliveries are requeued, and no attempt is counted.

    No task is left.
    """
    begun: list[Delivery] = []
    ended: list[str] = []

    async def handle(delivery: Delivery) -> None:
        begun.append(delivery)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def main() -> None:
        begun.clear()
        ended.clear()
        memory = MemoryStore() if store else None
        consumer = AsyncConsumer(vhost.url, ORDERS, handle, concurrency=2, idempotency=memory)
        running = asyncio.create_task(consumer.run())
        await until(lambda: consumer.connected)
        if not left(vhost):
            await asyncio.to_thread(publish, vhost, "orders", numbered(5))
        await until(lambda: consumer.statistics.delivered == 5 and len(begun) == 2)
        running.cancel()
        started = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert time.monotonic() - started < 20
        assert ended == ["cancelled"] * 2
        assert consumer.statistics.failed == 0
        await asyncio.to_thread(vhost.wait_for_messages, "orders", 5)

    run_async(main())


def test_a_hanging_handler_is_cancelled_after_the_stop_timeout(
    vhost: VirtualHost, run_async: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Leaving the block takes about stop_timeout; the delivery is redelivered."""

    async def main() -> None:
        begun = asyncio.Event()

        async def handle(_: Delivery) -> None:
            begun.set()
            await asyncio.Event().wait()

        async with AsyncConsumer(vhost.url, ORDERS, handle, stop_timeout=0.3):
            if not left(vhost):
                await asyncio.to_thread(publish, vhost, "orders", numbered(1))
            await asyncio.wait_for(begun.wait(), 20)
            started = time.monotonic()
        assert 0.3 <= time.monotonic() - started < 10
        assert "still being handled after 0.3 s" in caplog.text
        await asyncio.to_thread(vhost.wait_for_messages, "orders", 1)

    run_async(main())


def test_a_handler_may_stop_its_consumer_and_cannot_close_it(vhost: VirtualHost, run_async: Any) -> None:
    """Closing would wait for itself, so it raises."""
    refused: list[str] = []

    async def main() -> None:
        async def handle(_: Delivery) -> None:
            with pytest.raises(UsageError, match=r"call stop\(\)"):
                await consumer.close()
            refused.append("close")
            consumer.stop()

        consumer = AsyncConsumer(vhost.url, ORDERS, handle)
        running = asyncio.create_task(consumer.run())
        await until(lambda: consumer.connected)
        await asyncio.to_thread(publish, vhost, "orders", numbered(1))
        await asyncio.wait_for(running, 20)

    run_async(main())
    assert refused == ["close"]
    assert left(vhost) == 0


def test_f51_a_handler_that_blocks_the_loop_is_reported(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, caplog: pytest.LogCaptureFixture, run_async: Any
) -> None:
    """Nothing else can run then, heartbeats included; here the connection survives.

    The broker waits for 12 s. The last heartbeat was sent up to 3 s before, so this process may stop for 5 s as well.
    """
    proxy = fault_proxy(vhost.url)

    async def handle(_: Delivery) -> None:
        threading.Event().wait(3.1)

    async def main() -> None:
        async with AsyncConsumer(proxy.url, ORDERS, handle, heartbeat=6) as consumer:
            await asyncio.to_thread(publish, vhost, "orders", numbered(1))
            await until(lambda: consumer.statistics.acked == 1)
            await until(lambda: "stalled" in caplog.text)
            assert consumer.reconnects == 0

    with caplog.at_level(logging.WARNING):
        run_async(main())


def test_it_belongs_to_one_loop_and_a_forgotten_one_is_reported(vhost: VirtualHost) -> None:
    """On another loop, every call is refused; an unclosed one is a ResourceWarning."""

    async def handle(_: Delivery) -> None: ...

    async def main() -> None:
        consumer = AsyncConsumer(vhost.url, ORDERS, handle)
        await consumer.connect()

        async def elsewhere() -> None:
            for call in (consumer.run(), consumer.connect(), consumer.close()):
                with pytest.raises(UsageError, match="event loop"):
                    await call

        await asyncio.to_thread(asyncio.run, elsewhere())
        await consumer.close()
        forgotten = [AsyncConsumer(vhost.url, ORDERS, handle)]
        await forgotten[0].connect()
        with pytest.warns(ResourceWarning, match="was not closed"):
            forgotten.clear()

    asyncio.run(main())


def test_f46_a_forked_child_refuses(vhost: VirtualHost) -> None:
    """Closing the copy does not affect the parent's."""

    async def handle(_: Delivery) -> None: ...

    async def main() -> None:
        async with AsyncConsumer(vhost.url, ORDERS, handle) as consumer:
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    with pytest.raises(UsageError, match="fork"):
                        consumer.connect().send(None)
                    with pytest.raises(StopIteration):
                        consumer.close().send(None)
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0  # noqa: ASYNC222  # a blocked loop does not matter here
            await asyncio.to_thread(publish, vhost, "orders", numbered(3))
            await until(lambda: consumer.statistics.acked == 3)

    asyncio.run(main())


def test_a_pull_that_is_cancelled_takes_nothing(vhost: VirtualHost, run_async: Any) -> None:
    """Cancelling a block that has deliveries requeues them."""

    async def main() -> None:
        async with AsyncConsumer(vhost.url, ORDERS) as consumer:
            async with consumer.get(10) as before:
                assert before == []
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2), consumer.get(1, timeout=20):
                    pytest.fail("there is nothing to take")
            await asyncio.to_thread(publish, vhost, "orders", numbered(2))

            async def hold() -> None:
                async with consumer.get(2, timeout=20) as taken:
                    assert len(taken) == 2
                    held.set()
                    await asyncio.Event().wait()

            held = asyncio.Event()
            holding = asyncio.create_task(hold())
            await held.wait()
            holding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await holding
            async with consumer.get(2, timeout=20) as again:
                assert [one.body for one in again] == numbered(2)
                assert all(one.redelivered and one.attempt == 1 for one in again)

    run_async(main())
