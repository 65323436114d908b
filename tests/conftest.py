"""Settings of all tests that need no broker, and what several of them share.

Tests of the core and of the codec that are marked `traced` are what the coverage of both is measured by: no examples
that are made up by chance, and no cost of operations, which tracing would slow down.
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

from tests import properties, reports
from tests.collecting import pytest_collection
from tests.new_queues import treat_new_queues_as_old

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["pytest_collection"]  # a hook for every test here

pytest.register_assert_rewrite("reliable_mq.testing.store_contract", "reliable_mq.testing.outbox_contract")
treat_new_queues_as_old()

Cost = Callable[[], float]
TRACED = ("tests/core/", "tests/codec/")


@pytest.hookimpl(tryfirst=True)  # before the plug-in of hypothesis takes its seed
def pytest_configure(config: pytest.Config) -> None:
    properties.load(config)
    reports.load(config)
    # A job that a shell runs in the background has SIGINT ignored, and so have its children; tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # when hypothesis has marked its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    properties.allow_time(items)
    # Modules whose tests wait and those whose tests compute are mixed, so that the processors are busy to the end.
    items.sort(key=lambda item: crc32(item.nodeid.partition("::")[0].encode()))
    _begin_with_slow_tests(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _begin_with_slow_tests(items: list[pytest.Item], processes: int) -> None:
    """Put slow tests first in the part of each process, since pytest-xdist deals out equal parts at the beginning."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    others = iter([item for item in items if not item.get_closest_marker("slow")])
    size, larger = divmod(len(items), processes)
    items.clear()
    for process in range(processes):
        first = slow[process::processes]
        items += [*first, *islice(others, size + (process >= processes - larger) - len(first))]
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
    """Counts the lines of Python that are carried out between two looks at it, as a clock of a test's module.

    They are the same on any machine, whatever else it does. What the interpreter does itself, such as copying a list,
    is one line however long it takes.
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
    """Assert that a message costs the same among few and among many others.

    First in lines of Python, by which many may cost a fifth more at most. Then in CPU time, for what the interpreter
    does in one line: a ratio of 8 leaves room for processor caches, and what is not O(1) is slower by a hundred times.
    Other processes can only add to a time, so the least of several counts.
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
