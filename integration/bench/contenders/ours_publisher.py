"""Our publisher, with its ways to publish, and its bars."""

from __future__ import annotations

from collections.abc import Callable

from integration.bench import child
from integration.bench.contender import Bar, Contender, Job, Limit, Measure, Role, Sample
from reliable_mq.message import Message
from reliable_mq.sync.publisher import Publisher


def run_submit(job: Job) -> Sample:
    """Submit messages, keep their Confirmations, and check every outcome."""

    def publish(publisher: Publisher, body: bytes, count: int) -> None:
        submit, queue = publisher.submit, job.queue
        confirmations = [submit(Message(body), routing_key=queue) for _ in range(count)]
        publisher.flush()
        for confirmation in confirmations:
            confirmation.result(0)

    return measure(job, publish)


def run_many(job: Job) -> Sample:
    def publish(publisher: Publisher, body: bytes, count: int) -> None:
        report = publisher.publish_many((Message(body) for _ in range(count)), routing_key=job.queue)
        report.raise_for_failures()
        if report.confirmed != count:
            raise RuntimeError(f"{report.confirmed} of {count} confirmed")

    return measure(job, publish)


def run_one_by_one(job: Job) -> Sample:
    def publish(publisher: Publisher, body: bytes, count: int) -> None:
        for _ in range(count):
            publisher.publish(Message(body), routing_key=job.queue)

    return measure(job, publish)


def measure(job: Job, publish: Callable[[Publisher, bytes, int], None]) -> Sample:
    body = job.body
    with Publisher(job.url, max_outstanding=job.window) as publisher:
        return child.measure_publishing(lambda count: publish(publisher, body, count), job)


CONTENDERS = [
    Contender(
        name="ours-submit",
        label="reliable_mq submit, a Confirmation each, flush",
        role=Role.PUBLISHER,
        run=run_submit,
        curve=True,
    ),
    Contender(name="ours-many", label="reliable_mq publish_many", role=Role.PUBLISHER, run=run_many),
    Contender(
        name="ours-publish",
        label="reliable_mq publish, one by one",
        role=Role.PUBLISHER,
        run=run_one_by_one,
        one_by_one=True,
    ),
]

BARS = [
    Bar("ours-submit", (Limit(Measure.RATE, 1.2, "pika-select"), Limit(Measure.RATE, 0.9, "rabbitmq-c"))),
    Bar("ours-submit", (Limit(Measure.CPU, 0.7, "pika-select"),)),
    Bar("ours-submit", (Limit(Measure.RATE, 15, "pika-blocking"),)),
    Bar("ours-publish", (Limit(Measure.RATE, 0.9, "pika-blocking"),)),
]

if __name__ == "__main__":
    child.main(CONTENDERS)
