"""A replay without a broker: a limit counts every attempted dead letter."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest

from reliable_mq import Message
from reliable_mq.codec import encode_properties
from reliable_mq.core.consumer.delivery import ChannelGeneration, Delivery
from reliable_mq.core.publisher.publication import Receipt
from reliable_mq.deadletters import DeadLetterQueue, DeadMessage, Filter
from reliable_mq.deadletters.delivery_limit import DeliveryLimit
from reliable_mq.deadletters.replay import Replay, ReplayReport, Target
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, PublishNacked, PublishUnconfirmed, StaleDelivery
from reliable_mq.stores import AsyncRedisStore, MemoryStore


class FakeChannel:
    """A queue of dead letters that are delivered in batches."""

    doubtful = 0

    def __init__(self, count: int, *, lost_at: int = 0, has_ids: bool = True, body: bytes = b"") -> None:
        self.left = self._count = count
        self._has_ids = has_ids
        self._body = body
        self.acked = 0
        self._lost_at = lost_at
        self._redelivered = False
        self._next = 1

    def take(self, most: int) -> list[Delivery]:
        if self._lost_at and self._next > self._lost_at:
            self._next, self._lost_at, self._redelivered = 1, 0, True
            raise StaleDelivery("the channel was lost")
        self.left = self._count if self._next == 1 else 0
        taken = []
        for tag in range(self._next, self._next + most):
            message = Message(self._body, message_id=f"id-{tag}")
            properties = encode_properties(message) if self._has_ids else b"\0\0"
            delivery = Delivery("", tag, self._redelivered, "", "orders.dead", properties, self._body)
            delivery.came_from(ChannelGeneration(1, 1, "orders.dead"))
            taken.append(delivery)
        self._next += most
        return taken

    def ack(self, deliveries: list[Delivery]) -> None:
        self.acked += len(deliveries)

    def finish(self) -> None:
        pass


class AckLosingChannel(FakeChannel):
    """Is lost at its first ack, and then delivers everything again."""

    def ack(self, deliveries: list[Delivery]) -> None:
        if not self._redelivered:
            self._next, self._redelivered = 1, True
            raise StaleDelivery("the channel was lost")
        super().ack(deliveries)


class HeldChannel(AckLosingChannel):
    """Sends none of its first acks. RabbitMQ holds everything for the lost connection, for some reads."""

    def __init__(self, count: int, *, reads: float) -> None:
        super().__init__(count)
        self._reads = reads

    def take(self, most: int) -> list[Delivery]:
        if self._redelivered and self._reads:
            self._reads -= 1
            return []
        return super().take(most)


class CutOffChannel(FakeChannel):
    """Is lost after its first batch. RabbitMQ holds everything else for the lost connection, for some reads."""

    def __init__(self, *, reads: float) -> None:
        super().__init__(1000)
        self._reads = reads

    def take(self, most: int) -> list[Delivery]:
        if self._next > 200 and not self._redelivered:
            self._redelivered = True
            raise StaleDelivery("the channel was lost")
        if self._redelivered and self._reads:
            self._reads -= 1
            return []
        return super().take(most)


class SharedChannel(FakeChannel):
    """Others take all messages after the first 200. May be lost at its first ack, which RabbitMQ has seen."""

    def __init__(self, *, loses_an_ack: bool = False) -> None:
        super().__init__(1000)
        self._loses_an_ack = loses_an_ack

    def take(self, most: int) -> list[Delivery]:
        return [] if self._next > 200 else super().take(most)

    def ack(self, deliveries: list[Delivery]) -> None:
        if self._loses_an_ack:
            self._loses_an_ack, self.doubtful = False, len(deliveries)
            raise StaleDelivery("the channel was lost")
        super().ack(deliveries)


class StopEvent(threading.Event):
    """Does not block a wait, or is set during it."""

    def __init__(self, *, comes: bool) -> None:
        super().__init__()
        self._comes = comes

    def wait(self, timeout: float | None = None) -> bool:
        return self._comes


class FakePublisher:
    """Nacks messages whose id ends with one of the given digits."""

    possible_duplicate = False

    def __init__(self, *, refuses: str) -> None:
        self.submitted = 0
        self.bodies: list[object] = []
        self._refuses = refuses

    def submit(self, message: Message, **_: Any) -> Any:
        self.submitted += 1
        self.bodies.append(message.body)
        if message.message_id[-1:] in [*self._refuses]:
            raise PublishNacked("it was nacked")
        return self

    def exception(self, _timeout: float | None = None) -> None:
        return None

    def receipt(self) -> Receipt:
        return Receipt("id", possible_duplicate=self.possible_duplicate)


class InterruptedPublisher(FakePublisher):
    """Is interrupted by Ctrl-C while the first confirm is awaited."""

    interrupted = False

    def exception(self, _timeout: float | None = None) -> None:
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt


class SilentPublisher(InterruptedPublisher):
    """Is interrupted while the first confirm is awaited, and gets no confirm."""

    def exception(self, timeout: float | None = None) -> None:
        super().exception(timeout)
        raise TimeoutError


class UnconfirmedPublisher(FakePublisher):
    """Gets confirms for the first messages, and none for later ones, which it may have sent."""

    def __init__(self, *, confirmed: int, sent: bool) -> None:
        super().__init__(refuses="")
        self._confirmed = confirmed
        self._sent = sent

    def submit(self, message: Message, **options: Any) -> Any:
        confirmation = super().submit(message, **options)
        if self.submitted <= self._confirmed:
            return confirmation
        return FailedConfirmation(PublishUnconfirmed("no confirm in time", sent=self._sent))


class FailedConfirmation:
    def __init__(self, error: PublishUnconfirmed) -> None:
        self._error = error

    def exception(self, _timeout: float | None = None) -> PublishUnconfirmed:
        return self._error


def replay(
    channel: FakeChannel,
    publisher: FakePublisher | None,
    limit: int | None,
    to: Target | None,
    rate: float | None = None,
    **options: Any,
) -> Any:
    return Replay(
        channel,  # type: ignore[arg-type]
        publisher,  # type: ignore[arg-type]
        chosen=Filter(),
        routing=lambda _message: to,
        limit=limit,
        rate=rate,
        store=None,
        namespace=None,
        delivery_limit=DeliveryLimit("orders.dead", version=(4, 3), quorum=True),
        progress=None,
        **options,
    ).run()


@pytest.mark.parametrize(("refuses", "replayed"), [("0123456789", 0), ("13579", 5), ("", 10)])
def test_a_limit_counts_what_fails_too(refuses: str, replayed: int) -> None:
    """With a wrong target, a trial run must not attempt the whole queue."""
    channel, publisher = FakeChannel(1000), FakePublisher(refuses=refuses)
    report = replay(channel, publisher, 10, Target("", "nowhere"))
    assert publisher.submitted == 10
    assert (report.replayed, report.failed, channel.acked) == (replayed, 10 - replayed, replayed)


def test_a_limit_counts_what_would_fail_in_a_dry_run() -> None:
    report = replay(FakeChannel(1000), None, 10, None)
    assert (report.replayed, report.failed) == (0, 10)


def test_a_failed_replay_is_not_tried_again_after_channel_loss() -> None:
    """Otherwise the limit would count it twice and end the run too early."""
    channel, publisher = FakeChannel(1000, lost_at=200), FakePublisher(refuses="0123456789")
    report = replay(channel, publisher, 300, Target("", "nowhere"))
    assert (publisher.submitted, report.failed, len(report.failures)) == (300, 300, 300)
    assert len({message.message_id for message, _ in report.failures}) == 300


def test_a_dry_run_counts_each_letter_once_after_channel_loss() -> None:
    report = replay(FakeChannel(1000, lost_at=200), None, 300, Target("", "orders"))
    assert (report.replayed, report.failed) == (300, 0)


@pytest.mark.parametrize(("size", "count", "kept"), [(1_000_000, 100, 34), (40_000_000, 2, 1)])
def test_failures_of_a_bounded_size_are_kept(size: int, count: int, kept: int) -> None:
    """All are counted, and at least one has its error in the report."""
    report = replay(FakeChannel(count, body=bytes(size)), None, count, None)
    assert (report.failed, len(report.failures)) == (count, kept)


def test_the_dead_letters_are_numbered_from_1() -> None:
    report = replay(FakeChannel(3), None, 2, None)
    assert [message.position for message, _ in report.failures] == [1, 2]
    assert all(isinstance(message, DeadMessage) for message, _ in report.failures)


def test_a_run_that_is_stopped_ends_with_what_it_is_at() -> None:
    """Published messages are acked and counted in the caller's report."""
    channel, publisher, report, stop = FakeChannel(1000), FakePublisher(refuses=""), ReplayReport(), threading.Event()
    submit = publisher.submit

    def stopping(message: Message, **options: Any) -> Any:
        if publisher.submitted == 249:
            stop.set()
        return submit(message, **options)

    publisher.submit = stopping  # type: ignore[method-assign]
    assert replay(channel, publisher, None, Target("", "orders"), stop=stop, report=report) is report
    assert (publisher.submitted, report.replayed, channel.acked) == (250, 250, 250)
    assert replay(channel, publisher, None, Target("", "orders"), stop=stop).replayed == 0


@pytest.mark.parametrize("stopped", [False, True])
def test_a_lost_ack_is_sent_again_though_no_more_is_tried(stopped: bool) -> None:
    """Otherwise the run would report success, and the next one would publish these messages again."""
    channel, publisher, stop = AckLosingChannel(1000), FakePublisher(refuses=""), threading.Event()
    submit = publisher.submit

    def submitting(message: Message, **options: Any) -> Any:
        if stopped and publisher.submitted == 9:
            stop.set()
        return submit(message, **options)

    publisher.submit = submitting  # type: ignore[method-assign]
    report = replay(channel, publisher, None if stopped else 10, Target("", "orders"), stop=stop)
    assert (publisher.submitted, report.replayed, report.already_published, channel.acked) == (10, 10, 10, 10)


def test_a_lost_ack_without_an_id_fails_a_run_that_tries_no_more() -> None:
    """Nobody knows whether the message is still in the queue."""
    channel, publisher, report = AckLosingChannel(1000, has_ids=False), FakePublisher(refuses=""), ReplayReport()
    with pytest.raises(StaleDelivery, match="10 replayed messages without an id may still be in the queue"):
        replay(channel, publisher, 10, Target("", "orders"), report=report)
    assert (publisher.submitted, report.replayed, channel.acked) == (10, 10, 0)


def test_a_message_sent_again_after_a_lost_confirm_is_counted() -> None:
    """It may be at its target twice."""
    publisher = FakePublisher(refuses="24")
    publisher.possible_duplicate = True
    report = replay(FakeChannel(10), publisher, 10, Target("", "orders"))
    assert (report.replayed, report.failed, report.sent_again) == (8, 2, 8)


def test_messages_held_by_a_lost_connection_are_awaited() -> None:
    """The queue looks empty until RabbitMQ notices the loss."""
    channel, publisher = HeldChannel(200, reads=3), FakePublisher(refuses="")
    report = replay(channel, publisher, None, Target("", "orders"), stop=StopEvent(comes=False))
    assert (publisher.submitted, report.already_published, channel.acked) == (200, 200, 200)


def test_messages_that_a_lost_connection_took_are_awaited() -> None:
    """The run had not published them, but they were in the queue when it began."""
    channel, publisher = CutOffChannel(reads=3), FakePublisher(refuses="")
    report = replay(channel, publisher, None, Target("", "orders"), stop=StopEvent(comes=False))
    assert (publisher.submitted, report.replayed, channel.acked) == (1000, 1000, 1000)


@pytest.mark.parametrize(("patience", "stopped"), [(0.0, False), (60.0, True)])
def test_messages_held_for_too_long_fail_the_run(
    patience: float, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run must not report success for messages that are still in the queue."""
    monkeypatch.setattr("reliable_mq.deadletters.replay._NOTICED", patience)
    channel, publisher = HeldChannel(200, reads=float("inf")), FakePublisher(refuses="")
    with pytest.raises(StaleDelivery, match="200 replayed messages were not delivered again"):
        replay(channel, publisher, None, Target("", "orders"), stop=StopEvent(comes=stopped))


@pytest.mark.parametrize(("dry_run", "loses_an_ack"), [(True, False), (False, False), (False, True)])
def test_a_replay_tells_that_others_took_messages(
    dry_run: bool, loses_an_ack: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, it would seem to be complete. Messages whose acks were seen are not among them."""
    monkeypatch.setattr("reliable_mq.deadletters.replay._NOTICED", 0.0)
    publisher = None if dry_run else FakePublisher(refuses="")
    report = replay(SharedChannel(loses_an_ack=loses_an_ack), publisher, None, Target("", "orders"))
    assert report.replayed == 200
    assert "800 of 1000 messages of queue 'orders.dead' were not read" in caplog.text


def test_a_limit_or_a_stop_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    stop = threading.Event()
    stop.set()
    replay(SharedChannel(), FakePublisher(refuses=""), 200, Target("", "orders"))
    replay(SharedChannel(), FakePublisher(refuses=""), None, Target("", "orders"), stop=stop)
    replay(FakeChannel(200), FakePublisher(refuses=""), None, Target("", "orders"))
    replay(AckLosingChannel(200), FakePublisher(refuses=""), None, Target("", "orders"))
    assert not caplog.records


def test_an_interrupt_ends_a_run_whose_channel_is_lost() -> None:
    """Otherwise the loss would hide it, and the run would publish the rest of the queue."""
    channel, publisher, report = AckLosingChannel(1000), InterruptedPublisher(refuses=""), ReplayReport()
    with pytest.raises(KeyboardInterrupt):
        replay(channel, publisher, None, Target("", "orders"), report=report)
    assert (publisher.submitted, report.replayed, report.unacked, channel.acked) == (200, 200, 200, 0)


def test_an_interrupted_run_counts_what_is_not_confirmed() -> None:
    """The next run publishes these messages again."""
    channel, publisher, report = FakeChannel(1000), SilentPublisher(refuses=""), ReplayReport()
    with pytest.raises(KeyboardInterrupt):
        replay(channel, publisher, None, Target("", "orders"), report=report)
    assert (report.replayed, report.failed, report.unconfirmed, channel.acked) == (0, 0, 200, 0)
    assert (report.unacked, replay(FakeChannel(10), FakePublisher(refuses=""), 5, Target("", "q")).unacked) == (0, 0)


@pytest.mark.parametrize("sent", [True, False])
def test_a_run_ends_if_none_of_a_batch_is_settled_in_time(sent: bool) -> None:
    """Otherwise each batch would wait for its deadline, for hours under an alarm of the broker."""
    channel, publisher, report = FakeChannel(1000), UnconfirmedPublisher(confirmed=201, sent=sent), ReplayReport()
    with pytest.raises(BrokerUnavailable, match="none of 200 messages was confirmed in time"):
        replay(channel, publisher, None, Target("", "orders"), report=report)
    assert (report.examined, publisher.submitted, report.replayed, report.failed) == (600, 600, 201, 399)
    assert channel.acked == 201


def test_a_stop_interrupts_the_wait_for_the_rate() -> None:
    channel, publisher, stop = FakeChannel(10), FakePublisher(refuses=""), threading.Event()
    submit = publisher.submit

    def stopping(message: Message, **options: Any) -> Any:
        threading.Timer(0.05, stop.set).start()
        return submit(message, **options)

    publisher.submit = stopping  # type: ignore[method-assign]
    began = time.monotonic()
    assert replay(channel, publisher, None, Target("", "orders"), rate=0.001, stop=stop).replayed == 1
    assert time.monotonic() - began < 60


def test_a_message_is_taken_when_the_rate_allows_it() -> None:
    """RabbitMQ closes a channel that holds a message for too long."""
    channel, taken = FakeChannel(10), []

    class Waiting(StopEvent):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout:
                taken.append(channel._next - 1)
            return super().wait(timeout)

    stop = Waiting(comes=False)
    assert replay(channel, FakePublisher(refuses=""), 2, Target("", "orders"), rate=0.001, stop=stop).replayed == 2
    assert taken[0] == 1  # of the two messages, while the second one waits


def test_another_body_is_published_in_its_place() -> None:
    channel, publisher = FakeChannel(3), FakePublisher(refuses="")
    assert replay(channel, publisher, 1, Target("", "orders"), body=b"mended").replayed == 1
    assert publisher.bodies == [b"mended"]


def test_a_dead_letter_of_any_size_may_be_replayed() -> None:
    """A broker with a higher limit has messages that a publisher refuses by default."""
    publisher = DeadLetterQueue("amqp://guest:guest@localhost/", "orders.dead")._new_publisher()
    message = Message(bytes(17 * 1024 * 1024))
    assert publisher._options.limits.check(message, "", "orders", 131072) == len(message.body)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"idempotency": object()}, "idempotency must be a store that can reset attempts (reset_many), not <object"),
        ({"idempotency": MemoryStore}, "idempotency must be a store that can reset attempts (reset_many), not <class"),
        ({"idempotency": AsyncRedisStore("redis://h")}, "idempotency is a store for AsyncConsumer"),
        ({"idempotency": MemoryStore(), "idempotency_namespace": 7}, "idempotency_namespace must be text, not 7"),
        ({"idempotency_namespace": "shop"}, "idempotency_namespace has no effect without idempotency="),
    ],
)
def test_a_store_that_cannot_be_reset_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        DeadLetterQueue("amqp://127.0.0.1:1", "orders.dead").replay(**options)
