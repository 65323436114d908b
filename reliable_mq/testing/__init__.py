"""For the tests of services that use RabbitMQ: a proxy that injects faults between a client and its broker.

See `reliable_mq.testing.proxy`; the pytest fixtures are in `reliable_mq.testing.fixtures`.
"""

from __future__ import annotations

from reliable_mq.testing.faults import Cut, Direction
from reliable_mq.testing.frames import (
    Frame,
    basic_ack,
    basic_cancel,
    basic_nack,
    channel_close,
    connection_blocked,
    connection_close,
    connection_unblocked,
    method,
)
from reliable_mq.testing.proxy import FaultProxy, FaultProxyFactory

__all__ = [
    "Cut",
    "Direction",
    "FaultProxy",
    "FaultProxyFactory",
    "Frame",
    "basic_ack",
    "basic_cancel",
    "basic_nack",
    "channel_close",
    "connection_blocked",
    "connection_close",
    "connection_unblocked",
    "method",
]
