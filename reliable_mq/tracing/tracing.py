"""The settings of traces.

This module imports OpenTelemetry when a `Tracing` is created. A program without traces does not load OpenTelemetry and
does not need it. Only publishers and consumers with a `Tracing` import the other modules of this package.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from reliable_mq._util.logs import LogLimit, get_logger
from reliable_mq._util.validation import fraction
from reliable_mq._util.version import OWN_VERSION
from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.context import Context
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.trace import Tracer, TracerProvider

    from reliable_mq.core.consumer.delivery import Delivery
    from reliable_mq.message import Message

logger = get_logger(__name__)

#: The version of the semantic conventions for names, kinds and attributes.
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"

_LOG_ERRORS_EVERY: Final = 60.0  # seconds: a broken tracer raises for every message


class TracerErrors:
    """A log of a tracer's exceptions, limited to one line a minute. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = LogLimit(_LOG_ERRORS_EVERY, clock)

    def log(self, error: Exception, consequence: str) -> None:
        """Count an exception. Log it unless another was logged in the last minute."""
        if count := self._limit.count():
            text = "OpenTelemetry raised, %d times since it was last logged; %s"
            logger.error(text, count, consequence, exc_info=error)


class Tracing:
    """OpenTelemetry spans for a publisher or a consumer. Needs the extra ``otel``.

    Any number of publishers and consumers may share one object. It is thread-safe.

    A message whose trace is not sampled has no span: its context is passed on unchanged.

    Args:
        tracer_provider: The provider that makes the tracer. None is the global one, which may be set later.
        propagator: The propagator that writes the context into headers and reads it from them. None is the global one,
            which defaults to W3C Trace Context and Baggage.
        root_ratio: The share, from 0 to 1, of publishes without a current span and of handler calls for messages
            without a context, for which the tracer's sampler decides whether to begin a trace. The others have no span
            and no context. A sampler takes several microseconds per message, even if it declines.

    Raises:
        ConfigurationError: If the extra ``otel`` is not installed, or an argument is invalid.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        propagator: TextMapPropagator | None = None,
        root_ratio: float = 1.0,
    ) -> None:
        try:
            from opentelemetry import trace  # noqa: PLC0415
        except ImportError as error:
            raise ConfigurationError(
                "Tracing needs OpenTelemetry's API: install the extra otel, pip install 'reliable-mq[otel]'"
            ) from error
        if tracer_provider is not None and not callable(getattr(tracer_provider, "get_tracer", None)):
            raise ConfigurationError(
                f"tracer_provider must be a TracerProvider of OpenTelemetry, not {tracer_provider!r}"
            )
        if propagator is not None and not callable(getattr(propagator, "inject", None)):
            raise ConfigurationError(f"propagator must be a TextMapPropagator of OpenTelemetry, not {propagator!r}")
        self._root_ratio = fraction("root_ratio", root_ratio)
        self._tracer = trace.get_tracer(
            "reliable_mq", OWN_VERSION, tracer_provider=tracer_provider, schema_url=SCHEMA_URL
        )
        self._propagator = propagator
        self._errors = TracerErrors()

    @property
    def tracer(self) -> Tracer:
        """The tracer that makes the spans."""
        return self._tracer

    @property
    def propagator(self) -> TextMapPropagator:
        """The configured propagator, or the current global one."""
        if self._propagator is not None:
            return self._propagator
        from opentelemetry.propagate import get_global_textmap  # noqa: PLC0415

        return get_global_textmap()

    @property
    def root_ratio(self) -> float:
        """The configured ratio."""
        return self._root_ratio

    def context_of(self, message: Delivery | Message) -> Context:
        """Return the context that a message carries, or an empty one.

        Use it to handle the items of a batch, or deliveries of ``get``, each in a separate context.
        """
        from reliable_mq.tracing.propagation import Propagation  # noqa: PLC0415

        return Propagation(self.propagator).extract(message.headers)

    def create(self, message: Message, *, exchange: str = "", routing_key: str = "") -> Message:
        """Return a message that carries the current context, by a *create* span.

        Use it for messages that are stored now and sent by another process, for example from your own table.
        ``SQLAlchemyOutbox(tracing=)`` calls it. A message that already carries a context is returned unchanged.
        """
        from reliable_mq.tracing.publishing import PublisherTracer, with_headers  # noqa: PLC0415

        tracer = PublisherTracer(self, name="", endpoints=())
        trace = tracer.begin(message, exchange, routing_key, operation="create")
        if trace is None:
            return message
        trace.ended()
        return with_headers(message, trace.headers)

    def __repr__(self) -> str:
        return f"<Tracing: root_ratio={self._root_ratio:g}>"


class CopyTracing(Tracing):
    """Tracing for messages that are published again: retries and dead letters.

    The messages are sent unchanged: none gets a context that it did not have. Their spans are in the trace of the
    attempt.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracer = tracing.tracer
        self._propagator = tracing._propagator  # noqa: SLF001
        self._root_ratio = 0.0
        self._errors = tracing._errors  # noqa: SLF001
