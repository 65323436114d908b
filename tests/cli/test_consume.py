"""``consume``: it acks written messages, requeues the rest, and exits in time."""

from __future__ import annotations

import io
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import pytest
from typer.testing import CliRunner

from reliable_mq.cli.app import app
from reliable_mq.cli.consume import _Follower
from reliable_mq.core import headers
from reliable_mq.retry import MOST_ATTEMPTS, RetryLater
from reliable_mq.testing.waiting import wait_until
from tests.contract.scripted_broker import ScriptedBroker

if TYPE_CHECKING:
    from reliable_mq.core.consumer.delivery import Delivery
    from reliable_mq.sync.consumer import Consumer


class Closed(io.BytesIO):
    """A pipe without a reader."""

    def write(self, _data: Any) -> int:
        raise BrokenPipeError


class Full(io.BytesIO):
    """A full disk."""

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


class RunningConsumer:
    """Run until stopped; `connected` is true from the given reading on."""

    def __init__(self, connected_at: int = 1) -> None:
        self.stopped = threading.Event()
        self.looks = 0
        self._connected_at = connected_at

    @property
    def connected(self) -> bool:
        self.looks += 1
        return self.looks >= self._connected_at

    def _run(self) -> int | None:
        assert self.stopped.wait(10)
        return None

    def stop(self) -> None:
        self.stopped.set()


def follower(
    out: io.BytesIO, *, keep: bool = False, count: int | None = None, timeout: float | None = None
) -> _Follower:
    return _Follower(out, lambda delivery: cast("bytes", delivery), keep=keep, count=count, timeout=timeout)


def delivery(body: bytes) -> Delivery:
    return cast("Delivery", body)


def run(what: _Follower) -> None:
    what.follow(cast("Consumer", RunningConsumer()))


def test_written_messages_are_acked_and_later_ones_held() -> None:
    out = io.BytesIO()
    three = follower(out, count=2)
    three.handle(delivery(b"a"))
    three.handle(delivery(b"b"))
    with pytest.raises(RetryLater):
        three.handle(delivery(b"c"))
    run(three)
    assert out.getvalue() == b"a\nb\n"
    assert three.status == 0


def test_what_is_looked_at_is_written_and_held() -> None:
    out = io.BytesIO()
    looking = follower(out, keep=True, count=1)
    with pytest.raises(RetryLater):
        looking.handle(delivery(b"a"))
    run(looking)
    assert out.getvalue() == b"a\n"
    assert looking.status == 0


def test_a_reader_that_left_is_no_failure_and_nothing_is_acked() -> None:
    broken = follower(Closed())
    with pytest.raises(RetryLater):
        broken.handle(delivery(b"a"))
    run(broken)
    assert broken.status == 0


def test_an_unwritable_output_is_a_failure_and_nothing_is_acked() -> None:
    full = follower(Full())
    with pytest.raises(RetryLater):
        full.handle(delivery(b"a"))
    with pytest.raises(OSError, match="No space left"):
        run(full)


@pytest.mark.parametrize(("count", "status"), [(None, 0), (3, 1)])
def test_an_idle_consume_exits_1_if_fewer_came_than_asked_for(count: int | None, status: int) -> None:
    idle = follower(io.BytesIO(), count=count, timeout=0.05)
    run(idle)
    assert idle.status == status


@pytest.mark.parametrize(
    ("count", "keep", "status", "told"), [(None, True, 1, True), (2, True, 0, False), (None, False, 0, False)]
)
def test_a_peek_that_reached_its_limit_says_so(
    count: int | None,
    keep: bool,
    status: int,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The broker sends no more messages than the largest prefetch."""
    monkeypatch.setattr("reliable_mq.cli.consume._PEEK_MOST", 2)
    peek = follower(io.BytesIO(), keep=keep, count=count, timeout=0.05)
    for body in (b"a", b"b"):
        with pytest.raises(RetryLater) if keep else nullcontext():
            peek.handle(delivery(body))
    run(peek)
    assert peek.status == status
    assert ("more may be in the queue" in capsys.readouterr().err) is told


def test_an_idle_consume_does_not_end_before_it_is_connected() -> None:
    """Before the connection, a full queue looks like an empty one."""
    consumer = RunningConsumer(connected_at=4)
    idle = follower(io.BytesIO(), timeout=0.001)
    idle.follow(cast("Consumer", consumer))
    assert consumer.looks == 4
    assert idle.status == 0


class Slow(io.BytesIO):
    """A pipe with a slow reader.

    A write returns when the consumer's `connected` was read more than 10 times, or when the consumer is stopped.
    """

    def __init__(self, consumer: RunningConsumer) -> None:
        super().__init__()
        self.writing = threading.Event()
        self._consumer = consumer

    def write(self, data: Any) -> int:
        self.writing.set()
        consumer = self._consumer
        wait_until(lambda: consumer.looks > 10 or consumer.stopped.is_set(), timeout=10, what="many looks, or the end")
        return super().write(data)


@pytest.mark.parametrize("keep", [False, True])
def test_it_does_not_end_while_a_message_is_being_written(keep: bool) -> None:
    """A reader such as a pager may be slower than the timeout."""
    consumer = RunningConsumer()
    out = Slow(consumer)
    slow = follower(out, keep=keep, timeout=0.1)
    with ThreadPoolExecutor(1) as pool:
        handled = pool.submit(slow.handle, delivery(b"a"))
        assert out.writing.wait(10)
        slow.follow(cast("Consumer", consumer))
        with pytest.raises(RetryLater) if keep else nullcontext():
            handled.result()
    assert consumer.looks > 10
    assert out.getvalue() == b"a\n"
    assert slow.status == 0


class InterruptedConsumer(RunningConsumer):
    """Ends on a signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def _run(self) -> int | None:
        return self._number


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_not_a_good_end(number: int, status: int) -> None:
    interrupted = follower(io.BytesIO())
    interrupted.follow(cast("Consumer", InterruptedConsumer(number)))
    assert interrupted.status == status


@pytest.mark.parametrize(("mode", "verdict"), [("--ack", "ack"), ("--peek", "nack")])
def test_a_message_with_many_attempts_is_written_like_others(mode: str, verdict: str) -> None:
    """Its own consumer may allow as many, with other delays.

    A rejected message would leave the queue, and be lost without a dead-letter exchange.
    """
    waits = {"path": [60_000]}
    tried = {headers.FORMAT: headers.FORMAT_VERSION, headers.ATTEMPT: MOST_ATTEMPTS - 1, headers.RETRY: waits}
    with ScriptedBroker() as broker, ThreadPoolExecutor(1) as executor:
        consuming = executor.submit(
            CliRunner().invoke, app, ["consume", broker.url, "orders", mode, "--count=1", "--timeout=10"]
        )
        broker.consuming.deliver(b"an order", headers=tried)
        result = consuming.result(30)
        assert (result.exit_code, result.stdout) == (0, "an order\n")
        assert [(one.verdict, one.requeue) for one in broker.settlements] == [(verdict, mode == "--peek")]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--ack", "--peek"]])
def test_one_of_ack_and_peek_is_needed(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["consume", "amqp://localhost", "q", *options])
    assert result.exit_code == 2
    assert "give either --ack or --peek" in result.output
