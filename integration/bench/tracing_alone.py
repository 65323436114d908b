"""``python -m integration.bench.tracing_alone``: traces without a broker.

The benchmark measures the cost of our traces and of the SDK alone, as CPU time of this process in µs per message. All
kinds take turns in short rounds. The fastest round counts, because other load on the machine slows down only some
rounds. The publisher is a real one. Its connection accepts every frame and acks a hundred messages at a time. The
handler does nothing. "SDK" is the same work without our traces, with direct calls to OpenTelemetry's SDK: spans, and
contexts written into headers. A span takes twice as long there as in an isolated loop.
"""

from __future__ import annotations

import random
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry.context import Context, attach, detach
from opentelemetry.propagate import get_global_textmap
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context

from integration.bench.report import Table
from integration.bench.tracing import BODY, SAMPLE_EVERY, provider_with
from reliable_mq import Message, Publisher, Tracing
from reliable_mq.codec import encode_properties
from reliable_mq.core.channel_setup import ServerInfo
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.settlement import SettledDeliveries
from reliable_mq.settings import Endpoint
from reliable_mq.sync.publisher_channel import PublisherChannel
from reliable_mq.tracing.consuming import ConsumerTracer
from reliable_mq.tracing.conventions import peer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.sdk.trace.sampling import Sampler

__all__ = ["main"]

TITLE = "Traces without a broker: CPU time, in µs per message"
MESSAGES = 2000  # per round; as many as a busy publisher sends between two passes over ended spans
ENDED = 0.06  # seconds after which the spans of a round have ended


def _context(*, sampled: bool) -> Context:
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    remote = SpanContext(random.getrandbits(128), random.getrandbits(64), True, flags)
    return set_span_in_context(NonRecordingSpan(remote), Context())


_NONE, _SAMPLED, _NOT_SAMPLED = Context(), _context(sampled=True), _context(sampled=False)


class Kind(NamedTuple):
    """One kind of traces.

    Attributes:
        label: The label in the table.
        context: Returns the context of a message, by its number.
        sampler: The sampler for messages without a parent. None for no traces.
        root_ratio: As in `Tracing`.
    """

    label: str
    context: Callable[[int], Context]
    sampler: Sampler | None = ALWAYS_ON
    root_ratio: float = 1.0

    def tracing(self) -> Tracing | None:
        if self.sampler is None:
            return None
        return Tracing(tracer_provider=provider_with(self.sampler), root_ratio=self.root_ratio)


KINDS = (
    Kind("none", lambda _: _NOT_SAMPLED, None),
    Kind("root_ratio=0, no context", lambda _: _NONE, root_ratio=0.0),
    Kind("not sampled, one context for all", lambda _: _NOT_SAMPLED),
    Kind("not sampled, a context for each", lambda _: _context(sampled=False)),
    Kind("1 % sampled", lambda number: _NOT_SAMPLED if number % SAMPLE_EVERY else _SAMPLED),
    Kind("the sampler declines each root", lambda _: _NONE, ALWAYS_OFF),
    Kind("all sampled", lambda _: _SAMPLED),
)


class _Connection:
    """A connection that accepts every frame."""

    peer = Endpoint("127.0.0.1", 5672)

    def write(self, data: bytes) -> None:
        pass

    def write_buffer_size(self) -> int:
        return 0

    def call_soon(self, fn: Callable[[], None]) -> None:
        pass  # `Publishing.round` calls the loop itself

    def call_later(self, delay: float, fn: Callable[[], None]) -> _Connection:
        return self

    def cancel(self) -> None:
        pass


class Publishing:
    """Rounds of one publisher, with one kind of traces, or with the SDK alone."""

    def __init__(self, kind: Kind, sdk: SDK | None = None) -> None:
        self._kind = kind
        self._sdk = sdk
        tracing = kind.tracing() if sdk is None else None
        self._publisher = Publisher("amqp://localhost/", tracing=tracing, new_queue_grace=0)
        self._channel = PublisherChannel(self._publisher._options)
        self._channel._io = _Connection()  # type: ignore[assignment]
        self._channel.ready(1, 1, 128 * 1024, ServerInfo("RabbitMQ", "4.3.0", (4, 3, 0)))
        self._publisher._channel = self._channel
        self._published = 0

    def round(self) -> float:
        """Return the CPU seconds to publish and confirm all messages, and end their spans."""
        channel, submit, sdk = self._channel, self._publisher.submit, self._sdk
        work = [(self._kind.context(number), Message(BODY)) for number in range(MESSAGES)]
        began = time.process_time()
        for context, message in work:
            token = attach(context)
            if sdk is not None:
                sdk.trace(context)
            submit(message, routing_key="orders")
            detach(token)
        channel._advance()
        for _ in range(0, MESSAGES, SAMPLE_EVERY):
            self._published += SAMPLE_EVERY
            channel.acked(self._published, True)
            channel.read_finished()
        time.sleep(ENDED)
        return time.process_time() - began


class Handling:
    """Rounds of a handler that does nothing, traced or with the SDK alone.

    A hundred deliveries are acked at a time.
    """

    def __init__(self, kind: Kind, sdk: SDK | None = None) -> None:
        self._kind = kind
        self._sdk = sdk
        tracing = kind.tracing() if sdk is None else None
        self._tracer = None if tracing is None else ConsumerTracer(tracing, name="shop", queue="orders", endpoints=())
        self._handle: Callable[[Any], object] = _handle
        if self._tracer is not None:
            self._handle = self._tracer.traced(_handle, batch=False)

    def round(self) -> float:
        """Return the CPU seconds of all calls, and of the spans of the acks."""
        contexts = [self._kind.context(number) for number in range(MESSAGES)]
        deliveries = [_delivery(number, context) for number, context in enumerate(contexts)]
        handle, tracer, sdk = self._handle, self._tracer, self._sdk
        began = time.process_time()
        for context, delivery in zip(contexts, deliveries, strict=True):
            if sdk is not None:
                sdk.trace(context)
            handle(delivery)
        for start in range(0, MESSAGES, SAMPLE_EVERY):
            end = start + SAMPLE_EVERY
            traced = [one for one in deliveries[start:end] if one.attempt_context is not None]
            if tracer is not None and traced:
                tracer.settled([SettledDeliveries("ack", traced, SAMPLE_EVERY)], time.time_ns())
            if sdk is not None:
                sdk.acked(contexts[start:end])
        return time.process_time() - began


def _delivery(number: int, context: Context) -> Delivery:
    properties = encode_properties(Message(BODY), _headers(context))
    return Delivery("", number + 1, False, "", "orders", properties, BODY)


def _handle(_: object) -> None:
    pass


def _headers(context: Context) -> dict[str, Any]:
    headers: dict[str, Any] = {}
    get_global_textmap().inject(headers, context)
    return headers


class SDK:
    """The calls to the SDK for one kind of traces.

    Args:
        kind: The kind of traces.
        consuming: Whether to attach the span and to link it, in place of writing its context.
    """

    def __init__(self, kind: Kind, *, consuming: bool) -> None:
        self._asks = kind.root_ratio > 0
        self._consuming = consuming
        self._tracer = provider_with(kind.sampler or ALWAYS_OFF).get_tracer("alone")
        self._attributes = {f"messaging.attribute.{number}": "value" for number in range(10)}
        self._ends: dict[str, str | int] = {"reliable_mq.outcome": "confirmed", "reliable_mq.attempts": 1}
        if not consuming:
            self._ends.update(peer(_Connection.peer))
        self._last: Context | None = None

    def trace(self, context: Context) -> None:
        """Make the calls for one message."""
        if context is _SAMPLED or (not context and self._asks):
            self._span(context)
        elif context and context is not self._last and not self._consuming:
            _headers(context)
            self._last = context

    def acked(self, contexts: Sequence[Context]) -> None:
        """Create the span of an ack, if one of these messages is sampled."""
        links = [Link(_REMOTE) for context in contexts if context is _SAMPLED]
        if links:
            self._tracer.start_span("ack orders", _SAMPLED, SpanKind.CLIENT, self._attributes, links).end()

    def _span(self, context: Context) -> None:
        links = [Link(_REMOTE)] if self._consuming and context else None
        span = self._tracer.start_span("send orders", context, SpanKind.PRODUCER, self._attributes, links)
        if self._consuming:
            detach(attach(set_span_in_context(span, context)))
        else:
            _headers(set_span_in_context(span, context))
            if span.is_recording():
                span.add_event("reliable_mq.sent", {"reliable_mq.attempt": 1})
        if span.is_recording():
            span.set_attributes(self._ends)
        span.end()


_REMOTE = SpanContext(random.getrandbits(128), random.getrandbits(64), True, TraceFlags(TraceFlags.SAMPLED))


def main(rounds: int) -> None:
    """Measure, and print the table."""
    work: dict[tuple[str, str], Publishing | Handling] = {}
    for kind in KINDS:
        work[kind.label, "publish"] = Publishing(kind)
        work[kind.label, "handler"] = Handling(kind)
        if kind.sampler is not None:
            work[kind.label, "publish, SDK"] = Publishing(kind, SDK(kind, consuming=False))
            work[kind.label, "handler, SDK"] = Handling(kind, SDK(kind, consuming=True))
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in work}
    for _ in range(rounds):
        for key, one in work.items():
            seconds[key].append(one.round())
    micros = {key: min(found) / MESSAGES * 1e6 for key, found in seconds.items()}
    rows = []
    for kind in KINDS:
        row = [kind.label]
        for column in ("publish", "handler"):
            mine, base = micros[kind.label, column], micros[KINDS[0].label, column]
            sdk = micros.get((kind.label, f"{column}, SDK"), base)
            row += [f"{mine:.2f}", f"{mine - base:.2f}", f"{sdk - base:.2f}"]
        rows.append(tuple(row))
    headings = ("traces", "a publish", "more", "of that SDK", "a handler call", "more", "of that SDK")
    print(Table(TITLE, headings, tuple(rows)).markdown())


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
