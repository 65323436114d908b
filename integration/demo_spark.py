"""``make demo-spark``: Spark turns orders into alerts, on a real cluster.

`examples/spark_orders.py` runs on a standalone cluster, with a real broker, in staged mode. An executor is killed in
the middle, and later the whole application with its relay. The application is then started again on the same
checkpoint. At the end, the account compares the alerts with those expected from the orders: none may be missing,
wrong or extra.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from examples.spark_orders import LIMIT
from integration.support.programs import ROOT, environment
from integration.support.spark import SETTINGS
from integration.support.spark_application import batches_in, descendants
from integration.support.spark_cluster import StandaloneCluster
from reliable_mq import Consumer, Message, Publisher, Queue
from reliable_mq.testing import RabbitMQ, remove_leftovers
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ORDERS, ALERTS = Queue("orders"), Queue("alerts")
COUNT = int(os.environ.get("RELIABLE_MQ_DEMO_ORDERS", "6000"))
DEADLINE = 300.0
BEGIN = datetime(2026, 1, 1, 12, tzinfo=UTC)


def main() -> int:
    """Run the demo; return 0 if the account adds up."""
    remove_leftovers()
    say("starting RabbitMQ in a container, and a Spark master with one worker")
    with tempfile.TemporaryDirectory(prefix="reliable-mq-spark-") as name, RabbitMQ() as broker:
        directory = Path(name)
        with StandaloneCluster(directory) as cluster:
            say(f"RabbitMQ and {cluster.url} are up")
            expected = publish(broker.url)
            return run(broker.url, cluster, directory, expected)


def publish(url: str) -> dict[str, int]:
    """Publish the orders; return the expected alerts by their ids."""
    rng = random.Random(2026)
    totals: Counter[str] = Counter()
    messages = []
    for number in range(COUNT):
        placed = BEGIN + timedelta(seconds=20 * 60 * number / COUNT)
        customer, cents = f"customer-{rng.randrange(40)}", rng.randrange(100, 40_000)
        totals[f"{customer}@{int(placed.timestamp()) // 60 * 60}"] += cents
        messages.append(order(number, customer, cents, placed))
    messages.append(order(COUNT, "nobody", 1, BEGIN + timedelta(hours=5)))  # later, so that all windows are complete
    with Publisher(url, topology=[ORDERS, ALERTS]) as publisher:
        report = publisher.publish_many(messages, routing_key=ORDERS.name)
    due = {name: cents for name, cents in totals.items() if cents > LIMIT}
    say(f"{report.confirmed:,} orders are published and confirmed")
    say(f"{len(due):,} alerts are due: one for each customer with more than {LIMIT / 100:,.2f} within a minute")
    return due


def order(number: int, customer: str, cents: int, placed: datetime) -> Message:
    """Return an order as a message."""
    content = {"order": number, "customer": customer, "cents": cents, "placed": placed.isoformat()}
    return Message.json(content, message_id=f"order-{number}")


def run(url: str, cluster: StandaloneCluster, directory: Path, expected: dict[str, int]) -> int:
    """Run the pipeline under faults until all alerts arrive; return the exit status."""
    checkpoint = directory / "checkpoint"
    began = time.monotonic()
    application = submit(url, cluster, directory)
    say("examples/spark_orders.py is submitted to the cluster, and stages the queue in a stream")
    try:
        wait_until(
            lambda: running(application, directory) and batches_in(checkpoint, "commits") >= 2,
            timeout=DEADLINE,
            what="two batches",
        )
        say(f"two batches are through; killing executor {cluster.kill_executor()}")
        reached = batches_in(checkpoint, "commits")
        wait_until(
            lambda: running(application, directory) and batches_in(checkpoint, "commits") > reached,
            timeout=DEADLINE,
            what="another batch",
        )
        say("Spark has another executor, and has run the lost tasks again; killing the whole application")
        kill(application)
        application = submit(url, cluster, directory)
        say("it starts again on the same checkpoint; waiting for the alerts")
        received: Counter[str] = Counter()
        wrong: set[str] = set()
        for name, cents in alerts(url, lambda: running(application, directory), expected):
            received[name] += 1
            if cents != expected.get(name):
                wrong.add(name)
    finally:
        kill(application)
    missing = expected.keys() - received.keys()
    adds_up = not missing and not wrong
    print(f"""
account after {time.monotonic() - began:.0f} s, one executor killed, the application killed once
  orders confirmed       {COUNT + 1:,}
  alerts expected        {len(expected):,}
  alerts received        {len(received):,}  ({sum(received.values()) - len(received)} more than once, with the same id)
  missing                {len(missing)}
  with a wrong total     {len(wrong)}  (an order lost or counted twice would show here)
{"the account adds up" if adds_up else "THE ACCOUNT DOES NOT ADD UP"}""")
    return 0 if adds_up else 1


def alerts(url: str, alive: Callable[[], bool], expected: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Receive the expected number of alerts, and wait a little for extra ones."""
    seen: set[str] = set()
    deadline = time.monotonic() + DEADLINE
    consumer = Consumer(url, ALERTS)
    try:
        while time.monotonic() < deadline:
            with consumer.get(100, timeout=2) as deliveries:
                for delivery in deliveries:
                    seen.add(delivery.message_id or "")
                    yield delivery.message_id or "", delivery.json()["cents"]
            if not deliveries:
                if seen >= expected.keys():
                    return
                alive()
    finally:
        consumer.close()


def submit(url: str, cluster: StandaloneCluster, directory: Path) -> subprocess.Popen[bytes]:
    """Start the example on the cluster."""
    settings = [f"--conf={name}={value}" for name, value in SETTINGS.items()]
    spark_submit = Path(sys.executable).parent / "spark-submit"
    with (directory / "application.log").open("ab") as log:
        return subprocess.Popen(
            [
                str(spark_submit),
                "--master",
                cluster.url,
                "--executor-memory",
                "700m",
                *settings,
                str(ROOT / "examples" / "spark_orders.py"),
                url,
                str(directory / "checkpoint"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment(), "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable},
            start_new_session=True,
        )


def running(application: subprocess.Popen[bytes], directory: Path) -> bool:
    """Return True; raise with the end of the log if the application has ended."""
    if application.poll() is not None:
        log = (directory / "application.log").read_text(errors="replace")
        raise RuntimeError(f"the application ended with {application.returncode}:\n{log[-5000:]}")
    return True


def kill(application: subprocess.Popen[bytes]) -> None:
    """SIGKILL the application with all processes that it has started."""
    for pid in (application.pid, *descendants(application.pid)):
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            continue
    application.wait(30)


def say(text: str) -> None:
    """Print the text of an event."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
