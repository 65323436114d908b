"""What a consuming session wants logged."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

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


class Notice(NamedTuple):
    """Something that a log should tell, most often about a delivery."""

    kind: NoticeKind
    delivery: Delivery | None
    text: str
