"""The outcome, receipt and error of a publication."""

from __future__ import annotations

import pytest

from reliable_mq.core.publisher.publication import BrokerReply, Outcome, Publication, PublicationState, Receipt
from reliable_mq.errors import (
    PublishBlocked,
    PublishNacked,
    PublishRefused,
    PublishReturned,
    PublishUnconfirmed,
    UsageError,
)
from reliable_mq.message import Message


@pytest.fixture
def publication() -> Publication:
    return Publication(Message(b"body", message_id="id-1"), "shop", "orders.new", True, 4, 12.5, None)


def test_a_new_publication_is_not_settled(publication: Publication) -> None:
    """At first there is no outcome, no error and no attempt."""
    assert publication.outcome is None
    assert publication.failure() is None
    assert (publication.sends, publication.nacks, publication.in_doubt) == (0, 0, False)
    assert publication.state is PublicationState.READY
    assert (publication.size, publication.accepted_at, publication.timeout) == (4, 12.5, None)
    assert str(publication) == "message id-1 to exchange 'shop' with routing key 'orders.new'"


def test_a_publication_without_an_id_is_called_so() -> None:
    """Messages of other clients may have none."""
    publication = Publication(Message.from_wire(b"", b"\0\0"), "", "orders", True, 0, 12.5, None)
    assert str(publication) == "message without id to exchange '' with routing key 'orders'"


def test_a_confirmed_one_has_a_receipt_and_no_error(publication: Publication) -> None:
    """The receipt has the number of attempts and the possible duplicate."""
    publication.outcome = Outcome.CONFIRMED
    publication.sends = 2
    publication.in_doubt = True
    assert publication.failure() is None
    assert publication.receipt() == Receipt("id-1", "confirmed", attempts=2, possible_duplicate=True)


@pytest.mark.parametrize("outcome", [None, *(one for one in Outcome if one is not Outcome.CONFIRMED)])
def test_only_a_confirmed_one_has_a_receipt(publication: Publication, outcome: Outcome | None) -> None:
    """A receipt says that the broker has the message."""
    publication.outcome = outcome
    with pytest.raises(UsageError, match="has no receipt, because it is not confirmed"):
        publication.receipt()


def test_a_nacked_one_says_how_often(publication: Publication) -> None:
    """The error counts the attempts, also those without an answer, and names the message."""
    publication.outcome = Outcome.NACKED
    publication.sends, publication.nacks = 4, 3
    error = publication.failure()
    assert isinstance(error, PublishNacked)
    assert (error.message_id, error.attempts) == ("id-1", 4)
    assert "message id-1 to exchange 'shop' with routing key 'orders.new' was nacked by the broker" in str(error)


def test_a_returned_one_carries_the_brokers_words(publication: Publication) -> None:
    """The error has the code and text of the return, the exchange and routing key."""
    publication.outcome = Outcome.RETURNED
    publication.reply = BrokerReply(312, "NO_ROUTE")
    error = publication.failure()
    assert isinstance(error, PublishReturned)
    assert (error.message_id, error.reply_code, error.reply_text) == ("id-1", 312, "NO_ROUTE")
    assert (error.exchange, error.routing_key) == ("shop", "orders.new")
    assert "312 NO_ROUTE; bind a queue, or" in str(error)


def test_one_that_the_default_exchange_returned_needs_a_queue() -> None:
    """No queue can be bound to the default exchange."""
    publication = Publication(Message(b"body"), "", "orders", True, 4, 12.5, None)
    publication.outcome = Outcome.RETURNED
    publication.reply = BrokerReply(312, "NO_ROUTE")
    assert "312 NO_ROUTE; declare a queue of that name, or" in str(publication.failure())


def test_one_without_a_routing_key_needs_one() -> None:
    """No queue of the default exchange has an empty name."""
    publication = Publication(Message(b"body"), "", "", True, 4, 12.5, None)
    publication.outcome = Outcome.RETURNED
    publication.reply = BrokerReply(312, "NO_ROUTE")
    assert "312 NO_ROUTE; it has no routing key: name a queue, routing_key=..., or" in str(publication.failure())


def test_a_refused_one_carries_the_channel_exception(publication: Publication) -> None:
    """The error has the code and text of the channel exception."""
    publication.outcome = Outcome.REFUSED
    publication.reply = BrokerReply(404, "NOT_FOUND - no exchange 'shop'")
    error = publication.failure()
    assert isinstance(error, PublishRefused)
    assert (error.message_id, error.reply_code) == ("id-1", 404)
    assert error.reply_text == "NOT_FOUND - no exchange 'shop'"
    assert "404 NOT_FOUND" in str(error)


@pytest.mark.parametrize(("sends", "known"), [(1, "it may have arrived"), (0, "it was never sent")])
def test_an_unknown_one_says_whether_it_may_have_arrived(publication: Publication, sends: int, known: str) -> None:
    """A sent message may have arrived, an unsent one has not."""
    publication.outcome = Outcome.UNKNOWN
    publication.sends = sends
    error = publication.failure()
    assert isinstance(error, PublishUnconfirmed)
    assert (error.message_id, error.sent, error.may_have_arrived) == ("id-1", sends > 0, sends > 0)
    assert known in str(error)


def test_one_that_a_blocked_broker_kept_from_being_sent_says_so(publication: Publication) -> None:
    """The error gives the broker's reason for blocking."""
    publication.outcome = Outcome.UNKNOWN
    publication.reply = BrokerReply(0, "low on memory")
    error = publication.failure()
    assert isinstance(error, PublishBlocked)
    assert (error.message_id, error.reason) == ("id-1", "low on memory")
    assert "low on memory" in str(error)


@pytest.mark.parametrize("outcome", [Outcome.NACKED, Outcome.RETURNED])
@pytest.mark.parametrize("in_doubt", [True, False])
def test_a_last_verdict_leaves_an_earlier_attempt_in_doubt(
    publication: Publication, outcome: Outcome, in_doubt: bool
) -> None:
    """If an earlier attempt was never answered, the message may have arrived."""
    publication.outcome = outcome
    publication.reply = BrokerReply(312, "NO_ROUTE")
    publication.in_doubt = in_doubt
    error = publication.failure()
    assert error is not None
    assert error.may_have_arrived is in_doubt
    assert ("may have arrived" in str(error)) is in_doubt


def test_errors_hold_nothing_of_the_body(publication: Publication) -> None:
    """No error text contains the body."""
    publication.reply = BrokerReply(312, "NO_ROUTE")
    for outcome in Outcome:
        publication.outcome = outcome
        assert "body" not in str(publication.failure())
