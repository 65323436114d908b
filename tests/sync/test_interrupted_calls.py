"""A signal handler raises within a call: nothing stays locked or is lost.

Python runs signal handlers at the start of a function, after a call of a C function, and at the end of a loop turn. The
exception is raised at each of these places in turn, including those in the standard library's `threading`.
"""

from __future__ import annotations

import dis
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self, cast

import pytest

from reliable_mq import Consumer, Message, OutboxError, Publisher, Queue
from reliable_mq._util.threads import CallbackThread, DaemonExecutor, InterruptibleEvent
from reliable_mq.engine.consumer_options import ConsumerOptions
from reliable_mq.engine.publisher_options import PublisherOptions
from reliable_mq.engine.pull import ANSWER
from reliable_mq.engine.workers import _WaitingWork
from reliable_mq.outbox import SQLiteOutbox
from reliable_mq.sync import confirmation as confirmation_module
from reliable_mq.sync import consumer as consumer_module
from reliable_mq.sync import outbox_channel
from reliable_mq.sync import subscription as subscription_module
from reliable_mq.sync.confirmation import Confirmation
from reliable_mq.sync.outbox_channel import OutboxChannel
from reliable_mq.sync.publisher_channel import PublisherChannel
from reliable_mq.sync.subscription import PullSubscription
from reliable_mq.testing.waiting import wait_until
from tests.contract.scripted_broker import ScriptedBroker

if TYPE_CHECKING:
    from pathlib import Path
    from types import CodeType, FrameType

    from tests.contract.scripted_broker import Published

INSIDE = ("/reliable_mq/", "/threading.py", "/contextlib.py")
PATIENCE = 10.0  # seconds for another thread, which nothing should delay
SOON = 0.001  # seconds


class Interrupted(Exception):
    """An exception like Celery's soft time limit."""


@cache
def places(code: CodeType) -> dict[int, tuple[bool, bool]]:
    """Return, by offset, whether a call comes before, and whether it jumps back."""
    found: dict[int, tuple[bool, bool]] = {}
    call = False
    for instruction in dis.get_instructions(code):
        found[instruction.offset] = call, instruction.opname == "JUMP_BACKWARD"
        call = instruction.opname.startswith("CALL") and not instruction.opname.startswith("CALL_INTRINSIC")
    return found


class Interruption:
    """Raises at the n-th of these places on this thread, within a block."""

    def __init__(self, step: int) -> None:
        self.left = step
        self.over = False
        self._returned_to: FrameType | None = None  # the end of a Python function's call is not such a place

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> bool:
        sys.settrace(self._before)
        return self.over

    def _called(self, frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any] | None:
        self._returned_to = frame.f_back
        if not any(part in frame.f_code.co_filename for part in INSIDE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._pass()
        return self._step

    def _step(self, frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
        if event == "opcode":
            called, jumps = places(frame.f_code).get(frame.f_lasti, (False, False))
            if jumps or (called and self._returned_to is not frame):
                self._pass()
            if self._returned_to is frame:
                self._returned_to = None
        elif event == "return":
            self._returned_to = frame.f_back
        return self._step

    def _pass(self) -> None:
        self.left -= 1
        if not self.left:
            self.over = True
            sys.settrace(None)
            raise Interrupted


def on_another_thread(call: Callable[[], object], what: str) -> None:
    outcome: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    threading.Thread(target=run, daemon=True).start()
    wait_until(lambda: outcome, timeout=PATIENCE, what=lambda: what)
    assert outcome == [None], what


def interrupt_everywhere(call: Callable[[], object], check: Callable[[], object], least: int) -> None:
    """Interrupt a call at each place in turn.

    After each, another thread checks what is left.
    """
    for step in count(1):
        interruption = Interruption(step)
        with suppress(Interrupted), interruption:
            call()
        on_another_thread(check, f"after an interruption at step {step}")
        if not interruption.over:
            break
    assert step > least, "it looked at nothing"


def confirm(published: Published) -> None:
    published.channel.ack(published.number)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.slow
def test_others_publish_after_an_interrupted_publish() -> None:
    with ScriptedBroker() as broker:
        broker.script = confirm
        with Publisher(broker.url) as publisher:

            def publish() -> None:
                publisher.publish(Message(b""), routing_key="q", timeout=PATIENCE)

            def check() -> None:
                publish()
                window = cast("Any", publisher)._channel.window
                assert (window.count, window.bytes) == (0, 0)

            publish()
            interrupt_everywhere(publish, check, least=20)


@pytest.mark.slow
def test_an_interrupted_flush_is_no_longer_notified() -> None:
    """Otherwise every settled message would wake all callers, for as long as the publisher lives."""
    with ScriptedBroker() as broker, Publisher(broker.url) as publisher:

        def flushing() -> object:
            return cast("Any", publisher)._channel._flushing

        def confirm_once_flushing(published: Published) -> None:
            wait_until(flushing, timeout=PATIENCE, what="a flush that waits")
            confirm(published)

        def flush() -> None:
            publisher.submit(Message(b""), routing_key="q")
            publisher.flush(PATIENCE)

        def check() -> None:
            flush()
            assert not flushing()

        broker.script = confirm_once_flushing
        flush()
        interrupt_everywhere(flush, check, least=25)


@pytest.mark.slow
def test_an_interrupted_get_takes_nothing_and_blocks_nobody() -> None:
    """Deliveries without an owner would use up the prefetch.

    The next call would be refused.
    """
    with ScriptedBroker() as broker, Consumer(broker.url, Queue("orders"), prefetch=3) as consumer:

        def get() -> None:
            broker.ready.extend([b""] * (3 - len(broker.ready)))
            with consumer.get(3, timeout=PATIENCE):
                pass

        def one_settles() -> None:
            broker.ready.extend([b""] * (3 - len(broker.ready)))
            with consumer.get(3, timeout=PATIENCE) as deliveries:
                deliveries[0].requeue()

        def check() -> None:
            with consumer.get(3, timeout=PATIENCE) as deliveries:
                assert deliveries

        get()
        for call in (get, one_settles):
            interrupt_everywhere(call, lambda: (broker.ready.extend([b""] * 3), check()), least=100)


def calls_of_channels(path: Path) -> dict[str, tuple[threading.RLock, Callable[[], object]]]:
    """Return calls that loop under a lock, each with the lock."""
    url = "amqp://guest:guest@127.0.0.1:1/"
    channel = PublisherChannel(PublisherOptions(url))
    failed = [Confirmation(Message(b""), "", "q", True, 0, 0.0, None, channel) for _ in range(2)]
    outbox = SQLiteOutbox(path / "outbox")
    relayed: Any = None
    stores = OutboxChannel(outbox, relayed, PublisherOptions(url, outbox=outbox), measured=False)
    stores._opening = opening = outbox_channel._Opening()
    pulls = PullSubscription(ConsumerOptions(url, Queue("orders")))
    pulls._taker = object()

    def take_failures() -> None:
        for one in failed:
            channel._keep_failure(one)
            one.result_observed = True
        channel.take_failures()

    def start() -> None:
        with suppress(OutboxError):
            stores.start(3 * SOON)
        assert opening.waiting == 0

    return {
        "take_failures": (channel.lock, take_failures),
        "start": (stores.lock, start),
        "wait_stored": (stores.lock, lambda: stores._wait_stored(3 * SOON)),
        "take": (pulls._changed.lock, lambda: pulls.take(1, 3 * SOON - ANSWER, [])),
    }


@pytest.mark.parametrize("name", ["take_failures", "start", "wait_stored", "take"])
def test_an_interrupted_loop_under_a_lock_frees_the_lock(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirmation_module, "CHECK_EVERY", SOON)
    monkeypatch.setattr(subscription_module, "_CHECK_EVERY", SOON)
    lock, call = calls_of_channels(tmp_path)[name]

    def check() -> None:
        with lock:
            pass

    interrupt_everywhere(call, check, least=3)


def test_an_event_is_usable_after_an_interrupted_wait_or_set() -> None:
    event = InterruptibleEvent()

    def wait() -> None:
        event.clear()
        event.wait(0.001)

    def check() -> None:
        event.set()
        assert event.wait(PATIENCE)

    interrupt_everywhere(wait, check, least=5)
    interrupt_everywhere(event.set, check, least=3)


def test_an_interrupted_stop_leaves_the_work_queue_usable() -> None:
    waiting = _WaitingWork()

    def use() -> None:
        waiting.stop_starting()
        waiting.recall()
        waiting.close()

    interrupt_everywhere(use, lambda: waiting.put(()), least=5)


def test_close_waits_only_a_bounded_time_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may hang. The rest can still be closed."""
    monkeypatch.setattr(consumer_module, "END_TIMEOUT", 0.1)
    consumer = Consumer("amqp://guest:guest@127.0.0.1:1/", Queue("orders"), stop_timeout=0.1)
    began = time.monotonic()
    consumer._wait_ended(cast("Any", SimpleNamespace(ended=InterruptibleEvent())))
    assert time.monotonic() - began < PATIENCE


def test_a_signal_handler_may_close_threads_that_a_call_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is still made, and no thread is left."""
    executor = DaemonExecutor("closed-meanwhile", 2)
    start = threading.Thread.start

    def start_and_close(thread: threading.Thread) -> None:
        start(thread)
        executor.close()

    monkeypatch.setattr(threading.Thread, "start", start_and_close)
    assert executor.call(lambda _: 1, PATIENCE) == 1
    wait_until(
        lambda: not any(thread.name.startswith("closed-meanwhile") for thread in threading.enumerate()),
        timeout=PATIENCE,
        what="the end of the threads",
    )


@pytest.mark.parametrize("begun", [False, True])
def test_callbacks_run_after_an_interrupted_thread_start(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks = CallbackThread("not-started")
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if begun:
            start(thread)
        raise Interrupted

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    called = threading.Event()
    with pytest.raises(Interrupted):
        callbacks.put(called.set)
    monkeypatch.undo()
    callbacks.put(called.set)
    assert called.wait(PATIENCE)
    callbacks.stop()
    assert callbacks.join(PATIENCE)
