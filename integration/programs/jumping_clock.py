"""Publish and consume while the wall clock jumps by an hour, forwards and back.

Usage: ``python -m integration.programs.jumping_clock sync|aio URL OFFSET_FILE``, under libfaketime, which reads the
offset of the wall clock from that file and leaves the monotonic clock unchanged. The program fails if the jumps
affect anything. It prints requests (``hold``, ``release`` and ``cut``, for the proxy that URL leads to); the parent
process carries out each one and answers with a line.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from queue import Queue as Queued

from integration.support.blocking import BlockingPublisher
from integration.support.blocking_consumer import BlockingConsumer
from reliable_mq import Consumer, Delivery, Message, Publisher, PublishUnconfirmed, Queue, RetryPolicy

HOUR = 3600
LATE = 15.0  # seconds that a busy machine may add
ORDERS = Queue("orders", dead_letter=None)
FULL = Queue("full", type="classic", dead_letter=None, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})


class WallClock:
    """The wall clock of this process."""

    def __init__(self, offset_file: str) -> None:
        self._offset_file = Path(offset_file)

    def jump(self, offset: int) -> None:
        """Set the clock to `offset` seconds off the true time; check that it jumped."""
        before, ticks = time.time(), time.monotonic()
        former = int(self._offset_file.read_text())
        self._offset_file.write_text(f"{offset:+d}")
        assert abs(time.time() - before - (offset - former)) < 10, "libfaketime does nothing here"
        assert time.monotonic() - ticks < 10, "libfaketime must leave the monotonic clock alone"


def ask(what: str) -> None:
    print(what, flush=True)
    assert sys.stdin.readline() == "done\n"


def messages(count: int) -> list[Message]:
    return [Message(b"x") for _ in range(count)]


def publish(publisher_of_api: type[Publisher], url: str, clock: WallClock) -> None:
    ids = set()
    with publisher_of_api(
        url,
        topology=[ORDERS, FULL],
        confirm_timeout=30,
        delivery_timeout=60,
        heartbeat=5,
        retry=RetryPolicy(max_attempts=2, delays=(1.0,)),
    ) as publisher:
        for offset in (0, HOUR, -HOUR, 0):
            clock.jump(offset)
            batch = messages(20)  # few: libfaketime makes each one slow
            ids.update(message.message_id for message in batch)
            assert publisher.publish_many(batch, routing_key="orders").ok, "publishing"
        assert len(ids) == 80, "message ids"

        # No deadline is early, whichever way the clock jumps while publishes are outstanding.
        ask("hold")
        outstanding = [publisher.submit(message, routing_key="orders") for message in messages(50)]
        for offset in (HOUR, -HOUR, 0):
            clock.jump(offset)
            began = time.monotonic()
            try:
                outstanding[0].result(0.5)
            except TimeoutError:
                assert 0.4 < time.monotonic() - began < 0.5 + LATE, "the wait for an outcome"
            else:
                raise AssertionError("settled without a confirm")
        assert publisher.statistics.in_doubt == 0, "the confirm timeout"
        # No deadline is late either.
        for offset in (HOUR, -HOUR):
            began = time.monotonic()
            confirmation = publisher.submit(Message(b"x"), routing_key="orders", timeout=1)
            clock.jump(offset)
            assert isinstance(confirmation.exception(20), PublishUnconfirmed), "a deadline"
            assert 0.9 < time.monotonic() - began < 1 + LATE, "a deadline"
        ask("release")
        assert [confirmation.exception(20) for confirmation in outstanding] == [None] * 50

        publisher.publish(Message(b"x"), routing_key="full")
        began = time.monotonic()
        nacked = publisher.submit(Message(b"x"), routing_key="full")
        clock.jump(0)
        assert nacked.exception(20) is not None
        assert 0.9 < time.monotonic() - began < 1 + LATE, "the delay of a retry"

        for offset in (HOUR, -HOUR):
            began = time.monotonic()
            ask("cut")
            clock.jump(offset)
            publisher.publish(Message(b"x"), routing_key="orders")
            assert time.monotonic() - began < LATE, "the reconnect"
        assert publisher.statistics.in_doubt <= 4, "connections were replaced"
        clock.jump(0)


def consume(consumer_of_api: type[Consumer], url: str, clock: WallClock) -> None:
    """Handle the messages of `publish`, then messages that fail while it jumps."""
    handled: Queued[tuple[float, Delivery]] = Queued()

    def handle(delivery: Delivery) -> None:
        handled.put((time.monotonic(), delivery))
        if delivery.body == b"fails" and delivery.attempt == 1:
            raise ValueError("once")

    retry = RetryPolicy(2, delays=(1.0,), backend="memory")
    with (
        consumer_of_api(url, ORDERS, handle, retry=retry, heartbeat=5) as consumer,
        Publisher(url) as publisher,
    ):
        for offset in (HOUR, -HOUR):
            publisher.publish(Message(b"fails"), routing_key="orders")
            began = failed(handled)
            clock.jump(offset)
            assert 0.9 < failed(handled) - began < 1 + LATE, "the delay of a retry in the process"
        assert consumer.reconnects == 0
        clock.jump(0)


def failed(handled: Queued[tuple[float, Delivery]]) -> float:
    """Return when the failing message was next handled."""
    while True:
        when, delivery = handled.get(timeout=20)
        if delivery.body == b"fails":
            return when


def main(api: str, url: str, offset_file: str) -> None:
    clock = WallClock(offset_file)
    publish(BlockingPublisher if api == "aio" else Publisher, url, clock)
    consume(BlockingConsumer if api == "aio" else Consumer, url, clock)
    print("end", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
