"""The consumers of queues, and a prefetch that bounds unacked bytes. No I/O.

AMQP limits the number of unacked deliveries, RabbitMQ has no limit in bytes, and a message may have 16 MiB. So the
prefetch begins with one delivery and grows with the number of deliveries whose size is known. The subscription is
cancelled while too many bytes are held.

If the user specifies no prefetch, its limit depends on the queue (`choose`). A queue without a delivery limit is read
as far ahead as the byte limit allows: the only effect of a crash is that messages are redelivered.

On a queue with a delivery limit, every crash of the reader counts against all deliveries that it holds. So the reader
holds fewer deliveries the closer they are to the limit: the whole prefetch if none was returned before, a single
delivery from half of the limit on. A message that crashes the reader then reaches the limit alone. Messages that were
returned before are at the head of a queue, so the reader checks one delivery before it requests more.

Invariant: the prefetch is at least 1. The unacked deliveries of all queues together never exceed the limit for all of
them, even while a subscription is renewed. No consumer tag is used twice, so that deliveries of a cancelled consumer
can be distinguished from those of its successor. Nothing is consumed from a stream, because RabbitMQ refuses a priority
for it: it would deliver only later messages, and acks would remove none.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from reliable_mq.codec.methods import Cancel, CheckQueue, Consume, QueueState, SetPrefetch, Step
from reliable_mq.core.channel_setup import NO_STREAM, SetupGenerator, StepRefused, is_a_stream, refusal
from reliable_mq.core.statistics import PeakAverage
from reliable_mq.errors import ConfigurationError
from reliable_mq.spark.options import LARGEST_PREFETCH
from reliable_mq.spark.queue_checks import QueueProfile, stream_refusal

_CAREFUL: Final = 2000  # maximum prefetch if a crash counts against deliveries that were read ahead
_STEADY: Final = 64  # maximum prefetch if renewing the subscription may activate another consumer
_GROWTH: Final = 64  # maximum prefetch, as a multiple of the deliveries whose size is known
_SLACK: Final = 1.1  # times the limit, so that messages slightly above the average do not end a subscription


@dataclass(frozen=True, slots=True)
class PrefetchChoice:
    """The limit of the prefetch of a query, and the reason for it."""

    most: int  # maximum unacked deliveries of a queue
    limit: int | None = None  # the delivery limit to respect; None also if the user has chosen the prefetch
    first: int = 1  # the prefetch before a size is known
    reason: str = ""


def choose(given: int | None, queues: Sequence[QueueProfile]) -> PrefetchChoice:
    single = any(queue.single_active_consumer for queue in queues)
    if given is not None:
        return PrefetchChoice(given, None, given if single else 1, "the option prefetch says so")
    limited = min(
        (queue for queue in queues if queue.delivery_limit is not None),
        key=lambda queue: (queue.delivery_limit, queue.known),
        default=None,
    )
    if limited is not None:
        why = (
            f"queue {limited.name!r} has a delivery limit of {limited.delivery_limit}, and a crash counts against "
            "everything that was read ahead"
            if limited.known
            else f"the arguments of queue {limited.name!r} are not known, so it may have a delivery limit"
        )
        return PrefetchChoice(_CAREFUL, limited.delivery_limit, 1, f"{why}; the option prefetch overrides it")
    if single:
        why = "a queue has a single active consumer, which a change of the subscription may make another one"
        return PrefetchChoice(_STEADY, None, _STEADY, f"{why}; the option prefetch overrides it")
    return PrefetchChoice(
        LARGEST_PREFETCH, None, 1, "no queue has a delivery limit: maxBytesPerTrigger bounds what is read ahead"
    )


class PrefetchChange(enum.Enum):
    STAY = enum.auto()
    PAUSE = enum.auto()
    RENEW = enum.auto()
    """Subscribe anew, with what `PrefetchController.grant` returns."""


class PrefetchController:
    """A controller of the prefetch of all queues of a reader. Not thread-safe."""

    def __init__(self, choice: PrefetchChoice, *, most_bytes: int, queues: int = 1) -> None:
        self.returned = 0  # maximum earlier returns of an unacked delivery; set by the owner
        self._limit = choice.limit
        self._looked = choice.limit is None  # whether a first delivery of this channel was checked
        self._most = choice.most
        self._most_bytes = most_bytes
        self._queues = queues
        self._first = min(choice.first, choice.most)
        self._known = 0  # deliveries whose size is known
        self._average = PeakAverage()
        self.granted = self.prefetch  # per queue, of the current subscription
        self.paused = False  # whether no subscription exists

    @property
    def prefetch(self) -> int:
        """The prefetch that a new subscription should have if nothing is unacked."""
        if not self._looked:
            return 1
        if self._average.value is None:
            return self._first
        grown = max(_GROWTH * self._known, self._first)
        if self._bearable <= 4 * grown:  # otherwise the next step would be less than twice this one
            grown = self._bearable
        return max(1, min(grown, int(self._most_bytes / self._queues / self._average.value)))

    def _target(self, unacked: int) -> int:
        """Return the prefetch for a subscription while that many deliveries are unacked."""
        return max(1, min(self.prefetch, self._most - unacked // self._queues))

    @property
    def _bearable(self) -> int:
        """The maximum unacked deliveries of a queue, since a crash counts against each."""
        if self._limit is None:
            return self._most
        if 2 * self.returned >= self._limit:
            return 1  # also with a limit of 0, where the first crash counts against all held deliveries
        return int(self._most ** (1 - 2 * self.returned / self._limit))

    def received(self, count: int, size: int) -> None:
        """Record ``count`` deliveries with a total size of ``size`` bytes."""
        self._looked = True
        self._known += count
        self._average.observe(size / count)

    def lost(self) -> None:
        """Reset for the next channel: all unacked deliveries were returned once more."""
        self.returned = 0
        self._looked = self._limit is None

    def grant(self, unacked: int) -> int:
        """Return the prefetch of a new subscription and record the subscription."""
        self.granted = self._target(unacked)
        self.paused = False
        return self.granted

    def next_change(self, held: int, unacked: int) -> PrefetchChange:
        if self.paused:
            return (
                PrefetchChange.RENEW
                if held <= self._most_bytes / 4 and not self._risky(unacked)
                else PrefetchChange.STAY
            )
        if held > _SLACK * self._most_bytes:
            self.paused = True
            return PrefetchChange.PAUSE
        if self._risky(unacked) and self.granted > 1:
            self.paused = True
            self._looked = False
            return PrefetchChange.PAUSE
        if unacked >= self.granted and self._target(unacked) >= 2 * self.granted:
            return PrefetchChange.RENEW
        return PrefetchChange.STAY

    def _risky(self, unacked: int) -> bool:
        """Return whether more deliveries are unacked than the delivery limit permits."""
        return self._limit is not None and unacked > self._queues * (2 * self._bearable + 1)  # for two subscriptions


class Subscriptions:
    """The consumers on the current channel: one per queue, with a common prefetch.

    The generators yield the steps for a connection to perform. Only the I/O thread uses this object.
    """

    def __init__(
        self,
        name: str,
        queues: Sequence[str],
        wanted: Callable[[str], bool],
        grant: Callable[[], int],
        single_active: Collection[str] = (),
    ) -> None:
        self._name = name
        self._queues = queues
        self._wanted = wanted
        self._grant = grant
        self._single_active = single_active  # the queues with a single active consumer
        self._granted = 1
        self._queue_of: dict[str, str] = {}  # by consumer tag, also while it is being cancelled
        self._active: list[str] = []  # the tags of consumers that receive deliveries
        self._made = 0  # number of consumers created
        self._others: dict[str, int] = {}  # by queue: the fewest consumers besides the active one of this reader

    def queue(self, consumer_tag: str) -> str:
        """Return the queue of a consumer of this channel, active or being cancelled."""
        return self._queue_of[consumer_tag]

    @property
    def queues(self) -> set[str]:
        return {self._queue_of[tag] for tag in self._active}

    def begin(self) -> SetupGenerator:
        """Consume on a new channel.

        Raises:
            ConfigurationError: If a queue was deleted, and a stream now has its name.
        """
        self._queue_of.clear()
        self._active.clear()
        for step in self._consume_wanted():
            try:
                yield step
            except StepRefused as refused:
                if isinstance(step, Consume) and is_a_stream(refused):
                    raise ConfigurationError(stream_refusal(step.queue)) from refused
                raise refusal(step, refused) from refused

    def renew(self) -> Generator[Step, Any, None]:
        """Consume all wanted queues again with the current prefetch."""
        yield from self.end()
        yield from self._consume_wanted()

    def found(self, state: QueueState) -> None:
        """Record a count of a queue with its consumers. One in doubt says nothing."""
        if not state.in_doubt:
            others = max(state.consumers - (state.name in self.queues), 0)
            self._others[state.name] = min(self._others.get(state.name, others), others)

    def ready(self, before: Mapping[str, int]) -> Generator[Step, Any, dict[str, int]]:
        """Count the ready messages of the wanted queues: others may be gone.

        The number ``before`` stands for a count in doubt.
        """
        counted: dict[str, int] = {}
        for queue in filter(self._wanted, self._queues):
            state: QueueState = yield CheckQueue(queue)
            self.found(state)
            counted[queue] = before.get(queue, 0) if state.in_doubt else state.messages
        return counted

    def certain_counts(self, queues: Sequence[str]) -> Generator[Step, Any, dict[str, int] | None]:
        """Count messages that are ready or on their way here; None if in doubt.

        The number on their way is not known, and taken to be the prefetch, unless all these queues are settled.
        """
        granted = self._granted
        counted: dict[str, int] = {}
        for queue in queues:
            state: QueueState = yield CheckQueue(queue)
            if state.in_doubt:
                return None
            self.found(state)
            counted[queue] = state.messages and state.messages + granted
        empty = [queue for queue in queues if not counted[queue]]
        if empty and not (yield from self.settled(empty)):
            counted.update(dict.fromkeys(empty, granted))
        return counted

    def settled(self, queues: Sequence[str] | None = None) -> Generator[Step, Any, bool]:
        """Renew the subscriptions. Return whether nothing is ready or on its way.

        A quorum queue delivers from the member on the consumer's node, which may lag behind. The leader counts a
        cancelled consumer as long as it has unacked deliveries. When these arrive, the node returns them, and the
        leader delivers them to the new consumer. So the leader must count no consumer between two subscriptions, except
        an active one that has replaced this reader's, and only the new one after that.
        """
        chosen = list(filter(self._wanted, queues or self._queues))
        settled = True
        yield from self.end()
        for queue in chosen:
            state: QueueState = yield CheckQueue(queue)
            others = max(self._others[queue], queue in self._single_active)
            settled = settled and not state.messages and state.consumers <= others
        yield from self._consume_wanted()
        for queue in chosen:
            state = yield CheckQueue(queue)
            certain = not state.in_doubt and not state.messages
            settled = settled and certain and state.consumers <= 1 + self._others[queue]
        return settled

    def resume(self, queue: str) -> Generator[Step, Any, None]:
        """Consume a wanted queue again whose consumer the broker has cancelled."""
        if queue in self.queues or not self._wanted(queue):
            return
        yield CheckQueue(queue)
        yield SetPrefetch(self._granted)
        yield self._consume(queue)

    def end(self, queue: str | None = None) -> Generator[Step, Any, None]:
        """Cancel the consumer of a queue, or all that exist when this is performed."""
        tags = [tag for tag in self._active if queue in (None, self._queue_of[tag])]
        self._active = [tag for tag in self._active if tag not in tags]
        for tag in tags:
            yield Cancel(tag)
            del self._queue_of[tag]  # no delivery follows the reply

    def cancelled(self, consumer_tag: str) -> str | None:
        """Forget a consumer. Return its queue, or None if it was already being cancelled."""
        if consumer_tag not in self._active:
            return None
        self._active.remove(consumer_tag)
        return self._queue_of[consumer_tag]

    def lost(self) -> None:
        """Forget all consumers, because their channel is lost."""
        self._active.clear()

    def _consume_wanted(self) -> Generator[Step, Any, None]:
        self._granted = self._grant()
        yield SetPrefetch(self._granted)
        for queue in filter(self._wanted, self._queues):
            yield self._consume(queue)

    def _consume(self, queue: str) -> Consume:
        self._made += 1
        tag = f"{self._name}-{self._made}"
        self._queue_of[tag] = queue
        self._active.append(tag)
        return Consume(queue, tag, arguments=NO_STREAM)
