"""Records the acks of a consumer as they pass through a fault proxy.

These are the acks that the consumer sends to the broker, not those that it reports to a test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pamqp.frame
from pamqp.commands import Basic, Connection
from pamqp.header import ContentHeader

from reliable_mq.testing.history import OperationKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reliable_mq.testing import Direction, Frame
    from reliable_mq.testing.history import History


class Acks:
    """A `FaultProxy.rewrite` callback that records acks and changes nothing.

    Only one connection through the proxy is open at a time.

    Args:
        history: Where the acks are recorded.
        by: The name of the consumer.

    Attributes:
        count: The number of acked messages.
    """

    def __init__(self, history: History, by: str = "") -> None:
        self.count = 0
        self._history = history
        self._by = by
        self._unacked: dict[tuple[int, int], str] = {}  # message ids by channel and delivery tag, in order
        self._delivered: tuple[int, int] | None = None  # the delivery whose content header is next

    def __call__(self, direction: Direction, frame: Frame) -> Iterable[Frame]:
        _, channel, value = pamqp.frame.unmarshal(frame.raw)
        match value:
            case Connection.Start():
                self._unacked.clear()
            case Basic.Deliver():
                self._delivered = channel, value.delivery_tag
            case ContentHeader() if self._delivered is not None and self._delivered[0] == channel:
                self._unacked[self._delivered] = value.properties.message_id
                self._delivered = None
            case Basic.Ack() if direction == "to_broker":
                self._acked(channel, value.delivery_tag, multiple=value.multiple)
        return [frame]

    def _acked(self, channel: int, tag: int, *, multiple: bool) -> None:
        for key in list(self._unacked):
            if key[0] == channel and (key[1] == tag or (multiple and key[1] < tag)):
                self._history.begin(OperationKind.ACK, self._unacked.pop(key), by=self._by).end()
                self.count += 1
