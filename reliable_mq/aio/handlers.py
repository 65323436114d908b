"""The tasks and threads that run handlers in the asyncio API.

One task exists for each coroutine handler that may run at a time, not for each delivery. A task handles one delivery
after the other, and is started when there is work for it. Plain handlers run on the threads of the sync API, and a task
waits for their end.

Invariants:

- A delivery is with one task, and has exactly one result or is put back. A delivery that no handler has started can be
  recalled. Deliveries are started in the order in which they were put. No exception affects another delivery.
- A handler whose task is cancelled has not failed. A handler that raises ``CancelledError`` by itself has failed,
  because a message that always causes this would be delivered again forever. The same applies to ``GeneratorExit``,
  which also ends a task that is destroyed.
- Handlers that never wait for anything yield the loop to others after `_SLICE` seconds. After `stop` no task is left,
  unless a handler refuses to be cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from reliable_mq._util.logs import get_logger
from reliable_mq._util.threads import call_on_thread
from reliable_mq.aio.group_watch import GroupWatch
from reliable_mq.aio.loop import resolve
from reliable_mq.aio.store_calls import BlockingStore, StoreAdapter, awaits
from reliable_mq.core.consumer.attempts import shown
from reliable_mq.core.consumer.delivery import Delivery, message_names
from reliable_mq.core.consumer.dispatch import deliveries_of, verdicts
from reliable_mq.core.consumer.handler import (
    NotStarted,
    RunHandler,
    Skipped,
    SkipReason,
    failure_of_handler,
    handling,
)
from reliable_mq.core.consumer.handler_signature import check_answer
from reliable_mq.core.statistics import Histogram
from reliable_mq.engine.claim_groups import ClaimBatcher
from reliable_mq.engine.steps import awaiting
from reliable_mq.engine.workers import (
    CHECK_INTERVAL,
    WorkerPool,
    all_failed,
    all_lost,
    batch_results,
    retrying_settlements,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence
    from contextvars import Context

    from reliable_mq.core.consumer.dispatch import Work
    from reliable_mq.core.consumer.handler import ClaimPolicy, Handling, Result
    from reliable_mq.engine.workers import ResultSink

logger = get_logger(__name__)

_SLICE = 0.005  # seconds that one task may run handlers before it yields the loop
_CANCEL_GRACE = 5.0  # seconds for a cancelled handler to end
_CANCELLED = "its handler was cancelled"


class TaskPool:
    """A pool of tasks that run coroutine handlers on the current event loop.

    A task runs one handler after the other, until a handler leaves context variables behind. Then another task
    continues, so that no handler sees the variables of an earlier delivery.

    The arguments are those of `WorkerPool`, for tasks in place of threads and a coroutine function as the handler.

    Attributes:
        items: The work that no task has started.
        epoch: A number that grows when the work is recalled or no more is started.
        handler_seconds: The time that handlers took per call, including waiting.
    """

    def __init__(
        self,
        *,
        name: str,
        count: int,
        handler: Callable[[Any], Any],
        batch: bool,
        store: Any,
        claiming: ClaimPolicy | None,
        sink: ResultSink,
    ) -> None:
        self.items: deque[Work] = deque()
        self.epoch = 0
        self.handler_seconds = Histogram()
        self._name = name
        self._count = count
        self._handler = handler
        self._batch = batch
        self._claiming = claiming
        if store is None or claiming is None:
            self._store = None
        else:
            self._store = StoreAdapter(store, f"{name}-store", count + 1)  # one thread more, for the retries
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()  # the context in which each task begins
        self._tasks: dict[asyncio.Task[None], Sequence[Delivery]] = {}  # with the unreported deliveries of each task
        self._watch = GroupWatch(f"{name}-settling", claiming, self._store, self, sink, self._tasks, self._context)
        self._idle: deque[asyncio.Future[None]] = deque()
        self._stopped_starting = False  # whether no more handlers are started
        self._closed = False
        self._numbers = itertools.count(1)

    def start(self) -> None:
        """Do nothing, because tasks are started when there is work for them."""

    def put(self, work: Iterable[Work]) -> None:
        """Queue deliveries or batches for handlers."""
        self.items.extend(work)
        self._fill()

    def put_back(self, deliveries: Sequence[Delivery], epoch: int) -> bool:
        """Put deliveries in front again, in order. Return False if they are recalled."""
        if epoch != self.epoch:
            return False
        self.items.extendleft(reversed(deliveries))
        self._fill()
        return True

    def stop_starting(self) -> None:
        """Start no more handlers. Waiting work can be recalled. Thread-safe."""
        self._stopped_starting = True
        self.epoch += 1

    def recall(self) -> list[Delivery]:
        """Return the deliveries that no handler has started. Tasks return their own."""
        self.epoch += 1
        recalled = [delivery for item in self.items for delivery in deliveries_of(item)]
        self.items.clear()
        return recalled

    def cancel(self) -> None:
        """Cancel the running handlers. Their deliveries are requeued."""
        for task in self._tasks:
            task.cancel()

    async def stop(self, patience: float) -> bool:
        """End the tasks, each after its handler. Cancel them after ``patience`` seconds.

        Returns:
            Whether all tasks have ended. A handler may refuse to be cancelled.
        """
        self._closed = True
        for idle in self._idle:
            resolve(idle, None)
        await self._wait_ended(patience)
        self.cancel()
        await self._wait_ended(_CANCEL_GRACE)
        self._watch.stop()
        if self._store is not None:
            self._store.abandon()
            await self._wait_ended(_CANCEL_GRACE, *self._watch.retrying)
        return not self._tasks and not self._watch.settling

    async def _wait_ended(self, patience: float, *others: asyncio.Task[None]) -> None:
        tasks = [*self._tasks, *self._watch.settling, *others]
        if tasks and patience > 0:
            await asyncio.wait(tasks, timeout=patience)

    async def retry_settlements(self, timeout: float, worth_waiting: Callable[[], bool]) -> int:
        """Retry settlements after `stop`, like `WorkerPool.retry_settlements`."""
        if self._store is None or self._claiming is None or not self._claiming.retries:
            return 0
        deadline = time.monotonic() + timeout
        retries = awaiting(retrying_settlements(self._claiming, self._store.ask, self._store.rest))
        task = self._loop.create_task(retries, name=f"{self._name}-settlements")
        try:
            while not task.done() and (left := deadline - time.monotonic()) > 0 and worth_waiting():
                await asyncio.wait([task], timeout=min(left, CHECK_INTERVAL))
        finally:
            task.cancel()
            self._store.abandon()
            await asyncio.wait([task], timeout=_CANCEL_GRACE)
        return len(self._claiming.retries)

    def abort(self) -> None:
        """Cancel all tasks without waiting."""
        self._closed = True
        self.cancel()
        self._watch.stop()
        if self._store is not None:
            self._store.abandon()

    @property
    def is_current(self) -> bool:
        """Whether the caller is a handler in one of these tasks."""
        return asyncio.current_task() in self._tasks

    def _fill(self) -> None:
        """Start or wake as many tasks as there is work for."""
        missing = 0 if self._stopped_starting else len(self.items)
        while missing and self._idle:
            resolve(self._idle.popleft(), None)
            missing -= 1
        while missing and len(self._tasks) < self._count and not self._closed:
            self._start(self._run())
            missing -= 1

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        name = f"{self._name}-handler-{next(self._numbers)}"
        task = self._context.copy().run(partial(self._loop.create_task, coroutine, name=name))
        self._tasks.setdefault(task, ())  # an eager task has run already
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        unreported = self._tasks.pop(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # not the handler's, as those are results
            if unreported:
                self._sink.report(all_lost(list(unreported)))
            logger.error(
                "a task of consumer %r ended with %s and is replaced; its %d deliveries failed",
                self._name,
                shown(error),
                len(unreported),
                exc_info=error,
            )
        if self.items and not self._closed:  # it was cancelled, or its context has changed; others take over
            self._loop.call_soon(self._fill)

    # -- one task --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a coroutine runs in a task")
        context = copy_context()
        groups = ClaimBatcher(self, 1 / self._count)
        items, report = self.items, self._sink.report
        handle = self._handle if self._store is None else self._handle_claimed
        resumed = time.perf_counter()
        try:
            while True:
                if self._stopped_starting or not items:
                    if self._closed:
                        return
                    await self._wait()
                    resumed = time.perf_counter()
                    continue
                item = items.popleft()
                self._tasks[task] = deliveries_of(item)
                results = await handle(item, task, groups)
                self._tasks[task] = ()
                if results:
                    report(results)
                if task.cancelling() or _has_changed(context):
                    return
                if time.perf_counter() - resumed > _SLICE:
                    await asyncio.sleep(0)
                    resumed = time.perf_counter()
        except (asyncio.CancelledError, GeneratorExit):  # it held no deliveries
            return

    async def _wait(self) -> None:
        idle = self._loop.create_future()
        self._idle.append(idle)
        try:
            await idle
        except asyncio.CancelledError:
            if idle in self._idle:
                self._idle.remove(idle)
            raise

    async def _handle(self, item: Work, task: asyncio.Task[None], _groups: ClaimBatcher) -> Sequence[Result]:
        """Call the handler without a store, as `handling` does step by step."""
        started = time.perf_counter()
        try:
            if isinstance(item, Delivery):
                answer = await self._handler(item)
                if answer is not None:
                    check_answer(answer, batch=False)
                return [item]
            given = list(item)
            answer = await self._handler(given)
            if answer is not None:
                check_answer(answer, batch=True)
            found = verdicts(answer, item, given)
        except asyncio.CancelledError as error:
            if not task.cancelling():  # the handler awaited a cancelled task
                return all_failed(deliveries_of(item), error)
            return [Skipped(delivery, SkipReason.CANCELLED, _CANCELLED) for delivery in deliveries_of(item)]
        except KeyboardInterrupt as error:
            detail = self._interrupted(error)
            return [Skipped(delivery, SkipReason.CANCELLED, detail) for delivery in deliveries_of(item)]
        except GeneratorExit as error:  # the handler's own, or the loop is gone and the task is destroyed
            self._sink.report(all_failed(deliveries_of(item), error))
            raise
        except BaseException as error:  # noqa: BLE001  # SystemExit in a handler is a failed attempt, too
            return all_failed(deliveries_of(item), error)
        finally:
            self.handler_seconds.observe(time.perf_counter() - started)
        return batch_results(found)

    async def _handle_claimed(self, item: Work, task: asyncio.Task[None], groups: ClaimBatcher) -> Sequence[Result]:
        """Carry out the steps of `handling` with a store."""
        self._tasks[task] = deliveries = groups.take(item)
        steps = handling(
            deliveries, batch=self._batch, claiming=self._claiming, wall_clock=time.time, progress=groups.progress
        )
        return await self._carry_out_all(task, steps, groups, None)

    async def _resume(
        self, steps: Handling, groups: ClaimBatcher, failure: BaseException, deliveries: Sequence[Delivery]
    ) -> None:
        """Continue after a handler that raised ``failure``, which ended its task."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a coroutine runs in a task")
        self._tasks[task] = deliveries
        self._sink.report(await self._carry_out_all(task, steps, groups, failure))
        self._tasks[task] = ()

    async def _carry_out_all(
        self, task: asyncio.Task[None], steps: Handling, groups: ClaimBatcher, failure: BaseException | None
    ) -> Sequence[Result]:
        """Carry out steps. The first one follows a ``failure`` of the handler, if any.

        Returns:
            The results to report.
        """
        cancelled: list[Delivery] = []
        self._watch.add(task, groups)
        try:
            results = await self._carry_out(task, steps, groups, cancelled, failure)
        except GeneratorExit as error:
            if self._tasks[task]:  # no other task continues with them
                self._sink.report(all_failed(list(self._tasks[task]), error))
            raise
        except KeyboardInterrupt as error:
            detail = self._interrupted(error)
            return [Skipped(delivery, SkipReason.CANCELLED, detail) for delivery in self._tasks[task]]
        except BaseException as error:
            deliveries = list(self._tasks[task])
            logger.exception("handling of %s failed outside the handler", message_names(deliveries))
            return all_failed(deliveries, error)
        finally:
            self._watch.remove(task)
            if self._tasks[task]:
                steps.close()
        self._tasks[task] = ()
        begun, left = groups.end([one for one in results if not _of(one, cancelled)])
        if left:
            self._sink.put_back(left)
        return [*begun, *(Skipped(delivery, SkipReason.CANCELLED, _CANCELLED) for delivery in cancelled)]

    async def _carry_out(
        self,
        task: asyncio.Task[None],
        steps: Handling,
        groups: ClaimBatcher,
        cancelled: list[Delivery],
        failure: BaseException | None,
    ) -> list[Result]:
        """Carry out steps to their end, and collect deliveries with a cancelled handler."""
        store = self._store
        if store is None:
            raise RuntimeError("there is no store")
        context = copy_context()
        try:
            step = next(steps) if failure is None else steps.throw(failure)
            while True:
                try:
                    answer: object
                    if not isinstance(step, RunHandler):
                        answer = await store.ask(step)
                    elif cancelled or task.cancelling() or not _may_begin(groups, context):
                        raise NotStarted  # noqa: TRY301
                    else:
                        answer = await self._call(step.argument)
                except asyncio.CancelledError as error:
                    if isinstance(step, RunHandler):
                        if not task.cancelling() and type(error) is not _Interrupted:
                            step = steps.throw(error)  # the handler awaited a cancelled task
                            continue
                        cancelled += deliveries_of(step.argument)
                    step = steps.throw(NotStarted())
                except GeneratorExit as error:
                    # The handler's own, or that of a future that it awaited, which was thrown into this task, too.
                    # After that this task must not await, so another task calls the store.
                    if isinstance(step, RunHandler) and _runs(task):
                        deliveries, self._tasks[task] = self._tasks[task], ()
                        self._start(self._resume(steps, groups, failure_of_handler(error), deliveries))
                    raise
                except BaseException as error:  # noqa: BLE001  # the generator decides
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as stop:
            results: list[Result] = stop.value
            return results

    async def _call(self, argument: Work) -> object:
        started = time.perf_counter()
        try:
            answer = await self._handler(argument)
            if answer is not None:
                check_answer(answer, batch=isinstance(argument, list))
        except KeyboardInterrupt as error:
            raise _Interrupted(self._interrupted(error)) from error
        finally:
            self.handler_seconds.observe(time.perf_counter() - started)
        return answer

    def _interrupted(self, error: KeyboardInterrupt) -> str:
        """Raise the program's interrupt from its loop, as it is not for the handler.

        It is raised once for any number of interrupted handlers, because a second one would interrupt the end of the
        program.
        """
        if self._loop not in _interrupted_loops:
            _interrupted_loops.add(self._loop)
            self._loop.call_soon(_raise, self._loop, error)
        return _CANCELLED


class _Interrupted(asyncio.CancelledError):
    """The end of a handler by ``KeyboardInterrupt``, which was for the program."""


def _runs(task: asyncio.Task[None]) -> bool:
    """Whether a task is running.

    A task that is destroyed after its loop is gone gets a ``GeneratorExit`` while it waits.
    """
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no loop runs
        return False


def _may_begin(groups: ClaimBatcher, context: Context) -> bool:
    return groups.may_begin(time.perf_counter()) and not _has_changed(context)


def _has_changed(context: Context) -> bool:
    """Return whether a handler has changed the context of this task."""
    try:
        return copy_context() != context
    except Exception:  # noqa: BLE001  # the values of variables cannot be compared
        return True


def _of(result: Result, deliveries: list[Delivery]) -> bool:
    return isinstance(result, Skipped) and result.reason is SkipReason.NOT_BEGUN and result.delivery in deliveries


_interrupted_loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()  # loops whose `_raise` is pending


def _raise(loop: asyncio.AbstractEventLoop, error: BaseException) -> None:
    _interrupted_loops.discard(loop)
    raise error


class ThreadPool:
    """A pool that runs plain handlers on the threads of a `WorkerPool`.

    It has the same arguments, and ``store`` may be an `AsyncIdempotencyStore`.
    """

    def __init__(self, *, name: str, store: Any, **arguments: Any) -> None:
        blocking = BlockingStore(store) if store is not None and awaits(store) else store
        self._name = name
        self._workers = WorkerPool(name=name, store=blocking, **arguments)

    def start(self) -> None:
        self._workers.start()

    def put(self, work: Iterable[Work]) -> None:
        self._workers.put(work)

    def stop_starting(self) -> None:
        self._workers.stop_starting()

    def recall(self) -> list[Delivery]:
        return self._workers.recall()

    async def stop(self, patience: float) -> bool:
        """End the threads, each after its handler. Return whether all have ended in time.

        A thread cannot be cancelled. A handler that still runs after ``patience`` seconds is left running.
        """
        if self._workers.stop(0.0):
            return True
        return await call_on_thread(f"{self._name}-end", partial(self._workers.stop, max(patience, 0.1)))

    async def retry_settlements(self, timeout: float, worth_waiting: Callable[[], bool]) -> int:
        """Retry settlements after `stop`, like `WorkerPool.retry_settlements`."""
        retry = partial(self._workers.retry_settlements, timeout, worth_waiting)
        return await call_on_thread(f"{self._name}-settlements", retry)

    def cancel(self) -> None:
        """Do nothing, because a thread cannot be cancelled."""

    def abort(self) -> None:
        self._workers.abort()

    @property
    def is_current(self) -> bool:
        """False, because a plain handler has no task that could await anything."""
        return False

    @property
    def handler_seconds(self) -> Histogram:
        return self._workers.handler_seconds
