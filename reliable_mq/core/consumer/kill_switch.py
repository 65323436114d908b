"""The kill switch of a consumer: a circuit breaker around its handlers.

It stops dispatching when too large a share of the handlers fails, probes after a pause, and resumes if the probe
succeeds. After a failed probe the next pause is twice as long.

Invariants:

- While PAUSED, nothing is dispatched. While PROBING, one delivery at a time is dispatched, and one beside it that may
  hang.
- Results of deliveries dispatched before the pause change nothing.
- A pause lasts at least ``pause`` and at most ``longest_pause`` of the switch. It ends even without a delivery for a
  probe.
- Memory is a fixed number of counts, however many results there are.
"""

from __future__ import annotations

import enum
from collections import deque
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Final

from reliable_mq._util.validation import seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliable_mq.core.consumer.delivery import Delivery
    from reliable_mq.retry import KillSwitch

_PARTS: Final = 10  # the parts of the window, which expire one by one


class KillSwitchState(enum.Enum):
    """The dispatch of deliveries under a kill switch."""

    RUNNING = "any number is dispatched"
    PAUSED = "none is dispatched"
    PROBING = "one is dispatched at a time, to see whether handlers succeed again"


_S = KillSwitchState
#: Event -> state before -> states after. For tests and documentation, not read at run time.
TRANSITIONS: Final[Mapping[str, Mapping[KillSwitchState, set[KillSwitchState]]]] = {
    "too large a share of enough results within the window are failures": {_S.RUNNING: {_S.PAUSED}},
    "the pause is over": {_S.PAUSED: {_S.PROBING}},
    "the probe succeeded": {_S.PROBING: {_S.RUNNING}},
    "the probe failed": {_S.PROBING: {_S.PAUSED}},
}
del _S


class KillSwitchMonitor:
    """The state of a kill switch. Not thread-safe. ``now`` is a monotonic clock."""

    def __init__(self, switch: KillSwitch) -> None:
        self._switch = switch
        self._window = seconds("window", switch.window)
        self._first_pause = seconds("pause", switch.pause)
        self._longest_pause = seconds("longest_pause", switch.longest_pause)
        self._state = KillSwitchState.RUNNING
        self._parts: deque[tuple[float, int, int]] = deque()  # since when, results, failures
        self.pause = self._first_pause  # the seconds of the current or next pause
        self._until = 0.0
        self._probe: Sequence[Delivery] = ()  # the dispatched probe
        self._beside: Sequence[Delivery] = ()  # a probe dispatched beside it, for which no other waits

    @property
    def paused(self) -> bool:
        return self._state is not KillSwitchState.RUNNING

    @property
    def deadline(self) -> float:
        """The time when a pause ends, infinity if only a result can change the state."""
        return self._until if self._state is KillSwitchState.PAUSED else inf

    def due(self, now: float) -> None:
        if now >= self.deadline:
            self._state, self._probe, self._beside = KillSwitchState.PROBING, (), ()

    @property
    def allows(self) -> int | None:
        """The number of deliveries that may be dispatched, None for any number."""
        if self._state is KillSwitchState.RUNNING:
            return None
        return int(self._state is KillSwitchState.PROBING and not self._probe)

    def dispatched(self, probe: Sequence[Delivery], *, beside: bool = False) -> None:
        """Record a dispatched probe.

        A probe ``beside`` another one may hang, so no other probe waits for it.
        """
        if beside:
            self._beside = probe
        else:
            self._probe = probe

    def is_probe(self, delivery: Delivery) -> bool:
        """Return whether this delivery was dispatched as a probe.

        Until the consumer resumes, no other result counts.
        """
        return any(probe is delivery for probe in chain(self._probe, self._beside))

    def recalled(self) -> None:
        """Forget a probe that was recalled, or whose channel is lost."""
        self._probe = self._beside = ()

    def settled(self, handled: int, failed: int, now: float) -> KillSwitchState | None:
        """Count results, and return the new state if they change it.

        Until the consumer resumes, the caller only passes the results of probes.
        """
        if self._state is KillSwitchState.PAUSED:
            return None
        if self._state is KillSwitchState.PROBING:
            if failed:
                self.pause = min(self.pause * 2, self._longest_pause)
                return self._paused(now)
            self._state, self.pause = KillSwitchState.RUNNING, self._first_pause
            return self._state
        self._count(handled, failed, now)
        total = sum(part[1] for part in self._parts)
        failures = sum(part[2] for part in self._parts)
        if total < self._switch.minimum or failures < self._switch.share * total:
            return None
        return self._paused(now)

    def _paused(self, now: float) -> KillSwitchState:
        self._state, self._until = KillSwitchState.PAUSED, now + self.pause
        self._parts.clear()
        return self._state

    def _count(self, handled: int, failed: int, now: float) -> None:
        parts = self._parts
        while parts and parts[0][0] <= now - self._window:
            parts.popleft()
        if parts and now - parts[-1][0] < self._window / _PARTS:
            since, all_before, failed_before = parts[-1]
            parts[-1] = since, all_before + handled + failed, failed_before + failed
        else:
            parts.append((now, handled + failed, failed))
