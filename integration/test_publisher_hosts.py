"""A publisher with several hosts, some of which are dead."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING

import pytest
import tenacity

from integration.support.publishing import book, submit
from reliable_mq import BrokerUnavailable, Message, Publisher, Queue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliable_mq.testing import Audit, FaultProxy, FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline", "publisher_api")

ORDERS = Queue("orders", dead_letter=None)
CONNECT_TIMEOUT = 1.0
SPARES = 6  # more live hosts: a machine that stalls for seconds does not connect to one within CONNECT_TIMEOUT


@pytest.fixture
def refusing() -> Iterator[str]:
    """A host without a listener. Its port stays bound, so that nobody else listens there."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


@pytest.fixture
def swallowing() -> Iterator[str]:
    """A host that answers no SYN: its queue of connections is full.

    A firewall that drops packets behaves like this.
    """
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        while True:
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0.2)
            try:
                waiting.connect(full.getsockname())
            except TimeoutError:
                break
        yield f"127.0.0.1:{full.getsockname()[1]}"


def with_hosts(vhost: VirtualHost, *hosts: str) -> str:
    return vhost.url.replace(f"{vhost.broker.host}:{vhost.broker.port}", ",".join(hosts))


def host_of(proxy: FaultProxy) -> str:
    return proxy.url.partition("@")[2].partition("/")[0]


@pytest.mark.parametrize("dead", ["refusing", "swallowing", "silent", "unknown"])
def test_f54_one_of_two_hosts_is_dead(
    vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory, request: pytest.FixtureRequest, dead: str
) -> None:
    """The next host is tried after at most the connect timeout, whatever the fault."""
    match dead:
        case "silent":  # accepts and never answers
            proxy = fault_proxy(vhost.url)
            proxy.hang_connections()
            host = host_of(proxy)
        case "unknown":  # the reserved domain that never resolves
            host = "no-such-host.invalid"
        case _:
            host = request.getfixturevalue(dead)
    live, *spares = (fault_proxy(vhost.url) for _ in range(1 + SPARES))
    began = time.monotonic()
    with Publisher(
        with_hosts(vhost, host, *map(host_of, (live, *spares))), topology=[ORDERS], connect_timeout=CONNECT_TIMEOUT
    ) as publisher:
        assert publisher.connected, "entering the block waits until every host has had its turn"
        assert time.monotonic() - began < CONNECT_TIMEOUT + 10
        assert book(checker, submit(checker, publisher, "orders")) is None
        for spare in spares:
            spare.refuse_connections()
        for proxy in (live, *spares):
            proxy.cut()  # after the spares, the dead host is next, and then the live one
        assert book(checker, submit(checker, publisher, "orders")) is None
    assert live.connections >= 2  # more if a busy machine does not connect within CONNECT_TIMEOUT
    checker.drain(vhost, ["orders"])
    checker.close()


def test_f54_the_host_in_use_dies(vhost: VirtualHost, checker: Audit, fault_proxy: FaultProxyFactory) -> None:
    """Outstanding messages are published to the next host."""
    first, second = fault_proxy(vhost.url), fault_proxy(vhost.url)
    with Publisher(with_hosts(vhost, host_of(first), host_of(second)), topology=[ORDERS]) as publisher:
        publisher.connect()
        first.hold_confirms()
        confirmations = [submit(checker, publisher, "orders") for _ in range(100)]
        vhost.wait_for_messages("orders", 100)
        first.refuse_connections()
        first.cut()
        assert [book(checker, confirmation) for confirmation in confirmations] == [None] * 100
        assert (first.connections, second.connections) == (1, 1)
    checker.drain(vhost, ["orders"])
    checker.close()


def test_f54_all_hosts_are_dead_for_a_while(vhost: VirtualHost, fault_proxy: FaultProxyFactory, refusing: str) -> None:
    """connect() fails in time and names a host.

    Publishes wait, and are confirmed in the end.
    """
    proxy = fault_proxy(vhost.url)
    proxy.refuse_connections()
    url = with_hosts(vhost, refusing, host_of(proxy))
    began = time.monotonic()
    with Publisher(url, connect_timeout=CONNECT_TIMEOUT, reconnect_wait=tenacity.wait_fixed(0.1)) as publisher:
        with pytest.raises(BrokerUnavailable, match="refused") as caught:
            publisher.connect()
        assert not caught.value.permanent
        assert time.monotonic() - began < 15
        confirmation = publisher.submit(Message(b"x"), routing_key="orders", timeout=20)
        with vhost.connect() as connection:
            connection.channel().queue_declare("orders", durable=True)
        proxy.accept_connections()
        assert confirmation.result(20).attempts == 1
