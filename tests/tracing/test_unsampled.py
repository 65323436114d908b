"""Contexts in the headers of messages, read and written with and without a call of the propagator.

A message in an unsampled context has the headers that the propagator writes. A received message has the context that
the propagator reads in its headers, but not in the tables within them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import baggage
from opentelemetry.context import Context, set_value
from opentelemetry.propagate import get_global_textmap
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    TraceFlags,
    TraceState,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from reliable_mq import Message, Tracing
from reliable_mq.codec import Properties, encode_properties, join_properties, plain_properties_head, split_properties
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


SAMPLED, UNSAMPLED = f"00-{'a' * 32}-{'b' * 16}-01", f"00-{'c' * 32}-{'d' * 16}-00"
MARK = "\x0btraceparentS\0\0\0\x37" + SAMPLED


@pytest.mark.parametrize(("ours", "theirs"), [(SAMPLED, UNSAMPLED), (UNSAMPLED, SAMPLED)], ids=["sampled", "unsampled"])
@pytest.mark.parametrize(
    "layout",
    ["alone", "nested first", "nested last", "only nested", "in an array", "in a value", "in bytes", "behind", "none"],
)
@pytest.mark.parametrize("content_type", [None, "", "application/json", MARK], ids=["no type", "empty", "json", "mark"])
def test_only_headers_of_the_message_itself_count(
    ours: str, theirs: str, layout: str, content_type: str | None
) -> None:
    """A table or a value within the headers may contain another context."""
    nested = {"original": {"traceparent": theirs}}
    own = {"traceparent": ours}
    headers = {
        "alone": own,
        "nested first": nested | own,
        "nested last": own | nested,
        "only nested": nested,
        "in an array": {"originals": [{"traceparent": theirs}]} | own,
        "in a value": {"text": MARK} | own,
        "in bytes": own | {"raw": b"\0\0\0\x48" + MARK.encode()},
        "behind": {"attempt": 1} | own,
        "none": {},
    }[layout]
    segments = split_properties(encode_properties(Message(b"", headers=headers)))
    if content_type is not None:
        segments["content_type"] = bytes((len(content_type),)) + content_type.encode()
    check(join_properties(segments))


@pytest.mark.parametrize(
    "raw",
    [
        b"\x1e\0" + b"\0\0" + b"\0\x48" + MARK[:-1].encode() + b"0",
        join_properties({"headers": plain_properties_head({"traceparent": UNSAMPLED})[2:-1]}),
        join_properties({"message_id": bytes((len(MARK) + 4,)) + b"\0\0\0\x48" + MARK.encode()}),
    ],
    ids=["no headers", "headers", "an id"],
)
def test_no_other_property_is_a_context(raw: bytes) -> None:
    check(raw)


def check(raw: bytes) -> None:
    """Check that properties have the context that the propagator reads."""
    headers = Properties(raw).headers
    decoded = get_current_span(TraceContextTextMapPropagator().extract(headers, Context())).get_span_context()
    propagation = Propagation(TraceContextTextMapPropagator())
    passed_on, read = propagation.passed_on(raw), propagation.span_context(raw)
    carries = "traceparent" in headers
    assert propagation.carries(raw) == carries
    assert (read is None) or (read.trace_id, read.trace_flags) == (decoded.trace_id, decoded.trace_flags)
    if decoded.trace_flags.sampled:
        assert (passed_on, read) == (None, decoded)
    else:
        assert passed_on is not None
        assert bool(passed_on) is carries
        if carries:
            assert get_current_span(passed_on).get_span_context() == decoded
            head = propagation.unsampled_head(passed_on)
            assert head == propagation.unsampled_head(set_span_in_context(NonRecordingSpan(decoded), Context()))
