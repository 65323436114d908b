"""The schedule for renewing the token of an open connection.

RabbitMQ closes a connection whose token has expired, or refuses its methods. So the next token is read from the
callback after a part of the lifetime and sent on the open connection (``connection.update-secret``). After a failure it
is read again, even beyond the expiry of the current token: the broker decides when an expired token costs the
connection (`core.channel_setup.reconnect_reason`). A connection that is lost takes a new token at the next connect.

Invariants:

- At most one call of the callback, or one update, is in progress. A call that takes too long counts as failed, but its
  token is used if it comes before another one.
- Nothing is due without a connection, or for a token that does not expire.
- On an open connection, the callback is called at most once a second.
- Every failure is followed by another attempt. The interval shrinks as the expiry comes nearer.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

RENEW_AFTER: Final = 0.6  # the part of the lifetime after which the next token is read
RENEW_AT_LEAST: Final = 1.0  # seconds between tokens, or a tiny lifetime would keep the callback busy
RETRY_AT_LEAST: Final = 1.0  # seconds from a failure to the next attempt
_RETRY_PART: Final = 1 / 3  # the part of the remaining time after which a failed attempt is repeated


class RenewalState(enum.Enum):
    """The renewal of one connection's token."""

    NONE = "there is no connection, or its token does not expire"
    PLANNED = "the next token is due at a time"
    READING = "the callback is called for the next token"
    FAILED = "the callback has not returned a token; the next call is due at a time"
    SENT = "the next token is sent; the broker has not answered"


_S = RenewalState
#: Event -> state before -> states after. For tests and documentation, not read at run time.
TRANSITIONS: Final[Mapping[str, Mapping[RenewalState, set[RenewalState]]]] = {
    "connected": {_S.NONE: {_S.PLANNED}},
    "due": {state: {_S.READING} for state in (_S.PLANNED, _S.FAILED)},
    "read": {state: {_S.SENT} for state in (_S.READING, _S.FAILED)},
    "the callback failed": {_S.READING: {_S.FAILED}},
    "accepted": {_S.SENT: {_S.PLANNED, _S.NONE}},
    "lost": {state: {_S.NONE} for state in (_S.PLANNED, _S.READING, _S.FAILED, _S.SENT)},
}
del _S


class TokenRenewal:
    """The plan for one connection. Not thread-safe. ``now`` is a monotonic clock."""

    def __init__(self) -> None:
        self.state = RenewalState.NONE
        self.due_at: float | None = None  # when to read the next token, if a read is planned
        self._expires_at = 0.0
        self._next: tuple[float, float] | None = None  # the time at which the sent token was read, and its lifetime

    def connected(self, read_at: float, lifetime: float | None) -> None:
        """Plan the renewal of a token that was read at ``read_at``.

        A token whose lifetime is None does not expire.
        """
        if lifetime is not None:
            self._plan(read_at, lifetime)

    def begin(self, now: float) -> bool:
        """Return whether to call the callback now and report `read` or `failed`."""
        if self.due_at is None or now < self.due_at:
            return False
        self.state, self.due_at = RenewalState.READING, None
        return True

    @property
    def wants_token(self) -> bool:
        """Whether to send a token that the callback returns now."""
        return self.state in (RenewalState.READING, RenewalState.FAILED)

    def read(self, now: float, lifetime: float | None) -> None:
        self.state, self.due_at = RenewalState.SENT, None
        self._next = None if lifetime is None else (now, lifetime)

    def failed(self, now: float) -> None:
        self.state = RenewalState.FAILED
        self.due_at = now + max(RETRY_AT_LEAST, (self._expires_at - now) * _RETRY_PART)

    def accepted(self) -> None:
        """Record that the broker accepted the sent token, and plan the next."""
        if self._next is None:
            self.state = RenewalState.NONE
        else:
            self._plan(*self._next)

    def lost(self) -> bool:
        """Forget the connection. Return whether a sent token was unanswered."""
        unanswered = self.state is RenewalState.SENT
        self.state, self.due_at, self._next = RenewalState.NONE, None, None
        return unanswered

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the token expires, negative after that."""
        return self._expires_at - now

    def _plan(self, read_at: float, lifetime: float) -> None:
        self.state, self._expires_at = RenewalState.PLANNED, read_at + lifetime
        self.due_at = read_at + max(lifetime * RENEW_AFTER, RENEW_AT_LEAST)
