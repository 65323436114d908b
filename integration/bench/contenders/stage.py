"""From a queue into a stream: our relay, and a handwritten loop.

The loop uses our consumer and publisher. It acks a batch after the batch is confirmed, so it delivers at least once.
The relay moves each message once, even if a process is killed.
"""

from __future__ import annotations

import threading

from integration.bench import child
from integration.bench.broker import BenchBroker
from integration.bench.contender import Bar, Contender, Job, Limit, Measure, Meter, Role, Sample
from reliable_mq import Delivery, Message, Queue
from reliable_mq.core.stage.envelope import MOST_MESSAGES
from reliable_mq.stage import StageOptions, StageRelay
from reliable_mq.sync.consumer import Consumer
from reliable_mq.sync.publisher import Publisher

OUTSTANDING = 2000
BATCH = 500


def run_relay(job: Job) -> Sample:
    """Measure the relay, from its first delivery until all is confirmed and acked."""
    stage, broker, meter = f"{job.queue}.stage", BenchBroker(job.url), Meter()
    relay = StageRelay(StageOptions(url=job.url, queue=job.queue, stage=stage, messages_per_entry=MOST_MESSAGES))
    relay.start()
    broker.wait_for_first_delivery(job.queue, job.messages)
    meter.start()
    while relay.statistics.moved < job.messages:
        threading.Event().wait(0.01)
    sample = meter.stop(job.messages)
    relay.close(10)
    for queue in (stage, f"{stage}.relay"):
        broker.delete_queue(queue)
    return sample


def run_loop(job: Job) -> Sample:
    """Measure the loop likewise, with a batch size that is confirmed fast."""
    stage, broker, meter = f"{job.queue}.stage", BenchBroker(job.url), Meter()
    finished = threading.Event()
    samples: list[Sample] = []
    count = 0

    with Publisher(job.url, topology=[Queue(stage, type="stream")]) as publisher:
        publisher.connect()

        def move(deliveries: list[Delivery]) -> None:
            nonlocal count
            if not count:
                meter.start()
            messages = [Message(each.body, message_id=each.message_id) for each in deliveries]
            publisher.publish_many(messages, routing_key=stage).raise_for_failures()
            count += len(deliveries)
            if count == job.messages:
                samples.append(meter.stop(job.messages))
                finished.set()

        with Consumer(job.url, job.queue, move, prefetch=OUTSTANDING, batch_size=BATCH):
            finished.wait()
    broker.delete_queue(stage)
    return samples[0]


CONTENDERS = [
    Contender(
        name="stage-relay",
        label="reliable_mq relay into a stage",
        role=Role.CONSUMER,
        run=run_relay,
        identified=True,
    ),
    Contender(
        name="stage-loop",
        label="reliable_mq Consumer, batches of 500 through a Publisher into a stream",
        role=Role.CONSUMER,
        run=run_loop,
        identified=True,
    ),
]

BARS = [Bar("stage-relay", (Limit(Measure.RATE, 0.8, "stage-loop"),))]

if __name__ == "__main__":
    child.main(CONTENDERS)
