"""Deliveries of the pull API."""

from __future__ import annotations

from typing import Any, cast

from reliable_mq import Queue
from reliable_mq.core.consumer.consumer_timeout import ConsumerTimeout
from reliable_mq.core.consumer.delivery import Delivery, DeliveryState
from reliable_mq.core.consumer.handler import Failed
from reliable_mq.engine.consumer_options import ConsumerOptions
from reliable_mq.engine.pull import PulledDelivery
from tests.core.deliveries import delivery, failure


def test_a_pulled_delivery_that_timed_out_has_failed_once() -> None:
    """The late verdict belongs to the attempt that was counted as failed."""
    session = ConsumerOptions("amqp://localhost/", Queue("orders"), None, name="c").new_session()
    session.opened(1, 1)
    session.delivered([delivery(1)], 0.0)
    [item] = session.poll(0.0).dispatch
    pulled = PulledDelivery(cast("Delivery", item), cast("Any", None))
    assert pulled.state is DeliveryState.RUNNING
    session.timed_out(ConsumerTimeout(60.0), 100.0, 0.0)
    session.lost(1)
    session.finished([Failed(pulled, failure())], 101.0)
    assert (session.statistics.failed, session.statistics.stale) == (1, 1)
    session.opened(2, 1)
    session.delivered([delivery(1, redelivered=True)], 200.0)
    assert [cast("Delivery", again).attempt for again in session.poll(200.0).dispatch] == [2]
