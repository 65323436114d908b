"""Provisional confirms without a session.

The tests check which publishes are kept, the order of the next attempt, and when the broker is asked.
"""

from __future__ import annotations

from math import inf

import pytest

from reliable_mq import Message
from reliable_mq.core.new_queues import NewQueues
from reliable_mq.core.publisher.provisional import ProvisionalConfirms
from reliable_mq.core.publisher.publication import BrokerReply, Publication, PublicationState

GRACE = 2.0
FIRST = GRACE / 4


@pytest.fixture
def confirms() -> ProvisionalConfirms[Publication]:
    """Return provisional confirms with a queue ``orders`` that was made at 0."""
    confirms: ProvisionalConfirms[Publication] = ProvisionalConfirms(GRACE)
    new_queues = NewQueues()
    new_queues.made(["orders"], 0.0)
    confirms.channel_opened(new_queues)
    return confirms


def on_wire(routing_key: str = "orders", *, tag: int = 1) -> Publication:
    publication = Publication(Message(b""), "", routing_key, True, 0, 0.0, None)
    publication.state = PublicationState.ON_WIRE
    publication.tag = tag
    return publication


def prove(confirms: ProvisionalConfirms[Publication]) -> list[Publication]:
    """Answer every round trip that is wanted."""
    final: list[Publication] = []
    while (at := confirms.round_trip_at) < inf:
        confirms.round_trip_begun(at)
        final += confirms.round_trip_ended(at)
    return final


def test_it_keeps_what_may_be_in_a_new_queue(confirms: ProvisionalConfirms[Publication]) -> None:
    new, old, returned = on_wire(), on_wire("old"), on_wire()
    returned.reply = BrokerReply(312, "NO_ROUTE")
    assert confirms.acked(1, [new, old, returned], 0.1) == [old, returned]
    assert len(confirms) == 1
    assert new.state is PublicationState.PROVISIONAL
    assert confirms.round_trip_at == FIRST
    assert prove(confirms) == [new]
    assert confirms.proven == GRACE
    assert not len(confirms)


def test_what_was_given_up_is_not_final_later(confirms: ProvisionalConfirms[Publication]) -> None:
    first, second = on_wire(), on_wire()
    confirms.acked(1, [first, second], 0.1)
    confirms.given_up(first)
    assert prove(confirms) == [second]


def test_a_lost_connection_returns_all_in_their_old_order(confirms: ProvisionalConfirms[Publication]) -> None:
    first, second, third = on_wire(tag=1), on_wire(tag=2), on_wire(tag=3)
    confirms.acked(1, [third], 0.1)
    confirms.acked(1, [first], 0.1)
    assert confirms.connection_lost([second], 1) == [first, second, third]
    assert (first.in_doubt, second.in_doubt, third.in_doubt) == (True, False, True)
    assert not len(confirms)
    assert prove(confirms) == []


def test_an_answer_on_a_lost_channel_counts_for_nothing(confirms: ProvisionalConfirms[Publication]) -> None:
    confirms.round_trip_begun(FIRST)
    assert confirms.round_trip_at == inf, "one at a time"
    confirms.channel_lost()
    assert confirms.round_trip_ended(FIRST) == []
    assert confirms.round_trip_at == FIRST


def test_what_is_proven_holds_for_the_same_broker_only(confirms: ProvisionalConfirms[Publication]) -> None:
    prove(confirms)
    confirms.channel_opened(confirms.new_queues)
    assert confirms.proven == GRACE
    confirms.channel_opened(NewQueues())
    assert confirms.proven == -inf


def test_what_a_node_has_proven_does_not_hold_for_another(confirms: ProvisionalConfirms[Publication]) -> None:
    """Nodes without a cluster name share their new queues."""
    new_queues = confirms.new_queues
    confirms.channel_opened(new_queues, "rabbit@one")
    prove(confirms)
    assert confirms.proven == GRACE
    confirms.channel_opened(new_queues, "rabbit@two")
    assert confirms.proven == -inf
    confirms.channel_opened(new_queues, "rabbit@one")
    assert confirms.proven == GRACE


def test_what_one_publisher_has_proven_holds_for_the_next(confirms: ProvisionalConfirms[Publication]) -> None:
    """The proof only holds for the same broker and the proven grace."""
    confirms.channel_opened(confirms.new_queues, "rabbit@one")
    prove(confirms)

    def final(grace: float, broker: str) -> bool:
        following: ProvisionalConfirms[Publication] = ProvisionalConfirms(grace)
        following.channel_opened(confirms.new_queues, broker)
        return following.acked(1, [publication := on_wire()], GRACE) == [publication]

    assert final(GRACE, "rabbit@one")
    assert not final(2 * GRACE, "rabbit@one")
    assert not final(GRACE, "rabbit@two")
    assert not final(GRACE, "")


def test_a_broker_without_a_name_is_proven_for_one_publisher(confirms: ProvisionalConfirms[Publication]) -> None:
    """Another broker may report no name either."""
    prove(confirms)
    assert confirms.proven == GRACE
    assert confirms.new_queues.proven("", GRACE) == -inf
