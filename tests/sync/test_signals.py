"""Signals to a consumer that runs, and to forked children."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from reliable_mq import Consumer, UsageError
from reliable_mq.engine.workers import WorkerPool
from reliable_mq.testing.waiting import wait_until
from tests.children import end_of_forked_child

if TYPE_CHECKING:
    from collections.abc import Callable

NOBODY = "amqp://guest:guest@127.0.0.1:1/"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_child_forked_during_run(number: signal.Signals) -> None:
    """The thread of a handler forks, as `multiprocessing` does.

    The parent's handlers would only stop a copy of the consumer.
    """
    consumer = Consumer(NOBODY, "orders", lambda _: None)
    ends: list[int] = []

    def fork() -> None:
        try:
            wait_until(lambda: consumer._subscription, timeout=10, what="it runs")
            ends.append(end_of_forked_child(number))
        finally:
            consumer.stop()

    before = signal.signal(number, signal.SIG_DFL)
    thread = threading.Thread(target=fork)
    try:
        thread.start()
        consumer.run()
    finally:
        thread.join()
        signal.signal(number, before)
    assert ends == [-number]


def set_prefetch(consumer: Consumer) -> None:
    with pytest.raises(UsageError, match="made before fork"):
        consumer.prefetch = 5


@pytest.mark.parametrize("use", [Consumer.stop, set_prefetch])
def test_a_forked_child_waits_for_no_lock_of_a_consumer(use: Callable[[Consumer], None]) -> None:
    """A signal handler of the program may stop it there. The parent's threads may have held locks at the fork."""
    with Consumer(NOBODY, "orders", lambda _: None) as consumer:
        held, forked = threading.Event(), threading.Event()

        def hold() -> None:
            with consumer._lock, consumer._pools[0]._waiting._lock:
                held.set()
                forked.wait(60)

        def use_it() -> None:
            signal.alarm(5)  # ends a child that hangs
            use(consumer)
            signal.alarm(0)

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait(60)
        try:
            assert end_of_forked_child(0, use_it) == 0
        finally:
            forked.set()
            holder.join()
        assert "not connected" in repr(consumer), "the parent's is not stopped"


@pytest.mark.parametrize("place", [(Consumer, "_new_subscription"), (WorkerPool, "start")], ids=["parts", "threads"])
def test_a_stop_by_a_signal_handler_during_the_start_counts(
    monkeypatch: pytest.MonkeyPatch, place: tuple[type, str]
) -> None:
    """The I/O thread does not run yet, so it cannot take the call that stops."""
    owner, name = place
    original = getattr(owner, name)

    def call_and_signal(self: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return original(self)

    monkeypatch.setattr(owner, name, call_and_signal)
    consumer = Consumer(NOBODY, "orders", lambda _: None)
    rescued = threading.Event()
    late = threading.Timer(10, lambda: (rescued.set(), consumer.stop()))
    before = signal.signal(signal.SIGUSR1, lambda *_: consumer.stop())
    late.start()
    try:
        consumer.run()
    finally:
        late.cancel()
        late.join()
        signal.signal(signal.SIGUSR1, before)
    assert not rescued.is_set()
