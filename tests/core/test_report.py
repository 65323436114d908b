"""The outcomes of many publishes, in one value or in one error."""

from __future__ import annotations

import pytest

from reliable_mq.core.publisher.publication import PublishReport, summary
from reliable_mq.errors import PublishError, PublishNacked
from reliable_mq.message import Message


def errors(count: int) -> list[PublishError]:
    return [PublishNacked(f"message {number}", message_id=str(number)) for number in range(count)]


def test_a_report_without_failures_raises_nothing() -> None:
    report = PublishReport(3)
    assert report.ok
    report.raise_for_failures()


def test_one_failure_is_raised_as_it_is() -> None:
    (error,) = errors(1)
    report = PublishReport(3, ((Message(b"x"), error),))
    assert not report.ok
    with pytest.raises(PublishNacked) as caught:
        report.raise_for_failures()
    assert caught.value is error


def test_many_failures_make_one_error_with_the_first_hundred() -> None:
    error = summary(errors(150), 150)
    assert str(error).startswith("150 messages were not confirmed; one of them: message 0")
    assert error.message_id == "0"
    assert [one.message_id for one in error.failures] == [str(number) for number in range(100)]


def test_failures_that_are_not_known_any_more_are_counted() -> None:
    assert "2 messages" in str(summary([], 2))


def test_messages_may_have_arrived_if_one_of_them_may() -> None:
    """Nothing is known of those that are not known any more."""
    in_doubt = errors(150)
    in_doubt[-1].may_have_arrived = True
    assert summary(in_doubt, 150).may_have_arrived
    assert not summary(errors(150), 150).may_have_arrived
    assert summary(errors(100), 150).may_have_arrived
    assert summary([], 2).may_have_arrived
