"""Reconnecting: the next host, the wait before it, and when to give up."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import tenacity
from hypothesis import given
from hypothesis import strategies as st
from tenacity.stop import stop_base
from tenacity.wait import wait_base

from reliable_mq.core.reconnect import (
    ADDRESSES_KEPT,
    CHANNEL_BURST,
    CHANNEL_REFILL,
    CONNECTION_BURST,
    CONNECTION_REFILL,
    MOST_UNANSWERED,
    AddressOrder,
    ConnectionLoss,
    CredentialsCalls,
    ReconnectPolicy,
    is_permanent,
    time_for_address,
)
from reliable_mq.errors import (
    BrokerUnavailable,
    ConfigurationError,
    ConsumerCancelled,
    ReliableMQError,
    TopologyMismatch,
    UsageError,
)

DOWN = BrokerUnavailable("down")
REFUSED = BrokerUnavailable("wrong password", permanent=True)
MISMATCH = TopologyMismatch("differs", kind="queue", name="q")
CHANNEL_LOSS = ConnectionLoss(404, "NOT_FOUND", "channel", by_broker=True)
CONNECTION_LOSS = ConnectionLoss(None, "reset", "connection", by_broker=False)


def policy(hosts: int = 1, **options: object) -> ReconnectPolicy:
    options.setdefault("wait", tenacity.wait_fixed(7))
    made = ReconnectPolicy(hosts=hosts, **options)  # type: ignore[arg-type]
    made.begin(0.0)
    return made


class TestHosts:
    def test_every_host_is_tried_once_before_the_wait(self) -> None:
        subject = policy(hosts=3)
        seen = []
        waits = []
        for _ in range(7):
            seen.append(subject.host)
            waits.append(subject.failed(DOWN, 1.0))
        assert seen == [0, 1, 2, 0, 1, 2, 0]
        assert waits == [0.0, 0.0, 7.0, 0.0, 0.0, 7.0, 0.0]

    def test_after_a_lost_connection_the_next_host_is_tried_at_once(self) -> None:
        subject = policy(hosts=2)
        subject.ready()
        assert subject.lost(CONNECTION_LOSS, 1.0) == 0.0
        assert subject.host == 1

    def test_a_connection_lost_between_set_ups_prolongs_the_outage(self) -> None:
        subject = policy(hosts=2, stop=lambda rounds: rounds == 2)
        subject.ready()
        subject.lost(CHANNEL_LOSS, 1.0)
        assert subject.failed(DOWN, 1.0, connected=True) == 7.0
        assert subject.lost(CONNECTION_LOSS, 2.0, was_ready=False) == 0.0
        assert subject.host == 1
        assert subject.failed(DOWN, 2.0) == 0.0
        assert subject.failed(DOWN, 2.0) is None

    def test_after_a_lost_channel_the_host_stays(self) -> None:
        subject = policy(hosts=2)
        subject.ready()
        assert subject.lost(CHANNEL_LOSS, 1.0) == 0.0
        assert subject.host == 0

    def test_a_set_up_failing_while_connected_waits_and_keeps_host(self) -> None:
        subject = policy(hosts=2)
        assert subject.failed(DOWN, 1.0, connected=True) == 7.0
        assert subject.host == 0


class TestGivingUp:
    @pytest.mark.parametrize("error", [REFUSED, MISMATCH, ConfigurationError("no such file")])
    def test_a_permanent_error_before_anything_was_ready_gives_up(self, error: ReliableMQError) -> None:
        assert policy().failed(error, 1.0) is None

    def test_it_does_not_while_another_host_is_only_unreachable(self) -> None:
        subject = policy(hosts=2)
        assert [subject.failed(error, 1.0) for error in (DOWN, REFUSED)] == [0.0, 7.0]
        assert [subject.failed(error, 1.0) for error in (REFUSED, REFUSED)] == [0.0, None]

    def test_it_does_once_something_was_ready(self) -> None:
        subject = policy()
        subject.ready()
        subject.lost(CONNECTION_LOSS, 1.0)
        assert subject.failed(REFUSED, 2.0) == 7.0

    def test_it_does_not_with_a_configuration_that_is_proven(self) -> None:
        assert policy(proven=True).failed(REFUSED, 1.0) == 7.0

    def test_a_mismatch_while_connected_gives_up_despite_other_hosts(self) -> None:
        subject = policy(hosts=3)
        assert subject.failed(DOWN, 1.0) == 0.0
        assert subject.failed(MISMATCH, 1.0, connected=True) is None

    def test_a_stop_object_counts_passes(self) -> None:
        subject = policy(hosts=2, stop=tenacity.stop_after_attempt(2))
        assert [subject.failed(DOWN, 1.0) for _ in range(4)] == [0.0, 7.0, 0.0, None]

    def test_a_function_of_the_number_of_passes_is_a_stop(self) -> None:
        subject = policy(hosts=2, stop=lambda rounds: rounds >= 2)
        assert [subject.failed(DOWN, 1.0) for _ in range(4)] == [0.0, 7.0, 0.0, None]

    def test_a_stop_object_counts_seconds_since_the_outage_began(self) -> None:
        subject = policy(stop=tenacity.stop_after_delay(10))
        subject.ready()
        subject.lost(CONNECTION_LOSS, 1000.0)
        assert subject.failed(DOWN, 1009.0) == 7.0
        assert subject.failed(DOWN, 1010.0) is None

    def test_a_stop_object_sees_the_wait_to_come(self) -> None:
        subject = policy(stop=tenacity.stop_before_delay(10))
        assert subject.failed(DOWN, 2.0) == 7.0
        assert subject.failed(DOWN, 4.0) is None


class TestWaits:
    def test_a_wait_object_counts_passes_since_the_outage_began(self) -> None:
        subject = policy(wait=tenacity.wait_incrementing(start=1, increment=1))
        assert [subject.failed(DOWN, 1.0) for _ in range(3)] == [1.0, 2.0, 3.0]
        subject.ready()
        assert subject.failed(DOWN, 1.0) == 1.0
        subject.lost(CONNECTION_LOSS, 1.0)
        assert subject.failed(DOWN, 1.0) == 1.0

    def test_a_function_of_the_number_of_passes_is_a_wait(self) -> None:
        subject = policy(hosts=2, wait=lambda rounds: rounds * 1.5)
        assert [subject.failed(DOWN, 1.0) for _ in range(4)] == [0.0, 1.5, 0.0, 3.0]
        subject.lost(CONNECTION_LOSS, 1.0)
        assert [subject.failed(DOWN, 1.0) for _ in range(2)] == [0.0, 1.5]

    def test_a_wait_object_sees_the_error(self) -> None:
        subject = policy(wait=tenacity.wait_exception(lambda error: 3.0 if error is DOWN else 5.0))
        assert subject.failed(DOWN, 1.0) == 3.0

    def test_a_negative_wait_is_none(self) -> None:
        assert policy(wait=tenacity.wait_fixed(-1)).failed(DOWN, 1.0) == 0.0

    @given(st.integers(1, 60))
    def test_the_default_doubles_to_30_seconds_with_half_jitter(self, rounds: int) -> None:
        subject = policy(wait=None)
        wait: float | None = None
        for _ in range(rounds):
            wait = subject.failed(DOWN, 1.0)
        longest = min(30.0, 0.2 * 2 ** (rounds - 1))
        assert wait is not None
        assert longest / 2 <= wait <= longest

    def test_the_default_is_random_without_a_seed(self) -> None:
        waits = {policy(wait=None).failed(DOWN, 1.0) for _ in range(20)}
        assert len(waits) > 1


class TestBudget:
    @pytest.mark.parametrize(
        ("loss", "burst", "refill"),
        [(CHANNEL_LOSS, CHANNEL_BURST, CHANNEL_REFILL), (CONNECTION_LOSS, CONNECTION_BURST, CONNECTION_REFILL)],
    )
    def test_losses_wait_for_the_refill_only_beyond_the_burst(
        self, loss: ConnectionLoss, burst: int, refill: float
    ) -> None:
        subject = policy()
        assert [subject.lost(loss, 5.0) for _ in range(burst)] == [0.0] * burst
        assert subject.lost(loss, 5.0) == pytest.approx(1 / refill)
        later = 5.0 + 2 / refill
        assert subject.lost(loss, later) == 0.0
        assert subject.lost(loss, later + burst / refill) == 0.0

    def test_the_long_run_rate_is_the_refill(self) -> None:
        subject = policy()
        now = 0.0
        for _ in range(CHANNEL_BURST + 100):
            now += subject.lost(CHANNEL_LOSS, now)
        assert now == pytest.approx(100 / CHANNEL_REFILL)

    def test_channels_and_connections_have_budgets_of_their_own(self) -> None:
        subject = policy()
        for _ in range(CONNECTION_BURST + 1):
            subject.lost(CONNECTION_LOSS, 1.0)
        assert subject.lost(CHANNEL_LOSS, 1.0) == 0.0

    def test_a_clock_going_backwards_costs_no_more_than_a_still_one(self) -> None:
        subject = policy()
        assert subject.lost(CHANNEL_LOSS, 100.0) == 0.0
        assert subject.lost(CHANNEL_LOSS, 50.0) == 0.0


@pytest.mark.parametrize(
    ("error", "permanent"),
    [
        (DOWN, False),
        (REFUSED, True),
        (MISMATCH, True),
        (ConfigurationError("x"), True),
        (UsageError("x"), True),
        (ConsumerCancelled("x"), False),
    ],
)
def test_which_errors_time_does_not_heal(error: ReliableMQError, permanent: bool) -> None:
    assert is_permanent(error) is permanent


class Broken(wait_base, stop_base):
    """A wait and stop object that raises."""

    def __call__(self, retry_state: tenacity.RetryCallState) -> Any:
        raise ValueError("a mistake")


@pytest.mark.parametrize(
    "options",
    [
        {"wait": Broken()},
        {"stop": Broken()},
        {"wait": tenacity.wait_exception(lambda _: "soon")},
        {"wait": lambda _: math.nan},
        {"wait": lambda _: math.inf},
    ],
    ids=["wait raises", "stop raises", "no number", "not a number", "forever"],
)
def test_a_mistake_in_the_users_objects_costs_no_attempt(options: dict[str, Any]) -> None:
    """The default wait is used, and each decision reports the error once."""
    subject = policy(**options)
    assert subject.broken is None
    for longest in (0.2, 0.4, 0.8):
        wait = subject.failed(DOWN, 1.0)
        assert wait is not None
        assert longest / 2 <= wait <= longest
        assert isinstance(subject.broken, ValueError)
    subject.ready()
    subject.failed(DOWN, 1.0)


def test_what_was_wrong_at_one_decision_is_not_said_of_the_next() -> None:
    """`broken` only describes the last decision."""
    subject = policy(wait=tenacity.wait_exception(lambda error: float("x") if error is DOWN else 1.0))
    subject.failed(DOWN, 1.0)
    assert subject.broken is not None
    assert subject.failed(BrokerUnavailable("another"), 1.0) == 1.0
    assert subject.broken is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hosts": 0}, "hosts"),
        ({"wait": 5}, "reconnect_wait must be"),
        ({"wait": tenacity.stop_never}, "reconnect_wait must be"),
        ({"wait": tenacity.wait_none}, "reconnect_wait must be"),
        ({"stop": 5}, "reconnect_stop must be"),
        ({"stop": tenacity.wait_fixed(1)}, "reconnect_stop must be"),
    ],
)
def test_invalid_values_are_refused_by_their_public_names(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        ReconnectPolicy(**options)  # type: ignore[arg-type]


def test_credentials_are_asked_for_again_after_connect_timeout() -> None:
    calls = CredentialsCalls(10.0)
    assert calls.begin(0.0)
    assert not calls.begin(9.9)
    assert calls.begin(10.0)
    assert calls.unanswered == 2


def test_credentials_call_intervals_double_and_calls_are_bounded() -> None:
    calls = CredentialsCalls(10.0)
    begun = [now for now in range(100_000) if calls.begin(float(now))]
    assert [later - earlier for earlier, later in pairwise(begun)] == [10 * 2**n for n in range(MOST_UNANSWERED - 1)]
    assert calls.unanswered == len(begun) == MOST_UNANSWERED


def test_an_answered_call_is_repeated_at_once_despite_a_hung_one() -> None:
    calls = CredentialsCalls(10.0)
    assert calls.begin(0.0)
    assert calls.begin(10.0)
    calls.answered()
    assert calls.begin(11.0)
    assert not calls.begin(20.9)
    assert calls.begin(21.0)
    assert calls.unanswered == 3


def test_an_answer_makes_room_for_the_next_question() -> None:
    """Without an unanswered call, the next one is made at once."""
    calls = CredentialsCalls(10.0)
    assert calls.begin(0.0)
    calls.answered()
    assert calls.begin(0.1)
    for now in range(100_000):
        calls.begin(float(now))
    assert calls.unanswered == MOST_UNANSWERED
    calls.answered()
    assert calls.unanswered == MOST_UNANSWERED - 1
    assert calls.begin(200_000.0)
    assert not calls.begin(300_000.0)


def found(*addresses: str) -> list[tuple[Any, ...]]:
    return [(2, 1, 6, "", (address, 5672)) for address in addresses]


def test_addresses_are_tried_in_turn_in_any_order_of_the_answer() -> None:
    """A name server may change the order from answer to answer."""
    order = AddressOrder()
    assert order.sort(found("a", "b", "c")) == found("a", "b", "c")
    order.tried(("a", 5672))
    assert order.sort(found("a", "b", "c")) == found("b", "c", "a")
    order.tried(("b", 5672))
    assert order.sort(found("b", "a", "c")) == found("c", "a", "b")
    order.tried(("a", 5672))
    assert order.sort(found("a", "b")) == found("b", "a")


def test_addresses_of_one_family_may_be_several_nodes() -> None:
    order = AddressOrder()
    both = [(2, 1, 6, "", ("127.0.0.1", 5672)), (10, 1, 6, "", ("::1", 5672, 0, 0))]
    for addresses, several in ((found("a"), False), (found("a", "b"), True), (both, False), (both + both, False)):
        order.sort(addresses)
        assert order.several == several


def test_the_number_of_addresses_kept_is_bounded() -> None:
    order = AddressOrder()
    for number in range(ADDRESSES_KEPT + 1):
        order.tried((str(number), 5672))
    assert order.sort(found("1", "0")) == found("0", "1")


@pytest.mark.parametrize(
    ("used", "addresses", "seconds"),
    [(0.0, 1, 5.0), (0.0, 2, 5.0), (0.0, 4, 2.5), (2.0, 4, 2.0), (0.0, 5, 2.0), (0.0, 50, 2.0), (11.0, 2, 0.5)],
)
def test_the_addresses_of_a_host_share_the_time_to_connect(used: float, addresses: int, seconds: float) -> None:
    assert time_for_address(10.0, used, addresses) == seconds
