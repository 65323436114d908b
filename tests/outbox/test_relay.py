"""The relay between a scripted outbox and a scripted publisher of rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import ANY

import pytest
from sqlalchemy import create_engine

from reliable_mq import (
    BrokerUnavailable,
    Message,
    OutboxError,
    PublishNacked,
    PublishReturned,
    PublishUnconfirmed,
    ReliableMQError,
)
from reliable_mq.core.outbox import KeptPlaces, NewRow, OutboxRow, RowOutcome, RowSettlement
from reliable_mq.core.statistics import OutboxStatus
from reliable_mq.outbox import Outbox, SQLAlchemyOutbox, SQLiteOutbox, sqlite_relay
from reliable_mq.outbox.protocol import RowBatch
from reliable_mq.outbox.relay import OutboxRelay
from reliable_mq.testing.waiting import wait_until

RETURNED = PublishReturned("no queue", reply_code=312, reply_text="NO_ROUTE", exchange="", routing_key="")


def rows(*bodies: str) -> list[NewRow]:
    return [NewRow(Message(body.encode()), "", "q", True, "key") for body in bodies]


class Connected:
    """A publisher that is always connected, keeps no places, and wakes the relay at once."""

    ended = False

    def connect(self) -> None:
        """Do nothing."""

    def kept(self) -> KeptPlaces:
        return KeptPlaces()

    def watch(self, wake: Callable[[], object]) -> None:
        wake()


class FirstIsReturned(Connected):
    """A publisher that returns the first message while rows of its key are stored."""

    def __init__(self, outbox: Outbox) -> None:
        self.sent: list[bytes] = []
        self.turns_after = 0
        self.looked_again = threading.Event()
        self._outbox = outbox
        self._outstanding: list[OutboxRow] = []

    def send(self, rows: Sequence[OutboxRow]) -> None:
        self.sent += [row.message.body for row in rows]
        self._outstanding += rows

    def take_settled(self) -> list[tuple[OutboxRow, ReliableMQError | None]]:
        if self.turns_after:
            self.turns_after += 1
            if self.turns_after == 4:
                self.looked_again.set()
        elif self._outstanding:
            self.turns_after = 1
            self._outbox.write(rows("c", "d"), [])
            return [(self._outstanding.pop(), RETURNED)]
        return []


@pytest.fixture(params=["file", "table"])
def outbox(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Outbox]:
    with ExitStack() as stack:
        made: Outbox
        if request.param == "file":
            made = SQLiteOutbox(tmp_path / "outbox", poll_interval=0.01)
        else:
            engine = create_engine(f"sqlite:///{tmp_path}/database")
            stack.callback(engine.dispose)
            made = SQLAlchemyOutbox(engine, create=True, poll_interval=0.01)
            made.open()
        stack.callback(made.close)
        yield made


def test_what_a_fate_holds_is_held_before_it_is_written(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    """Its key is not taken between the decision to set a row aside and the write."""
    outbox.write(rows("a", "b"), [])
    publisher = FirstIsReturned(outbox)
    decided: list[RowSettlement] = []  # decided, and never written
    relay = OutboxRelay(outbox, publisher, settle=decided.extend, limit=10, max_bytes=2**20, name="relay")
    relay.start(outbox.claims())
    try:
        assert publisher.looked_again.wait(20)
        assert publisher.sent == [b"a"]
        assert [(one.row.message.body, one.outcome.name) for one in decided] == [(b"a", "SET_ASIDE"), (b"b", "BACK")]
        row = decided[0].row
        target = f"message {row.message.message_id} to exchange {row.exchange!r} with routing key {row.routing_key!r}"
        assert f"{target} is set aside in {outbox!r}: PublishReturned: no queue" in caplog.text
    finally:
        relay.stop(0)
        assert relay.join(20)


class Silent(FirstIsReturned):
    """A publisher that settles nothing."""

    def send(self, rows: Sequence[OutboxRow]) -> None:
        self.sent += [row.message.body for row in rows]
        self.looked_again.set()


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [0.5, 0.0])
def test_a_stopping_relay_releases_waiting_rows_untouched(outbox: Outbox, timeout: float) -> None:
    """Only outstanding rows may be duplicates, however short the shutdown is."""
    outbox.write(rows("a", "b"), [])
    publisher = Silent(outbox)
    decided: list[RowSettlement] = []
    relay = OutboxRelay(outbox, publisher, settle=decided.extend, limit=10, max_bytes=2**20, name="relay")
    relay.start(outbox.claims())
    assert publisher.looked_again.wait(20)
    relay.stop(timeout)
    assert relay.join(20)
    assert publisher.sent == [b"a"]
    assert [(one.row.message.body, one.outcome.name) for one in decided] == [(b"b", "BACK")]
    leases = outbox.claims()
    left = [(row.message.body, row.possible_duplicate) for row in leases.take(10).rows]
    leases.close()
    # A file has no leases: its next relay marks every row that the previous one held as a possible duplicate.
    assert left == [(b"a", True), (b"b", isinstance(outbox, SQLiteOutbox))]


class Slow(Connected):
    """A publisher that confirms one row per call of `take_settled`."""

    def __init__(self) -> None:
        self.outstanding: list[OutboxRow] = []
        self.most: list[list[int]] = []
        self.confirmed: list[bytes] = []

    def send(self, rows: Sequence[OutboxRow]) -> None:
        self.outstanding += rows
        self.most.append([len(row.message.body) for row in self.outstanding])

    def take_settled(self) -> list[tuple[OutboxRow, ReliableMQError | None]]:
        if not self.outstanding:
            return []
        row = self.outstanding.pop(0)
        self.confirmed.append(row.message.body[:1])
        return [(row, None)]


def test_a_relay_keeps_no_more_bytes_outstanding_than_fit(outbox: Outbox) -> None:
    """A relay must not wait for space; a message over the limit is sent alone."""
    sizes = [100, 100, 100, 1000, 100, 100, 100, 100]
    outbox.write(
        [NewRow(Message(b"%d" % n + b"x" * (size - 1)), "", "q", True, None) for n, size in enumerate(sizes)], []
    )
    publisher = Slow()
    done = threading.Semaphore(0)

    def settle(settlements: list[RowSettlement]) -> None:
        outbox.write([], settlements)
        relay.settled(settlements)
        done.release(len(settlements))

    relay = OutboxRelay(outbox, publisher, settle=settle, limit=10, max_bytes=250, name="relay")
    relay.start(outbox.claims())
    try:
        assert all(done.acquire(timeout=20) for _ in sizes)
    finally:
        relay.stop(1)
        assert relay.join(20)
    assert publisher.confirmed == [b"%d" % n for n in range(len(sizes))]
    assert all(sum(each) <= 250 or len(each) == 1 for each in publisher.most), publisher.most
    assert max(map(sum, publisher.most)) == 1000


class Held(Connected):
    """A publisher that confirms all rows or none, and counts the turns of the relay."""

    def __init__(self, confirms: bool) -> None:
        self.turns = 0
        self._confirms = confirms
        self._settled: list[tuple[OutboxRow, ReliableMQError | None]] = []

    def send(self, rows: Sequence[OutboxRow]) -> None:
        if self._confirms:
            self._settled += [(row, None) for row in rows]

    def take_settled(self) -> list[tuple[OutboxRow, ReliableMQError | None]]:
        self.turns += 1
        settled, self._settled = self._settled, []
        return settled


@pytest.mark.parametrize("held", ["by their key", "by writes that hang"])
def test_a_relay_holds_few_bytes_of_rows_not_outstanding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    """A backlog of large rows would use up the memory, up to the number of places."""
    monkeypatch.setattr(sqlite_relay, "_BYTES_PER_TAKE", 10_000)
    outbox = SQLiteOutbox(tmp_path / "outbox", poll_interval=0.01)
    outbox.write([NewRow(Message(bytes(1000)), "", "q", True, f"{number % 20}") for number in range(1000)], [])
    publisher, leases = Held(held == "by writes that hang"), outbox.claims()
    relay = OutboxRelay(outbox, publisher, settle=lambda _: None, limit=1000, max_bytes=20_000, name="relay")
    take, taken, taken_at = leases.take, 0, 0

    def counted(limit: int, retries: int | None = None) -> RowBatch:
        nonlocal taken, taken_at
        batch = take(limit, retries)
        if batch.rows:
            taken, taken_at = taken + len(batch.rows), publisher.turns
        return batch

    monkeypatch.setattr(leases, "take", counted)
    relay.start(leases)
    try:
        wait_until(lambda: taken and publisher.turns > taken_at + 100, timeout=20, what="turns without a take")
    finally:
        relay.stop(0)
        assert relay.join(20)
        outbox.close()
    assert 20 <= taken <= 60


class Unanswered(Held):
    """A publisher that confirms nothing and never wakes the relay."""

    def watch(self, wake: Callable[[], object]) -> None:
        """Do nothing."""


@pytest.mark.slow
@pytest.mark.parametrize("busy", ["waiting", "counting"])
def test_leases_are_renewed_while_the_relay_waits_or_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: str
) -> None:
    """Other relays would publish its rows again."""
    engine = create_engine(f"sqlite:///{tmp_path}/database")
    counts = busy == "counting"
    outbox = SQLAlchemyOutbox(engine, create=True, lease=2, poll_interval=0.01 if counts else 60)
    outbox.open()
    outbox.write(rows("a"), [])
    leases, released, kept = outbox.claims(), threading.Event(), threading.Semaphore(0)
    keep, status = leases.keep, outbox.status

    def keep_and_count() -> None:
        keep()
        kept.release()

    def count_at_last() -> OutboxStatus:
        assert released.wait(20)
        return status()

    monkeypatch.setattr(leases, "keep", keep_and_count)
    monkeypatch.setattr(outbox, "status", count_at_last)
    relay = OutboxRelay(
        outbox, Unanswered(False), settle=lambda _: None, limit=10, max_bytes=2**20, name="relay", measured=counts
    )
    relay.start(leases)
    try:
        assert all(kept.acquire(timeout=15) for _ in range(4))
        assert relay.status is None
        released.set()
        if counts:
            wait_until(lambda: relay.status == OutboxStatus(1, oldest_age=ANY), timeout=20, what="the count")
    finally:
        released.set()
        relay.stop(0)
        assert relay.join(20)
        engine.dispose()


def test_a_relay_ends_after_its_count(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count would open an outbox that is closed meanwhile."""
    counting, released = threading.Event(), threading.Event()

    def count_at_last() -> OutboxStatus:
        counting.set()
        assert released.wait(20)
        return OutboxStatus(0)

    monkeypatch.setattr(outbox, "status", count_at_last)
    relay = OutboxRelay(
        outbox, Held(False), settle=lambda _: None, limit=10, max_bytes=2**20, name="relay", measured=True
    )
    relay.start(outbox.claims())
    assert counting.wait(20)
    relay.stop(0)
    assert not relay.join(0.2)
    released.set()
    assert relay.join(20)


def test_an_error_of_releasing_rows_is_logged_at_the_end(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An outbox of the user may raise any. The owner of the relay is told of the end all the same."""
    leases, released = outbox.claims(), threading.Event()
    close = leases.close

    def close_and_fail() -> None:
        close()
        raise ZeroDivisionError("a fault of the outbox")

    monkeypatch.setattr(leases, "close", close_and_fail)
    relay = OutboxRelay(
        outbox, Silent(outbox), settle=lambda _: None, released=released.set, limit=10, max_bytes=2**20, name="relay"
    )
    relay.start(leases)
    relay.stop(0)
    assert relay.join(20)
    assert released.is_set()
    assert "a fault of the outbox" in caplog.text


class Unconnected(Silent):
    """A publisher whose `connect` raises an error."""

    def connect(self) -> None:
        raise RuntimeError("can't start new thread")


def test_an_error_of_connecting_ends_no_relay(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    """The publisher connects for the first row instead; no restart is needed."""
    outbox.write(rows("a"), [])
    publisher = Unconnected(outbox)
    relay = OutboxRelay(outbox, publisher, settle=lambda _: None, limit=10, max_bytes=2**20, name="relay")
    relay.start(outbox.claims())
    try:
        assert publisher.looked_again.wait(20)
    finally:
        relay.stop(0)
        assert relay.join(20)
    assert publisher.sent == [b"a"]
    assert "can't start new thread" in caplog.text


class Refused(Slow):
    """A publisher that the broker refuses."""

    refused = True

    def connect(self) -> None:
        if self.refused:
            raise BrokerUnavailable("the password is wrong", permanent=True)


def test_an_idle_relay_connects_once_the_broker_lets_it(outbox: Outbox) -> None:
    """The next row may come hours later."""
    publisher = Refused()
    relay = OutboxRelay(outbox, publisher, settle=lambda _: None, limit=10, max_bytes=2**20, name="relay")
    relay.start(outbox.claims())
    try:
        wait_until(lambda: relay.statistics.interruptions > 2, timeout=20, what="two more attempts")
        error, since = relay.trouble
        assert isinstance(error, BrokerUnavailable)
        wait_until(lambda: relay.statistics.interruptions > 3, timeout=20, what="another attempt")
        assert relay.trouble[1] == since
        publisher.refused = False
        wait_until(lambda: relay.trouble[0] is None, timeout=20, what="the end of the trouble")
    finally:
        relay.stop(0)
        assert relay.join(20)


def test_an_outbox_that_answers_again_is_no_trouble(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next confirm may come hours later."""
    leases = outbox.claims()
    relay = OutboxRelay(outbox, Slow(), settle=lambda _: None, limit=10, max_bytes=2**20, name="relay")
    take, takes = leases.take, 0

    def counted(limit: int, retries: int | None = None) -> RowBatch:
        nonlocal takes
        takes += 1
        if takes == 1:
            raise OutboxError("the database is away")
        return take(limit, retries)

    monkeypatch.setattr(leases, "take", counted)
    relay.start(leases)
    try:
        wait_until(lambda: takes > 2, timeout=20, what="an answer")
        assert relay.statistics.interruptions == 1
        assert relay.trouble[0] is None
    finally:
        relay.stop(0)
        assert relay.join(20)


@pytest.mark.parametrize("answers", [False, True])
def test_an_error_that_is_no_answer_does_not_end_the_wait(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """A database that hangs fails call after call, each after its timeout."""
    leases = outbox.claims()
    relay = OutboxRelay(outbox, Slow(), settle=lambda _: None, limit=10, max_bytes=2**20, name="relay")
    waits: list[float | None] = []

    def fail(_limit: int, _retries: int | None = None) -> RowBatch:
        waits.append(relay.unanswered_since)
        raise OutboxError("it failed") from (ConnectionError("refused") if answers else TimeoutError("no answer"))

    monkeypatch.setattr(leases, "take", fail)
    relay.start(leases)
    try:
        wait_until(lambda: len(waits) == 2, timeout=20, what="another call")
        assert waits[0] is not None
        assert (waits[1] == waits[0]) is not answers
    finally:
        relay.stop(0)
        assert relay.join(20)


class Answering(Refused):
    """A publisher that the broker refuses, until it answers each publish with this error."""

    def __init__(self, answer: ReliableMQError) -> None:
        super().__init__()
        self._answer = answer

    def take_settled(self) -> list[tuple[OutboxRow, ReliableMQError | None]]:
        return [(row, self._answer) for row, _ in super().take_settled()]


@pytest.mark.parametrize("answer", [RETURNED, PublishNacked("full")])
def test_a_broker_that_answers_without_a_confirm_is_no_trouble(outbox: Outbox, answer: ReliableMQError) -> None:
    """The outbox may be empty then, so that no confirm follows."""
    outbox.write(rows("a"), [])
    found: list[tuple[Exception | None, int]] = []

    def settle(_: list[RowSettlement]) -> None:
        found.append((relay.trouble[0], relay.statistics.interruptions))

    relay = OutboxRelay(outbox, Answering(answer), settle=settle, limit=10, max_bytes=2**20, name="relay")
    relay.start(outbox.claims())
    try:
        wait_until(lambda: found, timeout=20, what="an answer")
        assert found[0] == (None, 1)
    finally:
        relay.stop(0)
        assert relay.join(20)


@pytest.mark.parametrize("failure", [PublishNacked("full"), BrokerUnavailable("away")])
def test_a_retry_does_not_wait_for_the_poll_interval(outbox: Outbox, failure: ReliableMQError) -> None:
    """The interval is for rows of other processes, and may be an hour."""
    outbox.poll_interval = 3600
    outbox.write([NewRow(Message(b"a"), "", "q", True, None)], [])
    publisher = Answering(failure)
    publisher.refused = False
    outcomes: list[RowOutcome] = []

    def settle(settlements: list[RowSettlement]) -> None:
        soon = [one._replace(delay=0.1) for one in settlements]
        outcomes.extend(one.outcome for one in soon)
        outbox.write([], soon)
        relay.settled(soon)

    relay = OutboxRelay(outbox, publisher, settle=settle, limit=10, max_bytes=2**20, name="relay")
    relay.start(outbox.claims())
    try:
        wait_until(lambda: len(outcomes) > 2, timeout=20, what="two more attempts")
    finally:
        relay.stop(0)
        assert relay.join(20)


def test_a_failed_take_does_not_wait_for_the_poll_interval(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again after the pause."""
    outbox.poll_interval = 3600
    outbox.write(rows("a"), [])
    leases, publisher = outbox.claims(), Slow()
    errors = [OutboxError("the database is away")]
    take = leases.take

    def fails_first(limit: int, retries: int | None = None) -> RowBatch:
        if errors:
            raise errors.pop()
        return take(limit, retries)

    monkeypatch.setattr(leases, "take", fails_first)
    relay = OutboxRelay(outbox, publisher, settle=lambda _: None, limit=10, max_bytes=2**20, name="relay")
    relay.start(leases)
    try:
        wait_until(lambda: publisher.confirmed, timeout=20, what="the row")
    finally:
        relay.stop(0)
        assert relay.join(20)


class NoLeader(Connected):
    """A publisher to two queues, one of which never confirms.

    A row to that queue fails at its first attempt and stays outstanding at the second.
    """

    def __init__(self) -> None:
        self.healthy = threading.Event()
        self.stuck: list[OutboxRow] = []
        self._settled: list[tuple[OutboxRow, ReliableMQError | None]] = []

    def send(self, rows: Sequence[OutboxRow]) -> None:
        for row in rows:
            if row.routing_key == "healthy":
                self._settled.append((row, None))
                self.healthy.set()
            elif row.attempts:
                self.stuck.append(row)
            else:
                self._settled.append((row, PublishUnconfirmed("no leader", sent=True)))

    def take_settled(self) -> list[tuple[OutboxRow, ReliableMQError | None]]:
        settled, self._settled = self._settled, []
        return settled


@pytest.mark.parametrize("key", [None, "key of {}"])
def test_rows_of_a_stuck_queue_leave_places_for_others(outbox: Outbox, key: str | None) -> None:
    """Failed rows that are due first get at most half of the places."""
    keys = [None if key is None else key.format(number) for number in range(40)]
    outbox.write([NewRow(Message(b"x"), "", "stuck", True, one) for one in keys], [])
    outbox.write([NewRow(Message(b"y"), "", "healthy", True, None)], [])
    publisher = NoLeader()

    def settle(settlements: list[RowSettlement]) -> None:
        outbox.write([], [one._replace(delay=0.0) for one in settlements])
        relay.settled(settlements)

    relay = OutboxRelay(outbox, publisher, settle=settle, limit=4, max_bytes=2**20, name="relay")
    relay.start(outbox.claims())
    try:
        assert publisher.healthy.wait(20)
    finally:
        relay.stop(0)
        assert relay.join(20)
    assert len(publisher.stuck) <= 2
