"""The schedule of token renewals, whatever the callback and the broker do."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reliable_mq.core.token_renewal import (
    RENEW_AFTER,
    RENEW_AT_LEAST,
    RETRY_AT_LEAST,
    TRANSITIONS,
    RenewalState,
    TokenRenewal,
)
from tests.properties import machine
from tests.transitions import changes, follows

LIFETIMES = st.none() | st.sampled_from([0.5, 5.0, 3600.0])


class CheckedRenewal(follows(TRANSITIONS), TokenRenewal):  # type: ignore[misc]
    """Only allows the state changes of the table."""


def test_the_next_token_is_due_before_the_end_of_the_one_before() -> None:
    renewal = CheckedRenewal()
    assert not renewal.begin(1e9)
    renewal.connected(100.0, 50.0)
    assert renewal.due_at == 100.0 + 50.0 * RENEW_AFTER < 150.0
    assert not renewal.begin(renewal.due_at - 0.1)
    assert renewal.begin(renewal.due_at)
    assert renewal.due_at is None
    renewal.read(131.0, 50.0)
    assert renewal.state is RenewalState.SENT
    renewal.accepted()
    assert renewal.due_at == 131.0 + 50.0 * RENEW_AFTER
    assert renewal.seconds_left(140.0) == 41.0


def test_a_tiny_lifetime_does_not_keep_the_callback_busy() -> None:
    renewal = CheckedRenewal()
    renewal.connected(100.0, 0.001)
    assert renewal.due_at == 100.0 + RENEW_AT_LEAST
    assert renewal.begin(101.0)
    renewal.read(101.0, 1e-9)
    renewal.accepted()
    assert renewal.due_at == 101.0 + RENEW_AT_LEAST


def test_a_password_that_does_not_expire_is_never_renewed() -> None:
    renewal = CheckedRenewal()
    renewal.connected(100.0, None)
    assert renewal.due_at is None
    renewal.connected(100.0, 5.0)
    assert renewal.begin(103.0)
    renewal.read(103.0, None)
    renewal.accepted()
    assert (renewal.state, renewal.due_at) == (RenewalState.NONE, None)


def test_a_failure_is_followed_by_another_try_also_after_the_end() -> None:
    renewal = CheckedRenewal()
    renewal.connected(0.0, 3600.0)
    assert renewal.begin(2160.0)
    renewal.failed(2160.0)
    assert renewal.due_at == 2160.0 + 480.0
    assert renewal.begin(5000.0)
    renewal.failed(5000.0)
    assert renewal.due_at == 5000.0 + RETRY_AT_LEAST


def test_a_token_is_wanted_until_one_is_sent() -> None:
    """The call of the callback took too long, and counts as failed."""
    renewal = CheckedRenewal()
    renewal.connected(0.0, 10.0)
    assert not renewal.wants_token
    assert renewal.begin(6.0)
    assert renewal.wants_token
    renewal.failed(7.0)
    assert renewal.wants_token
    renewal.read(7.5, 10.0)
    assert not renewal.wants_token
    assert renewal.due_at is None
    renewal.accepted()
    assert renewal.due_at == 7.5 + 10.0 * RENEW_AFTER
    assert not renewal.wants_token


def test_a_lost_connection_is_forgotten() -> None:
    renewal = CheckedRenewal()
    renewal.connected(0.0, 10.0)
    assert not renewal.lost()
    assert renewal.due_at is None
    renewal.connected(0.0, 10.0)
    assert renewal.begin(6.0)
    renewal.read(6.0, 10.0)
    assert renewal.lost()
    assert renewal.state is RenewalState.NONE


def reached(state: RenewalState) -> CheckedRenewal:
    renewal = CheckedRenewal()
    if state is not RenewalState.NONE:
        renewal.connected(0.0, 10.0)
    if state in (RenewalState.READING, RenewalState.FAILED, RenewalState.SENT):
        assert renewal.begin(9.0)
    if state is RenewalState.FAILED:
        renewal.failed(9.0)
    if state is RenewalState.SENT:
        renewal.read(9.0, 10.0)
    assert renewal.state is state
    return renewal


def test_every_transition_of_the_table_happens() -> None:
    CheckedRenewal.seen.clear()
    for state in RenewalState:
        reached(state).lost()
    reached(RenewalState.FAILED).read(9.0, 10.0)
    assert reached(RenewalState.FAILED).begin(10.0)
    reached(RenewalState.SENT).accepted()
    unlimited = reached(RenewalState.READING)
    unlimited.read(9.0, None)
    unlimited.accepted()
    assert CheckedRenewal.seen == changes(TRANSITIONS)


class RenewingMachine(RuleBasedStateMachine):
    """A connection, a callback and a broker with random behaviour."""

    def __init__(self) -> None:
        super().__init__()
        self.renewal = CheckedRenewal()
        self.now = 100.0

    @rule(seconds=st.sampled_from([0.1, 1.0, 30.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.renewal.state is RenewalState.NONE)
    @rule(lifetime=LIFETIMES)
    def connected(self, lifetime: float | None) -> None:
        self.renewal.connected(self.now, lifetime)

    @rule()
    def due(self) -> None:
        at = self.renewal.due_at
        assert self.renewal.begin(self.now) is (at is not None and self.now >= at)

    @precondition(lambda self: self.renewal.wants_token)
    @rule(lifetime=LIFETIMES)
    def answered(self, lifetime: float | None) -> None:
        self.renewal.read(self.now, lifetime)

    @precondition(lambda self: self.renewal.state is RenewalState.READING)
    @rule()
    def failed(self) -> None:
        self.renewal.failed(self.now)

    @precondition(lambda self: self.renewal.state is RenewalState.SENT)
    @rule()
    def accepted(self) -> None:
        self.renewal.accepted()

    @rule()
    def lost(self) -> None:
        sent = self.renewal.state is RenewalState.SENT
        assert self.renewal.lost() is sent

    @invariant()
    def a_time_is_planned_if_and_only_if_it_is_planned(self) -> None:
        planned = self.renewal.state in (RenewalState.PLANNED, RenewalState.FAILED)
        assert (self.renewal.due_at is not None) is planned


TestRenewing = RenewingMachine.TestCase
TestRenewing.settings = machine(50, steps=30)
