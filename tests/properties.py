"""How many examples a property gets, and which ones.

The examples of a plain run are the same every time: their seed is 0. A soak explores: it takes many times the
examples, from a seed that is drawn anew and printed. An example that fails is kept in ``.hypothesis/examples``, and
every later run on the same checkout, of either kind, tries it first, until it passes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from integration.support.seeds import SEED, SOAK, seeds, soak_seeds, soaking

__all__ = ["allow_time", "examples", "header_lines", "load", "machine", "tell_how_to_repeat"]

_TIMEOUT = 120  # seconds for a property with as many examples as a plain run has
FOUND = Path(__file__).parent.parent / ".hypothesis" / "examples"


def load(config: pytest.Config) -> None:
    """Set what holds for every property: which examples it gets, and that none is too slow.

    How long an example takes says nothing about it on a busy machine. A seed of the command line
    (``--hypothesis-seed``) is kept.
    """
    settings.register_profile(
        "any machine",
        settings.get_profile("default"),  # not the one that hypothesis takes of its own accord where CI is set
        max_examples=50 * soak_seeds(),
        derandomize=False,
        database=DirectoryBasedExampleDatabase(FOUND),
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("any machine")
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(seeds()[0])


def examples(count: int) -> settings:
    """Return the settings of a property."""
    return settings(max_examples=count * soak_seeds())


def machine(examples: int, *, steps: int) -> settings:
    """Return the settings of a state machine."""
    return settings(max_examples=examples * soak_seeds(), stateful_step_count=steps)


def allow_time(items: list[pytest.Item]) -> None:
    """Give the properties of a soak the time that so many examples need; those with a fixture ``examples``, too."""
    for item in items:
        property_based = item.get_closest_marker("hypothesis") or "examples" in getattr(item, "fixturenames", ())
        if soaking() and property_based and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_TIMEOUT * soak_seeds()))


def header_lines() -> list[str]:
    """Return what a run prints of its seed."""
    return [f"property tests: {SEED}={seeds()[0]}, {soak_seeds()} times the examples"] if soaking() else []


def tell_how_to_repeat(item: pytest.Item, report: pytest.TestReport) -> None:
    """Add to the report of a property that failed in a soak the command that repeats it."""
    if soaking() and report.failed and item.get_closest_marker("hypothesis"):
        command = f"{SOAK}={soak_seeds()} {SEED}={seeds()[0]} .venv/bin/python -m pytest '{item.nodeid}'"
        kept = f"kept in {FOUND}: every run tries it first; add it as an @example with the mend"
        report.sections.append(("to repeat", f"{command}\n{kept}"))
