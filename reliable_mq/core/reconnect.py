"""The policy of reconnecting: the next host, the wait before it, the end.

No clock, no socket: the connection reports events (``begin``, ``failed``, ``lost``, ``ready``) with their time, in
seconds of a monotonic clock, and gets the seconds to wait before it tries `host`, or None to give up.

Invariants:

- Hosts are tried in the order given. After a failed attempt and after a lost connection the next one is `host`; the
  very first attempt goes to the first. Every host gets one attempt, without a wait in between, before the wait object
  is called: that is a round.
- A round in which *every* attempt failed for a reason that time does not heal (wrong credentials, unknown virtual host,
  a certificate that does not verify, a topology that differs) ends it all, as long as nothing was ever ready: that is a
  wrong configuration, and waiting would hide it. Once something was ready, everything is tried again: brokers are
  re-created, passwords and certificates renewed.
- A loss is followed by an attempt at once, as long as losses are few. A channel or a connection that is lost again and
  again uses up a budget, which refills with time; from then on the rate of the refill is the rate of reopening. The
  budget for channels is large, since the search for the message that closes channels takes several closes in a row.
- No wait is negative; none is computed from a wall clock.
- Wait and stop are the user's: functions of the number of rounds, or tenacity's objects. If one raises, or returns no
  number, the default decides in its place: a mistake in them costs no message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import tenacity
from tenacity.stop import stop_base
from tenacity.wait import wait_base, wait_exponential

from reliable_mq.errors import BrokerUnavailable, ConfigurationError, TopologyMismatch, UsageError

if TYPE_CHECKING:
    from reliable_mq.errors import ReliableMQError

__all__ = ["ConnectionLoss", "CredentialsCalls", "ReconnectPolicy", "ReconnectStop", "ReconnectWait", "is_permanent"]

#: Seconds to wait after a round: a function of the number of rounds since the connection was lost, or a tenacity wait.
ReconnectWait: TypeAlias = Callable[[int], float] | wait_base
#: Whether to give up after a round: a function of the number of rounds, or a tenacity stop.
ReconnectStop: TypeAlias = Callable[[int], bool] | stop_base

CHANNEL_BURST: Final = 64  # channels that may be reopened in a row without a wait
CHANNEL_REFILL: Final = 1.0  # and per second in the long run
CONNECTION_BURST: Final = 32
CONNECTION_REFILL: Final = 2.0

MOST_UNANSWERED: Final = 8  # calls of one connection's credentials callback, each on a thread of its own

_FIRST_WAIT: Final = 0.2  # seconds, before the second round over the hosts
_LONGEST_WAIT: Final = 30.0


@dataclass(frozen=True, slots=True)
class ConnectionLoss:
    """The end of a channel that was ready, or of the connection under it."""

    code: int | None  # the reply code of the broker (406, 320, ...), if it gave one
    text: str  # the reply text of the broker, or our own reason
    scope: Literal["channel", "connection"]  # whether the connection was lost too
    by_broker: bool  # True if the broker closed it with a code; else reset, heartbeat, `discard`, ...


class ReconnectPolicy:
    """The attempts of one connection. Not thread-safe.

    It belongs to the thread or loop that connects.

    Args:
        hosts: the number of hosts, at least one.
        wait: called after every round with the number of rounds since the outage began, which is the ``attempt_number``
            of a tenacity wait. Seconds. Default: 0.2 s, doubled each time up to 30 s, of which a random part between a
            half and all.
        stop: called after every round, likewise; for a tenacity stop ``seconds_since_start`` counts from the beginning
            of the outage. Default: never.
        random: the randomness of the default wait; a seeded one makes it repeatable.

    Raises:
        ConfigurationError: a value that is none of these.
    """

    def __init__(
        self,
        *,
        hosts: int = 1,
        wait: ReconnectWait | None = None,
        stop: ReconnectStop | None = None,
        random: Random | None = None,
    ) -> None:
        if hosts < 1:
            raise ConfigurationError(f"hosts: at least one is needed, not {hosts}")
        if wait is not None:
            _check_callable("wait", wait, wait_base)
        if stop is not None:
            _check_callable("stop", stop, stop_base)
        self._hosts = hosts
        self._default_wait = _HalfJitter(random or SystemRandom())
        self._wait: ReconnectWait = self._default_wait if wait is None else wait
        self._stop: ReconnectStop = tenacity.stop_never if stop is None else stop
        self.broken: Exception | None = None  # of the wait or the stop object, at the last decision
        self.host = 0  # the index of the one to try next
        self._ever_ready = False
        self._outage_began = 0.0
        self._rounds = 0
        self._tried = 0  # attempts in this round
        self._permanent = 0  # of those, refused for good
        self._channels = _Budget(CHANNEL_BURST, CHANNEL_REFILL)
        self._connections = _Budget(CONNECTION_BURST, CONNECTION_REFILL)

    def begin(self, now: float) -> None:
        self._outage(now)

    def ready(self) -> None:
        """End the outage: a connection and its channel are set up."""
        self._ever_ready = True
        self._new_round()
        self._rounds = 0

    def failed(self, error: ReliableMQError, now: float, *, connected: bool = False) -> float | None:
        """Decide after an attempt to connect, or to set up a channel, that failed.

        Args:
            error: the reason.
            now: seconds.
            connected: True if the connection is there, and only its channel could not be set up. The host is not to
                blame then: `host` stays, and no other is tried before the wait.

        Returns:
            Seconds to wait before the next attempt; None to give up.
        """
        self.broken = None
        self._tried += 1
        self._permanent += is_permanent(error)
        if not connected:
            self._next_host()
            if self._tried < self._hosts:
                return 0.0
        hopeless = is_permanent(error) if connected else self._permanent == self._tried
        self._new_round()
        if hopeless and not self._ever_ready:
            return None
        self._rounds += 1
        return self._ask(error, now)

    def lost(self, loss: ConnectionLoss, now: float) -> float:
        """Decide after the loss of a channel, or a connection, that was ready.

        Returns:
            Seconds to wait before the next attempt (of a channel on the same connection, for a channel loss).
        """
        self._outage(now)
        if loss.scope == "channel":
            return self._channels.take(now)
        self._next_host()
        return self._connections.take(now)

    def _outage(self, now: float) -> None:
        self._outage_began = now
        self._rounds = 0
        self._new_round()

    def _new_round(self) -> None:
        self._tried = self._permanent = 0

    def _next_host(self) -> None:
        self.host = (self.host + 1) % self._hosts

    def _ask(self, error: ReliableMQError, now: float) -> float | None:
        """Call wait and stop as tenacity does: a stop object may read the wait."""
        state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
        state.attempt_number = self._rounds
        state.start_time = self._outage_began
        state.outcome = tenacity.Future.construct(self._rounds, error, has_exception=True)
        state.outcome_timestamp = now
        try:
            wait, stop = self._wait, self._stop
            state.upcoming_sleep = _finite(wait(state) if isinstance(wait, wait_base) else wait(self._rounds))
            gives_up = stop(state) if isinstance(stop, stop_base) else stop(self._rounds)
        except Exception as broken:  # noqa: BLE001  # the user's code may raise anything
            self.broken = broken
            return self._default_wait(state)
        return None if gives_up else state.upcoming_sleep


class CredentialsCalls:
    """The calls of a credentials callback whose earlier calls have not returned.

    A call may hang for ever, and each one keeps a thread. So another one begins after ``patience`` seconds, the next
    after twice as long, and so on until one returns, with up to `MOST_UNANSWERED` at a time.

    """

    def __init__(self, patience: float) -> None:
        self.unanswered = 0  # calls that have not returned
        self._patience = patience
        self._begun = 0  # calls since one has returned
        self._again_at = 0.0

    def begin(self, now: float) -> bool:
        """Return whether to call now; if so, the call is counted until `answered`."""
        if self.unanswered >= MOST_UNANSWERED or (self._begun and now < self._again_at):
            return False
        self._again_at = now + self._patience * 2**self._begun
        self._begun += 1
        self.unanswered += 1
        return True

    def answered(self) -> None:
        self.unanswered -= 1
        self._begun = 0


def _check_callable(option: str, given: object, kind: type[wait_base | stop_base]) -> None:
    """Refuse an option that cannot be called, or is of another kind of tenacity's."""
    foreign = isinstance(given, (wait_base, stop_base)) and not isinstance(given, kind)
    if foreign or isinstance(given, type) or not callable(given):
        raise ConfigurationError(
            f"reconnect_{option} must be a function of the number of rounds over the hosts, or one of tenacity's "
            f"{option}s, not {given!r:.100}"
        )


def _finite(wait: float) -> float:
    """Return a wait in seconds, 0 if it is negative.

    Refuses NaN, which would be no wait, and infinity, which is for the stop object to decide.
    """
    seconds = float(wait)
    if not isfinite(seconds):
        raise ValueError(f"the wait is {wait!r}, and must be a number of seconds")
    return max(0.0, seconds)


def is_permanent(error: ReliableMQError) -> bool:
    """Whether trying the same again cannot help."""
    if isinstance(error, BrokerUnavailable):
        return error.permanent
    return isinstance(error, (TopologyMismatch, ConfigurationError, UsageError))


class _HalfJitter(wait_exponential):
    """A random part, between a half and all, of an exponential wait.

    Many clients of a broker do not come back as one.
    """

    def __init__(self, random: Random) -> None:
        super().__init__(multiplier=_FIRST_WAIT, max=_LONGEST_WAIT)
        self._random = random

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        longest = super().__call__(retry_state)
        return self._random.uniform(longest / 2, longest)


class _Budget:
    """A token bucket: `burst` at once, `refill` per second in the long run."""

    def __init__(self, burst: int, refill: float) -> None:
        self._burst = float(burst)
        self._refill = refill
        self._tokens = float(burst)
        self._seen = 0.0

    def take(self, now: float) -> float:
        """Take a token; return the seconds until there is one, 0 if there is."""
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._seen) * self._refill)
        self._seen = now
        self._tokens -= 1.0
        return max(0.0, -self._tokens / self._refill)
