"""Confirms of a new queue, which are provisional until the queue is old enough."""

from __future__ import annotations

import pytest

from reliable_mq.core.new_queues import NewQueues
from reliable_mq.core.publisher.publication import Outcome, Publication
from reliable_mq.errors import PublishUnconfirmed
from tests.core.published import DELIVERY_TIMEOUT, FRAME_ERROR, MAX_ATTEMPTS, NO_EXCHANGE, Shell, Unencodable

GRACE = 2.0
ROUND_TRIPS, PAUSE = 7, 0.25
FIRST = 0.5  # the first round trip of a queue that was made at 0; the last one is at 2


@pytest.fixture
def shell() -> Shell:
    """A shell with a queue ``orders`` that was made at 0."""
    shell = Shell(GRACE)
    shell.new_queues.made(["orders"], 0.0)
    return shell


def answer(shell: Shell, at: float, took: float = 0.0) -> float:
    """Perform one round trip, and return the time of the answer."""
    assert shell.session.round_trip_due(at)
    shell.session.round_trip_begun(at)
    assert not shell.session.round_trip_due(at), "once at a time"
    shell.session.round_trip_ended(at + took)
    return at + took


def answer_all(shell: Shell, at: float) -> None:
    """Answer all the round trips that are needed."""
    for number in range(ROUND_TRIPS):
        answer(shell, at + number * PAUSE)


def confirmed(shell: Shell) -> list[str]:
    settled = shell.take_settled()
    assert all(one.outcome is Outcome.CONFIRMED for one in settled)
    return [one.message.body.decode() for one in settled]


def test_it_is_reported_as_confirmed_when_the_grace_is_over(shell: Shell) -> None:
    shell.accept("a", "b")
    shell.send()
    shell.ack(2, multiple=True, now=0.5)
    assert not shell.session.on_wire
    assert shell.session.outstanding == 2
    assert shell.session.next_wakeup() == FIRST
    assert not shell.session.round_trip_due(FIRST - 0.01)
    for number in range(ROUND_TRIPS - 1):
        answer(shell, FIRST + number * PAUSE)
        assert shell.session.next_wakeup() == FIRST + (number + 1) * PAUSE
    assert confirmed(shell) == []
    assert shell.session.freed_count == 0, "it keeps its place in the window"
    answer(shell, GRACE)
    assert confirmed(shell) == ["a", "b"]
    assert (shell.session.freed_count, shell.session.freed_bytes) == (2, 2)
    assert shell.session.outstanding == 0
    assert shell.session.statistics.confirmed == 2
    assert shell.session.next_wakeup() is None


def test_a_confirm_that_comes_after_the_grace_is_final_at_once(shell: Shell) -> None:
    answer_all(shell, FIRST)
    shell.accept("a", at=2.0)
    shell.send(2.0)
    shell.ack(1, now=3.0)
    assert confirmed(shell) == ["a"]
    assert shell.session.next_wakeup() is None, "nothing is to be asked"


def test_a_late_confirm_of_an_early_publish_is_not_final(shell: Shell) -> None:
    """It may have waited in the local socket, while the broker died."""
    shell.accept("a", at=0.1)
    shell.send(0.1)
    shell.ack(1, now=50.0)
    assert confirmed(shell) == []
    answer_all(shell, 50.0)
    assert confirmed(shell) == ["a"]


def test_the_time_alone_proves_nothing(shell: Shell) -> None:
    """The broker may have frozen after the confirm, and be killed before it thaws."""
    shell.accept("a")
    shell.send()
    shell.ack(1)
    shell.session.round_trip_begun(2.0)
    shell.session.tick(60.0)
    assert confirmed(shell) == []
    assert shell.session.next_wakeup() == DELIVERY_TIMEOUT, "it is asked once at a time"
    shell.lose()
    shell.session.round_trip_ended(61.0)
    assert confirmed(shell) == [], "an answer on a channel that is lost"
    shell.reopen(61.0)
    assert shell.sent(61.0) == ["a"]


def test_a_confirm_proves_nothing(shell: Shell) -> None:
    """The broker may have been frozen until then, without having saved the queue."""
    shell.accept("a")
    shell.send()
    shell.ack(1)
    shell.accept("b", at=2.0)
    shell.send(2.0)
    shell.ack(2, now=2.1)
    assert confirmed(shell) == []
    answer_all(shell, 2.1)
    assert confirmed(shell) == ["a", "b"]


def test_one_answer_proves_nothing_however_quick(shell: Shell) -> None:
    """A broker that was frozen answers before it saves the queue."""
    shell.accept("a")
    shell.send()
    shell.ack(1)
    at = answer(shell, FIRST, took=5.0)
    for _ in range(ROUND_TRIPS - 2):
        assert not shell.session.round_trip_due(at + 0.24)
        at = answer(shell, at + PAUSE)
    assert confirmed(shell) == []
    assert answer(shell, at + PAUSE, took=0.1) == 7.1, "it has run for a second and a half since it thawed"
    assert confirmed(shell) == ["a"]


def test_a_broker_that_is_always_slow_confirms_too(shell: Shell) -> None:
    shell.accept("a")
    shell.send()
    shell.ack(1)
    at = FIRST
    for _ in range(ROUND_TRIPS):
        assert confirmed(shell) == []
        at = answer(shell, at, took=3.0) + PAUSE
    assert confirmed(shell) == ["a"]


def test_a_queue_that_is_made_meanwhile_begins_anew(shell: Shell) -> None:
    for number in range(3):
        answer(shell, FIRST + number * PAUSE)
    shell.new_queues.made(["orders"], 1.5)
    shell.accept("a", at=1.5)
    shell.send(1.5)
    shell.ack(1, now=1.5)
    assert not shell.session.round_trip_due(1.99)
    for number in range(ROUND_TRIPS):
        assert confirmed(shell) == []
        answer(shell, 2.0 + number * PAUSE)
    assert confirmed(shell) == ["a"]


def test_a_broker_that_blocks_publishing_is_not_asked(shell: Shell) -> None:
    """A blocked connection is not read."""
    shell.accept("a")
    shell.send()
    shell.ack(1)
    shell.session.blocked("low on memory")
    assert not shell.session.round_trip_due(2.0)
    shell.session.unblocked(3.0)
    answer_all(shell, 3.0)
    assert confirmed(shell) == ["a"]


def test_it_is_asked_where_nothing_is_provisional_too(shell: Shell) -> None:
    """So the queue is known to be old if the connection is lost later."""
    assert shell.session.next_wakeup() == FIRST
    answer_all(shell, FIRST)
    assert shell.session.proven == GRACE
    assert shell.session.next_wakeup() is None
    shell.lose()
    shell.reopen()
    assert shell.session.proven == GRACE, "it is old for good"
    shell.accept("a")
    shell.send()
    shell.ack(1)
    assert confirmed(shell) == ["a"]
    shell.lose()
    shell.new_queues = NewQueues()
    shell.reopen()
    assert shell.session.proven == float("-inf"), "of another broker nothing is known"


def test_confirms_of_other_queues_are_final_at_once(shell: Shell) -> None:
    shell.accept("a")
    shell.accept("b", routing_key="old")
    shell.send()
    shell.ack(2, multiple=True)
    assert confirmed(shell) == ["b"]
    answer_all(shell, 2.0)
    assert confirmed(shell) == ["a"]


@pytest.mark.parametrize("header", ["CC", "BCC"])
def test_a_message_that_is_copied_may_be_in_any_new_queue(shell: Shell, header: str) -> None:
    shell.accept("a", routing_key="old", headers={header: ["orders"]})
    shell.accept("b", routing_key="old", headers={"other": "header"})
    shell.send()
    shell.ack(2, multiple=True)
    assert confirmed(shell) == ["b"]


def test_a_message_through_an_exchange_may_be_in_any_new_queue(shell: Shell) -> None:
    shell.accept("a", exchange="events", routing_key="order.placed")
    shell.send()
    shell.ack(1)
    assert confirmed(shell) == []
    answer_all(shell, 2.0)
    assert confirmed(shell) == ["a"]


def test_it_is_published_again_where_the_connection_is_lost(shell: Shell) -> None:
    """They come first, in the order of publishing, whichever was confirmed first."""
    shell.accept("a", "b", "c", "d")
    shell.send()
    shell.ack(3)
    shell.ack(1)
    shell.accept("e")
    shell.lose()
    shell.reopen()
    again = shell.send()
    assert [one.body for one in again] == [b"a", b"b", b"c", b"d", b"e"]
    assert [one.possible_duplicate for one in again] == [True, True, True, True, False]
    assert shell.session.statistics.in_doubt == 4
    answer_all(shell, 50.0)
    assert confirmed(shell) == [], "its first confirm is void"
    shell.ack(5, multiple=True, now=52.0)
    assert confirmed(shell) == ["a", "b", "c", "d", "e"]
    assert shell.session.freed_count == 5


def test_it_stays_where_it_is_while_only_the_channel_is_lost(shell: Shell) -> None:
    """The broker is still running, and has the message."""
    shell.accept("a", "b")
    shell.send()
    shell.ack(1)
    shell.lose(connection=False)
    assert not shell.session.round_trip_due(3.0), (
        "whether the broker lives is not known before there is another channel"
    )
    shell.reopen(3.0)
    assert shell.sent(3.0) == ["b"]
    answer_all(shell, 3.0)
    assert confirmed(shell) == ["a"]


@pytest.mark.parametrize("late", ["told", "found out"])
def test_a_connection_lost_after_its_channel_means_republishing(shell: Shell, late: str) -> None:
    shell.accept("a", "b")
    shell.send()
    shell.ack(1)
    shell.lose(connection=False)
    if late == "told":
        shell.session.channel_lost(shell.generation, None, connection=True)
    else:
        shell.session.connection_replaced()
    shell.reopen()
    assert shell.sent() == ["a", "b"]


def test_a_channel_that_the_broker_closes_blames_it_for_nothing(shell: Shell) -> None:
    shell.accept("a", "culprit")
    shell.send()
    shell.ack(1)
    shell.lose(NO_EXCHANGE, connection=False)
    assert [one.outcome for one in shell.take_settled()] == [Outcome.REFUSED], "the culprit is alone"
    shell.reopen()
    assert shell.sent() == []
    answer_all(shell, 2.0)
    assert confirmed(shell) == ["a"]


def test_a_frame_error_isolates_its_culprit_and_repeats_the_rest(shell: Shell) -> None:
    shell.accept("a", "b", "culprit")
    shell.send()
    shell.ack(1)
    shell.lose(FRAME_ERROR)
    shell.reopen()
    assert shell.sent() == ["a"], "innocent: it was confirmed"
    shell.ack(1)
    assert shell.sent() == ["b"], "a confirm frees the next group, though it is provisional"
    shell.ack(2)
    assert shell.sent() == ["culprit"]
    shell.lose(FRAME_ERROR)
    assert [one.outcome for one in shell.take_settled()] == [Outcome.REFUSED]
    shell.reopen()
    assert shell.sent() == ["a", "b"]


def test_a_lone_culprit_is_refused_and_the_others_are_resent(shell: Shell) -> None:
    shell.accept("a", "culprit")
    shell.send()
    shell.ack(1)
    shell.lose(FRAME_ERROR)
    assert [one.outcome for one in shell.take_settled()] == [Outcome.REFUSED]
    shell.reopen()
    assert shell.sent() == ["a"]


def test_a_returned_or_nacked_message_is_not_provisional(shell: Shell) -> None:
    shell.accept("returned", "nacked")
    shell.send()
    shell.return_("id of returned")
    shell.ack(1)
    assert [one.outcome for one in shell.take_settled()] == [Outcome.RETURNED]
    for attempt in range(1, MAX_ATTEMPTS + 1):
        shell.nack(1 + attempt)
        shell.sent(10.0 * attempt)
    assert [one.outcome for one in shell.take_settled()] == [Outcome.NACKED]


def test_another_message_with_its_id_waits_until_it_is_final(shell: Shell) -> None:
    shell.accept("a", message_id="one")
    shell.accept("b", message_id="one")
    assert shell.sent() == ["a"]
    shell.ack(1)
    assert shell.sent() == []
    answer_all(shell, 2.0)
    assert shell.sent(4.0) == ["b"]


def error(publication: Publication) -> PublishUnconfirmed:
    found = publication.failure()
    assert isinstance(found, PublishUnconfirmed)
    return found


def test_a_deadline_within_the_grace_says_why(shell: Shell) -> None:
    (publication,) = shell.accept("a", timeout=1.0)
    shell.send()
    shell.ack(1)
    shell.session.tick(1.0)
    assert shell.take_settled() == [publication]
    assert error(publication).sent
    assert "new_queue_grace" in str(error(publication))
    assert shell.session.freed_count == 1
    assert shell.session.statistics.unknown == 1
    answer_all(shell, 2.0)
    assert shell.take_settled() == []
    assert shell.session.statistics.confirmed == 0


def test_a_deadline_after_the_grace_is_kept(shell: Shell) -> None:
    shell.accept("a", timeout=2.1)
    shell.send()
    shell.ack(1)
    answer_all(shell, FIRST)
    assert confirmed(shell) == ["a"]


def test_what_is_given_up_is_not_published_again(shell: Shell) -> None:
    shell.accept("a", "b")
    shell.send()
    shell.ack(2, multiple=True)
    shell.session.abandon_all()
    assert [one.outcome for one in shell.take_settled()] == [Outcome.UNKNOWN] * 2
    shell.lose()
    shell.reopen()
    assert shell.sent() == []
    assert shell.session.freed_count == 2


def test_a_late_confirm_of_what_was_given_up_frees_its_place(shell: Shell) -> None:
    (publication,) = shell.accept("a", timeout=5.0)
    shell.send()
    shell.session.tick(5.0)
    assert shell.session.freed_count == 0
    shell.ack(1)
    assert shell.session.freed_count == 1
    assert "new_queue_grace" not in str(error(publication))


def test_it_owes_the_broker_nothing(shell: Shell) -> None:
    shell.accept("a")
    shell.send()
    shell.ack(1)
    assert not shell.session.channel_in_doubt(1000.0)


def test_a_stale_or_unknown_confirm_changes_nothing(shell: Shell) -> None:
    shell.accept("a")
    shell.send()
    shell.ack(2)
    shell.session.acked(shell.generation - 1, 1, False, 0.0)
    assert shell.session.stale_confirms == 2
    assert shell.session.on_wire == 1


def test_with_a_grace_of_0_every_confirm_is_final() -> None:
    shell = Shell(0.0)
    shell.new_queues.begin(["orders"])
    shell.accept("a")
    shell.send()
    shell.ack(1)
    assert confirmed(shell) == ["a"]


def test_an_unreadable_message_may_be_in_any_new_queue(shell: Shell) -> None:
    """Its headers are unknown."""
    message = Unencodable.after(1, b"a", "id of a")
    shell.session.accept([Publication(message, "", "old", True, 1, 0.0, None)])
    assert shell.sent() == ["a"]
    shell.ack(1)
    assert confirmed(shell) == []
    answer_all(shell, 2.0)
    assert confirmed(shell) == ["a"]
