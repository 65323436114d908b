"""Deliveries for unit tests of handlers, made without a broker."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from reliable_mq._util.validation import whole_number
from reliable_mq.codec.properties import encode_properties
from reliable_mq.core.consumer.attempts import AttemptHistory
from reliable_mq.core.consumer.delivery import ChannelGeneration, Delivery
from reliable_mq.core.idempotency import Claim, ClaimStatus, InboxClaim

if TYPE_CHECKING:
    from reliable_mq.message import Message


def make_delivery(
    message: Message,
    *,
    queue: str = "queue",
    exchange: str = "",
    routing_key: str | None = None,
    attempt: int = 1,
    redelivered: bool = False,
    session: object = None,
) -> Delivery:
    """Return a delivery of a message, as a handler receives it.

    Args:
        message: The message.
        queue: The queue from which it is consumed.
        exchange: The exchange to which it was published.
        routing_key: The routing key; None for the name of the queue.
        attempt: The number of this attempt at the message.
        redelivered: Whether the message may have been delivered before, as it may at a later attempt.
        session: The value of ``with delivery.transaction()``, which commits nothing. None for a consumer without a
            store that has transactions.

    Raises:
        ConfigurationError: If `attempt` is not a positive whole number.
    """
    whole_number("attempt", attempt, 1)
    key = queue if routing_key is None else routing_key
    redelivered = redelivered or attempt > 1
    delivery = Delivery("make_delivery", 1, redelivered, exchange, key, encode_properties(message), message.body)
    delivery.came_from(ChannelGeneration(1, 1, queue))
    if attempt > 1:
        delivery.set_failures(AttemptHistory(attempt - 1))
    if session is not None:
        claim = Claim(message.message_id, ClaimStatus.NEW)
        delivery.inbox_claim = InboxClaim(claim, lambda *_: nullcontext(session))
    return delivery
