"""Retry policies: schedule, repr, and refused arguments."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from random import Random
from typing import Any

import pytest
import tenacity
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq import Ack, ConfigurationError, DeadLetter, RetryLater, RetryPolicy

RANDOM = Random(1)
RULES = "retry_on=(OSError,), give_up_on=(KeyError, IndexError)"


def schedule(policy: RetryPolicy, upto: int = 10) -> list[float | None]:
    return [policy.delay(attempt, RANDOM) for attempt in range(1, upto)]


def test_the_default_tries_five_times() -> None:
    assert schedule(RetryPolicy(), 7) == [1.0, 10.0, 60.0, 60.0, None, None]
    assert RetryPolicy().max_attempts == 5


def test_delays_shorter_than_the_attempts_repeat_the_last() -> None:
    policy = RetryPolicy(4, delays=(1, timedelta(minutes=2)))
    assert schedule(policy, 6) == [1.0, 120.0, 120.0, None, None]


def test_one_attempt_is_never_tried_again() -> None:
    assert schedule(RetryPolicy(max_attempts=1), 3) == [None, None]


def test_a_tenacity_wait_is_asked_by_the_number_of_the_attempt() -> None:
    policy = RetryPolicy(4, backoff=tenacity.wait_exponential(multiplier=2, max=6))
    assert schedule(policy, 6) == [2.0, 4.0, 6.0, None, None]


def test_a_function_may_be_the_backoff() -> None:
    assert schedule(RetryPolicy(3, backoff=lambda state: state.attempt_number / 2), 5) == [0.5, 1.0, None, None]


@given(st.floats(0, 1), st.integers(1, 4), st.integers())
def test_jitter_only_adds_and_at_most_its_part(jitter: float, attempt: int, seed: int) -> None:
    policy = RetryPolicy(5, delays=(3, 5, 7), jitter=jitter)
    base = RetryPolicy(5, delays=(3, 5, 7)).delay(attempt, RANDOM)
    delay = policy.delay(attempt, Random(seed))
    assert base is not None
    assert delay is not None
    assert base <= delay <= base * (1 + jitter)


@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        (RetryPolicy(5, delays=(1, 10, 60)), "RetryPolicy(max_attempts=5, delays=(1, 10, 60, 60), backend='queues')"),
        (RetryPolicy(2, delays=(0.5,)), "RetryPolicy(max_attempts=2, delays=(0.5,), backend='queues')"),
        (RetryPolicy(1), "RetryPolicy(max_attempts=1, delays=(), backend='queues')"),
        (
            RetryPolicy(100, delays=(1,), jitter=0.5),
            "RetryPolicy(max_attempts=100, delays=(1, 1, 1, 1, 1, 1, 1, 1, ...), jitter=0.5, backend='queues')",
        ),
        (
            RetryPolicy(3, backoff=tenacity.wait_fixed(4)),
            "RetryPolicy(max_attempts=3, backoff=wait_fixed -> (4, 4), backend='queues')",
        ),
        (
            RetryPolicy(2, retry_on=OSError, give_up_on=[KeyError, IndexError], backend="memory"),
            f"RetryPolicy(max_attempts=2, delays=(1,), {RULES}, backend='memory')",
        ),
    ],
)
def test_the_repr_shows_the_schedule(policy: RetryPolicy, shown: str) -> None:
    assert repr(policy) == shown


def raising(state: tenacity.RetryCallState) -> float:
    raise ZeroDivisionError(state.attempt_number)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_attempts": 1001}, "max_attempts"),
        ({"max_attempts": 2.5}, "max_attempts"),
        ({"max_attempts": True}, "max_attempts"),
        ({"delays": ()}, "delays"),
        ({"delays": "12"}, "delays"),
        ({"delays": 3}, "delays"),
        ({"delays": (1, -1)}, r"delays\[1\]"),
        ({"delays": (float("nan"),)}, r"delays\[0\]"),
        ({"delays": (float("inf"),)}, r"delays\[0\]"),
        ({"delays": (10**400,)}, r"delays\[0\]"),
        ({"delays": (True,)}, r"delays\[0\]"),
        ({"delays": ("1",)}, r"delays\[0\]"),
        ({"delays": (timedelta(seconds=-1),)}, r"delays\[0\]"),
        ({"delays": (1,), "backoff": tenacity.wait_fixed(1)}, "delays and backoff"),
        ({"backoff": 3}, "backoff"),
        ({"backoff": lambda _: None}, "the backoff after attempt 1"),
        ({"backoff": raising}, "backoff raised for attempt 1"),
        ({"jitter": 1.5}, "jitter"),
        ({"jitter": -0.1}, "jitter"),
        ({"jitter": "much"}, "jitter"),
        ({"backend": "disk"}, "backend"),
        ({"retry_on": "OSError"}, "retry_on"),
        ({"retry_on": (OSError, 3)}, "retry_on"),
        ({"give_up_on": int}, "give_up_on"),
        ({"retry_on": (ValueError, FileNotFoundError), "give_up_on": OSError}, "FileNotFoundError is in retry_on"),
    ],
)
def test_nonsense_is_refused_by_name(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        RetryPolicy(**wrong)


def test_the_schedule_asks_the_backoff_once_for_each_attempt() -> None:
    """A backoff that later fails or returns another value has no effect."""
    asked: list[int] = []

    def once(state: tenacity.RetryCallState) -> float:
        assert state.attempt_number not in asked
        asked.append(state.attempt_number)
        return state.attempt_number * 2.0

    policy = RetryPolicy(4, backoff=once)
    assert policy.schedule == (2.0, 4.0, 6.0)
    assert [policy.delay(attempt, RANDOM) for attempt in (1, 2, 3, 4, 1)] == [2.0, 4.0, 6.0, None, 2.0]
    assert "(2, 4, 6)" in repr(policy)
    assert asked == [1, 2, 3]


def test_rules_by_exception() -> None:
    plain = RetryPolicy()
    assert plain.retries(Exception)
    assert plain.for_consumers == ()
    chosen = RetryPolicy(retry_on=(OSError, KeyError), give_up_on=FileNotFoundError)
    assert chosen.for_consumers == ("retry_on", "give_up_on")
    assert RetryPolicy(backend="memory").for_consumers == ("backend",)
    assert [kind for kind in (OSError, TimeoutError, FileNotFoundError, ValueError) if chosen.retries(kind)] == [
        OSError,
        TimeoutError,
    ]
    assert not RetryPolicy(give_up_on=ValueError).retries(UnicodeDecodeError)
    assert not RetryPolicy(retry_on=()).retries(OSError)


def test_what_a_handler_may_raise() -> None:
    assert RetryLater().delay is None
    assert str(RetryLater()) == "as the policy says"
    assert RetryLater(timedelta(minutes=1)).delay == 60.0
    assert str(RetryLater(2.5)) == "in 2.5 s"
    with pytest.raises(ConfigurationError, match="delay"):
        RetryLater(-1)
    assert DeadLetter("no such customer").reason == "no such customer"
    assert repr(Ack()) == "Ack()"


class OrderLocked(RetryLater):
    """A verdict with its own constructor."""

    def __init__(self, order: int, *, holder: str) -> None:
        super().__init__(order)
        self.holder = holder


class OrderRefused(DeadLetter):
    def __init__(self) -> None:
        super().__init__("refused")


@pytest.mark.parametrize(
    "verdict",
    [RetryLater(), RetryLater(5), DeadLetter("x"), OrderLocked(3, holder="a"), OrderRefused()],
    ids=lambda verdict: type(verdict).__name__,
)
@pytest.mark.parametrize("again", [lambda one: pickle.loads(pickle.dumps(one)), copy.copy, copy.deepcopy])
def test_verdicts_can_be_pickled_and_copied(verdict: Exception, again: Callable[[Exception], Exception]) -> None:
    """A process pool breaks if it cannot unpickle an exception."""
    verdict.add_note("in the pool")
    other = again(verdict)
    assert type(other) is type(verdict)
    assert (other.args, other.__dict__) == (verdict.args, verdict.__dict__)
    assert str(other) == str(verdict)


def lock() -> None:
    raise OrderLocked(3, holder="a")


def test_a_process_pool_reports_a_verdict_and_goes_on() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for _ in range(2):
            error = pool.submit(lock).exception(timeout=60)
            assert isinstance(error, OrderLocked)
            assert (error.delay, error.holder) == (3.0, "a")


class NeverAsked(type):
    def __subclasscheck__(cls, subclass: type) -> bool:
        raise RuntimeError("user code")


class Registered(Exception, metaclass=NeverAsked):
    pass


class Derived(Registered):
    pass


def test_exceptions_match_by_inheritance_and_run_no_user_code() -> None:
    policy = RetryPolicy(retry_on=Registered)
    assert policy.retries(Derived)
    assert not policy.retries(ValueError)
    assert not RetryPolicy(give_up_on=Registered).retries(Derived)
    with pytest.raises(ConfigurationError, match="never retried"):
        RetryPolicy(retry_on=Derived, give_up_on=Registered)
