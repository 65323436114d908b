"""A handwritten publisher on pika's ``SelectConnection``.

It has a window, which it refills as confirms arrive.
"""

from __future__ import annotations

from typing import Any

import pika

from integration.bench import child
from integration.bench.contender import Contender, Job, Role, Sample

PERSISTENT = pika.BasicProperties(delivery_mode=2)


class WindowedPublisher:
    """Keeps up to `window` publishes outstanding, with the body of each."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.body = job.body
        self.channel: Any = None
        self.sequence_number = 0
        self.last = 0
        self.lowest = 1  # confirms of multiple messages have settled every number below
        self.outstanding: dict[int, bytes] = {}
        self.failure: BaseException | None = None
        self.connection = pika.SelectConnection(
            pika.URLParameters(job.url),
            on_open_callback=lambda connection: connection.channel(on_open_callback=self.on_channel),
            on_open_error_callback=self.on_failure,
            on_close_callback=self.on_failure,
        )
        self.run()

    def publish(self, count: int) -> None:
        """Publish `count` messages, and wait until the broker has confirmed them all."""
        self.last += count
        self.refill()
        self.run()

    def run(self) -> None:
        self.connection.ioloop.start()
        if self.failure is not None:
            raise self.failure

    def on_channel(self, channel: Any) -> None:
        self.channel = channel
        channel.add_on_close_callback(self.on_failure)
        channel.add_on_return_callback(lambda *_: self.on_failure(None, RuntimeError("a message was returned")))
        channel.confirm_delivery(self.on_confirm, callback=lambda _: self.connection.ioloop.stop())

    def on_failure(self, _: object, reason: BaseException) -> None:
        self.failure = reason
        self.connection.ioloop.stop()

    def refill(self) -> None:
        publish, outstanding, body = self.channel.basic_publish, self.outstanding, self.body
        queue, window, last = self.job.queue, self.job.window, self.last
        while len(outstanding) < window and self.sequence_number < last:
            self.sequence_number += 1
            outstanding[self.sequence_number] = body
            publish("", queue, body, PERSISTENT, mandatory=True)

    def on_confirm(self, frame: Any) -> None:
        method = frame.method
        if not isinstance(method, pika.spec.Basic.Ack):
            self.on_failure(None, RuntimeError("a message was nacked"))
            return
        outstanding, tag = self.outstanding, method.delivery_tag
        if method.multiple:
            for settled in range(self.lowest, tag + 1):
                outstanding.pop(settled, None)
            self.lowest = tag + 1
        else:
            del outstanding[tag]
        if self.sequence_number < self.last:
            self.refill()
        elif not outstanding:
            self.connection.ioloop.stop()


def run(job: Job) -> Sample:
    return child.measure_publishing(WindowedPublisher(job).publish, job)


CONTENDERS = [
    Contender(
        name="pika-select",
        label="pika SelectConnection, window, by hand",
        role=Role.PUBLISHER,
        run=run,
        reference="by hand",
        curve=True,
    )
]

if __name__ == "__main__":
    child.main(CONTENDERS)
