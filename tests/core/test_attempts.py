"""Attempt counts: trusted headers, and what the process remembers."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from reliable_mq.core import headers
from reliable_mq.core.consumer.attempts import AttemptHistory, AttemptTracker, NewerFormat, failures_from_headers
from tests.core.deliveries import BROKEN_TABLE, delivery, failure
from tests.properties import machine


def test_our_header_says_which_attempt_is_next() -> None:
    first = datetime(2024, 5, 6, tzinfo=UTC)
    found = failures_from_headers({headers.FORMAT: 1, headers.ATTEMPT: 3, headers.RETRY: {"first-failure": first}})
    assert found is not None
    assert (found.count, found.first_at) == (2, first.timestamp())


@pytest.mark.parametrize(
    "table",
    [
        {},
        {headers.FORMAT: 1},
        {headers.ATTEMPT: 3},
        {headers.FORMAT: 0, headers.ATTEMPT: 3},
        {headers.FORMAT: "1", headers.ATTEMPT: 3},
        {headers.FORMAT: True, headers.ATTEMPT: 3},
        {headers.FORMAT: 1, headers.ATTEMPT: 1},
        {headers.FORMAT: 1, headers.ATTEMPT: 0},
        {headers.FORMAT: 1, headers.ATTEMPT: -7},
        {headers.FORMAT: 1, headers.ATTEMPT: 1001},
        {headers.FORMAT: 1, headers.ATTEMPT: 2**62},
        {headers.FORMAT: 1, headers.ATTEMPT: 2.0},
        {headers.FORMAT: 1, headers.ATTEMPT: "2"},
        {headers.FORMAT: 1, headers.ATTEMPT: True},
        {"x-death": [{"count": 4}], "x-delivery-count": 7, "x-acquired-count": 9},
    ],
    ids=repr,
)
def test_invalid_or_foreign_attempt_headers_are_ignored(table: dict[str, object]) -> None:
    assert failures_from_headers(table) is None


def test_a_first_failure_that_is_no_time_is_not_believed() -> None:
    found = failures_from_headers(
        {headers.FORMAT: 1, headers.ATTEMPT: 2, headers.RETRY: {"first-failure": "yesterday"}}
    )
    assert found is not None
    assert found.first_at is None


def test_a_newer_format_is_an_error_that_says_so() -> None:
    with pytest.raises(NewerFormat, match="headers of format 2, and 1 is the newest") as caught:
        failures_from_headers({headers.FORMAT: 2, headers.ATTEMPT: 2})
    assert caught.value.version == 2


def test_failures_add_up_and_keep_the_first_time() -> None:
    failures = AttemptHistory()
    failures.add(failure(at=5.0))
    failures.add(failure(at=9.0))
    assert (failures.count, failures.first_at) == (2, 5.0)
    assert failures.last is not None
    assert failures.last.at == 9.0


def test_without_an_id_nothing_is_remembered() -> None:
    book = AttemptTracker()
    for nameless in (delivery(message_id=None), delivery(message_id=""), delivery(type=b"\x09short")):
        book.remember(nameless, AttemptHistory(1))
        assert book.find(nameless) is None
        book.forget(nameless)
    assert len(book) == 0


def test_forgetting_a_broken_id_is_no_flaw_of_the_delivery() -> None:
    """The handler has not read it."""
    book = AttemptTracker()
    book.remember(delivery(), AttemptHistory(1))
    nameless = delivery(type=b"\x09short")
    book.forget(nameless)
    assert nameless.flaw is None


def test_broken_headers_do_not_hide_the_id() -> None:
    book = AttemptTracker()
    failures = AttemptHistory(1)
    book.remember(delivery(message_id="a", headers=BROKEN_TABLE), failures)
    assert book.find(delivery(message_id="a")) is failures


def test_of_two_counts_the_higher_is_known() -> None:
    book = AttemptTracker()
    book.remember(delivery(), AttemptHistory(2))
    for claimed, known in ((1, 2), (4, 4), (3, 4)):
        item = delivery()
        item.set_failures(AttemptHistory(claimed))
        found = book.find(item)
        assert found is not None
        assert found.count == known
    stranger = delivery(message_id="m2")
    stranger.set_failures(AttemptHistory(3))
    assert book.find(stranger) is stranger.failures


class Remembering(RuleBasedStateMachine):
    """A tracker with three entries, and a list of all failures in order.

    Invariants:

    - The tracker returns the last failures remembered for an id.
    - It holds at most as many ids as its capacity.
    - Of the failed ids, it holds those that failed last.
    """

    IDS = st.sampled_from("abcde")

    def __init__(self) -> None:
        super().__init__()
        self.book = AttemptTracker(capacity=3)
        self.model: list[tuple[str, AttemptHistory]] = []

    @rule(message_id=IDS)
    def remember(self, message_id: str) -> None:
        failures = AttemptHistory(1)
        self.model = [*[item for item in self.model if item[0] != message_id][-2:], (message_id, failures)]
        self.book.remember(delivery(message_id=message_id), failures)

    @rule(message_id=IDS)
    def forget(self, message_id: str) -> None:
        self.model = [item for item in self.model if item[0] != message_id]
        self.book.forget(delivery(message_id=message_id))

    @invariant()
    def the_last_ones_are_known(self) -> None:
        assert len(self.book) == len(self.model)
        for message_id in "abcde":
            assert self.book.find(delivery(message_id=message_id)) is dict(self.model).get(message_id)


TestRemembering = Remembering.TestCase
TestRemembering.settings = machine(40, steps=30)


def test_beyond_capacity_the_oldest_failure_is_forgotten() -> None:
    book = AttemptTracker(2)
    for message_id in ("a", "b", "a", "c"):
        book.remember(delivery(message_id=message_id), AttemptHistory(2))
    assert book.find(delivery(message_id="b")) is None
    for message_id in ("a", "c"):
        assert book.find(delivery(message_id=message_id)) is not None
