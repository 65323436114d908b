"""The condition whose block is entered by its lock."""

from __future__ import annotations

import pytest

from reliable_mq._util.threads import Condition


def test_a_condition_is_entered_by_its_lock_alone() -> None:
    """A signal could interrupt the condition's own ``__enter__`` with the lock held."""
    condition = Condition()
    with pytest.raises(TypeError, match="enter the lock"), condition:
        pytest.fail("it was entered")
    with condition.lock:
        condition.notify_all()
        assert not condition.wait(0.001)
