"""Figures of tests, printed at the end of a run: the fixture `report`, and the hook that prints.

A plug-in of all suites, which the `conftest` of each loads: once where several run together. The fixtures of the
package print figures, too. They are imported late: pytest rewrites their assertions once a test loads them as a
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
    """Have the figures of tests printed."""
    if not config.pluginmanager.has_plugin(__name__):
        config.pluginmanager.register(sys.modules[__name__], __name__)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures, unless the fixtures of the package are a plug-in that does."""
    from reliable_mq.testing import fixtures

    if not terminalreporter.config.pluginmanager.has_plugin(fixtures.__name__):
        fixtures.pytest_terminal_summary(terminalreporter)


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """A function that has a line printed at the end of the run."""
    from reliable_mq.testing.fixtures import ACCOUNT

    return lambda line: request.node.user_properties.append((ACCOUNT, line))
