"""Calls written as generators of requests, once for both APIs.

A generator yields each request, for example a query to a database, and is resumed with the reply. It ends with the
result of the call::

    rows = yield Query("SELECT ...")

Invariant: whatever is raised in place of a reply is raised at the ``yield``, including a cancellation and the exception
of a signal handler. The generator handles it, or ends with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

Request = TypeVar("Request")
T = TypeVar("T")


def drive(requests: Generator[Request, Any, T], send: Callable[[Request], Any]) -> T:
    """Send each request, resume the generator with the reply, return its result."""
    try:
        request = next(requests)
        while True:
            try:
                reply = send(request)
            except BaseException as error:  # noqa: BLE001  # the generator decides
                request = requests.throw(error)
            else:
                request = requests.send(reply)
    except StopIteration as end:
        result: T = end.value
        return result


async def drive_async(requests: Generator[Request, Any, T], send: Callable[[Request], Awaitable[Any]]) -> T:
    """Do the same as `drive`, and await each reply."""
    try:
        request = next(requests)
        while True:
            try:
                reply = await send(request)
            except BaseException as error:  # noqa: BLE001  # the generator decides
                request = requests.throw(error)
            else:
                request = requests.send(reply)
    except StopIteration as end:
        result: T = end.value
        return result
