"""The consumer session after the task of a handler was cancelled.

No attempt is counted, and the delivery is not lost.
"""

from __future__ import annotations

from random import Random

from reliable_mq import RetryPolicy
from reliable_mq.codec import encode_nack
from reliable_mq.core.consumer.acks import AckBatcher, StreamOffset
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.handler import Skipped, SkipReason
from reliable_mq.core.consumer.lifecycle import ConsumerLifecycle
from reliable_mq.core.consumer.settlement import LogEventKind
from tests.core.deliveries import delivery
from tests.core.sessions import CHANNEL, SteppedSession, attempt_again, deliver, items, kinds, make


def cancelled(*deliveries: Delivery) -> list[Skipped]:
    return [Skipped(one, SkipReason.CANCELLED, "its handler was cancelled") for one in deliveries]


def test_a_cancelled_handler_requeues_its_delivery_as_no_attempt() -> None:
    session = make(max_attempts=1)
    first, second = deliver(session, items(2))
    session.finished(cancelled(first), 0.0)
    assert session.take_output(0.0) == encode_nack(CHANNEL, 1, False, requeue=True)
    assert kinds(session) == [LogEventKind.CANCELLED]
    assert (session.statistics.failed, session.statistics.requeued, session.running) == (0, 1, 1)
    assert second.attempt == 1


def test_a_redelivery_that_is_cancelled_is_held_for_a_delay() -> None:
    session = make(max_attempts=1)
    [item] = deliver(session, [delivery(1, redelivered=True)])
    session.finished(cancelled(item), 0.0)
    assert session.take_output(0.0) == b""
    assert attempt_again(session, 0.9) == []
    assert attempt_again(session, 1.0) == [item]
    assert item.attempt == 1


def test_while_stopping_it_is_requeued_at_once() -> None:
    session = make()
    [item] = deliver(session, [delivery(1, redelivered=True)])
    session.stop()
    session.finished(cancelled(item), 0.0)
    assert session.take_output(0.0) == encode_nack(CHANNEL, 1, False, requeue=True)
    assert session.drained


def test_of_a_stream_it_is_held_since_nothing_can_be_requeued() -> None:
    session = SteppedSession(
        queue="events",
        retry=RetryPolicy(3, delays=(1,)),
        random=Random(1),
        dead_letters=None,
        broker_dead_letters=False,
        acks=AckBatcher(ack_every=10, ack_interval=5.0, prefetch=100),
        lifecycle=ConsumerLifecycle(),
        stream_offset=StreamOffset(),
    )
    session.opened(1, CHANNEL)
    [item] = deliver(session, [delivery(1, headers={"x-stream-offset": 10})])
    session.finished(cancelled(item), 0.0)
    assert session.take_output(0.0) == b""
    assert attempt_again(session, 1.0) == [item]
    assert item.redelivered


def test_with_automatic_acks_it_is_lost_and_that_is_said() -> None:
    session = make(automatic=True)
    [item] = deliver(session, items(1))
    session.finished(cancelled(item), 0.0)
    assert (session.statistics.failed, session.statistics.handled) == (1, 0)
    assert kinds(session) == [LogEventKind.DROPPED]
