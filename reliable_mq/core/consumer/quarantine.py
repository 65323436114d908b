"""The quarantine of a queue, for messages that may kill or hang their consumer.

It is a second queue, whose messages are handled one at a time. A message that kills its consumer is delivered again,
with all messages that were prefetched beside it. The broker counts these returns (``x-delivery-count``). A message that
was returned twice without a result is suspect. The threshold is higher if this process has lost channels and survived,
except over the consumer timeout. A timeout of deliveries that only waited in a pause of the kill switch raises it, too.
A suspect is moved, confirmed, to the quarantine queue, which is consumed with a prefetch of 1. There, a return is the
fault of the message and counts as a failed attempt. Each attempt in quarantine, including the first, follows after a
delay. Without a delay, a killer would kill one consumer after the other, and leave none for its neighbours.

From 4.3 on, deliveries that a stopping consumer requeues, or that the consumer timeout takes back, are only counted in
``x-acquired-count``, which counts every return. A process that has seen such a timeout suspects them equally soon. For
other processes it takes more than a few restarts. Up to 4.2 there is one count of all returns, so two restarts count
as two crashes. The only active consumer of a queue requeues nothing when it stops, because the next one would begin
with later messages. It closes its channel, which counts as a crash. So on such a queue, crashes are only counted among
all returns.

A delivery from quarantine that no handler has begun with is published to quarantine again when its consumer stops, so
that no return is counted for it.

Invariants:

- The broker's counts are only used for deliveries that the broker flags as redelivered. A client can send the counts
  itself, which costs a detour but no attempt.
- Quarantine is subscribed a moment after the queue, so that a process that quarantine kills has had time for other
  messages.
- A refused subscription is tried again rarely: each refusal closes the channel, and running handlers are repeated.
"""

from __future__ import annotations

import enum
from math import inf
from typing import TYPE_CHECKING, Final

from reliable_mq._util.validation import SHORT_STRING_BYTES
from reliable_mq.core.consumer.attempts import broker_counts
from reliable_mq.errors import ConfigurationError
from reliable_mq.topology import DEFAULT, Queue
from reliable_mq.topology.arguments import DLX, DLX_KEY

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from reliable_mq.core.consumer.delivery import Delivery

#: The number of returns without a verdict from which a message is suspect. A neighbour may have caused the first.
SUSPECT_FROM: Final = 2
#: The same, for returns that may have been regular.
SUSPECT_FROM_ANY: Final = 10
AFTER: Final = 1.0  # seconds between the subscriptions to the queue and to its quarantine
FIRST_WAIT, LONGEST_WAIT = 60.0, 3600.0  # seconds from a refused subscription to the next one
QUARANTINE_SUFFIX: Final = ".quarantine"


class QuarantineState(enum.Enum):
    """The subscription of a consumer to quarantine."""

    NO_CHANNEL = "there is no channel"
    WAITING = "subscribes in a moment"
    SUBSCRIBED = "is subscribed"
    LEFT_OUT = "does not subscribe on this channel any more"


_S = QuarantineState
#: Event -> state before -> states after. For tests and documentation, not read at run time.
TRANSITIONS: Final[Mapping[str, Mapping[QuarantineState, set[QuarantineState]]]] = {
    "a channel is set up": {_S.NO_CHANNEL: {_S.WAITING}},
    "the moment is over": {_S.WAITING: {_S.SUBSCRIBED}},
    "the consumer stops, or the broker cancels it": {_S.WAITING: {_S.LEFT_OUT}},
    "the channel is lost": {state: {_S.NO_CHANNEL} for state in (_S.WAITING, _S.SUBSCRIBED, _S.LEFT_OUT)},
}
del _S


class Quarantine:
    """The evidence against the messages of a queue. Not thread-safe.

    Args:
        queue: The quarantine queue.
        consumer_tag: The tag of its subscription.
        single_active: Whether one consumer of the queue is active at a time.
    """

    def __init__(self, queue: Queue, consumer_tag: str, *, single_active: bool = False) -> None:
        self.queue = queue
        self.consumer_tag = consumer_tag
        #: Channels that this process has lost and survived, except over the consumer timeout.
        self.losses = 0
        #: Channels that it has lost and survived after a delivery from quarantine, unless that delivery timed out.
        self.forgiven = 0
        self._single_active = single_active
        self.state = QuarantineState.NO_CHANNEL
        self.deadline = inf  # when WAITING ends; infinity if unknown
        self._timed_out = False  # whether this process has seen the consumer timeout take a delivery back
        self._received = False  # whether a delivery has come from quarantine on this channel
        self._wait = FIRST_WAIT  # seconds after the next refusal
        self._refused_until = -inf

    @staticmethod
    def of(queue: Queue, *, single_active: bool = False) -> Queue:
        """Return the quarantine queue to declare beside ``queue``.

        Both have a single active consumer if ``single_active``. The quarantine dead-letters where ``queue`` does.
        Without a routing key of dead letters, they have the name of ``queue``, as those of messages that have waited in
        a delay queue do.

        Raises:
            ConfigurationError: If the name of the queue is too long for the name of its quarantine.
        """
        if len(queue.name.encode()) + len(QUARANTINE_SUFFIX) > SHORT_STRING_BYTES:
            raise ConfigurationError(
                f"the name of queue {queue.name!r} leaves no room for {QUARANTINE_SUFFIX!r}: shorten it"
            )
        exchange, key = (queue.arguments.get(name) for name in (DLX, DLX_KEY))
        routed = {} if exchange is None else {DLX: exchange, DLX_KEY: queue.name if key is None else key}
        return Queue(
            queue.name + QUARANTINE_SUFFIX,
            dead_letter=DEFAULT if routed else queue.dead_letter_name,
            single_active_consumer=single_active,
            arguments=routed,
        )

    def opened(self) -> None:
        """Begin with a channel."""
        self.state, self.deadline = QuarantineState.WAITING, inf

    def lost(self, timed_out: Collection[Delivery] | None = None) -> None:
        """Forget the channel.

        ``timed_out`` contains the dispatched deliveries over whose consumer timeout it was closed. It is None if it was
        closed for another reason, or over deliveries that waited in a pause of the kill switch.
        """
        self.losses += self.state is not QuarantineState.NO_CHANNEL and timed_out is None
        self.forgiven += self._received and not any(map(self.has, timed_out or ()))
        self.state, self.deadline, self._received = QuarantineState.NO_CHANNEL, inf, False

    def timed_out(self) -> None:
        """Record that the consumer timeout took a delivery back."""
        self._timed_out = True

    def ended(self) -> None:
        """Prevent a later subscription on this channel, because the consumer stops."""
        self.deadline = inf
        if self.state is QuarantineState.WAITING:
            self.state = QuarantineState.LEFT_OUT

    def subscribe(self, now: float) -> bool:
        """Return whether to subscribe now, True once per channel."""
        if self.state is not QuarantineState.WAITING:
            return False
        if self.deadline == inf:
            self.deadline = max(now + AFTER, self._refused_until)
        if now < self.deadline:
            return False
        self.state, self.deadline = QuarantineState.SUBSCRIBED, inf
        return True

    def refused(self, now: float) -> float:
        """Record a refused subscription. Return the seconds until the next one."""
        wait, self._wait = self._wait, min(2 * self._wait, LONGEST_WAIT)
        self._refused_until = now + wait
        return wait

    def has(self, delivery: Delivery) -> bool:
        """Return whether the delivery came from quarantine."""
        return delivery.consumer_tag == self.consumer_tag

    def received(self) -> int:
        """Record a delivery from quarantine. Return its number of forgiven returns."""
        self._received = True
        self._wait = FIRST_WAIT
        return self.forgiven

    def suspects(self, delivery: Delivery) -> bool:
        """Return whether to move a delivery of the queue to quarantine."""
        if not delivery.redelivered:
            return False
        if _crashes(delivery) >= SUSPECT_FROM + self.losses and not self._single_active:
            return True
        return returns(delivery) >= (SUSPECT_FROM if self._timed_out else SUSPECT_FROM_ANY) + self.losses


def returns(delivery: Delivery) -> int:
    """Return how often the broker counts a delivery as returned, 0 without a count."""
    return max(broker_counts(delivery.properties))


def failures_by_broker(delivery: Delivery) -> int:
    """Return the failed attempts by the count of a broker from 4.3 on.

    Lost consumers are included. A client can send this count until the broker sets it. It cannot forge the count of all
    returns, which the broker sets on every returned delivery and which is never lower, so the lower count is returned.
    """
    return min(broker_counts(delivery.properties))


def _crashes(delivery: Delivery) -> int:
    """Return how often the consumer was lost or rejected it, all returns up to 4.2."""
    failed, acquired = broker_counts(delivery.properties)
    return min(failed, acquired) if acquired else failed
