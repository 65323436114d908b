"""The settlement of deliveries: ack, reject, requeue, or republish and then ack.

A delivery that must wait is held here until it is due. `ConsumerSession` and `OutcomeHandler` choose the settlement.

Invariants:

- Nothing is sent for a delivery of a lost channel, and a delivery is settled once.
- An original is acked only after the message that replaces it (a dead letter, or the one that waits for its next
  attempt) was confirmed. That message is published as mandatory.
- A `RepublishRequest` is in one place at a time: waiting for a declaration, ready, or being published. Nothing of a
  lost channel is published.
- A queue whose declaration is refused is declared once per channel. A delivery that would have waited in it is held in
  the process. Its dead letters are published again.
- Deliveries are only held while deliveries are dispatched. Nothing is requeued to a stream, or to a broker that forgets
  the deliveries it sends (automatic acks).
"""

from __future__ import annotations

import enum
import heapq
import itertools
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from reliable_mq.codec import encode_ack, encode_nack, encode_reject
from reliable_mq.core.consumer.acks import AckBatcher
from reliable_mq.core.consumer.attempts import AttemptTracker
from reliable_mq.core.consumer.delivery import ChannelGeneration, Delivery, DeliveryState, message_name
from reliable_mq.core.consumer.lifecycle import ConsumerState
from reliable_mq.core.headers import trace_ids
from reliable_mq.core.retry.dead_letters import RepublishReason, RepublishRequest
from reliable_mq.core.retry.retry_headers import encode_retry_headers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reliable_mq.core.consumer.acks import Frames, StreamOffset
    from reliable_mq.core.consumer.lifecycle import ConsumerLifecycle
    from reliable_mq.core.consumer.quarantine import Quarantine
    from reliable_mq.core.retry.dead_letters import DeadLetters
    from reliable_mq.core.retry.delay_queues import DelayQueues
    from reliable_mq.core.statistics import ConsumerStatistics
    from reliable_mq.topology import Queue


class RepublishQueue:
    """Messages to publish in place of deliveries: dead letters, retries, suspects.

    A retry goes to the first delay queue of its path. A queue that is not known to exist on this channel's broker is
    declared first, while its messages wait. A queue that is found to be missing is declared again. Not thread-safe.
    """

    def __init__(self, dead_letters: DeadLetters | None, delay_queues: DelayQueues | None) -> None:
        self._dead_letters = dead_letters
        self._delay_queues = delay_queues
        self._known: set[str] = set()
        self._refused: set[str] = set()
        self._undeclared: dict[str, list[RepublishRequest]] = {}
        self._declarations: list[Queue] = []
        self._ready: list[RepublishRequest] = []
        self._publishing: set[RepublishRequest] = set()

    @property
    def publishing(self) -> int:
        """The number of messages that are being published, without an outcome."""
        return len(self._publishing)

    def opened(self) -> None:
        """Begin with a channel, whose set-up declared the queues known beforehand."""
        delays, dead_letters = self._delay_queues, self._dead_letters
        self._known = set() if delays is None else {delays.queue(step).name for step in delays.own}
        if dead_letters is not None and dead_letters.queue is not None:
            self._known.add(dead_letters.queue.name)
        self._refused.clear()

    def lost(self) -> None:
        """Drop all messages that are not being published, since the channel is lost."""
        for republish in chain(self._ready, *self._undeclared.values()):
            republish.delivery.state = DeliveryState.SETTLED
        self._ready.clear()
        self._undeclared.clear()
        self._declarations.clear()

    def dead_letter(self, delivery: Delivery, reason: str) -> bool:
        """Dead-letter a delivery. Return False without a queue for dead letters."""
        if self._dead_letters is None:
            return False
        self.again(self._dead_letters.make(delivery, reason))
        return True

    def cut(self, republish: RepublishRequest) -> None:
        """Cut the properties of a dead letter that are too large for a frame."""
        assert self._dead_letters is not None, "it was made here"  # noqa: S101
        self._dead_letters.cut(republish)

    def delay(self, delivery: Delivery, delay: float, *, suspect: bool = False, tries: int = 0) -> bool:
        """Delay a delivery in delay queues. Return False if it must be held instead.

        ``delay`` is in seconds. ``tries`` is as in `RepublishRequest`.
        """
        return self._delay_queues is not None and self.forward(
            delivery, self._delay_queues.path(delay), suspect=suspect, tries=tries
        )

    def forward(
        self,
        delivery: Delivery,
        path: Sequence[int],
        *,
        suspect: bool = False,
        left: float | None = None,
        tries: int = 0,
    ) -> bool:
        """Send a delivery through delay queues. Return False if it must be held instead.

        ``left`` and ``tries`` are as in `RepublishRequest`.
        """
        if self._delay_queues is None or not path:
            return False
        path = self._delay_queues.through(path)
        queue = self._delay_queues.queue(path[0])
        if queue.name in self._refused:
            return False
        properties = encode_retry_headers(delivery, path[1:], suspect=suspect)
        if properties is None:
            return False
        purpose = RepublishReason.RETRY
        self.again(RepublishRequest(purpose, delivery, queue.name, properties, queue=queue, left=left, tries=tries))
        return True

    def quarantine(self, delivery: Delivery, queue: Queue, delay: float = 0.0) -> bool:
        """Move a delivery to quarantine, which is declared. Return False if it cannot.

        With a ``delay``, in seconds, it first waits in delay queues, and goes to quarantine from its own queue.
        """
        delays = self._delay_queues
        path = () if delays is None else delays.path(delay)
        properties = encode_retry_headers(delivery, path[1:], suspect=True)
        if properties is None:
            return False
        if delays is not None and path and delays.queue(path[0]).name not in self._refused:
            queue = delays.queue(path[0])
        else:
            self._known.add(queue.name)
        self.again(RepublishRequest(RepublishReason.QUARANTINE, delivery, queue.name, properties, queue=queue))
        return True

    def again(self, republish: RepublishRequest) -> None:
        """Publish a message once its queue is declared."""
        republish.delivery.state = DeliveryState.REPUBLISHING
        queue = republish.queue
        final = republish.purpose is RepublishReason.DEAD_LETTER  # it cannot be held instead
        if queue is None or queue.name in self._known or (final and queue.name in self._refused):
            self._ready.append(republish)
            return
        if queue.name not in self._undeclared:
            self._declarations.append(queue)
        self._undeclared.setdefault(queue.name, []).append(republish)

    def missing(self, republish: RepublishRequest) -> bool:
        """Let the missing queue of a returned message be declared before `again`.

        Return False if its declaration is unknown.
        """
        if republish.queue is None:
            return False
        self._known.discard(republish.queue.name)
        return True

    def declared(self, name: str, *, ok: bool) -> list[RepublishRequest]:
        """End a declaration. Return the messages whose queue could not be declared."""
        waiting = self._undeclared.pop(name, [])
        if not ok:
            self._refused.add(name)
            return waiting
        self._known.add(name)
        self._ready += waiting
        return []

    def settled(self, republish: RepublishRequest) -> None:
        self._publishing.discard(republish)

    def take(self) -> tuple[Sequence[Queue], Sequence[RepublishRequest]]:
        """Take the queues to declare, and the messages to publish now.

        The caller reports each queue as `declared`, unless the channel is lost, and each message as `settled`.
        """
        if not (self._ready or self._declarations):
            return (), ()
        declarations, self._declarations = self._declarations, []
        ready, self._ready = self._ready, []
        self._publishing.update(ready)
        return declarations, ready

    def quarantining(self, source: ChannelGeneration | None) -> bool:
        """Return whether a delivery of this channel is being moved to quarantine."""
        return any(
            one.purpose is RepublishReason.QUARANTINE and one.delivery.source is source for one in self._publishing
        )

    @property
    def idle(self) -> bool:
        return not (self._publishing or self._ready or self._undeclared)


_INFO, _WARNING, _ERROR = 20, 30, 40  # the levels of `logging`, which the core does not import


class LogEventKind(enum.Enum):
    """The subject of a log line, with its text and level."""

    RETRIED = "retried", _INFO
    DEAD_LETTERED = "dead-lettered", _WARNING
    PAUSED = "kill switch pauses dispatch, too many handlers fail", _ERROR
    RESUMED = "kill switch resumes dispatch", _WARNING
    QUARANTINED = "has come back too often without an outcome, and is moved to quarantine", _WARNING
    REJECTED = "rejected", _ERROR
    NOT_DECLARED = "queue not declared, its messages are held here", _WARNING
    REPUBLISH_FAILED = "not published again, and stays unacked", _ERROR
    STORE_FAILED = "idempotency store failed", _ERROR
    BATCH_FAILED = "failed with its batch, each of which is tried by itself", _WARNING
    CANCELLED = "not handled, no attempt is counted", _WARNING
    OVERDUE = "unacked for long", _WARNING
    TIMED_OUT = "timed out in its handler", _ERROR
    DROPPED = "failed, and acknowledged automatically", _ERROR

    def __init__(self, text: str, level: int) -> None:
        self.text: Final = text
        self.level: Final = level


_BACK_TO_QUARANTINE: Final = 1.0  # seconds, while the subscription of quarantine goes on
_FINISHED: Final = DeliveryState.FINISHED  # a global is looked up faster than a member of an enum
#: After these events no consumer has the message any more, and operators look for the reason in the log.
_LAST: Final = frozenset({LogEventKind.DEAD_LETTERED, LogEventKind.REJECTED})


class LogEvent(NamedTuple):
    """A line to log, usually about a delivery."""

    kind: LogEventKind
    delivery: Delivery | None
    text: str

    @property
    def ids(self) -> dict[str, str] | None:
        """The trace ids of the last attempt, or None if it is not sampled."""
        context = None if self.delivery is None else self.delivery.attempt_context
        return trace_ids(context or "")

    def line(self, consumer: str) -> str:
        """Return the log line: the message, its failed attempts and the reason."""
        if self.delivery is None:
            return f"consumer {consumer!r}: {self.kind.text}: {self.text}"
        line = f"{message_name(self.delivery)} of queue {self.delivery.queue!r} {self.kind.text}: {self.text}"
        failures = self.delivery.failures
        count = 0 if failures is None else failures.count
        if count or self.kind in _LAST:
            line += f"; attempts failed: {count}"
        if self.kind in _LAST and failures is not None and failures.last is not None:
            last = failures.last
            known = str(last) in self.text or last.exception_message == self.text
            line += "" if known else f", the last with {last}"
        return line


class SettledDeliveries(NamedTuple):
    """A settlement that a trace shows."""

    method: str  # "ack", "nack" or "reject"
    deliveries: list[Delivery]  # the deliveries with an `attempt_context`, at least one
    total: int  # the number of all deliveries that were settled with them


class Settlement:
    """Deliveries that wait for no handler, and frames to send. Not thread-safe."""

    def __init__(
        self,
        *,
        acks: AckBatcher | None,
        dead_letters: DeadLetters | None,
        delay_queues: DelayQueues | None,
        stream_offset: StreamOffset | None,
        lifecycle: ConsumerLifecycle,
        quarantine: Quarantine | None,
    ) -> None:
        self.automatic: Final = acks is None  # the broker forgets the deliveries that it sends
        self.acks: Final = acks or AckBatcher(ack_every=1, ack_interval=0.0, prefetch=0)
        self.republish: Final = RepublishQueue(dead_letters, delay_queues)
        self.stream_offset: Final = stream_offset
        self.attempts: Final = AttemptTracker()
        self.statistics: Final[ConsumerStatistics] = self.acks.statistics
        self.source: ChannelGeneration | None = None  # the open channel
        self._lifecycle = lifecycle
        self._quarantine = quarantine
        self._log: list[LogEvent] = []
        self._held: list[tuple[float, int, Delivery | RepublishRequest]] = []
        self._order = itertools.count()  # breaks ties in _held
        self._output: list[bytes] = []
        self._requeued: list[Delivery] = []  # to requeue with the next output
        self._finished: dict[int, Delivery] = {}  # unacked deliveries with an `attempt_context`, by delivery tag
        self._settled: list[SettledDeliveries] = []
        self._flush = False  # whether all finished deliveries are acked with the next output

    def opened(self, source: ChannelGeneration) -> None:
        self.source = source
        self.acks.opened(source.generation)
        self.republish.opened()

    def lost(self, queued: Sequence[Delivery]) -> None:
        """Forget the channel and its ``queued`` deliveries, which no handler has."""
        for delivery in queued:
            delivery.state = DeliveryState.SETTLED
        self.source = None
        if self.stream_offset is not None:
            self.stream_offset.lost(self.acks.first_unfinished)
        self.statistics.lost += self.acks.lost()
        self.republish.lost()
        self._output.clear()
        self._requeued.clear()
        self._finished.clear()
        self._settled.clear()

    def finish(self, deliveries: Sequence[Delivery], now: float, *, at_once: bool = False) -> int:
        """Ack deliveries, in time or ``at_once``. Return the number of unfinished ones."""
        self._flush |= at_once
        for delivery in deliveries:
            delivery.state = _FINISHED
            if delivery.attempt_context is not None:
                self._finished[delivery.delivery_tag] = delivery
        return self.acks.finished([delivery.delivery_tag for delivery in deliveries], now)

    @property
    def consuming(self) -> bool:
        return self._lifecycle.consuming

    def hold(self, item: Delivery | RepublishRequest, due: float) -> None:
        """Hold a delivery, or a publish of it, until ``due``, or requeue it in a stop."""
        delivery = item.delivery if isinstance(item, RepublishRequest) else item
        if self._lifecycle.consuming:
            delivery.state = DeliveryState.HELD
            heapq.heappush(self._held, (due, next(self._order), item))
        elif item is delivery:
            self.return_unhandled([delivery])
        else:  # its publish failed
            self.requeue([delivery])

    def due(self, now: float) -> Iterable[Delivery | RepublishRequest]:
        """Take the held deliveries and publishes that are due."""
        if not self._held or self._held[0][0] > now:
            return ()
        items = []
        while self._held and self._held[0][0] <= now:
            items.append(heapq.heappop(self._held)[2])
        return items

    def release(self) -> list[Delivery]:
        """Release all held deliveries, and return them."""
        released = [item.delivery if isinstance(item, RepublishRequest) else item for _, _, item in self._held]
        self._held.clear()
        return released

    def dead_letter(self, delivery: Delivery, reason: str) -> None:
        """Publish the dead letter of a delivery, or reject it without a queue for that."""
        if delivery.failures is not None:
            delivery.failures.verdict = reason
        if self.republish.dead_letter(delivery, reason):
            self.log(LogEventKind.DEAD_LETTERED, delivery, reason)
        else:
            self.reject(delivery, reason)

    def reject(self, delivery: Delivery, reason: str) -> None:
        """Send ``basic.reject``, so that the broker dead-letters or drops the delivery."""
        if self.send_reject(delivery, requeue=False):
            self.statistics.rejected += 1
            self.log(LogEventKind.REJECTED, delivery, reason)
            self.attempts.forget(delivery)

    def return_unhandled(self, deliveries: Iterable[Delivery]) -> None:
        """Return deliveries that are with no handler.

        One from quarantine is published there again, because the broker counts a requeue, as a failed attempt.
        """
        if self.source is not None and self._lifecycle.state is not ConsumerState.ENDED:
            deliveries = [one for one in deliveries if not self._back_to_quarantine(one)]
        self.requeue(deliveries)

    def requeue(self, deliveries: Iterable[Delivery]) -> None:
        """Requeue deliveries with the next output, since a late one takes fewer frames."""
        deliveries = list(deliveries)
        for delivery in deliveries:
            delivery.state = DeliveryState.SETTLED
        if self.source is not None and not self.automatic and self.stream_offset is None:
            keeps = self._lifecycle.keeps
            deliveries = [delivery for delivery in deliveries if not keeps(delivery.consumer_tag)]
            self._requeued += deliveries

    def _back_to_quarantine(self, delivery: Delivery) -> bool:
        """Publish a delivery from quarantine there again. Return False if it cannot."""
        quarantine = self._quarantine
        if quarantine is None or not quarantine.has(delivery):
            return False
        if self._lifecycle.keeps(delivery.consumer_tag):  # its subscription goes on, and would get the copy at once
            return self.republish.delay(delivery, _BACK_TO_QUARANTINE, suspect=True)
        return self.republish.quarantine(delivery, quarantine.queue)

    def log(self, kind: LogEventKind, delivery: Delivery | None, text: str) -> None:
        self._log.append(LogEvent(kind, delivery, text))

    def take_log(self) -> Sequence[LogEvent]:
        if not self._log:
            return ()
        events, self._log = self._log, []
        return events

    def take_settled(self) -> Sequence[SettledDeliveries]:
        """Take the settlements that a trace shows, which belong to the output."""
        if not self._settled:
            return ()
        settled, self._settled = self._settled, []
        return settled

    def take_output(self, now: float, *, idle: bool) -> bytes:
        """Take the bytes to write on the open channel.

        ``idle`` means that no handler runs.
        """
        flush, self._flush = self._flush or not self._lifecycle.consuming, False
        acked = self.statistics.acked
        frames = self.acks.flush() if flush else self.acks.due(now, idle=idle)
        if frames and self.source is not None:
            self._send_acks(self.source, frames, self.statistics.acked - acked)
        if self._requeued and self.source is not None:
            self._send_requeued(self.source)
        if not self._output:
            return b""
        output = b"".join(self._output)
        self._output.clear()
        return output

    @property
    def deadline(self) -> float:
        """The time when the first held delivery is due, infinity if none is held."""
        return self._held[0][0] if self._held else inf

    @property
    def holds_publishes(self) -> bool:
        """Whether a publish is held for another try. Thread-safe."""
        return any(isinstance(item, RepublishRequest) for _, _, item in tuple(self._held))

    def send_reject(self, delivery: Delivery, *, requeue: bool) -> bool:
        """Send ``basic.reject``. Return False if the delivery is already settled."""
        source = delivery.source
        delivery.state = DeliveryState.SETTLED
        if not self.acks.take_out(source.generation, delivery.delivery_tag):
            return False
        self._output.append(encode_reject(source.channel, delivery.delivery_tag, requeue=requeue))
        self._record("reject", [delivery], 1)
        return True

    def _send_requeued(self, source: ChannelGeneration) -> None:
        acked = self.statistics.acked
        requeued, self._requeued = self._requeued, []
        acks, nacks = self.acks.requeue([delivery.delivery_tag for delivery in requeued])
        self._send_acks(source, acks, self.statistics.acked - acked)
        self._output.extend(encode_nack(source.channel, tag, multiple, requeue=True) for tag, multiple in nacks)
        self._record("nack", requeued, len(requeued))

    def _send_acks(self, source: ChannelGeneration, frames: Frames, total: int) -> None:
        self._output.extend(encode_ack(source.channel, tag, multiple) for tag, multiple in frames)
        if frames and self._finished:
            self._record_acks(frames, total)

    def _record_acks(self, frames: Frames, total: int) -> None:
        """Record the finished deliveries that these ack frames settle."""
        tags = {tag for tag, _ in frames}
        highest = max((tag for tag, multiple in frames if multiple), default=0)
        acked = [tag for tag in self._finished if tag <= highest or tag in tags]
        self._record("ack", [self._finished.pop(tag) for tag in acked], total)

    def _record(self, method: str, deliveries: Iterable[Delivery], total: int) -> None:
        traced = [delivery for delivery in deliveries if delivery.attempt_context is not None]
        if traced:
            self._settled.append(SettledDeliveries(method, traced, total))
