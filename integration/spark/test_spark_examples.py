"""The Spark examples run unchanged and print the output in their docstrings."""

from __future__ import annotations

import json
import os
import runpy
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from examples.spark_orders import start
from integration.support.programs import output_of
from integration.support.spark import JAVA_OPTIONS, drain
from integration.test_examples import EXAMPLES, ROOT, assert_prints
from reliable_mq import Message, Publisher, Queue
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from reliable_mq.testing import VirtualHost

NAMES = ("spark_files", "spark_once")
PARTITIONS = "spark.sql.shuffle.partitions"

# They run in one program, one after the other. Each starts and stops a session, and all share the JVM, which is slow
# to start.
PROGRAM = """
import runpy, sys
for name in sys.argv[1:]:
    runpy.run_path(f"{name}.py", run_name="__main__")
    print("----", flush=True)
"""


def test_the_examples_print_what_they_say(
    spark: SparkSession, vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are given the session of the tests, and do not stop it."""
    monkeypatch.setenv("RELIABLE_MQ_URL", vhost.url)
    monkeypatch.setattr(type(spark), "stop", lambda _session: None)
    partitions = spark.conf.get(PARTITIONS)
    try:
        for name in NAMES:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
            assert_prints(name, capsys.readouterr().out)
    finally:
        spark.conf.set(PARTITIONS, str(partitions))  # one of them changes it


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_the_examples_start_their_own_sessions(vhost: VirtualHost) -> None:
    """They print the same."""
    output = output_of(
        [sys.executable, "-c", PROGRAM, *NAMES],
        cwd=EXAMPLES,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RELIABLE_MQ_URL": vhost.url,
            "PYSPARK_PYTHON": sys.executable,
            "JDK_JAVA_OPTIONS": JAVA_OPTIONS,  # for the start of the JVM
        },
        timeout=350,
    )
    for name, printed in zip(NAMES, output.split("----\n"), strict=False):
        assert_prints(name, printed)


def test_orders_become_alerts_and_a_duplicate_order_counts_once(
    spark: SparkSession, vhost: VirtualHost, checkpoint: str
) -> None:
    """A customer whose orders exceed the limit within a minute causes an alert.

    Other customers cause none.
    """
    minute = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)

    def order(customer: str, cents: int, placed: datetime = minute) -> Message:
        body = {"customer": customer, "cents": cents, "placed": placed.isoformat()}
        return Message(json.dumps(body).encode(), content_type="application/json")

    twice = order("Bo", 60_000)
    orders = [order("Al", 70_000), order("Al", 40_000), twice, twice, order("Cy", 0, minute + timedelta(hours=3))]
    with Publisher(vhost.url, topology=[Queue("orders"), Queue("alerts")]) as publisher:
        assert publisher.publish_many(orders, routing_key="orders").ok
        query = start(spark, vhost.url, checkpoint)
        try:
            wait_until(lambda: vhost.live_counts(["alerts"])["alerts"], timeout=240, what="an alert")
        finally:
            query.stop()
    [(properties, body)] = drain(vhost, "alerts")
    alert = json.loads(body)
    assert (alert["customer"], alert["cents"], alert["orders"]) == ("Al", 110_000, 2)
    assert properties.message_id == f"Al@{minute.timestamp():.0f}"
    assert vhost.live_counts(["orders"])["orders"] == 0
