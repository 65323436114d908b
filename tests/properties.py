"""How many examples a property gets: few where the tests are run often, many in a soak."""

from __future__ import annotations

import os

from hypothesis import settings

__all__ = ["TIMES", "examples", "machine"]

TIMES = int(os.environ.get("RELIABLE_MQ_SOAK_SEEDS", "1"))


def examples(count: int) -> settings:
    """Return the settings of a property."""
    return settings(max_examples=count * TIMES)


def machine(examples: int, *, steps: int) -> settings:
    """Return the settings of a state machine."""
    return settings(max_examples=examples * TIMES, stateful_step_count=steps)
