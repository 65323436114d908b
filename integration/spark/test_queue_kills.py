"""A Spark application is SIGKILLed in every phase of a batch and loses nothing.

It reads a queue and a stream.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from integration.support.spark_application import PHASES, Application, committed_rows, drained, killed_in_each_phase
from reliable_mq import Consumer, Message, Publisher, Queue
from reliable_mq.stores import SQLiteStore
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from pyspark.sql import SparkSession

    from reliable_mq.testing import Audit, VirtualHost

MESSAGES = 600
PER_BATCH = 40
ORDERS, EVENTS, COPIES = Queue("orders"), Queue("events", type="stream"), Queue("copies")


def publish(vhost: VirtualHost, queue: Queue) -> list[str]:
    messages = [Message(b"%d" % number) for number in range(MESSAGES)]
    with Publisher(vhost.url, topology=[queue]) as publisher:
        assert publisher.publish_many(messages, routing_key=queue.name).ok
    return [message.message_id for message in messages]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("aimed_at", ["queue", pytest.param("stream", marks=pytest.mark.soak)])
def test_f60_an_application_killed_in_any_phase_loses_nothing(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path, checker: Audit, rng: random.Random, aimed_at: str
) -> None:
    """The application is restarted on the same checkpoints until all is read.

    No message is lost. In a file sink, no message of the stream is repeated; of the queue, only messages of an
    interrupted batch may be. Both queries run, and each kill is aimed at a phase of one of them.
    """
    for message_id in publish(vhost, ORDERS):
        checker.attempted(message_id)
        checker.confirmed(message_id)
    events = publish(vhost, EVENTS)
    sources = {
        "queue": {"url": vhost.url, "queue": ORDERS.name},
        "stream": {"url": vhost.url, "stream": EVENTS.name, "startingOffsets": "earliest"},
    }
    small = {"maxMessagesPerTrigger": str(PER_BATCH)}
    limits = {"queue": {**small, "prefetch": "100"}, "stream": {**small, "minPartitions": str(rng.randrange(1, 4))}}
    limited = {name: source | limits[name] for name, source in sources.items()}
    killed_in_each_phase({"sources": limited, "pause": 0.003}, tmp_path, rng, of=aimed_at, timeout=240)
    drained(spark, {"sources": sources, "directory": str(tmp_path)}, 240)

    assert committed_rows(tmp_path / "stream" / "output") == dict.fromkeys(events, 1)
    for message_id, times in committed_rows(tmp_path / "queue" / "output").items():
        for _ in range(times):
            checker.handled(message_id)
    checker.drain(vhost, [ORDERS.name], dead_letters=["orders.dead"])
    balance = checker.close()
    assert balance.left == 0
    assert balance.dead_lettered == 0
    assert len(balance.duplicated) <= len(PHASES) * PER_BATCH  # a batch per kill


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "mode", [{"prefetch": "100"}, {"stage": "orders.stage", "minPartitions": "2"}], ids=["queue", "staged"]
)
def test_f60_behind_a_killed_pipeline_each_effect_happens_once(
    spark: SparkSession, vhost: VirtualHost, tmp_path: Path, rng: random.Random, mode: dict[str, str]
) -> None:
    """Spark copies a queue to a queue under the message ids.

    A consumer with an idempotency store handles the copies.
    """
    orders = publish(vhost, ORDERS)
    with Publisher(vhost.url, topology=[COPIES]) as publisher:
        publisher.connect()
    source = {"url": vhost.url, "queue": ORDERS.name, "maxMessagesPerTrigger": str(PER_BATCH), **mode}
    settings = {
        "sources": {"queue": source},
        "to": {"url": vhost.url, "routingKey": COPIES.name},
        "directory": str(tmp_path),
    }

    def copied() -> int:
        return vhost.live_counts([COPIES.name])[COPIES.name]

    for _ in range(3):
        enough = copied() + rng.randrange(20, 100)
        with Application("spark_queries", {**settings, "pause": 0.003}, tmp_path / "log") as application:
            application.wait_until(lambda enough=enough: copied() >= enough, timeout=240, what=f"{enough} copies")
            application.kill()
    drained(spark, settings, 240)

    copies = copied()
    print(f"{copies} copies of {MESSAGES} orders")
    assert MESSAGES < copies <= MESSAGES + 3 * PER_BATCH
    effects: Counter[str] = Counter()
    store = SQLiteStore(tmp_path / "store.db")
    with Consumer(vhost.url, COPIES, lambda copy: effects.update([copy.message_id]), idempotency=store):
        wait_until(lambda: vhost.live_counts([COPIES.name])[COPIES.name] == 0, timeout=60, what="no copy left")
    assert effects == dict.fromkeys(orders, 1)
