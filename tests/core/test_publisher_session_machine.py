"""The publisher session as a state machine, with a random broker.

The shell behaves correctly. The model broker decodes and counts the output of the session. At random, it confirms,
nacks, returns, closes channels, loses connections, blocks, and gets a new queue. The model knows the required outcome
of each publish.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reliable_mq.core.new_queues import NewQueues
from reliable_mq.core.publisher.publication import BrokerReply, Outcome, Publication, PublicationState
from reliable_mq.errors import PublishBlocked
from reliable_mq.message import Message
from tests.core.published import (
    CONFIRM_TIMEOUT,
    DELAYS,
    DELIVERY_TIMEOUT,
    FORCED,
    FRAME_ERROR,
    FRAME_MAX,
    NO_EXCHANGE,
    NO_ROUTE,
    CheckedPublication,
    Published,
    Unencodable,
    decode,
    new_session,
)
from tests.properties import machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

T = TypeVar("T")

UNENCODABLE = {"unencodable": 0, "unencodable again": 1}  # how often each can be encoded
KINDS = st.lists(
    st.sampled_from(["good"] * 6 + ["unroutable", "culprit", "connection culprit", *UNENCODABLE]), max_size=6
)
MESSAGE_IDS = st.sampled_from([None, None, None, "a", "b"])
MAX_ATTEMPTS = 2
ONCE_EVERY = 4  # one publish in this many is tried only once
GRACE = 2.0
ROUND_TRIPS, PAUSE = 7, GRACE / 8
DRAINED_WITHIN = 3.0
BLAMED_FOR = 20 * CONFIRM_TIMEOUT
WATCHED = (ROUND_TRIPS - 1) * PAUSE
TIMEOUTS = st.sampled_from([None, None, None, 5.0, 500.0])
MISSING = "missing"  # the exchange that NO_EXCHANGE names
POSITIONS = st.sampled_from([0.0, 0.3, 0.6, 1.0])  # in a list, from first to last


def at(position: float, those: Sequence[T]) -> T:
    return those[round(position * (len(those) - 1))]


@dataclass(eq=False)
class Expected:
    """The model's knowledge of a publication."""

    publication: Publication
    number: int
    culprit: BrokerReply | None = None  # the reply with which the broker closes the channel or connection over it
    unroutable: bool = False
    encodable: float = inf  # how often it can be encoded
    unique: bool = True  # no other publish has its message id
    sends: int = 0
    sent_last: int = 0  # the number of its last send among all sends
    sent_at: float = 0.0
    nacks: int = 0
    final_at: float | None = None  # the time when a provisional confirm becomes final
    in_doubt: bool = False
    due: float = 0.0  # not sent earlier
    outcome: Outcome | None = None
    blocked: bool = False  # given up unsent because the broker blocked

    @property
    def message_id(self) -> str:
        return self.publication.message.message_id

    @property
    def destination(self) -> tuple[str, str]:
        return self.publication.exchange, self.publication.routing_key

    @property
    def deadline(self) -> float:
        timeout = self.publication.timeout
        return self.publication.accepted_at + (DELIVERY_TIMEOUT if timeout is None else timeout)


@dataclass
class Channel:
    """A channel at the broker. A tag is a place in ``sent``, counted from 1."""

    generation: int
    sent: list[Expected] = field(default_factory=list)
    read: int = 0
    unconfirmed: list[int] = field(default_factory=list)
    returned: set[Expected] = field(default_factory=set)
    since: float | None = None  # start of the round trip in progress
    progress_at: float = 0.0
    taken_at: float = -inf  # when the network last took a part of the data, or the last of it
    unsent: int = 0  # bytes that the network had not taken at the last report
    emptied: bool = False  # whether a report since the last progress has shown that the network had taken all
    nacks_since: float = inf
    settled_through: int = 0
    passed_over_at: float = inf

    @property
    def doubt_at(self) -> float:
        return min(max(self.progress_at, self.taken_at) + CONFIRM_TIMEOUT, self.passed_over_at)

    def progress(self, now: float) -> None:
        self.progress_at, self.emptied = now, False

    @property
    def on_wire(self) -> list[Expected]:
        return [self.sent[tag - 1] for tag in self.unconfirmed]

    @property
    def owed(self) -> list[Expected]:
        return [one for one in self.on_wire if one.outcome is None]


class PublishingMachine(RuleBasedStateMachine):
    """A correct shell and a random broker."""

    def __init__(self) -> None:
        super().__init__()
        self.session = new_session(MAX_ATTEMPTS, GRACE)
        self.new_queues = NewQueues()
        self.new_queues.longest = GRACE
        self.proven = -inf  # queues made by then are old
        self.answered: list[float] = []  # start times of round trips on this connection
        self.ask_after = -inf
        self.made_at = float("-inf")  # when the queue was made; infinite while it is being made
        self.other_made_at = float("-inf")
        self.sends = 0
        self.now = 100.0
        self.everyone: list[Expected] = []
        self.channel: Channel | None = None
        self.generation = 0
        self.connection_blocked = False
        self.unblocked_at = -inf
        self.disconnected: str | None = "no attempt to connect has ended yet"
        self.again: list[Expected] = []  # unsettled at a channel loss and not sent since, in sending order
        self.cleared: list[Expected] = []  # those that were suspects and not confirmed, in the order of clearing
        self.last_first_send = -1
        self.blamed: dict[tuple[str, str], float] = {}  # destinations that cost a channel, and when
        self.settled: Counter[Publication] = Counter()
        self.stale = 0
        self.stray = 0

    @initialize()
    def begin(self) -> None:
        self.open_channel()

    @rule(kind=st.integers(0, 5), data=st.data())
    def meanwhile(self, kind: int, data: st.DataObject) -> None:
        match kind:
            case 2 if self.channel is not None:
                self.report_unsent(data.draw(st.sampled_from([0, 1, 2])))
            case 5:
                self.answer()
            case 4:
                self.make_queue(data.draw(st.sampled_from(["begin", "end", "made", "other"])))
            case 0:
                self.accept(data.draw(KINDS), data.draw(MESSAGE_IDS), data.draw(TIMEOUTS))
            case 1:
                self.time_passes(data.draw(st.sampled_from([0.5, 3.0, 31.0, 31.0, 130.0])))
            case 3 if self.connection_blocked:
                self.unblock()
            case 3 if self.channel is not None:
                self.block()

    # actions of callers

    def accept(self, kinds: list[str], message_id: str | None, timeout: float | None) -> None:
        accepted = []
        for kind in kinds:
            number = len(self.everyone)
            culprit = {"culprit": NO_EXCHANGE, "connection culprit": FRAME_ERROR}.get(kind)
            body, own_id = str(number).encode(), message_id or f"unique {number}"
            encodable = UNENCODABLE.get(kind)
            publication = CheckedPublication(
                Message(body, message_id=own_id) if encodable is None else Unencodable.after(encodable, body, own_id),
                MISSING if culprit is NO_EXCHANGE else "",
                kind,
                kind == "unroutable" or number % 2 == 0,
                number,
                self.now,
                timeout,
            )
            publication.once = number % ONCE_EVERY == ONCE_EVERY - 1
            expected = Expected(
                publication,
                number,
                culprit,
                unroutable=kind == "unroutable",
                encodable=inf if encodable is None else encodable,
                unique=message_id is None,
            )
            self.everyone.append(expected)
            accepted.append(publication)
        self.session.accept(accepted)

    # actions of the shell

    def open_channel(self) -> None:
        self.generation += 1
        self.channel = Channel(self.generation, progress_at=self.now)
        self.disconnected = None
        self.session.channel_opened(self.generation, self.generation % 7 + 1, FRAME_MAX, self.now, self.new_queues)

    def make_queue(self, event: str) -> None:
        """Make the queue of routable publishes, or another one."""
        being_made = self.made_at == float("inf")
        if event == "other":
            self.new_queues.made(["other"], self.now)
            self.other_made_at = self.now
        elif event == "begin" and not being_made:
            self.new_queues.begin(["good"])
            self.made_at = float("inf")
        elif event == "end" and being_made:
            self.new_queues.end(["good"], self.now)
            self.made_at = self.now
        elif event == "made" and not being_made:
            self.new_queues.made(["good"], self.now)
            self.made_at = self.now

    @rule(
        kinds=KINDS,
        message_id=MESSAGE_IDS,
        timeout=TIMEOUTS,
        seconds=st.sampled_from([0.0, 0.0, 1.0, 2.0, 31.0]),
        new=st.sampled_from(["", "made", "begin", "end"]),
        limit=st.sampled_from([1, 300, 1_000_000, 1_000_000]),
        seconds_on_wire=st.sampled_from([0.0, 0.0, 5.0]),
        part_read=st.sampled_from([1.0, 1.0, 0.5]),
        confirms=st.lists(st.tuples(POSITIONS, st.booleans(), st.booleans()), max_size=4),
        answers=st.booleans(),
        end=st.sampled_from(["", "", "", "lost", "forced", "blocked", "blocked, lost", "blocked, channel lost"]),
    )
    def work(
        self,
        kinds: list[str],
        message_id: str | None,
        timeout: float | None,
        seconds: float,
        new: str,
        limit: int,
        seconds_on_wire: float,
        part_read: float,
        confirms: list[tuple[float, bool, bool]],
        answers: bool,
        end: str,
    ) -> None:
        """Perform one sequence of typical events, so that short runs get far."""
        self.accept(kinds, message_id, timeout)
        self.time_passes(seconds)
        if self.channel is None:
            self.open_channel()
        if self.connection_blocked:
            self.unblock()
        self.make_queue(new)
        self.send(limit)
        self.time_passes(seconds_on_wire)
        self.tick()
        self.read(part_read)
        for position, multiple, ack in confirms:
            self.confirm(position, multiple, ack=ack)
        if answers:
            self.answer()
        if self.channel is not None and end.startswith("blocked"):
            self.block()
        if self.channel is not None and end.endswith(("lost", "forced")):
            self.lose(FORCED if end == "forced" else None, connection="channel" not in end)

    @rule()
    def send_everything(self) -> None:
        """Send everything, also without a channel or while the broker blocks."""
        self.send(1_000_000)

    def send(self, limit: int) -> None:
        self.tick()
        if self.session.channel_in_doubt(self.now):
            assert self.channel is not None
            self.session.abandon_overdue()
            for expected in self.channel.on_wire:
                if expected.publication.once and expected.outcome is None:
                    self.give_up(expected)
            self.lose(None, connection=True, overdue=True)
        if self.session.reopening_due(self.now):
            self.session.reopening_begun()
            assert not self.session.reopening_due(self.now)
            assert not self.session.data_to_send(self.now, limit), "published on a channel that is being closed"
            self.lose(None, connection=False)
        data = self.session.data_to_send(self.now, limit)
        published = decode(data)
        for expected in self.everyone:
            if expected.outcome is None and expected.sends == expected.encodable and expected.publication.outcome:
                expected.outcome = Outcome.REFUSED
        for one in published:
            self.sent(one)
        if limit == 1:
            assert len(published) <= 1
        if not published:
            self.nothing_could_be_sent()
        if self.session.round_trip_due(self.now):
            assert self.channel is not None
            assert self.channel.since is None
            self.channel.since = self.now
            self.session.round_trip_begun(self.now)

    def answer(self) -> None:
        """Answer the round trip, if one is in progress."""
        channel = self.channel
        if channel is None or channel.since is None:
            return
        self.session.round_trip_ended(self.now)
        since, channel.since = channel.since, None
        assert not self.answered or since >= self.answered[-1] + PAUSE
        self.answered.append(since)
        self.ask_after = self.now + PAUSE
        if len(self.answered) >= ROUND_TRIPS:
            self.prove(self.answered[-ROUND_TRIPS] + WATCHED)

    def prove(self, moment: float) -> None:
        self.proven = max(self.proven, moment)
        for expected in self.provisional:
            if expected.final_at is not None and expected.final_at <= self.proven:
                expected.outcome, expected.final_at = Outcome.CONFIRMED, None

    def tick(self) -> None:
        self.session.tick(self.now)
        for expected in self.everyone:
            if expected.outcome is None and expected.deadline <= self.now:
                self.expire_on_wire(expected)
                self.give_up(expected)
        channel = self.channel
        if channel is None or not channel.owed or self.connection_blocked:
            return
        if self.now >= channel.nacks_since + CONFIRM_TIMEOUT + DRAINED_WITHIN:
            channel.nacks_since = self.now
            since = max(channel.owed[0].sent_at, self.unblocked_at)
            if self.now - since >= CONFIRM_TIMEOUT:
                channel.progress_at = since

    def report_unsent(self, unsent: int) -> None:
        channel = self.channel
        assert channel is not None
        self.session.trust.unsent(unsent, self.now)
        if unsent < channel.unsent and not channel.emptied:
            channel.taken_at = self.now
        channel.unsent = unsent
        channel.emptied |= unsent == 0

    def expire_on_wire(self, expected: Expected) -> None:
        """Blame the destination of an old publish that the broker has passed over.

        Each destination costs one channel in `BLAMED_FOR` seconds.
        """
        channel = self.channel
        if channel is None or self.connection_blocked or expected not in channel.on_wire:
            return
        tag = next(tag for tag in channel.unconfirmed if channel.sent[tag - 1] is expected)
        long_ago = self.now - max(expected.sent_at, self.unblocked_at) >= CONFIRM_TIMEOUT
        if long_ago:
            channel.taken_at = -inf
        to_blame = self.now - self.blamed.get(expected.destination, -inf) >= BLAMED_FOR
        if long_ago and tag < channel.settled_through and to_blame and channel.passed_over_at == inf:
            channel.passed_over_at = self.blamed[expected.destination] = self.now

    @property
    def provisional(self) -> list[Expected]:
        """Return the provisional publishes, in sending order."""
        return sorted(
            (expected for expected in self.everyone if expected.final_at is not None), key=lambda one: one.sent_last
        )

    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    def sent(self, one: Published) -> None:
        """Record a publish of the session, and check that it was allowed."""
        channel = self.channel
        assert channel is not None, "published without a channel"
        assert not self.connection_blocked, "published while blocked"
        expected = self.everyone[int(one.body)]
        publication = expected.publication
        assert one.channel == channel.generation % 7 + 1
        assert one.message_id == publication.message.message_id
        assert (one.exchange, one.routing_key) == (publication.exchange, publication.routing_key)
        assert one.mandatory is publication.mandatory
        assert one.persistent
        assert self.now < channel.nacks_since + CONFIRM_TIMEOUT, "published on a channel that is to be opened anew"
        assert expected.outcome is None, "published after it was settled"
        assert expected.final_at is None, "published again while the broker has it, and lives"
        assert expected.due <= self.now, "published before its delay was over"
        for other in self.everyone[: expected.number]:
            if other.message_id == expected.message_id:
                assert other.outcome is not None, "overtook a publish with the same message_id"
        assert expected.message_id not in {other.message_id for other in channel.on_wire}
        assert one.possible_duplicate is expected.in_doubt
        self.again = [other for other in self.again if other.outcome is None]
        if self.again:
            to_missing = publication.exchange == MISSING  # publishes that an error may mean come last
            older = self.again[: self.again.index(expected)]
            same = [other for other in older if (other.publication.exchange == MISSING) is to_missing]
            assert not same, "not the oldest of those whose channel was lost"
            self.again.remove(expected)
        if expected.unique and not expected.sends:
            assert expected.number > self.last_first_send, "overtook an older publish"
            self.last_first_send = expected.number
        if not channel.unconfirmed:
            channel.progress(self.now)
        expected.sends += 1
        self.sends += 1
        expected.sent_last = self.sends
        expected.sent_at = self.now
        channel.sent.append(expected)
        channel.unconfirmed.append(len(channel.sent))

    def nothing_could_be_sent(self) -> None:
        """Check that the session sends nothing only if it must not."""
        if self.channel is None or self.connection_blocked or self.channel.unconfirmed:
            return
        ending = self.now >= self.channel.nacks_since + CONFIRM_TIMEOUT
        assert not ending or all(expected.outcome is not None for expected in self.everyone)
        waiting: set[str] = set()
        for expected in self.everyone:
            if expected.outcome is None:
                held = expected.final_at is not None or expected.due > self.now
                assert held or expected.message_id in waiting, "forgotten"
                waiting.add(expected.message_id)

    # actions of the broker

    def read(self, part: float) -> None:
        if self.channel is not None:
            self.read_up_to(self.channel.read + round(part * (len(self.channel.sent) - self.channel.read)))

    def read_up_to(self, tag: int) -> None:
        channel = self.channel
        assert channel is not None
        for expected in channel.sent[channel.read : tag]:
            channel.read += 1
            if expected.culprit is not None:
                self.lose(expected.culprit, connection=expected.culprit is FRAME_ERROR)
                return
            if expected.unroutable:
                self.session.returned(channel.generation, *NO_ROUTE, expected.message_id)
                if expected.outcome is None:
                    channel.returned.add(expected)

    def confirm(self, position: float, multiple: bool, *, ack: bool) -> None:
        """Confirm a publish that was read and is not confirmed."""
        channel = self.channel
        tags = [tag for tag in channel.unconfirmed if tag <= channel.read] if channel is not None else []
        if tags:
            self.confirm_tag(at(position, tags), multiple, ack=ack)

    def confirm_tag(self, tag: int, multiple: bool, *, ack: bool) -> None:
        channel = self.channel
        assert channel is not None
        (self.session.acked if ack else self.session.nacked)(channel.generation, tag, multiple, self.now)
        tags = [held for held in channel.unconfirmed if held == tag or (multiple and held < tag)]
        if tags:
            channel.progress(self.now)
            channel.nacks_since = inf if ack else min(channel.nacks_since, self.now)
        else:
            self.stale += 1
        for held in tags:
            channel.unconfirmed.remove(held)
            channel.settled_through = max(channel.settled_through, tag)
            expected = channel.sent[held - 1]
            expected.nacks += not ack
            if expected.outcome is not None:
                continue
            self.blamed.pop(expected.destination, None)
            if expected in channel.returned:
                expected.outcome = Outcome.RETURNED
            elif ack and self.proven < self.new_since(expected) + GRACE and not expected.unroutable:
                expected.final_at = self.new_since(expected) + GRACE
            elif ack:
                expected.outcome = Outcome.CONFIRMED
            elif expected.nacks == MAX_ATTEMPTS or expected.publication.once:
                expected.outcome = Outcome.NACKED
            else:
                expected.due = self.now + DELAYS[expected.nacks - 1]

    def new_since(self, expected: Expected) -> float:
        """Return when the newest queue was made that may have the message.

        If the headers cannot be read again, any queue counts.
        """
        newest = min(self.made_at, self.now)
        readable = expected.encodable > expected.sends
        return newest if readable or self.made_at > self.now else max(newest, self.other_made_at)

    @rule(kind=st.integers(0, 3), data=st.data())
    def late_or_wrong_event(self, kind: int, data: st.DataObject) -> None:
        age = data.draw(st.integers(0, 1))
        match kind:
            case 0:
                self.confirm_again(data)
            case 1:
                self.confirm_what_does_not_exist(data, age)
            case 2:
                self.stray_return(data, age)
            case _:
                self.old_channel_is_lost_again(data)

    def confirm_again(self, data: st.DataObject) -> None:
        """Confirm any tag that was read, settled or not."""
        if self.channel is not None and self.channel.read:
            tag = data.draw(st.integers(1, self.channel.read))
            self.confirm_tag(tag, data.draw(st.booleans()), ack=data.draw(st.booleans()))

    def confirm_what_does_not_exist(self, data: st.DataObject, age: int) -> None:
        """Confirm a tag of an older channel, or one beyond the last publish."""
        current = len(self.channel.sent) if self.channel is not None else 0
        tag = current + 1 if age == 0 else data.draw(st.integers(0, current + 1))
        confirm = self.session.acked if data.draw(st.booleans()) else self.session.nacked
        confirm(self.generation - age, tag, data.draw(st.booleans()), self.now)
        self.stale += 1

    def stray_return(self, data: st.DataObject, age: int) -> None:
        """Return a message on an older channel, or one that is not on the wire."""
        on_wire = {expected.message_id for expected in self.channel.on_wire} if self.channel is not None else set()
        anything = st.sampled_from([None, "a", "nobody's"])
        message_id = data.draw(anything | st.sampled_from(sorted(on_wire)) if on_wire else anything)
        if age or message_id not in on_wire:
            self.session.returned(self.generation - age, *NO_ROUTE, message_id)
            self.stray += 1

    def old_channel_is_lost_again(self, data: st.DataObject) -> None:
        connection = data.draw(st.booleans())
        reply = data.draw(st.sampled_from([None, NO_EXCHANGE]))
        self.session.channel_lost(self.generation - 1, reply, connection=connection, text="reset")
        if connection and self.channel is None:
            self.connection_blocked, self.disconnected = False, "reset"
            self.again = self.lose_provisional() + self.again

    @precondition(lambda self: self.channel is None)
    @rule()
    def connection_follows_its_channel(self) -> None:
        self.session.connection_replaced()
        self.connection_blocked = False
        self.session.blocked_reason = None
        self.again = self.lose_provisional() + self.again

    @precondition(lambda self: self.channel is None)
    @rule()
    def attempt_fails(self) -> None:
        self.disconnected = "refused"
        self.session.disconnected("refused")

    def lose_provisional(self) -> list[Expected]:
        lost = self.provisional
        self.ask_after = -inf
        self.answered.clear()
        for expected in lost:
            expected.final_at = None
            expected.in_doubt = True
        return lost

    @precondition(lambda self: self.channel)
    @rule(loss=st.sampled_from([(None, False), (None, True), (FORCED, True)]))
    def lose_channel(self, loss: tuple[BrokerReply | None, bool]) -> None:
        self.lose(loss[0], connection=loss[1])

    def lose(self, reply: BrokerReply | None, *, connection: bool, overdue: bool = False) -> None:
        channel = self.channel
        assert channel is not None
        probing = self.session._bisector.active
        isolating = reply in (NO_EXCHANGE, FRAME_ERROR) or probing
        self.session.channel_lost(channel.generation, reply, connection=connection, text="reset")
        on_wire = channel.on_wire
        unsettled = [expected for expected in on_wire if expected.outcome is None]
        if channel.passed_over_at < inf:
            long_ago = [one for one in on_wire if one.sent_at + CONFIRM_TIMEOUT <= channel.passed_over_at]
            self.blamed.update((one.destination, channel.passed_over_at) for one in long_ago)
        blames = reply in (NO_EXCHANGE, FRAME_ERROR)
        named = [one for one in on_wire if one.publication.exchange == MISSING] if reply is NO_EXCHANGE else []
        self.mark_doubt(on_wire, named, alone=blames and len(on_wire) == 1)
        if blames and len(on_wire) == 1:
            self.refuse(on_wire)
        elif len(named) == 1:
            self.refuse(named)
        together = [one for one in [*named, *self.again] if one.outcome is None and one.publication.outcome is not None]
        if together:
            assert named == on_wire, "refused, though the error may have meant others"
            assert all(one.sends and one.publication.exchange == MISSING for one in together)
            self.refuse([*named, *together])
        if not probing:
            self.cleared = []
        elif overdue:
            self.cleared += unsettled
        if connection:
            unsettled = [*self.lose_provisional(), *unsettled]
            if not isolating:
                unsettled.sort(key=lambda one: one.sent_last)
        self.again = [*unsettled, *self.again]
        if probing and overdue:
            suspects = [one for one in self.again if one.publication.state is PublicationState.SUSPECT]
            others = [one for one in self.again if one not in suspects and one not in self.cleared]
            self.again = [*suspects, *self.cleared, *others]
        self.channel = None
        if connection:
            self.connection_blocked, self.disconnected = False, "reset"

    def mark_doubt(self, on_wire: list[Expected], named: list[Expected], *, alone: bool) -> None:
        """Mark the publishes before the last named one: only they were processed."""
        processed = [] if alone else on_wire[: on_wire.index(named[-1])] if named else on_wire
        for expected in processed:
            if expected.outcome is None:
                expected.in_doubt = True

    def refuse(self, culprits: Iterable[Expected]) -> None:
        for expected in culprits:
            if expected.outcome is None:
                assert expected.culprit is not None
                expected.outcome = Outcome.REFUSED

    def block(self) -> None:
        self.session.blocked("low on memory")
        self.connection_blocked = True

    def unblock(self) -> None:
        self.session.unblocked(self.now)
        self.connection_blocked = False
        self.unblocked_at = self.now
        if self.channel is not None:
            self.channel.progress(self.now)

    def give_up(self, expected: Expected) -> None:
        returned = self.channel is not None and expected in self.channel.returned
        still_returned = returned and self.channel is not None and expected in self.channel.on_wire
        if still_returned:
            expected.outcome = Outcome.RETURNED
        elif expected.sends and expected.nacks == expected.sends:
            expected.outcome = Outcome.NACKED
        else:
            expected.outcome = Outcome.UNKNOWN
        expected.blocked = not expected.sends and self.connection_blocked
        expected.final_at = None

    # invariants

    @invariant()
    def all_invariants(self) -> None:
        self.every_publish_is_settled_once_and_as_the_broker_said()
        self.culprits_alone_are_refused_and_returned_ones_never_confirmed()
        self.a_place_is_freed_once_when_settled_and_off_the_wire()
        self.what_can_be_seen_is_true()
        self.counts_add_up()
        self.doubt_begins_when_confirms_are_overdue()
        self.a_channel_with_nacks_only_is_opened_anew()
        self.the_shell_is_woken_in_time()

    def every_publish_is_settled_once_and_as_the_broker_said(self) -> None:
        self.settled.update(self.session.settled)
        self.session.settled.clear()
        for expected in self.everyone:
            publication = expected.publication
            assert publication.outcome is expected.outcome
            assert self.settled[publication] == (expected.outcome is not None)
            assert (publication.sends, publication.nacks) == (expected.sends, expected.nacks)
            assert publication.in_doubt is expected.in_doubt
            assert isinstance(publication.failure(), PublishBlocked) is expected.blocked

    def culprits_alone_are_refused_and_returned_ones_never_confirmed(self) -> None:
        for expected in self.everyone:
            if expected.outcome is Outcome.REFUSED and expected.sends == expected.encodable:
                assert "no bytes for this one" in str(expected.publication.failure())
            elif expected.outcome is Outcome.REFUSED:
                assert expected.publication.reply is expected.culprit is not None
            if expected.outcome is Outcome.CONFIRMED:
                assert not expected.unroutable
                assert expected.culprit is None

    def a_place_is_freed_once_when_settled_and_off_the_wire(self) -> None:
        kept = [one.publication for one in self.everyone if one.publication.state is PublicationState.ABANDONED]
        assert self.session.abandoned_count == len(kept)
        assert self.session.abandoned_bytes == sum(publication.size for publication in kept)
        on_wire = self.channel.on_wire if self.channel else []
        free = [one.publication for one in self.everyone if one.outcome is not None and one not in on_wire]
        assert self.session.freed_count == len(free)
        assert self.session.freed_bytes == sum(publication.size for publication in free)

    def what_can_be_seen_is_true(self) -> None:
        unsettled = [expected.publication.accepted_at for expected in self.everyone if expected.outcome is None]
        on_wire = self.channel.on_wire if self.channel else []
        session = self.session
        assert session.outstanding == len(unsettled)
        assert session.oldest_accepted_at == min(unsettled, default=None)
        assert session.on_wire == len(on_wire)
        assert session.stale_confirms == self.stale
        assert session.blocked_reason == ("low on memory" if self.connection_blocked else None)
        assert session.disconnected_reason == self.disconnected
        for expected in self.everyone:
            assert expected.publication.state in self.possible_states(expected, expected in on_wire)

    def possible_states(self, expected: Expected, on_wire: bool) -> set[PublicationState]:
        """Return the possible states of a publication.

        The model knows neither the session's timers nor its suspects.
        """
        if expected.outcome is not None:
            return {PublicationState.ABANDONED if on_wire else PublicationState.SETTLED}
        if on_wire:
            return {PublicationState.ON_WIRE}
        if expected.final_at is not None:
            return {PublicationState.PROVISIONAL}
        if expected.due > self.now and expected not in self.again:
            return {PublicationState.DELAYED}
        for older in self.everyone[: expected.number]:
            holds_id = older.outcome is None or (self.channel is not None and older in self.channel.on_wire)
            if holds_id and older.message_id == expected.message_id:
                return {PublicationState.WAITING}
        suspects = {PublicationState.SUSPECT} if self.session._bisector.active else set()
        return {PublicationState.READY, PublicationState.DELAYED} | suspects

    def counts_add_up(self) -> None:
        statistics = self.session.statistics
        outcomes = Counter(expected.outcome for expected in self.everyone)
        assert statistics.confirmed == outcomes[Outcome.CONFIRMED] == sum(statistics.confirm_seconds.counts)
        assert statistics.nacked == outcomes[Outcome.NACKED]
        assert statistics.returned == outcomes[Outcome.RETURNED]
        assert statistics.refused == outcomes[Outcome.REFUSED]
        assert statistics.unknown == outcomes[Outcome.UNKNOWN]
        assert statistics.nacks == sum(expected.nacks for expected in self.everyone)
        assert statistics.republished == sum(max(expected.sends - 1, 0) for expected in self.everyone)
        assert statistics.stray_returns == self.stray

    def doubt_begins_when_confirms_are_overdue(self) -> None:
        channel = self.channel
        owed = channel is not None and channel.unconfirmed and not self.connection_blocked
        doubt = channel is not None and self.now >= channel.doubt_at
        assert self.session.channel_in_doubt(self.now) is bool(owed and doubt)

    def a_channel_with_nacks_only_is_opened_anew(self) -> None:
        channel = self.channel
        usable = channel is not None and not channel.owed and not self.connection_blocked
        wanted = any(expected.outcome is None for expected in self.everyone)
        due = channel is not None and self.now >= channel.nacks_since + CONFIRM_TIMEOUT
        assert self.session.reopening_due(self.now) is bool(usable and due and wanted)

    def the_shell_is_woken_in_time(self) -> None:
        moments = [expected.deadline for expected in self.everyone if expected.outcome is None]
        moments += [
            expected.due
            for expected in self.everyone
            if expected.outcome is None and expected.due > self.now and expected not in self.again
        ]
        if self.channel is not None and self.channel.since is None and not self.connection_blocked:
            final = [expected.final_at for expected in self.provisional if expected.final_at is not None]
            moments += [max(at - WATCHED, self.ask_after) for at in final]
        if self.channel is not None and self.channel.unconfirmed and not self.connection_blocked:
            moments.append(self.channel.doubt_at)
        if moments and self.channel is not None and not self.connection_blocked:
            moments.append(self.channel.nacks_since + CONFIRM_TIMEOUT + (DRAINED_WITHIN if self.channel.owed else 0.0))
        wakeup = self.session.next_wakeup()
        if moments:
            assert wakeup is not None
            assert wakeup <= min(moments)

    def teardown(self) -> None:
        """Let the broker work: everything settles, and the window is empty."""
        for turn in range(20 * len(self.everyone) + 20):
            if self.channel is None:
                self.open_channel()
            if self.connection_blocked:
                self.unblock()
            self.send((1_000_000, 300)[turn % 2])
            self.answer()
            if self.channel is not None:
                self.read_up_to(len(self.channel.sent))
            if self.channel is None:
                continue
            if self.channel.unconfirmed:
                self.confirm_tag(self.channel.read, multiple=True, ack=True)
            elif all(expected.outcome is not None for expected in self.everyone):
                break
            else:
                wakeup = self.session.next_wakeup()
                assert wakeup is not None
                assert wakeup > self.now, "woken for nothing"
                self.now = wakeup
        self.all_invariants()
        assert all(expected.outcome is not None for expected in self.everyone)
        assert self.session.freed_count == len(self.everyone)
        assert self.session.outstanding == self.session.on_wire == len(self.session.ids) == 0


TestPublishing = PublishingMachine.TestCase
TestPublishing.settings = machine(100, steps=40)
