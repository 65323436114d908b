"""The states of a delivery: every transition of the table happens."""

from __future__ import annotations

from reliable_mq import KillSwitch
from reliable_mq.core.consumer.consumer_timeout import ConsumerTimeout
from reliable_mq.core.consumer.delivery import TRANSITIONS, DeliveryState
from reliable_mq.core.consumer.handler import Failed
from tests.core.deliveries import CheckedDelivery, delivery, failure
from tests.core.sessions import RETURNED, deliver, fail, items, make, only_republish
from tests.transitions import changes


def test_every_transition_of_the_table_happens() -> None:
    CheckedDelivery.seen.clear()
    refused()
    failed()
    held()
    recalled()
    timed_out()
    assert CheckedDelivery.seen == changes(TRANSITIONS)


def refused() -> None:
    """Refuse deliveries: the broker or the session dead-letters them.

    The dead letters are confirmed, returned, or outstanding when the channel is lost.
    """
    for dead_letters in (True, False):
        session = make(max_body_bytes=1, dead_letters=dead_letters)
        session.delivered([delivery(1), delivery(2), delivery(3)], 0.0)
        if dead_letters:
            confirmed, returned, late = session.take_republishes()
            session.published(confirmed, None, 0.0)
            session.published(returned, RETURNED, 0.0)
            session.tick(100.0)
            session.lost(1)
            session.published(late, None, 100.0)


def failed() -> None:
    """Fail a delivery, which moves to a delay queue."""
    session = make(queues=True)
    [item] = deliver(session, items(1))
    fail(session, item)
    session.published(only_republish(session), None, 0.0)


def held() -> None:
    """Hold a failed delivery until its next attempt, and lose its channel.

    A redelivery is held until the attempt is due.
    """
    session = make()
    [item] = deliver(session, items(1))
    fail(session, item)
    session.tick(100.0)
    fail(session, session.take_work()[0], 100.0)
    session.lost(1)
    session.opened(2, 3)
    session.delivered([delivery(1, message_id="m1", redelivered=True)], 100.0)


def recalled() -> None:
    """Recall two deliveries: one is dispatched again, the other requeued."""
    session = make(kill_switch=KillSwitch(share=0.5, window=10, minimum=1, pause=5))
    [first, second, third] = deliver(session, items(3))
    session.finished([Failed(first, failure())], 0.0)
    assert session.take_pause()
    session.postponed([second])
    session.recalled([third])


def timed_out() -> None:
    session = make(consumer_timeout=60.0)
    [item, done] = deliver(session, items(2))
    session.finished([done], 0.0)
    session.timed_out(ConsumerTimeout(60.0), 100.0, 0.0)
    assert item.state is DeliveryState.TIMED_OUT
    session.finished([item], 101.0)
