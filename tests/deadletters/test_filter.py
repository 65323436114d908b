"""Which dead letters a filter selects, and the statistics of dead letters."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from reliable_mq import ConfigurationError, Message
from reliable_mq.codec import encode_properties
from reliable_mq.core import headers
from reliable_mq.core.consumer.delivery import ChannelGeneration, Delivery
from reliable_mq.deadletters import DeadMessage, Filter, Statistics

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)


def letter(*, age: float | None = 60.0, **changed: object) -> DeadMessage:
    table: dict[str, Any] = {
        headers.FORMAT: 1,
        headers.ORIGINAL_QUEUE: "orders",
        headers.DEAD_LETTER_REASON: "5 of 5 attempts failed",
        headers.EXCEPTION_TYPE: "app.errors.Timeout",
        "shop": "north",
        "n": 7,
        "flag": True,
        "raw": b"x\xff",
    }
    if age is not None:
        table[headers.LAST_FAILURE] = NOW - timedelta(seconds=age)
    table |= changed
    properties = encode_properties(Message(b"", headers=table, message_id="id-1"))
    delivery = Delivery("", 1, False, "", "orders.dead", properties, b"12345")
    delivery.came_from(ChannelGeneration(1, 1, "orders.dead"))
    return DeadMessage(delivery, 1)


@pytest.mark.parametrize(
    ("given", "matches"),
    [
        ({}, True),
        ({"exception": "Timeout"}, True),
        ({"exception": "app.errors.Timeout"}, True),
        ({"exception": "app.*"}, True),
        ({"exception": "*Time*"}, True),
        ({"exception": "timeout"}, False),
        ({"exception": "errors.Timeout"}, False),
        ({"reason": "ATTEMPTS"}, True),
        ({"reason": "expired"}, False),
        ({"queue": "orders"}, True),
        ({"queue": "order"}, False),
        ({"message_ids": ["id-0", "id-1"]}, True),
        ({"message_ids": ["id-0"]}, False),
        ({"message_ids": []}, False),
        ({"fingerprints": [letter().fingerprint, "0" * 32]}, True),
        ({"fingerprints": ["0" * 32]}, False),
        ({"fingerprints": set()}, False),
        ({"message_ids": None, "fingerprints": None, "headers": {}}, True),
        ({"headers": {"shop": "north", "n": "7"}}, True),
        ({"headers": {"flag": "true", "raw": "x\\xff"}}, True),
        ({"headers": {"shop": "south"}}, False),
        ({"headers": {"none": ""}}, False),
        ({"older_than": 59}, True),
        ({"older_than": timedelta(minutes=1)}, False),
        ({"newer_than": 61}, True),
        ({"newer_than": 60, "older_than": 1}, False),
        ({"exception": "Timeout", "reason": "no"}, False),
    ],
)
def test_everything_that_is_given_must_be_so(given: dict[str, Any], matches: bool) -> None:
    assert Filter(**given).matches(letter(), NOW) is matches


def test_a_wildcard_does_not_match_without_an_exception() -> None:
    """Otherwise, a purge by exception would delete expired messages, too."""
    assert Filter(exception="*").matches(letter(), NOW)
    assert not Filter(exception="*").matches(letter(**{headers.EXCEPTION_TYPE: ""}), NOW)


def test_a_dead_letter_whose_age_is_unknown_is_of_no_age() -> None:
    assert not Filter(older_than=1).matches(letter(age=None), NOW)
    assert not Filter(newer_than=1).matches(letter(age=None), NOW)
    assert Filter().matches(letter(age=None), NOW)


def test_only_the_empty_filter_means_everything() -> None:
    assert Filter().everything
    assert not Filter(queue="q").everything
    assert not Filter(older_than=0).everything
    assert not Filter(message_ids=[]).everything
    assert not Filter(fingerprints=[]).everything


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"exception": ""}, "exception"),
        ({"queue": 5}, "queue"),
        ({"message_ids": "id"}, "message_ids"),
        ({"message_ids": b"id"}, "message_ids must be a collection of texts, not b'id'"),
        ({"message_ids": 5}, "message_ids"),
        ({"message_ids": [["id"]]}, "message_ids"),
        ({"fingerprints": "0f"}, "fingerprints"),
        ({"fingerprints": ["0f", 5]}, "fingerprints"),
        ({"headers": {"n": 7}}, "headers must be a mapping of texts to texts, not {'n': 7}"),
        ({"headers": {7: "n"}}, "headers"),
        ({"headers": "abc"}, "headers"),
        ({"older_than": -1}, "older_than"),
        ({"newer_than": "1h"}, "newer_than"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Filter(**given)


def test_statistics_count_by_cause_queue_and_age() -> None:
    counted = Statistics()
    for age in (1, 61, 3700, 90_000, 700_000, None):
        counted.add(letter(age=age), NOW)
    counted.add(letter(age=1, **{headers.EXCEPTION_TYPE: "", headers.ORIGINAL_QUEUE: ""}), NOW)
    assert (counted.messages, counted.bytes) == (7, 35)
    assert counted.by_cause == {"app.errors.Timeout": 6, "5 of 5 attempts failed": 1}
    assert counted.by_queue == {"orders": 6, "": 1}
    assert list(counted.by_age.items()) == [
        ("up to a minute", 2),
        ("up to an hour", 1),
        ("up to a day", 1),
        ("up to a week", 1),
        ("older", 1),
        ("unknown", 1),
    ]
    assert counted.newest == NOW - timedelta(seconds=1)
    assert counted.oldest == NOW - timedelta(seconds=700_000)


def test_statistics_count_by_texts_of_a_bounded_size() -> None:
    """A publisher may forge a class, a reason and a queue of any length, other ones in each message."""
    counted = Statistics()
    for number in range(3):
        long = "x" * 512 + f"{number}" * 100_000
        counted.add(letter(**{headers.EXCEPTION_TYPE: long, headers.ORIGINAL_QUEUE: long}), NOW)
    assert counted.by_cause == counted.by_queue == {"x" * 512: 3}
