"""The consumer session and the broker's consumer timeout.

The session warns before the timeout, and counts a timeout as a failed attempt.
"""

from __future__ import annotations

from math import inf

import pytest

from reliable_mq import KillSwitch, RetryPolicy
from reliable_mq.codec import encode_nack
from reliable_mq.core.consumer.acks import StreamOffset
from reliable_mq.core.consumer.consumer_timeout import ConsumerTimeout
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.handler import Failed, Skipped, SkipReason
from reliable_mq.core.consumer.settlement import LogEventKind
from reliable_mq.core.retry.dead_letters import RepublishReason
from tests.core.deliveries import delivery, failure
from tests.core.sessions import (
    CHANNEL,
    ISOLATED,
    SteppedSession,
    attempt_again,
    deliver,
    fail,
    items,
    kinds,
    make,
    only_republish,
)
from tests.core.test_consumer_session_retries import waited_delivery
from tests.core.test_quarantine import back, isolated

CLOSED = ConsumerTimeout(10.0)


def struck(session: SteppedSession, generation: int = 1, now: float = 100.0, strike: ConsumerTimeout = CLOSED) -> None:
    """Close the channel over the consumer timeout, and open another one."""
    session.timed_out(strike, now, 1_000.0)
    session.lost(generation)
    session.opened(generation + 1, CHANNEL)


def again(message_id: str | None = "m1", tag: int = 1) -> Delivery:
    return delivery(tag, redelivered=True, message_id=message_id)


# -- before the timeout ------------------------------------------------------------------------------------------------


def test_a_long_unacked_delivery_is_warned_of_by_age_and_queue() -> None:
    session = make(consumer_timeout=1800.0)
    deliver(session, items(2))
    assert session.deadline == 1350.0
    session.tick(1350.0)
    [notice] = session.take_notices()
    assert (notice.kind, notice.delivery) == (LogEventKind.OVERDUE, None)
    assert notice.text == (
        "message 'm1', message 'm2' of queue 'orders', for 1350 s; "
        "the broker requeues a delivery that is unacked for 1800 s, its consumer timeout"
    )
    session.tick(1790.0)
    assert (kinds(session), session.statistics.overdue, session.deadline) == ([], 2, inf)


def test_of_many_the_first_are_named() -> None:
    session = make(consumer_timeout=100.0)
    deliver(session, items(50))
    session.tick(75.0)
    [notice] = session.take_notices()
    assert "message 'm5', and 45 more of queue 'orders', for 75 s" in notice.text
    assert session.statistics.overdue == 50


def test_what_the_broker_forgets_is_never_overdue() -> None:
    session = make(consumer_timeout=100.0, automatic=True)
    deliver(session, items(1))
    session.tick(1000.0)
    assert kinds(session) == []
    session.timed_out(CLOSED, 1000.0, 0.0)
    assert session.statistics.timed_out == 0


# -- when the broker closes the channel --------------------------------------------------------------------------------


def test_a_message_that_hangs_its_handler_fails_and_is_retried() -> None:
    session = make(max_attempts=3)
    [item] = deliver(session, items(1))
    struck(session)
    assert (session.statistics.timed_out, session.statistics.failed, session.running) == (1, 1, 1)
    [notice] = session.take_notices()
    assert (notice.kind, notice.delivery) == (LogEventKind.TIMED_OUT, item)
    assert notice.line("c") == (
        "message 'm1' of queue 'orders' timed out in its handler: "
        "no result within 10 s, the broker's consumer timeout; attempts failed: 1"
    )
    assert deliver(session, [again()], 100.0) == []
    assert attempt_again(session, 100.9) == []
    [second] = attempt_again(session, 101.0)
    assert (second.attempt, second.redelivered) == (2, True)


def test_the_attempt_cap_holds_for_a_message_that_always_hangs() -> None:
    """The dead letter names the reason."""
    session = make(max_attempts=2)
    deliver(session, items(1))
    struck(session)
    deliver(session, [again()], 100.0)
    assert len(attempt_again(session, 101.0)) == 1
    struck(session, 2, 200.0)
    assert deliver(session, [again()], 200.0) == []
    republish = only_republish(session)
    assert (republish.purpose, republish.reason) == (RepublishReason.DEAD_LETTER, "2 of 2 attempts failed")
    assert b"TimeoutError" in republish.properties
    session.published(republish, None, 200.0)
    assert session.statistics.dead_lettered == 1


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (RetryPolicy(3, give_up_on=TimeoutError), "the retry policy gives up on TimeoutError: no result within 10 s"),
        (RetryPolicy(1), "1 of 1 attempts failed"),
    ],
)
def test_it_counts_as_a_timeout_error_of_the_handler(policy: RetryPolicy, reason: str) -> None:
    session = make(retry=policy)
    deliver(session, items(1))
    struck(session)
    assert deliver(session, [again()], 100.0) == []
    assert only_republish(session).reason.startswith(reason)


@pytest.mark.parametrize("fails", [True, False])
def test_the_late_result_of_its_handler_changes_nothing(fails: bool) -> None:
    session = make(max_attempts=3)
    [item] = deliver(session, items(1))
    struck(session)
    session.finished([Failed(item, failure()) if fails else item], 101.0)
    assert (session.statistics.stale, session.statistics.failed, session.statistics.handled) == (1, 1, 0)
    assert (session.running, session.take_output(200.0)) == (0, b"")
    assert [one.attempt for one in deliver(session, [again()], 102.0)] == [2]


def test_the_late_word_of_its_store_changes_nothing() -> None:
    session = make()
    [item] = deliver(session, items(1))
    struck(session)
    session.finished([Skipped(item, SkipReason.STORE_FAILED, "late")], 101.0)
    assert (session.statistics.stale, session.statistics.store_failures, session.drained) == (1, 0, True)


def test_what_no_handler_has_begun_with_has_not_failed() -> None:
    """Only a delivery that a handler holds fails at the timeout.

    Deliveries that wait for a handler, for their next attempt or for a confirm do not fail, nor do newer ones.
    """
    session = make(max_attempts=3)
    hung, held, waiting, given_up = deliver(session, items(4))
    fail(session, held, delay=1000)
    fail(session, given_up, verdict="no")
    republish = only_republish(session)
    [late] = deliver(session, items(1, 5), 99.9)
    session.recalled([waiting])
    assert session.take_notices()
    struck(session)
    assert [notice.delivery for notice in session.take_notices()] == [hung]
    assert session.statistics.timed_out == 1
    session.published(republish, None, 101.0)
    session.finished([late], 101.0)
    assert session.statistics.stale == 2


def test_what_is_declared_for_has_not_failed() -> None:
    session = make(queues=True)
    [item] = deliver(session, items(1))
    fail(session, item, delay=70)
    struck(session)
    assert session.statistics.timed_out == 0


def test_without_a_channel_nothing_times_out() -> None:
    session = make()
    deliver(session, items(1))
    session.lost(1)
    session.timed_out(CLOSED, 100.0, 0.0)
    assert session.statistics.timed_out == 0


def test_nothing_is_counted_of_a_stream_which_is_read_again() -> None:
    stream = make()
    stream.stream_offset = StreamOffset()
    deliver(stream, [delivery(1, headers={"x-stream-offset": 10})])
    stream.timed_out(CLOSED, 100.0, 0.0)
    assert stream.statistics.timed_out == 0


def test_what_is_pulled_together_loses_no_attempt() -> None:
    """The caller handles one after the other, and may hang on none."""
    session = make(max_attempts=1, subscribes=False)
    deliver(session, items(2))
    struck(session)
    assert (session.statistics.timed_out, session.statistics.failed) == (0, 0)
    for generation in (2, 3):
        assert [one.attempt for one in deliver(session, [again("m1", 1), again("m2", 2)], 100.0)] == [1, 1]
        struck(session, generation, 200.0)


# -- when the broker cancels the consumer ------------------------------------------------------------------------------


def test_a_cancelled_consumer_does_not_wait_for_what_hangs() -> None:
    """Deliveries without a started handler are requeued.

    The session waits for handlers with younger deliveries.
    """
    session = make(consumer_timeout=60.0)
    hung, waiting = deliver(session, items(2))
    [runs] = deliver(session, items(1, 3), 50.0)
    session.drain()
    session.recalled([waiting])
    session.timed_out(ConsumerTimeout(consumer_tag="ctag"), 60.0, 1_000.0)
    assert session.take_output(60.0) == encode_nack(CHANNEL, 2, False, requeue=True)
    assert not session.drained
    session.finished([runs], 61.0)
    assert session.drained
    session.lost(1)
    session.opened(2, CHANNEL)
    assert not session.drained
    session.finished([hung], 62.0)
    assert session.drained
    assert session.statistics.timed_out == 1


def test_a_second_timeout_before_the_channel_ends_recounts_none() -> None:
    """From 4.3 on, the broker first cancels the consumer, then closes the channel.

    It closes the channel over a delivery that is unacked for too long.
    """
    session = make(consumer_timeout=60.0)
    deliver(session, items(1))
    [later] = deliver(session, items(1, 2), 30.0)
    session.drain()
    session.timed_out(ConsumerTimeout(consumer_tag="ctag"), 60.0, 1_000.0)
    struck(session, now=90.0, strike=ConsumerTimeout(60.0))
    assert [notice.delivery for notice in session.take_notices()][-1] == later
    assert session.statistics.timed_out == 2


def test_a_cancel_by_a_broker_whose_timeout_nobody_knows_is_none() -> None:
    session = make()
    [item] = deliver(session, items(1))
    session.drain()
    session.timed_out(ConsumerTimeout(consumer_tag="ctag"), 1e6, 1_000.0)
    assert session.statistics.timed_out == 0
    session.finished([item], 1e6)
    assert session.statistics.handled == 1


# -- batches -----------------------------------------------------------------------------------------------------------


def test_after_a_hung_batch_each_is_tried_alone_before_it_counts() -> None:
    session = make(max_attempts=1, batch=(2, 1.0))
    session.delivered(items(2), 0.0)
    assert [len(batch) for batch in session.take_batches()] == [2]
    struck(session)
    assert (session.statistics.timed_out, session.statistics.failed) == (2, 0)
    session.delivered([again("m1", 1), again("m2", 2)], 100.0)
    session.tick(100.0)
    assert [[one.message_id for one in batch] for batch in session.take_batches()] == [["m1"], ["m2"]]
    struck(session, 2, 200.0)
    assert session.statistics.failed == 2
    session.delivered([again("m1", 1), again("m2", 2)], 200.0)
    assert {one.purpose for one in session.take_republishes()} == {RepublishReason.DEAD_LETTER}


def test_what_hung_alone_is_alone_after_a_long_delay() -> None:
    """Otherwise it would take a neighbour along in each attempt."""
    session = make(batch=(2, 0.0), retry=RetryPolicy(3, delays=(600,)), queues=True)
    session.delivered(items(2), 0.0)
    session.take_batches()
    struck(session)
    session.delivered([again("m1", 1), again("m2", 2)], 100.0)
    session.tick(100.0)
    assert len(session.take_batches()) == 2
    struck(session, 2, 200.0)
    session.delivered([again("m1", 1)], 200.0)
    republish = only_republish(session)
    session.published(republish, None, 200.0)
    session.delivered([waited_delivery(republish, 2), *items(1, 3)], 900.0)
    session.tick(900.0)
    assert [[one.message_id for one in batch] for batch in session.take_batches()] == [["m1"], ["m3"]]


def test_each_of_a_hung_claim_group_is_retried_before_it_counts() -> None:
    session = make(max_attempts=1, grouped=True)
    deliver(session, items(2))
    struck(session)
    assert session.statistics.failed == 0
    deliver(session, [again("m1")], 100.0)
    [alone] = attempt_again(session, 100.0)
    assert alone.attempt == 1
    struck(session, 2, 200.0)
    assert session.statistics.failed == 1


# -- quarantine --------------------------------------------------------------------------------------------------------


def test_a_message_without_id_is_suspect_after_two_timeouts() -> None:
    """A channel lost over the timeout does not raise the threshold for suspects."""
    session = make(quarantine=True)
    for generation in (1, 2):
        item = delivery(message_id=None) if generation == 1 else back(1, message_id=None)
        assert deliver(session, [item], 0.0) == [item]
        struck(session, generation)
    assert deliver(session, [back(2, message_id=None)], 100.0) == []
    assert only_republish(session).purpose is RepublishReason.QUARANTINE


def test_timeouts_in_a_pause_of_the_kill_switch_make_no_suspect() -> None:
    """The deliveries wait unacked for the pause. The broker up to 4.2 counts each timeout as a return."""
    switch = KillSwitch(share=0.5, window=10, minimum=2, pause=1000, longest_pause=1000)
    session = make(quarantine=True, kill_switch=switch)
    *failing, waiting = deliver(session, items(3))
    session.finished([Failed(item, failure(delay=1000)) for item in failing], 0.0)
    assert session.take_pause()
    session.postponed([waiting])
    for generation in (1, 2):
        struck(session, generation)
        assert deliver(session, [back(generation, message_id="m3")], 0.0) == []
        assert session.take_republishes() == []
    assert session._quarantine is not None
    assert session._quarantine.losses == 2


def test_a_probe_of_the_kill_switch_that_hangs_becomes_a_suspect() -> None:
    session = make(quarantine=True, kill_switch=KillSwitch(share=0.5, window=10, minimum=2, pause=5))
    session.finished([Failed(item, failure(delay=1000)) for item in deliver(session, items(2))], 0.0)
    assert session.take_pause()
    session.tick(5.0)
    for generation, probe in ((1, delivery(3, message_id=None)), (2, back(1, message_id=None))):
        assert deliver(session, [probe], 5.0) == [probe]
        struck(session, generation)
    assert deliver(session, [back(2, message_id=None)], 100.0) == []
    assert only_republish(session).purpose is RepublishReason.QUARANTINE


def test_in_quarantine_a_timeout_counts_as_one_attempt() -> None:
    """The broker counts it as a return and the session as a failure."""
    session = make(max_attempts=5, quarantine=True)
    assert deliver(session, [back(2)]) == []
    moved = only_republish(session)
    session.published(moved, None, 0.0)
    session.delivered([isolated(moved, 2)], 0.0)
    [one] = session.take_isolated()
    struck(session, strike=ConsumerTimeout(consumer_tag=ISOLATED))
    assert session.statistics.timed_out == 1
    session.delivered([isolated(moved, 1, returned=1)], 100.0)
    session.tick(200.0)
    [second] = session.take_isolated()
    assert isinstance(one, Delivery)
    assert isinstance(second, Delivery)
    assert (one.attempt, second.attempt) == (2, 2)


def test_in_quarantine_timeouts_without_an_id_count_as_returns() -> None:
    """Timeouts before and in quarantine count, as no other count includes them."""
    session = make(max_attempts=2, quarantine=True)
    deliver(session, [delivery(message_id=None)])
    struck(session)
    assert deliver(session, [back(2, message_id=None)]) == []
    moved = only_republish(session)
    session.published(moved, None, 0.0)
    session.delivered([isolated(moved, 2, message_id=None)], 0.0)
    for generation, returned in ((2, 1), (3, 2)):
        assert len(session.take_isolated()) == 1
        struck(session, generation, strike=ConsumerTimeout(consumer_tag=ISOLATED))
        session.delivered([isolated(moved, 1, returned=returned, message_id=None)], 0.0)
        session.tick(100.0)
    assert session.take_isolated() == []
    assert only_republish(session).purpose is RepublishReason.DEAD_LETTER


def test_a_quarantined_message_is_not_blamed_for_other_timeouts() -> None:
    session = make(max_attempts=5, quarantine=True)
    assert deliver(session, [back(2)]) == []
    moved = only_republish(session)
    session.published(moved, None, 0.0)
    deliver(session, [delivery(2, message_id="other")], 0.0)
    session.delivered([isolated(moved, 3)], 99.5)
    session.take_isolated()
    struck(session, strike=CLOSED)
    assert session.statistics.timed_out == 1
    session.delivered([isolated(moved, 1, returned=1)], 100.0)
    [second] = session.take_isolated()
    assert isinstance(second, Delivery)
    assert second.attempt == 1


def test_a_cancel_of_the_queue_leaves_out_what_is_in_quarantine() -> None:
    session = make(quarantine=True, consumer_timeout=1.0)
    assert deliver(session, [back(2)]) == []
    moved = only_republish(session)
    session.published(moved, None, 0.0)
    session.delivered([isolated(moved, 2)], 0.0)
    session.take_isolated()
    session.timed_out(ConsumerTimeout(consumer_tag="ctag"), 100.0, 0.0)
    assert session.statistics.timed_out == 0
