"""What holds for every outbox: nothing is lost, nothing is given out twice, no row of a key overtakes another."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine

from reliable_mq import BrokerUnavailable, ConfigurationError, Message, PublishNacked, PublishReturned
from reliable_mq.core.outbox import NewRow, OutboxRow, RelaySession, RowSettlement
from reliable_mq.outbox import Outbox, SQLAlchemyOutbox, SQLiteOutbox, sqlalchemy_table, sqlite, sqlite_relay
from reliable_mq.outbox.protocol import RowLeases
from tests.properties import examples

OUTCOMES: list[Any] = [
    None,
    None,
    PublishNacked("full"),
    PublishReturned("no queue", reply_code=312, reply_text="NO_ROUTE", exchange="", routing_key=""),
    BrokerUnavailable("no broker"),
]
STORE = st.tuples(st.just("store"), st.lists(st.sampled_from(["a", "b", None]), min_size=2, max_size=8))
TAKE = st.tuples(st.just("take"), st.integers(1, 10))
SETTLE = st.tuples(st.just("settle"), st.tuples(st.integers(0, 20), st.sampled_from(OUTCOMES)))
# Order is lost where rows are taken between a fate and its writing, so that is what mostly happens.
STEPS = st.lists(
    st.one_of(
        STORE,
        TAKE,
        TAKE,
        SETTLE,
        SETTLE,
        st.tuples(st.just("write"), st.none()),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 3.0, 100.0])),
        st.tuples(st.sampled_from(["die", "retry", "purge"]), st.none()),
    ),
    min_size=8,
    max_size=40,
)


class Clock:
    """The time since the boot of the machine, as the backends see it."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def since_boot(self) -> int:
        return int(self.now * 1_000_000)


class Model:
    """An outbox with one relay at a time, and what must hold."""

    def __init__(self, outbox: Outbox, clock: Clock) -> None:
        self.outbox = outbox
        self.clock = clock
        self.number = 0
        self.keys: dict[str, str | None] = {}
        self.left: list[str] = []  # in order; neither confirmed nor purged
        self.begin()

    def begin(self) -> None:
        self.claims: RowLeases = self.outbox.claims()
        self.session = RelaySession()
        self.outstanding: list[OutboxRow] = []
        self.unwritten: list[RowSettlement] = []

    def store(self, keys: list[str | None]) -> None:
        rows = []
        for key in keys:
            name = f"m{self.number}"
            self.number += 1
            self.keys[name] = key
            self.left.append(name)
            rows.append(NewRow(Message(name.encode(), message_id=name), "", "q", True, key))
        self.outbox.write(rows, [])

    def take(self, limit: int) -> None:
        taken = self.claims.take(limit)
        assert not taken.damaged
        self.session.taken(taken.rows)
        self.send()

    def send(self) -> None:
        while self.session.ready:
            row = self.session.ready.popleft()
            name = row.message.message_id
            assert row.message.body == name.encode()
            assert name in self.left, "it was confirmed, or purged"
            assert all(other.message.message_id != name for other in self.outstanding), "it is outstanding"
            key = self.keys[name]
            if key is not None:
                first = next(other for other in self.left if self.keys[other] == key)
                confirmed = {one.row.message.message_id for one in self.unwritten if one.fate.value == "confirmed"}
                assert first == name or first in confirmed, f"{name} overtakes {first}"
            self.outstanding.append(row)

    def settle(self, choice: tuple[int, Any]) -> None:
        number, error = choice
        if self.outstanding:
            row = self.outstanding.pop(number % len(self.outstanding))
            self.session.settled(row, error)
            if error is None:
                self.left.remove(row.message.message_id)
            decided, self.session.settlements = self.session.settlements, []
            self.claims.decided(decided)
            self.unwritten += decided
            self.send()

    def write(self, _: None) -> None:
        settlements, self.unwritten = self.unwritten, []
        self.outbox.write([], settlements)
        self.claims.written(settlements)

    def die(self, _: None) -> None:
        """What is confirmed and not written comes again."""
        again = {one.row.message.message_id for one in self.unwritten if one.fate.value == "confirmed"}
        self.left = sorted({*self.left, *again}, key=lambda name: int(name[1:]))
        self.claims.close()
        self.begin()

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    def retry(self, _: None) -> None:
        before = self.outbox.status().set_aside
        assert self.outbox.retry() == before
        assert self.outbox.status().set_aside == 0

    def purge(self, _: None) -> None:
        gone = [one.message_id for one in self.outbox.set_aside()]
        assert self.outbox.purge() == len(gone)
        self.left = [name for name in self.left if name not in gone]

    def finish(self) -> None:
        """With a broker that takes everything, the outbox becomes empty."""
        self.write(None)
        self.retry(None)
        for _ in range(1000):
            if not self.left:
                break
            self.wait(100.0)
            self.take(7)
            while self.outstanding:
                self.settle((0, None))
            self.write(None)
        assert not self.left
        status = self.outbox.status()
        assert (status.rows, status.set_aside) == (0, 0)
        assert self.outbox.backlog()[0] == 0
        self.claims.close()


@examples(40)
@given(steps=STEPS)
def test_whatever_happens_every_row_of_a_file_is_published_in_the_order_of_its_key(steps: list[Any]) -> None:
    """Relays die, rows are delayed, set aside, put back and purged; at the end everything else was confirmed."""
    go_through(steps, lambda directory, _stack: SQLiteOutbox(directory / "outbox"))


@examples(12)
@given(steps=STEPS)
def test_whatever_happens_every_row_of_a_table_is_published_in_the_order_of_its_key(steps: list[Any]) -> None:
    """The same in a database of one's own, where a step costs ten times as much."""

    def make(directory: Path, stack: ExitStack) -> Outbox:
        engine = create_engine(f"sqlite:///{directory}/database")
        stack.callback(engine.dispose)
        return SQLAlchemyOutbox(engine, create=True, lease=1e8)

    go_through(steps, make)


def go_through(steps: list[Any], make: Callable[[Path, ExitStack], Outbox]) -> None:
    clock = Clock()
    with ExitStack() as stack:
        for module in (sqlite, sqlite_relay, sqlalchemy_table):
            stack.enter_context(patch.object(module, "since_boot", clock.since_boot))
        outbox = make(Path(stack.enter_context(tempfile.TemporaryDirectory())), stack)
        stack.callback(outbox.close)
        model = Model(outbox, clock)
        for step, argument in steps:
            getattr(model, step)(argument)
        model.finish()


@pytest.mark.parametrize(
    "arguments",
    [{"path": ""}, {"path": ":memory:"}, {"path": 5}, {"path": "/"}, {"path": "a\0b"}, {"path": "x", "timeout": -1}],
)
def test_a_file_outbox_refuses_wrong_arguments(arguments: dict[str, Any]) -> None:
    """Before anything is opened."""
    with pytest.raises(ConfigurationError):
        SQLiteOutbox(**arguments)


def test_an_ordering_key_must_be_a_function_that_gives_text(tmp_path: Path) -> None:
    """Both are said."""
    with pytest.raises(ConfigurationError, match="ordering_key"):
        SQLiteOutbox(tmp_path / "outbox", ordering_key="key")  # type: ignore[arg-type]
    outbox = SQLiteOutbox(tmp_path / "outbox", ordering_key=lambda *_: 1)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigurationError, match="int"):
        outbox.ordering_key(Message(b""), "", "q")
    outbox = SQLiteOutbox(tmp_path / "outbox", ordering_key=lambda *_: "\udcff")
    with pytest.raises(ConfigurationError, match="encoded"):  # or its transaction would fail, with all in it
        outbox.ordering_key(Message(b""), "", "q")


@pytest.mark.parametrize("kind", ["file", "table"])
def test_numbers_and_ids_that_mean_nothing_are_refused(tmp_path: Path, kind: str) -> None:
    """SQLite takes a limit of -1 for none, and one text is a sequence of texts."""
    with ExitStack() as stack:
        outbox: Outbox
        if kind == "file":
            outbox = SQLiteOutbox(tmp_path / "outbox")
        else:
            engine = create_engine(f"sqlite:///{tmp_path}/database")
            stack.callback(engine.dispose)
            outbox = SQLAlchemyOutbox(engine, create=True)
        stack.callback(outbox.close)
        outbox.open()
        wrong: Any
        for wrong in (-1, 1.5, True, "1", 2**63, float("nan")):
            with pytest.raises(ConfigurationError, match="limit must be"):
                outbox.set_aside(wrong)
            with pytest.raises(ConfigurationError, match="up_to must be"):
                outbox.backlog(wrong)
        assert outbox.set_aside(0) == []
        for wrong in ("one", b"one", [1], ["\udcff"]):
            for decide in (outbox.retry, outbox.purge):
                with pytest.raises(ConfigurationError, match="message_ids must be"):
                    decide(wrong)
        assert outbox.purge(("a", "b")) == 0


def test_the_longest_timeout_is_one(tmp_path: Path) -> None:
    """SQLite counts milliseconds in 32 bits, and waits not at all where there are more."""
    outbox = SQLiteOutbox(tmp_path / "outbox", timeout=1e9)
    outbox.open()
    connection = outbox._connection
    assert connection is not None
    assert connection.execute("PRAGMA busy_timeout").fetchone()[0] > 1e9
    outbox.close()


def test_no_password_of_a_database_is_shown() -> None:
    """Wherever the URL has it."""
    for url in ("postgresql+psycopg://me:hush@h/x", "postgresql+psycopg://h/x?user=me&password=hush"):
        assert "hush" not in repr(SQLAlchemyOutbox(create_engine(url)))


def test_one_process_at_a_time_relays_a_file(tmp_path: Path) -> None:
    """The second gets nothing until the first lets go; what the first had may have been published."""
    first, second = SQLiteOutbox(tmp_path / "outbox"), SQLiteOutbox(tmp_path / "outbox")
    one, two = first.claims(), second.claims()
    first.write([NewRow(Message(b""), "", "q", True, None) for _ in range(3)], [])
    assert [row.possible_duplicate for row in one.take(10).rows] == [False] * 3
    assert two.take(10).rows == []
    one.close()
    assert [row.possible_duplicate for row in two.take(10).rows] == [True] * 3
    two.close()
    first.close()
    second.close()


def test_what_is_stored_is_synchronised_at_every_commit(tmp_path: Path) -> None:
    """A commit that is not on disk would be forgotten by a power cut."""
    outbox = SQLiteOutbox(tmp_path / "outbox")
    outbox.open()
    connection = outbox._connection
    assert connection is not None
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    outbox.close()
