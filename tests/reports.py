"""A plug-in that prints figures of tests at the end of a run.

The `conftest` of each suite loads it; it is registered once if several suites run together. The fixtures of the package
print figures, too. They are imported late, so that pytest can still rewrite their assertions if a test loads them as a
plug-in.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["load", "pytest_terminal_summary", "report"]


def load(config: pytest.Config) -> None:
    """Register this plug-in."""
    if not config.pluginmanager.has_plugin(__name__):
        config.pluginmanager.register(sys.modules[__name__], __name__)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures, unless the fixtures of the package are a plug-in."""
    from reliable_mq.testing import fixtures

    if not terminalreporter.config.pluginmanager.has_plugin(fixtures.__name__):
        fixtures.pytest_terminal_summary(terminalreporter)


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return a function that adds a line to the end of the run."""
    from reliable_mq.testing.fixtures import ACCOUNT

    return lambda line: request.node.user_properties.append((ACCOUNT, line))
