"""Tests for your own idempotency store, as a pytest base class.

Every `IdempotencyStore` must pass `StoreContract`. Derive a class from it in a test module, with a fixture that creates
the store::

    class TestMine(StoreContract):
        @pytest.fixture
        def subject(self, tmp_path):
            clock = Clock()
            with MyStore(tmp_path / "store", retention=RETENTION, clock=clock) as store:
                yield StoreUnderTest(store, age=clock.advance, empty=store.clear)

The contract needs the extra ``testing``. The stores of this package also run it. The contract for outboxes is in
:mod:`reliable_mq.testing.outbox_contract`.
"""

# ruff: noqa: S101 -- these are tests

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, multiple, precondition, rule, run_state_machine_as_test

from reliable_mq._util.threads import start_daemon
from reliable_mq.errors import IdempotencyStoreError
from reliable_mq.stores import Claim, ClaimStatus

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

__all__ = [
    "LEASE",
    "RETENTION",
    "StoreCall",
    "StoreContract",
    "StoreOnThread",
    "StoreUnderTest",
    "contended",
    "explain",
]

LEASE, RETENTION = 100.0, 400.0  # seconds, so long that a slow server does not matter
_PATIENCE = 60.0  # seconds
NEW, IN_PROGRESS, DONE, UNREADABLE = (
    ClaimStatus.NEW,
    ClaimStatus.IN_PROGRESS,
    ClaimStatus.DONE,
    ClaimStatus.UNREADABLE,
)


@dataclass
class StoreUnderTest:
    """A store, with functions that control its time and its records.

    Attributes:
        store: The store. Its methods must block, so wrap an asyncio store in a `StoreOnThread`. It must keep records
            for `RETENTION` seconds.
        age: A function that makes a number of seconds pass. It advances the store's clock, or moves the times of its
            records into the past.
        empty: A function that deletes all records.
        rewrite: A function that gives the record of a key the format of a newer version, or None for a store that does
            not outlive its process.
        another: A function that returns a second store on the same records, as another process would create it. The
            fixture closes it. Without it, no test checks that calls of two processes are atomic: a store with a lock of
            its own passes.
    """

    store: Any
    age: Callable[[float], object]
    empty: Callable[[], object]
    rewrite: Callable[[str], object] | None = None
    another: Callable[[], Any] | None = None


class StoreOnThread:
    """A wrapper that gives an asyncio store methods that block.

    The store runs on an event loop in another thread.

    Args:
        make: A function that creates the store. It is called on that event loop.

    Attributes:
        store: The store.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.store = self.run(_called(make))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.__dict__["store"], name)

        def call(*arguments: Any, **options: Any) -> Any:
            return self.run(method(*arguments, **options))

        return call

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the event loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def end(self, closing: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine that closes the store, then stop the event loop."""
        try:
            self.run(closing)
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(10)
            self.loop.close()


async def _called(make: Callable[[], Any]) -> Any:
    return make()


def _claim(subject: StoreUnderTest, key: str = "a", lease: float = LEASE) -> Claim:
    made: Claim = subject.store.claim_many([key], lease)[0]
    return made


class StoreContract:
    """The tests that every idempotency store must pass.

    Derive a class with a fixture ``subject`` that creates a `StoreUnderTest`. The tests of ``reset_many`` run if the
    store has that method, which the replay of dead letters needs.
    """

    @pytest.fixture
    def examples(self) -> int:
        """Return the number of examples that compare the store with its model."""
        return 10

    def test_a_key_is_claimed_once_and_done_once(self, subject: StoreUnderTest) -> None:
        first = _claim(subject)
        assert (first.key, first.status, first.attempts) == ("a", NEW, 0)
        assert _claim(subject).status is IN_PROGRESS
        assert subject.store.complete_many([first]) == [True]
        assert _claim(subject).status is DONE
        assert subject.store.complete_many([first]) == [True]  # repeated, as if the first reply was lost
        assert subject.store.release_many([first], failed=True) == [False]

    def test_a_call_without_keys_returns_nothing(self, subject: StoreUnderTest) -> None:
        assert subject.store.claim_many([], LEASE) == []
        assert subject.store.complete_many([]) == []
        assert subject.store.release_many([], failed=True) == []
        if hasattr(subject.store, "reset_many"):
            assert subject.store.reset_many([]) == []

    def test_results_come_in_the_order_of_the_keys(self, subject: StoreUnderTest) -> None:
        keys = ["c", "a", "d", "b"]
        assert [made.key for made in subject.store.claim_many(["a"], LEASE)] == ["a"]
        made = subject.store.claim_many(keys, LEASE)
        assert [(one.key, one.status) for one in made] == [("c", NEW), ("a", IN_PROGRESS), ("d", NEW), ("b", NEW)]
        stale = Claim("x", NEW, 7)
        assert subject.store.complete_many([made[3], stale, made[0]]) == [True, False, True]
        assert subject.store.release_many([made[0], made[2]], failed=False) == [False, True]

    def test_a_key_given_twice_is_new_once(self, subject: StoreUnderTest) -> None:
        made = subject.store.claim_many(["a", "b", "a"], LEASE)
        assert [one.status for one in made] == [NEW, NEW, IN_PROGRESS]
        assert subject.store.complete_many([made[0], made[0]]) == [True, True]
        assert [one.status for one in subject.store.claim_many(["a", "a"], LEASE)] == [DONE, DONE]
        assert subject.store.release_many([made[1]], failed=True) == [True]
        assert _claim(subject, "b").attempts == 1

    def test_failed_attempts_are_counted_and_no_others(self, subject: StoreUnderTest) -> None:
        assert subject.store.release_many([_claim(subject)], failed=False) == [True]
        assert subject.store.release_many([_claim(subject)], failed=True) == [True]
        again = _claim(subject)
        assert (again.status, again.attempts) == (NEW, 1)
        assert subject.store.release_many([again], failed=False) == [True]
        assert _claim(subject).attempts == 1

    def test_after_its_lease_a_claim_is_stale_once_another_is_made(self, subject: StoreUnderTest) -> None:
        slow = _claim(subject)
        subject.age(LEASE / 2)
        assert _claim(subject).status is IN_PROGRESS
        subject.age(LEASE / 2)
        quick = _claim(subject)
        assert quick.status is NEW
        assert quick.token > slow.token
        assert subject.store.complete_many([slow]) == [False]
        assert subject.store.release_many([slow], failed=True) == [False]
        assert subject.store.complete_many([slow, quick]) == [False, True]

    def test_each_claim_lasts_for_the_lease_of_its_call(self, subject: StoreUnderTest) -> None:
        _claim(subject, "short", LEASE / 4)
        _claim(subject, "long", 2 * LEASE)
        subject.age(LEASE / 2)
        assert [_claim(subject, key).status for key in ("short", "long")] == [NEW, IN_PROGRESS]
        subject.age(1.5 * LEASE + 1)
        assert _claim(subject, "long").status is NEW

    def test_a_claim_that_nobody_took_over_may_still_be_completed(self, subject: StoreUnderTest) -> None:
        slow = _claim(subject)
        subject.age(LEASE + 1)
        assert subject.store.complete_many([slow]) == [True]
        assert _claim(subject).status is DONE

    def test_a_done_key_is_forgotten_after_the_retention(self, subject: StoreUnderTest) -> None:
        done = _claim(subject)
        subject.store.complete_many([done])
        subject.age(RETENTION - LEASE / 2)
        assert _claim(subject).status is DONE
        subject.age(1.5 * LEASE + 1)
        again = _claim(subject)
        assert again.status is NEW
        assert again.token > done.token
        assert subject.store.complete_many([done]) == [False]

    def test_keys_of_any_text_are_told_apart(self, subject: StoreUnderTest) -> None:
        """This includes keys that a database might trim, fold, truncate or refuse."""
        keys = ["a", "A", "a ", " a", "", "ä", "a\u0308", "a\0", "\ud800", "%", "_", "'", "\\", "x" * 200, "x" * 201]
        keys += ["x" * 5000, "sha256:" + "0" * 64, "|", "a|b", "{a}", "\uff21", "ß", "ss", ":k0"]
        made = subject.store.claim_many(keys, LEASE)
        assert [(one.key, one.status) for one in made] == [(key, NEW) for key in keys]
        assert subject.store.complete_many(made) == [True] * len(keys)
        assert {one.status for one in subject.store.claim_many(keys, LEASE)} == {DONE}

    def test_a_call_may_have_thousands_of_keys(self, subject: StoreUnderTest) -> None:
        keys = [f"key-{number}" for number in range(2500)]
        made = subject.store.claim_many(keys, LEASE)
        assert {one.status for one in made} == {NEW}
        assert subject.store.complete_many(made) == [True] * 2500

    def test_a_record_of_a_newer_format_is_neither_read_nor_changed(self, subject: StoreUnderTest) -> None:
        """Row 58 of the fault matrix: the key is `UNREADABLE`, and other keys are claimed."""
        if subject.rewrite is None:
            return  # the records do not outlive the process
        held = _claim(subject, "newer")
        subject.rewrite("newer")
        made = subject.store.claim_many(["newer", "other"], LEASE)
        assert [one.status for one in made] == [UNREADABLE, NEW]
        assert subject.store.complete_many([held, made[1]]) == [False, True]
        assert subject.store.release_many([held], failed=True) == [False]
        if hasattr(subject.store, "reset_many"):
            assert subject.store.reset_many(["newer"]) == [False]

    def test_failed_attempts_can_be_forgotten(self, subject: StoreUnderTest) -> None:
        if not hasattr(subject.store, "reset_many"):
            return
        for key in ("failed", "held", "done"):
            subject.store.release_many([_claim(subject, key)], failed=True)
        held = _claim(subject, "held")
        subject.store.complete_many([_claim(subject, "done")])
        keys = ["failed", "unknown", "held", "done", "failed"]
        assert subject.store.reset_many(keys)[:4] == [True, False, True, False]
        assert subject.store.release_many([held], failed=True) == [True]
        made = subject.store.claim_many(["failed", "held", "done"], LEASE)
        assert [(one.status, one.attempts) for one in made] == [(NEW, 0), (NEW, 1), (DONE, 1)]

    def test_of_many_threads_one_wins_each_key(self, subject: StoreUnderTest) -> None:
        """Half of the threads use the store of another process."""
        stores = [subject.store, subject.another() if subject.another else subject.store]
        keys = [f"key-{number}" for number in range(40)]
        wins: list[Claim] = []
        barrier = threading.Barrier(6)

        def contend(number: int) -> None:
            store, order = stores[number % 2], random.Random(number).sample(keys, len(keys))
            barrier.wait(10)
            for start in range(0, len(keys), 8):
                wins.extend(one for one in store.claim_many(order[start : start + 8], 60.0) if one.token)

        _run_threads([lambda number=number: contend(number) for number in range(6)])  # type: ignore[misc]
        assert sorted(won.key for won in wins) == sorted(keys)

    def test_histories_of_concurrent_callers_are_linearizable(self, subject: StoreUnderTest, examples: int) -> None:
        """Some order of overlapping calls explains all results."""
        another = subject.another() if subject.another else None
        for seed in range(examples // 10 + 1):
            subject.empty()
            history = contended(subject.store, seed, another)
            assert len(history) > 200
            assert all(event.answer is not None for event in history)
            for key in "abc":
                assert explain([event for event in history if event.key == key]), (seed, key)

    def test_the_store_and_the_model_agree(self, subject: StoreUnderTest, examples: int) -> None:
        run_state_machine_as_test(
            lambda: StoreModel(subject),  # type: ignore[arg-type]
            settings=settings(
                max_examples=examples,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )


def _run_threads(functions: Sequence[Callable[[], object]]) -> None:
    """Run functions in parallel threads. Raise the first error."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 -- raised below
            errors.append(error)

    threads = [start_daemon("store contract", guarded, function) for function in functions]
    for thread in threads:
        thread.join(_PATIENCE)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


class StoreCall(NamedTuple):
    """A call for one key, and its result.

    Attributes:
        what: ``claim``, ``brief`` (a claim whose lease ends at once), ``complete``, ``release`` or ``fail``.
        token: The token of the claim to settle.
        answer: The claim that was made, or whether the claim was settled. None if the call raised an error, and took
            effect before ``ended`` or not at all.
        begun, ended: The times of begin and end.
    """

    key: str
    what: str
    token: int
    answer: Any
    begun: float
    ended: float


class _State(NamedTuple):
    """The state of a key in a store.

    After a claim that raised an error, the key is in ``doubt``: the next claim in the same process may get the key.
    """

    kind: str = "free"  # or held, brief, doubt, done
    token: int = 0  # the newest known token
    attempts: int = 0


def explain(events: Sequence[StoreCall], *, asked_again: bool = False) -> bool:
    """Return whether some order of the calls explains their results.

    A history is linearizable if some order of its calls explains every result, and in this order each call takes effect
    at one moment between its begin and its end.

    Args:
        events: The calls for one key.
        asked_again: True if the store repeats a query whose reply was lost. A release may then take effect and still
            return False, and a claim may replace another one whose lease has ended, and still return a third one.
    """
    events = [*events, *filter(None, map(_first_query, events if asked_again else ()))]
    events.sort(key=lambda event: event.begun)
    refuted: set[tuple[frozenset[int], _State]] = set()
    stack: list[tuple[frozenset[int], _State]] = [(frozenset(range(len(events))), _State())]
    while stack:
        left, state = stack.pop()
        if not left:
            return True
        if (left, state) in refuted:
            continue
        refuted.add((left, state))
        first_end = min(events[number].ended for number in left)
        for number in sorted(left, reverse=True):
            if events[number].begun <= first_end:
                after = _after(state, events[number])
                if asked_again and events[number].what in {"release", "fail"} and not events[number].answer:
                    after += _after(state, events[number]._replace(answer=True))
                stack.extend((left - {number}, each) for each in after)
    return False


def _first_query(event: StoreCall) -> StoreCall | None:
    """Return the query without a reply that may precede the query of a claim."""
    repeated = event.what in {"claim", "brief"} and event.answer is not None
    return event._replace(answer=None) if repeated and event.answer.status is not NEW else None


def _after(state: _State, event: StoreCall) -> list[_State]:
    """Return the possible states after a call, or no states if its result is wrong."""
    if event.answer is None:
        return [state, *_after_lost(state, event)]
    if event.what in {"claim", "brief"}:
        made = event.answer
        if made.status is ClaimStatus.DONE:
            return [state] if state.kind == "done" else []
        if made.status is ClaimStatus.IN_PROGRESS:
            return [state] if state.kind in {"held", "brief", "doubt"} else []
        if state.kind in {"free", "brief", "doubt"} and made.token > state.token and made.attempts == state.attempts:
            return [_State("held" if event.what == "claim" else "brief", made.token, made.attempts)]
        return []
    holds = state.token == event.token and state.kind in {"held", "brief"}
    if event.what == "complete":
        if holds:
            return [_State("done", state.token, state.attempts)] if event.answer else []
        return [state] if event.answer == (state.kind == "done" and state.token == event.token) else []
    if holds:
        return [_State("free", state.token, state.attempts + (event.what == "fail"))] if event.answer else []
    return [] if event.answer else [state]


def _after_lost(state: _State, event: StoreCall) -> list[_State]:
    """Return the possible states after a call that took effect but raised an error."""
    if event.what in {"claim", "brief"}:
        return [state._replace(kind="doubt")] if state.kind in {"free", "brief"} else []
    return _after(state, event._replace(answer=True))


def contended(store: Any, seed: int, another: Any = None) -> list[StoreCall]:
    """Make random calls for three keys in five threads. Return their history.

    Some leases end at once.

    Args:
        store: The store.
        seed: The seed of the calls.
        another: A second store on the same records, which two of the threads use, or None.
    """
    stores = [store, store if another is None else another]
    history: list[StoreCall] = []

    def call(method: Callable[..., list[Any]], *arguments: Any, **options: Any) -> list[Any] | None:
        try:
            return method(*arguments, **options)
        except IdempotencyStoreError:
            return None

    def contend(number: int) -> None:
        store, rng = stores[number % 2], random.Random(seed * 100 + number)
        mine: list[Claim] = []
        for _ in range(50):
            begun = time.perf_counter()
            if mine and rng.random() < 0.6:
                chosen = mine.pop(rng.randrange(len(mine)))
                what = rng.choice(["complete", "release", "fail", "fail", "fail", "release"])
                if what == "complete":
                    answers = call(store.complete_many, [chosen])
                    if answers != [False] and rng.random() < 0.3:
                        mine.append(chosen)
                else:
                    answers = call(store.release_many, [chosen], failed=what == "fail")
                [answer] = answers or [None]
                history.append(StoreCall(chosen.key, what, chosen.token, answer, begun, time.perf_counter()))
            else:
                keys = rng.sample("abc", rng.choice([1, 2, 3]))
                brief = rng.random() < 0.3
                made = call(store.claim_many, keys, 1e-6 if brief else 60.0)
                ended = time.perf_counter()
                mine += [one for one in made or () if one.status is NEW]
                what = "brief" if brief else "claim"
                history.extend(
                    StoreCall(key, what, 0, answer, begun, ended)
                    for key, answer in zip(keys, made or repeat(None), strict=False)
                )

    _run_threads([lambda number=number: contend(number) for number in range(5)])  # type: ignore[misc]
    return history


class StoreModel(RuleBasedStateMachine):
    """A store and a model of it, which remembers everything.

    A crashed holder is a claim that is never settled. Invariants:

    - At most one claim on a key can be completed or released: the newest one, until it is settled.
    - A key is done from its completion until at least the end of its retention, and at most one lease longer.
    - Failed attempts add up over releases and are remembered for the same time.
    - The tokens of a key only grow.
    """

    claims = Bundle("claims")

    def __init__(self, subject: StoreUnderTest) -> None:
        super().__init__()
        self.subject = subject
        subject.empty()
        self.now = 0.0
        self.done: dict[str, tuple[int, float, float]] = {}  # token, earliest end, latest end
        self.attempts: dict[str, tuple[int, float, float]] = {}  # count, earliest end, latest end
        self.holder: dict[str, tuple[int, float]] = {}  # newest token, end of the lease
        self.longest: dict[str, float] = {}  # latest time at which a store may still have the key's record
        self.last: dict[str, int] = {}

    @rule(target=claims, keys=st.lists(st.sampled_from("abc"), min_size=1, max_size=4))
    def claim(self, keys: list[str]) -> object:
        answers = self.subject.store.claim_many(keys, LEASE)
        assert [answer.key for answer in answers] == keys
        for answer in answers:
            key = answer.key
            _, least, most = self.done.get(key, (0, 0.0, 0.0))
            if least > self.now or (most > self.now and answer.status is DONE):
                assert answer.status is DONE
            elif self.holder.get(key, (0, 0.0))[1] > self.now:
                assert answer.status is IN_PROGRESS
            else:
                assert answer.status is NEW
                assert answer.token > self.last.get(key, 0)
                assert answer.attempts in self.counts(key)
                self.last[key] = answer.token
                self.holder[key] = (answer.token, self.now + LEASE)
                self.longest[key] = self.now + LEASE + RETENTION
                self.attempts[key] = (answer.attempts, self.longest[key], self.longest[key])
                self.done.pop(key, None)
        return multiple(*(answer for answer in answers if answer.status is NEW))

    @rule(some=st.lists(claims, max_size=4))
    def complete(self, some: list[Claim]) -> None:
        for made, answer in zip(some, self.subject.store.complete_many(some), strict=True):
            token, least, most = self.done.get(made.key, (0, 0.0, 0.0))
            if self.holds(made):
                assert answer
                del self.holder[made.key]
                self.done[made.key] = (made.token, self.now + RETENTION, self.kept(made.key))
                self.attempts[made.key] = (self.attempts[made.key][0], self.now + RETENTION, self.kept(made.key))
            elif token == made.token and most > self.now:
                assert answer or least <= self.now
                if answer:
                    self.done[made.key] = (token, least, max(most, self.now + RETENTION))
            else:
                assert not answer

    @rule(made=claims, failed=st.booleans())
    def release(self, made: Claim, failed: bool) -> None:
        expected = self.holds(made)
        assert self.subject.store.release_many([made], failed=failed) == [expected]
        if expected:
            del self.holder[made.key]
            count = self.attempts[made.key][0] + failed
            self.attempts[made.key] = (count, self.now + RETENTION, self.kept(made.key))

    @precondition(lambda self: hasattr(self.subject.store, "reset_many"))
    @rule(key=st.sampled_from("abc"))
    def reset(self, key: str) -> None:
        [answer] = self.subject.store.reset_many([key])
        _, least, most = self.done.get(key, (0, 0.0, 0.0))
        if least > self.now:
            assert not answer
        elif most <= self.now:
            assert answer in {bool(count) for count in self.counts(key)}
        if answer:
            _, least, most = self.attempts[key]
            self.attempts[key] = (0, least, most)

    @rule(seconds=st.sampled_from([LEASE / 4, LEASE / 2, LEASE, RETENTION + LEASE / 2]))
    def time_passes(self, seconds: float) -> None:
        self.subject.age(seconds)
        self.subject.store.claim_many([], 1.0)
        self.now += seconds
        for key, (_, lease_ends) in list(self.holder.items()):
            if lease_ends + RETENTION <= self.now:
                del self.holder[key]

    def holds(self, made: Claim) -> bool:
        return self.holder.get(made.key, (0, 0.0))[0] == made.token

    def kept(self, key: str) -> float:
        return max(self.longest[key], self.now + RETENTION)

    def counts(self, key: str) -> set[int]:
        """Return the possible counts of failed attempts in the store."""
        count, least, most = self.attempts.get(key, (0, 0.0, 0.0))
        return {count} if least > self.now else {count, 0} if most > self.now else {0}
