"""What a handler may be, and what its return value means.

Calling a generator function, or a coroutine function, runs nothing of it. A verdict that is returned is meant as one
that is raised. Invariant: a delivery is never taken for handled because of either; acking it would lose it.
"""

from __future__ import annotations

import inspect
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING

from reliable_mq.errors import ConfigurationError, UsageError
from reliable_mq.retry import DeadLetter, RetryLater

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["check_answer", "check_handler", "is_coroutine_function"]


def is_coroutine_function(handler: object) -> bool:
    """Whether this is to be awaited: a coroutine function, or an object that is called as one."""
    return _is(inspect.iscoroutinefunction, handler)


def check_handler(handler: object) -> None:
    """Refuse what cannot handle anything.

    Raises:
        ConfigurationError: it cannot be called, or is a generator function.
    """
    if not callable(handler):
        raise ConfigurationError(f"handler must be callable, not {handler!r}")
    if _is(inspect.isgeneratorfunction, handler) or _is(inspect.isasyncgenfunction, handler):
        raise ConfigurationError("handler is a generator function, of which a call runs nothing: take out its yield")


def check_answer(answer: object, *, batch: bool) -> None:
    """Raise what a handler returned, if that is a verdict; refuse it where it shows that nothing was done.

    Args:
        answer: what it returned.
        batch: whether the handler takes a list; its verdicts are read elsewhere.

    Raises:
        RetryLater, DeadLetter: it is that, or that class.
        UsageError: it is a coroutine or a generator.
    """
    if not batch:
        if isinstance(answer, (RetryLater, DeadLetter)):
            raise answer
        if isinstance(answer, type) and issubclass(answer, (RetryLater, DeadLetter)):
            raise answer
    if isinstance(answer, CoroutineType):
        answer.close()  # or Python says that it was never awaited
        raise UsageError(
            "the handler returned a coroutine, of which nothing has run; define it with async def, await what it "
            "calls, and give it to an AsyncConsumer"
        )
    if isinstance(answer, (GeneratorType, AsyncGeneratorType)):
        raise UsageError("the handler returned a generator, of which nothing has run: take out its yield")


def _is(kind: Callable[[object], bool], handler: object) -> bool:
    return kind(handler) or kind(type(handler).__call__)
