"""What a consuming session wants logged."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, NamedTuple

from reliable_mq.core.ages import named

if TYPE_CHECKING:
    from reliable_mq.core.delivery import Delivery

__all__ = ["Notice", "NoticeKind"]


class NoticeKind(enum.Enum):
    """What the shell should log."""

    RETRIED = "retried"
    DEAD_LETTERED = "dead-lettered"
    PAUSED = "hands out nothing for now, too many handlings fail"
    RESUMED = "hands out again"
    ISOLATED = "has come back too often without a verdict, and is moved"
    REJECTED = "rejected"
    NOT_DECLARED = "delay queue not declared, what was to wait there is held here"
    REPUBLISH_FAILED = "not published again, and stays unacked"
    STORE_FAILED = "idempotency store failed"
    BATCH_FAILED = "and its batch failed, each is tried by itself"
    CANCELLED = "not handled, and no attempt"
    OVERDUE = "unacked for long"
    TIMED_OUT = "taken back from its handler, which counts as a failed attempt"
    DROPPED = "failed, and acknowledged automatically"


#: After these the message is with no consumer any more, and the log is where people look for the reason.
_LAST: Final = frozenset({NoticeKind.DEAD_LETTERED, NoticeKind.REJECTED})


class Notice(NamedTuple):
    """Something that a log should tell, most often about a delivery."""

    kind: NoticeKind
    delivery: Delivery | None
    text: str

    def line(self, consumer: str) -> str:
        """Return the line for the log of the consumer of this name: which message, which attempt, and why."""
        if self.delivery is None:
            return f"consumer {consumer!r}: {self.kind.value}: {self.text}"
        line = f"{named(self.delivery)} of queue {self.delivery.queue!r} {self.kind.value}: {self.text}"
        failures = self.delivery.failures
        count = 0 if failures is None else failures.count
        if count or self.kind in _LAST:
            line += f"; attempts failed: {count}"
        if self.kind in _LAST and failures is not None and failures.last is not None:
            last = f"{failures.last.exception_type}: {failures.last.exception_message}"
            line += "" if last in self.text else f", the last with {last}"
        return line
