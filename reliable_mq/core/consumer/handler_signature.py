"""Checks of handlers and of their answers.

A consumer checks its handler when it is made. Otherwise each call would fail, and each message would be retried and
then dead-lettered, although nothing is wrong with the message. Of a decorated function the wrapper is checked, and not
the function in its ``__wrapped__``, because the wrapper may supply further arguments.

The mistake of some handlers shows only in their answer: a lambda that calls a coroutine function, for example.

Invariants:

- A handler is refused only if every call with a delivery would fail or run nothing. A builtin whose signature Python
  does not know is accepted.
- A delivery is never reported as handled because its handler is a generator or coroutine function, of which a call runs
  nothing, or because it returned a future whose work goes on, or a verdict instead of raising it. Acking it would lose
  the message.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from types import AsyncGeneratorType, CoroutineType, GeneratorType

from reliable_mq._util.validation import is_called_as
from reliable_mq.errors import ConfigurationError, UsageError
from reliable_mq.retry import DeadLetter, RetryLater


def check_handler(handler: object) -> None:
    """Refuse a handler that cannot handle deliveries.

    Raises:
        ConfigurationError: If the handler is not callable, is a generator function, or cannot take one argument.
    """
    if not callable(handler):
        raise ConfigurationError(f"handler must be callable, not {handler!r}")
    if is_called_as(inspect.isgeneratorfunction, handler) or is_called_as(inspect.isasyncgenfunction, handler):
        raise ConfigurationError("handler is a generator function, so a call runs nothing: remove its yield")
    try:
        signature = inspect.signature(handler, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigurationError(
            f"handler cannot be called with one argument, a delivery or a batch: {error}"
        ) from None


def check_answer(answer: object, *, batch: bool) -> None:
    """Raise a returned verdict, and refuse a value whose work is not done.

    The verdicts of a batch handler are read elsewhere.

    Raises:
        RetryLater, DeadLetter: If the value is such a verdict or its class.
        UsageError: If the value is a coroutine or a generator, or a future, task or other awaitable.
    """
    if not _shows_its_class(answer):
        return  # as any other value
    if not batch:
        if isinstance(answer, (RetryLater, DeadLetter)):
            raise answer
        if isinstance(answer, type) and issubclass(answer, (RetryLater, DeadLetter)):
            raise answer
    if isinstance(answer, CoroutineType):
        answer.close()  # otherwise Python warns that it was never awaited
        raise UsageError(
            "the handler returned a coroutine that has not run; define it with async def, await what it "
            "calls, and give it to an AsyncConsumer, or, in place of a lambda, functools.partial(handle, ...)"
        )
    if isinstance(answer, (GeneratorType, AsyncGeneratorType)):
        raise UsageError("the handler returned a generator that has not run: remove its yield")
    if isinstance(answer, Awaitable) or hasattr(type(answer), "add_done_callback"):  # of every Future; mocks have none
        raise UsageError(
            f"the handler returned a {type(answer).__name__}, whose work may not have finished: "
            "call its .result(), or await it"
        )


def _shows_its_class(answer: object) -> bool:
    """Return whether `isinstance` may be called.

    It reads ``__class__``, which fails for a lazy proxy without an object, of a web framework for example.
    """
    try:
        answer.__class__  # noqa: B018
    except Exception:  # noqa: BLE001 -- whatever making the object raises
        return False
    return True
