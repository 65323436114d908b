"""Relays into a stage, and the contents of a stage."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, contextmanager
from threading import Event
from typing import TYPE_CHECKING

from reliable_mq import Message, Publisher, Queue
from reliable_mq.codec.methods import Consume, SetPrefetch
from reliable_mq.core.stage.envelope import MOST_MESSAGES, unstaged
from reliable_mq.stage import StageOptions, StageRelay
from reliable_mq.sync.admin_channel import AdminChannel
from reliable_mq.testing.waiting import wait_until
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reliable_mq.codec import RawDelivery
    from reliable_mq.testing import VirtualHost

DEADLINE = 60.0
ORDERS = Queue("orders", dead_letter=None)
STAGED = {"queue": "orders", "stage": "orders.stage"}


class StageReader(AdminChannel):
    """Reads the raw messages of a stream.

    Attributes:
        arrived: The messages so far.
        originals: What `staged` has found in them.
    """

    def __init__(self, url: str) -> None:
        super().__init__(parse_url(url), name="stage-reader", patience=30.0)
        self.arrived: list[RawDelivery] = []
        self.originals: list[RawDelivery] = []
        self._read = 0

    def delivered(self, deliveries: list[RawDelivery]) -> None:
        self.arrived += deliveries

    def staged(self) -> int:
        """Return how many originals have arrived; read each message once."""
        new = self.arrived[self._read :]
        self._read += len(new)
        for delivery in new:
            entry = unstaged(delivery.properties, delivery.body)
            self.originals += [] if entry is None else entry.originals
        return len(self.originals)

    def wait_quiet(self) -> None:
        """Wait until no more messages arrive for a while."""
        quiet = Event()
        seen = -1
        while seen != len(self.arrived):
            seen = len(self.arrived)
            quiet.wait(0.3)


def originals(url: str, *streams: str, count: int) -> list[RawDelivery]:
    """Return all messages of a stage, without markers, once its streams have `count` of them."""
    return [each for found in originals_of(url, *streams, count=count) for each in found]


def originals_of(url: str, *streams: str, count: int) -> list[list[RawDelivery]]:
    """Return the messages of each stream of a stage, once they are `count` in total."""
    with ExitStack() as stack:
        readers = [stack.enter_context(StageReader(url)) for _ in streams]
        for reader, stream in zip(readers, streams, strict=True):
            reader.perform(SetPrefetch(65_535))
            reader.perform(Consume(stream, "all", arguments={"x-stream-offset": "first"}))
        wait_until(lambda: sum(one.staged() for one in readers) >= count, timeout=DEADLINE, what=f"{count} staged")
        for reader in readers:
            reader.wait_quiet()  # duplicates may arrive last
            reader.staged()
        return [reader.originals for reader in readers]


def delivered_of(url: str, stream: str, count: int) -> list[RawDelivery]:
    """Return all messages of a stream, as delivered, once there are `count` of them."""
    with StageReader(url) as reader:
        reader.perform(SetPrefetch(65_535))
        reader.perform(Consume(stream, "all", arguments={"x-stream-offset": "first"}))
        wait_until(lambda: len(reader.arrived) >= count, timeout=DEADLINE, what=lambda: f"{len(reader.arrived)} came")
        reader.wait_quiet()
        return list(reader.arrived)


def ids(messages: Iterable[RawDelivery]) -> Counter[str]:
    return Counter(Message.from_wire(each.body, each.properties).message_id for each in messages)


def check_each_once(url: str, *streams: str, count: int) -> None:
    """Assert that a stage has `count` messages, each of them once."""
    found = ids(originals(url, *streams, count=count))
    assert found.total() == len(found) == count, f"{found.total()} messages of {len(found)} ids, not {count}"


def publish(url: str, queue: str, count: int, first: int = 0, **declared: object) -> None:
    topology = [Queue(queue, dead_letter=None, **declared)] if declared else []  # type: ignore[arg-type]
    with Publisher(url, topology=topology, new_queue_grace=0) as publisher:
        messages = (Message(b"body", message_id=f"m{number}") for number in range(first, first + count))
        assert publisher.publish_many(messages, routing_key=queue).ok


@contextmanager
def relaying(url: str, queue: str = "orders", stage: str = "stage", **options: object) -> Iterator[StageRelay]:
    options = {"new_stage_grace": 0.0, "messages_per_entry": MOST_MESSAGES, **options}
    relay = StageRelay(StageOptions(url=url, queue=queue, stage=stage, **options))  # type: ignore[arg-type]
    relay.start()
    try:
        yield relay
    finally:
        relay.close(10)


def ready(vhost: VirtualHost, queue: str) -> int:
    with vhost.connect() as connection:
        count: int = connection.channel().queue_declare(queue, passive=True).method.message_count
    return count


def left(vhost: VirtualHost, queue: str) -> int:
    """Return the number of messages in a queue, with those that are unacked."""
    return vhost.live_counts([queue])[queue]


def wait_emptied(vhost: VirtualHost, queue: str, timeout: float = DEADLINE) -> None:
    """Wait until a queue has no message, ready or unacked.

    Messages of a lost connection may be unacked for a while, and a leader that does not respond counts no ready ones.
    """
    wait_until(
        lambda: vhost.live_counts([queue])[queue] == 0,
        timeout=timeout,
        what=f"an empty {queue!r}",
        interval=0.3,  # a count takes a tenth of a second of CPU time
    )


def is_taken(vhost: VirtualHost, *queues: str) -> bool:
    """Return whether queues have a consumer, and no ready message.

    Without the consumer, nothing is known: a leader that does not respond counts neither.
    """
    with vhost.connect() as connection:
        channel = connection.channel()
        found = [channel.queue_declare(queue, passive=True).method for queue in queues]
    return all(one.consumer_count and not one.message_count for one in found)


def publish_orders(vhost: VirtualHost, count: int, queue: Queue = ORDERS) -> list[str]:
    """Publish messages with lists and tables in headers; return their ids."""
    messages = [
        Message(b"%d" % number, headers={"n": number, "items": [1, {"two": "2"}]}, user_id="guest")
        for number in range(count)
    ]
    with Publisher(vhost.url, topology=[queue]) as publisher:
        assert publisher.publish_many(messages, routing_key=queue.name).ok
    return [message.message_id for message in messages]
