"""Where the randomness of a fault test comes from, so that a failure can be repeated.

A test that asks for the fixture `seed` gets one number, which stands in the test's name and so in every report of a
failure. A plain run takes 0: it is green or red, whoever runs it. A soak (`RELIABLE_MQ_SOAK_SEEDS`: how many seeds)
explores: it draws its first seed and leaves it in the environment, so that all of its processes name their tests alike.
`RELIABLE_MQ_SEED` sets the first seed of either.
"""

from __future__ import annotations

import os
import random

SEED = "RELIABLE_MQ_SEED"
SOAK = "RELIABLE_MQ_SOAK_SEEDS"


def soaking() -> bool:
    """Whether this is `make soak`: many seeds, every broker line."""
    return SOAK in os.environ


def soak_seeds() -> int:
    """Return how many seeds a fault test takes, and how many times the examples a property test takes."""
    return int(os.environ.get(SOAK, "1"))


def seeds() -> list[int]:
    """The seeds of this run; the first one is the one that a single run takes."""
    drawn = random.SystemRandom().randrange(2**32) if soaking() else 0
    first = int(os.environ.setdefault(SEED, str(drawn)))
    source = random.Random(first)
    return [first, *(source.randrange(2**32) for _ in range(soak_seeds() - 1))]
