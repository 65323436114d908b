"""The ways of deliveries that are with no handler: held, published elsewhere, rejected, handed back, acked.

What waits here for its time is kept here, and so are the frames that are to be sent on the open channel. Which way a
delivery takes is decided elsewhere (`ConsumingSession`, `Results`).

Invariants: nothing is sent for a delivery of a lost channel; a delivery is settled once; nothing is held but while
deliveries are handed out, and nothing goes back to a stream, or to a broker that has forgotten what it sent.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from typing import TYPE_CHECKING

from reliable_mq.core.acks import AckBatcher
from reliable_mq.core.attempts import FailureBook
from reliable_mq.core.codec import encode_ack, encode_nack, encode_reject
from reliable_mq.core.deadletters import Republish
from reliable_mq.core.delivery import Delivery, Source
from reliable_mq.core.notices import Notice, NoticeKind
from reliable_mq.core.republishing import Republishing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reliable_mq.core.acks import Frames
    from reliable_mq.core.consumer_statistics import ConsumerStatistics
    from reliable_mq.core.deadletters import DeadLetters
    from reliable_mq.core.ladder import Ladder
    from reliable_mq.core.positions import StreamPosition

__all__ = ["State", "Ways"]


class State(enum.Enum):
    """What is done with deliveries."""

    CONSUMING = "consuming"
    """They are handed out."""
    DRAINING = "draining"
    """They go back to the broker, until another channel is opened: the subscription has ended."""
    STOPPING = "stopping"
    """They go back to the broker, for good."""


class Ways:
    """See the module. Not thread-safe.

    Args:
        acks: batches the acks; None with automatic acks.
        dead_letters: makes the dead letters; None where there is no queue for them.
        ladder: the delay queues; None where there are none.
        position: where the consumption of a stream is; None for queues.

    Attributes:
        automatic: whether the broker forgets what it sends.
        acks: batches the acks.
        out: what is published.
        position: as given.
        book: what is remembered of messages that failed.
        notices: what to log.
        statistics: counts.
        source: the open channel; None while there is none.
        state: what is done with deliveries.
        keeps: whether what goes back waits unacked for the end of the channel, which returns all of it at once.
    """

    def __init__(
        self,
        *,
        acks: AckBatcher | None,
        dead_letters: DeadLetters | None,
        ladder: Ladder | None,
        position: StreamPosition | None,
    ) -> None:
        self.automatic = acks is None
        self.acks = acks or AckBatcher(ack_every=1, ack_interval=0.0, prefetch=0)
        self.out = Republishing(dead_letters, ladder)
        self.position = position
        self.book = FailureBook()
        self.notices: list[Notice] = []
        self.statistics: ConsumerStatistics = self.acks.statistics
        self.source: Source | None = None
        self.state = State.CONSUMING
        self.keeps = False
        self._held: list[tuple[float, int, Delivery | Republish]] = []
        self._order = itertools.count()  # breaks ties in _held
        self._output: list[bytes] = []
        self._back: list[int] = []  # delivery tags that go back with the next output
        self._flush = False  # what is finished is acked now

    def opened(self, source: Source) -> None:
        """A channel is open."""
        self.source = source
        self.acks.opened(source.generation)
        self.out.opened()

    def lost(self) -> None:
        """The channel is gone, and what is held has been taken."""
        self.source = None
        if self.position is not None:
            self.position.lost(self.acks.lowest)
        self.statistics.lost += self.acks.lost()
        self.out.lost()
        self._output.clear()
        self._back.clear()

    def finish(self, deliveries: Sequence[Delivery], now: float, *, at_once: bool = False) -> int:
        """These are done with: ack them, some time or ``at_once``; answer how many were not before."""
        self._flush |= at_once
        return self.acks.finished(self.acks.generation, [delivery.delivery_tag for delivery in deliveries], now)

    def hold(self, item: Delivery | Republish, due: float) -> None:
        """Keep it until then."""
        if self.state is State.CONSUMING:
            heapq.heappush(self._held, (due, next(self._order), item))
        else:
            self.hand_back([item.delivery if isinstance(item, Republish) else item])

    def due(self, now: float) -> Iterator[Delivery | Republish]:
        """Give what was held until now."""
        while self._held and self._held[0][0] <= now:
            yield heapq.heappop(self._held)[2]

    def release(self) -> list[Delivery]:
        """Give everything that is held."""
        released = [item.delivery if isinstance(item, Republish) else item for _, _, item in self._held]
        self._held.clear()
        return released

    def dead_letter(self, delivery: Delivery, reason: str) -> None:
        """Publish its dead letter, or where there is no queue for that, reject it."""
        if delivery.failures is not None:
            delivery.failures.verdict = reason
        if self.out.dead_letter(delivery, reason):
            self.note(NoticeKind.DEAD_LETTERED, delivery, reason)
        else:
            self.reject(delivery, reason)

    def reject(self, delivery: Delivery, reason: str) -> None:
        """End it with ``basic.reject``; the broker dead-letters it, or drops it."""
        if self._send_reject(delivery, requeue=False):
            self.statistics.rejected += 1
            self.note(NoticeKind.REJECTED, delivery, reason)
            self.book.forget(delivery)

    def requeue(self, delivery: Delivery) -> None:
        """Have the broker count a failure, and delay it."""
        self._send_reject(delivery, requeue=True)

    def hand_back(self, deliveries: Iterable[Delivery]) -> None:
        """Return these with the next output: the later that is, the fewer frames it takes."""
        if self.source is not None and not self.automatic and self.position is None and not self.keeps:
            self._back += [delivery.delivery_tag for delivery in deliveries]

    def in_hand(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """Answer which of these are of the open channel, and neither go back nor are being published."""
        source, gone = self.source, {*self._back, *self.out.tags(self.source)}
        return [one for one in deliveries if one.source is source and one.delivery_tag not in gone]

    def note(self, kind: NoticeKind, delivery: Delivery | None, text: str) -> None:
        """Have it logged."""
        self.notices.append(Notice(kind, delivery, text))

    def take_output(self, now: float, *, idle: bool) -> bytes:
        """Take the bytes to write on the open channel, where no handler runs if it is ``idle``; empty for none."""
        flush, self._flush = self._flush or self.state is not State.CONSUMING, False
        frames = self.acks.flush() if flush else self.acks.due(now, idle=idle)
        if frames and self.source is not None:
            self._send_acks(self.source, frames)
        if self._back and self.source is not None:
            self._send_back(self.source)
        if not self._output:
            return b""
        output = b"".join(self._output)
        self._output.clear()
        return output

    @property
    def deadline(self) -> float | None:
        """When something held is due; None where nothing is."""
        return self._held[0][0] if self._held else None

    @property
    def held(self) -> int:
        """How many are held."""
        return len(self._held)

    def _send_reject(self, delivery: Delivery, *, requeue: bool) -> bool:
        source = delivery.source
        if not self.acks.taken(source.generation, delivery.delivery_tag):
            return False
        self._output.append(encode_reject(source.channel, delivery.delivery_tag, requeue=requeue))
        return True

    def _send_back(self, source: Source) -> None:
        acks, nacks = self.acks.hand_back(source.generation, self._back)
        self._back.clear()
        self._send_acks(source, acks)
        self._output.extend(encode_nack(source.channel, tag, multiple, requeue=True) for tag, multiple in nacks)

    def _send_acks(self, source: Source, frames: Frames) -> None:
        self._output.extend(encode_ack(source.channel, tag, multiple) for tag, multiple in frames)
