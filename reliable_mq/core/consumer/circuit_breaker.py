"""The kill switch of a consumer: when too large a share of handlings fails, it stops handing out, probes, and resumes.

::

    RUNNING --too large a share of enough handlings within the window failed--> PAUSED
    PAUSED --the pause is over--> PROBING --the one that was handed out succeeded--> RUNNING
                                          --it failed--> PAUSED, for twice as long

Invariants: while paused nothing is to be handed out, while probing one at a time, and one beside it that may hang; what
was handed out before the pause changes nothing; a pause is at least the switch's ``pause`` and at most its
``longest_pause``, and ends whether or not there is anything to probe with; memory is a fixed number of counts, however
many results there are.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from reliable_mq.retry import KillSwitch

__all__ = ["CircuitBreaker", "Transition"]

_PARTS: Final = 10  # of the window, that leave it one by one


class _BreakerState(enum.Enum):
    RUNNING = enum.auto()
    PAUSED = enum.auto()
    PROBING = enum.auto()


class Transition(enum.Enum):
    """What a result has led to."""

    PAUSED = "paused"
    RESUMED = "resumed"


class CircuitBreaker:
    """See the module. Not thread-safe; ``now`` is a monotonic clock, in seconds.

    Args:
        switch: when.
    """

    __slots__ = ("_beside", "_parts", "_pause", "_probe", "_state", "_switch", "_until")

    def __init__(self, switch: KillSwitch) -> None:
        self._switch = switch
        self._state = _BreakerState.RUNNING
        self._parts: deque[tuple[float, int, int]] = deque()  # since when, handlings, failures
        self._pause = switch.pause
        self._until = 0.0
        self._probe = False  # one is handed out
        self._beside = False  # one is that no probe is to wait for

    @property
    def paused(self) -> bool:
        """Whether anything is held back."""
        return self._state is not _BreakerState.RUNNING

    @property
    def deadline(self) -> float | None:
        """When to ask again what may be handed out; None where that depends on results alone."""
        return self._until if self._state is _BreakerState.PAUSED else None

    def due(self, now: float) -> None:
        """Time passed."""
        if self._state is _BreakerState.PAUSED and now >= self._until:
            self._state, self._probe, self._beside = _BreakerState.PROBING, False, False

    @property
    def allows(self) -> int | None:
        """How many may be handed out; None for any number."""
        return (
            None
            if self._state is _BreakerState.RUNNING
            else int(self._state is _BreakerState.PROBING and not self._probe)
        )

    def handed_out(self, *, beside: bool = False) -> None:
        """One was, as a probe; ``beside``: one that may hang, and that another probe does not wait for."""
        self._probe |= not beside
        self._beside |= beside

    def withdrawn(self) -> None:
        """The probe was taken back, or its channel is lost: there may be another."""
        self._probe = self._beside = False

    def settled(self, handled: int, failed: int, now: float) -> Transition | None:
        """So many handlings succeeded and failed; answer what that has changed."""
        if self._state is _BreakerState.PAUSED:
            return None
        if self._state is _BreakerState.PROBING:
            if not (self._probe or self._beside):
                return None
            if failed:
                self._pause = min(self._pause * 2, self._switch.longest_pause)
                return self._paused(now)
            self._state, self._pause = _BreakerState.RUNNING, self._switch.pause
            return Transition.RESUMED
        self._count(handled, failed, now)
        total = sum(part[1] for part in self._parts)
        failures = sum(part[2] for part in self._parts)
        if total < self._switch.minimum or failures < self._switch.share * total:
            return None
        return self._paused(now)

    @property
    def pause(self) -> float:
        """Seconds of the pause that has begun."""
        return self._pause

    def _paused(self, now: float) -> Transition:
        self._state, self._until = _BreakerState.PAUSED, now + self._pause
        self._parts.clear()
        return Transition.PAUSED

    def _count(self, handled: int, failed: int, now: float) -> None:
        parts = self._parts
        while parts and parts[0][0] <= now - self._switch.window:
            parts.popleft()
        if parts and now - parts[-1][0] < self._switch.window / _PARTS:
            since, all_before, failed_before = parts[-1]
            parts[-1] = since, all_before + handled + failed, failed_before + failed
        else:
            parts.append((now, handled + failed, failed))
