"""Spans of consuming: *process* around a handler, *receive* for ``get``, *settle*.

A handler runs in the context of its message. When it ends, the context of its thread or task is restored. The span of a
single delivery is in the trace of its message and links to it, and to the previous attempt. The span of a batch has a
separate trace, and links to each sampled message. A message whose trace is not sampled has no span: its handler runs in
an unsampled context, which is decoded only if it is read.

Invariants:

- No exception of a tracer, a span, a span processor or an exception's text becomes the failure of a delivery.
- A span that was started is ended, whatever its other methods raise.
- A context is detached where it was attached, unless its task is discarded.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opentelemetry.context import Context, attach, detach, get_current
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanKind,
    StatusCode,
    get_current_span,
    set_span_in_context,
)

from reliable_mq.core.consumer.attempts import describe
from reliable_mq.core.statistics import Histogram
from reliable_mq.errors import ConsumeError
from reliable_mq.retry import DeadLetter, RetryLater
from reliable_mq.tracing import conventions
from reliable_mq.tracing.propagation import AttemptContext, Propagation, context_of, context_of_attempt, ids_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from opentelemetry.trace import Span, SpanContext

    from reliable_mq.core.consumer.attempts import Failure
    from reliable_mq.core.consumer.delivery import Delivery
    from reliable_mq.core.consumer.settlement import SettledDeliveries
    from reliable_mq.settings import Endpoint
    from reliable_mq.tracing.tracing import Tracing

_DESTINATIONS_KEPT: Final = 1024  # attributes of spans, by exchange and routing key
_EMPTY: Final = Context()


class _Handling(NamedTuple):
    """A span around a handler, and the context that contains it."""

    context: Context
    span: Span
    began: float


class ConsumerTracer:
    """A factory of the spans of one consumer. Thread-safe."""

    def __init__(self, tracing: Tracing, *, name: str, queue: str, endpoints: Sequence[Endpoint]) -> None:
        self._tracing = tracing
        self._root_ratio = tracing.root_ratio
        self._errors = tracing._errors  # noqa: SLF001  # of the same package
        self._queue = queue
        self._common: dict[str, Any] = {
            conventions.SYSTEM: conventions.RABBITMQ,
            conventions.CLIENT_ID: name,
            **conventions.server(endpoints),
        }
        self._destination = lru_cache(_DESTINATIONS_KEPT)(partial(_destination, queue))
        self.exemplars = Histogram()  # traced handler times, without counts

    # Handlers

    def traced(self, handler: Callable[[Any], object], *, batch: bool) -> Callable[[Any], object]:
        """Return a plain handler that runs in the context of its message."""
        begin = self._begin_batch if batch else self._begin

        def handle(argument: Any) -> object:
            begun = begin(argument)
            if isinstance(begun, _Handling):
                return self._handle(handler, argument, *begun)
            if not begun and not get_current():
                return handler(argument)
            token = attach(begun)
            try:
                return handler(argument)
            finally:
                detach(token)

        return handle

    def traced_coroutine(self, handler: Callable[[Any], Any], *, batch: bool) -> Callable[[Any], Any]:
        """Return a coroutine function that runs a handler in its message's context."""
        begin = self._begin_batch if batch else self._begin

        async def handle(argument: Any) -> object:
            begun = begin(argument)
            if isinstance(begun, _Handling):
                return await self._await(handler, argument, *begun)
            if not begun and not get_current():
                return await handler(argument)
            token = attach(begun)
            try:
                answer = await handler(argument)
            except BaseException as error:
                if not _is_thrown_away(error, begun):
                    detach(token)
                raise
            detach(token)
            return answer

        return handle

    @contextmanager
    def attempt(self, delivery: Delivery) -> Iterator[None]:
        """Enter the context of the last attempt at a delivery, or an empty one."""
        before = context_of_attempt(delivery.attempt_context or "")
        token = attach(context_of(before) if before.is_valid else _EMPTY)
        try:
            yield
        finally:
            detach(token)

    def _handle(
        self, handler: Callable[[Any], object], argument: Any, context: Context, span: Span, began: float
    ) -> object:
        token = attach(context)
        try:
            answer = handler(argument)
            self._end(span, began, answer)
        except BaseException as error:
            self._end_failed(span, began, error)
            raise
        finally:
            detach(token)
        return answer

    async def _await(
        self, handler: Callable[[Any], Any], argument: Any, context: Context, span: Span, began: float
    ) -> object:
        token = attach(context)
        try:
            answer = await handler(argument)
        except BaseException as error:
            if _is_thrown_away(error, context):
                self._finish(span, began, "cancelled")
            else:
                self._end_failed(span, began, error)
                detach(token)
            raise
        self._end(span, began, answer)
        detach(token)
        return answer

    def _begin(self, delivery: Delivery) -> Context | _Handling:
        """Begin the span of a delivery. Return only a context if it needs none."""
        try:
            if delivery.attempt_context is not None:
                return self._process(delivery, *self._carried(delivery))
            context = self._propagation.passed_on(delivery.properties)
            if context is None:
                return self._process(delivery, *self._carried(delivery))
            if context or self._root_ratio == 0:
                return context
            return self._process(delivery, context, None)
        except Exception as error:  # noqa: BLE001  # logged
            self._errors.log(error, "failed to start a span; the handler runs without one")
            return _EMPTY

    def _process(self, delivery: Delivery, context: Context, message: SpanContext | None) -> Context | _Handling:
        """Begin the span of a delivery in the context that it carries."""
        links = [] if message is None else [Link(message)]
        parent = message
        if delivery.attempt_context is not None:
            before = context_of_attempt(delivery.attempt_context)
            if before.is_valid:
                links.append(Link(before))
                if parent is None:
                    parent, context = before, set_span_in_context(NonRecordingSpan(before), context)
        if random.random() >= self._root_ratio if parent is None else not parent.trace_flags.sampled:
            return context
        destination = self._destination(delivery.exchange, delivery.routing_key)
        span = self._start("process", SpanKind.CONSUMER, context, destination, links)
        try:
            if span.is_recording():
                delivery.attempt_context = AttemptContext(span.get_span_context(), message)
                span.set_attributes(_describe(delivery))
        except BaseException:
            span.end()
            raise
        return _Handling(set_span_in_context(span, context), span, time.perf_counter())

    def _begin_batch(self, deliveries: list[Delivery]) -> Context | _Handling:
        try:
            return self._process_batch(deliveries)
        except Exception as error:  # noqa: BLE001  # logged
            self._errors.log(error, "failed to start a span; the batch handler runs without one")
            return _EMPTY

    def _process_batch(self, deliveries: list[Delivery]) -> Context | _Handling:
        links, decided = self._links(deliveries)
        if not links and (decided or random.random() >= self._root_ratio):
            return _EMPTY
        span = self._start("process", SpanKind.CONSUMER, _EMPTY, self._common_destination(deliveries), links)
        try:
            if span.is_recording():
                text = AttemptContext(span.get_span_context(), None)
                for delivery in deliveries:
                    delivery.attempt_context = text
                span.set_attribute(conventions.BATCH_COUNT, len(deliveries))
        except BaseException:
            span.end()
            raise
        return _Handling(set_span_in_context(span, _EMPTY), span, time.perf_counter())

    def _end(self, span: Span, began: float, answer: Any) -> None:
        """End the span of a handler that has returned."""
        verdict = answer if issubclass(type(answer), type) else type(answer)
        outcome = "handled"
        if issubclass(verdict, (RetryLater, DeadLetter)):
            outcome = "retry_later" if issubclass(verdict, RetryLater) else "dead_letter"
        self._finish(span, began, outcome)

    def _end_failed(self, span: Span, began: float, error: BaseException) -> None:
        """End the span of a handler that has raised."""
        failure = describe(error, 0.0)
        if failure.verdict is not None:
            self._finish(span, began, "dead_letter")
        elif not failure.kinds:
            self._finish(span, began, "retry_later")
        elif issubclass(type(error), asyncio.CancelledError):  # not isinstance, which reads its __class__
            self._finish(span, began, "cancelled")
        else:
            self._finish(span, began, "failed", error)

    def _finish(self, span: Span, began: float, outcome: str, error: BaseException | None = None) -> None:
        try:
            try:
                span.set_attribute(conventions.OUTCOME, outcome)
                if error is not None:
                    failure = describe(error, 0.0)
                    span.set_attribute(conventions.ERROR_TYPE, failure.exception_type)
                    span.set_status(StatusCode.ERROR, failure.exception_message)
                    _record(span, error, failure)
                if span.is_recording():
                    self.exemplars.exemplify(time.perf_counter() - began, ids_of(span.get_span_context()), time.time())
            finally:
                span.end()
        except Exception as raised:  # noqa: BLE001  # logged
            self._errors.log(raised, "failed to end a span; the delivery is not affected")

    # Deliveries of `get`

    def received(self, deliveries: Sequence[Delivery], began: int, peer: Endpoint | None) -> None:
        """Record that a caller has received deliveries, if there are any.

        ``began`` is when it requested them, in nanoseconds since 1970; ``peer`` the host that it is connected to.
        """
        if not deliveries:
            return
        try:
            self._receive(deliveries, began, peer)
        except Exception as error:  # noqa: BLE001  # logged
            self._errors.log(error, "failed to record a span; the deliveries are not affected")

    def _receive(self, deliveries: Sequence[Delivery], began: int, peer: Endpoint | None) -> None:
        links, decided = self._links(deliveries)
        context = get_current()
        ambient = get_current_span(context).get_span_context()
        if ambient.is_valid:
            if not ambient.trace_flags.sampled:
                return
        elif not links and (decided or random.random() >= self._root_ratio):
            return
        destination = self._common_destination(deliveries)
        span = self._start("receive", SpanKind.CLIENT, context, destination, links, began)
        try:
            if span.is_recording():
                for delivery in deliveries:
                    message = self._carried(delivery)[1]
                    if message is not None and message.trace_flags.sampled:
                        delivery.attempt_context = AttemptContext(span.get_span_context(), message)
                span.set_attributes({conventions.BATCH_COUNT: len(deliveries), **conventions.peer(peer)})
        finally:
            span.end()

    # Settlements

    def settled(self, settlements: Iterable[SettledDeliveries], at: int, peer: Endpoint | None = None) -> None:
        """Record settlements of sampled messages. Call it where a processor may block.

        Each settlement span is a child of the span of its first message, so that it is sampled too. They were written
        to the host ``peer`` at the time ``at``, in nanoseconds since 1970.
        """
        for settlement in settlements:
            try:
                self._settle(settlement, at, peer)
            except Exception as error:  # noqa: BLE001  # logged
                self._errors.log(error, "failed to record a settlement; the settlement itself is not affected")

    def _settle(self, settlement: SettledDeliveries, at: int, peer: Endpoint | None) -> None:
        first = settlement.deliveries[0]
        links, _ = self._links(settlement.deliveries)
        context = context_of(context_of_attempt(first.attempt_context or ""))
        destination = self._common_destination(settlement.deliveries)
        span = self._start(settlement.method, SpanKind.CLIENT, context, destination, links, at)
        attributes: dict[str, str | int] = {**conventions.peer(peer)}
        if settlement.total > 1:
            attributes[conventions.BATCH_COUNT] = settlement.total
        else:
            attributes[conventions.DELIVERY_TAG] = first.delivery_tag
            message_id = _text(first, "message_id")
            if message_id is not None:
                attributes[conventions.MESSAGE_ID] = message_id
        try:
            span.set_attributes(attributes)
        finally:
            span.end(at)

    # Parts of spans

    @cached_property
    def _propagation(self) -> Propagation:
        return Propagation(self._tracing.propagator)

    def _start(
        self,
        operation: str,
        kind: SpanKind,
        context: Context,
        destination: dict[str, Any],
        links: Sequence[Link],
        start_time: int | None = None,
    ) -> Span:
        name = f"{operation} {destination[conventions.DESTINATION]}"
        kind_of_operation = operation if operation in {"process", "receive"} else "settle"
        attributes = {
            **self._common,
            **destination,
            conventions.OPERATION_NAME: operation,
            conventions.OPERATION_TYPE: kind_of_operation,
        }
        return self._tracing.tracer.start_span(name, context, kind, attributes, links, start_time)

    def _common_destination(self, deliveries: Sequence[Delivery]) -> dict[str, Any]:
        """Return the common destination, or the queue if there are several."""
        if len({(delivery.exchange, delivery.routing_key) for delivery in deliveries}) == 1:
            return self._destination(deliveries[0].exchange, deliveries[0].routing_key)
        return {conventions.DESTINATION: self._queue}

    def _links(self, deliveries: Iterable[Delivery]) -> tuple[list[Link], bool]:
        """Return links to sampled messages, and whether all messages carry a context."""
        propagation = self._propagation
        links: list[Link] = []
        decided = True
        for delivery in deliveries:
            previous = delivery.attempt_context
            message = previous.message if isinstance(previous, AttemptContext) else None
            passed_on = None if message is not None else propagation.passed_on(delivery.properties)
            carried = message is not None or bool(passed_on)
            if passed_on is None:
                carried = carried or propagation.carries(delivery.properties)
                message = message or self._carried(delivery)[1]
                if message is not None and message.trace_flags.sampled:
                    links.append(Link(message))
            if previous is not None and not carried:
                before = context_of_attempt(previous)
                if before.is_valid:
                    links.append(Link(before))
            decided &= carried
        return links, decided

    def _carried(self, delivery: Delivery) -> tuple[Context, SpanContext | None]:
        """Return the context that a delivery carries, and its span context if valid."""
        propagation, properties = self._propagation, delivery.properties
        found = None if propagation.has_baggage(properties) else propagation.span_context(properties)
        if found is not None and found.is_valid:
            return context_of(found), found
        context = self._context_of(propagation, delivery)
        span = get_current_span(context).get_span_context()
        return context, span if span.is_valid else None

    def _context_of(self, propagation: Propagation, delivery: Delivery) -> Context:
        """Return the context that a delivery carries, empty if none can be read."""
        if not propagation.may_carry_any(delivery.properties):
            return _EMPTY
        flaw = delivery.flaw
        try:
            return propagation.extract(delivery.headers)
        except ConsumeError:
            delivery.flaw = flaw  # the handler has not read the invalid part
            return _EMPTY


def _destination(queue: str, exchange: str, routing_key: str) -> dict[str, Any]:
    attributes = {conventions.DESTINATION: conventions.consumed_from(exchange, routing_key, queue)}
    if routing_key:
        attributes[conventions.ROUTING_KEY] = conventions.exportable(routing_key)
    return attributes


def _is_thrown_away(error: BaseException, context: Context) -> bool:
    """Return whether a handler ends because its task is discarded.

    The handler is no longer in its context then, so nothing can be detached.
    """
    return issubclass(type(error), GeneratorExit) and get_current() is not context


def _record(span: Span, error: BaseException, failure: Failure) -> None:
    """Record an exception, with the safe text of its description if it has none."""
    try:
        span.record_exception(error)
    except (Exception, SystemExit):  # noqa: BLE001  # whatever its ``__str__`` raises
        text = {"exception.type": failure.exception_type, "exception.message": failure.exception_message}
        span.add_event("exception", text)


def _describe(delivery: Delivery) -> dict[str, str | int | bool]:
    """Return the attributes of one delivery."""
    attributes: dict[str, str | int | bool] = {
        conventions.BODY_SIZE: len(delivery.body),
        conventions.DELIVERY_TAG: delivery.delivery_tag,
        conventions.ATTEMPT: delivery.attempt,
    }
    if delivery.redelivered:
        attributes[conventions.REDELIVERED] = True
    for attribute, name in ((conventions.MESSAGE_ID, "message_id"), (conventions.CONVERSATION_ID, "correlation_id")):
        value = _text(delivery, name)
        if value is not None:
            attributes[attribute] = value
    return attributes


def _text(delivery: Delivery, name: str) -> str | None:
    flaw = delivery.flaw
    try:
        value: str | None = getattr(delivery, name)
    except ConsumeError:
        delivery.flaw = flaw
        return None
    return None if value is None else conventions.exportable(value)
