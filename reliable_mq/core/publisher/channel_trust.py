"""Whether a publisher still trusts its channel, by the confirms on it.

The broker keeps the state of publishing to a queue for each channel, and learns changes of it from messages between its
nodes, any of which can be lost. It then goes wrong for this channel alone, for as long as it is open, and a new channel
is the only cure:

- Confirms are lost. A channel on which nothing is settled for the confirm timeout is *silent*. A large message takes
  long on a slow network, so the time starts again while the network takes data, until it has taken all that was written
  or a publish whose confirm is overdue expires. Then the other publishes need another channel in time.
- The confirms of one queue are lost, for good, while those of others come. A publish is *passed over* if it expires
  without a confirm, though it was written the confirm timeout ago, and a later one is settled.
- A quorum queue that was full tells each channel once that it is not full any more. A channel that has missed it nacks
  whatever is published, even to an empty queue. A channel that has had *nacks only* for the confirm timeout, without a
  single ack, is opened anew for the next publish. If the queue is full indeed, the new channel has nacks only, too, and
  is opened anew after as long again. Before that, publishing pauses until the last confirms have come, for a tenth of
  the confirm timeout at most. A publish that is still not confirmed then puts the channel in doubt if its confirm is
  overdue. Otherwise publishing goes on, and the confirm timeout of nacks only starts again.

Publishes on the wire of a channel in doubt are published again, and can arrive twice. A queue that has no leader, or is
slower than the deadline of its publishes, passes over publishes on every channel. Therefore, its destination (exchange
and routing key) costs one channel only, until the broker settles a publish to it in time. This blame lapses after 20
confirm timeouts: the queue may have a leader again, and its confirms may be lost on this channel.

A broker that blocks the connection reads nothing, so no confirm becomes overdue meanwhile, and the confirm timeout of
all that is on the wire starts again afterwards.

The trust is that of one channel at a time. ``now`` is the monotonic clock of the caller, in seconds. The time of an
event that is not due is infinity.

Invariants of `ChannelTrust`:

- A new channel is trusted for a whole confirm timeout, whichever publishes expire.
- No destination is to blame for two channels, except if a publish to it was settled in time between them, or the blame
  has lapsed. Those that are to blame are the destination of the publish passed over, and those of all that were on the
  wire for as long.
- An ack renews the trust: the confirm timeout of nacks only is counted from the next nack.
- Nothing more is published on a channel that is to be opened anew, so that its last confirms come before its end. A
  confirm that does not come stops publishing for a tenth of the time only.
- Every operation is O(1) for each publish, and settling costs nothing while no destination is to blame.
- Memory is bounded: with 1024 destinations to blame, no further one costs a channel until the first blame lapses.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reliable_mq.core.publisher.publication import Publication

_MAX_BLAMED = 1024  # destinations
_BLAMED_FOR = 20  # confirm timeouts
_DRAINED_WITHIN = 0.1  # confirm timeouts
_NO_LEADER = " (does a quorum queue have no leader? `rabbitmq-queues quorum_status` tells)"


class ChannelTrust:
    """The confirms of one channel at a time, by their time. Not thread-safe.

    Args:
        confirm_timeout: The seconds without any settlement, or with nacks only, after which a channel is given up.
    """

    def __init__(self, confirm_timeout: float) -> None:
        self._confirm_timeout = confirm_timeout
        self._progress_at = 0.0  # when the broker last settled anything, or last had no outstanding confirms
        self.taken_at = -inf  # when the network last took written data, before it had taken all
        self._unsent = 0  # written bytes that the network had not taken at the last report
        self._all_taken = False  # whether the network has taken all that was written since `_progress_at`
        self._unblocked_at = -inf  # when the broker last ended a block
        self._nacks_since = inf  # from when nacks only are counted: the first one after the last ack
        self.reopening = False  # whether the channel is being closed for its nacks
        self.passed_over: Publication | None = None  # the first publish on the channel that was passed over
        self._passed_over_at = 0.0
        #: Destinations that have cost a channel and were not settled since, with the time of that, the oldest first.
        self._blamed: OrderedDict[tuple[str, str], float] = OrderedDict()

    # Events

    def channel_opened(self, now: float) -> None:
        """Trust a new channel, whatever happened on the last one."""
        self.progressed(now)
        self.taken_at, self._unsent = -inf, 0
        self._nacks_since = inf
        self.reopening = False
        self.passed_over = None

    def channel_lost(self, lost: Iterable[Publication]) -> None:
        """Blame all that the channel owed for as long as the publish that was passed over."""
        if self.passed_over is not None:
            sent_before = self._passed_over_at - self._confirm_timeout
            for one in lost:
                if one.sent_at <= sent_before:
                    self._blame(_destination(one))
            self.passed_over = None

    def expired(self, publication: Publication, settled_through: int, now: float) -> None:
        """Record a publish that expires on the wire, and the latest tag that is settled."""
        overdue = now - self._outstanding_since(publication) >= self._confirm_timeout
        if overdue:
            self.taken_at = -inf
        if not overdue or publication.tag >= settled_through or self.passed_over is not None:
            return
        while self._blamed and now - next(iter(self._blamed.values())) >= _BLAMED_FOR * self._confirm_timeout:
            self._blamed.popitem(last=False)
        destination = _destination(publication)
        if destination not in self._blamed and len(self._blamed) < _MAX_BLAMED:
            self.passed_over, self._passed_over_at = publication, now
            self._blame(destination)

    def progressed(self, now: float) -> None:
        """Record that confirms have come, or that none is outstanding."""
        self._progress_at = now
        self._all_taken = False

    def unsent(self, size: int, now: float) -> None:
        """Record the number of written bytes that the network has not taken yet.

        The caller reports it before and after each write.
        """
        if size < self._unsent and not self._all_taken:
            self.taken_at = now
        if not size:
            self._all_taken = True
        self._unsent = size

    def unblocked(self, now: float) -> None:
        """Record that the broker, which owed no confirm while it blocked, goes on."""
        self.progressed(now)
        self._unblocked_at = now

    def acked(self, publications: Iterable[Publication], now: float) -> None:
        """Record acks, before the publishes that they settled have their outcome."""
        self._settled(publications, now)
        self._nacks_since = inf

    def nacked(self, publications: Iterable[Publication], now: float) -> None:
        """Record nacks, before the publishes that they settled have their outcome."""
        self._settled(publications, now)
        self._nacks_since = min(self._nacks_since, now)

    def drained_in_vain(self, publication: Publication, now: float) -> None:
        """Record that the oldest outstanding confirm did not come by `drained_at`."""
        self._nacks_since = now
        since = self._outstanding_since(publication)
        if now - since >= self._confirm_timeout:
            self._progress_at = since

    def _outstanding_since(self, publication: Publication) -> float:
        return max(publication.sent_at, self._unblocked_at)

    def _settled(self, publications: Iterable[Publication], now: float) -> None:
        self.progressed(now)
        if self._blamed:
            for one in publications:
                if one.outcome is None:
                    self._blamed.pop(_destination(one), None)

    def _blame(self, destination: tuple[str, str]) -> None:
        self._blamed.pop(destination, None)
        if len(self._blamed) < _MAX_BLAMED:
            self._blamed[destination] = self._passed_over_at

    # Readings

    @property
    def doubt_at(self) -> float:
        """The time when the channel is in doubt, if confirms are outstanding until then."""
        if self.passed_over is not None:
            return self._passed_over_at
        return max(self._progress_at, self.taken_at) + self._confirm_timeout

    def doubt(self, on_wire: int, *, none_settled: bool) -> str:
        """Return the reason for discarding a channel that is in doubt."""
        if self.passed_over is not None:
            return f"no confirm for {self.passed_over} in time, though later ones are confirmed"
        text = f"no confirm for any of {on_wire} outstanding publishes in time"
        return f"{text}, nor for any other on this channel{_NO_LEADER}" if none_settled else text

    @property
    def reopening_at(self) -> float:
        """The time to open another channel, infinity once that has begun."""
        return inf if self.reopening else self._nacks_since + self._confirm_timeout

    @property
    def drained_at(self) -> float:
        """The time until which publishing waits for the confirms before `reopening_at`."""
        return self.reopening_at + _DRAINED_WITHIN * self._confirm_timeout

    def ending(self, now: float) -> bool:
        """Return whether to publish nothing more before another channel is open."""
        return self.reopening or now >= self.reopening_at


def _destination(publication: Publication) -> tuple[str, str]:
    return publication.exchange, publication.routing_key
