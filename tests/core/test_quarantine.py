"""Quarantine: suspects, their move, and the meaning of returns there."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import pytest

from reliable_mq import (
    ConfigurationError,
    PublishBlocked,
    PublishNacked,
    PublishRefused,
    PublishReturned,
    Queue,
    RetryPolicy,
)
from reliable_mq.codec import encode_ack, encode_nack, encode_table
from reliable_mq.core import headers
from reliable_mq.core.consumer.consumer_timeout import ConsumerTimeout
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.handler import Skipped, SkipReason
from reliable_mq.core.consumer.quarantine import AFTER, TRANSITIONS, Quarantine, returns
from reliable_mq.core.consumer.settlement import LogEventKind
from reliable_mq.core.retry.dead_letters import RepublishReason, RepublishRequest
from tests.core.deliveries import BROKEN_TABLE, OURS, delivery
from tests.core.sessions import (
    CHANNEL,
    ISOLATED,
    CheckedQuarantine,
    SteppedSession,
    deliver,
    fail,
    items,
    kinds,
    make,
    only_republish,
)
from tests.core.test_retry_headers import waited
from tests.transitions import changes

if TYPE_CHECKING:
    from collections.abc import Callable

RETURNED = PublishReturned("gone", reply_code=312, reply_text="NO_ROUTE", exchange="", routing_key="orders.quarantine")


def back(count: int, tag: int = 1, **others: Any) -> Delivery:
    """Return a delivery that was returned `count` times."""
    return delivery(tag, redelivered=True, headers={"x-delivery-count": count}, **others)


def isolated(
    republish: RepublishRequest, tag: int = 1, *, returned: int = 0, message_id: str | None = "m1"
) -> Delivery:
    """Return the delivery from quarantine of a message that was moved there."""
    item = waited(republish.properties)
    table = dict(item.headers)
    if returned:
        table["x-delivery-count"] = returned
    made = delivery(
        tag, redelivered=bool(returned), headers=table, routing_key="orders.quarantine", message_id=message_id
    )
    made.consumer_tag = ISOLATED
    return made


def suspect(session: SteppedSession, tag: int = 1) -> RepublishRequest:
    assert deliver(session, [back(2, tag)]) == []
    return only_republish(session)


def republished(session: SteppedSession, tag: int = 1) -> RepublishRequest:
    """Move a message to quarantine that every consumer suspects."""
    assert deliver(session, [back(10, tag)]) == []
    republish = only_republish(session)
    session.published(republish, None, 0.0)
    session.take_output(0.0)
    return republish


def moved(session: SteppedSession, tag: int = 1) -> RepublishRequest:
    republish = suspect(session, tag)
    session.published(republish, None, 0.0)
    assert session.take_output(0.0) == encode_ack(CHANNEL, tag, multiple=False)
    return republish


@pytest.mark.parametrize(
    ("table", "count"),
    [
        ({}, 0),
        ({"x-delivery-count": 3}, 3),
        ({"x-acquired-count": 4}, 4),
        ({"x-delivery-count": 1, "x-acquired-count": 4}, 4),
        ({"x-delivery-count": "9", "x-acquired-count": True}, 0),
        (BROKEN_TABLE, 0),
    ],
)
def test_how_often_a_delivery_came_back(table: Any, count: int) -> None:
    assert returns(delivery(headers=table)) == count


@pytest.mark.parametrize(("count", "moved"), [(0, False), (1, False), (2, True), (99, True)])
def test_a_message_returned_twice_is_quarantined_then_acked(count: int, moved: bool) -> None:
    session = make(quarantine=True)
    assert bool(deliver(session, [back(count)])) != moved
    if moved:
        assert kinds(session) == [LogEventKind.QUARANTINED]
        republish = only_republish(session)
        assert (republish.routing_key, republish.purpose) == ("orders.quarantine", RepublishReason.QUARANTINE)
        assert session.take_output(9.0) == b""
        session.published(republish, None, 9.0)
        assert session.take_output(20.0) == encode_ack(CHANNEL, 1, multiple=False)
        assert session.statistics.quarantined == 1


def test_a_suspect_waits_a_retry_delay_before_quarantine() -> None:
    """Otherwise it could kill a third consumer while the first two restart."""
    session = make(quarantine=True, queues=True, retry=RetryPolicy(3, delays=(0.5,)))
    first = suspect(session)
    assert (first.routing_key, first.purpose) == ("orders.retry.500", RepublishReason.QUARANTINE)
    assert kinds(session) == [LogEventKind.QUARANTINED]
    session.published(first, None, 0.0)
    assert session.take_output(0.0) == encode_ack(CHANNEL, 1, multiple=False)
    on_its_way = delivery(2, headers=dict(waited(first.properties).headers))
    assert deliver(session, [on_its_way]) == []
    second = only_republish(session)
    assert (second.routing_key, second.purpose) == ("orders.quarantine", RepublishReason.QUARANTINE)
    session.published(second, None, 0.0)
    assert (session.statistics.delayed, session.statistics.quarantined) == (1, 1)
    session.tick(AFTER)
    there = isolated(second, 3)
    session.delivered([there], AFTER)
    assert session.take_isolated() == [there]
    assert there.attempt == 1


@pytest.mark.parametrize(
    ("policy", "queue"),
    [
        (RetryPolicy(3, delays=(60,)), "orders.retry.1000"),
        (RetryPolicy(3, delays=(0,)), "orders.quarantine"),
        (RetryPolicy(1), "orders.quarantine"),
    ],
)
def test_a_suspect_waits_as_retries_do_but_at_most_a_second(policy: RetryPolicy, queue: str) -> None:
    session = make(quarantine=True, queues=True, retry=policy)
    assert deliver(session, [back(2)]) == []
    for declaration in session.take_declarations():
        session.declared(declaration, None, 0.0)
    assert only_republish(session).routing_key == queue


def test_without_its_delay_queue_a_suspect_is_moved_at_once() -> None:
    session = make(quarantine=True, queues=True, retry=RetryPolicy(3, delays=(60,)))
    for tag in (1, 2):
        assert deliver(session, [back(2, tag)]) == []
        for declaration in session.take_declarations():
            assert tag == 1, "asked for once"
            session.declared(declaration, OSError("no"), 0.0)
        assert only_republish(session).routing_key == "orders.quarantine"


def returned(failed: int, acquired: int) -> Delivery:
    """Return a redelivery of RabbitMQ 4.3.

    It was returned ``acquired`` times, ``failed`` times of them because its consumer was lost.
    """
    counts = {"x-delivery-count": failed, "x-acquired-count": acquired}
    return delivery(redelivered=True, headers={name: count for name, count in counts.items() if count})


@pytest.mark.parametrize(
    ("failed", "acquired", "moved"),
    [(0, 2, False), (0, 9, False), (0, 10, True), (1, 9, False), (2, 2, True), (2, 9, True)],
)
def test_what_was_requeued_in_good_order_is_suspect_much_later(failed: int, acquired: int, moved: bool) -> None:
    """The broker distinguishes requeues from crashes.

    A few restarts of its consumer do not make a message suspect.
    """
    assert bool(deliver(make(quarantine=True), [returned(failed, acquired)])) != moved


def test_after_a_consumer_timeout_any_two_returns_make_a_suspect() -> None:
    """RabbitMQ counts a timeout in the same way as a requeue."""
    session = make(quarantine=True, consumer_timeout=10.0)
    deliver(session, [delivery(message_id=None)])
    session.timed_out(ConsumerTimeout(), 11.0, 0.0)
    session.lost(1)
    session.opened(2, CHANNEL)
    assert deliver(session, [returned(0, 2)]) == []


def test_a_count_that_a_client_sent_makes_nobody_suspect() -> None:
    """The broker sends no count with a first delivery."""
    forged = delivery(headers={"x-delivery-count": 9, "x-acquired-count": 9, "x-dead-lettered": "yes"})
    assert deliver(make(quarantine=True), [forged]) == [forged]


def test_a_cancel_for_another_reason_changes_nothing() -> None:
    session = make(quarantine=True, consumer_timeout=10.0)
    deliver(session, [delivery()])
    session.timed_out(ConsumerTimeout(consumer_tag="c"), 1.0, 0.0)
    session.lost(1)
    session.opened(2, CHANNEL)
    assert deliver(session, [returned(0, 2)])


@pytest.mark.parametrize("others", [{}, OURS], ids=["foreign", "ours"])
def test_a_count_that_a_client_sent_moves_nothing(others: dict[str, object]) -> None:
    """According to the broker, it is the first delivery."""
    session = make(quarantine=True)
    assert deliver(session, [delivery(headers={"x-delivery-count": 99, **others})])


def test_without_a_quarantine_nothing_is_moved() -> None:
    session = make()
    assert deliver(session, [back(99)])
    assert session.take_isolated() == []
    assert not session.take_subscription()


def test_returns_by_channels_survived_make_no_suspect() -> None:
    """The process survived, so the messages have not killed it."""
    session = make(quarantine=True)
    session.lost(1)
    session.lost(1)
    session.opened(2, CHANNEL)
    assert deliver(session, [back(2)])
    assert deliver(session, [back(3, tag=2)]) == []


def test_every_transition_of_the_table_happens() -> None:
    CheckedQuarantine.seen.clear()
    session = subscribed()
    session.lost(1)
    session.opened(2, CHANNEL)
    session.lost(2)
    session.opened(3, CHANNEL)
    session.stop()
    session.lost(3)
    assert CheckedQuarantine.seen == changes(TRANSITIONS)


def test_quarantine_is_subscribed_to_later_once_per_channel() -> None:
    session = make(quarantine=True)
    session.tick(10.0)
    assert not session.take_subscription()
    assert session.deadline == 10.0 + AFTER
    session.tick(10.0 + AFTER)
    assert session.take_subscription()
    assert not session.take_subscription()
    session.tick(100.0)
    assert not session.take_subscription()
    assert session.deadline == inf
    session.lost(1)
    session.tick(101.0)
    assert not session.take_subscription()
    session.opened(2, CHANNEL)
    session.tick(102.0)
    session.tick(102.0 + AFTER)
    assert session.take_subscription()


def test_a_session_that_stops_does_not_subscribe() -> None:
    session = make(quarantine=True)
    session.tick(0.0)
    session.stop()
    session.tick(AFTER)
    assert not session.take_subscription()


@pytest.mark.parametrize("end", [SteppedSession.stop, SteppedSession.drain])
def test_an_ending_session_drops_the_quarantine_deadline(end: Callable[[SteppedSession], None]) -> None:
    """Handlers may run long, and a past deadline would keep the shell busy."""
    session = make(quarantine=True)
    deliver(session, [delivery()])
    session.tick(0.0)
    assert session.deadline == AFTER
    end(session)
    session.tick(2 * AFTER)
    assert session.deadline == inf
    session.lost(1)
    session.opened(2, CHANNEL)
    session.tick(3 * AFTER)
    assert (session.deadline == inf) == (end is SteppedSession.stop)


def test_refused_subscriptions_to_quarantine_become_rare() -> None:
    """Each one costs a channel. A delivery from quarantine shows that the cause is gone."""
    session = subscribed()
    republish = moved(session)
    now = 0.0
    for generation, wait in enumerate((60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0, 60.0), 2):
        if generation == 10:
            session.delivered([isolated(republish)], now)
        assert session.quarantine_refused(now) == wait
        session.lost(generation - 1)
        session.opened(generation, CHANNEL)
        session.tick(now + 1.0)
        assert session.deadline == now + wait
        now += wait
        session.tick(now - 0.1)
        assert not session.take_subscription()
        session.tick(now)
        assert session.take_subscription()


def subscribed(**options: Any) -> SteppedSession:
    session = make(quarantine=True, **options)
    session.tick(-AFTER)
    session.tick(0.0)
    assert session.take_subscription()
    return session


def test_a_quarantined_message_runs_alone_and_is_acked_at_once() -> None:
    """The broker sends the next message only after the ack."""
    session = subscribed()
    republish = moved(session)
    item = isolated(republish, 2)
    assert deliver(session, [item]) == []
    assert not session.drained
    assert session.take_isolated() == [item]
    assert (item.routing_key, item.attempt, session.running) == ("orders", 1, 1)
    session.finished([item], 0.0)
    assert session.take_output(0.0) == encode_ack(CHANNEL, 2, multiple=False)


def test_nothing_leaves_quarantine_while_a_suspect_moves_there() -> None:
    """It may be the same message: two copies would remain if the process died now."""
    session = subscribed()
    republish = suspect(session)
    item = isolated(republish, 2)
    session.delivered([item], 0.0)
    assert session.take_isolated() == []
    session.published(republish, None, 0.0)
    assert session.take_output(0.0) == encode_ack(CHANNEL, 1, multiple=False)
    assert session.take_isolated() == [item]


def test_a_batch_handler_gets_it_as_a_batch_of_one() -> None:
    session = subscribed(batch=(5, 1.0))
    session.delivered([back(2)], 0.0)
    republish = only_republish(session)
    session.published(republish, None, 0.0)
    item = isolated(republish, 2)
    session.delivered([item], 0.0)
    assert session.take_isolated() == [[item]]


@pytest.mark.parametrize(("times", "attempt", "delay"), [(1, 2, 1.0), (2, 3, 10.0)])
def test_each_return_in_quarantine_is_an_attempt_with_its_delay(times: int, attempt: int, delay: float) -> None:
    """Without a delay, the message would kill one consumer after the other."""
    session = subscribed()
    item = isolated(moved(session), 2, returned=times)
    session.delivered([item], 0.0)
    session.tick(delay - 0.1)
    assert session.take_isolated() == []
    session.tick(delay)
    assert [one.attempt for one in session.take_isolated() if isinstance(one, Delivery)] == [attempt]
    assert session.statistics.retried == 1


@pytest.mark.parametrize("times", [3, 7])
def test_after_the_last_one_it_is_dead_lettered(times: int) -> None:
    session = subscribed()
    session.delivered([isolated(moved(session), 2, returned=times)], 0.0)
    dead = only_republish(session)
    assert dead.purpose is RepublishReason.DEAD_LETTER
    assert dead.reason == f"{times} of 3 attempts failed; {times} of them by the loss of their consumer"
    session.published(dead, None, 0.0)
    assert session.take_output(0.0) == encode_ack(CHANNEL, 2, multiple=False)


def test_the_largest_count_of_returns_is_dead_lettered() -> None:
    """A broker without that count passes on what a client sent.

    With the attempts in our headers it would exceed 64 bits, which no header can carry.
    """
    session = subscribed()
    table = {**dict(isolated(moved(session)).headers), headers.ATTEMPT: 2, "x-acquired-count": 2**63 - 1}
    item = delivery(2, redelivered=True, headers=table, routing_key="orders.quarantine")
    item.consumer_tag = ISOLATED
    session.delivered([item], 0.0)
    assert only_republish(session).purpose is RepublishReason.DEAD_LETTER


def test_a_return_in_quarantine_takes_a_delay_queue_and_counts() -> None:
    session = subscribed(queues=True)
    session.delivered([isolated(moved(session), 2, returned=1)], 0.0)
    republish = only_republish(session)
    assert (republish.routing_key, republish.purpose) == ("orders.retry.1000", RepublishReason.RETRY)
    again = waited(republish.properties)
    again._delivery_tag = 3
    assert deliver(session, [again], 1.0) == []
    back_again = only_republish(session)
    assert (back_again.purpose, back_again.delivery.attempt) == (RepublishReason.QUARANTINE, 2)
    session.delivered([isolated(back_again, 4, returned=2)], 1.0)
    assert only_republish(session).reason == "3 of 3 attempts failed; 3 of them by the loss of their consumer"


def test_a_policy_without_delays_has_none_there() -> None:
    session = subscribed(retry=RetryPolicy(3, delays=(0,)))
    item = isolated(moved(session), 2, returned=1)
    session.delivered([item], 0.0)
    session.tick(0.0)
    assert session.take_isolated() == [item]


@pytest.mark.parametrize("cancelled", [False, True])
def test_returns_by_channels_survived_are_forgiven_in_quarantine(cancelled: bool) -> None:
    """The broker may have cancelled the subscription before the delivery came."""
    session = subscribed()
    republish = moved(session)
    if cancelled:
        session.drain()
    session.delivered([isolated(republish, 2)], 0.0)
    session.lost(1)
    session.opened(2, CHANNEL)
    item = isolated(republish, 1, returned=1)
    session.delivered([item], 0.0)
    assert session.take_isolated() == [item]
    assert item.attempt == 1


@pytest.mark.parametrize(("cancelled", "other"), [(ISOLATED, "ctag"), ("ctag", ISOLATED)])
@pytest.mark.parametrize("stops", [False, True])
def test_after_a_cancel_the_other_subscription_gets_no_requeue(cancelled: str, other: str, stops: bool) -> None:
    """It would get the message again at once, and the broker would count each return."""
    session = subscribed()
    deliver(session, [delivery(1)])
    deliveries = items(5)
    for item, tag in zip(deliveries, ("ctag", other, cancelled, other, other), strict=True):
        item.consumer_tag = tag
    _, queued, of_the_cancelled, late, oversized = deliveries
    session.delivered([queued, of_the_cancelled], 0.0)
    session.drain(cancelled)
    if stops:
        session.stop()
    session.delivered([late], 0.0)
    session.oversized(oversized, 2**30, 0.0)
    if cancelled == "ctag":
        assert session.take_output(0.0) == encode_nack(CHANNEL, 3, multiple=False, requeue=True)
    else:
        assert session.take_output(0.0) == b""
        assert only_republish(session).delivery is of_the_cancelled


def test_a_failure_in_quarantine_is_delayed_and_comes_back_there() -> None:
    session = subscribed(queues=True)
    item = isolated(moved(session), 2)
    session.delivered([item], 0.0)
    session.take_isolated()
    fail(session, item)
    republish = only_republish(session)
    assert republish.routing_key == "orders.retry.1000"
    again = waited(republish.properties)
    again._delivery_tag = 3
    assert deliver(session, [again], 1.0) == []
    back_again = only_republish(session)
    assert (back_again.purpose, back_again.delivery.attempt) == (RepublishReason.QUARANTINE, 2)


def test_what_fails_there_and_is_held_is_handed_out_there_again() -> None:
    session = subscribed()
    item = isolated(moved(session), 2)
    session.delivered([item], 0.0)
    session.take_isolated()
    fail(session, item)
    session.tick(1.0)
    assert session.take_work() == []
    assert session.take_isolated() == [item]


def given_back(session: SteppedSession, error: Exception | None = None) -> RepublishRequest:
    """Return the copy of a delivery from quarantine that is given back, after its publish."""
    assert session.take_isolated() == []
    assert session.take_output(0.0) == b""
    copy = only_republish(session)
    assert (copy.routing_key, copy.purpose) == ("orders.quarantine", RepublishReason.QUARANTINE)
    session.published(copy, error, 0.0)
    return copy


def test_a_stop_publishes_it_again_without_a_return() -> None:
    """The broker would count the return, though no handler had the message."""
    session = subscribed()
    session.delivered([isolated(moved(session), 2)], 0.0)
    session.stop()
    copy = given_back(session)
    assert session.take_output(0.0) == encode_ack(CHANNEL, 2, multiple=False)
    assert (session.statistics.requeued, session.statistics.quarantined) == (1, 1)
    assert session.drained
    later = subscribed()
    later.delivered([isolated(copy)], 0.0)
    assert [item.attempt for item in later.take_isolated()] == [1]


def test_a_stop_keeps_the_attempts_of_one_waiting_for_its_store() -> None:
    session = subscribed(retry=RetryPolicy(3, delays=(0,)))
    session.delivered([isolated(moved(session), 2, returned=1)], 0.0)
    session.tick(0.0)
    [item] = session.take_isolated()
    session.finished([Skipped(item, SkipReason.STORE_FAILED, "down")], 0.0)
    assert session.take_isolated() == []
    session.stop()
    copy = given_back(session)
    later = subscribed()
    later.delivered([isolated(copy)], 0.0)
    assert [item.attempt for item in later.take_isolated()] == [2]


def test_one_that_comes_in_a_stop_has_attempts_by_its_returns() -> None:
    session = subscribed(queues=True)
    first = moved(session)
    session.stop()
    session.delivered([isolated(first, 2, returned=1)], 0.0)
    delayed = only_republish(session)
    assert (delayed.routing_key, delayed.purpose) == ("orders.retry.1000", RepublishReason.RETRY)
    later, again = subscribed(queues=True), waited(delayed.properties)
    again._delivery_tag = 1
    assert deliver(later, [again]) == []
    assert only_republish(later).delivery.attempt == 2


@pytest.mark.parametrize(
    "error",
    [
        RETURNED,
        PublishNacked("nacked"),
        PublishBlocked("blocked"),
        PublishRefused("too large", reply_code=406, reply_text="PRECONDITION_FAILED"),
    ],
)
def test_a_stop_requeues_what_it_cannot_publish_again(error: Exception) -> None:
    session = subscribed()
    session.delivered([isolated(moved(session), 2)], 0.0)
    session.stop()
    given_back(session, error)
    assert session.take_output(0.0) == encode_nack(CHANNEL, 2, multiple=False, requeue=True)
    assert session.take_republishes() == []
    assert session.drained


@pytest.mark.parametrize("queues", [False, True])
def test_the_active_consumer_gives_back_through_a_delay_queue(queues: bool) -> None:
    """Its subscription to quarantine goes on, and would get the copy at once. Without delays it is kept unacked."""
    session = subscribed(queues=queues, single_active=True)
    session.delivered([isolated(republished(session), 2)], 0.0)
    session.stop(keep=True)
    assert session.take_isolated() == []
    assert session.take_output(0.0) == b""
    copies = session.take_republishes()
    assert [(copy.routing_key, copy.purpose) for copy in copies] == (
        [("orders.retry.1000", RepublishReason.RETRY)] if queues else []
    )


@pytest.mark.parametrize(
    "error", [PublishBlocked("blocked"), PublishRefused("no", reply_code=403, reply_text="ACCESS_REFUSED")]
)
@pytest.mark.parametrize("stops", [False, True])
def test_a_delivery_that_cannot_be_given_back_is_kept(stops: bool, error: Exception) -> None:
    """Whether the active consumer stops, or the broker cancels a subscription. Another publish would fail, too."""
    session = subscribed(queues=True, single_active=stops)
    session.delivered([isolated(republished(session), 2)], 0.0)
    if stops:
        session.stop(keep=True)
    else:
        session.cancelled(session.lifecycle.consumer_tag, 0.0)
    session.published(only_republish(session), error, 0.0)
    assert session.take_republishes() == []
    assert session.take_output(0.0) == b""
    assert session.drained


def test_the_end_publishes_nothing() -> None:
    session = subscribed()
    session.delivered([isolated(moved(session), 2)], 0.0)
    session.end()
    assert session.take_republishes() == []


@pytest.mark.parametrize(("count", "suspect"), [(2, False), (9, False), (10, True)])
def test_a_single_active_consumer_suspects_after_many_returns(count: int, suspect: bool) -> None:
    """Each of its regular restarts closes the channel with unacked deliveries, like a crash."""
    session = make(quarantine=True, single_active=True)
    assert bool(deliver(session, [back(count)])) != suspect


def test_what_may_not_be_moved_is_handed_out_where_it_is() -> None:
    """The user may not write there."""
    session = make(quarantine=True)
    republish = suspect(session)
    session.published(republish, PublishRefused("no permission", reply_code=403, reply_text="ACCESS_REFUSED"), 0.0)
    session.tick(0.0)
    assert session.take_work() == [republish.delivery]


@pytest.mark.parametrize(
    "error",
    [
        PublishRefused("too large", reply_code=406, reply_text="PRECONDITION_FAILED"),
        ConfigurationError("larger than a frame"),
    ],
)
def test_a_suspect_that_quarantine_refuses_is_dead_lettered(error: Exception) -> None:
    """A handler would be killed again."""
    session = make(quarantine=True)
    republish = suspect(session)
    session.published(republish, error, 0.0)  # type: ignore[arg-type]
    session.tick(100.0)
    assert session.take_work() == []
    dead = only_republish(session)
    assert (dead.delivery, dead.purpose) == (republish.delivery, RepublishReason.DEAD_LETTER)
    assert dead.reason == f"cannot be moved to quarantine: {error}"


def test_where_it_is_missing_it_is_declared_again() -> None:
    session = make(quarantine=True)
    republish = suspect(session)
    session.published(republish, RETURNED, 0.0)
    [queue] = session.take_declarations()
    assert queue.name == "orders.quarantine"
    session.declared(queue, None, 0.0)
    assert only_republish(session) is republish


@pytest.mark.parametrize("error", [PublishBlocked("alarm"), PublishNacked("full")])
def test_a_suspect_that_cannot_be_moved_is_kept_from_handlers(error: Exception) -> None:
    session = make(quarantine=True)
    republish = suspect(session)
    session.published(republish, error, 0.0)  # type: ignore[arg-type]
    session.tick(1.0)
    assert session.take_work() == []
    assert only_republish(session) is republish


def test_the_queue_of_quarantine() -> None:
    """It dead-letters to the same queue."""
    queue = Quarantine.of(Queue("orders", dead_letter="bin"), single_active=True)
    assert (queue.name, queue.dead_letter_name, queue.single_active_consumer) == ("orders.quarantine", "bin", True)
    with pytest.raises(ConfigurationError, match="leaves no room for"):
        Quarantine.of(Queue("q" * 248))


@pytest.mark.parametrize(("given", "key"), [({}, "orders"), ({"x-dead-letter-routing-key": ""}, "")])
def test_quarantine_routes_dead_letters_as_its_queue_does(given: dict[str, object], key: str) -> None:
    """Otherwise it would drop what is given up."""
    exchange = {"x-dead-letter-exchange": "dlx"}
    arguments = Quarantine.of(Queue("orders", arguments=exchange | given)).arguments_for((4, 3))
    assert arguments.items() >= (exchange | {"x-dead-letter-routing-key": key}).items()


@pytest.mark.parametrize("given", [{"dead_letter": None}, {"arguments": {"x-dead-letter-exchange": None}}])
def test_quarantine_drops_dead_letters_if_its_queue_does(given: Any) -> None:
    queue = Quarantine.of(Queue("orders", **given))
    assert queue.arguments_for((4, 3)) == {"x-queue-type": "quorum", "x-delivery-limit": -1}


def test_a_suspect_with_broken_headers_is_dead_lettered() -> None:
    """It cannot be copied to quarantine, and a handler would be killed again, without end."""
    session = make(quarantine=True)
    count = encode_table({"x-delivery-count": 2})[4:]
    table = count + BROKEN_TABLE[4:]
    item = delivery(redelivered=True, headers=len(table).to_bytes(4, "big") + table)
    assert returns(item) == 2
    assert deliver(session, [item]) == []
    dead = only_republish(session)
    assert (dead.delivery, dead.purpose) == (item, RepublishReason.DEAD_LETTER)
    assert dead.reason == "cannot be moved to quarantine: its properties cannot be copied"
    assert kinds(session) == [LogEventKind.DEAD_LETTERED]
