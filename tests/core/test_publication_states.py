"""The states of a publication: every transition happens, and none is a dead end."""

from __future__ import annotations

import pytest

from reliable_mq.core.publisher.publication import TRANSITIONS, PublicationState
from tests.core.published import (
    DELIVERY_TIMEOUT,
    UNKNOWN_ERROR,
    CheckedPublication,
    Shell,
    Transition,
    Unencodable,
)
from tests.transitions import changes

GRACE = 2.0
LATE = DELIVERY_TIMEOUT + 10.0


def unencodable(times: int) -> CheckedPublication:
    message = Unencodable.after(times, b"bad", f"bad {times}")
    return CheckedPublication(message, "", "orders", True, 3, 0.0, None)


def test_every_transition_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session uses every transition of the table."""
    monkeypatch.setattr(CheckedPublication, "observed", set())
    confirms_retries_and_ids()
    deadlines_in_every_state()
    new_queues_and_lost_connections()
    channel_errors()
    listed: set[Transition] = {
        (event, before, after)
        for event, moves in TRANSITIONS.items()
        for before, those in moves.items()
        for after in those
    }
    assert CheckedPublication.observed == listed


def confirms_retries_and_ids() -> None:
    shell = Shell()
    shell.accept("a", "b")
    shell.accept("second a", message_id="id of a")
    shell.session.accept([unencodable(0)])
    shell.sent()
    shell.ack(1)
    shell.nack(2)
    shell.sent()
    shell.return_("id of a")
    shell.nack(3)
    assert shell.sent(5.0) == ["b"]


def deadlines_in_every_state() -> None:
    shell = Shell(grace=GRACE)
    shell.new_queues.made(["orders"], 0.0)
    shell.accept("delayed", "provisional", "acked late", "nacked late", "never confirmed")
    shell.sent()
    shell.nack(1)
    shell.ack(2, now=1.5)
    shell.accept("waits", message_id="id of never confirmed")
    shell.accept("ready")
    shell.session.abandon_all()
    shell.ack(3, now=1.5)
    shell.nack(4)
    shell.lose()
    shell.reopen()
    shell.accept("one", "two", "three")
    shell.accept("four", timeout=1.0)
    shell.sent()
    shell.lose(UNKNOWN_ERROR, connection=False)
    shell.session.tick(1.0)
    shell.session.tick(LATE)


def new_queues_and_lost_connections() -> None:
    shell = Shell(grace=GRACE)
    shell.new_queues.made(["orders"], 0.0)
    shell.accept("safe", "lost", "not confirmed")
    shell.sent()
    shell.ack(1, now=1.5)
    for number in range(7):
        at = GRACE / 4 + number * GRACE / 8
        shell.session.round_trip_begun(at)
        shell.session.round_trip_ended(at)
    shell.new_queues.made(["orders"], GRACE)
    shell.ack(2, now=GRACE + 0.5)
    shell.lose()
    shell.reopen()


def channel_errors() -> None:
    shell = Shell(grace=GRACE)
    shell.new_queues.made(["orders"], 0.0)
    shell.accept("provisional", "one", "two", "three", "four")
    shell.session.accept([unencodable(1)])
    shell.sent()
    shell.ack(1, now=1.5)
    shell.lose(UNKNOWN_ERROR, connection=False)
    shell.session.connection_replaced()
    shell.reopen()
    while shell.sent():
        shell.lose(UNKNOWN_ERROR, connection=False)
        shell.reopen()


def test_what_is_settled_stays_so_and_nothing_else_is_an_end() -> None:
    """Every state leads to `SETTLED`, which no transition leaves."""
    moves: dict[PublicationState, set[PublicationState]] = {state: set() for state in PublicationState}
    for before, after in changes(TRANSITIONS):
        moves[before].add(after)
    assert moves.pop(PublicationState.SETTLED) == set()
    for state in moves:
        reached = {state}
        for _ in PublicationState:
            reached |= {after for before in reached for after in moves.get(before, ())}
        assert PublicationState.SETTLED in reached
