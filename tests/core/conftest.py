"""What tests of the core share.

Those marked `traced` are what the coverage of the core is measured by: no examples that are made up by chance, and no
cost of operations, which tracing would slow down.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Cost = Callable[[], float]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is traced."""
    for item in items:
        if Path(__file__).parent not in item.path.parents or not isinstance(item, pytest.Function):
            continue
        if not hasattr(item.obj, "is_hypothesis_test") and "assert_same_cost" not in item.fixturenames:
            item.add_marker("traced")


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
