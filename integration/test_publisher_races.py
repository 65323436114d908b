"""A publisher used by many threads, with the smallest windows.

It is closed and forgotten at any moment.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import tenacity

from integration.support.programs import environment
from integration.support.publishing import book, submit
from reliable_mq import (
    Message,
    Publisher,
    PublishError,
    PublishReturned,
    PublishUnconfirmed,
    Queue,
    UsageError,
)
from reliable_mq.engine.publisher import PublisherState
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from random import Random

    from reliable_mq import Confirmation
    from reliable_mq.testing import Audit, FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")

ORDERS = Queue("orders", type="classic")
QUICK = tenacity.wait_fixed(0.05)


# -- windows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "size"), [(1, 1_000_000), pytest.param(2, 1, marks=pytest.mark.soak), (1000, 1), (3, 150)]
)
def test_the_smallest_windows_let_everything_through(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, count: int, size: int
) -> None:
    """With any window, and a lost connection, every message is confirmed."""
    proxy = fault_proxy(vhost.url)
    with Publisher(
        proxy.url, topology=[ORDERS], max_outstanding=count, max_outstanding_bytes=size, reconnect_wait=QUICK
    ) as publisher:

        def work(number: int) -> None:
            for body in (b"", b"x", b"x" * 100, b"x" * 1000):
                confirmations = [submit(checker, publisher, "orders", body) for _ in range(3)]
                if number == 0:
                    proxy.cut()
                assert [book(checker, confirmation) for confirmation in confirmations] == [None] * 3

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        wait_until(lambda: publisher.outstanding == 0, timeout=10, what="none outstanding")  # counted after its outcome
    checker.drain(vhost, ["orders"])
    assert checker.close().confirmed == 8 * 4 * 3


def test_a_large_message_is_not_kept_out_by_small_ones(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory
) -> None:
    """Bytes freed one by one are kept for a large message that came first."""
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS], max_outstanding_bytes=1000, delivery_timeout=20) as publisher:
        publisher.connect()
        proxy.hold_confirms()
        confirmations = []
        for number in range(10):
            confirmations.append(submit(checker, publisher, "orders", b"s" * 100))
            proxy.wait_for(lambda number=number: proxy.held_confirms > number)
        lane = publisher._channel
        assert lane is not None
        with ThreadPoolExecutor(2) as pool:
            large = pool.submit(submit, checker, publisher, "orders", b"l" * 900)
            wait_until(lambda: len(lane._waiting) == 1, timeout=10, what="the large message")
            small = pool.submit(submit, checker, publisher, "orders", b"s" * 100)
            wait_until(lambda: len(lane._waiting) == 2, timeout=10, what="the small message")
            for _ in range(9):
                assert not large.done()
                proxy.release_confirms(1)
            confirmations.append(large.result(10))
            proxy.release_confirms(1)
            confirmations.append(small.result(10))
        proxy.heal()
        assert [book(checker, one) for one in confirmations] == [None] * 12
    with vhost.connect() as connection:
        channel = connection.channel()
        bodies = [channel.basic_get("orders", auto_ack=True)[2] for _ in range(12)]
    assert [body[:1] for body in bodies] == [b"s"] * 10 + [b"l", b"s"]


def test_a_window_that_is_mostly_stuck_lets_the_rest_through(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """Messages that wait for a retry do not block free places of the window."""
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS], max_outstanding=10) as publisher:
        publisher.connect()
        proxy.hold_confirms()
        stuck = [publisher.submit(Message(b"x"), routing_key="orders") for _ in range(10)]
        proxy.wait_for(lambda: proxy.held_confirms >= 1)
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(publisher.submit, Message(b"x"), routing_key="orders") for _ in range(2)]
            vhost.wait_for_messages("orders", 10)

            def two_are_free() -> bool:
                """Return whether two places are free; a confirm may be for one or all ten."""
                return publisher.statistics.confirmed >= 2 or proxy.release_confirms(1) < 0

            wait_until(two_are_free, timeout=10, what="two places")
            for future in waiting:
                future.result(10)
        proxy.heal()
        assert [confirmation.exception(10) for confirmation in stuck] == [None] * 10


def test_a_deadline_of_nothing_is_over_at_once(vhost: VirtualHost) -> None:
    """With timeout=0, a publish fails before it is sent and frees its place."""
    with Publisher(vhost.url, topology=[ORDERS], max_outstanding=5) as publisher:
        for _ in range(50):
            with pytest.raises(PublishUnconfirmed) as caught:
                publisher.publish(Message(b"x"), routing_key="orders", timeout=0)
            assert caught.value.sent is False
        wait_until(lambda: publisher.outstanding == 0, timeout=10, what="none outstanding")  # counted after its outcome
        assert publisher.publish(Message(b"x"), routing_key="orders").attempts == 1
        assert publisher.publish(Message(b"x"), routing_key="orders", timeout=1e9).attempts == 1
        publisher.submit(Message(b"x"), routing_key="orders").result(1e12)
        publisher.flush(0) if publisher.outstanding == 0 else publisher.flush(10)


# -- closing -----------------------------------------------------------------------------------------------------------


def test_a_submit_that_races_with_a_close_is_settled_or_refused(
    vhost: VirtualHost, checker: Audit, rng: Random
) -> None:
    """At any moment of close(), a submit returns a settled confirmation or raises."""
    for _ in range(15):
        publisher = Publisher(vhost.url, topology=[ORDERS], max_outstanding=20)
        confirmations: list[Confirmation] = []
        refused = threading.Semaphore(0)

        def work(
            publisher: Publisher = publisher,
            confirmations: list[Confirmation] = confirmations,
            refused: threading.Semaphore = refused,
        ) -> None:
            try:
                while True:
                    confirmations.append(submit(checker, publisher, "orders"))
            except UsageError:
                refused.release()

        with ThreadPoolExecutor(6) as pool:
            for _ in range(4):
                pool.submit(work)
            moment = rng.uniform(0, 0.1)
            began = time.monotonic()
            wait_until(lambda: time.monotonic() - began > moment, timeout=5, what="the moment", interval=0.001)  # noqa: B023
            closing = [pool.submit(publisher.close) for _ in range(2)]
            for future in closing:
                assert future.exception(20) is None
            for _ in range(4):
                assert refused.acquire(timeout=20)
        assert [confirmation.done() for confirmation in confirmations] == [True] * len(confirmations)
        assert [error for confirmation in confirmations if (error := book(checker, confirmation))] == []
    checker.drain(vhost, ["orders"])
    checker.close()


def test_close_gives_up_what_it_must_and_says_so_once(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """Outstanding publishes, blocked submits and flushes end with a close.

    close() raises when it gives messages up, and only once.
    """
    proxy = fault_proxy(vhost.url)
    publisher = Publisher(proxy.url, topology=[ORDERS], max_outstanding=10)
    publisher.connect()
    proxy.hold_confirms()
    confirmations = [publisher.submit(Message(b"x"), routing_key="orders") for _ in range(10)]
    with ThreadPoolExecutor(4) as pool:
        flushing = pool.submit(publisher.flush)
        blocked = pool.submit(publisher.submit, Message(b"x"), routing_key="orders")
        waiting = pool.submit(confirmations[0].result)
        began = time.monotonic()
        with pytest.raises(PublishError, match="were not confirmed"):
            publisher.close(timeout=0.3)
        assert time.monotonic() - began < 20
        assert flushing.exception(10) is None
        assert isinstance(blocked.exception(10), UsageError)
        assert isinstance(waiting.exception(10), PublishUnconfirmed)
    assert all(confirmation.done() for confirmation in confirmations)
    publisher.close()


def test_closing_an_idle_publisher_is_quick_on_a_silent_broker(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """A closing handshake without an answer times out sooner than messages would."""
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS]) as publisher:
        publisher.publish(Message(b"x"), routing_key="orders")
        proxy.black_hole()
        began = time.monotonic()
    assert time.monotonic() - began < 20


def test_an_interrupted_close_can_be_taken_up_again(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """After Ctrl-C in close(), messages stay outstanding; closing again waits."""
    proxy = fault_proxy(vhost.url)
    publisher = Publisher(proxy.url, topology=[ORDERS])
    publisher.connect()
    proxy.hold_confirms()
    confirmations = [publisher.submit(Message(b"x"), routing_key="orders") for _ in range(10)]
    vhost.wait_for_messages("orders", 10)

    def interrupt() -> None:
        wait_until(lambda: publisher._state is PublisherState.CLOSING, timeout=20, what="close() begun")
        threading.Event().wait(0.3)  # by now it waits for the messages
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        publisher.close()
    interrupter.join()
    assert not any(confirmation.done() for confirmation in confirmations)
    proxy.heal()
    publisher.close()
    assert [confirmation.exception(0) for confirmation in confirmations] == [None] * 10


# -- who has seen a failure --------------------------------------------------------------------------------------------


def test_looking_twice_at_a_confirmed_message_is_no_failure(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """Waiting and then adding a callback changes no count of failures."""
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS]) as publisher:
        publisher.connect()
        for _ in range(3):
            proxy.hold_confirms()
            confirmation = publisher.submit(Message(b"x"), routing_key="orders")
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(confirmation.result)
                wait_until(lambda c=confirmation: c.callbacks, timeout=20, what="somebody who waits")
                proxy.heal()
                waiting.result(10)
            called = threading.Event()
            confirmation.add_done_callback(lambda _, called=called: called.set())
            assert called.is_set()


def test_failures_too_many_to_be_remembered_are_still_counted(vhost: VirtualHost) -> None:
    """Of 150 failures, the last hundred are kept.

    If those were looked at, close() still reports the other 50.
    """
    publisher = Publisher(vhost.url)
    publisher.connect()
    confirmations = [publisher.submit(Message(b"x"), routing_key="nowhere") for _ in range(150)]
    publisher.flush(20)
    assert {type(confirmation.exception()) for confirmation in confirmations[50:]} == {PublishReturned}
    with pytest.raises(PublishError, match="50 messages were not confirmed"):
        publisher.close()


def test_callbacks_may_raise_and_exit_and_harm_no_other(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """Each callback is called once, in order, whatever the others do."""
    called: list[int] = []

    def callback(number: int) -> None:
        called.append(number)
        if number == 1:
            raise ValueError("the first callback fails")
        if number == 2:
            sys.exit(3)

    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS]) as publisher:
        for number in range(5):
            proxy.hold_confirms()  # otherwise it may be called here, before earlier ones on their thread
            publisher.submit(Message(b"x"), routing_key="orders").add_done_callback(
                lambda _, number=number: callback(number)
            )
            proxy.release_confirms()
            publisher.flush(10)
        settled = publisher.submit(Message(b"x"), routing_key="orders")
        publisher.flush(10)
        wait_until(lambda: len(called) == 5, timeout=10, what="the callbacks before it")  # these run on a thread
        settled.add_done_callback(lambda _: callback(1))  # this one is called here, at once
    assert called == [0, 1, 2, 3, 4, 1]
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError, SystemExit, ValueError]


def test_callbacks_may_do_all_but_close_their_publisher(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """A callback may publish, fill the window, wait, flush and add callbacks."""
    outcomes: list[object] = []
    done = threading.Event()
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS], max_outstanding=4) as publisher:

        def callback(_confirmation: Confirmation) -> None:
            try:
                outcomes.append(publisher.publish(Message(b"x"), routing_key="orders").attempts)
                outcomes.append(publisher.publish_many([Message(b"x") for _ in range(20)], routing_key="orders").ok)
                publisher.flush(10)
                publisher.submit(Message(b"x"), routing_key="orders").add_done_callback(lambda _: done.set())
                publisher.close()
            except UsageError as error:
                outcomes.append(type(error))

        proxy.hold_confirms()  # otherwise the callback may be called here
        publisher.submit(Message(b"x"), routing_key="orders").add_done_callback(callback)
        proxy.release_confirms()
        assert done.wait(20)
        wait_until(lambda: len(outcomes) == 3, timeout=20, what="the end of the first callback")
        assert outcomes == [1, True, UsageError]


def test_slow_callbacks_hold_up_publishes_and_bound_memory(vhost: VirtualHost) -> None:
    """As many callbacks may wait as the window has places.

    Then submit waits as well, and its error says so.
    """
    release = threading.Event()
    called = at_once = 0

    def callback(_confirmation: Confirmation) -> None:
        nonlocal called, at_once
        if threading.current_thread() is threading.main_thread():
            at_once += 1  # it was confirmed before the callback was added
        else:
            assert release.wait(60)
        called += 1

    with Publisher(vhost.url, topology=[ORDERS], max_outstanding=10) as publisher:
        submitted: list[Confirmation] = []

        def fill(timeout: float) -> None:
            while len(submitted) < 100:
                submitted.append(publisher.submit(Message(b"x"), routing_key="orders", timeout=timeout))
                submitted[-1].add_done_callback(callback)
                publisher.flush(10)

        with pytest.raises(PublishUnconfirmed, match=r"callbacks of \d+ earlier publishes") as caught:
            fill(1)
        assert caught.value.sent is False
        assert 10 <= len(submitted) - at_once <= 25
        release.set()
        fill(30)
    assert called == len(submitted) == 100


def test_an_endless_callback_delays_close_only_to_its_timeout(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """close() waits for callbacks up to its timeout, as for messages."""
    release = threading.Event()
    proxy = fault_proxy(vhost.url)
    publisher = Publisher(proxy.url, topology=[ORDERS])
    proxy.hold_confirms()  # otherwise the callback may be called here
    publisher.submit(Message(b"x"), routing_key="orders").add_done_callback(lambda _: release.wait(30))
    proxy.release_confirms()
    publisher.flush(10)
    began = time.monotonic()
    publisher.close(timeout=0.2)
    assert time.monotonic() - began < 20
    release.set()


# -- the end of the program --------------------------------------------------------------------------------------------


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", program, *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=True)


def test_threads_that_publish_while_the_interpreter_exits(vhost: VirtualHost) -> None:
    """Daemon threads are cut off, other threads finish.

    Submitted messages are published, and nothing hangs.
    """
    program = (
        "import sys, threading\n"
        "from reliable_mq import Message, Publisher, Queue, UsageError\n"
        "publisher = Publisher(sys.argv[1], topology=[Queue('orders', type='classic')], max_outstanding=50)\n"
        "def endless():\n"
        "    try:\n"
        "        while True:\n"
        "            publisher.submit(Message(b'daemon'), routing_key='orders')\n"
        "    except UsageError:\n"
        "        pass\n"
        "def finite():\n"
        "    for _ in range(200):\n"
        "        publisher.submit(Message(b'worker'), routing_key='orders')\n"
        "for _ in range(3):\n"
        "    threading.Thread(target=endless, daemon=True).start()\n"
        "threading.Thread(target=finite).start()\n"
    )
    done = run(program, vhost.url)
    assert "not closed; closing it at exit" in done.stderr
    assert "Traceback" not in done.stderr
    with vhost.connect() as connection:
        channel = connection.channel()
        bodies = [body for *_, body in iter(lambda: channel.basic_get("orders", auto_ack=True), (None, None, None))]
    assert bodies.count(b"worker") == 200


def test_an_exit_during_an_outage_reconnects_calls_back_and_ends(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """Names are resolved and callbacks called during the interpreter's exit.

    New threads cannot start then.
    """
    proxy = fault_proxy(vhost.url)
    program = (
        "import sys, threading\n"
        "from reliable_mq import Message, Publisher, Queue\n"
        "url = sys.argv[1].replace('127.0.0.1', 'localhost')\n"
        "publisher = Publisher(url, topology=[Queue('orders', type='classic')])\n"
        "publisher.connect()\n"
        "print('connected', flush=True)\n"
        "sys.stdin.readline()\n"
        "publisher.submit(Message(b'x'), routing_key='orders').add_done_callback(lambda c: print(repr(c)))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, proxy.url],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        proxy.refuse_connections()
        proxy.cut()
        process.stdin.write("go\n")
        process.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        proxy.accept_connections()
        output, _ = process.communicate(timeout=30)
    assert output.endswith(": confirmed>\n")
    assert process.returncode == 0


def test_a_forked_childs_exit_is_silent_on_the_parents_publisher(vhost: VirtualHost) -> None:
    """The child's exit neither closes the publisher nor warns about it."""
    program = (
        "import os, sys\n"
        "from reliable_mq import Message, Publisher, Queue\n"
        "publisher = Publisher(sys.argv[1], topology=[Queue('orders', type='classic')])\n"
        "publisher.publish(Message(b'x'), routing_key='orders')\n"
        "child = os.fork()\n"
        "if child:\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    publisher.publish(Message(b'x'), routing_key='orders')\n"
        "    publisher.close()\n"
    )
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, vhost.url]  # the fork's warning
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    vhost.wait_for_messages("orders", 2)


# -- forgotten publishers ----------------------------------------------------------------------------------------------


def test_a_closed_publisher_is_collected(vhost: VirtualHost) -> None:
    """The package keeps neither an unused publisher nor a closed one alive."""
    unused = Publisher(vhost.url)
    used = Publisher(vhost.url, topology=[ORDERS])
    used.publish(Message(b"x"), routing_key="orders")
    used.submit(Message(b"x"), routing_key="orders").add_done_callback(lambda _: None)
    lane = used._channel
    assert lane is not None
    gone = [weakref.ref(one) for one in (unused, used, lane)]
    used.close()
    del unused, used, lane

    def collected() -> bool:
        gc.collect()
        return not any(reference() for reference in gone)

    wait_until(collected, timeout=10, what="all of them collected")  # a thread may be about to end


def test_an_open_publisher_that_is_forgotten_goes_on(vhost: VirtualHost) -> None:
    """Its messages are published, and it is closed at the interpreter's exit."""
    publisher = Publisher(vhost.url, topology=[ORDERS])
    for _ in range(1000):
        publisher.submit(Message(b"x"), routing_key="orders")
    forgotten = weakref.ref(publisher)
    del publisher
    gc.collect()
    vhost.wait_for_messages("orders", 1000)
    found = forgotten()
    assert found is not None
    found.close()
