"""Our asyncio consumer with batched acks.

The handler is a coroutine or a plain function, on both event loops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import uvloop

from integration.bench import child
from integration.bench.contender import Bar, Contender, Job, Limit, Measure, Meter, Role, Sample
from reliable_mq.aio.consumer import AsyncConsumer

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def run(plain: bool, loop_factory: LoopFactory, job: Job) -> Sample:
    async def main() -> Sample:
        meter = Meter()
        loop = asyncio.get_running_loop()
        finished = asyncio.Event()
        samples: list[Sample] = []
        count, last = 0, job.messages

        def handle(_delivery: object) -> None:
            nonlocal count
            count += 1
            if count == 1:
                meter.start()
            if count == last:
                samples.append(meter.stop(last))
                loop.call_soon_threadsafe(finished.set)

        async def handle_on_the_loop(delivery: object) -> None:
            handle(delivery)

        handler = handle if plain else handle_on_the_loop
        async with AsyncConsumer(job.url, job.queue, handler, prefetch=job.prefetch, ack_every=job.ack_every):
            await finished.wait()
        return samples[0]

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


CONTENDERS = [
    Contender(
        name="ours-async-consumer",
        label="reliable_mq AsyncConsumer, coroutine handler",
        role=Role.CONSUMER,
        run=partial(run, False, asyncio.new_event_loop),
    ),
    Contender(
        name="ours-async-consumer-uvloop",
        label="the same on uvloop",
        role=Role.CONSUMER,
        run=partial(run, False, uvloop.new_event_loop),
    ),
    Contender(
        name="ours-async-consumer-plain",
        label="reliable_mq AsyncConsumer, plain handler in a thread",
        role=Role.CONSUMER,
        run=partial(run, True, asyncio.new_event_loop),
    ),
    Contender(
        name="ours-async-consumer-plain-uvloop",
        label="the same on uvloop",
        role=Role.CONSUMER,
        run=partial(run, True, uvloop.new_event_loop),
    ),
]

BARS = [
    Bar("ours-async-consumer", (Limit(Measure.RATE, 2, "aio-pika-consumer"),)),
    Bar("ours-async-consumer-uvloop", (Limit(Measure.RATE, 2, "aio-pika-consumer-uvloop"),)),
    Bar("ours-async-consumer-plain", (Limit(Measure.RATE, 2, "aio-pika-consumer"),)),
    Bar("ours-async-consumer-plain-uvloop", (Limit(Measure.RATE, 2, "aio-pika-consumer-uvloop"),)),
]

if __name__ == "__main__":
    child.main(CONTENDERS)
