"""Deliveries on request (``basic.get``), for jobs that drain a queue and exit.

Each request is answered with a delivery or with "empty". A whole batch of requests is sent in one write. Deliveries
pass through the consumer session like any others. A retried delivery is held in the process and comes first with a
later request.

Invariants:

- The number of unsettled deliveries, including held ones, does not exceed the prefetch. The broker itself does not
  apply the prefetch to ``basic.get``.
- Requests that a lost channel did not answer are repeated on the next one, for a caller that still waits.
- A call ends with all its requests answered, unless the broker does not answer. A call that may make no request before
  the broker has confirmed retries or dead letters waits for that answer, too.
- A delivery that is not settled at the end of its block is acked, or requeued if the block raised.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from reliable_mq.codec import CodecError, encode_get
from reliable_mq.codec.methods import ReplyCode
from reliable_mq.core.channel_setup import is_missing
from reliable_mq.core.consumer.attempts import describe
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.handler import Failed
from reliable_mq.engine.subscription import BaseSubscription
from reliable_mq.errors import ConsumeError, ConsumerCancelled, StaleDelivery, UsageError
from reliable_mq.retry import DeadLetter, RetryLater

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from reliable_mq._util.validation import Duration
    from reliable_mq.codec import RawDelivery
    from reliable_mq.connection.interfaces import TimerHandle
    from reliable_mq.core.channel_setup import ServerInfo, SetupGenerator
    from reliable_mq.core.consumer.handler import Result
    from reliable_mq.core.reconnect import ConnectionLoss
    from reliable_mq.engine.consumer_options import ConsumerOptions
    from reliable_mq.engine.steps import Steps
    from reliable_mq.errors import ReliableMQError

_POLL_FIRST, _POLL_LONGEST = 0.02, 0.5  # seconds between two requests to an empty queue
ANSWER = 5.0  # seconds to wait for the broker's answers to the last requests
LONGEST_WAIT = 1e8  # seconds, which every timer accepts
_REFUSALS = frozenset({ReplyCode.ACCESS_REFUSED, ReplyCode.NOT_IMPLEMENTED})  # a stream has no basic.get
_SINGLE_ACTIVE = "single active consumer"  # in the text of RESOURCE_LOCKED; otherwise the queue is another's for now


class PulledDelivery(Delivery):
    """A delivery from ``get``, settled by its methods or at the end of its block."""

    __slots__ = ("_settled", "_subscription", "delivered")

    def __init__(self, delivery: Delivery, subscription: BasePullSubscription) -> None:
        self.delivered = delivery  # the session's own, which may be pulled again and then has its failed attempts
        context = delivery.attempt_context
        super().__init__(
            delivery.consumer_tag,
            delivery.delivery_tag,
            delivery.redelivered,
            delivery.exchange,
            delivery.routing_key,
            delivery.properties,
            delivery.body,
        )
        self._source = delivery.source
        self.attempt_context = context
        self._failures = delivery.failures
        self._settled = False
        self._subscription = subscription

    @property
    def attempt_context(self) -> str | None:
        """The trace context of the session's own delivery."""
        return self.delivered.attempt_context

    @attempt_context.setter
    def attempt_context(self, context: str | None) -> None:
        self.delivered.attempt_context = context

    def ack(self) -> None:
        """Ack the delivery. Does not wait for the broker.

        Raises:
            StaleDelivery: If its channel is gone. The broker will deliver it again.
            UsageError: If it is already settled.
        """
        self._subscription.settle(self, self.delivered)

    def retry(self, delay: Duration | None = None) -> None:
        """Retry the delivery later, like `RetryLater`. Raises the errors of `ack`."""
        self._subscription.settle(self, Failed(self.delivered, describe(RetryLater(delay), time.time())))

    def dead_letter(self, reason: str) -> None:
        """Dead-letter the delivery, like `DeadLetter`. Raises the errors of `ack`."""
        self._subscription.settle(self, Failed(self.delivered, describe(DeadLetter(reason), time.time())))

    def requeue(self) -> None:
        """Requeue the delivery without counting an attempt. Raises the errors of `ack`."""
        self._subscription.settle(self, None)

    @property
    def settled(self) -> bool:
        """Whether the delivery was acked, retried, dead-lettered or requeued."""
        return self._settled

    def mark_settled(self) -> None:
        """Mark the delivery as settled. Raise UsageError if it already is."""
        if self._settled:
            raise UsageError(f"{self!r} is settled already")
        self._settled = True


def leave(deliveries: Iterable[PulledDelivery], *, ack: bool) -> None:
    """Ack or requeue unsettled deliveries at the end of a block.

    After an interruption it must be called again.

    Raises:
        StaleDelivery: If the channel of a delivery to ack is gone. The other deliveries are acked.
    """
    stale: StaleDelivery | None = None
    for delivery in deliveries:
        if not delivery.settled:
            try:
                if ack:
                    delivery.ack()
                else:
                    delivery.requeue()
            except StaleDelivery as error:
                stale = error
            except UsageError:
                continue  # another thread has just settled it
    if stale is not None and ack:
        raise stale


class ChangeMonitor(Protocol):
    """A monitor that wakes callers when state shared with the loop changes.

    Attributes:
        lock: The lock that guards that state. The methods must be called while it is held.
    """

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def notify_all(self) -> None:
        """Wake all waiting callers."""

    def wait(self, timeout: float, /) -> Any:
        """Wait for a change, for up to ``timeout`` seconds. A step."""


class BasePullSubscription(BaseSubscription):
    """A subscription that requests each delivery, and is its own handler pool.

    Callers take turns. Each API adds how they wait. The caller whose turn it is asks for a number of deliveries. The
    loop requests them, and ends the round when every request is answered or none can be made.
    """

    _changes_type: ClassVar[type[ChangeMonitor]]
    _guard: AbstractContextManager[Any]  # guards the nine attributes from `_arrived` to `_gone`

    def __init__(self, options: ConsumerOptions) -> None:
        super().__init__(options)
        self.handlers = self
        self._changed = self._changes_type()
        self._guard = self._changed.lock
        self._arrived: deque[Delivery] = deque()
        self._unsettled = 0  # deliveries that the user has and has not settled
        self._wanted = 0  # deliveries for the caller whose turn it is, including arrived ones
        self._over = False  # whether the round is over
        self._full = False  # whether it is over only because unconfirmed copies use up the prefetch
        self._asked = False  # whether the loop has begun to ask for this round
        self._done = False  # no more deliveries will arrive
        self._missing = False  # the broker did not find the queue, which may still exist
        self._gone: ReliableMQError | None = None  # the broker's error that the queue no longer exists
        self._unanswered = 0  # unanswered requests; used on the loop only, like the rest
        self._empty = False  # whether an answer of this round was "empty"
        self._channel = 0
        self._poll = _POLL_FIRST
        self._poll_timer: TimerHandle | None = None

    # For callers

    def take(self, most: int, timeout: float, taken: list[PulledDelivery]) -> Any:
        """Take up to ``most`` deliveries: those present, or the first that arrive in time.

        Waits for its turn, and for the answers of a connected broker, a few seconds beyond ``timeout`` at most.

        Args:
            most: The maximum number of deliveries.
            timeout: The time to wait, in seconds.
            taken: The list that receives the deliveries one by one. An interrupted caller must settle or requeue those
                in it.

        Raises:
            UsageError: If the deliveries would exceed the prefetch.
        """
        raise NotImplementedError

    def _take(self, most: int, deadline: float, taken: list[PulledDelivery]) -> Steps[None]:
        """Take deliveries, for the caller whose turn it is."""
        with self._guard:
            try:
                self._begin_round(most)
                while True:  # without a condition: see `Condition`
                    wait = self._take_arrived(taken, deadline)
                    if wait is None:
                        break
                    yield self._changed.wait(min(wait, LONGEST_WAIT))
            except BaseException:
                self._put_back(taken)
                raise
            finally:
                self._wanted = 0

    def _begin_round(self, most: int) -> None:
        """Request up to ``most`` deliveries.

        Raises:
            UsageError: If they would exceed the prefetch.
        """
        if 0 < self._options.prefetch < self._unsettled + most:
            raise UsageError(
                f"{self._unsettled} deliveries are unsettled; {most} more would exceed "
                f"prefetch={self._options.prefetch}"
            )
        self._wanted, self._over, self._asked = most, False, False
        self._io.call_soon(self._ask_afresh)

    def _take_arrived(self, taken: list[PulledDelivery], deadline: float) -> float | None:
        """Move arrived deliveries to ``taken``; return the seconds to wait, or None.

        None means that the call ends.

        Raises:
            ConsumerCancelled: If no delivery arrived and the queue is gone.
        """
        while self._wanted and self._arrived:
            delivery = PulledDelivery(self._arrived[0], self)
            self._wanted -= 1
            self._unsettled += 1
            taken.append(delivery)  # one uninterruptible step with the two lines before
            self._arrived.popleft()
        now = time.monotonic()
        last = deadline + ANSWER
        gone = self._gone is not None
        over = gone or (self._over and not self._missing and (bool(taken) or not self._full))
        if not self._wanted or self._done or now >= last or (over and (taken or now >= deadline)):
            if gone and not taken:
                raise ConsumerCancelled(
                    f"queue {self._options.queue_name!r} was deleted; when it exists again, get() can be called again"
                ) from self._gone
            return None
        return (deadline if over else last) - now

    def _put_back(self, taken: list[PulledDelivery]) -> None:
        """Put deliveries back in front, as the caller was interrupted before it had them."""
        if taken and self._arrived:
            first, last = self._arrived[0], taken[-1]
            if (first.source, first.delivery_tag) == (last.source, last.delivery_tag):  # it was only copied until now
                self._arrived.popleft()
        self._arrived.extendleft(one.delivered for one in reversed(taken))
        self._unsettled -= len(taken)
        taken.clear()

    def settle(self, delivery: PulledDelivery, result: Result | None) -> None:
        """Settle a delivery with the user's result. None requeues it.

        Raises:
            UsageError: If it is already settled.
            StaleDelivery: If its channel is gone.
        """
        reports: deque[Any] = self._requeued if result is None else self._results
        report = delivery.delivered if result is None else result  # counted as stale by the session
        now = time.monotonic()
        try:
            with self._guard:
                if not self._results:
                    self._reported_at = now
                delivery.mark_settled()
                self._unsettled -= 1
                reports.append(report)  # one uninterruptible step with the two lines before
            self._wake()
        except BaseException:
            self._io.call_soon(self._run)  # the wake-up may have been interrupted
            raise
        if delivery.source is not self.session.source:
            raise StaleDelivery(f"the channel of {delivery!r} is gone; the broker will deliver it again")

    # On the loop: the handler pool

    def put(self, work: Iterable[Delivery | list[Delivery]]) -> None:
        """Pass requested or retried deliveries to the caller."""
        with self._guard:
            self._arrived.extend(item for item in work if isinstance(item, Delivery))
            self._changed.notify_all()

    def stop_starting(self) -> None:
        """Do nothing, because there are no handlers."""

    def recall(self) -> list[Delivery]:
        """Return the deliveries that no caller has taken."""
        with self._guard:
            recalled = list(self._arrived)
            self._arrived.clear()
        return recalled

    # On the loop: the connection

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        """Repeat the requests that the lost channel did not answer."""
        self._channel = channel
        with self._guard:
            self._gone, self._missing = None, False
        super().ready(generation, channel, frame_max, server)
        self._ask_afresh()

    def lost(self, generation: int, loss: ConnectionLoss) -> None:
        """Forget unanswered requests. End if the broker refuses them permanently."""
        self._unanswered = 0
        self._empty = False
        with self._guard:
            self._missing = loss.by_broker and loss.code == ReplyCode.NOT_FOUND
        super().lost(generation, loss)
        single = loss.code == ReplyCode.RESOURCE_LOCKED and _SINGLE_ACTIVE in loss.text
        if loss.by_broker and (single or loss.code in _REFUSALS):
            self.error = ConsumeError(
                f"the broker refuses get() on queue {self._options.queue_name!r}: {loss.code} {loss.text}"
            )
            self._end()

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        """Wake callers if the queue is gone. It may be declared again later."""
        super().failed(error, will_retry)
        if will_retry and is_missing(error):
            with self._guard:
                self._gone, self._missing = error, False
                self._changed.notify_all()

    def got(self, delivery: RawDelivery, message_count: int) -> None:
        """Accept the delivery that answers a request."""
        self._answered()
        self._poll = _POLL_FIRST
        super().got(delivery, message_count)

    def oversized(self, delivery: RawDelivery, size: int, message_count: int | None) -> None:
        """Accept a delivery that answers a request and is passed to no caller."""
        self._answered()
        self._poll = _POLL_FIRST
        super().oversized(delivery, size, message_count)

    def got_empty(self) -> None:
        """Note that the queue is empty."""
        self._answered()
        self._empty = True

    def _answered(self) -> None:
        """Count the answer to a request. Without one, the stream cannot be trusted."""
        if not self._unanswered:
            raise CodecError("the broker answered a get that was not sent")
        self._unanswered -= 1

    def _subscribe(self, server: ServerInfo) -> SetupGenerator:
        return self._options.pull_setup(server, self._queue_listener)

    def _run(self) -> None:
        """Pass deliveries on, and request more or end the round."""
        super()._run()
        self._ask()

    def _ask(self) -> None:
        """Request the deliveries still wanted, as far as the prefetch allows."""
        if self._unanswered:
            return
        with self._guard:
            missing = self._wanted - len(self._arrived)
        if missing > 0 and self.connected and not self._empty:
            prefetch = self._options.prefetch
            self._unanswered = max(min(missing, prefetch - self.session.outstanding) if prefetch else missing, 0)
            if self._poll > _POLL_FIRST:
                self._unanswered = min(self._unanswered, 1)  # an empty queue gets one request at a time
        if self._unanswered:
            with self._guard:
                self._over = False
            self._io.write(encode_get(self._channel, self._options.queue_name) * self._unanswered)
            return
        with self._guard:
            self._over = self._asked  # otherwise `_ask_afresh` is about to ask
            self._full = missing > 0 and self.connected and not self._empty and self.session.copying
            self._changed.notify_all()
        if missing > 0 and self._poll_timer is None and self.connected:
            self._poll_timer = self._io.call_later(self._poll, self._ask_again)
            self._poll = min(self._poll * 2, _POLL_LONGEST)

    def _ask_again(self) -> None:
        self._poll_timer = None
        self._empty = False
        self._ask()

    def _ask_afresh(self) -> None:
        """Send requests at once, even if the queue was empty before."""
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        self._poll = _POLL_FIRST
        with self._guard:
            self._asked = True
        self._ask_again()

    def _finish(self, now: float) -> None:
        super()._finish(now)
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        with self._guard:
            self._done = True
            self._changed.notify_all()
