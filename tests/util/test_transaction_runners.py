"""Transactions with a time limit, on engines of SQLAlchemy."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.util import await_only

from reliable_mq import Message, OutboxError
from reliable_mq._util.sqlalchemy import AsyncTransactionRunner, SyncTransactionRunner
from reliable_mq.core.outbox import NewRow
from reliable_mq.outbox import SQLAlchemyOutbox
from reliable_mq.testing.waiting import wait_until
from tests.refused_threads import refusing_threads
from tests.signal_handlers import Interrupted, interruptible


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("reliable_mq outbox transaction")]


def one(connection: Connection) -> Any:
    return connection.execute(text("SELECT 1")).scalar_one()


def test_work_that_hangs_ends_for_its_caller_in_time(tmp_path: Path) -> None:
    """It hangs on another thread with its connection; no thread is left behind."""
    engine = create_engine(f"sqlite:///{tmp_path}/database")
    released = threading.Event()
    with closing(SyncTransactionRunner(engine)) as runner:
        with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
            runner.run(lambda _: released.wait(20), None, 0.1)
        assert runner.run(one, None, 20) == 1
        released.set()
        assert runner.run(one, None) == 1
    wait_until(lambda: not _threads(), timeout=20, what="no thread")
    engine.dispose()


def test_work_that_hangs_on_a_loop_is_cancelled_in_time(tmp_path: Path) -> None:
    """Its connection is dropped. A TimeoutError of the work itself is passed on."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/database")
    cancelled = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def fail(_: Connection) -> None:
        raise TimeoutError("its own")

    with closing(AsyncTransactionRunner(engine)) as runner:
        with pytest.raises(TimeoutError, match=r"no answer within 0\.5 s"):
            runner.run(lambda _: await_only(hang()), None, 0.5)
        assert cancelled.wait(20)
        assert runner.run(one, None, 20) == 1
        with pytest.raises(TimeoutError, match="its own"):
            runner.run(fail, None, 20)
    asyncio.run(engine.dispose())


class _DriverError(Exception):
    """An error like those of PyMySQL and psycopg: most codes of MySQL share a SQLSTATE."""

    def __init__(self, code: str | int) -> None:
        super().__init__(code if isinstance(code, int) else "the text of an error")
        self.sqlstate = "HY000" if isinstance(code, int) else code


@pytest.mark.parametrize("code", ["25006", 1290, 1792, 1836])
def test_a_connection_to_a_read_only_server_is_dropped(tmp_path: Path, code: str | int) -> None:
    """The server may have become a replica. Connections that failed for other reasons stay in the pool."""
    engine = create_engine(f"sqlite:///{tmp_path}/database")
    opened: list[object] = []
    event.listen(engine, "connect", lambda connection, _: opened.append(connection))

    def fail(reason: str | int) -> None:
        raise OperationalError("INSERT", {}, _DriverError(reason))

    with closing(SyncTransactionRunner(engine)) as runner:
        for reason in ("another", code, "another"):
            with pytest.raises(OperationalError):
                runner.run(lambda _, reason=reason: fail(reason), None)
    assert len(opened) == 2
    engine.dispose()


@pytest.mark.parametrize("at", ["the start", "the wait"])
def test_work_whose_caller_is_interrupted_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The work may begin before its caller has the future to wait for."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/database")
    cancelled = threading.Event()
    waiting = threading.Event()

    async def hang() -> None:
        waiting.set()
        if at == "the wait":
            interrupt()
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def interrupted(*arguments: Any) -> Any:
        start(*arguments)
        assert waiting.wait(10)
        interrupt()

    start = asyncio.run_coroutine_threadsafe
    with closing(AsyncTransactionRunner(engine)) as runner, interruptible() as interrupt:
        with monkeypatch.context() as patched:
            if at == "the start":
                patched.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
            with pytest.raises(Interrupted):
                runner.run(lambda _: await_only(hang()), None)
        assert cancelled.wait(10)
    asyncio.run(engine.dispose())


def test_a_loop_whose_thread_was_refused_starts_with_next_call(tmp_path: Path) -> None:
    """No call waits for a loop that does not run."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/database")
    with closing(AsyncTransactionRunner(engine)) as runner:
        with refusing_threads("outbox database"), pytest.raises(RuntimeError, match="can't start new thread"):
            runner.run(one, None, 20)
        assert runner.run(one, None, 20) == 1
    asyncio.run(engine.dispose())


def test_a_message_whose_transaction_hangs_may_be_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout of the outbox ends the transaction at an unknown point."""
    engine = create_engine(f"sqlite:///{tmp_path}/database")
    outbox = SQLAlchemyOutbox(engine, create=True, timeout=0.1)
    outbox.open()
    monkeypatch.setattr(outbox, "_timeout", 0.1)  # a file has no server that could hang
    released = threading.Event()
    runner = outbox._runner
    assert isinstance(runner, SyncTransactionRunner)
    real = runner._run

    def late(*arguments: Any) -> Any:
        released.wait(20)
        return real(*arguments)

    monkeypatch.setattr(runner, "_run", late)
    try:
        with pytest.raises(OutboxError, match="no answer within") as caught:
            outbox.write([NewRow(Message(b""), "", "q", True, None)], [])
        assert caught.value.may_have_arrived
    finally:
        released.set()
    wait_until(lambda: not runner._executor.hanging, timeout=10, what="the end of the late transaction")
    outbox.close()
    engine.dispose()  # before the end of that transaction, its connection would stay open


def test_a_conflict_is_repeated_within_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts share the time of the call: each may wait for a lock until MariaDB's own limit."""
    now = 0.0
    limits: list[float | None] = []

    def wait_for_a_lock(_work: object, _isolation: object, limit: float | None) -> None:
        nonlocal now
        now += 12
        limits.append(limit)
        raise OperationalError("INSERT", {}, _DriverError(1205))

    outbox = SQLAlchemyOutbox(create_engine("mysql+pymysql://db/orders"))
    clock = SimpleNamespace(monotonic=lambda: now, time=lambda: now)
    monkeypatch.setattr("reliable_mq.outbox.sqlalchemy.time", clock)
    monkeypatch.setattr(outbox, "_runner", SimpleNamespace(run=wait_for_a_lock))
    with pytest.raises(OutboxError, match="failed"):
        outbox.status()
    assert limits == [30, 18, 6]
