"""Asyncio-only behaviour of publishers: cancelled or many tasks, blocked loops.

Behaviour of both APIs is tested in other modules. Here, a test runs on asyncio's loop and on uvloop, and fails if a
task is left on the loop or asyncio logs an error.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tenacity

from reliable_mq import (
    BrokerUnavailable,
    Message,
    PublishError,
    PublishReturned,
    PublishUnconfirmed,
    Queue,
    UsageError,
)
from reliable_mq.aio.publisher import AsyncPublisher
from reliable_mq.testing.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine
    from random import Random

    from reliable_mq.testing import Audit, FaultProxyFactory, RabbitMQ, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")

ORDERS = Queue("orders", dead_letter=None)


def test_f50_3_000_callers_at_once_all_settle_within_the_window(
    vhost: VirtualHost, checker: Audit, run_async: Any
) -> None:
    """Each of 3 000 concurrent callers gets a receipt, within the window."""
    most = 0

    async def main() -> None:
        nonlocal most
        async with AsyncPublisher(vhost.url, topology=[ORDERS], max_outstanding=500) as publisher:

            async def one() -> None:
                nonlocal most
                message = Message(b"x" * 100)
                checker.attempted(message.message_id)
                receipt = await publisher.publish(message, routing_key="orders")
                most = max(most, publisher.outstanding)
                checker.confirmed(receipt.message_id)

            await asyncio.gather(*(one() for _ in range(3_000)))
            assert publisher.outstanding == 0

    run_async(main())
    assert most <= 500
    checker.drain(vhost, ["orders"])
    assert checker.close().confirmed == 3_000


def test_f49_a_cancelled_publish_credits_nothing_to_the_next(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, run_async: Any
) -> None:
    """A task is cancelled while it awaits a confirm.

    Other publishes get their own outcomes, and the cancelled one is still settled.
    """
    proxy = fault_proxy(vhost.url)

    async def main() -> None:
        async with AsyncPublisher(proxy.url, topology=[ORDERS]) as publisher:
            await publisher.connect()
            proxy.hold_confirms()
            task = asyncio.create_task(publisher.publish(Message(b"routable"), routing_key="orders"))
            await until(lambda: proxy.seen("basic.publish") == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert publisher.outstanding == 1
            proxy.release_confirms()
            proxy.heal()
            with pytest.raises(PublishReturned):
                await publisher.publish(Message(b"unroutable"), routing_key="nowhere")
            await publisher.publish(Message(b"routable"), routing_key="orders")
            assert publisher.outstanding == 0

    run_async(main())
    vhost.wait_for_messages("orders", 2)


def test_f49_tasks_cancelled_at_any_point_leave_sequence_intact(
    vhost: VirtualHost, checker: Audit, rng: Random, run_async: Any
) -> None:
    """A third of 3000 tasks is cancelled at random; the others get their own outcomes."""

    async def main() -> None:
        async with AsyncPublisher(vhost.url, topology=[ORDERS], max_outstanding=50) as publisher:

            async def one(number: int) -> None:
                message = Message(b"%d" % number)
                checker.attempted(message.message_id)
                key = "nowhere" if number % 10 == 0 else "orders"
                try:
                    await publisher.publish(message, routing_key=key)
                except PublishReturned:
                    assert key == "nowhere"
                    checker.failed(message.message_id)
                else:
                    assert key == "orders"
                    checker.confirmed(message.message_id)

            tasks = [asyncio.create_task(one(number)) for number in range(3000)]
            cancelled = rng.sample(tasks, 1000)
            for task in cancelled:
                await asyncio.sleep(0)
                if rng.random() < 0.2:
                    await asyncio.sleep(rng.random() * 0.002)
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            wrong = [one for one in results if one is not None and not isinstance(one, asyncio.CancelledError)]
            assert wrong == []
            await publisher.flush(20)
            assert publisher.outstanding == 0
            with pytest.raises(PublishReturned):
                await publisher.publish(Message(b"x"), routing_key="nowhere")
            with suppress(PublishError):  # errors of cancelled, unroutable messages
                await publisher.close()

    run_async(main())
    checker.drain(vhost, ["orders"])
    checker.close()


def test_f49_cancels_amid_cut_connections_leave_sequence_intact(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, rng: Random, run_async: Any
) -> None:
    """Every waiting call is cancelled at random, entering the block included.

    The other calls get their own outcomes, during the cuts and afterwards.
    """
    proxy = fault_proxy(vhost.url)
    options: dict[str, Any] = {"topology": [ORDERS], "max_outstanding": 20, "reconnect_wait": tenacity.wait_fixed(0.02)}

    cuts = 0

    async def cancelled_at_random(call: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(call)
        await asyncio.sleep(rng.random() * 0.05)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            raise error

    async def enter() -> None:
        async with AsyncPublisher(proxy.url, **options):
            pass

    async def main() -> None:
        nonlocal cuts
        cuts = 0
        async with AsyncPublisher(proxy.url, **options) as publisher:

            async def one(number: int) -> None:
                message = Message(b"%d" % number)
                checker.attempted(message.message_id)
                key = "nowhere" if number % 10 == 0 else "orders"
                try:
                    await publisher.publish(message, routing_key=key)
                except PublishReturned:
                    assert key == "nowhere"
                    checker.failed(message.message_id)
                else:
                    assert key == "orders"
                    checker.confirmed(message.message_id)

            async def many() -> None:
                messages = [Message(b"x") for _ in range(50)]
                for message in messages:
                    checker.attempted(message.message_id)
                report = await publisher.publish_many(messages, routing_key="orders")
                assert report.ok
                for message in messages:
                    checker.confirmed(message.message_id)

            async def connect() -> None:
                with suppress(BrokerUnavailable):  # the connection was cut
                    await publisher.connect()

            async def cut() -> None:
                nonlocal cuts
                while True:
                    # The pauses grow, because on a slow machine connecting may take longer than the first ones.
                    await asyncio.sleep(rng.random() * (0.1 + 0.01 * cuts))
                    proxy.cut()
                    cuts += 1

            async with asyncio.TaskGroup() as calls:
                cutting = calls.create_task(cut())
                async with asyncio.TaskGroup() as group:
                    for number in range(600):
                        group.create_task(one(number) if rng.random() < 0.6 else cancelled_at_random(one(number)))
                    for _ in range(20):
                        for call in (many, partial(publisher.flush, 30), connect, enter):
                            group.create_task(cancelled_at_random(call()))
                            await asyncio.sleep(0.002)
                    while cuts <= 3:  # a fast machine may be done with the rest before that
                        group.create_task(one(1))
                        await asyncio.sleep(0.002)
                    group.create_task(many())
                cutting.cancel()
            await publisher.flush(30)
            assert publisher.outstanding == 0
            assert cuts > 3
            with pytest.raises(PublishReturned):
                await publisher.publish(Message(b"x"), routing_key="nowhere")
            await one(1)
            with suppress(PublishError):  # errors of cancelled, unroutable messages
                await publisher.close()

    run_async(main())
    checker.drain(vhost, ["orders"])
    checker.close()


def test_f49_a_task_cancelled_as_it_waits_for_room_sends_nothing(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, run_async: Any
) -> None:
    proxy = fault_proxy(vhost.url)

    async def main() -> None:
        async with AsyncPublisher(proxy.url, topology=[ORDERS], max_outstanding=5) as publisher:
            await publisher.connect()
            proxy.hold_confirms()
            first = [await publisher.submit(Message(b"x"), routing_key="orders") for _ in range(5)]
            waiting = [asyncio.create_task(publisher.submit(Message(b"x"), routing_key="orders")) for _ in range(3)]
            await asyncio.sleep(0)
            waiting[1].cancel()
            await asyncio.sleep(0)
            assert publisher.outstanding == 5
            proxy.release_confirms()
            proxy.heal()
            for confirmation in first:
                await confirmation
            assert (await (await waiting[0])).attempts == 1
            assert (await (await waiting[2])).attempts == 1
            with pytest.raises(asyncio.CancelledError):
                await waiting[1]

    run_async(main())
    vhost.wait_for_messages("orders", 7)


@pytest.mark.parametrize("loop", ["asyncio", pytest.param("uvloop", marks=pytest.mark.soak)])
def test_f48_a_keyboard_interrupt_ends_the_program_after_a_flush(vhost: VirtualHost, tmp_path: Path, loop: str) -> None:
    """SIGINT cancels the main task: the publisher flushes and closes without errors."""
    program = tmp_path / "interrupted.py"
    program.write_text(
        f"import asyncio, sys, {loop}\n"
        "from reliable_mq import Message, Queue\n"
        "from reliable_mq.aio.publisher import AsyncPublisher\n"
        "async def main():\n"
        "    asyncio.get_running_loop().slow_callback_duration = 60  # a slow machine is nothing to complain of\n"
        "    async with AsyncPublisher(sys.argv[1], topology=[Queue('orders', dead_letter=None)]) as publisher:\n"
        "        await publisher.connect()\n"
        "        for _ in range(300):\n"
        "            await publisher.submit(Message(b'x'), routing_key='orders')\n"
        "        print('ready', flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "try:\n"
        f"    with asyncio.Runner(loop_factory={loop}.new_event_loop) as runner:\n"
        "        runner.run(main())\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-X", "dev", str(program), vhost.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path.cwd(),
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (out, err) == ("interrupted\n", "")
    vhost.wait_for_messages("orders", 300)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork()")
def test_f46_a_forked_publisher_refuses_and_the_parents_works(vhost: VirtualHost) -> None:
    """In the child, the copy raises at once, and a new publisher works.

    The parent's connection is not affected.
    """

    async def in_child() -> None:
        async with AsyncPublisher(vhost.url) as own:
            await own.publish(Message(b"child"), routing_key="orders")

    async def main() -> None:
        async with AsyncPublisher(vhost.url, topology=[ORDERS]) as publisher:
            await publisher.publish(Message(b"parent"), routing_key="orders")
            pending = await publisher.submit(Message(b"parent"), routing_key="orders")
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    for call in (
                        publisher.publish(Message(b"child"), routing_key="orders"),
                        publisher.submit(Message(b"child"), routing_key="orders"),
                        publisher.flush(1),
                        publisher.connect(),
                    ):
                        with pytest.raises(UsageError, match="fork"):
                            call.send(None)
                    with pytest.raises(StopIteration):
                        publisher.close().send(None)
                    asyncio.run(in_child())
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0  # noqa: ASYNC222  # a blocked loop does not matter here
            await pending
            await publisher.publish(Message(b"parent"), routing_key="orders")

    asyncio.run(main())
    vhost.wait_for_messages("orders", 4)


def test_a_blocked_loop_is_reported_and_keeps_its_connection(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, caplog: pytest.LogCaptureFixture, run_async: Any
) -> None:
    """Code that blocks the loop for over half a heartbeat is logged.

    Here the connection survives.
    """
    proxy = fault_proxy(vhost.url)

    async def main() -> None:
        async with AsyncPublisher(proxy.url, topology=[ORDERS], heartbeat=4) as publisher:
            await publisher.publish(Message(b"x"), routing_key="orders")
            threading.Event().wait(2.1)
            await until(lambda: "stalled" in caplog.text)
            await publisher.publish(Message(b"x"), routing_key="orders")

    with caplog.at_level(logging.WARNING):
        run_async(main())
    assert proxy.connections == 1


def test_a_confirmation_can_be_awaited_again_and_never_blocks(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, run_async: Any
) -> None:
    """Several tasks can await it, repeatedly; result and exception never wait.

    Callbacks run on the loop.
    """
    proxy = fault_proxy(vhost.url)

    async def main() -> None:
        async with AsyncPublisher(proxy.url, topology=[ORDERS]) as publisher:
            await publisher.connect()
            proxy.hold_confirms()
            confirmation = await publisher.submit(Message(b"x"), routing_key="orders")
            assert not confirmation.done()
            for ask in (confirmation.result, confirmation.exception):
                with pytest.raises(UsageError, match="not settled"):
                    ask()
            threads: list[int] = []
            confirmation.add_done_callback(lambda _: threads.append(threading.get_ident()))
            confirmation.add_done_callback(lambda _: 1 / 0)

            async def wait() -> object:
                return await confirmation

            tasks = [asyncio.create_task(wait()) for _ in range(3)]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(wait(), 0.05)
            tasks[0].cancel()
            proxy.release_confirms()
            proxy.heal()
            receipts = await asyncio.gather(*tasks[1:])
            assert receipts == [confirmation.result()] * 2
            assert await confirmation == confirmation.result()
            confirmation.add_done_callback(lambda _: threads.append(threading.get_ident()))
            await until(lambda: len(threads) == 2)
            assert set(threads) == {threading.get_ident()}

    run_async(main())


def test_it_belongs_to_one_loop(vhost: VirtualHost) -> None:
    """On another loop every call is refused; calls on the first are unaffected."""

    async def main() -> None:
        async with AsyncPublisher(vhost.url, topology=[ORDERS]) as publisher:
            await publisher.publish(Message(b"x"), routing_key="orders")

            async def elsewhere() -> None:
                for call in (
                    publisher.publish(Message(b"x"), routing_key="orders"),
                    publisher.submit(Message(b"x"), routing_key="orders"),
                    publisher.flush(1),
                    publisher.close(),
                ):
                    with pytest.raises(UsageError, match="event loop"):
                        await call

            await asyncio.to_thread(asyncio.run, elsewhere())
            await publisher.publish(Message(b"x"), routing_key="orders")

    asyncio.run(main())


def test_publish_many_takes_plain_and_asynchronous_iterables(vhost: VirtualHost, run_async: Any) -> None:
    async def some() -> AsyncIterator[Message]:
        for _ in range(3000):
            yield Message(b"x")

    async def main() -> None:
        async with AsyncPublisher(vhost.url, topology=[ORDERS], max_outstanding=100) as publisher:
            report = await publisher.publish_many(some(), routing_key="orders")
            assert (report.ok, report.confirmed) == (True, 3000)
            failed = [Message(b"x") for _ in range(3)]
            report = await publisher.publish_many(failed, routing_key="nowhere")
            assert report.confirmed == 0
            assert [one for one, _ in report.failures] == failed
            with pytest.raises(PublishError, match="3 messages"):
                report.raise_for_failures()

    run_async(main())


@pytest.mark.soak
def test_closing_without_a_broker_ends_in_time_or_when_cancelled(
    private_broker: RabbitMQ, private_vhost: VirtualHost, run_async: Any
) -> None:
    """Outstanding messages are reported as unconfirmed.

    A cancelled close can be repeated.
    """

    async def main() -> None:
        publisher = AsyncPublisher(private_vhost.url, topology=[ORDERS])
        await publisher.connect()
        await asyncio.to_thread(private_broker.kill)
        confirmation = await publisher.submit(Message(b"x"), routing_key="orders")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(publisher.close(), 0.2)
        with pytest.raises(UsageError, match="closed"):
            await publisher.publish(Message(b"x"), routing_key="orders")
        with pytest.raises(TimeoutError):
            await publisher.flush(0.1)
        started = time.monotonic()
        with pytest.raises(PublishUnconfirmed):
            await publisher.close(timeout=0.5)
        assert time.monotonic() - started < 20
        assert confirmation.done()
        await publisher.close()

    try:
        run_async(main())
    finally:
        private_broker.start()


def test_first_calls_at_once_share_one_connection_or_one_error(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, run_async: Any
) -> None:
    proxy = fault_proxy(vhost.url)

    async def main() -> None:
        publisher = AsyncPublisher(proxy.url, topology=[ORDERS])
        await asyncio.gather(*(publisher.publish(Message(b"x"), routing_key="orders") for _ in range(50)))
        await publisher.close()
        wrong = AsyncPublisher(vhost.url.replace("guest:guest", "guest:wrong"))
        errors = await asyncio.gather(
            *(wrong.publish(Message(b"x"), routing_key="orders") for _ in range(5)), return_exceptions=True
        )
        assert {type(error) for error in errors} == {BrokerUnavailable}
        with pytest.raises(BrokerUnavailable, match="403"):
            await wrong.connect()
        with pytest.raises(BrokerUnavailable, match="403"):
            async with wrong:
                pytest.fail("it was entered")
        await wrong.close()

    run_async(main())
    assert proxy.connections == 1


def test_one_that_is_forgotten_is_reported(vhost: VirtualHost) -> None:
    """An unclosed publisher is a ResourceWarning: no exit handler can run a loop."""

    async def main() -> None:
        publisher = AsyncPublisher(vhost.url, topology=[ORDERS])
        await publisher.publish(Message(b"x"), routing_key="orders")
        forgotten = [publisher]
        del publisher
        with pytest.warns(ResourceWarning, match="was not closed"):
            forgotten.clear()

    asyncio.run(main())


def test_readings_are_those_of_the_sync_api(vhost: VirtualHost) -> None:
    """They are the same families and labels, and one for the user's loop."""
    from prometheus_client import CollectorRegistry, generate_latest

    from reliable_mq import Publisher

    def names(registry: CollectorRegistry) -> set[str]:
        return {line.partition(" ")[0] for line in generate_latest(registry).decode().splitlines() if "#" not in line}

    ours, theirs = CollectorRegistry(), CollectorRegistry()

    async def main() -> None:
        async with AsyncPublisher(vhost.url, topology=[ORDERS], registry=ours) as publisher:
            await publisher.publish(Message(b"x"), routing_key="orders")
            assert ours.get_sample_value(
                "reliable_mq_publisher_settled_total", {"publisher": "publisher", "outcome": "confirmed"}
            )

    asyncio.run(main())
    with Publisher(vhost.url, topology=[ORDERS], registry=theirs) as publisher:
        publisher.publish(Message(b"x"), routing_key="orders")
    stalled = 'reliable_mq_publisher_event_loop_stalled_seconds_total{publisher="publisher"}'
    assert names(ours) == names(theirs) | {stalled}
