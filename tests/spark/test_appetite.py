"""How many deliveries are asked for, so that bytes stay bounded."""

from __future__ import annotations

from reliable_mq.spark.appetite import Appetite, Move


def appetite(most: int = 2000, most_bytes: int = 1_000_000, queues: int = 1) -> Appetite:
    return Appetite(most=most, most_bytes=most_bytes, queues=queues)


def test_it_begins_small_while_sizes_are_not_known() -> None:
    """The first messages may be the largest ones."""
    assert appetite().prefetch == 64
    assert appetite(most=10).prefetch == 10


def test_small_messages_get_all_that_is_allowed() -> None:
    """As soon as the first ones have used up what was granted."""
    hungry = appetite()
    hungry.fed(20, 20 * 100)
    assert hungry.move(held=2000, unacked=20) is Move.STAY
    assert hungry.move(held=6400, unacked=64) is Move.RENEW
    hungry.renewed()
    assert hungry.granted == 2000
    assert hungry.move(held=200_000, unacked=2000) is Move.STAY


def test_large_messages_get_as_many_as_fit() -> None:
    """Shared by the queues, and one at least."""
    hungry = appetite(queues=2)
    hungry.fed(10, 10 * 50_000)
    assert hungry.prefetch == 10
    hungry.fed(1, 5_000_000)
    assert hungry.prefetch == 1


def test_it_pauses_while_too_much_is_held() -> None:
    """And goes on once most of it is gone, with what fits by then."""
    hungry = appetite()
    hungry.fed(10, 10 * 100)
    hungry.renewed()
    hungry.fed(1, 900_000)
    assert hungry.move(held=1_100_001, unacked=11) is Move.PAUSE
    assert hungry.move(held=500_000, unacked=5) is Move.STAY
    assert hungry.move(held=250_000, unacked=2) is Move.RENEW
    hungry.renewed()
    assert (hungry.granted, hungry.paused) == (1, False)


def test_messages_that_are_a_little_larger_do_not_end_the_subscription() -> None:
    """What is asked for is what may be held; what comes may be a tenth more."""
    hungry = appetite()
    hungry.fed(64, 64 * 1000)
    hungry.renewed()
    assert hungry.granted == 1000
    assert hungry.move(held=1000 * 1050, unacked=1000) is Move.STAY


def test_it_forgets_large_messages_slowly() -> None:
    """One read of small ones changes little."""
    hungry = appetite()
    hungry.fed(1, 100_000)
    hungry.fed(100, 100 * 100)
    assert hungry.prefetch == 12
    for _ in range(40):
        hungry.fed(100, 100 * 100)
    assert hungry.prefetch == 2000
