"""Spans of consumers of either API.

Handlers run in the context of their message, and acks link to it.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import baggage
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import get_current_span
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest

from integration.support.consuming import Handler
from reliable_mq import Ack, DeadLetter, Delivery, Message, Queue, RetryLater, RetryPolicy
from reliable_mq.core import headers
from reliable_mq.stores import MemoryStore
from reliable_mq.testing.waiting import wait_until
from tests.refused_threads import refusing_threads
from tests.tracing.spans import BrokenEnd, BrokenSampler, Recorder, context_of, traceparent

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.contract.scripted_broker import Published, ScriptedBroker

TRACE = "0af7651916cd43dd8448eb211c80319c"
THEIRS = f"00-{TRACE}-b7ad6b7169203331-01"
ANOTHER = "00-1af7651916cd43dd8448eb211c80319c-c7ad6b7169203331-01"
NOT_SAMPLED = THEIRS[:-1] + "0"
SOON = RetryPolicy(2, delays=(0.01,), backend="memory")
NewConsumer = "Callable[..., Any]"


@pytest.fixture
def consume(new_consumer: NewConsumer, request: pytest.FixtureRequest) -> Any:  # type: ignore[valid-type]
    """Return a function that makes a consumer with the usual handler of its API.

    A handler runs on a thread, or as a coroutine in a task.
    """

    def make(handler: Callable[[Any], object] | None, queue: Any = "orders", **options: Any) -> Any:
        async def coroutine(argument: Any) -> object:
            assert handler is not None
            return handler(argument)

        is_coroutine = request.node.callspec.params["new_consumer"] in ("aio", "uvloop")
        return new_consumer(coroutine if is_coroutine and handler is not None else handler, queue, **options)  # type: ignore[operator]

    return make


class Contexts:
    """A handler that keeps the trace id and the sampled flag of the current span."""

    def __init__(self) -> None:
        self.found: list[tuple[str, bool]] = []
        self.baggage: list[object] = []

    def __call__(self, _: object) -> None:
        context = get_current_span().get_span_context()
        self.baggage.append(baggage.get_baggage("tenant"))
        self.found.append((f"{context.trace_id:032x}", context.trace_flags.sampled))

    def wait(self, count: int) -> list[tuple[str, bool]]:
        wait_until(lambda: len(self.found) >= count, timeout=30, what=lambda: f"{count} handled: {self.found}")
        return self.found


NONE = ("0" * 32, False)


def test_a_handler_is_a_process_span_in_the_trace_of_its_message(broker: ScriptedBroker, consume: Any) -> None:
    recorder = Recorder()
    handler = Contexts()
    with consume(handler, tracing=recorder.tracing, name="billing"):
        broker.consuming.deliver(
            b"four", headers={"traceparent": THEIRS}, message_id="m-1", correlation_id="c-1", delivery_mode=2
        )
        recorder.wait(2)
    assert handler.found == [(TRACE, True)]
    common = {
        "messaging.client.id": "billing",
        "messaging.destination.name": "orders",
        "messaging.message.id": "...",
        "messaging.rabbitmq.destination.routing_key": "orders",
        "messaging.rabbitmq.message.delivery_tag": 1,
        "messaging.system": "rabbitmq",
        "server.address": "127.0.0.1",
        "server.port": "...",
    }
    assert recorder.golden() == [
        {
            "name": "process orders",
            "kind": "CONSUMER",
            "parent": "another",
            "links": ["another"],
            "attributes": dict(
                sorted(
                    {
                        **common,
                        "messaging.message.body.size": 4,
                        "messaging.message.conversation_id": "c-1",
                        "messaging.operation.name": "process",
                        "messaging.operation.type": "process",
                        "reliable_mq.attempt": 1,
                        "reliable_mq.outcome": "handled",
                    }.items()
                )
            ),
            "status": "UNSET",
        },
        {
            "name": "ack orders",
            "kind": "CLIENT",
            "parent": "process orders",
            "links": ["another"],
            "attributes": dict(
                sorted(
                    {
                        **common,
                        "messaging.operation.name": "ack",
                        "messaging.operation.type": "settle",
                        "network.peer.address": "127.0.0.1",
                        "network.peer.port": "...",
                    }.items()
                )
            ),
            "status": "UNSET",
        },
    ]
    assert all(f"{context_of(span).trace_id:032x}" == TRACE for span in recorder.spans)
    assert {f"{link.context.span_id:016x}" for span in recorder.spans for link in span.links} == {THEIRS[36:52]}


def test_the_context_does_not_leak_into_the_next_delivery(broker: ScriptedBroker, consume: Any) -> None:
    recorder = Recorder(root_ratio=0)
    handler = Contexts()
    with consume(handler, tracing=recorder.tracing, prefetch=10):
        channel = broker.consuming
        channel.deliver(b"1", headers={"traceparent": THEIRS, "baggage": "tenant=a"})
        channel.deliver(b"2")
        channel.deliver(b"3", headers={"traceparent": NOT_SAMPLED})
        channel.deliver(b"4")
        channel.deliver(b"5", headers={"traceparent": ANOTHER})
        channel.deliver(b"6", headers={"baggage": "tenant=b"})
        handler.wait(6)
    assert handler.found == [(TRACE, True), NONE, (TRACE, False), NONE, (ANOTHER[3:35], True), NONE]
    assert handler.baggage == ["a", None, None, None, None, "b"]


def test_a_handler_that_raises_leaks_nothing(broker: ScriptedBroker, consume: Any) -> None:
    recorder = Recorder(root_ratio=0)
    handler = Contexts()

    def failing(delivery: Delivery) -> None:
        handler(delivery)
        if delivery.body == b"1":
            raise ValueError("no")

    with consume(failing, tracing=recorder.tracing, retry=RetryPolicy(1), dead_letter=None):
        broker.consuming.deliver(b"1", headers={"traceparent": THEIRS})
        broker.consuming.deliver(b"2")
        handler.wait(2)
    assert handler.found == [(TRACE, True), NONE]


def test_the_trace_of_a_consumer_start_is_not_that_of_handlers(broker: ScriptedBroker, consume: Any) -> None:
    recorder = Recorder(root_ratio=0)
    handler = Contexts()
    batches = Contexts()
    with recorder.tracer.start_as_current_span("start"):
        with consume(handler, tracing=recorder.tracing):
            broker.consuming.deliver(b"1")
            handler.wait(1)
        with consume(batches, tracing=recorder.tracing, batch_size=1):
            broker.consuming.deliver(b"1")
            batches.wait(1)
    assert handler.found == batches.found == [NONE]


def test_a_message_without_a_context_begins_a_trace(broker: ScriptedBroker, consume: Any) -> None:
    recorder = Recorder()
    handler = Contexts()
    with consume(handler, tracing=recorder.tracing):
        broker.consuming.deliver(b"1")
        process, ack = recorder.wait(2)
    assert process.parent is None
    assert process.links == ()
    assert handler.found == [(f"{context_of(process).trace_id:032x}", True)]
    assert (ack.name, context_of(ack).trace_id) == ("ack orders", context_of(process).trace_id)


@pytest.mark.parametrize("header", [NOT_SAMPLED, "rubbish", "00-zz", 7, bytearray(b"\xff")])
def test_a_message_that_is_not_sampled_has_no_span(broker: ScriptedBroker, consume: Any, header: object) -> None:
    recorder = Recorder(ParentBased(ALWAYS_OFF))
    handler = Handler()
    with consume(handler, tracing=recorder.tracing):
        broker.consuming.deliver(b"1", headers={"traceparent": header})
        handler.wait_done(1)
    assert recorder.spans == []


def outcomes(recorder: Recorder) -> list[tuple[object, object, str]]:
    return [
        (attributes["reliable_mq.outcome"], attributes.get("error.type"), span.status.status_code.name)
        for span in sorted(recorder.spans, key=lambda span: span.start_time or 0)
        if span.name.startswith("process") and (attributes := span.attributes or {})
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (ValueError("no"), ("failed", "ValueError", "ERROR")),
        (RetryLater(0.01), ("retry_later", None, "UNSET")),
        (DeadLetter("wrong"), ("dead_letter", None, "UNSET")),
        (SystemExit(1), ("failed", "SystemExit", "ERROR")),
        (GeneratorExit(), ("failed", "GeneratorExit", "ERROR")),
    ],
)
def test_the_span_ends_with_the_outcome_of_the_handler(
    broker: ScriptedBroker, consume: Any, result: BaseException, expected: tuple[object, object, str]
) -> None:
    recorder = Recorder()

    def handle(_: Delivery) -> None:
        raise result

    with consume(handle, tracing=recorder.tracing, retry=RetryPolicy(1), dead_letter=None):
        broker.consuming.deliver(b"1", headers={"traceparent": THEIRS})
        recorder.wait(2)
    assert outcomes(recorder) == [expected]
    reject = recorder.named("reject orders")
    assert reject.attributes is not None
    assert reject.attributes["messaging.operation.type"] == "settle"


def test_a_verdict_that_is_returned_is_an_outcome(broker: ScriptedBroker, consume: Any) -> None:
    recorder = Recorder()
    with consume(lambda _: DeadLetter("wrong"), tracing=recorder.tracing, dead_letter=None):
        broker.consuming.deliver(b"1")
        recorder.wait(2)
    assert outcomes(recorder) == [("dead_letter", None, "UNSET")]


def test_each_attempt_links_to_the_one_before(broker: ScriptedBroker, consume: Any) -> None:
    recorder = Recorder()
    handler = Contexts()

    def failing(delivery: Delivery) -> None:
        handler(delivery)
        if delivery.attempt == 1:
            raise ValueError("no")

    with consume(failing, tracing=recorder.tracing, retry=SOON, dead_letter=None):
        broker.consuming.deliver(b"1", headers={"traceparent": THEIRS})
        first, second, ack = recorder.wait(3)
    assert [first.attributes and first.attributes["reliable_mq.attempt"], outcomes(recorder)] == [
        1,
        [("failed", "ValueError", "ERROR"), ("handled", None, "UNSET")],
    ]
    assert second.parent is not None
    assert f"{second.parent.span_id:016x}" == THEIRS[36:52]
    assert [link.context.span_id for link in second.links][1:] == [context_of(first).span_id]
    assert ack.parent is not None
    assert ack.parent.span_id == context_of(second).span_id


def confirming(published: Published) -> None:
    published.channel.ack(published.number)


def test_a_delay_queue_keeps_the_context_of_message_and_attempt(broker: ScriptedBroker, consume: Any) -> None:
    """The first consumer fails, and the second one gets its retry."""
    broker.script = confirming
    recorder = Recorder()

    def failing(_: Delivery) -> None:
        raise ValueError("no")

    queue = Queue("orders", dead_letter=None)
    with consume(failing, queue, tracing=recorder.tracing, retry=RetryPolicy(3, delays=(60,)), new_queue_grace=0):
        broker.consuming.deliver(b"1", headers={"traceparent": THEIRS, "mine": 1})
        [published] = broker.wait_published(1)
    [first] = [span for span in recorder.spans if span.name.startswith("process")]
    assert published.properties.headers is not None
    assert published.properties.headers["traceparent"] == THEIRS
    assert published.properties.headers[headers.TRACE_CONTEXT] == traceparent(first)
    seen: list[dict[str, object]] = []
    with consume(lambda delivery: seen.append(dict(delivery.headers)), tracing=recorder.tracing):
        broker.consuming.deliver(b"1", headers=published.properties.headers)
        wait_until(lambda: seen, timeout=30, what="the second attempt")
    assert seen == [{"traceparent": THEIRS, "mine": 1}]
    second = [span for span in recorder.spans if span.name.startswith("process")][1]
    assert f"{context_of(second).trace_id:032x}" == TRACE
    assert [link.context.span_id for link in second.links] == [int(THEIRS[36:52], 16), context_of(first).span_id]


def test_attempts_at_a_message_without_a_context_share_a_trace(broker: ScriptedBroker, consume: Any) -> None:
    recorder = Recorder()

    def failing(delivery: Delivery) -> None:
        if delivery.attempt == 1:
            raise ValueError("no")

    with consume(failing, tracing=recorder.tracing, retry=SOON, dead_letter=None):
        broker.consuming.deliver(b"1")
        first, second, ack = recorder.wait(3)
    assert len({context_of(span).trace_id for span in (first, second, ack)}) == 1
    assert [link.context.span_id for link in second.links] == [context_of(first).span_id]


def test_a_span_thread_that_cannot_start_delays_no_ack(
    broker: ScriptedBroker, consume: Any, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    with consume(lambda _: None, tracing=recorder.tracing, ack_interval=0.02) as consumer:
        channel = broker.consuming
        with refusing_threads("-traces") as refused:
            for number in (1, 2):
                channel.deliver(b"", headers={"traceparent": THEIRS})
                broker.wait_settled(number)
            wait_until(lambda: consumer.statistics.acked == 2, timeout=30, what="two acks")
        channel.deliver(b"", headers={"traceparent": THEIRS})
        recorder.wait(6)
    assert len(broker.connections) == 1
    assert caplog.text.count("their thread cannot be started") == bool(refused), "the sync API has a span thread"


def test_a_batch_is_one_span_that_links_to_sampled_messages(broker: ScriptedBroker, consume: Any) -> None:
    recorder = Recorder()
    sizes: list[int] = []

    def handle(deliveries: list[Delivery]) -> list[Any]:
        sizes.append(len(deliveries))
        return [Ack()] * len(deliveries)

    with consume(handle, tracing=recorder.tracing, batch_size=4, batch_wait=30):
        channel = broker.consuming
        for header in (THEIRS, NOT_SAMPLED, ANOTHER):
            channel.deliver(b"1", headers={"traceparent": header})
        channel.deliver(b"1")
        process, ack = recorder.wait(2)
    assert sizes == [4]
    assert process.parent is None
    assert process.kind.name == "CONSUMER"
    ids = [THEIRS[36:52], ANOTHER[36:52]]
    assert [f"{link.context.span_id:016x}" for link in process.links] == ids
    assert process.attributes is not None
    assert process.attributes["messaging.batch.message_count"] == 4
    assert "messaging.message.id" not in process.attributes
    assert ack.attributes is not None
    assert ack.attributes["messaging.batch.message_count"] == 4
    assert {f"{link.context.span_id:016x}" for link in ack.links} >= set(ids)


def test_a_batch_of_messages_that_are_not_sampled_has_no_span(broker: ScriptedBroker, consume: Any) -> None:
    recorder = Recorder()
    handler = Contexts()
    with consume(handler, tracing=recorder.tracing, batch_size=2, batch_wait=30):
        for _ in range(2):
            broker.consuming.deliver(b"1", headers={"traceparent": NOT_SAMPLED})
        handler.wait(1)
    assert recorder.spans == []
    assert handler.found == [NONE]


def test_acks_in_one_frame_are_one_span(broker: ScriptedBroker, consume: Any) -> None:
    recorder = Recorder()
    gate = threading.Event()
    handler = Handler(then=lambda _: gate.wait(30))
    with consume(handler, tracing=recorder.tracing, ack_every=4, ack_interval=30, prefetch=20):
        for header in (THEIRS, NOT_SAMPLED, NOT_SAMPLED, ANOTHER):
            broker.consuming.deliver(b"1", headers={"traceparent": header})
        handler.wait_begun(1)
        gate.set()
        broker.wait_settled(1)
        wait_until(lambda: len(recorder.spans) >= 3, timeout=30, what="three spans")
    acks = [span for span in recorder.spans if span.name.startswith("ack")]
    linked = [f"{link.context.span_id:016x}" for span in acks for link in span.links]
    assert sorted(linked) == sorted([THEIRS[36:52], ANOTHER[36:52]])
    assert len(acks) <= 2


def test_a_store_claims_and_the_handler_is_traced_all_the_same(broker: ScriptedBroker, consume: Any) -> None:
    recorder = Recorder()
    handler = Contexts()
    with consume(handler, tracing=recorder.tracing, idempotency=MemoryStore()):
        for _ in range(2):  # the second is a duplicate
            broker.consuming.deliver(b"1", headers={"traceparent": THEIRS}, message_id="m-1")
        broker.wait(lambda: sum(one.tag for one in broker.settlements if one.tag == 2), "the acks")
        wait_until(lambda: len(recorder.spans) >= 2, timeout=30, what="two spans")
    assert handler.found == [(TRACE, True)]
    assert [span.name for span in recorder.spans].count("process orders") == 1


def test_get_is_a_receive_span(broker: ScriptedBroker, consume: Any) -> None:
    broker.ready.extend([b"1", b"2"])
    recorder = Recorder()
    with consume(None, tracing=recorder.tracing) as consumer:
        with consumer.get(2, timeout=30) as deliveries:
            assert len(deliveries) == 2
        with consumer.get(1) as deliveries:
            assert deliveries == []
        [receive] = recorder.wait(1)
    assert (receive.name, receive.kind.name) == ("receive orders", "CLIENT")
    assert receive.attributes is not None
    assert receive.attributes["messaging.batch.message_count"] == 2
    assert receive.attributes["messaging.operation.type"] == "receive"
    assert receive.attributes["network.peer.address"] == "127.0.0.1"


def test_a_publish_in_a_handler_goes_on_with_the_trace(
    broker: ScriptedBroker, consume: Any, new_publisher_of_the_sync_api: Any
) -> None:
    broker.script = confirming
    recorder = Recorder()
    with new_publisher_of_the_sync_api(tracing=recorder.tracing) as publisher:

        def handle(_: Delivery) -> None:
            publisher.submit(Message(b""), routing_key="invoices")

        with consume(handle, tracing=recorder.tracing):
            broker.consuming.deliver(b"1", headers={"traceparent": THEIRS})
            broker.consuming.deliver(b"2", headers={"traceparent": NOT_SAMPLED})
            published = broker.wait_published(2)
            wait_until(lambda: len(recorder.spans) >= 3, timeout=30, what="three spans")
    send = recorder.named("send invoices")
    assert send.parent is not None
    assert send.parent.span_id == context_of(recorder.named("process orders")).span_id
    assert [(one.properties.headers or {})["traceparent"] for one in published] == [traceparent(send), NOT_SAMPLED]


# -- copies: retries and dead letters ----------------------------------------------------------------------------------


def failing(_: Delivery) -> None:
    raise ValueError("no")


def test_a_dead_letter_is_sent_in_the_trace_of_its_last_attempt(
    broker: ScriptedBroker, consume: Any, caplog: pytest.LogCaptureFixture
) -> None:
    broker.script = confirming
    recorder = Recorder()
    options = {"tracing": recorder.tracing, "retry": RetryPolicy(1), "new_queue_grace": 0}
    with consume(failing, dead_letter="orders.dead", **options):
        broker.consuming.deliver(b"1", headers={"traceparent": THEIRS, "mine": 1}, message_id="m-1")
        broker.wait_settled(1)
        recorder.wait(3)
    process, send, ack = (recorder.named(f"{name}") for name in ("process orders", "send orders.dead", "ack orders"))
    assert send.kind.name == "CLIENT"
    assert send.parent is not None
    assert ack.parent is not None
    assert send.parent.span_id == ack.parent.span_id == context_of(process).span_id
    assert [f"{link.context.span_id:016x}" for link in send.links] == [THEIRS[36:52]]
    assert send.attributes is not None
    assert send.attributes["reliable_mq.outcome"] == "confirmed"
    [published] = broker.published
    found = published.properties.headers or {}
    assert (found["traceparent"], found[headers.TRACE_CONTEXT]) == (THEIRS, traceparent(process))
    [record] = [record for record in caplog.records if "dead-lettered" in record.message]
    assert (vars(record)["trace_id"], vars(record)["span_id"]) == (TRACE, f"{context_of(process).span_id:016x}")


def test_a_record_factory_with_trace_ids_costs_no_connection(
    broker: ScriptedBroker, consume: Any, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    class Correlated(logging.LogRecord):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.trace_id = "none"

    broker.script = confirming
    request.addfinalizer(partial(logging.setLogRecordFactory, logging.getLogRecordFactory()))
    logging.setLogRecordFactory(Correlated)
    options = {"dead_letter": "orders.dead", "retry": RetryPolicy(1), "new_queue_grace": 0}
    with consume(failing, tracing=Recorder().tracing, **options):
        broker.consuming.deliver(b"1", headers={"traceparent": THEIRS}, message_id="m-1")
        broker.wait_settled(1)
    assert "a callback failed" not in caplog.text
    [record] = [record for record in caplog.records if "dead-lettered" in record.message]
    assert vars(record)["trace_id"] == TRACE


def test_a_message_without_a_context_gets_none_by_a_retry(broker: ScriptedBroker, consume: Any) -> None:
    broker.script = confirming
    recorder = Recorder()
    options = {"tracing": recorder.tracing, "retry": RetryPolicy(2, delays=(60,)), "new_queue_grace": 0}
    with consume(failing, Queue("orders", dead_letter=None), **options):
        broker.consuming.deliver(b"1")
        broker.wait_settled(1)
        recorder.wait(3)
    [published] = broker.published
    found = published.properties.headers or {}
    assert "traceparent" not in found
    process, send = recorder.named("process orders"), recorder.named("send orders.retry.60000")
    assert found[headers.TRACE_CONTEXT] == traceparent(process)
    assert context_of(send).trace_id == context_of(process).trace_id


def test_a_copy_of_a_message_that_is_not_sampled_has_no_span(broker: ScriptedBroker, consume: Any) -> None:
    broker.script = confirming
    recorder = Recorder(root_ratio=0)
    options = {"tracing": recorder.tracing, "retry": RetryPolicy(1), "new_queue_grace": 0}
    with recorder.tracer.start_as_current_span("start"), consume(failing, dead_letter="orders.dead", **options):
        broker.consuming.deliver(b"1", headers={"traceparent": NOT_SAMPLED})
        broker.consuming.deliver(b"2")
        broker.wait(lambda: sum(one.tag for one in broker.settlements) >= 2, "the acks")
    assert [span.name for span in recorder.spans] == ["start"]
    assert [(one.properties.headers or {}).get("traceparent") for one in broker.published] == [NOT_SAMPLED, None]


def test_times_of_handlers_have_exemplars(broker: ScriptedBroker, consume: Any) -> None:
    recorder = Recorder(root_ratio=0)
    registry = CollectorRegistry()
    handler = Contexts()
    with consume(handler, tracing=recorder.tracing, registry=registry):
        broker.consuming.deliver(b"1", headers={"traceparent": THEIRS})
        broker.consuming.deliver(b"2")
        recorder.wait(2)
        handler.wait(2)
        text = generate_latest(registry).decode()
    [line] = [line for line in text.splitlines() if "handler_seconds_bucket" in line and " # " in line]
    assert f'trace_id="{TRACE}"' in line


@pytest.mark.parametrize(("sampler", "processor"), [(BrokenSampler(), None), (None, BrokenEnd())])
def test_a_tracer_that_raises_is_logged_once(
    broker: ScriptedBroker,
    consume: Any,
    caplog: pytest.LogCaptureFixture,
    sampler: BrokenSampler | None,
    processor: BrokenEnd | None,
) -> None:
    recorder = Recorder(sampler)
    if processor is not None:
        recorder.provider.add_span_processor(processor)
    handler = Contexts()
    with consume(handler, tracing=recorder.tracing):
        for _ in range(3):
            broker.consuming.deliver(b"1", headers={"traceparent": THEIRS})
        handler.wait(3)
    [logged] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert logged.getMessage().startswith("OpenTelemetry raised, 1 times")
