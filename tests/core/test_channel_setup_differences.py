"""The differences between a declaration and an existing queue or exchange.

Each round corrects one argument of the declaration.
"""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.codec.methods import Bind, CheckExchange, CheckQueue, Consume, DeclareExchange, DeclareQueue
from reliable_mq.core.channel_setup import (
    Comparison,
    Pipeline,
    StepRefused,
    compare,
    consumer_setup,
    corrected,
    explain,
    publisher_setup,
)
from reliable_mq.errors import BrokerUnavailable, Difference, TopologyMismatch
from reliable_mq.topology import Binding, Exchange, Queue, inequivalence_from_reply
from tests.core.steps import granted

if TYPE_CHECKING:
    from collections.abc import Generator

QUORUM = {"x-queue-type": "quorum"}
NEWEST = (4, 3, 6)
_TYPES = {bool: "bool", int: "signedint", str: "longstr"}


def inequivalent(argument: str, values: str, kind: str = "queue") -> str:
    return f"PRECONDITION_FAILED - inequivalent arg '{argument}' for {kind} 'q' in vhost '/': {values}"


class Broker:
    """A broker with one queue or exchange called q.

    Like RabbitMQ, it names one difference at a time.
    """

    def __init__(self, existing: DeclareQueue | DeclareExchange | None, refusal: StepRefused | None = None) -> None:
        self.existing = existing
        self.refusal = refusal  # replaces the refusal of the comparison
        self.sent: list[Pipeline] = []

    def answer(self, pipeline: Pipeline) -> tuple[object, ...]:
        self.sent.append(pipeline)
        replies: list[Any] = []
        for step in pipeline.steps:
            if isinstance(step, CheckQueue | CheckExchange) and self.existing is None:
                raise StepRefused(404, "NOT_FOUND", answered=tuple(replies))
            if isinstance(step, DeclareQueue | DeclareExchange) and step.name == "q":
                assert self.existing is not None, "a declaration would make it"
                if self.refusal is not None:
                    raise StepRefused(self.refusal.code, self.refusal.text, answered=tuple(replies))
                text = refused(step, self.existing)
                if text:
                    raise StepRefused(406, text, answered=tuple(replies))
            replies.append(granted(step))
        return tuple(replies)

    def carry_out(self, steps: Generator[Any, Any, Any]) -> Any:
        try:
            step = next(steps)
            while True:
                try:
                    reply = self.answer(step) if isinstance(step, Pipeline) else granted(step)
                except StepRefused as refusal:
                    step = steps.throw(refusal)
                else:
                    step = steps.send(reply)
        except StopIteration as stop:
            return stop.value


def refused(declared: Any, existing: Any) -> str:
    """Return RabbitMQ's text for the first difference, or an empty text."""
    kind = "queue" if isinstance(declared, DeclareQueue) else "exchange"
    for name in ("type", "durable", "auto_delete", "internal"):
        ours, theirs = getattr(declared, name, None), getattr(existing, name, None)
        if ours != theirs:
            return inequivalent(name, f"received '{printed(ours)}' but current is '{printed(theirs)}'", kind)
    for name in sorted({*declared.arguments, *existing.arguments}):
        ours, theirs = declared.arguments.get(name), existing.arguments.get(name)
        if (type(ours), ours) != (type(theirs), theirs):
            if type(ours) is type(theirs):
                values = f"received '{printed(ours)}' but current is '{printed(theirs)}'"
            else:
                values = f"received {typed(ours)} but current is {typed(theirs)}"
            return inequivalent(name, values, kind)
    return ""


def printed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def typed(value: object) -> str:
    return "none" if value is None else f"the value '{printed(value)}' of type '{_TYPES[type(value)]}'"


@pytest.mark.parametrize(
    ("arguments", "argument", "values", "found"),
    [
        ({}, "x-queue-type", "received none but current is the value 'quorum' of type 'longstr'", QUORUM),
        (
            {**QUORUM, "x-delivery-limit": -1},
            "x-delivery-limit",
            "received the value '-1' of type 'signedint' but current is none",
            QUORUM,
        ),
        (
            {},
            "x-delivery-limit",
            "received none but current is the value '7' of type 'signedint'",
            {"x-delivery-limit": 7},
        ),
        (
            {},
            "x-single-active-consumer",
            "received none but current is the value 'true' of type 'bool'",
            {"x-single-active-consumer": True},
        ),
        (
            {"x-single-active-consumer": True},
            "x-single-active-consumer",
            "received 'true' but current is 'false'",
            {"x-single-active-consumer": False},
        ),
        ({}, "x-overflow", "received none but current is the value '5' of type 'longstr'", {"x-overflow": "5"}),
        ({"x-overflow": "a"}, "x-overflow", "received 'a' but current is '5'", {"x-overflow": "5"}),
        (
            {**QUORUM, "x-delivery-limit": -1},
            "x-delivery-limit",
            "received '-1' but current is '3'",
            {**QUORUM, "x-delivery-limit": 3},
        ),
        ({}, "x-expires", "received none but current is none", None),
        ({"x-expires": 1}, "x-expires", "received '1' but current is '1'", None),
        ({}, "x-expires", "received none but current i...", None),
    ],
)
def test_a_refusal_corrects_one_argument(
    arguments: dict[str, object], argument: str, values: str, found: dict[str, object] | None
) -> None:
    """The correction keeps the type of the argument, and nothing is guessed."""
    inequivalence = inequivalence_from_reply("queue", "q", inequivalent(argument, values))
    assert inequivalence is not None
    expected = None if found is None else DeclareQueue("q", arguments=found)
    assert corrected(DeclareQueue("q", arguments=arguments), inequivalence) == expected


class Name(str, enum.Enum):  # noqa: UP042  # the older kind, which users have
    """A name whose text in an f-string is not what is sent."""

    Q = "q"


def test_a_refusal_is_understood_for_a_member_of_an_enum() -> None:
    text = inequivalent("x-max-length", "received '10' but current is '20'")
    assert inequivalence_from_reply("queue", Name.Q, text) == ("x-max-length", "'10'", "'20'")


@pytest.mark.parametrize(
    ("step", "argument", "values", "found"),
    [
        (DeclareQueue("q"), "durable", "received 'true' but current is 'false'", DeclareQueue("q", durable=False)),
        (
            DeclareQueue("q"),
            "auto_delete",
            "received 'false' but current is 'true'",
            DeclareQueue("q", auto_delete=True),
        ),
        (
            DeclareExchange("q"),
            "internal",
            "received 'false' but current is 'true'",
            DeclareExchange("q", internal=True),
        ),
        (DeclareExchange("q"), "type", "received 'direct' but current is 'topic'", DeclareExchange("q", "topic")),
        (DeclareExchange("q"), "type", "received 'direct' but current is none", None),
    ],
)
def test_a_refusal_corrects_one_property(
    step: DeclareQueue | DeclareExchange, argument: str, values: str, found: object
) -> None:
    kind = "queue" if isinstance(step, DeclareQueue) else "exchange"
    inequivalence = inequivalence_from_reply(kind, "q", inequivalent(argument, values, kind))
    assert inequivalence is not None
    assert corrected(step, inequivalence) == found


VALUES = st.one_of(st.booleans(), st.integers(0, 3), st.sampled_from(["", "1", "true", "none", "it's"]))
TABLES = st.dictionaries(st.sampled_from([f"x-{letter}" for letter in "abcdefgh"]), VALUES)
QUEUES = st.builds(DeclareQueue, st.just("q"), durable=st.booleans(), auto_delete=st.booleans(), arguments=TABLES)
EXCHANGES = st.builds(
    DeclareExchange,
    st.just("q"),
    st.sampled_from(["direct", "topic"]),
    durable=st.booleans(),
    auto_delete=st.booleans(),
    internal=st.booleans(),
    arguments=TABLES,
)


@given(st.one_of(st.tuples(QUEUES, QUEUES), st.tuples(EXCHANGES, EXCHANGES)))
def test_every_difference_is_found(
    both: tuple[DeclareQueue, DeclareQueue] | tuple[DeclareExchange, DeclareExchange],
) -> None:
    """Each difference is found once, with one more round than differences."""
    declared, existing = both
    broker = Broker(existing)
    found: Comparison = broker.carry_out(compare(declared))
    names = [difference.argument for difference in found.differences]
    properties = [name for name in ("type", "durable", "auto_delete", "internal") if hasattr(declared, name)]
    differing = [name for name in properties if getattr(declared, name) != getattr(existing, name)]
    for name in sorted({*declared.arguments, *existing.arguments}):
        ours, theirs = declared.arguments.get(name), existing.arguments.get(name)
        if (type(ours), ours) != (type(theirs), theirs):
            differing.append(name)
    assert names == differing
    assert found.existing == existing
    assert found.ended_by == ""
    assert len(broker.sent) == len(names) + 1


@pytest.mark.parametrize("kind", ["queue", "exchange"])
def test_a_comparison_never_declares_what_was_just_not_found(kind: str) -> None:
    """The check comes first in the pipeline, because the object may be deleted."""
    step = DeclareQueue("q") if kind == "queue" else DeclareExchange("q")
    check = CheckQueue("q") if kind == "queue" else CheckExchange("q")
    gone = Broker(None)
    values = "received 'true' but current is 'false'"
    found = gone.carry_out(compare(step, StepRefused(406, inequivalent("durable", values, kind))))
    assert found == Comparison(None, (Difference("durable", "true", "false"),), "404 NOT_FOUND")
    assert gone.sent == [Pipeline((check, replace(step, durable=False)))]


@pytest.mark.parametrize(
    "refusal",
    [
        StepRefused(403, "ACCESS_REFUSED"),
        StepRefused(406, "PRECONDITION_FAILED - something else"),
        StepRefused(406, inequivalent("x-a", "received none but current is the value 'z' of ty...")),
        StepRefused(406, inequivalent("x-a", "received none but current is the value '{1}' of type 'array'")),
    ],
)
def test_a_comparison_ends_when_no_new_argument_is_named(refusal: StepRefused) -> None:
    """The result says so, because there may be further differences."""
    broker = Broker(DeclareQueue("q"), refusal)
    found = broker.carry_out(compare(DeclareQueue("q")))
    assert found.existing is None
    assert found.ended_by == f"{refusal.code} {refusal.text}"
    assert len(broker.sent) <= 2


def test_a_comparison_ends_after_24_arguments() -> None:
    """This limit holds whatever the broker answers."""
    existing = DeclareQueue("q", arguments={f"x-{number:02}": number for number in range(30)})
    broker = Broker(existing)
    found = broker.carry_out(compare(DeclareQueue("q")))
    assert found.existing is None
    assert [difference.argument for difference in found.differences] == [f"x-{number:02}" for number in range(24)]
    assert len(broker.sent) == 25


def test_a_comparison_ends_with_the_connection() -> None:
    steps = compare(DeclareQueue("q"))
    next(steps)
    text = inequivalent("durable", "received 'true' but current is 'false'")
    refusal = StepRefused(406, text, answered=(granted(CheckQueue("q")),), connection=True)
    with pytest.raises(StopIteration) as stop:
        steps.throw(refusal)
    assert stop.value.value == Comparison(None, (), f"406 {refusal.text}")


ORDERS = Queue("q", type="classic", max_length=5, message_ttl=1, dead_letter=None)


@pytest.mark.parametrize("start", ["publisher", "consumer"])
def test_a_set_up_raises_every_difference(start: str) -> None:
    existing = DeclareQueue("q", arguments={**QUORUM, "x-max-length": 7, "x-overflow": "reject-publish"})
    if start == "publisher":
        setup = publisher_setup([Exchange("e"), ORDERS, Binding("e", ORDERS)], NEWEST)
    else:
        setup = consumer_setup(ORDERS, [Exchange("e")], NEWEST, Consume(ORDERS.name, "tag"), prefetch=1)
    with pytest.raises(TopologyMismatch) as caught:
        Broker(existing).carry_out(setup)
    error = caught.value
    assert error.differences == (
        Difference("x-max-length", "5", "7"),
        Difference("x-message-ttl", "1000", "none"),
        Difference("x-queue-type", "classic", "quorum"),
    )
    assert (error.argument, error.declared, error.existing) == error.differences[0]
    assert str(error).startswith(
        "queue 'q': x-max-length is declared as '5', but exists as '7'; x-message-ttl is declared as '1000', but "
        "exists as none; x-queue-type is declared as 'classic', but exists as 'quorum'. RabbitMQ cannot change an"
    )
    assert isinstance(error.__cause__, StepRefused)
    assert "x-max-length" in error.__cause__.text, "the first refusal"


def test_all_differences_are_found_unless_the_queue_is_gone() -> None:
    first = TopologyMismatch("x-max-length", kind="queue", name="q", argument="x-max-length")
    found = Broker(DeclareQueue("q", arguments=QUORUM)).carry_out(explain(ORDERS, first, NEWEST))
    assert [difference.argument for difference in found.differences] == [
        "x-max-length",
        "x-message-ttl",
        "x-overflow",
        "x-queue-type",
    ]
    assert Broker(None).carry_out(explain(ORDERS, first, NEWEST)) is first


def test_an_earlier_refusal_for_another_reason_is_not_compared() -> None:
    broker, first = Broker(DeclareQueue("q")), BrokerUnavailable("403", permanent=True)
    assert broker.carry_out(explain(ORDERS, first, NEWEST)) is first
    assert broker.sent == []


def test_a_set_up_raises_every_difference_of_an_exchange() -> None:
    with pytest.raises(TopologyMismatch) as caught:
        Broker(DeclareExchange("q", "topic", durable=False)).carry_out(publisher_setup([Exchange("q")], NEWEST))
    assert caught.value.differences == (Difference("type", "direct", "topic"), Difference("durable", "true", "false"))


def test_differences_that_may_not_be_all_are_told_as_such() -> None:
    text = inequivalent("x-queue-type", "received 'classic' but cur...")
    with pytest.raises(
        TopologyMismatch, match=r"its x-queue-type differs from what exists \(more may.* 406 "
    ) as caught:
        Broker(DeclareQueue("q"), StepRefused(406, text)).carry_out(publisher_setup([ORDERS], NEWEST))
    assert caught.value.differences == (Difference("x-queue-type"),)


def test_nothing_is_compared_over_another_refusal() -> None:
    broker = Broker(DeclareQueue("q"), StepRefused(403, "ACCESS_REFUSED"))
    with pytest.raises(BrokerUnavailable):
        broker.carry_out(publisher_setup([ORDERS], NEWEST))
    assert len(broker.sent) == 1


def test_a_binding_is_not_compared() -> None:
    setup = publisher_setup([Binding("e", "q")], NEWEST)
    assert next(setup) == Pipeline((Bind("queue", "q", "e", "", {}),))
    with pytest.raises(BrokerUnavailable):
        setup.throw(StepRefused(406, inequivalent("x-match", "received 'a' but current is 'b'", "binding")))
