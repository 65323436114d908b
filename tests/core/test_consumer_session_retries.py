"""Retries in delay queues.

A retry is published and confirmed before its original is acked, or the original is held in the process.
"""

from __future__ import annotations

import pytest

from reliable_mq import (
    BrokerUnavailable,
    ConfigurationError,
    DeadLetter,
    PublishBlocked,
    PublishError,
    PublishNacked,
    PublishRefused,
    PublishReturned,
    PublishUnconfirmed,
    RetryLater,
    RetryPolicy,
)
from reliable_mq.codec import encode_ack, encode_reject
from reliable_mq.core import headers
from reliable_mq.core.consumer.attempts import describe
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.handler import Failed, Skipped, SkipReason
from reliable_mq.core.consumer.settlement import LogEvent, LogEventKind
from reliable_mq.core.retry.dead_letters import RepublishReason, RepublishRequest
from reliable_mq.core.retry.delay_queues import LONGEST, LONGEST_PATH
from reliable_mq.core.retry.retry_headers import decode_retry_headers
from tests.core.deliveries import delivery, failure
from tests.core.sessions import (
    CHANNEL,
    DEAD,
    SteppedSession,
    attempt_again,
    deliver,
    fail,
    items,
    kinds,
    make,
    only_republish,
)
from tests.core.test_retry_headers import waited

BLOCKED = PublishBlocked("memory alarm")
NACKED = PublishNacked("full")
UNCONFIRMED = PublishUnconfirmed("no answer")
RETURNED = PublishReturned("gone", reply_code=312, reply_text="NO_ROUTE", exchange="", routing_key="orders.retry.1000")
REFUSED = PublishRefused("too large", reply_code=501, reply_text="FRAME_ERROR")


def failed_once(session: SteppedSession, *, delay: float | None = None) -> tuple[Delivery, RepublishRequest]:
    [item] = deliver(session, items(1))
    fail(session, item, delay=delay)
    return item, only_republish(session)


def test_a_failure_waits_in_the_delay_queue_of_its_attempt() -> None:
    """The original is acked only after the retry is confirmed."""
    session = make(queues=True)
    item, republish = failed_once(session)
    assert (republish.routing_key, republish.purpose, republish.delivery) == (
        "orders.retry.1000",
        RepublishReason.RETRY,
        item,
    )
    assert (session.take_output(99.0), session.held, session.drained) == (b"", 0, False)
    assert (session.republishing, session.copying) == (1, True)
    session.published(republish, None, 99.0)
    assert session.take_output(200.0) == encode_ack(CHANNEL, 1, multiple=False)
    assert (session.drained, session.republishing, session.copying) == (True, 0, False)
    assert (session.statistics.retried, session.statistics.delayed, session.statistics.dead_lettered) == (1, 1, 0)
    [again] = deliver(session, [waited_delivery(republish, 2)], 200.0)
    assert (again.attempt, again.redelivered) == (2, True)
    fail(session, again, 200.0)
    republish = only_republish(session)
    assert republish.routing_key == "orders.retry.10000"
    [last] = deliver(session, [waited_delivery(republish, 3)], 300.0)
    fail(session, last, 300.0)
    assert only_republish(session).purpose is RepublishReason.DEAD_LETTER


def waited_delivery(republish: RepublishRequest, tag: int) -> Delivery:
    found = waited(republish.properties)
    found._delivery_tag = tag
    return found


def test_a_delay_from_the_handler_takes_several_delay_queues() -> None:
    """Each delay queue is declared first.

    Between the queues, the message does not reach a handler.
    """
    session = make(queues=True)
    [item] = deliver(session, items(1))
    fail(session, item, delay=70)
    assert session.take_republishes() == []
    [queue] = session.take_declarations()
    assert queue.name == "orders.retry.50000"
    session.declared(queue, None, 0.0)
    republish = only_republish(session)
    session.published(republish, None, 0.0)
    assert deliver(session, [waited_delivery(republish, 2)], 50.0) == []
    [queue] = session.take_declarations()
    assert queue.name == "orders.retry.20000"
    session.declared(queue, None, 50.0)
    republish = only_republish(session)
    session.published(republish, None, 50.0)
    [again] = deliver(session, [waited_delivery(republish, 3)], 70.0)
    assert again.attempt == 2
    assert session.statistics.delayed == 2


def test_without_delay_queues_the_rest_of_the_delay_is_held() -> None:
    policy = RetryPolicy(3, delays=(1, 30))
    session = make(retry=policy, queues=True)
    [item] = deliver(session, items(1))
    fail(session, item, delay=70)
    [queue] = session.take_declarations()
    session.declared(queue, None, 0.0)
    other = make(retry=policy)
    assert deliver(other, [waited_delivery(only_republish(session), 1)], 50.0) == []
    other.tick(69.9)
    assert other.take_work() == []
    other.tick(70.0)
    assert [one.attempt for one in other.take_work()] == [2]


def on_its_way(*path: int) -> Delivery:
    """Return a message with a path of delay queues, as any client can send it."""
    return delivery(1, headers={headers.FORMAT: 1, headers.RETRY: {"path": list(path)}})


@pytest.mark.parametrize("longest", [0, 10])
@pytest.mark.parametrize("error", [BLOCKED, NACKED], ids=repr)
def test_a_step_of_a_long_delay_is_published_again(error: PublishError, longest: int) -> None:
    """It cannot be held for so long."""
    session = make(retry=RetryPolicy(3, delays=(longest,)), queues=True)
    assert deliver(session, [on_its_way(1_000_000, 500_000)]) == []
    [queue] = session.take_declarations()
    session.declared(queue, None, 0.0)
    republish = only_republish(session)
    session.published(republish, error, 0.0)
    assert attempt_again(session, 0.9) == []
    assert session.take_republishes() == []
    assert attempt_again(session, 1.0) == []
    assert only_republish(session) is republish
    session.published(republish, None, 1.0)
    assert session.statistics.delayed == 1


@pytest.mark.parametrize("refused", ["its queue", "the message"])
def test_a_refused_step_of_a_long_delay_is_held_like_a_retry(refused: str) -> None:
    session = make(queues=True)
    assert deliver(session, [on_its_way(1_000_000, 500_000)]) == []
    [queue] = session.take_declarations()
    if refused == "its queue":
        session.declared(queue, BrokerUnavailable("403", permanent=True), 0.0)
    else:
        session.declared(queue, None, 0.0)
        session.published(only_republish(session), REFUSED, 0.0)
    assert attempt_again(session, 9.9) == []
    assert [one.attempt for one in attempt_again(session, 10.0)] == [1]


def test_what_says_that_it_waits_is_held_no_longer_than_a_retry() -> None:
    """Otherwise a few of these messages could fill the prefetch for years."""
    session = make()
    assert deliver(session, [on_its_way(*[LONGEST] * LONGEST_PATH)]) == []
    session.tick(9.9)
    assert session.take_work() == []
    session.tick(10.0)
    assert [one.attempt for one in session.take_work()] == [1]


def test_a_way_through_queues_that_are_not_ours_makes_none() -> None:
    """The message waits equally long in queues of the fixed series."""
    session = make(queues=True)
    assert deliver(session, [on_its_way(60_007, 3)]) == []
    [queue] = session.take_declarations()
    assert queue.name == "orders.retry.50000"
    session.declared(queue, None, 0.0)
    assert decode_retry_headers(waited(only_republish(session).properties)).path == (10_000, 100)


@pytest.mark.parametrize("delay", [0, 0.0])
def test_without_a_delay_it_is_tried_again_at_once(delay: float) -> None:
    session = make(queues=True)
    [item] = deliver(session, items(1))
    fail(session, item, delay=delay)
    session.tick(0.0)
    assert session.take_work() == [item]


def lines(session: SteppedSession) -> list[str]:
    return [notice.line("c") for notice in session.take_notices()]


def test_the_log_names_message_queue_attempts_and_exception() -> None:
    session = make(max_attempts=2)
    first, second, third = deliver(session, items(3))
    fail(session, first)
    assert lines(session) == ["message 'm1' of queue 'orders' retried: in 1 s: ValueError: no; attempts failed: 1"]
    [again] = attempt_again(session, 1.0)
    fail(session, again)
    fail(session, second, verdict="blocked")
    session.finished([Skipped(third, SkipReason.UNIDENTIFIED)], 1.0)
    broken, refused, unknown = lines(session)
    assert broken == (
        "message 'm1' of queue 'orders' dead-lettered: 2 of 2 attempts failed; attempts failed: 2, "
        "the last with ValueError: no"
    )
    assert refused == (
        "message 'm2' of queue 'orders' dead-lettered: blocked; attempts failed: 1, the last with ValueError: no"
    )
    assert unknown.startswith("message 'm3' of queue 'orders' dead-lettered: not handed to a handler: it has no")
    assert unknown.endswith("; attempts failed: 0")


def test_the_log_does_not_say_the_exception_twice() -> None:
    session = make(retry=RetryPolicy(2, give_up_on=KeyError))
    [item] = deliver(session, items(1))
    session.finished([Failed(item, describe(KeyError("k"), 1.0))], 0.0)
    [gone] = deliver(session, items(1, 2))
    session.finished([Failed(gone, describe(DeadLetter("the customer is gone"), 1.0))], 0.0)
    assert lines(session) == [
        "message 'm1' of queue 'orders' dead-lettered: the retry policy gives up on KeyError: 'k'; attempts failed: 1",
        "message 'm2' of queue 'orders' dead-lettered: the customer is gone; attempts failed: 1",
    ]


def test_the_log_counts_no_attempts_where_nothing_failed() -> None:
    notice = LogEvent(LogEventKind.CANCELLED, delivery(message_id="m1"), "its handler was cancelled")
    assert (
        notice.line("c")
        == "message 'm1' of queue 'orders' not handled, no attempt is counted: its handler was cancelled"
    )


def test_a_log_line_without_a_message_names_its_consumer() -> None:
    assert LogEvent(LogEventKind.PAUSED, None, "text").line("c") == (
        "consumer 'c': kill switch pauses dispatch, too many handlers fail: text"
    )


def test_a_queue_not_declared_is_logged_and_its_delivery_held() -> None:
    session = make(queues=True)
    [item] = deliver(session, items(1))
    fail(session, item, delay=70)
    [queue] = session.take_declarations()
    session.take_notices()
    session.declared(queue, BrokerUnavailable("403", permanent=True), 1.0)
    [notice] = session.take_notices()
    assert (notice.kind, notice.delivery) == (LogEventKind.NOT_DECLARED, None)
    assert "orders.retry.50000" in notice.text
    session.tick(69.0)
    assert session.take_work() == []
    session.tick(70.0)
    assert session.take_work() == [item]


@pytest.mark.parametrize("error", [BLOCKED, NACKED, REFUSED, ConfigurationError("too long")], ids=repr)
def test_an_unpublished_retry_is_held_for_the_rest_of_its_delay(error: PublishError) -> None:
    """Consuming continues under an alarm, and while the delay queue is full."""
    session = make(queues=True)
    item, republish = failed_once(session, delay=10)
    session.published(republish, error, 4.0)
    assert LogEventKind.REPUBLISH_FAILED in kinds(session)
    session.tick(9.9)
    assert session.take_work() == []
    session.tick(10.0)
    assert session.take_work() == [item]
    assert item.attempt == 2


def test_a_short_retry_that_is_nacked_is_handled_in_time() -> None:
    """The queue may stay full."""
    session = make(queues=True)
    item, republish = failed_once(session)
    session.published(republish, NACKED, 0.01)
    assert attempt_again(session, 0.9) == []
    assert attempt_again(session, 1.1) == [item]
    assert (item.attempt, session.take_republishes()) == (2, [])


@pytest.mark.parametrize("error", [BLOCKED, NACKED], ids=repr)
def test_a_retry_of_a_long_delay_is_published_again(error: PublishError) -> None:
    """Otherwise it would use the prefetch for the whole delay, long after the alarm."""
    session = make(queues=True, retry=RetryPolicy(3, delays=(3600,)))
    _item, republish = failed_once(session)
    session.published(republish, error, 0.0)
    assert attempt_again(session, 0.9) == []
    assert session.take_republishes() == []
    assert attempt_again(session, 1.0) == []
    assert only_republish(session).routing_key == republish.routing_key


def blocked_until(ends: float, session: SteppedSession, republish: RepublishRequest) -> RepublishRequest | None:
    """Block each publish. Return the first one after the alarm, None if it is held instead."""
    found = [republish]
    now = 0.0
    while now < ends:
        session.published(*found, BLOCKED, now)
        now, before = session.deadline or 0.0, now
        assert 1.0 <= now - before <= 60.0
        session.tick(now)
        for queue in session.take_declarations():
            session.declared(queue, None, now)
        found = session.take_republishes()
    return found[0] if found else None


def test_after_an_alarm_a_retry_waits_for_the_rest_of_its_delay() -> None:
    session = make(queues=True, retry=RetryPolicy(3, delays=(3600,)))
    republish = blocked_until(3000.0, session, failed_once(session)[1])
    assert republish is not None
    assert republish.tries == 55, "the time between the tries grows"
    path = decode_retry_headers(waited_delivery(republish, 2)).path
    left = int(republish.routing_key.rpartition(".")[2]) + sum(path)
    assert 590_000 <= left <= 660_000


def test_a_retry_blocked_for_nearly_all_its_delay_is_held() -> None:
    session = make(queues=True, retry=RetryPolicy(3, delays=(3600,)))
    item, republish = failed_once(session)
    assert blocked_until(3541.0, session, republish) is None
    session.tick(3599.9)
    assert session.take_work() == []
    session.tick(3600.0)
    assert session.take_work() == [item]


def test_a_redelivered_original_waits_a_long_delay_in_its_queue() -> None:
    """Otherwise it would use the prefetch for the rest of the delay."""
    session = make(queues=True, retry=RetryPolicy(3, delays=(3600,)))
    item, _republish = failed_once(session)
    session.lost(1)
    session.opened(2, CHANNEL)
    assert deliver(session, [delivery(1, redelivered=True, message_id=item.message_id)], 0.5) == []
    again = only_republish(session)
    assert (again.routing_key, again.purpose) == ("orders.retry.3600000", RepublishReason.RETRY)
    session.published(again, None, 1.0)
    assert session.take_output(1.0) == encode_ack(CHANNEL, 1, multiple=False)
    [back] = deliver(session, [waited_delivery(again, 2)], 3700.0)
    assert back.attempt == 2


def test_a_returned_retry_declares_its_queue_and_goes_out_again() -> None:
    session = make(queues=True)
    _item, republish = failed_once(session)
    session.published(republish, RETURNED, 1.0)
    [queue] = session.take_declarations()
    session.declared(queue, None, 1.0)
    assert only_republish(session) is republish
    session.published(republish, RETURNED, 2.0)
    session.tick(3.9)
    assert list(session.take_declarations()) == [], "somebody deletes it again and again: wait"
    session.tick(4.0)
    assert session.take_declarations() == [queue]
    session.declared(queue, None, 4.0)
    assert only_republish(session) is republish


def test_a_queue_that_goes_missing_later_is_declared_again() -> None:
    session = make(queues=True)
    _item, republish = failed_once(session)
    session.published(republish, UNCONFIRMED, 0.0)
    session.tick(1.0)
    assert only_republish(session) is republish
    session.published(republish, RETURNED, 1.0)
    session.tick(3.0)
    assert session.take_republishes() == []
    assert [queue.name for queue in session.take_declarations()] == ["orders.retry.1000"]


@pytest.mark.parametrize("error", [None, BrokerUnavailable("403", permanent=True)], ids=["declared", "refused"])
def test_a_returned_dead_letter_declares_its_queue_once(error: BrokerUnavailable | None) -> None:
    """If that is refused, it is published again without another declaration."""
    session = make(max_attempts=1, declares=True, broker_dead_letters=False)
    [item] = deliver(session, items(1))
    fail(session, item)
    republish = only_republish(session)
    session.published(republish, RETURNED, 0.0)
    [queue] = session.take_declarations()
    assert (queue, session.take_republishes()) == (DEAD, [])
    session.declared(queue, error, 0.0)
    session.tick(1.0)
    assert only_republish(session) is republish
    session.published(republish, RETURNED, 1.0)
    session.tick(3.0)
    assert session.take_declarations() == ([] if error else [queue])
    assert session.take_work() == []


def test_a_retry_that_was_not_confirmed_is_published_again_later() -> None:
    session = make(queues=True)
    _item, republish = failed_once(session)
    session.published(republish, UNCONFIRMED, 0.0)
    session.tick(0.9)
    assert session.take_republishes() == []
    session.tick(1.0)
    assert only_republish(session) is republish
    session.published(republish, None, 1.0)
    assert session.statistics.delayed == 1


def test_a_publish_held_for_another_try_is_told_from_a_delivery() -> None:
    """Health reports a blocked broker only while a publish waits for it."""
    session = make(max_attempts=2, broker_dead_letters=False)
    [item] = deliver(session, items(1))
    fail(session, item)
    assert (session.held, session.holds_publishes) == (1, False)
    session.tick(1.0)
    fail(session, item, 1.0)
    session.published(only_republish(session), BLOCKED, 1.0)
    assert (session.held, session.holds_publishes, session.republishing) == (1, True, 0)


def test_a_dead_letter_blocked_repeatedly_is_left_to_the_broker() -> None:
    """The broker dead-letters it without any publish.

    If it has no dead-letter exchange, the message waits.
    """
    for broker_dead_letters in (True, False):
        session = make(max_attempts=1, broker_dead_letters=broker_dead_letters)
        [item] = deliver(session, items(1))
        fail(session, item)
        republish = only_republish(session)
        now = 0.0
        for _ in range(3):
            assert session.take_output(now) == b""
            session.published(republish, BLOCKED, now)
            now += 10
            session.tick(now)
            session.take_republishes()
        rejected = encode_reject(CHANNEL, 1, requeue=False)
        assert session.take_output(now) == (rejected if broker_dead_letters else b"")
        assert session.statistics.rejected == broker_dead_letters


def test_what_is_published_while_the_channel_is_lost_is_no_ack() -> None:
    session = make(queues=True)
    _item, republish = failed_once(session)
    session.lost(1)
    session.opened(2, CHANNEL)
    session.published(republish, None, 1.0)
    assert session.take_output(10.0) == b""
    assert (session.statistics.stale, session.statistics.delayed) == (1, 0)


def test_a_redelivered_original_keeps_the_attempts_of_its_retry() -> None:
    """The retry was confirmed, and the ack of its original was lost.

    Both count as failed once, and wait.
    """
    session = make(queues=True)
    item, republish = failed_once(session)
    session.published(republish, None, 0.0)
    session.lost(1)
    session.opened(2, CHANNEL)
    assert deliver(session, [delivery(1, redelivered=True, message_id=item.message_id)], 0.5) == []
    session.tick(1.0)
    [again] = session.take_work()
    assert again.attempt == 2


def test_a_first_delivery_has_the_attempts_of_its_header_alone() -> None:
    """This process remembers an attempt, and another one has handled two since."""
    session = make(max_attempts=9)
    [item] = deliver(session, [delivery(1, message_id="a")])
    fail(session, item)
    session.lost(1)
    session.opened(2, CHANNEL)
    waited = {headers.FORMAT: 1, headers.ATTEMPT: 2}
    [copy] = deliver(session, [delivery(1, message_id="a", headers=waited)], 100.0)
    assert copy.attempt == 2
    session.lost(2)
    session.opened(3, CHANNEL)
    [again] = deliver(session, [delivery(1, message_id="a", redelivered=True, headers=waited)], 101.0)
    assert again.attempt == 2


@pytest.mark.parametrize("policy", [RetryPolicy(3, delays=(1, 10)), RetryPolicy(1)], ids=["count", "verdict"])
def test_a_replayed_message_lost_once_has_all_its_attempts(policy: RetryPolicy) -> None:
    """This process remembers an attempt from before, and another one dead-lettered it."""
    session = make(queues=True, retry=policy)
    [item] = deliver(session, [delivery(1, message_id="a")])
    fail(session, item)
    only_republish(session)  # its confirm is lost with the channel
    session.lost(1)
    session.opened(2, CHANNEL)
    [replayed] = deliver(session, [delivery(1, message_id="a")], 100.0)
    assert replayed.attempt == 1
    session.lost(2)
    session.opened(3, CHANNEL)
    [again] = deliver(session, [delivery(1, redelivered=True, message_id="a")], 101.0)
    assert again.attempt == 1


@pytest.mark.parametrize(
    ("policy", "error", "given_up"),
    [
        (RetryPolicy(3, give_up_on=ValueError), UnicodeDecodeError("utf-8", b"", 0, 1, "no"), True),
        (RetryPolicy(3, give_up_on=ValueError), OSError(), False),
        (RetryPolicy(3, retry_on=OSError), ValueError(), True),
        (RetryPolicy(3, retry_on=OSError), TimeoutError(), False),
        (RetryPolicy(3, retry_on=OSError), RetryLater(), False),
        (RetryPolicy(3, retry_on=OSError), ExceptionGroup("both", [OSError(), TimeoutError()]), False),
        (RetryPolicy(3, retry_on=OSError), ExceptionGroup("both", [OSError(), ValueError()]), True),
        (RetryPolicy(3, retry_on=OSError), ExceptionGroup("both", [RetryLater(), OSError()]), False),
        (RetryPolicy(3, retry_on=OSError), ExceptionGroup("both", [RetryLater(), ValueError()]), True),
        (RetryPolicy(3, retry_on=OSError), ExceptionGroup("one", [ExceptionGroup("in it", [OSError()])]), False),
        (RetryPolicy(3, retry_on=OSError), ExceptionGroup("one", [ExceptionGroup("in it", [KeyError()])]), True),
        (RetryPolicy(3, retry_on=ExceptionGroup), ExceptionGroup("one", [KeyError()]), False),
        (RetryPolicy(3, give_up_on=ExceptionGroup), ExceptionGroup("one", [KeyError()]), True),
        (RetryPolicy(3, give_up_on=KeyError), ExceptionGroup("both", [OSError(), KeyError()]), True),
    ],
)
def test_the_policy_decides_by_the_exception(policy: RetryPolicy, error: BaseException, given_up: bool) -> None:
    """Each exception of a group counts.

    The policy does not apply if the handler chose a verdict.
    """
    session = make(retry=policy)
    [item] = deliver(session, items(1))
    described = describe(error, 1.0)
    session.finished([Failed(item, described)], 0.0)
    assert bool(session.take_republishes()) == given_up
    assert session.held == (not given_up)
    if given_up:
        assert item.failures is not None
        text = f"{described.exception_type}: {described.exception_message}"
        assert item.failures.verdict == f"the retry policy gives up on {text}"


def test_a_stop_lets_what_is_being_published_end() -> None:
    """A retry is also published if its handler ends during the stop.

    So its count of attempts outlives the process.
    """
    session = make(queues=True)
    first, second = deliver(session, items(2))
    fail(session, first)
    session.stop()
    session.finished([Failed(second, failure())], 0.0)
    republishes = session.take_republishes()
    assert [republish.delivery for republish in republishes] == [first, second]
    for republish in republishes:
        assert not session.drained
        session.published(republish, None, 0.0)
    assert session.drained
    assert session.take_output(0.0) == encode_ack(CHANNEL, 2, multiple=True)
    assert headers.ATTEMPT.encode() in republishes[1].properties
