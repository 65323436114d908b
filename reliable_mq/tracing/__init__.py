"""Traces: OpenTelemetry spans of publishing and consuming; extra ``otel``.

`Tracing` is what users give a publisher or a consumer. OpenTelemetry is imported when one is made, not before.
"""

from reliable_mq.tracing.tracing import Tracing

__all__ = ["Tracing"]
