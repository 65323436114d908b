"""Admission: deliveries that are refused before a handler is called."""

from __future__ import annotations

import pytest

from reliable_mq.codec import encode_table
from reliable_mq.core import headers
from reliable_mq.core.consumer.admission import Admission
from reliable_mq.core.consumer.attempts import AttemptTracker
from reliable_mq.core.consumer.delivery import Delivery
from reliable_mq.core.statistics import ConsumerStatistics
from tests.core.deliveries import BROKEN_TABLE, delivery, failures, too_deep


class Door:
    """An admission with 5 attempts, 100 bytes of body and 200 of properties."""

    def __init__(
        self, *, max_body_bytes: int | None = 100, max_header_bytes: int | None = 200, keeps: bool = True
    ) -> None:
        self.book = AttemptTracker()
        self.statistics = ConsumerStatistics()
        self.admission = Admission(
            attempts=self.book,
            max_attempts=5,
            max_body_bytes=max_body_bytes,
            max_header_bytes=max_header_bytes,
            keeps=keeps,
            statistics=self.statistics,
        )

    def refusal(self, item: Delivery) -> str | None:
        return self.admission.check(item).refusal


def with_attempt(attempt: int, **more: object) -> Delivery:
    return delivery(headers={headers.FORMAT: 1, headers.ATTEMPT: attempt, **more})


@pytest.mark.parametrize(
    ("item", "plain"),
    [
        (delivery(headers={"tenant": "a"}), True),
        (delivery(redelivered=True), False),
        (delivery(headers={headers.POSSIBLE_DUPLICATE: True}), False),
        (delivery(body=bytes(101)), False),
        (delivery(headers={"much": "x" * 200}), False),
    ],
    ids=["first", "redelivered", "ours", "large body", "large headers"],
)
def test_what_has_to_be_looked_at(item: Delivery, plain: bool) -> None:
    assert Door().admission.plain([delivery(), item]) is plain


def test_a_first_delivery_is_admitted_as_attempt_1() -> None:
    item = delivery(headers={headers.POSSIBLE_DUPLICATE: True})
    assert Door().refusal(item) is None
    assert (item.attempt, item.redelivered) == (1, False)


def test_a_redelivery_that_never_failed_is_still_attempt_1() -> None:
    door = Door()
    item = delivery(redelivered=True)
    assert door.refusal(item) is None
    assert item.attempt == 1
    assert door.statistics.redelivered == 1


def test_an_attempt_header_sets_the_attempt_and_redelivered() -> None:
    item = with_attempt(3)
    assert Door().refusal(item) is None
    assert (item.attempt, item.redelivered) == (3, True)


@pytest.mark.parametrize("spoofed", [0, -1, 10**9, "5", 2.5, None], ids=repr)
def test_a_spoofed_attempt_counts_as_the_first(spoofed: object) -> None:
    item = delivery(headers={headers.FORMAT: 1, headers.ATTEMPT: spoofed, "x-death": [{"count": 9}]})
    assert Door().refusal(item) is None
    assert item.attempt == 1


def test_attempts_used_up_elsewhere_are_not_begun_again() -> None:
    assert Door().refusal(with_attempt(6)) == "5 of 5 attempts failed"
    assert Door().refusal(with_attempt(5)) is None


def test_a_redelivery_has_the_failures_this_process_remembers() -> None:
    door = Door()
    known = failures(3)
    door.book.remember(delivery(message_id="a"), known)
    again = delivery(2, message_id="a", redelivered=True)
    assert door.refusal(again) is None
    assert again.failures is known
    other = delivery(3, message_id="b", redelivered=True)
    assert door.refusal(other) is None
    assert other.attempt == 1
    fresh = delivery(4, message_id="a")  # not redelivered: another message with this id, or the publisher's duplicate
    assert door.refusal(fresh) is None
    assert fresh.attempt == 1


def test_of_header_and_memory_the_higher_count_holds() -> None:
    door = Door()
    door.book.remember(delivery(), failures(1))
    item = delivery(redelivered=True, headers={headers.FORMAT: 1, headers.ATTEMPT: 4})
    assert door.refusal(item) is None
    assert item.attempt == 4


def test_a_verdict_of_before_still_holds_at_the_redelivery() -> None:
    door = Door()
    known = failures(1)
    known.verdict = "no such customer"
    door.book.remember(delivery(), known)
    assert door.refusal(delivery(redelivered=True)) == "no such customer"
    assert door.statistics.rejected_unseen == 0


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (delivery(body=bytes(101)), "not handed to a handler: 101 bytes of body are above the limit of 100"),
        (delivery(headers={"much": "x" * 200}), "above the limit of 200"),
        (delivery(headers={headers.FORMAT: 2}), "headers of format 2, and 1 is the newest that is known here"),
        (delivery(headers=BROKEN_TABLE + b"", app_id=b"\x0ex-reliable-mq-"), "are broken"),
    ],
    ids=["body", "properties", "newer format", "undecodable"],
)
def test_what_is_refused_unseen_is_counted_and_says_why(item: Delivery, reason: str) -> None:
    door = Door()
    refusal = door.refusal(item)
    assert refusal is not None
    assert reason in refusal
    assert door.statistics.rejected_unseen == 1


@pytest.mark.parametrize(
    "item",
    [delivery(headers={headers.FORMAT: 2}), delivery(headers=BROKEN_TABLE, app_id=b"\x0ex-reliable-mq-")],
    ids=["newer format", "undecodable"],
)
def test_a_flawed_message_passes_where_refusing_would_lose_it(item: Delivery) -> None:
    door = Door(keeps=False)
    assert door.refusal(item) is None
    assert (item.attempt, item.flaw, door.statistics.rejected_unseen) == (1, None, 0)
    assert door.refusal(delivery(body=bytes(101))) is not None, "a limit was asked for"


def test_undecodable_foreign_headers_do_not_hide_ours() -> None:
    item = delivery(headers=too_deep(encode_table({headers.FORMAT: 1, headers.ATTEMPT: 3})))
    assert Door(max_header_bytes=None).refusal(item) is None
    assert (item.attempt, item.flaw) == (3, None)


def test_without_limits_any_size_passes() -> None:
    door = Door(max_body_bytes=None, max_header_bytes=None)
    item = delivery(body=bytes(10_000_000), headers={"much": "x" * 100_000})
    assert door.admission.plain([item])
    assert door.refusal(item) is None
