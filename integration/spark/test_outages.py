"""The broker is SIGKILLed and restarted under running queries.

One query copies a queue to a queue, and one reads a stream.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from integration.support.live_queries import COPIES, MESSAGES, LiveQueries
from reliable_mq import Consumer
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from reliable_mq.testing import Audit, RabbitMQ, VirtualHost


@pytest.mark.timeout(600)
def test_f01_a_broker_killed_under_live_queries_loses_nothing(
    spark: SparkSession, private_vhost: VirtualHost, private_broker: RabbitMQ, checker: Audit, tmp_path: Path
) -> None:
    """Neither query fails, and the stream is read without a gap or repeat.

    Messages in a batch of the queue may be delivered twice.
    """
    live = LiveQueries(spark, private_vhost, checker, tmp_path)
    came, offsets = live.came, live.offsets
    killed = threading.Event()
    copying: list[StreamingQuery] = []

    def collect(rows: DataFrame, batch: int) -> None:
        if batch == 2:
            copying.append(live.copy())
            wait_until(lambda: copying[0].lastProgress, timeout=150, what="a batch of the other query")
            private_broker.kill()
            killed.set()
        offsets.update(row.offset for row in rows.select("offset").collect())  # the broker is gone or just back

    read = live.read(collect)
    with Consumer(private_vhost.url, COPIES, lambda copy: came.update([copy.message_id])):
        wait_until(killed.is_set, timeout=240, what="the broker killed")
        [copied] = copying
        assert len(came) < MESSAGES
        private_broker.start()
        wait_until(
            lambda: len(came) == len(offsets) == MESSAGES or copied.exception() or read.exception(),
            timeout=120, what=lambda: f"{len(came)} and {len(offsets)} of {MESSAGES}",
        )  # fmt: skip
        assert copied.exception() is read.exception() is None
        copied.processAllAvailable()
    copied.stop()
    read.stop()
    live.check()
