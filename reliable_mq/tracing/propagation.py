"""Contexts in the headers of messages.

Headers are decoded only for a message that carries a context, which a search in the encoded properties detects. The
usual context, a ``traceparent`` without ``tracestate`` and ``baggage``, is read without decoding. The same bytes in a
table or a value within the headers do not count.

Writing that context does not call a propagator either, because the call takes as long as publishing a message. A
propagator that writes W3C's format is recognised by its output, not by its class.

Invariant: a context that a message carries is never replaced, nor is any single header of it.
"""

from __future__ import annotations

import re
from binascii import hexlify
from typing import TYPE_CHECKING, Any, Final, Self

from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import (
    DEFAULT_TRACE_STATE,
    INVALID_SPAN,
    NonRecordingSpan,
    SpanContext,
    TraceFlags,
    format_span_id,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from reliable_mq.codec import CodecError, Properties, find_header, plain_properties_head

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.trace import Span

TRACEPARENT: Final = "traceparent"
_BAGGAGE: Final = "baggage"  # not part of a trace context
_W3C: Final = frozenset({TRACEPARENT, "tracestate"})
_BAGGAGE_MARK: Final = b"\x07baggage"
_TRACESTATE_MARK: Final = b"\x0atracestate"
_TRACEPARENT_MARK: Final = b"\x0btraceparent"
_TRACEPARENT: Final = _TRACEPARENT_MARK + b"S\x00\x00\x00\x37"  # the header's name, and the type and size of its value
_ONLY_TRACEPARENT: Final = b"\x00\x00\x00\x48" + _TRACEPARENT  # headers with no other one, after their size
_HEADERS, _TYPE_AND_HEADERS = 0b001, 0b101  # the flags of properties up to the headers: without and with a content type
_USUAL_PLACE: Final = 6  # of the header, in properties that begin with headers and have no other one
_LAST_FLAG: Final = len(_TRACEPARENT) + 54  # from the beginning of the header
_SAMPLED: Final = frozenset((b"1", b"3", b"5", b"7", b"9", b"b", b"d", b"f"))  # the last digit of the flags
_PARTS: Final = re.compile(re.escape(_TRACEPARENT) + rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_PLACE: Final = "-" * 55  # a placeholder for the value
_HEAD_BEGIN, _HEAD_END = plain_properties_head({TRACEPARENT: _PLACE}).split(_PLACE.encode())
_HEAD_AND_VERSION: Final = _HEAD_BEGIN + b"00-"
_FLAGS_AND_END: Final = tuple(b"-%02x%b" % (flags, _HEAD_END) for flags in range(256))
_NO_TRACE, _NO_SPAN = b"0" * 32, b"0" * 16
_EMPTY: Final = Context()
(_SPAN_KEY,) = set_span_in_context(INVALID_SPAN, _EMPTY)  # the key of the span in a context
_SPAN_ALONE: Final = frozenset((_SPAN_KEY,))


class Propagation:
    """A reader and writer of contexts with one propagator. Thread-safe."""

    def __init__(self, propagator: TextMapPropagator) -> None:
        self._propagator = propagator
        self._fields = frozenset(propagator.fields) - {_BAGGAGE}
        self._marks = tuple(bytes((len(name),)) + name.encode() for name in self._fields)
        self._is_w3c = TRACEPARENT in self._fields and self._fields <= _W3C
        self._writes_w3c: bool | None = None  # None: unknown

    def carries(self, properties: bytes | None) -> bool:
        """Return whether encoded properties carry a trace context."""
        if properties is None or not any(mark in properties for mark in self._marks):
            return False
        try:
            return not self._fields.isdisjoint(Properties(properties).header_names())
        except CodecError:
            return True  # an unreadable context is not replaced

    def may_carry_any(self, properties: bytes) -> bool:
        """Return whether a message may carry a trace context or baggage."""
        return _BAGGAGE_MARK in properties or self.carries(properties)

    def passed_on(self, properties: bytes) -> Context | None:
        """Return the context of a message that needs no span.

        The context is decoded only when it is read, which most handlers never do.

        Returns:
            An empty context if the message carries none. The message's context if it is not sampled. None if it is
            sampled or needs decoding.
        """
        if not self._is_w3c:
            return None
        at = properties.find(_ONLY_TRACEPARENT)
        if at == 2 and properties[0] >> 5 == _HEADERS:
            at = _USUAL_PLACE
        elif at > 2 and at == 3 + properties[2] and properties[0] >> 5 == _TYPE_AND_HEADERS:
            at += 4
        elif properties.find(_BAGGAGE_MARK) >= 0:  # faster than ``in``
            return None
        elif properties.find(_TRACEPARENT_MARK) < 0:
            return _EMPTY
        else:
            try:
                at = find_header(properties, _TRACEPARENT_MARK)
            except CodecError:
                return None
            if at < 0:
                return _EMPTY
            if not properties.startswith(_TRACEPARENT, at):
                return None
        last = at + _LAST_FLAG
        if properties[last : last + 1] in _SAMPLED:
            return None
        span = _new_span(_PassedOnSpan)
        span.properties = properties
        if at != _USUAL_PLACE:
            span.at = at
        return Context({_SPAN_KEY: span})

    def span_context(self, properties: bytes) -> SpanContext | None:
        """Return the span context of a message, or None if it needs decoding."""
        if not self._is_w3c or _TRACESTATE_MARK in properties:
            return None
        try:
            at = find_header(properties, _TRACEPARENT_MARK)
        except CodecError:
            return None
        found = _PARTS.match(properties, at) if at >= 0 else None
        if found is None:
            return None
        trace_id, span_id, flags = found.groups()
        return SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)))

    def has_baggage(self, properties: bytes) -> bool:
        """Return whether a message may carry more than the context of a span."""
        return not self._is_w3c or _BAGGAGE_MARK in properties

    def unsampled_head(self, context: Context) -> bytes | None:
        """Return the `plain_properties_head` that passes on an unsampled context.

        Returns:
            None if the context is sampled or has no valid span, or if the propagator must write it.
        """
        span: Any = context.get(_SPAN_KEY)
        if span is None or len(context) != 1 or not (self._writes_w3c or self._does_write_w3c()):
            return None
        if type(span) is _PassedOnSpan and (header := span.undecoded()) is not None:
            return _HEAD_BEGIN + header + _HEAD_END
        found: SpanContext = span.get_span_context()
        if found[3] & 1:  # inlined, because it runs for each message: the properties of OpenTelemetry take longer
            return None
        return _plain_head(found)

    def head_of(self, span: Span, context: Context) -> bytes | None:
        """Return the `plain_properties_head` that carries a span in a context.

        Returns:
            None if the propagator must write it.
        """
        if context.keys() <= _SPAN_ALONE and (self._writes_w3c or self._does_write_w3c()):
            return _plain_head(span.get_span_context())
        return None

    def headers(self, context: Context) -> dict[str, str]:
        """Return the headers that carry a context, as the propagator writes them."""
        headers: dict[str, str] = {}
        self._propagator.inject(headers, context)
        return headers

    def added(self, headers: Mapping[str, str], properties: bytes) -> Mapping[str, str]:
        """Return the headers that are missing in the encoded properties."""
        try:
            theirs = Properties(properties).header_names()
        except CodecError:
            return {}
        return {name: value for name, value in headers.items() if name not in theirs}

    def extract(self, headers: Mapping[str, object]) -> Context:
        """Return the context in the headers, independent of the current context."""
        return self._propagator.extract(headers, Context(), _GETTER)

    def span_in(self, properties: bytes) -> Span:
        """Return the span in encoded properties, invalid if it is unreadable."""
        try:
            return get_current_span(self.extract(Properties(properties).headers))
        except CodecError:
            return INVALID_SPAN

    def _does_write_w3c(self) -> bool:
        """Return whether the propagator writes a lone span as `_plain_head` does."""
        if self._writes_w3c is None:
            spans = [SpanContext(1 << 100, 1 << 50, False, TraceFlags(flags)) for flags in (0, 1)]
            self._writes_w3c = self._is_w3c and all(
                plain_properties_head(self.headers(context_of(span))) == _plain_head(span) for span in spans
            )
        return self._writes_w3c


def _plain_head(span: SpanContext) -> bytes | None:
    """Return the head with W3C's header for a span, or None if it needs more headers."""
    trace_id, span_id, _, flags, state, is_valid = span
    if not is_valid or (state is not DEFAULT_TRACE_STATE and state):
        return None
    ids = (trace_id << 64 | span_id).to_bytes(24, "big")
    return _HEAD_AND_VERSION + hexlify(ids, "-", -16) + _FLAGS_AND_END[flags]  # a dash after the first 16 bytes


def traceparent_in(head: bytes) -> str:
    """Return the only header in a `plain_properties_head`."""
    return head[len(_HEAD_BEGIN) : -len(_HEAD_END)].decode()


class _PassedOnSpan(NonRecordingSpan):
    """The span of an unsampled message. Its context is decoded when it is needed.

    It is created without calling ``__init__``, because every message needs one.
    """

    properties: bytes  # with a context in W3C's format
    at: int = _USUAL_PLACE  # the position of the header ``traceparent`` in the properties
    _decoded: SpanContext | None = None

    def undecoded(self) -> bytes | None:
        """Return the received header, or None if it needs decoding."""
        found = _PARTS.match(self.properties, self.at)
        if found is None or _TRACESTATE_MARK in self.properties:
            return None
        trace_id, span_id, _ = found.groups()
        if trace_id == _NO_TRACE or span_id == _NO_SPAN:
            return None
        return found.group()[len(_TRACEPARENT) :]

    def get_span_context(self) -> SpanContext:
        if self._decoded is None:
            try:
                context = TraceContextTextMapPropagator().extract(Properties(self.properties).headers, _EMPTY, _GETTER)
            except CodecError:
                context = _EMPTY
            self._decoded = get_current_span(context).get_span_context()
        return self._decoded

    def __repr__(self) -> str:
        return repr(NonRecordingSpan(self.get_span_context()))


_new_span: Final = _PassedOnSpan.__new__


def ids_of(context: SpanContext) -> dict[str, str]:
    """Return the ids of a span, for logs and exemplars."""
    return {"trace_id": format_trace_id(context.trace_id), "span_id": format_span_id(context.span_id)}


class AttemptContext(str):
    """The text by which the next attempt finds the span of this one."""

    __slots__ = ("message", "span")

    message: SpanContext | None  # the sampled context that the message carries, or None
    span: SpanContext

    def __new__(cls, span: SpanContext, message: SpanContext | None) -> Self:
        flags = int(span.trace_flags)
        text = f"00-{format_trace_id(span.trace_id)}-{format_span_id(span.span_id)}-{flags:02x}"
        self = super().__new__(cls, text)
        self.span, self.message = span, message
        return self

    def __getnewargs__(self) -> tuple[SpanContext, SpanContext | None]:  # type: ignore[override]  # of a str: the text
        return self.span, self.message


def context_of(span: SpanContext) -> Context:
    """Return a context that contains only a span with this span context."""
    return Context({_SPAN_KEY: NonRecordingSpan(span)})


def context_of_attempt(text: str) -> SpanContext:
    """Return the span context of an earlier attempt, invalid if it is unreadable."""
    if isinstance(text, AttemptContext):
        return text.span
    context = TraceContextTextMapPropagator().extract({TRACEPARENT: text}, _EMPTY)
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
