"""What tests of the core share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Cost = Callable[[], float]


@pytest.fixture
def assert_same_cost() -> Callable[[Cost, Cost], None]:
    """Assert that a message costs the same (CPU time) among few and among many others.

    A ratio of 8 leaves room for processor caches; what is not O(1) is slower by a hundred times. The best of three.
    """

    def check(few: Cost, many: Cost) -> None:
        ratios: list[float] = []
        while not ratios or ratios[-1] >= 8:
            assert len(ratios) < 3, f"a message costs more the more others there are: {ratios}"
            ratios.append(many() / few())

    return check
