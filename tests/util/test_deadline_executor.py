"""Calls that hang: the caller continues in time, and the call is ended or dropped."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from reliable_mq._util.threads import CancelHandle, DaemonExecutor
from reliable_mq.testing.waiting import wait_until
from tests.signal_handlers import Interrupted, interruptible


class Connection:
    """A minimal driver connection."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()

    def fileno(self) -> int:
        return self.near.fileno()


def test_a_call_returns_its_result_or_raises_its_exception() -> None:
    calls = DaemonExecutor("test")
    assert calls.call(lambda _: 7, 5) == 7
    with pytest.raises(ZeroDivisionError):
        calls.call(lambda _: 1 // 0, 5)
    calls.close()


def test_calls_one_after_the_other_share_a_thread() -> None:
    calls = DaemonExecutor("test")
    assert len({calls.call(lambda _: threading.get_ident(), 5) for _ in range(50)}) == 1
    calls.close()
    assert calls.call(lambda _: 7, 5) == 7
    calls.close()


def test_a_call_that_waits_for_its_socket_is_ended() -> None:
    """Its thread can be used for the next call."""
    calls, connection = DaemonExecutor("test", most=1), Connection()
    ended = threading.Event()

    def wait(lifeline: CancelHandle) -> bytes:
        with lifeline.using(connection, ended.set):
            answer = connection.near.recv(1)
        ended.set()
        return answer

    begun = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer"):
        calls.call(wait, 0.05)
    assert time.monotonic() - begun < 5
    assert ended.wait(10)
    deadline = time.monotonic() + 10
    while True:
        try:
            assert calls.call(lambda _: 7, 5) == 7
            break
        except TimeoutError:
            assert time.monotonic() < deadline
    calls.close()
    close(connection)


def test_a_call_whose_caller_is_interrupted_is_ended() -> None:
    """As nobody waits for it any more, it counts as hanging until then."""
    calls, connection = DaemonExecutor("test"), Connection()
    hanging: list[int] = []

    def wait(lifeline: CancelHandle) -> None:
        with lifeline.using(connection, lambda: hanging.append(calls.hanging)):
            interrupt()
            connection.near.recv(1)

    with interruptible() as interrupt, pytest.raises(Interrupted):
        calls.call(wait, 60)
    wait_until(lambda: hanging, timeout=10, what="the end of the call")
    assert hanging == [1]
    wait_until(lambda: not calls.hanging, timeout=10, what="no call that hangs")
    calls.close()
    close(connection)


def test_a_call_that_gets_its_connection_too_late_leaves_it_open() -> None:
    """Nothing was sent on it, so its pool can lend it to the next caller."""
    handle, given_up = CancelHandle(), threading.Event()
    handle.cut()
    with pytest.raises(TimeoutError, match="nobody waits"), handle.using(object(), given_up.set):
        raise AssertionError("nobody waits")
    assert not given_up.is_set()


def test_a_connection_cut_after_its_last_answer_is_given_up() -> None:
    """Its driver has seen no error, so a pool would lend the connection to the next caller."""
    connection, given_up = Connection(), threading.Event()
    handle = CancelHandle()
    with pytest.raises(TimeoutError, match="nobody waits"), handle.using(connection, given_up.set):
        handle.cut()
    assert given_up.is_set()
    assert connection.far.recv(1) == b""
    close(connection)


def test_where_every_thread_hangs_further_calls_fail_at_once() -> None:
    calls, go_on = DaemonExecutor("test", most=2), threading.Event()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            calls.call(lambda _: go_on.wait(10), 0.02)
    with pytest.raises(TimeoutError, match="2 earlier questions"):
        calls.call(lambda _: 7, 10)
    go_on.set()
    calls.close()


def test_calls_with_waiting_callers_are_not_limited() -> None:
    calls, together = DaemonExecutor("test", most=2), threading.Barrier(5)
    answers: list[int] = []

    def ask() -> None:
        answers.append(calls.call(lambda _: together.wait(10), 20))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    together.wait(10)
    for thread in threads:
        thread.join(10)
    assert len(answers) == 4
    assert calls.call(lambda _: 7, 5) == 7
    calls.close()


def test_a_block_waiting_on_its_socket_is_cut_on_its_own_thread() -> None:
    calls, connection = DaemonExecutor("test"), Connection()
    begun = time.monotonic()
    with (
        calls.cutting(0.05) as lifeline,
        pytest.raises(TimeoutError, match="nobody waits"),
        lifeline.using(connection, lambda: None),
    ):
        assert connection.near.recv(1) == b""
    assert lifeline.is_cut
    assert time.monotonic() - begun < 5
    calls.close()
    close(connection)


def test_a_block_that_ends_in_time_leaves_its_connection_alone() -> None:
    """This holds if the deadline passes later; the thread can be used again."""
    calls, connection = DaemonExecutor("test", most=1), Connection()
    with calls.cutting(60) as lifeline, lifeline.using(connection, lambda: None):
        pass
    lifeline.cut()  # as late as possible
    connection.far.send(b"x")
    assert connection.near.recv(1) == b"x"
    assert call_when_idle(calls) == 7
    calls.close()
    close(connection)


def test_a_block_keeps_its_deadline_while_every_thread_hangs() -> None:
    """The same holds for a call with ``beyond=True``, whose caller limits the number.

    A handler's transaction must not fail because no thread is free.
    """
    calls, connection, over = DaemonExecutor("test", most=1), Connection(), threading.Event()
    with pytest.raises(TimeoutError, match="no answer"):
        calls.call(lambda _: over.wait(30), 0.05)
    with pytest.raises(TimeoutError, match="without an answer"):
        calls.call(lambda _: 7, 5)
    assert calls.call(lambda _: 7, 5, beyond=True) == 7
    with (
        calls.cutting(0.05) as lifeline,
        pytest.raises(TimeoutError, match="nobody waits"),
        lifeline.using(connection, lambda: None),
    ):
        assert connection.near.recv(1) == b""
    over.set()
    calls.close()
    close(connection)


def call_when_idle(calls: DaemonExecutor) -> int:
    """Call once the only thread has ended an abandoned call."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return calls.call(lambda _: 7, 5)
        except TimeoutError:
            assert time.monotonic() < deadline


def close(connection: Connection) -> None:
    connection.near.close()
    connection.far.close()
