"""Spans as a collector gets them: exported by OTLP over HTTP, decoded with OpenTelemetry's own protocol buffers."""

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

from reliable_mq import Consumer, Message, Publisher, RetryPolicy, Tracing
from reliable_mq.tracing.tracing import SCHEMA_URL
from tests.contract.scripted_broker import ScriptedBroker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.contract.scripted_broker import Published


class Collector(ThreadingHTTPServer):
    """A collector in this process: keeps what is posted to it."""

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
        """Say nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join(30)


def attributes(span: Span) -> dict[str, Any]:
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes}


def test_a_collector_gets_the_spans_of_publisher_and_consumer(collector: Collector) -> None:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(collector.url)))
    tracing = Tracing(tracer_provider=provider)
    delivered = threading.Event()

    def to_the_consumer(published: Published) -> None:
        broker.consuming.deliver(published.body, headers=published.properties.headers, message_id=published.message_id)
        published.channel.ack(published.number)

    def handle(_: object) -> None:
        delivered.set()
        raise ValueError("no stock")

    with ScriptedBroker() as broker:
        broker.script = to_the_consumer
        options = {"tracing": tracing, "retry": RetryPolicy(1), "dead_letter": None}
        with Consumer(broker.url, "orders", handle, **options):  # type: ignore[arg-type]
            assert broker.consuming
            with Publisher(broker.url, tracing=tracing) as publisher:
                receipt = publisher.publish(Message(b"four"), routing_key="orders")
            assert delivered.wait(30)
            broker.wait_settled(1)
    provider.shutdown()
    send, process, reject = collector.spans
    assert [(span.name, span.kind) for span in (send, process, reject)] == [
        ("send orders", Span.SPAN_KIND_PRODUCER),
        ("process orders", Span.SPAN_KIND_CONSUMER),
        ("reject orders", Span.SPAN_KIND_CLIENT),
    ]
    assert [process.parent_span_id, reject.parent_span_id] == [send.span_id, process.span_id]
    assert {span.trace_id for span in (send, process, reject)} == {send.trace_id}
    assert [[link.span_id for link in span.links] for span in (process, reject)] == [[send.span_id], [send.span_id]]
    assert [event.name for event in send.events] == ["reliable_mq.sent"]
    assert attributes(send)["messaging.message.id"] == receipt.message_id
    assert attributes(send)["reliable_mq.outcome"] == "confirmed"
    assert (process.status.code, process.status.message) == (Status.STATUS_CODE_ERROR, "no stock")
    assert attributes(process)["error.type"] == "ValueError"
    assert attributes(reject)["messaging.operation.type"] == "settle"
