"""A Spark Connect server whose Python has the package.

Its client has the package or not.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from integration.programs.spark_connect import EVENTS
from integration.support.programs import output_of
from integration.support.spark import drain
from integration.support.spark_application import committed_rows
from integration.support.spark_cluster import ConnectServer
from reliable_mq import Message, Publisher, Queue

if TYPE_CHECKING:
    from pathlib import Path

    from reliable_mq.testing import VirtualHost

TOPOLOGY = [Queue("orders"), Queue("done"), Queue("events", type="stream")]
ORDERS = 500


def publish_orders(vhost: VirtualHost) -> dict[str, bytes]:
    messages = [Message(b"%d" % number) for number in range(ORDERS)]
    with Publisher(vhost.url, topology=TOPOLOGY) as publisher:
        assert publisher.publish_many(messages, routing_key="orders").ok
    return {message.message_id: bytes(message.body) for message in messages}


def run(remote: str, vhost: VirtualHost, directory: Path, *, registered: bool) -> dict[str, Any]:
    """Run the client and return its output."""
    given = {"remote": remote, "url": vhost.url, "directory": str(directory), "registered": registered}
    program = [sys.executable, "-m", "integration.programs.spark_connect", json.dumps(given)]
    said: dict[str, Any] = json.loads(output_of(program, timeout=300))
    assert said["session"] == "pyspark.sql.connect.session"
    return said


def assert_moved(vhost: VirtualHost, published: dict[str, bytes]) -> None:
    """Check that the other queue has each order once, and that none is left."""
    taken = drain(vhost, "done")
    assert len(taken) == ORDERS
    assert {properties.message_id: body for properties, body in taken} == published
    assert drain(vhost, "orders") == []


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_client_registers_the_format_and_reads_and_writes(vhost: VirtualHost, tmp_path: Path) -> None:
    """The client copies a queue and reads and writes a stream.

    The stream is read by a query into files, and as a batch. Errors have their usual texts.
    """
    published = publish_orders(vhost)
    with ConnectServer(tmp_path, discovered=False) as server:
        said = run(server.url, vhost, tmp_path, registered=True)
    assert "Failed to find the data source: rabbitmq" in said["before"]
    assert said["progress"]["sequence"] == ORDERS
    assert_moved(vhost, published)
    assert sorted(offset for offset, _ in said["events"]) == list(range(EVENTS))
    assert {body for _, body in said["events"]} == {str(number) for number in range(EVENTS)}
    rows = committed_rows(tmp_path / "events")
    assert len(rows) == rows.total() == EVENTS
    assert "row 0: message " in said["unroutable"]
    assert "312 NO_ROUTE" in said["unroutable"]
    assert "use mode('append')" in said["overwrite"]
    assert "no queue 'not-there'" in said["missing"]
    assert "guest:guest" not in json.dumps(said)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_client_without_the_package_uses_what_the_server_finds(vhost: VirtualHost, tmp_path: Path) -> None:
    """With the wheel installed on the server, nothing has to be registered."""
    published = publish_orders(vhost)
    with ConnectServer(tmp_path, discovered=True) as server:
        run(server.url, vhost, tmp_path, registered=False)
    assert_moved(vhost, published)
