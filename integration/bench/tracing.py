"""``python -m integration.bench.tracing``: the cost of traces, in CPU time of the client per message.

Publisher and consumer, sync and asyncio, run against one broker without traces and with each kind of traces in turn,
several rounds; of each kind the least counts: what else the machine does only adds to it. CPU time is that of this
process, all threads; the broker's is not in it. Spans go to a batch processor whose exporter drops them.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from integration.bench.broker import BenchBroker
from integration.bench.paths import OUTPUT
from integration.bench.report import Table
from integration.support.set_up import broker_image
from reliable_mq import AsyncConsumer, AsyncPublisher, Consumer, Message, Publisher, Queue, Tracing
from reliable_mq.testing import RabbitMQ

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.sampling import Sampler
    from opentelemetry.trace import Span

__all__ = ["BODY", "SAMPLE_EVERY", "Kind", "main", "provider_with", "table"]

TITLE = "Traces: CPU time of the client, in µs per message"
ORDERS = Queue("bench.traces", type="classic")
BODY = b"x" * 1024
SAMPLE_EVERY = 100


class _Drop(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def provider_with(sampler: Sampler) -> TracerProvider:
    """Return a provider that drops its spans, in batches; the sampler is asked about roots."""
    provider = TracerProvider(sampler=ParentBased(sampler))
    provider.add_span_processor(BatchSpanProcessor(_Drop(), max_queue_size=100_000))
    return provider


def _tracing(*, sampled: bool = True, root_ratio: float = 1.0) -> Tracing:
    return Tracing(tracer_provider=provider_with(ALWAYS_ON if sampled else ALWAYS_OFF), root_ratio=root_ratio)


def _remote(*, sampled: bool) -> Span:
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    return NonRecordingSpan(SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True, flags))


class Kind(NamedTuple):
    """One kind of traces.

    Attributes:
        label: in the table.
        tracing: makes it; None for none.
        parents: of so many messages one has a parent that is sampled; 0 for none, None for no parent at all.
    """

    label: str
    tracing: Callable[[], Tracing] | None
    parents: int | None = None

    def current(self, number: int) -> AbstractContextManager[object]:
        """Return the context of the caller for the messages from ``number`` on."""
        if self.parents is None:
            return nullcontext()
        return use_span(_SAMPLED if self.parents and number % self.parents == 0 else _NOT_SAMPLED)

    def message(self, number: int) -> Message:
        """Return a message as a consumer gets it: with the context of its publisher, if there is one."""
        if self.parents is None:
            return Message(BODY)
        flags = "01" if self.parents and number % self.parents == 0 else "00"
        return Message(
            BODY, headers={"traceparent": f"00-{'0af7651916cd43dd8448eb211c80319c'}-b7ad6b7169203331-{flags}"}
        )


_SAMPLED, _NOT_SAMPLED = _remote(sampled=True), _remote(sampled=False)

KINDS = (
    Kind("no traces, no context", None),
    Kind("root_ratio=0, no context", lambda: _tracing(root_ratio=0.0)),
    Kind("the sampler declines each root", lambda: _tracing(sampled=False)),
    Kind("no traces, messages with a context", None, 0),
    Kind("context not sampled", _tracing, 0),
    Kind("1 % sampled", _tracing, SAMPLE_EVERY),
    Kind("all sampled", _tracing, 1),
)


def publish(url: str, kind: Kind, count: int) -> float:
    """Return the CPU seconds of ``count`` confirmed messages, pipelined."""
    tracing = None if kind.tracing is None else kind.tracing()
    with Publisher(url, topology=[ORDERS], tracing=tracing, new_queue_grace=0) as publisher:
        publisher.publish(Message(BODY), routing_key=ORDERS.name)
        began = time.process_time()
        for start in range(0, count, SAMPLE_EVERY):
            with kind.current(start):
                publisher.submit(Message(BODY), routing_key=ORDERS.name)
            with kind.current(start + 1) if kind.parents != 1 else kind.current(start):
                for _ in range(min(SAMPLE_EVERY, count - start) - 1):
                    publisher.submit(Message(BODY), routing_key=ORDERS.name)
        publisher.flush(120)
        return time.process_time() - began


def publish_on_asyncio(url: str, kind: Kind, count: int) -> float:
    """As `publish`."""

    async def run() -> float:
        tracing = None if kind.tracing is None else kind.tracing()
        async with AsyncPublisher(url, topology=[ORDERS], tracing=tracing, new_queue_grace=0) as publisher:
            await publisher.publish(Message(BODY), routing_key=ORDERS.name)
            began = time.process_time()
            for start in range(0, count, SAMPLE_EVERY):
                with kind.current(start):
                    await publisher.submit(Message(BODY), routing_key=ORDERS.name)
                with kind.current(start + 1) if kind.parents != 1 else kind.current(start):
                    for _ in range(min(SAMPLE_EVERY, count - start) - 1):
                        await publisher.submit(Message(BODY), routing_key=ORDERS.name)
            await publisher.flush(120)
            return time.process_time() - began

    return asyncio.run(run())


def _fill(url: str, kind: Kind, count: int) -> None:
    with Publisher(url, topology=[ORDERS], new_queue_grace=0) as publisher:
        report = publisher.publish_many(map(kind.message, range(count)), routing_key=ORDERS.name)
    report.raise_for_failures()


def consume(url: str, kind: Kind, count: int) -> float:
    """Return the CPU seconds of ``count`` deliveries, handled and acked."""
    _fill(url, kind, count)
    left, over = count, threading.Event()

    def handle(_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            over.set()

    tracing = None if kind.tracing is None else kind.tracing()
    began = time.process_time()
    with Consumer(url, ORDERS, handle, prefetch=300, tracing=tracing):
        if not over.wait(120):
            raise TimeoutError(f"{left} of {count} messages were not handled")
    return time.process_time() - began


def consume_on_asyncio(url: str, kind: Kind, count: int) -> float:
    """As `consume`."""
    _fill(url, kind, count)

    async def run() -> float:
        left, over = count, asyncio.Event()

        async def handle(_: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                over.set()

        tracing = None if kind.tracing is None else kind.tracing()
        began = time.process_time()
        async with AsyncConsumer(url, ORDERS, handle, prefetch=300, tracing=tracing):
            await asyncio.wait_for(over.wait(), 120)
        return time.process_time() - began

    return asyncio.run(run())


WORK = {
    "Publisher": publish,
    "AsyncPublisher": publish_on_asyncio,
    "Consumer": consume,
    "AsyncConsumer": consume_on_asyncio,
}


def table(seconds: dict[tuple[str, str], list[float]], count: int) -> Table:
    """Return the table of what was measured: per kind, µs per message and the ratio to its base."""
    rows = []
    for kind in KINDS:
        base = KINDS[0] if kind.parents is None else KINDS[3]
        row = [kind.label]
        for work in WORK:
            mine, of_base = (min(seconds[work, one.label]) for one in (kind, base))
            share = "" if kind.tracing is None else f" ({(mine / of_base - 1) * 100:+.0f} %)"
            row.append(f"{mine / count * 1e6:.1f}{share}")
        rows.append(tuple(row))
    return Table(TITLE, ("traces", *WORK), tuple(rows))


def main(count: int, rounds: int) -> None:
    """Measure, and print and add the table."""
    seconds: dict[tuple[str, str], list[float]] = {(work, kind.label): [] for work in WORK for kind in KINDS}
    with RabbitMQ(broker_image("newest")) as broker:
        for turn in range(rounds):
            for kind in KINDS:
                for work, run in WORK.items():
                    seconds[work, kind.label].append(run(broker.url, kind, count))
                    BenchBroker(broker.url).delete_queue(ORDERS.name)
            print(f"round {turn + 1} of {rounds}", file=sys.stderr)
    found = table(seconds, count)
    print(found.markdown())
    OUTPUT.mkdir(parents=True, exist_ok=True)
    (OUTPUT / "tracing.md").write_text(found.markdown())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3] or (10_000, 9)))
