"""FastStream on aio-pika: 1000 publishing tasks; a subscriber, which acks each.

Each task awaits its confirms.
"""

from __future__ import annotations

import asyncio

from faststream import AckPolicy
from faststream.rabbit import Channel, RabbitBroker, RabbitQueue

from integration.bench import child
from integration.bench.contender import Contender, Job, Meter, Role, Sample

TASKS = 1000


def publish(job: Job) -> Sample:
    body, queue = job.body, job.queue

    async def publish(broker: RabbitBroker, count: int) -> None:
        numbers = iter(range(count))

        async def task() -> None:
            for _ in numbers:
                await broker.publish(body, queue, persist=True)

        await asyncio.gather(*(task() for _ in range(TASKS)))

    async def main() -> Sample:
        async with RabbitBroker(job.url, logger=None) as broker:
            if job.warmup:
                await publish(broker, job.warmup)
            meter = Meter()
            meter.start()
            await publish(broker, job.messages)
            return meter.stop(job.messages)

    return asyncio.run(main())


def consume(job: Job) -> Sample:
    async def main() -> Sample:
        meter = Meter()
        finished = asyncio.Event()
        samples: list[Sample] = []
        count, last = 0, job.messages
        broker = RabbitBroker(job.url, logger=None, apply_types=False)

        @broker.subscriber(
            RabbitQueue(job.queue, declare=False),
            channel=Channel(prefetch_count=job.prefetch),
            ack_policy=AckPolicy.NACK_ON_ERROR,
        )
        async def handle(_body: bytes) -> None:
            nonlocal count
            count += 1
            if count == 1:
                meter.start()
            if count == last:
                samples.append(meter.stop(last))
                finished.set()

        async with broker:
            await broker.start()
            await finished.wait()
        return samples[0]

    return asyncio.run(main())


CONTENDERS = [
    Contender(
        name="faststream-tasks",
        label=f"FastStream, {TASKS} tasks that await publish",
        role=Role.PUBLISHER,
        run=publish,
    ),
    Contender(
        name="faststream-consumer",
        label="FastStream subscriber, acks each",
        role=Role.CONSUMER,
        run=consume,
    ),
]

if __name__ == "__main__":
    child.main(CONTENDERS)
