"""Log records of the driver: demoted on I/O threads, unchanged elsewhere."""

from __future__ import annotations

import logging
import threading
import uuid
from typing import TYPE_CHECKING

import pytest

from reliable_mq._util.logs import demoted_driver_logs

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def driver() -> logging.Logger:
    """A logger of a module of an invented driver."""
    return logging.getLogger(f"driver{uuid.uuid4().hex}.adapters.module")


def package(logger: logging.Logger) -> str:
    return logger.name.partition(".")[0]


def in_io_thread(logger: logging.Logger, work: Callable[[], None]) -> None:
    def run() -> None:
        with demoted_driver_logs(package(logger)):
            work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_records_of_an_io_thread_are_dropped(driver: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    """An error of the driver is only shown if its logger has the level DEBUG."""
    caplog.set_level(logging.INFO)
    in_io_thread(driver, lambda: driver.error("connection lost"))
    assert caplog.records == []


def test_records_of_an_io_thread_are_there_at_debug(driver: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    """At the level DEBUG nothing is missing, including tracebacks."""
    caplog.set_level(logging.DEBUG, logger=package(driver))

    def work() -> None:
        driver.error("connection lost", exc_info=ConnectionResetError())
        driver.debug("as it is")

    in_io_thread(driver, work)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("DEBUG", "connection lost"),
        ("DEBUG", "as it is"),
    ]
    assert caplog.records[0].exc_info


def test_a_handler_for_errors_does_not_see_what_was_demoted(driver: logging.Logger) -> None:
    """A handler with a level compares it with the new level of the record."""
    seen: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record)

    driver.setLevel(logging.DEBUG)
    driver.addHandler(Handler(logging.WARNING))
    in_io_thread(driver, lambda: driver.error("connection lost"))
    assert seen == []


def test_records_of_other_threads_are_untouched(driver: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    """A program that uses the driver itself gets its records as usual."""
    caplog.set_level(logging.INFO)
    in_io_thread(driver, lambda: None)
    driver.error("theirs")
    thread = threading.Thread(target=lambda: driver.warning("theirs too"))
    thread.start()
    thread.join()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", "theirs"),
        ("WARNING", "theirs too"),
    ]


def test_other_packages_are_untouched(driver: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    """Only loggers of the driver's package are filtered.

    A package whose name begins the same is not.
    """
    alike = logging.getLogger(f"{package(driver)}_plugin.module")
    in_io_thread(driver, lambda: alike.error("not the driver's"))
    assert [record.getMessage() for record in caplog.records] == ["not the driver's"]


def test_a_thread_that_was_ours_is_untouched_afterwards(
    driver: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    """The level of a record is only lowered within the block."""
    with demoted_driver_logs(package(driver)):
        driver.error("inside")
    driver.error("after it")
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG] == ["after it"]


def test_asking_twice_filters_once(driver: logging.Logger) -> None:
    """Every I/O thread adds the filter, but it exists once."""
    for _ in range(3):
        in_io_thread(driver, lambda: None)
    assert len(driver.filters) == 1
