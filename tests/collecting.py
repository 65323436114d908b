"""Garbage collection skips objects that existed before the first test, and what earlier tests left.

Otherwise the garbage collector scans them again and again while pytest collects the tests, which takes a sixth of that
time, and then in every test that collects garbage. Libraries and caches keep more and more objects, which are frozen
after some tests and at the end of each file.
"""

from __future__ import annotations

import gc
from itertools import count
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_TESTS_BETWEEN_FREEZES = 20
_tests_ended = count(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    ends_its_file = nextitem is not None and nextitem.path != item.path
    if ends_its_file or next(_tests_ended) % _TESTS_BETWEEN_FREEZES == 0:
        gc.collect()
        gc.freeze()
