"""A stream reader on pika's ``SelectConnection``, with a bare callback."""

from __future__ import annotations

from typing import Any

import pika

from integration.bench import child
from integration.bench.contender import Contender, Job, Meter, Role, Sample


def run(job: Job) -> Sample:
    """Read from the first message on, with the offset of each message.

    A reader needs the offsets to resume after a crash.
    """
    meter = Meter()
    samples: list[Sample] = []
    failures: list[BaseException] = []
    count, last = 0, job.messages

    def on_channel(channel: Any) -> None:
        channel.basic_qos(prefetch_count=job.prefetch)
        channel.basic_consume(job.queue, on_delivery, arguments={"x-stream-offset": "first"})

    def on_delivery(channel: Any, method: Any, properties: Any, _body: bytes) -> None:
        nonlocal count
        count += 1
        if count == 1:
            meter.start()
        offset = properties.headers["x-stream-offset"]
        if count % job.ack_every == 0 or count == last:
            channel.basic_ack(method.delivery_tag, multiple=True)
            if count == last:
                samples.append(meter.stop(last))
                if offset != last - 1:
                    failures.append(RuntimeError(f"message {last} has offset {offset}"))
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


CONTENDERS = [
    Contender(
        name="pika-stream",
        label="pika SelectConnection, bare callback, offsets looked at",
        role=Role.STREAM,
        run=run,
        reference="bare callback",
    )
]

if __name__ == "__main__":
    child.main(CONTENDERS)
