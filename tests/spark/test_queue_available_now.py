"""The end of a query with AvailableNow in queue mode, with a scripted reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reliable_mq.spark.options import read_options
from reliable_mq.spark.queue_batches import QueuePosition
from reliable_mq.spark.queue_source import QueueSource

if TYPE_CHECKING:
    from reliable_mq.spark.options import QueueOptions


def after(position: QueuePosition, messages: int) -> QueuePosition:
    sequence = position.sequence + messages
    return QueuePosition("epoch", sequence, {"orders": sequence})


class LateReader:
    """A reader whose last deliveries come just before its subscription ends."""

    exhausted = False

    def __init__(self, late: int) -> None:
        self.closed = False
        self._late = late
        self._held = 0

    def plan(self, start: QueuePosition, *, most: int, timeout: float) -> QueuePosition:
        held, self._held = self._held, 0
        return after(start, held) if held else start

    def count(self, timeout: float) -> dict[str, int]:
        return {"orders": 0}

    def settled(self, timeout: float) -> bool:
        self._held, self._late = self._late, 0
        return True

    def close(self, timeout: float) -> None:
        self.closed = True


def test_what_comes_before_the_last_subscription_is_read() -> None:
    options: QueueOptions = read_options(  # type: ignore[assignment]
        {"url": "amqp://localhost/", "queue": "orders"}, streaming=True
    )
    source = QueueSource(options, ["body"])
    reader: Any = LateReader(3)
    start = after(QueuePosition.first(["orders"]), 5)
    end = source._next_available(reader, start, 100)
    assert end == after(start, 3)
    assert not reader.closed
    assert source._next_available(reader, end, 100) == end
    assert reader.closed
