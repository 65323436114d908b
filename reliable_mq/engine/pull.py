"""Deliveries on request (``basic.get``).

They are for jobs that take the messages that are there and go. Each request is answered with a delivery or with
"empty"; a whole batch of requests is sent in one write. Deliveries go through the consumer session as any others: a
retried one is held in the process and comes first with a later request.

Invariants: no more deliveries are unsettled, held ones included, than the prefetch, which the broker itself does not
apply to ``basic.get``; requests that a lost channel did not answer are made again on the next one, for a caller that
still waits; a call ends with every request of its own answered, unless the broker does not answer; a delivery that is
not settled when its block is left is requeued, or acked, as the block ended.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from reliable_mq.codec import encode_get
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
    from reliable_mq.core.consumer.delivery import DeliveryState
    from reliable_mq.core.consumer.handler import Result
    from reliable_mq.core.reconnect import ConnectionLoss
    from reliable_mq.engine.consumer_options import ConsumerOptions
    from reliable_mq.engine.steps import Steps
    from reliable_mq.errors import ReliableMQError

__all__ = ["LONGEST_WAIT", "BasePullSubscription", "ChangeMonitor", "PulledDelivery", "leave"]

_POLL_FIRST, _POLL_LONGEST = 0.02, 0.5  # seconds between two requests to an empty queue
_ANSWER = 5.0  # seconds that the broker's answers to the last requests are waited for
LONGEST_WAIT = 1e8  # seconds, which every timer takes
_NOT_FOUND = 404
_REFUSALS = frozenset({403, 540})  # not allowed to read; a stream, which has no basic.get


class PulledDelivery(Delivery):
    """A delivery from ``get``, settled by its methods or at the end of its block."""

    __slots__ = ("_delivered", "_settled", "_subscription")

    def __init__(self, delivery: Delivery, subscription: BasePullSubscription) -> None:
        self._delivered = delivery
        state, context = delivery.state, delivery.attempt_context
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
        self.state, self.attempt_context = state, context
        self._failures = delivery.failures
        self._settled = False
        self._subscription = subscription

    @property
    def state(self) -> DeliveryState:
        """The state of the delivery that the session knows."""
        return self._delivered.state

    @state.setter
    def state(self, state: DeliveryState) -> None:
        self._delivered.state = state

    @property
    def attempt_context(self) -> str | None:
        """The trace context of the delivery that the session knows."""
        return self._delivered.attempt_context

    @attempt_context.setter
    def attempt_context(self, context: str | None) -> None:
        self._delivered.attempt_context = context

    def ack(self) -> None:
        """Ack it. Does not wait for the broker.

        Raises:
            StaleDelivery: its channel is gone; the broker will deliver it again.
            UsageError: it is settled already.
        """
        self._subscription.settle(self, self)

    def retry(self, delay: Duration | None = None) -> None:
        """Retry it later: a failed attempt, as by `RetryLater`. Errors as for `ack`."""
        self._subscription.settle(self, Failed(self, describe(RetryLater(delay), time.time())))

    def dead_letter(self, reason: str) -> None:
        """Dead-letter it, as `DeadLetter` raised by a handler. Errors as for `ack`."""
        self._subscription.settle(self, Failed(self, describe(DeadLetter(reason), time.time())))

    def requeue(self) -> None:
        """Requeue it, without an attempt. Errors as for `ack`."""
        self._subscription.settle(self, None)

    @property
    def settled(self) -> bool:
        """Whether it was acked, retried, dead-lettered or requeued."""
        return self._settled

    def mark_settled(self) -> None:
        """Note that it is settled; UsageError if it was."""
        if self._settled:
            raise UsageError(f"{self!r} is settled already")
        self._settled = True


def leave(deliveries: Iterable[PulledDelivery], *, ack: bool) -> None:
    """Ack, or requeue, unsettled deliveries at the end of a block.

    If that is interrupted, it is to be called again.

    Raises:
        StaleDelivery: the channel of one is gone; the others are acked.
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
    if stale is not None and ack:
        raise stale


class ChangeMonitor(Protocol):
    """Wakes callers on changes of the state that a caller and the loop share.

    Attributes:
        lock: guards that state; the methods are to be called in a block of it.
    """

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def notify_all(self) -> None:
        """Wake callers."""

    def wait(self, timeout: float, /) -> Any:
        """Wait for a change, for up to ``timeout`` seconds. A step."""


class BasePullSubscription(BaseSubscription):
    """A subscription that asks for each delivery, and is its own handler pool.

    Callers take turns; an API adds how they wait. The one whose turn it is asks for a number of deliveries; the loop
    requests them, and ends the round when every request is answered, or none can be made.
    """

    _changes_type: ClassVar[type[ChangeMonitor]]
    _guard: AbstractContextManager[Any]  # of the seven that `__init__` begins with

    def __init__(self, options: ConsumerOptions) -> None:
        super().__init__(options)
        self.handlers = self
        self._changed = self._changes_type()
        self._guard = self._changed.lock
        self._arrived: deque[Delivery] = deque()
        self._unsettled = 0  # given to the user and not settled
        self._wanted = 0  # by the caller whose turn it is, arrived ones included
        self._over = False  # the round
        self._done = False  # nothing will come any more
        self._missing = False  # the broker did not find the queue; whether it is gone is not known yet
        self._gone: ReliableMQError | None = None  # how the broker said that the queue does not exist any more
        self._unanswered = 0  # requests that are not answered; on the loop only, as the rest
        self._empty = False  # an answer of this round
        self._channel = 0
        self._poll = _POLL_FIRST
        self._poll_timer: TimerHandle | None = None

    # For callers

    def take(self, most: int, timeout: float, taken: list[PulledDelivery]) -> Any:
        """Take up to ``most`` deliveries: those here, or the first that come in time.

        The answers of a broker that is connected are waited for, a few seconds beyond ``timeout`` at most.

        Args:
            most: deliveries.
            timeout: seconds.
            taken: gets them, one by one; a caller that is interrupted is to leave those that are in it.

        Raises:
            UsageError: that would exceed the prefetch.
        """
        raise NotImplementedError

    def _take(self, most: int, deadline: float, taken: list[PulledDelivery]) -> Steps[None]:
        """Take deliveries. By the caller whose turn it is."""
        with self._guard:
            try:
                self._begin_round(most)
                while (wait := self._take_arrived(taken, deadline)) is not None:
                    yield self._changed.wait(min(wait, LONGEST_WAIT))
            except BaseException:
                self._put_back(taken)
                raise
            finally:
                self._wanted = 0

    def _begin_round(self, most: int) -> None:
        """Ask for up to ``most``.

        Raises:
            UsageError: that would exceed the prefetch.
        """
        if 0 < self._options.prefetch < self._unsettled + most:
            raise UsageError(
                f"{self._unsettled} deliveries are unsettled; {most} more would exceed "
                f"prefetch={self._options.prefetch}"
            )
        self._wanted, self._over = most, False
        self._io.call_soon(self._ask_afresh)

    def _take_arrived(self, taken: list[PulledDelivery], deadline: float) -> float | None:
        """Move arrived deliveries to ``taken``. Returns seconds to wait for more, or None.

        The answers of a broker that is connected are waited for, a few seconds beyond ``deadline`` at most.

        Raises:
            ConsumerCancelled: nothing came, and the queue is gone.
        """
        while self._wanted and self._arrived:
            delivery = PulledDelivery(self._arrived[0], self)
            self._wanted -= 1
            self._unsettled += 1
            taken.append(delivery)  # one step with the two lines before
            self._arrived.popleft()
        now = time.monotonic()
        last = deadline + _ANSWER
        gone = self._gone is not None
        over = gone or (self._over and not self._missing)
        if not self._wanted or self._done or now >= last or (over and (taken or now >= deadline)):
            if gone and not taken:
                raise ConsumerCancelled(
                    f"queue {self._options.queue_name!r} was deleted; when it exists again, get() gives from it again"
                ) from self._gone
            return None
        return (deadline if over else last) - now

    def _put_back(self, taken: list[PulledDelivery]) -> None:
        """Put deliveries in front again: the caller was interrupted before it had them."""
        if taken and self._arrived:
            first, last = self._arrived[0], taken[-1]
            if (first.source, first.delivery_tag) == (last.source, last.delivery_tag):  # so far it was only copied
                self._arrived.popleft()
        self._arrived.extendleft(reversed(taken))
        self._unsettled -= len(taken)
        taken.clear()

    def settle(self, delivery: PulledDelivery, result: Result | None) -> None:
        """Settle a delivery with the result of the user; None requeues it.

        Raises:
            UsageError: it is settled already.
            StaleDelivery: its channel is gone.
        """
        reports: deque[Any] = self._requeued if result is None else self._results
        report = delivery if result is None else result  # counted as stale where it is
        now = time.monotonic()
        try:
            with self._guard:
                if not self._results:
                    self._reported_at = now
                delivery.mark_settled()
                self._unsettled -= 1
                reports.append(report)  # one step with the two lines before
            self._wake()
        except BaseException:
            self._io.call_soon(self._run)  # waking it may have been interrupted
            raise
        if delivery.source is not self.session.source:
            raise StaleDelivery(f"the channel of {delivery!r} is gone; the broker will deliver it again")

    # On the loop: the handler pool

    def put(self, work: Iterable[Delivery | list[Delivery]]) -> None:
        """Pass deliveries on to the caller: requested ones, or those of a next attempt."""
        with self._guard:
            self._arrived.extend(item for item in work if isinstance(item, Delivery))
            self._changed.notify_all()

    def stop_starting(self) -> None:
        """Do nothing: there are no handlers."""

    def recall(self) -> list[Delivery]:
        """Return the deliveries that no caller has."""
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
        """Forget unanswered requests; end if the broker refuses them for good."""
        self._unanswered = 0
        self._empty = False
        with self._guard:
            self._missing = loss.by_broker and loss.code == _NOT_FOUND
        super().lost(generation, loss)
        if loss.by_broker and loss.code in _REFUSALS:
            self.error = ConsumeError(
                f"the broker does not give from queue {self._options.queue_name!r}: {loss.code} {loss.text}"
            )
            self._end()

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        """Wake callers if the queue is gone; it may come back."""
        super().failed(error, will_retry)
        if will_retry and is_missing(error):
            with self._guard:
                self._gone, self._missing = error, False
                self._changed.notify_all()

    def got(self, delivery: RawDelivery, message_count: int) -> None:
        """Take in the delivery that answers a request."""
        self._unanswered -= 1
        self._poll = _POLL_FIRST
        super().got(delivery, message_count)

    def oversized(self, delivery: RawDelivery, size: int, message_count: int | None) -> None:
        """Take in a delivery that answers a request, and that no caller gets."""
        self._unanswered -= 1
        self._poll = _POLL_FIRST
        super().oversized(delivery, size, message_count)

    def got_empty(self) -> None:
        """Note that the queue is empty."""
        self._unanswered -= 1
        self._empty = True

    def _subscribe(self, server: ServerInfo) -> SetupGenerator:
        return self._options.pull_setup(server, self._maker)

    def _run(self) -> None:
        """Pass deliveries on; then request more, or end the round."""
        super()._run()
        self._ask()

    def _ask(self) -> None:
        """Request the deliveries that are still wanted, as far as the prefetch allows."""
        if self._unanswered:
            return
        with self._guard:
            missing = self._wanted - len(self._arrived)
        if missing > 0 and self.connected and not self._empty:
            prefetch = self._options.prefetch
            self._unanswered = max(min(missing, prefetch - self.session.outstanding) if prefetch else missing, 0)
            if self._poll > _POLL_FIRST:
                self._unanswered = min(self._unanswered, 1)  # an empty queue is asked once at a time
        if self._unanswered:
            with self._guard:
                self._over = False
            self._io.write(encode_get(self._channel, self._options.queue_name) * self._unanswered)
            return
        with self._guard:
            self._over = True
            self._changed.notify_all()
        if missing > 0 and self._poll_timer is None and self.connected:
            self._poll_timer = self._io.call_later(self._poll, self._ask_again)
            self._poll = min(self._poll * 2, _POLL_LONGEST)

    def _ask_again(self) -> None:
        self._poll_timer = None
        self._empty = False
        self._ask()

    def _ask_afresh(self) -> None:
        """Ask at once, though the queue was empty before."""
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        self._poll = _POLL_FIRST
        self._ask_again()

    def _finish(self, now: float) -> None:
        super()._finish(now)
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        with self._guard:
            self._done = True
            self._changed.notify_all()
