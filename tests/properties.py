"""The number and the seed of the examples of property tests.

A plain run uses half of the examples, the same every time: their seed is 0. A soak run uses many times as many, from a
random seed that it prints. A failing example is stored in ``.hypothesis/examples``, and every later run of either kind
on the same checkout tries it first until it passes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from integration.support.seeds import SEED, SOAK, seeds, soak_seeds, soaking

__all__ = ["allow_time", "examples", "header_lines", "load", "machine", "scaled", "tell_how_to_repeat"]

_TIMEOUT = 120  # seconds for a property with the number of examples of a plain run
FOUND = Path(__file__).parent.parent / ".hypothesis" / "examples"


def load(config: pytest.Config) -> None:
    """Set the examples of all properties, and disable the deadline of an example.

    On a busy machine the duration of an example is not significant. A seed from the command line
    (``--hypothesis-seed``) is kept.
    """
    settings.register_profile(
        "any machine",
        settings.get_profile("default"),  # not the profile that hypothesis uses if CI is set
        max_examples=scaled(50),
        derandomize=False,
        database=DirectoryBasedExampleDatabase(FOUND),
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("any machine")
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(seeds()[0])


def scaled(count: int) -> int:
    """Return the number of examples in this run, of those of one seed of a soak run."""
    return count * soak_seeds() if soaking() else count // 2


def examples(count: int) -> settings:
    """Return the settings of a property."""
    return settings(max_examples=scaled(count))


def machine(examples: int, *, steps: int) -> settings:
    """Return the settings of a state machine."""
    return settings(max_examples=scaled(examples), stateful_step_count=steps)


def allow_time(items: list[pytest.Item]) -> None:
    """Extend the timeout of tests with examples in a soak run."""
    for item in items:
        property_based = item.get_closest_marker("hypothesis") or "examples" in getattr(item, "fixturenames", ())
        if soaking() and property_based and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_TIMEOUT * soak_seeds()))


def header_lines() -> list[str]:
    """Return the header lines of a run, with the seed of a soak run."""
    return [f"property tests: {SEED}={seeds()[0]}, {soak_seeds()} times the examples"] if soaking() else []


def tell_how_to_repeat(item: pytest.Item, report: pytest.TestReport) -> None:
    """Add the command that repeats a failed property of a soak run to the report."""
    if soaking() and report.failed and item.get_closest_marker("hypothesis"):
        command = f"{SOAK}={soak_seeds()} {SEED}={seeds()[0]} .venv/bin/python -m pytest '{item.nodeid}'"
        kept = f"kept in {FOUND}: every run tries it first; add it as an @example with the mend"
        report.sections.append(("to repeat", f"{command}\n{kept}"))
