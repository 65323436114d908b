"""The linter of queue arguments, and the arguments that a Queue declares.

The linter finds misspellings, arguments of other versions, and contradictions.
"""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from reliable_mq import ConfigurationError, Queue
from reliable_mq.topology import TopologyWarning
from reliable_mq.topology.arguments import ARGUMENTS, ArgumentProblem, lint_arguments

DLX = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}


def lint(
    arguments: dict[str, object], kind: str = "quorum", version: tuple[int, ...] | None = None
) -> list[ArgumentProblem]:
    return lint_arguments(arguments, kind, version)


@pytest.mark.parametrize("kind", ["quorum", "classic", "stream"])
@pytest.mark.parametrize("version", [None, (3, 13, 7), (4, 0, 5), (4, 3, 6)])
def test_what_this_package_declares_has_no_flaw(kind: str, version: tuple[int, ...] | None) -> None:
    queue = Queue("q", type=kind)  # type: ignore[arg-type]
    assert lint(queue.arguments_for(version or (4, 3, 6)), kind, version) == []
    if queue.dead_letter_queue is not None:
        assert lint(queue.dead_letter_queue.arguments_for(version or (4, 3, 6)), kind, version) == []


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("x-mesage-ttl", "x-message-ttl"),
        ("message-ttl", "x-message-ttl"),
        ("x-dead-letter-exchanges", "x-dead-letter-exchange"),
        ("x-deadletter-exchange", "x-dead-letter-exchange"),
        ("x-delivery-limits", "x-delivery-limit"),
        ("x-max-lenght", "x-max-length"),
        ("X-Overflow", "x-overflow"),
    ],
)
def test_a_misspelling_is_told_with_what_was_meant(given: str, meant: str) -> None:
    (flaw,) = lint({given: 1})
    assert (flaw.argument, flaw.certain) == (given, True)
    assert f"did you mean {meant}?" in flaw.text


@pytest.mark.parametrize(
    ("name", "version", "told"),
    [
        ("x-delayed-retry-type", (4, 2, 1), "requires RabbitMQ 4.3"),
        ("x-delayed-retry-type", (4, 3), None),
        ("x-delayed-retry-type", None, None),
        ("x-delayed-retry-type", (), None),
        ("x-dead-letter-strategy", (3, 9), "requires RabbitMQ 3.10"),
        ("x-queue-mode", (4, 0, 5), "is ignored or refused by RabbitMQ 3.12"),
        ("x-queue-mode", (3, 11), None),
        ("x-queue-mode", None, "is ignored"),
        ("x-queue-master-locator", (4, 0), None),
        ("x-queue-master-locator", (4, 3), "or refused"),
        ("x-max-in-memory-length", None, "is ignored or refused by RabbitMQ 4"),
    ],
)
def test_an_argument_of_another_version_is_told(name: str, version: tuple[int, ...] | None, told: str | None) -> None:
    values = {"x-delayed-retry-type": "failed", "x-dead-letter-strategy": "at-most-once"}
    flaws = lint({name: values.get(name, 1)}, version=version)
    assert [flaw.certain for flaw in flaws] == ([] if told is None else [False])
    assert told is None or told in flaws[0].text


@pytest.mark.parametrize(
    ("arguments", "certain", "told"),
    [
        ({"x-nothing-like-it": 1}, False, "is not known to RabbitMQ, which ignores it"),
        ({"x-overflow": "reject"}, True, "cannot be 'reject'"),
        ({"x-overflow": "reject-publsh"}, True, "did you mean 'reject-publish'?"),
        ({"x-overflow": "reject-publish-dlx"}, True, "on a quorum queue"),
        ({"x-dead-letter-strategy": "atleast"}, True, "cannot be 'atleast'"),
        ({"x-message-ttl": "5"}, True, "must be a whole number of at least 0, not '5'"),
        ({"x-max-length": -1, "x-overflow": "drop-head"}, True, "at least 0"),
        ({"x-expires": True}, True, "at least 1"),
        ({"x-delivery-limit": -2}, True, "at least -1"),
        ({"x-delivery-limit": 20}, False, "drops a message after 21 deliveries"),
        ({"x-max-length": 10}, False, "drops the oldest messages"),
        ({"x-max-length-bytes": 10}, False, "drops the oldest messages"),
        ({"x-dead-letter-exchange": ""}, False, "is the default exchange"),
        ({"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}, False, "requires a dead-letter"),
        ({**DLX, "x-dead-letter-strategy": "at-least-once"}, True, "is not in effect without x-overflow=reject"),
        ({"x-message-ttl": 1000, "x-expires": 500}, False, "deletes an unused queue"),
        ({"x-delayed-retry-min": 5, "x-delayed-retry-max": 2, "x-delayed-retry-type": "all"}, True, "is above"),
        ({"x-delayed-retry-max": 5}, False, "does nothing without x-delayed-retry-type"),
    ],
)
def test_what_contradicts_itself_or_loses_messages_is_told(
    arguments: dict[str, object], certain: bool, told: str
) -> None:
    (flaw,) = lint(arguments)
    assert flaw.certain is certain
    assert told in flaw.text
    assert flaw.fix


def test_a_ttl_and_priorities_block_at_the_head() -> None:
    (flaw,) = lint({"x-message-ttl": 1000, "x-max-priority": 5}, "classic")
    assert "can hold up expired ones" in flaw.text


@pytest.mark.parametrize(
    "arguments",
    [
        {"x-message-deduplication": True},
        {"team": "shop"},
        {"x-message-ttl": 1000, "x-expires": 5000, **DLX},
        {"x-delivery-limit": 20, **DLX},
        {"x-delivery-limit": None, "x-mesage-ttl": None},
        {"x-max-length": 10, "x-overflow": "drop-head"},
        {"x-overflow": "reject-publish", "x-dead-letter-strategy": "at-least-once", **DLX},
        {"x-delayed-retry-type": "failed", "x-delayed-retry-min": 1000, "x-delayed-retry-max": 5000},
    ],
)
def test_what_is_right_is_not_told(arguments: dict[str, object]) -> None:
    assert lint(arguments) == []


def test_a_queue_refuses_what_is_certain() -> None:
    with pytest.raises(ConfigurationError, match=r"argument x-mesage-ttl of queue 'q' .* did you mean x-message-ttl"):
        Queue("q", arguments={"x-mesage-ttl": 5})
    with pytest.raises(ConfigurationError, match=r"x-message-ttl .* must be a whole number"):
        Queue("q", arguments={"x-message-ttl": "5"})


def test_a_queue_warns_of_what_may_be_meant_where_it_is_made() -> None:
    with pytest.warns(TopologyWarning, match="argument x-delivery-limit of queue 'q' drops a message after 6") as told:
        Queue("q", dead_letter=None, arguments={"x-delivery-limit": 5})
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Queue("q", max_length=5, message_ttl=60)
        Queue("q", arguments={"x-delivery-limit": 5})


def test_fields_named_in_the_table_are_those_of_a_queue() -> None:
    """A row with an unknown field would fail at the first declaration."""
    fields = {field.name for field in dataclasses.fields(Queue)}
    assert {argument.field for argument in ARGUMENTS.values() if argument.field} <= fields
