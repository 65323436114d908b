"""Waiting for a condition."""

from __future__ import annotations

import asyncio
import time
from itertools import count

import pytest

from reliable_mq.testing.waiting import until, wait_until


def test_the_last_look_is_after_the_timeout() -> None:
    """A look that took longer than the timeout does not hide what became true meanwhile."""
    looks = []

    def true_after_the_timeout() -> bool:
        looks.append(time.monotonic())
        if len(looks) == 1:
            time.sleep(0.05)
        return len(looks) == 2

    assert wait_until(true_after_the_timeout, timeout=0.02, what="two looks", interval=0.001)


def test_what_is_not_true_in_time_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"not within 0\.01 s: 3 more"):
        wait_until(lambda: False, timeout=0.01, what=lambda: "3 more", interval=0.001)


def test_on_a_loop_too_what_is_not_true_in_time_is_named() -> None:
    looks = count()
    asyncio.run(until(lambda: next(looks) == 2, 10))
    with pytest.raises(TimeoutError, match=r"not within 0\.01 s: 3 more"):
        asyncio.run(until(lambda: False, 0.01, what="3 more"))
