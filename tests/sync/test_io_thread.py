"""The I/O thread with a dead port, a silent peer or a broken loop. No broker."""

from __future__ import annotations

import os
import socket
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import tenacity

from reliable_mq._util.threads import call_in_background
from reliable_mq.core.channel_setup import publisher_setup
from reliable_mq.core.reconnect import ReconnectPolicy
from reliable_mq.engine.health import LoopWatch
from reliable_mq.settings import ConnectionSettings, Credentials, Endpoint
from reliable_mq.sync.io_thread import IOThread
from reliable_mq.testing.waiting import wait_until
from tests.leftovers import nothing_left
from tests.refused_threads import refusing_threads

if TYPE_CHECKING:
    from collections.abc import Iterator


class Client:
    """Keeps failures, which are the only events without a broker."""

    def __init__(self) -> None:
        self.failures: list[tuple[Exception, bool]] = []
        self.failed_once = threading.Event()

    def failed(self, error: Exception, will_retry: bool) -> None:
        self.failures.append((error, will_retry))
        self.failed_once.set()

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called")


@pytest.fixture
def silent_peer() -> Iterator[Endpoint]:
    """Yield the endpoint of a server that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Endpoint("127.0.0.1", server.getsockname()[1])


@pytest.fixture
def dead_port() -> Endpoint:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Endpoint("127.0.0.1", server.getsockname()[1])


def io_thread(
    endpoint: Endpoint, client: Client, *, connect_timeout: float = 10.0, **reconnect_policy: Any
) -> IOThread:
    return IOThread(
        name="test",
        settings=ConnectionSettings(
            endpoints=(endpoint,), credentials=Credentials("guest", "guest"), connect_timeout=connect_timeout
        ),
        setup=lambda server: publisher_setup([], server.version_tuple),
        client=client,
        reconnect_policy=ReconnectPolicy(**reconnect_policy),
    )


def test_a_dead_port_fails_the_attempt_and_close_leaves_nothing(dead_port: Endpoint) -> None:
    with nothing_left():
        client = Client()
        io = io_thread(dead_port, client, wait=tenacity.wait_fixed(60))
        io.start()
        assert client.failed_once.wait(20)
        ((error, will_retry),) = client.failures
        assert will_retry
        assert str(dead_port) in str(error)
        assert io.close(10)


def test_a_thread_that_cannot_be_started_leaves_nothing(dead_port: Endpoint) -> None:
    """Its owner may try again with another one for a long time."""
    io = io_thread(dead_port, Client())
    with nothing_left():
        with refusing_threads("test"), pytest.raises(RuntimeError, match="can't start new thread"):
            io.start()
        assert (io.over, io.call_soon(lambda: None), io.close(0)) == (True, False, True)


def test_a_silent_peer_is_given_the_time_to_connect_and_no_more(silent_peer: Endpoint) -> None:
    client = Client()
    io = io_thread(silent_peer, client, connect_timeout=0.3, stop=tenacity.stop_after_attempt(1))
    io.start()
    assert client.failed_once.wait(20)
    ((error, will_retry),) = client.failures
    assert not will_retry
    assert "within 0.3 s" in str(error)
    assert io.close(10)


@pytest.mark.parametrize("kind", [OSError, SystemExit])
def test_a_broken_loop_is_reported_and_still_runs_queued_calls(
    silent_peer: Endpoint, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    client = Client()
    io = io_thread(silent_peer, client)
    io.start()
    ran = threading.Event()

    def break_it() -> None:
        def poll() -> None:
            raise kind("epoll is gone")

        io._loop._poller.poll = poll
        io.call_soon(ran.set)

    assert io.call_soon(break_it)
    assert io.join(20)
    assert ran.is_set()
    ((error, will_retry),) = client.failures
    assert not will_retry
    assert "epoll is gone" in str(error)
    assert "event loop failed" in caplog.text
    assert io.call_soon(ran.clear) is False


def test_a_signal_handler_may_queue_a_call_during_another_one(silent_peer: Endpoint) -> None:
    """The handler may even wait for the call.

    The I/O thread needs no lock that the interrupted thread could hold.
    """
    io = io_thread(silent_peer, Client())
    io.start()
    ran = threading.Event()
    with io._lock:
        assert io.call_soon(ran.set)
        assert ran.wait(20)
        io.stop()
        assert io.join(20)


def test_a_call_queued_at_the_thread_end_runs_once_or_is_refused(silent_peer: Endpoint) -> None:
    """The result of `call_soon` is right, even if the thread ends at that moment."""
    for _ in range(30):
        io = io_thread(silent_peer, Client())
        io.start()
        ran: list[int] = []
        accepted: list[int] = []

        def queue(io: IOThread = io, ran: list[int] = ran, accepted: list[int] = accepted) -> None:
            accepted.extend(number for number in range(300) if io.call_soon(partial(ran.append, number)))

        queueing = threading.Thread(target=queue)
        queueing.start()
        io.stop()
        queueing.join()
        assert io.join(20)
        assert sorted(ran) == accepted


def test_a_forked_copy_does_not_touch_the_parents_connection(silent_peer: Endpoint) -> None:
    """In the child, it closes its copies of the descriptors, and shuts nothing down."""
    io = io_thread(silent_peer, Client())
    io.start()
    finished = threading.Event()
    io.call_soon(finished.set)
    assert finished.wait(20)
    child = os.fork()
    if child == 0:
        try:
            del io
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    finished.clear()
    assert io.call_soon(finished.set)
    assert finished.wait(20)
    assert io.close(10)


def test_a_call_in_the_background_is_answered_whatever_it_does() -> None:
    answers: list[object] = []
    answered = threading.Semaphore(0)

    def done(answer: object) -> None:
        answers.append(answer)
        answered.release()

    def leave() -> None:
        raise SystemExit

    for call in (lambda: 42, lambda: 1 / 0, leave):
        call_in_background("test", call, done)
        assert answered.acquire(timeout=20)
    assert answers[0] == 42
    assert isinstance(answers[1], ZeroDivisionError)
    assert isinstance(answers[2], RuntimeError)


def test_a_background_call_runs_inline_if_no_thread_can_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interpreter that exits refuses new threads.

    It may still have to look up a host name.
    """

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    answers: list[object] = []
    call_in_background("test", lambda: 42, answers.append)
    assert answers == [42]


def test_a_look_before_the_start_does_not_count_as_unanswered(dead_port: Endpoint) -> None:
    """A probe may come while a publisher or consumer starts."""
    io = io_thread(dead_port, Client(), wait=tenacity.wait_fixed(60))
    watch = LoopWatch()
    assert watch.check(1.0, io.call_soon) is None
    io.start()
    try:
        assert watch.check(2.0, io.call_soon) is None
        wait_until(lambda: watch.check(3.0, io.call_soon) is None, timeout=30, what="an answer")
    finally:
        io.close(10)
