"""The ways of deliveries that are with no handler: held, published elsewhere, rejected, handed back, acked.

What waits here for its time is kept here, and so are the frames that are to be sent on the open channel. Which way a
delivery takes is decided elsewhere (`ConsumingSession`, `Results`).

Invariants: nothing is sent for a delivery of a lost channel; a delivery is settled once; nothing is held but while
deliveries are handed out, and nothing goes back to a stream, or to a broker that has forgotten what it sent.

What is published, mandatory and confirmed, before its original may be acked: dead letters and retries.

A retry goes to the first delay queue of its path. One that is not known to exist on this channel's broker is declared
first, and what is to go there waits for that; one that turns out to be missing is declared again.

Invariants: a `RepublishRequest` is in one place at a time: waiting for a declaration, ready to be taken, or taken;
nothing of a channel that is lost is published; a queue that may not be declared is asked for once per channel, and what
would have waited there is held in the process.

What a consuming session wants logged.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from reliable_mq.codec import encode_ack, encode_nack, encode_reject
from reliable_mq.core.consumer.acks import AckBatcher
from reliable_mq.core.consumer.attempts import AttemptTracker
from reliable_mq.core.consumer.consumer_timeout import named
from reliable_mq.core.consumer.delivery import ChannelGeneration, Delivery, DeliveryState
from reliable_mq.core.retry.dead_letters import RepublishReason, RepublishRequest, Target
from reliable_mq.core.retry.retry_headers import encode_retry_headers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reliable_mq.core.consumer.acks import Frames
    from reliable_mq.core.consumer.stream_offset import StreamOffset
    from reliable_mq.core.retry.dead_letters import DeadLetters
    from reliable_mq.core.retry.delay_queues import DelayQueues
    from reliable_mq.core.statistics import ConsumerStatistics
    from reliable_mq.topology import Queue

__all__ = ["LogEvent", "LogEventKind", "RepublishQueue", "SessionState", "Settlement"]


class RepublishQueue:
    """See the module. Not thread-safe.

    Args:
        dead_letters: makes the dead letters; None where there is no queue for them.
        ladder: the delay queues; None where there are none.
    """

    def __init__(self, dead_letters: DeadLetters | None, ladder: DelayQueues | None) -> None:
        self._dead_letters = dead_letters
        self._ladder = ladder
        self._known: set[str] = set()
        self._refused: set[str] = set()
        self._undeclared: dict[str, list[RepublishRequest]] = {}
        self._declarations: list[Queue] = []
        self._ready: list[RepublishRequest] = []
        self._taken: set[RepublishRequest] = set()

    def opened(self) -> None:
        """A channel is open, and what belongs to the policy is declared."""
        self._known = set() if self._ladder is None else {self._ladder.queue(step).name for step in self._ladder.own}
        self._refused.clear()

    def lost(self) -> None:
        """The channel is gone."""
        for republish in chain(self._ready, *self._undeclared.values()):
            republish.delivery.state = DeliveryState.SETTLED
        self._ready.clear()
        self._undeclared.clear()
        self._declarations.clear()

    def dead_letter(self, delivery: Delivery, reason: str) -> bool:
        """Dead-letter it; False where there is no queue for that."""
        if self._dead_letters is None:
            return False
        self.again(self._dead_letters.make(delivery, reason))
        return True

    def delay(self, delivery: Delivery, delay: float, *, suspect: bool = False) -> bool:
        """Have it wait for ``delay`` seconds in delay queues; False where it has to be held instead."""
        return self._ladder is not None and self.forward(delivery, self._ladder.path(delay), suspect=suspect)

    def forward(self, delivery: Delivery, path: Sequence[int], *, suspect: bool = False) -> bool:
        """Have it wait in these delay queues, one after the other; False where it has to be held instead."""
        if self._ladder is None or not path:
            return False
        path = self._ladder.through(path)
        queue = self._ladder.queue(path[0])
        if queue.name in self._refused:
            return False
        properties = encode_retry_headers(delivery, path[1:], suspect=suspect)
        if properties is None:
            return False
        target = Target("", queue.name)
        self.again(RepublishRequest(delivery, target, properties, "", purpose=RepublishReason.RETRY, queue=queue))
        return True

    def isolate(self, delivery: Delivery, queue: Queue, delay: float = 0.0) -> bool:
        """Move it to quarantine, which was declared with the policy's delay queues; False where it cannot be.

        With a ``delay``, in seconds, it waits in delay queues first, and comes back from there as what it is.
        """
        path = () if self._ladder is None else self._ladder.path(delay)
        properties = encode_retry_headers(delivery, path[1:], suspect=True)
        if properties is None:
            return False
        if self._ladder is not None and path and self._ladder.queue(path[0]).name not in self._refused:
            queue = self._ladder.queue(path[0])
        else:
            self._known.add(queue.name)
        target = Target("", queue.name)
        self.again(RepublishRequest(delivery, target, properties, "", purpose=RepublishReason.QUARANTINE, queue=queue))
        return True

    def again(self, republish: RepublishRequest) -> None:
        """Publish one, once its queue is declared."""
        republish.delivery.state = DeliveryState.REPUBLISHING
        queue = republish.queue
        if queue is None or queue.name in self._known:
            self._ready.append(republish)
            return
        if queue.name not in self._undeclared:
            self._declarations.append(queue)
        self._undeclared.setdefault(queue.name, []).append(republish)

    def missing(self, republish: RepublishRequest) -> None:
        """The queue that it was to go to does not exist (any more): publish it again once that is declared."""
        if republish.queue is not None:
            self._known.discard(republish.queue.name)
        self.again(republish)

    def declared(self, name: str, *, ok: bool) -> list[RepublishRequest]:
        """A declaration that was taken has ended; answer what cannot be published for want of that queue."""
        waiting = self._undeclared.pop(name, [])
        if not ok:
            self._refused.add(name)
            return waiting
        self._known.add(name)
        self._ready += waiting
        return []

    def settled(self, republish: RepublishRequest) -> None:
        """One that was taken is confirmed, or it is known that it is not."""
        self._taken.discard(republish)

    def take(self) -> list[RepublishRequest]:
        """Take what to publish."""
        ready, self._ready = self._ready, []
        self._taken.update(ready)
        return ready

    def take_declarations(self) -> Iterable[Queue]:
        """Take what to declare; each is to be answered with `declared`, unless the channel is lost."""
        declarations, self._declarations = self._declarations, []
        return declarations

    def isolating(self, source: ChannelGeneration | None) -> bool:
        """Whether something of this channel is being moved to quarantine, and its original is not acked yet."""
        return any(one.purpose is RepublishReason.QUARANTINE and one.delivery.source is source for one in self._taken)

    @property
    def idle(self) -> bool:
        """Whether nothing is being published, or is to be."""
        return not (self._taken or self._ready or self._undeclared)


class LogEventKind(enum.Enum):
    """What the shell should log."""

    RETRIED = "retried"
    DEAD_LETTERED = "dead-lettered"
    PAUSED = "hands out nothing for now, too many handlings fail"
    RESUMED = "hands out again"
    ISOLATED = "has come back too often without a verdict, and is moved"
    REJECTED = "rejected"
    NOT_DECLARED = "delay queue not declared, what was to wait there is held here"
    REPUBLISH_FAILED = "not published again, and stays unacked"
    STORE_FAILED = "idempotency store failed"
    BATCH_FAILED = "and its batch failed, each is tried by itself"
    CANCELLED = "not handled, and no attempt"
    OVERDUE = "unacked for long"
    TIMED_OUT = "taken back from its handler, which counts as a failed attempt"
    DROPPED = "failed, and acknowledged automatically"


#: After these the message is with no consumer any more, and the log is where people look for the reason.
_LAST: Final = frozenset({LogEventKind.DEAD_LETTERED, LogEventKind.REJECTED})


class LogEvent(NamedTuple):
    """Something that a log should tell, most often about a delivery."""

    kind: LogEventKind
    delivery: Delivery | None
    text: str

    def line(self, consumer: str) -> str:
        """Return the line for the log of the consumer of this name: which message, which attempt, and why."""
        if self.delivery is None:
            return f"consumer {consumer!r}: {self.kind.value}: {self.text}"
        line = f"{named(self.delivery)} of queue {self.delivery.queue!r} {self.kind.value}: {self.text}"
        failures = self.delivery.failures
        count = 0 if failures is None else failures.count
        if count or self.kind in _LAST:
            line += f"; attempts failed: {count}"
        if self.kind in _LAST and failures is not None and failures.last is not None:
            last = f"{failures.last.exception_type}: {failures.last.exception_message}"
            line += "" if last in self.text else f", the last with {last}"
        return line


class SessionState(enum.Enum):
    """What is done with deliveries."""

    CONSUMING = "consuming"
    """They are handed out."""
    DRAINING = "draining"
    """They go back to the broker, until another channel is opened: the subscription has ended."""
    STOPPING = "stopping"
    """They go back to the broker, for good."""


class Settlement:
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
        ladder: DelayQueues | None,
        position: StreamOffset | None,
    ) -> None:
        self.automatic = acks is None
        self.acks = acks or AckBatcher(ack_every=1, ack_interval=0.0, prefetch=0)
        self.out = RepublishQueue(dead_letters, ladder)
        self.position = position
        self.book = AttemptTracker()
        self.notices: list[LogEvent] = []
        self.statistics: ConsumerStatistics = self.acks.statistics
        self.source: ChannelGeneration | None = None
        self.state = SessionState.CONSUMING
        self.keeps = False
        self._held: list[tuple[float, int, Delivery | RepublishRequest]] = []
        self._order = itertools.count()  # breaks ties in _held
        self._output: list[bytes] = []
        self._back: list[int] = []  # delivery tags that go back with the next output
        self._flush = False  # what is finished is acked now

    def opened(self, source: ChannelGeneration) -> None:
        """A channel is open."""
        self.source = source
        self.acks.opened(source.generation)
        self.out.opened()

    def lost(self, waiting: Sequence[Delivery]) -> None:
        """The channel is gone; these had waited to be dispatched, or for their time."""
        for delivery in waiting:
            delivery.state = DeliveryState.SETTLED
        self.source = None
        if self.position is not None:
            self.position.lost(self.acks.first_unfinished)
        self.statistics.lost += self.acks.lost()
        self.out.lost()
        self._output.clear()
        self._back.clear()

    def finish(self, deliveries: Sequence[Delivery], now: float, *, at_once: bool = False) -> int:
        """These are done with: ack them, some time or ``at_once``; answer how many were not before."""
        self._flush |= at_once
        for delivery in deliveries:
            delivery.state = DeliveryState.FINISHED
        return self.acks.finished(self.acks.generation, [delivery.delivery_tag for delivery in deliveries], now)

    def hold(self, item: Delivery | RepublishRequest, due: float) -> None:
        """Keep it until then."""
        delivery = item.delivery if isinstance(item, RepublishRequest) else item
        if self.state is SessionState.CONSUMING:
            delivery.state = DeliveryState.HELD
            heapq.heappush(self._held, (due, next(self._order), item))
        else:
            self.hand_back([delivery])

    def due(self, now: float) -> Iterator[Delivery | RepublishRequest]:
        """Give what was held until now."""
        while self._held and self._held[0][0] <= now:
            yield heapq.heappop(self._held)[2]

    def release(self) -> list[Delivery]:
        """Give everything that is held."""
        released = [item.delivery if isinstance(item, RepublishRequest) else item for _, _, item in self._held]
        self._held.clear()
        return released

    def dead_letter(self, delivery: Delivery, reason: str) -> None:
        """Publish its dead letter, or where there is no queue for that, reject it."""
        if delivery.failures is not None:
            delivery.failures.verdict = reason
        if self.out.dead_letter(delivery, reason):
            self.note(LogEventKind.DEAD_LETTERED, delivery, reason)
        else:
            self.reject(delivery, reason)

    def reject(self, delivery: Delivery, reason: str) -> None:
        """End it with ``basic.reject``; the broker dead-letters it, or drops it."""
        if self._send_reject(delivery, requeue=False):
            self.statistics.rejected += 1
            self.note(LogEventKind.REJECTED, delivery, reason)
            self.book.forget(delivery)

    def requeue(self, delivery: Delivery) -> None:
        """Have the broker count a failure, and delay it."""
        self._send_reject(delivery, requeue=True)

    def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """Return these with the next output: the later that is, the fewer frames it takes."""
        for delivery in deliveries:
            delivery.state = DeliveryState.SETTLED
        if self.source is not None and not self.automatic and self.position is None and not self.keeps:
            self._back += [delivery.delivery_tag for delivery in deliveries]

    def note(self, kind: LogEventKind, delivery: Delivery | None, text: str) -> None:
        """Have it logged."""
        self.notices.append(LogEvent(kind, delivery, text))

    def take_output(self, now: float, *, idle: bool) -> bytes:
        """Take the bytes to write on the open channel, where no handler runs if it is ``idle``; empty for none."""
        flush, self._flush = self._flush or self.state is not SessionState.CONSUMING, False
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
        delivery.state = DeliveryState.SETTLED
        if not self.acks.take_out(source.generation, delivery.delivery_tag):
            return False
        self._output.append(encode_reject(source.channel, delivery.delivery_tag, requeue=requeue))
        return True

    def _send_back(self, source: ChannelGeneration) -> None:
        acks, nacks = self.acks.requeue(source.generation, self._back)
        self._back.clear()
        self._send_acks(source, acks)
        self._output.extend(encode_nack(source.channel, tag, multiple, requeue=True) for tag, multiple in nacks)

    def _send_acks(self, source: ChannelGeneration, frames: Frames) -> None:
        self._output.extend(encode_ack(source.channel, tag, multiple) for tag, multiple in frames)
