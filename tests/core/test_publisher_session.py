"""The publisher session, by examples: the outcome of a publish in each case."""

from __future__ import annotations

import random
from time import process_time
from typing import TYPE_CHECKING

import pytest

from reliable_mq.core.new_queues import NewQueues
from reliable_mq.core.publisher import channel_trust
from reliable_mq.core.publisher import session as module
from reliable_mq.core.publisher.publication import BrokerReply, Outcome, Publication
from reliable_mq.errors import PublishBlocked, PublishRefused, PublishReturned
from reliable_mq.message import Message
from tests.core.published import (
    CONFIRM_TIMEOUT,
    DELAYS,
    DELIVERY_TIMEOUT,
    FORCED,
    FRAME_ERROR,
    FRAME_MAX,
    MAX_ATTEMPTS,
    NO_EXCHANGE,
    NO_ROUTE,
    UNKNOWN_ERROR,
    Published,
    Shell,
    Unencodable,
    new_session,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@pytest.fixture
def shell() -> Shell:
    return Shell()


def outcomes(publications: Iterable[Publication]) -> list[Outcome | None]:
    return [publication.outcome for publication in publications]


def test_a_publish_is_confirmed_by_its_ack_and_not_before(shell: Shell) -> None:
    """Only the ack settles it and releases its place."""
    assert shell.session.is_empty
    (publication,) = shell.accept("body")
    assert shell.session.outstanding == 1
    assert not shell.session.is_empty
    (published,) = shell.send()
    assert published == Published(1, "", "orders", True, "id of body", False, True, b"body")
    assert shell.take_settled() == []
    shell.ack(1, now=0.5)
    assert shell.take_settled() == [publication]
    assert publication.outcome is Outcome.CONFIRMED
    assert publication.receipt().attempts == 1
    assert not publication.receipt().possible_duplicate
    assert (shell.session.freed_count, shell.session.freed_bytes) == (1, 4)
    assert shell.session.oldest_accepted_at is None
    assert (shell.session.outstanding, shell.session.next_wakeup()) == (0, None)


@pytest.mark.parametrize("acked", [True, False])
def test_a_return_beats_its_confirm(shell: Shell, acked: bool) -> None:
    """The error has the code and text of the return, even if the broker acks."""
    first, second = shell.accept("unroutable", "routable")
    shell.send()
    shell.return_("id of unroutable")
    assert first.outcome is None
    (shell.ack if acked else shell.nack)(1)
    shell.ack(2)
    assert outcomes([first, second]) == [Outcome.RETURNED, Outcome.CONFIRMED]
    error = first.failure()
    assert isinstance(error, PublishReturned)
    assert (error.reply_code, error.reply_text) == NO_ROUTE


def test_with_equal_message_ids_the_right_one_is_returned(shell: Shell) -> None:
    """The second publish with an id waits for the first confirm.

    So a return can only mean one of them.
    """
    routable, unroutable, third = shell.accept("routable", "unroutable", "third", message_id="same")
    assert shell.sent() == ["routable"]
    assert shell.sent() == []
    shell.ack(1)
    assert shell.sent() == ["unroutable"]
    shell.return_("same")
    shell.ack(2)
    assert shell.sent() == ["third"]
    shell.ack(3)
    assert outcomes([routable, unroutable, third]) == [Outcome.CONFIRMED, Outcome.RETURNED, Outcome.CONFIRMED]


def test_a_message_without_an_id_is_matched_with_its_return(shell: Shell) -> None:
    """Messages without a message_id go one at a time.

    So a return can only mean one of them.
    """
    publications = []
    for body in (b"unroutable", b"routable"):
        message = Message._from_wire(body, Message(body).encoded_properties, message_id="")
        publications.append(Publication(message, "", "orders", True, len(body), 0.0, None))
    shell.session.accept(publications)
    assert shell.sent() == ["unroutable"]
    shell.return_(None)
    shell.ack(1)
    assert shell.sent() == ["routable"]
    shell.ack(2)
    assert outcomes(publications) == [Outcome.RETURNED, Outcome.CONFIRMED]


def test_a_message_whose_id_has_escaped_bytes_is_returned(shell: Shell) -> None:
    """The broker returns an id as text if its bytes are UTF-8."""
    (publication,) = shell.accept("body", message_id="rechnung-é".encode().decode("ascii", "surrogateescape"))
    (published,) = shell.send()
    assert published.message_id == "rechnung-é"
    shell.return_(published.message_id)
    shell.ack(1)
    assert publication.outcome is Outcome.RETURNED


def test_a_return_that_fits_nothing_is_counted(shell: Shell) -> None:
    """The message may be unknown, not on the wire, or of an older channel."""
    (publication,) = shell.accept("body")
    shell.return_("id of body")
    shell.return_("unknown")
    shell.send()
    shell.session.returned(shell.generation - 1, *NO_ROUTE, "id of body")
    shell.return_(None)
    shell.ack(1)
    assert publication.outcome is Outcome.CONFIRMED
    assert shell.session.statistics.stray_returns == 4


def test_after_a_loss_unsettled_publishes_go_first_and_in_order(shell: Shell) -> None:
    """Only unsettled publishes go out again, marked as possible duplicates."""
    a, b, c = shell.accept("a", "b", "c")
    shell.send()
    shell.ack(2)
    shell.accept("d")
    shell.lose()
    shell.accept("e")
    assert shell.send() == []
    shell.reopen()
    again = shell.send()
    assert [(one.body, one.possible_duplicate) for one in again] == [
        (b"a", True),
        (b"c", True),
        (b"d", False),
        (b"e", False),
    ]
    assert [one.message_id for one in again] == ["id of a", "id of c", "id of d", "id of e"]
    shell.ack(4, multiple=True)
    assert shell.session.outstanding == 0
    assert [one.receipt().possible_duplicate for one in (a, b, c)] == [True, False, True]
    assert [one.receipt().attempts for one in (a, b, c)] == [2, 1, 2]


def test_a_late_confirm_of_an_old_channel_settles_nothing(shell: Shell) -> None:
    """Sequence numbers start again on a new channel."""
    (publication,) = shell.accept("body")
    shell.send()
    shell.lose()
    shell.reopen()
    shell.send()
    shell.session.acked(shell.generation - 1, 1, False, 0.0)
    assert publication.outcome is None
    assert shell.session.stale_confirms == 1
    shell.session.channel_lost(shell.generation - 1, NO_EXCHANGE, connection=False)
    assert shell.session.on_wire == 1


def test_a_session_continues_the_counts_of_another_one(shell: Shell) -> None:
    shell.accept("a")
    shell.send()
    shell.ack(1)
    shell.ack(1)
    following = Shell()
    following.session.continue_counts(shell.session)
    following.accept("b")
    following.send()
    following.ack(1)
    assert (following.session.statistics.confirmed, following.session.stale_confirms) == (2, 1)


def test_a_return_on_a_lost_channel_does_not_fail_the_retry(shell: Shell) -> None:
    """The message is routable on the next channel, so it is confirmed."""
    (publication,) = shell.accept("body")
    shell.send()
    shell.return_("id of body")
    shell.lose()
    shell.reopen()
    shell.send()
    shell.ack(1)
    assert publication.outcome is Outcome.CONFIRMED


def test_a_nacked_publish_is_tried_again_after_its_delay(shell: Shell) -> None:
    """A nack is a known outcome: the next attempt is no possible duplicate."""
    (publication,) = shell.accept("body")
    shell.send()
    shell.nack(1)
    assert shell.session.next_wakeup() == DELAYS[0]
    assert shell.sent(now=0.9) == []
    (published,) = shell.send(now=1.0)
    assert not published.possible_duplicate
    shell.ack(2)
    assert publication.receipt().attempts == 2


def test_a_nack_is_not_retried_past_the_publish_deadline(shell: Shell) -> None:
    (publication,) = shell.accept("body", timeout=DELAYS[0] / 2)
    shell.send()
    shell.nack(1)
    assert shell.sent(now=DELAYS[0] / 2) == []
    assert publication.outcome is Outcome.NACKED
    assert shell.sent(now=DELAYS[0]) == []
    assert shell.session.next_wakeup() is None


def test_a_publish_is_reported_nacked_after_the_last_attempt(shell: Shell) -> None:
    """The policy limits the number of attempts."""
    (publication,) = shell.accept("body")
    for attempt, now in enumerate((0.0, 1.0, 3.0), 1):
        assert shell.sent(now) == ["body"]
        shell.nack(attempt, now=now)
    assert publication.outcome is Outcome.NACKED
    assert publication.nacks == MAX_ATTEMPTS
    assert shell.session.freed_count == 1


@pytest.mark.parametrize(("reply", "closes"), [(NO_EXCHANGE, 1), (UNKNOWN_ERROR, 3)])
def test_a_channel_exception_fails_its_culprit_alone(shell: Shell, reply: BrokerReply, closes: int) -> None:
    """One publish of 100 goes to a missing exchange.

    It is refused with the broker's reply, and the 99 others are confirmed.
    """
    good = shell.accept(*(f"good {number}" for number in range(60)))
    (culprit,) = shell.accept("culprit", exchange="missing")
    good += shell.accept(*(f"good {number}" for number in range(60, 99)))
    closed = 0
    while shell.session.outstanding:
        published = shell.sent()
        assert published, "stands still"
        if "culprit" in published:
            closed += 1
            shell.lose(reply, connection=False)
            shell.reopen()
        else:
            shell.ack(0, multiple=True)
    assert set(outcomes(good)) == {Outcome.CONFIRMED}
    error = culprit.failure()
    assert isinstance(error, PublishRefused)
    assert (error.reply_code, error.reply_text) == reply
    assert closed == closes
    assert len(shell.take_settled()) == shell.session.freed_count == 100


def test_what_came_after_the_culprit_is_in_no_doubt(shell: Shell) -> None:
    """The broker processes a channel in order.

    Only the publishes before the culprit are published again as possible duplicates.
    """
    shell.accept("a", "b")
    (culprit,) = shell.accept("culprit", exchange="missing")
    shell.accept("c", "d")
    shell.send()
    shell.lose(NO_EXCHANGE, connection=False)
    error = culprit.failure()
    assert error is not None
    assert not error.may_have_arrived
    assert shell.session.statistics.in_doubt == 2
    shell.reopen()
    assert [(one.body, one.possible_duplicate) for one in shell.send()] == [(b"a", True), (b"b", True)]
    shell.ack(2, multiple=True)
    assert [(one.body, one.possible_duplicate) for one in shell.send()] == [(b"c", False), (b"d", False)]


def test_publishes_to_one_missing_exchange_are_refused_together(shell: Shell) -> None:
    """The first error may mean any of them.

    The second one means all, because only they were on the channel.
    """
    shell.accept("a")
    culprits = shell.accept("x", exchange="missing")
    shell.accept("b")
    culprits += shell.accept("y", "z", exchange="missing")
    shell.send()
    shell.lose(NO_EXCHANGE, connection=False)
    shell.reopen()
    for group in ["a"], ["b"]:
        assert shell.sent() == group
        shell.ack(0, multiple=True)
    assert shell.sent(limit=1) == ["x"]
    shell.lose(NO_EXCHANGE, connection=False)
    assert set(outcomes(culprits)) == {Outcome.REFUSED}
    shell.reopen()
    assert shell.sent() == []
    assert shell.session.outstanding == shell.session.on_wire == 0
    assert [error.may_have_arrived for one in culprits if (error := one.failure())] == [True, True, False]


def test_those_to_an_exchange_that_is_back_are_confirmed(shell: Shell) -> None:
    """Publishes that the error may mean are published again before they are refused."""
    publishes = shell.accept("x", "y", exchange="missing")
    shell.send()
    shell.lose(NO_EXCHANGE, connection=False)
    shell.reopen()
    assert shell.sent() == ["x", "y"]
    shell.ack(2, multiple=True)
    assert set(outcomes(publishes)) == {Outcome.CONFIRMED}


def test_no_newer_publish_is_sent_during_isolation(shell: Shell) -> None:
    """Only the probed group is on the channel."""
    shell.accept("a", "culprit")
    shell.send()
    shell.lose(UNKNOWN_ERROR, connection=False)
    shell.reopen()
    shell.accept("new")
    assert shell.sent() == ["a"]
    assert shell.sent() == []
    shell.ack(1)
    assert shell.sent() == ["culprit"]
    shell.lose(UNKNOWN_ERROR, connection=False)
    shell.reopen()
    assert shell.sent() == ["new"]


def test_a_group_is_written_bit_by_bit(shell: Shell) -> None:
    """Unwritten publishes of a group are probed after the written ones."""
    shell.accept(*"abcdefghi")
    shell.send()
    shell.lose(UNKNOWN_ERROR, connection=False)
    shell.reopen()
    assert shell.sent(limit=1) == ["a"]
    assert shell.sent(limit=1) == ["b"]
    shell.lose(UNKNOWN_ERROR, connection=False)
    shell.reopen()
    probed = []
    while group := shell.sent():
        probed.append("".join(group))
        shell.ack(len(shell.session.settled) or 1, multiple=True)
        shell.ack(0, multiple=True)
    assert probed == ["a", "b", "c", "def", "ghi"]


def test_a_connection_lost_during_an_isolation_convicts_nobody(shell: Shell) -> None:
    """An interrupted group, even of one publish, is probed again."""
    (a, b) = shell.accept("a", "b")
    shell.send()
    shell.lose(UNKNOWN_ERROR, connection=False)
    shell.reopen()
    assert shell.sent() == ["a"]
    shell.lose(FORCED)
    shell.reopen()
    assert shell.sent() == ["a"]
    shell.ack(1)
    assert shell.sent() == ["b"]
    shell.ack(2)
    assert outcomes([a, b]) == [Outcome.CONFIRMED, Outcome.CONFIRMED]


def test_a_group_that_is_not_confirmed_delays_others_once(shell: Shell) -> None:
    """The broker has read the group and closed no channel over it."""
    (stuck,) = shell.accept("stuck", routing_key="no leader")
    (culprit,) = shell.accept("culprit", exchange="missing")
    (other,) = shell.accept("other")
    shell.send()
    shell.lose(NO_EXCHANGE, connection=False)
    shell.reopen()
    assert shell.sent() == ["stuck"]
    (new,) = shell.accept("new")
    assert shell.session.channel_in_doubt(CONFIRM_TIMEOUT)
    shell.session.abandon_overdue()
    shell.lose()
    shell.reopen(now=CONFIRM_TIMEOUT)
    assert shell.sent(now=CONFIRM_TIMEOUT) == ["other"]
    shell.ack(1, now=CONFIRM_TIMEOUT)
    assert shell.sent(now=CONFIRM_TIMEOUT) == ["stuck", "new"]
    shell.ack(3, now=CONFIRM_TIMEOUT)
    assert outcomes([stuck, culprit, other, new]) == [None, Outcome.REFUSED, Outcome.CONFIRMED, Outcome.CONFIRMED]


def test_groups_that_are_not_confirmed_stay_in_their_order(shell: Shell) -> None:
    """A group that was not written as a whole keeps the rest as a group."""
    shell.accept(*"abcdefghi")
    shell.send()
    shell.lose(UNKNOWN_ERROR, connection=False)
    shell.reopen()
    for written, limit in (("a", 1), ("bc", 1_000_000), ("d", 1)):
        assert "".join(shell.sent(limit=limit)) == written
        shell.session.abandon_overdue()
        shell.lose()
        shell.reopen()
    assert shell.sent() == ["e", "f"]
    shell.lose(UNKNOWN_ERROR, connection=False)
    shell.reopen()
    for tag, suspect in enumerate("ef", 1):
        assert shell.sent() == [suspect]
        shell.ack(tag)
    assert shell.sent() == ["g", "h", "i"]
    shell.ack(5, multiple=True)
    assert shell.sent() == ["a", "b", "c", "d"]


def test_a_publish_that_was_given_up_is_a_suspect_too(shell: Shell) -> None:
    """The channel closes over two publishes, one of them past its deadline.

    The other one is not convicted.
    """
    (given_up,) = shell.accept("given up", timeout=5.0)
    (innocent,) = shell.accept("innocent")
    shell.send()
    shell.session.tick(5.0)
    shell.lose(UNKNOWN_ERROR, connection=False)
    assert innocent.outcome is None
    shell.reopen()
    assert shell.sent() == ["innocent"]
    shell.ack(1)
    assert outcomes([given_up, innocent]) == [Outcome.UNKNOWN, Outcome.CONFIRMED]


def test_a_channel_closed_over_an_abandoned_publish_refuses_none(shell: Shell) -> None:
    """A settled publish keeps its outcome, even if it is the culprit."""
    (given_up,) = shell.accept("given up", timeout=5.0)
    shell.send()
    shell.session.tick(5.0)
    shell.lose(NO_EXCHANGE, connection=False)
    assert given_up.outcome is Outcome.UNKNOWN
    assert len(shell.take_settled()) == shell.session.freed_count == 1


def test_a_group_whose_rest_is_abandoned_yields_to_the_next(shell: Shell) -> None:
    """The unwritten rest of the group is abandoned, and the next group follows."""
    shell.accept("a")
    shell.accept("b", timeout=5.0)
    shell.accept("c", "d")
    shell.send()
    shell.lose(UNKNOWN_ERROR, connection=False)
    shell.reopen()
    assert shell.sent(limit=1) == ["a"]
    shell.session.tick(5.0)
    shell.ack(1)
    assert shell.sent() == ["c", "d"]


def test_the_next_group_follows_where_one_cannot_be_encoded(shell: Shell) -> None:
    """A group of which nothing can be written does not delay the next group."""
    broken = Publication(Unencodable.after(1, b"broken", "broken"), "", "orders", True, 6, 0.0, None)
    shell.session.accept([broken])
    shell.accept("a")
    shell.send()
    shell.lose(UNKNOWN_ERROR, connection=False)
    shell.reopen()
    assert shell.sent() == ["a"]
    assert broken.outcome is Outcome.REFUSED


@pytest.mark.parametrize(
    ("reply", "refused"),
    [(FRAME_ERROR, True), (FORCED, False), (None, False)],
)
def test_only_an_error_that_a_publish_can_provoke_blames_one(
    shell: Shell, reply: BrokerReply | None, refused: bool
) -> None:
    """A frame error blames a publish, a shutdown of the broker does not."""
    (publication,) = shell.accept("body")
    shell.send()
    shell.lose(reply)
    assert publication.outcome is (Outcome.REFUSED if refused else None)


def test_a_single_crash_of_the_broker_refuses_no_publish(shell: Shell) -> None:
    """The broker may have processed it before the crash.

    If the broker crashes again, the publish is refused, in doubt.
    """
    crash = BrokerReply(541, "INTERNAL_ERROR")
    (innocent,) = shell.accept("innocent")
    shell.send()
    shell.lose(crash)
    shell.reopen()
    assert [(one.body, one.possible_duplicate) for one in shell.send()] == [(b"innocent", True)]
    shell.ack(1)
    assert innocent.receipt().possible_duplicate
    (culprit,) = shell.accept("culprit")
    for _ in range(2):
        assert shell.sent() == ["culprit"]
        shell.lose(crash)
        shell.reopen()
    assert outcomes([innocent, culprit]) == [Outcome.CONFIRMED, Outcome.REFUSED]
    error = culprit.failure()
    assert error is not None
    assert error.may_have_arrived


def test_an_expired_publish_is_unknown_and_not_sent_again(shell: Shell) -> None:
    """A sent publish may have arrived, an unsent one has not."""
    (sent,) = shell.accept("sent", timeout=5.0)
    shell.send()
    shell.lose()
    (unsent,) = shell.accept("unsent", timeout=5.0)
    shell.session.tick(5.0)
    shell.reopen()
    assert shell.sent(now=5.0) == []
    assert outcomes([sent, unsent]) == [Outcome.UNKNOWN, Outcome.UNKNOWN]
    assert "may have arrived" in str(sent.failure())
    assert "never sent" in str(unsent.failure())
    assert shell.session.freed_count == 2


def test_a_publish_that_was_returned_is_known_at_its_deadline(shell: Shell) -> None:
    """At the deadline, the return has come and the ack has not."""
    (publication,) = shell.accept("body", timeout=5.0)
    shell.send()
    shell.return_("id of body")
    shell.session.tick(5.0)
    assert publication.outcome is Outcome.RETURNED
    shell.ack(1)
    assert len(shell.take_settled()) == shell.session.freed_count == 1


def test_a_publish_nacked_on_every_attempt_expires_as_nacked(shell: Shell) -> None:
    """One is delayed, one is ready without a channel, and one was not answered.

    The one without an answer may have arrived.
    """
    (delayed,) = shell.accept("delayed", timeout=0.5)
    ready, unanswered = shell.accept("ready", "unanswered", timeout=5.0)
    shell.send()
    shell.nack(3, multiple=True)
    shell.session.tick(0.5)
    shell.session.tick(4.0)
    assert shell.sent(limit=1) == ["ready"]
    shell.nack(4)
    assert shell.sent() == ["unanswered"]
    shell.lose()
    shell.session.tick(5.0)
    assert outcomes([delayed, ready, unanswered]) == [Outcome.NACKED, Outcome.NACKED, Outcome.UNKNOWN]
    assert [error.may_have_arrived for one in (delayed, ready, unanswered) if (error := one.failure())] == [
        False,
        False,
        True,
    ]
    assert shell.session.freed_count == 3


@pytest.mark.parametrize("end", ["ack", "nack", "lost"])
def test_an_abandoned_publish_holds_its_place_while_on_the_wire(shell: Shell, end: str) -> None:
    """A late confirm changes no outcome, but releases the place and the id."""
    (first,) = shell.accept("first", message_id="same", timeout=5.0)
    (second,) = shell.accept("second", message_id="same")
    shell.send()
    shell.session.tick(5.0)
    assert first.outcome is Outcome.UNKNOWN
    assert (shell.session.freed_count, shell.session.on_wire) == (0, 1)
    assert shell.sent() == []
    shell.return_("same")
    if end == "lost":
        shell.lose()
        shell.reopen()
    else:
        (shell.ack if end == "ack" else shell.nack)(1)
    assert (shell.session.freed_count, shell.session.stale_confirms) == (1, 0)
    assert first.outcome is Outcome.UNKNOWN
    assert shell.sent() == ["second"]
    assert second.outcome is None


def test_one_that_waits_for_its_turn_can_be_given_up(shell: Shell) -> None:
    """It is skipped, and the next publish with its id still waits for its turn."""
    shell.accept("first", message_id="same")
    shell.accept("second", message_id="same", timeout=10.0)
    shell.accept("third", message_id="same", timeout=5.0)
    shell.accept("fourth", message_id="same")
    shell.send()
    assert shell.sent(5.0) == []
    shell.session.tick(10.0)
    shell.ack(1)
    assert shell.sent() == ["fourth"]
    assert shell.session.freed_count == 3
    shell.session.tick(10.0)
    assert shell.session.freed_count == 3


def test_closing_for_good_gives_up_everything(shell: Shell) -> None:
    """Every publish is settled once: on the wire, delayed, waiting or ready."""
    shell.accept("nacked", "on the wire", timeout=500.0)
    shell.send()
    shell.nack(1)
    shell.accept("same 1", "same 2", message_id="same")
    shell.session.abandon_all()
    settled = shell.take_settled()
    assert len(settled) == 4
    assert sorted(outcomes(settled), key=str) == [Outcome.NACKED] + 3 * [Outcome.UNKNOWN]
    assert shell.session.freed_count == 3
    shell.lose()
    assert shell.session.freed_count == 4
    assert shell.session.next_wakeup() is None
    shell.reopen()
    assert shell.sent(now=10.0) == []


def test_nothing_is_sent_while_the_broker_blocks(shell: Shell) -> None:
    """Publishes wait, and confirms still count.

    Publishing continues when the broker unblocks the connection.
    """
    shell.accept("a")
    shell.send()
    shell.session.blocked("low on memory")
    (b,) = shell.accept("b")
    assert shell.sent() == []
    shell.ack(1)
    assert len(shell.take_settled()) == 1
    shell.session.unblocked(0.0)
    assert shell.sent() == ["b"]
    assert b.outcome is None


def test_a_deadline_while_the_broker_blocks_says_so(shell: Shell) -> None:
    """The error gives the broker's reason for blocking."""
    shell.session.blocked("low on disk")
    (publication,) = shell.accept("body", timeout=5.0)
    shell.session.tick(5.0)
    error = publication.failure()
    assert isinstance(error, PublishBlocked)
    assert error.reason == "low on disk"


def test_a_new_channel_on_a_blocked_connection_is_blocked(shell: Shell) -> None:
    """The block applies to the connection, and is not announced again."""
    shell.session.blocked("low on memory")
    shell.accept("body")
    shell.lose(connection=False)
    shell.reopen()
    assert shell.sent() == []


def test_disconnected_is_the_connection_and_not_its_channel(shell: Shell) -> None:
    """The session is connected from the first open channel on.

    It is disconnected when a connection is lost or a channel cannot be opened.
    """
    session = shell.session
    shell.lose(connection=False)
    assert session.disconnected_reason is None
    session.disconnected("no such exchange")
    assert session.disconnected_reason == "no such exchange"
    shell.reopen()
    assert session.disconnected_reason is None
    shell.lose(connection=True)
    assert session.disconnected_reason == "lost"
    assert new_session(1).disconnected_reason == "no attempt to connect has ended yet"


@pytest.mark.parametrize("channel_first", [False, True])
def test_a_new_connection_is_not_blocked(shell: Shell, channel_first: bool) -> None:
    """The end of the connection ends the blocking, even if the channel was lost first."""
    shell.session.blocked("low on memory")
    shell.accept("body")
    if channel_first:
        shell.lose(connection=False)
    shell.lose(connection=True)
    shell.reopen()
    assert shell.sent() == ["body"]


def test_a_channel_silent_for_the_confirm_timeout_is_in_doubt(shell: Shell) -> None:
    """The clock starts with the first unconfirmed publish.

    It restarts with every confirm that settles a publish.
    """
    assert not shell.session.channel_in_doubt(1_000.0)
    shell.accept("a", "b", at=1_000.0)
    shell.send(now=1_000.0)
    assert shell.session.next_wakeup() == 1_030.0
    shell.ack(1, now=1_020.0)
    shell.ack(1, now=1_029.0)
    assert not shell.session.channel_in_doubt(1_049.9)
    assert shell.session.channel_in_doubt(1_050.0)


def test_a_large_message_on_a_slow_network_is_in_no_doubt(shell: Shell) -> None:
    """The time starts again while the network takes data, and for the last time when it has taken all."""
    trust = shell.session.trust
    shell.accept("large", timeout=1_000.0)
    shell.send()
    trust.unsent(9_000, 0.0)
    trust.unsent(6_000, 29.0)
    assert shell.session.next_wakeup() == 59.0
    assert not shell.session.channel_in_doubt(58.9)
    trust.unsent(6_000, 58.9)
    assert shell.session.channel_in_doubt(59.0)
    trust.unsent(0, 59.0)
    assert not shell.session.channel_in_doubt(88.9)
    trust.unsent(6_000, 60.0)
    trust.unsent(3_000, 61.0)
    assert shell.session.channel_in_doubt(89.0)


def test_small_publishes_do_not_hide_a_silent_channel(shell: Shell) -> None:
    trust = shell.session.trust
    shell.accept("first", timeout=1_000.0)
    shell.send()
    for now in range(1, 30):
        trust.unsent(0, float(now))
        shell.accept("next", at=float(now), timeout=1_000.0)
        shell.send(now=float(now))
        trust.unsent(100, float(now))
        trust.unsent(10, now + 0.5)
    assert shell.session.channel_in_doubt(30.0)


def test_a_peer_that_hardly_reads_is_in_doubt_at_a_deadline(shell: Shell) -> None:
    """Only a publish whose confirm is overdue counts."""
    trust = shell.session.trust
    shell.accept("large", timeout=40.0)
    shell.send()
    trust.unsent(9_000, 0.0)
    shell.accept("young", at=20.0, timeout=10.0)
    shell.send(now=20.0)
    trust.unsent(8_999, 29.0)
    shell.session.tick(30.0)
    assert not shell.session.channel_in_doubt(30.0)
    trust.unsent(8_998, 40.0)
    shell.session.tick(40.0)
    assert shell.session.channel_in_doubt(40.0)


def test_a_blocked_channel_is_not_in_doubt(shell: Shell) -> None:
    """A broker that blocks need not confirm.

    The clock restarts when it unblocks.
    """
    shell.accept("body")
    shell.send()
    shell.session.blocked("low on memory")
    assert not shell.session.channel_in_doubt(100.0)
    shell.session.unblocked(100.0)
    assert not shell.session.channel_in_doubt(129.9)
    assert shell.session.channel_in_doubt(130.0)


def test_blocked_time_does_not_make_a_confirm_overdue(shell: Shell) -> None:
    """A publish that expires after a long block is not passed over.

    The broker has not read it while it blocked.
    """
    shell.accept("first", "last", timeout=62.0)
    shell.send()
    shell.session.blocked("low on memory")
    shell.session.unblocked(61.0)
    shell.ack(2, now=61.5)
    shell.session.tick(62.0)
    assert not shell.session.channel_in_doubt(62.0)


def test_blocked_time_does_not_pause_nacked_retries(shell: Shell) -> None:
    """The confirms of a channel with nacks only are not overdue after a long block."""
    shell.accept("full", "late", timeout=1_000.0)
    shell.send()
    shell.nack(1, now=0.0)
    shell.session.blocked("low on memory")
    shell.session.unblocked(61.0)
    assert shell.sent(now=61.0) == ["full"]
    assert not shell.session.channel_in_doubt(61.0)


def test_a_confirm_that_settles_nothing_is_no_progress(shell: Shell) -> None:
    """A broker that repeats old confirms does not renew the trust in its channel."""
    shell.accept("body")
    shell.send()
    shell.nack(7, now=20.0)
    shell.ack(7, now=20.0)
    assert shell.session.channel_in_doubt(30.0)


def test_the_doubt_says_whether_the_channel_ever_confirmed(shell: Shell) -> None:
    """A queue without a leader confirms nothing on any channel."""
    shell.accept("a", "b")
    shell.send()
    assert "2 outstanding publishes" in shell.session.doubt
    assert "no leader" in shell.session.doubt
    shell.ack(1)
    assert "1 outstanding publishes" in shell.session.doubt
    assert "no leader" not in shell.session.doubt


def pass_over(shell: Shell, since: float, *keys: str) -> None:
    """Publish to each key on a new channel, until the deadline.

    Only a publish to another queue is confirmed, later.
    """
    shell.reopen(now=since)
    stuck = [shell.accept(f"{key} {since}", at=since, routing_key=key)[0] for key in keys]
    shell.accept(f"quick {since}", at=since, routing_key="quick")
    shell.send(now=since)
    shell.ack(len(keys) + 1, now=since + 100.0)
    shell.session.tick(since + DELIVERY_TIMEOUT)
    assert outcomes(stuck) == [Outcome.UNKNOWN] * len(stuck)


def test_a_channel_that_passes_over_a_publish_is_in_doubt(shell: Shell) -> None:
    """The channel confirms another queue, so the confirms of this one may be lost."""
    shell.accept("late", timeout=500.0)
    shell.send(now=0.0)
    stuck = shell.accept("stuck", routing_key="stuck")[0]
    shell.accept("quick", routing_key="quick")
    shell.send(now=0.0)
    shell.ack(3, now=100.0)
    assert not shell.session.channel_in_doubt(119.9)
    shell.session.tick(120.0)
    assert shell.session.channel_in_doubt(120.0)
    assert shell.session.next_wakeup() == 120.0
    assert f"no confirm for {stuck} in time" in shell.session.doubt
    shell.lose()
    assert not shell.session.channel_in_doubt(120.0)
    shell.reopen(now=120.0)
    (again,) = shell.send(now=120.0)
    assert (again.body, again.possible_duplicate) == (b"late", True)
    assert not shell.session.channel_in_doubt(149.9)


def test_a_queue_that_never_confirms_costs_one_channel(shell: Shell) -> None:
    """A queue without a leader confirms on no channel.

    Other publishes become possible duplicates only once.
    """
    shell.lose()
    pass_over(shell, 0.0, "stuck", "also stuck")
    assert shell.session.channel_in_doubt(120.0)
    shell.lose()
    pass_over(shell, 120.0, "stuck")
    assert not shell.session.channel_in_doubt(240.0)
    shell.ack(1, now=240.0)  # too late
    shell.lose()
    pass_over(shell, 240.0, "stuck", "also stuck")
    assert not shell.session.channel_in_doubt(360.0)
    (confirmed,) = shell.accept("in time", at=360.0, routing_key="stuck")
    shell.send(now=360.0)
    shell.ack(4, now=370.0)
    assert confirmed.outcome is Outcome.CONFIRMED
    shell.lose()
    pass_over(shell, 370.0, "also stuck")
    assert not shell.session.channel_in_doubt(490.0)
    shell.lose()
    pass_over(shell, 490.0, "stuck")
    assert shell.session.channel_in_doubt(610.0), "it did confirm in the meantime"


@pytest.mark.parametrize(
    ("first", "later"),
    [
        pytest.param(["stuck"], "stuck", id="same"),
        # Each message to a topic exchange may have its own routing key.
        pytest.param([f"order.{number}" for number in range(channel_trust._MAX_BLAMED + 1)], "deaf", id="many"),
    ],
)
def test_blame_of_destinations_lapses(shell: Shell, first: list[str], later: str) -> None:
    """A queue may have a leader again, and its confirms may be lost on this channel."""
    shell.lose()
    pass_over(shell, 0.0, *first)
    assert shell.session.channel_in_doubt(120.0)
    shell.lose()
    assert len(shell.session.trust._blamed) == min(len(first), channel_trust._MAX_BLAMED)
    pass_over(shell, 590.0, later)
    assert not shell.session.channel_in_doubt(710.0)
    shell.lose()
    pass_over(shell, 600.0, later)
    assert shell.session.channel_in_doubt(720.0)


def test_what_was_as_late_costs_no_second_channel(shell: Shell) -> None:
    """A channel in doubt blames every destination left unconfirmed for as long."""
    (slower,) = shell.accept("slower", routing_key="slower", timeout=200.0)
    shell.accept("stuck", routing_key="stuck")
    shell.accept("quick")
    shell.send()
    shell.accept("younger", at=100.0, routing_key="younger")
    shell.send(now=100.0)
    shell.ack(3, now=100.0)
    shell.session.tick(120.0)
    shell.lose()
    shell.reopen(now=120.0)
    shell.accept("quick again", at=120.0)
    shell.send(now=120.0)
    shell.ack(3, now=190.0)
    shell.session.tick(200.0)
    assert slower.outcome is Outcome.UNKNOWN
    assert not shell.session.channel_in_doubt(200.0)
    shell.session.tick(220.0)
    assert shell.session.channel_in_doubt(220.0), "the last channel owed it for less time"


@pytest.mark.parametrize("case", ["sent of late", "nothing later is settled", "blocked"])
def test_a_publish_that_is_only_late_costs_no_channel(shell: Shell, case: str) -> None:
    """Each case is possible with a healthy broker."""
    timeout = 29.9 if case == "sent of late" else 120.0
    (owed,) = shell.accept("owed", at=0.0, timeout=500.0)
    first, last = shell.accept("first", "last", timeout=timeout)
    shell.send()
    if case == "blocked":
        shell.session.blocked("low on memory")
    shell.ack(2 if case == "nothing later is settled" else 3, now=timeout - 1)
    shell.session.tick(timeout)
    assert Outcome.UNKNOWN in outcomes([first, last])
    if case == "blocked":
        shell.session.unblocked(timeout)
    assert not shell.session.channel_in_doubt(timeout)
    assert owed.outcome is None


def test_a_channel_with_nacks_only_is_opened_anew(shell: Shell) -> None:
    """A queue that is no longer full may still be refused on this channel.

    The channel is opened again without putting a publish in doubt.
    """
    shell.accept("a", "b")
    shell.send()
    shell.nack(1, now=0.0)
    assert shell.sent(now=1.0) == ["a"]
    shell.nack(3, now=20.0)
    assert not shell.session.reopening_due(30.0), "a publish is on the wire"
    assert shell.sent(now=30.0) == [], "it would be in doubt"
    shell.nack(2, now=30.0)
    assert shell.session.reopening_due(30.0)
    shell.session.reopening_begun()
    assert not shell.session.reopening_due(30.0)
    assert shell.sent(now=40.0) == []
    shell.lose(connection=False)
    shell.reopen(now=40.0)
    again = shell.send(now=40.0)
    assert {published.body for published in again} == {b"a", b"b"}
    assert not any(published.possible_duplicate for published in again)
    shell.nack(2, multiple=True, now=40.0)
    assert not shell.session.reopening_due(69.9)
    assert shell.session.reopening_due(70.0), "no more often than that"


def test_a_lost_confirm_pauses_nacked_retries_briefly(shell: Shell) -> None:
    """The retries go on before the lost confirm is overdue.

    Once it is overdue, the channel is in doubt as soon as no other publish is on the wire.
    """
    shell.accept("full", timeout=1_000.0)
    shell.send()
    shell.nack(1, now=0.0)
    assert shell.sent(now=1.0) == ["full"]
    shell.accept("owed", at=29.0, timeout=1_000.0, routing_key="silent")
    assert shell.sent(now=29.0) == ["owed"]
    shell.nack(2, now=30.0)
    assert shell.sent(now=32.9) == [], "the confirm may be the last one before another channel"
    assert shell.session.next_wakeup() == 33.0
    assert shell.sent(now=33.0) == ["full"]
    assert not shell.session.channel_in_doubt(33.0)
    shell.nack(4, now=62.0)
    shell.accept("later", at=63.0)
    assert shell.sent(now=65.9) == []
    assert not shell.session.channel_in_doubt(65.9)
    assert shell.session.next_wakeup() == 66.0
    shell.session.tick(66.0)
    assert shell.session.channel_in_doubt(66.0)


def test_a_publish_given_up_delays_no_other_channel(shell: Shell) -> None:
    """Its outcome is known, so the end of its channel changes nothing."""
    shell.accept("full", timeout=500.0)
    (owed,) = shell.accept("owed", routing_key="silent", timeout=20.0)
    shell.send()
    shell.nack(1, now=0.0)
    assert shell.sent(now=1.0) == ["full"]
    shell.nack(3, now=25.0)
    shell.session.tick(27.0)
    assert owed.outcome is Outcome.UNKNOWN
    assert not shell.session.reopening_due(29.9)
    assert shell.session.next_wakeup() == 30.0
    assert not shell.session.channel_in_doubt(30.0)
    assert shell.session.reopening_due(30.0)


def test_a_channel_is_opened_anew_for_a_publish_and_unblocked(shell: Shell) -> None:
    """An idle publisher does not need a new channel.

    A broker that blocks would not answer.
    """
    shell.accept("a", timeout=20.0)
    shell.send()
    shell.nack(1)
    shell.session.tick(20.0)
    assert shell.session.next_wakeup() is None
    assert not shell.session.reopening_due(50.0)
    shell.accept("b", at=50.0)
    assert shell.session.reopening_due(50.0)
    assert shell.sent(now=50.0) == []
    shell.session.blocked("low on memory")
    assert not shell.session.reopening_due(51.0)
    assert shell.session.next_wakeup() == 170.0, "the deadline"
    shell.session.unblocked(52.0)
    assert shell.session.reopening_due(52.0)


def test_an_ack_between_nacks_keeps_the_channel(shell: Shell) -> None:
    """The ack shows that the broker accepts publishes on this channel."""
    shell.accept("a", "b", "c")
    shell.send()
    shell.nack(1)
    shell.ack(2, now=29.0)
    shell.nack(3, now=29.5)
    assert not shell.session.reopening_due(59.4)
    assert shell.session.reopening_due(59.5)


def test_a_write_has_whole_messages_of_about_the_size_asked(shell: Shell) -> None:
    """A write has at least one message, and a large body is split into frames."""
    large = "x" * 10_000
    shell.accept("a", "b")
    shell.accept(large, "c", message_id="same")
    assert shell.sent(limit=1) == ["a"]
    assert shell.sent(limit=100) == ["b", large]
    assert shell.sent(limit=100) == []
    shell.ack(3)
    assert shell.sent(limit=100) == ["c"]


def test_encoded_heads_are_bounded_and_right(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is bounded, and each publish gets the frames of its exchange."""
    monkeypatch.setattr(module, "_HEADS_KEPT", 3)
    exchanges = [f"exchange {number % 5}" for number in range(20)]
    for number, exchange in enumerate(exchanges):
        shell.accept(str(number), exchange=exchange)
    assert [published.exchange for published in shell.send()] == exchanges
    assert len(shell.session._heads) <= 3


@pytest.mark.parametrize("sent_before", [0, 1])
def test_a_message_that_cannot_be_encoded_fails_alone(shell: Shell, sent_before: int) -> None:
    """The message is refused at once, and never tried again.

    The others are confirmed, and the window is empty at the end.
    """
    broken = Publication(Unencodable.after(sent_before, b"broken", "broken"), "", "orders", True, 6, 0.0, None)
    before = shell.accept("a", "b")
    shell.session.accept([broken])
    after = shell.accept("same id", message_id="broken") + shell.accept("c")
    if sent_before:
        assert shell.sent() == ["a", "b", "broken", "c"]
        shell.lose()
        shell.reopen()
    assert shell.sent() == ["a", "b", "c", "same id"]
    assert shell.take_settled() == [broken]
    shell.ack(4, multiple=True)
    assert set(outcomes(before + after)) == {Outcome.CONFIRMED}
    error = broken.failure()
    assert isinstance(error, PublishRefused)
    assert "cannot be encoded: RuntimeError: no bytes for this one" in str(error)
    assert error.reply_code == 0
    assert error.may_have_arrived is bool(sent_before)
    assert (shell.session.outstanding, shell.session.freed_count, len(shell.session.ids)) == (0, 5, 0)
    assert shell.session.statistics.refused == 1


def test_a_message_of_a_wrong_body_fails_alone(shell: Shell) -> None:
    """All messages are joined into one write, but only the wrong one fails."""
    broken = Publication(Message._from_wire("text", None, "broken"), "", "orders", True, 6, 0.0, None)  # type: ignore[arg-type]
    shell.session.accept([broken])
    good = shell.accept("a")
    assert shell.sent() == ["a"]
    shell.ack(1)
    assert outcomes([broken, *good]) == [Outcome.REFUSED, Outcome.CONFIRMED]
    assert "body must be bytes, not str" in str(broken.failure())


def test_nothing_is_marked_as_sent_where_the_write_fails(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishes of a failed write are ready again, in order."""
    shell.accept("a", "b")

    def no_memory(*_: object) -> int:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(module, "append_publish", no_memory)
        with pytest.raises(MemoryError):
            shell.send()
    assert shell.session.on_wire == 0
    assert shell.sent() == ["a", "b"]


def test_frames_carry_the_number_of_the_channel_they_go_to(shell: Shell) -> None:
    """Frames encoded for the old channel are not used again."""
    shell.accept("a")
    assert [published.channel for published in shell.send()] == [1]
    shell.lose()
    shell.session.channel_opened(7, 2, FRAME_MAX, 0.0, shell.new_queues)
    assert [published.channel for published in shell.send()] == [2]


def test_publishes_given_up_without_a_channel_do_not_pile_up(shell: Shell) -> None:
    """Abandoned publishes are removed, however long the broker is unavailable."""
    shell.lose()
    for moment in range(1_000):
        shell.accept(f"{moment}", timeout=10.0, at=float(moment))
        shell.session.tick(float(moment))
    assert shell.session.outstanding == 10
    assert len(shell.session._ready) <= 2 * 10 + module._DEAD_KEPT
    shell.reopen()
    assert shell.sent(now=1_000.0) == [str(number) for number in range(991, 1_000)]


def test_nacked_publishes_that_are_given_up_do_not_pile_up() -> None:
    """A delay may be longer than the deadline."""
    shell = Shell(delays=(3600.0,))
    for moment in range(1_000):
        shell.accept(f"{moment}", timeout=10.0, at=float(moment))
        shell.accept(f"quick {moment}", at=float(moment))
        shell.send(now=float(moment))
        shell.nack(2 * moment + 1, now=float(moment))
        shell.ack(2 * moment + 2, now=float(moment))
        shell.session.tick(float(moment))
    assert shell.session.outstanding == 10
    assert len(shell.session._delayed) <= 2 * 10 + module._DEAD_KEPT


def test_the_time_to_the_confirm_is_measured_from_acceptance(shell: Shell) -> None:
    """The latency includes later attempts, and failures do not count."""
    shell.accept("a", "b", "returned")
    shell.send()
    shell.return_("id of returned")
    shell.ack(3, multiple=True, now=0.004)
    statistics = shell.session.statistics
    assert statistics.confirmed == sum(statistics.confirm_seconds.counts) == 2
    assert statistics.confirm_seconds.total == pytest.approx(0.008)


def test_a_message_costs_the_same_among_few_and_many_outstanding(
    assert_same_cost: Callable[[Callable[[], float], Callable[[], float]], None],
) -> None:
    """The cost covers everything from acceptance to the confirm.

    Confirms are single, in any order, or multiple.
    """

    def cost(outstanding: int, rounds: int) -> float:
        quarter = min(outstanding // 4, 2_500)
        middle = range(2 * quarter + 1, outstanding - quarter + 1)
        spent = 0.0
        for _ in range(rounds):
            session = new_session()
            session.channel_opened(1, 1, FRAME_MAX, 0.0, NewQueues())
            messages = [Message(b"", message_id=str(number)) for number in range(outstanding)]
            publications = [Publication(message, "", "orders", True, 0, 0.0, None) for message in messages]
            session.accept(publications[: -4 * quarter])
            session.data_to_send(0.0, 1_000_000_000)
            began = process_time()
            session.accept(publications[-4 * quarter :])
            session.data_to_send(0.0, 1_000_000_000)
            for tag in range(1, quarter + 1):
                session.acked(1, tag, False, 0.0)
                session.next_wakeup()
            for tag in range(outstanding, outstanding - quarter, -1):
                session.acked(1, tag, False, 0.0)
            for tag in range(quarter + 10, 2 * quarter + 1, 10):
                session.acked(1, tag, True, 0.0)
            for tag in random.Random(2).sample(middle, quarter):
                session.acked(1, tag, False, 0.0)
            spent += process_time() - began
            assert session.outstanding == outstanding - 4 * quarter
        return spent / (4 * quarter * rounds)

    assert_same_cost(lambda: cost(1_000, 3), lambda: cost(30_000, 1))


def test_a_publish_that_is_tried_once_ends_at_its_nack(shell: Shell) -> None:
    """Other publishes are tried again after a delay."""
    once, other = shell.accept("once", "other")
    once.once = True
    shell.send()
    shell.nack(2, multiple=True)
    assert shell.take_settled() == [once]
    assert outcomes([once, other]) == [Outcome.NACKED, None]


def test_a_publish_that_is_tried_once_ends_with_its_channel(shell: Shell) -> None:
    """It is given up when the confirms are overdue.

    Its place is released when the channel is lost or the ack comes.
    """
    late, once, other = shell.accept("late", "once", "other")
    late.once = once.once = True
    shell.send()
    shell.session.abandon_overdue()
    assert shell.take_settled() == [late, once]
    assert outcomes([late, once, other]) == [Outcome.UNKNOWN, Outcome.UNKNOWN, None]
    assert (shell.session.abandoned_count, shell.session.abandoned_bytes) == (2, 8)
    shell.ack(1)
    assert (shell.session.abandoned_count, shell.session.abandoned_bytes) == (1, 4)
    shell.lose()
    assert (shell.session.abandoned_count, shell.session.abandoned_bytes) == (0, 0)
    assert outcomes([other]) == [None]
