"""Retry policies, the decisions of handlers, and the kill switch.

Invariants of a policy:

- The constructor computes the schedule, which never changes. The user's ``backoff`` is called only there, so no user
  code runs when a message fails.
- The schedule is finite. ``max_attempts`` includes the first attempt.
- Every delay is a finite number of seconds, at least 0 and never below the configured delay, because jitter only adds.
- Invalid values raise in the constructor, not when a message first fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal, TypeAlias, get_args

import tenacity

from reliable_mq._util.validation import Duration, fraction, is_number, seconds, whole_number
from reliable_mq.errors import ConfigurationError, rebuilt

__all__ = ["Ack", "DeadLetter", "KillSwitch", "RetryBackend", "RetryLater", "RetryPolicy", "Verdict"]

Backoff: TypeAlias = Callable[[tenacity.RetryCallState], float]
RetryBackend: TypeAlias = Literal["queues", "memory", "broker"]
Exceptions: TypeAlias = type[BaseException] | Sequence[type[BaseException]]

DEFAULT_MAX_ATTEMPTS: Final = 5
DEFAULT_DELAYS: Final = (1.0, 10.0, 60.0)

#: The highest attempt count: `RetryPolicy` refuses more, and a header that claims more is not trusted.
MOST_ATTEMPTS: Final = 1000

_SHOWN = 8  # delays that ``repr`` lists


class Ack:
    """A batch handler's decision on an item that succeeded: ``Ack`` or ``Ack()``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Ack()"


class RetryLater(Exception):
    """The decision of a handler to retry a delivery later.

    A handler raises or returns it; a batch handler returns it for an item. The retry counts as an attempt: after the
    policy's last attempt, the delivery is dead-lettered nevertheless.

    Args:
        delay: The seconds until the next attempt; None for the policy's delay.
    """

    delay: float | None = None  # for a subclass that does not call this constructor

    def __init__(self, delay: Duration | None = None) -> None:
        self.delay = None if delay is None else seconds("delay", delay)
        super().__init__("as the policy says" if delay is None else f"in {self.delay:g} s")

    def __reduce__(self) -> tuple[object, ...]:
        return rebuilt, (type(self), self.args, self.__dict__)


class DeadLetter(Exception):
    """The decision of a handler to dead-letter a delivery now.

    A handler raises or returns it; a batch handler returns it for an item.

    Args:
        reason: A sentence for the operator, which is stored in a header of the dead letter.
    """

    reason: str = ""  # for a subclass that does not call this constructor

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return rebuilt, (type(self), self.args, self.__dict__)


Verdict: TypeAlias = Ack | type[Ack] | RetryLater | DeadLetter


class RetryPolicy:
    """The number of attempts for a failed message, and the delays between them.

    Immutable. After the last attempt a consumer dead-letters the message, and a publisher reports it. ``retry_on``,
    ``give_up_on`` and ``backend`` are for consumers only: a publisher retries only nacks, and refuses a policy that
    sets them.

    Args:
        max_attempts: The number of attempts, including the first one, from 1 (no retry) to 1000.
        delays: The seconds before the second attempt, the third and so on. The last delay repeats. Default: 1, 10, 60.
        backoff: A replacement for ``delays``: one of tenacity's waits, such as ``wait_exponential(max=60)``, or a
            function of the same kind. The constructor calls it once per attempt. For random delays use ``jitter``.
        jitter: The largest random addition to a delay, as a fraction of it, from 0 (none) to 1 (up to twice the delay).
        retry_on: The exceptions after which a handler is called again; others dead-letter at once. Default: all.
            Subclasses match, as in an ``except`` clause; the same holds for ``give_up_on``. An ``ExceptionGroup`` is
            retried if each exception in it is.
        give_up_on: The exceptions that dead-letter at once, even if ``retry_on`` names one of their base classes.
        backend: The place where a delivery waits. ``"queues"``: in one delay queue per delay, declared beside the
            queue; if that is impossible (a plain name, a stream, an exclusive, auto-delete or transient queue), in
            memory. ``"memory"``: unacked, in the consumer's process; the sum of a message's delays must stay below the
            broker's consumer timeout. ``"broker"``: in the queue itself, with ``Queue(..., delayed_retry=...)``, which
            sets the delays.

    Raises:
        ConfigurationError: If a value is invalid. The message names it.
    """

    __slots__ = ("_backend", "_backoff", "_give_up_on", "_jitter", "_max_attempts", "_retry_on", "_schedule")

    def __init__(
        self,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
        *,
        delays: Sequence[Duration] | None = None,
        backoff: Backoff | None = None,
        jitter: float = 0.0,
        retry_on: Exceptions | None = None,
        give_up_on: Exceptions = (),
        backend: RetryBackend = "queues",
    ) -> None:
        if delays is not None and backoff is not None:
            raise ConfigurationError("delays and backoff are two ways to say the same: give one of them")
        if backend not in get_args(RetryBackend):
            raise ConfigurationError(f"backend must be 'queues', 'memory' or 'broker', not {backend!r}")
        self._backend: RetryBackend = backend
        self._jitter = fraction("jitter", jitter)
        self._max_attempts = whole_number("max_attempts", max_attempts, 1, MOST_ATTEMPTS)
        self._retry_on = None if retry_on is None else _exceptions("retry_on", retry_on)
        self._give_up_on = _exceptions("give_up_on", give_up_on)
        for kind in self._retry_on or ():
            if _is_any(kind, self._give_up_on):
                raise ConfigurationError(f"{kind.__name__} is in retry_on, and never retried: give_up_on covers it")
        self._backoff = "" if backoff is None else getattr(backoff, "__name__", type(backoff).__name__)
        failed = range(1, self._max_attempts)
        if backoff is None:
            given = _delays(DEFAULT_DELAYS if delays is None else delays)
            self._schedule = tuple(given[min(attempt, len(given)) - 1] for attempt in failed)
        elif callable(backoff):
            self._schedule = tuple(_ask(backoff, attempt) for attempt in failed)
        else:
            raise ConfigurationError(f"backoff must be one of tenacity's waits, not {backoff!r}")

    @property
    def max_attempts(self) -> int:
        """The number of attempts, including the first one."""
        return self._max_attempts

    @property
    def schedule(self) -> tuple[float, ...]:
        """The seconds after each attempt except the last one, without jitter."""
        return self._schedule

    @property
    def jitter(self) -> float:
        """The largest random addition to a delay, as a fraction of the delay."""
        return self._jitter

    @property
    def backend(self) -> RetryBackend:
        """The configured place where a delivery waits."""
        return self._backend

    @property
    def for_consumers(self) -> tuple[str, ...]:
        """The names of the arguments that a publisher cannot use."""
        given = {
            "retry_on": self._retry_on is not None,
            "give_up_on": bool(self._give_up_on),
            "backend": self._backend != "queues",
        }
        return tuple(name for name, is_given in given.items() if is_given)

    def retries(self, kind: type[BaseException], *groups: type[BaseException]) -> bool:
        """Return whether an exception of this class is retried if an attempt is left.

        Args:
            kind: The exception's class.
            groups: The classes of the exception groups around it, which ``retry_on`` and ``give_up_on`` may name. A
                group is retried if each exception in it is.
        """
        kinds = (kind, *groups)
        if any(_is_any(one, self._give_up_on) for one in kinds):
            return False
        return self._retry_on is None or any(_is_any(one, self._retry_on) for one in kinds)

    def delay(self, attempt: int, random: Random) -> float | None:
        """Return the delay after a failed attempt.

        Args:
            attempt: The number of the failed attempt, from 1.
            random: The source of the jitter.

        Returns:
            The seconds until the next attempt; None after the last one.
        """
        if attempt >= self._max_attempts:
            return None
        base = self._schedule[attempt - 1]
        return base + base * self._jitter * random.random() if self._jitter else base

    def __repr__(self) -> str:
        shown = ", ".join(f"{delay:g}" for delay in self._schedule[:_SHOWN]) + ("," * (len(self._schedule) == 1))
        if len(self._schedule) > _SHOWN:
            shown += ", ..."
        how = f"backoff={self._backoff} -> ({shown})" if self._backoff else f"delays=({shown})"
        parts = [f"max_attempts={self._max_attempts}", how]
        if self._jitter:
            parts.append(f"jitter={self._jitter:g}")
        for name, kinds in (("retry_on", self._retry_on), ("give_up_on", self._give_up_on or None)):
            if kinds is not None:
                names = ", ".join(kind.__name__ for kind in kinds) + ("," * (len(kinds) == 1))
                parts.append(f"{name}=({names})")
        return f"RetryPolicy({', '.join(parts)}, backend={self._backend!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class KillSwitch:
    """A rule that pauses a consumer when too many of its handler calls fail.

    Without a pause, a service that is down would use up the attempts of every message in the queue. Deliveries stay
    unacked during the pause. After it one delivery is handled as a probe, and its success ends the pause.

    ``RetryLater`` and ``DeadLetter`` count as failures. Each delivery of a batch counts as a call.

    Args:
        share: The share of failed handler calls within the window that starts a pause, above 0 and up to 1.
        window: The length of the window, in seconds or as a timedelta.
        minimum: The number of handler calls within the window below which the consumer does not pause.
        pause: The time until the first probe, in seconds or as a timedelta. It doubles after each failed probe.
        longest_pause: The maximum length of a pause, in seconds or as a timedelta.

    Raises:
        ConfigurationError: If a value is out of range. The message names it.
    """

    share: float = 0.9
    window: Duration = 30.0
    minimum: int = 20
    pause: Duration = 5.0
    longest_pause: Duration = 60.0

    def __post_init__(self) -> None:
        if not is_number(self.share) or not 0 < self.share <= 1:
            raise ConfigurationError(f"share must be a number above 0, up to 1, not {self.share!r}")
        whole_number("minimum", self.minimum, 1)
        pause = seconds("pause", self.pause, positive=True)
        longest_pause = seconds("longest_pause", self.longest_pause, positive=True)
        if longest_pause < pause:
            raise ConfigurationError(f"longest_pause is below pause: {self.longest_pause!r} and {self.pause!r}")
        object.__setattr__(self, "window", seconds("window", self.window, positive=True))
        object.__setattr__(self, "pause", pause)
        object.__setattr__(self, "longest_pause", longest_pause)


def _ask(backoff: Backoff, attempt: int) -> float:
    state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
    state.attempt_number = attempt
    try:
        delay = backoff(state)
    except Exception as error:
        raise ConfigurationError(f"backoff raised for attempt {attempt}: {error!r}") from error
    return seconds(f"the backoff after attempt {attempt}", delay)


def _delays(delays: object) -> tuple[float, ...]:
    if isinstance(delays, Sequence) and not isinstance(delays, str) and delays:
        return tuple(seconds(f"delays[{index}]", delay) for index, delay in enumerate(delays))
    raise ConfigurationError(f"delays must be a sequence of at least one number of seconds, not {delays!r}")


def _is_any(kind: type[BaseException], bases: tuple[type[BaseException], ...]) -> bool:
    """Return whether a class inherits from one of ``bases``.

    A user's ``__subclasscheck__``, which may raise, is not called.
    """
    return any(type.__subclasscheck__(base, kind) for base in bases)


def _exceptions(field: str, value: object) -> tuple[type[BaseException], ...]:
    kinds = (value,) if isinstance(value, type) else value
    if isinstance(kinds, Sequence) and all(isinstance(one, type) and issubclass(one, BaseException) for one in kinds):
        return tuple(kinds)
    raise ConfigurationError(f"{field} must be an exception class or a sequence of them, not {value!r}")
