"""Our consumer: batched acks, a plain handler in a worker thread."""

from __future__ import annotations

import threading

from integration.bench import child
from integration.bench.contender import Bar, Contender, Job, Limit, Measure, Meter, Role, Sample
from reliable_mq.sync.consumer import Consumer


def run(job: Job) -> Sample:
    meter = Meter()
    finished = threading.Event()
    samples: list[Sample] = []
    count, last = 0, job.messages

    def handle(_delivery: object) -> None:
        nonlocal count
        count += 1
        if count == 1:
            meter.start()
        if count == last:
            samples.append(meter.stop(last))
            finished.set()

    with Consumer(job.url, job.queue, handle, prefetch=job.prefetch, ack_every=job.ack_every):
        finished.wait()
    return samples[0]


CONTENDERS = [
    Contender(
        name="ours-consumer",
        label="reliable_mq Consumer, handler in a worker thread",
        role=Role.CONSUMER,
        run=run,
    )
]

BARS = [Bar("ours-consumer", (Limit(Measure.RATE, 0.9, "pika-consumer"),))]

if __name__ == "__main__":
    child.main(CONTENDERS)
