"""A consumer with signals, threads and exits, and the resources it leaves behind."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest
import tenacity

from integration.support.baseline import back_to_baseline
from integration.support.consuming import Gate, Handler, Running, numbered, publish, running
from integration.support.processes import Process
from integration.support.programs import environment
from integration.support.seeds import soaking
from reliable_mq import Consumer, Message, Publisher, Queue, UsageError
from reliable_mq.testing import Frame
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliable_mq import Delivery
    from reliable_mq.testing import FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline", "consumer_api")

ORDERS = Queue("orders")


class Program:
    """``integration.programs.consuming`` as a process, and its output."""

    def __init__(
        self, url: str, api: str = "sync", *, stop_timeout: float = 30, passes: int = 0, queue: str = "shared"
    ) -> None:
        arguments = [url, str(stop_timeout), str(passes), api, queue]
        self._process = Process("integration.programs.consuming", *arguments, stderr=2)
        self.said: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.communicate()

    def wait_for(self, text: str) -> None:
        """Read until a line holds `text`."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(line.decode().rstrip())
            if text in self.said[-1]:
                return
        raise AssertionError(f"it never said {text!r}: {self.said}")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def let_through(self) -> None:
        """Let one handler end."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def end(self, timeout: float = 20) -> int:
        """Wait for the end; return the exit code."""
        assert self._process.stdout is not None
        self.said += [line.decode().rstrip() for line in self._process.stdout]
        return self._process.wait(timeout)


def declare(vhost: VirtualHost) -> None:
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        publisher.connect()


def left(vhost: VirtualHost) -> int:
    return vhost.live_counts(["orders"])["orders"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_f47_a_signal_finishes_the_handler_and_requeues_others(
    any_vhost: VirtualHost, number: signal.Signals, consumer_api: str
) -> None:
    """Running handlers finish and are acked; the other deliveries are requeued.

    The process ends by itself.
    """
    declare(any_vhost)
    publish(any_vhost, "orders", numbered(10))
    with Program(any_vhost.url, consumer_api) as program:
        program.wait_for("begun 0")
        program.signal(number)
        program.wait_for("; 1 deliveries are being handled")
        any_vhost.wait_for_messages("orders", 9)
        program.let_through()
        assert program.end() == 0
        assert [line for line in program.said if line.split()[0] in {"begun", "done", "returned"}] == [
            "begun 0",
            "done 0",
            "returned",
        ]
    assert left(any_vhost) == 9


def test_f47_a_second_signal_does_not_wait_for_the_handler(vhost: VirtualHost, consumer_api: str) -> None:
    """The delivery is requeued."""
    declare(vhost)
    publish(vhost, "orders", numbered(10))
    with Program(vhost.url, consumer_api) as program:
        program.wait_for("begun 0")
        program.signal(signal.SIGTERM)
        program.wait_for("; 1 deliveries are being handled")
        program.signal(signal.SIGTERM)
        assert program.end() == 0
        assert program.said[-1] == "returned"
        assert "done 0" not in program.said
    assert left(vhost) == 10


def test_f47_a_hanging_handler_is_given_the_stop_timeout(vhost: VirtualHost, consumer_api: str) -> None:
    """Then the process ends, and the broker redelivers the message."""
    declare(vhost)
    publish(vhost, "orders", numbered(10))
    with Program(vhost.url, consumer_api, stop_timeout=0.5) as program:
        program.wait_for("begun 0")
        program.signal(signal.SIGTERM)
        assert program.end() == 0
        assert any("still being handled after 0.5 s" in line for line in program.said)
    assert left(vhost) == 10


def test_f47_a_signal_while_the_broker_is_away_ends_it_too(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, consumer_api: str
) -> None:
    """There are no handlers to wait for."""
    proxy = fault_proxy(vhost.url)
    proxy.refuse_connections()
    with Program(proxy.url, consumer_api) as program:
        program.wait_for("next attempt in")
        program.signal(signal.SIGTERM)
        assert program.end() == 0


def test_f34_after_a_sigkill_only_what_was_not_acked_comes_back(any_vhost: VirtualHost, consumer_api: str) -> None:
    """Three were acked; the fourth was being handled, and the others waited."""
    declare(any_vhost)
    publish(any_vhost, "orders", numbered(10))
    with Program(any_vhost.url, consumer_api, passes=3) as program:
        program.wait_for("begun 3")
        wait_until(lambda: left(any_vhost) == 7, timeout=10, what="three acked")
        program.signal(signal.SIGKILL)
        assert program.end() == -signal.SIGKILL
    handler = Handler()
    with Consumer(any_vhost.url, ORDERS, handler):
        handler.wait_done(7)
    assert handler.bodies == numbered(7, first=3)
    assert handler.redelivered == [True] * 7
    assert handler.attempts == [1] * 7


def test_f34_after_a_sigkill_the_next_active_one_keeps_order(any_vhost: VirtualHost, consumer_api: str) -> None:
    """No message is skipped, and only unacked messages are handled twice."""
    orders = Queue("orders", single_active_consumer=True)
    with Program(any_vhost.url, consumer_api, passes=3, queue="single") as program:
        program.wait_for("consuming from queue")
        handler = Handler()
        with Consumer(any_vhost.url, orders, handler, name="next") as waiting:
            publish(any_vhost, "orders", numbered(10))
            program.wait_for("begun 3")
            wait_until(lambda: left(any_vhost) == 7, timeout=10, what="three acked")
            assert waiting.statistics.delivered == 0, "it waits for the role"
            program.signal(signal.SIGKILL)
            assert program.end() == -signal.SIGKILL
            handler.wait_done(7)
    assert handler.bodies == numbered(7, first=3)


@pytest.mark.parametrize("acks", ["batched", "each"])
def test_a_stop_amid_the_work_loses_and_repeats_nothing(any_vhost: VirtualHost, acks: str) -> None:
    """Handled messages are acked before the close; the next consumer gets the rest."""
    declare(any_vhost)
    publish(any_vhost, "orders", numbered(1200))
    handled: list[bytes] = []
    while len(handled) < 1200:
        handler = Handler()
        consumer = Consumer(
            any_vhost.url, ORDERS, handler, concurrency=3, ack_every=1 if acks == "each" else None, prefetch=100
        )
        with consumer:
            handler.wait_done(min(300, 1200 - len(handled)))
            consumer.stop()
        handled += handler.bodies
        assert consumer.statistics.delivered == consumer.statistics.acked + consumer.statistics.requeued
        moved = consumer.statistics.quarantined + consumer.statistics.delayed
        assert len(handler.done) == consumer.statistics.acked - moved
    assert sorted(handled, key=int) == numbered(1200)
    assert left(any_vhost) == 0


def test_a_stop_ends_the_subscription_before_it_requeues(
    any_vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """In the other order, the broker would redeliver the requeued messages here."""
    proxy = fault_proxy(any_vhost.url)
    frames: list[str] = []

    def note(_direction: str, frame: Frame) -> list[Frame]:
        frames.append(frame.name)
        return [frame]

    with Gate() as gate:
        handler = Handler(then=gate)
        with Consumer(proxy.url, ORDERS, handler, prefetch=20) as consumer:
            publish(any_vhost, "orders", numbered(50))
            handler.wait_begun(1)
            wait_until(lambda: consumer.statistics.delivered == 20, timeout=10, what="delivered")
            proxy.rewrite(note)
            consumer.stop()
            any_vhost.wait_for_messages("orders", 49)
            gate.open()
        assert consumer.statistics.delivered == 20
        assert consumer.statistics.requeued == 19
    order = [name for name in dict.fromkeys(frames) if name.startswith("basic.") or name.endswith(".close")]
    assert order == ["basic.cancel", "basic.cancel-ok", "basic.nack", "basic.ack", "channel.close", "connection.close"]


@pytest.mark.parametrize("consumer_api", ["sync"], indirect=True)
def test_a_handler_may_stop_its_consumer(vhost: VirtualHost) -> None:
    """Its own delivery is acked, the rest are requeued.

    close() in the handler would wait for itself, so it raises.
    """
    errors: list[Exception] = []

    def stop_at_three(delivery: Delivery) -> None:
        if delivery.body == b"3":
            try:
                consumer.close()
            except UsageError as error:
                errors.append(error)
            consumer.stop()
            assert stopping.wait(10)

    stopping = threading.Event()
    handler = Handler(then=stop_at_three)
    consumer = Consumer(vhost.url, ORDERS, handler)
    run = Running(consumer).start()
    wait_until(lambda: consumer.connected, timeout=10, what="consuming")
    publish(vhost, "orders", numbered(10))
    handler.wait_begun(4)
    wait_until(lambda: not consumer.connected, timeout=10, what="stopping")
    stopping.set()
    assert run.join() is None
    assert handler.bodies == numbered(4)
    assert len(errors) == 1
    assert left(vhost) == 6


@pytest.mark.parametrize("consumer_api", ["sync"], indirect=True)
def test_run_returns_though_a_handler_never_does(vhost: VirtualHost, caplog: pytest.LogCaptureFixture) -> None:
    """After stop_timeout the delivery is left to the broker, and a log line says so."""
    with Gate() as gate:
        handler = Handler(then=gate)
        consumer = Consumer(vhost.url, ORDERS, handler, stop_timeout=0.3)
        run = Running(consumer).start()
        wait_until(lambda: consumer.connected, timeout=10, what="consuming")
        publish(vhost, "orders", numbered(3))
        handler.wait_begun(1)
        started = time.monotonic()
        consumer.stop()
        assert run.join() is None
        assert 0.3 <= time.monotonic() - started < 20
    assert "1 deliveries are still being handled after 0.3 s" in caplog.text
    assert "handlers of consumer 'consumer' are still running" in caplog.text
    assert left(vhost) == 3


def test_a_stop_without_patience_counts_no_return_as_a_failure(vhost: VirtualHost) -> None:
    """Only the delivery in the handler returns by the end of the channel, which the broker counts as a failure."""
    with Gate() as gate:
        handler = Handler(then=gate)
        with Consumer(vhost.url, ORDERS, handler, stop_timeout=0) as consumer:
            publish(vhost, "orders", numbered(20))
            handler.wait_begun(1)
            wait_until(lambda: consumer.statistics.delivered == 20, timeout=10, what="delivered")
    wait_until(lambda: left(vhost) == 20, timeout=10, what="returned")
    with Consumer(vhost.url, ORDERS) as pulling, pulling.get(20, timeout=10) as found:
        counts = {one.body: one.headers.get("x-delivery-count") for one in found}
    assert counts == dict.fromkeys(numbered(20)) | {handler.bodies[0]: 1}


def test_a_stop_during_a_loss_lets_work_end_without_subscribing(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """If the connection is lost during a stop, the new one gets no deliveries."""
    proxy = fault_proxy(vhost.url)
    with Gate() as gate:
        handler = Handler(then=gate)
        with Consumer(proxy.url, ORDERS, handler, reconnect_wait=tenacity.wait_fixed(0.1)) as consumer:
            publish(vhost, "orders", numbered(5))
            handler.wait_begun(1)
            wait_until(lambda: consumer.statistics.delivered == 5, timeout=10, what="delivered")
            consumer.stop()
            wait_until(lambda: consumer.statistics.requeued == 4, timeout=10, what="the rest requeued")
            proxy.cut()
            wait_until(lambda: consumer.reconnects == 1, timeout=10, what="connected again")
            gate.open()
        assert consumer.statistics.delivered == 5
        assert proxy.seen("basic.consume", "to_broker") == 1
    assert len(handler.begun) == 1
    assert left(vhost) == 5


@pytest.mark.parametrize("consumer_api", ["sync"], indirect=True)
def test_run_off_the_main_thread_leaves_signals_alone(vhost: VirtualHost) -> None:
    """On the main thread, run() restores the signal handlers."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    handler = Handler()
    declare(vhost)
    consumer = Consumer(vhost.url, ORDERS, handler)
    with running(consumer):
        publish(vhost, "orders", numbered(1))
        handler.wait_done(1)
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    second = Consumer(vhost.url, ORDERS, lambda _: second.stop())
    publish(vhost, "orders", numbered(1))
    second.run()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("consumer_api", ["sync"], indirect=True)
def test_run_on_the_main_thread_is_stopped_by_a_signal(vhost: VirtualHost) -> None:
    """The signal is sent by a running handler."""
    handler = Handler(then=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    declare(vhost)
    publish(vhost, "orders", numbered(1))
    Consumer(vhost.url, ORDERS, handler).run()
    assert handler.bodies == numbered(1)
    assert left(vhost) == 0


@pytest.mark.parametrize("consumer_api", ["sync"], indirect=True)
def test_a_consumer_that_was_forgotten_is_closed_at_exit(vhost: VirtualHost, tmp_path: Path) -> None:
    """Acked deliveries of a script that just ends stay acked; the rest are requeued.

    The script ends after get(), with a connected consumer.
    """
    declare(vhost)
    publish(vhost, "orders", numbered(10))
    program = tmp_path / "forgetful.py"
    program.write_text(
        "import sys\n"
        "from reliable_mq import Consumer\n"
        "consumer = Consumer(sys.argv[1], 'orders')\n"
        "with consumer.get(4, timeout=10) as deliveries:\n"
        "    assert len(deliveries) == 4\n"
    )
    subprocess.run([sys.executable, str(program), vhost.url], check=True, timeout=60, env=environment())
    assert left(vhost) == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork()")
@pytest.mark.parametrize("consumer_api", ["sync"], indirect=True)
def test_a_forked_consumer_refuses_and_the_parents_works_on(vhost: VirtualHost) -> None:
    """The copy in the child raises at once, and closing it does nothing.

    A new consumer in the child works.
    """
    publish_to: list[bytes] = []
    handler = Handler(then=lambda delivery: publish_to.append(delivery.body))
    with Consumer(vhost.url, ORDERS, handler) as consumer, Consumer(vhost.url, ORDERS) as pulling:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(UsageError, match="fork"), pulling.get():
                    pass
                with pytest.raises(UsageError, match="fork"):
                    consumer.connect()
                consumer.close()
                pulling.close()
                with Consumer(vhost.url, "orders") as own, own.get(1) as deliveries:
                    assert deliveries == []
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        publish(vhost, "orders", numbered(3))
        handler.wait_done(3)
        assert (consumer.reconnects, consumer.connected) == (0, True)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_f55_200_starts_and_stops_leave_nothing_behind(vhost: VirtualHost) -> None:
    """No cycle leaves a thread, a descriptor or an object."""
    cycles, warm_up = (1000, 50) if soaking() else (200, 30)

    def cycle() -> None:
        handler = Handler()
        with Consumer(vhost.url, ORDERS, handler):
            for body in numbered(2):
                publisher.publish(Message(body), routing_key="orders")
            handler.wait_done(2)

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    with without_logs(), back_to_baseline(), Publisher(vhost.url, topology=[ORDERS]) as publisher:
        for _ in range(warm_up):
            cycle()
        before, threads = objects(), threading.active_count()
        for _ in range(cycles):
            cycle()
        wait_until(lambda: threading.active_count() <= threads, timeout=10, what="threads to end")
        assert objects() - before < 2 * cycles, "objects are left of each cycle"


@contextmanager
def without_logs() -> Iterator[None]:
    """Disable logging in the block, because pytest keeps every record."""
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
