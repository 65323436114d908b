"""One publish: what was asked for, how far it has come, and how it ended.

A publication has one of five outcomes; one that goes into an outbox has a sixth, *stored*. *Unknown* is an outcome of
an attempt long before it is one of the publication: a publish whose channel was lost is sent again, with the same
``message_id``; only when its deadline passes does it end as unknown.

What became of many publishes: the report of ``publish_many``, and one error for several.

A publish that goes into an outbox: it ends when the message is durable there, or when it is known not to be.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from reliable_mq.errors import (
    PublishBlocked,
    PublishError,
    PublishNacked,
    PublishRefused,
    PublishReturned,
    PublishUnconfirmed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliable_mq.message import Message

__all__ = ["BrokerReply", "Outcome", "Publication", "PublishReport", "Receipt", "StoredPublication", "summary"]


class Outcome(enum.Enum):
    """How a publish ended."""

    CONFIRMED = "confirmed"
    """The broker acked it: it is on every queue it was routed to, and on disk where message and queue are durable."""
    STORED = "stored"
    """It is durable in the outbox, and the relay will publish it."""
    NACKED = "nacked"
    """The broker refused it, as often as the retry policy allowed."""
    RETURNED = "returned"
    """It was mandatory and no queue was bound for it."""
    REFUSED = "refused"
    """The broker closed the channel because of it."""
    UNKNOWN = "unknown"
    """Its deadline passed without a confirm."""


class BrokerReply(NamedTuple):
    """A reply code and text of the broker; code 0 is ours."""

    code: int
    text: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """What is known of a message that was published.

    Attributes:
        message_id: the id it was published with.
        status: ``"confirmed"``: the broker has it; ``"stored"``: it is durable in the outbox, and the relay will
            publish it.
        attempts: how often it was sent.
        possible_duplicate: whether an earlier attempt of unknown outcome may have arrived too.
    """

    message_id: str
    status: str = "confirmed"
    attempts: int = 1
    possible_duplicate: bool = False


class Publication:
    """A publish and its state. Written by the publishing session alone; ``outcome`` is set last, and once.

    Attributes:
        message, exchange, routing_key, mandatory: what was asked for.
        size: bytes counted against the window.
        accepted_at: on the monotonic clock, seconds.
        timeout: seconds from ``accepted_at`` after which it is given up; None for the session's delivery timeout.
        sends: how often it was written to a channel.
        nacks: how often the broker refused it.
        on_wire: whether the open channel still owes a confirm for it.
        in_doubt: whether an attempt ended without a confirm, so that a further one may be a duplicate.
        reply: the return or the channel exception that concerns it, or why it was blocked, or provisional to the end.
        outcome: None until it is settled.
        home: the face that it belongs to, for what a user does with it.
        watchers: what the face calls when it is settled; None for nobody.
        seen: whether a user has asked for the outcome, or will be told.
    """

    __slots__ = (
        "accepted_at",
        "exchange",
        "home",
        "in_doubt",
        "mandatory",
        "message",
        "nacks",
        "on_wire",
        "outcome",
        "reply",
        "routing_key",
        "seen",
        "sends",
        "size",
        "timeout",
        "watchers",
    )

    def __init__(
        self,
        message: Message,
        exchange: str,
        routing_key: str,
        mandatory: bool,
        size: int,
        accepted_at: float,
        timeout: float | None,
        home: Any = None,
    ) -> None:
        self.message = message
        self.exchange = exchange
        self.routing_key = routing_key
        self.mandatory = mandatory
        self.size = size
        self.accepted_at = accepted_at
        self.timeout = timeout
        self.sends = 0
        self.nacks = 0
        self.on_wire = False
        self.in_doubt = False
        self.reply: BrokerReply | None = None
        self.outcome: Outcome | None = None
        self.home = home
        self.watchers: list[Callable[[], object]] | None = None
        self.seen = False

    def receipt(self) -> Receipt:
        """The receipt of a confirmed publication."""
        return Receipt(self.message.message_id, attempts=self.sends, possible_duplicate=self.in_doubt)

    def failure(self) -> PublishError | None:
        """The error that a settled publication ended with; None where it was confirmed."""
        match self.outcome:
            case Outcome.NACKED:
                return self._with_doubt(
                    PublishNacked(
                        f"{self} was nacked by the broker (attempts: {self.nacks}); "
                        f"a queue it is routed to is full or cannot accept it{self._doubt}",
                        message_id=self.message.message_id,
                        attempts=self.nacks,
                    )
                )
            case Outcome.RETURNED:
                code, text = self.reply or BrokerReply(0, "")
                return self._with_doubt(
                    PublishReturned(
                        f"{self} was returned: {code} {text}; bind a queue, or publish with mandatory=False to drop it"
                        f"{self._doubt}",
                        message_id=self.message.message_id,
                        reply_code=code,
                        reply_text=text,
                        exchange=self.exchange,
                        routing_key=self.routing_key,
                    )
                )
            case Outcome.REFUSED:
                code, text = self.reply or BrokerReply(0, "")
                why = f"the broker closed the channel with {code} {text}" if code else text
                return self._with_doubt(
                    PublishRefused(
                        f"{self} was refused: {why}{self._doubt}",
                        message_id=self.message.message_id,
                        reply_code=code,
                        reply_text=text,
                    )
                )
            case Outcome.UNKNOWN:
                return self._unconfirmed()
            case _:
                return None

    @property
    def _doubt(self) -> str:
        return " (an earlier attempt was never answered and may have arrived)" if self.in_doubt else ""

    def _with_doubt(self, error: PublishError) -> PublishError:
        error.may_have_arrived = self.in_doubt
        return error

    def _unconfirmed(self) -> PublishError:
        sent = self.sends > 0
        if not sent and self.reply is not None:
            return PublishBlocked(
                f"{self} was not sent: the broker has blocked publishing ({self.reply.text})",
                message_id=self.message.message_id,
                reason=self.reply.text,
            )
        if self.reply is not None:
            return PublishUnconfirmed(
                f"{self} was not confirmed for good in time: {self.reply.text}; it is published no more, and has "
                "arrived unless that happens",
                message_id=self.message.message_id,
                sent=True,
            )
        known = "it may have arrived" if sent else "it was never sent"
        return PublishUnconfirmed(
            f"{self} was not confirmed in time and is published no more; {known}",
            message_id=self.message.message_id,
            sent=sent,
        )

    def __str__(self) -> str:
        return f"message {self.message.message_id} to exchange {self.exchange!r} with routing key {self.routing_key!r}"


_FAILURES_KEPT = 100


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What became of the messages of one ``publish_many``.

    Attributes:
        confirmed: how many the broker has.
        failures: every other message with its error, in the order in which they settled.
        stored: how many are durable in the outbox, where there is one; then none is counted as confirmed.
    """

    confirmed: int
    failures: tuple[tuple[Message, PublishError], ...] = ()
    stored: int = 0

    @property
    def ok(self) -> bool:
        """Whether every message was confirmed, or stored."""
        return not self.failures

    def raise_for_failures(self) -> None:
        """Raise one PublishError for all failures, if there are any."""
        if self.failures:
            raise summary([error for _, error in self.failures], len(self.failures))


def summary(errors: Sequence[PublishError], count: int) -> PublishError:
    """One error for ``count`` failures, of which ``errors`` are the last, or all that are still known."""
    if count == len(errors) == 1:
        return errors[0]
    what = f"{count} messages were not confirmed"
    if not errors:
        return PublishError(f"{what}; the publisher does not remember which")
    return PublishError(
        f"{what}; one of them: {errors[0]}", message_id=errors[0].message_id, failures=errors[:_FAILURES_KEPT]
    )


class StoredPublication(Publication):
    """A publication whose outcome is that of storing it. The relay's publish of the same message is another one.

    ``watchers`` and the rest are as on every publication; ``seen`` and ``outcome`` are written by who stores it.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # of the classes of either face, which derive from two classes

        @property
        def error(self) -> PublishError | None:
            """Why it is not stored, or not known to be."""

        @error.setter
        def error(self, error: PublishError | None) -> None: ...

        def settled(self) -> None:
            """Tell who watches: the face's own."""

    def stored(self, error: PublishError | None) -> None:
        """It is durable, or was not stored; where the error says that it may have arrived, that is not known."""
        self.error = error
        if error is None:
            self.outcome = Outcome.STORED
        else:
            self.outcome = Outcome.UNKNOWN if error.may_have_arrived else Outcome.REFUSED

    def receipt(self) -> Receipt:
        """The receipt of a message that is stored."""
        return Receipt(self.message.message_id, status="stored", attempts=0)

    def failure(self) -> PublishError | None:
        """The error that it ended with; None where it is stored, or is still on its way."""
        return None if self.outcome is None else self.error
