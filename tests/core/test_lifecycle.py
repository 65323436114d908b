"""The life of a consumer as a state machine.

Broker, handlers and user do whatever they may, in any order.
"""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reliable_mq.core.consumer.lifecycle import (
    CANCEL_WAIT,
    LINGER,
    PAUSE,
    TRANSITIONS,
    ChannelStep,
    ConsumerLifecycle,
    ConsumerState,
    Resubscribe,
    SubscriptionChange,
)
from tests.properties import machine
from tests.transitions import changes, follows

STOP_TIMEOUT = 10.0
PREFETCH = 20
MANY_ACKS = 21 * 17
RARELY = st.sampled_from([False] * 4 + [True])


class CheckedLifecycle(follows(TRANSITIONS), ConsumerLifecycle):  # type: ignore[misc]
    """Only allows the state changes of the table."""


def make(
    *, subscribes: bool = True, single_active: bool = False, stop_timeout: float = STOP_TIMEOUT
) -> CheckedLifecycle:
    return CheckedLifecycle(
        consumer_tag="c",
        prefetch=PREFETCH,
        stop_timeout=stop_timeout,
        single_active=single_active,
        subscribes=subscribes,
    )


def step(
    life: ConsumerLifecycle, now: float, *, drained: bool = True, unacked: bool = False
) -> list[SubscriptionChange]:
    """Poll once, as in a session that sends nothing."""
    life.tick(now, drained=drained)
    return list(life.advance(now, drained=drained, unacked=unacked))


def test_a_consumer_with_few_acks_ends_as_soon_as_nothing_runs() -> None:
    life = make()
    life.opened()
    assert life.stop(1.0)
    assert step(life, 1.0, drained=False) == [ChannelStep.UNSUBSCRIBE]
    assert (life.state, life.silent, life.connected) == (ConsumerState.CANCELLING, True, False)
    life.unsubscribed(1.01)
    assert not step(life, 1.02, drained=False)
    assert (life.state, life.silent, life.deadline) == (ConsumerState.SETTLING, True, 1.01 + PAUSE)
    step(life, 1.01 + PAUSE, drained=False)
    assert (life.state, life.silent, life.deadline) == (ConsumerState.STOPPING, False, 1.0 + STOP_TIMEOUT)
    life.sent(21, 1.2)
    step(life, 1.2)
    assert (life.state, life.deadline, life.gave_up) == (ConsumerState.ENDED, inf, False)
    assert not life.stop(2.0)


def test_a_consumer_that_has_sent_many_acks_waits_a_moment() -> None:
    life = make(subscribes=False)
    life.opened()
    life.sent(MANY_ACKS, 1.0)
    life.stop(1.0)
    step(life, 1.5)
    assert (life.state, life.deadline) == (ConsumerState.LINGERING, 1.5 + LINGER)
    step(life, 1.5 + LINGER)
    assert life.state is ConsumerState.ENDED


def test_acks_of_more_than_a_second_ago_are_not_many() -> None:
    life = make(subscribes=False)
    life.sent(MANY_ACKS, 1.0)
    life.sent(21, 2.5)
    life.stop(2.5)
    step(life, 2.5)
    assert life.state is ConsumerState.ENDED


@pytest.mark.parametrize("single_active", [False, True])
def test_a_stop_waits_for_a_handler_up_to_the_stop_timeout(single_active: bool) -> None:
    life = make(single_active=single_active)
    life.opened()
    life.stop(1.0)
    assert life.keeps("c") == single_active
    step(life, 0.9 + STOP_TIMEOUT, drained=False)
    assert life.state is (ConsumerState.STOPPING if single_active else ConsumerState.CANCELLING)
    step(life, 1.0 + STOP_TIMEOUT, drained=False)
    assert (life.state, life.gave_up) == (ConsumerState.ENDED, True)


@pytest.mark.parametrize("drained", [True, False])
def test_a_stop_without_patience_ends_the_subscription_first(drained: bool) -> None:
    """Otherwise the broker would deliver here again the deliveries that it requeues.

    Only a handler that still runs is given up.
    """
    life = make(stop_timeout=0.0)
    life.opened()
    life.stop(1.0)
    assert step(life, 1.0, drained=drained) == [ChannelStep.UNSUBSCRIBE]
    step(life, 0.9 + CANCEL_WAIT, drained=drained)
    assert (life.state, life.deadline) == (ConsumerState.CANCELLING, 1.0 + CANCEL_WAIT)
    life.unsubscribed(1.95)
    step(life, 1.95, drained=drained)
    assert (life.state, life.gave_up) == (ConsumerState.ENDED, not drained)


def test_a_cancel_that_is_not_answered_delays_no_stop_for_long() -> None:
    life = make(stop_timeout=0.0)
    life.opened()
    life.stop(1.0)
    step(life, 1.0 + CANCEL_WAIT)
    assert (life.state, life.gave_up) == (ConsumerState.ENDED, True)


def test_many_acks_are_waited_for_though_the_patience_is_over() -> None:
    life = make(stop_timeout=0.0, subscribes=False)
    life.opened()
    life.sent(MANY_ACKS, 1.0)
    life.stop(1.0)
    step(life, 1.0)
    assert (life.state, life.deadline) == (ConsumerState.LINGERING, 1.0 + LINGER)


def test_a_loss_ends_the_wait_for_cancel_ok() -> None:
    life = make()
    life.opened()
    life.stop(1.0)
    life.lost()
    step(life, 1.0, drained=False)
    assert life.state is ConsumerState.STOPPING


def test_after_a_cancel_only_its_own_subscription_gets_requeues() -> None:
    life = make()
    life.opened()
    life.cancelled("other", 1.0)
    assert (life.keeps("other"), life.keeps("c")) == (False, True)
    life.stop(2.0)
    assert (life.keeps("other"), life.keeps("c")) == (False, True)
    life.lost()
    assert not life.keeps("c")


@pytest.mark.parametrize(("drained", "at"), [(True, 2.0), (False, 1.0 + STOP_TIMEOUT)])
def test_a_cancelled_channel_reopens_when_drained_or_in_time(drained: bool, at: float) -> None:
    life = make()
    life.opened()
    assert life.cancelled("c", 1.0)
    assert not life.cancelled("c", 1.0)
    assert not step(life, 1.5, drained=False)
    assert step(life, at, drained=drained) == [ChannelStep.REOPEN]
    assert not step(life, at + 1.0)
    life.lost()
    assert not step(life, at + 1.0)
    life.opened()
    assert (life.state, life.connected, life.deadline) == (ConsumerState.SUBSCRIBED, True, inf)


def test_another_prefetch_is_another_subscription() -> None:
    life = make()
    assert life.change_prefetch(5)
    assert not step(life, 0.0)
    life.opened()
    assert step(life, 0.0) == [Resubscribe("c", "c#2", 5)]
    assert life.change_prefetch(7)
    assert step(life, 0.0) == [Resubscribe("c#2", "c#3", 7)]
    assert (life.prefetch, life.steady) == (7, True)
    assert life.change_prefetch(7)  # a further subscription would add as many unacked deliveries
    assert not step(life, 0.0)


def test_single_active_waits_for_all_acks_to_change_prefetch() -> None:
    life = make(single_active=True)
    life.subscribing(PREFETCH)
    life.opened()
    assert not life.change_prefetch(5)
    assert not step(life, 1.0, unacked=True)
    assert life.deadline == inf
    assert not step(life, 2.0)
    assert life.deadline == 2.0 + LINGER
    assert not step(life, 2.05)
    assert not step(life, 2.1, unacked=True)
    assert not step(life, 3.0)
    assert step(life, 3.0 + LINGER) == [ChannelStep.REOPEN]
    life.lost()
    life.subscribing(5)
    life.opened()
    assert life.steady


def test_a_prefetch_that_was_changed_back_reopens_nothing() -> None:
    life = make(single_active=True)
    life.opened()
    life.change_prefetch(5)
    step(life, 1.0)
    life.change_prefetch(PREFETCH)
    assert not step(life, 1.0)
    assert (life.deadline, life.steady) == (inf, True)


def test_a_stopping_consumer_does_not_subscribe_to_quarantine() -> None:
    life = make()
    life.opened()
    life.subscribe_to_quarantine()
    assert step(life, 1.0) == [ChannelStep.SUBSCRIBE_TO_QUARANTINE]
    life.subscribe_to_quarantine()
    life.stop(1.0)
    assert step(life, 1.0) == [ChannelStep.UNSUBSCRIBE]


class Living(RuleBasedStateMachine):
    """One consumer, from its start to its end.

    Invariants:

    - The state changes according to the table.
    - The broker has at most one subscription, and none of a consumer that was told of the end of its own.
    - The single active consumer does not cancel while a delivery is unacked.
    - Nothing is sent between a stop and the end of the subscription.
    - The next step is in the future, and an ended consumer needs none.
    - A consumer that is stopped ends in time, whatever happens.
    """

    @initialize(single_active=st.booleans(), subscribes=st.booleans())
    def begin(self, single_active: bool, subscribes: bool) -> None:
        self.life = make(subscribes=subscribes, single_active=single_active)
        self.single_active, self.subscribes = single_active, subscribes
        self.now = 0.0
        self.open = False
        self.reopening = False
        self.subscription: str | None = None  # the subscription at the broker
        self.cancelling = False
        self.running = 0
        self.unacked = 0
        self.wanted = PREFETCH
        self.told: int | None = None
        self.stopped_at: float | None = None

    def turn(self) -> None:
        self.life.tick(self.now, drained=not self.running)
        if not self.life.silent and self.open:
            finished = self.unacked - self.running
            if finished:
                self.life.sent(21 * finished, self.now)
                self.unacked -= finished
        for change in self.life.advance(self.now, drained=not self.running, unacked=bool(self.unacked)):
            assert self.open
            if change is ChannelStep.REOPEN:
                assert not self.reopening
                assert self.life.state is ConsumerState.RESUBSCRIBING or not self.unacked
                self.reopening = True
            elif change is ChannelStep.UNSUBSCRIBE:
                assert not (self.single_active and self.unacked)
                self.cancelling = True
            else:
                assert isinstance(change, Resubscribe)
                assert not self.single_active
                assert change.before == self.subscription
                self.subscription, self.told = change.consumer_tag, change.prefetch

    @precondition(lambda self: not self.open)
    @rule()
    def open_channel(self) -> None:
        self.open, self.reopening = True, False
        if not self.life.stopping and self.subscribes:
            self.life.subscribing(self.wanted)
            self.told = self.wanted
            self.subscription = self.life.consumer_tag
        self.life.opened()
        self.turn()
        assert self.life.connected is not self.life.stopping

    @precondition(lambda self: self.open)
    @rule(really=RARELY)
    def lose_channel(self, really: bool) -> None:
        if really or self.reopening:
            self.open, self.unacked, self.subscription, self.cancelling = False, 0, None, False
            self.life.lost()
            self.turn()

    @precondition(lambda self: self.subscription and not self.cancelling)
    @rule(really=RARELY)
    def broker_cancels(self, really: bool) -> None:
        if really:
            self.subscription = None
            assert self.life.cancelled(self.life.consumer_tag, self.now) is not (self.life.stopping)
            self.turn()

    @precondition(lambda self: self.cancelling)
    @rule()
    def cancel_ok(self) -> None:
        self.cancelling, self.subscription = False, None
        self.life.unsubscribed(self.now)
        self.turn()

    @precondition(lambda self: self.open and self.life.consuming)
    @rule(count=st.integers(1, 30))
    def deliver(self, count: int) -> None:
        self.unacked += count
        self.running += count
        self.turn()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.running -= data.draw(st.integers(1, self.running))
        self.turn()

    @rule(prefetch=st.integers(1, 3))
    def change_prefetch(self, prefetch: int) -> None:
        self.wanted = prefetch
        self.life.change_prefetch(prefetch)
        self.turn()

    @rule(really=RARELY)
    def stop(self, really: bool) -> None:
        if really and self.life.stop(self.now):
            self.stopped_at = self.now
            assert self.life.keeps(self.life.consumer_tag) == (self.single_active and self.subscription is not None)
            self.turn()

    @rule(seconds=st.sampled_from([0.05, 0.2, 1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.turn()

    @invariant()
    def the_next_step_is_ahead(self) -> None:
        deadline = self.life.deadline
        assert deadline > self.now
        if self.life.state is ConsumerState.ENDED:
            assert deadline == inf

    @invariant()
    def a_stop_ends_in_time(self) -> None:
        if self.stopped_at is not None and self.now >= self.stopped_at + STOP_TIMEOUT:
            assert self.life.state is ConsumerState.ENDED

    @invariant()
    def a_steady_consumer_has_what_it_wants(self) -> None:
        if self.life.steady and self.life.subscribed:
            assert (self.subscription, self.told) == (self.life.consumer_tag, self.wanted)

    def teardown(self) -> None:
        life = getattr(self, "life", None)
        if life is None:
            return
        life.stop(self.now)
        self.now += STOP_TIMEOUT + 1
        self.turn()
        assert life.state is ConsumerState.ENDED


TestLiving = Living.TestCase
TestLiving.settings = machine(75, steps=50)


def reached(state: ConsumerState) -> CheckedLifecycle:
    life = make(subscribes=state is not ConsumerState.LINGERING)
    life.opened()
    if state is ConsumerState.LINGERING:
        life.sent(MANY_ACKS, 1.0)
    if state is ConsumerState.RESUBSCRIBING:
        life.cancelled("c", 1.0)
    elif state is not ConsumerState.SUBSCRIBED:
        life.stop(1.0)
    if state in (ConsumerState.SETTLING, ConsumerState.STOPPING):
        life.unsubscribed(1.0)
    if state is ConsumerState.STOPPING:
        step(life, 1.0 + PAUSE, drained=False)
    if state in (ConsumerState.LINGERING, ConsumerState.ENDED):
        step(life, 1.0)
    if state is ConsumerState.ENDED:
        life.end()
    assert life.state is state
    return life


def test_every_transition_of_the_table_happens() -> None:
    CheckedLifecycle.seen.clear()
    for state in ConsumerState:
        reached(state).end()
        reached(state).stop(2.0)
    back = reached(ConsumerState.RESUBSCRIBING)
    back.lost()
    back.opened()
    make(subscribes=False).stop(1.0)
    assert CheckedLifecycle.seen == changes(TRANSITIONS)
