"""The context and the spans of a handler, which end with the handler in every case."""

from __future__ import annotations

import asyncio
import pickle
from contextvars import copy_context
from typing import TYPE_CHECKING, Never

import pytest
from opentelemetry.context import get_current
from opentelemetry.sdk.trace import Span
from opentelemetry.trace import NoOpTracerProvider

from reliable_mq import DeadLetter, Message, RetryLater
from reliable_mq.core.consumer.settlement import SettledDeliveries
from reliable_mq.tracing import Tracing
from reliable_mq.tracing.consuming import ConsumerTracer
from reliable_mq.tracing.publishing import PublisherTracer
from tests.core.deliveries import delivery
from tests.hostile_exceptions import Classless, Textless, Wordless
from tests.tracing.spans import Recorder

if TYPE_CHECKING:
    from reliable_mq import Delivery

SAMPLED = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.mark.parametrize("context", [SAMPLED, SAMPLED[:-1] + "0"], ids=["a span", "no span"])
@pytest.mark.parametrize("thrown_away", [False, True])
def test_a_context_ends_with_its_handler(context: str, thrown_away: bool, caplog: pytest.LogCaptureFixture) -> None:
    """This covers a GeneratorExit in the handler and a discarded task.

    A GeneratorExit leaves no context behind, and a discarded task does not detach the context of another task.
    """

    async def handle(_: Delivery) -> None:
        if not thrown_away:
            raise GeneratorExit
        await asyncio.sleep(0)

    tracer = ConsumerTracer(Recorder().tracing, name="test", queue="orders", endpoints=())
    running = tracer.traced_coroutine(handle, batch=False)(delivery(headers={"traceparent": context}))
    task = copy_context()
    if thrown_away:
        task.run(running.send, None)
        running.close()
    else:
        with pytest.raises(GeneratorExit):
            task.run(running.send, None)
        assert task.run(get_current) == {}
    assert get_current() == {}
    assert caplog.messages == []


def test_a_traced_delivery_goes_to_another_process() -> None:
    copies: list[Delivery] = []
    tracer = ConsumerTracer(Recorder().tracing, name="test", queue="orders", endpoints=())
    item = delivery(headers={"traceparent": SAMPLED})
    tracer.traced(lambda one: copies.append(pickle.loads(pickle.dumps(one))), batch=False)(item)
    assert item.attempt_context is not None
    assert (copies[0].attempt_context, copies[0].headers) == (item.attempt_context, item.headers)


@pytest.mark.parametrize("kind", [Wordless, Textless, Classless])
@pytest.mark.parametrize("is_coroutine", [False, True])
def test_an_exception_that_cannot_be_shown_ends_its_span(
    kind: type[Exception], is_coroutine: bool, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    tracer = ConsumerTracer(recorder.tracing, name="test", queue="orders", endpoints=())

    def handle(_: Delivery) -> None:
        raise kind

    async def handle_later(_: Delivery) -> None:
        raise kind

    def attempt() -> None:
        if is_coroutine:
            tracer.traced_coroutine(handle_later, batch=False)(delivery()).send(None)
        else:
            tracer.traced(handle, batch=False)(delivery())

    with pytest.raises(kind):
        attempt()
    assert get_current() == {}
    [span] = recorder.spans
    assert span.attributes is not None
    assert span.attributes["reliable_mq.outcome"] == "failed"
    [event] = span.events
    assert event.attributes is not None
    assert (event.name, event.attributes["exception.type"]) == ("exception", f"{kind.__module__}.{kind.__name__}")
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("errors", "outcome"),
    [
        ([RetryLater(5), RetryLater()], "retry_later"),
        ([ValueError("no"), DeadLetter("bad")], "dead_letter"),
        ([ValueError("no"), RetryLater(5)], "failed"),
    ],
)
def test_the_outcome_of_a_group_is_what_becomes_of_its_message(errors: list[Exception], outcome: str) -> None:
    """A `TaskGroup` raises a group, and the verdict in it counts."""

    def handle(_: Delivery) -> None:
        raise ExceptionGroup("unhandled errors in a TaskGroup", errors)

    recorder = Recorder()
    tracer = ConsumerTracer(recorder.tracing, name="test", queue="orders", endpoints=())
    with pytest.raises(ExceptionGroup):
        tracer.traced(handle, batch=False)(delivery())
    [span] = recorder.spans
    assert (span.attributes or {})["reliable_mq.outcome"] == outcome
    assert len(span.events) == (outcome == "failed")


def test_an_answer_that_hides_its_class_ends_its_span() -> None:
    recorder = Recorder()
    tracer = ConsumerTracer(recorder.tracing, name="test", queue="orders", endpoints=())
    answer = Classless()
    assert tracer.traced(lambda _: answer, batch=False)(delivery()) is answer
    assert [dict(span.attributes or {})["reliable_mq.outcome"] for span in recorder.spans] == ["handled"]


@pytest.mark.parametrize("method", ["set_attribute", "set_attributes", "set_status", "is_recording"])
def test_a_span_that_raises_ends_all_the_same(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends once, and neither the handler nor the delivery is affected."""

    def refuse(*_: object, **__: object) -> Never:
        raise RuntimeError("a span of somebody else")

    def handle(_: object) -> None:
        raise ValueError("no")

    recorder = Recorder()
    tracer = ConsumerTracer(recorder.tracing, name="test", queue="orders", endpoints=())
    sampled = delivery(headers={"traceparent": SAMPLED})
    monkeypatch.setattr(Span, method, refuse)
    with pytest.raises(ValueError, match="no"):
        tracer.traced(handle, batch=False)(sampled)
    with pytest.raises(ValueError, match="no"):
        tracer.traced(handle, batch=True)([sampled])
    tracer.received([sampled], 0, None)
    tracer.settled([SettledDeliveries("ack", [sampled], 1)], 0)
    monkeypatch.undo()
    assert get_current() == {}
    assert [span.name for span in recorder.started] == [*["process orders"] * 2, "receive orders", "ack orders"]
    assert all(span.end_time is not None for span in recorder.started)
    assert [record.name for record in caplog.records if record.name.startswith("opentelemetry")] == []


def test_a_handler_passes_on_baggage_without_a_trace() -> None:
    """Without an SDK, a message carries baggage alone."""
    tracing = Tracing(tracer_provider=NoOpTracerProvider())
    publisher = PublisherTracer(tracing, name="test", endpoints=())
    passed_on: list[object] = []

    def handle(_: Delivery) -> None:
        trace = publisher.begin(Message(b""), "", "orders")
        passed_on.append(trace and dict(trace.headers))

    consumer = ConsumerTracer(tracing, name="test", queue="orders", endpoints=())
    consumer.traced(handle, batch=False)(delivery(headers={"baggage": "tenant=acme"}))
    assert passed_on == [{"baggage": "tenant=acme"}]


def test_a_handler_can_print_its_context() -> None:
    """The context of an unsampled message shows the decoded ids, like any other."""
    printed: list[str] = []
    tracer = ConsumerTracer(Recorder().tracing, name="test", queue="orders", endpoints=())
    tracer.traced(lambda _: printed.append(repr(get_current())), batch=False)(
        delivery(headers={"traceparent": SAMPLED[:-1] + "0"})
    )
    assert all(part in printed[0] for part in ("NonRecordingSpan", "a" * 32, "b" * 16))
