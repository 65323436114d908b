"""Health for probes: each sign alone, and several together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reliable_mq.core.health import ConsumerSigns, Health, OutboxSigns, PublisherSigns, StoreFailure, health_of

NOW, WALL_CLOCK = 1000.0, 1_800_000_000.0
PUBLISHER = PublisherSigns(changed_at=900.0, stuck_after=30.0, connected=True, patience=20.0, worked_at=990.0)
CONSUMER = ConsumerSigns(changed_at=900.0, stuck_after=300.0, connected=True, patience=20.0, worked_at=990.0)
WELL = Health(live=True, ready=True, progressing=True, since=WALL_CLOCK - 100)


def judge(signs: PublisherSigns | ConsumerSigns) -> Health:
    return health_of(signs, NOW, WALL_CLOCK)


@pytest.mark.parametrize("signs", [PUBLISHER, CONSUMER])
def test_what_works_is_well_since_it_is_connected(signs: PublisherSigns | ConsumerSigns) -> None:
    assert judge(signs) == WELL
    assert judge(replace(signs, work=5)) == WELL
    assert judge(replace(signs, unanswered_since=NOW - 19.9)) == WELL


@pytest.mark.parametrize("signs", [PUBLISHER, CONSUMER])
def test_a_lost_connection_is_live_and_not_ready(signs: PublisherSigns | ConsumerSigns) -> None:
    away = replace(signs, connected=False, changed_at=NOW - 7, disconnected_reason="reset by peer")
    assert judge(away) == Health(True, False, True, WALL_CLOCK - 7, "not connected: reset by peer")
    first = judge(replace(away, disconnected_reason=None))
    assert first.reason == "not connected: the first attempt goes on"
    unused = judge(replace(away, started=False))
    assert (unused.live, unused.ready) == (True, False)
    assert unused.reason.startswith("not started")


@pytest.mark.parametrize("signs", [PUBLISHER, CONSUMER])
def test_a_loop_that_stalls_or_has_ended_is_not_live(signs: PublisherSigns | ConsumerSigns) -> None:
    stalled = judge(replace(signs, unanswered_since=NOW - 20))
    assert (stalled.live, stalled.ready, stalled.progressing) == (False, False, True)
    assert stalled.since == WALL_CLOCK - 20
    assert stalled.reason == "its event loop has stalled for 20.0 s or longer"
    over = judge(replace(signs, loop_over=True, unanswered_since=NOW - 20))
    assert (over.live, over.ready) == (False, False)
    assert over.reason == "its I/O thread or event loop has ended"


@pytest.mark.parametrize("signs", [PUBLISHER, CONSUMER])
def test_what_has_given_up_is_not_live(signs: PublisherSigns | ConsumerSigns) -> None:
    health = judge(replace(signs, connected=False, given_up="403 ACCESS_REFUSED"))
    assert (health.live, health.ready, health.reason) == (False, False, "given up: 403 ACCESS_REFUSED")


@pytest.mark.parametrize(("signs", "of"), [(PUBLISHER, "messages are outstanding"), (CONSUMER, "with handlers")])
def test_work_of_which_nothing_ends_does_not_progress(signs: PublisherSigns | ConsumerSigns, of: str) -> None:
    stuck = replace(signs, work=3, worked_at=NOW - signs.stuck_after)
    health = judge(stuck)
    assert (health.live, health.ready, health.progressing) == (True, True, False)
    assert health.since == WALL_CLOCK - signs.stuck_after
    assert of in health.reason
    assert judge(replace(stuck, work=0)) == WELL


@pytest.mark.parametrize("signs", [PUBLISHER, CONSUMER])
def test_what_its_program_has_closed_is_live(signs: PublisherSigns | ConsumerSigns) -> None:
    """A process that drains must not be killed, whatever the other signs are."""
    health = judge(replace(signs, closed="stopping", loop_over=True, given_up="x", unanswered_since=0.0))
    assert health == Health(True, False, True, WALL_CLOCK - 100, "stopping")


def test_a_blocked_publisher_is_live_and_not_ready() -> None:
    health = judge(replace(PUBLISHER, blocked_reason="low on memory", blocked_at=NOW - 3))
    assert health == Health(True, False, True, WALL_CLOCK - 3, "the broker blocks publishing: low on memory")
    assert judge(replace(PUBLISHER, blocked_reason="low on memory")).since == WALL_CLOCK


def test_a_paused_consumer_is_live_but_not_ready_or_progressing() -> None:
    health = judge(replace(CONSUMER, paused=True, paused_at=NOW - 3))
    assert (health.live, health.ready, health.progressing, health.since) == (True, False, False, WALL_CLOCK - 3)
    assert "kill switch" in health.reason
    assert judge(replace(CONSUMER, paused=True)).since == WALL_CLOCK


def test_a_store_that_fails_makes_a_consumer_not_ready() -> None:
    failing = replace(CONSUMER, store_failing=(NOW - 3, "TimeoutError: down"))
    said = "its idempotency store fails: TimeoutError: down"
    assert judge(failing) == Health(True, False, True, WALL_CLOCK - 3, said)
    longer = replace(failing, store_failing=(NOW - CONSUMER.stuck_after, "TimeoutError: down"))
    assert judge(longer) == Health(True, False, False, WALL_CLOCK - CONSUMER.stuck_after, said)
    assert judge(replace(failing, paused=True)).reason.endswith(f"; {said}")


def test_the_retry_connection_counts_while_retries_wait_for_it() -> None:
    away = replace(PUBLISHER, connected=False, changed_at=NOW - 5, disconnected_reason="refused")
    assert judge(replace(CONSUMER, republisher=away)) == WELL
    waits = judge(replace(CONSUMER, republisher=replace(away, work=2)))
    assert waits == Health(True, False, True, WALL_CLOCK - 5, "its retries and dead letters: not connected: refused")
    assert judge(replace(CONSUMER, republisher=away, holds_publishes=True)) == waits
    stuck = judge(replace(CONSUMER, republisher=replace(PUBLISHER, work=2, worked_at=NOW - 30)))
    assert (stuck.live, stuck.ready, stuck.progressing) == (True, True, False)
    ended = judge(replace(CONSUMER, paused=True, republisher=replace(away, given_up="403")))
    assert (ended.live, ended.ready, ended.progressing) == (False, False, False)
    assert ended.reason.endswith("; its retries and dead letters: given up: 403")
    lost = judge(replace(CONSUMER, connected=False, republisher=replace(away, loop_over=True)))
    assert lost.reason.startswith("not connected")
    assert not lost.live


def test_with_an_outbox_the_broker_is_not_needed_to_be_ready() -> None:
    away = replace(PUBLISHER, connected=False, outbox=OutboxSigns(open=True))
    assert judge(away) == WELL
    assert judge(replace(away, given_up="403 ACCESS_REFUSED")) == WELL
    closed = judge(replace(away, outbox=OutboxSigns(open=False)))
    assert (closed.live, closed.ready, closed.reason) == (True, False, "its outbox is not open")
    ended = judge(replace(away, outbox=OutboxSigns(open=True, relay_over=True)))
    assert (ended.live, ended.ready) == (False, False)


def test_a_relay_in_trouble_for_long_does_not_progress() -> None:
    trouble = OutboxSigns(open=True, trouble="no host", trouble_since=NOW - 30)
    health = judge(replace(PUBLISHER, connected=False, outbox=trouble))
    assert (health.live, health.ready, health.progressing) == (True, True, False)
    assert health.reason == "nothing of its outbox can be published: no host"
    assert judge(replace(PUBLISHER, outbox=replace(trouble, trouble_since=NOW - 29))) == WELL


def test_an_outbox_that_cannot_store_is_not_ready() -> None:
    failing = OutboxSigns(open=True, store_failing=StoreFailure(NOW - 29, NOW - 1, "the disk is full"))
    health = judge(replace(PUBLISHER, outbox=failing))
    assert health == Health(True, False, True, WALL_CLOCK - 29, "its outbox cannot store messages: the disk is full")
    for_long = replace(failing, store_failing=StoreFailure(NOW - 30, NOW - 1, "the disk is full"))
    assert not judge(replace(PUBLISHER, outbox=for_long)).progressing


def test_a_failure_to_store_is_no_longer_known_after_a_while() -> None:
    """A publisher that is not ready gets no traffic, and only the next message shows whether it can be stored."""
    failing = OutboxSigns(open=True, store_failing=StoreFailure(NOW - 500, NOW - 29.9, "the disk is full"))
    assert not judge(replace(PUBLISHER, outbox=failing)).ready
    over = replace(failing, store_failing=StoreFailure(NOW - 500, NOW - 30, "the disk is full"))
    assert judge(replace(PUBLISHER, outbox=over)) == WELL
    assert not judge(replace(PUBLISHER, outbox=replace(over, unstored=1, answered_at=NOW))).ready


def test_an_outbox_that_does_not_answer_is_not_ready() -> None:
    hangs = OutboxSigns(open=True, unstored=2, answered_at=NOW - 30)
    reason = "2 messages are not stored, and its outbox has not answered for 30.0 s"
    assert judge(replace(PUBLISHER, outbox=hangs)) == Health(True, False, False, WALL_CLOCK - 30, reason)
    assert judge(replace(PUBLISHER, outbox=replace(hangs, answered_at=NOW - 29))) == WELL
    assert judge(replace(PUBLISHER, outbox=replace(hangs, unstored=0))) == WELL


def test_an_outbox_that_does_not_answer_its_relay_is_not_ready() -> None:
    """Without traffic, only the relay notices."""
    hangs = OutboxSigns(open=True, unanswered_since=NOW - 30)
    reason = "its outbox has not answered its relay for 30.0 s"
    assert judge(replace(PUBLISHER, outbox=hangs)) == Health(True, False, False, WALL_CLOCK - 30, reason)
    assert judge(replace(PUBLISHER, outbox=replace(hangs, unanswered_since=NOW - 29))) == WELL


def test_all_reasons_are_given_and_the_oldest_counts() -> None:
    health = judge(replace(PUBLISHER, connected=False, disconnected_reason="reset", work=1, worked_at=NOW - 500))
    assert (health.live, health.ready, health.progressing) == (True, False, False)
    assert health.since == WALL_CLOCK - 500
    assert "1 messages are outstanding" in health.reason
    assert health.reason.endswith("not connected: reset")
