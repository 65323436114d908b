"""Queues that a publisher or consumer makes, and those that exist, in either API."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from reliable_mq import AsyncPublisher, DeadLetter, Message, Publisher, PublishError, Queue
from reliable_mq.deadletters import DeadLetterQueue
from reliable_mq.engine.publisher_options import PublisherOptions
from reliable_mq.outbox import SQLiteOutbox
from reliable_mq.spark.options import WriteOptions
from reliable_mq.spark.sink import BatchSink

if TYPE_CHECKING:
    from pathlib import Path

    from reliable_mq import Delivery
    from tests.contract.scripted_broker import Published, ScriptedBroker

NewConsumer = "Callable[..., Any]"
NewPublisher = "Callable[..., Any]"
LONG = 60.0  # seconds of grace, longer than any test
SHORT = 0.7
ASKED = 1 + 7  # confirm.select: once for a channel, then until a queue is known to be old


def topology(*names: str) -> list[Queue]:
    return [Queue(name, dead_letter=None) for name in names]


def submit(publisher: Any, *queues: str) -> list[Any]:
    return [publisher.submit(Message(queue.encode()), routing_key=queue) for queue in queues]


def acking(published: Published) -> None:
    published.channel.ack(published.number)


def make(broker: ScriptedBroker, queue: str) -> None:
    """Let this process make a queue, and clear `seen`."""
    broker.script = acking
    broker.missing = {queue}
    with Publisher(broker.url, topology=topology(queue), new_queue_grace=LONG) as publisher:
        publisher.connect()
    assert not broker.missing, "it is declared"
    broker.seen.clear()


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the default grace, for publishers that a test does not make itself.

    `tests.new_queues` has set it to 0.
    """
    defaults: dict[str, Any] = PublisherOptions.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "new_queue_grace", SHORT)


def test_a_missing_queue_costs_one_channel_and_no_connection(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    """The broker closes the channel over the first missing queue."""
    broker.script = acking
    broker.missing = {"costs-b", "costs-c"}
    with new_publisher(topology=topology("costs-a", "costs-b", "costs-c"), new_queue_grace=LONG) as publisher:
        found, *made = submit(publisher, "costs-a", "costs-b", "costs-c")
        assert found.result(30).attempts == 1
        broker.wait_published(3)
        assert not any(confirmation.done() for confirmation in made)
        assert broker.seen.count("Channel.Open") == 2
        assert len(broker.connections) == 1
        assert not broker.missing, "they are declared"
        with pytest.raises(PublishError, match="new_queue_grace"):
            publisher.close(0)


@pytest.mark.slow
def test_provisional_confirms_are_republished_after_a_reconnect(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    broker.script = acking
    broker.missing = {"again-new"}
    with new_publisher(topology=topology("again-new"), new_queue_grace=2.0) as publisher:
        [confirmation] = submit(publisher, "again-new")
        [published] = broker.wait_published(1)
        assert not confirmation.done()
        published.channel.connection.cut()
        _, again = broker.wait_published(2)
        assert again.message_id == published.message_id
        assert again.possible_duplicate
        assert confirmation.result(30).attempts == 2


@pytest.mark.slow
def test_a_broker_silent_within_the_grace_confirms_nothing(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """Its host may have vanished.

    It is asked when the grace is over, and the connection is given up.
    """

    def script(published: Published) -> None:
        acking(published)
        broker.script, broker.silent = acking, True

    broker.script = script
    broker.missing = {"silent-new"}
    with new_publisher(topology=topology("silent-new"), new_queue_grace=0.7, connect_timeout=0.7) as publisher:
        [confirmation] = submit(publisher, "silent-new")
        broker.wait(lambda: len(broker.connections) > 1, "another connection")
        assert not confirmation.done()
        broker.silent = False
        assert confirmation.result(30).attempts == 2


@pytest.mark.slow
def test_a_slow_broker_keeps_its_connection_within_the_grace(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    """It answers the round trip behind a hundred publishes, and confirms each of them."""

    def script(published: Published) -> None:
        time.sleep(0.02)
        acking(published)

    broker.script = script
    broker.missing = {"slow-new"}
    with new_publisher(topology=topology("slow-new"), new_queue_grace=SHORT, connect_timeout=1.0) as publisher:
        publisher.connect()
        connections = len(broker.connections)
        confirmations = submit(publisher, *["slow-new"] * 120)
        assert {confirmation.result(30).attempts for confirmation in confirmations} == {1}
    assert len(broker.connections) == connections


@pytest.mark.slow
def test_an_original_stays_while_its_dead_letter_is_provisional(
    broker: ScriptedBroker, new_consumer: NewConsumer
) -> None:
    """The consumer made the dead-letter queue, which the broker may lose."""

    def give_up(_delivery: Delivery) -> None:
        raise DeadLetter("of no use")

    broker.script = acking
    broker.missing = {"letters-new"}
    letters = Queue("letters-new", dead_letter=None)
    with new_consumer(give_up, dead_letter=letters, new_queue_grace=SHORT, ack_interval=0.02):
        broker.consuming.deliver(b"x")
        [settled] = broker.wait_settled(1)
    assert (settled.verdict, settled.tag) == ("ack", 1)
    assert [letter.routing_key for letter in broker.published] == ["letters-new"]
    assert broker.seen[: broker.seen.index("Basic.Ack")].count("Confirm.Select") >= ASKED


@pytest.mark.slow
def test_an_outbox_row_stays_until_its_confirm_is_final(
    broker: ScriptedBroker, new_publisher: NewPublisher, tmp_path: Path
) -> None:
    broker.script = acking
    broker.missing = {"rows-new"}
    outbox = SQLiteOutbox(tmp_path / "outbox")
    with new_publisher(topology=topology("rows-new"), outbox=outbox, new_queue_grace=SHORT) as publisher:
        publisher.publish(Message(b"x"), routing_key="rows-new")
        broker.wait(lambda: outbox.backlog()[0] == 0, "the row is removed")
        assert broker.seen.count("Confirm.Select") >= ASKED
    assert len(broker.published) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("short_grace")
def test_a_dead_letter_stays_until_its_replay_confirm_is_final(broker: ScriptedBroker) -> None:
    make(broker, "replay-new")
    broker.ready.append(b"x")
    with DeadLetterQueue(broker.url, "orders.dead") as letters:
        assert letters.replay(to="replay-new").replayed == 1
    assert [(one.verdict, one.tag) for one in broker.settlements] == [("ack", 1)]
    assert [copy.routing_key for copy in broker.published] == ["replay-new"]
    assert broker.seen[: broker.seen.index("Basic.Ack")].count("Confirm.Select") >= ASKED


@pytest.mark.slow
@pytest.mark.usefixtures("short_grace")
def test_an_import_returns_when_no_confirm_of_it_is_provisional(broker: ScriptedBroker) -> None:
    """A caller may delete the file after that."""
    make(broker, "import-new")
    with DeadLetterQueue(broker.url, "import-new") as letters:
        assert letters.import_lines([b'{"body": "x"}']).confirmed == 1
    assert [line.routing_key for line in broker.published] == ["import-new"]
    assert broker.seen.count("Confirm.Select") >= ASKED


@pytest.mark.slow
@pytest.mark.usefixtures("short_grace")
def test_a_spark_task_waits_for_final_confirms_of_its_rows(broker: ScriptedBroker) -> None:
    make(broker, "rows-of-spark-new")
    assert write(broker, {"body": ["x"]}, routing_key="rows-of-spark-new") == ["rows-of-spark-new"]
    assert broker.seen.count("Confirm.Select") >= ASKED


@pytest.mark.slow
@pytest.mark.usefixtures("short_grace")
def test_a_spark_task_waits_for_final_confirms_of_dead_letters(broker: ScriptedBroker) -> None:
    """The task itself makes their queue."""
    broker.script = acking
    broker.missing = {"letters-of-spark-new"}
    columns = {"body": ["x"], "priority": [-1]}
    written = write(broker, columns, routing_key="orders", dead_letter_queue="letters-of-spark-new")
    assert written == ["letters-of-spark-new"]
    assert broker.seen.count("Confirm.Select") >= ASKED


def write(broker: ScriptedBroker, columns: dict[str, list[Any]], **options: str) -> list[str]:
    """Write one batch like a Spark task, and return the routing keys."""
    sink = BatchSink(WriteOptions(url=broker.url, **options), tuple(columns))
    assert sink.write(iter([pa.RecordBatch.from_pydict(columns)])).rows == 1
    return [row.routing_key for row in broker.published]


@pytest.mark.slow
def test_a_set_up_takes_as_long_as_the_broker_answers(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """Checking and declaring a thousand quorum queues may exceed connect_timeout."""
    broker.script = acking
    broker.declare_seconds = 0.3
    broker.missing = {"large-6"}  # finding the others takes as long
    names = [f"large-{number}" for number in range(7)]
    with new_publisher(topology=topology(*names), connect_timeout=1.5, new_queue_grace=LONG) as publisher:
        publisher.connect()
        assert submit(publisher, "large-1")[0].result(30).attempts == 1
    assert broker.seen.count("Queue.Declare") == 2 * len(names), "a look at each, and its declaration"
    assert len(broker.connections) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_queue_is_not_new_for_ever_after_its_loop_has_ended(broker: ScriptedBroker) -> None:
    """Otherwise each confirm of a publish to an exchange would be provisional in this process."""
    broker.script = acking
    broker.missing.add("orders")
    broker.declare_seconds = 1.0
    kept = [AsyncPublisher(broker.url, topology=topology("orders"), new_queue_grace=SHORT)]

    async def leave_a_set_up() -> None:
        connecting = asyncio.create_task(kept[0].connect())
        await asyncio.to_thread(broker.wait, lambda: broker.seen.count("Queue.Declare") == 2, "the declaration")
        assert not connecting.done()

    asyncio.run(leave_a_set_up())
    broker.declare_seconds = 0.0
    with Publisher(broker.url, new_queue_grace=SHORT) as publisher:
        publisher.publish(Message(b"x"), exchange="events", timeout=30)  # the queue is new for a short time
        began = time.monotonic()
        publisher.publish(Message(b"y"), exchange="events", timeout=30)
        assert time.monotonic() - began < SHORT
    kept.clear()
    gc.collect()  # so that it warns here, and in no later test
