"""What a check found."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Finding", "Status", "worst"]


class Status(enum.Enum):
    """How bad it is."""

    OK = "ok"
    UNCHECKED = "not checked"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Attributes:
        status: how bad it is.
        subject: what it is about: a host, ``"broker"``, ``"queue 'orders'"``.
        check: what was looked at, in a word or two.
        text: what there is, and what it means.
        fix: what to do about it; empty where nothing is to be done.
    """

    status: Status
    subject: str
    check: str
    text: str
    fix: str = ""


def worst(findings: Iterable[Finding]) -> Status:
    """The worst status there is; OK where nothing was found."""
    order = list(Status)
    return max((finding.status for finding in findings), key=order.index, default=Status.OK)
