"""Spans of publishing: a *send* span for each message, ended by its outcome.

The span's context is added to the headers when the message is encoded. The user's `Message` stays unchanged. A message
that already carries a context keeps it, and the span links to it.

A span belongs to the trace of the current span, or of the message, or else begins a trace. The flag of the context, or
the sampler, decides first whether that trace is sampled. If it is not, the message only gets the context that its
receiver continues with, and has no span.

Invariants:

- No span is ended on the loop of a connection, because a span processor is user code.
- A span that was begun ends once: with the outcome of its message, or with the error that was raised to its caller.
"""

from __future__ import annotations

import random
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from opentelemetry.context import Context, get_current
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    StatusCode,
    get_current_span,
    set_span_in_context,
)

from reliable_mq.codec import encode_properties, plain_properties_head
from reliable_mq.core.publisher.publication import Outcome
from reliable_mq.core.publisher.trace import PublicationEvent
from reliable_mq.errors import PublishBlocked, PublishDisconnected, PublishRefused, PublishUnconfirmed
from reliable_mq.message import Message
from reliable_mq.tracing import conventions
from reliable_mq.tracing.propagation import TRACEPARENT, Propagation, ids_of, traceparent_in
from reliable_mq.tracing.tracing import CopyTracing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opentelemetry.trace import Span

    from reliable_mq.core.publisher.publication import Publication
    from reliable_mq.settings import Endpoint
    from reliable_mq.tracing.tracing import TracerErrors, Tracing

_DESTINATIONS_KEPT: Final = 1024  # names and attributes of spans, by exchange and routing key
_NOTHING: Final[Mapping[str, str]] = {}


class PublisherTracer:
    """A factory of the spans of one publisher. Thread-safe."""

    def __init__(self, tracing: Tracing, *, name: str, endpoints: Sequence[Endpoint]) -> None:
        self._tracing = tracing
        self._root_ratio = tracing.root_ratio
        self._injects = not isinstance(tracing, CopyTracing)
        self._errors = tracing._errors  # noqa: SLF001  # of the same package
        self._destination = lru_cache(_DESTINATIONS_KEPT)(partial(_destination, name, conventions.server(endpoints)))
        self._unsampled = SendTrace(None)  # for the last unsampled context: callers publish many messages in one

    apart: Final = Context()
    """The context of a caller that has none."""

    def begin(
        self,
        message: Message,
        exchange: str,
        routing_key: str,
        *,
        operation: Literal["create", "send"] = "send",
        ambient: Context | None = None,
    ) -> SendTrace | None:
        """Begin the span of a publish, or return None if no trace is needed.

        Arguments of a wrong type begin no span, since the publisher refuses them. The operation is ``"create"`` for a
        message that another span will send; a message with a context gets no such span. The message is published in
        the context ``ambient``, or else in that of the caller.
        """
        context = get_current() if ambient is None else ambient
        try:
            if isinstance(message, Message) and message.encoded_properties is None:  # most messages take this fast path
                known = self._unsampled
                if known.context is context:
                    return known
                if not context:
                    if self._root_ratio == 0:
                        return None
                elif self._injects:
                    head = self._propagation.unsampled_head(context)
                    if head is not None:
                        trace = _new_trace(SendTrace)
                        trace.context, trace.plain_head, trace._headers = context, head, None  # noqa: SLF001
                        self._unsampled = trace
                        return trace
            return self._begin(message, exchange, routing_key, operation, context)
        except Exception as error:  # noqa: BLE001  # logged
            self._errors.log(error, "failed to start a span; the message is published without one")
            return None

    @cached_property
    def _propagation(self) -> Propagation:
        return Propagation(self._tracing.propagator)

    def _begin(
        self, message: Message, exchange: str, routing_key: str, operation: str, context: Context
    ) -> SendTrace | None:
        if not _have_types(message, exchange, routing_key):
            return None
        properties = message.encoded_properties
        propagation = self._propagation
        carried = None
        if properties is not None and propagation.carries(properties):
            carried = propagation.span_in(properties)
        if carried is not None and operation == "create":
            return None
        theirs = None if carried is None else carried.get_span_context()
        parent = get_current_span(context).get_span_context()
        if not parent.is_valid and theirs is not None and theirs.is_valid:
            parent, context = theirs, set_span_in_context(carried, context)  # type: ignore[arg-type]
        if parent.is_valid:
            if not parent.trace_flags.sampled:
                return self._pass_on(propagation, context, properties) if theirs is None else None
        elif random.random() >= self._root_ratio:
            return None
        span = self._start(message, exchange, routing_key, operation, context, theirs)
        try:
            head, headers = None, _NOTHING
            if theirs is None and self._injects:
                head = propagation.head_of(span, context) if properties is None else None
                if head is None:
                    headers = propagation.headers(set_span_in_context(span, context))
                    if properties is not None:
                        headers = propagation.added(headers, properties)
            if not span.is_recording():
                return SendTrace(head, headers) if head or headers else None
            if properties is not None and (correlation_id := message.correlation_id) is not None:
                span.set_attribute(conventions.CONVERSATION_ID, conventions.exportable(correlation_id))
            return RecordedTrace(head, headers, self._errors, span)
        except BaseException:  # for example of the user's propagator
            span.end()
            raise

    def _start(
        self,
        message: Message,
        exchange: str,
        routing_key: str,
        operation: str,
        context: Context,
        theirs: SpanContext | None,
    ) -> Span:
        destination, common = self._destination(exchange, routing_key)
        attributes = {  # set at once, because setting a single attribute is slow
            **common,
            conventions.MESSAGE_ID: conventions.exportable(message.message_id),
            conventions.BODY_SIZE: len(message.body),
        }
        if operation != "send":
            attributes[conventions.OPERATION_NAME] = attributes[conventions.OPERATION_TYPE] = operation
        injected = theirs is None and self._injects
        return self._tracing.tracer.start_span(
            f"{operation} {destination}",
            context,
            SpanKind.PRODUCER if injected else SpanKind.CLIENT,
            attributes,
            [Link(theirs)] if theirs is not None and theirs.is_valid else None,
        )

    def _pass_on(self, propagation: Propagation, context: Context, properties: bytes | None) -> SendTrace | None:
        """Return the trace of a message whose context is not sampled."""
        if not self._injects:
            return None
        headers: Mapping[str, str] = propagation.headers(context)
        if properties is not None:
            headers = propagation.added(headers, properties)
        trace = SendTrace(None, headers)
        if properties is None:
            trace.context = context
            self._unsampled = trace
        return trace


def _destination(
    name: str, server: Mapping[str, str | int], exchange: str, routing_key: str
) -> tuple[str, dict[str, Any]]:
    """Return the name of a destination, and the attributes common to its spans."""
    # A member of an enum of strings has another `str`.
    exchange_name, key = str.__str__(exchange), str.__str__(routing_key)
    destination = conventions.published_to(exchange_name, key)
    attributes: dict[str, Any] = {
        conventions.SYSTEM: conventions.RABBITMQ,
        conventions.OPERATION_NAME: "send",
        conventions.OPERATION_TYPE: "send",
        conventions.DESTINATION: destination,
        **({conventions.CLIENT_ID: name} if name else {}),
        **server,
    }
    if key:
        attributes[conventions.ROUTING_KEY] = conventions.exportable(key)
    return destination, attributes


def _have_types(message: object, exchange: object, routing_key: object) -> bool:
    return isinstance(message, Message) and isinstance(exchange, str) and isinstance(routing_key, str)


class SendTrace:
    """The trace of an unsampled publish, which consists only of headers.

    One object may serve many publishes.

    Args:
        plain_head: The head with ``traceparent`` and no other header. None if ``headers`` is given instead.
        headers: The headers to set on the message if there is no ``plain_head``.
    """

    __slots__ = ("_headers", "context", "plain_head")

    recording: bool = False  # whether there is a span to end
    ids: Mapping[str, str] = _NOTHING  # of the span, for logs and exemplars

    def __init__(self, plain_head: bytes | None, headers: Mapping[str, str] = _NOTHING) -> None:
        self.context: Context | None = None  # whose messages share this trace; None if it belongs to one message
        self._headers = headers if plain_head is None else None
        # The start of the encoded properties of a message with these headers and an id, up to the id.
        self.plain_head = plain_properties_head(headers) if plain_head is None else plain_head

    @property
    def header_bytes(self) -> int:
        """The maximum encoded size of the headers, in bytes."""
        return len(self.plain_head)

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers to set on the message."""
        return {TRACEPARENT: traceparent_in(self.plain_head)} if self._headers is None else self._headers

    def without_headers(self) -> SendTrace:
        """Return the trace for a message whose headers have no space for the context."""
        return SendTrace(None)

    def ended(self) -> None:
        """End the span without an outcome."""

    def event(self, event: PublicationEvent, publication: Publication) -> None:
        """Record an event."""

    def settled(self, publication: Publication, at: int, peer: Endpoint | None = None) -> None:
        """End the span with the outcome.

        ``at`` is in nanoseconds since 1970. ``peer`` is the host that was contacted last, if any.
        """

    def failed(self, error: BaseException) -> None:
        """End the span of a publish that was not accepted."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """End the span if the block has raised, because the publish is not accepted."""
        if error is not None:
            self.failed(error)


_new_trace: Final = SendTrace.__new__  # created for each message: calling ``__init__`` takes as long as creating it


class RecordedTrace(SendTrace):
    """The trace of one sampled publish. No method raises."""

    __slots__ = ("_errors", "_span", "ids", "recording")

    def __init__(self, plain_head: bytes | None, headers: Mapping[str, str], errors: TracerErrors, span: Span) -> None:
        super().__init__(plain_head, headers)
        self.recording = True
        self.ids = ids_of(span.get_span_context())
        self._errors = errors
        self._span: Span | None = span

    def without_headers(self) -> SendTrace:
        return self if self._span is None else RecordedTrace(None, _NOTHING, self._errors, self._span)

    def ended(self) -> None:
        self._end({})

    def event(self, event: PublicationEvent, publication: Publication) -> None:
        span = self._span
        if span is None:
            return
        attributes: dict[str, str | int] = {}
        if event in {PublicationEvent.SENT, PublicationEvent.NACKED, PublicationEvent.IN_DOUBT}:
            attributes[conventions.ATTEMPT] = publication.sends
        if event is PublicationEvent.RETURNED and publication.reply is not None:
            attributes[conventions.REPLY_CODE] = publication.reply.code
            attributes[conventions.REPLY_TEXT] = conventions.exportable(publication.reply.text)
        try:
            span.add_event(f"reliable_mq.{event.value}", attributes)
        except Exception as error:  # noqa: BLE001  # logged
            self._errors.log(error, "failed to add an event to a span; the publish itself is not affected")

    def settled(self, publication: Publication, at: int, peer: Endpoint | None = None) -> None:
        if publication.outcome is None:
            return
        attributes: dict[str, str | int] = {conventions.OUTCOME: publication.outcome.value}
        if publication.sends:
            attributes[conventions.ATTEMPTS] = publication.sends
            attributes.update(conventions.peer(peer))
        if publication.in_doubt:
            attributes[conventions.POSSIBLE_DUPLICATE] = True
        if publication.reply is not None and publication.reply.code:
            attributes[conventions.REPLY_CODE] = publication.reply.code
            attributes[conventions.REPLY_TEXT] = conventions.exportable(publication.reply.text)
        self._end(attributes, publication.failure(), at)

    def failed(self, error: BaseException) -> None:
        outcome = _OUTCOMES.get(type(error))
        self._end({} if outcome is None else {conventions.OUTCOME: outcome.value}, error)

    def _end(self, attributes: dict[str, str | int], error: BaseException | None = None, at: int | None = None) -> None:
        """End the span unless it has ended. Never raises, whatever a tracer does."""
        span, self._span, self.recording = self._span, None, False
        if span is None:
            return
        try:
            try:
                if error is not None:
                    attributes[conventions.ERROR_TYPE] = type(error).__name__
                    span.set_status(StatusCode.ERROR, conventions.exportable(str(error)))
                if attributes:
                    span.set_attributes(attributes)
            finally:
                span.end(at)
        except Exception as raised:  # noqa: BLE001  # logged
            self._errors.log(raised, "failed to end a span; the publish itself is not affected")


def with_headers(message: Message, headers: Mapping[str, str]) -> Message:
    return Message.from_wire(message.body, encode_properties(message, headers)) if headers else message


_OUTCOMES: Final[Mapping[type[BaseException], Outcome]] = {
    PublishRefused: Outcome.REFUSED,
    PublishBlocked: Outcome.REFUSED,  # nothing was sent
    PublishDisconnected: Outcome.REFUSED,  # nothing was sent either
    PublishUnconfirmed: Outcome.UNKNOWN,
}
