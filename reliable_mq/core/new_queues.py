"""The record of new quorum queues and streams, whose confirms are not final.

RabbitMQ (4.0 and 4.3) saves the registration of a quorum queue half a second to a second after it made the queue. A
node that is killed before that restarts with an empty queue, despite its confirms. It saves its record of streams
equally late after it made its first stream, and loses the stream if it is killed before that. So a message confirmed in
such a queue counts as unconfirmed until the node has answered several frames, the last of which was sent a grace after
the queue was made. The passage of time in this process proves nothing: the node may have frozen, or its answers may
have waited in our own socket. Only the process that made the queue knows that it is new, so all connections of the
process share this record and every proof of a queue's age.

A single answer proves nothing. It may be the first answer of a broker that was frozen until then and has not saved its
queues. Round trips with pauses between them, the first a quarter of the grace after the queue was made, show that the
broker has run for more than the second that it needs, unless it freezes in several of the pauses.

Invariants:

- A queue is new from the moment before it is declared.
- A queue that another connection makes or finds again never becomes older.
- A forgotten queue is older than every grace, by more than the time that any answer takes.
- The cost of a queue does not depend on the number of others: a program may declare thousands, one by one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol

from reliable_mq.core.headers import may_copy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from reliable_mq.message import Message

#: In seconds. No loss was ever seen after one second; the grace is twice that.
NEW_QUEUE_GRACE: Final = 2.0

#: The seconds beyond the grace for which a queue is remembered. A connection without an answer for so long is replaced.
KEPT: Final = 300.0

_NEVER: Final = float("-inf")


class NewQueueListener(Protocol):
    """A listener to the queues that a set-up makes, which adds the time."""

    def begin(self, names: Collection[str], /) -> None:
        """Record queues before they are declared, none of which is known to exist."""

    def end(self, names: Collection[str], /) -> None:
        """Record that the queues exist, or may exist after a failed set-up."""


class NewQueues:
    """The new queues of one virtual host.

    Not thread-safe: the connections that share the record hold a lock.
    """

    def __init__(self) -> None:
        #: When the newest queue was made, on the monotonic clock: infinity while a queue is being made, minus infinity
        #: if none is known. Any thread may read it.
        self.latest = _NEVER
        self.longest = 0.0  # the longest grace of its users, seconds
        self._made: OrderedDict[str, float] = OrderedDict()  # in the order of the calls, nearly that of the times
        self._newest = _NEVER  # the latest of these times
        self._being_made: dict[str, int] = {}  # the number of connections that are declaring each queue
        self._proven: dict[tuple[str, float], float] = {}  # by broker and grace; see `prove`

    def begin(self, names: Iterable[str]) -> None:
        for name in names:
            self._being_made[name] = self._being_made.get(name, 0) + 1
        self._update_latest()

    def end(self, names: Iterable[str], now: float) -> None:
        """Record that queues of `begin` are declared, or may be."""
        for name in names:
            others = self._being_made.pop(name, 1) - 1
            if others:
                self._being_made[name] = others
        self._add(names, now)

    def made(self, names: Iterable[str], now: float) -> None:
        """Record queues that were made at ``now`` at the latest."""
        self._add(names, now)

    def given_up(self, now: float) -> None:
        """Record that no declaration is in progress. Their queues may exist."""
        names, self._being_made = list(self._being_made), {}
        self._add(names, now)

    def prove(self, broker: str, grace: float, moment: float) -> None:
        """Record that queues made ``grace`` seconds before ``moment`` are old.

        ``broker`` is the name that the broker reports. It separates the proofs of brokers whose cluster was given no
        name, because these share one record.
        """
        if broker:
            self._proven[broker, grace] = max(moment, self.proven(broker, grace))

    def proven(self, broker: str, grace: float) -> float:
        """Return the latest moment given to `prove`, minus infinity without one."""
        return self._proven.get((broker, grace), _NEVER)

    def new(self, proven: float, grace: float) -> list[str]:
        """Return queues being made, or younger than ``grace`` seconds at ``proven``."""
        return [*self._being_made, *(name for name, at in self._made.items() if at + grace > proven)]

    def final_at(
        self, exchange: str, routing_key: str, now: float, proven: float, grace: float, *, copied: bool
    ) -> float | None:
        """Return when a confirm received ``now`` is final, or None if it is final now.

        At the returned time the confirm is final only if the broker still lives. On the default exchange, the routing
        key names the queue. With another exchange, or for a ``copied`` message, which has a header that also routes it
        elsewhere, any new queue may have the message. A queue that is being made may already exist.
        """
        if exchange or copied:
            at = now if self._being_made else self.latest
        elif routing_key in self._being_made:
            at = now
        else:
            at = self._made.get(routing_key, _NEVER)
        return at + grace if at + grace > proven else None

    def _add(self, names: Iterable[str], now: float) -> None:
        for name in names:
            self._made[name] = max(now, self._made.get(name, now))
            self._made.move_to_end(name)
            self._newest = max(self._newest, now)
        while self._made and self._made[next(iter(self._made))] + self.longest + KEPT <= now:
            self._made.popitem(last=False)
        self._update_latest()

    def _update_latest(self) -> None:
        if self._being_made:
            self.latest = float("inf")
        else:
            self.latest = self._newest if self._made else _NEVER


def is_copied(message: Message) -> bool:
    """Return whether CC or BCC headers may route a message to further queues."""
    try:
        properties = message.encoded_properties
    except Exception:  # noqa: BLE001  # of a user's own message, or a damaged one: it was encoded once
        return True
    return properties is not None and may_copy(properties)
