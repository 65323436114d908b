"""Contexts in the headers of messages.

Headers are decoded for a message that carries a context alone: whether one does is a search in the encoded properties.

Invariant: a context that a message carries is never replaced, nor a single header of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter

from reliable_mq.codec import CodecError, Properties

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.propagators.textmap import TextMapPropagator

__all__ = ["Propagation"]

_BAGGAGE: Final = "baggage"  # no context of a trace


class Propagation:
    """Reads and writes contexts with one propagator. Thread-safe.

    Args:
        propagator: of OpenTelemetry.
    """

    def __init__(self, propagator: TextMapPropagator) -> None:
        self._propagator = propagator
        self._fields = frozenset(propagator.fields) - {_BAGGAGE}
        self._marks = tuple(bytes((len(name),)) + name.encode() for name in self._fields)

    def carries(self, properties: bytes | None) -> bool:
        """Whether encoded properties carry the context of a trace."""
        if properties is None or not any(mark in properties for mark in self._marks):
            return False
        try:
            return not self._fields.isdisjoint(Properties(properties).header_names())
        except CodecError:
            return True  # what cannot be read is not replaced

    def headers(self, context: Context) -> dict[str, str]:
        """Return the headers that carry a context."""
        headers: dict[str, str] = {}
        self._propagator.inject(headers, context)
        return headers

    def added(self, headers: Mapping[str, str], properties: bytes) -> Mapping[str, str]:
        """Return those of the headers that the encoded properties do not have."""
        try:
            theirs = Properties(properties).header_names()
        except CodecError:
            return {}
        return {name: value for name, value in headers.items() if name not in theirs}

    def extract(self, headers: Mapping[str, object]) -> Context:
        """Return the context that headers carry, without any of this thread or task."""
        return self._propagator.extract(headers, Context(), _GETTER)


class _HeaderGetter(Getter["Mapping[str, object]"]):
    def get(self, carrier: Mapping[str, object], key: str) -> list[str] | None:
        value = carrier.get(key)
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        return [value] if isinstance(value, str) else None

    def keys(self, carrier: Mapping[str, object]) -> list[str]:
        return list(carrier)


_GETTER: Final = _HeaderGetter()
