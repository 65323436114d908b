"""Valid handlers, and answers which show that no handler code has run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from functools import partial, wraps
from typing import Any
from unittest.mock import MagicMock

import pytest

from reliable_mq import Ack, ConfigurationError, DeadLetter, RetryLater, UsageError
from reliable_mq._util.validation import is_coroutine_function
from reliable_mq.core.consumer.handler_signature import check_answer, check_handler
from tests.hostile_exceptions import Classless


def plain(_delivery: object) -> None:
    pass


async def coroutine(_delivery: object) -> None:
    pass


def generator(_delivery: object) -> Iterator[None]:
    yield


async def async_generator(_delivery: object) -> AsyncIterator[None]:
    yield


class Plain:
    def __call__(self, _delivery: object) -> None:
        pass

    handle = generator


class Coroutine:
    async def __call__(self, _delivery: object) -> None:
        pass


class Generator:
    def __call__(self, _delivery: object) -> Iterator[None]:
        yield


def two(_delivery: object, _session: object) -> None:
    pass


def none() -> None:
    pass


@wraps(two)
def with_session(delivery: object) -> None:
    two(delivery, "a session")


@pytest.mark.parametrize(
    "handler", [plain, Plain(), print, list, iter, with_session, partial(plain), partial(two, 1), partial(Plain())]
)
def test_what_can_be_called_is_a_handler(handler: Any) -> None:
    check_handler(handler)
    assert not is_coroutine_function(handler)


@pytest.mark.parametrize("handler", [coroutine, Coroutine(), partial(coroutine), partial(partial(Coroutine()))])
def test_what_returns_a_coroutine_is_a_coroutine_function(handler: Any) -> None:
    check_handler(handler)
    assert is_coroutine_function(handler)


def test_what_cannot_be_called_is_none() -> None:
    with pytest.raises(ConfigurationError, match="handler must be callable, not 5"):
        check_handler(5)


@pytest.mark.parametrize(
    ("handler", "mistake"),
    [
        (two, "missing a required argument: '_session'"),
        (none, "too many positional arguments"),
        (partial(plain, 1), "too many positional arguments"),
        (Plain.__call__, "missing a required argument: '_delivery'"),
    ],
)
def test_a_handler_of_no_or_more_arguments_is_refused(handler: Any, mistake: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_handler(handler)
    assert str(refused.value) == f"handler cannot be called with one argument, a delivery or a batch: {mistake}"


@pytest.mark.parametrize(
    "handler", [generator, async_generator, partial(generator), Plain().handle, Generator(), partial(Generator())]
)
def test_a_generator_function_is_no_handler(handler: Any) -> None:
    with pytest.raises(ConfigurationError, match="handler is a generator function"):
        check_handler(handler)


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("answer", [5, "text", [], object(), Ack, Ack(), ValueError("no"), ValueError, [RetryLater(1)]])
def test_any_other_answer_is_none_of_our_business(answer: object, batch: bool) -> None:
    check_answer(answer, batch=batch)


class NotYet(RetryLater):
    def __init__(self) -> None:
        super().__init__(7)


@pytest.mark.parametrize("verdict", [RetryLater(1), RetryLater, DeadLetter("x"), NotYet(), NotYet], ids=repr)
def test_a_verdict_that_a_plain_handler_returns_is_raised(verdict: object) -> None:
    with pytest.raises((RetryLater, DeadLetter)) as raised:
        check_answer(verdict, batch=False)
    assert raised.value is verdict or raised.type is verdict
    check_answer(verdict, batch=True)  # accepted here, and checked elsewhere


def test_returning_dead_letter_without_a_reason_is_an_error() -> None:
    with pytest.raises(TypeError, match="reason"):
        check_answer(DeadLetter, batch=False)


@pytest.mark.parametrize("make", [coroutine, generator, async_generator])
def test_code_that_was_made_and_has_not_run_is_no_answer(make: Any) -> None:
    """The code is closed, so Python does not warn that it was never awaited."""
    with pytest.raises(UsageError, match="has not run"):
        check_answer(make(None), batch=False)


def test_the_refusal_of_a_coroutine_names_partial() -> None:
    """A lambda that calls a coroutine function is no coroutine function, and a partial of one is."""
    assert is_coroutine_function(partial(coroutine))
    with pytest.raises(UsageError, match=r"in place of a lambda, functools\.partial\(handle, \.\.\.\)"):
        check_answer(coroutine(None), batch=False)


class Later:
    def __await__(self) -> Iterator[None]:
        yield


def a_task() -> asyncio.Task[None]:
    async def made() -> asyncio.Task[None]:
        return asyncio.create_task(coroutine(None))

    return asyncio.run(made())


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(("make", "name"), [(Future, "Future"), (a_task, "Task"), (Later, "Later")])
def test_work_that_may_go_on_is_no_answer(make: Any, name: str, batch: bool) -> None:
    with pytest.raises(UsageError) as refused:
        check_answer(make(), batch=batch)
    assert str(refused.value) == (
        f"the handler returned a {name}, whose work may not have finished: call its .result(), or await it"
    )


def test_a_mock_is_no_future() -> None:
    check_answer(MagicMock(), batch=False)


def test_a_proxy_without_an_object_is_like_any_other_answer() -> None:
    """The effect has happened, and must not be repeated."""
    check_answer(Classless(), batch=False)
