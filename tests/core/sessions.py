"""A consuming session for tests, and what a shell does with it, in few words."""

from __future__ import annotations

from random import Random

from reliable_mq import KillSwitch, PublishReturned, Queue, RetryPolicy
from reliable_mq.core.consumer.acks import AckBatcher
from reliable_mq.core.consumer.circuit_breaker import CircuitBreaker
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.dispatch import Batcher
from reliable_mq.core.consumer.handler import Failed
from reliable_mq.core.consumer.quarantine import Quarantine
from reliable_mq.core.consumer.session import ConsumingSession
from reliable_mq.core.consumer.settlement import LogEventKind
from reliable_mq.core.retry.dead_letters import DeadLetters, RepublishRequest, Target
from reliable_mq.core.retry.delay_queues import DelayQueues
from tests.core.deliveries import delivery, failure

CHANNEL = 3
ISOLATED = "c#quarantine"
RETURNED = PublishReturned("no queue", reply_code=312, reply_text="NO_ROUTE", exchange="", routing_key="q.dead")


def make(
    *,
    max_attempts: int = 3,
    dead_letters: bool = True,
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
) -> ConsumingSession:
    policy = retry or RetryPolicy(max_attempts, delays=(1, 10))
    session = ConsumingSession(
        queue="orders",
        retry=policy,
        random=Random(1),
        dead_letters=DeadLetters(Target("", "q.dead"), consumer="c", version="0") if dead_letters else None,
        broker_dead_letters=broker_dead_letters,
        acks=None if automatic else AckBatcher(ack_every=10, ack_interval=5.0, prefetch=100),
        batcher=None if batch is None else Batcher(*batch),
        max_body_bytes=max_body_bytes,
        ladder=DelayQueues("orders", policy) if queues else None,
        quarantine=Quarantine(Quarantine.of(Queue("orders")), ISOLATED) if quarantine else None,
        broker_retries=broker_retries,
        breaker=None if kill_switch is None else CircuitBreaker(kill_switch),
        consumer_timeout=consumer_timeout,
        grouped=grouped,
    )
    session.opened(1, CHANNEL)
    return session


def items(count: int, first: int = 1) -> list[Delivery]:
    return [delivery(tag, message_id=f"m{tag}") for tag in range(first, first + count)]


def deliver(session: ConsumingSession, deliveries: list[Delivery], now: float = 0.0) -> list[Delivery]:
    session.delivered(deliveries, now)
    return session.take_work()


def fail(
    session: ConsumingSession,
    item: Delivery,
    now: float = 0.0,
    *,
    delay: float | None = None,
    verdict: str | None = None,
) -> None:
    session.finished([Failed(item, failure(delay=delay, verdict=verdict))], now)


def attempt_again(session: ConsumingSession, now: float) -> list[Delivery]:
    session.tick(now)
    return session.take_work()


def kinds(session: ConsumingSession) -> list[LogEventKind]:
    return [notice.kind for notice in session.take_notices()]


def only_republish(session: ConsumingSession) -> RepublishRequest:
    [republish] = session.take_republishes()
    return republish
