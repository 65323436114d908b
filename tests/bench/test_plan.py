"""The order of the rounds and the points of the curves of a benchmark run."""

from __future__ import annotations

from integration.bench.plan import FULL, QUICK, rotated


def test_rotation_puts_each_first_and_varies_who_goes_before() -> None:
    """Each item comes first once in as many rounds as there are items."""
    items = ["a", "b", "c", "d"]
    orders = [rotated(items, number) for number in range(4)]
    assert all(sorted(order) == items for order in orders)
    assert {order[0] for order in orders} == set(items)
    assert len({order[order.index("b") - 1] for order in orders if order[0] != "b"}) > 1
    assert rotated([], 3) == []


def test_no_point_of_a_curve_takes_long_or_much() -> None:
    """Small windows and large messages get fewer messages, but at least one."""
    for plan in (FULL, QUICK):
        for point in plan.points():
            assert 1 <= point.messages <= plan.curve_messages
            assert point.messages * point.size <= plan.curve_bytes
            assert point.messages <= plan.published_one_by_one * point.window


def test_the_full_plan_covers_what_is_promised() -> None:
    """The full plan has the documented ranges and amounts.

    Windows from 1 to 10 000, sizes from 100 B to 1 MiB, 200 000 deliveries, and a million outstanding messages.
    """
    assert (min(FULL.windows), max(FULL.windows)) == (1, 10_000)
    assert (min(FULL.sizes), max(FULL.sizes)) == (100, 1024 * 1024)
    assert (FULL.consumed, FULL.held, FULL.size, FULL.window) == (200_000, 1_000_000, 1024, 2000)
