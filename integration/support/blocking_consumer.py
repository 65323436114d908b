"""Runs `AsyncConsumer` on an event loop thread, with the methods of `Consumer`.

One test can then cover both APIs. Each method calls the method of the same name with the same arguments and waits for
the result. The handler of a test may block, so it runs on a separate thread, and the consumer gets a coroutine handler
that waits for it. A coroutine function is passed on unchanged.

An asyncio store is called on the consumer's own loop, where a blocking call would be noticed. `ends_with_its_consumer`
registers how the store is closed there.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from integration.support.blocking import Loop
from reliable_mq.aio.consumer import AsyncConsumer
from reliable_mq.engine.consumer import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliable_mq.engine.pull import PulledDelivery

_FOR_EVER = 100_000.0  # seconds


_ENDINGS: WeakKeyDictionary[Any, Callable[[], Coroutine[Any, Any, object]]] = WeakKeyDictionary()


def ends_with_its_consumer(store: Any, ending: Callable[[], Coroutine[Any, Any, object]]) -> Any:
    """Have `ending` called on the loop of the consumer that uses this asyncio store.

    `ending` closes the store. Only one consumer may use it. Returns the store.
    """
    _ENDINGS[store] = ending
    return store


async def _nothing() -> None:
    pass


class BlockingConsumer:
    """An `AsyncConsumer` on its own loop thread, with the methods of a `Consumer`.

    Attributes:
        plain: Whether handlers are passed on unchanged, so that `AsyncConsumer` calls them on its threads.
    """

    plain = False

    def __init__(self, url: Any, queue: Any, handler: Callable[[Any], object] | None = None, **arguments: Any) -> None:
        as_it_is = handler is None or self.plain or inspect.iscoroutinefunction(handler)
        self.consumer = AsyncConsumer(url, queue, handler if as_it_is else in_a_coroutine(handler), **arguments)  # type: ignore[arg-type]
        store = arguments.get("idempotency")
        self._ending = _nothing if store is None else _ENDINGS.get(store, _nothing)
        self._loop: Loop | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.consumer, name)

    def __repr__(self) -> str:
        return repr(self.consumer)

    @property
    def prefetch(self) -> int:
        return self.consumer.prefetch

    @prefetch.setter
    def prefetch(self, prefetch: int) -> None:
        self.consumer.prefetch = prefetch

    def run(self) -> None:
        try:
            self._call(self.consumer.run, _FOR_EVER)
        finally:
            self._stop()

    def connect(self) -> None:
        self._call(self.consumer.connect)

    def close(self) -> None:
        try:
            self._call(self.consumer.close)
        finally:
            self._stop()

    def __enter__(self) -> Self:
        try:
            self._call(self.consumer.__aenter__)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._call(lambda: self.consumer.__aexit__(*exc_info))  # type: ignore[arg-type]
        finally:
            self._stop()

    @contextmanager
    def get(self, *arguments: Any, **keywords: Any) -> Iterator[list[PulledDelivery]]:
        block = self.consumer.get(*arguments, **keywords)
        deliveries = self._call(block.__aenter__)
        try:
            yield deliveries
        except BaseException as error:
            if not self._call(partial(block.__aexit__, type(error), error, error.__traceback__)):
                raise
        else:
            self._call(partial(block.__aexit__, None, None, None))

    def _call(self, call: Callable[[], Coroutine[Any, Any, Any]], deadline: float | None = None) -> Any:
        if self._loop is None:
            self._loop = Loop()
        try:
            return self._loop.call(call(), *(() if deadline is None else (deadline,)))
        finally:
            if self.consumer._subscription is None or self.consumer._state is RunState.FINISHED:
                self._stop()

    def _stop(self) -> None:
        """End the loop if nothing runs on it."""
        subscription = self.consumer._subscription
        if self._loop is not None and (subscription is None or subscription.ended.is_set()):
            loop, self._loop = self._loop, None
            loop.call(self._ending())
            loop.stop()


class PlainBlockingConsumer(BlockingConsumer):
    """A `BlockingConsumer` whose plain handlers run in the consumer's own threads."""

    plain = True


def in_a_coroutine(handler: Callable[[Any], object]) -> Callable[[Any], Coroutine[Any, Any, object]]:
    """Return a coroutine function that calls `handler` on a thread and waits for it."""

    async def handle(argument: object) -> object:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[object] = loop.create_future()

        def tell(set_outcome: Callable[[Any], None], outcome: object) -> None:
            if not ended.done():  # it is done if it was cancelled
                set_outcome(outcome)

        def call() -> None:
            try:
                told = partial(tell, ended.set_result, handler(argument))
            except BaseException as error:
                told = partial(tell, ended.set_exception, error)
            if not loop.is_closed():
                loop.call_soon_threadsafe(told)

        threading.Thread(target=call, name="handler", daemon=True).start()
        return await ended

    return handle
