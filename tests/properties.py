"""How many examples a property gets: few where the tests are run often, many in a soak. And none is too slow."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

__all__ = ["examples", "load", "machine"]

TIMES = int(os.environ.get("RELIABLE_MQ_SOAK_SEEDS", "1"))


def load() -> None:
    """Set what holds for every property: on a busy machine any example takes long, which says nothing about it."""
    settings.register_profile(
        "any machine", settings(), max_examples=50 * TIMES, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any machine")


def examples(count: int) -> settings:
    """Return the settings of a property."""
    return settings(max_examples=count * TIMES)


def machine(examples: int, *, steps: int) -> settings:
    """Return the settings of a state machine."""
    return settings(max_examples=examples * TIMES, stateful_step_count=steps)
