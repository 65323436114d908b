"""The seeds of fault tests, which make a failure reproducible.

A test with the fixture `seed` gets one number. It is part of the test's name, and so of every report of a failure. A
plain run uses the seed 0, so its result does not depend on chance. A soak run (`RELIABLE_MQ_SOAK_SEEDS`: the number of
seeds) draws its first seed at random and stores it in the environment, so that all of its processes use the same test
names. `RELIABLE_MQ_SEED` sets the first seed of either run.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

SEED = "RELIABLE_MQ_SEED"
SOAK = "RELIABLE_MQ_SOAK_SEEDS"


def soaking() -> bool:
    """Return whether this is `make soak`: many seeds, every broker line."""
    return SOAK in os.environ


def soak_seeds() -> int:
    """Return the number of seeds of a fault test.

    It is also the factor for the number of examples of a property test.
    """
    return int(os.environ.get(SOAK, "1"))


def seeds() -> list[int]:
    """Return the seeds of this run. The first is the one that a single run uses."""
    drawn = random.SystemRandom().randrange(2**32) if soaking() else 0
    first = int(os.environ.setdefault(SEED, str(drawn)))
    source = random.Random(first)
    return [first, *(source.randrange(2**32) for _ in range(soak_seeds() - 1))]


def deselect_for_soak(
    config: pytest.Config, items: list[pytest.Item], repeats: Callable[[pytest.Item], bool] = lambda _: False
) -> None:
    """Deselect, unless this is `make soak`, the tests with the mark ``soak`` and those that `repeats` names."""
    if soaking():
        return
    left = {item for item in items if item.get_closest_marker("soak") is not None or repeats(item)}
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]
