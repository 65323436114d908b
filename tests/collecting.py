"""Garbage collection skips objects that existed before the first test.

Otherwise the garbage collector scans them again and again while pytest collects the tests, which takes a sixth of that
time, and then in every test that collects garbage.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
