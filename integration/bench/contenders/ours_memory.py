"""The memory for an outstanding message of our publisher.

This is the memory for its Message and its Confirmation, kept in a list.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc

from integration.bench import child
from integration.bench.contender import Bar, Contender, Job, Limit, Measure, Meter, Role, Sample, rss
from reliable_mq.errors import PublishError
from reliable_mq.message import Message
from reliable_mq.sync.publisher import Publisher

PATIENCE = 3600.0  # seconds; longer than the runner lets this process run


def run(job: Job) -> Sample:
    # The bodies, each a separate object, exist before the first measurement, because the bar does not include them.
    bodies = [b"%0*d" % (job.size, number) for number in range(job.messages)]
    publisher = Publisher(
        job.url,
        max_outstanding=job.messages,
        max_outstanding_bytes=job.messages * job.size,
        confirm_timeout=PATIENCE,
        delivery_timeout=PATIENCE,
    )
    publisher.connect()
    gc.collect()
    before = rss()
    meter = Meter()
    meter.start()
    confirmations = [publisher.submit(Message(body), routing_key=job.queue) for body in bodies]
    confirmations[-1].result()  # the only confirm that the peer sends, after all messages have arrived
    sample = meter.stop(job.messages)
    if publisher.outstanding != job.messages - 1:
        raise RuntimeError(f"{publisher.outstanding} are outstanding, not {job.messages - 1}")
    gc.collect()
    growth = rss() - before
    with contextlib.suppress(PublishError):  # the others fail, because the peer does not confirm them
        publisher.close(0)
    return dataclasses.replace(sample, rss_growth_bytes=growth)


CONTENDERS = [
    Contender(
        name="ours-memory",
        label="reliable_mq submit, Message and Confirmation kept",
        role=Role.MEMORY,
        run=run,
    )
]

BARS = [Bar("ours-memory", (Limit(Measure.MEMORY, 600),))]

if __name__ == "__main__":
    child.main(CONTENDERS)
