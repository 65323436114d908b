"""Settings of all tests that need no broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import properties
from tests.new_queues import treat_new_queues_as_old

if TYPE_CHECKING:
    from collections.abc import Iterator

treat_new_queues_as_old()


@pytest.hookimpl(tryfirst=True)  # before the plug-in of hypothesis takes its seed
def pytest_configure(config: pytest.Config) -> None:
    properties.load(config)


@pytest.hookimpl(trylast=True)  # when hypothesis has marked its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    properties.allow_time(items)


def pytest_report_header() -> list[str]:
    return properties.header_lines()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[pytest.TestReport]:
    report: pytest.TestReport = yield
    properties.tell_how_to_repeat(item, report)
    return report
