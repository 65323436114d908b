"""Our publisher with a SQLite outbox: how fast it stores and relays messages.

Every commit waits for an fsync.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

from integration.bench import child
from integration.bench.contender import Bar, Contender, Job, Limit, Measure, Meter, Role, Sample
from reliable_mq.core.outbox import NewRow
from reliable_mq.message import Message
from reliable_mq.outbox import SQLiteOutbox
from reliable_mq.sync.publisher import Publisher

_THREADS = 32
_ROWS = 1000  # rows per transaction that fills an outbox, which is not measured


def run_accept(job: Job) -> Sample:
    """Measure one thread that submits messages, until all are on disk.

    The time until the relay has published them is not measured.
    """
    body = job.body
    with tempfile.TemporaryDirectory() as directory:
        outbox = SQLiteOutbox(Path(directory) / "outbox")
        with Publisher(job.url, max_outstanding=job.window, outbox=outbox) as publisher:

            def accept(count: int) -> None:
                messages = (Message(body) for _ in range(count))
                publisher.publish_many(messages, routing_key=job.queue).raise_for_failures()

            sample = child.measure_publishing(accept, job)
            publisher.flush(120)
    return sample


def run_threads(job: Job) -> Sample:
    """Measure threads that publish one message at a time, and share fsyncs."""
    body = job.body
    with tempfile.TemporaryDirectory() as directory:
        outbox = SQLiteOutbox(Path(directory) / "outbox")
        with Publisher(job.url, max_outstanding=job.window, outbox=outbox) as publisher:

            def work(count: int) -> None:
                for _ in range(count):
                    publisher.publish(Message(body), routing_key=job.queue)

            def accept(count: int) -> None:
                counts = [count // _THREADS + (number < count % _THREADS) for number in range(_THREADS)]
                threads = [threading.Thread(target=work, args=(each,)) for each in counts]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

            sample = child.measure_publishing(accept, job)
            publisher.flush(120)
    return sample


def run_drain(job: Job) -> Sample:
    """Measure the relay of a full outbox, until its last row is confirmed and removed."""
    with tempfile.TemporaryDirectory() as directory:
        outbox = SQLiteOutbox(Path(directory) / "outbox")

        def fill(count: int) -> None:
            for start in range(0, count, _ROWS):
                rows = min(_ROWS, count - start)
                outbox.write([NewRow(Message(job.body), "", job.queue, True, None) for _ in range(rows)], [])

        fill(job.messages)
        meter = Meter()
        meter.start()
        with Publisher(job.url, max_outstanding=job.window, outbox=outbox) as publisher:
            publisher.flush(120)
            sample = meter.stop(job.messages)
            fill(job.warmup)  # the runner counts the messages that arrive
            publisher.flush(120)
    return sample


CONTENDERS = [
    Contender(
        name="ours-outbox-accept",
        label="reliable_mq publish_many into a SQLite outbox, until on disk",
        role=Role.PUBLISHER,
        run=run_accept,
    ),
    Contender(
        name="ours-outbox-threads",
        label="reliable_mq publish into a SQLite outbox, 32 threads, until on disk",
        role=Role.PUBLISHER,
        run=run_threads,
    ),
    Contender(
        name="ours-outbox-relay",
        label="reliable_mq relay of a SQLite outbox, until confirmed and removed",
        role=Role.PUBLISHER,
        run=run_drain,
    ),
]

BARS = [
    Bar("ours-outbox-accept", (Limit(Measure.RATE, 5000),)),
    Bar("ours-outbox-threads", (Limit(Measure.RATE, 5000),)),
    Bar("ours-outbox-relay", (Limit(Measure.RATE, 0.5, "ours-many"),)),
]

if __name__ == "__main__":
    child.main(CONTENDERS)
