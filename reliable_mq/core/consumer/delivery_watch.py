"""A watch for a consumer that gets no deliveries, though messages are ready.

The member of a quorum queue on the consumer's own node delivers, if the queue has one there. If it does not run, the
leader assigns messages to the consumer, as many as its prefetch, and nobody delivers them. Both sides see a healthy
subscription, which would wait forever. On another node, or on one without a member, the consumer gets all messages.

Such a consumer has had no delivery for a while, owes the broker nothing, and its queue has ready messages, again and
again. A consumer that works gets ready messages at once, unless they are for another one, or for later: so the watch is
for a quorum queue that is known not to have a single active consumer, and not to delay retries itself.

A queue with fewer messages than the prefetch shows nothing, because all of them are assigned, and none is ready. Over
AMQP, it cannot be told from a queue whose messages are handled elsewhere. The consumer waits until more have come.

Invariants of `DeliveryWatch`:

- It asks for a new connection only after two counts, `CHECK_EVERY` seconds apart, with ready messages, and no delivery
  since the check before the first of them.
- A delivery that is unsettled means that the broker delivers: the consumer may be busy, full or paused.
- Without a delivery, it asks once for each host at most, however long messages stay ready.
- It counts only for a consumer without deliveries: none is counted while messages flow.
"""

from __future__ import annotations

from typing import Final

CHECK_EVERY: Final = 60.0  # seconds between two checks
_IN_A_ROW: Final = 2  # counts with ready messages


class DeliveryWatch:
    """The deliveries of one consumer. Not thread-safe.

    The caller checks every `CHECK_EVERY` seconds while the consumer is subscribed.

    ``delivered`` is the number of all deliveries that the consumer has had, on whichever channel.

    Args:
        hosts: The number of hosts that the consumer can connect to.
    """

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._left = hosts  # reconnections until the next delivery
        self._delivered = 0  # at the last check
        self._ready = 0  # counts in a row with ready messages

    def subscribed(self, delivered: int) -> None:
        """Begin anew with another subscription."""
        self._saw(delivered)
        self._ready = 0

    def check(self, delivered: int, outstanding: int) -> bool:
        """Return whether to count the ready messages, and to report them as `counted`.

        ``outstanding`` is the number of deliveries that are not settled.
        """
        quiet = not self._saw(delivered) and not outstanding
        if not quiet:
            self._ready = 0
        return quiet and self._left > 0

    def counted(self, ready: int, delivered: int) -> bool:
        """Return whether to connect anew, preferably to another host."""
        if self._saw(delivered) or not ready:
            self._ready = 0
            return False
        self._ready += 1
        if self._ready < _IN_A_ROW:
            return False
        self._ready = 0
        self._left -= 1
        return True

    def _saw(self, delivered: int) -> bool:
        """Return whether there were deliveries since the last call."""
        news = delivered != self._delivered
        if news:
            self._delivered, self._left = delivered, self._hosts
        return news
