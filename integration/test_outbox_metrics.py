"""The metrics of an outbox, on either API and of the command line's relay."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry

from integration.support.command_line import start_cli
from reliable_mq import Message, OutboxError, Publisher, Queue
from reliable_mq.core.outbox import NewRow
from reliable_mq.outbox import SQLiteOutbox
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from reliable_mq.core.outbox import RowSettlement
    from reliable_mq.testing import FaultProxyFactory, VirtualHost

ORDERS = Queue("orders", type="classic", dead_letter=None)


class Full(SQLiteOutbox):
    """An outbox that may be full."""

    full = False

    def write(self, rows: Sequence[NewRow], settlements: Sequence[RowSettlement]) -> None:
        if rows and self.full:
            raise OutboxError("the disk is full")
        super().write(rows, settlements)


def scraped(registry: CollectorRegistry) -> Callable[..., float | None]:
    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"reliable_mq_outbox_{name}", {"publisher": "shop", **labels})

    return value


@pytest.mark.usefixtures("baseline", "publisher_api")
def test_a_scrape_shows_what_waits_and_what_became_of_the_rest(
    vhost: VirtualHost, tmp_path: Path, fault_proxy: FaultProxyFactory
) -> None:
    """Without a broker, rows wait and age; afterwards all but set-aside rows go."""
    registry = CollectorRegistry()
    value = scraped(registry)
    proxy = fault_proxy(vhost.url)
    proxy.refuse_connections()
    outbox = Full(tmp_path / "outbox", ordering_key=lambda message, *_: message.correlation_id)
    with Publisher(proxy.url, topology=[ORDERS], outbox=outbox, name="shop", registry=registry) as publisher:
        publisher.publish(Message(b"", correlation_id="key"), routing_key="nowhere")
        publisher.publish(Message(b"", correlation_id="key"), routing_key="orders")
        publisher.publish(Message(b""), routing_key="orders")
        outbox.full = True
        with pytest.raises(OutboxError, match="full"):
            publisher.publish(Message(b""), routing_key="orders")
        wait_until(lambda: value("waiting") == 3, timeout=20, what="a count")
        age = value("oldest_age_seconds")
        assert age is not None
        wait_until(lambda: (value("oldest_age_seconds") or 0) > age, timeout=20, what="an older one")
        assert value("stored_total") == 3
        assert value("failures_total", what="store") == 1
        assert value("relayed_total", outcome="confirmed") == 0
        proxy.accept_connections()
        publisher.flush(30)
        wait_until(lambda: value("set_aside") == 1, timeout=20, what="a row set aside")
        wait_until(lambda: (value("waiting"), value("held")) == (1, 1), timeout=20, what="one that is held")
        assert value("relayed_total", outcome="confirmed") == 1
        assert value("relayed_total", outcome="set_aside") == 1
        assert value("unreadable") == 0
    assert value("waiting") is None, "the gauges of a closed publisher go"
    assert value("stored_total") == 3, "its counters stay"


def test_the_command_line_serves_the_metrics_of_its_relay(vhost: VirtualHost, tmp_path: Path) -> None:
    """The command picks a port and prints it; the relay counts confirmed rows."""
    with vhost.connect() as connection:
        connection.channel().queue_declare("orders")
    outbox = SQLiteOutbox(tmp_path / "outbox")
    outbox.write([NewRow(Message(b""), "", "orders", True, None)] * 3, [])
    outbox.close()
    relay = start_cli("outbox", "relay", vhost.url, str(tmp_path / "outbox"), "--metrics-port", "0")
    try:
        assert relay.stderr is not None
        said = re.search(rb"http://\S+/metrics", relay.stderr.readline())
        assert said is not None
        wanted = 'reliable_mq_outbox_relayed_total{outcome="confirmed",publisher="reliable-mq outbox relay"} 3.0'

        def shown() -> bool:
            with urlopen(said[0].decode(), timeout=10) as response:
                text: str = response.read().decode()
            return wanted in text.splitlines()

        wait_until(shown, timeout=20, what=wanted)
    finally:
        relay.send_signal(signal.SIGTERM)
        relay.communicate(timeout=30)
    assert relay.returncode == 0
