"""Purges and imports that fail midway, a lost channel, and the nacks at the end of an operation."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from reliable_mq import Message
from reliable_mq.codec import encode_nack
from reliable_mq.core import headers
from reliable_mq.core.consumer.delivery import ChannelGeneration, Delivery
from reliable_mq.core.publisher.publication import Receipt
from reliable_mq.core.reconnect import ConnectionLoss
from reliable_mq.deadletters import DeadLetterQueue, ImportReport
from reliable_mq.deadletters import channel as channel_module
from reliable_mq.deadletters.channel import GetChannel
from reliable_mq.deadletters.replay import Target
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, PublishUnconfirmed, StaleDelivery
from reliable_mq.url import parse_url
from tests.web.memory_broker import MemoryBroker, letter

QUEUE = "orders.dead"


def opened(broker: MemoryBroker) -> DeadLetterQueue:
    return broker.open("amqp://localhost", QUEUE)


def test_a_purge_that_fails_has_counted_what_it_deleted() -> None:
    broker = MemoryBroker()
    broker.add(QUEUE, *map(letter, range(500)))
    broker.fails_at_ack = 3
    counts: list[int] = []
    with opened(broker) as dead, pytest.raises(StaleDelivery):
        dead.purge(on_deleted=counts.append)
    assert counts == [200, 400]
    assert len(broker.queues[QUEUE]) == 100


def test_a_purge_counts_up_to_its_limit() -> None:
    broker = MemoryBroker()
    broker.add(QUEUE, *map(letter, range(500)))
    counts: list[int] = []
    with opened(broker) as dead:
        assert dead.purge(limit=250, on_deleted=counts.append) == 250
        assert dead.purge() == 250
    assert counts == [200, 250]


def test_a_reader_is_told_that_others_took_messages(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise, an export would be incomplete without a word."""
    broker = MemoryBroker()
    broker.add(QUEUE, *map(letter, range(500)))
    with opened(broker) as dead:
        assert len(list(dead.browse())) == 500
        assert not caplog.records
        messages = dead.browse()
        next(messages)
        held, broker.queues[QUEUE] = broker.queues[QUEUE], []
        assert len(list(messages)) == 199
        assert "300 of 500 messages of queue 'orders.dead' were not read" in caplog.text
    assert len(held) == 300


@pytest.mark.parametrize("limit", [-1, 0, True, 1.5])
def test_an_invalid_purge_limit_deletes_nothing(limit: Any) -> None:
    broker = MemoryBroker()
    broker.add(QUEUE, *map(letter, range(500)))
    with opened(broker) as dead, pytest.raises(ConfigurationError, match="limit must be a whole number"):
        dead.purge(limit=limit)
    assert len(broker.queues[QUEUE]) == 500


@pytest.mark.parametrize(("size", "sent"), [(1, True), (1024 * 1024, False)])
def test_an_import_ends_if_none_of_a_batch_is_settled(size: int, sent: bool) -> None:
    """The lines after it are reported, too. A batch is at most 1000 lines or 32 MiB."""
    tried = []

    class Blocked:
        def submit(self, message: Message, *, routing_key: str) -> Any:
            tried.append((message, routing_key))
            return SimpleNamespace(exception=lambda: PublishUnconfirmed("no confirm in time", sent=sent))

        def close(self, _timeout: float) -> None:
            pass

    dead = opened(MemoryBroker())
    dead._new_publisher = Blocked  # type: ignore[assignment]
    line = b'{"body": "%s"}' % (b"x" * size)
    report = dead.import_lines([b"{", *[line] * 1200])
    assert (report.lines, report.confirmed) == (1201, 0)
    assert [number for number, _ in report.failures] == [*range(1, 1202)]
    assert len(tried) == (1000 if size == 1 else 32)
    assert "no confirm in time" in str(report.failures[1][1])
    assert f"not tried, because none of {len(tried)} messages before it was confirmed" in str(report.failures[-1][1])


class EndingPublisher:
    """Confirms messages, the first of them after a loss, and raises an error once it has taken some."""

    def __init__(self, takes: int, error: BaseException) -> None:
        self._takes = takes
        self._taken = 0
        self._error = error

    def submit(self, _message: Message, *, routing_key: str) -> Any:
        assert routing_key == QUEUE
        self._takes -= 1
        if self._takes < 0:
            raise self._error
        receipt = Receipt("id", possible_duplicate=not self._taken)
        self._taken += 1
        return SimpleNamespace(exception=lambda: None, receipt=lambda: receipt)

    def close(self, _timeout: float) -> None:
        pass


def test_an_import_that_loses_its_login_reports_every_line() -> None:
    error = BrokerUnavailable("the login was refused")
    dead = opened(MemoryBroker())
    dead._new_publisher = lambda: EndingPublisher(2, error)  # type: ignore[assignment, return-value]
    assert dead.import_lines([b'{"body": "x"}'] * 4) == ImportReport(4, 2, 1, [(3, error), (4, error)])


def test_an_import_that_never_has_a_login_raises_its_error() -> None:
    dead = opened(MemoryBroker())
    dead._new_publisher = lambda: EndingPublisher(0, BrokerUnavailable("no host"))  # type: ignore[assignment, return-value]
    with pytest.raises(BrokerUnavailable, match="no host"):
        dead.import_lines([b"{", b'{"body": "x"}'])


def test_an_interrupted_import_has_reported_whole_batches() -> None:
    """Each line up to its last one is confirmed, failed or blank."""
    dead, report = opened(MemoryBroker()), ImportReport()
    dead._new_publisher = lambda: EndingPublisher(2500, KeyboardInterrupt())  # type: ignore[assignment, return-value]
    with pytest.raises(KeyboardInterrupt):
        dead.import_lines([b"{", b"", *[b'{"body": "x"}'] * 4000], report=report)
    assert (report.lines, report.confirmed, [number for number, _ in report.failures]) == (2002, 2000, [1])


def test_blank_lines_are_skipped_and_counted_as_lines() -> None:
    broker = MemoryBroker()
    broker.queues[QUEUE] = []
    with opened(broker) as dead:
        report = dead.import_lines([b"", b'{"body": "a"}', b" \t\r", b"{", b'{"body": "b"}\n', b"\n"])
    assert (report.lines, report.confirmed, broker.bodies(QUEUE)) == (6, 2, [b"a", b"b"])
    assert [number for number, _ in report.failures] == [4]


@pytest.mark.parametrize("as_published", [False, True])
def test_a_replay_never_sends_a_letter_back_into_its_own_queue(as_published: bool) -> None:
    broker = MemoryBroker()
    table = {
        headers.ORIGINAL_QUEUE: QUEUE,
        headers.ORIGINAL_EXCHANGE: "",
        headers.ORIGINAL_ROUTING_KEY: QUEUE,
    }
    broker.add(QUEUE, letter(1, **table))
    broker.queues["elsewhere"] = []
    with opened(broker) as dead:
        for dry_run in (True, False):
            report = dead.replay(as_published=as_published, dry_run=dry_run)
            assert (report.replayed, report.failed) == (0, 1)
            assert "its origin is 'orders.dead' itself" in str(report.failures[0][1])
        assert len(broker.queues[QUEUE]) == 1
        assert dead.replay(to=Target("", "elsewhere")).replayed == 1
        with pytest.raises(ConfigurationError, match="itself"):
            dead.replay(to=QUEUE)


def message(tag: int, body: bytes = b"") -> Delivery:
    return Delivery("", tag, False, "", QUEUE, b"\0\0", body)


class Reconnecting(GetChannel):
    """Gets another connection while it takes the last message."""

    def __init__(self, *, lost_again: bool) -> None:
        super().__init__(parse_url("amqp://localhost"), QUEUE, name="test")
        self._source = ChannelGeneration(1, 3, QUEUE)
        self.sent: list[tuple[int, bytes]] = []
        self._lost_again = lost_again

    def take(self, most: int) -> Any:
        self._source = ChannelGeneration(2, 7, QUEUE)
        self._unacked.append(array("Q", [1]))
        self.left = 1
        return [message(1)]

    def _send(self, source: ChannelGeneration, frames: bytes) -> None:
        self.sent.append((source.channel, frames))
        if self._lost_again:
            raise self._stale()

    def _wait_for(self, ready: int, source: ChannelGeneration | None = None) -> None:
        assert ready == 1


@pytest.mark.parametrize("lost_again", [False, True])
def test_the_last_nack_goes_to_the_channel_of_its_delivery(lost_again: bool) -> None:
    channel = Reconnecting(lost_again=lost_again)
    channel.finish()
    assert channel.sent == [(7, encode_nack(7, 1, multiple=True, requeue=True))]


class LostChannel(GetChannel):
    """Is lost between two steps of a take."""

    def __init__(self, lost_before: str) -> None:
        super().__init__(parse_url("amqp://localhost"), QUEUE, name="test")
        self._ready = True
        self._lost_before = lost_before

    def _lose(self) -> None:
        self.lost(1, ConnectionLoss(None, "reset", "connection", by_broker=False))

    def _wait_ready(self) -> None:
        if self._lost_before == "the old loss is forgotten":
            self._lose()

    def _get(self, source: ChannelGeneration, most: int) -> None:
        if self._lost_before == "the get is counted":
            self._lose()
        super()._get(source, most)


@pytest.mark.parametrize("lost_before", ["the old loss is forgotten", "the get is counted"])
def test_a_get_that_meets_a_loss_awaits_no_answer(lost_before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next channel would also wait for it, and fail."""
    monkeypatch.setattr(channel_module, "_ANSWER", 0.1)
    channel = LostChannel(lost_before)
    with pytest.raises(StaleDelivery):
        channel.take(1)
    assert channel._outstanding == 0


def test_a_loss_is_reported_with_its_reason() -> None:
    """For an operation that exceeds the consumer timeout, the reason is what to change."""
    channel = GetChannel(parse_url("amqp://localhost"), QUEUE, name="test")
    channel._wait_ready = lambda: None  # type: ignore[method-assign]
    channel._add_unacked([message(1)])
    text = "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out"
    channel.lost(1, ConnectionLoss(406, text, "channel", by_broker=True))
    channel._ready = True
    with pytest.raises(StaleDelivery, match=f"was lost \\(406 {text}\\); the messages taken from queue 'orders.dead'"):
        channel.take(1)


class AckedChannel(GetChannel):
    """Records what is sent, and has one message for each get."""

    def __init__(self) -> None:
        super().__init__(parse_url("amqp://localhost"), QUEUE, name="test")
        self._ready = True
        self._loss_at_get: ConnectionLoss | None = None
        self._tags = count(1)
        self.body = b""
        self.steps: list[str] = []

    def _wait_ready(self) -> None:
        pass

    def _send(self, source: ChannelGeneration, frames: bytes) -> None:
        self.steps.append("acks" if frames else "check")

    def _get(self, source: ChannelGeneration, most: int) -> None:
        self.steps.append(f"get {most}")
        if self._loss_at_get is not None:
            self.lost(1, self._loss_at_get)
            self._check(source)
        for _ in range(most):
            self._outstanding += 1
            self.got(message(next(self._tags), self.body), 9)


def test_an_ack_ends_when_the_queue_has_it() -> None:
    """RabbitMQ's channel holds back acks beyond 32 of a quorum queue, and loses them if its connection is lost."""
    channel = AckedChannel()
    taken = channel.take(2)
    channel.ack(taken)
    assert channel.steps == ["get 1", "get 1", "acks", "get 1", "check"]
    following = channel.take(2)
    assert (len(following), channel.left) == (2, 10)
    assert channel.steps[5:] == ["get 1"]
    channel.ack([])
    assert len(channel.steps) == 6


@pytest.mark.parametrize(("size", "taken"), [(8, 4), (20, 1), (40, 1)])
def test_a_batch_of_gets_is_as_many_as_fit(size: int, taken: int) -> None:
    """The process would otherwise hold 200 messages of any size."""
    channel = AckedChannel()
    channel.body = bytes(size * 1024 * 1024)
    for _ in range(2):
        assert len(channel.take(9)) == taken
    channel.ack(channel.take(1))
    assert len(channel.take(9)) == taken, "the message that the ack took counts, too"


def test_a_batch_of_gets_asks_for_no_more_than_the_queue_has() -> None:
    channel = AckedChannel()
    assert len(channel.take(200)) == 10


def test_an_ack_whose_channel_is_lost_before_the_queue_has_it() -> None:
    channel = AckedChannel()
    taken = channel.take(2)
    channel._loss_at_get = ConnectionLoss(None, "reset", "connection", by_broker=False)
    with pytest.raises(StaleDelivery):
        channel.ack(taken)


class InterruptedChannel(GetChannel):
    """Is interrupted while some of its gets await their replies, on a queue of 500 messages."""

    def __init__(self, *, answered: int) -> None:
        super().__init__(parse_url("amqp://localhost"), QUEUE, name="test")
        self._ready = True
        self._io: Any = SimpleNamespace(call_soon=lambda fn: fn(), bytes_received=0)
        self._interrupted_after: int | None = answered
        self.gets = 0  # without replies
        self.taken = 0
        self.sent: list[bytes] = []
        self.awaited: list[int] = []

    def _wait_ready(self) -> None:
        pass

    def _ask(self, source: ChannelGeneration, most: int) -> None:
        self.gets += max(most, 0)
        if self._interrupted_after is not None and most > 1:
            self.reply(self._interrupted_after)
            self._interrupted_after = None
            raise KeyboardInterrupt
        self.reply(self.gets)

    def _send(self, source: ChannelGeneration, frames: bytes) -> None:
        self.sent.append(frames)

    def _wait_for(self, ready: int, source: ChannelGeneration | None = None) -> None:
        self.awaited.append(ready)

    def reply(self, replies: int) -> None:
        self.gets -= replies
        for _ in range(replies):
            self.taken += 1
            self.got(message(self.taken), 500 - self.taken)


@pytest.mark.parametrize("before_the_end", [0, 20, 50])
def test_an_interrupted_batch_is_requeued_in_full(before_the_end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its messages would be withheld from the queue, and the next operation would await too many replies."""
    monkeypatch.setattr(channel_module, "_ANSWER", 0.2)
    channel = InterruptedChannel(answered=140)
    with pytest.raises(KeyboardInterrupt):
        channel.take(200)
    channel.reply(min(before_the_end, channel.gets))
    channel.finish()
    assert channel.gets == channel._outstanding == 0
    ends = [*range(32, channel.taken, 32), channel.taken]
    assert channel.sent == [encode_nack(0, end, multiple=True, requeue=True) for end in ends]
    assert channel.awaited[-1] == 500, "it waits for more messages than the queue has"
    assert len(channel.take(1)) == 1


class LostMeanwhile(AckedChannel):
    """Is lost while it stores or removes tags."""

    def __init__(self) -> None:
        super().__init__()
        self._losing = threading.Thread(target=self._lose)

    def _lose(self) -> None:
        self.lost(1, ConnectionLoss(None, "reset", "connection", by_broker=False))
        self._source = ChannelGeneration(2, 3, QUEUE)

    def lose_on_another_thread(self) -> None:
        self._losing.start()
        self._losing.join(0.1)

    def lost_at_last(self) -> None:
        """Wait for the loss, and for the next channel."""
        self._losing.join()
        self._ready = True


def test_a_loss_while_tags_are_stored_is_reported() -> None:
    """Otherwise the messages are read twice, and the next channel would requeue by tags of the old one."""

    class Channel(LostMeanwhile):
        def _add_unacked(self, deliveries: list[Delivery]) -> None:
            self.lose_on_another_thread()
            super()._add_unacked(deliveries)

    channel = Channel()
    assert len(channel.take(4)) == 4
    channel.lost_at_last()
    assert not channel._unacked
    with pytest.raises(StaleDelivery):
        channel.take(4)


def test_a_loss_while_tags_are_removed_is_reported() -> None:
    channel = LostMeanwhile()
    channel.take(3)

    class Acked(set[int]):
        def difference_update(self, *tags: Iterable[Any]) -> None:
            channel.lose_on_another_thread()
            super().difference_update(*tags)

    channel._remove_unacked(Acked({1}))
    channel.lost_at_last()
    assert not channel._unacked
    with pytest.raises(StaleDelivery):
        channel.take(4)


class SlowChannel(GetChannel):
    """Gets a large message in parts, one whenever it looks at what has arrived."""

    def __init__(self, part: int) -> None:
        super().__init__(parse_url("amqp://localhost"), QUEUE, name="test")
        self._ready = True
        self._io: Any = self
        self._part = part
        self._parts = 0

    def _wait_ready(self) -> None:
        pass

    def call_soon(self, _fn: object) -> None:
        pass

    @property
    def bytes_received(self) -> int:
        self._parts += 1
        if self._parts == 10:
            self.got(message(1), 0)
        return self._parts * self._part


def test_a_large_message_may_arrive_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_ANSWER", 0.01)
    assert len(SlowChannel(100_000).take(1)) == 1
    with pytest.raises(BrokerUnavailable, match="did not answer"):
        SlowChannel(8).take(1)  # heartbeats
