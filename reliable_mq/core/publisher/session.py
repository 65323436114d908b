"""The publishing session: everything that a publisher decides, without I/O.

The shell tells the session what happened (publishes accepted, a channel opened, confirms and returns read, a channel or
a connection lost, time passed) and asks what to do: which bytes to send now, which publishes are settled, whether to
discard the channel, when to call again. The session knows no socket, clock or thread; ``now`` is the shell's monotonic
clock, in seconds.

The way of a publish::

    accepted --its message_id is outstanding--> waiting for its turn --> ready
    accepted ----------------------------------------------------------> ready
    ready    --written to the open channel-----------------------------> on the wire
    on the wire  --ack--> confirmed            --ack or nack, after a return--> returned
                 --ack, and its queue was made a moment ago--> provisional --an answer after the grace--> confirmed
                                                               provisional --connection lost--> as on the wire
                 --nack, attempts left--> delayed --its delay is over--> ready
                 --nack, none left--> nacked
                 --channel lost--> ready, in its old order (in doubt: its next attempt may be a duplicate)
                 --the broker closed the channel over it (`reliable_mq.core.publisher.bisect`)--> refused
    ready    --its message cannot be encoded--> refused
    anywhere     --its deadline passes--> unknown, or returned where the return has come (it is sent no more)

Invariants:

- every accepted publish is settled exactly once, and ``outcome`` never changes afterwards;
- a return beats its ack: a returned publish is never reported as confirmed;
- what was on the wire when the channel was lost is exactly what is published again, before anything newer, and in
  order, except that those whom the broker's error may mean come last;
- what came after the one that the broker closed the channel over was not processed, and is in no doubt;
- nothing is published while a channel exception is being isolated, except the group that is probed;
- a publish is refused only where it was alone on the channel that closed, or the only one that the error can mean, or
  one of a group that the error means as a whole, twice: one that was given up while on the wire is a suspect too;
- no two publishes with the same ``message_id`` are on the wire at once;
- nothing is published without a channel, while the broker blocks, or once it is settled;
- a message that cannot be encoded fails alone: nothing is marked as sent before the whole write is encoded;
- a place in the window is given back once per accepted publish, when it is settled *and* off the wire: a late confirm
  still finds it;
- nothing is reported as confirmed while a queue that it may have gone to is new (`NewQueues`): until then it keeps its
  place in the window, and is published again, in its old order, where the connection is lost. The broker has to answer
  on this connection what was sent after the grace: a question, or a publish. A channel that is closed costs it nothing,
  and blames it for nothing; the question is asked on the next one;
- an answer that took more than half of the grace may be the first of a broker that was frozen until then, and saves
  its queues only now: it is asked once more, a grace later.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from reliable_mq.codec import append_publish, encode_properties, publish_head
from reliable_mq.core import headers
from reliable_mq.core.consumer.attempts import describe
from reliable_mq.core.new_queues import NewQueues
from reliable_mq.core.publisher.bisect import ChannelErrorBisector, named_by
from reliable_mq.core.publisher.confirms import ConfirmTracker
from reliable_mq.core.publisher.deadlines import PublishDeadlines
from reliable_mq.core.publisher.publication import BrokerReply, Outcome, Publication
from reliable_mq.core.publisher.window import MessageIdQueue
from reliable_mq.core.statistics import PublisherStatistics

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from random import Random

    from reliable_mq.message import Message
    from reliable_mq.retry import RetryPolicy

__all__ = ["PublishingSession"]

P = TypeVar("P", bound=Publication)

_IN_DOUBT = {headers.POSSIBLE_DUPLICATE: True}
_HEADS_KEPT = 1024  # encoded basic.publish frames, by exchange, routing key and mandatory

_NEW = (
    "the broker has confirmed it, but made the queue so short a time ago that it loses what is in there if it dies now "
    "(new_queue_grace)"
)

_NEVER, _FOR_EVER = float("-inf"), float("inf")

_NO_LEADER = " (does a quorum queue have no leader? `rabbitmq-queues quorum_status` tells)"

_DEAD_KEPT = 64  # given-up publishes that may stand in the queue before it is swept

# Connection-level reply codes that a publish can provoke (frame, syntax, command and internal errors); the others
# (320 connection-forced, 530 not-allowed on a deleted virtual host, ...) blame the broker's state.
_BLAMES_A_PUBLISH = frozenset({501, 502, 503, 504, 505, 541})


class PublishingSession(Generic[P]):
    """See the module. Not thread-safe: one thread, or one event loop, owns it.

    Args:
        retry: how a nacked publish is tried again.
        confirm_timeout: seconds without any settlement after which the channel is in doubt.
        delivery_timeout: seconds from acceptance after which a publish without a timeout of its own is given up.
        random: the source of the jitter.
        new_queue_grace: seconds after a queue was made within which its confirms are provisional; 0 for never.

    Attributes:
        statistics: counts, written here and read by anyone.
        proven: when the broker of this connection is known to have lived; minus infinity where that is not known.
        frame_max: bytes that a frame may have on the latest channel.
        blocked_reason: the broker's reason while it blocks publishing; else None.
        settled: publishes settled since the shell last took and cleared the list.
        freed_count, freed_bytes: places of the window given back since the shell last took and zeroed them.
    """

    def __init__(
        self,
        *,
        retry: RetryPolicy,
        confirm_timeout: float,
        delivery_timeout: float,
        random: Random,
        new_queue_grace: float = 0.0,
    ) -> None:
        self._retry = retry
        self._confirm_timeout = confirm_timeout
        self._random = random
        self._tracker: ConfirmTracker[P] = ConfirmTracker()
        self._roster: PublishDeadlines[P] = PublishDeadlines(delivery_timeout)
        self._gate: MessageIdQueue[P] = MessageIdQueue()
        self._isolation: ChannelErrorBisector[P] = ChannelErrorBisector()
        self._ready: deque[P] = deque()
        self._probe: deque[P] = deque()  # the part of the group under isolation that is not written yet
        self._delayed: list[tuple[float, int, P]] = []
        self._order = itertools.count()  # breaks ties in _delayed
        self._heads: dict[tuple[str, str, bool], bytes] = {}
        self._new_queues = NewQueues()
        self._new_queue_grace = new_queue_grace
        self._provisional: dict[P, tuple[int, int]] = {}  # by generation and number: in the order of publishing
        self._final: list[tuple[float, int, list[P]]] = []  # when the broker has to live for which of those
        self.proven = _NEVER
        self._asked_at: float | None = None  # where an answer is outstanding on this channel
        self._ask_after = _NEVER
        self._slow = False  # the last answer took long
        self._channel = 0
        self.frame_max = 131072
        self._progress_at = 0.0  # when the broker last settled anything, or last owed nothing
        self.statistics = PublisherStatistics()
        self.blocked_reason: str | None = None
        self.settled: list[P] = []
        self.freed_count = 0
        self.freed_bytes = 0

    # What happened

    def accept(self, publications: Collection[P]) -> None:
        """Publishes came in, in the order of their ``accepted_at``, each admitted to the window."""
        self._roster.enter(publications)
        self._ready.extend(self._gate.enter(publications))

    def channel_opened(
        self, generation: int, channel: int, frame_max: int, now: float, new_queues: NewQueues | None = None
    ) -> None:
        """A channel is open and in confirm mode; publishing goes on.

        Where it is on another connection than the last one was, `connection_replaced` comes before.
        """
        self._tracker.channel_opened(generation)
        if new_queues is not None and self._new_queue_grace:
            self._new_queues = new_queues
        self._channel = channel
        self.frame_max = frame_max
        self._heads.clear()
        self._progress_at = now
        self._ask_after, self._slow = _NEVER, False

    def connection_replaced(self) -> None:
        """The connection was lost, if only after its channel: what is provisional is published again."""
        self._send_first(self._lose_provisional({}))
        self.proven = _NEVER

    def asked(self, now: float) -> None:
        """The shell asks what `question_due` wants to be asked."""
        self._asked_at = now

    def answered(self, now: float) -> None:
        """The broker has answered that, on the channel that it was asked on."""
        asked_at, self._asked_at = self._asked_at, None
        if asked_at is None:
            return
        self._slow = not self._slow and not self._is_quick(asked_at, now)
        if self._slow:
            self._ask_after = now + self._new_queue_grace
        else:
            self._prove(asked_at, now)

    def acked(self, generation: int, tag: int, multiple: bool, now: float) -> None:
        """``basic.ack`` from the broker."""
        if self.proven < self._new_queues.latest + self._new_queue_grace:
            self._acked_early(generation, tag, multiple, now)
            return
        settled = self._tracker.settle(generation, tag, multiple)
        if settled:
            self._progress_at = now
            self._conclude(settled, now)

    def nacked(self, generation: int, tag: int, multiple: bool, now: float) -> None:
        """``basic.nack`` from the broker: it does not take these. They are tried again, or reported."""
        settled = self._tracker.settle(generation, tag, multiple)
        if not settled:
            return
        self._progress_at = now
        for publication in settled:
            publication.on_wire = False
            publication.nacks += 1
            self.statistics.nacks += 1
            if publication.outcome is not None:
                self._retire(publication)
            elif publication.reply is not None:
                self._settle(publication, Outcome.RETURNED)
            else:
                delay = self._retry.delay(publication.nacks, self._random)
                if delay is None:
                    self._settle(publication, Outcome.NACKED)
                else:
                    heapq.heappush(self._delayed, (now + delay, next(self._order), publication))

    def returned(self, generation: int, code: int, text: str, message_id: str | None) -> None:
        """``basic.return`` from the broker, which comes before the confirm of the same publish.

        ``message_id`` is that of the returned properties. None finds the publish whose ``message.message_id`` is empty:
        that is how one that goes out without an id is tracked, one at a time.
        """
        publication = self._gate.holder(message_id or "")
        if publication is None or not publication.on_wire or generation != self._tracker.generation:
            self.statistics.stray_returns += 1
        elif publication.outcome is None:
            publication.reply = BrokerReply(code, text)

    def channel_lost(self, generation: int, reply: BrokerReply | None, *, connection: bool) -> None:
        """The channel is gone, alone or with its connection. ``reply`` is the broker's reason, where it gave one."""
        if generation != self._tracker.generation:
            if connection and not self._tracker.open:
                self.blocked_reason = None
                self.connection_replaced()
            return
        if connection:
            self.blocked_reason = None
        numbers = self._tracker.outstanding_numbers if self._provisional else []
        lost = self._tracker.channel_lost()
        self._asked_at = None
        blames = reply is not None and (not connection or reply.code in _BLAMES_A_PUBLISH)
        unwritten = self._take_probe()
        named = named_by(reply, [*lost, *unwritten]) if reply is not None and blames else []
        doubted = _processed(lost, named) if blames else len(lost)
        unsettled: list[P] = []
        for place, publication in enumerate(lost):
            publication.on_wire = False
            if publication.outcome is not None:
                self._retire(publication)
                continue
            if place < doubted:
                publication.in_doubt = True
                self.statistics.in_doubt += 1
            publication.reply = None
            unsettled.append(publication)
        if reply is not None and blames:
            for culprit in self._isolation.closed(lost, unwritten, named):
                if culprit.outcome is None:
                    culprit.reply = reply
                    self._settle(culprit, Outcome.REFUSED)
        elif self._isolation.active:
            self._isolation.interrupted([*unsettled, *unwritten])
        elif connection and self._provisional:
            places = {one: (generation, number) for one, number in zip(lost, numbers, strict=True)}
            self._send_first(self._lose_provisional({one: places[one] for one in unsettled}))
        else:
            self._ready.extendleft(reversed(unsettled))
        if connection:
            self.connection_replaced()

    def blocked(self, reason: str) -> None:
        """``connection.blocked``: nothing is written until the broker takes it back."""
        self.blocked_reason = reason

    def unblocked(self, now: float) -> None:
        """``connection.unblocked``."""
        self.blocked_reason = None
        self._progress_at = now

    def abandon(self, publication: P) -> None:
        """Its caller waits no longer: give it up as if its deadline had passed. It has been accepted before.

        Nothing happens where it is settled.
        """
        if publication.outcome is None:
            self._give_up(publication)

    def abandon_all(self) -> None:
        """The publisher closes for good: give up everything unsettled."""
        for publication in self._roster.expire(float("inf")):
            self._give_up(publication)

    def tick(self, now: float) -> None:
        """Time passed: give up what is over its deadline, make ready what was delayed. Call it before sending."""
        for publication in self._roster.expire(now):
            self._give_up(publication)
        while self._delayed and self._delayed[0][0] <= now:
            publication = heapq.heappop(self._delayed)[2]
            if publication.outcome is None:
                self._ready.append(publication)

    # What to do

    def data_to_send(self, now: float, limit: int) -> bytes:
        """The frames to write now: about ``limit`` bytes, at least one message, whole messages. Empty for nothing."""
        if not self._tracker.open or self.blocked_reason is not None:
            return b""
        if not len(self._tracker):
            self._progress_at = now
        sent: list[P] = []
        data = b""
        while not sent and (queue := self._may_be_sent()):
            try:
                data = self._encode(queue, sent, limit)
            except BaseException:  # nothing of it is written
                queue.extendleft(reversed(sent))
                raise
        for publication in sent:
            if publication.sends:
                self.statistics.republished += 1
            publication.sends += 1
            publication.on_wire = True
        self._tracker.published(sent)
        return data

    def channel_in_doubt(self, now: float) -> bool:
        """Whether the broker owes confirms and has settled nothing for the confirm timeout: discard the channel."""
        at = self._doubt_at()
        return at is not None and now >= at

    @property
    def doubt(self) -> str:
        """Why the channel is discarded where it is in doubt."""
        text = f"no confirm for any of {self.on_wire} outstanding publishes in time"
        return f"{text}, nor for any other on this channel{_NO_LEADER}" if self._tracker.none_settled else text

    def question_due(self, now: float) -> bool:
        """Whether to ask the broker now whether it lives, with anything that it answers. The shell says `asked`."""
        at = self._question_at()
        return at is not None and now >= at

    def next_wakeup(self) -> float | None:
        """When to call :meth:`tick` and the questions after it next, whatever else happens; None for never."""
        delayed = self._delayed[0][0] if self._delayed else None
        times = (self._roster.next_deadline, self._doubt_at(), delayed, self._question_at())
        return min((at for at in times if at is not None), default=None)

    # What can be seen

    @property
    def outstanding(self) -> int:
        """Publishes accepted and not settled."""
        return len(self._roster)

    @property
    def on_wire(self) -> int:
        """Publishes for which the open channel owes a confirm."""
        return len(self._tracker)

    @property
    def stale_confirms(self) -> int:
        """Confirms that were unknown, repeated or of an older channel."""
        return self._tracker.stale

    @property
    def oldest_accepted_at(self) -> float | None:
        """When the oldest unsettled publish was accepted; None where all is settled."""
        return self._roster.oldest_accepted_at

    def _doubt_at(self) -> float | None:
        if not len(self._tracker) or self.blocked_reason is not None:
            return None
        return self._progress_at + self._confirm_timeout

    def _question_at(self) -> float | None:
        """Also where nothing is provisional: queues that are known to be old are not new again after a loss."""
        if not self._tracker.open or self.blocked_reason is not None or self._asked_at is not None:
            return None
        old_at = self._new_queues.latest + self._new_queue_grace
        final_at = self._final[0][0] if self._final else _FOR_EVER
        at = min(final_at, old_at if old_at > self.proven else _FOR_EVER)
        return max(at, self._ask_after) if at < _FOR_EVER else None

    def _is_quick(self, asked_at: float, now: float) -> bool:
        return now - asked_at <= self._new_queue_grace / 2

    def _prove(self, moment: float, now: float) -> None:
        """The broker has answered what was sent after ``moment``."""
        self.proven = max(self.proven, moment)
        while self._final and self._final[0][0] <= self.proven:
            final = heapq.heappop(self._final)[2]
            self._conclude([one for one in final if self._provisional.pop(one, None) is not None], now)

    def _encode(self, queue: deque[P], sent: list[P], limit: int) -> bytes:
        """Move publishes from ``queue`` to ``sent``, up to ``limit`` bytes, and return their frames.

        One that cannot be encoded is refused: it would fail the same way at every attempt.
        """
        out: list[bytes] = []
        size = 0
        heads, channel, frame_max = self._heads, self._channel, self.frame_max
        while queue and size < limit:
            publication = queue.popleft()
            if publication.outcome is not None:
                continue
            sent.append(publication)
            pieces = len(out)
            try:
                key = (publication.exchange, publication.routing_key, publication.mandatory)
                head = heads.get(key)
                if head is None:
                    if len(heads) >= _HEADS_KEPT:
                        heads.clear()
                    head = heads[key] = publish_head(channel, *key)
                message = publication.message
                properties = encode_properties(message, _IN_DOUBT if publication.in_doubt else None)
                size += append_publish(out, head, channel, properties, message.body, frame_max)
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 -- whatever a message raises that is damaged, or a user's own
                sent.pop()
                del out[pieces:]
                failure = describe(error, 0.0)
                text = f"it cannot be encoded: {failure.exception_type}: {failure.exception_message}"
                publication.reply = BrokerReply(0, text)
                self._settle(publication, Outcome.REFUSED)
        return b"".join(out)

    def _may_be_sent(self) -> deque[P]:
        """What is ready; during an isolation, of one group only, and the next one once all of it is settled."""
        isolation = self._isolation
        while isolation.active and not len(self._tracker) and all(one.outcome is not None for one in self._probe):
            self._probe = deque(isolation.next_group())
        return self._probe if isolation.active else self._ready

    def _conclude(self, acked: Sequence[P], now: float) -> None:
        """The broker has these for good."""
        before = len(self.settled)
        freed = 0
        waited: list[float] = []
        for publication in acked:
            publication.on_wire = False
            freed += publication.size
            if publication.outcome is None:
                if publication.reply is None:
                    publication.outcome = Outcome.CONFIRMED
                    waited.append(now - publication.accepted_at)
                else:
                    publication.outcome = Outcome.RETURNED
                self.settled.append(publication)
        self._roster.settled(len(self.settled) - before)
        self._ready.extend(self._gate.leave(acked))
        self.freed_count += len(acked)
        self.freed_bytes += freed
        self.statistics.returned += len(self.settled) - before - len(waited)
        if waited:
            self.statistics.confirmed += len(waited)
            self.statistics.confirm_seconds.observe_all(waited)

    def _acked_early(self, generation: int, tag: int, multiple: bool, now: float) -> None:
        """The broker has these, while some queue is new."""
        numbers = self._tracker.numbers(generation, tag, multiple)
        settled = self._tracker.settle(generation, tag, multiple)
        if not settled:
            return
        self._progress_at = now
        newest = max(one.accepted_at for one in settled)
        if self._is_quick(newest, now):
            self._prove(newest, now)
        for_good: list[P] = []
        provisional: dict[float, list[P]] = {}
        for number, publication in zip(numbers, settled, strict=True):
            publication.on_wire = False
            at = None
            if publication.outcome is None and publication.reply is None:
                at = self._new_queues.final_at(
                    publication.exchange,
                    publication.routing_key,
                    now,
                    self.proven,
                    self._new_queue_grace,
                    copied=_is_copied(publication.message),
                )
            if at is None:
                for_good.append(publication)
            else:
                self._provisional[publication] = generation, number
                provisional.setdefault(at, []).append(publication)
        for at, publications in provisional.items():
            heapq.heappush(self._final, (at, next(self._order), publications))
        self._conclude(for_good, now)

    def _lose_provisional(self, unsettled: dict[P, tuple[int, int]]) -> list[P]:
        """The broker may have died, and its new queues with it: return what to publish again, in its old order.

        Args:
            unsettled: what was on the wire, by generation and number.
        """
        for publication in self._provisional:
            publication.in_doubt = True
        self.statistics.in_doubt += len(self._provisional)
        again = {**self._provisional, **unsettled}
        self._provisional.clear()
        self._final.clear()
        return sorted(again, key=again.__getitem__)

    def _send_first(self, publications: list[P]) -> None:
        """Publish these, which the broker has had, before all others."""
        if self._isolation.active:
            self._isolation.innocent(publications)
        else:
            self._ready.extendleft(reversed(publications))

    def _take_probe(self) -> list[P]:
        rest = list(self._probe)
        self._probe.clear()
        return rest

    def _settle(self, publication: P, outcome: Outcome) -> None:
        publication.outcome = outcome
        match outcome:
            case Outcome.NACKED:
                self.statistics.nacked += 1
            case Outcome.RETURNED:
                self.statistics.returned += 1
            case _:
                self.statistics.refused += 1
        self._roster.settled(1)
        self.settled.append(publication)
        self._retire(publication)

    def _give_up(self, publication: P) -> None:
        """Settle a publish wherever it stands: as unknown, unless the broker returned it."""
        if publication.reply is not None:
            publication.outcome = Outcome.RETURNED
            self.statistics.returned += 1
        else:
            if not publication.sends and self.blocked_reason is not None:
                publication.reply = BrokerReply(0, self.blocked_reason)
            elif self._provisional.pop(publication, None) is not None:
                publication.reply = BrokerReply(0, _NEW)
            publication.outcome = Outcome.UNKNOWN
            self.statistics.unknown += 1
        self._roster.settled(1)
        self.settled.append(publication)
        if publication.on_wire:
            return  # its confirm is still owed: it keeps its place until the channel settles it or is lost
        if self._gate.withdraw(publication):
            self._free(publication)
        else:
            self._retire(publication)
        if len(self._ready) > 2 * len(self._roster) + _DEAD_KEPT:
            self._ready = deque(waiting for waiting in self._ready if waiting.outcome is None)

    def _retire(self, publication: P) -> None:
        self._free(publication)
        self._ready.extend(self._gate.leave((publication,)))

    def _free(self, publication: P) -> None:
        self.freed_count += 1
        self.freed_bytes += publication.size


def _processed(lost: Sequence[P], named: Sequence[P]) -> int:
    """How many of those on a channel that the broker closed it may have processed, from the first one on.

    It processes a channel in order, so the culprit and what came after it were not; and the last one that is named is
    the culprit, or came after it.
    """
    if len(lost) == 1:
        return 0
    those = set(map(id, named))
    return next((place for place in reversed(range(len(lost))) if id(lost[place]) in those), len(lost))


def _is_copied(message: Message) -> bool:
    """Whether a message may have a header that routes it to further queues (CC, BCC)."""
    try:
        properties = message.encoded_properties
    except Exception:  # noqa: BLE001  # of a user's own message, or a damaged one: it was encoded once
        return True
    return properties is not None and (b"\x02CC" in properties or b"\x03BCC" in properties)
