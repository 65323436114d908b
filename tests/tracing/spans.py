"""Finished spans, in a form that tests can compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler, SamplingResult
from opentelemetry.trace import format_span_id, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from reliable_mq import Tracing
from reliable_mq.testing.waiting import wait_until
from tests.tracing.model import flaws

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, Span
    from opentelemetry.trace import SpanContext, Tracer

#: Attributes that differ between runs; a golden trace has only their names.
_OWN = {"messaging.message.id", "network.peer.port", "server.port", "reliable_mq.seconds"}


class Recorder:
    """A tracer provider that keeps its finished spans.

    Attributes:
        provider: The tracer provider.
        tracing: A `Tracing` with that provider.
        tracer: Another tracer of that provider, for spans of the test.
        started: The spans that have started, whether ended or not.
    """

    def __init__(self, sampler: Sampler | None = None, **options: Any) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler)
        self.started: list[ReadableSpan] = []
        self.provider.add_span_processor(_Started(self.started))
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(tracer_provider=self.provider, **options)
        self.tracer: Tracer = self.provider.get_tracer("test")

    @property
    def spans(self) -> list[ReadableSpan]:
        """The ended spans in order, checked against OpenTelemetry's conventions."""
        spans = list(self._exporter.get_finished_spans())
        for span in spans:
            if span.instrumentation_scope is None or span.instrumentation_scope.name != "test":
                assert not list(flaws(span)), span.to_json()
        return spans

    def wait(self, count: int) -> list[ReadableSpan]:
        """Wait for the given number of spans, which end on other threads.

        Return them in the order of their starts.
        """
        wait_until(lambda: len(self.spans) >= count, timeout=30, what=lambda: f"{count} spans: {self.golden()}")
        assert len(self.spans) == count, self.golden()
        return sorted(self.spans, key=lambda span: span.start_time or 0)

    def named(self, name: str) -> ReadableSpan:
        """Return the only span with this name."""
        [span] = [span for span in self.spans if span.name == name]
        return span

    def golden(self) -> list[dict[str, Any]]:
        """Return all spans by start, without the values that differ between runs."""
        spans = sorted(self.spans, key=lambda span: span.start_time or 0)
        names = {format_span_id(context_of(span).span_id): span.name for span in spans}
        return [_golden(span, names) for span in spans]


class BrokenSampler(Sampler):
    """Raises for every span."""

    def should_sample(self, *_: Any, **__: Any) -> SamplingResult:
        raise RuntimeError("no sample")

    def get_description(self) -> str:
        return "broken"


class BrokenEnd(SpanProcessor):
    """Raises at the end of a span."""

    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("no end")


class BrokenPropagator(TraceContextTextMapPropagator):
    """Raises whenever it writes a context."""

    def inject(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("no header")


class _Started(SpanProcessor):
    def __init__(self, started: list[ReadableSpan]) -> None:
        self._started = started

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self._started.append(span)


def context_of(span: ReadableSpan) -> SpanContext:
    context = span.get_span_context()
    assert context is not None
    return context


def traceparent(span: ReadableSpan) -> str:
    """Return the header that carries the context of a sampled span."""
    context = context_of(span)
    return f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-{int(context.trace_flags):02x}"


def _golden(span: ReadableSpan, names: Mapping[str, str]) -> dict[str, Any]:
    def name_of(context: SpanContext) -> str:
        return names.get(format_span_id(context.span_id), "another")

    golden: dict[str, Any] = {
        "name": span.name,
        "kind": span.kind.name,
        "attributes": {
            name: "..." if name in _OWN else value for name, value in sorted((span.attributes or {}).items())
        },
        "status": span.status.status_code.name,
    }
    if span.parent is not None:
        golden["parent"] = name_of(span.parent)
    if span.links:
        golden["links"] = [name_of(link.context) for link in span.links]
    if span.events:
        golden["events"] = [(event.name, dict(event.attributes or {})) for event in span.events]
    return golden
