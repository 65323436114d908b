"""The reconnect policy: the next host, the wait before it, and when to give up.

The policy uses no clock and no socket. The connection reports events (``begin``, ``failed``, ``lost``, ``ready``) with
their time, in seconds of a monotonic clock. The policy returns the seconds to wait before the connection tries `host`,
or None to give up.

Invariants:

- Hosts are tried in the given order, starting with the first. `host` advances after a failed attempt and after a lost
  connection; so do the addresses of a host (`AddressOrder`). A round is one attempt at every host, without a wait in
  between. The wait object is called after a round.
- If *every* attempt of a round failed for a reason that time does not heal (wrong credentials, unknown virtual host, a
  certificate that does not verify, a topology that differs), the policy gives up, as long as nothing was ever ready.
  The configuration is wrong, and waiting would hide it. Once something was ready, everything is tried again, because
  brokers are re-created, and passwords and certificates are renewed.
- A loss is followed by an immediate attempt, as long as losses are few. A channel or connection that is lost again and
  again uses up a budget, which refills with time. After that, the refill rate limits the rate of reopening. The budget
  for channels is large, because the search for a message that closes channels takes several closes in a row.
- No wait is negative, and none is computed from a wall clock.
- The user may replace wait and stop by functions of the number of rounds or by tenacity objects. If one of them raises
  or returns no number, the default wait applies instead, so that a mistake in them loses no message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from random import SystemRandom
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import tenacity
from tenacity.stop import stop_base
from tenacity.wait import wait_base, wait_exponential

from reliable_mq.errors import BrokerUnavailable, ConfigurationError, TopologyMismatch, UsageError

if TYPE_CHECKING:
    from reliable_mq.errors import ReliableMQError

#: The seconds to wait after a round, as a function of the number of rounds since the connection was lost, or a tenacity
#: wait.
ReconnectWait: TypeAlias = Callable[[int], float] | wait_base
#: Whether to give up after a round, as a function of the number of rounds, or a tenacity stop.
ReconnectStop: TypeAlias = Callable[[int], bool] | stop_base

CHANNEL_BURST: Final = 64  # channels that may be reopened in a row without a wait
CHANNEL_REFILL: Final = 1.0  # channels per second in the long run
CONNECTION_BURST: Final = 32
CONNECTION_REFILL: Final = 2.0

ADDRESSES_KEPT: Final = 64  # addresses of hosts whose last attempts are known
LEAST_SHARES: Final = 2  # parts into which the addresses of a host divide the time to connect
MOST_SHARES: Final = 5
_LEAST_LEFT: Final = 0.1  # the part of the time that is left after the longest lookup

MOST_UNANSWERED: Final = 8  # concurrent calls of one connection's credentials callback, each on its own thread

_random: Final = SystemRandom()
_FIRST_WAIT: Final = 0.2  # seconds, before the second round over the hosts
_LONGEST_WAIT: Final = 30.0


@dataclass(frozen=True, slots=True)
class ConnectionLoss:
    """The end of a channel that was ready, or of the connection under it."""

    code: int | None  # the reply code of the broker (406, 320, ...), None without one
    text: str  # the reply text of the broker, or a reason of this package
    scope: Literal["channel", "connection"]  # whether the connection was lost too
    by_broker: bool  # True if the broker closed it with a code; False after a reset, missed heartbeat, `discard`, ...
    over: tuple[int, int] = (0, 0)  # the method over which the broker closed the connection, if it named one


class ReconnectPolicy:
    """The attempts of one connection.

    Not thread-safe: the thread or event loop that connects owns it.

    Args:
        hosts: The number of hosts, at least one.
        wait: A callable that returns the seconds to wait. It is called after every round with the number of rounds
            since the outage began, which is the ``attempt_number`` of a tenacity wait. Default: 0.2 s, doubled each
            time up to 30 s, of which a random part between half and all is used.
        stop: A callable that returns whether to give up. It is called like ``wait``. For a tenacity stop,
            ``seconds_since_start`` counts from the beginning of the outage. Default: never.
        proven: Whether another connection with the same configuration was ready. The attribute of this name can be set
            later.
        quiet: Whether no log line says that the connection is given up, because the owner reports it.

    Raises:
        ConfigurationError: If an option is invalid. The message names the option.
    """

    def __init__(
        self,
        *,
        hosts: int = 1,
        wait: ReconnectWait | None = None,
        stop: ReconnectStop | None = None,
        proven: bool = False,
        quiet: bool = False,
    ) -> None:
        if hosts < 1:
            raise ConfigurationError(f"hosts: at least one is needed, not {hosts}")
        if wait is not None:
            _check_callable("wait", wait, wait_base)
        if stop is not None:
            _check_callable("stop", stop, stop_base)
        self._hosts = hosts
        self._wait: ReconnectWait = _DEFAULT_WAIT if wait is None else wait
        self._stop: ReconnectStop = tenacity.stop_never if stop is None else stop
        self.broken: Exception | None = None  # raised by the wait or the stop object at the last decision
        self.host = 0  # the index of the next host to try
        self.proven = proven
        self.quiet: Final = quiet
        self._outage_began = 0.0
        self._rounds = 0
        self._tried = 0  # attempts in this round
        self._permanent = 0  # attempts in this round that were refused for good
        self._channels = _Budget(CHANNEL_BURST, CHANNEL_REFILL)
        self._connections = _Budget(CONNECTION_BURST, CONNECTION_REFILL)

    def begin(self, now: float) -> None:
        """Begin an outage, as at the start."""
        self._outage_began = now
        self._rounds = 0
        self._new_round()

    def ready(self) -> None:
        """End the outage: a connection and its channel are set up."""
        self.proven = True
        self._new_round()
        self._rounds = 0

    def failed(self, error: ReliableMQError, now: float, *, connected: bool = False) -> float | None:
        """Decide after a failed attempt to connect or to set up a channel.

        Args:
            error: The reason of the failure.
            now: The current time, in seconds.
            connected: True if the connection is open and only its channel could not be set up. The host is not to
                blame, so `host` does not change, and no other host is tried before the wait.

        Returns:
            The seconds to wait before the next attempt, or None to give up.
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
        if hopeless and not self.proven:
            return None
        self._rounds += 1
        return self._ask(error, now)

    def lost(self, loss: ConnectionLoss, now: float, *, was_ready: bool = True) -> float:
        """Decide after the loss of a channel or connection.

        Args:
            loss: The loss.
            now: The current time, in seconds.
            was_ready: False if the channel was lost before, so that the outage goes on.

        Returns:
            The seconds to wait before the next attempt. After a channel loss, the attempt is to open a channel on the
            same connection.
        """
        if was_ready:
            self.begin(now)
        if loss.scope == "channel":
            return self._channels.take(now)
        self._next_host()
        return self._connections.take(now)

    def _new_round(self) -> None:
        self._tried = self._permanent = 0

    def _next_host(self) -> None:
        self.host = (self.host + 1) % self._hosts

    def _ask(self, error: ReliableMQError, now: float) -> float | None:
        """Call wait and stop as tenacity does, since a stop object may read the wait."""
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
            return _DEFAULT_WAIT(state)
        return None if gives_up else state.upcoming_sleep


class CredentialsCalls:
    """The calls of a credentials callback that may hang.

    A call may hang forever and keeps its thread. So a second call begins after ``patience`` seconds, the next after
    twice as long, and so on until one returns, with at most `MOST_UNANSWERED` at a time.
    """

    def __init__(self, patience: float) -> None:
        self.unanswered = 0  # calls that have not returned
        self._patience = patience
        self._begun = 0  # calls since the last one that returned
        self._again_at = 0.0

    def begin(self, now: float) -> bool:
        """Return whether to call now. The call counts as unanswered until `answered`."""
        if self.unanswered >= MOST_UNANSWERED or (self._begun and now < self._again_at):
            return False
        self._again_at = now + self._patience * 2**self._begun
        self._begun += 1
        self.unanswered += 1
        return True

    def answered(self) -> None:
        self.unanswered -= 1
        self._begun = 0


class AddressOrder:
    """The order in which the addresses of host names are tried.

    An address may accept connections and never answer, which ends the attempt. So the next attempt begins with an
    address that was not tried yet, or not for the longest time.

    Attributes:
        several: Whether the last host has several addresses of one family, which may be different nodes. One node often
            has an address of each family.
    """

    def __init__(self) -> None:
        self.several = False
        self._tried: deque[object] = deque(maxlen=ADDRESSES_KEPT)  # the last one was tried last

    def tried(self, address: object) -> None:
        if address in self._tried:
            self._tried.remove(address)
        self._tried.append(address)

    def sort(self, found: list[Any]) -> list[Any]:
        """Return the results of ``getaddrinfo`` in the order in which to try them."""
        addresses = {(one[0], one[4]) for one in found}
        self.several = len(addresses) > len({family for family, _ in addresses})
        return sorted(found, key=lambda one: self._tried.index(one[4]) if one[4] in self._tried else -1)


def time_for_address(connect_timeout: float, used: float, addresses: int) -> float:
    """Return the seconds in which an address of a host must respond.

    An unresponsive address leaves an equal part of the time to each of the next ones, and half of it if there is none.
    More than `MOST_SHARES` addresses would have too little each, so the others are the first of the next attempt.

    Args:
        connect_timeout: The time to connect to the host, in seconds.
        used: The seconds that the lookup of the addresses has taken.
        addresses: The number of addresses.
    """
    left = max(connect_timeout - used, _LEAST_LEFT * connect_timeout)
    return left / min(max(addresses, LEAST_SHARES), MOST_SHARES)


def _check_callable(option: str, given: object, kind: type[wait_base | stop_base]) -> None:
    """Refuse an option that is not callable, or is a tenacity object of another kind."""
    foreign = isinstance(given, (wait_base, stop_base)) and not isinstance(given, kind)
    if foreign or isinstance(given, type) or not callable(given):
        raise ConfigurationError(
            f"reconnect_{option} must be a function of the number of rounds over the hosts, or one of tenacity's "
            f"{option}s, not {given!r:.100}"
        )


def _finite(wait: float) -> float:
    """Return a wait in seconds, 0 if it is negative.

    NaN is refused because it would be no wait, and infinity because only the stop object may end the attempts.
    """
    seconds = float(wait)
    if not isfinite(seconds):
        raise ValueError(f"the wait is {wait!r}, and must be a number of seconds")
    return max(0.0, seconds)


def is_permanent(error: ReliableMQError) -> bool:
    """Return whether another attempt of the same cannot help."""
    if isinstance(error, BrokerUnavailable):
        return error.permanent
    return isinstance(error, (TopologyMismatch, ConfigurationError, UsageError))


class _HalfJitter(wait_exponential):
    """A random part, between half and all, of an exponential wait.

    It keeps the many clients of a broker from reconnecting at the same moment. A program may have seeded the random
    numbers of Python, equally in each of them.
    """

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        longest = super().__call__(retry_state)
        return _random.uniform(longest / 2, longest)


_DEFAULT_WAIT: Final = _HalfJitter(multiplier=_FIRST_WAIT, max=_LONGEST_WAIT)


class _Budget:
    """A token bucket with `burst` tokens at once and `refill` tokens per second."""

    def __init__(self, burst: int, refill: float) -> None:
        self._burst = float(burst)
        self._refill = refill
        self._tokens = float(burst)
        self._seen = 0.0

    def take(self, now: float) -> float:
        """Take a token. Return the seconds until it is available, 0 if it is now."""
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._seen) * self._refill)
        self._seen = now
        self._tokens -= 1.0
        return max(0.0, -self._tokens / self._refill)
