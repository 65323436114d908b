"""A publisher with threads, signals, forks and exits, and its callbacks' threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.support.programs import environment
from reliable_mq import (
    Message,
    Publisher,
    PublishReturned,
    Queue,
    UsageError,
)

if TYPE_CHECKING:
    from reliable_mq.testing import FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")

ORDERS = Queue("orders", dead_letter=None)


def test_f46_a_forked_publisher_refuses_and_the_parents_works(vhost: VirtualHost) -> None:
    """In the child, the copy raises at once, and a new publisher works.

    The parent's publisher continues.
    """
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        publisher.publish(Message(b"parent"), routing_key="orders")
        pending = publisher.submit(Message(b"parent"), routing_key="orders")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for call in (
                    lambda: publisher.publish(Message(b"child"), routing_key="orders"),
                    lambda: publisher.submit(Message(b"child"), routing_key="orders"),
                    lambda: publisher.flush(1),
                ):
                    with pytest.raises(UsageError, match="fork"):
                        call()
                publisher.close()
                with Publisher(vhost.url) as own:
                    own.publish(Message(b"child"), routing_key="orders")
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        pending.result(20)
        publisher.publish(Message(b"parent"), routing_key="orders")
    vhost.wait_for_messages("orders", 4)


def test_f48_an_interrupted_wait_credits_no_later_publish(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """After a KeyboardInterrupt in a wait, the next publish gets its own outcome."""
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS]) as publisher:
        publisher.connect()
        proxy.hold_confirms()
        interrupter = threading.Thread(
            target=lambda: (
                proxy.wait_for(lambda: proxy.seen("basic.publish") == 1),
                os.kill(os.getpid(), signal.SIGINT),
            )
        )
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(Message(b"routable"), routing_key="orders")
        interrupter.join()
        proxy.release_confirms()
        proxy.heal()
        with pytest.raises(PublishReturned):
            publisher.publish(Message(b"unroutable"), routing_key="nowhere")
        publisher.publish(Message(b"routable"), routing_key="orders")
    vhost.wait_for_messages("orders", 2)


def test_callbacks_run_off_the_io_thread_and_may_publish(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """A done-callback may publish and wait for its confirm; it may not close."""
    outcome: list[object] = []
    done = threading.Event()
    proxy = fault_proxy(vhost.url)

    with Publisher(proxy.url, topology=[ORDERS]) as publisher:

        def on_confirmed(confirmation: object) -> None:
            try:
                outcome.append(publisher.publish(Message(b"second"), routing_key="orders").status)
                publisher.close()
            except UsageError as error:
                outcome.append(error)
            done.set()

        proxy.hold_confirms()  # a callback added too late is called at once, by the thread that adds it
        publisher.submit(Message(b"first"), routing_key="orders").add_done_callback(on_confirmed)
        proxy.release_confirms()
        assert done.wait(20)
    assert outcome[0] == "confirmed"
    assert isinstance(outcome[1], UsageError)


def test_what_a_forgotten_publisher_holds_is_published_at_exit(vhost: VirtualHost, tmp_path: Path) -> None:
    """A program that ends without close() gets its messages confirmed."""
    program = tmp_path / "forgetful.py"
    program.write_text(
        "import sys\n"
        "from reliable_mq import Message, Publisher, Queue\n"
        "publisher = Publisher(sys.argv[1], topology=[Queue('orders', dead_letter=None)])\n"
        "for _ in range(3000):\n"
        "    publisher.submit(Message(b'x'), routing_key='orders')\n"
    )
    subprocess.run([sys.executable, str(program), vhost.url], check=True, timeout=200, env=environment())
    vhost.wait_for_messages("orders", 3000)
