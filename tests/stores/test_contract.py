"""The store contract for the stores that need no server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest

from reliable_mq.stores import Claim, ClaimStatus, MemoryStore
from reliable_mq.stores.protocol import ResettableStore
from reliable_mq.testing import store_contract
from reliable_mq.testing.store_contract import (
    RETENTION,
    StoreCall,
    StoreContract,
    StoreOnThread,
    StoreUnderTest,
    explain,
)
from tests.properties import scaled
from tests.stores import subjects
from tests.stores.subjects import Subject


@pytest.fixture(params=["memory", "sqlite", "sqlalchemy", "sqlalchemy_async"])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    makers = {
        "memory": subjects.memory,
        "sqlite": lambda: subjects.sqlite(tmp_path),
        "sqlalchemy": lambda: subjects.sqlalchemy_sqlite(tmp_path),
        "sqlalchemy_async": lambda: subjects.sqlalchemy_async_sqlite(tmp_path),
    }
    with makers[request.param]() as made:
        yield made


class TestStores(StoreContract):
    @pytest.fixture
    def examples(self, request: pytest.FixtureRequest) -> int:
        return scaled({"memory": 80, "sqlite": 25}.get(request.node.callspec.params["subject"], 10))


def test_a_store_that_hangs_does_not_keep_pytest_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_contract, "_PATIENCE", 0.1)
    before, answers = set(threading.enumerate()), threading.Event()

    with pytest.raises(AssertionError):
        store_contract._run_threads([answers.wait])

    (hanging,) = set(threading.enumerate()) - before
    answers.set()
    hanging.join(20)
    assert hanging.daemon


class LockedStore:
    """A store that reads the shared records and writes them back, under a lock that others do not share."""

    def __init__(self, records: list[MemoryStore]) -> None:
        self._records, self._lock = records, threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                read, changed = self._records[0], MemoryStore(retention=RETENTION)
                changed._claimed, changed._settled = read._claimed.copy(), read._settled.copy()
                changed._tokens = read._tokens
                time.sleep(0.001)
                answer = getattr(changed, name)(*arguments, **options)
                self._records[0] = changed
                return answer

        return call


@pytest.mark.parametrize("shared", [False, True])
def test_a_store_whose_lock_is_of_one_process_is_found(shared: bool) -> None:
    records = [MemoryStore(retention=RETENTION)]
    subject = StoreUnderTest(LockedStore(records), age=lambda _: None, empty=lambda: None)
    if shared:
        subject.another = lambda: LockedStore(records)

    for test in (
        StoreContract().test_of_many_threads_one_wins_each_key,
        lambda subject: StoreContract().test_histories_of_concurrent_callers_are_linearizable(subject, 1),
    ):
        with pytest.raises(AssertionError) if shared else nullcontext():
            test(subject)


def test_a_thread_ends_though_its_store_cannot_be_closed() -> None:
    async def fails() -> NoReturn:
        raise OSError("no connection")

    before = set(threading.enumerate())
    store = StoreOnThread(object)

    with pytest.raises(OSError, match="no connection"):
        store.end(fails())

    assert store.loop.is_closed()
    assert set(threading.enumerate()) == before


def test_every_store_can_forget_failed_attempts(subject: Subject) -> None:
    """The replay of dead letters requires it."""
    assert isinstance(getattr(subject.store, "store", subject.store), ResettableStore)


def test_a_history_in_which_two_hold_a_key_is_refuted() -> None:
    """The checker of histories finds all wrong histories and no correct ones."""

    def claimed(token: int, begun: float, status: ClaimStatus = ClaimStatus.NEW) -> StoreCall:
        return StoreCall("a", "claim", 0, Claim("a", status, token), begun, begun + 1)

    done = StoreCall("a", "complete", 1, True, 2.0, 3.0)
    assert explain([claimed(1, 0.0), done, claimed(0, 4.0, ClaimStatus.DONE)])
    assert explain([claimed(1, 0.0), claimed(0, 0.5, ClaimStatus.IN_PROGRESS), done])
    assert explain([claimed(1, 0.5), claimed(0, 0.0, ClaimStatus.IN_PROGRESS), done])
    assert not explain([claimed(1, 0.0), claimed(2, 1.5)])
    assert not explain([claimed(1, 0.0), done, claimed(2, 4.0)])
    assert not explain([claimed(0, 0.0, ClaimStatus.IN_PROGRESS), claimed(1, 2.0)])
    assert not explain([claimed(1, 0.0), done, StoreCall("a", "release", 1, True, 4.0, 5.0)])
    assert explain([claimed(1, 0.0)._replace(what="brief"), claimed(2, 1.5), done._replace(answer=False)])
    assert not explain([claimed(1, 0.0)._replace(what="brief"), claimed(2, 1.5), done._replace(begun=4, ended=5)])


def test_a_lost_reply_may_be_of_a_call_that_took_effect_or_not() -> None:
    """The claim takes effect at most once, so at most one later holder is allowed."""

    def claimed(token: int | None, begun: float, status: ClaimStatus = ClaimStatus.NEW) -> StoreCall:
        return StoreCall("a", "claim", 0, token and Claim("a", status, token), begun, begun + 1)

    def settled(what: str, answer: bool | None, begun: float) -> StoreCall:
        return StoreCall("a", what, 1, answer, begun, begun + 1)

    assert explain([claimed(None, 0.0), claimed(1, 2.0)])
    assert explain([claimed(None, 0.0), claimed(9, 2.0, ClaimStatus.IN_PROGRESS), claimed(1, 4.0)])
    assert not explain([claimed(None, 0.0), claimed(1, 2.0), claimed(2, 4.0)])
    assert not explain([claimed(1, 0.0), claimed(None, 2.0), claimed(2, 4.0)])
    twice = [claimed(1, 0.0), settled("release", False, 2.0), claimed(2, 4.0)]
    assert [explain(twice, asked_again=again) for again in (False, True)] == [False, True]
    overtaken = [
        claimed(1, 0.0)._replace(what="brief"),
        claimed(9, 2.0, ClaimStatus.IN_PROGRESS)._replace(ended=6.0),  # its first query replaces the brief claim
        settled("complete", False, 2.6)._replace(ended=2.9),
        claimed(3, 3.0),
    ]
    assert [explain(overtaken, asked_again=again) for again in (False, True)] == [False, True]
    for what in ("complete", "release"):
        history = [claimed(1, 0.0), settled(what, None, 2.0)]
        assert explain([*history, claimed(9, 4.0, ClaimStatus.IN_PROGRESS), settled(what, True, 6.0)])
        assert explain([*history, claimed(9, 4.0, ClaimStatus.DONE)]) is (what == "complete")
        assert explain([*history, claimed(2, 4.0)]) is (what == "release")
