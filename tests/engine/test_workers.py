"""Worker threads: the deliveries of handlers, their order, and their results."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from reliable_mq import Ack, DeadLetter, RetryLater
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.handler import ClaimPolicy, Failed, Result, Skipped, SkipReason
from reliable_mq.core.idempotency import Claim, ClaimStatus
from reliable_mq.engine import claim_groups
from reliable_mq.engine.workers import WorkerPool
from reliable_mq.stores import IdempotencyStore, MemoryStore
from reliable_mq.testing.waiting import wait_until
from tests.core.deliveries import delivery
from tests.hostile_exceptions import Classless, NotYet, Textless
from tests.refused_threads import refusing_threads

DEADLINE = 30.0


class Sink:
    """Keeps the reported results."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self.returned: list[Delivery] = []
        self._changed = threading.Condition()

    def report(self, results: Sequence[Result]) -> None:
        with self._changed:
            self.results += results
            self._changed.notify_all()

    def put_back(self, deliveries: Sequence[Delivery]) -> None:
        with self._changed:
            self.returned += deliveries
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[Result]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.results) >= count, DEADLINE), self.results
        return self.results

    def wait_for_returned(self, count: int) -> list[Delivery]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.returned) >= count, DEADLINE)
        return self.returned


class Gate:
    """A handler that waits until it is released, one call at a time."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.let_through = threading.Semaphore(0)
        self.seen: list[Any] = []

    def __call__(self, argument: Any) -> None:
        self.seen.append(argument)
        self.begun.release()
        assert self.let_through.acquire(timeout=DEADLINE)

    def wait_begun(self) -> None:
        assert self.begun.acquire(timeout=DEADLINE)


@contextmanager
def running(
    handler: Callable[[Any], object],
    *,
    count: int = 1,
    batch: bool = False,
    store: IdempotencyStore | None = None,
    key: Callable[[Delivery], str | None] | None = None,
    sink: Sink | None = None,
) -> Iterator[tuple[WorkerPool, Sink]]:
    sink = sink or Sink()
    claiming = (
        None
        if store is None
        else ClaimPolicy(queue="orders", namespace="q", key=key, lease=60.0, max_attempts=3, clock=time.monotonic)
    )
    workers = WorkerPool(
        name="test", count=count, handler=handler, batch=batch, store=store, claiming=claiming, sink=sink
    )
    workers.start()
    try:
        yield workers, sink
    finally:
        assert workers.stop(DEADLINE)


def refuse(_argument: object) -> None:
    raise ValueError("no")


#: What a handler may do with its list.
TOUCHES: dict[str, Callable[[list[Any]], None]] = {
    "sorts it": lambda batch: batch.sort(key=lambda one: -one.delivery_tag),
    "empties it": lambda batch: batch.clear(),
    "pops": lambda batch: batch.pop() and None,
    "appends": lambda batch: batch.append(batch[0]),
}


def items(count: int) -> list[Delivery]:
    return [delivery(tag, message_id=f"m{tag}") for tag in range(1, count + 1)]


def failures(results: Sequence[Result]) -> list[str]:
    return [result.failure.exception_type for result in results if isinstance(result, Failed)]


@pytest.fixture(params=[False, True], ids=["plain", "with a store"])
def store(request: pytest.FixtureRequest) -> MemoryStore | None:
    return MemoryStore() if request.param else None


def test_one_worker_handles_each_delivery_once_and_in_order(store: MemoryStore | None) -> None:
    seen: list[Delivery] = []
    work = items(100)
    with running(seen.append, store=store) as (workers, sink):
        workers.put(work)
        assert sink.wait_for(100) == work
    assert seen == work


def test_several_workers_share_the_work(store: MemoryStore | None) -> None:
    """Each of the four handlers waits for the other three."""
    together = threading.Barrier(4)
    with running(lambda _: together.wait(DEADLINE), count=4, store=store) as (workers, sink):
        workers.put(items(4))
        sink.wait_for(4)
        assert failures(sink.results) == []


def test_a_returned_verdict_counts_like_a_raised_one(store: MemoryStore | None) -> None:
    answers = iter([DeadLetter("no"), RetryLater(7), RetryLater])
    with running(lambda _: next(answers), store=store) as (workers, sink):
        workers.put(items(3))
        results = sink.wait_for(3)
    found = {one.delivery.delivery_tag: one.failure for one in results if isinstance(one, Failed)}
    assert (found[1].verdict, found[2].delay, found[3].delay) == ("no", 7.0, None)


def test_what_else_a_handler_returns_is_ignored(store: MemoryStore | None) -> None:
    work = items(5)
    answers = iter([ValueError("no"), False, [RetryLater()], Ack, Classless("no")])
    with running(lambda _: next(answers), store=store) as (workers, sink):
        workers.put(work)
        assert sink.wait_for(5) == work


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration()]
)
def test_any_exception_fails_its_delivery_and_ends_no_worker(error: BaseException, store: MemoryStore | None) -> None:
    def handle(item: Delivery) -> None:
        if item.delivery_tag == 1:
            raise error

    with running(handle, store=store) as (workers, sink):
        workers.put(items(1))
        sink.wait_for(1)
        workers.put(items(3)[1:])
        sink.wait_for(3)
        assert failures(sink.results) == [type(error).__name__]
    if store is not None:
        (claim,) = store.claim_many(["q|orders|m1"], 60.0)
        assert (claim.status, claim.attempts) == (ClaimStatus.NEW, 1), "its claim was not released"


def test_an_exception_without_a_class_fails_its_delivery_alone(store: MemoryStore | None) -> None:
    def handle(item: Delivery) -> None:
        if item.delivery_tag == 1:
            raise Classless("no")

    with running(handle, store=store) as (workers, sink):
        workers.put(items(3))
        assert failures(sink.wait_for(3)) == ["tests.hostile_exceptions.Classless"]
    if store is not None:
        (claim,) = store.claim_many(["q|orders|m1"], 60.0)
        assert (claim.status, claim.attempts) == (ClaimStatus.NEW, 1), "its claim was not released"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, 0),
        (SystemExit(), 0),
        (SystemExit(3), 3),
        (SystemExit(2**40 + 3), 3),
        (SystemExit("no"), 1),
        (ValueError("no"), 1),
    ],
)
def test_a_child_that_a_handler_forks_ends_with_the_handler(
    error: BaseException | None, status: int, store: MemoryStore | None
) -> None:
    """Otherwise it would handle the other deliveries of its parent, too, and then wait for more without an end."""
    parent = os.getpid()
    ends: list[int] = []

    def handle(_delivery: object) -> None:
        if os.getpid() != parent:
            os._exit(99)  # a delivery in the child
        child = os.fork()
        if child:
            ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        elif error is not None:
            raise error

    work = items(3)
    with running(handle, store=store) as (workers, sink):
        workers.put(work)
        assert sink.wait_for(3) == work
    assert ends == [status] * 3


def test_a_handler_that_returns_what_has_not_run_has_failed(store: MemoryStore | None) -> None:
    """No code has run, so an ack would lose the message."""

    with running(lambda item: (tag for tag in [item.delivery_tag]), store=store) as (workers, sink):
        workers.put(items(2))
        sink.wait_for(2)
        assert failures(sink.results) == ["reliable_mq.errors.UsageError"] * 2


def test_a_batch_handler_gets_lists_and_answers_per_item(store: MemoryStore | None) -> None:
    work = items(4)
    verdicts = [Ack, None, RetryLater(5), DeadLetter("bad")]
    with running(lambda _: verdicts, batch=True, store=store) as (workers, sink):
        workers.put([work])
        results = sink.wait_for(4)
    by_tag = {(one.delivery if isinstance(one, Failed) else one).delivery_tag: one for one in results}  # type: ignore[union-attr]
    assert by_tag[1] is work[0]
    assert by_tag[2] is work[1]
    third, fourth = by_tag[3], by_tag[4]
    assert isinstance(third, Failed)
    assert isinstance(fourth, Failed)
    assert (third.failure.delay, fourth.failure.verdict) == (5.0, "bad")
    assert third.alone
    assert fourth.alone


def by_tag(results: Sequence[Result]) -> dict[int, Result]:
    return {(one if isinstance(one, Delivery) else one.delivery).delivery_tag: one for one in results}


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
def test_a_batch_handler_may_do_as_it_likes_with_its_list(
    touch: Callable[[Any], None], store: MemoryStore | None
) -> None:
    """Every delivery of the batch is handled, and the worker continues."""
    work = items(12)
    with running(touch, batch=True, store=store) as (workers, sink):
        workers.put([work[:9], work[9:]])
        assert sink.wait_for(12) == work


@pytest.mark.parametrize("touch", [lambda batch: batch.reverse(), lambda batch: batch.insert(4, "mine")])
def test_verdicts_match_their_deliveries_in_a_changed_batch_list(
    touch: Callable[[Any], None], store: MemoryStore | None
) -> None:
    def handle(batch: list[Any]) -> list[object]:
        touch(batch)
        mine = [one for one in batch if isinstance(one, Delivery)]
        return [DeadLetter("bad") if one.delivery_tag == 2 else Ack for one in mine]

    with running(handle, batch=True, store=store) as (workers, sink):
        workers.put([items(9)])
        results = by_tag(sink.wait_for(9))
    failed = {tag: one.failure.verdict for tag, one in results.items() if isinstance(one, Failed)}
    assert failed == {2: "bad"}


def test_verdicts_on_popped_deliveries_are_asked_for_one_by_one(store: MemoryStore | None) -> None:
    """The order in which a handler removed them is unknown.

    So each delivery is asked for alone.
    """

    def handle(batch: list[Delivery]) -> list[object]:
        return [DeadLetter("bad") if batch.pop().delivery_tag == 2 else Ack for _ in range(len(batch))]

    with running(handle, batch=True, store=store) as (workers, sink):
        workers.put([items(3)])
        results = sink.wait_for(3)
    assert failures(results) == ["reliable_mq.errors.UsageError"] * 3
    assert not any(result.alone for result in results if isinstance(result, Failed))


@pytest.mark.parametrize("error", [NotYet(), DeadLetter(Textless()), Textless()])  # type: ignore[arg-type]
@pytest.mark.parametrize("how", ["raised", "returned for an item"])
def test_an_undescribable_exception_is_an_ordinary_failure(
    error: Exception, how: str, store: MemoryStore | None
) -> None:
    def handle(batch: list[Delivery]) -> list[object] | None:
        if batch[0].delivery_tag > 1:
            return None
        if how == "raised":
            raise error
        return [error]

    with running(handle, batch=True, store=store) as (workers, sink):
        workers.put([items(1)])
        sink.wait_for(1)
        workers.put([items(2)[1:]])
        sink.wait_for(2)
    assert len(failures(sink.results)) == 1


def test_a_key_function_that_leaves_fails_its_delivery_alone() -> None:
    def key(item: Delivery) -> str:
        if item.delivery_tag == 2:
            raise SystemExit(3)
        return f"m{item.delivery_tag}"

    with running(lambda _: None, store=MemoryStore(), key=key) as (workers, sink):
        workers.put(items(4))
        sink.wait_for(4)
    assert failures(sink.results) == ["SystemExit"]


class Interrupting(Sink):
    """Ends the worker that reports the first results.

    An exception from another thread may do so at any point.
    """

    ended: int = 0

    def report(self, results: Sequence[Result]) -> None:
        super().report(results)
        if not self.ended:
            self.ended += 1
            raise SystemExit(3)


def test_a_worker_that_is_ended_is_replaced_and_logged(
    store: MemoryStore | None, caplog: pytest.LogCaptureFixture
) -> None:
    work = items(5)
    with running(lambda _: None, store=store, sink=Interrupting()) as (workers, sink):
        workers.put(work[:1])
        sink.wait_for(1)
        workers.put(work[1:])
        assert sink.wait_for(5) == work
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert record.getMessage() == (
        "a worker of consumer 'test' ended with SystemExit: 3 and is replaced; its 0 deliveries failed"
    )


def test_what_a_worker_that_is_ended_held_has_failed(
    store: MemoryStore | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they would not be settled or redelivered while the channel is open."""

    def end(*_args: object) -> None:
        raise SystemExit(3)

    monkeypatch.setattr("reliable_mq.engine.workers.all_failed", end)
    monkeypatch.setattr("reliable_mq.engine.workers.handling", end)
    with running(refuse, batch=True, store=store) as (workers, sink):
        workers.put([items(2)])
        results = sink.wait_for(2)
    assert failures(results) == ["RuntimeError"] * 2
    assert not any(result.alone for result in results if isinstance(result, Failed))
    assert "its 2 deliveries failed" in caplog.text


def test_a_worker_interrupted_in_recovery_gets_another_thread(
    store: MemoryStore | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = iter([SystemExit(4)])
    recover = WorkerPool._recover

    def interrupted(self: WorkerPool, worker: Any, error: BaseException) -> None:
        recover(self, worker, error)
        for end in ends:
            raise end

    monkeypatch.setattr(WorkerPool, "_recover", interrupted)
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    work = items(5)
    with running(lambda _: None, store=store, sink=Interrupting()) as (workers, sink):
        workers.put(work[:1])
        sink.wait_for(1)
        workers.put(work[1:])
        assert sink.wait_for(5) == work
    wait_until(lambda: told, timeout=20, what="the end of the first thread")  # the other thread has already started
    assert [one.exc_value.code for one in told] == [4]


@pytest.mark.parametrize("answer", [[Ack], "ok", 5, [Ack] * 3])
def test_an_answer_that_is_no_verdict_list_fails_the_whole_batch(answer: object, store: MemoryStore | None) -> None:
    with running(lambda _: answer, batch=True, store=store) as (workers, sink):
        workers.put([items(2)])
        results = sink.wait_for(2)
    assert failures(results) == ["reliable_mq.errors.UsageError"] * 2
    assert not any(result.alone for result in results if isinstance(result, Failed))


def test_a_batch_of_one_that_fails_has_failed_alone(store: MemoryStore | None) -> None:
    with running(lambda _: 1 / 0, batch=True, store=store) as (workers, sink):
        workers.put([items(1)])
        [result] = sink.wait_for(1)
    assert isinstance(result, Failed)
    assert result.alone


def test_what_no_handler_has_begun_with_can_be_recalled(store: MemoryStore | None) -> None:
    gate = Gate()
    work = items(5)
    with running(gate, store=store) as (workers, sink):
        workers.put(work)
        gate.wait_begun()
        assert workers.recall() == work[1:]
        gate.let_through.release()
        sink.wait_for(1)
        assert gate.seen == work[:1]
        assert sink.results == work[:1]


def test_batches_are_recalled_item_by_item() -> None:
    gate = Gate()
    work = items(5)
    with running(gate, batch=True) as (workers, _):
        workers.put([work[:2], work[2:4], work[4:]])
        gate.wait_begun()
        assert workers.recall() == work[2:]
        gate.let_through.release()


def test_workers_that_stop_finish_what_waits() -> None:
    """Deliveries that must return are recalled before."""
    seen: list[Delivery] = []
    with running(seen.append) as (workers, sink):
        workers.put(items(50))
        assert workers.stop(DEADLINE)
        assert len(sink.results) == 50


def test_stop_waits_for_a_hanging_handler_only_for_its_timeout() -> None:
    gate = Gate()
    with running(gate) as (workers, _):
        workers.put(items(1))
        gate.wait_begun()
        assert not workers.stop(0.01)
        gate.let_through.release()


def test_a_handler_may_stop_the_workers_and_knows_that_it_is_one() -> None:
    stopped: list[bool] = []

    def handle(_: Delivery) -> None:
        assert workers.is_current
        stopped.append(workers.stop(0.01))

    with running(handle) as (workers, sink):
        assert not workers.is_current
        workers.put(items(1))
        assert sink.wait_for(1) == sink.results
        assert failures(sink.results) == []
    assert stopped == [False]


def test_the_time_in_handlers_is_counted_per_call(store: MemoryStore | None) -> None:
    with running(lambda _: None, count=2, store=store) as (workers, sink):
        workers.put(items(20))
        sink.wait_for(20)
        assert sum(workers.handler_seconds.counts) == 20


# Claims


class Watched(MemoryStore):
    """Records how many keys are claimed at a time."""

    def __init__(self, max_entries: int = 1_000_000) -> None:
        super().__init__(max_entries=max_entries)
        self.claimed: list[int] = []

    def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        self.claimed.append(len(keys))
        return super().claim_many(keys, lease)


def test_quick_handlers_are_claimed_for_together_more_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_groups, "_GROUP_SECONDS", 60.0)  # a handler is quick though the machine is slow
    store = Watched()
    with running(lambda _: None, store=store) as (workers, sink):
        workers.put(items(400))
        sink.wait_for(400)
    assert store.claimed[:7] == [1, 2, 4, 8, 16, 32, 64]
    assert max(store.claimed) == 64


def test_a_store_that_has_no_room_for_many_is_asked_for_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number then grows slowly.

    The few refused deliveries wait, without an attempt.
    """
    monkeypatch.setattr(claim_groups, "_GROUP_SECONDS", 60.0)  # a handler is quick though the machine is slow
    store = Watched(max_entries=10)
    with running(lambda _: None, store=store) as (workers, sink):
        workers.put(items(1000))
        results = sink.wait_for(1000)
    refused = [one for one in results if isinstance(one, Skipped) and one.reason is SkipReason.STORE_FAILED]
    assert 0 < len(refused) < 100
    assert max(store.claimed) == 16
    assert max(store.claimed[5:]) == 11


def test_a_worker_takes_no_more_than_its_share() -> None:
    store = Watched()
    gate = Gate()
    with running(gate, count=2, store=store) as (workers, sink):
        for _ in range(60):
            gate.let_through.release()
        workers.put(items(20))
        sink.wait_for(20)
        assert max(store.claimed) <= 1 + 20 // 2


def test_what_waits_behind_a_slow_handler_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease could expire.

    It is put back in front, in order, and no attempt is counted.
    """
    monkeypatch.setattr(claim_groups, "_GROUP_SECONDS", 0.0)
    store = Watched()
    work = items(12)
    seen: list[Delivery] = []
    with running(seen.append, store=store) as (workers, sink):
        workers.put(work)
        results = sink.wait_for(12)
    assert seen == results == work
    assert not any(isinstance(one, Skipped) for one in results)
    assert all(
        claim.status is ClaimStatus.DONE for claim in store.claim_many([f"q|orders|m{n}" for n in range(1, 13)], 1.0)
    )


def let_groups_run_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_groups, "_GROUP_SECONDS", DEADLINE)
    monkeypatch.setattr(claim_groups, "PATIENCE", 0.05)


class Hanging:
    """A handler that hangs at one delivery until released, and refuses some tags."""

    def __init__(self, at: int, refused: Sequence[int] = ()) -> None:
        self.gate = Gate()
        self._at = at
        self._refused = refused

    def __call__(self, item: Delivery) -> None:
        if item.delivery_tag == self._at:
            self.gate(item)
        if item.delivery_tag in self._refused:
            refuse(item)


def test_a_hanging_handler_holds_up_no_result_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise up to 63 other effects would be repeated.

    This happens if the connection is lost and the leases end.
    """
    let_groups_run_long(monkeypatch)
    monkeypatch.setattr(claim_groups, "PATIENCE", 0.5)  # the group must get as far as the delivery that hangs
    store = Watched()
    handler = Hanging(100, refused=[80])
    with running(handler, store=store) as (workers, sink):
        workers.put(items(63))
        sink.wait_for(63)
        work = items(120)[63:]
        workers.put(work)
        handler.gate.wait_begun()
        assert store.claimed[-1] == len(work)  # in one claim
        sink.wait_for(99)
        assert {claim.status for claim in store.claim_many(keys(64, 80), 1.0)} == {ClaimStatus.DONE}
        assert [claim.status for claim in store.claim_many(keys(80, 81), 60.0)] == [ClaimStatus.NEW]
        assert {claim.status for claim in store.claim_many(keys(81, 100), 1.0)} == {ClaimStatus.DONE}
        assert failures(sink.results) == ["ValueError"]
        handler.gate.let_through.release()
        sink.wait_for(120)
    assert sorted(by_tag(sink.results)) == list(range(1, 121))
    assert len(sink.results) == 120
    assert store.claim_many(keys(100, 101), 1.0)[0].status is ClaimStatus.DONE


def test_a_hanging_handler_holds_up_no_delivery_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker handles the deliveries that have not begun."""
    let_groups_run_long(monkeypatch)
    handler = Hanging(100)
    with running(handler, count=2, store=MemoryStore()) as (workers, sink):
        workers.put(items(99))
        sink.wait_for(99)
        work = items(160)[99:]
        workers.put(work)
        handler.gate.wait_begun()
        sink.wait_for(159)
        assert work[0] not in sink.results
        handler.gate.let_through.release()
        sink.wait_for(160)
    assert sorted(by_tag(sink.results)) == list(range(1, 161))
    assert len(sink.results) == 160
    assert sink.returned == []


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("no")])
def test_results_taken_over_survive_a_store_that_fails(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The results are reported, and no handler counts as failed.

    The next group is taken over again.
    """
    let_groups_run_long(monkeypatch)
    store = Watched()
    errors = [error]
    complete_many = store.complete_many

    def fail_once(claims: Sequence[Claim]) -> list[bool]:
        if claims[0].key == "q|orders|m64" and errors:
            raise errors.pop()
        return complete_many(claims)

    monkeypatch.setattr(store, "complete_many", fail_once)
    handler = Hanging(70)
    with running(handler, store=store) as (workers, sink):
        workers.put(items(63))
        sink.wait_for(63)
        workers.put(items(70)[63:])
        handler.gate.wait_begun()
        sink.wait_for(69)
        handler.gate.let_through.release()
        results = sink.wait_for(70)
    skipped = [one for one in results if isinstance(one, Skipped)]
    assert [one.delivery.delivery_tag for one in skipped] == list(range(64, 70))
    assert {one.reason for one in skipped} == {SkipReason.STORE_FAILED}
    assert len(by_tag(results)) == len(results) == 70
    assert ("failed to settle the results" in caplog.text) is isinstance(error, SystemExit)


def test_a_worker_that_is_ended_reports_nothing_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    let_groups_run_long(monkeypatch)
    store = MemoryStore()
    monkeypatch.setattr(store, "release_many", lambda _claims, *, failed: sys.exit(failed))
    handler = Hanging(70, refused=[70])
    with running(handler, store=store) as (workers, sink):
        workers.put(items(63))
        sink.wait_for(63)
        workers.put(items(72)[63:])
        handler.gate.wait_begun()
        sink.wait_for(69)
        handler.gate.let_through.release()
        results = sink.wait_for(72)
    assert len(by_tag(results)) == len(results) == 72
    assert failures(results) == ["SystemExit"]


def keys(first: int, end: int) -> list[str]:
    return [f"q|orders|m{number}" for number in range(first, end)]


def test_a_recall_returns_deliveries_claimed_but_not_begun() -> None:
    """No handler gets a delivery of a lost channel, even if a worker holds it."""
    store = Watched()
    gate = Gate()
    work = items(11)
    with running(gate, store=store) as (workers, sink):
        for _ in range(7):
            gate.let_through.release()
        workers.put(work)
        for _ in range(8):
            gate.wait_begun()
        # Groups of 1, 2 and 4 are done. One delivery of the next group has started.
        assert workers.recall() == []
        gate.let_through.release()
        assert sink.wait_for_returned(3) == work[8:]
        assert sink.wait_for(8) == work[:8]
    assert gate.seen == work[:8]
    assert store.claim_many(["q|orders|m11"], 1.0)[0].status is ClaimStatus.NEW


@pytest.mark.parametrize("batch", [False, True])
def test_a_recall_during_the_claim_call_reaches_no_handler(batch: bool) -> None:
    """The consumer was stopped, or the channel of the delivery lost, while the store took its time."""

    class Slow(MemoryStore):
        asked, answers = threading.Event(), threading.Event()

        def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
            self.asked.set()
            assert self.answers.wait(DEADLINE)
            return super().claim_many(keys, lease)

    store = Slow()
    seen: list[Any] = []
    [item] = items(1)
    with running(seen.append, store=store, batch=batch) as (workers, sink):
        workers.put([[item]] if batch else [item])
        assert store.asked.wait(DEADLINE)
        assert workers.recall() == []
        store.answers.set()
        assert sink.wait_for_returned(1) == [item]
    assert (seen, sink.results) == ([], [])
    assert store.claim_many(["q|orders|m1"], 1.0)[0].status is ClaimStatus.NEW


def test_a_hanging_handler_holds_up_no_settled_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """That another holder has a key, and that a handler returned before, is reported meanwhile."""
    let_groups_run_long(monkeypatch)
    store = MemoryStore()
    handler = Hanging(66)
    with running(handler, store=store) as (workers, sink):
        workers.put(items(63))
        sink.wait_for(63)
        store.claim_many(["q|orders|m64"], 60.0)
        held, completed, hangs = items(66)[63:]
        [completed.claim] = store.claim_many(["q|orders|m65"], 60.0)
        workers.put([held, completed, hangs])
        handler.gate.wait_begun()
        assert sink.wait_for(65)[63:] == [Skipped(held, SkipReason.IN_PROGRESS), completed]
        assert store.claim_many(["q|orders|m65"], 60.0)[0].status is ClaimStatus.DONE
        handler.gate.let_through.release()
        assert sink.wait_for(66)[65:] == [hangs]
    assert len(sink.results) == 66


def test_a_duplicate_and_a_key_held_elsewhere_reach_no_handler() -> None:
    store = MemoryStore()
    store.complete_many(store.claim_many(["q|orders|m1"], 60.0))
    store.claim_many(["q|orders|m2"], 60.0)
    seen: list[Delivery] = []
    with running(seen.append, store=store) as (workers, sink):
        workers.put(items(3))
        results = sink.wait_for(3)
    assert [one.reason for one in results if isinstance(one, Skipped)] == [SkipReason.DUPLICATE, SkipReason.IN_PROGRESS]
    assert [item.message_id for item in seen] == ["m3"]


def test_a_store_that_exits_its_thread_costs_an_attempt_only(caplog: pytest.LogCaptureFixture) -> None:
    class Leaving(MemoryStore):
        def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
            if keys == ["q|orders|m1"]:
                raise SystemExit
            return super().claim_many(keys, lease)

    with running(lambda _: None, store=Leaving()) as (workers, sink):
        workers.put(items(2))
        first, second = sink.wait_for(2)
    assert isinstance(first, Failed)
    assert isinstance(second, Delivery)
    assert "SystemExit" in caplog.text


class Silent(MemoryStore):
    """A store that does not answer completions until it is told to."""

    silent = True

    def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        if self.silent:
            raise OSError("no answer")
        return super().complete_many(claims)


@pytest.mark.parametrize("batch", [False, True])
def test_a_recovered_store_is_told_though_nothing_is_claimed(batch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message may be with another consumer, which would handle it again when the lease ends."""
    monkeypatch.setattr(claim_groups, "PATIENCE", 0.05)
    store = Silent()
    with running(lambda _: None, batch=batch, store=store) as (workers, sink):
        workers.put([items(1)] if batch else items(1))
        (skipped,) = sink.wait_for(1)  # its channel is lost: it is not put again
        assert isinstance(skipped, Skipped)
        store.silent = False
        wait_until(
            lambda: store.claim_many(["q|orders|m1"], 60.0)[0].status is ClaimStatus.DONE,
            timeout=DEADLINE,
            what="the completion was repeated",
        )


def test_a_refused_thread_delays_the_retries_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(claim_groups, "PATIENCE", 0.05)
    store = Silent()
    with running(lambda _: None, store=store) as (workers, sink):
        with refusing_threads("-settlements") as refused:
            workers.put(items(1))
            sink.wait_for(1)
            store.silent = False
            wait_until(lambda: len(refused) > 1, timeout=DEADLINE, what="two threads were refused")
        wait_until(
            lambda: store.claim_many(["q|orders|m1"], 60.0)[0].status is ClaimStatus.DONE,
            timeout=DEADLINE,
            what="the completion was repeated",
        )
    assert not caplog.records


@pytest.mark.parametrize("answers", [True, False])
def test_settlements_are_retried_without_a_thread(answers: bool) -> None:
    """An interpreter that exits refuses new threads. The time is still bounded."""
    store = Silent()
    with running(lambda _: None, store=store) as (workers, sink):
        workers.put(items(1))
        sink.wait_for(1)
        assert workers.stop(DEADLINE)
        store.silent = not answers
        with refusing_threads("-settlements"):
            assert workers.retry_settlements(DEADLINE if answers else 0.2, lambda: True) == (0 if answers else 1)
            assert workers.retry_settlements(DEADLINE, lambda: False) == (0 if answers else 1)
    (claim,) = store.claim_many(["q|orders|m1"], 60.0)
    assert claim.status is (ClaimStatus.DONE if answers else ClaimStatus.IN_PROGRESS)
