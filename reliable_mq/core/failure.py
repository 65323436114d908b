"""An attempt that failed, described where it failed.

The description is made at once, on the thread or task that ran the handler: ``str(exception)`` is the user's code,
which an I/O thread must not run, and an exception that is kept keeps every frame of its traceback alive.

Of an exception group, each exception in it counts, however deep. The strictest wins: the first `DeadLetter` is the
verdict; else the policy gives up where it would on one of the others; else the longest delay that a `RetryLater` asks
for is waited for; else that of the policy.

Invariants: a description is bounded, printable, and encodable as UTF-8; making one never raises, whatever the
exception's class, text or attributes do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from reliable_mq.durations import seconds
from reliable_mq.retry import DeadLetter, RetryLater

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Failure", "Kinds", "describe", "printable", "shown"]

MESSAGE_LIMIT: Final = 512  # characters
_TYPE_LIMIT: Final = 128
_SHOWN: Final = 5  # exceptions of a group that its description shows
_NO_TEXT: Final = "(its text cannot be shown)"
_NO_NAME: Final = "(a class that cannot be named)"
_WRONG_DELAY: Final = " (its delay is no number of seconds: that of the policy counts)"
_INSIDE: Final = BaseExceptionGroup.__dict__["exceptions"]  # that a subclass may hide

#: The class of an exception, and those of the groups that it was in, from the inside out.
Kinds = tuple[type[BaseException], ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """What a handler raised.

    Attributes:
        exception_type: the class, with its module.
        exception_message: its text, printable and cut.
        at: when, in seconds since 1970.
        delay: seconds to wait for the next attempt, where the handler chose them.
        verdict: why it is to be dead-lettered now, where the handler chose that.
        kinds: the exceptions for which the policy is to decide: another attempt follows if it does after each of them.
    """

    exception_type: str
    exception_message: str
    at: float
    delay: float | None = None
    verdict: str | None = None
    kinds: tuple[Kinds, ...] = field(default=(), compare=False, repr=False)


class _Leaf(NamedTuple):
    error: BaseException
    kinds: Kinds

    def is_a(self, kind: type[BaseException]) -> bool:
        return issubclass(self.kinds[0], kind)  # not isinstance, which reads the exception's __class__


def describe(error: BaseException, at: float) -> Failure:
    """Describe what a handler raised, or returned as its verdict on an item, at ``at`` (seconds since 1970)."""
    name, text = _name(error), _text(error)
    leaves = _leaves(error)
    if leaves[0].error is not error:
        text += ": " + "; ".join(shown(leaf.error) for leaf in leaves[:_SHOWN])
        if len(leaves) > _SHOWN:
            text += f"; and {len(leaves) - _SHOWN} more"
    delays, usable = _delays(leaf.error for leaf in leaves if leaf.is_a(RetryLater))
    if not usable:
        text = text[: MESSAGE_LIMIT - len(_WRONG_DELAY)] + _WRONG_DELAY
    return Failure(
        name,
        printable(text),
        at,
        delay=max(delays, default=None),
        verdict=next((_reason(leaf.error) for leaf in leaves if leaf.is_a(DeadLetter)), None),
        kinds=tuple(leaf.kinds for leaf in leaves if not leaf.is_a(RetryLater) and not leaf.is_a(DeadLetter)),
    )


def shown(error: BaseException) -> str:
    """Name an exception, with its text, whatever is wrong with it."""
    name = _guarded(lambda: printable(type(error).__name__, _TYPE_LIMIT), _NO_NAME)
    text = _text(error)
    return printable(f"{name}: {text}") if text else name


def _leaves(error: BaseException) -> list[_Leaf]:
    """Return the exceptions of a group, in their order; of any other, itself."""
    found: list[_Leaf] = []
    waiting: list[_Leaf] = [_Leaf(error, (type(error),))]
    while waiting:
        leaf = waiting.pop()
        if leaf.is_a(BaseExceptionGroup) and not leaf.is_a(RetryLater) and not leaf.is_a(DeadLetter):
            inside: tuple[BaseException, ...] = _INSIDE.__get__(leaf.error)
            waiting += [_Leaf(one, (type(one), *leaf.kinds)) for one in reversed(inside)]
        else:
            found.append(leaf)
    return found


def _delays(errors: Iterable[BaseException]) -> tuple[list[float], bool]:
    """Return the delays that these `RetryLater` ask for, and whether all that are asked for can be used."""
    delays: list[float] = []
    usable = True
    for error in errors:
        try:
            asked = error.delay  # type: ignore[attr-defined]  # a RetryLater
            if asked is not None:
                delays.append(seconds("delay", asked))
        except BaseException:  # noqa: BLE001 -- the attribute may be anything by now
            usable = False
    return delays, usable


def _reason(error: BaseException) -> str:
    given = _guarded(lambda: printable(str(error.reason)), _NO_TEXT)  # type: ignore[attr-defined]  # a DeadLetter
    return given or _text(error) or _name(error)


def _name(error: BaseException) -> str:
    return _guarded(lambda: printable(_qualified(type(error)), _TYPE_LIMIT), _NO_NAME)


def _qualified(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _text(error: BaseException) -> str:
    return _guarded(lambda: printable(str(error)), _NO_TEXT)


def _guarded(make: Callable[[], str], instead: str) -> str:
    """Run the user's code that makes a text."""
    try:
        return make()
    except BaseException:  # noqa: BLE001 -- whatever it raises: SystemExit would end the worker
        return instead


def printable(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """Escape what does not print (control characters, line ends, lone surrogates) and cut at ``limit`` characters."""
    text = str.__str__(text)[: limit + 1]  # a subclass may change what the methods below do
    if not text.isprintable():
        text = "".join(
            char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii")
            for char in text
        )
    return text if len(text) <= limit else text[: limit - 3] + "..."
