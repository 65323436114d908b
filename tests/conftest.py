"""Settings and fixtures of all tests that need no broker.

The tests of the core and the codec that are marked `traced` measure the coverage of both. They contain no random
examples and no measurements of cost, because tracing is slow.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest

from integration.support.seeds import deselect_for_soak
from tests import properties, reports
from tests.collecting import pytest_collection
from tests.log_records import records_can_be_formatted, restored_loggers
from tests.new_queues import treat_new_queues_as_old
from tests.signal_handlers import restored_handlers

if TYPE_CHECKING:
    from collections.abc import Iterator

# A hook and fixtures for all tests in this directory.
__all__ = ["pytest_collection", "records_can_be_formatted", "restored_handlers", "restored_loggers"]

pytest.register_assert_rewrite("reliable_mq.testing.store_contract", "reliable_mq.testing.outbox_contract")
treat_new_queues_as_old()

Cost = Callable[[], float]
TRACED = ("tests/core/", "tests/codec/")


@pytest.hookimpl(tryfirst=True)  # before the plug-in of hypothesis reads its seed
def pytest_configure(config: pytest.Config) -> None:
    properties.load(config)
    reports.load(config)
    # Background jobs of a shell and their children ignore SIGINT, which tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # after hypothesis has marked its own tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    properties.allow_time(items)
    deselect_for_soak(config, items)
    # Mix modules that wait with modules that compute, so that all processors are busy until the end.
    items.sort(key=lambda item: crc32(item.nodeid.partition("::")[0].encode()))
    _begin_with_slow_tests(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _begin_with_slow_tests(items: list[pytest.Item], processes: int) -> None:
    """Put slow tests first for each process.

    pytest-xdist assigns equal parts of the list to the processes at the start.
    """
    slow = [item for item in items if item.get_closest_marker("slow")]
    others = iter([item for item in items if not item.get_closest_marker("slow")])
    size, larger = divmod(len(items), processes)
    items.clear()
    for process in range(processes):
        first = slow[process::processes]
        space = size + (process >= processes - larger) - len(first)
        items += [*first, *islice(others, max(space, 0))]
    items += others


def pytest_itemcollected(item: pytest.Item) -> None:
    if not isinstance(item, pytest.Function):
        return
    made_up = hasattr(item.obj, "is_hypothesis_test")
    measured = "assert_same_cost" in item.fixturenames
    if item.nodeid.startswith(TRACED) and not made_up and not measured:
        item.add_marker("traced")
    if made_up or measured or "examples" in item.fixturenames or "[uvloop" in item.name:
        item.add_marker("slow")


def pytest_report_header() -> list[str]:
    return properties.header_lines()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[pytest.TestReport]:
    report: pytest.TestReport = yield
    properties.tell_how_to_repeat(item, report)
    return report


class Lines:
    """A clock that counts the executed lines of Python between two calls.

    Replaces the clock of a test module. The count does not depend on the machine or its load. An operation inside the
    interpreter, such as copying a list, is one line however long it takes.
    """

    def __init__(self) -> None:
        self._count = 0
        self._running = False
        self._former: Any = None

    def __call__(self) -> float:
        if self._running:
            sys.settrace(self._former)
        self._running = not self._running
        count = self._count
        if self._running:
            self._former = sys.gettrace()
            sys.settrace(self._trace)
        return float(count)

    def _trace(self, _frame: FrameType, _event: str, _argument: object) -> Any:
        self._count += 1
        return self._trace


@pytest.fixture
def assert_same_cost(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Cost, Cost], None]:
    """Assert that the cost of a message does not depend on the number of others.

    First it counts lines of Python: with many messages, one may cost at most a fifth more. Then it measures CPU time,
    for operations inside the interpreter: a ratio of 8 allows for processor caches, and anything that is not O(1) is a
    hundred times slower. Other processes can only increase a time, so the smallest of several times counts.
    """

    def check(few: Cost, many: Cost) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(request.module, "process_time", Lines())
            ratio = many() / few()
        assert ratio <= 1.2, f"a message costs more lines the more others there are: {ratio:.3f}"
        cheap, dear = min(few() for _ in range(3)), [many()]
        while min(dear) >= 8 * cheap:
            assert len(dear) < 5, f"a message costs more the more others there are: {cheap:.2g} s, and {dear}"
            cheap = min(cheap, few())
            dear.append(many())

    return check
