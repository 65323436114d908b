"""Generators of requests, in both APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

import pytest

from reliable_mq._util.generators import drive, drive_async

Drive = Callable[[Generator[int, int, Any], Callable[[int], int]], Any]


def _drive_async(requests: Generator[int, int, Any], send: Callable[[int], int]) -> Any:
    async def reply(request: int) -> int:
        return send(request)

    return asyncio.run(drive_async(requests, reply))


@pytest.fixture(params=[drive, _drive_async], ids=["sync", "asyncio"])
def run(request: pytest.FixtureRequest) -> Drive:
    result: Drive = request.param
    return result


class Interruption(BaseException):
    """As raised by a signal handler."""


def refuse(error: BaseException) -> Callable[[int], int]:
    def send(request: int) -> int:
        if request == 2:
            raise error
        return 10 * request

    return send


def test_a_generator_is_resumed_with_each_reply(run: Drive) -> None:
    def requests() -> Generator[int, int, list[int]]:
        first = yield 1
        return [first, (yield first + 1)]

    assert run(requests(), lambda request: 10 * request) == [10, 110]


def test_a_generator_without_a_request_ends_at_once(run: Drive) -> None:
    def requests() -> Generator[int, int, str]:
        return "done"
        yield 1

    assert run(requests(), refuse(ValueError())) == "done"


@pytest.mark.parametrize("error", [ValueError(), Interruption()])
def test_a_failed_request_raises_in_the_generator(run: Drive, error: BaseException) -> None:
    """Which may continue with another request."""

    def requests() -> Generator[int, int, tuple[BaseException, int]]:
        try:
            yield 2
        except (ValueError, Interruption) as caught:
            return caught, (yield 3)
        raise AssertionError

    assert run(requests(), refuse(error)) == (error, 30)


@pytest.mark.parametrize("error", [ValueError(), Interruption()])
def test_an_error_that_a_generator_passes_on_is_raised(run: Drive, error: BaseException) -> None:
    def requests() -> Generator[int, int, None]:
        yield 1
        yield 2

    with pytest.raises(type(error)) as raised:
        run(requests(), refuse(error))
    assert raised.value is error
