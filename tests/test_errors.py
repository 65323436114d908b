"""The tree of errors matches its docstring, and errors can be copied and pickled."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from reliable_mq import errors

EXAMPLES: list[errors.ReliableMQError] = [
    errors.ReliableMQError("m"),
    errors.ConfigurationError("m"),
    errors.UsageError("m"),
    errors.BrokerUnavailable("m", permanent=True),
    errors.TopologyMismatch("m", kind="queue", name="q", argument="durable", declared="true", existing="false"),
    errors.TopologyMismatch("m", kind="queue", name="q", differences=[errors.Difference("x-a", "1", "2")]),
    errors.PublishError("m", message_id="1", failures=[errors.PublishNacked("n", message_id="2", attempts=3)]),
    errors.PublishNacked("m", message_id="1", attempts=3),
    errors.PublishReturned("m", message_id="1", reply_code=312, reply_text="NO_ROUTE", exchange="e", routing_key="k"),
    errors.PublishRefused("m", message_id="1", reply_code=404, reply_text="NOT_FOUND"),
    errors.PublishUnconfirmed("m", message_id="1", sent=False),
    errors.PublishBlocked("m", message_id="1", reason="low on memory"),
    errors.PublishDisconnected("m", message_id="1", reason="no heartbeat"),
    errors.OutboxError("m", message_id="id"),
    errors.LabError("m"),
    errors.ConsumeError("m"),
    errors.ConsumerCancelled("m"),
    errors.StaleDelivery("m"),
    errors.IdempotencyStoreError("m"),
]


def test_there_is_an_example_of_every_error() -> None:
    """The list above is complete, so the tests below cover every error."""
    assert {type(error).__name__ for error in EXAMPLES} == set(errors.__all__)


@pytest.mark.parametrize("duplicate", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_can_be_copied_and_pickled(error: errors.ReliableMQError, duplicate: object) -> None:
    """A worker process can send any error to its parent without loss."""
    assert callable(duplicate)
    again = duplicate(error)
    assert type(again) is type(error)
    assert again is not error
    assert str(again) == str(error)
    for name, value in vars(error).items():
        if name != "failures":
            assert getattr(again, name) == value
    if isinstance(error, errors.PublishError):
        assert [str(one) for one in again.failures] == [str(one) for one in error.failures]


def test_a_copy_keeps_the_cause_and_no_traceback() -> None:
    """An error that several callers raise is copied for each of them."""
    cause = ValueError("of a driver")
    with pytest.raises(errors.BrokerUnavailable) as caught:
        raise errors.BrokerUnavailable("m") from cause
    again = copy.copy(caught.value)
    assert (again.__cause__, again.__traceback__) == (cause, None)
    assert copy.copy(errors.BrokerUnavailable("m")).__suppress_context__ is False


def test_every_error_is_drawn_in_the_tree() -> None:
    """The docstring of the module names each of them."""
    drawn = inspect.getdoc(errors) or ""
    assert [name for name in errors.__all__ if name not in drawn] == []


def test_the_text_of_an_error_has_nothing_that_does_not_print() -> None:
    """The text may come from a broker, and ends in logs and on terminals."""
    error = errors.BrokerUnavailable("refused: é\n\x1b[2J\udcff")
    assert str(error) == "refused: é\\n\\x1b[2J\\udcff"
    assert str(errors.BrokerUnavailable("refused: é")) == "refused: é"


@pytest.mark.parametrize(("may_have_arrived", "said"), [(False, "was not stored"), (True, "may not be stored")])
def test_an_outbox_error_says_whether_it_is_certain(may_have_arrived: bool, said: str) -> None:
    error = errors.OutboxError("writing failed")
    error.may_have_arrived = may_have_arrived
    assert str(error.of("message m1", "m1")) == f"message m1 {said}: writing failed"
