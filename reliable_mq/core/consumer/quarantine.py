"""The quarantine of a queue, for messages that may kill or hang their consumer.

It is a second queue, whose messages are handled one at a time. A message that kills its consumer comes again, and so do
all that were prefetched beside it. The broker counts how often (``x-delivery-count``); a message that has come back
twice without a result is suspect, or more often if this process has lost channels itself and lives, unless that was
over the consumer timeout. A suspect is moved, confirmed, to a queue of its own beside the first, which is consumed with
a prefetch of 1: there, a return is the message's own fault, and counts as a failed attempt. The next one follows after
its delay, and so does the first one there: without a delay, a killer would kill one consumer after the other, and its
neighbours would have none. So a killer is dispatched twice from its queue and ``max_attempts`` times from quarantine,
and then dead-lettered; its neighbours are dispatched twice beside it, then without it.

From 4.3 on, deliveries that a consumer requeues as it stops are counted in ``x-acquired-count`` alone, with every
return; so are those that the consumer timeout takes back. Only a process that has seen such a timeout suspects them as
soon; for others it takes more than a few restarts. Up to 4.2 there is one count of all returns, and two restarts count
as two crashes.

Invariants: the broker's counts are believed of deliveries only that the broker says are redelivered (a client can send
them itself; that costs a detour, no attempt); quarantine is subscribed to a moment after the queue is, so that a
process which quarantine kills has had time for the others.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

from reliable_mq.codec import CodecError, Properties
from reliable_mq.core.consumer.attempts import BROKER_COUNTS, whole
from reliable_mq.errors import ConfigurationError
from reliable_mq.topology import Queue
from reliable_mq.topology.arguments import SHORT_STRING_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from reliable_mq.core.consumer.delivery import Delivery

__all__ = ["QUARANTINE_SUFFIX", "TRANSITIONS", "Quarantine", "QuarantineState", "failures_by_broker", "returns"]

#: Returns without a verdict from which on a message is suspect; the first may be a neighbour's doing.
SUSPECT_FROM: Final = 2
#: The same, of returns that may have been in good order.
SUSPECT_FROM_ANY: Final = 10
AFTER: Final = 1.0  # seconds from the subscription to the queue to that to its quarantine
QUARANTINE_SUFFIX: Final = ".quarantine"


class QuarantineState(enum.Enum):
    """Whether a consumer is subscribed to quarantine."""

    NO_CHANNEL = "there is no channel"
    WAITING = "subscribes in a moment"
    SUBSCRIBED = "is subscribed"
    LEFT_OUT = "does not subscribe on this channel any more"


_S = QuarantineState
#: Event -> state before -> states after. For tests and documentation, not read at run time.
TRANSITIONS: Final[Mapping[str, Mapping[QuarantineState, set[QuarantineState]]]] = {
    "a channel is set up": {_S.NO_CHANNEL: {_S.WAITING}},
    "the moment is over": {_S.WAITING: {_S.SUBSCRIBED}},
    "the consumer stops": {_S.WAITING: {_S.LEFT_OUT}},
    "the channel is lost": {state: {_S.NO_CHANNEL} for state in (_S.WAITING, _S.SUBSCRIBED, _S.LEFT_OUT)},
}
del _S


class Quarantine:
    """The evidence against the messages of a queue. Not thread-safe."""

    def __init__(self, queue: Queue, consumer_tag: str) -> None:
        self.queue = queue
        self.consumer_tag = consumer_tag
        #: Channels that this process has lost, and lives, unless a delivery had been unacked for too long.
        self.losses = 0
        #: Those that it has lost, and lives, after something came from quarantine, unless they were lost for that.
        self.forgiven = 0
        self.state = QuarantineState.NO_CHANNEL
        self.deadline: float | None = None  # when WAITING ends; None if that is not known yet
        self._timed_out = False  # this process has seen the consumer timeout take a delivery back
        self._received = False  # a delivery has come from quarantine on this channel

    @staticmethod
    def of(queue: Queue) -> Queue:
        """Return the queue to declare beside this one.

        Raises:
            ConfigurationError: the name leaves no room for its own.
        """
        if len(queue.name.encode()) + len(QUARANTINE_SUFFIX) > SHORT_STRING_BYTES:
            raise ConfigurationError(
                f"the name of queue {queue.name!r} leaves no room for {QUARANTINE_SUFFIX!r}: shorten it"
            )
        return Queue(
            queue.name + QUARANTINE_SUFFIX,
            dead_letter=queue.dead_letter_name,
            single_active_consumer=queue.single_active_consumer,
        )

    def opened(self) -> None:
        """Begin with a channel."""
        self.state, self.deadline = QuarantineState.WAITING, None

    def lost(self, timed_out: Collection[Delivery] | None = None) -> None:
        """Forget the channel; ``timed_out``: the deliveries for which it was closed."""
        self.losses += self.state is not QuarantineState.NO_CHANNEL and timed_out is None
        self.forgiven += self._received and not any(map(self.has, timed_out or ()))
        self.state, self.deadline, self._received = QuarantineState.NO_CHANNEL, None, False

    def timed_out(self) -> None:
        """Note that the consumer timeout took a delivery back."""
        self._timed_out = True

    def ended(self) -> None:
        """Subscribe to quarantine no more on this channel: the consumer is stopping."""
        self.deadline = None
        if self.state is QuarantineState.WAITING:
            self.state = QuarantineState.LEFT_OUT

    def subscribe(self, now: float) -> bool:
        """Whether to subscribe now; true once per channel."""
        if self.state is not QuarantineState.WAITING:
            return False
        if self.deadline is None:
            self.deadline = now + AFTER
        if now < self.deadline:
            return False
        self.state, self.deadline = QuarantineState.SUBSCRIBED, None
        return True

    def has(self, delivery: Delivery) -> bool:
        """Whether the delivery came from quarantine."""
        return delivery.consumer_tag == self.consumer_tag

    def received(self) -> int:
        """Note a delivery from quarantine. Return how many of its returns count as none."""
        self._received = True
        return self.forgiven

    def suspects(self, delivery: Delivery) -> bool:
        """Whether to move a delivery of the queue to quarantine."""
        if not delivery.redelivered:
            return False
        if _crashes(delivery) >= SUSPECT_FROM + self.losses:
            return True
        return returns(delivery) >= (SUSPECT_FROM if self._timed_out else SUSPECT_FROM_ANY) + self.losses


def returns(delivery: Delivery) -> int:
    """Return how often a delivery came back, by the broker's count; 0 without one."""
    return max(_counts(delivery))


def failures_by_broker(delivery: Delivery) -> int:
    """Return the failed attempts by the count of a broker from 4.3 on.

    Lost consumers are included. A client can send that count, until the broker has one; but not one of returns beside
    it, which a delivery that came back always has from the broker, and which is never less.
    """
    return min(_counts(delivery))


def _crashes(delivery: Delivery) -> int:
    """Return how often its consumer was lost or rejected it; up to 4.2, all returns."""
    failed, acquired = _counts(delivery)
    return min(failed, acquired) if acquired else failed


def _counts(delivery: Delivery) -> tuple[int, int]:
    """Read the counts of the broker."""
    view = Properties(delivery.properties)
    try:
        failed, acquired = (whole(view.headers_beginning(name).get(name)) for name in BROKER_COUNTS)
    except CodecError:
        return 0, 0
    return failed, acquired
