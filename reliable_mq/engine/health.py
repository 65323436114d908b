"""The signs of health of an event loop and of a subscription.

`reliable_mq.core.health` judges these signs. They are noted on the loop of a connection and read by any thread. Each
attribute is written by one thread only and is consistent at any moment. Nothing here waits. `DeliveryCheck` acts on one
sign by itself: it replaces a connection on which ready messages are not delivered.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reliable_mq.codec.methods import CheckQueue, QueueState
from reliable_mq.core.consumer import delivery_watch
from reliable_mq.core.health import ConsumerSigns
from reliable_mq.engine.connection import Wakeup

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.core.channel_setup import StepGenerator
    from reliable_mq.core.consumer.delivery_watch import DeliveryWatch
    from reliable_mq.core.consumer.session import ConsumerSession
    from reliable_mq.engine.connection import BaseConnection
    from reliable_mq.errors import ReliableMQError


class LoopWatch:
    """A watch that detects an event loop that no longer runs calls. Thread-safe.

    Each check schedules a call on the loop, unless the previous call has not run yet. So nothing runs between two
    checks, and the second check detects a loop that stalls.
    """

    def __init__(self) -> None:
        self._asked_at: float | None = None

    def check(self, now: float, call_soon: Callable[[Callable[[], None]], object]) -> float | None:
        """Return the time since which the loop has not responded, or None.

        Schedules the next call if the last one has run.

        Args:
            now: The current time in seconds, on a monotonic clock.
            call_soon: A thread-safe callable that runs a function on the loop. It may return False if the loop does not
                run.
        """
        asked_at = self._asked_at
        if asked_at is None:
            self._asked_at = now
            if call_soon(self._answered) is False:
                self._asked_at = None
        return asked_at

    def _answered(self) -> None:
        self._asked_at = None


class ConsumerVitals:
    """The signs of health of one subscription.

    Args:
        heartbeat: The heartbeat of its connection, in seconds. The loop may stand still for that long.
    """

    def __init__(self, heartbeat: float) -> None:
        self._heartbeat = heartbeat
        self._watch = LoopWatch()
        self._changed_at = self._worked_at = time.monotonic()
        self._paused_at: float | None = None
        self._away: str | None = None

    def subscribed(self) -> None:
        """Note that a channel is subscribed."""
        self._changed_at, self._away = time.monotonic(), None

    def unsubscribed(self, reason: str) -> None:
        """Note the end of a subscription."""
        self._changed_at, self._away = time.monotonic(), reason

    def attempt_failed(self, reason: str) -> None:
        """Note a failed attempt to subscribe again."""
        self._away = reason

    def worked(self, now: float) -> None:
        """Note that a handler has ended, or that no handler was running."""
        self._worked_at = now

    def paused(self, *, paused: bool) -> None:
        """Note that the kill switch has paused or resumed the consumer."""
        self._paused_at = (self._paused_at or time.monotonic()) if paused else None

    def signs(
        self,
        session: ConsumerSession,
        connection: BaseConnection,
        error: ReliableMQError | None,
        now: float,
        stuck_after: float,
        store_failing: tuple[float, str] | None,
    ) -> ConsumerSigns:
        """Return the signs of health. Thread-safe. Does not wait."""
        return ConsumerSigns(
            changed_at=self._changed_at,
            stuck_after=stuck_after,
            connected=session.lifecycle.connected,
            disconnected_reason=self._away,
            given_up="" if error is None else str(error),
            loop_over=connection.over,
            unanswered_since=self._watch.check(now, connection.call_soon),
            patience=self._heartbeat,
            work=session.running,
            worked_at=self._worked_at,
            paused=session.paused,
            paused_at=self._paused_at,
            store_failing=store_failing,
        )


class DeliveryCheck:
    """A timer that checks whether ready messages are delivered.

    It runs while its consumer is subscribed. To be used on the loop.

    Args:
        watch: The watch that decides. None to check nothing.
        io: The connection, which is discarded if ready messages are not delivered.
    """

    def __init__(self, watch: DeliveryWatch | None, queue: str, session: ConsumerSession, io: BaseConnection) -> None:
        self._watch = watch
        self._queue = queue
        self._session = session
        self._io = io
        self._timer = Wakeup(self._check)

    def begin(self) -> None:
        """Check from time to time, on a new channel."""
        if self._watch is not None:
            self._watch.subscribed(self._session.statistics.delivered)
            self._check_later()

    def end(self) -> None:
        """Stop checking."""
        self._timer.cancel()

    def _check_later(self) -> None:
        now = time.monotonic()
        self._timer.set(now + delivery_watch.CHECK_EVERY, now, self._io.call_later)

    def _check(self) -> None:
        session = self._session
        if self._watch is None or not session.lifecycle.subscribed:
            return
        if self._watch.check(session.statistics.delivered, session.outstanding):
            self._io.run(self._count(), self._counted)
        self._check_later()

    def _count(self) -> StepGenerator:
        return (yield CheckQueue(self._queue))

    def _counted(self, outcome: object) -> None:
        if self._watch is None or not isinstance(outcome, QueueState):  # the channel is lost
            return
        if self._watch.counted(outcome.messages, self._session.statistics.delivered):
            text = f"{outcome.messages} messages of queue {self._queue!r} are ready, and none is delivered"
            self._io.discard(f"{text}: does the queue's member on this node run?")
