"""Cases of the asyncio API only: a stalled event loop, and thousands of tasks."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
import time
import tracemalloc
import weakref
from contextvars import ContextVar
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import tenacity
import uvloop
from prometheus_client import CollectorRegistry, generate_latest

from reliable_mq import (
    AsyncConfirmation,
    AsyncConsumer,
    AsyncPublisher,
    Consumer,
    DeadLetter,
    Message,
    PublishDisconnected,
    PublishError,
    PublishNacked,
    PublishUnconfirmed,
    Queue,
    RetryPolicy,
    StaleDelivery,
    UsageError,
)
from reliable_mq.aio import publisher_channel
from reliable_mq.aio.outbox_channel import AsyncRelayPublisher
from reliable_mq.aio.subscription import AsyncRepublisher
from reliable_mq.connection.aiormq_driver import Link, link
from reliable_mq.connection.connection import ConnectionState
from reliable_mq.core.outbox import OutboxRow
from reliable_mq.engine import publisher as engine_publisher
from reliable_mq.outbox import SQLiteOutbox
from reliable_mq.stores import MemoryStore
from reliable_mq.testing.waiting import until
from tests.contract.test_publishing import let_resolve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from pathlib import Path

    from reliable_mq import Delivery
    from reliable_mq.core.retry.dead_letters import RepublishRequest
    from tests.contract.scripted_broker import Published, ScriptedBroker

HEARTBEAT = b"\x08\0\0\0\0\0\0\xce"


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Return a function that runs a coroutine on a fresh event loop.

    No task may be left, and the loop may report no error.
    """

    def run(main: Coroutine[Any, Any, None]) -> None:
        complaints: list[object] = []

        async def watched() -> set[str]:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
            await asyncio.wait_for(main, 100)
            return {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}

        with asyncio.Runner(loop_factory=request.param) as runner:
            assert runner.run(watched()) == set()
        assert complaints == []

    return run


def acking(published: Published) -> None:
    published.channel.ack(published.number)


class Beating(threading.Thread):
    """A thread that sends the broker's heartbeats on the newest connection."""

    def __init__(self, broker: ScriptedBroker) -> None:
        super().__init__(daemon=True)
        self._broker = broker
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.2):
            self._broker.connections[-1].send_bytes(HEARTBEAT)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self.join(5)


def test_an_address_that_connects_too_late_ends_no_connection(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of an address ends just when it is connected. The event loop closes it; the next one is in use."""
    let_resolve(monkeypatch, "rabbit.test", [(socket.AF_INET, (f"127.0.0.{one}", broker.port)) for one in (2, 1)])
    broker.script = acking

    async def main() -> None:
        loop = asyncio.get_running_loop()
        connect = loop.create_connection
        late: list[asyncio.Transport] = []

        async def create_connection(*arguments: Any, **options: Any) -> Any:
            transport, protocol = await connect(*arguments, **options)
            if late:
                return transport, protocol
            late.append(transport)
            transport.close()
            raise TimeoutError

        monkeypatch.setattr(loop, "create_connection", create_connection)
        with socket.create_server(("127.0.0.2", broker.port)):
            url = f"amqp://guest:guest@rabbit.test:{broker.port}/"
            async with AsyncPublisher(url, reconnect_stop=lambda _: True) as publisher:
                await publisher.publish(Message(b"x"), routing_key="q")
                assert len(broker.connections) == 1

    asyncio.run(main())


@pytest.mark.slow
def test_a_stalled_loop_reads_before_it_gives_up_a_connection(
    broker: ScriptedBroker, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing was read for more than two heartbeats.

    The broker's heartbeats wait in the socket, and the log names the reason.
    """
    broker.script = acking

    registry = CollectorRegistry()

    async def main() -> None:
        async with (
            AsyncPublisher(broker.url, heartbeat=1, registry=registry, name="p") as publisher,
            AsyncConsumer(broker.url, "q", handle, registry=registry, name="c"),
        ):
            await publisher.publish(Message(b"x"), routing_key="q")
            channel = broker.consuming
            with Beating(broker):
                threading.Event().wait(3)
                await publisher.publish(Message(b"x"), routing_key="q")
                channel.deliver(b"y")
                await until(lambda: handled == [b"y"])
                await until(lambda: "stalled" in caplog.text)
            stalled = "reliable_mq_{}_event_loop_stalled_seconds_total"
            publishers = registry.get_sample_value(stalled.format("publisher"), {"publisher": "p"})
            assert publishers is not None
            assert 2.9 < publishers < 10
            # Its heartbeat is the default, which three seconds do not exceed.
            assert registry.get_sample_value(stalled.format("consumer"), {"consumer": "c", "queue": "q"}) == 0
        assert len(broker.connections) == 2

    handled: list[bytes] = []

    async def handle(delivery: Delivery) -> None:
        handled.append(delivery.body)

    with caplog.at_level(logging.WARNING):
        run(main())


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [None, 2])
def test_a_stalled_loop_reads_before_it_judges_a_publish(broker: ScriptedBroker, run: Any, timeout: int | None) -> None:
    """The confirm arrives during the stall, and waits in the socket."""

    def ack_others(published: Published) -> None:
        if published.body != b"late" or published.possible_duplicate:
            acking(published)

    broker.script = ack_others

    async def main() -> None:
        async with AsyncPublisher(broker.url, confirm_timeout=2) as publisher:
            confirmation = await publisher.submit(Message(b"late"), routing_key="q", timeout=timeout)
            await until(lambda: broker.published)
            await publisher.submit(Message(b"next"), routing_key="q")  # its turn comes before the next read
            threading.Event().wait(2.5)
            broker.published[0].channel.ack(1)
            assert not (await confirmation).possible_duplicate
        assert len(broker.connections) == 1

    run(main())


def test_a_stalled_loop_reads_before_it_judges_a_flush(broker: ScriptedBroker, run: Any) -> None:
    """The confirm arrives during the stall, and is read in the turn of the loop in which the time is over."""

    async def main() -> None:
        async with AsyncPublisher(broker.url) as publisher:
            await publisher.submit(Message(b"x"), routing_key="q")
            await until(lambda: broker.published)
            flushing = asyncio.ensure_future(publisher.flush(0.05))
            await asyncio.sleep(0)
            broker.published[0].channel.ack(1)
            threading.Event().wait(0.2)
            await flushing

    run(main())


def test_a_stall_is_reported_from_half_a_heartbeat_not_a_quarter(
    broker: ScriptedBroker, run: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stall may begin at any time between two checks, which are 0.1 s apart here."""
    registry = CollectorRegistry()
    name = "reliable_mq_consumer_event_loop_stalled_seconds_total"
    now, looks = 1000.0, 0
    monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=lambda: now))
    check_for_stall = Link._check_for_stall

    def counted(self: Link, due: float) -> None:
        nonlocal looks
        check_for_stall(self, due)
        looks += 1

    monkeypatch.setattr(Link, "_check_for_stall", counted)

    def stalled() -> float:
        return registry.get_sample_value(name, {"consumer": "c", "queue": "q"}) or 0.0

    async def reported(seconds: float, later: float) -> float:
        """Return the reported seconds of a stall that begins `later` after a check."""
        nonlocal now
        before, seen = stalled(), looks
        now += later + seconds
        await until(lambda: looks > seen)
        return stalled() - before

    async def handle(_: Delivery) -> None: ...

    async def main() -> None:
        async with AsyncConsumer(broker.url, "q", handle, heartbeat=2, registry=registry, name="c") as consumer:
            await until(lambda: consumer.connected)
            for later in (0.01, 0.06, 0.1):
                assert await reported(0.5, later) == 0
            for later in (0.01, 0.06, 0.1):
                assert 0.9 < await reported(1, later) < 1.01
            assert caplog.text.count("stalled for") == 3

    with caplog.at_level(logging.WARNING):
        run(main())


@pytest.mark.slow
def test_a_connection_lost_to_a_stall_is_replaced_without_loss(
    broker: ScriptedBroker, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker closes the connection during the stall.

    Unconfirmed messages are published again.
    """

    async def main() -> None:
        async with AsyncPublisher(broker.url, heartbeat=1) as publisher:
            confirmation = await publisher.submit(Message(b"x"), routing_key="q")
            await until(lambda: broker.published)
            broker.script = acking
            broker.connections[-1].cut()
            threading.Event().wait(1)
            assert (await confirmation).possible_duplicate
            await until(lambda: "stalled" in caplog.text)

    with caplog.at_level(logging.WARNING):
        run(main())


def test_the_end_of_the_stream_is_noticed_despite_unsent_frames(
    broker: ScriptedBroker, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker has an alarm and reads nothing. A proxy half-closes the connection."""
    links: list[Link] = []
    make, released = Link.__init__, threading.Event()

    def made(self: Link, *arguments: Any) -> None:
        links.append(self)
        make(self, *arguments)

    monkeypatch.setattr(Link, "__init__", made)

    async def main() -> None:
        broker.script = lambda _: released.wait(60)
        async with AsyncPublisher(broker.url, reconnect_wait=tenacity.wait_fixed(0.02)) as publisher:
            await publisher.connect()
            while links[0].write_buffer_size() < 100_000:
                await publisher.submit(Message(bytes(60_000)), routing_key="q")
                await asyncio.sleep(0)
            broker.script = acking
            broker.connections[0].block("memory")
            await until(lambda: publisher.blocked is not None)
            broker.connections[0].end_stream()
            try:
                await until(lambda: len(broker.connections) == 2)
            finally:
                released.set()

    run(main())


@pytest.mark.slow
def test_2_000_tasks_that_publish_hold_no_more_than_the_window(broker: ScriptedBroker, run: Any) -> None:
    """Only a window of messages is unconfirmed, encoded or buffered at a time."""
    owed: list[int] = [0, 0]  # unconfirmed messages, now and at most
    lock = threading.Lock()
    held: list[Published] = []

    def script(published: Published) -> None:
        with lock:
            held.append(published)
            owed[1] = max(owed[1], len(held))
            if len(held) == 100:
                published.channel.ack(published.number, multiple=True)
                held.clear()

    broker.script = script
    most = 0

    async def main() -> None:
        nonlocal most
        async with AsyncPublisher(broker.url, max_outstanding=200) as publisher:

            async def one(number: int) -> str:
                nonlocal most
                receipt = await publisher.publish(Message(b"%d" % number), routing_key="q")
                most = max(most, publisher.outstanding)
                return receipt.message_id

            receipts = await asyncio.gather(*(one(number) for number in range(2000)))
            assert len(set(receipts)) == 2000
            assert publisher.outstanding == 0

    run(main())
    assert most <= 200
    assert owed[1] <= 200
    assert [published.body for published in broker.published] == [b"%d" % number for number in range(2000)]


@pytest.mark.slow
def test_2_000_unconfirmed_tasks_hold_no_copies_past_the_window(broker: ScriptedBroker, run: Any) -> None:
    """Apart from the callers' messages, memory only holds what the window admits.

    Nothing is left of callers that gave up.
    """
    window, size = 100, 4000
    messages = [Message(b"%d" % number + bytes(size)) for number in range(2000)]

    async def main() -> None:
        async with AsyncPublisher(broker.url, max_outstanding=window) as publisher:
            await publisher.connect()
            tracemalloc.start()
            try:
                tasks = [asyncio.create_task(publisher.publish(message, routing_key="q")) for message in messages]
                in_vain = (publisher.publish(Message(bytes(size)), routing_key="q", timeout=0.01) for _ in range(200))
                late = await asyncio.gather(*in_vain, return_exceptions=True)
                assert {type(one) for one in late} == {PublishUnconfirmed}
                del late, in_vain
                await until(lambda: len(broker.published) == window)
                await asyncio.sleep(0.01)  # the loop keeps its last work for one turn
                gc.collect()
                bodies = [trace.size for trace in tracemalloc.take_snapshot().traces if size <= trace.size < 2 * size]
            finally:
                tracemalloc.stop()
                broker.script = acking
                broker.published[-1].channel.ack(window, multiple=True)
            assert sum(bodies) < 2 * window * size, "the scripted broker has one window of them"
            receipts = await asyncio.gather(*tasks)
            assert {receipt.attempts for receipt in receipts} == {1}

    run(main())
    assert [len(published.body) for published in broker.published] == [len(message.body) for message in messages]


def test_submits_of_one_turn_need_no_task_and_share_one_write(
    broker: ScriptedBroker, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = Link.write

    def counted(link: Link, data: bytes) -> None:
        written.append(len(data))
        write(link, data)

    monkeypatch.setattr(Link, "write", counted)

    async def main() -> None:
        async with AsyncPublisher(broker.url) as publisher:
            await publisher.connect()
            written.clear()
            before = asyncio.all_tasks()
            confirmations = [await publisher.submit(Message(b"%d" % number), routing_key="q") for number in range(50)]
            assert asyncio.all_tasks() == before
            assert written == []
            await until(lambda: len(broker.published) == 50)
            assert asyncio.all_tasks() == before
            assert len(written) == 1
            broker.published[0].channel.ack(50, multiple=True)
            for confirmation in confirmations:
                await confirmation

    run(main())


def test_a_cancelled_entering_raises_no_failure_of_another_task(
    broker: ScriptedBroker, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The other task has waited for the same connection, and its message is given up."""
    entering: asyncio.Future[None]

    async def enter(publisher: AsyncPublisher) -> None:
        async with publisher:
            pytest.fail("it was entered")

    async def submit(publisher: AsyncPublisher) -> AsyncConfirmation:
        confirmation = await publisher.submit(Message(b"x"), routing_key="q")
        entering.cancel()
        return confirmation

    async def main() -> None:
        nonlocal entering
        publisher = AsyncPublisher(broker.url)
        submitting = asyncio.ensure_future(submit(publisher))
        await asyncio.sleep(0)
        entering = asyncio.ensure_future(enter(publisher))
        confirmation = await submitting
        with pytest.raises(asyncio.CancelledError):
            await entering
        assert isinstance(confirmation.exception(), PublishUnconfirmed)

    run(main())
    assert "leaving a publisher because of CancelledError, with messages unconfirmed" in caplog.text


def test_cancelled_publishes_leave_the_others_their_outcomes(broker: ScriptedBroker, run: Any) -> None:
    """Publishes are cancelled on the wire, waiting for the window, or not begun.

    Admitted messages are settled, others are not sent.
    """

    async def main() -> None:
        async with AsyncPublisher(broker.url, max_outstanding=4) as publisher:
            await publisher.connect()
            tasks = [
                asyncio.create_task(publisher.publish(Message(b"%d" % number), routing_key="q")) for number in range(8)
            ]
            never_ran = asyncio.create_task(publisher.publish(Message(b"never"), routing_key="q"))
            never_ran.cancel()
            await until(lambda: len(broker.published) == 4)
            for number in (1, 2, 5):
                tasks[number].cancel()
            await asyncio.sleep(0)
            assert publisher.outstanding == 4
            channel = broker.published[0].channel
            channel.return_(broker.published[1])
            channel.ack(4, multiple=True)
            await until(lambda: len(broker.published) == 7)
            channel.ack(7, multiple=True)
            results = await asyncio.gather(*tasks, never_ran, return_exceptions=True)
            cancelled = [isinstance(result, asyncio.CancelledError) for result in results]
            assert cancelled == [number in {1, 2, 5, 8} for number in range(9)]
            assert not any(isinstance(result, Exception) for result in results)
            assert publisher.outstanding == 0
            assert [one.body for one in broker.published] == [b"0", b"1", b"2", b"3", b"4", b"6", b"7"]
            assert publisher.statistics.returned == 1
            confirmed = [await publisher.submit(Message(b"next"), routing_key="q")]
            await until(lambda: len(broker.published) == 8)
            channel.ack(8)
            await confirmed[0]
            with pytest.raises(Exception, match="returned"):  # for the cancelled task, since no caller has seen it
                await publisher.close()

    run(main())


def test_a_cancelled_large_publish_does_not_block_a_small_one(broker: ScriptedBroker, run: Any) -> None:
    """A message that fits is admitted at once, although nothing is settled."""

    async def main() -> None:
        async with AsyncPublisher(broker.url, max_outstanding_bytes=1000) as publisher:

            def submit(size: int) -> asyncio.Task[Any]:
                return asyncio.create_task(publisher.submit(Message(bytes(size)), routing_key="q"))

            first = await submit(600)
            large, small = submit(600), submit(100)
            await asyncio.sleep(0)
            assert not small.done()
            large.cancel()
            confirmations = [first, await asyncio.wait_for(small, 5), await asyncio.wait_for(submit(100), 5)]
            await until(lambda: len(broker.published) == 3)
            broker.published[0].channel.ack(3, multiple=True)
            for confirmation in confirmations:
                await confirmation
            assert large.cancelled()

    run(main())


def test_close_raises_a_failure_admitted_during_cancellation(broker: ScriptedBroker, run: Any) -> None:
    """The message is admitted in the same turn of the loop, and no report has it."""

    async def main() -> None:
        async with AsyncPublisher(broker.url, max_outstanding=1, retry=RetryPolicy(max_attempts=1)) as publisher:
            first = await publisher.submit(Message(b"1"), routing_key="q")
            many = asyncio.create_task(publisher.publish_many([Message(b"2")], routing_key="q"))
            await asyncio.sleep(0)
            first.add_done_callback(lambda _: many.cancel())
            await until(lambda: len(broker.published) == 1)
            broker.published[0].channel.ack(1)
            await until(lambda: len(broker.published) == 2)
            assert many.cancelled()
            broker.published[1].channel.nack(2)

    with pytest.raises(PublishNacked):
        run(main())


def test_only_one_of_two_closes_raises_a_failure(broker: ScriptedBroker, run: Any) -> None:
    """The user sees the failure between the ends of the two closes."""

    async def main() -> None:
        publisher = AsyncPublisher(broker.url)
        confirmation = await publisher.submit(Message(b"x"), routing_key="q")
        raised: list[PublishError] = []

        async def close() -> None:
            try:
                await publisher.close(0)
            except PublishError as error:
                raised.append(error)
                assert confirmation.exception() is not None

        await asyncio.gather(close(), close())
        assert [type(error) for error in raised] == [PublishUnconfirmed]

    run(main())


def test_messages_that_fail_at_once_do_not_stop_the_loop(broker: ScriptedBroker, run: Any) -> None:
    """The publisher reconnects while the messages of a report fail."""

    async def main() -> None:
        async with AsyncPublisher(broker.url, on_disconnected="raise", connect_timeout=1) as publisher:
            await until(lambda: publisher.connected)
            broker.silent = True
            broker.connection.cut()
            await until(lambda: not publisher.connected)
            broker.silent = False
            given_up = time.monotonic() + 10

            def messages() -> Iterator[Message]:
                while not publisher.connected and time.monotonic() < given_up:
                    yield Message(b"x")

            report = await publisher.publish_many(messages(), routing_key="q")
            assert publisher.connected
            assert {type(error) for _, error in report.failures} == {PublishDisconnected}

    run(main())


def test_a_report_ended_by_a_close_tells_of_failures(broker: ScriptedBroker, run: Any) -> None:
    """The close left them to the report."""
    broker.script = lambda published: published.channel.nack(published.number)

    async def main() -> None:
        publisher = AsyncPublisher(broker.url, retry=RetryPolicy(max_attempts=1))

        async def messages() -> AsyncIterator[Message]:
            yield Message(b"1", message_id="nacked")
            await publisher.close()
            yield Message(b"2")

        with pytest.raises(UsageError, match="is closed") as caught:
            await publisher.publish_many(messages(), routing_key="q")
        [note] = caught.value.__notes__
        assert "message nacked to exchange '' with routing key 'q' was nacked" in note

    run(main())


def test_a_row_admitted_as_its_relay_is_cancelled_returns_once(broker: ScriptedBroker, run: Any) -> None:
    """Its confirm decides, so it is not published again."""

    async def main() -> None:
        async with AsyncPublisher(broker.url, max_outstanding=1) as publisher:
            relay = AsyncRelayPublisher(publisher._connect_relay, publisher._relay)
            relay.start()
            relay.send([OutboxRow(number, Message(b"x"), "", "q", True, None, 0, False) for number in (1, 2, 3)])
            relay.watch(lambda: relay._loop.call_soon(relay.cancel))  # between the admission and the next turn
            for tag in (1, 2):
                await until(lambda tag=tag: len(broker.published) == tag)  # type: ignore[misc]
                broker.published[-1].channel.ack(tag)
            await publisher.flush()
            await until(lambda: len(relay._settled) >= 3)
            settled = [(row.id, error is None) for row, error in relay.take_settled()]
            assert sorted(settled) == [(1, True), (2, True), (3, False)]

    run(main())


def test_the_time_to_connect_counts_against_the_wait_for_room(
    broker: ScriptedBroker, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeout of a message starts at its submission, whatever it waits for."""
    broker.silent = True
    passed = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed)
    for module in (engine_publisher, publisher_channel):
        monkeypatch.setattr(module, "time", clock)

    async def main() -> None:
        nonlocal passed
        publisher = AsyncPublisher(broker.url, max_outstanding=1, connect_timeout=0.3, delivery_timeout=600)
        first = asyncio.create_task(publisher.submit(Message(b"x"), routing_key="q"))
        await asyncio.sleep(0)
        began = time.monotonic()
        second = asyncio.create_task(publisher.submit(Message(b"y"), routing_key="q", timeout=60.5))
        await until(lambda: broker.connections)
        passed = 60.0  # the duration of the first attempt to connect
        with pytest.raises(PublishUnconfirmed, match="window"):
            await second
        assert 0.4 < time.monotonic() - began < 25
        assert not (await first).done()
        with pytest.raises(PublishUnconfirmed, match="never sent"):
            await publisher.close(timeout=0)

    run(main())


def test_readings_of_a_consumer_are_those_of_the_sync_api(broker: ScriptedBroker, run: Any) -> None:
    """The names and labels are the same, with one more reading for the event loop.

    In the asyncio API the event loop belongs to the user.
    """

    def names(registry: CollectorRegistry) -> set[str]:
        return {line.partition(" ")[0] for line in generate_latest(registry).decode().splitlines() if "#" not in line}

    def serve_one(acked: int) -> None:
        broker.consuming.deliver(b"x")
        broker.wait_settled(acked)

    ours, theirs = CollectorRegistry(), CollectorRegistry()

    async def handle(_: Delivery) -> None: ...

    async def main() -> None:
        async with AsyncConsumer(broker.url, "q", handle, registry=ours):
            await asyncio.to_thread(serve_one, 1)

    run(main())
    with Consumer(broker.url, "q", lambda _: None, registry=theirs):
        serve_one(2)
    stalled = 'reliable_mq_consumer_event_loop_stalled_seconds_total{consumer="consumer",queue="q"}'
    assert names(ours) == names(theirs) | {stalled}
    assert 'reliable_mq_consumer_acked_total{consumer="consumer",queue="q"}' in names(theirs)


@pytest.mark.parametrize("options", [{}, {"batch_size": 5}, {"idempotency": True}], ids=["each", "batches", "store"])
def test_an_async_handler_sees_only_the_context_of_its_consumer(
    broker: ScriptedBroker, run: Any, options: dict[str, Any]
) -> None:
    """A handler keeps its variables while it runs, even if they cannot be compared."""
    tenant: ContextVar[Any] = ContextVar("tenant", default="")
    region: ContextVar[str] = ContextVar("region", default="")
    seen: list[object] = []

    class Incomparable:
        def __eq__(self, other: object) -> bool:
            raise ValueError

        __hash__ = None  # type: ignore[assignment]

    async def handle(given: Any) -> None:
        deliveries = given if isinstance(given, list) else [given]
        seen.extend((tenant.get(), region.get()) for _ in deliveries)
        mine = Incomparable()
        tenant.set(mine)
        await asyncio.sleep(0)
        assert tenant.get() is mine

    def deliver() -> None:
        for number in range(60):
            broker.consuming.deliver(b"%d" % number, message_id=str(number))
        broker.wait(lambda: {one.tag for one in broker.settlements if one.verdict == "ack"} >= {60}, "acks")

    async def main() -> None:
        region.set("eu")
        named = {"idempotency": MemoryStore()} if "idempotency" in options else options
        async with AsyncConsumer(broker.url, "q", handle, prefetch=60, concurrency=2, **named):
            await asyncio.to_thread(deliver)

    run(main())
    assert seen == [("", "eu")] * 60


def test_the_context_of_a_failed_handler_ends_with_it(
    broker: ScriptedBroker, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead letters are published without it, as one task and connection publish those of all deliveries."""
    tenant: ContextVar[str] = ContextVar("tenant", default="")
    region: ContextVar[str] = ContextVar("region", default="")
    seen: list[tuple[str, str]] = []
    put = AsyncRepublisher.put

    def watched(republisher: AsyncRepublisher, republish: RepublishRequest) -> None:
        seen.append((tenant.get(), region.get()))
        put(republisher, republish)

    async def handle(_: Delivery) -> None:
        tenant.set("acme")
        raise DeadLetter("no")

    async def main() -> None:
        region.set("eu")
        async with AsyncConsumer(broker.url, Queue("q", dead_letter="q.dead"), handle):
            broker.consuming.deliver(b"x", message_id="1")
            await until(lambda: seen)

    broker.script = acking
    monkeypatch.setattr(AsyncRepublisher, "put", watched)
    run(main())
    assert seen == [("", "eu")]


def test_closing_the_consumer_in_a_get_block_requeues_deliveries(broker: ScriptedBroker, run: Any) -> None:
    """The consumer waits as for a handler, and then returns them to the broker.

    The end of the block raises.
    """

    async def main() -> None:
        consumer = AsyncConsumer(broker.url, "orders", stop_timeout=0.1)
        await consumer.connect()
        broker.ready.extend([b"a", b"b"])
        block = consumer.get(2, timeout=10)
        assert len(await block.__aenter__()) == 2
        await consumer.close()
        with pytest.raises(StaleDelivery):
            await block.__aexit__(None, None, None)

    run(main())
    assert all(one.verdict != "ack" for one in broker.settlements)
    assert broker.connections[0].closed_in_good_order


@pytest.mark.parametrize("in_time", [True, False])
def test_an_ended_consumer_is_not_kept_alive_by_a_timer(broker: ScriptedBroker, run: Any, in_time: bool) -> None:
    """The event loop runs on, and a check for unacked deliveries is due after 1 350 s."""

    async def ended() -> tuple[weakref.ref[Any], weakref.ref[Any]]:
        release = asyncio.Event()

        async def handle(_: Delivery) -> None:
            await release.wait()

        consumer = AsyncConsumer(broker.url, "orders", handle, stop_timeout=5 if in_time else 0.1)
        await consumer.connect()
        broker.consuming.deliver(b"x")
        await until(lambda: consumer.statistics.delivered == 1)
        if in_time:
            release.set()
        await consumer.close()
        return weakref.ref(consumer), weakref.ref(handle)

    async def main() -> None:
        consumer, handler = await ended()
        gc.collect()
        assert consumer() is None
        assert handler() is None

    run(main())


def test_cancelling_run_requeues_deliveries_and_leaves_nothing(broker: ScriptedBroker, run: Any) -> None:
    """The handlers are cancelled, which is not a failure.

    Nothing is acked, and the connection is closed properly.
    """
    ended: list[bytes] = []
    begun = asyncio.Event()

    async def handle(delivery: Delivery) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(delivery.body)
            raise

    async def main() -> None:
        running = asyncio.create_task(AsyncConsumer(broker.url, "q", handle).run())
        await until(lambda: broker.consumed)
        for body in (b"a", b"b", b"c"):
            broker.consuming.deliver(body)
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run(main())
    assert ended == [b"a"]
    assert all(one.verdict != "ack" and one.requeue for one in broker.settlements)
    assert broker.published == []
    assert broker.connections[0].closed_in_good_order


def test_a_task_that_is_cancelled_in_get_takes_nothing_with_it(broker: ScriptedBroker, run: Any) -> None:
    """The task waits for deliveries, or holds some.

    Held deliveries are requeued, and the next task gets new ones.
    """

    async def main() -> None:
        async with AsyncConsumer(broker.url, "orders", ack_interval=0.02) as consumer:

            async def take(count: int, timeout: float, hold: asyncio.Event | None = None) -> list[bytes]:
                async with consumer.get(count, timeout=timeout) as deliveries:
                    if hold is not None:
                        hold.set()
                        await asyncio.Event().wait()
                    return [delivery.body for delivery in deliveries]

            waiting = asyncio.create_task(take(1, 20))
            await until(lambda: "Basic.Get" in broker.seen)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            broker.ready.extend([b"a", b"b"])
            holds = asyncio.Event()
            holding = asyncio.create_task(take(2, 5, holds))
            await asyncio.wait_for(holds.wait(), 10)
            holding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await holding
            await until(lambda: sum(2 if one.multiple else 1 for one in broker.settlements) == 2)
            assert all(one.verdict == "nack" and one.requeue for one in broker.settlements)
            broker.ready.append(b"c")
            assert await take(1, 5) == [b"c"]

    run(main())


async def take_one(consumer: AsyncConsumer) -> list[bytes]:
    async with consumer.get(1, timeout=20) as deliveries:
        return [delivery.body for delivery in deliveries]


async def begun(consumer: AsyncConsumer) -> None:
    """Return once a start has begun, in the same turn of the event loop."""
    while consumer._subscription is None:  # noqa: ASYNC110  # an event would come later
        await asyncio.sleep(0)


@pytest.mark.parametrize("pulls", [False, True], ids=["connect", "get"])
def test_a_start_that_is_cancelled_twice_may_be_tried_again(broker: ScriptedBroker, run: Any, pulls: bool) -> None:
    """A deadline and the end of a task group may both cancel it.

    The second cancellation comes while the start is undone.
    """

    async def main() -> None:
        consumer = AsyncConsumer(broker.url, "orders")
        starting = asyncio.create_task(take_one(consumer) if pulls else consumer.connect())
        await begun(consumer)
        starting.cancel()
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        broker.ready.append(b"a")
        await consumer.connect()
        assert await take_one(consumer) == [b"a"]
        await consumer.close()

    run(main())


@pytest.mark.parametrize("pulls", [False, True], ids=["connect", "get"])
def test_who_gives_up_a_start_ends_it_for_nobody_else(broker: ScriptedBroker, run: Any, pulls: bool) -> None:
    async def main() -> None:
        consumer = AsyncConsumer(broker.url, "orders")
        first = asyncio.create_task(take_one(consumer) if pulls else consumer.connect())
        await begun(consumer)
        others = [
            asyncio.create_task(take_one(consumer)),
            *([] if pulls else [asyncio.create_task(consumer.connect())]),
        ]
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        broker.ready.append(b"a")
        assert (await asyncio.gather(*others))[0] == [b"a"]
        await consumer.close()

    run(main())


def test_another_event_loop_closes_no_publisher(broker: ScriptedBroker) -> None:
    """The publisher is unchanged."""

    async def main() -> None:
        async with AsyncPublisher(broker.url) as publisher:

            def elsewhere() -> None:
                with pytest.raises(UsageError, match="another event loop"):
                    asyncio.run(publisher.close())

            await asyncio.to_thread(elsewhere)
            assert publisher.health().ready
            await publisher.connect()

    asyncio.run(main())


# -- closing that is cancelled, or early -------------------------------------------------------------------------------


async def nothing_runs(before: set[asyncio.Task[Any]]) -> None:
    """Wait until no tasks are left except the earlier ones."""
    await until(lambda: asyncio.all_tasks() <= before)


async def cancelled_twice(task: asyncio.Task[None], closing: Callable[[], bool]) -> None:
    """Cancel a task, and once more while it closes."""
    task.cancel()
    await until(closing)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_publisher_closed_before_it_connects_never_connects(broker: ScriptedBroker, run: Any) -> None:
    """That connection would never be closed."""

    async def main() -> None:
        before = asyncio.all_tasks()
        publisher = AsyncPublisher(broker.url)
        publishing = asyncio.create_task(publisher.publish(Message(b"x"), routing_key="q"))
        await asyncio.sleep(0)
        publishing.cancel()
        await publisher.close(0)
        with pytest.raises(asyncio.CancelledError):
            await publishing
        async with AsyncPublisher(broker.url):  # takes longer
            pass
        await nothing_runs(before)

    run(main())
    assert len(broker.connections) == 1


@pytest.mark.parametrize("outbox", [False, True])
def test_a_publisher_block_cancelled_twice_leaves_nothing_behind(
    broker: ScriptedBroker, run: Any, tmp_path: Path, outbox: bool
) -> None:
    """It is closed without waiting for confirms.

    Nothing connects again, and the event loop reports no error.
    """
    registry = CollectorRegistry()

    async def main() -> None:
        before = asyncio.all_tasks()
        file = SQLiteOutbox(tmp_path / "outbox") if outbox else None
        publisher = AsyncPublisher(broker.url, outbox=file, registry=registry)
        entered = asyncio.Event()

        async def enter() -> None:
            async with publisher:
                await publisher.submit(Message(b"x"), routing_key="q")
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(enter())
        await entered.wait()
        await until(lambda: broker.published)
        closing = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, closing.set)
        await cancelled_twice(task, closing.is_set)
        assert "closed" in repr(publisher)
        await nothing_runs(before)
        await until(lambda: file is None or file._connection is None)

    run(main())
    gc.collect()
    assert b"connected" not in generate_latest(registry)


def test_an_outbox_opened_after_its_publisher_closed_is_closed(run: Any, tmp_path: Path) -> None:
    opening, may_open, opened = threading.Event(), threading.Event(), threading.Event()

    class Slow(SQLiteOutbox):
        def open(self) -> None:
            opening.set()
            may_open.wait(10)
            super().open()
            opened.set()

    outbox = Slow(tmp_path / "outbox")

    async def main() -> None:
        before = asyncio.all_tasks()
        publisher = AsyncPublisher("amqp://localhost", outbox=outbox)
        publishing = asyncio.create_task(publisher.publish(Message(b"x"), routing_key="q"))
        await until(opening.is_set)
        publishing.cancel()
        await publisher.close(0)
        may_open.set()
        await until(opened.is_set)
        await until(lambda: outbox._connection is None)
        await nothing_runs(before)

    run(main())
    gc.collect()


def test_cancelling_twice_leaves_no_connection_for_dead_letters(broker: ScriptedBroker, run: Any) -> None:
    """This holds even if a confirm is missing on that connection. The gauges end, too."""
    registry = CollectorRegistry()

    async def handle(_: Delivery) -> None:
        raise DeadLetter("no")

    async def main() -> None:
        before = asyncio.all_tasks()
        consumer = AsyncConsumer(broker.url, Queue("orders"), handle, registry=registry)
        task = asyncio.create_task(consumer.run())
        await until(lambda: broker.consumed)
        broker.consuming.deliver(b"x")
        await until(lambda: broker.published)
        assert b"consumer_unacked" in generate_latest(registry)
        await cancelled_twice(task, lambda: not consumer.connected)
        assert b"consumer_unacked" not in generate_latest(registry)
        await nothing_runs(before)

    run(main())


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_no_connection_is_attempted_while_the_event_loop_ends(broker: ScriptedBroker) -> None:
    """The end of the loop has cancelled all tasks, and would destroy a new one."""
    broker.silent = True
    publisher = AsyncPublisher(broker.url, connect_timeout=0.2, reconnect_wait=tenacity.wait_fixed(0.2))
    unfinished: list[AsyncIterator[None]] = []

    async def main() -> AsyncIterator[None]:
        await publisher.submit(Message(b"x"), routing_key="q")
        await until(lambda: publisher._channel._io._connector._state is ConnectionState.WAITING)
        try:
            yield
        finally:  # after all tasks were cancelled
            await asyncio.sleep(0.3)

    async def begin() -> None:
        unfinished.append(main())
        await anext(unfinished[0])

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        runner.run(begin())
    assert asyncio.all_tasks(loop) == set()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # an unclosed client warns, and cannot be closed on another loop
@pytest.mark.parametrize("second", ["publish", "submit", "connect", "flush", "close", "__aenter__"])
@pytest.mark.parametrize("stored", [False, True], ids=["", "outbox"])
def test_a_publisher_on_a_second_event_loop_is_a_usage_error(
    broker: ScriptedBroker, tmp_path: Path, second: str, stored: bool
) -> None:
    """This holds whatever the end of the first loop did to its connection."""
    broker.script = acking

    def use_on_two_loops() -> None:  # keeps no reference, so it warns here and in no later test
        outbox = SQLiteOutbox(tmp_path / "outbox") if stored else None
        publisher = AsyncPublisher(broker.url, outbox=outbox)

        async def use() -> None:
            await publisher.publish(Message(b"x"), routing_key="q")

        async def use_again() -> None:
            arguments = {"routing_key": "q"} if second in ("publish", "submit") else {}
            await getattr(publisher, second)(*([Message(b"x")] if arguments else []), **arguments)

        asyncio.run(use())
        with pytest.raises(UsageError, match="another event loop"):
            asyncio.run(use_again())
        if publisher._outbox_channel is not None:
            publisher._outbox_channel.relay.stop(0.0)
            publisher._outbox_channel._writer.stop()
            publisher._outbox_channel._close_outbox_later()

    use_on_two_loops()
    gc.collect()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("second", ["run", "connect", "close", "__aenter__", "get"])
def test_a_consumer_on_a_second_event_loop_is_a_usage_error(broker: ScriptedBroker, second: str) -> None:
    async def handle(_: Delivery) -> None:
        raise AssertionError

    def use_on_two_loops() -> None:
        consumer = AsyncConsumer(broker.url, "orders", None if second == "get" else handle)

        async def use_again() -> None:
            if second == "get":
                async with consumer.get():
                    pass
            else:
                await getattr(consumer, second)()

        asyncio.run(consumer.connect())
        with pytest.raises(UsageError, match="another event loop"):
            asyncio.run(use_again())

    use_on_two_loops()
    gc.collect()
