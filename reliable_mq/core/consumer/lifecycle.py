"""The life of a consumer, from its subscription to the end of its connection.

`TRANSITIONS` lists all changes of state. A consumer that stops first cancels its subscription. It requeues deliveries
only after that, or the broker would deliver them here again. A set-up in progress cancels the subscription that it has
made. Before the consumer sends anything, it waits for a moment: if quick handlers end meanwhile, one frame settles all
deliveries, instead of one frame each.

Invariants:

- A single active consumer keeps its role while a delivery is unacked, unless its channel is lost. Its stop does not
  cancel the subscription and requeues nothing. When its handlers have ended, closing the connection returns the
  remaining deliveries and passes the role on in one step, so that the next consumer begins with the oldest delivery.
  For the same reason, a new prefetch waits until nothing is unacked.
- After the broker has cancelled one of several subscriptions, nothing is requeued to another one, which would get it
  again at once. Closing the channel returns it.
- Nothing is sent from the stop until the subscription has ended.
- Every state in which a consumer waits for its handlers or for the broker ends by a timer at the latest.
- A consumer ends once, and needs no timer after that.
"""

from __future__ import annotations

import enum
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CANCEL_WAIT: Final = 1.0  # seconds that a stop waits for cancel-ok, if `stop_timeout` is shorter
PAUSE: Final = 0.1  # seconds that a stop waits for quick handlers before it requeues the rest
LINGER: Final = 0.3  # seconds before the channel is closed after many acks, or for another prefetch
#: Many acks. RabbitMQ's channel passes 32 of them on to a quorum queue before it waits, and drops the rest when closed.
_BURST_BYTES, _BURST_SECONDS = 16 * 21, 1.0


class ConsumerState(enum.Enum):
    """The phase of a consumer's life."""

    SUBSCRIBED = "deliveries are dispatched; without a channel, the next one is waited for"
    RESUBSCRIBING = "the broker cancelled the subscription: waits for running handlers, then for another channel"
    CANCELLING = "stopping: waits for cancel-ok; the broker may still deliver, and nothing is sent"
    SETTLING = "stopping: no more deliveries come; waits a moment for quick handlers, and sends nothing yet"
    STOPPING = "stopping: acks and requeues are sent; waits for running handlers"
    LINGERING = "nothing runs: waits for RabbitMQ to pass many acks on to the queue"
    ENDED = "the connection is closed"


_S = ConsumerState
#: Event -> state before -> states after. For tests and documentation, not read at run time.
TRANSITIONS: Final[Mapping[str, Mapping[ConsumerState, set[ConsumerState]]]] = {
    "the broker cancels": {_S.SUBSCRIBED: {_S.RESUBSCRIBING}},
    "a channel is set up": {_S.RESUBSCRIBING: {_S.SUBSCRIBED}},
    "stop": {_S.SUBSCRIBED: {_S.CANCELLING}},
    "stop without a subscription, or as the single active consumer": {
        _S.SUBSCRIBED: {_S.STOPPING},
        _S.RESUBSCRIBING: {_S.STOPPING},
    },
    "cancel-ok, or the channel is lost": {_S.CANCELLING: {_S.SETTLING}},
    "nothing runs, or the pause is over": {_S.SETTLING: {_S.STOPPING}},
    "nothing runs": {_S.STOPPING: {_S.ENDED}},
    "nothing runs, and many acks were sent": {_S.STOPPING: {_S.LINGERING}},
    "stop_timeout is over": {state: {_S.ENDED} for state in (_S.CANCELLING, _S.SETTLING, _S.STOPPING)},
    "the wait is over": {_S.LINGERING: {_S.ENDED}},
    "an error for good, or a second signal": {state: {_S.ENDED} for state in _S if state is not _S.ENDED},
}
_STOPPING: Final = frozenset({_S.CANCELLING, _S.SETTLING, _S.STOPPING, _S.LINGERING, _S.ENDED})
_SILENT: Final = frozenset({_S.CANCELLING, _S.SETTLING})


class ChannelStep(enum.Enum):
    """A change of the open channel, or of its subscriptions."""

    UNSUBSCRIBE = "cancel the subscriptions; `unsubscribed` follows, or `lost`"
    SUBSCRIBE_TO_QUARANTINE = "subscribe to the quarantine of the queue, too"
    REOPEN = "close the channel, and open another one"


class Resubscribe(NamedTuple):
    """A new subscription on the open channel, with another prefetch."""

    before: str  # the consumer tag to cancel
    consumer_tag: str
    prefetch: int


#: A change to carry out.
SubscriptionChange: TypeAlias = ChannelStep | Resubscribe


class ConsumerLifecycle:
    """The state of one consumer. Not thread-safe. ``now`` is a monotonic clock.

    Args:
        stop_timeout: The maximum seconds that a stop waits for running handlers.
        single_active: Whether the queue has one active consumer at a time.
        subscribes: False for a consumer that pulls each delivery (``basic.get``).
    """

    def __init__(
        self,
        *,
        consumer_tag: str = "",
        prefetch: int = 0,
        stop_timeout: float = 30.0,
        single_active: bool = False,
        subscribes: bool = True,
    ) -> None:
        self.state = ConsumerState.SUBSCRIBED
        self.connected = False  # whether a channel is set up, and the consumer neither stops nor was cancelled
        self._open = False  # whether a channel is set up, and no reopening was requested
        self._keeps_role = False  # whether the stop is that of the single active consumer
        self._cancelled: str | None = None  # the tag of the subscription of this channel that the broker cancelled
        self.consumer_tag = consumer_tag  # the tag of the newest subscription
        self.gave_up = False  # whether it ended because `stop_timeout` was over
        self._stop_timeout = stop_timeout
        self._single_active = single_active
        self.subscribes: Final = subscribes
        self.prefetch = self._wanted = prefetch  # of the newest and of the next subscription; 0 for none
        self._patience = inf  # when the wait for running handlers ends
        self._cancel_by = 0.0  # until when a stop waits for cancel-ok at least
        self._pause = inf  # when SETTLING or LINGERING ends
        self._renewal = inf  # when the channel is reopened for a new prefetch, if it is still idle
        self._burst_at = 0.0
        self._burst = 0  # bytes sent since _burst_at
        self._changes: list[SubscriptionChange] = []

    # Events

    def opened(self) -> None:
        """Record that a channel is set up, and subscribed unless the consumer stops."""
        self._open = True
        if self.state is ConsumerState.RESUBSCRIBING:
            self.state = ConsumerState.SUBSCRIBED
            self._patience = inf
        if self.state is ConsumerState.SUBSCRIBED:
            self.connected = True
            if self.prefetch != self._wanted:
                self.change_prefetch(self._wanted)

    def lost(self) -> None:
        self.connected = self._open = False
        self._cancelled = None
        self._changes.clear()
        if self.state is ConsumerState.CANCELLING:
            self.unsubscribed(-inf)  # there is nothing to wait for

    def cancelled(self, consumer_tag: str, now: float) -> bool:
        """Record that the broker cancelled a subscription. Return False if not news."""
        if self.state is not ConsumerState.SUBSCRIBED:
            return False
        self.state = ConsumerState.RESUBSCRIBING
        self._cancelled = consumer_tag
        self.connected = False
        self._changes.clear()
        self._patience = now + self._stop_timeout
        return True

    def stop(self, now: float) -> bool:
        """Begin to stop. Return False if the stop has begun before."""
        if self.state in _STOPPING:
            return False
        self._changes.clear()
        self._keeps_role = self.is_single_active
        if self.subscribed and not self._keeps_role:
            self.state = ConsumerState.CANCELLING
            self._changes.append(ChannelStep.UNSUBSCRIBE)
        else:
            self.state = ConsumerState.STOPPING
        self.connected = False
        self._patience, self._cancel_by = now + self._stop_timeout, now + CANCEL_WAIT
        return True

    def unsubscribed(self, now: float) -> None:
        """Record that the subscription has ended, as requested."""
        if self.state is ConsumerState.CANCELLING:
            self.state = ConsumerState.SETTLING
            self._pause = now + PAUSE

    def end(self) -> None:
        self.state = ConsumerState.ENDED
        self.connected = False
        self._changes.clear()
        self._patience = self._pause = self._renewal = inf

    def sent(self, size: int, now: float) -> None:
        if now - self._burst_at > _BURST_SECONDS:
            self._burst_at, self._burst = now, 0
        self._burst += size

    # The prefetch

    def subscribing(self, prefetch: int) -> None:
        """Record that a new channel is being subscribed with this prefetch."""
        self.prefetch = self._wanted = prefetch

    def change_prefetch(self, prefetch: int) -> bool:
        """Renew the subscription with this prefetch.

        Return False if that waits until nothing is unacked.
        """
        if prefetch == self.prefetch == self._wanted:
            return True  # a new subscription would add a whole prefetch of unacked deliveries
        self._wanted = prefetch
        if self.is_single_active:
            return False
        if self.subscribed:  # otherwise `opened` compares it with the prefetch that was sent to the broker
            self.prefetch = prefetch
            before, self.consumer_tag = self.consumer_tag, _next_tag(self.consumer_tag)
            self._changes.append(Resubscribe(before, self.consumer_tag, prefetch))
        return True

    @property
    def is_single_active(self) -> bool:
        """Whether this is the single active consumer, which a new subscription would end."""
        return self.subscribed and self._single_active

    @property
    def subscribed(self) -> bool:
        """Whether the broker delivers on the open channel."""
        return self.subscribes and self.connected

    def subscribe_to_quarantine(self) -> None:
        self._changes.append(ChannelStep.SUBSCRIBE_TO_QUARANTINE)

    # Progress

    def tick(self, now: float, *, drained: bool) -> None:
        """Advance the timers to ``now``, before data is sent.

        ``drained`` means that nothing is dispatched, waits for dispatch, or is being published.
        """
        nothing_left = drained and self.state in (ConsumerState.SETTLING, ConsumerState.STOPPING)
        if now >= self._waits_until and not nothing_left:
            self._patience = inf
            if self.state is ConsumerState.RESUBSCRIBING:
                self._reopen()
            else:
                self.gave_up = True
                self.end()
        elif self.state is ConsumerState.SETTLING:
            if drained or now >= self._pause:
                self.state, self._pause = ConsumerState.STOPPING, inf
        elif self.state is ConsumerState.LINGERING and now >= self._pause:
            self.end()

    def advance(self, now: float, *, drained: bool, unacked: bool) -> Sequence[SubscriptionChange]:
        """Take the next steps after data was sent. Return changes of the subscription."""
        if drained and self.state is ConsumerState.RESUBSCRIBING:
            self._reopen()
        elif drained and self.state is ConsumerState.STOPPING:
            if self._burst <= _BURST_BYTES:
                self.end()
            else:
                self.state, self._pause, self._patience = ConsumerState.LINGERING, now + LINGER, inf
        if self.prefetch != self._wanted or self._renewal < inf:
            self._renew_when_idle(now, unacked=unacked)
        changes, self._changes = self._changes, []
        return changes

    @property
    def steady(self) -> bool:
        """Whether the consumer only needs to dispatch and to send."""
        return (
            self.state is ConsumerState.SUBSCRIBED
            and self.prefetch == self._wanted
            and not self._changes
            and self._renewal == inf
        )

    @property
    def consuming(self) -> bool:
        """Whether deliveries are dispatched. Otherwise they are requeued."""
        return self.state is ConsumerState.SUBSCRIBED

    def keeps(self, consumer_tag: str) -> bool:
        """Return whether deliveries of this subscription are not requeued.

        They stay unacked until the channel is closed, which requeues them in one step.
        """
        return self._keeps_role or self._cancelled not in (None, consumer_tag)

    @property
    def stopping(self) -> bool:
        return self.state in _STOPPING

    @property
    def silent(self) -> bool:
        return self.state in _SILENT

    @property
    def deadline(self) -> float:
        """The time to call `tick` if no event comes first, infinity for never."""
        return min(self._waits_until, self._pause, self._renewal)

    @property
    def _waits_until(self) -> float:
        """The time when it gives up on handlers or cancel-ok, infinity for never."""
        return max(self._patience, self._cancel_by) if self.state is ConsumerState.CANCELLING else self._patience

    def _renew_when_idle(self, now: float, *, unacked: bool) -> None:
        """Reopen the channel after an idle moment, since it loses acks on their way."""
        idle = self.state is ConsumerState.SUBSCRIBED and self.subscribed and not unacked
        if not idle or self.prefetch == self._wanted:
            self._renewal = inf
        elif self._renewal == inf:
            self._renewal = now + LINGER
        elif now >= self._renewal:
            self._renewal = inf
            self._reopen()

    def _reopen(self) -> None:
        if self._open:
            self._open = False
            self._changes.append(ChannelStep.REOPEN)


def _next_tag(consumer_tag: str) -> str:
    name, _, number = consumer_tag.rpartition("#")
    return f"{name}#{int(number) + 1}" if name and number.isdecimal() else f"{consumer_tag}#2"
