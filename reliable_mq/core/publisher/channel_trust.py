"""Whether a publisher still trusts its channel, by the confirms on it.

The broker keeps the state of publishing to a queue for each channel, and learns changes of it from messages between its
nodes, any of which can be lost. It then goes wrong for this channel alone, for as long as it is open, and a new channel
is the only cure:

- Confirms are lost. A channel on which nothing is settled for the confirm timeout is *silent*.
- A quorum queue that was full tells each channel once that it is not full any more. A channel that has missed it nacks
  whatever is published, even to an empty queue. A channel that has had *nacks only* for the confirm timeout, without a
  single ack, is opened anew for the next publish. If the queue is full indeed, the new channel has nacks only, too, and
  is opened anew after as long again.

The trust is that of one channel at a time. ``now`` is the monotonic clock of the caller, in seconds.

Invariants of `ChannelTrust`:

- A new channel is trusted for a whole confirm timeout.
- An ack renews the trust: the confirm timeout of nacks only is counted from the next nack.
- Nothing more is published on a channel that is to be opened anew, so that its last confirms come before its end.
- Every operation is O(1).
"""

from __future__ import annotations

__all__ = ["ChannelTrust"]


class ChannelTrust:
    """The confirms of one channel at a time, by their time only. Not thread-safe.

    Args:
        confirm_timeout: The seconds without any settlement, or with nacks only, after which a channel is given up.
    """

    def __init__(self, confirm_timeout: float) -> None:
        self._confirm_timeout = confirm_timeout
        self._progress_at = 0.0  # when the broker last settled anything, or last had no outstanding confirms
        self._nacks_since: float | None = None  # when the first nack came after the last ack
        self.reopening = False  # whether the channel is being closed for its nacks

    # Events

    def channel_opened(self, now: float) -> None:
        """Trust a new channel, whatever happened on the last one."""
        self._progress_at = now
        self._nacks_since = None
        self.reopening = False

    def owes_nothing(self, now: float) -> None:
        """Record that no confirm is outstanding."""
        self._progress_at = now

    def unblocked(self, now: float) -> None:
        """Record that the broker, which owed no confirm while it blocked, goes on."""
        self._progress_at = now

    def acked(self, now: float) -> None:
        """Record acks that settled something."""
        self._progress_at = now
        self._nacks_since = None

    def nacked(self, now: float) -> None:
        """Record nacks that settled something."""
        self._progress_at = now
        if self._nacks_since is None:
            self._nacks_since = now

    # Readings

    @property
    def silent_at(self) -> float:
        """The time when the channel is silent, if confirms are outstanding until then."""
        return self._progress_at + self._confirm_timeout

    @property
    def reopening_at(self) -> float | None:
        """The time to open another channel, None without nacks or once that has begun."""
        if self._nacks_since is None or self.reopening:
            return None
        return self._nacks_since + self._confirm_timeout

    def ending(self, now: float) -> bool:
        """Return whether to publish nothing more before another channel is open."""
        at = self.reopening_at
        return self.reopening or (at is not None and now >= at)
