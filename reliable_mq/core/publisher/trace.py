"""The events in the life of a publish that a trace shows.

The session reports each event to the trace of a publication, if it has one. The session knows nothing of spans. A trace
is any object that records events and provides the headers by which the receiver of the message continues the trace.

Invariant: a publish without a trace, as most are, costs no more than the check for one.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

from reliable_mq.codec import encode_properties
from reliable_mq.core import headers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reliable_mq.codec import FieldValue
    from reliable_mq.core.publisher.publication import Publication


class PublicationEvent(enum.Enum):
    """An event in the life of a publish that its trace shows, beside its outcome."""

    WINDOW_FULL = "window_full"  # its caller waits for the window
    ADMITTED = "admitted"  # the window has room for it again
    BLOCKED = "blocked"  # it is not written, because the broker blocks publishing
    UNBLOCKED = "unblocked"  # the broker accepts publishes again
    SENT = "sent"  # it was written to a channel
    RETURNED = "returned"  # no queue is bound for it
    NACKED = "nacked"  # the broker nacked it
    PROVISIONAL = "provisional"  # the broker acked it, but may still lose it because a queue is new
    IN_DOUBT = "in_doubt"  # the channel was lost before its confirm, so it may have arrived


class PublicationTrace(Protocol):
    """A recorder of the life of one publish, which must not block the session."""

    @property
    def recording(self) -> bool:
        """Whether events are recorded. Otherwise the trace only has headers."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers to set on the message in addition to its own."""

    @property
    def plain_head(self) -> bytes:
        """The `plain_properties_head` of the headers."""

    @property
    def ids(self) -> Mapping[str, str]:
        """The ids of the span for logs and exemplars, empty if it is not sampled."""

    def event(self, event: PublicationEvent, publication: Publication) -> None:
        """Record an event."""

    def failed(self, error: BaseException) -> None:
        """End the trace of a publish that was not accepted."""


def encode_traced(publication: Publication) -> bytes:
    """Return the encoded properties of an attempt that is traced or in doubt."""
    extra: dict[str, FieldValue] = {} if publication.trace is None else {**publication.trace.headers}
    if publication.in_doubt:
        extra[headers.POSSIBLE_DUPLICATE] = True
    return encode_properties(publication.message, extra)


def record(publications: Iterable[Publication], event: PublicationEvent) -> None:
    """Record an event in the traces of those publishes that have one."""
    for publication in publications:
        trace = publication.trace
        if trace is not None and trace.recording:
            trace.event(event, publication)
