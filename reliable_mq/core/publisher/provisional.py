"""Provisional confirms: acked publishes that the broker may still lose.

A provisional publish may be in a new queue (`core.new_queues`). Round trips with pauses prove that the broker has run
since the queue was made. Its confirms are final after that. Until then the publishes keep their places in the window,
and are published again, in their old order, if the connection is lost. The loss of a channel alone does not affect
them: the round trips continue on the next channel.

Invariants:

- A publish is held here from its ack until it is final, given up, or published again.
- Queues that are known to be old stay old, unless the next connection is to another broker.
- One round trip is in progress at a time. An answer only counts on the channel on which the round trip began.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from reliable_mq.core.new_queues import NewQueues, is_copied
from reliable_mq.core.publisher.publication import Publication, PublicationState
from reliable_mq.core.publisher.trace import PublicationEvent, record

if TYPE_CHECKING:
    from collections.abc import Sequence

P = TypeVar("P", bound=Publication)

_ROUND_TRIPS: Final = 7  # the number of round trips that prove that the broker has run
_WATCHED: Final = 0.75  # the part of the grace over which they are spread


class ProvisionalConfirms(Generic[P]):
    """The provisional publishes of one publisher. Not thread-safe."""

    def __init__(self, grace: float) -> None:
        self.grace = grace  # seconds after a queue was made during which its confirms are provisional; 0 means never
        self.new_queues = NewQueues()
        #: Queues that were made a grace before this time are old, because the broker has run since.
        self.proven = -inf
        self._broker = ""
        self._generations: dict[P, int] = {}  # the channel of each publish; with its tag, it gives the order
        self._final: list[tuple[float, int, list[P]]] = []  # publishes, by the time that makes them final once proven
        self._order = itertools.count()  # breaks ties in _final
        self._begun_at: float | None = None  # when the round trip in progress on this channel began
        self._next_at = -inf  # when the pause after the last round trip ends
        self._answered: deque[float] = deque(maxlen=_ROUND_TRIPS)  # when answered round trips of this connection began

    def __len__(self) -> int:
        return len(self._generations)

    def channel_opened(self, new_queues: NewQueues, broker: str = "") -> None:
        """Begin with a channel, perhaps to another broker.

        ``broker`` is the name that the broker reports, empty if it reports none. A proof of another publisher also
        counts here.
        """
        if not self.grace:
            return
        if new_queues is not self.new_queues or broker != self._broker:
            self.new_queues = new_queues
            self._broker = broker
            self.proven = -inf
        self.proven = max(self.proven, new_queues.proven(broker, self.grace))

    def acked(self, generation: int, publications: list[P], now: float) -> list[P]:
        """Keep publishes that may be in a new queue. Return the others, which are final."""
        final: list[P] = []
        kept: dict[float, list[P]] = {}
        for publication in publications:
            at = None
            if publication.state is PublicationState.ON_WIRE and publication.reply is None:
                at = self.new_queues.final_at(
                    publication.exchange,
                    publication.routing_key,
                    now,
                    self.proven,
                    self.grace,
                    copied=is_copied(publication.message),
                )
            if at is None:
                final.append(publication)
            else:
                publication.state = PublicationState.PROVISIONAL
                self._generations[publication] = generation
                kept.setdefault(at, []).append(publication)
        for at, those in kept.items():
            record(those, PublicationEvent.PROVISIONAL)
            heapq.heappush(self._final, (at, next(self._order), those))
        return final

    def given_up(self, publication: P) -> None:
        """Forget a publish whose deadline has passed."""
        del self._generations[publication]

    def channel_lost(self) -> None:
        """Forget the round trip that is in progress."""
        self._begun_at = None

    def connection_lost(self, on_wire: Sequence[P], generation: int) -> list[P]:
        """Return the publishes to send again, in their old order.

        The broker may have died, and its new queues with it. The code that opens the next connection records the queues
        again that were not known to be old. Those ``on_wire`` have no confirm, and were published on the channel
        ``generation``.
        """
        self._next_at = -inf
        self._answered.clear()
        for publication in self._generations:
            publication.in_doubt = True
        record(self._generations, PublicationEvent.IN_DOUBT)
        generations = self._generations | dict.fromkeys(on_wire, generation)
        self._generations.clear()
        self._final.clear()
        return sorted(generations, key=lambda one: (generations[one], one.tag))

    def round_trip_begun(self, now: float) -> None:
        """Record that the round trip of `round_trip_at` has begun."""
        self._begun_at = now

    def round_trip_ended(self, now: float) -> list[P]:
        """Record the answer of the broker. Return the publishes that are now final."""
        begun_at, self._begun_at = self._begun_at, None
        if begun_at is None:
            return []
        self._answered.append(begun_at)
        watched = self.grace * _WATCHED
        self._next_at = now + watched / (_ROUND_TRIPS - 1)
        if len(self._answered) == _ROUND_TRIPS:
            moment = self._answered[0] + watched
            self.proven = max(self.proven, moment)
            self.new_queues.prove(self._broker, self.grace, moment)
        final: list[P] = []
        while self._final and self._final[0][0] <= self.proven:
            final += heapq.heappop(self._final)[2]
        return [one for one in final if self._generations.pop(one, None) is not None]

    @property
    def round_trip_at(self) -> float:
        """The time when the next round trip is due, infinity if none is.

        Round trips continue without provisional publishes, because queues that are known to be old stay old after a
        loss.
        """
        if self._begun_at is not None:
            return inf
        old_at = self.new_queues.latest + self.grace
        at = min(self._final[0][0] if self._final else inf, old_at if old_at > self.proven else inf)
        return max(at - self.grace * _WATCHED, self._next_at)
