"""What is loaded and collected before the first test runs stays to the end: it is not looked at as garbage.

Python would look at it again and again while tests are collected, which takes a sixth of that time, and then in each
test that collects garbage.
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
