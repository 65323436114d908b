"""A message in an unsampled context has the headers that the propagator writes.

This holds with and without a call of the propagator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import baggage
from opentelemetry.context import Context, set_value
from opentelemetry.propagate import get_global_textmap
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from reliable_mq import Message, Tracing
from reliable_mq.codec import encode_properties, plain_properties_head
from reliable_mq.tracing.propagation import Propagation
from reliable_mq.tracing.publishing import PublisherTracer

if TYPE_CHECKING:
    from opentelemetry.propagators.textmap import TextMapPropagator


class SampledAlone(TraceContextTextMapPropagator):
    """Writes only sampled contexts."""

    def inject(self, carrier: Any, context: Context | None = None, setter: Any = None) -> None:
        headers: dict[str, str] = {}
        super().inject(headers, context)
        if headers.get("traceparent", "").endswith("1"):
            carrier.update(headers)


def unsampled(trace_id: int = 1 << 100, span_id: int = 7, flags: int = 0, state: TraceState | None = None) -> Context:
    span = SpanContext(trace_id, span_id, True, TraceFlags(flags), state)
    return set_span_in_context(NonRecordingSpan(span), Context())


def handled(traceparent: str) -> Context:
    """Return the context in which a handler runs."""
    properties = encode_properties(Message(b"", headers={"traceparent": traceparent}))
    context = Propagation(get_global_textmap()).passed_on(properties)
    assert context is not None
    return context


ZEROS = "0" * 32
CONTEXTS = {
    "span": unsampled(),
    "other flags": unsampled(flags=0xFE),
    "tracestate": unsampled(state=TraceState([("vendor", "1")])),
    "baggage": baggage.set_baggage("user", "1", unsampled()),
    "something else": set_value("theirs", 1, unsampled()),
    "handler": handled(f"00-{ZEROS[:-1]}5-{ZEROS[:15]}6-02"),
    "handler, no trace": handled(f"00-{ZEROS}-{ZEROS[:15]}6-00"),
    "handler, version to come": handled(f"01-{ZEROS[:-1]}5-{ZEROS[:15]}6-00"),
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("propagator", [get_global_textmap(), TraceContextTextMapPropagator(), SampledAlone()])
def test_the_headers_are_those_that_the_propagator_writes(context: Context, propagator: TextMapPropagator) -> None:
    written: dict[str, str] = {}
    propagator.inject(written, context)
    tracer = PublisherTracer(Tracing(propagator=propagator, root_ratio=0), name="shop", endpoints=())
    trace = tracer.begin(Message(b""), "", "orders", ambient=context)
    assert (dict(trace.headers) if trace is not None else {}) == written
    if trace is not None:
        assert trace.plain_head == plain_properties_head(written)
        assert trace.header_bytes == len(trace.plain_head)
        assert not trace.recording
