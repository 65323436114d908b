"""Bugs of pika that this library does not have.

There is one test for each bug that can be provoked from outside, by its number in the project's list of facts about
pika 1.4.4. The bugs of consuming (2 undecodable headers, 3 floats in headers, 7 a deleted queue) are tested with the
consumer.
"""

from __future__ import annotations

import importlib.resources
import logging
import os
import signal
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING

import pytest
import tenacity

from integration.support.certificates import Authority
from integration.support.publishing import book, submit
from reliable_mq import (
    BrokerUnavailable,
    ConfigurationError,
    Message,
    PublishBlocked,
    Publisher,
    PublishNacked,
    PublishReturned,
    PublishUnconfirmed,
    Queue,
    RetryPolicy,
    UsageError,
)
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from random import Random

    from reliable_mq.testing import Audit, FaultProxyFactory, RabbitMQ, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")

ORDERS = Queue("orders", dead_letter=None)
QUICK = tenacity.wait_fixed(0.1)


@pytest.mark.soak
def test_pika_01_an_interrupted_wait_credits_no_other_publish(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory
) -> None:
    """pika's BlockingChannel returned success for a nacked publish.

    It used the confirm of the interrupted one.
    """
    bound = {"x-max-length": 1, "x-overflow": "reject-publish"}
    full = Queue("full", type="classic", dead_letter=None, arguments=bound)
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS, full], retry=RetryPolicy(max_attempts=1)) as publisher:
        publisher.publish(Message(b"x"), routing_key="full")
        proxy.hold_confirms()

        def interrupt() -> None:
            proxy.wait_for(lambda: proxy.held_confirms == 1)
            os.kill(os.getpid(), signal.SIGINT)

        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(Message(b"accepted"), routing_key="orders")
        interrupter.join()
        nacked = publisher.submit(Message(b"nacked"), routing_key="full")
        proxy.wait_for(lambda: proxy.held_confirms == 2)
        proxy.release_confirms()
        assert isinstance(nacked.exception(20), PublishNacked)


@pytest.mark.soak
def test_pika_04_a_memory_alarm_hangs_neither_publish_nor_close(
    private_broker: RabbitMQ, private_vhost: VirtualHost
) -> None:
    """Without blocked_connection_timeout, pika waits forever, in close() as well."""
    publisher = Publisher(private_vhost.url, topology=[ORDERS])
    publisher.publish(Message(b"x"), routing_key="orders")
    private_broker.alarm("memory")
    began = time.monotonic()
    with pytest.raises(PublishUnconfirmed):  # it was sent: the broker blocks a connection when it publishes
        publisher.publish(Message(b"x"), routing_key="orders", timeout=1)

    def is_blocked() -> str | None:
        if not publisher.blocked:  # the message was given up before it was sent
            publisher.submit(Message(b"x"), routing_key="orders", timeout=1)
        return publisher.blocked

    wait_until(is_blocked, timeout=20, what="the broker to say so", interval=0.5)
    with pytest.raises(PublishBlocked, match="memory"):
        publisher.publish(Message(b"x"), routing_key="orders", timeout=1)
    publisher.close(timeout=1)
    assert time.monotonic() - began < 25


def test_pika_05_after_a_loss_a_publish_succeeds_by_confirm_only(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory
) -> None:
    """After its transport is aborted, pika's basic_publish returns without an error.

    The message is lost.
    """
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS], reconnect_wait=QUICK) as publisher:
        assert book(checker, submit(checker, publisher, "orders")) is None
        proxy.refuse_connections()
        proxy.cut()
        wait_until(lambda: not publisher.connected, timeout=10, what="the loss to be noticed")
        confirmations = [submit(checker, publisher, "orders") for _ in range(10)]
        with pytest.raises(PublishUnconfirmed) as caught:
            publisher.publish(Message(b"given up"), routing_key="orders", timeout=0.5)
        assert caught.value.sent is False
        assert publisher.outstanding == 10
        assert not any(confirmation.done() for confirmation in confirmations)
        proxy.accept_connections()
        assert [book(checker, confirmation) for confirmation in confirmations] == [None] * 10
    checker.drain(vhost, ["orders"])
    assert not checker.close().duplicated


@pytest.mark.soak
def test_pika_06_two_threads_corrupt_nothing(vhost: VirtualHost, checker: Audit) -> None:
    """Two threads on one pika connection interleave frames.

    Of 8000 messages, 87 were stored, and all threads died.
    """
    bodies = [b"x" * size for size in (0, 1, 1_000, 140_000)]  # the last takes more than one frame
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:

        def work() -> None:
            confirmations = [submit(checker, publisher, "orders", bodies[n % len(bodies)]) for n in range(400)]
            assert [error for one in confirmations if (error := book(checker, one))] == []

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(150)
        assert publisher.statistics.in_doubt == 0, "the connection was replaced"
    checker.drain(vhost, ["orders"])
    balance = checker.close()
    assert balance.confirmed == 800
    assert not balance.duplicated


@pytest.mark.soak
def test_pika_08_a_confirm_timeout_shows_a_half_open_connection(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory
) -> None:
    """pika detects it only by heartbeats, after two minutes by default."""
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS], confirm_timeout=1, heartbeat=60) as publisher:
        assert book(checker, submit(checker, publisher, "orders")) is None
        proxy.black_hole(new_connections=False)
        began = time.monotonic()
        assert book(checker, submit(checker, publisher, "orders")) is None
        assert time.monotonic() - began < 20
    with pytest.raises(ConfigurationError, match="heartbeat"):
        Publisher(vhost.url, heartbeat=0)
    checker.drain(vhost, ["orders"])
    checker.close()


def test_pika_09_submits_while_connections_die_are_settled(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, rng: Random
) -> None:
    """Callbacks of add_callback_threadsafe are lost with pika's connection.

    Their waiters wait forever.
    """
    proxy = fault_proxy(vhost.url)
    with Publisher(proxy.url, topology=[ORDERS], reconnect_wait=QUICK) as publisher:
        publisher.connect()
        stop = threading.Event()

        def cut() -> None:
            while not stop.wait(rng.uniform(0.001, 0.1)):
                proxy.cut()

        cutting = threading.Thread(target=cut)

        def work() -> None:
            for _ in range(150):
                assert book(checker, submit(checker, publisher, "orders")) is None

        threads = [threading.Thread(target=work) for _ in range(4)]
        cutting.start()
        for thread in threads:
            thread.start()
        wait_until(lambda: proxy.connections >= 15, timeout=30, what="15 connections")
        stop.set()
        for thread in (cutting, *threads):
            thread.join(150)
    checker.drain(vhost, ["orders"])
    assert checker.close().confirmed == 600


def test_pika_10_forks_neither_hang_nor_corrupt_the_stream(vhost: VirtualHost, checker: Audit) -> None:
    """A forked child hung or wrote into its parent's stream with its pika connection."""
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        done = threading.Event()

        def work() -> None:
            while not done.is_set():
                assert book(checker, submit(checker, publisher, "orders", b"x" * 1000)) is None

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        before = publisher.statistics.confirmed
        for number in range(10):
            wait_until(lambda so_far=before + 50 * number: publisher.statistics.confirmed > so_far, timeout=30, what="")
            child = os.fork()
            if child == 0:
                refused = 0
                try:
                    signal.alarm(60)  # ends a child that hangs
                    for call in (publisher.connect, publisher.flush):
                        try:
                            call()
                        except UsageError:
                            refused += 1
                    publisher.close()
                finally:
                    os._exit(0 if refused == 2 else 1)
            assert os.waitpid(child, 0)[1] == 0
        done.set()
        for thread in threads:
            thread.join(60)
        assert publisher.statistics.in_doubt == 0, "the connection was replaced"
    checker.drain(vhost, ["orders"])
    assert not checker.close().duplicated


@pytest.fixture
def impostor(tmp_path: Path) -> Iterator[int]:
    """The port of a TLS server with an untrusted certificate.

    The server records the data that it receives.
    """
    own = Authority(tmp_path, "impostor").issue("impostor", "localhost", "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.cert_file, own.key_file)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    try:
                        with context.wrap_socket(connection, server_side=True) as secured:
                            heard.append(secured.recv(100))
                    except OSError:  # the client refuses the certificate, as it must
                        continue

        heard: list[bytes] = []
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        assert heard == [], "the impostor was told something"


@pytest.mark.parametrize(
    "option",
    [
        "ssl_options={'protocol':2,'cert_reqs':0}",
        "ssl_options=%7B%27protocol%27%3A%20ssl.PROTOCOL_TLS%7D",
        "verify=verify_none",
        "no_verify_ssl=1",
        "cert_reqs=CERT_NONE",
    ],
)
def test_pika_11_no_option_of_a_url_turns_verification_off(impostor: int, option: str) -> None:
    """PROTOCOL_TLS in ssl_options of a URL turned pika's verification off.

    cert_reqs was ignored.
    """
    url = f"amqps://guest:guest@127.0.0.1:{impostor}/"
    with pytest.raises(ConfigurationError, match=option.partition("=")[0]):
        Publisher(f"{url}?{option}")
    with pytest.raises(BrokerUnavailable, match="certificate does not verify"):
        Publisher(url).connect()


def test_pika_12_a_user_without_a_password_is_a_clear_error() -> None:
    """pika raises a bare TypeError for such a URL."""
    with pytest.raises(ConfigurationError, match="password"):
        Publisher("amqp://user@localhost/")


def test_pika_12_the_body_of_a_returned_message_is_not_logged(
    vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    """pika logs it at WARNING."""
    caplog.set_level(logging.DEBUG)
    with Publisher(vhost.url) as publisher, pytest.raises(PublishReturned):
        publisher.publish(Message(b"a body of its own", headers={"h": "a header of its own"}), routing_key="nowhere")
    assert caplog.records
    assert "of its own" not in caplog.text


def test_pika_13_the_package_says_that_it_is_typed() -> None:
    """pika has no py.typed."""
    assert (importlib.resources.files("reliable_mq") / "py.typed").is_file()
