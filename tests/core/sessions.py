"""A consumer session for tests, and helpers that act as its shell.

A test takes the actions of the session one kind at a time.
"""

from __future__ import annotations

from itertools import chain
from random import Random
from typing import Any

from reliable_mq import KillSwitch, PublishReturned, Queue, RetryPolicy
from reliable_mq.core.consumer import kill_switch as switches
from reliable_mq.core.consumer import quarantine as quarantines
from reliable_mq.core.consumer.acks import AckBatcher
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.dispatch import Batcher
from reliable_mq.core.consumer.handler import Failed
from reliable_mq.core.consumer.kill_switch import KillSwitchMonitor
from reliable_mq.core.consumer.lifecycle import PAUSE, ChannelStep, ConsumerLifecycle, SubscriptionChange
from reliable_mq.core.consumer.quarantine import Quarantine
from reliable_mq.core.consumer.session import Actions, ConsumerSession
from reliable_mq.core.consumer.settlement import LogEvent, LogEventKind
from reliable_mq.core.retry.dead_letters import DeadLetters, RepublishRequest
from reliable_mq.core.retry.delay_queues import DelayQueues
from tests.core.deliveries import delivery, failure
from tests.transitions import follows

CHANNEL = 3
ISOLATED = "c#quarantine"
RETURNED = PublishReturned("no queue", reply_code=312, reply_text="NO_ROUTE", exchange="", routing_key="q.dead")
DEAD = Queue("q.dead", dead_letter=None)
DEAD_LETTERS = DeadLetters("q.dead", consumer="c", version="0")
DECLARED_DEAD_LETTERS = DeadLetters("q.dead", consumer="c", version="0", declared=[DEAD])


class CheckedKillSwitch(follows(switches.TRANSITIONS, "_state"), KillSwitchMonitor):  # type: ignore[misc]
    pass


class CheckedQuarantine(follows(quarantines.TRANSITIONS), Quarantine):  # type: ignore[misc]
    pass


class ReadableSession(ConsumerSession):
    """Shows the values that only the session itself reads."""

    @property
    def deadline(self) -> float:
        return self._deadline

    @property
    def drained(self) -> bool:
        return self._drained

    @property
    def held(self) -> int:
        """The number of deliveries held for their next attempt or publish."""
        return len(self._settlement._held)


class SteppedSession(ReadableSession):
    """Polls at every access, and keeps the actions that the test has not taken."""

    _now = 0.0
    _kept: tuple[Actions, ...] = ()

    def tick(self, now: float) -> None:
        self._now = now
        self._kept += (self.poll(now),)
        if self._kept[-1].recall:
            self._kept += (self.poll(now),)

    def _take(self, name: str, empty: Any) -> Any:
        """Return the actions of one kind from all polls since the last call."""
        self.tick(self._now)
        found = [getattr(actions, name) for actions in self._kept]
        self._kept = tuple(actions._replace(**{name: empty}) for actions in self._kept)
        return found

    def take_work(self) -> list[Delivery]:
        return [] if self._dispatcher._batcher is not None else list(chain.from_iterable(self._take("dispatch", ())))

    def take_batches(self) -> list[list[Delivery]]:
        return [] if self._dispatcher._batcher is None else list(chain.from_iterable(self._take("dispatch", ())))

    def take_isolated(self) -> list[Delivery | list[Delivery]]:
        return list(chain.from_iterable(self._take("dispatch_quarantined", ())))

    def take_pause(self) -> bool:
        return any(self._take("recall", False))

    def take_changes(self) -> list[SubscriptionChange]:
        return list(chain.from_iterable(self._take("subscribe", ())))

    def take_subscription(self) -> bool:
        return ChannelStep.SUBSCRIBE_TO_QUARANTINE in self.take_changes()

    def take_republishes(self) -> list[RepublishRequest]:
        return list(chain.from_iterable(self._take("publish", ())))

    def take_declarations(self) -> list[Queue]:
        return list(chain.from_iterable(self._take("declare", ())))

    def take_notices(self) -> list[LogEvent]:
        return list(chain.from_iterable(self._take("log", ())))

    def take_output(self, now: float) -> bytes:
        self._now = now
        return b"".join(self._take("data", b""))

    @property
    def acks_due_after(self) -> int:
        return self._acks.due_after

    def drain(self, consumer_tag: str = "ctag") -> None:
        self.cancelled(consumer_tag, self._now)

    def stop(self, now: float | None = None, *, keep: bool = False) -> bool:
        """Stop the session, the subscription, and the pause without sends."""
        self.lifecycle._single_active |= keep
        stopped = super().stop(self._now if now is None else now)
        self.lifecycle.unsubscribed(self._now - PAUSE)
        return stopped


def make(
    *,
    max_attempts: int = 3,
    dead_letters: bool = True,
    declares: bool = False,
    broker_dead_letters: bool = True,
    automatic: bool = False,
    batch: tuple[int, float] | None = None,
    max_body_bytes: int | None = None,
    retry: RetryPolicy | None = None,
    queues: bool = False,
    quarantine: bool = False,
    broker_retries: bool = False,
    kill_switch: KillSwitch | None = None,
    consumer_timeout: float | None = None,
    grouped: bool = False,
    single_active: bool = False,
    subscribes: bool = True,
    acks: AckBatcher | None = None,
) -> SteppedSession:
    policy = retry or RetryPolicy(max_attempts, delays=(1, 10))
    session = SteppedSession(
        queue="orders",
        retry=policy,
        random=Random(1),
        dead_letters=(DECLARED_DEAD_LETTERS if declares else DEAD_LETTERS) if dead_letters else None,
        broker_dead_letters=broker_dead_letters,
        acks=None if automatic else acks or AckBatcher(ack_every=10, ack_interval=5.0, prefetch=100),
        batcher=None if batch is None else Batcher(*batch),
        max_body_bytes=max_body_bytes,
        delay_queues=DelayQueues("orders", policy) if queues else None,
        quarantine=(
            CheckedQuarantine(Quarantine.of(Queue("orders")), ISOLATED, single_active=single_active)
            if quarantine
            else None
        ),
        broker_retries=broker_retries,
        kill_switch=None if kill_switch is None else CheckedKillSwitch(kill_switch),
        consumer_timeout=consumer_timeout,
        grouped=grouped,
        lifecycle=ConsumerLifecycle(single_active=single_active, subscribes=subscribes),
    )
    session.opened(1, CHANNEL)
    return session


def items(count: int, first: int = 1) -> list[Delivery]:
    return [delivery(tag, message_id=f"m{tag}") for tag in range(first, first + count)]


def deliver(session: SteppedSession, deliveries: list[Delivery], now: float = 0.0) -> list[Delivery]:
    session.delivered(deliveries, now)
    return session.take_work()


def fail(
    session: SteppedSession,
    item: Delivery,
    now: float = 0.0,
    *,
    delay: float | None = None,
    verdict: str | None = None,
) -> None:
    session.finished([Failed(item, failure(delay=delay, verdict=verdict))], now)


def attempt_again(session: SteppedSession, now: float) -> list[Delivery]:
    session.tick(now)
    return session.take_work()


def kinds(session: SteppedSession) -> list[LogEventKind]:
    return [notice.kind for notice in session.take_notices()]


def only_republish(session: SteppedSession) -> RepublishRequest:
    [republish] = session.take_republishes()
    return republish
