"""The consuming session: everything that a consumer decides, without I/O.

The shell tells the session what happened (a channel opened or lost, deliveries read, results of handlers, dead letters
confirmed or not, time passed) and asks what to do: which deliveries to hand to handlers, what to publish, which bytes
to send, when to call again. The session knows no socket, clock or thread; ``now`` is the shell's monotonic clock, in
seconds.

The way of a delivery::

    delivered --above a limit, undecodable, newer format, attempts used up--> dead letter
    delivered --there are delay queues that it has still to go through--> retry
    delivered --it has come back too often without a verdict--> quarantine
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

import enum
import heapq
import itertools
from typing import TYPE_CHECKING, Final

from reliable_mq.core.acks import AckBatcher
from reliable_mq.core.admission import Admission, Finding, used_up
from reliable_mq.core.attempts import FailureBook, Failures
from reliable_mq.core.breaker import Change
from reliable_mq.core.codec import encode_ack, encode_nack, encode_reject
from reliable_mq.core.consumer_statistics import ConsumerStatistics
from reliable_mq.core.deadletters import Purpose, Republish
from reliable_mq.core.delivery import Delivery, Source
from reliable_mq.core.handling import Failed, Outcome, Result, What
from reliable_mq.core.handout import HandOut
from reliable_mq.core.notices import Notice, NoticeKind
from reliable_mq.core.republishing import Republishing
from reliable_mq.errors import ConfigurationError, PublishBlocked, PublishRefused, PublishReturned, ReliableMQError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from random import Random

    from reliable_mq.core.acks import Frames
    from reliable_mq.core.batching import Batcher
    from reliable_mq.core.breaker import Breaker
    from reliable_mq.core.deadletters import DeadLetters
    from reliable_mq.core.failure import Failure
    from reliable_mq.core.ladder import Ladder
    from reliable_mq.core.positions import StreamPosition
    from reliable_mq.core.quarantine import Quarantine
    from reliable_mq.retry import RetryPolicy
    from reliable_mq.topology import Queue

__all__ = ["ConsumingSession", "Notice", "NoticeKind", "State"]

_UNIDENTIFIED: Final = "not handed to a handler: it has no message_id, by which the idempotency store would know it"
_LONGEST_WAIT: Final = 60.0  # seconds between two tries to dead-letter, or to reach the store
_PATIENCE: Final = 3  # tries to publish a dead letter while an alarm blocks that, where the broker can dead-letter


class State(enum.Enum):
    """What is done with deliveries."""

    CONSUMING = "consuming"
    """They are handed out."""
    DRAINING = "draining"
    """They go back to the broker, until another channel is opened: the subscription has ended."""
    STOPPING = "stopping"
    """They go back to the broker, for good."""


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

    Attributes:
        automatic: whether acks are.
        position: as given.
        statistics: counts, written here and read by anyone.
        state: what is done with deliveries.
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
        position: StreamPosition | None = None,
        ladder: Ladder | None = None,
        quarantine: Quarantine | None = None,
        broker_retries: bool = False,
        breaker: Breaker | None = None,
    ) -> None:
        self._queue = queue
        self._retry = retry
        self._random = random
        self._out = Republishing(dead_letters, ladder)
        self._broker_dead_letters = broker_dead_letters
        self._acks = acks or AckBatcher(ack_every=1, ack_interval=0.0, prefetch=0)
        self.automatic: Final = acks is None
        self._batcher = batcher
        self._claim_wait = claim_wait
        self._quarantine = quarantine
        self._broker_retries = broker_retries
        self._breaker = breaker
        self._to_pause = False
        self._hand = HandOut(batcher, quarantine, breaker)
        self._to_isolate = False
        self._flush = False  # what is finished is acked now: quarantine has a prefetch of 1
        self.position = position
        self._book = FailureBook()
        self._source: Source | None = None
        self._held: list[tuple[float, int, Delivery | Republish]] = []
        self._order = itertools.count()  # breaks ties in _held
        self._output: list[bytes] = []
        self._back: list[int] = []  # delivery tags that go back with the next output
        self._notices: list[Notice] = []
        self._noted: Failure | None = None  # of the last batch that failed
        self._running = 0
        self.statistics: ConsumerStatistics = self._acks.statistics
        self.state = State.CONSUMING
        self._admission = Admission(
            book=self._book,
            max_attempts=retry.max_attempts,
            max_body_bytes=max_body_bytes,
            max_header_bytes=max_header_bytes,
            keeps=dead_letters is not None or broker_dead_letters,
            broker_counts=broker_retries,
            statistics=self.statistics,
        )
        self._outcomes = {
            What.DUPLICATE: self._duplicate,
            What.IN_PROGRESS: self._in_progress,
            What.EXHAUSTED: self._exhausted,
            What.UNIDENTIFIED: self._unidentified,
            What.STORE_FAILED: self._store_failed,
            What.CANCELLED: self._cancelled,
        }

    # What happened

    def opened(self, generation: int, channel: int) -> None:
        """A channel is open and subscribed."""
        self._source = Source(generation, channel, self._queue)
        self._acks.opened(generation)
        self._out.opened()
        if self._quarantine is not None:
            self._quarantine.opened()
        if self.state is State.DRAINING:
            self.state = State.CONSUMING

    def delivered(self, deliveries: list[Delivery], now: float) -> None:
        """Deliveries came in on the open channel, in their order; at least one."""
        source = self._source
        if source is None:
            self.statistics.stale += len(deliveries)
            return
        self.statistics.delivered += len(deliveries)
        if not self.automatic:
            self._acks.delivered(deliveries[0].delivery_tag, deliveries[-1].delivery_tag)
        for delivery in deliveries:
            delivery.source = source
        if self.position is not None:
            self.position.delivered(deliveries, self._acks.lowest)
        if self.automatic:
            self.statistics.redelivered += sum(delivery.redelivered for delivery in deliveries)
        elif self.state is not State.CONSUMING:
            self._hand_back(deliveries)
            return
        elif not self._admission.plain(deliveries):
            deliveries = [delivery for delivery in deliveries if self._admit(delivery, now)]
            self._hand.add_any(deliveries, now)
            return
        self._hand.add(deliveries, now)

    def finished(self, results: Sequence[Result], now: float, *, since: float | None = None) -> None:
        """These were handed out, and this is what became of them; of what was handled, ``since`` then at the latest."""
        self._running -= len(results)
        if self.automatic:
            self._finished_automatically(results)
            return
        handled = [result for result in results if isinstance(result, Delivery)]
        if self._breaker is not None:
            self._switch(self._breaker, len(handled), sum(isinstance(result, Failed) for result in results), now)
        if handled:
            self._handled(handled, now if since is None else since)
        if len(handled) == len(results):
            return
        for result in results:
            if isinstance(result, Failed):
                self._failed(result, now)
            elif isinstance(result, Outcome):
                if result.delivery.source is self._source:
                    self._outcomes[result.what](result, now)
                else:
                    self.statistics.stale += 1

    def published(self, republish: Republish, error: ReliableMQError | None, now: float) -> None:
        """What was taken to be published is confirmed, or it is known that it was not."""
        self._out.settled()
        delivery = republish.delivery
        if delivery.source is not self._source:
            self.statistics.stale += 1
        elif error is not None:
            self._not_published(republish, error, now)
        else:
            finished = self._acks.finished(self._acks.generation, (delivery.delivery_tag,), now)
            self._flush |= self._in_quarantine(delivery)
            if republish.purpose is Purpose.DEAD_LETTER:
                self.statistics.dead_lettered += finished
                self._book.forget(delivery)
            elif republish.purpose is Purpose.RETRY:
                self.statistics.delayed += finished
            else:
                self.statistics.isolated += finished

    def declared(self, queue: Queue, error: BaseException | None, now: float) -> None:
        """A queue that was taken is declared, or it is known that it was not."""
        if error is not None:
            self._notices.append(Notice(NoticeKind.NOT_DECLARED, None, f"{queue.name!r}: {error}"))
        for republish in self._out.declared(queue.name, ok=error is None):
            self._hold_instead(republish.delivery, now)

    def withdrawn(self, deliveries: Sequence[Delivery]) -> None:
        """These were handed out, and no handler has begun with them, nor will."""
        self._running -= len(deliveries)
        self._hand_back([delivery for delivery in deliveries if delivery.source is self._source])

    def postponed(self, deliveries: Sequence[Delivery], now: float) -> None:
        """These were handed out, no handler has begun with them, and they are to be handed out again after a pause."""
        self._running -= len(deliveries)
        current = [delivery for delivery in deliveries if delivery.source is self._source or self.automatic]
        if current and self.state is not State.CONSUMING:
            self._hand_back(current)
            return
        self._hand.put_back(current, now)

    def tick(self, now: float) -> None:
        """Time passed; see `deadline`."""
        while self._held and self._held[0][0] <= now:
            item = heapq.heappop(self._held)[2]
            if isinstance(item, Republish):
                self._out.again(item)
            elif item.failures is not None and item.failures.count >= self._retry.max_attempts:
                self._dead_letter(item, used_up(item.failures.count, self._retry.max_attempts))
            else:
                self._hand.add_alone(item)
        self._hand.due(now)
        if self._quarantine is not None and self.state is State.CONSUMING:
            self._to_isolate |= self._quarantine.subscribe(now)

    def lost(self, generation: int) -> None:
        """The channel is gone. What was handed out and has not begun is to be `withdrawn`."""
        if self._source is None or generation != self._source.generation:
            return
        self._source = None
        if self.position is not None:
            self.position.lost(self._acks.lowest)
        self.statistics.lost += self._acks.lost()
        self._take_everything()
        self._out.lost()
        if self._breaker is not None:
            self._breaker.withdrawn()
        if self._quarantine is not None:
            self._quarantine.lost()
        self._to_isolate = False
        self._output.clear()
        self._back.clear()

    def drain(self) -> None:
        """The broker has ended the subscription; the channel is open: hand back what has not begun, ack what ends.

        What was handed out and has not begun is to be `withdrawn`.
        """
        self.statistics.cancelled += 1
        if self.state is State.CONSUMING:
            self.state = State.DRAINING
        self._hand_back(self._take_everything())

    def stop(self) -> None:
        """As `drain`, for good."""
        self.state = State.STOPPING
        self._hand_back(self._take_everything())

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
        """Take what to hand out from quarantine, where possible beside what runs; for either kind of handler."""
        isolated = self._hand.take_isolated()
        self._running += len(isolated)
        return list(isolated) if self._batcher is None else [[delivery] for delivery in isolated]

    def take_pause(self) -> bool:
        """Whether what was handed out and has not begun is to be taken back, and `postponed`."""
        pause, self._to_pause = self._to_pause, False
        return pause

    def take_subscription(self) -> bool:
        """Whether to subscribe to quarantine on the open channel, now."""
        subscribe, self._to_isolate = self._to_isolate, False
        return subscribe

    def take_republishes(self) -> list[Republish]:
        """Take what to publish, mandatory and confirmed; each is to be answered with `published`."""
        return self._out.take()

    def take_declarations(self) -> Iterable[Queue]:
        """Take the queues to declare on the open channel; each is to be answered with `declared`."""
        return self._out.take_declarations()

    def take_notices(self) -> list[Notice]:
        """Take what to log."""
        notices, self._notices = self._notices, []
        return notices

    def take_output(self, now: float) -> bytes:
        """Take the bytes to write on the open channel; empty where there are none."""
        flush, self._flush = self._flush or self.state is not State.CONSUMING, False
        frames = self._acks.flush() if flush else self._acks.due(now)
        if frames and self._source is not None:
            self._send_acks(self._source, frames)
        if self._back and self._source is not None:
            self._send_back(self._source)
        if not self._output:
            return b""
        output = b"".join(self._output)
        self._output.clear()
        return output

    @property
    def deadline(self) -> float | None:
        """When `tick` and `take_output` are to be called, though nothing happens until then; None for never."""
        held = self._held[0][0] if self._held else None
        times = (self._acks.deadline, held, self._hand.deadline)
        return min((time for time in times if time is not None), default=None)

    @property
    def source(self) -> Source | None:
        """The open channel, by which deliveries of a lost one are told; None while there is none."""
        return self._source

    @property
    def drained(self) -> bool:
        """Whether nothing is handed out or to be, and nothing is being published."""
        return not self._running and self._hand.empty and self._out.idle

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
        return len(self._held)

    @property
    def ack_every(self) -> int:
        """Finished deliveries that are acked together."""
        return self._acks.ack_every

    @property
    def outstanding(self) -> int:
        """Deliveries that are neither acked nor given back."""
        return self._acks.outstanding

    # Results

    def _admit(self, delivery: Delivery, now: float) -> bool:
        quarantine = self._quarantine
        forgiven = quarantine.losses if quarantine is not None and quarantine.has(delivery) else None
        finding = self._admission.look(delivery, forgiven=forgiven)
        if finding.refusal is not None:
            self._dead_letter(delivery, finding.refusal)
        elif finding.path:
            if not self._out.forward(delivery, finding.path, suspect=finding.suspect):
                self._hold(delivery, now + sum(finding.path) / 1000)
        elif self._isolate(delivery, finding):
            pass
        elif delivery.failures is not None and delivery.failures.due > now:
            self._hold(delivery, delivery.failures.due)
        else:
            return True
        return False

    def _isolate(self, delivery: Delivery, finding: Finding) -> bool:
        """Move it to quarantine, if it is suspect, not from there, and can be moved."""
        quarantine = self._quarantine
        if quarantine is None or quarantine.has(delivery):
            return False
        if not (finding.suspect or quarantine.suspects(delivery)):
            return False
        moved = self._out.isolate(delivery, quarantine.queue)
        if moved:
            self._notices.append(Notice(NoticeKind.ISOLATED, delivery, f"to {quarantine.queue.name!r}"))
        return moved

    def _in_quarantine(self, delivery: Delivery) -> bool:
        return self._quarantine is not None and self._quarantine.has(delivery)

    def _switch(self, breaker: Breaker, handled: int, failed: int, now: float) -> None:
        if not handled and not failed:
            breaker.withdrawn()  # the store had the last word, which says nothing about the handler
            return
        change = breaker.settled(handled, failed, now)
        if change is Change.PAUSED:
            self._to_pause = True
            self.statistics.pauses += 1
            self._notices.append(Notice(NoticeKind.PAUSED, None, f"a probe follows in {breaker.pause:g} s"))
        elif change is Change.RESUMED:
            self._notices.append(Notice(NoticeKind.RESUMED, None, "a probe succeeded"))

    def _handled(self, deliveries: list[Delivery], now: float) -> None:
        source = self._source
        current = [delivery for delivery in deliveries if delivery.source is source]
        self.statistics.stale += len(deliveries) - len(current)
        tags = [delivery.delivery_tag for delivery in current]
        self.statistics.handled += self._acks.finished(self._acks.generation, tags, now)
        if self._quarantine is not None and self._quarantine.active:
            self._flush |= any(map(self._quarantine.has, current))
        if self._book:
            for delivery in current:
                if delivery.failures is not None:
                    self._book.forget(delivery)

    def _finished_automatically(self, results: Sequence[Result]) -> None:
        for result in results:
            if isinstance(result, Failed):
                self.statistics.failed += 1
                self._note(NoticeKind.DROPPED, result)
            elif isinstance(result, Outcome) and result.what is What.CANCELLED:
                self.statistics.failed += 1
                self._notices.append(Notice(NoticeKind.DROPPED, result.delivery, result.detail))
            else:
                self.statistics.handled += 1

    def _failed(self, result: Failed, now: float) -> None:
        delivery, failure = result.delivery, result.failure
        failures = self._remember(delivery, failure) if result.alone else Failures()
        if delivery.source is not self._source:
            self.statistics.stale += 1
            return
        if result.detail:
            self._notices.append(Notice(NoticeKind.STORE_FAILED, delivery, result.detail))
        if delivery.flaw is not None:
            self._dead_letter(delivery, f"its properties are broken: {delivery.flaw}")
        elif not result.alone:
            if failure is not self._noted:  # once for a batch, whose deliveries share it
                self._noted = failure
                self._note(NoticeKind.BATCH_FAILED, result)
            delivery.redelivered = True
            self._hold(delivery, now)
        elif failure.verdict is not None:
            self._dead_letter(delivery, failure.verdict)
        else:
            self._retry_or_give_up(delivery, failures, failure, now)

    def _retry_or_give_up(self, delivery: Delivery, failures: Failures, failure: Failure, now: float) -> None:
        delay = self._retry.delay(failures.count, self._random)
        if delay is None:
            self._dead_letter(delivery, used_up(failures.count, self._retry.max_attempts))
            return
        if failure.kind is not None and not self._retry.retries(failure.kind):
            self._dead_letter(delivery, f"the retry policy gives up on {_shown(failure)}")
            return
        if self._broker_retries:
            self.statistics.retried += 1
            self._notices.append(Notice(NoticeKind.RETRIED, delivery, f"as the queue says: {_shown(failure)}"))
            self._reject(delivery, "", requeue=True)
            return
        if failure.delay is not None:
            delay = failure.delay
        failures.due = now + delay
        delivery.redelivered = True
        self.statistics.retried += 1
        self._notices.append(Notice(NoticeKind.RETRIED, delivery, f"in {delay:.3g} s: {_shown(failure)}"))
        if not self._out.delay(delivery, delay, suspect=self._in_quarantine(delivery)):
            self._hold(delivery, failures.due)

    def _not_published(self, republish: Republish, error: ReliableMQError, now: float) -> None:
        republish.tries += 1
        delivery = republish.delivery
        self.statistics.republish_failed += 1
        self._notices.append(Notice(NoticeKind.REPUBLISH_FAILED, delivery, str(error)))
        refused = isinstance(error, (PublishRefused, ConfigurationError))  # too large with our headers, say
        blocked = isinstance(error, PublishBlocked)
        if republish.purpose is Purpose.DEAD_LETTER:
            # The broker's own dead-lettering keeps what cannot be published, and needs no connection that publishes.
            if self._broker_dead_letters and (refused or (blocked and republish.tries >= _PATIENCE)):
                self._reject(delivery, republish.reason)
                return
        elif refused or (blocked and republish.purpose is Purpose.RETRY):
            self._hold_instead(delivery, now)
            return
        elif isinstance(error, PublishReturned) and republish.tries == 1:
            self._out.missing(republish)
            return
        self._hold(republish, now + self._backoff(republish.tries))

    def _hold_instead(self, delivery: Delivery, now: float) -> None:
        """It was to wait in a delay queue, and cannot."""
        self._hold(delivery, now if delivery.failures is None else max(now, delivery.failures.due))

    def _duplicate(self, outcome: Outcome, now: float) -> None:
        delivery = outcome.delivery
        self.statistics.duplicates += self._acks.finished(self._acks.generation, (delivery.delivery_tag,), now)
        self._book.forget(delivery)

    def _in_progress(self, outcome: Outcome, now: float) -> None:
        self.statistics.claims_in_progress += 1
        self._hold(outcome.delivery, now + self._claim_wait)

    def _exhausted(self, outcome: Outcome, _now: float) -> None:
        failures = outcome.delivery.failures or Failures()
        self._dead_letter(outcome.delivery, used_up(failures.count, self._retry.max_attempts))

    def _unidentified(self, outcome: Outcome, _now: float) -> None:
        self.statistics.quarantined += 1
        self._dead_letter(outcome.delivery, _UNIDENTIFIED)

    def _store_failed(self, outcome: Outcome, now: float) -> None:
        self.statistics.store_failures += 1
        self._notices.append(Notice(NoticeKind.STORE_FAILED, outcome.delivery, outcome.detail))
        outcome.delivery.store_failures += 1
        self._hold(outcome.delivery, now + self._backoff(outcome.delivery.store_failures))

    def _cancelled(self, outcome: Outcome, now: float) -> None:
        """It goes back, and is no attempt. One that has come back is held first, or it might go round at once."""
        delivery = outcome.delivery
        self._notices.append(Notice(NoticeKind.CANCELLED, delivery, outcome.detail))
        if delivery.redelivered or self.position is not None:
            delivery.redelivered = True
            self._hold(delivery, now + self._claim_wait)
        else:
            self._hand_back([delivery])

    # Where deliveries go

    def _hold(self, item: Delivery | Republish, due: float) -> None:
        if self.state is State.CONSUMING:
            heapq.heappush(self._held, (due, next(self._order), item))
        else:
            self._hand_back([item.delivery if isinstance(item, Republish) else item])

    def _dead_letter(self, delivery: Delivery, reason: str) -> None:
        if delivery.failures is not None:
            delivery.failures.verdict = reason
        if self._out.dead_letter(delivery, reason):
            self._notices.append(Notice(NoticeKind.DEAD_LETTERED, delivery, reason))
        else:
            self._reject(delivery, reason)

    def _reject(self, delivery: Delivery, reason: str, *, requeue: bool = False) -> None:
        source = delivery.source
        if self._acks.taken(source.generation, delivery.delivery_tag):
            self._output.append(encode_reject(source.channel, delivery.delivery_tag, requeue=requeue))
            if requeue:
                return
            self.statistics.rejected += 1
            self._notices.append(Notice(NoticeKind.REJECTED, delivery, reason))
            self._book.forget(delivery)

    def _hand_back(self, deliveries: list[Delivery]) -> None:
        """Return these with the next output: the later that is, the fewer frames it takes."""
        if self._source is not None and not self.automatic and self.position is None:
            self._back += [delivery.delivery_tag for delivery in deliveries]

    def _send_back(self, source: Source) -> None:
        acks, nacks = self._acks.hand_back(source.generation, self._back)
        self._back.clear()
        self._send_acks(source, acks)
        self._output.extend(encode_nack(source.channel, tag, multiple, requeue=True) for tag, multiple in nacks)

    def _send_acks(self, source: Source, frames: Frames) -> None:
        self._output.extend(encode_ack(source.channel, tag, multiple) for tag, multiple in frames)

    def _take_everything(self) -> list[Delivery]:
        """Empty every place where a delivery waits to be handed out, or to be dead-lettered again."""
        if self.automatic:
            return []
        deliveries = self._hand.clear()
        deliveries.extend(item.delivery if isinstance(item, Republish) else item for _, _, item in self._held)
        self._held.clear()
        return deliveries

    def _remember(self, delivery: Delivery, failure: Failure) -> Failures:
        self.statistics.failed += 1
        if delivery.redelivered or delivery.source is not self._source:
            delivery.failures = self._book.recall(delivery)  # another handler of it may have failed in the meantime
        failures = delivery.failures = delivery.failures or Failures()
        failures.add(failure)
        self._book.remember(delivery, failures)
        return failures

    def _note(self, kind: NoticeKind, result: Failed) -> None:
        self._notices.append(Notice(kind, result.delivery, _shown(result.failure)))

    @staticmethod
    def _backoff(tries: int) -> float:
        return min(_LONGEST_WAIT, 2.0 ** min(tries - 1, 10))


def _shown(failure: Failure) -> str:
    return f"{failure.exception_type}: {failure.exception_message}"
