"""OpenTelemetry: one trace from the publish to the handler, with a retry.

The retry waits in a delay queue. The example needs ``opentelemetry-sdk`` in addition to the extra ``otel``. A real
program has one global `TracerProvider` with an exporter to a collector; here the spans are collected and printed at the
end.

Prints::

    send example.tracing: confirmed
    process example.tracing: failed
    send example.tracing.retry.500: confirmed
    process example.tracing: handled
    in one trace: True
"""

from __future__ import annotations

import os
import threading

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from reliable_mq import Consumer, Delivery, Message, Publisher, Queue, RetryPolicy, Tracing

URL = os.environ.get("RELIABLE_MQ_URL", "amqp://guest:guest@localhost/")
ORDERS = Queue("example.tracing")

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
tracing = Tracing(tracer_provider=provider)  # or Tracing(), for the global provider

handled = threading.Event()


def handle(delivery: Delivery) -> None:
    if delivery.attempt == 1:
        raise ValueError("no stock")
    handled.set()


with Publisher(URL, topology=[ORDERS], tracing=tracing) as publisher:
    publisher.publish(Message.json({"order": 1}), routing_key="example.tracing")
with Consumer(URL, ORDERS, handle, retry=RetryPolicy(3, delays=(0.5,)), tracing=tracing):
    handled.wait(30)

spans = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time)
for span in spans:
    if "reliable_mq.outcome" in span.attributes:  # the other spans are acks
        print(f"{span.name}: {span.attributes['reliable_mq.outcome']}")
print("in one trace:", len({span.context.trace_id for span in spans}) == 1)
