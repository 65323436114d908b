"""The consumer session when channels are lost, drained and closed."""

from __future__ import annotations

from math import inf

from reliable_mq.codec import encode_ack, encode_nack
from reliable_mq.core import headers
from reliable_mq.core.consumer.handler import Failed, Skipped, SkipReason
from reliable_mq.core.consumer.lifecycle import ConsumerState
from tests.core.deliveries import delivery, failure
from tests.core.sessions import CHANNEL, RETURNED, attempt_again, deliver, fail, items, make, only_republish

# The channel


def test_results_for_a_lost_channel_are_dropped_and_counted() -> None:
    session = make()
    handled, failed, busy, dead = deliver(session, items(4))
    session.finished([Failed(dead, failure(verdict="no use"))], 0.0)
    republish = only_republish(session)
    session.lost(1)
    assert session.statistics.lost == 4
    session.opened(2, CHANNEL)
    deliver(session, items(4))
    session.finished([handled, Failed(failed, failure()), Skipped(busy, SkipReason.DUPLICATE)], 0.0)
    session.published(republish, None, 0.0)
    assert session.statistics.stale == 4
    assert session.take_output(99.0) == b""
    assert session.held == 0
    assert session.outstanding == 4


def test_a_failure_on_a_lost_channel_still_counts_as_an_attempt() -> None:
    session = make()
    [item] = deliver(session, items(1))
    session.lost(1)
    fail(session, item)
    session.opened(2, CHANNEL)
    [again] = deliver(session, [delivery(1, message_id="m1", redelivered=True)])
    assert again.attempt == 2


def test_failures_on_two_channels_add_up_and_end_a_message() -> None:
    session = make(max_attempts=2)
    [old] = deliver(session, items(1))
    session.lost(1)
    session.opened(2, CHANNEL)
    [new] = deliver(session, [delivery(1, message_id="m1", redelivered=True)])
    fail(session, new)
    assert session.held == 1
    fail(session, old)  # its handler has outlived its channel
    assert attempt_again(session, 1.0) == []
    assert only_republish(session).reason == "2 of 2 attempts failed"


def test_a_failure_that_came_to_be_known_later_counts_too() -> None:
    session = make(max_attempts=2)
    [old] = deliver(session, items(1))
    session.lost(1)
    session.opened(2, CHANNEL)
    [new] = deliver(session, [delivery(1, message_id="m1", redelivered=True)])
    fail(session, old)
    fail(session, new)
    assert only_republish(session).reason == "2 of 2 attempts failed"


def test_a_count_never_goes_down() -> None:
    session = make(max_attempts=5)
    [copy] = deliver(session, [delivery(1)])
    [later] = deliver(session, [delivery(2, redelivered=True, headers={headers.FORMAT: 1, headers.ATTEMPT: 4})])
    fail(session, copy)
    fail(session, later)
    assert later.attempt == 5


def test_a_verdict_on_a_lost_channel_applies_at_redelivery() -> None:
    session = make()
    [item] = deliver(session, items(1))
    fail(session, item, verdict="no use")
    session.lost(1)
    assert session.take_republishes() == []
    session.opened(2, CHANNEL)
    assert deliver(session, [delivery(1, message_id="m1", redelivered=True)]) == []
    assert only_republish(session).reason == "no use"


def test_what_waits_on_a_lost_channel_never_reaches_a_handler() -> None:
    session = make()
    work = deliver(session, items(3))
    fail(session, work[0])
    session.delivered(items(2, 4), 0.0)
    session.finished([work[1]], 0.0)
    session.lost(1)
    assert session.take_work() == []
    assert session.take_output(99.0) == b""
    assert (session.held, session.deadline) == (0, inf)
    session.recalled([work[2]])
    assert session.drained


def test_a_late_recall_requeues_nothing_on_the_next_channel() -> None:
    session = make()
    [old] = deliver(session, items(1))
    session.lost(1)
    session.opened(2, CHANNEL)
    deliver(session, items(1))
    session.recalled([old])
    assert session.take_output(0.0) == b""
    assert (session.running, session.outstanding, session.statistics.requeued) == (1, 1, 0)


def test_losing_another_generation_changes_nothing() -> None:
    session = make()
    work = deliver(session, items(1))
    session.lost(7)
    session.finished(work, 0.0)
    assert session.statistics.handled == 1
    session.lost(1)
    session.lost(1)
    assert session.statistics.lost == 1


def test_deliveries_without_a_channel_are_dropped_and_counted() -> None:
    session = make()
    session.lost(1)
    assert deliver(session, items(2)) == []
    assert session.statistics.stale == 2


def test_the_open_channel_is_the_source_of_its_deliveries() -> None:
    session = make()
    [item] = deliver(session, items(1))
    assert item.source is session.source
    session.lost(1)
    assert session.source is None


def test_bytes_that_were_not_written_die_with_their_channel() -> None:
    session = make(dead_letters=False, max_attempts=1)
    [item] = deliver(session, items(1))
    fail(session, item)
    session.lost(1)
    session.opened(2, CHANNEL)
    assert session.take_output(0.0) == b""


# The end


def test_stop_requeues_what_has_not_begun_and_awaits_the_rest() -> None:
    session = make()
    work = deliver(session, items(6))
    fail(session, work[1])
    session.delivered(items(2, 7), 0.0)
    session.finished([work[0]], 0.0)
    session.stop()
    session.recalled(work[4:])
    assert session.lifecycle.stopping
    assert not session.drained
    nacks = [encode_nack(CHANNEL, 2, False, True)] + [encode_nack(CHANNEL, tag, False, True) for tag in (5, 6, 7, 8)]
    assert session.take_output(0.0) == b"".join([encode_ack(CHANNEL, 1, False), *nacks])
    session.finished([work[2]], 0.0)
    fail(session, work[3])
    assert session.take_output(0.0) == encode_ack(CHANNEL, 3, False) + encode_nack(CHANNEL, 4, False, True)
    assert session.drained
    assert session.outstanding == 0
    assert session.statistics.requeued == 6


def test_what_is_delivered_while_stopping_is_requeued_at_once() -> None:
    session = make(batch=(2, 1.0))
    session.stop()
    session.delivered(items(3), 0.0)
    assert session.take_batches() == []
    assert session.take_output(0.0) == encode_nack(CHANNEL, 3, True, True)


def test_stopping_still_dead_letters_and_requeues_what_it_cannot() -> None:
    session = make(max_attempts=1)
    first, second = deliver(session, items(2))
    session.stop()
    fail(session, first)
    fail(session, second)
    confirmed, failed = session.take_republishes()
    session.published(confirmed, None, 0.0)
    session.published(failed, RETURNED, 0.0)
    assert session.take_output(0.0) == encode_ack(CHANNEL, 1, False) + encode_nack(CHANNEL, 2, False, True)
    assert session.drained


def test_a_held_dead_letter_is_requeued_at_stop() -> None:
    session = make(max_attempts=1)
    [item] = deliver(session, items(1))
    fail(session, item)
    session.published(only_republish(session), RETURNED, 0.0)
    session.stop()
    assert session.take_output(0.0) == encode_nack(CHANNEL, 1, False, True)


def test_stop_without_a_channel_sends_nothing() -> None:
    session = make()
    work = deliver(session, items(1))
    session.lost(1)
    session.stop()
    session.recalled(work)
    assert session.take_output(0.0) == b""
    assert session.drained


def test_a_drained_session_consumes_again_but_a_stopped_one_not() -> None:
    session = make()
    deliver(session, items(1))
    session.drain()
    assert session.lifecycle.state is ConsumerState.RESUBSCRIBING
    session.delivered(items(1, 2), 0.0)
    assert session.take_output(0.0) == encode_nack(CHANNEL, 2, False, True)
    session.lost(1)
    session.opened(2, CHANNEL)
    assert session.lifecycle.state is ConsumerState.SUBSCRIBED
    assert len(deliver(session, items(1))) == 1
    session.stop()
    session.drain()
    session.lost(2)
    session.opened(3, CHANNEL)
    assert session.lifecycle.stopping
