"""Traces: OpenTelemetry spans of publishing and consuming (extra ``otel``).

Users pass a `Tracing` to a publisher or a consumer. OpenTelemetry is imported when a `Tracing` is created, not before.
"""

from reliable_mq.tracing.tracing import Tracing

__all__ = ["Tracing"]
