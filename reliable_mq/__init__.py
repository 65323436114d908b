"""Reliable publishing to and consuming from RabbitMQ.

Every message that a publisher reported as confirmed reaches a handler or a dead-letter queue, whatever dies in between.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.publisher.publication import Outcome, PublishReport, Receipt
from reliable_mq.errors import (
    BrokerUnavailable,
    ConfigurationError,
    ConsumeError,
    ConsumerCancelled,
    IdempotencyStoreError,
    OutboxError,
    PublishBlocked,
    PublishError,
    PublishNacked,
    PublishRefused,
    PublishReturned,
    PublishUnconfirmed,
    ReliableMQError,
    StaleDelivery,
    TopologyMismatch,
    UsageError,
)
from reliable_mq.message import Message
from reliable_mq.retry import Ack, DeadLetter, KillSwitch, RetryLater, RetryPolicy
from reliable_mq.sync.confirmation import Confirmation
from reliable_mq.sync.consumer import Consumer
from reliable_mq.sync.publisher import Publisher
from reliable_mq.tls import TLSOptions
from reliable_mq.topology import Binding, Exchange, Queue

if TYPE_CHECKING:
    from reliable_mq.aio.confirmation import AsyncConfirmation
    from reliable_mq.aio.consumer import AsyncConsumer
    from reliable_mq.aio.publisher import AsyncPublisher

__all__ = [
    "Ack",
    "AsyncConfirmation",
    "AsyncConsumer",
    "AsyncPublisher",
    "Binding",
    "BrokerUnavailable",
    "ConfigurationError",
    "Confirmation",
    "ConsumeError",
    "Consumer",
    "ConsumerCancelled",
    "DeadLetter",
    "Delivery",
    "Exchange",
    "IdempotencyStoreError",
    "KillSwitch",
    "Message",
    "OutboxError",
    "Outcome",
    "PublishBlocked",
    "PublishError",
    "PublishNacked",
    "PublishRefused",
    "PublishReport",
    "PublishReturned",
    "PublishUnconfirmed",
    "Publisher",
    "Queue",
    "Receipt",
    "ReliableMQError",
    "RetryLater",
    "RetryPolicy",
    "StaleDelivery",
    "TLSOptions",
    "TopologyMismatch",
    "UsageError",
]

# Loading the asyncio face with its driver takes a tenth of the time that all the rest takes.
_ON_DEMAND = {
    "AsyncConfirmation": "reliable_mq.aio.confirmation",
    "AsyncConsumer": "reliable_mq.aio.consumer",
    "AsyncPublisher": "reliable_mq.aio.publisher",
}

if not TYPE_CHECKING:  # where any name would seem to exist

    def __getattr__(name: str) -> object:
        if name not in _ON_DEMAND:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_ON_DEMAND[name]), name)
        return value
