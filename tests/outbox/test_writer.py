"""The thread that writes to an outbox, when the outbox fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from queue import Queue
from typing import Any

import pytest

from reliable_mq import Message, OutboxError
from reliable_mq.core.outbox import NewRow, OutboxRow, RowOutcome, RowSettlement
from reliable_mq.core.statistics import OutboxStatistics
from reliable_mq.outbox import SQLiteOutbox, relay
from reliable_mq.outbox.relay import OutboxWriter

DONE = RowSettlement(OutboxRow(1, Message(b""), "", "q", True, None, 0, False), RowOutcome.CONFIRMED)
NEW = NewRow(Message(b"new"), "", "q", True, None)


class Failing(SQLiteOutbox):
    """An outbox whose first writes fail; it records the size of each write."""

    def __init__(self, path: Any, failures: int) -> None:
        super().__init__(path)
        self.failures = failures
        self.asked: list[tuple[int, int]] = []  # numbers of rows and outcomes

    def write(self, rows: Sequence[NewRow], settlements: Sequence[RowSettlement]) -> None:
        self.asked.append((len(rows), len(settlements)))
        if self.failures:
            self.failures -= 1
            raise OutboxError("the disk is full")


class Told:
    """A writer, and queues of its reports."""

    def __init__(self, outbox: SQLiteOutbox) -> None:
        self.stored: Queue[tuple[list[str], OutboxError | None]] = Queue()
        self.settled: Queue[list[RowSettlement]] = Queue()
        self.writer: OutboxWriter[str] = OutboxWriter(
            outbox,
            name="writer",
            on_stored=lambda owners, error: self.stored.put((owners, error)),
            on_settled=self.settled.put,
            statistics=OutboxStatistics(),
        )


@pytest.fixture
def outbox(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Failing]:
    monkeypatch.setattr(relay, "_RETRY_AFTER", 0.01)
    made = Failing(tmp_path / "outbox", failures=2)
    yield made
    made.close()


def test_a_settlement_that_failed_is_retried_until_written(outbox: Failing) -> None:
    """A row that stays in the outbox would be published again."""
    told = Told(outbox)
    told.writer.settle([DONE])
    told.writer.start()
    assert told.settled.get(timeout=20) == [DONE]
    told.writer.stop()
    assert told.writer.join(20)
    assert outbox.asked == [(0, 1)] * 3


def test_a_message_that_could_not_be_stored_is_never_tried_again(outbox: Failing) -> None:
    """Its caller got the error. The outcomes of the same write are retried."""
    told = Told(outbox)
    told.writer.store("mine", NEW)
    told.writer.settle([DONE])
    told.writer.start()
    owners, error = told.stored.get(timeout=20)
    assert (owners, str(error)) == (["mine"], "the disk is full")
    assert told.settled.get(timeout=20) == [DONE]
    told.writer.stop()
    assert told.writer.join(20)
    assert outbox.asked == [(1, 1), (0, 1), (0, 1)]


def test_a_failure_is_reported_before_outcomes_are_retried(outbox: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lock on the table, for example, the next write may take as long as the first one."""
    told = Told(outbox)
    reported: list[bool] = []
    write = outbox.write

    def noting(rows: Sequence[NewRow], settlements: Sequence[RowSettlement]) -> None:
        reported.append(not told.stored.empty())
        write(rows, settlements)

    monkeypatch.setattr(outbox, "write", noting)
    told.writer.store("mine", NEW)
    told.writer.settle([DONE])
    told.writer.start()
    assert told.settled.get(timeout=20) == [DONE]
    told.writer.stop()
    assert told.writer.join(20)
    assert reported == [False, True, True]


class Broken(Failing):
    """An outbox whose first writes raise an unexpected exception."""

    def write(self, rows: Sequence[NewRow], settlements: Sequence[RowSettlement]) -> None:
        self.asked.append((len(rows), len(settlements)))
        if self.failures:
            self.failures -= 1
            raise ZeroDivisionError("a fault of the outbox")


def test_a_callback_exception_ends_neither_writer_nor_reports(tmp_path: Any) -> None:
    """Later messages are stored, and every report is made once and is correct."""
    outbox = Failing(tmp_path / "outbox", failures=0)
    told: Queue[tuple[str, object]] = Queue()

    def on_stored(owners: list[str], error: OutboxError | None) -> None:
        told.put((owners[0], error))
        raise RuntimeError("can't start new thread")

    def on_settled(settlements: list[RowSettlement]) -> None:
        told.put(("settled", settlements))
        raise RuntimeError("a fault of the relay")

    def called() -> None:
        told.put(("called", None))
        raise RuntimeError("a fault of who waits")

    made: OutboxWriter[str] = OutboxWriter(
        outbox, name="writer", on_stored=on_stored, on_settled=on_settled, statistics=OutboxStatistics()
    )
    made.store("first", NEW)
    made.settle([DONE])
    made.call(called)
    made.start()
    assert [told.get(timeout=20) for _ in range(3)] == [("settled", [DONE]), ("first", None), ("called", None)]
    made.store("second", NEW)
    assert told.get(timeout=20) == ("second", None)
    made.stop()
    assert made.join(20)
    assert told.empty()
    outbox.close()


def test_an_outbox_fault_leaves_it_unknown_what_was_stored(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write may have been partial. The outcomes are written later."""
    monkeypatch.setattr(relay, "_RETRY_AFTER", 0.01)
    outbox = Broken(tmp_path / "outbox", failures=2)
    told = Told(outbox)
    told.writer.store("mine", NEW)
    told.writer.settle([DONE])
    told.writer.start()
    owners, error = told.stored.get(timeout=20)
    assert owners == ["mine"]
    assert error is not None
    assert error.may_have_arrived
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert told.settled.get(timeout=20) == [DONE]
    told.writer.stop()
    assert told.writer.join(20)
    assert outbox.asked == [(1, 1), (0, 1), (0, 1)]
    outbox.close()
