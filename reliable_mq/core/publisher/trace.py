"""The events in the life of a publish that a trace shows.

The session tells the trace of a publication, if it has one, of each event as it happens. It knows nothing of spans: a
trace is whatever records events, and brings the headers by which the receiver of the message continues it.

Invariant: most publishes have no trace, and cost no more than finding that out.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, Protocol

from reliable_mq.codec import encode_properties
from reliable_mq.core import headers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reliable_mq.codec import FieldValue
    from reliable_mq.core.publisher.publication import Publication

__all__ = ["PublicationEvent", "PublicationTrace", "encode_traced", "record"]


class PublicationEvent(enum.Enum):
    """An event in the life of a publish that its trace shows, beside its outcome."""

    WINDOW_FULL = "window_full"  # its caller waits for the window
    ADMITTED = "admitted"  # the window has room for it again
    BLOCKED = "blocked"  # the broker blocks publishing, and it is not written yet
    UNBLOCKED = "unblocked"  # the broker takes publishes again
    SENT = "sent"  # it was written to a channel
    RETURNED = "returned"  # no queue is bound for it
    NACKED = "nacked"  # the broker nacked it
    PROVISIONAL = "provisional"  # the broker acked it, and may still lose it: a queue is new
    IN_DOUBT = "in_doubt"  # the channel was lost before its confirm: it may have arrived


class PublicationTrace(Protocol):
    """Records the life of one publish. Called by the session: it must not block."""

    @property
    def recording(self) -> bool:
        """Whether events are recorded; otherwise there are headers alone."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers to set on the message, beside its own."""

    @property
    def plain_head(self) -> bytes:
        """`plain_properties_head` of the headers."""

    @property
    def ids(self) -> Mapping[str, str]:
        """The ids of its span, for logs and exemplars; empty if it is not sampled."""

    def event(self, event: PublicationEvent, publication: Publication) -> None:
        """Record an event."""

    def failed(self, error: BaseException) -> None:
        """End: the publish was not accepted."""


_IN_DOUBT: Final[Mapping[str, FieldValue]] = {headers.POSSIBLE_DUPLICATE: True}


def encode_traced(publication: Publication) -> bytes:
    """Return the encoded properties of an attempt that is traced or in doubt.

    One that is not in doubt, of a message with an id alone, has `plain_properties`, which takes less.
    """
    message, trace = publication.message, publication.trace
    if trace is None:
        return encode_properties(message, _IN_DOUBT)
    if publication.in_doubt:
        return encode_properties(message, {**trace.headers, **_IN_DOUBT})
    return encode_properties(message, trace.headers)


def record(publications: Iterable[Publication], event: PublicationEvent) -> None:
    """Record an event in the traces of publishes that have one."""
    for publication in publications:
        trace = publication.trace
        if trace is not None and trace.recording:
            trace.event(event, publication)
