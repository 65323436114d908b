"""How often and after how long something is tried again, and what a handler may say about its delivery.

Invariants of a policy: its schedule is finite and ends (``max_attempts`` counts the first attempt too); every delay it
answers is a finite number of seconds, at least 0 and never less than what was asked for, since jitter only adds.
Nonsense is refused when the policy is made, not when a message first fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import tenacity

from reliable_mq.durations import Duration, seconds
from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from random import Random

__all__ = ["Ack", "DeadLetter", "RetryLater", "RetryPolicy", "Verdict"]

Backoff: TypeAlias = Callable[[tenacity.RetryCallState], float]

DEFAULT_MAX_ATTEMPTS: Final = 5
DEFAULT_DELAYS: Final = (1.0, 10.0, 60.0)

#: An attempt count above this is no count of ours: `RetryPolicy` refuses it, and a header that claims it is not
#: trusted.
MOST_ATTEMPTS: Final = 1000

_SHOWN = 8  # delays that a repr spells out


class Ack:
    """The verdict of a batch handler on an item that is done: ``Ack`` or ``Ack()``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Ack()"


class RetryLater(Exception):
    """Raised by a handler, or returned for an item of a batch: try this delivery again later.

    It counts as an attempt: after the policy's last one the delivery is dead-lettered all the same.

    Args:
        delay: seconds until the next attempt; None for the delay of the policy.
    """

    def __init__(self, delay: Duration | None = None) -> None:
        self.delay = None if delay is None else seconds("delay", delay)
        super().__init__("as the policy says" if delay is None else f"in {self.delay:g} s")


class DeadLetter(Exception):
    """Raised by a handler, or returned for an item of a batch: dead-letter this delivery now.

    Args:
        reason: a sentence for whoever looks at the dead letter; it travels in a header.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


Verdict: TypeAlias = Ack | type[Ack] | RetryLater | DeadLetter


class RetryPolicy:
    """When something that failed is tried again, and when it is given up. Immutable.

    A consumer dead-letters what it gives up; a publisher reports it. A consumer holds a delivery that waits for its
    next attempt, unacknowledged and in its place of the prefetch, so the delays of one message together must stay below
    the broker's consumer timeout (30 minutes unless it was changed).

    Args:
        max_attempts: attempts in all, the first one included; from 1 (never again) to 1000.
        delays: seconds before the second attempt, the third one and so on; the last one repeats. Default: 1, 10, 60.
        backoff: instead of ``delays``, one of tenacity's waits, such as ``wait_exponential(max=60)``, or a function of
            the same kind. It must not block.
        jitter: part of each delay that is added to it at random, from 0 (none) to 1 (up to twice the delay).
        backend: where a delivery waits; ``"memory"``: held in the consumer's process.

    Raises:
        ConfigurationError: a value is out of its range; the message names it.
    """

    __slots__ = ("_backoff", "_delays", "_jitter", "_max_attempts")

    def __init__(
        self,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
        *,
        delays: Sequence[Duration] | None = None,
        backoff: Backoff | None = None,
        jitter: float = 0.0,
        backend: Literal["memory"] = "memory",
    ) -> None:
        if delays is not None and backoff is not None:
            raise ConfigurationError("delays and backoff are two ways to say the same: give one of them")
        if backend != "memory":
            raise ConfigurationError(f"backend must be 'memory', not {backend!r}")
        self._jitter = _part("jitter", jitter)
        self._max_attempts = _attempts(max_attempts)
        self._delays = _delays(DEFAULT_DELAYS if delays is None else delays)
        self._backoff = backoff
        if backoff is not None:
            if not callable(backoff):
                raise ConfigurationError(f"backoff must be one of tenacity's waits, not {backoff!r}")
            for attempt in range(1, self._max_attempts):
                _ask(backoff, attempt)

    @property
    def max_attempts(self) -> int:
        """Attempts in all, the first one included."""
        return self._max_attempts

    def delay(self, attempt: int, random: Random) -> float | None:
        """Answer how long to wait after a failed attempt.

        Args:
            attempt: the number of the attempt that failed, from 1.
            random: the source of the jitter.

        Returns:
            Seconds until the next attempt; None to give up.
        """
        if attempt >= self._max_attempts:
            return None
        base = self._base(attempt)
        return base + base * self._jitter * random.random() if self._jitter else base

    def _base(self, attempt: int) -> float:
        if self._backoff is not None:
            return _ask(self._backoff, attempt)
        return self._delays[min(attempt, len(self._delays)) - 1]

    def __repr__(self) -> str:
        known = [self._base(attempt) for attempt in range(1, min(self._max_attempts, _SHOWN + 1))]
        schedule = ", ".join(f"{delay:g}" for delay in known) + ("," if len(known) == 1 else "")
        if self._max_attempts - 1 > _SHOWN:
            schedule += ", ..."
        how = f"delays=({schedule})"
        if self._backoff is not None:
            name = getattr(self._backoff, "__name__", type(self._backoff).__name__)
            how = f"backoff={name} (such as {schedule})"
        jitter = f", jitter={self._jitter:g}" if self._jitter else ""
        return f"RetryPolicy(max_attempts={self._max_attempts}, {how}{jitter}, backend='memory')"


def _ask(backoff: Backoff, attempt: int) -> float:
    state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
    state.attempt_number = attempt
    try:
        delay = backoff(state)
    except Exception as error:
        raise ConfigurationError(f"backoff raised for attempt {attempt}: {error!r}") from error
    return seconds(f"the backoff after attempt {attempt}", delay)


def _attempts(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_ATTEMPTS:
        return value
    raise ConfigurationError(f"max_attempts must be a whole number from 1 to {MOST_ATTEMPTS}, not {value!r}")


def _delays(delays: object) -> tuple[float, ...]:
    if isinstance(delays, Sequence) and not isinstance(delays, str) and delays:
        return tuple(seconds(f"delays[{index}]", delay) for index, delay in enumerate(delays))
    raise ConfigurationError(f"delays must be a sequence of at least one number of seconds, not {delays!r}")


def _part(field: str, value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    raise ConfigurationError(f"{field} must be a number from 0 to 1, not {value!r}")
