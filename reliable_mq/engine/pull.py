"""Deliveries on request (``basic.get``), for jobs that take what is there and go.

Each request is answered with a delivery or with "empty"; a whole batch of requests goes out in one write. Deliveries
are the consuming session's as any others: a retried one is held in the process and comes first with a later request.

Invariants: no more deliveries are unsettled, held ones included, than the prefetch, which the broker itself does not
apply to ``basic.get``; requests that a lost channel did not answer are made again on the next one, for whoever still
waits; a call ends with every request of its own answered, unless the broker does not answer; a delivery that was not
settled when its block is left goes back, or is acked, as the block ended.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

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
    from types import TracebackType

    from reliable_mq._util.validation import Duration
    from reliable_mq.codec import RawDelivery
    from reliable_mq.connection.interfaces import TimerHandle
    from reliable_mq.core.channel_setup import ServerInfo, SetupGenerator
    from reliable_mq.core.consumer.handler import Result
    from reliable_mq.core.reconnect import ConnectionLoss, ReconnectPolicy
    from reliable_mq.engine.consumer_options import ConsumerOptions
    from reliable_mq.errors import ReliableMQError
    from reliable_mq.settings import ConnectionSettings

__all__ = ["BasePullSubscription", "ChangeMonitor", "PulledDelivery"]

_POLL_FIRST, _POLL_LONGEST = 0.02, 0.5  # seconds between two requests to an empty queue
_ANSWER = 5.0  # seconds that the broker's answers to the last requests are waited for
_NOT_FOUND = 404
_REFUSALS = frozenset({403, 540})  # not allowed to read; a stream, which has no basic.get


class PulledDelivery(Delivery):
    """A delivery from ``get``: settled one by one, or all together when its block is left."""

    __slots__ = ("_settled", "_subscription")

    def __init__(self, delivery: Delivery, subscription: BasePullSubscription) -> None:
        super().__init__(
            delivery.consumer_tag,
            delivery.delivery_tag,
            delivery.redelivered,
            delivery.exchange,
            delivery.routing_key,
            delivery.properties,
            delivery.body,
        )
        self.source = delivery.source
        self.state = delivery.state
        self.failures = delivery.failures
        self._settled = False
        self._subscription = subscription

    def ack(self) -> None:
        """It is done. Does not wait for the broker.

        Raises:
            StaleDelivery: its channel is gone; the broker will deliver it again.
            UsageError: it is settled already.
        """
        self._settle(self)

    def retry(self, delay: Duration | None = None) -> None:
        """Try it again later: a failed attempt, as `RetryLater` raised by a handler. Errors as for `ack`."""
        self._settle(Failed(self, describe(RetryLater(delay), time.time())))

    def dead_letter(self, reason: str) -> None:
        """Dead-letter it, as `DeadLetter` raised by a handler. Errors as for `ack`."""
        self._settle(Failed(self, describe(DeadLetter(reason), time.time())))

    def hand_back(self) -> None:
        """Return it to the queue, unhandled and no attempt. Errors as for `ack`."""
        self._settle(None)

    @property
    def settled(self) -> bool:
        """Whether it was acked, retried, dead-lettered or handed back."""
        return self._settled

    def _settle(self, result: Result | None) -> None:
        if self._settled:
            raise UsageError(f"{self!r} is settled already")
        self._settled = True
        self._subscription.settle(self, result)


class ChangeMonitor(Protocol):
    """Guards what a caller and the loop share, and tells callers that it has changed."""

    def __enter__(self) -> object:
        """Begin to look at it, or to change it."""

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        """End that."""

    def notify_all(self) -> None:
        """It has changed. Between `__enter__` and `__exit__` only."""


class BasePullSubscription(BaseSubscription):
    """A subscription whose deliveries are asked for; it is its own outlet. A face says how callers wait.

    Callers take turns. The one whose turn it is says how many it wants; the loop asks for them, and says when the round
    is over: when every request is answered, or none can be made.
    """

    _changed: ChangeMonitor  # guards the seven that `__init__` begins with

    def __init__(self, options: ConsumerOptions, settings: ConnectionSettings, recovery: ReconnectPolicy) -> None:
        super().__init__(options, settings, recovery)
        self.outlet = self
        self._changed = self._new_changes()
        self._arrived: deque[Delivery] = deque()
        self._unsettled = 0  # given to the user and not settled
        self._wanted = 0  # by the caller whose turn it is, what has arrived included
        self._over = False  # the round
        self._done = False  # nothing will come any more
        self._doubted = False  # the broker did not find the queue, and it is not known yet whether it is gone
        self._gone: ReliableMQError | None = None  # how the broker said that the queue does not exist any more
        self._owed = 0  # requests that are not answered; on the loop only, as the rest
        self._empty = False  # an answer of this round
        self._channel = 0
        self._poll = _POLL_FIRST
        self._poll_timer: TimerHandle | None = None

    def _new_changes(self) -> ChangeMonitor:
        raise NotImplementedError

    # For callers. The first three under `_changed`, by the one whose turn it is

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
        """Move to ``taken`` what has arrived. Returns how many seconds to wait for more; None where that is all.

        The answers of a broker that is connected are waited for, a few seconds beyond ``deadline`` at most.

        Raises:
            ConsumerCancelled: nothing came, and the queue is gone.
        """
        while self._wanted and self._arrived:
            taken.append(PulledDelivery(self._arrived.popleft(), self))
            self._wanted -= 1
            self._unsettled += 1
        now = time.monotonic()
        last = deadline + _ANSWER
        gone = self._gone is not None
        over = gone or (self._over and not self._doubted)
        if not self._wanted or self._done or now >= last or (over and (taken or now >= deadline)):
            if gone and not taken:
                raise ConsumerCancelled(
                    f"queue {self._options.queue_name!r} was deleted; when it exists again, get() gives from it again"
                ) from self._gone
            return None
        return (deadline if over else last) - now

    def _give_back(self, taken: list[PulledDelivery]) -> None:
        """The caller was interrupted before it had them: they come first again."""
        self._arrived.extendleft(reversed(taken))
        self._unsettled -= len(taken)

    def _end_round(self) -> None:
        self._wanted = 0

    def settle(self, delivery: PulledDelivery, result: Result | None) -> None:
        """The user settled a delivery; None hands it back."""
        with self._changed:
            self._unsettled -= 1
        if result is None:
            self.hand_back([delivery])
        else:
            self.report([result])  # counted as stale where it is
            self._wake()
        if delivery.source is not self.session.source:
            raise StaleDelivery(f"the channel of {delivery!r} is gone; the broker will deliver it again")

    def leave(self, deliveries: Iterable[PulledDelivery], *, ack: bool) -> None:
        """A block is left: ack what is not settled, or hand it back. Raises StaleDelivery after the last of them."""
        stale: StaleDelivery | None = None
        for delivery in deliveries:
            if not delivery.settled:
                try:
                    if ack:
                        delivery.ack()
                    else:
                        delivery.hand_back()
                except StaleDelivery as error:
                    stale = error
        if stale is not None and ack:
            raise stale

    # On the loop: the outlet

    def put(self, work: Iterable[Delivery | list[Delivery]]) -> None:
        """Deliveries that were asked for, or whose next attempt is due."""
        with self._changed:
            self._arrived.extend(item for item in work if isinstance(item, Delivery))
            self._changed.notify_all()

    def hold(self) -> None:
        """Nothing: no handler begins with anything."""

    def withdraw(self) -> list[Delivery]:
        """Give back what nobody has taken."""
        with self._changed:
            withdrawn = list(self._arrived)
            self._arrived.clear()
        return withdrawn

    # On the loop: the connection

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        """Ask again what the lost channel did not answer."""
        self._channel = channel
        with self._changed:
            self._gone, self._doubted = None, False
        super().ready(generation, channel, frame_max, server)
        self._ask_afresh()

    def lost(self, generation: int, loss: ConnectionLoss) -> None:
        """What was asked is not answered any more. A broker that refuses to answer would do so again and again."""
        self._owed = 0
        self._empty = False
        with self._changed:
            self._doubted = loss.by_broker and loss.code == _NOT_FOUND
        super().lost(generation, loss)
        if loss.by_broker and loss.code in _REFUSALS:
            self.error = ConsumeError(
                f"the broker does not give from queue {self._options.queue_name!r}: {loss.code} {loss.text}"
            )
            self._end()

    def failed(self, error: ReliableMQError, will_retry: bool) -> None:
        """Where the queue is gone, callers are told; it may come back."""
        super().failed(error, will_retry)
        if will_retry and is_missing(error):
            with self._changed:
                self._gone, self._doubted = error, False
                self._changed.notify_all()

    def got(self, delivery: RawDelivery, message_count: int) -> None:
        """A request is answered with a delivery."""
        self._owed -= 1
        self._poll = _POLL_FIRST
        super().got(delivery, message_count)

    def oversized(self, delivery: RawDelivery, size: int, message_count: int | None) -> None:
        """A request is answered with a delivery that nobody gets."""
        self._owed -= 1
        self._poll = _POLL_FIRST
        super().oversized(delivery, size, message_count)

    def got_empty(self) -> None:
        """A request is answered: the queue is empty."""
        self._owed -= 1
        self._empty = True

    def _subscribe(self, server: ServerInfo) -> SetupGenerator:
        return self._options.pull_setup(server, self._maker)

    def _run(self) -> None:
        """Pass deliveries on; then ask for those that are still wanted, or tell the caller that there are no more."""
        super()._run()
        self._ask()

    def _ask(self) -> None:
        """Ask for what is wanted and neither here nor asked for, as far as the prefetch allows."""
        if self._owed:
            return
        with self._changed:
            missing = self._wanted - len(self._arrived)
        if missing > 0 and self.connected and not self._empty:
            prefetch = self._options.prefetch
            self._owed = max(min(missing, prefetch - self.session.outstanding) if prefetch else missing, 0)
            if self._poll > _POLL_FIRST:
                self._owed = min(self._owed, 1)  # an empty queue is asked once at a time
        if self._owed:
            with self._changed:
                self._over = False
            self._io.write(encode_get(self._channel, self._options.queue_name) * self._owed)
            return
        with self._changed:
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
        """Ask at once, whatever the queue has said before."""
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        self._poll = _POLL_FIRST
        self._ask_again()

    def _finish(self, now: float) -> None:
        super()._finish(now)
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        with self._changed:
            self._done = True
            self._changed.notify_all()
