"""Publishes as a broker reads them, and a caller of a publishing session.

Publishes are decoded by another codec (pamqp). Every change of a publication's state is checked against the table of
transitions.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pamqp import commands, frame
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from reliable_mq.core.headers import POSSIBLE_DUPLICATE
from reliable_mq.core.new_queues import NewQueues
from reliable_mq.core.publisher.publication import TRANSITIONS, BrokerReply, Publication, PublicationState
from reliable_mq.core.publisher.session import PublisherSession
from reliable_mq.message import Message
from reliable_mq.retry import RetryPolicy

if TYPE_CHECKING:
    from reliable_mq.codec import FieldValue

MAX_ATTEMPTS = 3
DELAYS = (1.0, 2.0)
CONFIRM_TIMEOUT = 30.0
DELIVERY_TIMEOUT = 120.0
FRAME_MAX = 4096

NO_ROUTE = BrokerReply(312, "NO_ROUTE")
NO_EXCHANGE = BrokerReply(404, "NOT_FOUND - no exchange 'missing' in vhost '/'")
UNKNOWN_ERROR = BrokerReply(406, "PRECONDITION_FAILED - something new")
FRAME_ERROR = BrokerReply(501, "FRAME_ERROR")
FORCED = BrokerReply(320, "CONNECTION_FORCED - broker forced connection closure")


class Unencodable(Message):
    """A message whose encoding fails, like a damaged one or a user's subclass."""

    __slots__ = ("encoded_before",)

    @classmethod
    def after(cls, times: int, body: bytes, message_id: str) -> Unencodable:
        """Return a message that can be encoded `times` times."""
        message = cls._from_wire(body, None, message_id)
        object.__setattr__(message, "encoded_before", iter([None] * times))
        return message

    @property
    def encoded_properties(self) -> bytes | None:  # type: ignore[override]
        try:
            return next(self.encoded_before)
        except StopIteration:
            raise RuntimeError("no bytes for this one") from None


class Published(NamedTuple):
    """A publish as the broker reads it."""

    channel: int
    exchange: str
    routing_key: str
    mandatory: bool
    message_id: str | None
    possible_duplicate: bool
    persistent: bool
    body: bytes


def decode(data: bytes) -> list[Published]:
    published = []
    while data:
        size, channel, method = frame.unmarshal(data)
        assert isinstance(method, commands.Basic.Publish)
        data = data[size:]
        size, header_channel, header = frame.unmarshal(data)
        assert isinstance(header, ContentHeader)
        data = data[size:]
        body = b""
        while len(body) < header.body_size:
            size, body_channel, part = frame.unmarshal(data)
            assert isinstance(part, ContentBody)
            assert size <= FRAME_MAX
            assert body_channel == channel
            body += part.value
            data = data[size:]
        assert header_channel == channel
        properties = header.properties
        published.append(
            Published(
                channel,
                method.exchange,
                method.routing_key,
                method.mandatory,
                properties.message_id,
                bool((properties.headers or {}).get(POSSIBLE_DUPLICATE)),
                properties.delivery_mode == 2,
                body,
            )
        )
    return published


EVENTS = {  # the events that each call of the session may cause
    "accept": {"message_id taken"},
    "acked": {"acked", "message_id free"},
    "nacked": {"nacked", "message_id free"},
    "round_trip_ended": {"queue old enough", "message_id free"},
    "channel_lost": {"channel lost", "connection lost", "message_id free"},
    "connection_replaced": {"connection lost"},
    "abandon_all": {"given up", "message_id free"},
    "abandon_overdue": {"given up", "message_id free"},
    "tick": {"given up", "delay over", "message_id free"},
    "data_to_send": {"written", "cannot be encoded", "message_id free"},
}

Transition = tuple[str, PublicationState, PublicationState]


class CheckedPublication(Publication):
    """A publication that only allows the state changes of the current call."""

    __slots__ = ("_state",)
    events: ClassVar[set[str]] = set()  # the events of the current call
    observed: ClassVar[set[Transition]] = set()

    @property
    def state(self) -> PublicationState:  # type: ignore[override]
        return self._state

    @state.setter
    def state(self, state: PublicationState) -> None:
        before: PublicationState = getattr(self, "_state", state)
        self._state: PublicationState = state
        if state is not before:
            reasons = {(event, before, state) for event in self.events if state in TRANSITIONS[event].get(before, ())}
            assert reasons, f"{before} -> {state} in {self.events}"
            self.observed.update(reasons)


class CheckedSession(PublisherSession[Publication]):
    """A session that sets the events that its publications may see."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, events in EVENTS.items():
            setattr(self, name, _within(events, getattr(self, name)))


def _within(events: set[str], call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def checked(*args: Any, **others: Any) -> Any:
        outer, CheckedPublication.events = CheckedPublication.events, CheckedPublication.events | events
        try:
            return call(*args, **others)
        finally:
            CheckedPublication.events = outer

    return checked


def new_session(
    max_attempts: int = MAX_ATTEMPTS, grace: float = 0.0, delays: tuple[float, ...] = DELAYS
) -> PublisherSession[Publication]:
    return CheckedSession(
        retry=RetryPolicy(max_attempts, delays=delays),
        confirm_timeout=CONFIRM_TIMEOUT,
        delivery_timeout=DELIVERY_TIMEOUT,
        random=random.Random(1),
        new_queue_grace=grace,
    )


class Shell:
    """A session with a channel, on a clock that starts at 0."""

    def __init__(self, grace: float = 0.0, delays: tuple[float, ...] = DELAYS) -> None:
        self.session = new_session(grace=grace, delays=delays)
        self.new_queues = NewQueues()
        self.new_queues.longest = grace
        self.generation = 0
        self.reopen()

    def reopen(self, now: float = 0.0) -> None:
        self.generation += 1
        self.session.channel_opened(self.generation, 1, FRAME_MAX, now, self.new_queues)

    def accept(
        self,
        *bodies: str,
        message_id: str | None = None,
        exchange: str = "",
        timeout: float | None = None,
        at: float = 0.0,
        headers: dict[str, FieldValue] | None = None,
        routing_key: str = "orders",
    ) -> list[Publication]:
        publications: list[Publication] = [
            CheckedPublication(
                Message(body.encode(), message_id=message_id or f"id of {body}", headers=headers),
                exchange,
                routing_key,
                True,
                len(body),
                at,
                timeout,
            )
            for body in bodies
        ]
        self.session.accept(publications)
        return publications

    def send(self, now: float = 0.0, limit: int = 1_000_000) -> list[Published]:
        self.session.tick(now)
        return decode(self.session.data_to_send(now, limit))

    def sent(self, now: float = 0.0, limit: int = 1_000_000) -> list[str]:
        return [published.body.decode() for published in self.send(now, limit)]

    def ack(self, tag: int, *, multiple: bool = False, now: float = 0.0) -> None:
        self.session.acked(self.generation, tag, multiple, now)

    def nack(self, tag: int, *, multiple: bool = False, now: float = 0.0) -> None:
        self.session.nacked(self.generation, tag, multiple, now)

    def return_(self, message_id: str | None) -> None:
        self.session.returned(self.generation, *NO_ROUTE, message_id)

    def lose(self, reply: BrokerReply | None = None, *, connection: bool = True) -> None:
        self.session.channel_lost(self.generation, reply, connection=connection)

    def take_settled(self) -> list[Publication]:
        settled, self.session.settled = self.session.settled, []
        return settled
