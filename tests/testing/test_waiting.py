"""Waiting for a condition."""

from __future__ import annotations

import time

import pytest

from reliable_mq.testing.waiting import wait_until


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
