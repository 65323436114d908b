"""Counts of a queue, to find whether it is empty or has other consumers. No I/O.

AMQP shows the number of ready messages and the number of consumers of a queue. It shows neither the unacked messages
nor whether the queue has a single active consumer. Another consumer may be the active one, or become it when the relay
changes its subscription, so a warning about other consumers is valid for such queues too. A quorum queue counts a
cancelled consumer until its deliveries are acked. With a single active consumer, it only counts that one.

RabbitMQ reports 0 messages and 0 consumers for a quorum queue whose leader does not respond. The relay is a consumer of
the queue, so such a count is ignored. When the channel is set up, the relay is not a consumer yet. If that count is in
doubt, the first count after the subscription decides. The number of messages on their way then is not known, and taken
to be the prefetch.

The counts of a quorum queue come from its leader, and the deliveries from the member on the relay's node, which may lag
behind. So messages may be on their way though two counts in a row find none. A new subscription shows it: the leader
counts the one before as long as it has unacked deliveries. When these arrive, the node returns them, and the leader
delivers them to the new one. So the queue is counted between the two subscriptions, too, and a new one that is counted
alone only later may have messages on their way itself.

Invariants:

- A queue is empty only after two counts in a row, with no delivery between them, and after a new subscription. No
  consumer is counted before it, and only itself at first, apart from consumers that were there at the set-up.
- A warning about other consumers is given once until they are gone, and only after two counts in a row, since a
  consumer that has just ended may be counted once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from reliable_mq.codec.methods import QueueState

_IN_A_ROW: Final = 2


class QueueCounts:
    """The counts of one queue. Not thread-safe.

    ``moved`` is the number of messages moved since the relay began.

    Attributes:
        ready: The number of ready messages by the last count, None before the first.
        shared: Whether the queue had other consumers when the channel was set up. One of them may be an earlier relay
            that is gone: RabbitMQ 4.3 requeues the deliveries of a node that is away only after a minute.
    """

    def __init__(self) -> None:
        self.ready: int | None = None
        self.shared = False
        self._ready_before: int | None = 0  # ready messages when the channel was set up; None if in doubt
        self._granted = 0  # the prefetch of the newest subscription of the channel
        self._moved_before = 0  # moved messages when the relay became active
        self._empty = 0  # empty counts in a row
        self._renewed = False  # whether the subscription was renewed since the last delivery
        self._free = False  # whether nothing was counted before that which the earlier subscription may have had
        self._alone = False  # whether no more consumers were counted after that than those found, and the relay
        self._others: int | None = None  # other consumers when a channel was set up, the fewest
        self._delivered = 0
        self._delivered_before = 0  # deliveries at the last count
        self._own_until = 0  # moved messages until which cancelled consumers of the relay may be counted
        self._crowded = 0  # counts in a row with other consumers
        self._warned = False

    def set_up(self, count: QueueState) -> None:
        """Record the count when a channel is set up."""
        self.ready = count.messages
        self._ready_before = None if count.in_doubt else count.messages
        self._delivered = self._delivered_before = 0
        self._granted = 0
        if not count.in_doubt:
            self._found(count.consumers)
        self._renewed = self._alone = False

    def activated(self, moved: int) -> None:
        """Record that the relay became active."""
        self._moved_before = moved
        self._empty = 0

    def delivered(self, number: int) -> None:
        self._delivered += number
        self._renewed = self._alone = False

    def renewed(self, between: QueueState) -> None:
        """Record a new subscription of a seemingly empty queue; ``between`` precedes it."""
        self._renewed, self._alone = True, False
        self._free = not between.messages and between.consumers <= (self._others or 0)

    def subscribed(self, moved: int, outstanding: int, prefetch: int) -> None:
        """Record a new subscription. Earlier ones end with the outstanding deliveries."""
        self._own_until = moved + outstanding
        self._granted = prefetch

    def counted(self, count: QueueState, outstanding: int) -> None:
        """Record the messages of a count after the subscription."""
        if count.in_doubt:
            return
        ready = count.messages
        if self._ready_before is None:
            self._ready_before = ready + self._delivered + self._granted
            self._found(count.consumers - bool(self._granted))
        empty = not ready and not outstanding and self._delivered == self._delivered_before
        self._delivered_before = self._delivered
        self._empty = self._empty + 1 if empty else 0
        alone = count.consumers <= 1 + (self._others or 0)
        self._free = self._free and alone
        self._alone = self._renewed and self._free
        self._renewed = self._renewed and (self._free or not alone)
        self.ready = ready

    def _found(self, others: int) -> None:
        self.shared = others > 0
        self._others = others if self._others is None else min(self._others, others)

    def others(self, consumers: int, moved: int, *, subscribed: bool) -> int:
        """Record the consumers of a count. Return the number of others to warn about.

        ``subscribed`` means that the relay is one of them and is not changing its subscription.
        """
        own = moved < self._own_until or (self._renewed and not self._alone)
        if not subscribed or own or not consumers:  # a count without the relay does not come from the leader
            self._crowded = 0
            return 0
        if consumers <= 1:
            self._crowded, self._warned = 0, False
            return 0
        self._crowded += 1
        if self._crowded < _IN_A_ROW or self._warned:
            return 0
        self._warned = True
        return consumers - 1

    @property
    def unknown(self) -> bool:
        """Whether the number of messages that were ready at the set-up is not known yet."""
        return self._ready_before is None

    @property
    def wants_count(self) -> bool:
        """Whether the first count of a new subscription matters."""
        return self.unknown or (self._renewed and not self._alone)

    @property
    def wants_renewal(self) -> bool:
        """Whether only a new subscription shows if the queue is empty."""
        return self._empty >= _IN_A_ROW and not self._renewed

    @property
    def drained(self) -> bool:
        """Whether the queue had no message, ready or unacked."""
        return self._empty >= _IN_A_ROW and self._alone

    def has_moved(self, moved: int) -> bool:
        """Return whether the messages that were ready at activation are moved.

        Other consumers may have received some of them, so an empty queue counts too.
        """
        known = self._ready_before is not None and moved - self._moved_before >= self._ready_before
        return self.drained or known
