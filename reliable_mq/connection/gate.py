"""Holds a channel's content back until the channel is ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.core.codec import ChannelSink, RawDelivery

__all__ = ["Gate"]


class Gate:
    """Holds content back until it is opened, then lets it through in its order.

    Deliveries may follow ``basic.consume-ok`` in the same read, while later steps of the set-up are still outstanding;
    a client must not see them before it was told that the channel is ready.
    """

    def __init__(self, sink: ChannelSink) -> None:
        self._sink = sink
        self.largest_body = sink.largest_body
        self._held: list[Callable[[], None]] | None = []

    def open(self) -> None:
        """Hand over what was held back; from now on, everything at once."""
        held, self._held = self._held, None
        for event in held or ():
            event()

    def acked(self, tag: int, multiple: bool) -> None:
        self._pass(lambda: self._sink.acked(tag, multiple))

    def nacked(self, tag: int, multiple: bool) -> None:
        self._pass(lambda: self._sink.nacked(tag, multiple))

    def returned(self, code: int, text: str, exchange: str, routing_key: str, properties: bytes, body: bytes) -> None:
        self._pass(lambda: self._sink.returned(code, text, exchange, routing_key, properties, body))

    def delivered(self, deliveries: list[RawDelivery]) -> None:
        self._pass(lambda: self._sink.delivered(deliveries))

    def got(self, delivery: RawDelivery, message_count: int) -> None:
        self._pass(lambda: self._sink.got(delivery, message_count))

    def got_empty(self) -> None:
        self._pass(self._sink.got_empty)

    def oversized(self, delivery: RawDelivery, size: int, message_count: int | None) -> None:
        self._pass(lambda: self._sink.oversized(delivery, size, message_count))

    def _pass(self, event: Callable[[], None]) -> None:
        if self._held is None:
            event()
        else:
            self._held.append(event)
