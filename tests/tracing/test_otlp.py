"""Spans as a collector receives them by OTLP over HTTP.

OpenTelemetry's own protocol buffers decode them. Each test compares all values of the spans.
"""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from integration.support.blocking import BlockingPublisher
from integration.support.blocking_consumer import BlockingConsumer
from integration.support.consuming import Handler
from reliable_mq import Consumer, Message, Publisher, RetryPolicy, Tracing
from reliable_mq.core import headers
from reliable_mq.outbox import SQLiteOutbox
from reliable_mq.tracing.tracing import SCHEMA_URL
from tests.contract.scripted_broker import ScriptedBroker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from opentelemetry.proto.common.v1.common_pb2 import KeyValue

    from tests.contract.scripted_broker import Published


both_apis = pytest.mark.parametrize(
    ("publisher", "consumer"), [(Publisher, Consumer), (BlockingPublisher, BlockingConsumer)], ids=["sync", "aio"]
)


class Collector(ThreadingHTTPServer):
    """A collector in this process that keeps the posted requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Posts)
        self.requests: list[ExportTraceServiceRequest] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"

    @property
    def spans(self) -> list[Span]:
        scopes = [scope for one in self.requests for resource in one.resource_spans for scope in resource.scope_spans]
        assert {(scope.scope.name, scope.schema_url) for scope in scopes} == {("reliable_mq", SCHEMA_URL)}
        return sorted((span for scope in scopes for span in scope.spans), key=lambda span: span.start_time_unix_nano)


class _Posts(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join(30)


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        yield broker


class Traces:
    """Traces whose spans are sent to a collector."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._provider = TracerProvider()
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(collector.url)))
        self.tracing = Tracing(tracer_provider=self._provider)

    def golden(self) -> list[dict[str, Any]]:
        """Return all values of the collected spans, with names in place of ids."""
        self._provider.shutdown()
        spans = self._collector.spans
        names = {span.span_id: span.name for span in spans}
        first = {span.trace_id: span.name for span in reversed(spans)}
        return [
            {
                "name": span.name,
                "kind": Span.SpanKind.Name(span.kind),
                "trace": first[span.trace_id],
                "parent": names[span.parent_span_id] if span.parent_span_id else None,
                "links": [(names[link.span_id], decoded(link.attributes)) for link in span.links],
                "attributes": decoded(span.attributes),
                "events": [(event.name, decoded(event.attributes)) for event in span.events],
                "status": (Status.StatusCode.Name(span.status.code), span.status.message),
            }
            for span in spans
        ]


def decoded(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in attributes}


def common(broker: ScriptedBroker, client: str, operation: str, kind: str) -> dict[str, Any]:
    """Return the attributes that all spans have."""
    return {
        "messaging.system": "rabbitmq",
        "messaging.client.id": client,
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        "messaging.destination.name": "orders",
        "messaging.rabbitmq.destination.routing_key": "orders",
        "server.address": "127.0.0.1",
        "server.port": broker.port,
    }


def peer(broker: ScriptedBroker) -> dict[str, Any]:
    return {"network.peer.address": "127.0.0.1", "network.peer.port": broker.port}


def of_message(message_id: str) -> dict[str, Any]:
    return {"messaging.message.id": message_id, "messaging.message.body.size": 4}


def sent(broker: ScriptedBroker, message_id: str) -> dict[str, Any]:
    """Return the span of a publish without a parent."""
    return {
        "name": "send orders",
        "kind": "SPAN_KIND_PRODUCER",
        "trace": "send orders",
        "parent": None,
        "links": [],
        "attributes": {
            **common(broker, "shop", "send", "send"),
            **peer(broker),
            **of_message(message_id),
            "reliable_mq.outcome": "confirmed",
            "reliable_mq.attempts": 1,
        },
        "events": [("reliable_mq.sent", {"reliable_mq.attempt": 1})],
        "status": ("STATUS_CODE_UNSET", ""),
    }


def settled(broker: ScriptedBroker, how: str, message_id: str, *, trace: str, parent: str) -> dict[str, Any]:
    """Return the span of the settlement of one delivery."""
    return {
        "name": f"{how} orders",
        "kind": "SPAN_KIND_CLIENT",
        "trace": trace,
        "parent": parent,
        "links": [("send orders", {})],
        "attributes": {
            **common(broker, "billing", how, "settle"),
            **peer(broker),
            "messaging.message.id": message_id,
            "messaging.rabbitmq.message.delivery_tag": 1,
        },
        "events": [],
        "status": ("STATUS_CODE_UNSET", ""),
    }


@both_apis
def test_a_collector_gets_the_spans_of_publisher_and_consumer(
    collector: Collector, broker: ScriptedBroker, publisher: type[Any], consumer: type[Any]
) -> None:
    traces = Traces(collector)
    delivered = threading.Event()

    def to_the_consumer(published: Published) -> None:
        broker.consuming.deliver(published.body, headers=published.properties.headers, message_id=published.message_id)
        published.channel.ack(published.number)

    def handle(_: object) -> None:
        delivered.set()
        raise ValueError("no stock")

    broker.script = to_the_consumer
    options = {"tracing": traces.tracing, "retry": RetryPolicy(1), "dead_letter": None, "name": "billing"}
    with consumer(broker.url, "orders", handle, **options):
        assert broker.consuming
        with publisher(broker.url, tracing=traces.tracing, name="shop") as shop:
            receipt = shop.publish(Message(b"four"), routing_key="orders")
        assert delivered.wait(30)
        broker.wait_settled(1)
    send, process, reject = traces.golden()
    [(_, raised)] = process["events"]
    assert raised.pop("exception.stacktrace").endswith("ValueError: no stock\n")
    assert send == sent(broker, receipt.message_id)
    assert process == {
        "name": "process orders",
        "kind": "SPAN_KIND_CONSUMER",
        "trace": "send orders",
        "parent": "send orders",
        "links": [("send orders", {})],
        "attributes": {
            **common(broker, "billing", "process", "process"),
            **of_message(receipt.message_id),
            "messaging.rabbitmq.message.delivery_tag": 1,
            "reliable_mq.attempt": 1,
            "reliable_mq.outcome": "failed",
            "error.type": "ValueError",
        },
        "events": [
            (
                "exception",
                {"exception.type": "ValueError", "exception.message": "no stock", "exception.escaped": "False"},
            )
        ],
        "status": ("STATUS_CODE_ERROR", "no stock"),
    }
    assert reject == settled(broker, "reject", receipt.message_id, trace="send orders", parent="process orders")


@both_apis
def test_a_collector_gets_the_spans_of_an_outbox(
    collector: Collector, broker: ScriptedBroker, publisher: type[Any], consumer: type[Any], tmp_path: Path
) -> None:
    """Each send span links to the context in the row; a nack ends the first."""
    traces = Traces(collector)

    def nacked_first(published: Published) -> None:
        if len(broker.published) == 1:
            published.channel.nack(published.number)
        else:
            published.channel.ack(published.number)

    broker.script = nacked_first
    outbox = SQLiteOutbox(tmp_path / "outbox.db")
    with publisher(broker.url, tracing=traces.tracing, name="shop", outbox=outbox) as shop:
        receipt = shop.publish(Message(b"four"), routing_key="orders")
        shop.flush(30)
    create, nacked, send = traces.golden()
    assert create == {
        "name": "create orders",
        "kind": "SPAN_KIND_PRODUCER",
        "trace": "create orders",
        "parent": None,
        "links": [],
        "attributes": {
            **common(broker, "shop", "create", "create"),
            **of_message(receipt.message_id),
            "reliable_mq.outcome": "stored",
        },
        "events": [],
        "status": ("STATUS_CODE_UNSET", ""),
    }
    relayed = {
        **sent(broker, receipt.message_id),
        "kind": "SPAN_KIND_CLIENT",
        "trace": "create orders",
        "parent": "create orders",
        "links": [("create orders", {})],
    }
    outcome = {"error.type": "PublishNacked", "reliable_mq.outcome": "nacked"}
    events = [("reliable_mq.sent", {"reliable_mq.attempt": 1}), ("reliable_mq.nacked", {"reliable_mq.attempt": 1})]
    assert nacked.pop("status")[0] == "STATUS_CODE_ERROR"
    assert nacked == {
        **{name: value for name, value in relayed.items() if name != "status"},
        "attributes": {**relayed["attributes"], **outcome},
        "events": events,
    }
    assert send == {**relayed, "events": [("reliable_mq.sent", {"reliable_mq.attempt": 1})]}


@both_apis
def test_a_collector_gets_the_spans_of_get(
    collector: Collector, broker: ScriptedBroker, publisher: type[Any], consumer: type[Any]
) -> None:
    """The receive span links to the trace of the message, and so does the ack."""
    traces = Traces(collector)

    def ready(published: Published) -> None:
        broker.ready.append(published)
        published.channel.ack(published.number)

    broker.script = ready
    with publisher(broker.url, tracing=traces.tracing, name="shop") as shop:
        receipt = shop.publish(Message(b"four"), routing_key="orders")
    with consumer(broker.url, "orders", None, tracing=traces.tracing, name="billing") as billing:
        with billing.get(1, timeout=30) as deliveries:
            assert [delivery.body for delivery in deliveries] == [b"four"]
        broker.wait_settled(1)
    send, receive, ack = traces.golden()
    assert send == sent(broker, receipt.message_id)
    assert receive == {
        "name": "receive orders",
        "kind": "SPAN_KIND_CLIENT",
        "trace": "receive orders",
        "parent": None,
        "links": [("send orders", {})],
        "attributes": {
            **common(broker, "billing", "receive", "receive"),
            **peer(broker),
            "messaging.batch.message_count": 1,
        },
        "events": [],
        "status": ("STATUS_CODE_UNSET", ""),
    }
    assert ack == settled(broker, "ack", receipt.message_id, trace="receive orders", parent="receive orders")


@pytest.mark.parametrize("consumer", [Consumer, BlockingConsumer], ids=["sync", "aio"])
def test_text_that_is_not_utf8_costs_no_span(collector: Collector, broker: ScriptedBroker, consumer: type[Any]) -> None:
    """Any client can send it, and OpenTelemetry loses all spans of an export with one such name."""
    traces = Traces(collector)
    waited = {headers.FORMAT: 1, headers.ATTEMPT: 2, headers.RETRY: {"routing-key": b"\xff"}}
    message = Message(b"x", message_id="m\udcff", correlation_id="c\udcff", headers=waited)
    traces.tracing.create(message, routing_key="\udcff")
    with consumer(broker.url, "orders", Handler(), tracing=traces.tracing, dead_letter=None):
        broker.consuming.deliver_raw(b"x", message.encoded_properties or b"")
        broker.wait_settled(1)
    create, process, ack = traces.golden()
    assert [span["name"] for span in (create, process, ack)] == ["create ?", "process ?:orders", "ack ?:orders"]
    for span in (create, process, ack):
        assert span["attributes"]["messaging.message.id"] == "m?"
        assert span["attributes"]["messaging.rabbitmq.destination.routing_key"] == "?"
    assert process["attributes"]["messaging.message.conversation_id"] == "c?"
