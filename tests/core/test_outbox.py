"""The rows of an outbox, their format, and the decisions of a relay."""

from __future__ import annotations

from typing import Any

import pytest

from reliable_mq import (
    BrokerUnavailable,
    ConfigurationError,
    Message,
    Outcome,
    PublishNacked,
    PublishRefused,
    PublishReturned,
    PublishUnconfirmed,
    ReliableMQError,
)
from reliable_mq.core import outbox as core_outbox
from reliable_mq.core.outbox import (
    COLUMNS,
    FORMAT,
    LONGEST_DELAY,
    KeptPlaces,
    NewRow,
    OutboxRow,
    RelaySession,
    RowOutcome,
    UnreadableRow,
    damaged_row,
    delay_after,
    row_from,
    values_of,
)
from reliable_mq.core.publisher.publication import StoredPublication
from reliable_mq.core.statistics import OutboxStatus
from reliable_mq.errors import OutboxError, UsageError

RETURNED = PublishReturned("no queue", reply_code=312, reply_text="NO_ROUTE", exchange="", routing_key="q")
UNANSWERED = PublishUnconfirmed("no leader", sent=True)
REFUSED = PublishRefused("too large", reply_code=406, reply_text="PRECONDITION_FAILED")


def row(number: int, key: str | None = None, attempts: int = 0) -> OutboxRow:
    return OutboxRow(number, Message(b"x", message_id=f"m{number}"), "", "q", True, key, attempts, False)


def values(**changed: Any) -> list[Any]:
    made = values_of(NewRow(Message(b"body", message_id="m"), "x", "key", True, None))
    given = dict(zip(COLUMNS, made, strict=True))
    assert changed.keys() <= given.keys()
    return list((given | changed).values())


def numbers(rows: Any) -> list[int]:
    return [one.id for one in rows]


def outcomes(session: RelaySession) -> list[tuple[int, RowOutcome]]:
    taken, session.settlements = session.settlements, []
    return [(one.row.id, one.outcome) for one in taken]


@pytest.mark.parametrize(
    "message",
    [
        Message(b"", message_id="m"),
        Message(b"x" * 1000, headers={"a": 1}, message_id="m", priority=3, persistent=False),
    ],
)
def test_a_row_gives_back_the_message_byte_for_byte(message: Message) -> None:
    """The relay publishes exactly what was accepted, including the id."""
    made = row_from(7, values_of(NewRow(message, "exchange", "key", False, "order")))
    assert (made.id, made.exchange, made.routing_key, made.mandatory, made.ordering_key) == (
        7,
        "exchange",
        "key",
        False,
        "order",
    )
    assert made.message.body == message.body
    assert made.message.message_id == message.message_id
    assert made.message.encoded_properties == message.encoded_properties
    assert (made.attempts, made.possible_duplicate) == (0, False)


def test_a_row_says_where_its_message_goes() -> None:
    row = OutboxRow(1, Message(b"x", message_id="m1"), "events", "order.placed", True, None, 0, False)
    assert str(row) == "message m1 to exchange 'events' with routing key 'order.placed'"


def test_a_row_of_a_newer_format_is_not_decoded() -> None:
    """The error only names the newer format, whatever the columns hold."""
    with pytest.raises(UnreadableRow, match="newer") as caught:
        row_from(1, values(format=FORMAT + 1, body=None, properties="what is this"))
    assert caught.value.newer


@pytest.mark.parametrize(
    "changed",
    [
        {"format": 0},
        {"format": "1"},
        {"message_id": None},
        {"exchange": b"x"},
        {"routing_key": 3},
        {"body": "text"},
        {"properties": "text"},
        {"properties": b"\xff"},
        {"ordering_key": b"key"},
        {"attempts": "many"},
    ],
)
def test_a_damaged_row_is_refused(changed: dict[str, Any]) -> None:
    """A row that no version has ever written is not published."""
    with pytest.raises(UnreadableRow) as caught:
        row_from(1, values(**changed))
    assert not caught.value.newer


def test_a_damaged_row_keeps_the_id_of_its_message() -> None:
    """Whatever the id is, nothing else of the row is read."""
    row = damaged_row(7, values(message_id="order-7" * 100, body=None), key="key", claim="claim")
    assert (row.id, row.message.message_id, row.message.body) == (7, "order-7" * 100, b"")
    assert (row.ordering_key, row.claim) == ("key", "claim")
    assert damaged_row(7, values(message_id=b"\xff")).message.message_id == r"b'\xff'"


def test_a_row_in_doubt_is_marked_as_a_possible_duplicate() -> None:
    """Both the mark in the row and ``in_doubt`` count."""
    assert row_from(1, values(possible_duplicate=1)).possible_duplicate
    assert row_from(1, values(), in_doubt=True).possible_duplicate
    assert not row_from(1, values()).possible_duplicate


def test_a_database_that_gives_memory_views_is_understood() -> None:
    """psycopg2 and others return binary columns as memory views."""
    wired = Message(b"body", message_id="m", type="t")
    made = row_from(1, values(body=memoryview(b"body"), properties=memoryview(wired.encoded_properties or b"")))
    assert made.message.body == b"body"
    assert made.message.type == "t"


def test_delays_grow_to_a_longest_one() -> None:
    """A full queue is not tried too often."""
    delays = [delay_after(attempts) for attempts in range(1, 20)]
    assert delays == sorted(delays)
    assert delays[0] == 1
    assert delays[-1] == LONGEST_DELAY


def test_rows_without_a_key_are_ready_at_once_in_order() -> None:
    """They wait for no other row."""
    session = RelaySession()
    session.add([row(1), row(2), row(3)])
    assert numbers(session.ready) == [1, 2, 3]
    assert session.waiting == 0


def test_rows_of_a_key_are_ready_one_after_the_other() -> None:
    """The next row of a key follows the confirm; other keys do not wait."""
    session = RelaySession()
    session.add([row(1, "a"), row(2, "a"), row(3, "b"), row(4, "a")])
    assert numbers(session.ready) == [1, 3]
    assert session.waiting == 2
    session.ready.clear()
    session.settled(row(1, "a"), None)
    assert numbers(session.ready) == [2]
    session.settled(row(3, "b"), None)
    session.settled(row(2, "a"), None)
    session.settled(row(4, "a"), None)
    assert session.waiting == 0
    session.add([row(5, "a")])
    assert numbers(session.ready) == [2, 4, 5]
    assert outcomes(session) == [(number, RowOutcome.CONFIRMED) for number in (1, 3, 2, 4)]


@pytest.mark.parametrize("error", [RETURNED, REFUSED, ConfigurationError("routing_key is too long")])
def test_an_unpublishable_row_is_set_aside_and_holds_its_key(error: Any) -> None:
    """The rows behind it are released untouched.

    The outbox decides about later rows.
    """
    session = RelaySession()
    session.add([row(1, "a"), row(2, "a"), row(3)])
    session.settled(row(1, "a"), error)
    first = session.settlements[0]
    assert first.reason == f"{type(error).__name__}: {error}"
    assert not first.possible_duplicate
    assert outcomes(session) == [(1, RowOutcome.SET_ASIDE), (2, RowOutcome.BACK)]
    assert session.waiting == 0


@pytest.mark.parametrize(
    ("error", "doubt"), [(PublishNacked("full"), False), (PublishUnconfirmed("late", sent=True), True)]
)
def test_what_was_not_confirmed_is_tried_again_later(error: Any, doubt: bool) -> None:
    """The next attempt may succeed, but may be a duplicate after an unknown outcome."""
    session = RelaySession()
    session.add([row(1, attempts=2), row(2, "a"), row(3, "a")])
    session.settled(row(1, attempts=2), error)
    session.settled(row(2, "a"), error)
    first = session.settlements[0]
    assert (first.delay, first.possible_duplicate) == (delay_after(3), doubt)
    assert outcomes(session) == [(1, RowOutcome.LATER), (2, RowOutcome.LATER), (3, RowOutcome.BACK)]


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [(None, RowOutcome.CONFIRMED), (RETURNED, RowOutcome.SET_ASIDE), (PublishNacked("full"), RowOutcome.LATER)],
)
def test_an_error_about_the_connection_hands_rows_back(answer: ReliableMQError | None, outcome: RowOutcome) -> None:
    """The error says nothing about the row.

    It is kept until the broker answers the publish of another row.
    """
    session = RelaySession()
    session.add([row(1), row(2), row(3)])
    error = BrokerUnavailable("nobody there")
    session.settled(row(1), error)
    session.settled(row(2), UNANSWERED)
    assert session.trouble is error
    session.settled(row(3), answer)
    assert session.trouble is None
    assert outcomes(session) == [(1, RowOutcome.BACK), (2, RowOutcome.LATER), (3, outcome)]


def test_a_relay_that_stops_releases_what_is_not_outstanding() -> None:
    """Outstanding rows still get their outcome, and no row follows them."""
    session = RelaySession()
    session.add([row(1, "a"), row(2, "a"), row(3, "b"), row(4, "b"), row(5)])
    outstanding = session.ready.popleft()
    session.stopped()
    assert sorted(outcomes(session)) == [
        (2, RowOutcome.BACK),
        (3, RowOutcome.BACK),
        (4, RowOutcome.BACK),
        (5, RowOutcome.BACK),
    ]
    assert session.waiting == 0
    session.settled(outstanding, None)
    assert not session.ready
    assert outcomes(session) == [(1, RowOutcome.CONFIRMED)]
    session.stopped()
    assert outcomes(session) == []


class Stored(StoredPublication):
    __slots__ = ("error",)


@pytest.mark.parametrize(("arrived", "outcome"), [(False, Outcome.REFUSED), (True, Outcome.UNKNOWN)])
def test_a_publish_ends_once_its_message_is_stored_or_fails(arrived: bool, outcome: Outcome) -> None:
    """The receipt says stored, or the error says whether the message may be stored."""
    stored = Stored(Message(b"", message_id="m"), "", "q", True, 0, 0.0, None)
    assert stored.failure() is None
    with pytest.raises(UsageError, match="has no receipt, because it is not stored"):
        stored.receipt()
    stored.stored(None)
    assert stored.outcome is Outcome.STORED
    assert stored.failure() is None
    receipt = stored.receipt()
    assert (receipt.message_id, receipt.status, receipt.attempts) == ("m", "stored", 0)
    failed = Stored(Message(b"", message_id="m"), "", "q", True, 0, 0.0, None)
    error = OutboxError("the disk is full")
    error.may_have_arrived = arrived
    failed.stored(error)
    assert failed.outcome is outcome
    assert failed.failure() is error


def test_a_session_knows_a_key_until_its_rows_are_settled() -> None:
    """A relay reads rows again when a key is settled."""
    session = RelaySession()
    first, second = row(1, "key"), row(2, "key")
    assert not session.has("key")
    session.add([first, second])
    assert session.has("key")
    session.settled(first, None)
    assert session.has("key")
    session.settled(second, None)
    assert not session.has("key")


def test_what_waits_grows_older_while_nobody_counts_it() -> None:
    """A relay that hangs must not hide the age of the waiting messages."""
    assert OutboxStatus(rows=1, oldest_age=1.5).after(10.0) == OutboxStatus(rows=1, oldest_age=11.5)
    assert OutboxStatus(rows=0, set_aside=1).after(10.0) == OutboxStatus(rows=0, set_aside=1)


def test_rows_that_failed_take_half_of_the_places() -> None:
    """Further suspect rows are delayed again, without an attempt.

    The rows behind them are returned. Rows that never failed are ready.
    """
    session = RelaySession(4)
    assert session.suspects_to_take(KeptPlaces()) == 2
    session.add([row(1, attempts=1), row(2, "a", attempts=2), row(3, "b", attempts=2), row(4, "b"), row(5), row(6)])
    assert numbers(session.ready) == [1, 2, 5, 6]
    assert session.suspects_to_take(KeptPlaces()) == 0
    assert session.settlements[0].delay == delay_after(3)
    assert not session.settlements[0].possible_duplicate
    assert outcomes(session) == [(3, RowOutcome.LATER), (4, RowOutcome.BACK)]
    session.settled(row(1), None)
    session.settled(row(2, "a"), PublishNacked("full"))
    assert session.suspects_to_take(KeptPlaces()) == 2
    assert session.suspects_to_take(KeptPlaces(rows=2)) == 0


def test_rows_that_failed_take_half_of_the_bytes() -> None:
    """A single larger row is still tried, alone."""
    session = RelaySession(100, 4)
    session.add([row(1, attempts=1), row(2, attempts=1), row(3, attempts=1)])
    assert outcomes(session) == [(3, RowOutcome.LATER)]
    large = OutboxRow(4, Message(b"large"), "", "q", True, None, 1, False)
    session = RelaySession(100, 4)
    session.add([large])
    assert numbers(session.ready) == [4]


def test_the_bodies_of_rows_that_wait_for_their_key_are_counted() -> None:
    session = RelaySession()
    rows = [row(size, "key")._replace(message=Message(bytes(size))) for size in (1, 10, 100, 1000)]
    session.add(rows)
    assert session.waiting_bytes == 1110
    session.settled(session.ready.popleft(), None)
    assert session.waiting_bytes == 1100
    session.settled(session.ready.popleft(), RETURNED)
    assert session.waiting_bytes == 0
    session.add(rows)
    session.stopped()
    assert session.waiting_bytes == 0


def test_new_rows_to_a_silent_destination_are_suspects() -> None:
    """The next answer ends the suspicion, even if it is a nack."""
    other = row(9)._replace(routing_key="other")
    session = RelaySession(2)
    session.add([row(1)])
    session.settled(row(1), UNANSWERED)
    session.settlements.clear()
    session.add([row(2), row(3), other])
    assert numbers(session.ready) == [1, 2, 9]
    assert outcomes(session) == [(3, RowOutcome.LATER)]
    session.settled(row(2), PublishNacked("full"))
    session.settlements.clear()
    session.add([row(4), row(5)])
    assert outcomes(session) == []


def test_the_number_of_silent_destinations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit, all are forgotten.

    Their rows are ordinary until the next confirm is missing.
    """
    monkeypatch.setattr(core_outbox, "_SILENT_KEPT", 2)
    session = RelaySession(2)
    silent = [row(number)._replace(routing_key=f"q{number}") for number in range(3)]
    for each in silent:
        session.add([each])
        session.settled(each, UNANSWERED)
    session.settlements.clear()
    session.add([row(10 + number)._replace(routing_key=f"q{number}") for number in range(3)])
    assert session.suspects == 1
    assert outcomes(session) == []


def test_kept_places_count_as_those_of_rows_that_failed() -> None:
    """Their confirms may still come, so the publisher keeps their places."""
    session = RelaySession(4)
    session.add([row(1, attempts=1), row(2)], KeptPlaces(rows=2))
    assert numbers(session.ready) == [2]
    assert outcomes(session) == [(1, RowOutcome.LATER)]


def test_no_row_is_delayed_while_there_is_no_channel() -> None:
    """Without a channel every row waits, so delaying them would only cost writes."""
    session = RelaySession(2)
    session.add([row(number, attempts=1) for number in range(5)], KeptPlaces(connected=False))
    assert numbers(session.ready) == [0, 1, 2, 3, 4]
    assert outcomes(session) == []
    session.stopped()
    assert session.suspects == 0


def test_the_bytes_of_a_row_that_is_tried_twice_count_once() -> None:
    """Its lease was lost to a relay that died, so it comes again while its old attempt is outstanding."""
    session = RelaySession(4)
    again = row(1, attempts=1)._replace(message=Message(bytes(1000)))
    session.add([again])
    session.add([again])
    for _ in range(2):
        session.settled(again, None)
    assert (session.suspects, session._suspect_bytes) == (0, 0)
