"""Settings of all tests that need no broker."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.properties import TIMES

# On a busy machine any example takes long, which says nothing about it.
settings.register_profile(
    "any machine", settings(), max_examples=50 * TIMES, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
