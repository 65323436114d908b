"""Durations as users give them: seconds, or a ``timedelta``."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from reliable_mq.errors import ConfigurationError

__all__ = ["Duration", "seconds"]

Duration = float | timedelta

LONGEST: Final = 1e9  # seconds, some thirty years: more than a timer can be trusted with


def seconds(field: str, value: Duration, *, positive: bool = False) -> float:
    """Return ``value`` in seconds.

    Args:
        field: the option's name, for the error.
        value: seconds or a timedelta.
        positive: whether 0 is refused too.

    Raises:
        ConfigurationError: it is no duration, negative, or longer than 1e9 seconds.
    """
    number = value.total_seconds() if isinstance(value, timedelta) else value
    in_range = isinstance(number, (int, float)) and not isinstance(number, bool) and 0 <= number <= LONGEST
    if not in_range or (positive and number == 0):
        least = "above 0" if positive else "from 0"
        raise ConfigurationError(f"{field} must be a number of seconds {least} to 1e9, or a timedelta, not {value!r}")
    return float(number)
