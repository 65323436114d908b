"""New quorum queues and streams of this process: no confirm of theirs is final.

RabbitMQ saves the registration of a quorum queue half a second to a second after it made the queue (4.0 and 4.3). A
node that is killed before that starts again with the queue empty, whatever it has confirmed. It saves what it knows of
streams as late after it made its first one: killed before that, it has lost the stream. So a message that is
confirmed in such a queue counts as unconfirmed until the node has answered several frames, the last of which was sent a
grace after the queue was made. That the time has passed here proves nothing: the node may have frozen, or its answers
may have waited in our own socket. Only the process that made the queue knows of it, so all of its connections share
that knowledge, and each proof of their age.

One answer proves nothing, however quick: it may be the first of a broker that was frozen until then, and has yet to
save its queues. Killed at that moment, RabbitMQ 4.3 lost them in five of five trials. Round trips with pauses, the
first a quarter of the grace after the queue was made, show that it has run for more than the second that it needs,
unless it freezes in several of the pauses.

Invariants: a queue is new from the moment before it is declared; a queue made or found again by another connection
never becomes older; a forgotten queue is older than every grace, by more than any answer takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from reliable_mq.core.headers import may_copy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from reliable_mq.message import Message

__all__ = ["KEPT", "NEW_QUEUE_GRACE", "NewQueueListener", "NewQueues", "is_copied"]

#: Seconds: twice the second after which no loss was ever seen.
NEW_QUEUE_GRACE: Final = 2.0

#: Seconds beyond the grace for which a queue is remembered: a connection without an answer for so long is replaced.
KEPT: Final = 300.0

_NEVER: Final = float("-inf")


class NewQueueListener(Protocol):
    """A listener to the queues that a set-up makes. It adds the time."""

    def begin(self, names: Collection[str], /) -> None:
        """Note queues before they are declared; they did not exist, as far as is known."""

    def end(self, names: Collection[str], /) -> None:
        """Note that they exist by now; after a failed set-up one may not have been made."""


class NewQueues:
    """The new queues of one virtual host. Not thread-safe: its users share a lock."""

    def __init__(self) -> None:
        #: When the newest queue was made, on the monotonic clock; infinite while one is being made, minus infinity if
        #: none is known. For any thread.
        self.latest = _NEVER
        self.longest = 0.0  # the longest grace of its users, seconds
        self._made: dict[str, float] = {}
        self._being_made: dict[str, int] = {}  # how many connections are declaring it
        self._proven: dict[tuple[str, float], float] = {}  # by broker and grace; see `prove`

    def begin(self, names: Iterable[str]) -> None:
        for name in names:
            self._being_made[name] = self._being_made.get(name, 0) + 1
        self._look()

    def end(self, names: Iterable[str], now: float) -> None:
        """Note that queues of `begin` are declared, or may be."""
        for name in names:
            others = self._being_made.pop(name, 1) - 1
            if others:
                self._being_made[name] = others
        self._add(names, now)

    def made(self, names: Iterable[str], now: float) -> None:
        """Note queues that were made at ``now`` at the latest."""
        self._add(names, now)

    def given_up(self, now: float) -> None:
        """Note that no declaration goes on: queues that were being made may exist."""
        names, self._being_made = list(self._being_made), {}
        self._add(names, now)

    def prove(self, broker: str, grace: float, moment: float) -> None:
        """Note that queues made ``grace`` seconds before ``moment`` are old.

        ``broker`` is the name that it reports: brokers whose cluster was given no name share one record.
        """
        if broker:
            self._proven[broker, grace] = max(moment, self.proven(broker, grace))

    def proven(self, broker: str, grace: float) -> float:
        """The latest moment of `prove`; minus infinity for none."""
        return self._proven.get((broker, grace), _NEVER)

    def new(self, proven: float, grace: float) -> list[str]:
        """The queues younger than ``grace`` seconds at ``proven``, or being made."""
        return [*self._being_made, *(name for name, at in self._made.items() if at + grace > proven)]

    def final_at(
        self, exchange: str, routing_key: str, now: float, proven: float, grace: float, *, copied: bool
    ) -> float | None:
        """Return when a confirm that came ``now`` is final; None if it is final now.

        It is final then if the broker still lives. The routing key names the queue on the default exchange; with
        another exchange, or a message that is copied to other queues, any new queue may have it. One that is being made
        may exist already.

        A ``copied`` message has a header that routes it elsewhere, too.
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
        self._made = {name: at for name, at in self._made.items() if at + self.longest + KEPT > now}
        self._look()

    def _look(self) -> None:
        self.latest = float("inf") if self._being_made else max(self._made.values(), default=_NEVER)


def is_copied(message: Message) -> bool:
    """Whether a message may have a header that routes it to further queues: CC, BCC."""
    try:
        properties = message.encoded_properties
    except Exception:  # noqa: BLE001  # of a user's own message, or a damaged one: it was encoded once
        return True
    return properties is not None and may_copy(properties)
