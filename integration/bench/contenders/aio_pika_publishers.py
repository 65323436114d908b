"""aio-pika publishers: 1000 tasks that await their confirms, and a single task.

The 1000 tasks run on asyncio's loop and on uvloop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import aio_pika
import uvloop

from integration.bench import child
from integration.bench.contender import Contender, Job, Meter, Role, Sample

TASKS = 1000


def run(tasks: int, loop_factory: Callable[[], asyncio.AbstractEventLoop], job: Job) -> Sample:
    body = job.body

    async def publish(exchange: aio_pika.abc.AbstractExchange, count: int) -> None:
        numbers = iter(range(count))

        async def task() -> None:
            for _ in numbers:
                message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
                await exchange.publish(message, routing_key=job.queue)

        await asyncio.gather(*(task() for _ in range(tasks)))

    async def main() -> Sample:
        async with await aio_pika.connect(job.url) as connection:
            channel = await connection.channel(publisher_confirms=True)
            if job.warmup:
                await publish(channel.default_exchange, job.warmup)
            meter = Meter()
            meter.start()
            await publish(channel.default_exchange, job.messages)
            return meter.stop(job.messages)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


CONTENDERS = [
    Contender(
        name="aio-pika-tasks",
        label=f"aio-pika, {TASKS} tasks that await publish",
        role=Role.PUBLISHER,
        run=partial(run, TASKS, asyncio.new_event_loop),
    ),
    Contender(
        name="aio-pika-tasks-uvloop",
        label="the same on uvloop",
        role=Role.PUBLISHER,
        run=partial(run, TASKS, uvloop.new_event_loop),
    ),
    Contender(
        name="aio-pika-sequential",
        label="aio-pika, one message after the other",
        role=Role.PUBLISHER,
        run=partial(run, 1, asyncio.new_event_loop),
        one_by_one=True,
    ),
]

if __name__ == "__main__":
    child.main(CONTENDERS)
