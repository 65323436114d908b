"""A publisher's first connect, among threads, deadlines and failures."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import tenacity
from tenacity.wait import wait_base

from integration.support.programs import environment
from reliable_mq import (
    BrokerUnavailable,
    ConfigurationError,
    Message,
    Publisher,
    PublishUnconfirmed,
    Queue,
    TopologyMismatch,
    UsageError,
)
from reliable_mq.engine.publisher import PublisherState
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from reliable_mq.testing import FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")

ORDERS = Queue("orders", dead_letter=None)
QUICK = tenacity.wait_fixed(0.1)


def test_construction_connects_to_nothing(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """Neither constructing a publisher nor closing an unused one connects."""
    proxy = fault_proxy(vhost.url)
    publisher = Publisher(proxy.url, topology=[ORDERS])
    assert (publisher.connected, publisher.outstanding, publisher.blocked) == (False, 0, None)
    publisher.flush()
    publisher.close()
    assert proxy.connections == 0


def test_many_threads_that_publish_first_make_one_connection(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """The first thread opens the connection, and the others wait for it."""
    proxy = fault_proxy(vhost.url)
    publisher = Publisher(proxy.url, topology=[ORDERS])
    with ThreadPoolExecutor(20) as pool:
        receipts = list(pool.map(lambda _: publisher.publish(Message(b"x"), routing_key="orders"), range(60)))
    assert {receipt.attempts for receipt in receipts} == {1}
    assert proxy.connections == 1
    publisher.close()


def test_the_first_publish_keeps_its_deadline_with_no_answer(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """A timeout of one second includes connecting, whatever the connect timeout is."""
    proxy = fault_proxy(vhost.url)
    proxy.hang_connections()
    publisher = Publisher(proxy.url, topology=[ORDERS], connect_timeout=20)
    with ThreadPoolExecutor(5) as pool:
        began = time.monotonic()
        errors = list(
            pool.map(lambda _: publisher.submit(Message(b"x"), routing_key="orders", timeout=1).exception(), range(5))
        )
        assert {type(error) for error in errors} == {PublishUnconfirmed}
        assert {error.sent for error in errors} == {False}
        assert 0.9 < time.monotonic() - began < 10
    publisher.close()


def test_closing_ends_an_opening_that_nothing_answers(vhost: VirtualHost, fault_proxy: FaultProxyFactory) -> None:
    """close() in another thread ends connect(), publish() and the publisher."""
    proxy = fault_proxy(vhost.url)
    proxy.hang_connections()
    publisher = Publisher(proxy.url, topology=[ORDERS], connect_timeout=20)
    with ThreadPoolExecutor(2) as pool:
        connecting = pool.submit(publisher.connect)
        publishing = pool.submit(publisher.publish, Message(b"x"), routing_key="orders")
        wait_until(lambda: proxy.connections == 1, timeout=10, what="the attempt")
        began = time.monotonic()
        publisher.close(timeout=0.5)
        for future in (connecting, publishing):
            with pytest.raises((UsageError, PublishUnconfirmed)):
                future.result(10)
        assert time.monotonic() - began < 10


def test_what_cannot_be_healed_is_raised_every_time_anew(vhost: VirtualHost) -> None:
    """Every call raises; the publisher can be opened once the cause is gone."""
    with vhost.connect() as connection:
        connection.channel().queue_declare("orders", durable=True)  # a classic queue
    publisher = Publisher(vhost.url, topology=[ORDERS])
    for call in (publisher.connect, lambda: publisher.publish(Message(b"x"), routing_key="orders")):
        with pytest.raises(TopologyMismatch, match="x-queue-type"):
            call()
    with ThreadPoolExecutor(8) as pool:
        outcomes = [pool.submit(publisher.submit, Message(b"x"), routing_key="orders") for _ in range(8)]
        assert {type(outcome.exception(20)) for outcome in outcomes} == {TopologyMismatch}
    vhost.delete_queue("orders")
    with publisher:
        assert publisher.publish(Message(b"x"), routing_key="orders").attempts == 1


def test_an_error_that_is_raised_again_and_again_does_not_grow(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """A publisher that has given up raises its reason with a new traceback each time."""
    proxy = fault_proxy(vhost.url)
    stop = tenacity.stop_after_attempt(2)
    publisher = Publisher(proxy.url, topology=[ORDERS], reconnect_wait=QUICK, reconnect_stop=stop)
    publisher.connect()
    proxy.hold_confirms()
    outstanding = publisher.submit(Message(b"x"), routing_key="orders")
    proxy.refuse_connections()
    proxy.cut()
    error = outstanding.exception(20)
    assert isinstance(error, PublishUnconfirmed)
    assert isinstance(error.__cause__, BrokerUnavailable)
    depths = set()
    for _ in range(50):
        with pytest.raises(BrokerUnavailable) as caught:
            publisher.publish(Message(b"x"), routing_key="orders")
        depths.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(depths) == 1
    publisher.close()


class Mistaken(wait_base):
    """A wait that raises."""

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        raise ValueError("a mistake of the user's")


def test_a_mistake_in_a_wait_of_the_users_costs_no_reconnect(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """The error of reconnect_wait is logged, and the default wait is used."""
    proxy = fault_proxy(vhost.url)
    proxy.refuse_connections()
    publisher = Publisher(proxy.url, topology=[ORDERS], reconnect_wait=Mistaken())
    with pytest.raises(BrokerUnavailable, match="refused"):
        publisher.connect()
    with publisher:
        confirmation = publisher.submit(Message(b"x"), routing_key="orders")
        proxy.accept_connections()
        assert confirmation.result(20).attempts == 1
    assert "a mistake of the user's" in caplog.text


def test_connect_may_fail_while_a_publish_waits_for_a_connection(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """connect() raises; a publish in another thread waits and is confirmed."""
    proxy = fault_proxy(vhost.url)
    proxy.refuse_connections()
    publisher = Publisher(proxy.url, topology=[ORDERS], reconnect_wait=QUICK)
    with ThreadPoolExecutor(8) as pool:
        publishing = [pool.submit(publisher.publish, Message(b"x"), routing_key="orders") for _ in range(4)]
        connecting = [pool.submit(publisher.connect) for _ in range(4)]
        for future in connecting:
            with pytest.raises(BrokerUnavailable, match="refused"):
                future.result(20)
        proxy.accept_connections()
        assert {future.result(20).attempts for future in publishing} == {1}
    publisher.close()


def test_an_interrupted_block_is_not_entered_and_leaves_nothing(vhost: VirtualHost) -> None:
    """Ctrl-C while entering a with block raises KeyboardInterrupt.

    No thread stays behind.
    """
    program = (
        "import sys, threading\n"
        "from reliable_mq import Publisher\n"
        "try:\n"
        "    with Publisher('amqp://guest:guest@127.0.0.1:1/', reconnect_wait=None, connect_timeout=20):\n"
        "        print('entered', flush=True)\n"
        "        threading.Event().wait(20)\n"
        "except KeyboardInterrupt:\n"
        "    print([thread.name for thread in threading.enumerate()], flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "entered\n"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=20)
    assert output == "['MainThread']\n"
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("max_outstanding", 0),
        ("max_outstanding", 1.5),
        ("max_outstanding_bytes", -1),
        ("max_message_bytes", "16 MiB"),
        ("max_message_bytes", True),
        ("mandatory", "yes"),
        ("confirm_timeout", 0),
        ("confirm_timeout", float("nan")),
        ("delivery_timeout", float("inf")),
        ("delivery_timeout", "30"),
        ("retry", 3),
        ("on_blocked", "ignore"),
        ("reconnect_wait", 5),
        ("reconnect_stop", 5),
        ("credentials", "guest:guest"),
        ("tls", True),
        ("heartbeat", 0),
        ("heartbeat", 1.5),
        ("connect_timeout", 0),
        ("name", ""),
        ("name", None),
        ("registry", {}),
        ("topology", ["orders"]),
    ],
)
def test_a_wrong_argument_is_named_at_once(argument: str, value: object) -> None:
    """Every argument is checked by the constructor, which names it."""
    with pytest.raises(ConfigurationError, match=argument.removeprefix("reconnect_")):
        Publisher("amqp://guest:guest@localhost/", **{argument: value})


def test_unknown_arguments_are_refused() -> None:
    """A misspelt option is an error."""
    with pytest.raises(TypeError, match="confirm_time"):
        Publisher("amqp://guest:guest@localhost/", confirm_time=3)


def test_a_signal_handler_may_not_use_a_starting_publisher(vhost: VirtualHost) -> None:
    """The publisher is not usable yet, and waiting would never end, so it raises."""
    publisher = Publisher(vhost.url, topology=[ORDERS])
    with publisher._lock:  # as in a handler, which runs on the thread that holds the lock
        publisher._state = PublisherState.STARTING
        with pytest.raises(UsageError, match="signal handler"):
            publisher.publish(Message(b"x"), routing_key="orders")
        publisher._state = PublisherState.OPEN
    with publisher:
        publisher.publish(Message(b"x"), routing_key="orders")
