"""The consumer session: every decision of a consumer, without I/O.

Events are reported by method calls: a channel opened or lost, deliveries read, results of handlers, publishes confirmed
or not. `ConsumerSession.poll` returns the `Actions` to carry out: deliveries to dispatch, messages to publish, bytes to
send, the time of the next call. The session uses no socket, clock or thread. ``now`` is a monotonic clock, in seconds.
The owner polls the session after every event, and at `Actions.wake_at`.

The tables of `reliable_mq.core.consumer.delivery` and `reliable_mq.core.consumer.lifecycle` list the states of a
delivery and of the consumer, with their events.

Invariants:

- A delivery of a lost channel never reaches a handler, and nothing is sent for it on another channel.
- An original is acked only after its handler finished, the store had it as done, or the message that replaces it (a
  dead letter, or the one that waits for the next attempt) was confirmed.
- No message is dispatched as attempt ``max_attempts + 1``, unless an earlier handler outlived its channel and failed
  after the message was dispatched again.
- After `stop` nothing is dispatched. Once `drained`, every outstanding delivery is requeued or acked.
- A delivery that the broker has forgotten (automatic acks) is dispatched even if its channel is lost.
- Nothing is requeued to a stream, which keeps its messages. The next channel begins at the oldest unsettled delivery.
- The memory for deliveries is bounded: a broker that ignores the prefetch altogether loses its connection.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from reliable_mq.core.consumer.admission import Admission, AdmissionResult
from reliable_mq.core.consumer.consumer_timeout import WARN_AT, ConsumerTimeout, ConsumerTimeoutMonitor
from reliable_mq.core.consumer.delivery import ChannelGeneration, Delivery, DeliveryState, message_names
from reliable_mq.core.consumer.dispatch import Dispatcher
from reliable_mq.core.consumer.lifecycle import ConsumerLifecycle, ConsumerState
from reliable_mq.core.consumer.outcomes import OutcomeHandler
from reliable_mq.core.consumer.settlement import LogEventKind, Settlement

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from reliable_mq.core.consumer.acks import AckBatcher, StreamOffset
    from reliable_mq.core.consumer.dispatch import Batcher, Work
    from reliable_mq.core.consumer.handler import Result
    from reliable_mq.core.consumer.kill_switch import KillSwitchMonitor
    from reliable_mq.core.consumer.lifecycle import SubscriptionChange
    from reliable_mq.core.consumer.quarantine import Quarantine
    from reliable_mq.core.consumer.settlement import LogEvent, SettledDeliveries
    from reliable_mq.core.retry.dead_letters import DeadLetters, RepublishRequest
    from reliable_mq.core.retry.delay_queues import DelayQueues
    from reliable_mq.core.statistics import ConsumerStatistics
    from reliable_mq.errors import ReliableMQError
    from reliable_mq.retry import RetryPolicy
    from reliable_mq.topology import Queue

_SPARE: Final = 1000  # unacked deliveries that are always accepted, whatever the prefetch is
_SHORTEST_POLL: Final = 0.02  # the minimum seconds between polls while handlers run


class Actions(NamedTuple):
    """The actions to carry out, in the order of the fields."""

    state: ConsumerState  # in ENDED, close the connection after these actions
    #: Whether to recall dispatched deliveries that no handler has begun with, and to report them as `postponed`. There
    #: are no other actions, and the session must be polled again.
    recall: bool = False
    dispatch: Sequence[Work] = ()  # deliveries for handlers, or batches for a batch handler
    declare: Sequence[Queue] = ()  # queues to declare on the open channel; report each as `declared`
    publish: Sequence[RepublishRequest] = ()  # mandatory and confirmed; report each as `published`
    data: bytes = b""  # bytes to write on the open channel
    settled: Sequence[SettledDeliveries] = ()  # the settlements in `data` that a trace shows
    #: Like `dispatch`, for the handler of quarantine, but after `data`. It is empty while a delivery is moved to
    #: quarantine: its copy may already come from there, and must kill no process before the original is acked.
    dispatch_quarantined: Sequence[Work] = ()
    subscribe: Sequence[SubscriptionChange] = ()  # changes of the subscription to make on the open channel
    log: Sequence[LogEvent] = ()
    wake_at: float | None = None  # when to poll if no event comes first; None for never
    report_after: int = 1  # the number of results to collect before they are reported, at the latest at `wake_at`


class ConsumerSession:
    """The decisions of one consumer.

    Not thread-safe: one thread or event loop owns the session.

    Args:
        dead_letters: The maker of dead letters. None if there is no queue for them, and ``basic.reject`` ends a
            delivery that is given up.
        broker_dead_letters: Whether the broker dead-letters rejected deliveries.
        acks: The batcher of acks. None for automatic acks, where the broker forgets the deliveries that it sends and
            nothing is retried.
        batcher: The grouping of deliveries for a batch handler. None for a plain handler.
        max_body_bytes, max_header_bytes: The sizes above which deliveries are dead-lettered without a handler. None for
            no limit.
        delay_queues: The delay queues for failed deliveries. None to hold them in this process.
        broker_retries: Whether the queue delays rejected deliveries and counts them.
        consumer_timeout: The consumer timeout of the broker, in seconds. None if it has none.
        grouped: Whether several deliveries may be with one handler, or with the worker that calls it.
    """

    def __init__(
        self,
        *,
        queue: str,
        retry: RetryPolicy,
        random: Random,
        dead_letters: DeadLetters | None,
        broker_dead_letters: bool,
        acks: AckBatcher | None,
        lifecycle: ConsumerLifecycle,
        batcher: Batcher | None = None,
        max_body_bytes: int | None = None,
        max_header_bytes: int | None = None,
        stream_offset: StreamOffset | None = None,
        delay_queues: DelayQueues | None = None,
        quarantine: Quarantine | None = None,
        broker_retries: bool = False,
        kill_switch: KillSwitchMonitor | None = None,
        consumer_timeout: float | None = None,
        grouped: bool = False,
    ) -> None:
        self._queue = queue
        self._quarantine = quarantine
        self._kill_switch = kill_switch
        self.lifecycle: Final = lifecycle
        self._settlement = Settlement(
            acks=acks,
            dead_letters=dead_letters,
            delay_queues=delay_queues,
            stream_offset=stream_offset,
            lifecycle=lifecycle,
            quarantine=quarantine,
        )
        self._acks = self._settlement.acks
        self.automatic: Final = acks is None  # the broker acks each delivery as it sends it
        self.stream_offset: Final = stream_offset
        self.statistics: Final[ConsumerStatistics] = self._settlement.statistics
        self._dispatcher = Dispatcher(batcher, quarantine, kill_switch)
        self._outcomes = OutcomeHandler(
            settlement=self._settlement,
            retry=retry,
            random=random,
            broker_dead_letters=broker_dead_letters,
            broker_retries=broker_retries,
            quarantine=quarantine,
            kill_switch=kill_switch,
        )
        self._admission = Admission(
            attempts=self._settlement.attempts,
            max_attempts=retry.max_attempts,
            max_body_bytes=max_body_bytes,
            max_header_bytes=max_header_bytes,
            keeps=dead_letters is not None or broker_dead_letters,
            broker_counts=broker_retries,
            statistics=self.statistics,
        )
        self._longest_delay = max(retry.schedule, default=0.0)
        self._grouped = grouped or batcher is not None
        self._timeouts = ConsumerTimeoutMonitor(consumer_timeout, self._acks)
        self._timed_out: list[Delivery] | None = None  # deliveries whose timeout ends the channel
        self._most: int | None = None  # above this many unacked deliveries, the prefetch was ignored; None: no bound
        self._running = 0

    # Events: the channel

    def opened(self, generation: int, channel: int, namespace: str = "") -> None:
        """Begin with a subscribed channel in the virtual host of ``namespace``."""
        self._settlement.opened(ChannelGeneration(generation, channel, self._queue, namespace))
        self._timeouts.clear()
        if self._quarantine is not None:
            self._quarantine.opened()
        self.lifecycle.opened()

    def delivered(self, deliveries: list[Delivery], now: float) -> None:
        """Process at least one delivery, in order. The session keeps the list.

        Raises:
            ValueError: If the deliveries break the protocol: a delivery tag does not follow the previous one, or far
                more deliveries are unacked than the prefetch allows.
        """
        if not self._receive(deliveries, now):
            return
        if self.automatic:
            self.statistics.redelivered += sum(delivery.redelivered for delivery in deliveries)
        elif not self.lifecycle.consuming:
            self._return_late(deliveries, now)
            return
        elif not self._admission.plain(deliveries):
            deliveries = [delivery for delivery in deliveries if self._admit(delivery, now)]
            self._dispatcher.add_any(deliveries, now)
            return
        self._dispatcher.add(deliveries, now)

    def oversized(self, delivery: Delivery, size: int, now: float) -> None:
        """Reject or requeue a delivery whose body of `size` bytes was not read."""
        if not self._receive([delivery], now):
            return
        if self._quarantine is not None and self._quarantine.has(delivery):
            self._quarantine.received()
        if self.lifecycle.consuming:
            self._settlement.reject(delivery, self._admission.without_body(delivery, size))
        else:
            self._settlement.requeue([delivery])

    def cancelled(self, consumer_tag: str, now: float) -> bool:
        """End a subscription that the broker cancelled. Return False without one.

        The caller reports dispatched deliveries that no handler has begun with as `recalled`.
        """
        if not self.lifecycle.cancelled(consumer_tag, now):
            return False
        self.statistics.cancelled += 1
        if self.stream_offset is not None:
            self.stream_offset.cancelled()
        self._end_subscription()
        return True

    def timed_out(self, timeout: ConsumerTimeout, now: float, at: float) -> None:
        """Fail the deliveries that timed out, which the broker has requeued.

        The caller reports `lost` next, unless the broker has `cancelled` the subscription. It first reports deliveries
        that no handler has begun with as `recalled`. Nothing is requeued to a stream, which is read again. ``at`` is
        ``now`` in seconds since 1970.
        """
        if self._settlement.source is None or self.stream_offset is not None or self.automatic:
            return
        self._settlement.requeue(self._take_queued())
        quarantine, tag = self._quarantine, timeout.consumer_tag
        seconds = timeout.timeout or self._timeouts.timeout or 0.0
        found: list[Delivery] = []
        if quarantine is not None and tag == quarantine.consumer_tag:
            found = [one for one in self._timeouts.unacked(0.0, now) if quarantine.has(one)]  # with any timeout
        elif seconds:
            found = [
                one
                for one in self._timeouts.unacked(seconds, now)
                if tag is None or not self._outcomes.in_quarantine(one)
            ]
        found = [delivery for delivery in found if delivery.state is DeliveryState.RUNNING]
        if len(found) > 1 and not self.lifecycle.subscribes:
            found = []  # the caller of `get` handles them in turn, and may hang on none
        if quarantine is not None and found:
            quarantine.timed_out()
        for delivery in found:
            alone = (
                not self._grouped
                or len(found) == 1
                or self._outcomes.in_quarantine(delivery)
                or (delivery.failures is not None and delivery.failures.alone)
            )
            self._outcomes.timed_out(delivery, timeout=seconds, now=now, at=at, alone=alone)
        self._timed_out = found

    def lost(self, generation: int) -> None:
        """Forget a lost channel.

        The caller reports dispatched deliveries that no handler has begun with as `recalled`.
        """
        if self._settlement.source is None or generation != self._settlement.source.generation:
            return
        self._settlement.lost(self._take_queued())
        self._timeouts.clear()
        timed_out = self._timed_out
        if self._kill_switch is not None:
            self._kill_switch.recalled()
            if self._kill_switch.paused and not timed_out:
                timed_out = None  # the deliveries only waited for the end of the pause: none is to blame
        if self._quarantine is not None:
            self._quarantine.lost(timed_out)
        self._timed_out = None
        self.lifecycle.lost()

    # Events: handlers and publishes

    def finished(self, results: Sequence[Result], now: float, *, since: float | None = None) -> None:
        """Apply results of dispatched deliveries, whose handlers ended at ``since``."""
        self._running -= len(results)
        self._outcomes.finished(results, now, now if since is None else since)

    def recalled(self, deliveries: Sequence[Delivery]) -> None:
        """Requeue dispatched deliveries that no handler has begun with or will."""
        self._running -= len(deliveries)
        self._settlement.return_unhandled(self._outcomes.still_running(deliveries))

    def postponed(self, deliveries: Sequence[Delivery]) -> None:
        """Queue dispatched deliveries again that no handler has begun with."""
        self._running -= len(deliveries)
        current = self._outcomes.still_running(deliveries)
        if self.lifecycle.consuming:
            self._dispatcher.put_back(current)
        else:
            self._settlement.return_unhandled(current)

    def published(self, republish: RepublishRequest, error: ReliableMQError | None, now: float) -> None:
        """Apply the outcome of a publish, which is confirmed if ``error`` is None."""
        self._outcomes.published(republish, error, now)

    def declared(self, queue: Queue, error: BaseException | None, now: float) -> None:
        """Apply the outcome of a declaration, which succeeded if ``error`` is None."""
        self._outcomes.declared(queue, error, now)

    def quarantine_refused(self, now: float) -> float:
        """Record a refused subscription to quarantine, which closes the channel.

        Returns:
            The seconds until the next subscription to quarantine.
        """
        return 0.0 if self._quarantine is None else self._quarantine.refused(now)

    # Events: the user

    def stop(self, now: float) -> bool:
        """Begin to stop. Return False if the stop has begun before.

        The caller reports dispatched deliveries that no handler has begun with as `recalled`.
        """
        if not self.lifecycle.stop(now):
            return False
        self._end_subscription()
        return True

    def end(self) -> None:
        """Stop at once.

        The caller reports dispatched deliveries that no handler has begun with as `recalled`.
        """
        self.lifecycle.end()
        self._end_subscription()

    def subscribing(self, prefetch: int) -> None:
        """Fit the session to a channel that is being subscribed."""
        self._acks.set_prefetch(prefetch)
        self.lifecycle.subscribing(prefetch)
        self._bound(prefetch)

    def change_prefetch(self, prefetch: int) -> bool:
        """Renew the subscription with this prefetch.

        Returns:
            False if that waits until nothing is unacked, to keep the role of the single active consumer.
        """
        if not self.lifecycle.is_single_active:
            self._acks.set_prefetch(prefetch)
            self._bound(prefetch, self.lifecycle.prefetch + self._acks.outstanding)
        return self.lifecycle.change_prefetch(prefetch)

    # Actions

    def poll(self, now: float) -> Actions:
        """Advance to ``now`` and return the actions to carry out."""
        settlement, dispatcher, lifecycle, outcomes = self._settlement, self._dispatcher, self.lifecycle, self._outcomes
        for item in settlement.due(now):
            delivery = outcomes.due(item, now)
            if delivery is not None:
                dispatcher.add_alone(delivery)
        dispatcher.due(now)
        overdue = self._timeouts.newly_overdue(now)
        if overdue:
            self._warn(overdue)
        if self._quarantine is not None and lifecycle.consuming and self._quarantine.subscribe(now):
            lifecycle.subscribe_to_quarantine()
        if outcomes.recall:
            outcomes.recall = False
            return Actions(lifecycle.state, recall=True)
        dispatch, count = dispatcher.take()
        self._running += count
        declare, publish = settlement.republish.take()
        steady = lifecycle.steady
        if not steady:
            lifecycle.tick(now, drained=self._drained)
        data = b""
        if steady or not lifecycle.silent:
            data = settlement.take_output(now, idle=not self._running)
            if data:
                lifecycle.sent(len(data), now)
        quarantined: Sequence[Work] = ()
        if dispatcher.has_quarantined and not settlement.republish.quarantining(settlement.source):
            quarantined = dispatcher.take_quarantined()
            self._running += len(quarantined)
        subscribe: Sequence[SubscriptionChange] = ()
        if not steady:
            subscribe = lifecycle.advance(now, drained=self._drained, unacked=bool(self._acks.outstanding))
        report_after = self._acks.due_after if self._acks.interval >= _SHORTEST_POLL else 1
        log, wake_at = settlement.take_log(), self._wake_at(now, report_after)
        return Actions(  # by position, which is twice as fast
            lifecycle.state,
            False,  # recall
            dispatch,
            declare,
            publish,
            data,
            settlement.take_settled(),
            quarantined,
            subscribe,
            log,
            wake_at,
            report_after,
        )

    # For anyone

    @property
    def source(self) -> ChannelGeneration | None:
        """The open channel, or None. A delivery of another channel is stale."""
        return self._settlement.source

    @property
    def paused(self) -> bool:
        return self._kill_switch is not None and self._kill_switch.paused

    @property
    def running(self) -> int:
        return self._running

    @property
    def republishing(self) -> int:
        """The number of retries and dead letters that are being published."""
        return self._settlement.republish.publishing

    @property
    def copying(self) -> bool:
        """Whether a retry or dead letter is being published, or is about to be."""
        return not self._settlement.republish.idle

    @property
    def holds_publishes(self) -> bool:
        """Whether a retry or dead letter is held for another publish. Thread-safe."""
        return self._settlement.holds_publishes

    @property
    def rested_at(self) -> float:
        """The time after which acks are sent when no handler runs, infinity for never."""
        return self._acks.rested_at

    @property
    def outstanding(self) -> int:
        """The number of deliveries that are neither acked nor requeued."""
        return self._acks.outstanding

    def _bound(self, prefetch: int, unacked: int = 0) -> None:
        """Bound the unacked deliveries of a broker that respects the prefetch."""
        bounded = prefetch and not self.automatic and self.stream_offset is None  # a stream may send whole chunks
        self._most = 4 * (prefetch + unacked) + _SPARE if bounded else None

    # Deliveries that came in

    def _receive(self, deliveries: list[Delivery], now: float) -> bool:
        """Stamp and record deliveries. Return False if their channel is lost."""
        source = self._settlement.source
        if source is None:
            self.statistics.stale += len(deliveries)
            return False
        self.statistics.delivered += len(deliveries)
        if not self.automatic:
            self._acks.delivered(deliveries[0].delivery_tag, deliveries[-1].delivery_tag)
            if self._most is not None and self._acks.outstanding > self._most:
                raise ValueError(f"{self._acks.outstanding} deliveries are unacked: the broker ignores the prefetch")
            self._timeouts.delivered(deliveries, now)
        for delivery in deliveries:
            delivery.came_from(source)
        if self.stream_offset is not None:
            self.stream_offset.delivered(deliveries, self._acks.first_unfinished)
        attempts = self._settlement.attempts
        if attempts:
            for delivery in deliveries:
                if not delivery.redelivered:
                    attempts.forget(delivery)
        return True

    def _admit(self, delivery: Delivery, now: float) -> bool:
        quarantine = self._quarantine
        forgiven = quarantine.received() if quarantine is not None and quarantine.has(delivery) else None
        result = self._admission.check(delivery, forgiven=forgiven)
        failures = delivery.failures
        if result.refusal is not None:
            self._settlement.dead_letter(delivery, result.refusal)
        elif result.path:
            # At most the policy's longest delay: any client can send a path, and a held delivery uses prefetch.
            left = min(sum(result.path) / 1000, self._longest_delay)
            if not self._settlement.republish.forward(delivery, result.path, suspect=result.suspect, left=left):
                self._settlement.hold(delivery, now + left)
        elif result.lost:
            self._outcomes.returned(delivery, now)
        elif self._move_to_quarantine(delivery, result):
            pass
        elif failures is not None and (failures.due > now or failures.alone):
            self._outcomes.wait(delivery, failures, now)
        else:
            return True
        return False

    def _return_late(self, deliveries: list[Delivery], now: float) -> None:
        """Return deliveries that come in a stop; one from quarantine is checked first."""
        in_quarantine = self._outcomes.in_quarantine
        deliveries = [one for one in deliveries if not in_quarantine(one) or self._admit(one, now)]
        self._settlement.return_unhandled(deliveries)

    def _move_to_quarantine(self, delivery: Delivery, result: AdmissionResult) -> bool:
        """Move a suspect to quarantine. Return False if it is none."""
        quarantine = self._quarantine
        if quarantine is None or quarantine.has(delivery):
            return False
        if not (result.suspect or quarantine.suspects(delivery)):
            return False
        self._outcomes.move_to_quarantine(delivery, quarantine.queue, known=result.suspect)
        return True

    def _warn(self, overdue: list[Delivery]) -> None:
        self.statistics.overdue += len(overdue)
        timeout = self._timeouts.timeout or 0.0
        text = (
            f"{message_names(overdue)}, for {timeout * WARN_AT:g} s; "
            f"the broker requeues a delivery that is unacked for {timeout:g} s, its consumer timeout"
        )
        self._settlement.log(LogEventKind.OVERDUE, None, text)

    def _end_subscription(self) -> None:
        if self._quarantine is not None:
            self._quarantine.ended()
        self._settlement.return_unhandled(self._take_queued())

    def _take_queued(self) -> list[Delivery]:
        """Take all deliveries that wait to be dispatched or to be published again."""
        return [] if self.automatic else [*self._dispatcher.clear(), *self._settlement.release()]

    @property
    def _drained(self) -> bool:
        """Whether nothing is dispatched, waits for dispatch, or is being published.

        If another channel is to follow, a handler that still runs with a timed-out delivery does not count.
        """
        running = self._running
        if self.lifecycle.state is ConsumerState.RESUBSCRIBING:
            running -= self._outcomes.overrunning
        return not running and self._dispatcher.empty and self._settlement.republish.idle

    @property
    def _deadline(self) -> float:
        """The time of the next timer of its parts, infinity for never."""
        acks_due = self._acks.deadline_if(idle=not self._running)
        return min(acks_due, self._settlement.deadline, self._dispatcher.deadline, self._timeouts.deadline)

    def _wake_at(self, now: float, report_after: int) -> float | None:
        lifecycle = self.lifecycle
        if lifecycle.state is ConsumerState.ENDED:
            return None
        at = self._deadline
        if report_after > 1 and self._running:
            latest = now + self._acks.interval
            rested = self._acks.rested_at  # earlier results are not reported one by one
            at = min(latest, rested if rested > now else latest, at)
        if not lifecycle.steady:
            if lifecycle.silent:
                at = max(at, now + _SHORTEST_POLL)
            at = min(at, lifecycle.deadline)
        return at if at < inf else None
