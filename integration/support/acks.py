"""The acks of a consumer, as they pass a fault proxy: what it tells the broker, and not what it tells a test."""

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
    """Records each ack of a message, for `FaultProxy.rewrite`; changes nothing.

    Of the connections through the proxy, one is open at a time.

    Args:
        history: where they are recorded.
        by: the name of the consumer.

    Attributes:
        count: how many messages were acked.
    """

    def __init__(self, history: History, by: str = "") -> None:
        self.count = 0
        self._history = history
        self._by = by
        self._unacked: dict[tuple[int, int], str] = {}  # by channel and delivery tag, in their order
        self._delivered: tuple[int, int] | None = None  # whose content header comes next

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
