"""Settings of all tests that need no broker."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# On a busy machine any example takes long, which says nothing about it.
settings.register_profile("any machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
