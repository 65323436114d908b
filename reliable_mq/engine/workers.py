"""The threads that run handlers.

An exception from an unexpected place (sent by another thread, no memory) is logged, and the deliveries of the worker
have failed. The worker continues, on another thread if necessary.

With a store, deliveries are claimed in groups (`reliable_mq.engine.claim_groups`). One more thread takes over
from groups of which one handler runs long. While settlements have no answer, another thread retries them.

Invariants:

- A delivery is with one worker, and has exactly one result or is put back. A delivery that no handler has started can
  be recalled. Deliveries are started in the order in which they were put.
- No exception ends a worker or affects another delivery. No lock is held while a handler runs. A batch handler gets its
  own list.
- A child that a handler forks ends with the handler. It settles nothing and handles nothing else.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from reliable_mq._util.logs import get_logger
from reliable_mq._util.threads import Condition, DaemonThread, InterruptibleEvent, start_daemon
from reliable_mq.core.consumer.attempts import Failure, describe, shown
from reliable_mq.core.consumer.delivery import Delivery, message_names
from reliable_mq.core.consumer.dispatch import Work, deliveries_of, verdicts
from reliable_mq.core.consumer.handler import (
    ClaimKeys,
    Complete,
    Failed,
    NotStarted,
    Release,
    RunHandler,
    failure_of_handler,
    handling,
    settling,
)
from reliable_mq.core.consumer.handler_signature import check_answer
from reliable_mq.core.statistics import Histogram
from reliable_mq.engine import claim_groups
from reliable_mq.engine.claim_groups import ClaimBatcher, settling_group_rest
from reliable_mq.engine.steps import blocking, calling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reliable_mq.core.consumer.handler import ClaimPolicy, GroupProgress, Handling, Result, Step
    from reliable_mq.engine.steps import Steps
    from reliable_mq.stores import IdempotencyStore

logger = get_logger(__name__)

UNANSWERED = (
    "consumer %r: the idempotency store did not answer to %d settlements: these messages wait until their leases end, "
    "and one whose handler has returned is handled again then"
)
CHECK_INTERVAL = 0.1  # seconds between checks whether to keep waiting for the store
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between retries of settlements: the first and the longest
_LOST = "the worker that called its handler was ended"


class ResultSink(Protocol):
    """A sink for the results of workers. Thread-safe."""

    def report(self, results: Sequence[Result]) -> None:
        """Accept results."""

    def put_back(self, deliveries: Sequence[Delivery]) -> None:
        """Accept recalled deliveries that no handler has started."""


class WorkerPool:
    """A pool of threads that run handlers. Queuing and recalling are thread-safe.

    Args:
        name: The name of the threads.
        count: The number of threads.
        handler: The user's handler.
        batch: Whether the handler takes a list of deliveries.
        store: The store to claim in, used with ``claiming``. None makes no claims.
        claiming: The policy for claiming deliveries.
        sink: The sink for results.
    """

    def __init__(
        self,
        *,
        name: str,
        count: int,
        handler: Callable[[Any], object],
        batch: bool,
        store: IdempotencyStore | None,
        claiming: ClaimPolicy | None,
        sink: ResultSink,
    ) -> None:
        self._waiting = _WaitingWork()
        self._watching: list[threading.Thread] = []
        if store is None or claiming is None:
            new_worker: Callable[[], _Worker] = partial(_Worker, handler, batch, self._waiting, sink)
        else:
            new_worker = partial(
                _ClaimingWorker, handler, batch, self._waiting, sink, store=store, claiming=claiming, share=1 / count
            )
            self._watching.append(DaemonThread(f"{name}-watch", self._watch, claiming))
        self._name = name
        self._sink = sink
        self._store = store
        self._claiming = claiming
        self._workers = [new_worker() for _ in range(count)]
        self._threads = [self._new_thread(number) for number in range(count)]
        self._working = set(range(count))  # numbers of workers that have not ended
        self._over = InterruptibleEvent()  # all workers have ended
        self._retrying: threading.Thread | None = None

    def start(self) -> None:
        """Start the threads."""
        for thread in [*self._threads, *self._watching]:
            thread.start()

    def put(self, work: Iterable[Work]) -> None:
        """Queue deliveries or batches for handlers. Does not block."""
        self._waiting.put(work)

    def stop_starting(self) -> None:
        """Start no more handlers. Waiting and later work can be recalled. Thread-safe."""
        self._waiting.stop_starting()

    def recall(self) -> list[Delivery]:
        """Return the deliveries that no handler has started. Workers return their own."""
        return [delivery for item in self._waiting.recall() for delivery in deliveries_of(item)]

    def stop(self, timeout: float) -> bool:
        """End the threads, each after its handler. Return whether all have ended in time."""
        self._waiting.close()
        deadline = time.monotonic() + timeout
        for threads in (self._threads, self._watching):
            for number in range(len(threads)):
                thread = threads[number]
                if thread is not threading.current_thread() and thread.ident is not None:
                    thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in [*self._threads, *self._watching])

    def abort(self) -> None:
        """End the threads, each after its handler. Does not wait."""
        self._waiting.close()

    def retry_settlements(self, timeout: float, worth_waiting: Callable[[], bool]) -> int:
        """Retry settlements after `stop`. Return the number still without an answer."""
        claiming = self._claiming
        if claiming is None or not claiming.retries:
            return 0
        deadline = time.monotonic() + timeout
        over = InterruptibleEvent()

        def rest(seconds: float) -> bool:
            left = deadline - time.monotonic()
            time.sleep(max(min(seconds, left), 0.0))
            return left <= seconds or not worth_waiting()

        try:
            thread = start_daemon(f"{self._name}-settlements", self._retry_settlements, claiming, over.wait)
        except RuntimeError:  # an interpreter that exits refuses the thread
            self._retry_settlements(claiming, rest)
            return len(claiming.retries)
        while thread.is_alive() and (left := deadline - time.monotonic()) > 0 and worth_waiting():
            thread.join(min(left, CHECK_INTERVAL))
        over.set()
        return len(claiming.retries)

    def _retry_settlements(self, claiming: ClaimPolicy, rest: Callable[[float], bool]) -> None:
        blocking(retrying_settlements(claiming, self._ask, rest))

    def _ask(self, step: Step) -> Any:
        return store_call(self._store, step)()

    @property
    def is_current(self) -> bool:
        """Whether the caller is a handler on one of these threads."""
        return threading.current_thread() in self._threads

    @property
    def handler_seconds(self) -> Histogram:
        """The run time of handlers, per call."""
        total = Histogram()
        for worker in self._workers:
            total.add(worker.seconds)
        return total

    def _new_thread(self, number: int) -> threading.Thread:
        return DaemonThread(f"{self._name}-worker-{number}", self._work, number)

    def _work(self, number: int) -> None:
        worker = self._workers[number]
        ended = False
        try:
            while not ended:
                try:
                    worker.run()
                    ended = True
                except BaseException as error:  # noqa: BLE001  # not the handler's: those are results
                    self._recover(worker, error)
        finally:
            if not ended:  # `_recover` was interrupted as well
                self._threads[number] = self._new_thread(number)
                self._threads[number].start()
            else:
                self._working.discard(number)
                if not self._working:
                    self._over.set()

    def _recover(self, worker: _Worker, error: BaseException) -> None:
        """Continue after an exception that no handler raised. The deliveries have failed."""
        deliveries = worker.abandon()
        if deliveries:
            self._sink.report(all_lost(deliveries))
        logger.error(
            "a worker of consumer %r ended with %s and is replaced; its %d deliveries failed",
            self._name,
            shown(error),
            len(deliveries),
            exc_info=error,
        )

    def _watch(self, claiming: ClaimPolicy) -> None:
        """Take over from groups of which one handler runs long, and retry settlements."""
        checks = [partial(self._retry_unanswered, claiming)]
        checks += [partial(self._settle_overdue, claiming, worker) for worker in self._workers]
        while not self._over.wait(claim_groups.PATIENCE):
            for check in checks:
                try:
                    check()
                except BaseException:  # not the handler's, as for the workers
                    logger.exception("failed to settle the results of a group of consumer %r", self._name)

    def _retry_unanswered(self, claiming: ClaimPolicy) -> None:
        """Retry settlements on another thread, so that they delay no take-over."""
        if claiming.retries and not (self._retrying and self._retrying.is_alive()):
            name = f"{self._name}-settlements"
            with suppress(RuntimeError):  # no thread can be started now
                self._retrying = start_daemon(name, self._retry_settlements, claiming, self._over.wait)

    def _settle_overdue(self, claiming: ClaimPolicy, worker: _Worker) -> None:
        group = worker.overdue()
        if group is not None and (rest := group.take_over()).deliveries:
            blocking(settling_group_rest(claiming, group, rest, self._ask, self._waiting, self._sink))


class _WaitingWork:
    """The work that no worker has. Taking it needs no lock. A recall ends an epoch."""

    def __init__(self) -> None:
        self.items: deque[Work] = deque()
        self.epoch = 0
        self._changed = Condition()  # a signal handler may interrupt the stopping thread
        self._lock = self._changed.lock
        self._idle = 0
        self._closed = False
        self._unstarted: deque[Work] | None = None  # work that must not be started

    def put(self, work: Iterable[Work]) -> None:
        with self._lock:
            (self.items if self._unstarted is None else self._unstarted).extend(work)
            self._notify()

    def put_back(self, deliveries: Sequence[Delivery], epoch: int) -> bool:
        """Put deliveries in front again, in order. Return False if they are recalled."""
        with self._lock:
            if epoch != self.epoch:
                return False
            self.items.extendleft(reversed(deliveries))
            self._notify()
            return True

    def stop_starting(self) -> None:
        with self._lock:
            if self._unstarted is None:
                self._unstarted = deque(self._take_all())

    def recall(self) -> list[Work]:
        with self._lock:
            unstarted, self._unstarted = self._unstarted, None if self._unstarted is None else deque()
            return [*(unstarted or ()), *self._take_all()]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def wait(self) -> bool:
        """Wait for work. Return False if there is none and the queue is closed."""
        with self._lock:
            while not self.items:
                if self._closed:
                    return False
                self._idle += 1
                try:
                    self._changed.wait()
                finally:
                    self._idle -= 1
        return True

    def _take_all(self) -> list[Work]:
        """Take out all work, and end the epoch. The lock is held."""
        self.epoch += 1
        items: list[Work] = []
        while True:
            try:
                items.append(self.items.popleft())
            except IndexError:
                return items

    def _notify(self) -> None:
        if self._idle:
            self._changed.notify(min(self._idle, len(self.items)))


class _Worker:
    """The loop of one thread.

    Attributes:
        seconds: The run time of the handler, per call.
        unreported: The deliveries that are not reported yet.
    """

    def __init__(self, handler: Callable[[Any], object], batch: bool, waiting: _WaitingWork, sink: ResultSink) -> None:
        self.seconds = Histogram()
        self.unreported: Work | tuple[()] = ()
        self._handler = handler
        self._batch = batch
        self._waiting = waiting
        self._sink = sink

    def run(self) -> None:
        items, sink = self._waiting.items, self._sink
        while True:
            try:
                item = items.popleft()
            except IndexError:
                if not self._waiting.wait():
                    return
                continue
            self.unreported = item
            results = self._handle(item)
            self.unreported = ()
            if results:  # otherwise another thread has taken them over
                sink.report(results)

    def abandon(self) -> list[Delivery]:
        """Return the deliveries that are not reported yet. They are not reported here."""
        unreported, self.unreported = self.unreported, ()
        return [unreported] if isinstance(unreported, Delivery) else list(unreported)

    def overdue(self) -> GroupProgress | None:
        """Return the group that has been running for long, if any. Thread-safe."""
        return None

    def _handle(self, item: Work) -> Sequence[Result]:
        """Call the handler without a store, as `handling` does step by step."""
        deliveries = [item] if isinstance(item, Delivery) else item
        started = time.perf_counter()
        try:
            if isinstance(item, Delivery):
                call_handler(self._handler, item)
                return deliveries
            given = list(item)
            found = verdicts(call_handler(self._handler, given), item, given)
        except BaseException as error:  # noqa: BLE001  # SystemExit in a handler is a failed attempt, too
            return all_failed(deliveries, error)
        finally:
            self.seconds.observe(time.perf_counter() - started)
        return batch_results(found)


class _ClaimingWorker(_Worker):
    """A worker that carries out the steps of `handling` with a store."""

    def __init__(
        self,
        handler: Callable[[Any], object],
        batch: bool,
        waiting: _WaitingWork,
        sink: ResultSink,
        *,
        store: IdempotencyStore,
        claiming: ClaimPolicy,
        share: float,
    ) -> None:
        super().__init__(handler, batch, waiting, sink)
        self._store = store
        self._claiming = claiming
        self._groups = ClaimBatcher(waiting, share)

    def _handle(self, item: Work) -> Sequence[Result]:
        self.unreported = deliveries = self._groups.take(item)
        try:
            results = self._run(
                handling(
                    deliveries,
                    batch=self._batch,
                    claiming=self._claiming,
                    wall_clock=time.time,
                    progress=self._groups.progress,
                )
            )
        except BaseException as error:  # from a store or key function that ends its thread
            logger.exception("handling of %s failed outside the handler", message_names(deliveries))
            self.unreported = deliveries = self._groups.abandon(deliveries)
            return all_failed(deliveries, error) if deliveries else []
        self.unreported = ()
        begun, left = self._groups.end(results)
        if left:
            self._sink.put_back(left)
        return begun

    def abandon(self) -> list[Delivery]:
        return self._groups.abandon(super().abandon())

    def overdue(self) -> GroupProgress | None:
        return None if self._batch else self._groups.overdue()  # a batch is handled by one call

    def _run(self, steps: Handling) -> list[Result]:
        clock, may_begin, handler = time.perf_counter, self._groups.may_begin, self._handler
        seconds: list[float] = []
        now = clock()
        try:
            step = next(steps)
            while True:
                try:
                    if type(step) is not RunHandler:
                        answer = store_call(self._store, step)()
                        now = clock()
                    elif may_begin(now):  # most frequent by far: reads the clock once per delivery
                        started = now
                        try:
                            answer = call_handler(handler, step.argument)
                        finally:
                            now = clock()
                            seconds.append(now - started)
                    else:
                        raise NotStarted  # noqa: TRY301
                except BaseException as error:  # noqa: BLE001  # the generator decides
                    step = steps.throw(failure_of_handler(error) if type(step) is RunHandler else error)
                else:
                    step = steps.send(answer)
        except StopIteration as stop:
            results: list[Result] = stop.value
            return results
        finally:
            if seconds:
                self.seconds.observe_all(seconds)


def store_call(store: Any, step: Step) -> Callable[[], Any]:
    """Return the store call that carries out a step of `handling`."""
    if isinstance(step, ClaimKeys):
        return partial(store.claim_many, step.keys, step.lease)
    if isinstance(step, Complete):
        return partial(store.complete_many, step.claims)
    assert isinstance(step, Release)  # noqa: S101  # there is no other
    return partial(store.release_many, step.claims, failed=step.failed)


def retrying_settlements(
    claiming: ClaimPolicy, ask: Callable[[Step], Any], rest: Callable[[float], Any]
) -> Steps[None]:
    """Retry settlements until the store has answered all of them.

    Args:
        claiming: The policy that has the settlements.
        ask: A callable that carries out a step with the store.
        rest: A callable that waits for a number of seconds and returns whether to end.
    """
    pause = _FIRST_PAUSE
    while True:
        yield from calling(settling(claiming), ask)
        over = not claiming.retries or (yield rest(pause))
        if over:
            return
        pause = min(2 * pause, _LONGEST_PAUSE)


def call_handler(handler: Callable[[Any], object], argument: Work) -> object:
    """Call a plain handler in its own context, so that it leaves no variable behind.

    Raises:
        RetryLater, DeadLetter: If the handler returned that for a single delivery.
        UsageError: If the handler returned a coroutine, a generator or a future, whose work may not be done.
    """
    process = os.getpid()
    try:
        answer = copy_context().run(handler, argument)
    except BaseException as error:
        if os.getpid() != process:
            _end_child(error)
        raise
    if os.getpid() != process:
        _end_child(None)
    if answer is not None:
        check_answer(answer, batch=isinstance(argument, list))
    return answer


def _end_child(error: BaseException | None) -> None:
    """End a forked child, whose threads and connections are the parent's."""
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        os._exit((error.code or 0) & 0xFF)  # as sys.exit() does; a larger number would be an OverflowError here
    if error is not None:
        logger.error("a child process that a handler forked ended with %s", shown(error), exc_info=error)
    os._exit(0 if error is None else 1)


def batch_results(found: Iterable[tuple[Delivery, Exception | None]]) -> list[Result]:
    """Return the results of a batch from the verdicts of its handler."""
    return [
        delivery if verdict is None else Failed(delivery, describe(verdict, time.time())) for delivery, verdict in found
    ]


def all_failed(deliveries: list[Delivery], error: BaseException) -> list[Result]:
    """Return a failure by ``error`` for each delivery of a handler call."""
    failure = describe(error, time.time())
    return [Failed(delivery, failure, alone=len(deliveries) == 1) for delivery in deliveries]


def all_lost(deliveries: list[Delivery]) -> list[Result]:
    """Return failures for deliveries of an ended worker or task. Calls no user code."""
    failure = Failure("RuntimeError", _LOST, time.time())
    return [Failed(delivery, failure, alone=len(deliveries) == 1) for delivery in deliveries]
