"""Tasks for coroutine handlers: their deliveries, order, and results."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar, copy_context
from typing import Any

import pytest

from reliable_mq import Ack, DeadLetter, RetryLater
from reliable_mq.aio.group_watch import GroupWatch
from reliable_mq.aio.handlers import TaskPool
from reliable_mq.aio.store_calls import BlockingStore
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.handler import ClaimPolicy, Failed, Result, Skipped, SkipReason
from reliable_mq.core.idempotency import Claim, ClaimStatus
from reliable_mq.engine import claim_groups
from reliable_mq.errors import IdempotencyStoreError
from reliable_mq.stores import MemoryStore
from reliable_mq.testing.waiting import until
from tests.core.deliveries import delivery
from tests.hostile_exceptions import Classless, NotYet, Textless

DEADLINE = 30.0


class Sink:
    """Keeps the reported results."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self.returned: list[Delivery] = []
        self._changed = asyncio.Event()

    def report(self, results: Sequence[Result]) -> None:
        self.results += results
        self._changed.set()

    def put_back(self, deliveries: Sequence[Delivery]) -> None:
        self.returned += deliveries
        self._changed.set()

    async def wait_for(self, count: int, what: Callable[[Sink], Sequence[object]] = lambda sink: sink.results) -> None:
        async with asyncio.timeout(DEADLINE):
            while len(what(self)) < count:
                self._changed.clear()
                await self._changed.wait()


class Awaiting(MemoryStore):
    """A store whose methods are coroutines."""

    async def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().claim_many(keys, lease)

    async def complete_many(self, claims: Sequence[Claim]) -> list[bool]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().complete_many(claims)

    async def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().release_many(claims, failed=failed)


class Blocking(MemoryStore):
    """A store that is called on a thread, because it may block."""

    threads: set[int]

    def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        assert threading.current_thread() is not threading.main_thread()
        return super().claim_many(keys, lease)


KINDS: dict[str, Callable[[], Any] | None] = {
    "plain": None,
    "in memory": MemoryStore,
    "blocking": Blocking,
    "awaited": Awaiting,
}


#: asyncio's own tasks, and from Python 3.12 on those that run until their first wait as they are created.
FACTORIES: list[Any] = [None]
if sys.version_info >= (3, 12):
    FACTORIES.append(asyncio.eager_task_factory)


@pytest.fixture(params=list(KINDS))
def store(request: pytest.FixtureRequest) -> Any:
    make = KINDS[request.param]
    return None if make is None else make()


@asynccontextmanager
async def running(
    handler: Callable[[Any], Any],
    *,
    count: int = 1,
    batch: bool = False,
    store: Any = None,
    key: Callable[[Delivery], str | None] | None = None,
) -> AsyncIterator[tuple[TaskPool, Sink]]:
    """Yield a pool of tasks and its sink.

    At the end, no task or thread is left.
    """
    before = asyncio.all_tasks()
    sink = Sink()
    claiming = (
        None
        if store is None
        else ClaimPolicy(queue="orders", namespace="q", key=key, lease=60.0, max_attempts=3, clock=time.monotonic)
    )
    tasks = TaskPool(name="test", count=count, handler=handler, batch=batch, store=store, claiming=claiming, sink=sink)
    try:
        yield tasks, sink
    finally:
        assert await tasks.stop(DEADLINE)
        assert asyncio.all_tasks() <= before


def items(count: int) -> list[Delivery]:
    return [delivery(tag, message_id=f"m{tag}") for tag in range(1, count + 1)]


def failures(results: Sequence[Result]) -> list[str]:
    return [result.failure.exception_type for result in results if isinstance(result, Failed)]


def cancelled(results: Sequence[Result]) -> list[Delivery]:
    return [one.delivery for one in results if isinstance(one, Skipped) and one.reason is SkipReason.CANCELLED]


def test_each_delivery_is_handled_once_and_in_order_by_one_task(store: Any) -> None:
    seen: list[Delivery] = []
    work = items(100)

    async def handle(item: Delivery) -> None:
        await asyncio.sleep(0)
        seen.append(item)

    async def main() -> None:
        async with running(handle, store=store) as (tasks, sink):
            tasks.put(work)
            await sink.wait_for(100)
            assert sink.results == seen == work
            assert sum(tasks.handler_seconds.counts) == 100

    asyncio.run(main())


def test_handlers_run_up_to_the_limit_without_idle_tasks(store: Any) -> None:
    """Each of the four handlers waits for the other three."""

    async def main() -> None:
        together = asyncio.Barrier(4)

        async def handle(_: Delivery) -> None:
            await together.wait()

        async with running(handle, count=4, store=store) as (tasks, sink):
            tasks.put(items(1))
            await asyncio.sleep(0)
            assert len(tasks._tasks) == 1
            tasks.put(items(8)[1:])
            await sink.wait_for(8)
            assert len(tasks._tasks) == 4
            assert failures(sink.results) == []

    asyncio.run(main())


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), GeneratorExit(), StopAsyncIteration()])
@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("factory", FACTORIES)
def test_whatever_a_handler_raises_is_its_own_failure(
    error: BaseException, awaited: bool, factory: Any, store: Any
) -> None:
    """The handler raises, or a future that it awaits does.

    asyncio throws a GeneratorExit of that future into the task.
    """

    async def handle(item: Delivery) -> None:
        if item.delivery_tag == 1:
            if awaited:
                failing = asyncio.get_running_loop().create_future()
                asyncio.get_running_loop().call_soon(failing.set_exception, error)
                await failing
            raise error

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(factory)
        async with running(handle, store=store) as (tasks, sink):
            tasks.put(items(3))
            await sink.wait_for(3)
            assert failures(sink.results) == [type(error).__name__]
            if store is not None:
                check_that_it_may_be_tried_again(store)

    asyncio.run(main())


def test_an_exception_without_a_class_fails_its_delivery_alone(store: Any) -> None:
    async def handle(item: Delivery) -> None:
        if item.delivery_tag == 1:
            raise Classless("no")

    async def main() -> None:
        async with running(handle, store=store) as (tasks, sink):
            tasks.put(items(3))
            await sink.wait_for(3)
            assert failures(sink.results) == ["tests.hostile_exceptions.Classless"]
            if store is not None:
                check_that_it_may_be_tried_again(store)

    asyncio.run(main())


def check_that_it_may_be_tried_again(store: MemoryStore) -> None:
    """Check that the first claim is released, and the attempt counted."""
    (claim,) = MemoryStore.claim_many(store, ["q|orders|m1"], 60.0)
    assert (claim.status, claim.attempts) == (ClaimStatus.NEW, 1)


def test_a_task_that_is_thrown_away_asks_no_store() -> None:
    """The coroutine of its task is closed, so it cannot wait for the store.

    This happens when the event loop is gone.
    """
    began = asyncio.Event()

    async def handle(_: Delivery) -> None:
        began.set()
        await asyncio.Event().wait()

    async def main() -> None:
        store = Awaiting()
        async with running(handle, store=store) as (tasks, sink):
            tasks.put(items(1))
            await began.wait()
            (task,) = tasks._tasks
            task.get_coro().close()  # type: ignore[union-attr]
            assert failures(sink.results) == ["GeneratorExit"]
            (claim,) = MemoryStore.claim_many(store, ["q|orders|m1"], 60.0)
            assert claim.status is ClaimStatus.IN_PROGRESS
            tasks.cancel()

    asyncio.run(main())


def test_a_handler_that_returns_what_nobody_awaits_has_failed(store: Any) -> None:
    """No code has run, so an ack would lose the message."""

    async def work() -> None:
        raise AssertionError

    async def handle(_: Delivery) -> object:
        return work()

    async def main() -> None:
        async with running(handle, store=store) as (tasks, sink):
            tasks.put(items(2))
            await sink.wait_for(2)
            assert failures(sink.results) == ["reliable_mq.errors.UsageError"] * 2

    asyncio.run(main())


def test_a_batch_handler_answers_per_item(store: Any) -> None:
    async def handle(_: list[Delivery]) -> list[Any]:
        return [Ack, None, RetryLater(5), DeadLetter("bad")]

    async def main() -> None:
        async with running(handle, batch=True, store=store) as (tasks, sink):
            tasks.put([items(4)])
            await sink.wait_for(4)
            failed = {one.delivery.delivery_tag: one for one in sink.results if isinstance(one, Failed)}
            assert (failed[3].failure.delay, failed[4].failure.verdict) == (5.0, "bad")
            assert sum(isinstance(one, Delivery) for one in sink.results) == 2

    asyncio.run(main())


def test_a_returned_verdict_counts_like_a_raised_one(store: Any) -> None:
    answers = iter([DeadLetter("no"), RetryLater(7), RetryLater, ValueError("no")])

    async def handle(_: Delivery) -> object:
        return next(answers)

    async def main() -> None:
        async with running(handle, store=store) as (tasks, sink):
            tasks.put(items(4))
            await sink.wait_for(4)
            found = {one.delivery.delivery_tag: one.failure for one in sink.results if isinstance(one, Failed)}
            assert (found[1].verdict, found[2].delay, found[3].delay) == ("no", 7.0, None)
            assert 4 not in found

    asyncio.run(main())


#: What a handler may do with its list.
TOUCHES: dict[str, Callable[[list[Any]], None]] = {
    "sorts it": lambda batch: batch.sort(key=lambda one: -one.delivery_tag),
    "empties it": lambda batch: batch.clear(),
    "pops": lambda batch: batch.pop() and None,
    "appends": lambda batch: batch.append(batch[0]),
}


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
def test_a_batch_handler_may_do_as_it_likes_with_its_list(touch: Callable[[list[Any]], None], store: Any) -> None:
    """Every delivery of the batch is handled, and the task continues."""
    work = items(12)

    async def handle(batch: list[Any]) -> None:
        await asyncio.sleep(0)
        touch(batch)

    async def main() -> None:
        async with running(handle, batch=True, store=store) as (tasks, sink):
            tasks.put([work[:9], work[9:]])
            await sink.wait_for(12)
            assert sink.results == work

    asyncio.run(main())


def test_verdicts_match_their_deliveries_in_a_reordered_batch(store: Any) -> None:
    async def handle(batch: list[Any]) -> list[object]:
        batch.sort(key=lambda one: -one.delivery_tag)
        return [DeadLetter("bad") if one.delivery_tag == 2 else Ack for one in batch]

    async def main() -> None:
        async with running(handle, batch=True, store=store) as (tasks, sink):
            tasks.put([items(9)])
            await sink.wait_for(9)
            failed = [one for one in sink.results if isinstance(one, Failed)]
            assert [(one.delivery.delivery_tag, one.failure.verdict) for one in failed] == [(2, "bad")]

    asyncio.run(main())


@pytest.mark.parametrize("error", [NotYet(), DeadLetter(Textless()), Textless()])  # type: ignore[arg-type]
@pytest.mark.parametrize("how", ["raised", "returned for an item"])
def test_an_undescribable_exception_is_an_ordinary_failure(error: Exception, how: str, store: Any) -> None:
    async def handle(batch: list[Delivery]) -> list[object]:
        if how == "raised":
            raise error
        return [error]

    async def main() -> None:
        async with running(handle, batch=True, store=store) as (tasks, sink):
            tasks.put([[one] for one in items(2)])
            await sink.wait_for(2)
            assert len(failures(sink.results)) == 2

    asyncio.run(main())


async def handled(_: object) -> None:
    pass


@pytest.mark.parametrize("store", ["in memory", "awaited"], indirect=True)
def test_a_key_function_that_leaves_fails_its_delivery_alone(store: Any) -> None:
    def key(item: Delivery) -> str:
        if item.delivery_tag == 2:
            raise SystemExit(3)
        return f"m{item.delivery_tag}"

    async def main() -> None:
        async with running(handled, store=store, key=key) as (tasks, sink):
            tasks.put(items(4))
            await sink.wait_for(4)
            assert failures(sink.results) == ["SystemExit"]

    asyncio.run(main())


@pytest.mark.parametrize("store", ["in memory", "blocking", "awaited"], indirect=True)
@pytest.mark.parametrize("by", ["a key function", "a task factory"])
def test_variables_set_before_a_handler_do_not_prevent_it(store: Any, by: str) -> None:
    """Otherwise its deliveries would be claimed and put back in a loop.

    Tools that trace tasks install such a factory, and decimal arithmetic sets a variable.
    """
    scope: ContextVar[object] = ContextVar("scope", default=None)
    seen: list[object] = []

    def key(item: Delivery) -> str | None:
        if by == "a key function":
            scope.set("key")
        return item.message_id

    async def handle(_: Delivery) -> None:
        seen.append(scope.get())

    async def in_scope(coroutine: Any) -> Any:
        scope.set("task")
        return await coroutine

    async def main() -> None:
        loop = asyncio.get_running_loop()
        if by == "a task factory":
            loop.set_task_factory(
                lambda loop, coroutine, **options: asyncio.Task(in_scope(coroutine), loop=loop, **options)
            )
        async with running(handle, store=store, key=key) as (tasks, sink):
            tasks.put(items(10))
            await sink.wait_for(10)

    asyncio.run(main())
    assert seen == ["task" if by == "a task factory" else None] * 10


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_task_that_is_ended_is_replaced_and_logged(
    store: Any, factory: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deliveries failed.

    Otherwise they would not be settled or redelivered while the channel is open.
    """
    ends = iter([MemoryError()])

    def end(self: TaskPool, *_args: object) -> Any:
        for error in ends:
            raise error
        return original(self, *_args)

    name = "_handle" if store is None else "_handle_claimed"
    original = getattr(TaskPool, name)
    monkeypatch.setattr(TaskPool, name, end)

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(factory)
        async with running(handled, store=store) as (tasks, sink):
            tasks.put(items(3))
            await sink.wait_for(3)
            assert failures(sink.results) == ["RuntimeError"]

    asyncio.run(main())
    [record] = [record for record in caplog.records if record.name == "reliable_mq.aio.handlers"]
    assert record.levelname == "ERROR"
    assert record.getMessage() == (
        "a task of consumer 'test' ended with MemoryError and is replaced; its 1 deliveries failed"
    )


def test_a_batch_with_an_invalid_answer_fails_as_a_whole(store: Any) -> None:
    async def handle(_: list[Delivery]) -> str:
        return "ok"

    async def main() -> None:
        async with running(handle, batch=True, store=store) as (tasks, sink):
            tasks.put([items(2)])
            await sink.wait_for(2)
            assert failures(sink.results) == ["reliable_mq.errors.UsageError"] * 2
            assert not any(one.alone for one in sink.results if isinstance(one, Failed))

    asyncio.run(main())


def test_what_has_not_begun_can_be_recalled(store: Any) -> None:
    work = items(5)

    async def main() -> None:
        gate, begun = asyncio.Event(), asyncio.Event()

        async def handle(_: Delivery) -> None:
            begun.set()
            await gate.wait()

        async with running(handle, store=store) as (tasks, sink):
            tasks.put(work)
            await begun.wait()
            assert tasks.recall() == work[1:]
            gate.set()
            await sink.wait_for(1)
            assert sink.results == work[:1]

    asyncio.run(main())


@pytest.mark.parametrize("new_store", [MemoryStore, Blocking, Awaiting])
def test_a_hanging_handler_holds_up_no_result_of_its_group(
    monkeypatch: pytest.MonkeyPatch, new_store: Callable[[], Any]
) -> None:
    """Otherwise up to 63 other effects would be repeated.

    This happens if the connection is lost and the leases end.
    """
    monkeypatch.setattr(claim_groups, "_GROUP_SECONDS", DEADLINE)
    monkeypatch.setattr(claim_groups, "PATIENCE", 0.05)

    async def main() -> None:
        store = new_store()
        gate, begun = asyncio.Event(), asyncio.Event()

        async def handle(item: Delivery) -> None:
            if item.delivery_tag == 100:
                begun.set()
                await gate.wait()

        async with running(handle, store=store) as (tasks, sink):
            tasks.put(items(63))
            await sink.wait_for(63)
            tasks.put(items(120)[63:])
            await begun.wait()
            await sink.wait_for(99)
            assert [one.delivery_tag for one in sink.results if isinstance(one, Delivery)] == list(range(1, 100))
            done = MemoryStore.claim_many(store, [f"q|orders|m{number}" for number in range(1, 100)], 1.0)
            assert {claim.status for claim in done} == {ClaimStatus.DONE}
            tasks.cancel()
            await sink.wait_for(120)
            assert [one.delivery_tag for one in cancelled(sink.results)] == [100]
            assert len(sink.results) == len({id(one) for one in sink.results}) == 120

    asyncio.run(main())


@pytest.mark.parametrize("new_store", [MemoryStore, Blocking, Awaiting])
def test_a_hanging_handler_holds_up_no_delivery_of_its_group(
    monkeypatch: pytest.MonkeyPatch, new_store: Callable[[], Any]
) -> None:
    """Another task handles the deliveries that have not begun."""
    monkeypatch.setattr(claim_groups, "_GROUP_SECONDS", DEADLINE)
    monkeypatch.setattr(claim_groups, "PATIENCE", 0.05)

    async def main() -> None:
        gate, begun = asyncio.Event(), asyncio.Event()

        async def handle(item: Delivery) -> None:
            if item.delivery_tag == 100:
                begun.set()
                await gate.wait()

        async with running(handle, count=2, store=new_store()) as (tasks, sink):
            tasks.put(items(99))
            await sink.wait_for(99)
            tasks.put(items(160)[99:])
            await begun.wait()
            await sink.wait_for(159)
            assert 100 not in {one.delivery_tag for one in sink.results if isinstance(one, Delivery)}
            gate.set()
            await sink.wait_for(160)
            assert len({id(one) for one in sink.results}) == len(sink.results) == 160
            assert sink.returned == []

    asyncio.run(main())


def test_stopping_ends_a_store_that_hangs_as_it_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results taken over are reported as if the store failed."""
    monkeypatch.setattr(claim_groups, "_GROUP_SECONDS", DEADLINE)
    monkeypatch.setattr(claim_groups, "PATIENCE", 0.05)
    monkeypatch.setattr("reliable_mq.aio.handlers._CANCEL_GRACE", 0.2)

    class Hanging(Awaiting):
        asked: asyncio.Event
        hangs = False

        async def complete_many(self, claims: Sequence[Claim]) -> list[bool]:  # type: ignore[override]
            if self.hangs:
                self.asked.set()
                await asyncio.Event().wait()
            return await super().complete_many(claims)

    async def main() -> None:
        store = Hanging()
        store.asked = asyncio.Event()

        async def handle(item: Delivery) -> None:
            if item.delivery_tag == 70:
                store.hangs = True
                await asyncio.Event().wait()

        async with running(handle, store=store) as (tasks, sink):
            tasks.put(items(63))
            await sink.wait_for(63)
            tasks.put(items(70)[63:])
            await store.asked.wait()
            assert await tasks.stop(0.1)
            assert [one.delivery_tag for one in cancelled(sink.results)] == [70]
            failed = [one.delivery for one in sink.results if isinstance(one, Skipped) and one.detail]
            assert {one.delivery_tag for one in failed} >= set(range(64, 70))
            assert len(sink.results) == 70

    asyncio.run(main())


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("batch", [False, True])
def test_a_recovered_store_is_told_though_nothing_is_claimed(
    monkeypatch: pytest.MonkeyPatch, batch: bool, awaited: bool
) -> None:
    """The message may be with another consumer, which would handle it again when the lease ends."""
    monkeypatch.setattr(claim_groups, "PATIENCE", 0.05)
    silent = True

    class Silent(Blocking):
        def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
            if silent:
                raise OSError("no answer")
            return super().complete_many(claims)

    class AwaitedSilent(Awaiting):
        async def complete_many(self, claims: Sequence[Claim]) -> list[bool]:  # type: ignore[override]
            if silent:
                raise OSError("no answer")
            return await super().complete_many(claims)

    async def main() -> None:
        nonlocal silent
        store = AwaitedSilent() if awaited else Silent()
        async with running(handled, batch=batch, store=store) as (tasks, sink):
            tasks.put([items(1)] if batch else items(1))
            await sink.wait_for(1)  # its channel is lost: it is not put again
            silent = False
            await until(
                lambda: MemoryStore.claim_many(store, ["q|orders|m1"], 60.0)[0].status is ClaimStatus.DONE, DEADLINE
            )

    asyncio.run(main())


def test_a_recovered_store_is_told_of_results_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store fails to answer after the group has ended."""
    monkeypatch.setattr(claim_groups, "_GROUP_SECONDS", DEADLINE)
    monkeypatch.setattr(claim_groups, "PATIENCE", 0.05)

    class Locked(Awaiting):
        locked = False
        asked: asyncio.Event
        over: asyncio.Event

        async def complete_many(self, claims: Sequence[Claim]) -> list[bool]:  # type: ignore[override]
            if self.locked and len(claims) > 1:
                self.asked.set()
                await self.over.wait()
                self.locked = False
                raise OSError("lock timeout")
            return await super().complete_many(claims)

    async def main() -> None:
        store, gate = Locked(), asyncio.Event()
        store.asked, store.over = asyncio.Event(), asyncio.Event()
        idle = asyncio.Event()  # the watch has found no group

        def checked(watch: GroupWatch) -> None:
            check(watch)
            if not watch._groups:
                idle.set()

        check = GroupWatch._check
        monkeypatch.setattr(GroupWatch, "_check", checked)

        async def handle(item: Delivery) -> None:
            if item.delivery_tag == 70:
                store.locked = True
                await gate.wait()

        async with running(handle, store=store) as (tasks, sink):
            tasks.put(items(63))
            await sink.wait_for(63)
            tasks.put(items(70)[63:])
            await store.asked.wait()
            gate.set()
            await sink.wait_for(64)
            await idle.wait()
            store.over.set()
            await sink.wait_for(70)
            keys = [f"q|orders|m{number}" for number in range(64, 70)]
            done = {ClaimStatus.DONE}
            await until(lambda: {one.status for one in MemoryStore.claim_many(store, keys, 60.0)} == done, DEADLINE)

    asyncio.run(main())


@pytest.mark.parametrize("stop", [True, False])
def test_a_retry_that_hangs_ends_with_the_pool(monkeypatch: pytest.MonkeyPatch, stop: bool) -> None:
    """It is stopped or aborted."""
    monkeypatch.setattr(claim_groups, "PATIENCE", 0.05)

    class Hanging(Awaiting):
        calls = 0
        asked: asyncio.Event

        async def complete_many(self, claims: Sequence[Claim]) -> list[bool]:  # type: ignore[override]
            self.calls += 1
            if self.calls > 1:
                self.asked.set()
                await asyncio.Event().wait()
            raise OSError("no answer")

    async def main() -> None:
        store = Hanging()
        store.asked = asyncio.Event()
        before = asyncio.all_tasks()
        async with running(handled, store=store) as (tasks, sink):
            tasks.put(items(1))
            await sink.wait_for(1)
            async with asyncio.timeout(DEADLINE):
                await store.asked.wait()
            if stop:
                assert await tasks.stop(0.1)
                assert asyncio.all_tasks() <= before
            else:
                tasks.abort()
                await until(lambda: asyncio.all_tasks() <= before, DEADLINE)

    asyncio.run(main())


def test_the_loop_ends_while_settlements_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer was not closed, and its store is away. The only cancellation comes during a call."""
    monkeypatch.setattr(claim_groups, "PATIENCE", 0.05)

    class Away(Blocking):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.asked, self.fails = threading.Event(), threading.Event()

        def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
            self.calls += 1
            if self.calls > 4:  # the loop has waited for the store
                return super().complete_many(claims)
            if self.calls > 1:
                self.asked.set()
                assert self.fails.wait(DEADLINE)
            raise OSError("no answer")

    store = Away()

    async def fail_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            store.fails.set()

    async def main() -> asyncio.Task[None]:
        claiming = ClaimPolicy(
            queue="orders", namespace="q", key=None, lease=60.0, max_attempts=3, clock=time.monotonic
        )
        tasks = TaskPool(
            name="test", count=1, handler=handled, batch=False, store=store, claiming=claiming, sink=Sink()
        )
        releasing = asyncio.create_task(fail_when_cancelled())
        tasks.put(items(1))
        await until(store.asked.is_set, DEADLINE)
        return releasing

    asyncio.run(main())
    (claim,) = MemoryStore.claim_many(store, ["q|orders|m1"], 60.0)
    assert claim.status is ClaimStatus.IN_PROGRESS


def test_a_recall_during_the_claim_call_reaches_no_handler() -> None:
    """The consumer was stopped, or the channel of the delivery lost, while the store took its time."""
    seen: list[Delivery] = []
    work = items(1)

    async def main() -> None:
        asked, answers = asyncio.Event(), asyncio.Event()

        class Slow(Awaiting):
            async def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
                asked.set()
                await answers.wait()
                return await super().claim_many(keys, lease)

        async def handle(item: Delivery) -> None:
            seen.append(item)

        store = Slow()
        async with running(handle, store=store) as (tasks, sink):
            tasks.put(work)
            await asked.wait()
            assert tasks.recall() == []
            answers.set()
            await until(lambda: bool(sink.returned), DEADLINE)
            assert (sink.returned, sink.results) == (work, [])
        assert (await store.claim_many(["q|orders|m1"], 1.0))[0].status is ClaimStatus.NEW

    asyncio.run(main())
    assert seen == []


def test_an_error_of_a_store_is_not_the_end_of_its_loop() -> None:
    class Failing(Awaiting):
        async def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
            raise RuntimeError("no tables")

    async def main() -> BlockingStore:
        store = BlockingStore(Failing())
        with pytest.raises(RuntimeError, match="no tables"):
            await asyncio.to_thread(store.claim_many, ["m1"], 60.0)
        return store

    store = asyncio.run(main())
    with pytest.raises(IdempotencyStoreError, match="the event loop of the store has ended: RuntimeError"):
        store.claim_many(["m1"], 60.0)


def test_a_thread_does_not_wait_for_a_loop_that_has_closed() -> None:
    """Its call to the store had begun."""

    class Hanging(Awaiting):
        async def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
            began.set()
            await asyncio.Event().wait()
            return []

    def call(store: BlockingStore) -> None:
        with pytest.raises(IdempotencyStoreError, match="the event loop of the store has ended"):
            store.claim_many(["m1"], 60.0)

    async def main() -> threading.Thread:
        thread = threading.Thread(target=call, args=(BlockingStore(Hanging()),), daemon=True)
        thread.start()
        await began.wait()
        return thread

    began = asyncio.Event()
    loop = asyncio.new_event_loop()
    thread = loop.run_until_complete(main())
    loop.close()
    thread.join(5)
    assert not thread.is_alive()


def test_where_a_handler_says_so_nothing_more_begins(store: Any) -> None:
    """Waiting deliveries, and those added later, can be recalled."""
    seen: list[Delivery] = []
    work = items(12)

    async def main() -> None:
        async def handle(item: Delivery) -> None:
            seen.append(item)
            if len(seen) == 2:
                tasks.stop_starting()

        async with running(handle, store=store) as (tasks, sink):
            tasks.put(work[:10])
            await sink.wait_for(2)
            tasks.put(work[10:])
            assert await tasks.stop(DEADLINE)
            assert seen == work[:2]
            assert sink.returned + tasks.recall() == work[2:]

    asyncio.run(main())


def test_a_cancelled_handler_is_no_failure_and_others_take_over(store: Any) -> None:
    """Its claim is released, so the next attempt can start."""
    work = items(3)

    async def main() -> None:
        begun: list[asyncio.Task[Any] | None] = []

        async def handle(item: Delivery) -> None:
            if item.delivery_tag == 1 and not begun:
                begun.append(asyncio.current_task())
                await asyncio.Event().wait()

        async with running(handle, store=store) as (tasks, sink):
            tasks.put(work)
            async with asyncio.timeout(DEADLINE):
                while not begun:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            assert begun[0] is not None
            begun[0].cancel()
            await sink.wait_for(3)
            assert cancelled(sink.results) == work[:1]
            assert failures(sink.results) == []
            tasks.put(work[:1])
            await sink.wait_for(4)
            assert sink.results[-1] is work[0]

    asyncio.run(main())


def test_a_handler_awaiting_a_cancelled_future_has_failed(store: Any) -> None:
    """Its task continues.

    Otherwise a message that always leads to this would be redelivered forever, without an attempt.
    """

    async def handle(item: Delivery) -> None:
        if item.delivery_tag == 1:
            inner = asyncio.get_running_loop().create_future()
            inner.cancel()
            await inner

    async def main() -> None:
        async with running(handle, store=store) as (tasks, sink):
            tasks.put(items(3))
            await sink.wait_for(3)
            assert cancelled(sink.results) == []
            assert failures(sink.results) == ["asyncio.exceptions.CancelledError"]
            assert len(tasks._tasks) == 1

    asyncio.run(main())


def test_timeouts_inside_a_handler_are_its_own(store: Any) -> None:
    """asyncio.timeout turns its cancellation of the task into a TimeoutError."""

    async def handle(_: Delivery) -> None:
        async with asyncio.timeout(0.001):
            await asyncio.Event().wait()

    async def main() -> None:
        async with running(handle, store=store) as (tasks, sink):
            tasks.put(items(2))
            await sink.wait_for(2)
            assert failures(sink.results) == ["TimeoutError"] * 2

    asyncio.run(main())


def test_stopping_cancels_what_is_not_done_in_time(store: Any) -> None:
    begun: list[Delivery] = []

    async def handle(delivery: Delivery) -> None:
        begun.append(delivery)
        await asyncio.Event().wait()

    async def main() -> None:
        async with running(handle, count=2, store=store) as (tasks, sink):
            tasks.put(items(2))
            await until(lambda: len(begun) == 2)
            assert await tasks.stop(0.01)
            assert len(cancelled(sink.results)) == 2

    asyncio.run(main())


def test_a_handler_that_refuses_to_be_cancelled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reliable_mq.aio.handlers._CANCEL_GRACE", 0.01)

    async def main() -> None:
        gate = asyncio.Event()

        async def handle(_: Delivery) -> None:
            while not gate.is_set():
                try:
                    await gate.wait()
                except asyncio.CancelledError:
                    continue

        async with running(handle) as (tasks, sink):
            tasks.put(items(1))
            await asyncio.sleep(0)
            assert not await tasks.stop(0.0)
            gate.set()
            await sink.wait_for(1)

    asyncio.run(main())


def test_a_store_that_hangs_is_given_up_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reliable_mq.aio.handlers._CANCEL_GRACE", 0.1)
    asked, answer = threading.Event(), threading.Event()

    class Hanging(MemoryStore):
        def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
            asked.set()
            assert answer.wait(DEADLINE)
            return super().claim_many(keys, lease)

    async def handle(_: Delivery) -> None:
        raise AssertionError

    async def main() -> None:
        async with running(handle, store=Hanging()) as (tasks, sink):
            tasks.put(items(1))
            await until(asked.is_set)
            assert await tasks.stop(0.0)
            assert [type(one) for one in sink.results] == [Skipped]

    try:
        asyncio.run(main())
    finally:
        answer.set()


def test_handlers_that_never_wait_leave_the_loop_to_others() -> None:
    """Another task runs long before the last of many handlers."""

    async def main() -> None:
        done = 0

        async def handle(_: Delivery) -> None:
            nonlocal done
            done += 1
            end = asyncio.get_running_loop().time() + 0.001
            while asyncio.get_running_loop().time() < end:
                pass

        async with running(handle) as (tasks, sink):
            tasks.put(items(200))
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)
            assert done < 100
            await sink.wait_for(200)

    asyncio.run(main())


def test_a_handler_knows_that_it_runs_here() -> None:
    async def main() -> None:
        async def handle(_: Delivery) -> None:
            assert tasks.is_current

        async with running(handle) as (tasks, sink):
            assert not tasks.is_current
            tasks.put(items(1))
            await sink.wait_for(1)
            assert failures(sink.results) == []

    asyncio.run(main())


def test_ctrl_c_in_a_handler_is_for_the_program(store: Any) -> None:
    """It ends the event loop as usual, and the delivery counts as cancelled."""
    results: list[Result] = []

    async def main() -> None:
        async def handle(_: Delivery) -> None:
            raise KeyboardInterrupt

        async with running(handle, store=store) as (tasks, sink):
            sink.results = results
            tasks.put(items(1))
            await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert len(cancelled(results)) == 1


def test_ctrl_c_in_several_handlers_interrupts_the_program_once(store: Any) -> None:
    """A second one would come while the loop ends.

    It would leave tasks and generators behind.
    """
    ended: list[str] = []

    async def main() -> None:
        async def handle(_: Delivery) -> None:
            raise KeyboardInterrupt

        try:
            async with running(handle, store=store, count=2) as (tasks, _):
                tasks.put(items(2))
                await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("main")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert ended == ["main"]


def test_a_watch_survives_groups_that_come_and_go_as_it_looks() -> None:
    """Python's eager tasks settle a group and begin the next one before the watch goes on."""

    class Group:
        """A group that is not overdue. Looking at it ends the other one and begins a third."""

        def __init__(self, change: Callable[[], None]) -> None:
            self._change = change
            self.seen = 0

        def overdue(self) -> None:
            self.seen += 1
            self._change()

    async def main() -> None:
        sink = Sink()
        watch = GroupWatch("test", None, None, sink, sink, {}, copy_context())  # type: ignore[arg-type]
        first, second, third = (asyncio.ensure_future(asyncio.sleep(0)) for _ in range(3))
        last, gone = Group(lambda: None), Group(lambda: None)

        def change() -> None:
            watch.remove(second)
            watch.add(third, last)  # type: ignore[arg-type]

        watch.add(first, Group(change))  # type: ignore[arg-type]
        watch.add(second, gone)  # type: ignore[arg-type]
        watch._check()
        assert (gone.seen, last.seen) == (0, 0)
        watch.remove(first)
        watch._check()
        assert last.seen == 1
        watch.stop()

    asyncio.run(main())
