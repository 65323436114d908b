"""A channel that takes messages out of a queue one batch after the other, and gives back what was not acked.

``basic.get``, many requests in one write: it ends by itself where the queue is empty, and everything that was taken
stays this channel's until it is acked or handed back.

Invariants: a tag is acked on the channel that brought it, or not at all; when the channel or the process is lost,
RabbitMQ returns everything that was not acked; when `finish` returns, the queue has seen every ack and has what was not
acked back, in its place. (RabbitMQ answers for a queue before the queue itself has seen what was sent to it, and a
quorum queue loses acks, and gives what comes back other places, when the channel is closed before that.)
"""

from __future__ import annotations

import threading
import time
from array import array
from functools import partial
from typing import TYPE_CHECKING

from reliable_mq.core.claims import namespace_of
from reliable_mq.core.codec import RawDelivery, encode_ack, encode_get, encode_nack
from reliable_mq.core.delivery import Delivery, Source
from reliable_mq.core.setup import CheckQueue, QueueState, StepRefused, refusal
from reliable_mq.errors import BrokerUnavailable, ConsumeError, StaleDelivery
from reliable_mq.sync.channel import StepChannel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reliable_mq.core.recovery import Loss
    from reliable_mq.core.setup import ServerInfo
    from reliable_mq.settings import ConnectionSettings

__all__ = ["GetChannel"]

_ANSWER = 60.0  # seconds for the answers to one batch of requests
_PATIENCE = 60.0  # seconds for which a connection that was lost is tried again
# A quorum queue keeps the order of up to 32 messages that are returned to it together; beyond that, Erlang's maps have
# none. What is returned while an earlier command is on its way to the queue is put together with others.
_RETURNED_TOGETHER = 32
_SEEN = 2.0  # seconds in which a queue has seen what was sent to it
_LOOK_AGAIN = 0.002
_TOLD = 1.0  # seconds within which the I/O thread tells of a loss that has ended a step
_REFUSALS = frozenset({403, 404, 405, 540})  # may not read; no such queue; exclusive or single-active; a stream


class GetChannel(StepChannel):
    """See the module. One thread at a time may use it.

    Args:
        settings: where to.
        queue: its name.
        name: of the connection.

    Attributes:
        left: how many messages there were, when the first of those taken last was taken; that one included.
    """

    def __init__(self, settings: ConnectionSettings, queue: str, *, name: str) -> None:
        super().__init__(settings, name=name, patience=_PATIENCE)
        self._queue = queue
        self._virtual_host = settings.virtual_host
        self._source = Source(0, 0, queue)
        self._arrived: list[Delivery] = []
        self._owed = 0
        self._held = array("Q")  # the tags of what was taken and not acked
        self.left = 0
        self._loss: Loss | None = None

    @property
    def source(self) -> Source:
        """The channel as it is now; another after every loss."""
        return self._source

    def count(self) -> QueueState:
        """Ask how many messages are ready, and how many consumers there are.

        Raises:
            TopologyMismatch: there is no such queue.
            BrokerUnavailable: the connection is lost.
        """
        step = CheckQueue(self._queue)
        try:
            state = self.perform(step)
        except StepRefused as refused:
            raise refusal(step, refused) from refused
        if not isinstance(state, QueueState):
            raise TypeError(f"the reply to {step} is {state!r}")
        return state

    def take(self, most: int) -> list[Delivery]:
        """Take up to ``most`` messages; fewer where the queue has no more. `left` says how many it had.

        Raises:
            StaleDelivery: the channel was lost; what was taken from it is back in the queue.
            ConsumeError: RabbitMQ does not give from this queue.
            BrokerUnavailable: the broker does not answer.
        """
        self._wait_ready()
        with self._changed:
            source, self._loss, self._arrived, self._owed, self.left = self._source, None, [], most, 0
        self._io.call_soon(partial(self._ask, source, most))
        with self._changed:
            if not self._changed.wait_for(lambda: not self._owed or self._is_lost(source), _ANSWER):
                raise BrokerUnavailable(f"the broker did not answer basic.get within {_ANSWER:g} s")
            self._check(source)
            self._held.extend(delivery.delivery_tag for delivery in self._arrived)
            return self._arrived

    def ack(self, deliveries: Iterable[Delivery]) -> None:
        """Ack, and wait until the broker has read it.

        Raises:
            StaleDelivery: the channel was lost; some of them may come again.
        """
        given = [delivery for delivery in deliveries if delivery.source is self._source]
        frames = [encode_ack(self._source.channel, delivery.delivery_tag, multiple=False) for delivery in given]
        self._send(b"".join(frames))
        self._let_go({delivery.delivery_tag for delivery in given})

    def finish(self) -> None:
        """Return everything that is not acked to the queue, in the order in which it came; wait until the queue has it.

        A channel that is lost has done so already, in an order of RabbitMQ's own.
        """
        source = self._source
        try:
            self.take(1)  # answered by the queue itself, after the acks before it
            ready = max(self.left - 1, 0)
            held = self._held
            for start in range(0, len(held), _RETURNED_TOGETHER):
                group = held[start : start + _RETURNED_TOGETHER]
                self._send(encode_nack(source.channel, group[-1], multiple=True, requeue=True))
                ready += len(group)
                self._wait_for(ready)
        except (ConsumeError, BrokerUnavailable):
            return
        finally:
            self._held = array("Q")

    def _wait_for(self, ready: int) -> None:
        """Wait until that many messages are ready; or not, where somebody else takes from the queue."""
        deadline = time.monotonic() + _SEEN
        while self.count().messages < ready and time.monotonic() < deadline:
            threading.Event().wait(_LOOK_AGAIN)

    def _send(self, frames: bytes) -> None:
        source = self._source
        self._io.call_soon(lambda: self._io.write(frames) if self._source is source else None)
        try:
            self.count()  # the broker answers in order
        except BrokerUnavailable:
            with self._changed:  # where the channel was lost, that is told next
                self._changed.wait_for(lambda: self._is_lost(source), _TOLD)
                self._check(source)
            raise
        with self._changed:
            self._check(source)

    def _let_go(self, acked: set[int]) -> None:
        """What is acked was taken last, mostly."""
        kept = []
        while acked and self._held:
            tag = self._held.pop()
            if tag in acked:
                acked.discard(tag)
            else:
                kept.append(tag)
        self._held.extend(reversed(kept))

    def _is_lost(self, source: Source) -> bool:
        return self._source is not source or self._loss is not None

    def _check(self, source: Source) -> None:
        if not self._is_lost(source):
            return
        loss = self._loss
        if loss is not None and loss.by_broker and loss.code in _REFUSALS:
            raise ConsumeError(f"RabbitMQ does not give from queue {self._queue!r}: {loss.code} {loss.text}")
        raise StaleDelivery(f"the connection was lost; what was taken from queue {self._queue!r} is back in it")

    # On the I/O thread

    def _ask(self, source: Source, most: int) -> None:
        if self._source is source:
            self._io.write(encode_get(source.channel, self._queue) * most)

    def ready(self, generation: int, channel: int, frame_max: int, server: ServerInfo) -> None:
        with self._changed:
            namespace = namespace_of(server.cluster_name, self._virtual_host)
            self._source = Source(generation, channel, self._queue, namespace)
        super().ready(generation, channel, frame_max, server)

    def lost(self, generation: int, loss: Loss) -> None:
        with self._changed:
            self._loss = loss
            self._held = array("Q")
        super().lost(generation, loss)
        with self._changed:
            self._changed.notify_all()

    def got(self, delivery: RawDelivery, message_count: int) -> None:
        if not isinstance(delivery, Delivery):
            raise TypeError("the reader was told to make another kind of delivery")
        delivery.source = self._source
        with self._changed:
            self.left = self.left or message_count + 1
            self._arrived.append(delivery)
            self._answered()

    def got_empty(self) -> None:
        with self._changed:
            self._answered()

    def _answered(self) -> None:
        self._owed -= 1
        if not self._owed:
            self._changed.notify_all()
