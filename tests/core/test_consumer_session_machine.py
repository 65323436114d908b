"""The consumer session as a state machine.

Broker, handlers and dead-letter queue do whatever they may, in any order.
"""

from __future__ import annotations

import struct
from collections import deque
from itertools import groupby
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reliable_mq import KillSwitch, PublishNacked, PublishReturned, Queue, ReliableMQError, RetryPolicy
from reliable_mq.core.consumer.acks import AckBatcher
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.consumer.dispatch import Batcher
from reliable_mq.core.consumer.handler import Failed, Result, Skipped, SkipReason
from reliable_mq.core.consumer.lifecycle import ChannelStep, ConsumerLifecycle, ConsumerState
from reliable_mq.core.consumer.quarantine import Quarantine
from reliable_mq.core.retry.dead_letters import RepublishReason, RepublishRequest
from reliable_mq.core.retry.delay_queues import DelayQueues
from tests.core.deliveries import CheckedDelivery, delivery, failure
from tests.core.sessions import (
    DECLARED_DEAD_LETTERS,
    ISOLATED,
    CheckedKillSwitch,
    CheckedQuarantine,
    ReadableSession,
)
from tests.properties import machine

FRAME = struct.Struct(">BHIHHQBB")
CHANNEL = 5
MAX_ATTEMPTS = 3
PREFETCH = 8
RARELY = st.sampled_from([False] * 5 + [True])
ACK_INTERVAL = 5.0
RETURNED = PublishReturned("no queue", reply_code=312, reply_text="NO_ROUTE", exchange="", routing_key="q.dead")


class Broker:
    """A queue with one channel.

    A frame that a real broker would answer with a channel error fails an assertion.
    """

    def __init__(self) -> None:
        self.queue: deque[tuple[str, bool]] = deque()  # message id, redelivered
        self.waiting: dict[RepublishRequest, float] = {}  # in delay queues, with the time when they expire
        self.waited: dict[str, RepublishRequest] = {}  # retries in the queue or unacked, by the id they have there
        self.unacked: dict[int, str] = {}
        self.acked: list[str] = []
        self.oversized: set[str] = set()  # ids of messages whose bodies the reader does not accept
        self.dead: set[str] = set()
        self.tag = 0

    def deliver(self, count: int) -> list[Delivery]:
        sent: list[Delivery] = []
        while self.queue and len(self.unacked) < PREFETCH and len(sent) < count:
            message_id, redelivered = self.queue.popleft()
            self.tag += 1
            self.unacked[self.tag] = message_id
            retry = self.waited.get(message_id)
            if retry is None:
                sent.append(delivery(self.tag, message_id=message_id, redelivered=redelivered))
            else:
                body = retry.delivery.body
                sent.append(CheckedDelivery("ctag", self.tag, redelivered, "", "orders", retry.properties, body))
        return sent

    def expire(self, retry: RepublishRequest) -> None:
        """Return an expired retry to its queue, as a new message for the same original."""
        del self.waiting[retry]
        key = f"{identity(retry)}+{len(self.waited)}"
        self.waited[key] = retry
        self.queue.append((key, False))

    def close(self) -> None:
        self.queue.extendleft((message_id, True) for message_id in reversed(self.unacked.values()))
        self.unacked.clear()
        self.tag = 0

    def receive(self, output: bytes) -> list[tuple[str, set[int]]]:
        """Carry out frames, and return for each its kind and the tags it settled."""
        settled = []
        for kind, channel, size, class_id, method, tag, bits, end in FRAME.iter_unpack(output):
            assert (kind, channel, size, class_id, end) == (1, CHANNEL, 13, 60, 0xCE)
            assert tag in self.unacked, f"unknown delivery tag {tag}"
            multiple = method != 90 and bits & 1
            tags = {one for one in self.unacked if one <= tag} if multiple else {tag}
            for one in sorted(tags):
                message_id = self.unacked.pop(one)
                if method == 80:
                    self.acked.append(message_id)
                elif method == 90:
                    assert message_id in self.oversized, "with a dead-letter queue nothing else is rejected"
                    assert not bits
                    self.dead.add(message_id)
                else:
                    assert bits & 2
                    self.queue.append((message_id, True))
            settled.append(({80: "ack", 90: "reject", 120: "nack"}[method], tags))
        return settled


def base(key: str) -> str:
    return key.partition("+")[0]


def identity(item: Delivery | RepublishRequest) -> str:
    return (item if isinstance(item, Delivery) else item.delivery).message_id or ""


class Consuming(RuleBasedStateMachine):
    """A queue of messages with ids, and one session that consumes it.

    Invariants:

    - No message is lost: each one is in the queue, unacked, handled or dead-lettered.
    - Deliveries without their body are rejected, and no others.
    - A delivery is acked only after its handler finished, its dead letter was confirmed, or the store had it as done.
    - A handler starts only with an outstanding delivery of the open channel. A delivery is with one handler at a time.
    - A handler sees attempts 1 to ``max_attempts``, with earlier failures counted, also at a redelivery, unless an
      earlier handler has outlived its channel.
    - No attempt starts before its delay is over.
    - After a stop nothing is dispatched. When the session is drained, the channel has no outstanding deliveries.
    - A finished delivery is acked by the end of its interval.
    - If broker and handlers work, each message is handled or dead-lettered in the end.
    """

    batch = False
    queues = False
    switch: KillSwitch | None = None

    def __init__(self) -> None:
        super().__init__()
        policy = RetryPolicy(MAX_ATTEMPTS, delays=(1, 10))
        self.session = ReadableSession(
            queue="orders",
            retry=policy,
            random=Random(1),
            dead_letters=DECLARED_DEAD_LETTERS,
            broker_dead_letters=True,
            acks=AckBatcher(ack_every=3, ack_interval=ACK_INTERVAL, prefetch=PREFETCH),
            lifecycle=ConsumerLifecycle(),
            batcher=Batcher(3, 2.0) if self.batch else None,
            delay_queues=DelayQueues("orders", policy) if self.queues else None,
            kill_switch=None if self.switch is None else CheckedKillSwitch(self.switch),
            quarantine=None if self.switch is None else CheckedQuarantine(Quarantine.of(Queue("orders")), ISOLATED),
            consumer_timeout=None if self.switch is None else 40.0,
        )
        self.broker = Broker()
        self.now = 0.0
        self.generation = 0
        self.open = False
        self.reopen = False  # whether the session has asked for a new channel
        self.published = 0
        self.work: deque[list[Delivery]] = deque()  # dispatched, not started
        self.begun: list[Delivery] = []
        self.publishing: list[RepublishRequest] = []
        self.may_ack: dict[tuple[int, int], float] = {}  # the time since when (generation, tag) may be acked
        self.failed: dict[str, int] = {}
        self.not_before: dict[str, float] = {}
        self.outlived: set[str] = set()  # failed on a lost channel, after they were delivered on the next one
        self.replaced: set[str] = set()  # ids of originals whose retry was confirmed
        self.handled: set[str] = set()
        self.dead = self.broker.dead
        self.open_channel()

    # The shell

    def turn(self) -> None:
        """Do what the loop of the shell does after every event."""
        actions = self.session.poll(self.now)
        while actions.recall:
            recalled = [item for group in self.work for item in group]
            self.work.clear()
            self.session.postponed(recalled)
            actions = self.session.poll(self.now)
        self.work.extend(item if isinstance(item, list) else [item] for item in actions.dispatch)
        for queue in actions.declare:
            self.session.declared(queue, None, self.now)
        self.publishing += actions.publish
        self.reopen |= ChannelStep.REOPEN in actions.subscribe
        assert actions.wake_at is None or actions.wake_at > self.now or actions.declare
        assert self.open or not actions.data
        for kind, tags in self.broker.receive(actions.data):
            if kind == "ack":
                for tag in tags:
                    del self.may_ack[self.generation, tag]

    def recall(self) -> None:
        recalled = [item for group in self.work for item in group]
        self.work.clear()
        self.session.recalled(recalled)

    def finish(self, *results: Result) -> None:
        for result in results:
            item = result if isinstance(result, Delivery) else result.delivery
            self.begun.remove(item)
        self.session.finished(results, self.now)
        self.turn()

    # The broker

    def publish(self, count: int) -> None:
        for _ in range(count):
            self.published += 1
            self.broker.queue.append((f"m{self.published}", False))

    @precondition(lambda self: not self.open)
    @rule()
    def open_channel(self) -> None:
        self.open, self.reopen = True, False
        self.generation += 1
        self.session.opened(self.generation, CHANNEL)
        self.turn()

    @precondition(lambda self: self.open)
    @rule(really=RARELY)
    def lose_channel(self, really: bool) -> None:
        if really:
            self.close_channel()
            if self.generation % 3:
                self.open_channel()

    def close_channel(self) -> None:
        self.open = False
        copies = {identity(retry) for retry in (*self.broker.waiting, *self.broker.waited.values())}
        self.outlived |= copies & set(map(base, self.broker.unacked.values()))
        self.broker.close()
        self.session.lost(self.generation)
        self.recall()
        self.may_ack.clear()
        self.turn()

    @precondition(lambda self: self.open)
    @rule(count=st.integers(1, PREFETCH))
    def deliver(self, count: int) -> None:
        if not self.broker.queue:
            self.publish(count)
        self.tell(self.broker.deliver(count))

    @precondition(lambda self: self.open)
    @rule()
    def deliver_oversized(self) -> None:
        self.publish(1)
        self.broker.oversized.add(f"m{self.published}")
        self.deliver(PREFETCH)

    def tell(self, sent: list[Delivery]) -> None:
        for without_body, some in groupby(sent, key=lambda item: item.message_id in self.broker.oversized):
            if without_body:
                for item in some:
                    self.session.oversized(item, 2**30, self.now)
            else:
                self.session.delivered(list(some), self.now)
        if sent:
            self.turn()

    # The handlers

    @precondition(lambda self: self.work or self.open)
    @rule()
    def begin(self) -> None:
        if not self.work:
            self.deliver(3)
        for item in self.work.popleft() if self.work else ():
            message_id = item.message_id or ""
            assert item.source.generation == self.generation
            assert self.open
            assert item.delivery_tag in self.broker.unacked
            assert item not in self.begun
            assert self.session.lifecycle.state is ConsumerState.SUBSCRIBED
            assert item.attempt == 1 or item.redelivered
            if message_id not in self.outlived:
                assert item.attempt == self.failed.get(message_id, 0) + 1 <= MAX_ATTEMPTS
                assert self.now >= self.not_before.get(message_id, 0.0)
            self.begun.append(item)

    def some_begun(self, data: st.DataObject, least: int, most: int) -> list[Delivery]:
        while len(self.begun) < least and self.open:
            before = len(self.begun)
            self.begin()
            if len(self.begun) == before:
                break
        if len(self.begun) < least:
            return []
        return data.draw(st.lists(st.sampled_from(self.begun), min_size=least, max_size=most, unique_by=id))

    @rule(data=st.data())
    def succeed(self, data: st.DataObject) -> None:
        some = self.some_begun(data, 1, 4)
        for item in some:
            self.settled_well(item, self.handled)
        self.finish(*some)

    @rule(data=st.data(), delay=st.sampled_from([None, 0.0, 7.0]), final=RARELY)
    def fail(self, data: st.DataObject, delay: float | None, final: bool) -> None:
        for item in self.some_begun(data, 1, 1):
            self.fail_one(item, delay, final)

    def fail_one(self, item: Delivery, delay: float | None, final: bool) -> None:
        message_id = item.message_id or ""
        self.failed[message_id] = self.failed.get(message_id, 0) + 1
        if not self.current(item) and self.open and message_id in map(base, self.broker.unacked.values()):
            self.outlived.add(message_id)
        if self.current(item) and not final:
            policy = 1.0 if item.attempt == 1 else 10.0
            self.not_before[message_id] = self.now + (policy if delay is None else delay)
        self.finish(Failed(item, failure(delay=delay, verdict="no use" if final else None)))

    @rule(data=st.data(), what=st.sampled_from([SkipReason.DUPLICATE, SkipReason.IN_PROGRESS, SkipReason.STORE_FAILED]))
    def store_says(self, data: st.DataObject, what: SkipReason) -> None:
        for item in self.some_begun(data, 1, 1):
            if what is SkipReason.DUPLICATE:
                self.settled_well(item, self.handled)
            self.finish(Skipped(item, what))

    @rule(data=st.data())
    def fail_together(self, data: st.DataObject) -> None:
        some = self.some_begun(data, 2, 4)
        self.finish(*(Failed(item, failure(), alone=False) for item in some))

    # The dead-letter queue

    @precondition(lambda self: self.publishing)
    @rule(data=st.data(), error=st.sampled_from([None, RETURNED, PublishNacked("full")]))
    def settle_dead_letter(self, data: st.DataObject, error: ReliableMQError | None) -> None:
        republish = data.draw(st.sampled_from(self.publishing))
        self.publishing.remove(republish)
        if error is None:
            self.confirmed(republish)
        self.session.published(republish, error, self.now)
        self.turn()

    def confirmed(self, republish: RepublishRequest) -> None:
        if republish.purpose is RepublishReason.DEAD_LETTER:
            self.settled_well(republish.delivery, self.dead)
            return
        assert republish.queue is not None
        assert isinstance(republish.queue.message_ttl, float)
        self.broker.waiting[republish] = self.now + republish.queue.message_ttl
        self.replaced.add(identity(republish))
        if self.current(republish.delivery):
            self.may_ack[self.generation, republish.delivery.delivery_tag] = self.now
        else:
            self.outlived.add(identity(republish))  # the message is now in two places, and its attempts may be too

    @precondition(lambda self: self.expired())
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        self.broker.expire(data.draw(st.sampled_from(self.expired())))

    def expired(self) -> list[RepublishRequest]:
        return [retry for retry, at in self.broker.waiting.items() if at <= self.now]

    # Time, and the end of the run

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.turn()
        assert all(self.now - since < ACK_INTERVAL for since in self.may_ack.values())
        deadline = self.session.deadline
        assert deadline > self.now
        if self.reopen and self.open:
            self.close_channel()
            self.open_channel()

    @precondition(lambda self: self.open)
    @rule(really=RARELY)
    def drain(self, really: bool) -> None:
        if not really:
            return
        self.session.cancelled("ctag", self.now)
        self.recall()
        self.turn()
        assert not self.work
        self.turn()
        assert not self.work

    @invariant()
    def nothing_is_lost(self) -> None:
        known = {message_id for message_id, _ in self.broker.queue} | set(self.broker.unacked.values())
        known = set(map(base, known)) | set(map(identity, self.broker.waiting))
        assert known | self.handled | self.dead == {f"m{number}" for number in range(1, self.published + 1)}
        assert set(map(base, self.broker.acked)) <= self.handled | self.dead | self.replaced

    @invariant()
    def the_counts_agree(self) -> None:
        session = self.session
        assert session.outstanding == len(self.broker.unacked)
        assert session.running == len(self.begun) + sum(map(len, self.work))
        assert session.statistics.acked == session.statistics.acks_sent + session.statistics.acks_saved
        assert session.statistics.acked == len(self.broker.acked)
        if session.lifecycle.state is not ConsumerState.SUBSCRIBED:
            assert not self.work
            assert session.held == 0
            if session.drained and self.open:
                assert session.outstanding == 0

    def teardown(self) -> None:
        """Let everything work normally; nothing is left after that, or after a stop."""
        if self.session.lifecycle.state is ConsumerState.RESUBSCRIBING and self.open:
            self.close_channel()
        if not self.open:
            self.open_channel()
        for _ in range(1000):
            if not (self.broker.queue or self.broker.unacked or self.broker.waiting):
                break
            self.now += 61.0
            for retry in list(self.broker.waiting):
                self.broker.expire(retry)
            self.turn()
            self.tell(self.broker.deliver(PREFETCH))
            while self.work:
                self.begin()
            for item in list(self.begun):
                self.settled_well(item, self.handled)
                self.finish(item)
            for republish in list(self.publishing):
                self.publishing.remove(republish)
                self.confirmed(republish)
                self.session.published(republish, None, self.now)
                self.turn()
        assert not self.broker.queue
        assert not self.broker.unacked
        assert self.handled | self.dead == {f"m{number}" for number in range(1, self.published + 1)}
        self.session.stop(self.now)
        self.recall()
        assert self.session.drained

    def settled_well(self, item: Delivery, where: set[str]) -> None:
        message_id = item.message_id or ""
        where.add(message_id)
        if self.current(item):
            self.may_ack[self.generation, item.delivery_tag] = self.now
            self.failed.pop(message_id, None)
            self.not_before.pop(message_id, None)

    def current(self, item: Delivery) -> bool:
        return self.open and item.source.generation == self.generation


class ConsumingBatches(Consuming):
    """`Consuming` with a batch handler."""

    batch = True


class ConsumingWithAKillSwitch(Consuming):
    """`Consuming` with a kill switch, a consumer timeout, and a quarantine.

    The session warns before the timeout. Nothing enters quarantine.
    """

    switch = KillSwitch(share=0.5, window=10, minimum=2, pause=5, longest_pause=20)


class ConsumingWithDelayQueues(Consuming):
    """`Consuming` with delay queues: a failed delivery waits as a separate message."""

    queues = True


TestConsuming = Consuming.TestCase
TestConsuming.settings = machine(75, steps=50)
TestConsumingWithDelayQueues = ConsumingWithDelayQueues.TestCase
TestConsumingWithDelayQueues.settings = machine(40, steps=50)
TestConsumingWithAKillSwitch = ConsumingWithAKillSwitch.TestCase
TestConsumingWithAKillSwitch.settings = machine(40, steps=50)
TestConsumingBatches = ConsumingBatches.TestCase
TestConsumingBatches.settings = machine(40, steps=50)
