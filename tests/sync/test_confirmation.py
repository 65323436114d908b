"""The time that a caller waits for a confirmation."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from reliable_mq.errors import ConfigurationError
from reliable_mq.sync.confirmation import time_to_wait

if TYPE_CHECKING:
    from reliable_mq._util.validation import Duration


@pytest.mark.parametrize(
    ("timeout", "waits"),
    [
        (None, None),
        (1.5, 1.5),
        (timedelta(minutes=1), 60.0),
        (-0.1, 0.0),
        (timedelta(seconds=-1), 0.0),
        (float("inf"), threading.TIMEOUT_MAX),
        (timedelta.max, threading.TIMEOUT_MAX),
    ],
)
def test_it_waits_as_long_as_a_duration_says(timeout: Duration | None, waits: float | None) -> None:
    """A deadline that has passed leaves no time, and a wait may be endless."""
    assert time_to_wait(timeout) == waits


@pytest.mark.parametrize("timeout", ["1", float("nan"), True, object()])
def test_what_is_no_duration_is_refused(timeout: Any) -> None:
    with pytest.raises(ConfigurationError, match="timeout must be a number of seconds"):
        time_to_wait(timeout)
