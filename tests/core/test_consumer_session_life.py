"""The consumer session through `poll`: a stop, the prefetch, and its breach."""

from __future__ import annotations

import pytest

from reliable_mq.codec import encode_ack, encode_nack
from reliable_mq.core.consumer.acks import AckBatcher
from reliable_mq.core.consumer.consumer_timeout import ConsumerTimeout
from reliable_mq.core.consumer.delivery import DeliveryState
from reliable_mq.core.consumer.lifecycle import PAUSE, ChannelStep, ConsumerState, Resubscribe
from reliable_mq.core.consumer.session import ConsumerSession
from tests.core.sessions import CHANNEL, items, make


def opened(session: ConsumerSession) -> ConsumerSession:
    session.subscribing(10)
    session.poll(0.0)
    return session


def test_a_stop_sends_nothing_until_the_subscription_has_ended() -> None:
    session = make()
    session.delivered(items(3), 0.0)
    work = session.poll(0.0).dispatch
    session.finished(work[:1], 0.0)
    assert ConsumerSession.stop(session, 1.0)
    session.recalled(work[1:2])
    actions = session.poll(1.0)
    assert (actions.state, actions.data, actions.subscribe) == (
        ConsumerState.CANCELLING,
        b"",
        [ChannelStep.UNSUBSCRIBE],
    )
    session.lifecycle.unsubscribed(1.0)
    assert session.poll(1.05).data == b""
    session.finished(work[2:], 1.06)
    actions = session.poll(1.06)
    acks = encode_ack(CHANNEL, 1, False) + encode_ack(CHANNEL, 3, False)
    assert actions.data == acks + encode_nack(CHANNEL, 2, False, True)
    assert (actions.state, actions.wake_at) == (ConsumerState.ENDED, None)
    assert not ConsumerSession.stop(session, 2.0)


def test_a_due_ack_does_not_wake_a_consumer_that_sends_nothing() -> None:
    session = make()
    session.delivered(items(2), 0.0)
    work = session.poll(0.0).dispatch
    session.finished(work[:1], 0.0)
    ConsumerSession.stop(session, 4.995)
    assert session.poll(4.995).wake_at == pytest.approx(5.015)
    session.lifecycle.unsubscribed(6.0)
    assert session.poll(6.0).wake_at == pytest.approx(6.02)
    assert session.poll(6.0 + PAUSE).data == encode_ack(CHANNEL, 1, False)


def test_an_end_requeues_what_waits_and_acks_what_is_finished() -> None:
    session = make()
    session.delivered(items(2), 0.0)
    work = session.poll(0.0).dispatch
    session.finished(work[:1], 0.0)
    session.delivered(items(1, 3), 0.0)
    session.end()
    actions = session.poll(0.0)
    assert (actions.state, actions.wake_at) == (ConsumerState.ENDED, None)
    assert actions.data == encode_ack(CHANNEL, 1, False) + encode_nack(CHANNEL, 3, False, True)


def test_another_prefetch_is_told_to_the_broker_and_to_the_acks() -> None:
    session = opened(make())
    assert session.change_prefetch(40)
    assert session.poll(0.0).subscribe == [Resubscribe("", "#2", 40)]
    assert not session.poll(0.0).subscribe


def test_another_prefetch_of_the_single_active_consumer_waits() -> None:
    session = opened(make(single_active=True))
    session.delivered(items(1), 0.0)
    work = session.poll(0.0).dispatch
    assert not session.change_prefetch(40)
    assert not session.poll(0.0).subscribe
    session.finished(work, 0.0)
    assert session.poll(10.0).data == encode_ack(CHANNEL, 1, False)
    wake_at = session.poll(10.0).wake_at
    assert wake_at is not None
    assert session.poll(wake_at).subscribe == [ChannelStep.REOPEN]


def test_a_broker_that_ignores_the_prefetch_is_refused() -> None:
    """Otherwise its deliveries could fill the memory of the process."""
    session = opened(make())
    session.delivered(items(1000), 0.0)
    with pytest.raises(ValueError, match="ignores the prefetch"):
        session.delivered(items(100, 1001), 0.0)


def test_a_prefetch_of_0_is_no_limit() -> None:
    session = make()
    session.subscribing(0)
    session.delivered(items(2000), 0.0)
    assert len(session.poll(0.0).dispatch) == 2000


def test_a_recalled_delivery_that_timed_out_is_not_waited_for() -> None:
    """A worker may still hold it, but does not start its handler."""
    session = make(consumer_timeout=60.0)
    session.delivered(items(1), 0.0)
    [item] = session.poll(0.0).dispatch
    session.cancelled("ctag", 100.0)
    session.timed_out(ConsumerTimeout(60.0), 100.0, 0.0)
    assert session.drained
    session.recalled([item])
    assert (session.running, session.drained, item.state) == (0, True, DeliveryState.SETTLED)


def test_of_results_of_two_channels_those_of_the_open_one_count() -> None:
    session = make()
    session.delivered(items(1), 0.0)
    before = session.poll(0.0).dispatch
    session.lost(1)
    session.opened(2, CHANNEL)
    session.delivered(items(1), 0.0)
    session.finished([*before, *session.poll(0.0).dispatch], 0.0)
    assert (session.statistics.handled, session.statistics.stale) == (1, 1)


def test_acks_at_short_intervals_need_no_second_look() -> None:
    session = make(acks=AckBatcher(ack_every=10, ack_interval=0.01, prefetch=100))
    session.delivered(items(2), 0.0)
    actions = session.poll(0.0)
    assert (actions.report_after, actions.wake_at) == (1, None)
