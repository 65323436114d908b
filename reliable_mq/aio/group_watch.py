"""The watch over groups and over unanswered settlements in the asyncio API.

If one handler of a group runs long, a task of its own settles the results of the others meanwhile, and puts back the
deliveries that have not begun. Another task retries the settlements that the store did not answer. The timer exists
only while groups are handled or settlements have no answer.

Invariants:

- A delivery belongs to one task: to the one that handles its group, or to the one that has taken it over.
- A task that has taken over deliveries ends with the store's answer, and reports or puts back each of them, even if it
  is destroyed.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from reliable_mq._util.logs import get_logger
from reliable_mq.core.consumer.attempts import shown
from reliable_mq.core.consumer.handler import NotStarted
from reliable_mq.engine import claim_groups
from reliable_mq.engine.steps import awaiting
from reliable_mq.engine.workers import retrying_settlements

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from contextvars import Context

    from reliable_mq.aio.store_calls import StoreAdapter
    from reliable_mq.core.consumer.delivery import Delivery
    from reliable_mq.core.consumer.handler import ClaimPolicy, GroupProgress, GroupRemainder, Step
    from reliable_mq.engine.claim_groups import ClaimBatcher, Waiting
    from reliable_mq.engine.workers import ResultSink

logger = get_logger(__name__)


class GroupWatch:
    """The watch of one pool. Created on its event loop.

    Args:
        name: The name of the tasks that settle.
        tasks: The unreported deliveries of each task of the pool.
        context: The context in which tasks begin.

    Attributes:
        settling: The running tasks that settle.
        retrying: The task that retries settlements, if any.
    """

    def __init__(
        self,
        name: str,
        claiming: ClaimPolicy | None,
        store: StoreAdapter | None,
        waiting: Waiting,
        sink: ResultSink,
        tasks: dict[asyncio.Task[None], Sequence[Delivery]],
        context: Context,
    ) -> None:
        self.settling: set[asyncio.Task[None]] = set()
        self.retrying: set[asyncio.Task[None]] = set()
        self._name = name
        self._claiming = claiming
        self._store = store
        self._waiting = waiting
        self._sink = sink
        self._tasks = tasks
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._groups: dict[asyncio.Task[None], ClaimBatcher] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, task: asyncio.Task[None], groups: ClaimBatcher) -> None:
        """Watch the group that a task handles."""
        self._groups[task] = groups
        if self._timer is None:
            self._start()

    def remove(self, task: asyncio.Task[None]) -> None:
        """End the watch over the group of a task."""
        del self._groups[task]

    def stop(self) -> None:
        """End the timer, and cancel the retries."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in self.retrying:
            task.cancel()

    def _start(self) -> None:
        self._timer = self._loop.call_later(claim_groups.PATIENCE, self._check, context=self._context.copy())

    def _check(self) -> None:
        self._timer = None
        for task, groups in list(self._groups.items()):  # an eager task may add a group, or end
            if task not in self._groups:
                continue
            group = groups.overdue()
            if group is not None and (rest := group.take_over()).deliveries:
                gone = set(rest.deliveries)
                self._tasks[task] = [delivery for delivery in self._tasks[task] if delivery not in gone]
                self._create_task(self.settling, self._settle(group, rest))
        unanswered = self._claiming is not None and len(self._claiming.retries) > 0
        if unanswered and not self.retrying:
            self._create_task(self.retrying, self._retry())
        if self._groups or self.settling or unanswered:
            self._start()

    def _create_task(self, tasks: set[asyncio.Task[None]], coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine, name=self._name)
        tasks.add(task)
        task.add_done_callback(partial(self._ended, tasks))

    async def _settle(self, group: GroupProgress, rest: GroupRemainder) -> None:
        if self._claiming is None:
            raise RuntimeError("there is no store")
        await awaiting(
            claim_groups.settling_group_rest(self._claiming, group, rest, self._ask, self._waiting, self._sink)
        )

    async def _retry(self) -> None:
        if self._claiming is None or self._store is None:
            raise RuntimeError("there is no store")
        await awaiting(retrying_settlements(self._claiming, self._store.ask, self._store.rest))

    async def _ask(self, step: Step) -> Any:
        if self._store is None:
            raise RuntimeError("there is no store")
        try:
            return await self._store.ask(step)
        except asyncio.CancelledError as error:  # the pool stops, and waits no longer
            raise NotStarted from error

    def _ended(self, tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("task %s ended with %s", self._name, shown(error), exc_info=error)
