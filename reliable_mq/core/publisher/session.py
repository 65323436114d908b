"""The publishing session: every decision of a publisher, without I/O.

The channel reports events to the session: publishes accepted, a channel opened, confirms and returns read, a channel or
a connection lost, time passed. It asks the session for the bytes to send, the settled publishes, whether to discard the
channel, and the time of the next call. The session uses no socket, clock or thread. ``now`` is the monotonic clock of
the caller, in seconds.

The states of a publish are `PublicationState`, and `TRANSITIONS` lists the events that move it between them. Only the
session changes states, except for `MessageIdQueue`, which delays a second publish of a ``message_id``.

Invariants:

- Every accepted publish is settled exactly once, and ``outcome`` never changes afterwards.
- A return takes precedence over its ack: a returned publish is never reported as confirmed.
- Exactly the publishes that were on the wire when the channel was lost are published again, before anything newer and
  in order, except that those named by the error of the broker come last, and after them those that the search cleared.
- A publish behind the one over which the broker closed the channel was not processed, and is not in doubt.
- While a channel error is bisected, nothing is published except the probed group.
- A publish is refused only if it was alone on the closed channel, if it is the only one that the error can mean, or if
  it is in a group that the error means as a whole, twice. A publish given up while on the wire is a suspect too.
- A crash of the broker leaves its publishes in doubt, and refuses no publish that has met only one crash.
- No two publishes with the same ``message_id`` are on the wire at once.
- Nothing is published without a channel, while the broker blocks, or after it is settled.
- A channel is in doubt if it passes over publishes, once for each destination until that confirms one in time.
- A channel with nacks only is opened anew once no unsettled publish is on the wire, so that none is in doubt.
- A message that cannot be encoded fails alone: nothing is marked as sent before the whole write is encoded.
- A place in the window is released once per accepted publish, when it is settled *and* off the wire, so that a late
  confirm still finds it.
- Nothing is reported as confirmed while a queue that may have received it is new (`ProvisionalConfirms`).
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Generic, TypeVar

from reliable_mq.codec import append_publish, encode_properties, plain_properties, publish_head
from reliable_mq.codec.methods import ReplyCode
from reliable_mq.core.consumer.attempts import describe
from reliable_mq.core.publisher.bisect import (
    BLAMES_A_PUBLISH,
    ChannelErrorBisector,
    named_by,
    processed,
)
from reliable_mq.core.publisher.channel_trust import ChannelTrust
from reliable_mq.core.publisher.confirms import ConfirmTracker
from reliable_mq.core.publisher.deadlines import PublishDeadlines
from reliable_mq.core.publisher.provisional import ProvisionalConfirms
from reliable_mq.core.publisher.publication import BrokerReply, Outcome, Publication, PublicationState
from reliable_mq.core.publisher.trace import PublicationEvent, encode_traced, record
from reliable_mq.core.publisher.window import MessageIdQueue
from reliable_mq.core.statistics import PublisherStatistics

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from random import Random

    from reliable_mq.core.new_queues import NewQueues
    from reliable_mq.retry import RetryPolicy

P = TypeVar("P", bound=Publication)

# Bound once, because an enum attribute lookup costs as much as the rest of a change of state.
_WAITING, _READY, _SUSPECT = PublicationState.WAITING, PublicationState.READY, PublicationState.SUSPECT
_ON_WIRE, _PROVISIONAL = PublicationState.ON_WIRE, PublicationState.PROVISIONAL
_DELAYED, _ABANDONED, _SETTLED = PublicationState.DELAYED, PublicationState.ABANDONED, PublicationState.SETTLED
_HEADS_KEPT = 1024  # maximum of cached basic.publish frames, by exchange, routing key and mandatory
_NEW = (
    "the broker has confirmed it, but made the queue so short a time ago that it loses what is in there if it dies now "
    "(new_queue_grace)"
)
_DEAD_KEPT = 64  # given-up publishes that may be in the queue, or in the heap of delays, before they are removed


class PublisherSession(Generic[P]):
    """The publishes of one publisher.

    Not thread-safe: one thread or event loop owns the session.

    Args:
        retry: The policy for nacked publishes.
        confirm_timeout: The seconds without any settlement after which the channel is in doubt, those from a write
            after which a publish that expires can be passed over, and those with nacks only after which the channel is
            opened anew.
        delivery_timeout: The seconds from acceptance after which a publish without an individual timeout is given up.
        random: The source of the jitter.
        new_queue_grace: The seconds after a queue was made during which its confirms are provisional. 0 means never.
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
        self.trust = ChannelTrust(confirm_timeout)  # the caller reports unsent bytes to it
        self._random = random
        self._tracker: ConfirmTracker[P] = ConfirmTracker()
        self._deadlines: PublishDeadlines[P] = PublishDeadlines(delivery_timeout)
        self.ids: MessageIdQueue[P] = MessageIdQueue()
        self._bisector: ChannelErrorBisector[P] = ChannelErrorBisector()
        self._ready: deque[P] = deque()
        self._probe: deque[P] = deque()  # the part of the probed group that is not written
        self._delayed: list[tuple[float, int, P]] = []
        self._order = itertools.count()  # breaks ties in _delayed
        self._heads: dict[tuple[str, str, bool], bytes] = {}
        self._provisional: ProvisionalConfirms[P] = ProvisionalConfirms(new_queue_grace)
        self._channel = 0
        self.frame_max = 131072  # the maximum frame size of the latest channel, in bytes
        self.statistics = PublisherStatistics()
        self.blocked_reason: str | None = None  # the reason while the broker blocks publishing
        #: None from when a channel is open until the connection is lost or another channel cannot be opened.
        self.disconnected_reason: str | None = "no attempt to connect has ended yet"
        self.settled: list[P] = []  # publishes settled since the caller last cleared the list
        self.abandoned_count = self.abandoned_bytes = 0  # places of publishes in the state `ABANDONED`
        self.freed_count = self.freed_bytes = 0  # places of the window released since the caller last reset them

    def continue_counts(self, former: PublisherSession[P]) -> None:
        """Continue the counts of a session that has ended, before the first event."""
        self.statistics = former.statistics
        self._tracker.stale = former.stale_confirms

    # Events

    def accept(self, publications: Collection[P]) -> None:
        """Accept publishes in the order of ``accepted_at``, each admitted to the window."""
        self._deadlines.enter(publications)
        self._ready.extend(self.ids.enter(publications))
        if self.blocked_reason is not None:
            record(publications, PublicationEvent.BLOCKED)

    def channel_opened(
        self,
        generation: int,
        channel: int,
        frame_max: int,
        now: float,
        new_queues: NewQueues,
        broker: str = "",
    ) -> None:
        """Publish on a channel that is open and in confirm mode.

        ``broker`` is the name that the broker reports, empty if it reports none. If the channel is on another
        connection than the last one, `connection_replaced` is called first.
        """
        self._tracker.channel_opened(generation)
        self._provisional.channel_opened(new_queues, broker)
        self._channel = channel
        self.disconnected_reason = None
        self.frame_max = frame_max
        self._heads.clear()
        self.trust.channel_opened(now)

    def connection_replaced(self) -> None:
        """Publish provisional publishes again, since their connection is lost."""
        self._send_first()

    def round_trip_begun(self, now: float) -> None:
        self._provisional.round_trip_begun(now)

    def round_trip_ended(self, now: float) -> None:
        """Record the broker's answer, on the channel on which the round trip began."""
        final = self._provisional.round_trip_ended(now)
        if final:
            self._confirm(final, now)

    def acked(self, generation: int, tag: int, multiple: bool, now: float) -> None:
        """Settle the publishes of a ``basic.ack``, except provisional ones."""
        settled = self._tracker.settle(generation, tag, multiple)
        if settled:
            self.trust.acked(settled, now)
            provisional = self._provisional
            if provisional.proven < provisional.new_queues.latest + provisional.grace:
                settled = provisional.acked(generation, settled, now)
            self._confirm(settled, now)

    def nacked(self, generation: int, tag: int, multiple: bool, now: float) -> None:
        """Retry or settle the publishes of a ``basic.nack``."""
        settled = self._tracker.settle(generation, tag, multiple)
        if not settled:
            return
        self.trust.nacked(settled, now)
        for publication in settled:
            publication.nacks += 1
            self.statistics.nacks += 1
            record((publication,), PublicationEvent.NACKED)
            if publication.state is _ABANDONED:
                self._release(publication)
            elif publication.reply is not None:
                self._finish(publication, Outcome.RETURNED)
            else:
                delay = None if publication.once else self._retry.delay(publication.nacks, self._random)
                if delay is None:
                    self._finish(publication, Outcome.NACKED)
                else:
                    publication.state = _DELAYED
                    heapq.heappush(self._delayed, (now + delay, next(self._order), publication))

    def returned(self, generation: int, code: int, text: str, message_id: str | None) -> None:
        """Record a ``basic.return``, which precedes the confirm of the same publish.

        ``message_id`` comes from the returned properties. None matches the publish whose ``message.message_id`` is
        empty: publishes without an id are tracked under the empty id, one at a time.
        """
        publication = self.ids.holder(message_id or "")
        state = None if publication is None or generation != self._tracker.generation else publication.state
        if publication is not None and state is _ON_WIRE:
            publication.reply = BrokerReply(code, text)
            record((publication,), PublicationEvent.RETURNED)
        elif state is not _ABANDONED:
            self.statistics.stray_returns += 1

    def disconnected(self, reason: str) -> None:
        self.disconnected_reason = reason

    def channel_lost(self, generation: int, reply: BrokerReply | None, *, connection: bool, text: str = "lost") -> None:
        """Schedule or settle the publishes of a lost channel.

        ``reply`` is the reason that the broker gave, if any. ``text`` is the reason of a connection that was lost with
        the channel.
        """
        if generation != self._tracker.generation:
            if connection and not self._tracker.open:
                self.blocked_reason, self.disconnected_reason = None, text
                self.connection_replaced()
            return
        if connection:
            self.blocked_reason, self.disconnected_reason = None, text
        lost = self._tracker.channel_lost()
        self.trust.channel_lost(lost)
        self._provisional.channel_lost()
        blames = reply is not None and (not connection or reply.code in BLAMES_A_PUBLISH)
        unwritten = list(self._probe)
        self._probe.clear()
        named = named_by(reply, [*lost, *unwritten]) if reply is not None and blames else []
        crashed = reply is not None and reply.code == ReplyCode.INTERNAL_ERROR
        doubted = processed(lost, named) if blames and not crashed else len(lost)
        unsettled: list[P] = []
        state = _SUSPECT if blames or (self._bisector.active and not self._bisector.overdue) else _READY
        for place, publication in enumerate(lost):
            if publication.state is _ABANDONED:
                self._release(publication)
                continue
            publication.state = state
            if place < doubted:
                publication.in_doubt = True
                self.statistics.in_doubt += 1
                record((publication,), PublicationEvent.IN_DOUBT)
            publication.reply = None
            unsettled.append(publication)
        if reply is not None and blames:
            for culprit in self._bisector.closed(lost, unwritten, named, crashed=crashed):
                if culprit.state is _SUSPECT:
                    culprit.reply = reply
                    self._finish(culprit, Outcome.REFUSED)
        elif self._bisector.active:
            self._bisector.interrupted(unsettled, unwritten)
        elif connection and self._provisional:
            self._send_first(unsettled, generation)
        else:
            self._ready.extendleft(reversed(unsettled))
        if connection:
            self.connection_replaced()

    def blocked(self, reason: str) -> None:
        """Stop writing until `unblocked`, after ``connection.blocked``."""
        self.blocked_reason = reason
        record(self._ready, PublicationEvent.BLOCKED)

    def unblocked(self, now: float) -> None:
        """Resume writing after ``connection.unblocked``."""
        self.blocked_reason = None
        self.trust.unblocked(now)
        record(self._ready, PublicationEvent.UNBLOCKED)

    def abandon_overdue(self) -> None:
        """Settle publishes that are tried once, before a channel in doubt is discarded.

        The others are no suspects any more.
        """
        self._bisector.overdue = True
        for publication in self._tracker.outstanding:
            if publication.once and publication.outcome is None:
                self._give_up(publication)

    def abandon_all(self) -> None:
        """Settle all publishes as at their deadline, when the publisher closes for good."""
        for publication in self._deadlines.expire(inf):
            self._give_up(publication)
        self._delayed.clear()  # otherwise they would determine the next wake-up

    def tick(self, now: float) -> None:
        """Settle expired publishes, and make delayed retries ready.

        The caller advances the timers to ``now`` before `data_to_send`.
        """
        for publication in self._deadlines.expire(now):
            if publication.state is _ON_WIRE and self.blocked_reason is None:
                self.trust.expired(publication, self._tracker.settled_through, now)
            self._give_up(publication)
        if now >= self._drained_at():
            self.trust.drained_in_vain(next(one for one in self._tracker.outstanding if one.outcome is None), now)
        while self._delayed and self._delayed[0][0] <= now:
            publication = heapq.heappop(self._delayed)[2]
            if publication.state is _DELAYED:
                publication.state = _READY
                self._ready.append(publication)

    # Work

    def data_to_send(self, now: float, limit: int) -> bytes:
        """Return the frames to write now, about ``limit`` bytes, empty if none.

        They contain whole messages, at least one.
        """
        if not self._tracker.open or self.blocked_reason is not None or self.trust.ending(now):
            return b""
        if not len(self._tracker):
            self.trust.progressed(now)
        sent: list[P] = []
        data = b""
        while not sent and (queue := self._may_be_sent()):
            try:
                data = self._encode(queue, sent, limit)
            except BaseException:  # nothing was written
                queue.extendleft(reversed(sent))
                raise
        first = self._tracker.published(sent) - len(sent)
        for tag, publication in enumerate(sent, first):
            publication.state = _ON_WIRE
            publication.tag, publication.sent_at = tag, now
            self.statistics.republished += publication.sends > 0
            publication.sends += 1
        record(sent, PublicationEvent.SENT)
        return data

    def channel_in_doubt(self, now: float) -> bool:
        """Return whether to discard the channel, because its confirms are overdue.

        Confirms are outstanding, and the broker has settled nothing for the confirm timeout, or has passed over one.
        """
        return now >= self._doubt_at()

    @property
    def doubt(self) -> str:
        """The reason for discarding a channel that is in doubt."""
        return self.trust.doubt(self.on_wire, none_settled=self._tracker.none_settled)

    def reopening_due(self, now: float) -> bool:
        """Return whether to begin to open another channel, and report `reopening_begun`.

        Only nacks have come for the confirm timeout, and unsettled publishes wait. None of them is on the wire.
        """
        return now >= self._reopening_at()

    def reopening_begun(self) -> None:
        """Write nothing more on the channel, which the caller closes and opens anew."""
        self.trust.reopening = True

    def round_trip_due(self, now: float) -> bool:
        """Return whether to begin a round trip now and report `round_trip_begun`.

        A round trip is any method that a live broker answers.
        """
        return now >= self._round_trip_at()

    def next_wakeup(self) -> float | None:
        """Return the time of the next `tick` if no event comes first, None for never."""
        delayed = self._delayed[0][0] if self._delayed else inf
        channel = (self._doubt_at(), self._reopening_at(), self._drained_at(), self._round_trip_at())
        at = min(self._deadlines.next_deadline, delayed, *channel)
        return at if at < inf else None

    # Readings

    @property
    def outstanding(self) -> int:
        return len(self._deadlines)

    @property
    def is_empty(self) -> bool:
        """Whether no publish has a place in the window. Abandoned ones keep theirs."""
        return not self.ids

    @property
    def on_wire(self) -> int:
        """The number of publishes on the open channel without a confirm."""
        return len(self._tracker)

    @property
    def proven(self) -> float:
        """The latest time such that queues made a grace before it are known to be old."""
        return self._provisional.proven

    @property
    def stale_confirms(self) -> int:
        """The number of confirms that were unknown, repeated or of an older channel."""
        return self._tracker.stale

    @property
    def oldest_accepted_at(self) -> float | None:
        """The time when the oldest unsettled publish was accepted, None without one."""
        return self._deadlines.oldest_accepted_at

    def _doubt_at(self) -> float:
        return self.trust.doubt_at if len(self._tracker) and self.blocked_reason is None else inf

    def _reopening_at(self) -> float:
        ready = self._tracker.open and self.blocked_reason is None and self.outstanding
        return self.trust.reopening_at if ready and not self._unconfirmed else inf

    def _drained_at(self) -> float:
        return self.trust.drained_at if self._unconfirmed and self.blocked_reason is None else inf

    @property
    def _unconfirmed(self) -> int:
        """The number of unsettled publishes on the wire."""
        return len(self._tracker) - self.abandoned_count

    def _round_trip_at(self) -> float:
        return self._provisional.round_trip_at if self._tracker.open and self.blocked_reason is None else inf

    def _encode(self, queue: deque[P], sent: list[P], limit: int) -> bytes:
        """Move publishes from ``queue`` to ``sent``, and return their frames.

        A publish that cannot be encoded is refused, since it would fail in the same way at every attempt.
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
                trace = publication.trace
                if trace is None and not publication.in_doubt:
                    properties = encode_properties(message)
                elif trace is not None and message.encoded_properties is None and not publication.in_doubt:
                    properties = plain_properties(trace.plain_head, message.message_id)
                else:
                    properties = encode_traced(publication)
                size += append_publish(out, head, channel, properties, message.body, frame_max)
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 -- whatever a message raises that is damaged, or a user's own
                sent.pop()
                del out[pieces:]
                publication.reply = BrokerReply(0, f"it cannot be encoded: {describe(error, 0.0)}")
                self._finish(publication, Outcome.REFUSED)
        return b"".join(out)

    def _may_be_sent(self) -> deque[P]:
        """Return the publishes to write next: ready ones, or those of the probed group.

        While there are suspects, the next group begins when the whole last group is settled.
        """
        bisector = self._bisector
        while bisector.active and not len(self._tracker) and all(one.outcome is not None for one in self._probe):
            self._probe = deque(bisector.next_group())
        if self._probe and not bisector.active:  # the cleared publishes
            self._ready.extendleft(reversed(self._probe))
            self._probe.clear()
        return self._probe if bisector.active else self._ready

    def _confirm(self, acked: Sequence[P], now: float) -> None:
        """Settle publishes that the broker has for good.

        This is `_finish` for many publishes at once, because tens of thousands of acks arrive per second.
        """
        before = len(self.settled)
        freed = 0
        waited: list[float] = []
        for publication in acked:
            publication.state = _SETTLED
            freed += publication.size
            if publication.outcome is None:
                if publication.reply is None:
                    publication.outcome = Outcome.CONFIRMED
                    waited.append(now - publication.accepted_at)
                else:
                    publication.outcome = Outcome.RETURNED
                self.settled.append(publication)
            else:
                self._no_longer_abandoned(publication)
        self._deadlines.settled(len(self.settled) - before)
        self._ready.extend(self.ids.leave(acked))
        self.freed_count += len(acked)
        self.freed_bytes += freed
        self.statistics.returned += len(self.settled) - before - len(waited)
        if waited:
            self.statistics.confirmed += len(waited)
            self.statistics.confirm_seconds.observe_all(waited)

    def _send_first(self, on_wire: Sequence[P] = (), generation: int = 0) -> None:
        """Publish provisional publishes and those of the lost channel first, in order."""
        self.statistics.in_doubt += len(self._provisional)
        publications = self._provisional.connection_lost(on_wire, generation)
        state = _SUSPECT if self._bisector.active else _READY
        for publication in publications:
            publication.state = state
        if self._bisector.active:
            self._bisector.innocent(publications)
        else:
            self._ready.extendleft(reversed(publications))

    def _give_up(self, publication: P) -> None:
        """Settle a publish in any state, by the broker's last answer or as unknown."""
        if publication.reply is not None:
            outcome = Outcome.RETURNED
        elif publication.sends and publication.nacks == publication.sends:
            outcome = Outcome.NACKED  # it waits for its backoff, or for a channel
        else:
            outcome = Outcome.UNKNOWN
            if not publication.sends and self.blocked_reason is not None:
                publication.reply = BrokerReply(0, self.blocked_reason)
            elif publication.state is _PROVISIONAL:
                self._provisional.given_up(publication)
                publication.reply = BrokerReply(0, _NEW)
        self._finish(publication, outcome, confirm_owed=publication.state is _ON_WIRE)
        if len(self._ready) > 2 * len(self._deadlines) + _DEAD_KEPT:
            self._ready = deque(waiting for waiting in self._ready if waiting.outcome is None)
        if len(self._delayed) > 2 * len(self._deadlines) + _DEAD_KEPT:
            self._delayed = [entry for entry in self._delayed if entry[2].outcome is None]
            heapq.heapify(self._delayed)

    def _finish(self, publication: P, outcome: Outcome, *, confirm_owed: bool = False) -> None:
        """Settle a publish: set its outcome, count it, and free its place and its id.

        While its confirm is outstanding, the publish keeps both until the channel settles it or is lost.
        """
        publication.outcome = outcome
        self.statistics.settled(outcome.value)
        self._deadlines.settled(1)
        self.settled.append(publication)
        if confirm_owed:
            publication.state = _ABANDONED
            self.abandoned_count += 1
            self.abandoned_bytes += publication.size
        else:
            self._release(publication)

    def _release(self, publication: P) -> None:
        """Free the place and the ``message_id`` of a settled publish off the wire."""
        waiting = publication.state is _WAITING
        if publication.state is _ABANDONED:
            self._no_longer_abandoned(publication)
        publication.state = _SETTLED
        self.freed_count += 1
        self.freed_bytes += publication.size
        if waiting:
            self.ids.withdraw(publication)
        else:
            self._ready.extend(self.ids.leave((publication,)))

    def _no_longer_abandoned(self, publication: P) -> None:
        self.abandoned_count -= 1
        self.abandoned_bytes -= publication.size
