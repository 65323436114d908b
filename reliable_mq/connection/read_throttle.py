"""How often a consumer's link reads.

A broker sends few deliveries at a time, and what a read costs is hardly the read: it hands work to other threads, and
wakes them. So a small read is not followed by the next one at once, but when about a tenth of the prefetch can have
come, at 40 000 messages a second: this halves the CPU time of a message, which on a machine shared with the broker
makes both faster. The gap alone would allow ten times that rate, whatever the prefetch is; a delivery that does not
follow another one closely waits for nothing, and no write ever waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliable_mq.codec.methods import Cancel, SetPrefetch

if TYPE_CHECKING:
    from reliable_mq.codec.methods import Step

__all__ = ["ReadThrottle"]

_LONGEST = 1e-3  # seconds
_PER_DELIVERY = 2.5e-6  # seconds for each of the prefetch
_MANY_BYTES = 64 * 1024  # a read of so many is worth its turn of the loop by itself


class ReadThrottle:
    """See the module. Not thread-safe."""

    def __init__(self) -> None:
        self._gap = 0.0

    def follow(self, step: Step) -> None:
        """A channel of the link carries out ``step``: the largest prefetch counts, until a consumer is cancelled."""
        if isinstance(step, SetPrefetch):
            self._gap = max(self._gap, min(step.count * _PER_DELIVERY, _LONGEST) if step.count else _LONGEST)
        elif isinstance(step, Cancel):
            self._gap = 0.0

    def gap_after(self, size: int) -> float:
        """Return the seconds until the next read, after one of ``size`` bytes."""
        return 0.0 if size >= _MANY_BYTES else self._gap
