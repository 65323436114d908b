"""Consumers on pika's ``SelectConnection``, with a bare callback."""

from __future__ import annotations

import dataclasses
from typing import Any

import pika

from integration.bench import child
from integration.bench.contender import Contender, Job, Meter, Role, Sample


def run(job: Job) -> Sample:
    meter = Meter()
    samples: list[Sample] = []
    failures: list[BaseException] = []
    count, last, ack_every = 0, job.messages, job.ack_every

    def on_channel(channel: Any) -> None:
        channel.basic_qos(prefetch_count=job.prefetch)
        channel.basic_consume(job.queue, on_delivery)

    def on_delivery(channel: Any, method: Any, _properties: object, _body: bytes) -> None:
        nonlocal count
        count += 1
        if count == 1:
            meter.start()
        if count % ack_every == 0 or count == last:
            channel.basic_ack(method.delivery_tag, multiple=ack_every > 1)
            if count == last:
                samples.append(meter.stop(last))
                connection.close()

    def on_close(connection: Any, reason: BaseException) -> None:
        if not samples:
            failures.append(reason)
        connection.ioloop.stop()

    connection = pika.SelectConnection(
        pika.URLParameters(job.url),
        on_open_callback=lambda connection: connection.channel(on_open_callback=on_channel),
        on_open_error_callback=on_close,
        on_close_callback=on_close,
    )
    connection.ioloop.start()
    for failure in failures:
        raise failure
    return samples[0]


def run_ack_each(job: Job) -> Sample:
    return run(dataclasses.replace(job, ack_every=1))


CONTENDERS = [
    Contender(
        name="pika-consumer",
        label="pika SelectConnection, bare callback, acks every 100",
        role=Role.CONSUMER,
        run=run,
        reference="bare callback",
    ),
    Contender(
        name="pika-consumer-each",
        label="pika SelectConnection, bare callback, acks each",
        role=Role.CONSUMER,
        run=run_ack_each,
    ),
]

if __name__ == "__main__":
    child.main(CONTENDERS)
