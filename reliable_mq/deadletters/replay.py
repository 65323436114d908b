"""Replay dead letters: publish a copy of each, and ack it after the confirm.

Invariants:

- A dead letter is acked after its copy was confirmed and never before. Whatever fails in between, the message is in the
  dead-letter queue, at its target, or in both. After a crash, at most a batch (`BATCH`, less under a rate) is in both.
- If this run published a copy but could not ack the original because a channel was lost, the copy is not published
  again: the original is acked when it is redelivered, also if no more is tried, because of the limit or a stop. This
  needs a message id. Without one, the ack may have arrived, and the next delivery may be another message that is equal
  in every byte, so it is published, perhaps a second time. If no more is tried, the run fails instead.
- A dead letter that could not be published is tried once and counted once in a run, whatever is lost in between.
- A run ends if RabbitMQ settled no message of a batch within its time: the next batch would probably wait as long.
- A run processes the messages that are in the queue when it begins. Later dead letters are left to the next run. If a
  channel is lost, the run waits a limited time for the messages that RabbitMQ holds for the lost connection.
- In any second, no more messages are published than the rate, even after idle time. For a rate that is not a whole
  number, for example 1.5, the limit is two in any 1.33 seconds. Only the excess of a wait is made up for.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from math import ceil
from typing import Final, NamedTuple, TypeAlias

from reliable_mq._util.logs import get_logger
from reliable_mq.core.idempotency import key_prefix
from reliable_mq.deadletters.channel import GetChannel
from reliable_mq.deadletters.delivery_limit import DeliveryLimit
from reliable_mq.deadletters.filter import Filter
from reliable_mq.deadletters.message import DeadMessage
from reliable_mq.errors import (
    BrokerUnavailable,
    ConfigurationError,
    ConsumeError,
    PublishBlocked,
    PublishError,
    PublishUnconfirmed,
    ReliableMQError,
    StaleDelivery,
)
from reliable_mq.stores.protocol import ResettableStore
from reliable_mq.sync.confirmation import Confirmation
from reliable_mq.sync.publisher import Publisher

logger = get_logger(__name__)

_MADE_UP: Final = 0.005  # seconds; the maximum excess of a wait that is made up for


class Target(NamedTuple):
    """The address to which dead letters are published."""

    exchange: str  # empty for the default exchange
    routing_key: str  # the queue's name with the default exchange


class RateLimit:
    """A limit that spreads publishes evenly. Not thread-safe. Times are monotonic.

    Args:
        rate: The maximum number of publishes per second, above 0.
    """

    def __init__(self, rate: float) -> None:
        most = ceil(rate)
        self._gap = 1.0 / rate
        self._window = most / rate
        self._latest: deque[float] = deque(maxlen=most)
        self._due = float("-inf")

    def due(self) -> float:
        """Return the earliest time of the next publish."""
        first = self._latest[0] + self._window if len(self._latest) == self._latest.maxlen else float("-inf")
        return max(self._due, first)

    def published(self, now: float) -> None:
        """Note a publish, which must not be earlier than ``due``."""
        self._due = max(self._due, now - _MADE_UP) + self._gap
        self._latest.append(now)


#: The number of dead letters that are taken, published and acked together.
BATCH: Final = 200
_FAILURES_KEPT: Final = 1000
_FAILED_BYTES: Final = 32 * 1024 * 1024  # properties and bodies of failed messages, after which no more are kept
_GRACE: Final = 5.0  # seconds to wait for outstanding confirms when a run is interrupted
_TOO_LATE: Final = (PublishBlocked, PublishUnconfirmed)
_NOTICED: Final = 60.0  # seconds for RabbitMQ to notice that a connection is dead, after two to three heartbeats
_CHECK_EVERY: Final = 0.5  # seconds
_LOSSES: Final = 10  # lost channels in a row, without an ack in between

#: Called with the number of messages read so far, and the total.
Progress: TypeAlias = Callable[[int, int], object]
#: Returns the target of a dead letter, or None if unknown. Raises ConfigurationError if the message cannot go there.
Routing: TypeAlias = Callable[[DeadMessage], Target | None]


@dataclass(slots=True)
class ReplayReport:
    """The counts of a replay.

    Attributes:
        examined: The number of dead letters that were read.
        replayed: The number of dead letters whose copies are confirmed. In a dry run, the number that would be
            published.
        delivered_before: The number of replayed messages that had been delivered before, because they were browsed or
            because a replay published them and was interrupted before it could ack them. It includes possible
            duplicates.
        possible_duplicates: The number of replayed messages that may be duplicates, because the connection of an
            earlier delivery was cut off during a replay or while browsing. None if RabbitMQ does not distinguish this
            from a requeue. It does for quorum queues from 4.3 on.
        sent_again: The number of replayed messages that were published again because a confirm was lost with its
            connection. Each may be at its target twice.
        already_published: The number of messages that this run published before a channel was lost, and acked later.
        failed: The number of messages that could not be published. They are still in the dead-letter queue.
        unacked: After an error, the number of replayed messages that may still be in the dead-letter queue, because
            their acks may not have arrived. The next run may publish them again.
        unconfirmed: After an error, the number of published messages whose confirms were no longer awaited. They are
            still in the dead-letter queue, and perhaps also at their targets.
        failures: The first failed messages, each with its error: at most a thousand, and none after their content
            reaches 32 MiB.
    """

    examined: int = 0
    replayed: int = 0
    delivered_before: int = 0
    possible_duplicates: int | None = None
    sent_again: int = 0
    already_published: int = 0
    failed: int = 0
    unacked: int = 0
    unconfirmed: int = 0
    failures: list[tuple[DeadMessage, ReliableMQError]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all messages were published."""
        return not self.failed


def none_was_settled(errors: Sequence[Exception | None]) -> bool:
    """Return whether RabbitMQ settled no message of a batch within its time.

    The next batch would probably wait as long for nothing, and might be published twice by the next run.
    """
    return bool(errors) and all(isinstance(error, _TOO_LATE) for error in errors)


def read_batches(
    channel: GetChannel, limit: DeliveryLimit, size: int, position: int = 0, total: int = 0
) -> Iterator[tuple[list[DeadMessage], int]]:
    """Read the messages that are in the queue now; yield batches and the total number."""
    while not total or position < total:
        deliveries = channel.take(min(size, total - position) if total else size)
        if not deliveries:
            return
        total = total or max(channel.left, len(deliveries))
        messages = [DeadMessage(delivery, number) for number, delivery in enumerate(deliveries, start=position + 1)]
        position += len(messages)
        limit.check(messages)
        yield messages, total


def warn_of_missing(queue: str, read: int, total: int) -> None:
    """Log a warning if fewer messages were read than there were at the beginning."""
    if read < total:
        logger.warning(
            "%d of %d messages of queue %r were not read: they expired, or others took them, such as a consumer, a "
            "browse, a replay or a lost connection",
            total - read,
            total,
            queue,
        )


@dataclass(eq=False)
class Replay:
    """One run of a replay, with the options of `DeadLetterQueue.replay`.

    Args:
        publisher: The publisher of the copies, or None for a dry run.
        limit: The maximum number of messages to try, including failures.
        namespace: The namespace of the keys in the store, or None for the namespace of the virtual host.
        delivery_limit: The delivery limit of the dead-letter queue.
    """

    channel: GetChannel
    publisher: Publisher | None
    _: KW_ONLY
    chosen: Filter
    routing: Routing
    limit: int | None
    rate: float | None
    store: ResettableStore | None
    namespace: str | None
    delivery_limit: DeliveryLimit
    progress: Progress | None
    stop: threading.Event = field(default_factory=threading.Event)
    body: bytes | None = None
    report: ReplayReport = field(default_factory=ReplayReport)

    def __post_init__(self) -> None:
        self.report.possible_duplicates = 0 if self.delivery_limit.counts_lost_connections else None
        self._pace = None if self.rate is None else RateLimit(self.rate)
        self._batch = BATCH if self.rate is None else max(1, min(BATCH, int(self.rate)))
        self._total = 0  # messages at the beginning
        self._position = 0  # of the latest message that was read
        self._lost = False  # whether a channel was lost
        self._acked = 0
        self._unacked: Counter[str] = Counter()  # messages with an id that this run published, perhaps not acked
        self._in_doubt = 0  # messages without an id that this run published, perhaps not acked
        self._failed: Counter[str] = Counter()  # messages that this run could not publish
        self._failed_bytes = 0  # of those in the report
        self._passed: Counter[str] = Counter()  # failed messages from before the channel was lost, to be read again

    def run(self) -> ReplayReport:
        """Run to the end. Blocks.

        Raises:
            BrokerUnavailable: If the connection is lost and does not come back, or if publishing is blocked. The next
                run may replay dead letters again that were confirmed but not acked.
            ConsumeError: If RabbitMQ does not deliver from the queue.
            StaleDelivery: If the connection was lost before the acks of messages without an id were known to have
                arrived, and no more is tried, or if published messages were not delivered again.
            IdempotencyStoreError: If the store does not respond.
        """
        try:
            return self._run()
        except BaseException:
            self.report.unacked = self._perhaps_acked
            raise

    def _run(self) -> ReplayReport:
        losses = 0
        while True:
            before = self._acked
            try:
                self._go_through()
                break
            except StaleDelivery:
                self._lost = True
                losses = 1 if self._acked > before else losses + 1
                if losses > _LOSSES:
                    raise
        if held := self._held:
            raise StaleDelivery(
                f"the connection was lost, and {held} replayed messages were not delivered again: RabbitMQ requeues "
                "them when it notices the loss, and the next replay may publish them a second time"
            )
        if self._in_doubt and not self._may_try:
            raise StaleDelivery(
                f"the connection was lost; {self._in_doubt} replayed messages without an id may still be in the queue"
            )
        if self._may_try:
            warn_of_missing(self.delivery_limit.queue, self._known, self._total)
        return self.report

    @property
    def _tried(self) -> int:
        return self.report.replayed + self.report.failed

    @property
    def _may_try(self) -> bool:
        return not self.stop.is_set() and (self.limit is None or self._tried < self.limit)

    @property
    def _held(self) -> int:
        """The minimum number of published messages that a lost connection holds."""
        return max(self._unacked.total() - self.channel.doubtful, 0)

    @property
    def _perhaps_acked(self) -> int:
        """The number of published messages whose acks may or may not have arrived."""
        return self._unacked.total() + self._in_doubt

    @property
    def _known(self) -> int:
        """The number of messages that were read or are perhaps acked."""
        return self._position + self._perhaps_acked

    @property
    def _waits(self) -> bool:
        """Whether a lost connection may hold messages that this run still has to handle."""
        return self._held > 0 or (self._lost and self._may_try and self._known < self._total)

    def _go_through(self) -> None:
        """Read the queue from its head, up to the number of messages at the beginning.

        Until RabbitMQ notices that a connection was lost, the queue may be empty but for the messages that it holds.
        """
        until = time.monotonic() + _NOTICED
        self._passed = self._failed.copy()
        if self.publisher is None:
            self.report.replayed = 0  # nothing was acked, so all messages are read again
        self._position = self._acked
        while self._may_try or self._unacked.total():
            self._wait_for_turn()  # before a message is taken, which RabbitMQ lets a channel hold for a limited time
            batches = read_batches(self.channel, self.delivery_limit, self._batch, self._position, self._total)
            found = next(batches, None)
            if found is None:
                if not self._waits or self.stop.wait(_CHECK_EVERY) or time.monotonic() >= until:
                    return
                continue
            messages, self._total = found
            self._position = messages[-1].position
            self.report.examined = max(self.report.examined, self._position)
            self._handle(messages)
            if self.progress is not None:
                self.progress(self._position, self._total)

    def _handle(self, messages: list[DeadMessage]) -> None:
        done: list[DeadMessage] = []
        chosen: list[DeadMessage] = []
        now, may_try = datetime.now(UTC), self._may_try
        for message in messages:
            digest = message.fingerprint if message.redelivered else ""
            if self._unacked[digest]:
                self._unacked[digest] -= 1
                done.append(message)
            elif self._passed[digest]:
                self._passed[digest] -= 1
            elif may_try and self.chosen.matches(message, now):
                chosen.append(message)
        if self.limit is not None:
            chosen = chosen[: self.limit - self._tried]
        if self.publisher is None:
            for message in chosen:
                if self._target(message) is not None:
                    self.report.replayed += 1
            return
        confirmations: list[tuple[DeadMessage, Confirmation]] = []
        try:
            self._submit(self.publisher, chosen, confirmations)
            errors = [confirmation.exception() for _message, confirmation in confirmations]
        except BaseException:
            with suppress(ReliableMQError):  # a loss must not replace the error that ends the run
                self._settle(done, confirmations, _GRACE)
            raise
        self._settle(done, confirmations, None)
        if none_was_settled(errors):
            raise BrokerUnavailable(
                f"the replay has ended, because none of {len(errors)} messages was confirmed in time: they are still "
                f"in queue {self.delivery_limit.queue!r}, and those that were sent may also be at their targets. Does "
                "the broker have an alarm, or a target queue no leader?"
            ) from errors[0]

    def _submit(
        self, publisher: Publisher, messages: list[DeadMessage], confirmations: list[tuple[DeadMessage, Confirmation]]
    ) -> None:
        targets = [(message, target) for message in messages if (target := self._target(message)) is not None]
        self._reset([message for message, _ in targets])
        for message, target in targets:
            self._wait_for_turn()
            if self.stop.is_set():
                break
            if self._pace is not None:
                self._pace.published(time.monotonic())
            try:
                confirmation = publisher.submit(
                    message.replayed(self.body), exchange=target.exchange, routing_key=target.routing_key
                )
            except (ConfigurationError, PublishError) as error:
                self._fail(message, error)
            else:
                confirmations.append((message, confirmation))

    def _settle(
        self, done: list[DeadMessage], confirmations: list[tuple[DeadMessage, Confirmation]], grace: float | None
    ) -> None:
        """Ack confirmed messages. Leave messages unconfirmed after ``grace`` seconds."""
        deadline = None if grace is None else time.monotonic() + grace
        confirmed, sent_again = [], 0
        for message, confirmation in confirmations:
            try:
                error = confirmation.exception(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            except TimeoutError:
                self.report.unconfirmed += 1
                continue
            if error is None:
                confirmed.append(message)
                sent_again += confirmation.receipt().possible_duplicate
            else:
                self._fail(message, error)
        self.report.replayed += len(confirmed)
        self.report.sent_again += sent_again
        self.report.delivered_before += sum(message.redelivered for message in confirmed)
        if self.report.possible_duplicates is not None:
            self.report.possible_duplicates += sum(
                message.redelivered and message.delivery_count > 0 for message in confirmed
            )
        try:
            self.channel.ack([message.delivery for message in (*done, *confirmed)])
        except ReliableMQError:
            self._unacked.update(message.fingerprint for message in (*done, *confirmed) if message.message_id)
            self._in_doubt += sum(not message.message_id for message in confirmed)
            raise
        self.report.already_published += len(done)
        self._acked += len(done) + len(confirmed)

    def _target(self, message: DeadMessage) -> Target | None:
        if message.unreadable:
            self._fail(message, ConsumeError(message.unreadable))
            return None
        try:
            target = self.routing(message)
        except ConfigurationError as error:
            self._fail(message, error)
            return None
        if target is None:
            self._fail(message, ConsumeError("its origin is unknown: name a target"))
        return target

    def _fail(self, message: DeadMessage, error: ReliableMQError) -> None:
        self._failed[message.fingerprint] += 1
        self.report.failed += 1
        if len(self.report.failures) < _FAILURES_KEPT and self._failed_bytes < _FAILED_BYTES:
            self._failed_bytes += len(message.properties) + len(message.body)
            self.report.failures.append((message, error))

    def _reset(self, messages: list[DeadMessage]) -> None:
        if self.store is None:
            return
        keys = [key for message in messages if (key := self._key(message)) is not None]
        if keys:
            self.store.reset_many(keys)

    def _key(self, message: DeadMessage) -> str | None:
        """Return the key that a consumer without an ``idempotency_key`` claims."""
        if message.origin is None or not message.origin.queue or not message.message_id:
            return None
        namespace = message.delivery.source.namespace if self.namespace is None else self.namespace
        return key_prefix(namespace, message.origin.queue) + message.message_id

    def _wait_for_turn(self) -> None:
        """Wait until the rate allows the next publish, or until the stop."""
        if self._pace is not None:
            self.stop.wait(max(self._pace.due() - time.monotonic(), 0.0))
