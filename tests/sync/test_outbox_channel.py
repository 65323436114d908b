"""Waiting for an outbox, on the sync API. No broker is needed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import TYPE_CHECKING, NoReturn

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from reliable_mq import BrokerUnavailable, Message, OutboxError, Publisher, PublishError, UsageError
from reliable_mq.core.outbox import NewRow, OutboxRow
from reliable_mq.outbox import SQLAlchemyOutbox, SQLiteOutbox, sqlite_relay
from reliable_mq.outbox.relay import OutboxWriter
from reliable_mq.outbox.sqlalchemy_relay import SQLAlchemyRowLeases
from reliable_mq.sync.outbox_channel import OutboxChannel, RelayPublisher
from reliable_mq.testing.waiting import wait_until
from tests.outbox.late import InterruptedQuestion, LateQuestion, on_time
from tests.refused_threads import refusing_threads

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from reliable_mq import Confirmation
    from reliable_mq.core.outbox import RowSettlement
    from reliable_mq.outbox.protocol import RowBatch

NOBODY = "amqp://guest:guest@127.0.0.1:1/"


def test_who_flushes_while_the_publisher_is_closed_is_told(tmp_path: Path) -> None:
    """Nothing relays the remaining rows any more, so the wait would never end."""
    publisher = Publisher("amqp://guest:guest@127.0.0.1:1/", outbox=SQLiteOutbox(tmp_path / "outbox"))
    publisher.publish(Message(b"1"), routing_key="orders")
    with ThreadPoolExecutor() as pool:
        flushed = pool.submit(publisher.flush)
        with pytest.raises(TimeoutError):
            publisher.flush(0.1)
        publisher.close(0)
        with pytest.raises(UsageError, match="for the next start"):
            flushed.result(20)
    with pytest.raises(UsageError, match="for the next start"):
        publisher.flush()


def test_a_flush_that_asks_a_closed_outbox_leaves_no_file_open(tmp_path: Path) -> None:
    """The flush opens the file again."""
    outbox = LateQuestion(tmp_path / "outbox")
    publisher = Publisher(NOBODY, outbox=outbox)
    publisher.publish(Message(b""), routing_key="q")
    with ThreadPoolExecutor() as pool:
        flushed = pool.submit(publisher.flush)
        assert outbox.asked.wait(20)
        publisher.close(0)
        with pytest.raises(UsageError, match="for the next start"):
            flushed.result(20)
    assert outbox._connection is outbox._reader is None


def test_a_flush_whose_count_a_close_ends_tells_of_the_close(tmp_path: Path) -> None:
    """The error of the interrupted query is not the reason."""
    outbox = InterruptedQuestion(tmp_path / "outbox")
    publisher = Publisher(NOBODY, outbox=outbox)
    publisher.publish(Message(b""), routing_key="q")
    with ThreadPoolExecutor() as pool:
        flushed = pool.submit(publisher.flush)
        assert outbox.asked.wait(20)
        publisher.close(0)
        with pytest.raises(UsageError, match="for the next start"):
            flushed.result(20)


def test_a_close_that_ends_the_count_of_another_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other one has nothing left to wait for."""
    outbox = InterruptedQuestion(tmp_path / "outbox")
    publisher = Publisher(NOBODY, outbox=outbox)
    publisher.publish(Message(b""), routing_key="q")
    with ThreadPoolExecutor() as pool:
        closed = pool.submit(publisher.close, 20)
        assert outbox.asked.wait(20)
        publisher.close(0)
        closed.result(20)
    assert "failed to close" not in caplog.text


def test_an_opening_that_is_interrupted_leaves_no_relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay would keep the lock, and no other could relay the rows."""

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(OutboxWriter, "start", interrupted)
    outbox = SQLiteOutbox(tmp_path / "outbox")
    publisher = Publisher("amqp://guest:guest@127.0.0.1:1/", outbox=outbox, name="test-open")
    with pytest.raises(KeyboardInterrupt), publisher:
        pytest.fail("it was entered")
    wait_until(
        lambda: not any(thread.name.startswith("test-open") for thread in threading.enumerate()),
        timeout=10,
        what="the end of its threads",
    )
    assert outbox._connection is None


@pytest.mark.parametrize("name", ["publisher-outbox", "publisher-relay", "publisher-outbox-open"])
def test_opening_is_retried_after_its_threads_failed_to_start(tmp_path: Path, name: str) -> None:
    publisher = Publisher(NOBODY, outbox=SQLiteOutbox(tmp_path / "outbox"))
    with refusing_threads(name), pytest.raises(RuntimeError, match="can't start new thread"):
        publisher.publish(Message(b"1"), routing_key="orders")
    assert not sqlite_relay._open_claims
    assert publisher.publish(Message(b"1"), routing_key="orders", timeout=20).status == "stored"
    publisher.close(0)
    assert not sqlite_relay._open_claims


class HangingOutbox(SQLiteOutbox):
    """An outbox that opens when it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_open = threading.Event()
        self.opens = threading.Semaphore(0)

    def open(self) -> None:
        self.opens.release()
        assert self.may_open.wait(60)
        super().open()


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[HangingOutbox]:
    outbox = HangingOutbox(tmp_path / "outbox")
    yield outbox
    outbox.may_open.set()
    wait_until(
        lambda: not any(thread.name.startswith("hanging") for thread in threading.enumerate()),
        timeout=20,
        what="the end of its threads",
    )
    outbox.close()


def test_deadlines_hold_beside_an_opening_that_hangs(hanging: HangingOutbox) -> None:
    """Publishing, flushing and closing end in time.

    A caller that still waits at the close gets an error.
    """
    publisher = Publisher(NOBODY, outbox=hanging, name="hanging")
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(publisher.publish, Message(b""), routing_key="q", timeout=60)
        assert hanging.opens.acquire(timeout=20)
        with on_time(0.5), pytest.raises(OutboxError, match=r"not opened within 0\.5 s"):
            publisher.publish(Message(b""), routing_key="q", timeout=0.5)
        with on_time(0.1), pytest.raises(OutboxError, match="not opened"):
            publisher.flush(0.1)
        with on_time(0.1):
            publisher.close(0.1)
        with pytest.raises(UsageError, match="closed"):
            waits.result(20)


def test_who_notices_the_close_after_the_opening_is_told(
    hanging: HangingOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = OutboxChannel._wait_until

    def wait_for_opening(channel: OutboxChannel, _condition: object, timeout: float) -> bool:
        opening = channel._opening
        assert opening is not None
        return wait(channel, lambda: opening.over, timeout)

    monkeypatch.setattr(OutboxChannel, "_wait_until", wait_for_opening)
    publisher = Publisher(NOBODY, outbox=hanging, name="hanging")
    with ThreadPoolExecutor() as pool:
        entered = pool.submit(publisher.__enter__)
        assert hanging.opens.acquire(timeout=20)
        publisher.close(0)
        hanging.may_open.set()
        with pytest.raises(UsageError, match="closed"):
            entered.result(20)


def test_an_opening_that_hung_is_waited_for_again(hanging: HangingOutbox) -> None:
    """Only one opening runs at a time.

    A publisher that timed out may be opened later.
    """
    publisher = Publisher(NOBODY, outbox=hanging, name="hanging")
    for _ in range(10):
        with pytest.raises(OutboxError, match="not opened"):
            publisher.publish(Message(b""), routing_key="q", timeout=0.01)
    assert hanging.opens.acquire(timeout=20)
    assert not hanging.opens.acquire(blocking=False)
    hanging.may_open.set()
    assert publisher.publish(Message(b""), routing_key="q", timeout=20).status == "stored"
    publisher.close(0)


def test_an_opening_that_nobody_waits_for_any_more_takes_no_hold(hanging: HangingOutbox) -> None:
    """A publisher that was not entered is not left.

    It would keep the lock of its relay.
    """
    publisher = Publisher(NOBODY, outbox=hanging, name="hanging", delivery_timeout=0.1)
    with pytest.raises(OutboxError, match="not opened"), publisher:
        pytest.fail("it was entered")
    hanging.may_open.set()
    wait_until(
        lambda: not any(thread.name.startswith("hanging") for thread in threading.enumerate()),
        timeout=20,
        what="the end of its threads",
    )
    other = SQLiteOutbox(hanging.path)
    other.write([NewRow(Message(b""), "", "q", True, None)], [])
    claims = other.claims()
    assert len(claims.take(1).rows) == 1
    claims.close()
    other.close()


def test_connecting_starts_the_relay(tmp_path: Path) -> None:
    """This holds even without a broker.

    Rows of earlier processes are relayed once there is one.
    """
    publisher = Publisher(NOBODY, outbox=SQLiteOutbox(tmp_path / "outbox"), name="test-connect")
    with pytest.raises(BrokerUnavailable):
        publisher.connect()
    assert any(thread.name == "test-connect-relay" for thread in threading.enumerate())
    publisher.close(0)


def test_an_empty_outbox_is_flushed_without_waiting(tmp_path: Path) -> None:
    with Publisher(NOBODY, outbox=SQLiteOutbox(tmp_path / "outbox"), name="empty") as publisher:
        publisher.flush(0)


class Gated(SQLiteOutbox):
    """An outbox that writes one transaction at a time, when it is released."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.begun = threading.Event()
        self.let = threading.Semaphore(0)
        self.bodies: list[bytes] = []

    def write(self, messages: Sequence[NewRow], settlements: Sequence[RowSettlement]) -> None:
        self.begun.set()
        self.let.acquire()
        self.bodies += [row.message.body[:1] for row in messages]
        super().write(messages, settlements)


def test_small_messages_do_not_keep_a_large_one_from_the_outbox(tmp_path: Path) -> None:
    """Room that is freed little by little is kept for the first caller."""
    outbox = Gated(tmp_path / "outbox")
    publisher = Publisher("amqp://guest:guest@127.0.0.1:1/", outbox=outbox, max_outstanding_bytes=1000)

    def submit(body: bytes) -> None:
        publisher.submit(Message(body), routing_key="orders", timeout=20).result()

    with ThreadPoolExecutor() as pool:
        publisher.submit(Message(b"s" * 100), routing_key="orders")
        lane = publisher._outbox_channel
        assert lane is not None
        assert outbox.begun.wait(10)
        for _ in range(9):
            publisher.submit(Message(b"s" * 100), routing_key="orders")
        large = pool.submit(submit, b"l" * 900)
        wait_until(lambda: len(lane._waiters.waiting) == 1, timeout=10, what="the large message")
        small = pool.submit(submit, b"s" * 100)
        wait_until(lambda: len(lane._waiters.waiting) == 2, timeout=10, what="the small message")
        outbox.let.release(100)
        large.result(20)
        small.result(20)
    publisher.close(0)
    assert outbox.bodies == [b"s"] * 10 + [b"l", b"s"]


@pytest.mark.slow
def test_closing_raises_what_a_hanging_outbox_has_not_stored(tmp_path: Path) -> None:
    """The writer has some messages; others are still in its queue."""
    outbox = Gated(tmp_path / "outbox")
    publisher = Publisher(NOBODY, outbox=outbox)
    confirmations = [publisher.submit(Message(b""), routing_key="q")]
    channel = publisher._outbox_channel
    assert channel is not None
    assert outbox.begun.wait(10)
    confirmations += [publisher.submit(Message(b""), routing_key="q") for _ in range(2)]
    called: Queue[Confirmation] = Queue()
    for confirmation in confirmations[1:]:
        confirmation.add_done_callback(called.put)
    try:
        with pytest.raises(PublishError, match="may be stored yet") as left:
            publisher.close(0.1)
        assert left.value.may_have_arrived
        assert [called.get(timeout=10) for _ in range(2)] == confirmations[1:]
        assert all(isinstance(confirmation.failure(), OutboxError) for confirmation in confirmations)
    finally:
        outbox.let.release(10)


def wait_for_end_of(name: str) -> None:
    wait_until(
        lambda: not any(thread.name.startswith(name) for thread in threading.enumerate()),
        timeout=20,
        what="the end of its threads",
    )


@pytest.mark.slow
def test_a_write_that_hung_leaves_a_closed_outbox_closed(tmp_path: Path) -> None:
    """The path may name another file by now. What was queued behind it is not written."""
    outbox = Gated(tmp_path / "outbox")
    publisher = Publisher(NOBODY, outbox=outbox, name="hung-write")
    publisher.submit(Message(b"1"), routing_key="q")
    channel = publisher._outbox_channel
    assert channel is not None
    assert outbox.begun.wait(10)
    publisher.submit(Message(b"2"), routing_key="q")
    with pytest.raises(PublishError, match="may be stored yet"):
        publisher.close(0.1)
    outbox.let.release(10)
    wait_for_end_of("hung-write")
    assert outbox._connection is None
    assert outbox.bodies == [b"1"]


@pytest.mark.slow
def test_a_take_that_hung_leaves_a_closed_outbox_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are released before."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/database")
    outbox = SQLAlchemyOutbox(engine, create=True)
    takes, released = threading.Event(), threading.Event()
    take = SQLAlchemyRowLeases.take

    def hangs(leases: SQLAlchemyRowLeases, limit: int, retries: int | None = None) -> RowBatch:
        takes.set()
        assert released.wait(20)
        return take(leases, limit, retries)

    monkeypatch.setattr(SQLAlchemyRowLeases, "take", hangs)
    publisher = Publisher(NOBODY, outbox=outbox, name="hung-take")
    publisher.publish(Message(b""), routing_key="q")
    assert takes.wait(20)
    publisher.close(0)
    released.set()
    wait_for_end_of("hung-take")
    assert outbox._runner._loop is None
    leases = outbox.claims()
    assert len(take(leases, 1).rows) == 1
    leases.close()
    outbox.close()


class GoneOutbox(SQLiteOutbox):
    """An outbox whose database disappears when it is told to."""

    gone = False

    def backlog(self, last: int | None = None) -> tuple[int, int | None]:
        if self.gone:
            raise OutboxError("the database is gone")
        return super().backlog(last)

    def close(self) -> None:
        super().close()
        if self.gone:
            raise OutboxError("the database is gone")


def test_closing_without_the_database_is_told_in_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outbox = GoneOutbox(tmp_path / "outbox")
    publisher = Publisher(NOBODY, outbox=outbox)
    publisher.publish(Message(b""), routing_key="q")
    outbox.gone = True
    publisher.close(0.1)
    said = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.getMessage().partition(": ")[2] for record in said] == ["the database is gone"] * 2
    assert not any(record.exc_info for record in said)


def test_an_error_of_sending_ends_no_relay(caplog: pytest.LogCaptureFixture) -> None:
    """The rows are returned without an attempt, and are sent again."""
    rows = [OutboxRow(number, Message(b""), "", "q", True, None, 0, False) for number in (1, 2)]
    sent: list[int] = []

    def send(row: OutboxRow) -> NoReturn:
        sent.append(row.id)
        if len(sent) == 1:
            raise RuntimeError("can't start new thread")
        raise BrokerUnavailable("no broker")

    publisher = RelayPublisher(lambda: None, send)
    for kind in (UsageError, BrokerUnavailable):
        publisher.send(rows)
        assert [(row.id, type(error)) for row, error in publisher.take_settled()] == [(1, kind), (2, kind)]
    assert sent == [1, 1]
    assert "can't start new thread" in caplog.text


def test_a_refused_question_thread_does_not_stop_a_close(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The relay ends and releases its rows, although the only query thread hangs."""
    outbox = LateQuestion(tmp_path / "outbox")
    publisher = Publisher(NOBODY, outbox=outbox)
    publisher.publish(Message(b""), routing_key="q")
    with ThreadPoolExecutor() as pool:
        flushed = pool.submit(publisher.flush)
        assert outbox.asked.wait(20)
        with refusing_threads(""):
            with pytest.raises(TimeoutError, match="can't start new thread"):
                publisher.flush(1)
            publisher.close(1)
        assert not sqlite_relay._open_claims
        outbox.closed.set()
        with pytest.raises(UsageError, match="for the next start"):
            flushed.result(20)
    outbox.close()
    assert caplog.text.count("can't start new thread") == 2, "for the rows that are left, and for the close"
