"""Tests for your own outbox, as a pytest base class.

Every `Outbox` must pass `OutboxContract`. Derive a class from it in a test module, with a fixture that creates the
outbox::

    class TestMine(OutboxContract):
        @pytest.fixture
        def subject(self, tmp_path):
            clock = Clock()
            outbox = MyOutbox(tmp_path / "outbox", clock=clock)
            outbox.open()
            yield OutboxUnderTest(outbox, age=clock.advance, empty=outbox.clear)
            outbox.close()

The contract needs the extra ``testing``. The outboxes of this package also run it.
"""

# ruff: noqa: S101 -- these are tests

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reliable_mq.core.outbox import NewRow, OutboxRow, RelaySession, RowOutcome, RowSettlement
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, PublishNacked, PublishReturned
from reliable_mq.message import Message

if TYPE_CHECKING:
    from reliable_mq.outbox import Outbox
    from reliable_mq.outbox.protocol import RowLeases

__all__ = ["OutboxContract", "OutboxUnderTest"]


@dataclass
class OutboxUnderTest:
    """An empty outbox, with functions that control its time and its rows.

    Attributes:
        outbox: The outbox. It must be open and derive no ordering keys from messages.
        age: A function that makes a number of seconds pass. It advances the outbox's clock, or moves the times of its
            rows into the past.
        empty: A function that deletes all rows.
        another: A function that returns a second outbox on the same rows, as another process would create it. The
            fixture closes it. Without it, no test checks that rows are stored when ``write`` returns, or that relays of
            two processes take different rows.
        lease: The seconds after which another relay may take the rows of a relay that died, or None if they are free
            when its process ends. Without it, no test checks that leases last and end.
    """

    outbox: Outbox
    age: Callable[[float], object]
    empty: Callable[[], object]
    another: Callable[[], Outbox] | None = None
    lease: float | None = None


class OutboxContract:
    """The tests that every outbox must pass.

    Derive a class with a fixture ``subject`` that creates an `OutboxUnderTest`. The contract does not require that
    several relays can share the rows of an outbox. A relay that ends (``close`` of its `RowLeases`) must leave its rows
    to the next relay.
    """

    @pytest.fixture
    def examples(self) -> int:
        """Return the number of event sequences that an outbox is tested with."""
        return 10

    def test_a_row_is_relayed_as_it_was_stored(self, subject: OutboxUnderTest) -> None:
        """A row keeps its message byte for byte, and its exchange and routing key."""
        message = Message(b"\0\xff", headers={"a": [1, None], "b": b"\0"}, message_id="an id", expiration=1.5)
        rows = [NewRow(message, "events", "a.b", False, "key"), NewRow(Message(b""), "", "q", True, None)]
        with contextlib.closing(subject.outbox.claims()) as leases:
            subject.outbox.write(rows, [])
            first, second = sorted(_take(leases), key=lambda row: row.id)
            assert (first.message.body, first.message.message_id) == (b"\0\xff", "an id")
            assert (first.message.headers, first.message.expiration) == (message.headers, message.expiration)
            assert (first.exchange, first.routing_key, first.mandatory) == ("events", "a.b", False)
            assert (second.exchange, second.routing_key, second.mandatory) == ("", "q", True)
            assert (first.ordering_key, second.ordering_key) == ("key", None)
            assert [(row.attempts, row.possible_duplicate) for row in (first, second)] == [(0, False), (0, False)]

    def test_rows_are_counted_and_confirmed_ones_removed(self, subject: OutboxUnderTest) -> None:
        ids = _store(subject.outbox, "0", "1", "2")
        count, last = subject.outbox.backlog()
        assert (count, subject.outbox.backlog(last)[0], subject.outbox.status().rows) == (3, 3, 3)
        with contextlib.closing(subject.outbox.claims()) as leases:
            rows = _take(leases)
            assert [row.message.message_id for row in rows] == ids
            _settle(subject.outbox, leases, RowSettlement(rows[1], RowOutcome.CONFIRMED))
        assert (subject.outbox.backlog()[0], subject.outbox.status().rows) == (2, 2)

    def test_a_delayed_row_is_due_after_its_delay(self, subject: OutboxUnderTest) -> None:
        """The row counts the attempt, and is marked as a possible duplicate."""
        _store(subject.outbox, "a")
        with contextlib.closing(subject.outbox.claims()) as leases:
            [row] = _take(leases)
            _settle(subject.outbox, leases, RowSettlement(row, RowOutcome.LATER, 5.0, "no", possible_duplicate=True))
            subject.age(3.0)
            assert _take(leases) == []
            subject.age(3.0)
            [row] = _take(leases)
            assert (row.attempts, row.possible_duplicate) == (1, True)

    def test_delayed_rows_leave_places_for_others(self, subject: OutboxUnderTest) -> None:
        """They are due and the oldest, but only as many are taken as were asked for."""
        for key in ("a", "b", "c", None, None, None):
            _store(subject.outbox, "failed", key=key)
        with contextlib.closing(subject.outbox.claims()) as leases:
            failed = _take(leases)
            _settle(subject.outbox, leases, *(RowSettlement(row, RowOutcome.LATER, 1.0, "no") for row in failed))
            for key in ("a", "d", None):
                _store(subject.outbox, "new", key=key)
            subject.age(2.0)
            taken = [(row.attempts, row.ordering_key) for row in _take(leases, 10, 0)]
            assert sorted(taken, key=str) == [(0, "d"), (0, None)]
            assert [row.attempts for row in _take(leases, 10, 4)] == [1, 1, 1, 1]
            assert [row.attempts for row in _take(leases, 10, 4)] == [1, 1]
            assert _take(leases, 10, 4) == []

    def test_a_row_that_is_set_aside_waits_for_a_decision(self, subject: OutboxUnderTest) -> None:
        """It holds later rows of its key, is listed with its reason, and can be decided."""
        first, _, other = _store(subject.outbox, "0", "1", key="key") + _store(subject.outbox, "2", key="other")
        with contextlib.closing(subject.outbox.claims()) as leases:
            rows = _take(leases)
            aside = [row for row in rows if row.message.message_id in {first, other}]
            held = [row for row in rows if row not in aside]
            _settle(
                subject.outbox,
                leases,
                *(RowSettlement(row, RowOutcome.SET_ASIDE, 0.0, "no queue") for row in aside),
                *(RowSettlement(row, RowOutcome.BACK) for row in held),
            )
            assert _take(leases) == []
            listed = subject.outbox.set_aside()
            assert [(one.message_id, one.reason) for one in listed] == [(first, "no queue"), (other, "no queue")]
            assert [(one.exchange, one.routing_key, one.attempts) for one in listed] == [("", "q", 1)] * 2
            assert [one.message_id for one in subject.outbox.set_aside(1)] == [first]
            status = subject.outbox.status()
            assert (status.rows, status.set_aside, status.held) == (1, 2, 1)
            assert subject.outbox.backlog()[0] == 0
            assert subject.outbox.retry([other]) == 1
            assert [row.message.message_id for row in _take(leases)] == [other]
            assert subject.outbox.purge([first, other]) == 1
            assert [row.message.body for row in _take(leases)] == [b"1"]

    def test_a_relay_that_ends_leaves_its_rows_to_the_next(self, subject: OutboxUnderTest) -> None:
        """The next relay gets the rows at once, marked as possible duplicates."""
        _store(subject.outbox, "a", "b")
        ending, other = subject.outbox.claims(), _another(subject).claims()
        assert len(_take(ending)) == 2
        ending.keep()
        assert _take(other) == []
        ending.close()
        assert [(row.message.body, row.possible_duplicate) for row in _take(other)] == [(b"a", True), (b"b", True)]
        other.close()

    def test_rows_of_a_dead_relay_are_free_after_its_lease(self, subject: OutboxUnderTest) -> None:
        """While the relay lived, it kept its lease."""
        if subject.lease is None:
            return
        _store(subject.outbox, "a", "b")
        dead, other = subject.outbox.claims(), _another(subject).claims()
        assert len(_take(dead)) == 2
        subject.age(0.6 * subject.lease)
        dead.keep()
        subject.age(0.6 * subject.lease)
        assert _take(other) == []
        subject.age(0.6 * subject.lease)
        assert [(row.message.body, row.possible_duplicate) for row in _take(other)] == [(b"a", True), (b"b", True)]
        other.close()

    def test_what_is_written_is_seen_by_another_process(self, subject: OutboxUnderTest) -> None:
        """A process that dies after a write has stored its messages and outcomes."""
        if subject.another is None:
            return
        another = subject.another()
        _store(subject.outbox, "a", "b")
        assert another.backlog()[0] == 2
        with contextlib.closing(subject.outbox.claims()) as leases:
            _settle(subject.outbox, leases, RowSettlement(_take(leases)[0], RowOutcome.CONFIRMED))
            assert another.backlog()[0] == 1

    def test_stored_rows_outlive_a_close(self, subject: OutboxUnderTest) -> None:
        """The next call opens the outbox again."""
        _store(subject.outbox, "a", "b")
        subject.outbox.close()
        assert subject.outbox.backlog()[0] == 2
        with contextlib.closing(subject.outbox.claims()) as leases:
            assert [row.message.body for row in _take(leases)] == [b"a", b"b"]

    def test_ordering_keys_and_ids_are_equal_for_equal_text_alone(self, subject: OutboxUnderTest) -> None:
        """Keys that differ only in case, accents or trailing spaces are different keys."""
        keys = ("order-ab", "ORDER-AB", "Örder-ab", "order-ab ", "")
        for key in keys:
            _store(subject.outbox, key, key=key)
        with contextlib.closing(subject.outbox.claims()) as leases:
            rows = _take(leases)
            assert sorted(row.message.body.decode() for row in rows) == sorted(keys)
            _settle(subject.outbox, leases, *(RowSettlement(row, RowOutcome.SET_ASIDE, 0.0, "why") for row in rows))
        assert subject.outbox.status().set_aside == len(keys)

    def test_wrong_numbers_and_ids_are_refused(self, subject: OutboxUnderTest) -> None:
        """Some databases ignore a negative limit, and a text is also a sequence of texts."""
        subject.outbox.open()
        wrong: Any
        for wrong in (-1, 1.5, True, "1", 2**63, float("nan")):
            with pytest.raises(ConfigurationError, match="limit must be"):
                subject.outbox.set_aside(wrong)
            with pytest.raises(ConfigurationError, match="up_to must be"):
                subject.outbox.backlog(wrong)
        assert subject.outbox.set_aside(0) == []
        for wrong in ("one", b"one", [1], ["\udcff"]):
            for decide in (subject.outbox.retry, subject.outbox.purge):
                with pytest.raises(ConfigurationError, match="message_ids must be"):
                    decide(wrong)
        assert subject.outbox.purge(("a", "b")) == 0

    def test_every_row_is_published_in_the_order_of_its_key(self, subject: OutboxUnderTest, examples: int) -> None:
        """The order holds even if relays die, or rows are delayed, set aside or purged."""

        @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(steps=_OUTBOX_STEPS)
        def run(steps: list[Any]) -> None:
            subject.empty()
            model = _OutboxModel(subject)
            for step, argument in steps:
                getattr(model, step)(argument)
            model.finish()

        run()


def _another(subject: OutboxUnderTest) -> Outbox:
    """Return the outbox of another process, or the only one."""
    return subject.another() if subject.another else subject.outbox


def _store(outbox: Outbox, *bodies: str, key: str | None = None) -> list[str]:
    rows = [NewRow(Message(body.encode()), "", "q", True, key) for body in bodies]
    outbox.write(rows, [])
    return [row.message.message_id for row in rows]


def _take(leases: RowLeases, limit: int = 10, retries: int | None = None) -> list[OutboxRow]:
    batch = leases.take(limit, retries)
    assert not batch.damaged
    return batch.rows


def _settle(outbox: Outbox, leases: RowLeases, *settlements: RowSettlement) -> None:
    leases.decided(settlements)
    outbox.write([], settlements)
    leases.written(settlements)


_PUBLISH_RESULTS: list[Any] = [
    None,
    None,
    PublishNacked("full"),
    PublishReturned("no queue", reply_code=312, reply_text="NO_ROUTE", exchange="", routing_key=""),
    BrokerUnavailable("no broker"),
]
_TAKE = st.tuples(st.just("take"), st.integers(1, 10))
_SETTLE = st.tuples(st.just("settle"), st.tuples(st.integers(0, 20), st.sampled_from(_PUBLISH_RESULTS)))
# Order could be lost if rows are taken after the outcome of a row and before its write, so this is the most frequent
# sequence.
_OUTBOX_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.lists(st.sampled_from(["a", "b", None]), min_size=2, max_size=8)),
        _TAKE,
        _TAKE,
        _SETTLE,
        _SETTLE,
        st.tuples(st.just("write"), st.none()),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 3.0, 100.0])),
        st.tuples(st.sampled_from(["die", "retry", "purge"]), st.none()),
    ),
    min_size=8,
    max_size=40,
)


class _OutboxModel:
    """A model of an outbox with one relay at a time, which checks each published row."""

    def __init__(self, subject: OutboxUnderTest) -> None:
        self.outbox = subject.outbox
        self.age = subject.age
        self.number = 0
        self.keys: dict[str, str | None] = {}
        self.left: list[str] = []  # rows that are neither confirmed nor purged, in order
        self.begin()

    def begin(self) -> None:
        self.leases: RowLeases = self.outbox.claims()
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
        self.session.add(_take(self.leases, limit))
        self.publish()

    def publish(self) -> None:
        while self.session.ready:
            row = self.session.ready.popleft()
            name = row.message.message_id
            assert row.message.body == name.encode()
            assert name in self.left, "it was confirmed, or purged"
            assert all(other.message.message_id != name for other in self.outstanding), "it is outstanding"
            key = self.keys[name]
            if key is not None:
                first = next(other for other in self.left if self.keys[other] == key)
                assert first == name or first in self.confirmed(), f"{name} overtakes {first}"
            self.outstanding.append(row)

    def confirmed(self) -> set[str]:
        """Return the messages whose confirmation is not written yet."""
        return {one.row.message.message_id for one in self.unwritten if one.outcome is RowOutcome.CONFIRMED}

    def settle(self, choice: tuple[int, Any]) -> None:
        number, error = choice
        if self.outstanding:
            row = self.outstanding.pop(number % len(self.outstanding))
            self.session.settled(row, error)
            if error is None:
                self.left.remove(row.message.message_id)
            decided, self.session.settlements = self.session.settlements, []
            self.leases.decided(decided)
            self.unwritten += decided
            self.publish()

    def write(self, _: None) -> None:
        settlements, self.unwritten = self.unwritten, []
        self.outbox.write([], settlements)
        self.leases.written(settlements)

    def die(self, _: None) -> None:
        """End the relay. Confirmed rows whose removal was not written come again."""
        self.left = sorted({*self.left, *self.confirmed()}, key=lambda name: int(name[1:]))
        self.leases.close()
        self.begin()

    def wait(self, seconds: float) -> None:
        self.age(seconds)

    def retry(self, _: None) -> None:
        before = self.outbox.status().set_aside
        assert self.outbox.retry() == before
        assert self.outbox.status().set_aside == 0

    def purge(self, _: None) -> None:
        gone = [one.message_id for one in self.outbox.set_aside()]
        assert self.outbox.purge() == len(gone)
        self.left = [name for name in self.left if name not in gone]

    def finish(self) -> None:
        """Confirm every message until the outbox is empty."""
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
        self.leases.close()
