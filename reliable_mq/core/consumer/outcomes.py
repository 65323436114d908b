"""What becomes of deliveries that were handed out, once the shell reports it, and of what was published for them.

Invariants: a result of a lost channel changes nothing but what is remembered of the message's failures, and a result
that comes after the broker's consumer timeout has taken its delivery back not even that, since it has been counted as a
failure; a delivery that failed waits, is published, rejected or handed back, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from reliable_mq.core.consumer.admission import used_up
from reliable_mq.core.consumer.attempts import AttemptHistory, describe
from reliable_mq.core.consumer.circuit_breaker import Transition
from reliable_mq.core.consumer.delivery import Delivery, DeliveryState
from reliable_mq.core.consumer.handler import Failed, Result, Skipped, SkipReason
from reliable_mq.core.consumer.settlement import LogEventKind
from reliable_mq.core.retry.dead_letters import RepublishReason, RepublishRequest
from reliable_mq.errors import ConfigurationError, PublishBlocked, PublishRefused, PublishReturned, ReliableMQError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from reliable_mq.core.consumer.attempts import Failure
    from reliable_mq.core.consumer.circuit_breaker import CircuitBreaker
    from reliable_mq.core.consumer.quarantine import Quarantine
    from reliable_mq.core.consumer.settlement import Settlement
    from reliable_mq.retry import RetryPolicy
    from reliable_mq.topology import Queue

__all__ = ["OutcomeHandler"]

_UNIDENTIFIED: Final = (
    "not handed to a handler: it has no message_id, or idempotency_key gave none, by which the idempotency store would "
    "know it; give the consumer an idempotency_key, a function of a delivery, that gives one"
)
_LONGEST_WAIT: Final = 60.0  # seconds between two tries to dead-letter, or to reach the store
_WAY_TO_QUARANTINE: Final = 1.0  # seconds, where the policy's first delay is not less
_PATIENCE: Final = 3  # tries to publish a dead letter while an alarm blocks that, where the broker can dead-letter


class OutcomeHandler:
    """See the module. Not thread-safe.

    Args:
        ways: where deliveries go.
        retry: how a failed delivery is tried again.
        random: the source of the jitter.
        broker_dead_letters: whether the broker itself dead-letters what is rejected.
        broker_retries: whether the queue itself delays what is rejected, and counts it.
        claim_wait: seconds until a delivery that is claimed elsewhere is looked at again.
        quarantine: of the queue; None where there is none.
        breaker: the kill switch; None where there is none.

    Attributes:
        to_pause: whether what was handed out and has not begun is to be taken back; for the taker to reset.
        overrunning: handlers that run on with what the consumer timeout has taken back.
    """

    def __init__(
        self,
        *,
        ways: Settlement,
        retry: RetryPolicy,
        random: Random,
        broker_dead_letters: bool,
        broker_retries: bool,
        claim_wait: float,
        quarantine: Quarantine | None,
        breaker: CircuitBreaker | None,
    ) -> None:
        self._ways = ways
        self._statistics = ways.statistics
        self._retry = retry
        self._random = random
        self._broker_dead_letters = broker_dead_letters
        self._broker_retries = broker_retries
        self._claim_wait = claim_wait
        self._quarantine = quarantine
        self._breaker = breaker
        self.to_pause = False
        self.overrunning = 0
        self._noted: Failure | None = None  # of the last batch that failed
        self._outcomes = {
            SkipReason.DUPLICATE: self._duplicate,
            SkipReason.IN_PROGRESS: self._in_progress,
            SkipReason.EXHAUSTED: self._exhausted,
            SkipReason.UNIDENTIFIED: self._unidentified,
            SkipReason.STORE_FAILED: self._store_failed,
            SkipReason.CANCELLED: self._cancelled,
        }

    def finished(self, results: Sequence[Result], now: float, since: float) -> None:
        """This is what became of deliveries; of what was handled, ``since`` then at the latest."""
        if self._ways.automatic:
            self._finished_automatically(results)
            return
        if self._breaker is not None:
            handled_count = sum(isinstance(result, Delivery) for result in results)
            self._switch(self._breaker, handled_count, sum(isinstance(result, Failed) for result in results), now)
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
                if result.delivery.source is self._ways.source:
                    self._outcomes[result.what](result, now)
                else:
                    self._stale(result.delivery)

    def timed_out(self, delivery: Delivery, *, timeout: float, now: float, at: float, alone: bool) -> None:
        """The consumer timeout has taken it back from its handler: that is a failed attempt, as of a ``TimeoutError``.

        Args:
            delivery: which; its handler runs on.
            timeout: seconds that it had, as far as that is known.
            now: monotonic time.
            at: the same, in seconds since 1970.
            alone: whether its handler has no other delivery beside it. Else nobody knows whose fault it was: it is no
                attempt, and the next one is made with this delivery alone.
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
            failures = self._ways.book.recall(delivery) or AttemptHistory()
            failures.alone = True
            self._ways.book.remember(delivery, failures)
        delivery.state = DeliveryState.TIMED_OUT
        self._ways.note(LogEventKind.TIMED_OUT, delivery, text)

    def published(self, republish: RepublishRequest, error: ReliableMQError | None, now: float) -> None:
        """What was taken to be published is confirmed, or it is known that it was not."""
        self._ways.out.settled(republish)
        delivery = republish.delivery
        if delivery.source is not self._ways.source:
            self._stale(delivery)
        elif error is not None:
            self._not_published(republish, error, now)
        else:
            # For as long as it is unacked there are two of it: a process that is killed then has handed out both.
            finished = self._ways.finish((delivery,), now, at_once=True)
            if republish.purpose is RepublishReason.DEAD_LETTER:
                self._statistics.dead_lettered += finished
                self._ways.book.forget(delivery)
            elif self._quarantine is not None and republish.queue is self._quarantine.queue:
                self._statistics.quarantined += finished
            else:
                self._statistics.delayed += finished

    def declared(self, queue: Queue, error: BaseException | None, now: float) -> None:
        """A queue that was taken is declared, or it is known that it was not."""
        if error is not None:
            self._ways.note(LogEventKind.NOT_DECLARED, None, f"{queue.name!r}: {error}")
        for republish in self._ways.out.declared(queue.name, ok=error is None):
            if republish.purpose is not RepublishReason.QUARANTINE or not self.isolate(republish.delivery, known=False):
                self._hold_instead(republish.delivery, now)

    def isolate(self, delivery: Delivery, *, known: bool) -> bool:
        """Move it to quarantine; False where it cannot be.

        One that is not ``known`` to have been there waits on its way. What it has returned from is being started again:
        at once, it would kill the third of its consumers within moments, and leave few or none for its neighbours.
        """
        quarantine = self._quarantine
        delay = 0.0 if known else min(self._retry.delay(1, self._random) or 0.0, _WAY_TO_QUARANTINE)
        if quarantine is None or not self._ways.out.isolate(delivery, quarantine.queue, delay):
            return False
        when = f", in {delay:g} s" if delay else ""
        self._ways.note(LogEventKind.ISOLATED, delivery, f"to {quarantine.queue.name!r}{when}")
        return True

    def returned(self, delivery: Delivery, now: float) -> None:
        """It is back in quarantine without a verdict: an attempt has failed, and the next one follows after a delay.

        At once, it would kill one consumer of its queue after the other, until none is left for its neighbours.
        """
        failures = delivery.failures = delivery.failures or AttemptHistory()
        delay = self._retry.delay(failures.count, self._random) or 0.0
        self._statistics.retried += 1
        failures.due = now + delay
        self._ways.note(LogEventKind.RETRIED, delivery, f"in {delay:.3g} s: the consumer that had it was lost")
        if not self._ways.out.delay(delivery, delay, suspect=True):
            self._ways.hold(delivery, failures.due)

    def due(self, item: Delivery | RepublishRequest) -> Delivery | None:
        """Its time has come: answer what is to be handed out, if that is what it waited for."""
        if isinstance(item, RepublishRequest):
            self._ways.out.again(item)
        elif item.failures is not None and item.failures.count >= self._retry.max_attempts:
            self._ways.dead_letter(item, used_up(item.failures.count, self._retry.max_attempts))
        else:
            return item
        return None

    def still_running(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Return those of these recalled deliveries that are of the open channel, and not timed out by the broker."""
        current = []
        for delivery in deliveries:
            if delivery.state is DeliveryState.TIMED_OUT:
                self.overrunning -= 1
            elif delivery.source is self._ways.source or self._ways.automatic:
                current.append(delivery)
                continue
            delivery.state = DeliveryState.SETTLED
        return current

    def _late(self, result: Result) -> bool:
        """Drop a result that comes after the consumer timeout."""
        delivery = result if isinstance(result, Delivery) else result.delivery
        if delivery.state is not DeliveryState.TIMED_OUT:
            return False
        self.overrunning -= 1
        self._stale(delivery)
        return True

    def _stale(self, delivery: Delivery) -> None:
        """Count a result that changes nothing: the broker has the delivery back."""
        self._statistics.stale += 1
        delivery.state = DeliveryState.SETTLED

    def _in_quarantine(self, delivery: Delivery) -> bool:
        return self._quarantine is not None and self._quarantine.has(delivery)

    def _switch(self, breaker: CircuitBreaker, handled: int, failed: int, now: float) -> None:
        if not handled and not failed:
            breaker.withdrawn()  # the store had the last word, which says nothing about the handler
            return
        change = breaker.settled(handled, failed, now)
        if change is Transition.PAUSED:
            self.to_pause = True
            self._statistics.pauses += 1
            self._ways.note(LogEventKind.PAUSED, None, f"a probe follows in {breaker.pause:g} s")
        elif change is Transition.RESUMED:
            self._ways.note(LogEventKind.RESUMED, None, "a probe succeeded")

    def _handled(self, deliveries: list[Delivery], now: float) -> None:
        source = self._ways.source
        current = [delivery for delivery in deliveries if delivery.source is source]
        if len(current) < len(deliveries):
            for delivery in deliveries:
                if delivery.source is not source:
                    self._stale(delivery)
        quarantine = self._quarantine
        at_once = quarantine is not None and quarantine.active and any(map(quarantine.has, current))
        self._statistics.handled += self._ways.finish(current, now, at_once=at_once)
        book = self._ways.book
        if book:
            for delivery in current:
                if delivery.failures is not None:
                    book.forget(delivery)

    def _finished_automatically(self, results: Sequence[Result]) -> None:
        for result in results:
            (result if isinstance(result, Delivery) else result.delivery).state = DeliveryState.FINISHED
            if isinstance(result, Failed):
                self._statistics.failed += 1
                self._ways.note(LogEventKind.DROPPED, result.delivery, _shown(result.failure))
            elif isinstance(result, Skipped) and result.what is SkipReason.CANCELLED:
                self._statistics.failed += 1
                self._ways.note(LogEventKind.DROPPED, result.delivery, result.detail)
            else:
                self._statistics.handled += 1

    def _failed(self, result: Failed, now: float) -> None:
        delivery, failure = result.delivery, result.failure
        failures = self._remember(delivery, failure) if result.alone else AttemptHistory()
        if delivery.source is not self._ways.source:
            self._stale(delivery)
            return
        if result.detail:
            self._ways.note(LogEventKind.STORE_FAILED, delivery, result.detail)
        if delivery.flaw is not None:
            self._ways.dead_letter(delivery, f"its properties are broken: {delivery.flaw}")
        elif not result.alone:
            if failure is not self._noted:  # once for a batch, whose deliveries share it
                self._noted = failure
                self._ways.note(LogEventKind.BATCH_FAILED, delivery, _shown(failure))
            delivery.redelivered = True
            self._ways.hold(delivery, now)
        elif failure.verdict is not None:
            self._ways.dead_letter(delivery, failure.verdict)
        else:
            self._retry_or_give_up(delivery, failures, failure, now)

    def _retry_or_give_up(self, delivery: Delivery, failures: AttemptHistory, failure: Failure, now: float) -> None:
        delay = self._retry.delay(failures.count, self._random)
        if delay is None:
            self._ways.dead_letter(delivery, used_up(failures.count, self._retry.max_attempts))
            return
        if not all(self._retry.retries(*kinds) for kinds in failure.kinds):
            self._ways.dead_letter(delivery, self._unretried(failure))
            return
        self._statistics.retried += 1
        if self._broker_retries:
            self._ways.note(LogEventKind.RETRIED, delivery, f"as the queue says: {_shown(failure)}")
            self._ways.requeue(delivery)
            return
        if failure.delay is not None:
            delay = failure.delay
        failures.due = now + delay
        delivery.redelivered = True
        self._ways.note(LogEventKind.RETRIED, delivery, f"in {delay:.3g} s: {_shown(failure)}")
        if not self._ways.out.delay(delivery, delay, suspect=self._in_quarantine(delivery)):
            self._ways.hold(delivery, failures.due)

    @staticmethod
    def _unretried(failure: Failure) -> str:
        return f"the retry policy gives up on {_shown(failure)}"

    def _not_published(self, republish: RepublishRequest, error: ReliableMQError, now: float) -> None:
        republish.tries += 1
        delivery = republish.delivery
        self._statistics.republish_failed += 1
        self._ways.note(LogEventKind.REPUBLISH_FAILED, delivery, str(error))
        refused = isinstance(error, (PublishRefused, ConfigurationError))  # too large with our headers, say
        blocked = isinstance(error, PublishBlocked)
        if republish.purpose is RepublishReason.DEAD_LETTER:
            # The broker's own dead-lettering keeps what cannot be published, and needs no connection that publishes.
            if self._broker_dead_letters and (refused or (blocked and republish.tries >= _PATIENCE)):
                self._ways.reject(delivery, republish.reason)
                return
        elif refused or (blocked and republish.purpose is RepublishReason.RETRY):
            self._hold_instead(delivery, now)
            return
        elif isinstance(error, PublishReturned) and republish.tries == 1:
            self._ways.out.missing(republish)
            return
        self._ways.hold(republish, now + _backoff(republish.tries))

    def _hold_instead(self, delivery: Delivery, now: float) -> None:
        """It was to wait in a delay queue, and cannot."""
        self._ways.hold(delivery, now if delivery.failures is None else max(now, delivery.failures.due))

    def _duplicate(self, outcome: Skipped, now: float) -> None:
        self._statistics.duplicates += self._ways.finish((outcome.delivery,), now)
        self._ways.book.forget(outcome.delivery)

    def _in_progress(self, outcome: Skipped, now: float) -> None:
        self._statistics.claims_in_progress += 1
        self._ways.hold(outcome.delivery, now + self._claim_wait)

    def _exhausted(self, outcome: Skipped, _now: float) -> None:
        failures = outcome.delivery.failures or AttemptHistory()
        self._ways.dead_letter(outcome.delivery, used_up(failures.count, self._retry.max_attempts))

    def _unidentified(self, outcome: Skipped, _now: float) -> None:
        self._statistics.rejected_unseen += 1
        self._ways.dead_letter(outcome.delivery, _UNIDENTIFIED)

    def _store_failed(self, outcome: Skipped, now: float) -> None:
        self._statistics.store_failures += 1
        self._ways.note(LogEventKind.STORE_FAILED, outcome.delivery, outcome.detail)
        outcome.delivery.store_failures += 1
        self._ways.hold(outcome.delivery, now + _backoff(outcome.delivery.store_failures))

    def _cancelled(self, outcome: Skipped, now: float) -> None:
        """It goes back, and is no attempt. One that has come back is held first, or it might go round at once."""
        delivery = outcome.delivery
        self._ways.note(LogEventKind.CANCELLED, delivery, outcome.detail)
        if delivery.redelivered or self._ways.position is not None:
            delivery.redelivered = True
            self._ways.hold(delivery, now + self._claim_wait)
        else:
            self._ways.hand_back([delivery])

    def _remember(self, delivery: Delivery, failure: Failure) -> AttemptHistory:
        self._statistics.failed += 1
        book = self._ways.book
        if delivery.redelivered or delivery.source is not self._ways.source:
            delivery.failures = book.recall(delivery)  # another handler of it may have failed in the meantime
        failures = delivery.failures = delivery.failures or AttemptHistory()
        failures.add(failure)
        book.remember(delivery, failures)
        return failures


def _backoff(tries: int) -> float:
    return min(_LONGEST_WAIT, 2.0 ** min(tries - 1, 10))


def _shown(failure: Failure) -> str:
    return f"{failure.exception_type}: {failure.exception_message}"
