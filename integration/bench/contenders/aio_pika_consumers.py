"""aio-pika's queue iterator, with acks every 100 or each, on both event loops."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from functools import partial

import aio_pika
import uvloop

from integration.bench import child
from integration.bench.contender import Contender, Job, Meter, Role, Sample

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def run(loop_factory: LoopFactory, job: Job) -> Sample:
    async def main() -> Sample:
        meter = Meter()
        count, last, ack_every = 0, job.messages, job.ack_every
        async with await aio_pika.connect(job.url) as connection:
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=job.prefetch)
            queue = await channel.get_queue(job.queue)
            async with queue.iterator() as messages:
                async for message in messages:
                    count += 1
                    if count == 1:
                        meter.start()
                    if count % ack_every == 0 or count == last:
                        await message.ack(multiple=ack_every > 1)
                        if count == last:
                            break
                return meter.stop(last)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


def run_ack_each(job: Job) -> Sample:
    return run(asyncio.new_event_loop, dataclasses.replace(job, ack_every=1))


CONTENDERS = [
    Contender(
        name="aio-pika-consumer",
        label="aio-pika iterator, acks every 100",
        role=Role.CONSUMER,
        run=partial(run, asyncio.new_event_loop),
    ),
    Contender(
        name="aio-pika-consumer-uvloop",
        label="the same on uvloop",
        role=Role.CONSUMER,
        run=partial(run, uvloop.new_event_loop),
    ),
    Contender(
        name="aio-pika-consumer-each",
        label="aio-pika iterator, acks each",
        role=Role.CONSUMER,
        run=run_ack_each,
    ),
]

if __name__ == "__main__":
    child.main(CONTENDERS)
