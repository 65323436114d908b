"""Waiting for a slow outbox, on the asyncio API. No broker is needed."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from reliable_mq import AsyncPublisher, BrokerUnavailable, Message, OutboxError, Outcome, PublishError, UsageError
from reliable_mq.aio import outbox_channel
from reliable_mq.aio.outbox_channel import AsyncRelayPublisher
from reliable_mq.core.outbox import NewRow, OutboxRow
from reliable_mq.engine import publisher as engine_publisher
from reliable_mq.engine.outbox_channel import MAX_HANGING
from reliable_mq.outbox import SQLiteOutbox, sqlite_relay
from reliable_mq.testing.waiting import until, wait_until
from tests.outbox.late import LateQuestion, on_time
from tests.refused_threads import refusing_threads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    from reliable_mq.core.outbox import RowSettlement
    from reliable_mq.outbox import RowLeases

NOBODY = "amqp://guest:guest@127.0.0.1:1/"


class SlowOutbox(SQLiteOutbox):
    """An outbox that writes when it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.written: list[int] = []  # sizes of bodies
        self.may_write = threading.Event()
        self.open_takes = 0.0  # seconds, on a clock that adds `opened_in`
        self.opened_in = 0.0

    def open(self) -> None:
        super().open()
        self.opened_in = self.open_takes

    def write(self, rows: Sequence[NewRow], settlements: Sequence[RowSettlement]) -> None:
        assert self.may_write.wait(20)
        super().write(rows, settlements)
        self.written.extend(len(row.message.body) for row in rows)


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[SlowOutbox]:
    outbox = SlowOutbox(tmp_path / "outbox.db")
    yield outbox
    outbox.close()


def message(size: int) -> Message:
    return Message(bytes(size))


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_a_large_message_not_stored_does_not_block_small_ones(outbox: SlowOutbox, how: str) -> None:
    async def main() -> None:
        async with AsyncPublisher(NOBODY, outbox=outbox, max_outstanding_bytes=1000) as publisher:

            def submit(size: int, timeout: float = 20) -> asyncio.Task[object]:
                return asyncio.create_task(publisher.submit(message(size), routing_key="q", timeout=timeout))

            first = await publisher.submit(message(600), routing_key="q")
            large, small = submit(700, 0.2 if how == "late" else 20), submit(100)
            await asyncio.sleep(0)
            assert not small.done()
            if how == "cancelled":
                large.cancel()
            await asyncio.wait([large])
            await asyncio.wait_for(small, 5)
            await asyncio.wait_for(submit(101), 5)
            outbox.may_write.set()
            assert (await first).status == Outcome.STORED.value
            await until(lambda: len(outbox.written) == 3)
            assert large.cancelled() or isinstance(large.exception(), OutboxError)

    asyncio.run(main())
    assert outbox.written == [600, 100, 101]


def test_an_admitted_message_is_stored_first_though_cancelled(outbox: SlowOutbox) -> None:
    """A cancellation does not take back an admitted message, as with a broker."""

    async def main() -> None:
        async with AsyncPublisher(NOBODY, outbox=outbox, max_outstanding=1) as publisher:
            first = await publisher.submit(message(1), routing_key="q")
            newcomers: list[asyncio.Task[object]] = []

            def at_once(_: object) -> None:  # as soon as there is room, before a task has noticed
                waiting.cancel()
                newcomers.append(asyncio.create_task(publisher.submit(message(3), routing_key="q")))

            first.add_done_callback(at_once)
            waiting = asyncio.create_task(publisher.submit(message(2), routing_key="q"))
            await asyncio.sleep(0)
            outbox.may_write.set()
            await until(lambda: len(outbox.written) == 3)
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.gather(*newcomers)

    asyncio.run(main())
    assert outbox.written == [1, 2, 3]


def test_awaiting_on_another_loop_leaves_the_right_one_untouched(outbox: SlowOutbox) -> None:
    """Only its own thread may set a timer on a loop, which debug mode checks."""

    async def main() -> None:
        async with AsyncPublisher(NOBODY, outbox=outbox) as publisher:
            confirmation = await publisher.submit(message(1), routing_key="q")

            async def elsewhere() -> None:
                await confirmation

            with pytest.raises(UsageError, match="another event loop"):
                await asyncio.to_thread(asyncio.run, elsewhere())
            outbox.may_write.set()
            assert (await confirmation).status == Outcome.STORED.value

    asyncio.run(main(), debug=True)


def test_the_time_to_open_counts_against_the_wait_for_room(outbox: SlowOutbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout of a message starts at its submission, whatever it waits for."""
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + outbox.opened_in)
    for module in (engine_publisher, outbox_channel):
        monkeypatch.setattr(module, "time", clock)
    outbox.open_takes = 60.0

    async def main() -> None:
        publisher = AsyncPublisher(NOBODY, outbox=outbox, max_outstanding=1, delivery_timeout=600)
        first = asyncio.create_task(publisher.submit(message(1), routing_key="q"))
        await asyncio.sleep(0)
        began = time.monotonic()
        with pytest.raises(OutboxError, match="were not, either, in time"):
            await publisher.submit(message(2), routing_key="q", timeout=60.5)
        assert 0.4 < time.monotonic() - began < 30
        outbox.may_write.set()
        await (await first)
        await publisher.close()

    asyncio.run(main())


def test_who_flushes_while_the_publisher_is_closed_is_told(tmp_path: Path) -> None:
    """Nothing relays the remaining rows any more, so the wait would never end."""

    async def main() -> None:
        publisher = AsyncPublisher(NOBODY, outbox=SQLiteOutbox(tmp_path / "outbox"))
        await publisher.publish(message(1), routing_key="q")
        flushed = asyncio.create_task(publisher.flush())
        with pytest.raises(TimeoutError):
            await publisher.flush(0.1)
        await publisher.close(0)
        async with asyncio.timeout(20):
            with pytest.raises(UsageError, match="for the next start"):
                await flushed
        with pytest.raises(UsageError, match="for the next start"):
            await publisher.flush()

    asyncio.run(main())


def test_a_flush_that_asks_a_closed_outbox_leaves_no_file_open(tmp_path: Path) -> None:
    """The flush opens the file again."""
    outbox = LateQuestion(tmp_path / "outbox")

    async def main() -> None:
        publisher = AsyncPublisher(NOBODY, outbox=outbox)
        await publisher.publish(message(1), routing_key="q")
        flushed = asyncio.create_task(publisher.flush())
        await until(outbox.asked.is_set)
        await publisher.close(0)
        with pytest.raises(UsageError, match="for the next start"):
            await flushed

    asyncio.run(main())
    assert outbox._connection is outbox._reader is None


@pytest.mark.parametrize("name", ["publisher-outbox", "publisher-relay"])
def test_opening_is_retried_after_its_threads_failed_to_start(tmp_path: Path, name: str) -> None:
    async def main() -> None:
        publisher = AsyncPublisher(NOBODY, outbox=SQLiteOutbox(tmp_path / "outbox"))
        with refusing_threads(name):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await publisher.publish(message(1), routing_key="orders")
            await until(lambda: not sqlite_relay._open_claims)
        assert (await publisher.publish(message(1), routing_key="orders")).status == Outcome.STORED.value
        await publisher.close(0)
        assert not sqlite_relay._open_claims

    asyncio.run(main())


class HangingOutbox(SQLiteOutbox):
    """An outbox whose opening or relay hangs until it is released."""

    def __init__(self, path: Path, which: str) -> None:
        super().__init__(path)
        self.may_go_on = threading.Event()
        self.which = which

    def open(self) -> None:
        assert self.which != "open" or self.may_go_on.wait(60)
        super().open()

    def claims(self) -> RowLeases:
        assert self.which != "claims" or self.may_go_on.wait(60)
        return super().claims()


@pytest.mark.slow
@pytest.mark.parametrize("which", ["open", "claims"])
def test_deadlines_hold_beside_an_opening_that_hangs(tmp_path: Path, which: str) -> None:
    """The event loop keeps running, and publishing, flushing and closing end.

    No lock of the outbox is left.
    """
    hanging = HangingOutbox(tmp_path / "outbox", which)

    async def main() -> None:
        publisher = AsyncPublisher(NOBODY, outbox=hanging, name="hanging")
        waits = asyncio.create_task(publisher.publish(message(1), routing_key="q", timeout=60))
        await asyncio.sleep(0)
        with on_time(0.5), pytest.raises(OutboxError, match=r"not opened within 0\.5 s"):
            await publisher.publish(message(1), routing_key="q", timeout=0.5)
        with on_time(0.1), pytest.raises(OutboxError, match="not opened"):
            await publisher.flush(0.1)
        with on_time(0.1):
            await publisher.close(0.1)
        hanging.may_go_on.set()
        with pytest.raises(UsageError, match="closed"):
            await waits

    asyncio.run(main())
    wait_until(
        lambda: not any(thread.name.startswith("hanging") for thread in threading.enumerate()),
        timeout=20,
        what="the end of its threads",
    )
    other = SQLiteOutbox(hanging.path)
    other.write([NewRow(message(1), "", "q", True, None)], [])
    claims = other.claims()
    assert len(claims.take(1).rows) == 1
    claims.close()
    other.close()
    hanging.close()


class HangingClaims(SQLiteOutbox):
    """An outbox whose relay hangs at its end until it is released."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_go_on = threading.Event()

    def claims(self) -> RowLeases:
        claims = super().claims()
        close = claims.close

        def hang() -> None:
            assert self.may_go_on.wait(60)
            close()

        claims.close = hang  # type: ignore[method-assign]
        return claims


@pytest.mark.slow
def test_a_relay_that_hangs_keeps_no_program_from_ending(tmp_path: Path) -> None:
    """A daemon thread waits for its end.

    asyncio waits for its executor's threads with the loop, and at exit.
    """
    hanging = HangingClaims(tmp_path / "outbox")

    async def main() -> None:
        publisher = AsyncPublisher(NOBODY, outbox=hanging, name="hanging")
        await publisher.publish(message(1), routing_key="q")
        closing = asyncio.create_task(publisher.close(25))
        await until(lambda: any(thread.name.startswith("hanging-outbox-end") for thread in threading.enumerate()))
        closing.cancel()
        await asyncio.wait([closing])
        await publisher.close(0)

    began = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began < 15
    hanging.may_go_on.set()
    wait_until(
        lambda: not any(thread.name.startswith("hanging") for thread in threading.enumerate()),
        timeout=20,
        what="the end of its threads",
    )
    hanging.close()


@pytest.mark.slow
def test_closing_raises_what_a_hanging_outbox_has_not_stored(outbox: SlowOutbox) -> None:
    async def main() -> None:
        publisher = AsyncPublisher(NOBODY, outbox=outbox)
        for _ in range(3):
            await publisher.submit(message(1), routing_key="q")
        with pytest.raises(PublishError, match="3 messages") as left:
            await publisher.close(0.1)
        assert [failure.may_have_arrived for failure in left.value.failures] == [True] * 3

    try:
        asyncio.run(main())
    finally:
        outbox.may_write.set()


def test_closing_does_not_wait_for_the_calls_of_the_program(tmp_path: Path) -> None:
    """The program's hanging calls may use every thread of the loop's executor."""
    go_on = threading.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        publisher = AsyncPublisher(NOBODY, outbox=SQLiteOutbox(tmp_path / "outbox"))
        await publisher.publish(message(1), routing_key="q")
        taken = loop.run_in_executor(None, go_on.wait, 60)
        try:
            async with asyncio.timeout(15):
                await publisher.close(1)
        finally:
            go_on.set()
            await taken

    asyncio.run(main())


def test_connecting_starts_the_relay(tmp_path: Path) -> None:
    """This holds even without a broker.

    Rows of earlier processes are relayed once there is one.
    """

    async def main() -> None:
        publisher = AsyncPublisher(NOBODY, outbox=SQLiteOutbox(tmp_path / "outbox"), name="test-connect")
        with pytest.raises(BrokerUnavailable):
            await publisher.connect()
        assert any(thread.name == "test-connect-relay" for thread in threading.enumerate())
        await publisher.close(0)

    asyncio.run(main())


def test_an_empty_outbox_is_flushed_without_waiting(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncPublisher(NOBODY, outbox=SQLiteOutbox(tmp_path / "outbox"), name="empty") as publisher:
            await publisher.flush(0)

    asyncio.run(main())


def test_any_number_of_tasks_may_flush_at_once(tmp_path: Path) -> None:
    """The questions that wait for a thread are no sign that the outbox hangs."""

    async def main() -> None:
        async with AsyncPublisher(NOBODY, outbox=SQLiteOutbox(tmp_path / "outbox"), name="many") as publisher:
            await asyncio.gather(*(publisher.flush(10) for _ in range(3 * MAX_HANGING)))

    asyncio.run(main())


class RowsInTests:
    """A relay publisher that records sent rows and settles none.

    Sending hangs if it is told to.
    """

    def __init__(self, *, hangs: bool = False) -> None:
        self.sent: list[int] = []
        self._hangs = hangs
        self.publisher = AsyncRelayPublisher(self._connect, self._send)
        self.publisher.start()

    async def _connect(self) -> None:
        """Do nothing: it counts as connected."""

    async def _send(self, row: OutboxRow, taken: Callable[[], object], _: Callable[..., None]) -> None:
        self.sent.append(row.id)
        if self._hangs:
            await asyncio.Event().wait()
        taken()


def row(number: int) -> OutboxRow:
    return OutboxRow(number, message(1), "", "q", True, None, 0, False)


def returned(publisher: AsyncRelayPublisher) -> list[tuple[int, type | None]]:
    return [(one.id, None if error is None else type(error)) for one, error in publisher.take_settled()]


def run_and_end(main: Callable[[], AsyncIterator[None]]) -> None:
    """Run a generator up to its ``yield``, and the rest while the loop ends.

    All tasks are cancelled by then.
    """
    unfinished: list[AsyncIterator[None]] = []

    async def begin() -> None:
        unfinished.append(main())
        await anext(unfinished[0])

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        complaints: list[object] = []
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        runner.run(begin())
    assert asyncio.all_tasks(loop) == set()
    assert complaints == []


class ArrivesLate(deque[OutboxRow]):
    """Rows to send. Another one comes just when the first is gone."""

    def __init__(self, late: OutboxRow) -> None:
        super().__init__()
        self._late = [late]
        self._begun = False

    def __bool__(self) -> bool:
        if len(self):
            self._begun = True
            return True
        if self._begun and self._late:
            self.append(self._late.pop())
        return False


def test_a_row_that_comes_after_the_last_one_is_sent() -> None:
    """The relay adds rows on its own thread. The publisher is open, so it returns none."""

    async def main() -> None:
        rows = RowsInTests()
        rows.publisher._to_send = ArrivesLate(row(2))
        rows.publisher.send([row(1)])
        await until(lambda: rows.sent != [])
        rows.publisher.send([])  # the relay's signal for the row that came late
        await until(lambda: rows.sent == [1, 2])
        assert returned(rows.publisher) == []
        rows.publisher.cancel()

    asyncio.run(main())


def test_rows_that_come_while_the_event_loop_ends_go_back(caplog: pytest.LogCaptureFixture) -> None:
    """No task is started, because the end of the loop would destroy it."""
    made: list[RowsInTests] = []

    async def main() -> AsyncIterator[None]:
        rows = RowsInTests(hangs=True)
        made.append(rows)
        await asyncio.sleep(0)
        try:
            yield
        finally:
            await asyncio.to_thread(rows.publisher.send, [row(1), row(2)])
            await asyncio.sleep(0)

    run_and_end(main)
    assert made[0].sent == []
    assert returned(made[0].publisher) == [(1, UsageError), (2, UsageError)]
    assert not caplog.records


@pytest.mark.parametrize("ended", ["cancelled", "loop"])
def test_rows_that_are_unsent_when_all_ends_go_back(ended: str) -> None:
    """This includes the row that is being sent."""
    made: list[RowsInTests] = []

    async def main() -> None:
        rows = RowsInTests(hangs=True)
        made.append(rows)
        rows.publisher.send([row(1), row(2)])
        await until(lambda: rows.sent == [1])
        if ended == "cancelled":
            rows.publisher.cancel()
            rows.publisher.send([row(3)])
            await until(lambda: len(rows.publisher._settled) == 3)

    asyncio.run(main())
    expected = [1, 2, 3] if ended == "cancelled" else [1, 2]
    assert sorted(returned(made[0].publisher)) == [(number, UsageError) for number in expected]
    assert made[0].sent == [1]


def test_rows_bound_for_a_closed_event_loop_are_returned() -> None:
    """The loop has accepted the call, but never makes it."""
    loop = asyncio.new_event_loop()

    async def make() -> RowsInTests:
        return RowsInTests()

    rows = loop.run_until_complete(make())
    rows.publisher.send([row(1)])
    loop.run_until_complete(until(lambda: rows.sent == [1]))
    rows.publisher.cancel()
    loop.run_until_complete(until(lambda: rows.publisher._task is not None and rows.publisher._task.done()))
    rows.publisher.send([row(2)])
    loop.close()
    rows.publisher.send([row(3)])
    assert returned(rows.publisher) == [(2, UsageError), (3, UsageError)]


def test_an_error_of_sending_ends_no_relay(caplog: pytest.LogCaptureFixture) -> None:
    """The row is returned without an attempt, and the next one is sent."""

    async def main() -> None:
        sent: list[int] = []

        async def connect() -> None: ...

        async def send(one: OutboxRow, taken: Callable[[], object], _: object) -> None:
            sent.append(one.id)
            if len(sent) == 1:
                raise KeyError(one.id)
            taken()

        publisher = AsyncRelayPublisher(connect, send)
        publisher.start()
        publisher.send([row(1), row(2)])
        await until(lambda: len(publisher._settled) == 2)
        assert [(one.id, str(error)) for one, error in publisher.take_settled()] == [
            (number, "the row could not be sent: KeyError: 1") for number in (1, 2)
        ]
        publisher.send([row(1)])
        await until(lambda: sent == [1, 1])
        publisher.cancel()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert "unexpected error while the relay submitted a row" in caplog.text


def test_a_publisher_whose_loop_ended_leaves_its_rows_to_another(tmp_path: Path) -> None:
    """A file has one relay at a time, in all processes. Who forgot to close the publisher is told."""

    async def main() -> None:
        publisher = AsyncPublisher(NOBODY, outbox=outbox)
        await publisher.publish(message(1), routing_key="q")
        await until(lambda: publisher._started_channel is not None)

    def run(told: pytest.WarningsRecorder) -> None:
        asyncio.run(main())
        wait_until(lambda: not sqlite_relay._open_claims, timeout=10, what="the end of the relay")
        wait_until(
            lambda: gc.collect() >= 0 and any("was not closed" in str(warning.message) for warning in told),
            timeout=10,
            what="the end of the writer",
        )

    outbox, other = (SQLiteOutbox(tmp_path / "outbox") for _ in range(2))
    try:
        with pytest.warns(ResourceWarning) as told:
            run(told)
        claims = other.claims()
        wait_until(lambda: claims.take(1).rows, timeout=10, what="the row, which may be delayed")
    finally:
        for left in list(sqlite_relay._open_claims):
            left.close()
        outbox.close()
        other.close()
