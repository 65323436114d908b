"""Durations in the arguments of users."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from reliable_mq import KillSwitch, Queue
from reliable_mq._util.validation import seconds
from reliable_mq.deadletters import Filter
from reliable_mq.errors import ConfigurationError
from reliable_mq.settings import ConnectionSettings, Credentials, Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable

LOGIN = Credentials("user", "password")


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


@pytest.mark.parametrize(
    "make",
    [
        lambda given: ConnectionSettings(endpoints=(Endpoint("h", 1),), credentials=LOGIN, connect_timeout=given),
        lambda given: Credentials("user", "token", expires_in=given),
        lambda given: Filter(older_than=given, newer_than=given),
        lambda given: KillSwitch(window=given, pause=given, longest_pause=given),
        lambda given: Queue("q", message_ttl=given),
        lambda given: Queue("q", delayed_retry=(given, given)),
        lambda given: Queue("q", type="stream", max_age=given),
    ],
)
def test_equal_durations_make_equal_objects(make: Callable[[float | timedelta], object]) -> None:
    """A topology, for example, may contain a queue twice only if the two are equal."""
    assert make(timedelta(seconds=5)) == make(5) == make(5.0)
    assert repr(make(timedelta(seconds=5))) == repr(make(5))
