"""The checks of ``doctor`` for delay queues, DLQs and linted arguments."""

from __future__ import annotations

from typing import Any

import pytest

from reliable_mq import Queue, RetryPolicy
from reliable_mq.cli.doctor.finding import Finding, Status
from reliable_mq.cli.doctor.management import QueueView, Snapshot
from reliable_mq.cli.doctor.queues import examine_queues
from reliable_mq.core.consumer.quarantine import Quarantine
from reliable_mq.core.retry.delay_queues import DelayQueue, DelayQueues

NEWEST, OLD = (4, 3, 6), (4, 0, 5)
OK, WARNING, PROBLEM = Status.OK, Status.WARNING, Status.PROBLEM


def view(queue: Queue, *, changed: dict[str, object] | None = None, **shown: Any) -> QueueView:
    """Return a declared queue as the API shows it, with `changed` arguments replaced."""
    arguments = {**queue.arguments_for(NEWEST), **(changed or {})}
    found = {"name": queue.name, "type": queue.type, "durable": True, "messages": 0}
    return QueueView(found | {"arguments": {k: v for k, v in arguments.items() if v is not None}} | shown)


ORDERS = Queue("orders")
DEAD = Queue("orders.dead", dead_letter=None)
DELAY = Queue("orders.retry.10000", message_ttl=10, dead_letter="orders")


def examine(*queues: QueueView, names: tuple[str, ...] = (), version: tuple[int, ...] = NEWEST, **rest: Any) -> Any:
    return examine_queues(Snapshot({each.name: each for each in queues}, **rest), names, version)


def not_well(findings: list[Finding]) -> list[tuple[Status, str, str]]:
    return [(each.status, each.subject, each.check) for each in findings if each.status is not OK]


def test_the_topology_of_a_consumer_with_retries_is_well() -> None:
    """The target queue of a delay queue is not a DLQ, whatever its length."""
    queues = view(ORDERS, messages=70), view(DEAD), view(DELAY, messages=5)
    for names in ((), ("orders",), ("orders.retry.10000",)):
        for version in (NEWEST, OLD):
            assert not_well(examine(*queues, names=names, version=version)) == []


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x-message-ttl": 1000}, "x-message-ttl is 1000, but must be 10000 on this delay queue"),
        ({"x-message-ttl": None}, "x-message-ttl is None"),
        ({"x-dead-letter-routing-key": "other"}, "messages do not return to their queue"),
        ({"x-dead-letter-strategy": None}, "a message is lost if its queue does not accept it"),
        ({"x-overflow": "drop-head", "x-dead-letter-strategy": None}, "a message is lost"),
    ],
)
def test_a_delay_queue_with_other_arguments_is_a_problem(changed: dict[str, object], text: str) -> None:
    other = view(Queue("other"), messages=3)
    found = list(examine(view(ORDERS), view(DEAD), view(DELAY, changed=changed), other, names=("orders",)))
    problems = [each for each in found if each.status is PROBLEM]
    assert problems[0].subject == "queue 'orders.retry.10000'"
    assert text in problems[0].text
    assert "delete it" in problems[0].fix


@pytest.mark.parametrize(
    "arguments", [{}, {"x-message-ttl": 60_000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders"}]
)
def test_a_queue_of_another_program_is_no_delay_queue(arguments: dict[str, object]) -> None:
    """It counts attempts in its name, and nobody is told to delete it."""
    other = QueueView({"name": "orders.retry.1", "type": "classic", "durable": True, "arguments": arguments})
    assert not_well(examine(view(ORDERS), view(DEAD), other)) == []
    assert not_well(examine(view(ORDERS), view(DEAD), other, names=("orders",))) == []


def test_a_policy_that_shortens_the_delays_is_a_problem() -> None:
    """Declaring the delay queue again would not help."""
    delay = view(DELAY, effective_policy_definition={"message-ttl": 1000})
    (found,) = (each for each in examine(view(ORDERS), view(DEAD), delay) if each.status is not OK)
    assert (found.status, found.subject) == (PROBLEM, "queue 'orders.retry.10000'")
    assert "x-message-ttl is 1000, but must be 10000 on this delay queue" in found.text
    assert "Remove message-ttl from the policy" in found.fix


def test_a_delay_queue_of_a_gone_queue_is_a_problem_unless_empty() -> None:
    assert not_well(examine(view(DELAY, messages=2))) == [(PROBLEM, "queue 'orders.retry.10000'", "delay queue")]
    assert not_well(examine(view(DELAY))) == [(WARNING, "queue 'orders.retry.10000'", "delay queue")]


def test_dead_letters_without_a_target_wait_if_at_least_once() -> None:
    (kept,) = examine(view(ORDERS), names=("orders",))
    assert (kept.status, kept.check) == (PROBLEM, "dead letters")
    assert "'orders.dead' does not exist: dead letters wait in this queue" in kept.text
    for changed in ({"x-overflow": "drop-head"}, {"x-dead-letter-strategy": "at-most-once"}):
        lost, *_ = examine(view(ORDERS, changed=dict(changed)), names=("orders",))
        assert "'orders.dead' does not exist: dead letters are dropped" in lost.text


def test_a_delay_queue_that_somebody_consumes_from_is_a_problem() -> None:
    consumers = [{"queue": {"name": DELAY.name}, "prefetch_count": 1, "ack_required": True}]
    found = examine(view(ORDERS), view(DEAD), view(DELAY), consumers=consumers)
    assert not_well(found) == [(PROBLEM, "queue 'orders.retry.10000'", "delay queue")]
    assert "consume from 'orders'" in found[0].fix


def test_what_has_expired_and_is_not_taken_is_told() -> None:
    found = examine(view(ORDERS), view(DEAD), view(DELAY, messages_dlx=7), names=("orders",))
    assert "7 messages have expired, but queue 'orders' has not accepted them yet" in found[-1].text


def test_a_quarantine_that_nobody_consumes_from_is_warned_of() -> None:
    around = view(ORDERS), view(DEAD)
    suspects = view(Quarantine.of(ORDERS), messages=2)
    for names in ((), ("orders",)):
        assert not_well(examine(*around, suspects, names=names)) == [
            (WARNING, "queue 'orders.quarantine'", "quarantine")
        ]
    consumers = [{"queue": {"name": suspects.name}, "prefetch_count": 1, "ack_required": True}]
    assert not_well(examine(*around, suspects, consumers=consumers)) == []
    assert not_well(examine(*around, view(Quarantine.of(ORDERS)))) == []


def test_the_delay_queues_that_a_consumer_declares_are_known() -> None:
    made = DelayQueues("orders", RetryPolicy(5, delays=(1, 10, 60))).queue(10_000)
    assert DelayQueue.of(made.name) == DelayQueue("orders", 10_000)
    assert not_well(examine(view(ORDERS), view(DEAD), view(made, messages=3))) == []


def test_delays_that_are_mixed_in_one_queue_are_warned_of() -> None:
    """A delay queue of another program, without ``x-message-ttl``."""
    route = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders"}
    mixed = view(Queue("shop-wait", dead_letter=None), changed=route)
    (found,) = [each for each in examine(view(ORDERS), view(DEAD), mixed) if each.check == "delay queue"]
    assert "holds up all messages behind it" in found.text


def test_a_work_queue_named_like_a_delay_queue_is_none() -> None:
    """Its consumer may be away for a while."""
    made = Queue("waiting-list")
    assert made.dead_letter_queue is not None
    assert not_well(examine(view(made), view(made.dead_letter_queue))) == []


def test_dead_letters_that_wait_are_told_with_what_to_do() -> None:
    waiting = view(DEAD, messages=12, messages_details={"rate": 1.5})
    _, found = examine(view(ORDERS), waiting, names=("orders",))
    assert "holds 12 messages and grows by 1.5 messages per second" in found.text
    assert "reliable-mq dlq stats URL orders.dead" in found.fix
    (orphans, *_) = examine(waiting)
    assert "queue 'orders', their probable origin, does not exist" in orphans.text


def test_the_queues_of_a_shared_dead_letter_queue_exist() -> None:
    """Its own name says nothing about the queues that its letters go back to."""
    shared = view(Queue("shop.dead", dead_letter=None), messages=12)
    waiting, _ = examine(view(Queue("orders", dead_letter="shop.dead")), shared)
    assert waiting.text == "a dead-letter queue that holds 12 messages"


def test_a_dead_letter_queue_that_loses_messages_is_warned_of() -> None:
    kept = [
        each.text
        for version in (NEWEST, OLD)
        for each in examine(
            view(ORDERS), view(DEAD, changed={"x-delivery-limit": 20, "x-message-ttl": 5000}), version=version
        )
        if each.check == "dead letters kept"
    ]
    assert [text.split(":")[0] for text in kept] == [
        "dead letters are dropped after 5 s (message TTL)",
        "dead letters are dropped after 5 s (message TTL)",
        "a delivery limit of 20",
    ]


def test_what_the_linter_says_is_told_once() -> None:
    changed = {"x-mesage-ttl": 5, "x-delayed-retry-type": "failed", "x-delivery-limit": 5}
    found = examine(view(ORDERS, changed=changed), view(DEAD), names=("orders",), version=OLD)
    assert [(each.check, each.text.split()[0]) for each in found if each.status is WARNING] == [
        ("arguments", "x-delayed-retry-type"),
        ("arguments", "x-mesage-ttl"),
    ]
    assert all(each.fix.endswith("declared again.") for each in found)
