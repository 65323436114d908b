"""Our asyncio publisher, on asyncio's loop and on uvloop, and its bars."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import uvloop

from integration.bench import child
from integration.bench.contender import Bar, Contender, Job, Limit, Measure, Meter, Role, Sample
from reliable_mq.aio.publisher import AsyncPublisher
from reliable_mq.message import Message

CALLERS = 1000

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


async def submit(publisher: AsyncPublisher, job: Job, count: int) -> None:
    """Submit messages, keep their confirmations, and check every outcome."""
    body, queue = job.body, job.queue
    confirmations = [await publisher.submit(Message(body), routing_key=queue) for _ in range(count)]
    await publisher.flush()
    for confirmation in confirmations:
        confirmation.result()


async def callers(publisher: AsyncPublisher, job: Job, count: int) -> None:
    """Publish from `CALLERS` tasks, each of which awaits every confirm."""
    body, queue = job.body, job.queue
    numbers = iter(range(count))

    async def caller() -> None:
        for _ in numbers:
            await publisher.publish(Message(body), routing_key=queue)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


def run(publish: Callable[[AsyncPublisher, Job, int], Awaitable[None]], loop_factory: LoopFactory, job: Job) -> Sample:
    async def main() -> Sample:
        async with AsyncPublisher(job.url, max_outstanding=job.window) as publisher:
            if job.warmup:
                await publish(publisher, job, job.warmup)
            meter = Meter()
            meter.start()
            await publish(publisher, job, job.messages)
            return meter.stop(job.messages)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


CONTENDERS = [
    Contender(
        name="ours-async-submit",
        label="reliable_mq async submit, a confirmation each, flush",
        role=Role.PUBLISHER,
        run=partial(run, submit, asyncio.new_event_loop),
    ),
    Contender(
        name="ours-async-submit-uvloop",
        label="the same on uvloop",
        role=Role.PUBLISHER,
        run=partial(run, submit, uvloop.new_event_loop),
    ),
    Contender(
        name="ours-async-callers",
        label=f"reliable_mq, {CALLERS} tasks that await publish",
        role=Role.PUBLISHER,
        run=partial(run, callers, asyncio.new_event_loop),
    ),
    Contender(
        name="ours-async-callers-uvloop",
        label="the same on uvloop",
        role=Role.PUBLISHER,
        run=partial(run, callers, uvloop.new_event_loop),
    ),
]

BARS = [
    Bar("ours-async-submit", (Limit(Measure.RATE, 3.5, "aio-pika-tasks"),)),
    Bar("ours-async-submit", (Limit(Measure.RATE, 0.8, "ours-submit"),)),
    Bar("ours-async-submit-uvloop", (Limit(Measure.RATE, 3.5, "aio-pika-tasks-uvloop"),)),
    Bar("ours-async-submit-uvloop", (Limit(Measure.RATE, 0.8, "ours-submit"),)),
    Bar("ours-async-callers", (Limit(Measure.RATE, 2, "aio-pika-tasks"),)),
    Bar("ours-async-callers-uvloop", (Limit(Measure.RATE, 2, "aio-pika-tasks-uvloop"),)),
]

if __name__ == "__main__":
    child.main(CONTENDERS)
