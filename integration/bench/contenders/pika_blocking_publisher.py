"""pika's ``BlockingChannel``, with a confirm or a transaction for every message."""

from __future__ import annotations

from collections.abc import Callable

import pika
from pika.adapters.blocking_connection import BlockingChannel

from integration.bench import child
from integration.bench.contender import Contender, Job, Role, Sample

PERSISTENT = pika.BasicProperties(delivery_mode=2)


def run_confirms(job: Job) -> Sample:
    return measure(job, BlockingChannel.confirm_delivery, publish_confirmed)


def run_transactions(job: Job) -> Sample:
    return measure(job, BlockingChannel.tx_select, publish_committed)


def publish_confirmed(channel: BlockingChannel, queue: str, body: bytes, count: int) -> None:
    for _ in range(count):
        channel.basic_publish("", queue, body, PERSISTENT, mandatory=True)


def publish_committed(channel: BlockingChannel, queue: str, body: bytes, count: int) -> None:
    for _ in range(count):
        channel.basic_publish("", queue, body, PERSISTENT, mandatory=True)
        channel.tx_commit()


def measure(
    job: Job,
    select: Callable[[BlockingChannel], object],
    publish: Callable[[BlockingChannel, str, bytes, int], None],
) -> Sample:
    connection = pika.BlockingConnection(pika.URLParameters(job.url))
    channel, body = connection.channel(), job.body
    select(channel)
    sample = child.measure_publishing(lambda count: publish(channel, job.queue, body, count), job)
    connection.close()
    return sample


CONTENDERS = [
    Contender(
        name="pika-blocking",
        label="pika BlockingChannel, confirms",
        role=Role.PUBLISHER,
        run=run_confirms,
        one_by_one=True,
        reference="BlockingChannel",
    ),
    Contender(
        name="pika-tx",
        label="pika BlockingChannel, tx.commit each",
        role=Role.PUBLISHER,
        run=run_transactions,
        one_by_one=True,
    ),
]

if __name__ == "__main__":
    child.main(CONTENDERS)
