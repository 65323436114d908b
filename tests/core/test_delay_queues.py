"""Paths of delay queues: they take the requested time, in a few steps."""

from __future__ import annotations

import pytest
import tenacity
from hypothesis import example, given
from hypothesis import strategies as st

from reliable_mq import ConfigurationError, RetryPolicy
from reliable_mq.core.retry.delay_queues import LONGEST, LONGEST_PATH, SERIES, DelayQueue, DelayQueues


def ladder(*delays: float, jitter: float = 0.0) -> DelayQueues:
    return DelayQueues("orders", RetryPolicy(len(delays) + 1, delays=delays, jitter=jitter))


@given(st.floats(0, 1e9), st.lists(st.floats(0, 1e5), min_size=1, max_size=4))
@example(1e-9, [1.0])
@example(0.1 + 0.2, [0.3])
def test_a_path_takes_as_long_as_asked_and_little_more(delay: float, delays: list[float]) -> None:
    """A path exceeds the delay by at most a second or a tenth, in a few steps."""
    path = ladder(*delays).path(delay)
    asked = min(delay * 1000, LONGEST)
    assert asked - 1e-3 <= sum(path) <= asked + max(1000, asked * 0.1) + 1
    assert len(path) <= LONGEST_PATH // 2
    assert list(path) == sorted(path, reverse=True)


def test_a_delay_of_the_policy_is_kept_exactly_in_one_step() -> None:
    made = ladder(0.25, 7, 61.5, 0)
    assert made.own == (250, 7000, 61500)
    assert [made.path(delay) for delay in (0.25, 7, 61.5, 0)] == [(250,), (7000,), (61500,), ()]


@given(st.lists(st.integers(1, LONGEST), min_size=1, max_size=LONGEST_PATH))
def test_a_foreign_path_takes_as_long_through_our_queues(path: list[int]) -> None:
    made = ladder(0.25, 7)
    ours = made.through(path)
    assert set(ours) <= {*SERIES, *made.own}
    assert sum(ours) >= min(sum(path), LONGEST)
    assert len(ours) <= LONGEST_PATH
    assert made.through(ours) == ours


def test_other_delays_are_put_together_from_a_fixed_series() -> None:
    made = ladder(1.0)
    assert made.path(88) == (50_000, 20_000, 20_000)
    assert made.path(86_400) == (50_000_000, 20_000_000, 20_000_000)
    assert made.path(1e9)[0] <= LONGEST <= sum(made.path(1e9))


@pytest.mark.parametrize(
    "policy",
    [
        RetryPolicy(4, delays=(1, 2, 3), jitter=0.1),
        RetryPolicy(100, backoff=tenacity.wait_incrementing(start=1, increment=1)),
    ],
    ids=["jitter", "many"],
)
def test_random_or_very_many_delays_get_no_queues_of_their_own(policy: RetryPolicy) -> None:
    assert DelayQueues("orders", policy).own == ()


def test_a_delay_queue_gives_back_what_it_has_at_least_once() -> None:
    queue = ladder(10).queue(10_000)
    assert queue.name == "orders.retry.10000"
    assert queue.arguments_for((4, 0)) == {
        "x-queue-type": "quorum",
        "x-delivery-limit": -1,
        "x-message-ttl": 10_000,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "orders",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }


def test_a_name_without_room_for_the_delay_queues_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="leaves no room for those of its delay queues"):
        DelayQueues("q" * 240, RetryPolicy())


def test_a_name_tells_a_delay_queue() -> None:
    assert DelayQueue.of("a.retry.5.retry.1000") == DelayQueue("a.retry.5", 1000)
    assert DelayQueue.of("orders.retry.") is None
    assert DelayQueue.of("orders.retry.01") is None
    assert DelayQueue.of("orders.retry") is None
    assert DelayQueue.of("orders.retry." + "9" * 5000) is None
