"""The memory store: one holder per key, fencing tokens, bounded memory."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from reliable_mq import ConfigurationError, IdempotencyStoreError
from reliable_mq.stores import Claim, ClaimStatus, IdempotencyStore, MemoryStore
from tests.properties import machine

NEW, IN_PROGRESS, DONE = ClaimStatus.NEW, ClaimStatus.IN_PROGRESS, ClaimStatus.DONE


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def claim(store: MemoryStore, key: str = "a", lease: float = 30.0) -> Claim:
    return store.claim_many([key], lease)[0]


def test_it_is_an_idempotency_store() -> None:
    store: IdempotencyStore = MemoryStore()
    assert isinstance(store, IdempotencyStore)


def test_a_key_is_claimed_once_and_done_once(clock: Clock) -> None:
    store = MemoryStore(clock=clock)
    first = claim(store)
    assert (first.status, first.attempts) == (NEW, 0)
    assert claim(store).status is IN_PROGRESS
    assert store.complete_many([first]) == [True]
    assert claim(store).status is DONE
    assert store.complete_many([first]) == [True]  # repeated, because the first answer was lost
    assert store.release_many([first], failed=True) == [False]


def test_a_key_given_twice_is_new_once(clock: Clock) -> None:
    store = MemoryStore(clock=clock)
    assert [made.status for made in store.claim_many(["a", "b", "a"], 1.0)] == [NEW, NEW, IN_PROGRESS]


def test_failed_attempts_are_counted_and_others_are_not(clock: Clock) -> None:
    store = MemoryStore(clock=clock)
    assert store.release_many([claim(store)], failed=False) == [True]
    assert len(store) == 0
    assert store.release_many([claim(store)], failed=True) == [True]
    again = claim(store)
    assert (again.status, again.attempts) == (NEW, 1)
    assert store.release_many([again], failed=False) == [True]
    assert claim(store).attempts == 1


def test_an_expired_lease_is_taken_over_and_its_token_is_stale(clock: Clock) -> None:
    store = MemoryStore(clock=clock)
    slow = claim(store, lease=10.0)
    clock.now += 9.9
    assert claim(store).status is IN_PROGRESS
    clock.now += 0.1
    quick = claim(store, lease=10.0)
    assert quick.status is NEW
    assert quick.token > slow.token
    assert store.complete_many([slow]) == [False]
    assert store.release_many([slow], failed=True) == [False]
    assert store.complete_many([quick]) == [True]


def test_a_lease_that_nobody_took_over_may_still_be_completed(clock: Clock) -> None:
    store = MemoryStore(clock=clock)
    slow = claim(store, lease=10.0)
    clock.now += 11
    assert store.complete_many([slow]) == [True]


def test_a_released_token_is_stale_even_after_a_failure(clock: Clock) -> None:
    store = MemoryStore(clock=clock)
    made = claim(store)
    store.release_many([made], failed=True)
    assert store.complete_many([made]) == [False]
    assert store.release_many([made], failed=True) == [False]


def test_what_is_done_is_forgotten_after_the_retention(clock: Clock) -> None:
    store = MemoryStore(retention=100.0, clock=clock)
    store.complete_many([claim(store)])
    clock.now += 99.9
    assert claim(store).status is DONE
    clock.now += 0.1
    assert claim(store).status is NEW


def test_a_claim_that_is_never_settled_is_forgotten_in_the_end(clock: Clock) -> None:
    store = MemoryStore(retention=100.0, clock=clock)
    claim(store, "abandoned", lease=10.0)
    clock.now += 110
    claim(store, "other")
    assert len(store) == 1


def test_a_full_store_forgets_the_oldest_settled_key_not_a_claim(clock: Clock) -> None:
    store = MemoryStore(max_entries=3, clock=clock)
    held = claim(store, "held")
    store.complete_many([claim(store, "old"), claim(store, "newer")])
    store.complete_many([claim(store, "newest")])
    assert len(store) == 3
    assert [made.status for made in store.claim_many(["newer", "newest", "held"], 1.0)] == [DONE, DONE, IN_PROGRESS]
    assert claim(store, "old").status is NEW  # forgotten, and "newer" is evicted for it
    assert claim(store, "newest").status is DONE
    assert store.complete_many([held]) == [True]


def test_when_full_an_expired_claim_goes_before_what_is_done(clock: Clock) -> None:
    store = MemoryStore(max_entries=2, clock=clock)
    claim(store, "abandoned", lease=10.0)
    store.complete_many([claim(store, "done")])
    clock.now += 10
    claim(store, "next")
    assert claim(store, "done").status is DONE


def test_a_full_store_drops_an_expired_claim_behind_a_live_one(clock: Clock) -> None:
    store = MemoryStore(max_entries=2, clock=clock)
    claim(store, "long", lease=100.0)
    claim(store, "short", lease=10.0)
    clock.now += 10
    assert claim(store, "next").status is NEW
    assert claim(store, "long").status is IN_PROGRESS


def test_when_full_of_claims_it_fails_and_claims_nothing(clock: Clock) -> None:
    store = MemoryStore(max_entries=2, clock=clock)
    claim(store, "a")
    with pytest.raises(IdempotencyStoreError, match="max_entries"):
        store.claim_many(["b", "a", "c"], 30.0)
    assert claim(store, "b").status is NEW


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_entries": 0}, "max_entries"),
        ({"max_entries": 1.5}, "max_entries"),
        ({"retention": 0}, "retention"),
        ({"retention": "a day"}, "retention"),
    ],
)
def test_nonsense_is_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        MemoryStore(**wrong)


def test_of_many_threads_one_wins_each_key() -> None:
    store = MemoryStore()
    keys = [str(number) for number in range(200)]
    wins: list[Claim] = []
    barrier = threading.Barrier(8)

    def contend() -> None:
        barrier.wait(10)
        for key in keys:
            made = store.claim_many([key], 60.0)[0]
            if made.status is NEW:
                wins.append(made)

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(won.key for won in wins) == sorted(keys)
    assert len({won.token for won in wins}) == len(keys)


def test_a_forked_child_does_not_wait_for_a_lock_of_its_parent() -> None:
    """The lock may be held at the fork by a thread that the child does not have."""
    store = MemoryStore()
    claim(store, "parent")
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    with store._lock:
        child = context.Process(
            target=lambda: answers.put([claim(store, key).status.name for key in ("parent", "child")]), daemon=True
        )
        child.start()
        child.join(20)
    assert child.exitcode == 0
    assert answers.get() == ["IN_PROGRESS", "NEW"]
    assert claim(store, "child").status is NEW


class Storing(RuleBasedStateMachine):
    """A store with spare capacity, compared with a model that forgets nothing.

    Invariants:

    - of all claims on a key, at most one can still be completed or released: the newest, until it is settled;
    - a key is done exactly from its completion until its retention is over;
    - failed attempts add up over releases and are remembered for the retention;
    - tokens only grow.
    """

    claims = Bundle("claims")
    LEASE, RETENTION = 10.0, 40.0

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = MemoryStore(retention=self.RETENTION, clock=self.clock)
        self.done: dict[str, tuple[float, int]] = {}  # end of the retention, and the token of the holder
        self.attempts: dict[str, tuple[int, float]] = {}  # number of attempts, and end of the retention
        self.holder: dict[str, tuple[int, float]] = {}  # newest token, and end of its lease
        self.last_token = 0

    @rule(target=claims, keys=st.lists(st.sampled_from("abc"), min_size=1, max_size=3))
    def claim(self, keys: list[str]) -> object:
        now = self.clock.now
        answers = self.store.claim_many(keys, self.LEASE)
        assert [answer.key for answer in answers] == keys
        for answer in answers:
            key = answer.key
            if self.done.get(key, (0.0, 0))[0] > now:
                assert answer.status is DONE
            elif self.holder.get(key, (0, 0.0))[1] > now:
                assert answer.status is IN_PROGRESS
            else:
                assert answer.status is NEW
                assert answer.token > self.last_token
                assert answer.attempts == self.failed(key)
                self.last_token = answer.token
                self.holder[key] = (answer.token, now + self.LEASE)
                self.attempts[key] = (self.failed(key), now + self.LEASE + self.RETENTION)
                self.done.pop(key, None)
        return multiple(*(answer for answer in answers if answer.status is NEW))

    @rule(some=st.lists(claims, max_size=4))
    def complete(self, some: Sequence[Claim]) -> None:
        expected = []
        for made in some:
            if self.holds(made):
                del self.holder[made.key]
                self.attempts.pop(made.key, None)
                self.done[made.key] = (self.clock.now + self.RETENTION, made.token)
            until, token = self.done.get(made.key, (0.0, 0))
            expected.append(until > self.clock.now and token == made.token)
        assert self.store.complete_many(some) == expected

    @rule(made=claims, failed=st.booleans())
    def release(self, made: Claim, failed: bool) -> None:
        expected = self.holds(made)
        assert self.store.release_many([made], failed=failed) == [expected]
        if expected:
            del self.holder[made.key]
            count = self.failed(made.key) + failed
            if count:
                self.attempts[made.key] = (count, self.clock.now + self.RETENTION)

    @rule(seconds=st.sampled_from([0.5, 5.0, 10.0, 45.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.store.claim_many([], 1.0)  # every claim forgets expired records
        for key, (_, lease_ends) in list(self.holder.items()):
            if lease_ends + self.RETENTION <= self.clock.now:
                del self.holder[key]
        for key, (until, _) in list(self.done.items()):
            if until <= self.clock.now:
                del self.done[key]

    @invariant()
    def nothing_is_kept_for_nothing(self) -> None:
        assert len(self.store) <= 3

    def holds(self, made: Claim) -> bool:
        return self.holder.get(made.key, (0, 0.0))[0] == made.token

    def failed(self, key: str) -> int:
        count, until = self.attempts.get(key, (0, 0.0))
        return count if until > self.clock.now else 0


TestStoring = Storing.TestCase
TestStoring.settings = machine(40, steps=40)
