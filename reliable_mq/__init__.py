"""Reliable publishing to and consuming from RabbitMQ.

Every message that a publisher reports as confirmed reaches a handler or a dead-letter queue, whatever fails in between.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reliable_mq.aio.confirmation import AsyncConfirmation
    from reliable_mq.aio.consumer import AsyncConsumer
    from reliable_mq.aio.publisher import AsyncPublisher
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
        PublishDisconnected,
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
    from reliable_mq.tracing import Tracing

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
    "PublishDisconnected",
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
    "Tracing",
    "UsageError",
]

# Names are imported on first use. A program that uses one API, or the command line's help, does not load the others.
_HOME = {
    "AsyncConfirmation": "aio.confirmation",
    "AsyncConsumer": "aio.consumer",
    "AsyncPublisher": "aio.publisher",
    "Delivery": "core.consumer.delivery",
    "Outcome": "core.publisher.publication",
    "PublishReport": "core.publisher.publication",
    "Receipt": "core.publisher.publication",
    "Message": "message",
    "Ack": "retry",
    "DeadLetter": "retry",
    "KillSwitch": "retry",
    "RetryLater": "retry",
    "RetryPolicy": "retry",
    "Confirmation": "sync.confirmation",
    "Consumer": "sync.consumer",
    "Publisher": "sync.publisher",
    "TLSOptions": "tls",
    "Binding": "topology",
    "Exchange": "topology",
    "Queue": "topology",
    "Tracing": "tracing",
}

if not TYPE_CHECKING:  # a type checker would assume that any name exists

    def __getattr__(name: str) -> object:
        if name in __all__:
            module = import_module(f"{__name__}.{_HOME.get(name, 'errors')}")
            value = globals()[name] = getattr(module, name)
            return value
        missing = AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name.startswith("_"):
            raise missing
        try:  # `import reliable_mq` is enough for `reliable_mq.stores`
            return import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise missing from None
