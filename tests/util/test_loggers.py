"""The package's loggers, with handlers of a program that raise."""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reliable_mq
from reliable_mq._util.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Change = Callable[[logging.LogRecord], object]


class Failing(logging.Handler):
    error: BaseException = OSError("no space left on device")

    def handle(self, record: logging.LogRecord) -> bool:
        raise self.error


@pytest.fixture
def handler() -> Iterator[Failing]:
    handler = Failing()
    logger = logging.getLogger("reliable_mq")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_no_logger_raises_what_a_handler_raises(handler: Failing, capsys: pytest.CaptureFixture[str]) -> None:
    for module in pkgutil.walk_packages(reliable_mq.__path__, "reliable_mq."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    modules = [module for name, module in sys.modules.items() if name.startswith("reliable_mq.")]
    loggers = {value for module in modules for value in vars(module).values() if isinstance(value, logging.Logger)}
    assert len(loggers) > 40
    for logger in loggers:
        logger.critical("from %s", logger.name)
        assert "no space left on device\nCall stack:" in capsys.readouterr().err


def test_a_closed_stderr_raises_nothing_either(handler: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(os.devnull).open("w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
    get_logger("reliable_mq.test").critical("lost")


def test_a_handler_cannot_end_a_thread(handler: Failing) -> None:
    """On the main thread SystemExit may come from a signal handler."""
    handler.error = SystemExit(1)
    logger = get_logger("reliable_mq.test")
    went_on = threading.Event()

    def run() -> None:
        logger.critical("lost")
        went_on.set()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert went_on.is_set()
    with pytest.raises(SystemExit):
        logger.critical("lost")


def test_an_interrupt_leaves_the_call(handler: Failing) -> None:
    handler.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        get_logger("reliable_mq.test").critical("lost")


@pytest.fixture
def change_records() -> Iterator[Callable[[Change], None]]:
    """Return a function that sets a record factory, which calls a function with each record."""
    before = logging.getLogRecordFactory()

    def replace(change: Change) -> None:
        def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
            record = before(*args, **kwargs)
            change(record)
            return record

        logging.setLogRecordFactory(make)

    yield replace
    logging.setLogRecordFactory(before)


def test_a_record_factory_may_set_the_names_of_our_fields(
    change_records: Callable[[Change], None], caplog: pytest.LogCaptureFixture
) -> None:
    change_records(lambda record: vars(record).update(trace_id="theirs"))
    logger = get_logger("reliable_mq.test")
    logger.critical("traced", extra={"trace_id": "ours"})
    logger.critical("not traced")
    assert [vars(record)["trace_id"] for record in caplog.records] == ["ours", "theirs"]


def test_a_record_factory_that_raises_loses_no_line(
    change_records: Callable[[Change], None], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: logging.LogRecord) -> None:
        raise RuntimeError("outside a request")

    change_records(fail)
    get_logger("reliable_mq.test").critical("from %s", "us", extra={"span_id": "s"}, stack_info=True)
    [record] = caplog.records
    assert (record.getMessage(), record.filename, vars(record)["span_id"]) == ("from us", Path(__file__).name, "s")
    assert record.stack_info is not None
    assert "outside a request" in capsys.readouterr().err


@pytest.mark.usefixtures("change_records")  # restores the factory
@pytest.mark.parametrize("extra", [None, {"span_id": "s"}])
def test_a_record_factory_that_makes_none_loses_no_line(
    extra: dict[str, str] | None, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.setLogRecordFactory(lambda *_args, **_kwargs: None)  # type: ignore[arg-type, return-value]
    get_logger("reliable_mq.test").critical("from %s", "us", extra=extra)
    [record] = caplog.records
    assert (record.getMessage(), vars(record).get("span_id")) == ("from us", extra and "s")
    assert "TypeError" in capsys.readouterr().err
