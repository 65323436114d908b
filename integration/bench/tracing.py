"""``python -m integration.bench.tracing``: the cost of traces.

The benchmark measures CPU time of the client and messages per second. Publisher and consumer, sync and asyncio, run
against one broker in several rounds, without traces and with each kind of traces in turn. For CPU time, the minimum
over all rounds counts, because other load on the machine can only add to it; for rates, the median. CPU time is the
time of all threads of this process, without the broker. Spans go to a batch processor whose exporter drops them.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from opentelemetry.context import Context, attach, detach
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

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

__all__ = ["BODY", "SAMPLE_EVERY", "Kind", "main", "provider_with", "tables"]

TITLE = "Traces: CPU time of the client, in µs per message"
TITLE_OF_RATES = "Traces: messages per second"
ORDERS = Queue("bench.traces", type="classic")
BODY = b"x" * 1024
SAMPLE_EVERY = 100


class _Drop(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def provider_with(sampler: Sampler) -> TracerProvider:
    """Return a provider that drops spans in batches; the sampler decides for roots."""
    provider = TracerProvider(sampler=ParentBased(sampler))
    provider.add_span_processor(BatchSpanProcessor(_Drop(), max_queue_size=100_000))
    return provider


def _tracing(*, sampled: bool = True, root_ratio: float = 1.0) -> Tracing:
    return Tracing(tracer_provider=provider_with(ALWAYS_ON if sampled else ALWAYS_OFF), root_ratio=root_ratio)


class Spent(NamedTuple):
    """The time of a run.

    Attributes:
        cpu: CPU seconds of this process, all threads.
        wall: Seconds on the clock.
    """

    cpu: float
    wall: float


class Kind(NamedTuple):
    """One kind of traces.

    Attributes:
        label: The label in the table.
        tracing: Creates the tracing. None for no traces.
        parents: One in this many messages has a sampled parent. 0 if no parent is sampled, None if there are no
            parents.
        each: Whether each message has a separate context. Otherwise the sampled messages share one, and the others
            another.
    """

    label: str
    tracing: Callable[[], Tracing] | None
    parents: int | None = None
    each: bool = False

    def parent(self, number: int) -> SpanContext | None:
        """Return the span that is current when a message is published."""
        if self.parents is None:
            return None
        flags = TraceFlags(bool(self.parents) and number % self.parents == 0)
        return SpanContext(_TRACE, _SPAN + self.each * number, True, flags)

    def contexts(self, count: int) -> list[Context]:
        """Return the contexts in which messages are published."""
        known: dict[tuple[int, int] | None, Context] = {}
        contexts = []
        for number in range(count):
            parent = self.parent(number)
            key = None if parent is None else (parent.span_id, parent.trace_flags)
            if key not in known:
                known[key] = Context()
                if parent is not None:
                    known[key] = set_span_in_context(NonRecordingSpan(parent), Context())
            contexts.append(known[key])
        return contexts

    def message(self, number: int) -> Message:
        """Return a message as a consumer gets it, with the context of its publisher."""
        parent = self.parent(number)
        if parent is None:
            return Message(BODY)
        ids = f"{parent.trace_id:032x}-{parent.span_id:016x}-{parent.trace_flags:02x}"
        return Message(BODY, headers={"traceparent": f"00-{ids}"})


_TRACE, _SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331

KINDS = (
    Kind("no traces, no context", None),
    Kind("root_ratio=0, no context", lambda: _tracing(root_ratio=0.0)),
    Kind("the sampler declines each root", lambda: _tracing(sampled=False)),
    Kind("no traces, messages with a context", None, 0),
    Kind("not sampled, one context", _tracing, 0),
    Kind("not sampled, a context for each", _tracing, 0, each=True),
    Kind("1 % sampled, one context for the others", _tracing, SAMPLE_EVERY),
    Kind("all sampled", _tracing, 1),
)


class _Watch:
    """Measures the time since its creation."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def spent(self) -> Spent:
        return Spent(time.process_time() - self._cpu, time.perf_counter() - self._wall)


def publish(url: str, kind: Kind, count: int) -> Spent:
    """Return the time to publish ``count`` messages, pipelined, with confirms."""
    tracing = None if kind.tracing is None else kind.tracing()
    contexts = kind.contexts(count)
    with Publisher(url, topology=[ORDERS], tracing=tracing, new_queue_grace=0) as publisher:
        publisher.publish(Message(BODY), routing_key=ORDERS.name)
        watch = _Watch()
        for context in contexts:
            token = attach(context)
            publisher.submit(Message(BODY), routing_key=ORDERS.name)
            detach(token)
        publisher.flush(120)
        return watch.spent()


def publish_on_asyncio(url: str, kind: Kind, count: int) -> Spent:
    """Do the same as `publish`, with asyncio."""

    async def run() -> Spent:
        tracing = None if kind.tracing is None else kind.tracing()
        contexts = kind.contexts(count)
        async with AsyncPublisher(url, topology=[ORDERS], tracing=tracing, new_queue_grace=0) as publisher:
            await publisher.publish(Message(BODY), routing_key=ORDERS.name)
            watch = _Watch()
            for context in contexts:
                token = attach(context)
                await publisher.submit(Message(BODY), routing_key=ORDERS.name)
                detach(token)
            await publisher.flush(120)
            return watch.spent()

    return asyncio.run(run())


def _fill(url: str, kind: Kind, count: int) -> None:
    with Publisher(url, topology=[ORDERS], new_queue_grace=0) as publisher:
        report = publisher.publish_many(map(kind.message, range(count)), routing_key=ORDERS.name)
    report.raise_for_failures()


def consume(url: str, kind: Kind, count: int) -> Spent:
    """Return the time to handle and ack ``count`` deliveries."""
    _fill(url, kind, count)
    left, over = count, threading.Event()

    def handle(_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            over.set()

    tracing = None if kind.tracing is None else kind.tracing()
    watch = _Watch()
    with Consumer(url, ORDERS, handle, prefetch=300, tracing=tracing):
        if not over.wait(120):
            raise TimeoutError(f"{left} of {count} messages were not handled")
    return watch.spent()


def consume_on_asyncio(url: str, kind: Kind, count: int) -> Spent:
    """Do the same as `consume`, with asyncio."""
    _fill(url, kind, count)

    async def run() -> Spent:
        left, over = count, asyncio.Event()

        async def handle(_: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                over.set()

        tracing = None if kind.tracing is None else kind.tracing()
        watch = _Watch()
        async with AsyncConsumer(url, ORDERS, handle, prefetch=300, tracing=tracing):
            await asyncio.wait_for(over.wait(), 120)
        return watch.spent()

    return asyncio.run(run())


WORK = {
    "Publisher": publish,
    "AsyncPublisher": publish_on_asyncio,
    "Consumer": consume,
    "AsyncConsumer": consume_on_asyncio,
}


def tables(spent: dict[tuple[str, str], list[Spent]], count: int) -> tuple[Table, Table]:
    """Return the tables of CPU time and throughput, by kind, with ratios to the base."""
    times, rates = [], []
    for kind in KINDS:
        base = KINDS[0] if kind.parents is None else KINDS[3]
        cpu_row, rate_row = [kind.label], [kind.label]
        for work in WORK:
            mine, of_base = (spent[work, one.label] for one in (kind, base))
            cpu, least = min(one.cpu for one in mine), min(one.cpu for one in of_base)
            rate, most = (count / median(one.wall for one in runs) for runs in (mine, of_base))
            cpu_row.append(f"{cpu / count * 1e6:.1f}{_share(kind, cpu / least)}")
            rate_row.append(f"{rate:,.0f}{_share(kind, rate / most)}")
        times.append(tuple(cpu_row))
        rates.append(tuple(rate_row))
    headings = ("traces", *WORK)
    return Table(TITLE, headings, tuple(times)), Table(TITLE_OF_RATES, headings, tuple(rates))


def _share(kind: Kind, ratio: float) -> str:
    return "" if kind.tracing is None else f" ({(ratio - 1) * 100:+.0f} %)"


def main(count: int, rounds: int) -> None:
    """Measure; print the tables, and write them to a file."""
    spent: dict[tuple[str, str], list[Spent]] = {(work, kind.label): [] for work in WORK for kind in KINDS}
    with RabbitMQ(broker_image("newest")) as broker:
        for turn in range(rounds):
            for kind in KINDS:
                for work, run in WORK.items():
                    spent[work, kind.label].append(run(broker.url, kind, count))
                    BenchBroker(broker.url).delete_queue(ORDERS.name)
            print(f"round {turn + 1} of {rounds}", file=sys.stderr)
    found = "\n".join(table.markdown() for table in tables(spent, count))
    print(found)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    (OUTPUT / "tracing.md").write_text(found)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3] or (10_000, 9)))
