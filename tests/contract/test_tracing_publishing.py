"""Spans of publishers of either API, and the trace context in the headers.

The tests check name, kind, attributes, events and outcome.
"""

from __future__ import annotations

import asyncio
import enum
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Never

import httpx
import pytest
from opentelemetry import baggage, context
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, get_current_span
from prometheus_client import CollectorRegistry
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from reliable_mq import (
    ConfigurationError,
    Message,
    PublishBlocked,
    PublishDisconnected,
    PublishNacked,
    PublishRefused,
    PublishReturned,
    PublishUnconfirmed,
    RetryPolicy,
    UsageError,
)
from reliable_mq.codec import encode_properties
from reliable_mq.health import HealthServer
from reliable_mq.outbox import SQLAlchemyOutbox, SQLiteOutbox
from reliable_mq.testing.waiting import wait_until
from reliable_mq.tracing.publishing import PublisherTracer
from tests.children import end_of_forked_child
from tests.hostile_exceptions import Wordless
from tests.refused_threads import refusing_threads
from tests.tracing.spans import BrokenEnd, BrokenPropagator, BrokenSampler, Recorder, context_of, traceparent

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reliable_mq import Tracing
    from tests.contract.scripted_broker import Published, ScriptedBroker

NewPublisher = "Callable[..., Any]"
THEIRS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = THEIRS[:-1] + "0"


def acking(published: Published) -> None:
    published.channel.ack(published.number)


def headers_of(published: Published) -> dict[str, Any]:
    return published.properties.headers or {}


def test_a_confirmed_publish_is_a_send_span_in_the_callers_trace(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    broker.script = acking
    recorder = Recorder()
    message = Message(b"four", correlation_id="c-1")
    with (
        new_publisher(tracing=recorder.tracing, name="shop") as publisher,
        recorder.tracer.start_as_current_span("HTTP"),
    ):
        receipt = publisher.publish(message, exchange="shop", routing_key="orders.new")
    recorder.wait(2)
    assert recorder.golden() == [
        {"name": "HTTP", "kind": "INTERNAL", "attributes": {}, "status": "UNSET"},
        {
            "name": "send shop:orders.new",
            "kind": "PRODUCER",
            "parent": "HTTP",
            "attributes": {
                "messaging.client.id": "shop",
                "messaging.destination.name": "shop:orders.new",
                "messaging.message.body.size": 4,
                "messaging.message.conversation_id": "c-1",
                "messaging.message.id": "...",
                "messaging.operation.name": "send",
                "messaging.operation.type": "send",
                "messaging.rabbitmq.destination.routing_key": "orders.new",
                "messaging.system": "rabbitmq",
                "network.peer.address": "127.0.0.1",
                "network.peer.port": "...",
                "reliable_mq.attempts": 1,
                "reliable_mq.outcome": "confirmed",
                "server.address": "127.0.0.1",
                "server.port": "...",
            },
            "status": "UNSET",
            "events": [("reliable_mq.sent", {"reliable_mq.attempt": 1})],
        },
    ]
    send = recorder.named("send shop:orders.new")
    assert send.attributes is not None
    assert send.attributes["messaging.message.id"] == receipt.message_id
    [published] = broker.published
    assert headers_of(published) == {"traceparent": traceparent(send)}
    assert message.headers == {}


def test_the_span_lasts_until_the_confirm(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    recorder = Recorder()
    with new_publisher(tracing=recorder.tracing) as publisher:
        confirmation = publisher.submit(Message(b""), routing_key="orders")
        [published] = broker.wait_published(1)
        assert recorder.spans == []
        acking(published)
        confirmation.result(30)
        recorder.wait(1)


def outcome(recorder: Recorder) -> tuple[object, object, str, list[str]]:
    [span] = recorder.wait(1)
    attributes = span.attributes or {}
    return (
        attributes.get("reliable_mq.outcome"),
        attributes.get("error.type"),
        span.status.status_code.name,
        [event.name.removeprefix("reliable_mq.") for event in span.events],
    )


def test_a_nacked_publish_shows_its_attempts(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    broker.script = lambda published: published.channel.nack(published.number)
    recorder = Recorder()
    with new_publisher(tracing=recorder.tracing, retry=RetryPolicy(2, delays=(0.01,))) as publisher:
        with pytest.raises(PublishNacked):
            publisher.publish(Message(b""), routing_key="orders")
        assert outcome(recorder) == ("nacked", "PublishNacked", "ERROR", ["sent", "nacked", "sent", "nacked"])


def test_a_returned_publish_shows_the_reply(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    def returning(published: Published) -> None:
        published.channel.return_(published)
        acking(published)

    broker.script = returning
    recorder = Recorder()
    with new_publisher(tracing=recorder.tracing) as publisher:
        with pytest.raises(PublishReturned):
            publisher.publish(Message(b""), routing_key="orders")
        assert outcome(recorder) == ("returned", "PublishReturned", "ERROR", ["sent", "returned"])
    [span] = recorder.spans
    assert span.attributes is not None
    assert (span.attributes["reliable_mq.reply.code"], span.attributes["reliable_mq.reply.text"]) == (312, "NO_ROUTE")


def test_a_refused_publish_shows_its_doubt(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    """Two publishes are lost with the channel, and either may be the cause.

    Both may have arrived, and each is sent again alone.
    """

    def script(published: Published) -> None:
        if published.body == b"bad":
            published.channel.close(404, "NOT_FOUND - a text that names no publish")
        elif len(broker.published) > 1:
            acking(published)

    broker.script = script
    recorder = Recorder()
    with new_publisher(tracing=recorder.tracing) as publisher:
        confirmations = [publisher.submit(Message(body), exchange="x") for body in (b"good", b"bad")]
        assert isinstance(confirmations[1].exception(30), PublishRefused)
        assert confirmations[0].exception(30) is None
        spans = recorder.wait(2)
    assert [[event.name.removeprefix("reliable_mq.") for event in span.events] for span in spans] == [
        ["sent", "in_doubt", "sent"]
    ] * 2
    assert [(span.attributes or {})["reliable_mq.outcome"] for span in spans] == ["confirmed", "refused"]
    assert [(span.attributes or {})["reliable_mq.possible_duplicate"] for span in spans] == [True, True]


def test_a_publish_that_was_refused_for_sure_has_no_doubt(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    broker.script = lambda published: published.channel.close(404, "NOT_FOUND - no exchange 'x' in vhost '/'")
    recorder = Recorder()
    with new_publisher(tracing=recorder.tracing) as publisher:
        with pytest.raises(PublishRefused):
            publisher.publish(Message(b""), exchange="x")
        assert outcome(recorder) == ("refused", "PublishRefused", "ERROR", ["sent"])
    assert "reliable_mq.possible_duplicate" not in (recorder.spans[0].attributes or {})


def test_a_lost_connection_is_doubt_and_a_second_attempt(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    def script(published: Published) -> None:
        if len(broker.published) == 1:
            published.channel.connection.cut()
        else:
            acking(published)

    broker.script = script
    recorder = Recorder()
    with new_publisher(tracing=recorder.tracing) as publisher:
        publisher.publish(Message(b""), routing_key="orders")
        assert outcome(recorder) == ("confirmed", None, "UNSET", ["sent", "in_doubt", "sent"])
    [span] = recorder.spans
    assert span.attributes is not None
    assert span.attributes["reliable_mq.possible_duplicate"] is True
    assert span.attributes["reliable_mq.attempts"] == 2
    first, second = broker.published
    assert headers_of(first)["traceparent"] == headers_of(second)["traceparent"] == traceparent(span)
    assert second.possible_duplicate


def test_a_publish_without_a_confirm_ends_as_unknown(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    recorder = Recorder()
    with new_publisher(tracing=recorder.tracing) as publisher:
        with pytest.raises(PublishUnconfirmed):
            publisher.publish(Message(b""), routing_key="orders", timeout=0.2)
        assert outcome(recorder) == ("unknown", "PublishUnconfirmed", "ERROR", ["sent"])


def test_waiting_for_the_window_is_an_event(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    recorder = Recorder()
    with new_publisher(tracing=recorder.tracing, max_outstanding=1) as publisher:
        first = publisher.submit(Message(b"1"), routing_key="orders")
        [published] = broker.wait_published(1)
        with pytest.raises(PublishUnconfirmed):
            publisher.submit(Message(b"2"), routing_key="orders", timeout=0.1)
        assert outcome(recorder) == ("unknown", "PublishUnconfirmed", "ERROR", ["window_full"])
        broker.script = acking
        acking(published)
        first.result(30)


def test_a_publish_that_gets_room_says_when(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    recorder = Recorder()
    with new_publisher(tracing=recorder.tracing, max_outstanding=1) as publisher, ThreadPoolExecutor(1) as another:
        publisher.submit(Message(b"1"), routing_key="orders")
        [published] = broker.wait_published(1)
        broker.script = acking
        waiting = another.submit(publisher.publish, Message(b"2"), routing_key="orders")
        wait_until(lambda: len(recorder.started) == 2 and recorder.started[1].events, timeout=30, what="a full window")
        acking(published)
        waiting.result(30)
        second = recorder.wait(2)[1]
    assert [event.name.removeprefix("reliable_mq.") for event in second.events] == ["window_full", "admitted", "sent"]


def test_a_blocked_broker_is_an_event(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    broker.script = acking
    recorder = Recorder()
    with new_publisher(tracing=recorder.tracing) as publisher:
        connection = broker.connections[-1]
        connection.block("low on memory")
        wait_until(lambda: publisher.blocked, timeout=30, what="the alarm")
        confirmation = publisher.submit(Message(b""), routing_key="orders")
        wait_until(lambda: publisher.outstanding, timeout=30, what="a publish")
        with pytest.raises(PublishBlocked):
            publisher.publish(Message(b""), routing_key="orders", timeout=0.1)
        recorder.wait(1)  # the caller may give up before the connection does
        connection.unblock()
        confirmation.result(30)
        spans = recorder.wait(2)
    events = [[event.name.removeprefix("reliable_mq.") for event in span.events] for span in spans]
    assert events == [["blocked", "unblocked", "sent"], ["blocked"]]


def test_a_publish_while_the_broker_blocks_ends_as_refused(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    recorder = Recorder()
    with new_publisher(tracing=recorder.tracing, on_blocked="raise") as publisher:
        broker.connections[-1].block("low on memory")
        wait_until(lambda: publisher.blocked, timeout=30, what="the alarm")
        with pytest.raises(PublishBlocked):
            publisher.publish(Message(b""), routing_key="orders")
        assert outcome(recorder) == ("refused", "PublishBlocked", "ERROR", [])


def test_a_publish_without_a_connection_ends_as_refused(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    recorder = Recorder()
    with new_publisher(tracing=recorder.tracing, on_disconnected="raise") as publisher:
        publisher.connect()
        broker.refusals["Connection.Open"] = 541, "INTERNAL_ERROR - starting"
        broker.connection.cut()
        wait_until(lambda: not publisher.connected, timeout=30, what="the loss")
        with pytest.raises(PublishDisconnected):
            publisher.publish(Message(b""), routing_key="orders")
        assert outcome(recorder) == ("refused", "PublishDisconnected", "ERROR", [])
    [span] = recorder.spans
    assert span.attributes is not None
    assert "network.peer.address" not in span.attributes  # nothing was sent


def test_a_context_in_the_message_is_kept_and_linked(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    broker.script = acking
    recorder = Recorder()
    with new_publisher(tracing=recorder.tracing) as publisher, recorder.tracer.start_as_current_span("HTTP"):
        publisher.publish(Message(b"", headers={"traceparent": THEIRS, "mine": 1}), routing_key="orders")
    send = recorder.wait(2)[1]
    [published] = broker.published
    assert headers_of(published) == {"traceparent": THEIRS, "mine": 1}
    assert send.kind.name == "CLIENT"
    assert [f"{link.context.trace_id:032x}" for link in send.links] == [THEIRS[3:35]]
    assert send.parent is not None
    assert send.parent.span_id == context_of(recorder.named("HTTP")).span_id


def test_without_a_current_span_a_messages_own_trace_goes_on(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    broker.script = acking
    recorder = Recorder()
    with new_publisher(tracing=recorder.tracing) as publisher:
        publisher.publish(Message(b"", headers={"traceparent": THEIRS}), routing_key="orders")
        publisher.publish(Message(b"", headers={"traceparent": NOT_SAMPLED}), routing_key="orders")
        publisher.publish(Message(b"", headers={"traceparent": "rubbish"}), routing_key="orders")
    ours, another = recorder.wait(2)
    assert f"{context_of(ours).trace_id:032x}" == THEIRS[3:35]
    assert another.links == ()
    assert [headers_of(one)["traceparent"] for one in broker.published] == [THEIRS, NOT_SAMPLED, "rubbish"]


def test_a_trace_that_is_not_sampled_is_passed_on_without_a_span(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    broker.script = acking
    recorder = Recorder(ParentBased(ALWAYS_OFF))
    with new_publisher(tracing=recorder.tracing) as publisher, recorder.tracer.start_as_current_span("HTTP") as current:
        publisher.publish(Message(b""), routing_key="orders")
        publisher.publish(Message(b""), routing_key="orders")
        publisher.publish(Message(b"", headers={"mine": 1}), routing_key="orders")
        publisher.publish(Message(b"", headers={"traceparent": THEIRS}), routing_key="orders")
    assert recorder.spans == []
    trace_id = f"{current.get_span_context().trace_id:032x}"
    found = [headers_of(one)["traceparent"] for one in broker.published]
    assert [header[3:35] for header in found] == [trace_id, trace_id, trace_id, THEIRS[3:35]]
    assert [header[-2:] in ("00", "02") for header in found] == [True, True, True, False]  # 02: a random trace id
    assert headers_of(broker.published[2])["mine"] == 1


def test_a_root_that_is_not_sampled_is_passed_on_too(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    broker.script = acking
    recorder = Recorder(ParentBased(ALWAYS_OFF))
    with new_publisher(tracing=recorder.tracing) as publisher:
        publisher.publish(Message(b""), routing_key="orders")
    assert recorder.spans == []
    assert headers_of(broker.published[0])["traceparent"][-2:] in ("00", "02")


def test_a_root_ratio_of_0_begins_no_trace(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    broker.script = acking
    recorder = Recorder(root_ratio=0)
    with new_publisher(tracing=recorder.tracing) as publisher:
        publisher.publish(Message(b""), routing_key="orders")
        with recorder.tracer.start_as_current_span("HTTP"):
            publisher.publish(Message(b""), routing_key="orders")
    assert [span.name for span in recorder.wait(2)] == ["HTTP", "send orders"]
    assert [sorted(headers_of(one)) for one in broker.published] == [[], ["traceparent"]]


def test_baggage_goes_with_the_message(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    broker.script = acking
    recorder = Recorder()
    token = context.attach(baggage.set_baggage("tenant", "a"))
    try:
        with new_publisher(tracing=recorder.tracing) as publisher:
            publisher.publish(Message(b"", headers={"mine": 1}), routing_key="orders")
            publisher.publish(Message(b"", headers={"baggage": "tenant=b"}), routing_key="orders")
    finally:
        context.detach(token)
    assert [headers_of(one)["baggage"] for one in broker.published] == ["tenant=a", "tenant=b"]


def test_headers_that_fill_the_frame_leave_the_context_out(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    broker.script = acking
    broker.frame_max = 8192
    recorder = Recorder()
    with new_publisher(tracing=recorder.tracing) as publisher:
        publisher.publish(Message(b"", headers={"large": "x" * 8000}), routing_key="orders")
        recorder.wait(1)
    assert sorted(headers_of(broker.published[0])) == ["large"]


def test_a_wrong_argument_ends_its_span_with_the_error(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    recorder = Recorder()
    with new_publisher(tracing=recorder.tracing, max_message_bytes=1) as publisher:
        with pytest.raises(PublishRefused):
            publisher.publish(Message(b"12"), routing_key="orders")
        assert outcome(recorder) == ("refused", "PublishRefused", "ERROR", [])


@pytest.mark.parametrize("wrong", [{"message": "text"}, {"exchange": ["e"]}, {"routing_key": ["orders"]}], ids=str)
def test_an_argument_of_a_wrong_type_is_no_error_of_the_tracer(
    broker: ScriptedBroker, new_publisher: NewPublisher, caplog: pytest.LogCaptureFixture, wrong: dict[str, Any]
) -> None:
    arguments = {"message": Message(b""), "exchange": "", "routing_key": "orders"} | wrong
    with new_publisher(tracing=Recorder().tracing) as publisher, pytest.raises(ConfigurationError):
        publisher.submit(arguments.pop("message"), **arguments)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_span_has_the_value_of_a_routing_key_in_an_enum(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    broker.script = acking
    recorder = Recorder()
    key = enum.Enum("Queues", {"ORDERS": "orders"}, type=str)["ORDERS"]
    with new_publisher(tracing=recorder.tracing) as publisher:
        publisher.publish(Message(b""), routing_key=key)
    assert broker.published[0].routing_key == "orders"
    [send] = recorder.wait(1)
    assert send.name == "send orders"
    assert (send.attributes or {})["messaging.rabbitmq.destination.routing_key"] == "orders"


def test_the_span_of_a_publish_in_a_forked_child_ends(
    broker: ScriptedBroker, new_publisher_of_the_sync_api: NewPublisher
) -> None:
    recorder = Recorder()
    with new_publisher_of_the_sync_api(tracing=recorder.tracing) as publisher:

        def submit() -> None:
            with pytest.raises(UsageError, match=r"made before fork\(\)"):
                publisher.submit(Message(b""), routing_key="orders")
            assert len(recorder.spans) == len(recorder.started) == 1

        assert end_of_forked_child(0, submit) == 0
    assert broker.published == []


def test_a_report_names_the_messages_of_the_caller(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    broker.script = lambda published: published.channel.nack(published.number)
    recorder = Recorder()
    message = Message(b"")
    with new_publisher(tracing=recorder.tracing, retry=RetryPolicy(1)) as publisher:
        report = publisher.publish_many([message], routing_key="orders")
    assert [failed for failed, _ in report.failures] == [message]


def test_an_awaited_failure_without_a_span_is_not_unawaited(
    broker: ScriptedBroker, new_publisher: NewPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    """A trace that is not sampled does not wait for the outcome."""
    broker.script = lambda _published: None
    with new_publisher(tracing=Recorder(ALWAYS_OFF).tracing, retry=RetryPolicy(1)) as publisher:
        confirmation = publisher.submit(Message(b""), routing_key="orders")
        [published] = broker.wait_published(1)
        with ThreadPoolExecutor(1) as pool:
            failure = pool.submit(confirmation.exception, 30)
            wait_until(lambda: confirmation.callbacks, timeout=30, what="a caller that waits")
            published.channel.nack(published.number)
            assert isinstance(failure.result(30), PublishNacked)
    assert "no caller waits" not in caplog.text


def test_an_unawaited_failure_is_logged_with_its_trace(
    broker: ScriptedBroker, new_publisher: NewPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    broker.script = lambda published: published.channel.nack(published.number)
    recorder = Recorder()
    publisher = new_publisher(tracing=recorder.tracing, retry=RetryPolicy(1))
    publisher.connect()
    publisher.submit(Message(b""), routing_key="orders")
    [send] = recorder.wait(1)
    with pytest.raises(PublishNacked):
        publisher.close()
    [record] = [record for record in caplog.records if "failed publishes that no caller waits for: 1" in record.message]
    ids = context_of(send)
    assert (vars(record)["trace_id"], vars(record)["span_id"]) == (f"{ids.trace_id:032x}", f"{ids.span_id:016x}")


def test_a_publish_leaves_the_callers_context_as_it_was(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    broker.script = acking
    recorder = Recorder()
    with new_publisher(tracing=recorder.tracing) as publisher, recorder.tracer.start_as_current_span("HTTP") as current:
        publisher.publish(Message(b""), routing_key="orders")
        assert get_current_span() is current
    assert not get_current_span().get_span_context().is_valid


def test_a_scrape_shows_exemplars_of_times_to_the_confirm(broker: ScriptedBroker, new_publisher: NewPublisher) -> None:
    broker.script = acking
    recorder = Recorder()
    registry = CollectorRegistry()
    with (
        new_publisher(tracing=recorder.tracing, registry=registry) as publisher,
        HealthServer(getattr(publisher, "publisher", publisher), port=0, registry=registry) as server,
    ):
        publisher.publish(Message(b""), routing_key="orders")
        [send] = recorder.wait(1)
        text = httpx.get(f"{server.url}/metrics", headers={"Accept": "application/openmetrics-text"}, timeout=30).text
    [line] = [line for line in text.splitlines() if "confirm_seconds_bucket" in line and " # " in line]
    assert f'trace_id="{context_of(send).trace_id:032x}"' in line


# -- outbox ------------------------------------------------------------------------------------------------------------


def test_the_context_is_that_of_who_stores_the_message(
    broker: ScriptedBroker, new_publisher: NewPublisher, tmp_path: Path
) -> None:
    """The relay sends the message later, without a context.

    Its span links to the span of storing.
    """
    broker.script = acking
    recorder = Recorder()
    with new_publisher(tracing=recorder.tracing, outbox=SQLiteOutbox(tmp_path / "outbox.db"), name="shop") as publisher:
        with recorder.tracer.start_as_current_span("HTTP"):
            message = Message(b"four")
            confirmation = publisher.submit(message, routing_key="orders")
            assert confirmation.result(30).status == "stored"
            assert message.headers == {}
        publisher.flush(30)
        recorder.wait(3)
    common = {
        "messaging.client.id": "shop",
        "messaging.destination.name": "orders",
        "messaging.message.body.size": 4,
        "messaging.message.id": "...",
        "messaging.rabbitmq.destination.routing_key": "orders",
        "messaging.system": "rabbitmq",
        "server.address": "127.0.0.1",
        "server.port": "...",
    }
    create, send = recorder.named("create orders"), recorder.named("send orders")
    golden = {span["name"]: span for span in recorder.golden()}
    assert golden["create orders"] == {
        "name": "create orders",
        "kind": "PRODUCER",
        "parent": "HTTP",
        "attributes": {
            **common,
            "messaging.operation.name": "create",
            "messaging.operation.type": "create",
            "reliable_mq.outcome": "stored",
        },
        "status": "UNSET",
    }
    assert golden["send orders"]["kind"] == "CLIENT"
    assert (golden["send orders"]["parent"], golden["send orders"]["links"]) == ("create orders", ["create orders"])
    assert golden["send orders"]["attributes"]["reliable_mq.outcome"] == "confirmed"
    assert context_of(create).trace_id == context_of(send).trace_id
    assert headers_of(broker.published[0]) == {"traceparent": traceparent(create)}


def test_a_message_that_cannot_be_stored_ends_its_span(
    broker: ScriptedBroker, new_publisher: NewPublisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that adds the context to the message raises."""

    def refuse(*_: object) -> Never:
        raise MemoryError("no copy")

    broker.script = acking
    recorder = Recorder()
    with new_publisher(tracing=recorder.tracing, outbox=SQLiteOutbox(tmp_path / "outbox.db")) as publisher:
        monkeypatch.setattr(Message, "from_wire", refuse)
        with pytest.raises(MemoryError, match="no copy"):
            publisher.publish(Message(b""), routing_key="orders")
        monkeypatch.undo()
    [span] = recorder.started
    assert (span.name, span.status.description) == ("create orders", "no copy")
    assert span.end_time is not None


def add_to_session(database: Path, tracing: Tracing, message: Message, **options: Any) -> None:
    engine = create_engine(f"sqlite:///{database}")
    with Session(engine) as session:
        SQLAlchemyOutbox(engine, tracing=tracing).add(session, message, **options)
        session.commit()
    engine.dispose()


def add_to_connection(database: Path, tracing: Tracing, message: Message, **options: Any) -> None:
    engine = create_engine(f"sqlite:///{database}")
    with engine.begin() as connection:
        SQLAlchemyOutbox(engine, tracing=tracing).add(connection, message, **options)
    engine.dispose()


def add_to_asyncio_session(database: Path, tracing: Tracing, message: Message, **options: Any) -> None:
    async def main() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{database}")
        async with AsyncSession(engine) as session:
            SQLAlchemyOutbox(engine, tracing=tracing).add(session, message, **options)
            await session.commit()
        await engine.dispose()

    asyncio.run(main())


@pytest.mark.parametrize("add", [add_to_session, add_to_connection, add_to_asyncio_session])
def test_a_row_of_a_transaction_carries_the_context_of_its_code(
    broker: ScriptedBroker, new_publisher: NewPublisher, tmp_path: Path, add: Callable[..., None]
) -> None:
    """Another publisher relays it in the same trace.

    A row that has a context keeps it.
    """
    broker.script = acking
    recorder, database = Recorder(), tmp_path / "shop.db"
    engine = create_engine(f"sqlite:///{database}")
    relayed = SQLAlchemyOutbox(engine, create=True)
    relayed.create_table()
    message = Message(b"four", headers={"mine": 1})
    with recorder.tracer.start_as_current_span("HTTP") as current:
        add(database, recorder.tracing, message, exchange="shop", routing_key="orders")
        add(database, recorder.tracing, Message(b"", headers={"traceparent": THEIRS}), routing_key="orders")
    assert message.headers == {"mine": 1}
    with new_publisher(tracing=recorder.tracing, outbox=relayed, name="relay") as publisher:
        publisher.flush(30)
    engine.dispose()
    recorder.wait(4)
    create, send = recorder.named("create shop:orders"), recorder.named("send shop:orders")
    assert {context_of(span).trace_id for span in (create, send)} == {current.get_span_context().trace_id}
    golden = {span["name"]: span for span in recorder.golden()}
    assert golden["create shop:orders"]["parent"] == "HTTP"
    assert (golden["send shop:orders"]["parent"], golden["send shop:orders"]["links"]) == (create.name, [create.name])
    first, second = broker.published
    assert headers_of(first) == {"mine": 1, "traceparent": traceparent(create)}
    assert first.message_id == message.message_id
    assert headers_of(second) == {"traceparent": THEIRS}


def test_a_row_that_is_refused_has_no_span() -> None:
    recorder = Recorder()
    outbox = SQLAlchemyOutbox(create_engine("sqlite://"), tracing=recorder.tracing)
    with recorder.tracer.start_as_current_span("HTTP"):
        with pytest.raises(ConfigurationError, match="session"):
            outbox.add(None, Message(b""), routing_key="orders")  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="routing_key"):
            outbox.add(None, Message(b""), routing_key="k" * 256)  # type: ignore[arg-type]
    assert [span.name for span in recorder.spans] == ["HTTP"]


def test_a_row_of_a_message_that_is_not_sampled_has_no_span(
    broker: ScriptedBroker, new_publisher: NewPublisher, tmp_path: Path
) -> None:
    broker.script = acking
    recorder = Recorder(ParentBased(ALWAYS_OFF), root_ratio=0)
    with (
        recorder.tracer.start_as_current_span("HTTP") as current,
        new_publisher(tracing=recorder.tracing, outbox=SQLiteOutbox(tmp_path / "outbox.db")) as publisher,
    ):
        publisher.publish(Message(b""), routing_key="orders")
        publisher.publish(Message(b"", headers={"traceparent": THEIRS}), routing_key="orders")
        publisher.flush(30)
    assert [span.name for span in recorder.spans] == ["send orders"]  # for the second message, whose trace is sampled
    found = [headers_of(one)["traceparent"] for one in broker.published]
    assert [header[3:35] for header in found] == [f"{current.get_span_context().trace_id:032x}", THEIRS[3:35]]


def test_a_message_for_anothers_outbox_gets_the_current_context() -> None:
    recorder = Recorder()
    with recorder.tracer.start_as_current_span("HTTP"):
        message = recorder.tracing.create(Message(b"", headers={"mine": 1}), routing_key="orders")
        again = recorder.tracing.create(message, routing_key="orders")
    assert again is message
    assert message.headers == {"mine": 1, "traceparent": traceparent(recorder.named("create orders"))}
    assert recorder.golden()[1]["parent"] == "HTTP"


@pytest.mark.parametrize(("sampler", "processor"), [(BrokenSampler(), None), (None, BrokenEnd())])
def test_a_tracer_that_raises_is_logged_once(
    broker: ScriptedBroker,
    new_publisher: NewPublisher,
    caplog: pytest.LogCaptureFixture,
    sampler: BrokenSampler | None,
    processor: BrokenEnd | None,
) -> None:
    broker.script = acking
    recorder = Recorder(sampler)
    if processor is not None:
        recorder.provider.add_span_processor(processor)
    with new_publisher(tracing=recorder.tracing) as publisher:
        for _ in range(3):
            publisher.publish(Message(b""), routing_key="orders")
    [logged] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert logged.getMessage().startswith("OpenTelemetry raised, 1 times")
    assert len(broker.published) == 3


def test_a_span_ends_although_its_context_cannot_be_written(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    broker.script = acking
    recorder = Recorder(propagator=BrokenPropagator())
    with new_publisher(tracing=recorder.tracing) as publisher:
        publisher.publish(Message(b""), routing_key="orders")
    assert len(broker.published) == 1
    assert recorder.started
    assert len(recorder.spans) == len(recorder.started)


def test_a_span_ends_with_an_error_that_has_no_text() -> None:
    """For example, an exception of a signal handler."""
    recorder = Recorder()
    trace = PublisherTracer(recorder.tracing, name="shop", endpoints=()).begin(Message(b""), "", "orders")
    assert trace is not None
    trace.failed(Wordless())
    assert len(recorder.spans) == 1


def test_an_unreadable_context_is_no_error_of_the_tracer(caplog: pytest.LogCaptureFixture) -> None:
    """It stays in the message: a copy of a damaged message is published as it is."""
    damaged = encode_properties(Message(b"", headers={"traceparent": THEIRS, "x": 1})).replace(b"\x01xI", b"\x01x?")
    recorder = Recorder()
    tracer = PublisherTracer(recorder.tracing, name="shop", endpoints=())
    trace = tracer.begin(Message.from_wire(b"", damaged), "", "orders")
    assert trace is not None
    assert trace.headers == {}
    trace.ended()
    [send] = recorder.spans
    assert (send.name, send.kind, send.parent) == ("send orders", SpanKind.CLIENT, None)
    assert caplog.records == []


def test_a_span_that_cannot_end_leaves_the_error_of_a_publish(
    broker: ScriptedBroker, new_publisher: NewPublisher
) -> None:
    recorder = Recorder()
    recorder.provider.add_span_processor(BrokenEnd())
    with new_publisher(tracing=recorder.tracing) as publisher, pytest.raises(ConfigurationError, match="routing_key"):
        publisher.submit(Message(b""), routing_key="k" * 256)


def test_a_span_thread_that_cannot_start_delays_no_outcome(
    broker: ScriptedBroker, new_publisher_of_the_sync_api: NewPublisher
) -> None:
    recorder = Recorder()
    with new_publisher_of_the_sync_api(tracing=recorder.tracing) as publisher:
        with refusing_threads("-callbacks"):
            confirmations = [publisher.submit(Message(b""), routing_key="orders") for _ in range(3)]
            broker.wait_published(3)[-1].channel.ack(3, multiple=True)
            publisher.flush(timeout=5)
            assert [confirmation.result(30).attempts for confirmation in confirmations] == [1, 1, 1]
        broker.script = acking
        publisher.publish(Message(b""), routing_key="orders")
        recorder.wait(4)
    assert len(broker.connections) == 1
