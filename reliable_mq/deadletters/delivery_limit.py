"""The delivery limit of a queue: refuse to read before RabbitMQ drops messages.

A quorum queue drops a message that was returned more often than its delivery limit, or dead-letters it. Up to RabbitMQ
4.2, each return counts, also at the end of an operation that was refused. From 4.3 on, only the return by a lost
connection or channel counts. The limit is an argument of the queue, which the broker names when it refuses a
declaration that differs. A policy may set a lower limit, which no client can query.

Invariant: without such a policy, a message that only this package has read is not dropped before operations were
refused, and from 4.3 on not by refused operations. In older versions, `_REFUSALS` of them drop no message, or one less
than the limit if that is lower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from reliable_mq.codec.methods import DeclareQueue
from reliable_mq.deadletters.message import DeadMessage
from reliable_mq.errors import ConsumeError
from reliable_mq.topology.arguments import ARGUMENTS

_LIMIT: Final = ARGUMENTS["x-delivery-limit"]
_ASSUMED: Final = 20  # if the arguments are unknown: RabbitMQ's default
_NOT_COUNTED: Final = (4, 3)  # the first version that does not count a requeue
_REFUSED_AT: Final = 16  # counted returns, whatever the limit is: a policy may set a lower one
_REFUSALS: Final = 4  # refused operations that drop no message, although each of them counts


@dataclass(frozen=True, slots=True)
class DeliveryLimit:
    """The delivery limit of a queue, and whether reads count against it.

    Args:
        queue: The name of the queue.
        limit: The limit of its arguments, or RabbitMQ's default; None if it certainly has none.
        version: The version of the broker.
        quorum: Whether it is certainly a quorum queue.
    """

    queue: str
    limit: int | None = None
    version: tuple[int, ...] = ()
    quorum: bool = False

    @classmethod
    def of(cls, queue: str, version: tuple[int, ...], declared: DeclareQueue | None) -> DeliveryLimit:
        """Return the limit of a queue that was declared so, or in an unknown way."""
        if declared is None:
            return cls(queue, _ASSUMED, version)
        if declared.arguments.get("x-queue-type", "classic") != "quorum":
            return cls(queue, None, version)
        limit = declared.arguments.get(_LIMIT.name, _LIMIT.default_on(version))
        return cls(queue, limit if isinstance(limit, int) and limit >= 0 else None, version, quorum=True)

    @property
    def counts_reads(self) -> bool:
        """Whether RabbitMQ may count each read against the limit."""
        return self.limit is not None and self.version < _NOT_COUNTED

    @property
    def counts_lost_connections(self) -> bool:
        """Whether RabbitMQ certainly counts lost connections, and no requeues."""
        return self.quorum and self.version >= _NOT_COUNTED

    def check(self, messages: Sequence[DeadMessage] = ()) -> None:
        """Refuse to continue if returning the messages may soon drop them.

        Without messages, refuse if any message might be dropped by its first return.

        Raises:
            ConsumeError: If a message was returned nearly as often as the limit allows.
        """
        if self.limit is None:
            return
        # At its first delivery, a message may have the count of another queue, from which a client has moved it.
        most = max((message.delivery_count for message in messages if message.redelivered), default=0)
        if most >= self._refused_at(self.limit):
            counted = "each read" if self.counts_reads else "each lost connection"
            raise ConsumeError(
                f"reading queue {self.queue!r} might soon drop messages: RabbitMQ {'.'.join(map(str, self.version))} "
                f"counts {counted} against the queue's delivery limit ({self.limit}, unless a policy sets another), "
                f"and the highest count is {most}; move the messages to a queue without a limit, for example with a "
                "shovel"
            )

    def _refused_at(self, limit: int) -> int:
        """Return the lowest number of counted returns at which to refuse."""
        refusals = _REFUSALS if self.counts_reads else 1
        lowest = 2 if self.counts_reads else 1  # below, the first refused operation would drop messages
        return min(_REFUSED_AT, max(limit - refusals, 1)) if limit >= lowest else 0
