"""The prefetch of a reader, which keeps the held bytes bounded."""

from __future__ import annotations

import pytest

from reliable_mq.codec import encode_table, join_properties
from reliable_mq.core.consumer.attempts import broker_counts
from reliable_mq.spark.queue_checks import QueueProfile
from reliable_mq.spark.queue_subscriptions import PrefetchChange, PrefetchChoice, PrefetchController, choose


def controller(
    most: int = 2000, most_bytes: int = 1_000_000, queues: int = 1, limit: int | None = None, first: int = 1
) -> PrefetchController:
    return PrefetchController(PrefetchChoice(most, limit, first), most_bytes=most_bytes, queues=queues)


def fed(hungry: PrefetchController, size: int) -> tuple[int, list[int]]:
    """Deliver unacked messages of one size; return their number and the prefetches."""
    unacked, grants = 0, [hungry.grant(0)]
    while True:
        hungry.received(hungry.granted, hungry.granted * size)
        unacked += hungry.granted
        if hungry.next_change(held=unacked * size, unacked=unacked) is not PrefetchChange.RENEW:
            return unacked, grants
        grants.append(hungry.grant(unacked))


def test_it_begins_with_one_delivery_while_sizes_are_not_known() -> None:
    """The first messages may be the largest ones."""
    assert controller().prefetch == 1
    assert controller(first=64).prefetch == 64
    assert controller(most=10, first=64).prefetch == 10


@pytest.mark.parametrize(
    ("most", "grants"),
    [
        (1, [1]),
        (10, [1, 9]),
        (256, [1, 255]),
        (257, [1, 64, 192]),
        (2000, [1, 64, 1935]),
        (65535, [1, 64, 4160, 61310]),
    ],
)
def test_the_more_sizes_are_known_the_more_is_asked_for(most: int, grants: list[int]) -> None:
    """The number of unacked deliveries never exceeds the limit."""
    assert fed(controller(most=most, most_bytes=10**9), size=100) == (most, grants)


def test_the_first_deliveries_are_bounded_in_bytes() -> None:
    """Only one message is delivered before its size is known."""
    unacked, grants = fed(controller(most=65535, most_bytes=4_000_000), size=256_000)
    assert grants == [1, 15]
    assert unacked * 256_000 <= 1.1 * 4_000_000


def test_several_queues_share_the_limit() -> None:
    """All unacked deliveries count against a new subscription of any queue."""
    hungry = controller(most=2000, queues=2)
    hungry.received(100, 100)
    assert hungry.grant(200) == 1900


def test_large_messages_get_as_many_as_fit() -> None:
    """The queues share the number, and each gets at least one."""
    hungry = controller(queues=2)
    hungry.received(10, 10 * 50_000)
    assert hungry.prefetch == 10
    hungry.received(1, 5_000_000)
    assert hungry.prefetch == 1


def test_it_pauses_while_too_much_is_held() -> None:
    """It resumes when most of the bytes are released, with a prefetch that fits."""
    hungry = controller()
    hungry.received(10, 10 * 100)
    hungry.grant(0)
    hungry.received(1, 900_000)
    assert hungry.next_change(held=1_100_001, unacked=11) is PrefetchChange.PAUSE
    assert hungry.next_change(held=500_000, unacked=5) is PrefetchChange.STAY
    assert hungry.next_change(held=250_000, unacked=2) is PrefetchChange.RENEW
    assert (hungry.grant(2), hungry.paused) == (1, False)


def test_slightly_larger_messages_do_not_end_the_subscription() -> None:
    """The held bytes may exceed the limit by a tenth."""
    hungry = controller()
    hungry.received(64, 64 * 1000)
    assert hungry.grant(0) == 1000
    assert hungry.next_change(held=1000 * 1050, unacked=1000) is PrefetchChange.STAY


def test_it_forgets_large_messages_slowly() -> None:
    """One read of small messages changes the prefetch only slightly."""
    hungry = controller()
    hungry.received(1, 100_000)
    hungry.received(100, 100 * 100)
    assert hungry.prefetch == 12
    for _ in range(40):
        hungry.received(100, 100 * 100)
    assert hungry.prefetch == 2000


# -- the limit for a queue ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "queues", "most", "limit", "first", "says"),
    [
        (None, [QueueProfile("a")], 65535, None, 1, "no queue has a delivery limit: maxBytesPerTrigger bounds"),
        (None, [QueueProfile("a"), QueueProfile("b", 20)], 2000, 20, 1, "queue 'b' has a delivery limit of 20, and"),
        (None, [QueueProfile("a", 30), QueueProfile("b", 20)], 2000, 20, 1, "queue 'b' has a delivery limit of 20"),
        (None, [QueueProfile("a", 20, known=False)], 2000, 20, 1, "arguments of queue 'a' are not known"),
        (None, [QueueProfile("a", single_active_consumer=True)], 64, None, 64, "a single active consumer"),
        (None, [QueueProfile("a", 20, single_active_consumer=True)], 2000, 20, 1, "delivery limit of 20"),
        (500, [QueueProfile("a", 20)], 500, None, 1, "the option prefetch"),
        (500, [QueueProfile("a", single_active_consumer=True)], 500, None, 500, "the option prefetch"),
    ],
)
def test_the_limit_is_the_highest_that_is_safe_for_the_queue(
    given: int | None, queues: list[QueueProfile], most: int, limit: int | None, first: int, says: str
) -> None:
    """An explicit limit takes precedence. The log has the reason."""
    choice = choose(given, queues)
    assert (choice.most, choice.limit, choice.first) == (most, limit, first)
    assert says in choice.reason


# -- a delivery limit --------------------------------------------------------------------------------------------------


def test_on_a_queue_with_a_limit_one_delivery_is_looked_at_first() -> None:
    """It is 1 on a new channel and rises if the delivery was not returned before."""
    careful = controller(limit=20)
    assert careful.granted == careful.prefetch == 1
    careful.received(1, 100)
    assert careful.next_change(held=100, unacked=1) is PrefetchChange.RENEW
    assert careful.grant(1) == 64
    careful.received(64, 6400)
    assert careful.next_change(held=6500, unacked=65) is PrefetchChange.RENEW
    assert careful.grant(65) == 1935
    assert careful.next_change(held=200_000, unacked=2000) is PrefetchChange.STAY
    careful.lost()
    assert careful.prefetch == 1


@pytest.mark.parametrize(
    ("limit", "returned", "prefetch"),
    [
        (20, 0, 2000), (20, 1, 935), (20, 5, 44), (20, 9, 2), (20, 10, 1), (20, 21, 1),
        (5, 1, 95), (5, 2, 4), (5, 3, 1), (2, 0, 2000), (2, 1, 1), (1, 0, 2000), (1, 1, 1), (0, 0, 1), (0, 1, 1),
    ],
)  # fmt: skip
def test_more_returns_of_a_delivery_lower_the_prefetch(limit: int, returned: int, prefetch: int) -> None:
    """From half of the limit on, the prefetch is one."""
    careful = controller(limit=limit)
    careful.received(2000, 200_000)
    careful.returned = returned
    assert careful.prefetch == prefetch


def test_a_late_often_returned_delivery_pauses_the_subscription() -> None:
    careful = controller(limit=20)
    careful.received(1, 100)
    careful.grant(1)
    careful.received(500, 50_000)
    careful.returned = 15
    assert careful.next_change(held=50_000, unacked=501) is PrefetchChange.PAUSE
    assert careful.next_change(held=40_000, unacked=400) is PrefetchChange.STAY
    careful.returned = 0
    assert careful.next_change(held=40_000, unacked=400) is PrefetchChange.RENEW
    assert careful.prefetch == 1
    careful.grant(400)
    assert careful.next_change(held=40_100, unacked=401) is PrefetchChange.STAY


def test_returned_deliveries_are_read_one_by_one_without_a_pause() -> None:
    """With a prefetch of one there is nothing to pause."""
    careful = controller(limit=20)
    careful.received(1, 100)
    careful.returned = 15
    for _ in range(3):
        assert careful.next_change(held=100, unacked=1) is PrefetchChange.STAY
        careful.received(1, 100)


@pytest.mark.parametrize(
    ("headers", "count"),
    [
        (encode_table({"x-delivery-count": 3}), 3),
        (encode_table({"x-delivery-count": -3}), 0),
        (encode_table({"x-delivery-count": "3"}), 0),
        (encode_table({"other": 3}), 0),
        (None, 0),
        (b"\0\0\0\x05\x03foo?", 0),
    ],
)
def test_the_return_count_of_a_delivery_is_read_from_its_headers(headers: bytes | None, count: int) -> None:
    properties = join_properties({} if headers is None else {"headers": headers})
    assert broker_counts(properties)[0] == count
