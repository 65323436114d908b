"""The consumer session without requeues: streams, and automatic acks."""

from __future__ import annotations

from random import Random

from reliable_mq import RetryPolicy
from reliable_mq.codec import encode_ack
from reliable_mq.core.consumer.acks import AckBatcher, StreamOffset
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.handler import Failed
from reliable_mq.core.consumer.lifecycle import ConsumerLifecycle
from tests.core.deliveries import delivery, failure
from tests.core.sessions import CHANNEL, SteppedSession, deliver, items, make


def of_a_stream() -> tuple[SteppedSession, StreamOffset]:
    position = StreamOffset()
    session = SteppedSession(
        queue="events",
        retry=RetryPolicy(3, delays=(1,)),
        random=Random(1),
        dead_letters=None,
        broker_dead_letters=False,
        acks=AckBatcher(ack_every=10, ack_interval=5.0, prefetch=100),
        lifecycle=ConsumerLifecycle(),
        stream_offset=position,
    )
    session.opened(1, CHANNEL)
    return session, position


def events(*offsets: int) -> list[Delivery]:
    return [delivery(tag, headers={"x-stream-offset": offset}) for tag, offset in enumerate(offsets, 1)]


def test_a_stream_goes_on_behind_what_is_settled_however_it_was() -> None:
    """Neither handled nor rejected messages are delivered again."""
    session, position = of_a_stream()
    first, second, third, _ = deliver(session, events(10, 11, 12, 13))
    session.finished([first, Failed(second, failure(verdict="no")), third], 0.0)
    session.lost(1)
    assert position.following == 13


def test_a_stream_goes_on_behind_what_came_without_its_body() -> None:
    session, position = of_a_stream()
    [first] = deliver(session, events(10))
    session.finished([first], 0.0)
    _, oversized = events(10, 11)
    session.oversized(oversized, 2_000_000, 0.0)
    session.lost(1)
    assert position.following == 12


def test_a_stream_goes_on_at_what_waits_for_its_next_attempt() -> None:
    session, position = of_a_stream()
    first, second, third = deliver(session, events(10, 11, 12))
    session.finished([first, Failed(second, failure()), third], 0.0)
    session.lost(1)
    assert position.following == 11


def test_a_stream_gets_no_requeues_and_skips_no_message() -> None:
    """A stream treats a nack as settled, so none is sent.

    The next channel begins at the first unhandled message.
    """
    session, position = of_a_stream()
    first, *_ = deliver(session, events(10, 11, 12))
    session.finished([first], 0.0)
    session.drain()
    assert session.take_output(0.0) == encode_ack(CHANNEL, 1, False)
    session.lost(1)
    assert position.following == 11
    session.opened(2, CHANNEL)
    deliver(session, events(11, 12))
    session.stop()
    assert session.take_output(0.0) == b""
    assert session.statistics.requeued == 0
    assert session.statistics.cancelled == 1


def test_after_a_cancel_by_the_broker_a_stream_may_be_new() -> None:
    session, position = of_a_stream()
    session.finished(deliver(session, events(10, 11, 12)), 0.0)
    session.drain()
    session.lost(1)
    assert position.start == 0


def test_automatically_acked_work_is_handled_after_channel_loss() -> None:
    """The broker has forgotten the deliveries, so it would not redeliver them."""
    session = make(automatic=True)
    session.delivered(items(3), 0.0)
    session.lost(1)
    work = session.take_work()
    assert len(work) == 3
    session.finished(work, 0.0)
    session.opened(2, CHANNEL)
    session.stop()
    session.delivered(items(2), 0.0)
    assert not session.drained
    session.finished(session.take_work(), 0.0)
    assert session.drained
    assert session.statistics.handled == 5


def test_the_ack_interval_counts_from_when_handling_finished() -> None:
    session = make()
    [item] = deliver(session, items(1))
    session.finished([item], 10.0, since=5.0)
    assert session.take_output(10.0) == encode_ack(CHANNEL, 1, False)


def test_a_retry_counts_from_when_it_was_looked_at() -> None:
    """A retry never starts too early."""
    session = make()
    first, second = deliver(session, items(2))
    session.finished([first, Failed(second, failure())], 10.0, since=5.0)
    session.tick(10.9)
    assert session.take_work() == []
    session.tick(11.0)
    assert session.take_work() == [second]
