"""The threads that run plain handlers, on the asyncio face: those of the sync face, waited for by a task."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from reliable_mq.aio.store_calls import BlockingStore, awaits
from reliable_mq.aio.threads import Threads
from reliable_mq.connection.consuming.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reliable_mq.connection.consuming.groups import Work
    from reliable_mq.connection.consuming.workers import ResultSink
    from reliable_mq.core.delivery import Delivery
    from reliable_mq.core.handling import Claiming
    from reliable_mq.core.statistics import Histogram

__all__ = ["WorkerThreads"]


class WorkerThreads:
    """See `Workers`, whose arguments these are; the threads are started at once."""

    def __init__(
        self,
        *,
        name: str,
        count: int,
        handler: Callable[[Any], object],
        batch: bool,
        store: Any,
        claiming: Claiming | None,
        sink: ResultSink,
    ) -> None:
        self._name = name
        self._workers = Workers(
            name=name,
            count=count,
            handler=handler,
            batch=batch,
            store=BlockingStore(store) if store is not None and awaits(store) else store,
            claiming=claiming,
            sink=sink,
        )
        self._workers.start()

    def put(self, work: Iterable[Work]) -> None:
        """Hand out deliveries, or batches."""
        self._workers.put(work)

    def hold(self) -> None:
        """Begin with nothing more. Any thread."""
        self._workers.hold()

    def withdraw(self) -> list[Delivery]:
        """Take back what no handler has begun with."""
        return self._workers.withdraw()

    async def stop(self, patience: float) -> bool:
        """End the threads, each after what it runs. Waits up to ``patience`` seconds; returns whether all have ended.

        A thread cannot be cancelled: what still runs then is left to itself.
        """
        if self._workers.stop(0.0):
            return True
        thread = Threads(f"{self._name}-end", 1)
        try:
            return await thread.call(partial(self._workers.stop, max(patience, 0.1)))
        finally:
            thread.stop()

    async def tell_owed(self, timeout: float, worth_waiting: Callable[[], bool]) -> int:
        """Tell the store again what it did not answer to; see `Workers.tell_owed`."""
        thread = Threads(f"{self._name}-owed", 1)
        try:
            return await thread.call(partial(self._workers.tell_owed, timeout, worth_waiting))
        finally:
            thread.stop()

    def cancel(self) -> None:
        """Nothing: a thread cannot be cancelled."""

    def abort(self) -> None:
        """End the threads, each after what it runs. Does not wait."""
        self._workers.stop(0.0)

    @property
    def is_current(self) -> bool:
        """No: a plain handler has no task to await anything in."""
        return False

    @property
    def handler_seconds(self) -> Histogram:
        """The time that handlers took, per call."""
        return self._workers.handler_seconds
