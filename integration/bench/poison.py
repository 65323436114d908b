"""``python -m integration.bench.poison``: the cost of messages that always fail.

It compares our consumer with the simplest solution: a handler that fails, and ``basic.nack`` with ``requeue``. RabbitMQ
4.3 does not count such a failure, so this loop does not end by itself. Our consumer retries after delays, and
dead-letters after the last attempt. Measured are the deliveries and the CPU time of the broker, minus the CPU time of
an idle broker over the same time.

The results are added to the report of the benchmark (``report.md``, ``report.json``), and replace those of an earlier
run.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from integration.bench.paths import OUTPUT
from integration.bench.report import Table
from integration.support.set_up import broker_image
from reliable_mq import Consumer, Message, Publisher, Queue, RetryPolicy
from reliable_mq.testing import RabbitMQ, VirtualHost
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reliable_mq import Delivery

__all__ = ["Cost", "add_to_report", "measure", "table"]

T = TypeVar("T")

TITLE = "Poison messages"
POISON = Queue("bench.poison")
BODY = b"x" * 1024


class Cost(NamedTuple):
    """The cost of the poison messages of one contender.

    Attributes:
        label: The label of the contender.
        deliveries: Deliveries of each message, on average.
        cpu_seconds: CPU time of the broker per message.
        seconds: How long it was measured.
        over: Whether all messages are dead-lettered by then. Otherwise the deliveries continue.
    """

    label: str
    deliveries: float
    cpu_seconds: float
    seconds: float
    over: bool


def ours(url: str, count: int, policy: RetryPolicy) -> tuple[int, float, bool]:
    """Consume until all are dead-lettered; return deliveries, seconds, and True."""
    calls = 0

    def handle(_delivery: Delivery) -> None:
        nonlocal calls
        calls += 1
        raise ValueError("cannot be processed")

    begun = time.monotonic()
    with Consumer(url, POISON, handle, retry=policy) as consumer:
        wait_until(lambda: consumer.statistics.dead_lettered >= count, timeout=120, what="dead-lettered", interval=0.1)
    return calls, time.monotonic() - begun, True


def requeue_loop(vhost: VirtualHost, seconds: float) -> tuple[int, float, bool]:
    """Requeue every delivery for `seconds`; return deliveries, seconds, and False."""
    deliveries = 0
    with vhost.connect() as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=200)
        begun = time.monotonic()
        for method, _, _ in channel.consume(POISON.name, inactivity_timeout=1):
            if method is not None:
                deliveries += 1
                channel.basic_nack(method.delivery_tag, requeue=True)
            if time.monotonic() - begun >= seconds:
                break
        channel.cancel()
    return deliveries, seconds, False


def measure(vhost: VirtualHost, count: int, policy: RetryPolicy, loop_seconds: float) -> list[Cost]:
    """Measure both, one after the other, on a broker that does nothing else."""
    broker = vhost.broker
    idle = _cpu(broker, lambda: time.sleep(min(loop_seconds, 5.0)))[0] / min(loop_seconds, 5.0)
    costs = []
    for label, run in (
        (repr(policy), lambda: ours(vhost.url, count, policy)),
        ("a requeue loop (pika)", lambda: requeue_loop(vhost, loop_seconds)),
    ):
        with Publisher(vhost.url, topology=[POISON]) as publisher:
            publisher.publish_many((Message(BODY) for _ in range(count)), routing_key=POISON.name)
        cpu, (deliveries, seconds, over) = _cpu(broker, run)
        costs.append(Cost(label, deliveries / count, (cpu - idle * seconds) / count, seconds, over))
        vhost.delete_queue(POISON.name)
    return costs


def table(costs: list[Cost]) -> Table:
    """Return the table of the costs."""
    rows = (
        (
            cost.label,
            f"{cost.deliveries:.1f}",
            f"{cost.cpu_seconds * 1000:.2f} ms",
            f"{cost.seconds:.1f} s{', then over' if cost.over else ', and so on'}",
        )
        for cost in costs
    )
    return Table(TITLE, ("", "deliveries each", "broker CPU each", "measured for"), tuple(rows))


def add_to_report(costs: list[Cost], output: Path) -> None:
    """Add the costs to the report of a run, which is created if it is missing."""
    output.mkdir(parents=True, exist_ok=True)
    page, data = output / "report.md", output / "report.json"
    before = page.read_text().partition(f"\n## {TITLE}\n")[0] if page.exists() else "# Benchmark\n"
    page.write_text(f"{before.rstrip()}\n\n{table(costs).markdown()}")
    document = json.loads(data.read_text()) if data.exists() else {}
    document["poison"] = [cost._asdict() for cost in costs]
    data.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _cpu(broker: RabbitMQ, run: Callable[[], T]) -> tuple[float, T]:
    before = broker.cpu_seconds
    answer = run()
    return broker.cpu_seconds - before, answer


def main(count: int, seconds: int) -> None:
    logging.getLogger("reliable_mq").setLevel(logging.CRITICAL)  # log lines are not part of the measurement
    with RabbitMQ(broker_image("newest")) as broker:
        vhost = VirtualHost(broker, "bench")
        vhost.create()
        costs = measure(vhost, count, RetryPolicy(5, delays=(1.0,)), seconds)
    print(table(costs).markdown())
    add_to_report(costs, OUTPUT)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3] or (200, 10)))
