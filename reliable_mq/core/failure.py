"""An attempt that failed, described where it failed.

The description is made at once, on the thread or task that ran the handler: ``str(exception)`` is the user's code,
which an I/O thread must not run, and an exception that is kept keeps every frame of its traceback alive.

Invariants: a description is bounded, printable, and encodable as UTF-8; making one never raises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from reliable_mq.retry import DeadLetter, RetryLater

__all__ = ["Failure", "describe", "printable"]

MESSAGE_LIMIT: Final = 512  # characters
_TYPE_LIMIT: Final = 128


@dataclass(frozen=True, slots=True)
class Failure:
    """What a handler raised.

    Attributes:
        exception_type: the class, with its module.
        exception_message: its text, printable and cut.
        at: when, in seconds since 1970.
        delay: seconds to wait for the next attempt, where the handler chose them.
        verdict: why it is to be dead-lettered now, where the handler chose that.
        kind: the class, where the policy is to decide by it.
    """

    exception_type: str
    exception_message: str
    at: float
    delay: float | None = None
    verdict: str | None = None
    kind: type[BaseException] | None = field(default=None, compare=False, repr=False)


def describe(error: BaseException, at: float) -> Failure:
    """Describe what a handler raised, or returned as its verdict on an item, at ``at`` (seconds since 1970)."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 -- whatever the user's __str__ raises
        text = "(its text cannot be shown)"
    return Failure(
        printable(name, _TYPE_LIMIT),
        printable(text),
        at,
        delay=error.delay if isinstance(error, RetryLater) else None,
        verdict=printable(str(error.reason)) if isinstance(error, DeadLetter) else None,
        kind=None if isinstance(error, (RetryLater, DeadLetter)) else kind,
    )


def printable(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """Escape what does not print (control characters, line ends, lone surrogates) and cut at ``limit`` characters."""
    text = text[: limit + 1]
    if not text.isprintable():
        text = "".join(
            char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii")
            for char in text
        )
    return text if len(text) <= limit else text[: limit - 3] + "..."
