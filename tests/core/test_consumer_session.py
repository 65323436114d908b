"""The consumer session: handlers and their results.

`test_consumer_session_machine` has the state machine.
"""

from __future__ import annotations

from math import inf

import pytest

from reliable_mq import ConsumeError, PublishNacked, PublishRefused, ReliableMQError, RetryLater
from reliable_mq.codec import Properties, encode_ack, encode_nack, encode_reject
from reliable_mq.codec.methods import ReplyCode
from reliable_mq.core import headers
from reliable_mq.core.consumer.attempts import describe
from reliable_mq.core.consumer.handler import Failed, Skipped, SkipReason
from reliable_mq.core.consumer.settlement import LogEventKind
from tests.core.deliveries import BROKEN_TABLE, delivery, failure
from tests.core.sessions import (
    CHANNEL,
    ISOLATED,
    RETURNED,
    attempt_again,
    deliver,
    fail,
    items,
    kinds,
    make,
    only_republish,
)

# Handled deliveries


def test_deliveries_are_handed_out_in_order_and_acked_together() -> None:
    session = make()
    work = deliver(session, items(20))
    assert [item.delivery_tag for item in work] == list(range(1, 21))
    assert [item.attempt for item in work] == [1] * 20
    assert work[0].queue == "orders"
    assert session.running == session.outstanding == 20
    session.finished(work[:12], 0.0)
    assert session.take_output(0.0) == encode_ack(CHANNEL, 12, True)
    assert session.take_output(0.0) == b""
    assert session.statistics.handled == 12
    assert session.running == session.outstanding == 8


def test_acks_wait_for_their_interval_at_most() -> None:
    session = make()
    work = deliver(session, items(3))
    assert session.deadline == inf
    session.finished([work[1]], 2.0)
    assert session.deadline == 7.0
    assert session.take_output(6.9) == b""
    assert session.take_output(7.0) == encode_ack(CHANNEL, 2, False)


def test_a_handled_delivery_lowers_the_count_until_acks_are_due() -> None:
    session = make()
    [item] = deliver(session, items(1))
    assert session.acks_due_after == 10
    session.finished([item], 1.0)
    assert session.acks_due_after == 9
    assert session.rested_at == float("inf"), "no rest was asked for"


def test_a_result_given_twice_is_counted_and_acked_once() -> None:
    session = make()
    [item] = deliver(session, items(1))
    session.finished([item], 0.0)
    session.finished([item], 0.0)
    assert (session.statistics.handled, session.statistics.stale) == (1, 1)
    assert session.take_output(9.0) == encode_ack(CHANNEL, 1, False)


# Failed deliveries


def test_a_failed_delivery_is_retried_after_its_delay() -> None:
    session = make()
    [item] = deliver(session, items(1))
    fail(session, item, 100.0)
    assert (session.held, session.running) == (1, 0)
    assert session.deadline == 101.0
    assert attempt_again(session, 100.9) == []
    assert attempt_again(session, 101.0) == [item]
    assert (item.attempt, item.redelivered) == (2, True)
    assert session.take_output(200.0) == b""
    assert kinds(session) == [LogEventKind.RETRIED]
    session.finished([item], 101.0)
    assert session.take_output(200.0) == encode_ack(CHANNEL, 1, False)
    assert (session.statistics.failed, session.statistics.retried, session.statistics.handled) == (1, 1, 1)


def test_a_handler_may_set_the_delay_but_not_the_attempts() -> None:
    session = make(max_attempts=2)
    [item] = deliver(session, items(1))
    fail(session, item, 0.0, delay=42.0)
    assert session.deadline == 42.0
    assert attempt_again(session, 42.0) == [item]
    fail(session, item, 42.0, delay=42.0)
    assert only_republish(session).reason == "2 of 2 attempts failed"


def test_the_longest_held_is_not_in_the_way_of_the_shortest() -> None:
    session = make()
    first, second = deliver(session, items(2))
    fail(session, first, 0.0, delay=60.0)
    fail(session, second, 0.0)
    assert attempt_again(session, 1.0) == [second]
    assert attempt_again(session, 60.0) == [first]


def test_the_original_is_acked_once_its_dead_letter_is_confirmed() -> None:
    session = make(max_attempts=1)
    [item] = deliver(session, items(1))
    fail(session, item)
    republish = only_republish(session)
    assert (republish.routing_key, republish.body) == ("q.dead", item.body)
    table = Properties(republish.properties).headers
    assert (table[headers.ATTEMPTS], table[headers.EXCEPTION_TYPE]) == (1, "ValueError")
    assert session.take_output(99.0) == b""
    assert not session.drained
    session.published(republish, None, 99.0)
    assert session.take_output(200.0) == encode_ack(CHANNEL, 1, False)
    assert session.statistics.dead_lettered == 1
    assert kinds(session) == [LogEventKind.DEAD_LETTERED]
    assert session.drained


def test_a_handler_may_dead_letter_at_once() -> None:
    session = make()
    [item] = deliver(session, items(1))
    fail(session, item, verdict="no such customer")
    assert only_republish(session).reason == "no such customer"


@pytest.mark.parametrize("error", [RETURNED, PublishNacked("full"), PublishRefused("x", reply_code=1, reply_text="x")])
def test_an_unconfirmed_dead_letter_is_retried_before_any_ack(error: ReliableMQError) -> None:
    session = make(max_attempts=1, broker_dead_letters=False)
    [item] = deliver(session, items(1))
    fail(session, item)
    republish = only_republish(session)
    waits = []
    now = 0.0
    for _ in range(8):
        session.published(republish, error, now)
        assert session.take_output(now) == b""
        assert session.deadline < inf
        waits.append(session.deadline - now)
        now = session.deadline
        session.tick(now)
        assert only_republish(session) is republish
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert session.statistics.republish_failed == 8
    session.published(republish, None, now)
    assert session.take_output(now + 5) == encode_ack(CHANNEL, 1, False)


def test_an_unpublishable_dead_letter_is_left_to_the_broker() -> None:
    session = make(max_attempts=1)
    [item] = deliver(session, items(1))
    fail(session, item)
    refused = PublishRefused("headers above frame_max", reply_code=501, reply_text="FRAME_ERROR")
    session.published(only_republish(session), refused, 0.0)
    assert session.take_output(0.0) == encode_reject(CHANNEL, 1, False)
    assert (session.statistics.rejected, session.statistics.republish_failed) == (1, 1)
    assert session.outstanding == 0


def test_properties_too_large_for_a_dead_letter_are_cut() -> None:
    """Otherwise the message would stay unacked, and as many as the prefetch allows would stop the consumer.

    The broker does not know the dead-letter queue.
    """
    session = make(max_attempts=1, broker_dead_letters=False)
    [item] = deliver(session, [delivery(headers={"h": "x" * 1000}, message_id="m1")])
    fail(session, item)
    republish = only_republish(session)
    refused = PublishRefused("too large", reply_code=ReplyCode.CONTENT_TOO_LARGE, reply_text="refused before sending")
    for kept in (2, 4, 8):
        session.published(republish, refused, 0.0)
        assert session.deadline < inf
        session.tick(session.deadline)
        assert only_republish(session) is republish
        properties = Properties(republish.properties)
        assert properties.message_id == "m1"
        assert properties.headers[headers.DEAD_LETTER_REASON] == "1 of 1 attempts failed"
        half = item.properties[: len(item.properties) // kept]
        assert properties.headers[headers.ORIGINAL_PROPERTIES] == half
    session.published(republish, None, 9.0)
    assert session.take_output(9.0) == encode_ack(CHANNEL, 1, False)


def test_giving_up_without_a_dead_letter_queue_rejects_loudly() -> None:
    session = make(max_attempts=1, dead_letters=False)
    first, second = deliver(session, items(2))
    fail(session, second)
    assert session.take_output(0.0) == encode_reject(CHANNEL, 2, False)
    assert kinds(session) == [LogEventKind.REJECTED]
    assert session.statistics.rejected == 1
    session.finished([first], 0.0)
    assert session.take_output(5.0) == encode_ack(CHANNEL, 1, False)


def test_broken_headers_a_handler_touched_are_not_retried() -> None:
    session = make()
    [item] = deliver(session, [delivery(headers=BROKEN_TABLE)])
    with pytest.raises(ConsumeError) as raised:
        _ = item.headers
    session.finished([Failed(item, describe(ExceptionGroup("two", [raised.value, OSError()]), 0.0))], 0.0)
    assert only_republish(session).reason == f"its properties are broken: {item.flaw}"


@pytest.mark.parametrize("queues", [False, True])
@pytest.mark.parametrize("error", [RetryLater(30), OSError("down")])
def test_a_handler_that_copes_with_broken_headers_may_fail(error: Exception, queues: bool) -> None:
    """It is retried like any other failure."""
    session = make(queues=queues)
    [item] = deliver(session, [delivery(headers=BROKEN_TABLE)])
    with pytest.raises(ConsumeError):
        _ = item.headers
    session.finished([Failed(item, describe(error, 0.0))], 0.0)
    assert (session.take_republishes(), session.held) == ([], 1)


def test_a_failure_told_twice_is_not_rejected_twice() -> None:
    session = make(max_attempts=1, dead_letters=False)
    [item] = deliver(session, items(1))
    fail(session, item)
    fail(session, item)
    assert session.take_output(0.0) == encode_reject(CHANNEL, 1, False)
    assert (session.statistics.rejected, session.statistics.stale) == (1, 1)


# Admission


def test_what_is_refused_unseen_does_not_hold_up_its_neighbours() -> None:
    session = make(max_body_bytes=100)
    poison = delivery(2, headers={headers.FORMAT: 99}), delivery(3, body=bytes(101))
    work = deliver(session, [*items(1), *poison, *items(1, 4)])
    assert [item.delivery_tag for item in work] == [1, 4]
    for republish in session.take_republishes():
        session.published(republish, None, 0.0)
    session.finished(work, 0.0)
    assert session.take_output(5.0) == encode_ack(CHANNEL, 4, True)
    assert session.statistics.rejected_unseen == session.statistics.dead_lettered == 2


@pytest.mark.parametrize("dead_letters", [True, False])
def test_a_delivery_without_its_body_is_rejected_at_once(dead_letters: bool) -> None:
    """This process cannot dead-letter a body that it did not read; the broker can.

    The neighbours are handled.
    """
    session = make(max_body_bytes=100, dead_letters=dead_letters)
    before = deliver(session, items(1))
    session.oversized(delivery(2, body=b"", redelivered=True), 2_000_000, 0.0)
    assert session.take_output(0.0) == encode_reject(CHANNEL, 2, False)
    [notice] = session.take_notices()
    assert notice.kind is LogEventKind.REJECTED
    assert "2000000 bytes of body are far above the limit of 100" in notice.text
    statistics = session.statistics
    counts = (statistics.delivered, statistics.rejected_unseen, statistics.rejected, statistics.redelivered)
    assert counts == (2, 1, 1, 1)
    session.finished([*before, *deliver(session, items(1, 3))], 0.0)
    assert session.take_output(5.0) == encode_ack(CHANNEL, 3, True)
    assert session.outstanding == 0


def test_a_bodyless_delivery_is_requeued_while_stopping() -> None:
    session = make(max_body_bytes=100)
    session.stop()
    session.oversized(delivery(1, body=b""), 2_000_000, 0.0)
    assert session.take_output(0.0) == encode_nack(CHANNEL, 1, False, True)
    assert session.take_notices() == []


def test_a_bodyless_delivery_on_a_lost_channel_is_dropped() -> None:
    session = make(max_body_bytes=100)
    session.lost(1)
    session.oversized(delivery(1, body=b""), 2_000_000, 0.0)
    session.opened(2, CHANNEL)
    assert session.take_output(0.0) == b""
    assert (session.statistics.stale, session.statistics.delivered) == (1, 0)


def test_a_bodyless_delivery_from_quarantine_is_rejected() -> None:
    session = make(max_body_bytes=100, quarantine=True)
    item = delivery(1, body=b"")
    item.consumer_tag = ISOLATED
    session.oversized(item, 2_000_000, 0.0)
    assert session.take_output(0.0) == encode_reject(CHANNEL, 1, False)


def test_a_redelivery_keeps_its_attempts_and_its_delay() -> None:
    session = make()
    [item] = deliver(session, items(1))
    fail(session, item, 0.0)
    session.lost(1)
    session.opened(2, CHANNEL)
    [again] = items(1)
    again.redelivered = True
    assert deliver(session, [again], 0.5) == []
    assert (session.held, session.deadline) == (1, 1.0)
    assert attempt_again(session, 1.0) == [again]
    assert again.attempt == 2


def test_success_is_what_makes_failures_forgotten() -> None:
    session = make()
    [item] = deliver(session, items(1))
    fail(session, item)
    [item] = attempt_again(session, 1.0)
    session.finished([item], 1.0)
    [copy] = deliver(session, [delivery(2, message_id="m1", redelivered=True)], 2.0)
    assert copy.attempt == 1


def test_a_neighbours_success_forgets_nothing() -> None:
    session = make()
    first, second = deliver(session, items(2))
    fail(session, first)
    session.finished([second], 0.0)
    session.lost(1)
    session.opened(2, CHANNEL)
    [again] = deliver(session, [delivery(1, message_id="m1", redelivered=True)], 5.0)
    assert again.attempt == 2


# The store


def test_a_duplicate_is_acked_without_a_handler() -> None:
    session = make()
    [item] = deliver(session, items(1))
    session.finished([Skipped(item, SkipReason.DUPLICATE)], 0.0)
    assert session.take_output(5.0) == encode_ack(CHANNEL, 1, False)
    assert (session.statistics.duplicates, session.statistics.handled) == (1, 0)


def test_a_claim_held_elsewhere_is_checked_again_and_not_acked() -> None:
    session = make()
    [item] = deliver(session, items(1))
    session.finished([Skipped(item, SkipReason.IN_PROGRESS)], 0.0)
    assert session.take_output(99.0) == b""
    assert attempt_again(session, 1.0) == [item]
    assert (item.attempt, session.statistics.claims_in_progress) == (1, 1)


def test_a_store_that_fails_closed_is_asked_ever_more_slowly() -> None:
    session = make()
    [item] = deliver(session, items(1))
    now = 0.0
    waits = []
    for _ in range(8):
        session.finished([Skipped(item, SkipReason.STORE_FAILED, "down")], now)
        assert session.deadline < inf
        waits.append(session.deadline - now)
        now = session.deadline
        assert attempt_again(session, now) == [item]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert session.take_output(now) == b""
    assert kinds(session) == [LogEventKind.STORE_FAILED] * 8
    assert (item.attempt, session.statistics.store_failures) == (1, 8)


def test_attempts_counted_by_the_store_end_in_a_dead_letter() -> None:
    session = make()
    [item, bare] = deliver(session, items(2))
    fail(session, item)
    [item] = attempt_again(session, 1.0)
    session.finished([Skipped(item, SkipReason.EXHAUSTED), Skipped(bare, SkipReason.EXHAUSTED)], 1.0)
    reasons = [republish.reason for republish in session.take_republishes()]
    assert reasons == ["1 of 3 attempts failed", "0 of 3 attempts failed"]


def test_a_delivery_without_an_id_is_dead_lettered_saying_so() -> None:
    session = make()
    [item] = deliver(session, [delivery(message_id=None)])
    session.finished([Skipped(item, SkipReason.UNIDENTIFIED)], 0.0)
    assert "no message_id" in only_republish(session).reason
    assert session.statistics.rejected_unseen == 1


def test_a_claim_that_was_not_released_is_told() -> None:
    session = make()
    [item] = deliver(session, items(1))
    session.finished([Failed(item, failure(), detail="down")], 0.0)
    assert kinds(session) == [LogEventKind.STORE_FAILED, LogEventKind.RETRIED]
    assert session.statistics.store_failures == 1


def test_an_exhausted_claim_that_was_not_released_is_told() -> None:
    session = make()
    [item] = deliver(session, items(1))
    session.finished([Skipped(item, SkipReason.EXHAUSTED, "down")], 0.0)
    assert kinds(session)[0] is LogEventKind.STORE_FAILED
    assert session.statistics.store_failures == 1
    assert only_republish(session)


# Batches


def test_batches_are_handed_out_full_or_after_their_wait() -> None:
    session = make(batch=(2, 3.0))
    session.delivered(items(5), 10.0)
    assert [len(batch) for batch in session.take_batches()] == [2, 2]
    assert session.running == 4
    assert session.deadline == 13.0
    session.tick(13.0)
    assert [[item.delivery_tag for item in batch] for batch in session.take_batches()] == [[5]]
    assert session.take_work() == []


def test_a_plain_handler_gets_no_batches() -> None:
    session = make()
    session.delivered(items(1), 0.0)
    assert session.take_batches() == []


def test_a_failed_batch_is_retried_item_by_item_without_counting() -> None:
    session = make(batch=(3, 3.0), max_attempts=1)
    session.delivered(items(3), 0.0)
    [batch] = session.take_batches()
    batch[1].flaw = "truncated table"
    shared = describe(ConsumeError("its properties are broken: truncated table"), 0.0)
    session.finished([Failed(item, shared, alone=False) for item in batch], 0.0)
    session.tick(0.0)
    alone = session.take_batches()
    assert alone == [[batch[0]], [batch[2]]]
    assert (alone[0][0].attempt, alone[0][0].redelivered) == (1, True)
    assert "its properties are broken" in only_republish(session).reason
    assert session.statistics.failed == 0
    assert kinds(session).count(LogEventKind.BATCH_FAILED) == 1


def test_a_stop_that_keeps_sends_acks_and_requeues_nothing() -> None:
    session = make()
    first, _ = deliver(session, items(2))
    session.stop(keep=True)
    session.recalled([_])
    session.delivered(items(1, 3), 0.0)
    assert not session.drained
    session.finished([first], 0.0)
    assert session.take_output(0.0) == encode_ack(CHANNEL, 1, False)
    assert session.drained


def test_a_failed_batch_is_requeued_while_stopping() -> None:
    session = make(batch=(2, 3.0))
    session.delivered(items(2), 0.0)
    [batch] = session.take_batches()
    session.stop()
    session.finished([Failed(item, failure(), alone=False) for item in batch], 0.0)
    assert session.take_output(0.0) == encode_nack(CHANNEL, 2, True, True)
    assert session.drained


def test_refusing_all_of_a_batch_leaves_nothing_waiting() -> None:
    session = make(batch=(2, 3.0))
    session.delivered([delivery(headers={headers.FORMAT: 99})], 0.0)
    assert session.deadline == inf


# Settings


def test_acks_follow_the_prefetch_of_a_subscription() -> None:
    session = make()
    session.subscribing(10)
    session.finished(deliver(session, items(5)), 0.0)
    assert session.take_output(0.0) == encode_ack(CHANNEL, 5, True)


def test_automatic_acks_are_at_most_once_and_send_nothing() -> None:
    session = make(automatic=True)
    first, second = deliver(session, [delivery(1, redelivered=True), delivery(2)])
    session.finished([first, Failed(second, failure())], 0.0)
    assert session.take_output(99.0) == b""
    assert session.take_republishes() == []
    assert kinds(session) == [LogEventKind.DROPPED]
    statistics = session.statistics
    assert (statistics.delivered, statistics.redelivered, statistics.handled, statistics.failed) == (2, 1, 1, 1)
    deliver(session, items(1, 3))
    session.stop()
    session.delivered(items(1, 4), 0.0)
    assert session.take_output(99.0) == b""
