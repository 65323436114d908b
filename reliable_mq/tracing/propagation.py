"""Contexts in the headers of messages.

Headers are decoded for a message that carries a context alone: whether one does is a search in the encoded properties.

Invariant: a context that a message carries is never replaced, nor a single header of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    format_span_id,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from reliable_mq.codec import CodecError, Properties

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.propagators.textmap import TextMapPropagator

__all__ = ["Propagation", "attempt_context", "context_of_attempt", "ids_of"]

_BAGGAGE: Final = "baggage"  # no context of a trace
_W3C: Final = frozenset({"traceparent", "tracestate"})
_TRACEPARENT: Final = b"\x0btraceparentS\x00\x00\x00\x37"  # the name of the header, the type and size of its value
_FLAGS: Final = len(_TRACEPARENT) + 53  # behind the beginning of the header
_SAMPLED: Final = frozenset((b"1", b"3", b"5", b"7", b"9", b"b", b"d", b"f"))  # the last digit of the flags
_EMPTY: Final = Context()


class Propagation:
    """Reads and writes contexts with one propagator. Thread-safe.

    Args:
        propagator: of OpenTelemetry.
    """

    def __init__(self, propagator: TextMapPropagator) -> None:
        self._propagator = propagator
        self._fields = frozenset(propagator.fields) - {_BAGGAGE}
        self._marks = tuple(bytes((len(name),)) + name.encode() for name in self._fields)
        self._is_w3c = self._fields <= _W3C

    def carries(self, properties: bytes | None) -> bool:
        """Whether encoded properties carry the context of a trace."""
        if properties is None or not any(mark in properties for mark in self._marks):
            return False
        try:
            return not self._fields.isdisjoint(Properties(properties).header_names())
        except CodecError:
            return True  # what cannot be read is not replaced

    def not_sampled(self, properties: bytes) -> Context | None:
        """Return the context of a message that is not sampled; None if it may be.

        It is decoded if somebody reads it: most handlers look at none.
        """
        if not self._is_w3c or b"\x07baggage" in properties:
            return None
        at = properties.find(_TRACEPARENT)
        if at < 0 or properties[at + _FLAGS + 1 : at + _FLAGS + 2] in _SAMPLED:
            return None
        return set_span_in_context(_PassedOnSpan(self, properties), _EMPTY)

    def headers(self, context: Context) -> dict[str, str]:
        """Return the headers that carry a context."""
        headers: dict[str, str] = {}
        self._propagator.inject(headers, context)
        return headers

    def added(self, headers: Mapping[str, str], properties: bytes) -> Mapping[str, str]:
        """Return those of the headers that the encoded properties do not have."""
        try:
            theirs = Properties(properties).header_names()
        except CodecError:
            return {}
        return {name: value for name, value in headers.items() if name not in theirs}

    def extract(self, headers: Mapping[str, object]) -> Context:
        """Return the context that headers carry, without any of this thread or task."""
        return self._propagator.extract(headers, Context(), _GETTER)


class _PassedOnSpan(NonRecordingSpan):
    """The span of a message that is not sampled; its context is decoded when needed."""

    def __init__(self, propagation: Propagation, properties: bytes) -> None:
        self._propagation = propagation
        self._properties = properties
        self._decoded: SpanContext | None = None

    def get_span_context(self) -> SpanContext:
        if self._decoded is None:
            try:
                context = self._propagation.extract(Properties(self._properties).headers)
            except CodecError:
                context = _EMPTY
            self._decoded = get_current_span(context).get_span_context()
        return self._decoded


def ids_of(context: SpanContext) -> dict[str, str]:
    """Return the ids of a span, for logs and exemplars."""
    return {"trace_id": format_trace_id(context.trace_id), "span_id": format_span_id(context.span_id)}


def attempt_context(context: SpanContext) -> str:
    """Return the text by which the next attempt finds the span of this one."""
    flags = int(context.trace_flags)
    return f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-{flags:02x}"


def context_of_attempt(text: str) -> SpanContext:
    """Return the context of an earlier attempt; an invalid one if it cannot be read."""
    context = TraceContextTextMapPropagator().extract({"traceparent": text}, _EMPTY)
    return get_current_span(context).get_span_context()


class _HeaderGetter(Getter["Mapping[str, object]"]):
    def get(self, carrier: Mapping[str, object], key: str) -> list[str] | None:
        value = carrier.get(key)
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        return [value] if isinstance(value, str) else None

    def keys(self, carrier: Mapping[str, object]) -> list[str]:
        return list(carrier)


_GETTER: Final = _HeaderGetter()
