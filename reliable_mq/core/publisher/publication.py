"""A publish: the request, its state, and its outcome.

A publication has one of five outcomes, or *stored* as a sixth if it goes into an outbox. An attempt can end as unknown
long before its publication does. A publish whose channel was lost is sent again, with the same ``message_id``, and ends
as unknown only when its deadline passes.

`TRANSITIONS` lists the events in the life of a publication, and the states between which each event moves it. The
session (`reliable_mq.core.publisher.session`) carries them out, and the tests check every change of state against it.

Invariants:

- ``outcome`` is set once, with the change to `ABANDONED` or `SETTLED`.
- A publication holds its place in the window until it is `SETTLED`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from reliable_mq.errors import (
    PublishBlocked,
    PublishError,
    PublishNacked,
    PublishRefused,
    PublishReturned,
    PublishUnconfirmed,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reliable_mq.core.outbox import NewRow
    from reliable_mq.core.publisher.trace import PublicationTrace
    from reliable_mq.message import Message


class PublicationState(enum.Enum):
    """The state of an accepted publish, which begins as `READY`."""

    WAITING = "another publish with the same message_id is outstanding"
    READY = "to be written as soon as a channel is open and not blocked"
    SUSPECT = "one of several that a channel error may blame; sent again in groups"
    ON_WIRE = "written; the broker owes a confirm"
    PROVISIONAL = "acked, but a queue that it may be in is so new that the broker can still lose it"
    DELAYED = "nacked; waits for its backoff"
    ABANDONED = "given up while on the wire; keeps its sequence number until the channel answers or is lost"
    SETTLED = "its outcome is known, and the broker owes nothing"


_S = PublicationState
#: Event -> state before -> states after. For tests and documentation, not read at run time. The culprit of a channel
#: error is settled as a suspect. A returned publish is settled by its confirm.
TRANSITIONS: Final[Mapping[str, Mapping[PublicationState, set[PublicationState]]]] = {
    "message_id taken": {_S.READY: {_S.WAITING}},
    "message_id free": {_S.WAITING: {_S.READY}},
    "written": {_S.READY: {_S.ON_WIRE}, _S.SUSPECT: {_S.ON_WIRE}},
    "cannot be encoded": {_S.READY: {_S.SETTLED}, _S.SUSPECT: {_S.SETTLED}},
    "acked": {_S.ON_WIRE: {_S.SETTLED, _S.PROVISIONAL}, _S.ABANDONED: {_S.SETTLED}},
    "nacked": {_S.ON_WIRE: {_S.DELAYED, _S.SETTLED}, _S.ABANDONED: {_S.SETTLED}},
    "delay over": {_S.DELAYED: {_S.READY}},
    "queue old enough": {_S.PROVISIONAL: {_S.SETTLED}},
    "channel lost": {_S.ON_WIRE: {_S.READY, _S.SUSPECT}, _S.SUSPECT: {_S.SETTLED}, _S.ABANDONED: {_S.SETTLED}},
    "connection lost": {_S.PROVISIONAL: {_S.READY, _S.SUSPECT}},
    "given up": {
        _S.ON_WIRE: {_S.ABANDONED},
        **{state: {_S.SETTLED} for state in (_S.WAITING, _S.READY, _S.SUSPECT, _S.PROVISIONAL, _S.DELAYED)},
    },
}
del _S


class Outcome(enum.Enum):
    """The end of a publish."""

    CONFIRMED = "confirmed"
    """The broker acked it: it is on every queue it was routed to, on disk if message and queue are durable."""
    STORED = "stored"
    """It is durable in the outbox, and the relay will publish it."""
    NACKED = "nacked"
    """The broker refused it, as often as the retry policy and its deadline allowed."""
    RETURNED = "returned"
    """It was mandatory and no queue was bound for it."""
    REFUSED = "refused"
    """The broker closed the channel because of it."""
    UNKNOWN = "unknown"
    """Its deadline passed without a confirm."""


class BrokerReply(NamedTuple):
    """A reply code and text of the broker. Code 0 marks a reason of this package."""

    code: int
    text: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """The receipt of a published message.

    Attributes:
        message_id: The id with which the message was published.
        status: ``"confirmed"`` if the broker has the message, ``"stored"`` if it is durable in the outbox and the relay
            will publish it.
        attempts: The number of times that the message was sent.
        possible_duplicate: Whether an earlier attempt of unknown outcome may have arrived too.
    """

    message_id: str
    status: str = "confirmed"
    attempts: int = 1
    possible_duplicate: bool = False


@dataclass(eq=False, repr=False, slots=True)
class Publication:
    """A publish and its state, which only the publishing session writes."""

    message: Message
    exchange: str
    routing_key: str
    mandatory: bool
    size: int  # bytes counted against the window
    accepted_at: float  # in seconds of the monotonic clock
    timeout: float | None  # seconds from acceptance to the deadline; None for the session's delivery timeout
    owner: Any = None  # its publisher, for the calls of its user
    state: PublicationState = field(default=PublicationState.READY, init=False)  # changed only as in `TRANSITIONS`
    sends: int = field(default=0, init=False)  # times that it was written to a channel
    sent_at: float = field(default=0.0, init=False)  # when it was written last
    tag: int = field(default=0, init=False)  # its number on the channel that it was written to last
    nacks: int = field(default=0, init=False)
    once: bool = field(default=False, init=False)  # its first nack, or a channel with overdue confirms, ends it
    in_doubt: bool = field(default=False, init=False)  # an attempt ended without a confirm, and may have arrived
    #: The return or the channel error that concerns it, or the reason why it was blocked or stayed provisional.
    reply: BrokerReply | None = field(default=None, init=False)
    outcome: Outcome | None = field(default=None, init=False)  # None until it is settled
    callbacks: list[Callable[[], object]] | None = field(default=None, init=False)  # called when it is settled
    trace: PublicationTrace | None = field(default=None, init=False)
    result_observed: bool = field(default=False, init=False)  # its user has read the outcome, or will be notified

    def receipt(self) -> Receipt:
        """Return the receipt of a confirmed publication.

        Raises:
            UsageError: If it is not confirmed.
        """
        self._check_outcome(Outcome.CONFIRMED)
        return Receipt(self.message.message_id, attempts=self.sends, possible_duplicate=self.in_doubt)

    def _check_outcome(self, outcome: Outcome) -> None:
        if self.outcome is not outcome:
            raise UsageError(f"{self} has no receipt, because it is not {outcome.value}: use result()")

    def failure(self) -> PublishError | None:
        """Return the error of a settled publication, or None if it was confirmed."""
        if self.outcome is Outcome.UNKNOWN:
            return self._unconfirmed()
        error = self._refused()
        if error is not None:
            error.may_have_arrived = self.in_doubt
        return error

    def _refused(self) -> PublishError | None:
        """Return the error of a publish that the broker did not accept."""
        message_id = self.message.message_id
        doubt = " (an earlier attempt was never answered and may have arrived)" if self.in_doubt else ""
        code, text = self.reply or BrokerReply(0, "")
        match self.outcome:
            case Outcome.NACKED:
                return PublishNacked(
                    f"{self} was nacked by the broker (attempts: {self.sends}); "
                    f"a queue it is routed to is full or cannot accept it{doubt}",
                    message_id=message_id,
                    attempts=self.sends,
                )
            case Outcome.RETURNED:
                remedy = "; declare a queue of that name, or publish with mandatory=False to drop it"
                if self.exchange:
                    remedy = "; bind a queue, or publish with mandatory=False to drop it"
                elif not self.routing_key:
                    remedy = "; it has no routing key: name a queue, routing_key=..., or an exchange"
                return PublishReturned(
                    f"{self} was returned: {code} {text}{remedy}{doubt}",
                    message_id=message_id,
                    reply_code=code,
                    reply_text=text,
                    exchange=self.exchange,
                    routing_key=self.routing_key,
                )
            case Outcome.REFUSED:
                why = f"the broker closed the channel with {code} {text}" if code else text
                return PublishRefused(
                    f"{self} was refused: {why}{doubt}", message_id=message_id, reply_code=code, reply_text=text
                )
            case _:
                return None

    def _unconfirmed(self) -> PublishError:
        message_id, sent, reason = self.message.message_id, self.sends > 0, self.reply and self.reply.text
        if reason is not None and not sent:
            return PublishBlocked(
                f"{self} was not sent: the broker has blocked publishing ({reason})",
                message_id=message_id,
                reason=reason,
            )
        if reason is not None:
            text = (
                f"was given up: its confirm did not become final in time: {reason}; it has arrived unless that happens"
            )
            return PublishUnconfirmed(f"{self} {text}", message_id=message_id, sent=True)
        known = "it may have arrived" if sent else "it was never sent"
        text = f"was not confirmed in time and was given up; {known}"
        return PublishUnconfirmed(f"{self} {text}", message_id=message_id, sent=sent)

    def __str__(self) -> str:
        name = self.message.message_id or "without id"
        return f"message {name} to exchange {self.exchange!r} with routing key {self.routing_key!r}"


_FAILURES_KEPT = 100


@dataclass(frozen=True, slots=True)
class PublishReport:
    """The outcome of one ``publish_many``.

    Attributes:
        confirmed: The number of messages that the broker has.
        failures: Every other message with its error, in no particular order.
        stored: The number of messages that are durable in the outbox. With an outbox, no message counts as confirmed.
    """

    confirmed: int
    failures: tuple[tuple[Message, PublishError], ...] = ()
    stored: int = 0

    @property
    def ok(self) -> bool:
        """Whether every message was confirmed or stored."""
        return not self.failures

    def raise_for_failures(self) -> None:
        """Raise one PublishError for all failures, if any."""
        if self.failures:
            raise summary([error for _, error in self.failures], len(self.failures))


def summary(errors: Sequence[PublishError], count: int) -> PublishError:
    """Return one error for ``count`` failures, of which ``errors`` are known."""
    if count == len(errors) == 1:
        return errors[0]
    known = f"; one of them: {errors[0]}" if errors else "; the publisher does not remember which"
    error = PublishError(
        f"{count} messages were not confirmed{known}",
        message_id=errors[0].message_id if errors else None,
        failures=errors[:_FAILURES_KEPT],
    )
    error.may_have_arrived = len(errors) < count or any(one.may_have_arrived for one in errors)
    return error


class StoredPublication(Publication):
    """A publication whose outcome is the result of storing it in an outbox.

    The `OutboxChannel` writes its ``outcome``. Its ``state`` stays `READY`, because no session holds it. The relay
    publishes the same message as another publication.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # provided by the classes of both APIs, which derive from two classes

        @property
        def error(self) -> PublishError | None:
            """The reason why it is not stored, or not known to be stored."""

        @error.setter
        def error(self, error: PublishError | None) -> None: ...

        row: NewRow
        """The message as it is to be stored."""

        def settled(self) -> None:
            """Call the callbacks."""

    def stored(self, error: PublishError | None) -> None:
        """Set the outcome: stored, not stored, or unknown if it may have arrived."""
        self.error = error
        if error is None:
            self.outcome = Outcome.STORED
        else:
            self.outcome = Outcome.UNKNOWN if error.may_have_arrived else Outcome.REFUSED

    def receipt(self) -> Receipt:
        """Return the receipt of a stored message.

        Raises:
            UsageError: If it is not stored.
        """
        self._check_outcome(Outcome.STORED)
        return Receipt(self.message.message_id, status="stored", attempts=0)

    def failure(self) -> PublishError | None:
        """Return the error, or None if the message is stored or not settled."""
        return None if self.outcome is None else self.error
