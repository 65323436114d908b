"""Settlements that the store did not answer.

They are sent again, and do not delay other keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq import IdempotencyStoreError
from reliable_mq.core.consumer.handler import (
    ClaimKeys,
    Complete,
    Failed,
    Release,
    RunHandler,
    Skipped,
    SkipReason,
    Step,
)
from reliable_mq.core.idempotency import Claim, ClaimStatus, SettlementRetries
from tests.core.deliveries import delivery
from tests.core.test_handler import HOUR, Runner, only, refuse

if TYPE_CHECKING:
    from collections.abc import Callable


def test_an_unanswered_release_is_repeated_before_the_attempt() -> None:
    runner = Runner(refuse)
    runner.broken = {Release}
    assert isinstance(only(runner(delivery())), Failed)
    runner.broken = set()
    retried = delivery()
    assert isinstance(only(runner(retried)), Failed)
    assert runner.kinds == [ClaimKeys, RunHandler, Release, Release, ClaimKeys, RunHandler, Release]
    assert retried.attempt == 2, "the first one was to be counted"
    assert not runner.claiming or not runner.claiming.retries


def test_a_handler_that_returned_is_not_called_for_a_redelivery() -> None:
    """The channel was lost together with the answer, so the message is redelivered."""
    calls: list[object] = []
    runner = Runner(calls.append)
    runner.broken = {Complete}
    assert isinstance(only(runner(delivery())), Skipped)
    runner.broken = set()
    again = delivery()
    assert only(runner(again)) == Skipped(again, SkipReason.DUPLICATE)
    assert len(calls) == 1


@pytest.mark.parametrize("raises", [True, False])
def test_what_is_owed_of_a_key_holds_up_this_key_alone(raises: bool) -> None:
    """The store raises, or returns no answers."""
    runner = Runner(lambda item: refuse(item) if item.message_id == "m1" else None)
    if raises:
        runner.broken = {Release}
    else:
        runner.answers = {Release: []}
    runner(delivery(1, message_id="m1"))
    held, other = delivery(2, message_id="m1"), delivery(3, message_id="m2")
    said = "IdempotencyStoreError: no answer" if raises else "the store gave 0 answers to 1 questions"
    assert runner(held, other) == [Skipped(held, SkipReason.STORE_FAILED, said), other]


def test_the_store_is_told_again_of_all_that_is_owed() -> None:
    """This is repeated until the store answers. The messages may be with another consumer."""
    runner = Runner(lambda item: refuse(item) if item.message_id == "m1" else None)
    assert runner.claiming is not None
    runner.broken = {Release, Complete}
    runner(delivery(1, message_id="m1"))
    runner(delivery(2, message_id="m2"))
    runner.settle()
    assert len(runner.claiming.retries) == 2
    runner.broken = {Release}
    runner.settle()
    assert len(runner.claiming.retries) == 1
    runner.broken = set()
    runner.settle()
    assert not runner.claiming.retries
    first, second = runner.store.claim_many(["q|orders|m1", "q|orders|m2"], HOUR)
    assert (first.status, first.attempts, second.status) == (ClaimStatus.NEW, 1, ClaimStatus.DONE)


class Refusing(Runner):
    """The store takes no release for which ``refused`` is true."""

    raises: bool  # whether it raises, or returns no answers
    refused: Callable[[list[str]], bool]

    def perform(self, step: Step) -> object:
        if isinstance(step, Release) and self.refused([claim.key[-2:] for claim in step.claims]):
            if self.raises:
                raise IdempotencyStoreError("lock timeout")
            return []
        return super().perform(step)


@pytest.fixture(params=[True, False])
def refusing(request: pytest.FixtureRequest) -> Refusing:
    """A runner that owes the releases of m1, m2 and m3."""
    runner = Refusing(lambda item: refuse(item) if item.message_id in ("m1", "m2", "m3") else None)
    runner.raises = request.param
    runner.refused = lambda _: True
    for number in (1, 2, 3):
        runner(delivery(number, message_id=f"m{number}"))
    runner.steps.clear()
    return runner


def test_what_cannot_be_settled_delays_no_claim(refusing: Refusing) -> None:
    for number in (4, 5):
        refusing(delivery(number, message_id=f"m{number}"))
    assert refusing.kinds == [ClaimKeys, RunHandler, Complete] * 2


def test_what_cannot_be_settled_delays_no_other_settlement(refusing: Refusing) -> None:
    """A transaction that the server has not ended locks the record of m1."""
    refusing.refused = lambda keys: "m1" in keys
    refusing.settle()
    refusing.settle()
    first, second, third = refusing.store.claim_many(["q|orders|m1", "q|orders|m2", "q|orders|m3"], HOUR)
    assert (first.status, first.attempts) == (ClaimStatus.IN_PROGRESS, 0)
    assert [(claim.status, claim.attempts) for claim in (second, third)] == [(ClaimStatus.NEW, 1)] * 2


def test_what_cannot_be_settled_together_is_settled_singly(refusing: Refusing) -> None:
    refusing.refused = lambda keys: len(keys) > 1
    refusing.settle()
    assert refusing.kinds == [Release] * 4
    claims = refusing.store.claim_many(["q|orders|m1", "q|orders|m2", "q|orders|m3"], HOUR)
    assert [(claim.status, claim.attempts) for claim in claims] == [(ClaimStatus.NEW, 1)] * 3


def test_a_store_that_is_down_is_asked_twice_at_a_time(refusing: Refusing) -> None:
    refusing.settle()
    assert refusing.kinds == [Release] * 2


def test_the_latest_are_remembered() -> None:
    owed = SettlementRetries(capacity=2)
    claims = [Claim(key, ClaimStatus.NEW, 1) for key in "abc"]
    for claim in claims:
        owed.add([claim], failed=True)
    owed.add([claims[2]], failed=None)
    assert owed.settlements() == [([claims[2]], True), ([claims[2]], None)]
    assert owed.settlements("ab") == []
    owed.answered(claims, failed=True)
    assert owed.settlements() == [([claims[2]], None)]


class Unreliable(Runner):
    """Loses questions and answers of settlements in the order of ``faults``."""

    faults: list[str]
    fails: bool  # whether the handler fails

    def perform(self, step: Step) -> object:
        fault = self.faults.pop() if self.faults and isinstance(step, (Complete, Release)) else "none"
        answer = None if fault == "question lost" else super().perform(step)
        if fault != "none":
            raise IdempotencyStoreError(fault)
        return answer


@pytest.mark.parametrize("batch", [False, True])
@given(
    st.lists(st.tuples(st.sampled_from(["m1", "m2", "m3"]), st.booleans())),
    st.lists(st.sampled_from(["none", "question lost", "answer lost"])),
)
def test_faults_double_no_effect_and_leave_no_key_claimed(
    batch: bool, deliveries: list[tuple[str, bool]], faults: list[str]
) -> None:
    effects: list[str] = []

    def handle(argument: Any) -> None:
        if runner.fails:
            raise ValueError("no")
        effects.extend(item.message_id for item in (argument if batch else [argument]))

    runner = Unreliable(handle, batch=batch, max_attempts=1000)
    runner.faults = faults
    for message_id, runner.fails in deliveries:
        runner(delivery(message_id=message_id))
    runner.faults, runner.fails = [], False
    runner.settle()
    assert len(effects) == len(set(effects))
    for message_id in ("m1", "m2", "m3"):
        [claim] = runner.store.claim_many([f"q|orders|{message_id}"], HOUR)
        assert claim.status is (ClaimStatus.DONE if message_id in effects else ClaimStatus.NEW)
