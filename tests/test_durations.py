"""Durations in the arguments of users."""

from __future__ import annotations

from datetime import timedelta

import pytest

from reliable_mq._util.validation import seconds
from reliable_mq.errors import ConfigurationError


@pytest.mark.parametrize(
    ("given", "read"), [(0, 0.0), (1, 1.0), (0.25, 0.25), (timedelta(minutes=1), 60.0), (1e9, 1e9)]
)
def test_seconds_and_timedeltas_are_read_as_seconds(given: float | timedelta, read: float) -> None:
    """A number is seconds; a timedelta is converted."""
    assert seconds("timeout", given) == read


@pytest.mark.parametrize(
    "given",
    [-1, -0.1, float("nan"), float("inf"), 10**400, 1.1e9, True, "1", None, timedelta(seconds=-1)],
)
def test_what_is_no_duration_is_refused_by_its_name(given: object) -> None:
    """The error names the field and shows the value."""
    with pytest.raises(ConfigurationError, match="timeout must be a number of seconds from 0"):
        seconds("timeout", given)


@pytest.mark.parametrize("given", [0, 0.0, timedelta()])
def test_zero_is_refused_where_a_positive_duration_is_needed(given: float | timedelta) -> None:
    """Zero is a duration, but some waits must be positive."""
    with pytest.raises(ConfigurationError, match="above 0"):
        seconds("interval", given, positive=True)
