"""The outcomes of handlers and publishes: ack, retry, dead-letter or requeue.

Invariants:

- A result of a lost channel only changes the remembered failed attempts of its message. A result that comes after the
  consumer timeout of its delivery does not even change those, because the timeout was counted as a failed attempt.
- A failed delivery is either held, republished, rejected or requeued.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from reliable_mq.codec.methods import ReplyCode
from reliable_mq.core.consumer.admission import used_up
from reliable_mq.core.consumer.attempts import AttemptHistory, describe
from reliable_mq.core.consumer.delivery import Delivery, DeliveryState
from reliable_mq.core.consumer.handler import Failed, Result, Skipped, SkipReason, delivery_of
from reliable_mq.core.consumer.kill_switch import KillSwitchState
from reliable_mq.core.consumer.quarantine import Quarantine, QuarantineState
from reliable_mq.core.consumer.settlement import LogEventKind
from reliable_mq.core.retry.dead_letters import RepublishReason, RepublishRequest
from reliable_mq.errors import (
    ConfigurationError,
    ConsumeError,
    PublishBlocked,
    PublishNacked,
    PublishRefused,
    PublishReturned,
    ReliableMQError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from reliable_mq.core.consumer.attempts import Failure
    from reliable_mq.core.consumer.kill_switch import KillSwitchMonitor
    from reliable_mq.core.consumer.settlement import Settlement
    from reliable_mq.retry import RetryPolicy
    from reliable_mq.topology import Queue

_UNIDENTIFIED: Final = (
    "not handed to a handler: it has no message_id, or idempotency_key gave none, by which the idempotency store would "
    "know it; give the consumer an idempotency_key, a function of a delivery, that gives one"
)
_LONGEST_HELD: Final = 60.0  # the maximum seconds until a delivery is due that is held in place of a delay queue
_LONGEST_WAIT: Final = 60.0  # the maximum seconds between attempts to dead-letter, or to reach the store
_QUARANTINE_DELAY: Final = 1.0  # the maximum seconds from the queue to quarantine
_CLAIM_WAIT: Final = 1.0  # seconds until a delivery that another holder has claimed is dispatched again
_BLOCKED_TRIES: Final = 3  # attempts to publish a dead letter during an alarm, if the broker can dead-letter


class OutcomeHandler:
    """The decision after the outcome of a handler or of a publish. Not thread-safe."""

    def __init__(
        self,
        *,
        settlement: Settlement,
        retry: RetryPolicy,
        random: Random,
        broker_dead_letters: bool,
        broker_retries: bool,
        quarantine: Quarantine | None,
        kill_switch: KillSwitchMonitor | None,
    ) -> None:
        self._settlement = settlement
        self._statistics = settlement.statistics
        self._retry = retry
        self._random = random
        self._broker_dead_letters = broker_dead_letters
        self._broker_retries = broker_retries
        self._quarantine = quarantine
        self._kill_switch = kill_switch
        #: Whether to recall dispatched deliveries, because the kill switch pauses the consumer. The reader resets it.
        self.recall = False
        self.overrunning = 0  # handlers that still run with deliveries that timed out
        self._logged: Failure | None = None  # the failure of the last batch that failed
        self._last_failure = ""  # which the kill switch has counted

    def finished(self, results: Sequence[Result], now: float, since: float) -> None:
        """Apply the results of handlers that ended at ``since``."""
        if self._settlement.automatic:
            self._finished_automatically(results)
            return
        if self._kill_switch is not None:
            self._count_for_kill_switch(self._kill_switch, results, now)
        if self.overrunning:
            results = [result for result in results if not self._late(result)]
        handled = [result for result in results if isinstance(result, Delivery)]
        if handled:
            self._handled(handled, since)
        if len(handled) == len(results):
            return
        for result in results:
            if isinstance(result, Failed):
                self._failed(result, now)
            elif isinstance(result, Skipped):
                self._skipped(result, now)

    def timed_out(self, delivery: Delivery, *, timeout: float, now: float, at: float, alone: bool) -> None:
        """Count a failed attempt after the consumer timeout of the broker.

        The handler still runs. If it also has other deliveries (not ``alone``), it is unknown on which one it hangs.
        Then the timeout does not count as an attempt, and the next attempt is made with this delivery alone. ``at`` is
        ``now`` in seconds since 1970.
        """
        self._statistics.timed_out += 1
        self.overrunning += 1
        text = f"no result within {timeout:g} s, the broker's consumer timeout"
        failure = describe(TimeoutError(text), at)
        if alone:
            failures = self._remember(delivery, failure)
            delay = self._retry.delay(failures.count, self._random)
            failures.due = now + (delay or 0.0)
            if delay is not None and not self._retry.retries(TimeoutError):
                failures.verdict = self._unretried(failure)
        else:
            failures = self._settlement.attempts.find(delivery) or AttemptHistory()
            failures.alone = True
            self._settlement.attempts.remember(delivery, failures)
        delivery.state = DeliveryState.TIMED_OUT
        self._settlement.log(LogEventKind.TIMED_OUT, delivery, text)

    def published(self, republish: RepublishRequest, error: ReliableMQError | None, now: float) -> None:
        """Apply the outcome of a publish, which is confirmed if ``error`` is None."""
        self._settlement.republish.settled(republish)
        delivery = republish.delivery
        if delivery.source is not self._settlement.source:
            self._stale(delivery)
        elif error is not None:
            self._not_published(republish, error, now)
        else:
            # Until the original is acked, there are two messages: a process killed now would have had both dispatched.
            finished = self._settlement.finish((delivery,), now, at_once=True)
            if republish.purpose is RepublishReason.DEAD_LETTER:
                self._statistics.dead_lettered += finished
                self._settlement.attempts.forget(delivery)
            elif self._quarantine is not None and republish.queue is self._quarantine.queue:
                if self.in_quarantine(delivery):
                    self._statistics.requeued += finished
                else:
                    self._statistics.quarantined += finished
            else:
                self._statistics.delayed += finished

    def declared(self, queue: Queue, error: BaseException | None, now: float) -> None:
        """Apply the outcome of a declaration, which succeeded if ``error`` is None."""
        if error is not None:
            self._settlement.log(LogEventKind.NOT_DECLARED, None, f"{queue.name!r}: {error}")
        for republish in self._settlement.republish.declared(queue.name, ok=error is None):
            if self._quarantine is not None and republish.purpose is RepublishReason.QUARANTINE:
                self.move_to_quarantine(republish.delivery, self._quarantine.queue, known=False)
            elif republish.purpose is RepublishReason.DEAD_LETTER:
                self._settlement.republish.again(republish)
            else:
                self._settlement.hold(republish.delivery, _due(republish, now))

    def move_to_quarantine(self, delivery: Delivery, queue: Queue, *, known: bool) -> None:
        """Move a delivery to quarantine, or dead-letter it if it cannot be copied.

        A delivery that is not ``known`` to have been there waits first. Its last consumer is being restarted. Without a
        delay, it would soon kill a third consumer, and leave few or none for its neighbours.
        """
        delay = 0.0 if known else min(self._retry.delay(1, self._random) or 0.0, _QUARANTINE_DELAY)
        if not self._settlement.republish.quarantine(delivery, queue, delay):
            # It may kill its consumer, and must not run.
            self._settlement.dead_letter(delivery, "cannot be moved to quarantine: its properties cannot be copied")
            return
        when = f", in {delay:g} s" if delay else ""
        self._settlement.log(LogEventKind.QUARANTINED, delivery, f"{queue.name!r}{when}")

    def returned(self, delivery: Delivery, now: float) -> None:
        """Retry a delivery that was returned to quarantine without a result.

        The return counts as a failed attempt. Without a delay, the delivery would kill one consumer of its queue after
        the other, until none is left for its neighbours.
        """
        failures = delivery.begin_failures()
        delay = self._retry.delay(failures.count, self._random) or 0.0
        self._retry_after(delivery, failures, delay, now, "the consumer that had it was lost")

    def wait(self, delivery: Delivery, failures: AttemptHistory, now: float, *, tries: int = 0) -> None:
        """Delay a delivery until its next attempt, which may be due.

        ``tries`` is the number of unconfirmed publishes for this delay.
        """
        left = failures.due - now
        suspect = self.in_quarantine(delivery)
        if left <= _LONGEST_HELD or not self._settlement.republish.delay(delivery, left, suspect=suspect, tries=tries):
            self._settlement.hold(delivery, max(failures.due, now))

    def due(self, item: Delivery | RepublishRequest, now: float) -> Delivery | None:
        """Apply the end of a delay. Return the delivery if it must be dispatched again."""
        if isinstance(item, RepublishRequest):
            failures = item.delivery.failures
            if item.purpose is RepublishReason.RETRY and failures is not None and failures.due > now:
                self.wait(item.delivery, failures, now, tries=item.tries)  # the rest of its delay
            else:
                self._settlement.republish.again(item)
        elif item.failures is not None and item.failures.count >= self._retry.max_attempts:
            self._settlement.dead_letter(item, used_up(item.failures.count, self._retry.max_attempts))
        else:
            return item
        return None

    def still_running(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Return the recalled deliveries of the open channel that did not time out."""
        current = []
        for delivery in deliveries:
            if delivery.state is DeliveryState.TIMED_OUT:
                self.overrunning -= 1
            elif delivery.source is self._settlement.source or self._settlement.automatic:
                current.append(delivery)
                continue
            delivery.state = DeliveryState.SETTLED
        return current

    def _late(self, result: Result) -> bool:
        """Drop a result that comes after the consumer timeout."""
        delivery = delivery_of(result)
        if delivery.state is not DeliveryState.TIMED_OUT:
            return False
        self.overrunning -= 1
        self._stale(delivery)
        return True

    def _stale(self, delivery: Delivery) -> None:
        """Count a result that changes nothing, because the broker took the delivery back."""
        self._statistics.stale += 1
        delivery.state = DeliveryState.SETTLED

    def in_quarantine(self, delivery: Delivery) -> bool:
        return self._quarantine is not None and self._quarantine.has(delivery)

    def _count_for_kill_switch(self, kill_switch: KillSwitchMonitor, results: Sequence[Result], now: float) -> None:
        if kill_switch.paused:
            results = [result for result in results if kill_switch.is_probe(delivery_of(result))]
            if not results:
                return
        handled = sum(isinstance(result, Delivery) for result in results)
        failures = [result.failure for result in results if isinstance(result, Failed)]
        if not handled and not failures:
            kill_switch.recalled()  # skipped results, such as those of the store, do not concern the handler
            return
        if failures:
            self._last_failure = str(failures[-1])
        change = kill_switch.settled(handled, len(failures), now)
        if change is KillSwitchState.PAUSED:
            self.recall = True
            self._statistics.pauses += 1
            text = f"a probe follows in {kill_switch.pause:g} s; the last failure: {self._last_failure}"
            self._settlement.log(LogEventKind.PAUSED, None, text)
        elif change is KillSwitchState.RUNNING:
            self._settlement.log(LogEventKind.RESUMED, None, "a probe succeeded")

    def _handled(self, deliveries: list[Delivery], now: float) -> None:
        source = self._settlement.source
        current = [delivery for delivery in deliveries if delivery.source is source]
        if len(current) < len(deliveries):
            for delivery in deliveries:
                if delivery.source is not source:
                    self._stale(delivery)
        quarantine = self._quarantine
        subscribed = quarantine is not None and quarantine.state is QuarantineState.SUBSCRIBED
        at_once = quarantine is not None and subscribed and any(map(quarantine.has, current))
        self._statistics.handled += self._settlement.finish(current, now, at_once=at_once)
        attempts = self._settlement.attempts
        if attempts:
            for delivery in current:
                if delivery.failures is not None:
                    attempts.forget(delivery)

    def _finished_automatically(self, results: Sequence[Result]) -> None:
        for result in results:
            delivery = delivery_of(result)
            delivery.state = DeliveryState.FINISHED
            if isinstance(result, Failed):
                dropped = str(result.failure)
            elif isinstance(result, Skipped) and result.reason is SkipReason.CANCELLED:
                dropped = result.detail
            else:
                self._statistics.handled += 1
                continue
            self._statistics.failed += 1
            self._settlement.log(LogEventKind.DROPPED, delivery, dropped)

    def _failed(self, result: Failed, now: float) -> None:
        delivery, failure = result.delivery, result.failure
        failures = self._remember(delivery, failure) if result.alone else AttemptHistory()
        if delivery.source is not self._settlement.source:
            self._stale(delivery)
            return
        if result.detail:  # the store did not release the claim
            self._store_failed(delivery, result.detail)
        if delivery.flaw is not None and any(kinds[0] is ConsumeError for kinds in failure.kinds):
            self._settlement.dead_letter(delivery, f"its properties are broken: {delivery.flaw}")
        elif not result.alone:
            if failure is not self._logged:  # log it once per batch, whose deliveries share the failure
                self._logged = failure
                self._settlement.log(LogEventKind.BATCH_FAILED, delivery, str(failure))
            delivery.redelivered = True
            self._settlement.hold(delivery, now)
        elif failure.verdict is not None:
            self._settlement.dead_letter(delivery, failure.verdict)
        else:
            self._retry_or_give_up(delivery, failures, failure, now)

    def _retry_or_give_up(self, delivery: Delivery, failures: AttemptHistory, failure: Failure, now: float) -> None:
        delay = self._retry.delay(failures.count, self._random)
        if delay is None:
            self._settlement.dead_letter(delivery, used_up(failures.count, self._retry.max_attempts))
            return
        if not all(self._retry.retries(*kinds) for kinds in failure.kinds):
            self._settlement.dead_letter(delivery, self._unretried(failure))
            return
        if self._broker_retries:
            self._statistics.retried += 1
            self._settlement.log(LogEventKind.RETRIED, delivery, f"as the queue says: {failure}")
            self._settlement.send_reject(delivery, requeue=True)  # the broker counts it as a failure
        else:
            delay = delay if failure.delay is None else failure.delay
            self._retry_after(delivery, failures, delay, now, str(failure))

    def _retry_after(self, delivery: Delivery, failures: AttemptHistory, delay: float, now: float, reason: str) -> None:
        """Delay the next attempt, in a delay queue or in this process."""
        self._statistics.retried += 1
        failures.due = now + delay
        delivery.redelivered = True
        self._settlement.log(LogEventKind.RETRIED, delivery, f"in {delay:.3g} s: {reason}")
        if not self._settlement.republish.delay(delivery, delay, suspect=self.in_quarantine(delivery)):
            self._settlement.hold(delivery, failures.due)

    @staticmethod
    def _unretried(failure: Failure) -> str:
        return f"the retry policy gives up on {failure}"

    def _not_published(self, republish: RepublishRequest, error: ReliableMQError, now: float) -> None:
        republish.tries += 1
        delivery = republish.delivery
        self._statistics.republish_failed += 1
        self._settlement.log(LogEventKind.REPUBLISH_FAILED, delivery, str(error))
        if self.in_quarantine(delivery) and (
            republish.purpose is RepublishReason.QUARANTINE  # it is returned
            or (republish.purpose is RepublishReason.RETRY and not self._settlement.consuming)  # not again and again
        ):
            self._settlement.requeue([delivery])
            return
        refused = isinstance(error, (PublishRefused, ConfigurationError))  # for example, too large with our headers
        code = error.reply_code if isinstance(error, PublishRefused) else None
        blocked = isinstance(error, PublishBlocked)
        if republish.purpose is RepublishReason.DEAD_LETTER:
            # The broker's own dead-lettering needs no publish of ours, which may be refused or blocked.
            if self._broker_dead_letters and (refused or (blocked and republish.tries >= _BLOCKED_TRIES)):
                self._settlement.reject(delivery, republish.reason)
                return
            if code == ReplyCode.CONTENT_TOO_LARGE:
                self._settlement.republish.cut(republish)
        elif refused and republish.purpose is RepublishReason.QUARANTINE and code != ReplyCode.ACCESS_REFUSED:
            # It may kill its consumer, and must not run. A missing permission is not the fault of the message.
            self._settlement.dead_letter(delivery, f"cannot be moved to quarantine: {error}")
            return
        elif refused or (
            isinstance(error, PublishBlocked | PublishNacked)  # the next publishes may end like this, too
            and republish.purpose is RepublishReason.RETRY
            and republish.left is None
            and _due(republish, now) - now <= _LONGEST_HELD
        ):
            self._settlement.hold(delivery, _due(republish, now))
            return
        missing = isinstance(error, PublishReturned) and self._settlement.republish.missing(republish)
        if missing and republish.tries == 1:
            self._settlement.republish.again(republish)
            return
        self._settlement.hold(republish, now + _backoff(republish.tries))

    def _skipped(self, result: Skipped, now: float) -> None:
        settlement, statistics = self._settlement, self._statistics
        delivery, reason = result.delivery, result.reason
        if delivery.source is not settlement.source:
            self._stale(delivery)
        elif reason is SkipReason.DUPLICATE:
            statistics.duplicates += settlement.finish((delivery,), now)
            settlement.attempts.forget(delivery)
        elif reason is SkipReason.IN_PROGRESS:
            statistics.claims_in_progress += 1
            settlement.hold(delivery, now + _CLAIM_WAIT)
        elif reason is SkipReason.EXHAUSTED:
            if result.detail:  # the store did not release the claim
                self._store_failed(delivery, result.detail)
            failed = 0 if delivery.failures is None else delivery.failures.count
            settlement.dead_letter(delivery, used_up(failed, self._retry.max_attempts))
        elif reason is SkipReason.UNIDENTIFIED:
            statistics.rejected_unseen += 1
            settlement.dead_letter(delivery, _UNIDENTIFIED)
        elif reason is SkipReason.STORE_FAILED:
            self._store_failed(delivery, result.detail)
            delivery.store_failures += 1
            settlement.hold(delivery, now + _backoff(delivery.store_failures))
        else:
            self._cancelled(delivery, result.detail, now)

    def _store_failed(self, delivery: Delivery, detail: str) -> None:
        self._statistics.store_failures += 1
        self._settlement.log(LogEventKind.STORE_FAILED, delivery, detail)

    def _cancelled(self, delivery: Delivery, detail: str, now: float) -> None:
        """Requeue a delivery, or hold a redelivered one, which might return at once."""
        self._settlement.log(LogEventKind.CANCELLED, delivery, detail)
        again = delivery.redelivered or self.in_quarantine(delivery)
        if again or self._settlement.stream_offset is not None:
            delivery.redelivered = True
            self._settlement.hold(delivery, now + _CLAIM_WAIT)
        else:
            self._settlement.return_unhandled([delivery])

    def _remember(self, delivery: Delivery, failure: Failure) -> AttemptHistory:
        self._statistics.failed += 1
        attempts = self._settlement.attempts
        if delivery.redelivered or delivery.source is not self._settlement.source:
            delivery.set_failures(attempts.find(delivery))  # another handler of the message may have failed meanwhile
        failures = delivery.begin_failures()
        failures.add(failure)
        attempts.remember(delivery, failures)
        return failures


def _due(republish: RepublishRequest, now: float) -> float:
    """Return when a delivery is due that would have been republished now."""
    due, failures = now + (republish.left or 0.0), republish.delivery.failures
    return due if failures is None else max(due, failures.due)


def _backoff(tries: int) -> float:
    return min(_LONGEST_WAIT, 2.0 ** min(tries - 1, 10))
