"""The consuming session: everything that a consumer decides, without I/O.

The shell tells the session what happened (a channel opened or lost, deliveries read, results of handlers, dead letters
confirmed or not, time passed) and asks what to do: which deliveries to hand to handlers, what to publish, which bytes
to send, when to call again. The session knows no socket, clock or thread; ``now`` is the shell's monotonic clock, in
seconds.

The way of a delivery::

    delivered --above a limit, undecodable, newer format, attempts used up--> dead letter
    delivered --there are delay queues that it has still to go through--> retry
    delivered --it has come back too often without a verdict--> quarantine, by way of a delay queue where there is one
    delivered --it has come back to quarantine--> retry, or where there are no delay queues: held
    delivered --its next attempt is not due yet--> held
    delivered ----------------------------------> work (alone, or in a batch) --taken by the shell--> running
    running --handled, or a duplicate of what is done--> finished --> acked, when the `AckBatcher` says so
    running --failed, attempts left--> retry, or where there are no delay queues: held --its delay is over--> work
    running --failed, attempts left, and the broker itself delays--> basic.reject, back to the queue
    running --claimed elsewhere, the store failed--> held, no attempt --> work
    running --its handler was cancelled--> basic.nack, back to the queue, no attempt; from the second time on, held
    running --its batch failed--> work, alone, no attempt
    running --failed, none left, or the handler says so--> dead letter
    dead letter, retry, quarantine --published and confirmed--> finished
    dead letter, retry, quarantine --not confirmed--> held --> published again
    retry --cannot be published, or an alarm blocks publishing--> held --its delay is over--> work
    dead letter --an alarm blocks publishing for long, and the broker itself can dead-letter--> basic.reject
    dead letter --there is no dead-letter queue--> basic.reject
    running --the broker's consumer timeout has taken it back--> failed, and gone; its result, if one comes, is dropped
    anything that is not running --drain or stop--> basic.nack, back to the queue
    anything --channel lost--> gone: the broker delivers it again; its result, if one comes, is dropped and counted

Invariants:

- a delivery of a lost channel never reaches a handler, and nothing is sent for it on another channel;
- an original is acked only after its handler finished, the store knew it as done, or what takes its place (a dead
  letter, the message that waits for the next attempt) was confirmed;
- no message is handed to a handler as attempt ``max_attempts + 1``, unless an earlier handler outlived its channel and
  failed after the message was handed out again;
- a delivery is in one place at a time: work, running, held, being dead-lettered, finished, or settled;
- after `stop` nothing more is handed out, and once `drained` nothing is outstanding that is not back at the broker or
  acked;
- what the broker has forgotten (automatic acks) is handed out whatever happens to its channel: it comes once;
- nothing goes back to a stream, which keeps what it has: the next channel begins at the oldest unsettled delivery.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from reliable_mq.core.consumer.admission import Admission, AdmissionResult
from reliable_mq.core.consumer.consumer_timeout import WARN_AT, ConsumerTimeout, ConsumerTimeoutMonitor, names
from reliable_mq.core.consumer.delivery import ChannelGeneration, Delivery, DeliveryState
from reliable_mq.core.consumer.dispatch import Dispatcher
from reliable_mq.core.consumer.outcomes import OutcomeHandler
from reliable_mq.core.consumer.settlement import LogEvent, LogEventKind, SessionState, Settlement
from reliable_mq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from random import Random

    from reliable_mq.core.consumer.acks import AckBatcher
    from reliable_mq.core.consumer.circuit_breaker import CircuitBreaker
    from reliable_mq.core.consumer.dispatch import Batcher
    from reliable_mq.core.consumer.handler import Result
    from reliable_mq.core.consumer.quarantine import Quarantine
    from reliable_mq.core.consumer.stream_offset import StreamOffset
    from reliable_mq.core.retry.dead_letters import DeadLetters, RepublishRequest
    from reliable_mq.core.retry.delay_queues import DelayQueues
    from reliable_mq.core.statistics import ConsumerStatistics
    from reliable_mq.errors import ReliableMQError
    from reliable_mq.retry import RetryPolicy
    from reliable_mq.topology import Queue

__all__ = ["ConsumingSession", "LogEvent", "LogEventKind", "SessionState"]


class ConsumingSession:
    """See the module. Not thread-safe: one thread, or one event loop, owns it.

    Args:
        queue: the name of the queue.
        retry: how a failed delivery is tried again.
        random: the source of the jitter.
        dead_letters: makes the dead letters; None where there is no queue for them: ``basic.reject`` ends what is given
            up.
        broker_dead_letters: whether the broker itself dead-letters what is rejected.
        acks: batches the acks; None with automatic acks, where the broker forgets what it sends and nothing is tried
            again.
        batcher: groups deliveries for a batch handler; None for a plain one.
        max_body_bytes, max_header_bytes: larger deliveries are dead-lettered unseen; None for no limit.
        claim_wait: seconds until a delivery that is claimed elsewhere is looked at again.
        position: where the consumption of a stream is; None for queues.
        ladder: the delay queues in which failed deliveries wait; None where they are held here.
        quarantine: of the queue; None where there is none.
        breaker: the kill switch; None where there is none.
        broker_retries: whether the queue itself delays what is rejected, and counts it.
        consumer_timeout: the broker's, in seconds; None where it has none.
        grouped: whether several deliveries may be with one handler, or with the worker that calls it.

    Attributes:
        automatic: whether acks are.
        position: as given.
        statistics: counts, written here and read by anyone.
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
        batcher: Batcher | None = None,
        max_body_bytes: int | None = None,
        max_header_bytes: int | None = None,
        claim_wait: float = 1.0,
        position: StreamOffset | None = None,
        ladder: DelayQueues | None = None,
        quarantine: Quarantine | None = None,
        broker_retries: bool = False,
        breaker: CircuitBreaker | None = None,
        consumer_timeout: float | None = None,
        grouped: bool = False,
    ) -> None:
        self._queue = queue
        self._batcher = batcher
        self._quarantine = quarantine
        self._breaker = breaker
        self._ways = Settlement(acks=acks, dead_letters=dead_letters, ladder=ladder, position=position)
        self._acks = self._ways.acks
        self.automatic: Final = acks is None
        self.position = position
        self.statistics: ConsumerStatistics = self._ways.statistics
        self._hand = Dispatcher(batcher, quarantine, breaker)
        self._results = OutcomeHandler(
            ways=self._ways,
            retry=retry,
            random=random,
            broker_dead_letters=broker_dead_letters,
            broker_retries=broker_retries,
            claim_wait=claim_wait,
            quarantine=quarantine,
            breaker=breaker,
        )
        self._admission = Admission(
            book=self._ways.book,
            max_attempts=retry.max_attempts,
            max_body_bytes=max_body_bytes,
            max_header_bytes=max_header_bytes,
            keeps=dead_letters is not None or broker_dead_letters,
            broker_counts=broker_retries,
            statistics=self.statistics,
        )
        self._longest_delay = max(retry.schedule, default=0.0)
        self._grouped = grouped or batcher is not None
        self._ages = ConsumerTimeoutMonitor(consumer_timeout, self._acks)
        self._timed_out: list[Delivery] | None = None  # for which the channel is given up
        self._to_isolate = False
        self._running = 0

    # What happened

    def opened(self, generation: int, channel: int, namespace: str = "") -> None:
        """A channel is open and subscribed, in the virtual host of this namespace."""
        self._ways.opened(ChannelGeneration(generation, channel, self._queue, namespace))
        self._ages.clear()
        if self._quarantine is not None:
            self._quarantine.opened()
        if self._ways.state is SessionState.DRAINING:
            self._ways.state = SessionState.CONSUMING

    def delivered(self, deliveries: list[Delivery], now: float) -> None:
        """Deliveries came in on the open channel, in their order; at least one. The list is the session's to keep."""
        source = self._ways.source
        if source is None:
            self.statistics.stale += len(deliveries)
            return
        self.statistics.delivered += len(deliveries)
        if not self.automatic:
            self._acks.delivered(deliveries[0].delivery_tag, deliveries[-1].delivery_tag)
            self._ages.delivered(deliveries, now)
        for delivery in deliveries:
            delivery.source = source
        if self.position is not None:
            self.position.delivered(deliveries, self._acks.first_unfinished)
        if self.automatic:
            self.statistics.redelivered += sum(delivery.redelivered for delivery in deliveries)
        elif self._ways.state is not SessionState.CONSUMING:
            self._ways.hand_back(deliveries)
            return
        elif not self._admission.plain(deliveries):
            deliveries = [delivery for delivery in deliveries if self._admit(delivery, now)]
            self._hand.add_any(deliveries, now)
            return
        self._hand.add(deliveries, now)

    def oversized(self, delivery: Delivery, size: int, now: float) -> None:
        """A delivery came in on the open channel without its body of `size` bytes: nothing but the broker has that."""
        source = self._ways.source
        if source is None:
            self.statistics.stale += 1
            return
        self.statistics.delivered += 1
        self._acks.delivered(delivery.delivery_tag, delivery.delivery_tag)
        self._ages.delivered([delivery], now)
        delivery.source = source
        if self.position is not None:
            self.position.delivered([delivery], self._acks.first_unfinished)
        if self._quarantine is not None and self._quarantine.has(delivery):
            self._quarantine.received()
        if self._ways.state is SessionState.CONSUMING:
            self._ways.reject(delivery, self._admission.without_body(delivery, size))
        else:
            self._ways.hand_back([delivery])

    def finished(self, results: Sequence[Result], now: float, *, since: float | None = None) -> None:
        """These were handed out, and this is what became of them; of what was handled, ``since`` then at the latest."""
        self._running -= len(results)
        self._results.finished(results, now, now if since is None else since)

    def published(self, republish: RepublishRequest, error: ReliableMQError | None, now: float) -> None:
        """What was taken to be published is confirmed, or it is known that it was not."""
        self._results.published(republish, error, now)

    def declared(self, queue: Queue, error: BaseException | None, now: float) -> None:
        """A queue that was taken is declared, or it is known that it was not."""
        self._results.declared(queue, error, now)

    def withdrawn(self, deliveries: Sequence[Delivery]) -> None:
        """These were handed out, and no handler has begun with them, nor will."""
        self._running -= len(deliveries)
        self._ways.hand_back(self._results.still_running(deliveries))

    def postponed(self, deliveries: Sequence[Delivery], now: float) -> None:
        """These were handed out, no handler has begun with them, and they are to be handed out again after a pause."""
        self._running -= len(deliveries)
        current = self._results.still_running(deliveries)
        if current and self._ways.state is not SessionState.CONSUMING:
            self._ways.hand_back(current)
            return
        self._hand.put_back(current, now)

    def tick(self, now: float) -> None:
        """Time passed; see `deadline`."""
        for item in self._ways.due(now):
            delivery = self._results.due(item)
            if delivery is not None:
                self._hand.add_alone(delivery)
        self._hand.due(now)
        if self._quarantine is not None and self._ways.state is SessionState.CONSUMING:
            self._to_isolate |= self._quarantine.subscribe(now)
        overdue = self._ages.look(now)
        if overdue:
            self._warn(overdue)

    def timed_out(self, strike: ConsumerTimeout, now: float, at: float) -> None:
        """The broker has taken back what was unacked for too long, and is about to be told `lost`, or was told `drain`.

        What a handler has begun with has failed, then. What none has is to be `withdrawn` before. Nothing goes back to
        a stream, which is read again.

        Args:
            strike: what the broker said.
            now: monotonic time.
            at: the same, in seconds since 1970.
        """
        if self._ways.source is None or self.position is not None or self.automatic:
            return
        self._ways.hand_back(self._take_everything())
        quarantine, tag = self._quarantine, strike.consumer_tag
        timeout = strike.timeout or self._ages.timeout or 0.0
        found: list[Delivery] = []
        if quarantine is not None and tag == quarantine.consumer_tag:
            found = [one for one in self._ages.unacked(0.0, now) if quarantine.has(one)]  # whatever the timeout is
        elif timeout:
            found = [one for one in self._ages.unacked(timeout, now) if tag is None or not self._isolated(one)]
        found = [delivery for delivery in found if delivery.state is DeliveryState.RUNNING]
        if quarantine is not None:
            quarantine.struck |= bool(found)
        for delivery in found:
            alone = (
                not self._grouped
                or len(found) == 1
                or self._isolated(delivery)
                or (delivery.failures is not None and delivery.failures.alone)
            )
            self._results.timed_out(delivery, timeout=timeout, now=now, at=at, alone=alone)
        self._timed_out = found

    def lost(self, generation: int) -> None:
        """The channel is gone. What was handed out and has not begun is to be `withdrawn`."""
        if self._ways.source is None or generation != self._ways.source.generation:
            return
        self._ways.lost(self._take_everything())
        self._ages.clear()
        if self._breaker is not None:
            self._breaker.withdrawn()
        if self._quarantine is not None:
            self._quarantine.lost(self._timed_out)
        self._timed_out = None
        self._to_isolate = False

    def drain(self) -> None:
        """The broker has ended the subscription; the channel is open: hand back what has not begun, ack what ends.

        What was handed out and has not begun is to be `withdrawn`.
        """
        self.statistics.cancelled += 1
        if self._ways.state is SessionState.CONSUMING:
            self._ways.state = SessionState.DRAINING
        self._end_subscription()

    def stop(self, *, keep: bool = False) -> None:
        """As `drain`, for good.

        Args:
            keep: send nothing back: the channel is closed when `drained`. Of several consumers, of which one is active,
                the next one would else be given newer messages before those that come back.
        """
        self._ways.state = SessionState.STOPPING
        self._ways.keeps |= keep
        self._end_subscription()

    def set_prefetch(self, prefetch: int) -> None:
        """The prefetch is ``prefetch`` from now on.

        Raises:
            ConfigurationError: ``ack_every`` or ``batch_size`` does not fit it; nothing has changed.
        """
        if self._batcher is not None and 0 < prefetch < self._batcher.batch_size:
            size = self._batcher.batch_size
            raise ConfigurationError(f"batch_size={size} does not fit prefetch={prefetch}: lower it")
        self._acks.set_prefetch(prefetch)

    # What to do

    def take_work(self) -> list[Delivery]:
        """Take the deliveries to hand out; for a plain handler."""
        work = self._hand.take_work()
        self._running += len(work)
        return work

    def take_batches(self) -> list[list[Delivery]]:
        """Take the batches to hand out; for a batch handler."""
        batches = self._hand.take_batches()
        self._running += sum(map(len, batches))
        return batches

    def take_isolated(self) -> list[Delivery | list[Delivery]]:
        """Take what to hand out from quarantine, where possible beside what runs; for either kind of handler.

        To be handed out after the output was written, and nothing while something is moved there: it may be the message
        that comes from there, which is to kill no process before its original is acked, or there are two of it.
        """
        isolated = self._hand.take_isolated(lambda: self._ways.out.isolating(self._ways.source))
        self._running += len(isolated)
        return list(isolated) if self._batcher is None else [[delivery] for delivery in isolated]

    def take_pause(self) -> bool:
        """Whether what was handed out and has not begun is to be taken back, and `postponed`."""
        pause, self._results.to_pause = self._results.to_pause, False
        return pause

    def take_subscription(self) -> bool:
        """Whether to subscribe to quarantine on the open channel, now."""
        subscribe, self._to_isolate = self._to_isolate, False
        return subscribe

    def take_republishes(self) -> list[RepublishRequest]:
        """Take what to publish, mandatory and confirmed; each is to be answered with `published`."""
        return self._ways.out.take()

    def take_declarations(self) -> Iterable[Queue]:
        """Take the queues to declare on the open channel; each is to be answered with `declared`."""
        return self._ways.out.take_declarations()

    def take_notices(self) -> list[LogEvent]:
        """Take what to log."""
        notices, self._ways.notices = self._ways.notices, []
        return notices

    def take_output(self, now: float) -> bytes:
        """Take the bytes to write on the open channel; empty where there are none."""
        return self._ways.take_output(now, idle=not self._running)

    @property
    def deadline(self) -> float | None:
        """When `tick` and `take_output` are to be called, though nothing happens until then; None for never."""
        acks = self._acks.deadline_if(idle=not self._running)
        times = (acks, self._ways.deadline, self._hand.deadline, self._ages.deadline)
        return min((time for time in times if time is not None), default=None)

    @property
    def state(self) -> SessionState:
        """What is done with deliveries."""
        return self._ways.state

    @property
    def source(self) -> ChannelGeneration | None:
        """The open channel, by which deliveries of a lost one are told; None while there is none."""
        return self._ways.source

    @property
    def drained(self) -> bool:
        """Whether nothing is handed out or to be, and nothing is being published.

        Where another channel is to follow, what runs on though the broker has taken it back is not waited for.
        """
        running = self._running
        if self._ways.state is SessionState.DRAINING:
            running -= self._results.overrunning
        return not running and self._hand.empty and self._ways.out.idle

    @property
    def paused(self) -> bool:
        """Whether the kill switch holds deliveries back."""
        return self._breaker is not None and self._breaker.paused

    @property
    def running(self) -> int:
        """Deliveries that are handed out."""
        return self._running

    @property
    def held(self) -> int:
        """Deliveries that wait for their next attempt, or for the next try to dead-letter them."""
        return self._ways.held

    @property
    def acks_due_after(self) -> int:
        """How many more deliveries must be handled, at least, before there is something to ack by their number."""
        return self._acks.due_after

    @property
    def rested_at(self) -> float:
        """From when on what is handled is acked as soon as no handler runs; infinite for never."""
        return self._acks.rested_at

    @property
    def outstanding(self) -> int:
        """Deliveries that are neither acked nor given back."""
        return self._acks.outstanding

    # Deliveries that came in

    def _admit(self, delivery: Delivery, now: float) -> bool:
        quarantine = self._quarantine
        forgiven = quarantine.received() if quarantine is not None and quarantine.has(delivery) else None
        finding = self._admission.look(delivery, forgiven=forgiven)
        failures = delivery.failures
        if finding.refusal is not None:
            self._ways.dead_letter(delivery, finding.refusal)
        elif finding.path:
            if not self._ways.out.forward(delivery, finding.path, suspect=finding.suspect):
                # No longer than what fails: any client can send a path, and what is held takes the place of another.
                self._ways.hold(delivery, now + min(sum(finding.path) / 1000, self._longest_delay))
        elif finding.lost:
            self._results.returned(delivery, now)
        elif self._isolate(delivery, finding):
            pass
        elif failures is not None and (failures.due > now or failures.alone):
            self._ways.hold(delivery, max(failures.due, now))
        else:
            return True
        return False

    def _isolate(self, delivery: Delivery, finding: AdmissionResult) -> bool:
        """Move it to quarantine, if it is suspect, not from there, and can be moved."""
        quarantine = self._quarantine
        if quarantine is None or quarantine.has(delivery):
            return False
        if not (finding.suspect or quarantine.suspects(delivery)):
            return False
        return self._results.isolate(delivery, known=finding.suspect)

    def _isolated(self, delivery: Delivery) -> bool:
        return self._quarantine is not None and self._quarantine.has(delivery)

    def _warn(self, overdue: list[Delivery]) -> None:
        self.statistics.overdue += len(overdue)
        timeout = self._ages.timeout or 0.0
        text = (
            f"{names(overdue)}, for {timeout * WARN_AT:g} s; "
            f"the broker takes back what is unacked for {timeout:g} s, its consumer timeout"
        )
        self._ways.note(LogEventKind.OVERDUE, None, text)

    def _end_subscription(self) -> None:
        if self._quarantine is not None:
            self._quarantine.ended()
        self._to_isolate = False
        self._ways.hand_back(self._take_everything())

    def _take_everything(self) -> list[Delivery]:
        """Empty every place where a delivery waits to be handed out, or to be dead-lettered again."""
        return [] if self.automatic else [*self._hand.clear(), *self._ways.release()]
