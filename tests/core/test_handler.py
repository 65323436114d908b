"""The order of claim, effect and completion.

It holds whatever the handler, the key function and the store do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq import Ack, DeadLetter, IdempotencyStoreError, RetryLater, UsageError
from reliable_mq.core.consumer.delivery import ChannelGeneration, Delivery
from reliable_mq.core.consumer.handler import (
    ClaimKeys,
    ClaimPolicy,
    Complete,
    Failed,
    GroupProgress,
    NotStarted,
    Release,
    Result,
    RunHandler,
    Skipped,
    SkipReason,
    Step,
    delivery_of,
    failure_of_handler,
    handling,
    settling,
    settling_rest,
)
from reliable_mq.core.idempotency import Claim, ClaimStatus, CommitStatus, StoreHealth, namespace_of
from reliable_mq.stores import MemoryStore
from tests.core.deliveries import delivery, failures

Handler = Callable[[Any], object]
HOUR = 3600.0


def nothing(_argument: object) -> None:
    pass


class Runner:
    """Carries out the steps on a memory store, and notes them.

    A step of a type in ``broken`` fails.
    """

    def __init__(
        self,
        handler: Handler = nothing,
        *,
        store: bool = True,
        batch: bool = False,
        max_attempts: int = 3,
        key: Callable[[Delivery], str | None] | None = None,
        transaction: Callable[..., Any] | None = None,
    ) -> None:
        self.handler = handler
        self.store = MemoryStore()
        self.batch = batch
        self.claiming = None
        if store:
            self.claiming = ClaimPolicy(
                queue="orders",
                namespace="q",
                key=key,
                lease=HOUR,
                max_attempts=max_attempts,
                transaction=transaction,
                clock=lambda: 7.0,
            )
        self.steps: list[Step] = []
        self.broken: set[type] = set()
        self.answers: dict[type, list[Any]] = {}

    def __call__(self, *deliveries: Delivery) -> list[Result]:
        self.progress = GroupProgress()
        self.taken_over: list[Result] = []
        self.gone: list[Delivery] = []
        results: list[Result] = self.carry_out(
            handling(
                deliveries, batch=self.batch, claiming=self.claiming, wall_clock=lambda: 50.0, progress=self.progress
            )
        )
        assert len(results) + len(self.taken_over) == len(deliveries)
        return results

    def take_over(self) -> None:
        """Settle the ended deliveries, as another thread does if a handler runs long."""
        assert self.claiming is not None
        rest = self.progress.take_over()
        self.gone += rest.deliveries
        self.taken_over += self.carry_out(settling_rest(self.claiming, self.progress.claims, rest))

    def settle(self) -> None:
        """Settle what is left, as at the end of a consumer."""
        assert self.claiming is not None
        self.carry_out(settling(self.claiming))

    def carry_out(self, steps: Generator[Step, Any, Any]) -> Any:
        send: Callable[[Any], Step] = steps.send
        answer: Any = None
        while True:
            try:
                step = send(answer)
            except StopIteration as stop:
                return stop.value
            self.steps.append(step)
            try:
                answer, send = self.perform(step), steps.send
            except BaseException as error:
                answer, send = failure_of_handler(error) if isinstance(step, RunHandler) else error, steps.throw

    def perform(self, step: Step) -> object:
        if type(step) in self.broken:
            raise IdempotencyStoreError("no answer")
        if type(step) in self.answers:
            return self.answers[type(step)]
        match step:
            case RunHandler(argument):
                return self.handler(argument)
            case ClaimKeys(keys, lease):
                return self.store.claim_many(keys, lease)
            case Complete(claims):
                return self.store.complete_many(claims)
            case Release(claims, failed):
                return self.store.release_many(claims, failed=failed)

    @property
    def kinds(self) -> list[type]:
        return [type(step) for step in self.steps]


def refuse(_argument: object) -> None:
    raise ValueError("no")


def only(results: list[Result]) -> Result:
    [result] = results
    return result


def test_without_a_store_the_handler_is_called_for_each() -> None:
    seen: list[Delivery] = []
    items = [delivery(1), delivery(2)]
    runner = Runner(seen.append, store=False)
    assert runner(*items) == items == seen


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
@pytest.mark.parametrize("batch", [False, True])
def test_a_handler_that_would_end_its_thread_fails_normally(error: BaseException, batch: bool) -> None:
    """The other deliveries of its group are handled, and no claim remains."""

    def leave(argument: Any) -> None:
        if batch or argument.message_id == "m1":
            raise error

    runner = Runner(leave, batch=batch)
    results = runner(delivery(1, message_id="m1"), delivery(2, message_id="m2"))
    failed = [result for result in results if isinstance(result, Failed)]
    assert [one.failure.exception_type for one in failed] == [type(error).__name__] * (2 if batch else 1)
    assert runner.store.claim_many(["q|orders|m1"], HOUR)[0].status is ClaimStatus.NEW


@pytest.mark.parametrize("batch", [False, True])
def test_a_generator_that_is_closed_at_a_call_ends(batch: bool) -> None:
    """This happens when its task is cancelled. No attempt is counted."""
    steps = handling([delivery()], batch=batch, claiming=None, wall_clock=lambda: 50.0)
    assert isinstance(next(steps), RunHandler)
    steps.close()
    assert inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("batch", [False, True])
def test_what_is_not_begun_is_no_attempt_and_not_claimed(store: bool, batch: bool) -> None:
    def put_off(_argument: object) -> None:
        raise NotStarted

    runner = Runner(put_off, store=store, batch=batch)
    items = [delivery(1, message_id="m1"), delivery(2, message_id="m2")]
    assert runner(*items) == [Skipped(item, SkipReason.NOT_BEGUN) for item in items]
    claims = runner.store.claim_many(["q|orders|m1", "q|orders|m2"], HOUR)
    assert [(claim.status, claim.attempts) for claim in claims] == [(ClaimStatus.NEW, 0)] * 2


def test_a_key_function_that_exits_fails_only_its_delivery() -> None:
    """Only an interruption propagates: on an event loop, it is for the program."""

    def key(item: Delivery) -> str:
        if item.message_id == "m1":
            raise error
        return "m2"

    runner = Runner(key=key)
    error: BaseException = SystemExit(3)
    bad, good = delivery(1, message_id="m1"), delivery(2, message_id="m2")
    failed, handled = runner(bad, good)
    assert isinstance(failed, Failed)
    assert (failed.delivery, failed.failure.exception_type, handled) == (bad, "SystemExit", good)
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        runner(delivery(1, message_id="m1"))


def test_without_a_store_a_failure_is_described_with_its_time() -> None:
    result = only(Runner(refuse, store=False)(delivery()))
    assert isinstance(result, Failed)
    assert (result.failure.exception_type, result.failure.at, result.alone) == ("ValueError", 50.0, True)


def test_a_key_is_claimed_before_and_completed_after_the_handler() -> None:
    runner = Runner()
    item = delivery(message_id="m1")
    assert runner(item) == [item]
    assert runner.kinds == [ClaimKeys, RunHandler, Complete]
    assert runner.steps[0] == ClaimKeys(["q|orders|m1"], HOUR)
    assert runner.store.claim_many(["q|orders|m1"], 1.0)[0].status is ClaimStatus.DONE
    assert item.claim is None


def test_a_duplicate_of_what_is_done_calls_no_handler() -> None:
    runner = Runner()
    runner(delivery(1))
    assert only(runner(copy := delivery(2))) == Skipped(copy, SkipReason.DUPLICATE)
    assert runner.kinds == [ClaimKeys, RunHandler, Complete, ClaimKeys]


def test_what_is_claimed_elsewhere_is_no_attempt() -> None:
    runner = Runner()
    runner.store.claim_many(["q|orders|m1"], HOUR)
    item = delivery()
    assert only(runner(item)) == Skipped(item, SkipReason.IN_PROGRESS)
    assert (runner.kinds, item.attempt) == ([ClaimKeys], 1)


def test_a_record_of_a_newer_version_delays_only_its_delivery() -> None:
    runner = Runner()
    newer, known = delivery(1, message_id="newer"), delivery(2, message_id="known")
    real = runner.store.claim_many(["q|orders|known"], HOUR)
    runner.answers = {ClaimKeys: [Claim("q|orders|newer", ClaimStatus.UNREADABLE), *real]}
    outcome, handled = runner(newer, known)
    assert isinstance(outcome, Skipped)
    assert (outcome.delivery, outcome.reason) == (newer, SkipReason.STORE_FAILED)
    assert "newer version" in outcome.detail
    assert handled is known


def test_a_key_completed_in_a_transaction_is_completed_only_once() -> None:
    """Two deliveries are handled, one of them with its own transaction.

    The store only completes the other one.
    """
    begun: list[Delivery] = []

    def handler(item: Delivery) -> None:
        assert item.inbox_claim is not None
        if item.message_id == "m1":
            item.transaction()
            item.inbox_claim.commit = CommitStatus.DONE

    runner = Runner(handler, transaction=begun.append)
    items = [delivery(1, message_id="m1"), delivery(2, message_id="m2")]
    assert runner(*items) == items
    assert begun == items[:1]
    last = runner.steps[-1]
    assert isinstance(last, Complete)
    assert [made.key for made in last.claims] == ["q|orders|m2"]


def lose_the_answer(item: Delivery) -> None:
    """Raise as if the connection was lost during a COMMIT."""
    assert item.inbox_claim is not None
    item.inbox_claim.commit = CommitStatus.UNKNOWN
    raise ConnectionResetError("no answer to COMMIT")


def test_a_lost_commit_answer_is_no_attempt_if_it_was_committed() -> None:
    """The store no longer has the claim, so the next claim finds the key done.

    This also holds after the last attempt.
    """

    class Committing(Runner):
        def perform(self, step: Step) -> object:
            if isinstance(step, Release):
                self.store.complete_many(step.claims)
            return super().perform(step)

    runner = Committing(lose_the_answer, max_attempts=1, transaction=nothing)
    item = delivery()
    result = only(runner(item))
    assert isinstance(result, Skipped)
    assert (result.reason, item.failures) == (SkipReason.STORE_FAILED, None)
    assert "not known" in result.detail
    assert "ConnectionResetError: no answer to COMMIT" in result.detail
    assert only(runner(item)) == Skipped(item, SkipReason.DUPLICATE)


def test_a_failure_after_its_commit_is_no_attempt() -> None:
    """Its effect is done, so the message is not dead-lettered after the last attempt."""

    def handler(item: Delivery) -> None:
        assert item.inbox_claim is not None
        runner.store.complete_many([item.inbox_claim.claim])
        item.inbox_claim.commit = CommitStatus.DONE
        raise RuntimeError("after the commit")

    runner = Runner(handler, max_attempts=1, transaction=nothing)
    item = delivery()
    result = only(runner(item))
    assert isinstance(result, Skipped)
    assert (result.reason, item.failures) == (SkipReason.STORE_FAILED, None)
    assert "RuntimeError: after the commit" in result.detail
    assert only(runner(item)) == Skipped(item, SkipReason.DUPLICATE)


@pytest.mark.parametrize("commit", [CommitStatus.UNKNOWN, CommitStatus.DONE])
def test_a_dead_letter_after_its_commit_is_dead_lettered(commit: CommitStatus) -> None:
    """The handler chose this, for example after it stored the reason."""

    def handler(item: Delivery) -> None:
        assert item.inbox_claim is not None
        runner.store.complete_many([item.inbox_claim.claim])
        item.inbox_claim.commit = commit
        raise DeadLetter("of no use")

    runner = Runner(handler, transaction=nothing)
    result = only(runner(delivery()))
    assert isinstance(result, Failed)
    assert result.failure.verdict == "of no use"


def test_a_lost_commit_answer_is_an_attempt_if_not_committed() -> None:
    """The store still has the claim."""
    runner = Runner(lose_the_answer, transaction=nothing)
    assert isinstance(only(runner(delivery())), Failed)
    assert runner.store.claim_many(["q|orders|m1"], HOUR)[0].attempts == 1


@pytest.mark.parametrize("batch", [False, True])
def test_a_failure_with_an_unknown_commit_is_no_attempt(batch: bool) -> None:
    """The database is unreachable, so the release gets no answer either."""

    def handler(argument: Any) -> None:
        for item in argument if batch else [argument]:
            item.inbox_claim.commit = CommitStatus.UNKNOWN
        raise ConnectionResetError

    runner = Runner(handler, batch=batch, transaction=nothing)
    runner.broken = {Release}
    results = runner(delivery(1, message_id="m1"), delivery(2, message_id="m2"))
    assert [getattr(result, "reason", None) for result in results] == [SkipReason.STORE_FAILED] * 2
    assert all("IdempotencyStoreError: no answer" in getattr(result, "detail", "") for result in results)


def lose_the_store(_argument: object) -> None:
    """Raise as if the transaction had no connection in time."""
    raise IdempotencyStoreError("no answer within 5 s")


@pytest.mark.parametrize("batch", [False, True])
def test_a_transaction_after_a_takeover_is_no_attempt(batch: bool) -> None:
    """The other holder may have the effect, so no copy is dead-lettered."""
    runner = Runner(lose_the_store, batch=batch, max_attempts=1, transaction=nothing)
    runner.answers = {Release: [False]}
    item = delivery()
    why = "its transaction failed: reliable_mq.errors.IdempotencyStoreError: no answer within 5 s"
    assert only(runner(item)) == Skipped(item, SkipReason.STORE_FAILED, why)
    runner.answers = {}
    assert only(runner(item)) == Skipped(item, SkipReason.IN_PROGRESS)


def test_a_transaction_whose_store_is_gone_is_no_attempt() -> None:
    """This also holds for the store, when it answers again."""
    runner = Runner(lambda item: lose_the_store(item) if runner.broken else None, max_attempts=1, transaction=nothing)
    runner.broken = {Release}
    item = delivery()
    assert only(runner(item)) == Skipped(
        item, SkipReason.STORE_FAILED, "its transaction failed: IdempotencyStoreError: no answer"
    )
    runner.broken = set()
    assert runner(item) == [item]
    assert item.attempt == 1


def test_a_transaction_whose_claim_the_store_has_is_an_attempt() -> None:
    """Otherwise a handler with too small a pool would fail for ever."""
    runner = Runner(lose_the_store, transaction=nothing)
    assert isinstance(only(runner(delivery())), Failed)
    assert runner.store.claim_many(["q|orders|m1"], HOUR)[0].attempts == 1


@pytest.mark.parametrize(
    "error",
    [
        ExceptionGroup("two", [IdempotencyStoreError("no answer"), ValueError("no")]),
        ExceptionGroup("two", [IdempotencyStoreError("no answer"), DeadLetter("of no use")]),
        RetryLater(5),
    ],
)
def test_what_else_a_handler_raises_is_an_attempt(error: Exception) -> None:
    """The store's answer to the release does not matter."""

    def handler(_item: Delivery) -> None:
        raise error

    runner = Runner(handler, transaction=nothing)
    runner.answers = {Release: [False]}
    assert isinstance(only(runner(delivery())), Failed)


def test_a_transaction_needs_a_store_that_has_some() -> None:
    with pytest.raises(UsageError, match="no idempotency store with transactions"):
        delivery().transaction()
    with pytest.raises(UsageError, match="SQLAlchemyStore"):
        raise_of(Runner(lambda item: item.transaction())(delivery()))


def raise_of(results: list[Result]) -> None:
    result = only(results)
    assert isinstance(result, Failed)
    assert result.failure.exception_type == "reliable_mq.errors.UsageError"
    raise UsageError(result.failure.exception_message)


def test_a_failed_attempt_is_released_counted_and_told() -> None:
    runner = Runner(refuse)
    item = delivery()
    result = only(runner(item))
    assert isinstance(result, Failed)
    assert runner.kinds == [ClaimKeys, RunHandler, Release]
    assert runner.store.claim_many(["q|orders|m1"], 1.0)[0].attempts == 1


def test_the_store_count_sets_the_attempt_and_the_last_one() -> None:
    attempts: list[tuple[int, bool]] = []

    def handler(item: Delivery) -> None:
        attempts.append((item.attempt, item.redelivered))
        raise ValueError

    runner = Runner(handler, max_attempts=3)
    for copy in range(1, 4):  # three copies of one message, each failing once
        assert isinstance(only(runner(delivery(copy))), Failed)
    last = delivery(4)
    assert only(runner(last)) == Skipped(last, SkipReason.EXHAUSTED)
    assert attempts == [(1, False), (2, True), (3, True)]
    assert last.failures is not None
    assert last.failures.count == 3
    assert runner.store.claim_many(["q|orders|m1"], 1.0)[0].status is ClaimStatus.NEW  # released, to be checked


def test_the_higher_of_two_counts_holds() -> None:
    runner = Runner(max_attempts=5)
    runner.store.release_many(runner.store.claim_many(["q|orders|m1"], 1.0), failed=True)
    item = delivery()
    item.set_failures(failures(3))
    assert runner(item) == [item]
    assert item.attempt == 4


def test_without_an_id_there_is_nothing_to_claim() -> None:
    for nameless in (delivery(message_id=None), delivery(message_id="")):
        runner = Runner()
        assert only(runner(nameless)) == Skipped(nameless, SkipReason.UNIDENTIFIED)
        assert runner.kinds == []


def test_a_key_function_names_what_is_claimed() -> None:
    runner = Runner(key=lambda item: item.json()["order"])
    item = delivery(body=b'{"order": "7"}')
    assert runner(item) == [item]
    assert runner.steps[0] == ClaimKeys(["q|orders|7"], HOUR)


def test_the_variables_of_a_key_function_reach_no_handler() -> None:
    order: ContextVar[str] = ContextVar("order", default="")
    seen: list[str] = []

    def key(item: Delivery) -> str:
        order.set("1")
        return f"key {item.delivery_tag}"

    Runner(lambda _: seen.append(order.get()), key=key)(delivery(1), delivery(2))
    assert seen == ["", ""]


@pytest.mark.parametrize(("given", "kind"), [(7, "int"), (0, "int"), (b"7", "bytes"), (("7",), "tuple")])
def test_a_key_that_is_no_text_is_named(given: Any, kind: str) -> None:
    runner = Runner(key=lambda _: given)
    result = only(runner(delivery()))
    assert isinstance(result, Failed)
    assert result.failure.exception_message == f"idempotency_key must give text or None, not {kind}"
    assert runner.kinds == []


def test_a_key_function_that_fails_is_a_failed_attempt() -> None:
    runner = Runner(key=lambda item: item.json()["order"])
    result = only(runner(delivery(body=b"no json")))
    assert isinstance(result, Failed)
    assert runner.kinds == []


def test_an_unreadable_message_id_is_a_failure_marked_as_a_flaw() -> None:
    item = Delivery("ctag", 1, False, "", "orders", b"\x00", b"")
    assert isinstance(only(Runner()(item)), Failed)
    assert item.flaw


PART = st.text("a|%27C/", max_size=5)
PLACES = st.tuples(PART, PART, PART)  # cluster, virtual host, queue


@given(PLACES, PLACES, PART.map("x".__add__), PART.map("x".__add__), st.booleans())
def test_keys_of_different_queues_never_meet(
    place: tuple[str, str, str], other: tuple[str, str, str], message_id: str, other_id: str, own: bool
) -> None:
    """This holds for the default namespace and for a custom one."""

    def key(cluster: str, virtual_host: str, queue: str, name: str) -> str | None:
        namespace = namespace_of(cluster, virtual_host)
        claiming = ClaimPolicy(
            queue=queue, namespace=namespace if own else None, key=None, lease=1.0, max_attempts=1, clock=lambda: 7.0
        )
        return claiming.key_of(delivery(message_id=name, source=ChannelGeneration(1, 1, queue, namespace)))

    assert (key(*place, message_id) == key(*other, other_id)) == ((place, message_id) == (other, other_id))


def test_a_key_names_the_virtual_host_of_its_delivery() -> None:
    """The connection may have moved to another cluster since."""
    claiming = ClaimPolicy(queue="orders", key=None, lease=1.0, max_attempts=1, clock=lambda: 7.0)
    keys = [
        claiming.key_of(delivery(message_id="m1", source=ChannelGeneration(1, 1, "orders", namespace_of(cluster, "/"))))
        for cluster in ("shop-a", "shop-b", "shop-b", "shop-a")
    ]
    assert keys == [f"shop-{letter}//|orders|m1" for letter in "abba"]


def test_a_store_that_fails_to_claim_means_no_effect() -> None:
    runner = Runner()
    runner.broken = {ClaimKeys}
    item = delivery()
    assert only(runner(item)) == Skipped(item, SkipReason.STORE_FAILED, "IdempotencyStoreError: no answer")
    assert runner.kinds == [ClaimKeys]


def test_a_failed_completion_is_repeated_without_the_handler() -> None:
    calls: list[object] = []
    runner = Runner(calls.append)
    runner.broken = {Complete}
    item = delivery()
    for _ in range(2):
        assert only(runner(item)) == Skipped(item, SkipReason.STORE_FAILED, "IdempotencyStoreError: no answer")
    runner.broken = set()
    assert runner(item) == [item]
    assert len(calls) == 1
    assert runner.kinds == [ClaimKeys, RunHandler, Complete, Complete, Complete]
    assert item.claim is None


def test_a_completion_with_a_lost_answer_succeeds_when_repeated() -> None:
    calls: list[object] = []

    class Forgetful(Runner):
        def perform(self, step: Step) -> object:
            answer = super().perform(step)
            if self.kinds.count(Complete) == 1:
                raise TimeoutError
            return answer

    runner = Forgetful(calls.append)
    item = delivery()
    assert isinstance(only(runner(item)), Skipped)
    assert runner(item) == [item]
    assert len(calls) == 1


def test_a_claim_that_the_store_lost_is_completed_anew() -> None:
    calls: list[object] = []
    runner = Runner(calls.append)
    item = delivery()
    for _ in range(2):  # the store may lose the next claim, too
        runner.answers = {Complete: [False]}
        result = only(runner(item))
        assert isinstance(result, Skipped)
        assert result.reason is SkipReason.STORE_FAILED
        assert "lease" in result.detail
        runner.store = MemoryStore()
    runner.answers = {}
    assert runner(item) == [item]
    assert (len(calls), item.claim) == (1, None)
    copy = delivery(2)
    assert only(runner(copy)) == Skipped(copy, SkipReason.DUPLICATE)


@pytest.mark.parametrize("failed", [True, False])
def test_what_another_holder_took_over_is_its_own_first(failed: bool) -> None:
    calls: list[object] = []
    runner = Runner(calls.append, max_attempts=1)
    runner.answers = {Complete: [False]}
    item = delivery()
    runner(item)
    runner.answers, runner.store = {}, MemoryStore()
    other = runner.store.claim_many(["q|orders|m1"], HOUR)
    assert only(runner(item)) == Skipped(item, SkipReason.IN_PROGRESS)
    if failed:
        runner.store.release_many(other, failed=True)
        assert runner(item) == [item]
    else:
        runner.store.complete_many(other)
        assert only(runner(item)) == Skipped(item, SkipReason.DUPLICATE)
    assert len(calls) == 1


def test_a_store_that_fails_to_release_changes_no_outcome() -> None:
    runner = Runner(refuse)
    runner.broken = {Release}
    result = only(runner(delivery()))
    assert isinstance(result, Failed)
    assert result.detail == "IdempotencyStoreError: no answer"


def test_a_failed_release_of_an_exhausted_key_changes_nothing() -> None:
    runner = Runner(max_attempts=1)
    runner.store.release_many(runner.store.claim_many(["q|orders|m1"], 1.0), failed=True)
    runner.broken = {Release}
    result = only(runner(delivery()))
    assert isinstance(result, Skipped)
    assert (result.reason, result.detail) == (SkipReason.EXHAUSTED, "IdempotencyStoreError: no answer")


@pytest.mark.parametrize("answer", [[], [Claim("a", ClaimStatus.NEW)] * 2, None])
def test_an_answer_of_another_shape_is_a_store_that_failed(answer: Any) -> None:
    runner = Runner()
    runner.answers = {ClaimKeys: answer}
    result = only(runner(delivery()))
    assert isinstance(result, Skipped)
    assert result.reason is SkipReason.STORE_FAILED
    assert runner.kinds == [ClaimKeys]


def test_a_completion_answered_in_another_shape_is_owed() -> None:
    runner = Runner()
    runner.answers = {Complete: []}
    item = delivery()
    assert only(runner(item)) == Skipped(item, SkipReason.STORE_FAILED, "the store gave 0 answers to 1 questions")
    assert item.claim is not None


def test_a_batch_costs_one_question_each() -> None:
    batches: list[list[Delivery]] = []
    runner = Runner(batches.append, batch=True)
    items = [delivery(tag, message_id=f"m{tag}") for tag in (1, 2, 3)]
    assert runner(*items) == items
    assert runner.kinds == [ClaimKeys, RunHandler, Complete]
    assert batches == [items]


def test_each_item_of_a_batch_gets_its_verdict() -> None:
    def handler(_batch: list[Delivery]) -> object:
        return [Ack, RetryLater(5), DeadLetter("why")]

    runner = Runner(handler, batch=True)
    good, later, dead = (delivery(tag, message_id=f"m{tag}") for tag in (1, 2, 3))
    results = runner(good, later, dead)
    assert good in results
    delays = {result.delivery: result.failure for result in results if isinstance(result, Failed)}
    assert delays[later].delay == 5.0
    assert delays[dead].verdict == "why"
    assert runner.kinds == [ClaimKeys, RunHandler, Release, Complete]


def test_a_batch_exception_blames_no_item_and_counts_for_none() -> None:
    runner = Runner(refuse, batch=True)
    items = [delivery(tag, message_id=f"m{tag}") for tag in (1, 2)]
    results = runner(*items)
    assert [result.alone for result in results if isinstance(result, Failed)] == [False, False]
    last = runner.steps[-1]
    assert isinstance(last, Release)
    assert not last.failed
    assert [claim.attempts for claim in runner.store.claim_many(["q|orders|m1", "q|orders|m2"], 1.0)] == [0, 0]


def test_an_exception_over_a_batch_of_one_is_its_own() -> None:
    result = only(Runner(refuse, batch=True, store=False)(delivery()))
    assert isinstance(result, Failed)
    assert result.alone


def test_a_batch_of_which_nothing_is_new_calls_no_handler() -> None:
    runner = Runner(batch=True)
    runner(delivery(1))
    runner(delivery(2))
    assert runner.kinds == [ClaimKeys, RunHandler, Complete, ClaimKeys]


def test_a_batch_of_mixed_fortunes_has_one_result_each() -> None:
    runner = Runner(batch=True)
    runner(delivery(1, message_id="done"))
    runner.store.claim_many(["q|orders|busy"], HOUR)
    items = [delivery(tag, message_id=name) for tag, name in enumerate(("new", "done", "busy", None, "new"), 2)]
    results = {
        (result if isinstance(result, Delivery) else result.delivery).delivery_tag: result for result in runner(*items)
    }
    assert results[2] is items[0]
    whats = {tag: result.reason for tag, result in results.items() if isinstance(result, Skipped)}
    assert whats == {
        3: SkipReason.DUPLICATE,
        4: SkipReason.IN_PROGRESS,
        5: SkipReason.UNIDENTIFIED,
        6: SkipReason.IN_PROGRESS,
    }


@given(
    st.lists(st.sampled_from(["ok", "fail", "dead"]), min_size=1, max_size=6),
    st.lists(st.sets(st.sampled_from([ClaimKeys, Complete, Release])), min_size=1, max_size=12),
)
def test_whatever_the_store_does_no_effect_happens_twice(handlers: list[str], broken: list[set[type]]) -> None:
    """Copies of one message are handled one after the other.

    Each is handled until it is settled, or until the store has failed often enough.
    """
    effects: list[int] = []
    outcomes = iter(handlers)

    def handler(item: Delivery) -> None:
        assert item.attempt <= 4
        if next(outcomes, "ok") == "ok":
            effects.append(item.delivery_tag)
        else:
            raise ValueError

    runner = Runner(handler, max_attempts=4)
    item = delivery()
    for store_breaks in [*broken, set()]:
        runner.broken = store_breaks
        result = only(runner(item))
        if isinstance(result, Delivery):
            assert effects
            break
        if isinstance(result, Skipped) and result.reason is SkipReason.DUPLICATE:
            assert effects
    assert len(effects) <= 1


def test_a_handler_that_runs_long_holds_up_no_others() -> None:
    """Those that have ended are settled; those that have not begun are released."""
    items = [delivery(number, message_id=f"m{number}") for number in range(1, 6)]

    def handle(item: Delivery) -> None:
        if item is items[0]:
            refuse(item)
        if item is items[2]:
            assert not runner.progress.interrupted
            runner.take_over()
            answers = runner.store.claim_many([f"q|orders|m{number}" for number in range(1, 6)], HOUR)
            found.extend(claim.status for claim in answers)

    found: list[ClaimStatus] = []
    runner = Runner(handle)
    assert runner(*items) == [items[2]]
    new = ClaimStatus.NEW
    assert found == [new, ClaimStatus.DONE, ClaimStatus.IN_PROGRESS, new, new]
    failed, handled, *untried = runner.taken_over
    assert untried == [Skipped(item, SkipReason.NOT_BEGUN) for item in items[3:]]
    assert isinstance(failed, Failed)
    assert (failed.delivery, handled) == (items[0], items[1])
    settled = [[claim.key[-2:] for claim in step.claims] for step in runner.steps if isinstance(step, Complete)]
    assert settled == [["m2"], ["m3"]]
    assert runner.progress.interrupted
    assert runner.progress.left(items) == [items[2]]


def test_a_handler_that_runs_long_holds_up_no_settled_results() -> None:
    """A key of another holder is to be claimed again, and a handler that returned before is to be acked."""
    held, completed, runs = items = [delivery(number, message_id=f"m{number}") for number in (1, 2, 3)]

    def handle(item: Delivery) -> None:
        assert item is runs
        runner.take_over()

    runner = Runner(handle)
    runner.store.claim_many(["q|orders|m1"], HOUR)
    [completed.claim] = runner.store.claim_many(["q|orders|m2"], HOUR)
    assert runner(*items) == [runs]
    assert runner.taken_over == [Skipped(held, SkipReason.IN_PROGRESS), completed]
    assert runner.progress.left(items) == [runs]
    assert not runner.progress.interrupted


def test_a_store_fails_from_its_first_failure_until_it_answers() -> None:
    """Whatever its answer is, and before a handler that runs long has ended."""

    def handle(_item: Delivery) -> None:
        seen.append(runner.claiming.store.failing if runner.claiming else None)

    seen: list[object] = []
    runner = Runner(handle)
    assert runner.claiming is not None
    item = delivery(message_id="m1")
    runner.broken = {ClaimKeys}
    only(runner(item))
    assert runner.claiming.store.failing == (7.0, "IdempotencyStoreError: no answer")
    runner.broken = set()
    runner.answers[ClaimKeys] = []
    only(runner(item))
    assert runner.claiming.store.failing == (7.0, "the store gave 0 answers to 1 questions")
    del runner.answers[ClaimKeys]
    assert only(runner(item)) is item
    assert seen == [None]
    assert runner.claiming.store.failing is None
    runner.broken = {ClaimKeys}
    only(runner(delivery(message_id="m2")))
    runner.broken = set()
    assert only(runner(item)) == Skipped(item, SkipReason.DUPLICATE)
    assert runner.claiming.store.failing is None


def test_a_late_failure_says_nothing_if_the_store_answers() -> None:
    """A call without an answer may time out after all later ones were answered, and be the last one."""
    now = 0.0
    store = StoreHealth(lambda: now)
    store.failed(0.0, "refused")
    first = now = 1.0
    second = now = 2.0
    store.answered()
    now = 3.0
    store.failed(first, "no answer in time")
    store.failed(second, "no answer in time")
    assert store.failing is None
    now = 4.0
    store.failed(3.0, "no answer in time")
    now = 5.0
    store.failed(3.5, "refused")
    assert store.failing == (4.0, "refused")
    store.forget()
    assert store.failing is None


def test_deliveries_that_are_being_begun_are_not_taken_over() -> None:
    """Otherwise another thread could take the first ones, and the last ones would begin before them."""

    def taken_over_meanwhile() -> Iterator[Delivery]:
        for item in items:
            taken.extend(group.take_over().unbegun)
            yield item

    items = [delivery(number) for number in range(3)]
    taken: list[Delivery] = []
    group = GroupProgress()
    assert list(group.begin(taken_over_meanwhile())) == items
    assert not taken


@given(st.lists(st.sampled_from(["returns", "raises", "is taken over"]), min_size=1, max_size=6), st.booleans())
def test_each_result_is_settled_by_one_alone(handlers: list[str], broken: bool) -> None:
    """The deliveries left for the group are those that no other thread took over."""
    items = [delivery(number, message_id=f"m{number}") for number in range(len(handlers))]

    def handle(item: Delivery) -> None:
        match handlers[items.index(item)]:
            case "raises":
                refuse(item)
            case "is taken over":
                runner.take_over()

    runner = Runner(handle)
    runner.broken = {Complete} if broken else set()
    results = runner(*items)
    others = [*map(delivery_of, runner.taken_over)]
    own = [*map(delivery_of, results)]
    assert sorted(one.delivery_tag for one in [*own, *others]) == list(range(len(items)))
    assert set(others) == set(runner.gone)
    assert set(runner.progress.left(items)) == set(own)
    settled = [claim for step in runner.steps if isinstance(step, (Complete, Release)) for claim in step.claims]
    assert len(settled) == len(set(settled)) == len(items)


def test_it_is_a_generator_so_that_both_apis_carry_it_out() -> None:
    assert inspect.isgeneratorfunction(handling)
