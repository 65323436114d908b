"""Test services that use RabbitMQ: a proxy that injects faults before the broker.

The proxy is `reliable_mq.testing.proxy.FaultProxy`; the pytest fixtures are in `reliable_mq.testing.fixtures`.
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
