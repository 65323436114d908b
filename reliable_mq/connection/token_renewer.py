"""Renew the token of an open connection before the token expires.

`core.token_renewal` decides when. The user's callback is called on a thread, as for a connect.

Invariants:

- No log line contains a token, and this module stores none.
- A result of the callback that comes after the loss of its connection is dropped.
- If the broker does not reply to an update in time, the connection is discarded. The time limit starts again while the
  broker has blocked the connection and so does not read, and on a slow network, where the update waits behind data that
  is not sent yet, or its reply behind deliveries.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

from reliable_mq._util.logs import get_logger
from reliable_mq._util.threads import call_in_background
from reliable_mq.codec import methods
from reliable_mq.connection.channel import data_arrives
from reliable_mq.core.consumer.attempts import printable
from reliable_mq.core.statistics import TokenStatistics
from reliable_mq.core.token_renewal import RenewalState, TokenRenewal
from reliable_mq.settings import Credentials

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.connection.interfaces import EventLoop, TimerHandle
    from reliable_mq.connection.link import BaseLink
    from reliable_mq.core.reconnect import ConnectionLoss, CredentialsCalls
    from reliable_mq.settings import ConnectionSettings

logger = get_logger(__name__)

_REASON: Final = "the token expires"
_TRY_EVERY: Final = 1.0  # seconds between two tries while an earlier call of the callback has not returned


class TokenRenewer:
    """A renewer of tokens, for one connection after the other. On its loop only."""

    def __init__(
        self,
        name: str,
        loop: EventLoop,
        settings: ConnectionSettings,
        calls: CredentialsCalls,
        *,
        discard: Callable[[str], None],
        is_blocked: Callable[[], bool],
        unneeded: Callable[[], None],
    ) -> None:
        self.statistics = TokenStatistics()
        self._name = name
        self._loop = loop
        self._settings = settings
        self._calls = calls  # shared with the connects, so that hung calls count for both
        self._discard = discard
        self._is_blocked = is_blocked
        self._unneeded = unneeded  # for a token that comes too late: the next connection may have waited for the call
        self._renewal = TokenRenewal()
        self._link: BaseLink | None = None
        self._timer: TimerHandle | None = None
        self._read: tuple[float, float | None] = 0.0, None  # when the next connect's token was read, and its lifetime

    def credentials_read(self, credentials: Credentials | None) -> None:
        """Record the credentials of the attempt that begins."""
        self._read = time.monotonic(), None if credentials is None else credentials.lifetime

    def connected(self, link: BaseLink) -> None:
        """Plan the first renewal, at the end of the handshake."""
        self._link = link
        self._renewal.connected(*self._read)
        self._plan()

    def accepted(self) -> None:
        """Process ``connection.update-secret-ok``."""
        if self._renewal.state is not RenewalState.SENT:
            return
        self._renewal.accepted()
        self.statistics.accepted += 1
        logger.info("%s: token renewed", self._name)
        self._plan()

    def unblocked(self) -> None:
        """Start the time limit of a sent token again, because the broker reads again."""
        if self._link is not None and self._renewal.state is RenewalState.SENT:
            self._await_answer(self._link)

    def lost(self, loss: ConnectionLoss | None = None) -> bool:
        """Forget the connection. Return whether the broker ended it over a new token.

        ``loss`` is given if the broker or the network ended it.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._link = None
        unanswered = self._renewal.lost()
        if not unanswered or loss is None or loss.over != methods.UPDATE_SECRET:
            return False
        self.statistics.refused += 1
        logger.error(
            "%s: the broker refused the renewed token and closed the connection: %s %s; the next attempt asks "
            "for another token",
            self._name,
            loss.code,
            printable(loss.text),
        )
        return True

    def _plan(self) -> None:
        if self._renewal.due_at is not None:
            self._set_timer(self._renewal.due_at - time.monotonic(), self._renew)

    def _set_timer(self, delay: float, fn: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(delay, 0.0), fn)

    def _renew(self) -> None:
        now = time.monotonic()
        if not self._calls.begin(now):
            self._set_timer(_TRY_EVERY, self._renew)
        elif self._renewal.begin(now):
            link = self._link
            call_in_background(
                f"{self._name} credentials",
                self._settings.resolve_credentials,
                lambda result: self._loop.call_soon(partial(self._on_read, link, result)),
            )
            self._set_timer(
                self._settings.connect_timeout, partial(self._failed, "the callback has not returned in time")
            )
        else:
            self._calls.answered()
            self._plan()

    def _on_read(self, link: BaseLink | None, result: Credentials | Exception | None) -> None:
        self._calls.answered()
        if link is None or link is not self._link or not self._renewal.wants_token:
            self._unneeded()
            return
        if not isinstance(result, Credentials):
            self._failed("the callback returned none" if result is None else str(result))
            return
        frame = methods.encode_update_secret(result.password, _REASON)
        if len(frame) > link.frame_max:
            self._failed(f"it has {len(frame)} bytes, and one frame of this connection holds {link.frame_max}")
            return
        self._renewal.read(time.monotonic(), result.lifetime)
        link.write(frame)
        self._await_answer(link)

    def _failed(self, reason: str) -> None:
        if self._renewal.state is not RenewalState.READING:  # the call took too long, and has failed already
            return
        now = time.monotonic()
        left = self._renewal.seconds_left(now)
        self._renewal.failed(now)
        self.statistics.failed += 1
        logger.warning(
            "%s: failed to get a new token; the current one %s: %s",
            self._name,
            f"expires in {left:.1f} s" if left > 0 else f"expired {-left:.1f} s ago",
            reason,
        )
        self._plan()

    def _await_answer(self, link: BaseLink) -> None:
        on_timeout = partial(self._on_unanswered, link, link.bytes_received)
        self._set_timer(self._settings.connect_timeout, on_timeout)

    def _on_unanswered(self, link: BaseLink, before: int) -> None:
        if data_arrives(before, link.bytes_received) or link.write_buffer_size() or self._is_blocked():
            self._await_answer(link)
        elif self._renewal.state is RenewalState.SENT:
            self._discard(f"connection.update-secret was not answered within {self._settings.connect_timeout:g} s")
