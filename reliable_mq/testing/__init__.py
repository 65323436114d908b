"""Brokers, networks and audits for tests of services that use RabbitMQ.

The brokers and networks fail on demand.

- `RabbitMQ` and `RabbitMQCluster` run real brokers in containers, and inject faults of processes, disks, networks and
  resources. They need Linux with docker, and the extra ``testing``.
- `FaultProxy` forwards connections to any broker and injects faults between frames.
- `make_delivery` makes a delivery for a unit test of a handler.
- `Audit` compares the published messages with the drained ones. `VirtualHost` drains them.
- `reliable_mq.testing.fixtures` has the pytest fixtures.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from reliable_mq._util.validation import missing_extra
from reliable_mq.errors import LabError
from reliable_mq.testing.audit import Audit, AuditResult
from reliable_mq.testing.deliveries import make_delivery
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
from reliable_mq.testing.management import Management, ManagementAPIError
from reliable_mq.testing.proxy import FaultProxy, FaultProxyFactory
from reliable_mq.testing.virtual_host import VirtualHost
from reliable_mq.testing.waiting import until, wait_until

if TYPE_CHECKING:
    from reliable_mq.testing.cluster import ClusterNode, RabbitMQCluster
    from reliable_mq.testing.containers import remove_leftovers
    from reliable_mq.testing.rabbitmq import RabbitMQ

__all__ = [
    "Audit",
    "AuditResult",
    "ClusterNode",
    "Cut",
    "Direction",
    "FaultProxy",
    "FaultProxyFactory",
    "Frame",
    "LabError",
    "Management",
    "ManagementAPIError",
    "RabbitMQ",
    "RabbitMQCluster",
    "VirtualHost",
    "basic_ack",
    "basic_cancel",
    "basic_nack",
    "channel_close",
    "connection_blocked",
    "connection_close",
    "connection_unblocked",
    "make_delivery",
    "method",
    "remove_leftovers",
    "until",
    "wait_until",
]

_ON_DEMAND = {  # name: its module, which needs the extra
    "ClusterNode": "cluster",
    "RabbitMQ": "rabbitmq",
    "RabbitMQCluster": "cluster",
    "remove_leftovers": "containers",
}

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in _ON_DEMAND:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            value = globals()[name] = getattr(import_module(f"{__name__}.{_ON_DEMAND[name]}"), name)
        except ImportError as error:
            raise missing_extra(name, "testing", error) from error
        return value
