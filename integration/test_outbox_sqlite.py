"""A publisher with a SQLite outbox: accepted messages survive any kill."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from integration.support.processes import Process
from integration.support.seeds import soaking
from reliable_mq import Message, Publisher, Queue, RetryPolicy, UsageError
from reliable_mq.core.outbox import NewRow
from reliable_mq.outbox import SQLiteOutbox
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from reliable_mq.testing import Audit, FaultProxyFactory, VirtualHost

pytestmark = pytest.mark.usefixtures("baseline")

ORDERS = Queue("orders", type="classic", dead_letter=None)


def assert_in_order(found: list[bytes]) -> None:
    """Check that first occurrences are in the order of their numbers."""
    numbers = list(dict.fromkeys(int(body) for body in found))
    assert numbers == sorted(numbers)


# -- row 33: killed ----------------------------------------------------------------------------------------------------


class Killed:
    """Runs the program repeatedly on one outbox, and keeps an account of its output."""

    def __init__(self, vhost: VirtualHost, outbox: Path | str, api: str, checker: Audit) -> None:
        self._arguments = [vhost.url, str(outbox), api]
        self._checker = checker
        self.accepted = 0

    def run(self, count: int, kill_at: int, *, kill_after: float | None = None) -> int | None:
        """Run once, with a kill at a line or after some seconds, or none.

        Return the number of lines that ran, or None if it was killed.
        """
        process = Process("integration.programs.outboxing", *self._arguments, str(count), str(kill_at), stderr=2)
        try:
            if kill_after is not None:
                time.sleep(kill_after)
                process.kill()
            said, _ = process.communicate(timeout=100)
        finally:
            process.kill()
        status = process.wait()
        lines = None
        for line in said.decode().splitlines():
            what, _, text = line.partition(" ")
            if what == "attempt":
                self._checker.attempted(text)
            elif what == "accepted":
                self._checker.confirmed(text)
                self.accepted += 1
            else:
                lines = int(text)
        if status == -signal.SIGKILL:
            lines = None  # it may have printed the number already
        assert status == (0 if lines is not None else -signal.SIGKILL), status
        return lines

    def run_and_be_killed(self, count: int, deaths: int, rng: random.Random) -> None:
        """Run once to the end, then `deaths` times with a kill, every third from outside."""
        began = time.monotonic()
        total = self.run(count, 0)
        took = time.monotonic() - began
        assert total is not None
        died = 0
        for number in range(deaths):
            began = time.monotonic()
            if number % 3 == 2:
                lines = self.run(count, 0, kill_after=rng.uniform(0, took))
            else:
                # Most lines belong to storing and relaying. Some kills are at the first lines, of the start.
                limit = total if rng.random() < 0.8 else total // 20
                lines = self.run(count, rng.randrange(1, limit + 1))
            died += lines is None
            if lines is not None:  # the first run was slower, and ran more lines while it waited
                total, took = min(total, lines), min(took, time.monotonic() - began)
        assert died > 0


def test_f33_a_publisher_killed_at_any_line_publishes_on_restart(
    one_api: str, vhost: VirtualHost, tmp_path: Path, checker: Audit, rng: random.Random
) -> None:
    """SIGKILLs at seeded lines of the outbox's code; restarts use the same file.

    The same ids arrive.
    """
    killed = Killed(vhost, tmp_path / "outbox", one_api, checker)
    killed.run_and_be_killed(15, 25 if soaking() else 3, rng)
    with Publisher(vhost.url, topology=[ORDERS], outbox=SQLiteOutbox(tmp_path / "outbox")) as publisher:
        publisher.flush(30)
    assert SQLiteOutbox(tmp_path / "outbox").status().rows == 0
    checker.drain(vhost, ["orders"])
    balance = checker.close()
    assert balance.confirmed == killed.accepted
    assert balance.drained >= balance.confirmed


def test_f33_what_a_killed_process_leaves_keeps_its_key_order(
    one_api: str, vhost: VirtualHost, tmp_path: Path, checker: Audit, rng: random.Random
) -> None:
    """First occurrences of a key's messages are in the order of their acceptance."""
    path = tmp_path / "outbox"
    outbox = SQLiteOutbox(path)
    numbers = iter(range(100_000))
    outbox.write([NewRow(Message(b"%d" % next(numbers)), "", "orders", True, "key") for _ in range(300)], [])
    for _ in range(4):
        killed = Killed(vhost, path, one_api, checker)
        assert killed.run(0, rng.randrange(500, 12_000)) is None
        outbox.write([NewRow(Message(b"%d" % next(numbers)), "", "orders", True, "key") for _ in range(10)], [])
    with Publisher(vhost.url, topology=[ORDERS], outbox=outbox) as publisher:
        publisher.flush(30)
    found = [body for _, body in vhost.bodies("orders")]
    assert len(set(found)) == 340
    assert_in_order(found)


# -- the behaviour, on either API --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("publisher_api")
def test_messages_stored_without_a_broker_are_published_later(
    vhost: VirtualHost, tmp_path: Path, fault_proxy: FaultProxyFactory
) -> None:
    """Publishing does not wait for a broker; the receipt says that it is stored.

    The message later arrives with the same id.
    """
    outbox = SQLiteOutbox(tmp_path / "outbox")
    proxy = fault_proxy(vhost.url)
    proxy.refuse_connections()
    began = time.monotonic()
    with Publisher(proxy.url, topology=[ORDERS], outbox=outbox, connect_timeout=20) as publisher:
        receipt = publisher.publish(Message(b"1", message_id="mine"), routing_key="orders")
        assert (receipt.message_id, receipt.status) == ("mine", "stored")
        report = publisher.publish_many([Message(b"2"), Message(b"3")], routing_key="orders")
        assert (report.confirmed, report.stored, report.ok) == (0, 2, True)
        assert time.monotonic() - began < 20
        with pytest.raises(TimeoutError, match="3 messages are still in"):
            publisher.flush(0.3)
        assert outbox.status().rows == 3
        proxy.accept_connections()
        publisher.flush(30)
        assert outbox.status().rows == 0
        assert publisher.statistics.confirmed == 3
    found = vhost.bodies("orders")
    assert [body for _, body in found] == [b"1", b"2", b"3"]
    assert found[0][0] == "mine"


@pytest.mark.usefixtures("publisher_api")
def test_leaving_without_a_broker_keeps_stored_messages(
    vhost: VirtualHost, tmp_path: Path, fault_proxy: FaultProxyFactory
) -> None:
    """It does not wait for a broker known to be away, and raises nothing.

    The messages are safe in the outbox.
    """
    proxy = fault_proxy(vhost.url)
    proxy.refuse_connections()
    began = time.monotonic()
    with Publisher(proxy.url, outbox=SQLiteOutbox(tmp_path / "outbox")) as publisher:
        publisher.publish(Message(b"1"), routing_key="orders")
    assert time.monotonic() - began < 15
    with Publisher(vhost.url, topology=[ORDERS], outbox=SQLiteOutbox(tmp_path / "outbox")) as publisher:
        publisher.flush(20)
    assert [body for _, body in vhost.bodies("orders")] == [b"1"]


@pytest.mark.usefixtures("publisher_api")
def test_a_publisher_that_was_closed_is_left_at_once(
    vhost: VirtualHost, tmp_path: Path, fault_proxy: FaultProxyFactory
) -> None:
    """Unconfirmed messages are in the outbox, so there is nothing to wait for."""
    with vhost.connect() as connection:
        connection.channel().queue_declare("orders")
    proxy = fault_proxy(vhost.url)
    proxy.hold_confirms()
    with Publisher(proxy.url, outbox=SQLiteOutbox(tmp_path / "outbox")) as publisher:
        publisher.publish(Message(b"1"), routing_key="orders")
        vhost.wait_for_messages("orders", 1)
        began = time.monotonic()
        publisher.close(0)
    assert time.monotonic() - began < 15
    assert SQLiteOutbox(tmp_path / "outbox").status().rows == 1


@pytest.mark.usefixtures("publisher_api")
def test_a_timed_out_close_removes_the_rows_it_has_published(
    vhost: VirtualHost, tmp_path: Path, fault_proxy: FaultProxyFactory
) -> None:
    """More messages wait than can be relayed within the timeout.

    Rows that remain in the outbox have not been published.
    """
    outbox = SQLiteOutbox(tmp_path / "outbox")
    outbox.write([NewRow(Message(b""), "", "orders", True, None) for _ in range(1500)], [])
    with vhost.connect() as connection:
        connection.channel().queue_declare("orders")
    proxy = fault_proxy(vhost.url)
    proxy.delay(0.05)
    with Publisher(proxy.url, outbox=outbox, max_outstanding=10) as publisher:
        publisher.connect()
        wait_until(lambda: publisher.statistics.confirmed > 0, timeout=20, what="a row that is published")
        began = time.monotonic()
        publisher.close(3)
    assert time.monotonic() - began < 20
    found = len(vhost.bodies("orders"))
    assert 0 < found < 1500
    assert outbox.status().rows == 1500 - found


@pytest.mark.usefixtures("publisher_api")
def test_what_is_unpublishable_is_set_aside_and_can_be_put_back(vhost: VirtualHost, tmp_path: Path) -> None:
    """Unroutable and refused messages stop neither the others nor flush.

    Once the cause is gone, retry publishes them.
    """
    outbox = SQLiteOutbox(tmp_path / "outbox")
    with Publisher(vhost.url, topology=[ORDERS], outbox=outbox) as publisher:
        publisher.publish(Message(b"unroutable", message_id="a"), routing_key="later")
        publisher.publish(Message(b"refused", message_id="b"), exchange="nowhere", routing_key="x")
        for number in range(20):
            publisher.publish(Message(b"%d" % number), routing_key="orders")
        publisher.flush(30)
        aside = {one.message_id: one.reason for one in outbox.set_aside()}
        assert aside.keys() == {"a", "b"}
        assert "NO_ROUTE" in aside["a"]
        assert "404" in aside["b"]
        assert outbox.status().set_aside == 2
    with Publisher(vhost.url, topology=[Queue("later", dead_letter=None)], outbox=outbox) as publisher:
        assert outbox.retry(["a"]) == 1
        publisher.flush(30)
    assert vhost.bodies("later") == [("a", b"unroutable")]
    assert sorted(int(body) for _, body in vhost.bodies("orders")) == list(range(20))
    assert outbox.purge() == 1
    assert outbox.status().set_aside == 0


@pytest.mark.usefixtures("publisher_api")
def test_a_damaged_row_is_set_aside_and_the_others_are_published(vhost: VirtualHost, tmp_path: Path) -> None:
    """A row that cannot be read is reported with its number and the reason.

    For example, another program has written into the file.
    """
    outbox = SQLiteOutbox(tmp_path / "outbox")
    outbox.write([NewRow(Message(b"%d" % number), "", "orders", True, None) for number in range(3)], [])
    with closing(sqlite3.connect(tmp_path / "outbox")) as connection, connection:
        connection.execute("UPDATE outbox SET message_id = 'mine', routing_key = CAST(X'FF' AS TEXT) WHERE id = 2")
    with Publisher(vhost.url, topology=[ORDERS], outbox=outbox) as publisher:
        publisher.flush(20)
        wait_until(lambda: outbox.status().set_aside == 1, timeout=20, what="a row that is set aside")
    assert [body for _, body in vhost.bodies("orders")] == [b"0", b"2"]
    [aside] = outbox.set_aside()
    assert (aside.message_id, aside.routing_key) == ("mine", "\\xff")
    assert "damaged" in aside.reason


@pytest.mark.usefixtures("publisher_api")
def test_a_key_keeps_its_order_behind_a_message_set_aside(vhost: VirtualHost, tmp_path: Path) -> None:
    """A message set aside holds its own key only.

    After a retry, the waiting messages follow in order.
    """
    outbox = SQLiteOutbox(tmp_path / "outbox", ordering_key=lambda message, _exchange, _key: message.correlation_id)
    with Publisher(vhost.url, topology=[ORDERS], outbox=outbox) as publisher:
        publisher.publish(Message(b"0", correlation_id="held", message_id="first"), routing_key="later")
        for number in range(1, 251):
            publisher.submit(Message(b"%d" % number, correlation_id="held"), routing_key="orders")
            publisher.submit(Message(b"%d" % (1000 + number), correlation_id="free"), routing_key="orders")
        publisher.flush(30)
        found = [body for _, body in vhost.bodies("orders")]
        assert [int(body) for body in found] == list(range(1001, 1251))
        status = outbox.status()
        assert (status.rows, status.held, status.set_aside) == (250, 250, 1)
        with vhost.connect() as connection:
            connection.channel().queue_declare("later")
        assert outbox.retry() == 1
        publisher.flush(30)
        vhost.wait_for_messages("orders", 250)
        assert [int(body) for _, body in vhost.bodies("orders")] == list(range(1, 251))


@pytest.mark.usefixtures("publisher_api")
def test_a_nacked_message_is_tried_again_until_there_is_room(vhost: VirtualHost, tmp_path: Path) -> None:
    """A full queue delays its own messages, and not those of other queues."""
    full = Queue(
        "full", type="classic", dead_letter=None, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
    )
    outbox = SQLiteOutbox(tmp_path / "outbox", ordering_key=lambda _message, _exchange, key: key)
    with Publisher(vhost.url, topology=[ORDERS, full], outbox=outbox) as publisher:
        for number in range(3):
            publisher.publish(Message(b"%d" % number), routing_key="full")
        wait_until(lambda: outbox.status().delayed == 1, timeout=20, what="a row that is delayed")
        publisher.publish(Message(b"4"), routing_key="orders")
        vhost.wait_for_messages("orders", 1)
        taken: list[bytes] = []

        def take() -> bool:
            taken.extend(body for _, body in vhost.bodies("full"))
            return len(taken) == 3

        wait_until(take, timeout=30, what="three messages")
        publisher.flush(20)
    assert taken == [b"0", b"1", b"2"]


@pytest.mark.usefixtures("publisher_api")
def test_a_full_queue_with_many_rows_holds_no_other_queue(vhost: VirtualHost, tmp_path: Path) -> None:
    """Its rows do not occupy the relay during the publisher's retries.

    The retries would take over a minute here.
    """
    full = Queue(
        "full", type="classic", dead_letter=None, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
    )
    outbox = SQLiteOutbox(tmp_path / "outbox")
    slow = RetryPolicy(2, delays=(70,))
    with Publisher(vhost.url, topology=[ORDERS, full], outbox=outbox, retry=slow, max_outstanding=4) as publisher:
        for number in range(13):
            publisher.publish(Message(b"%d" % number), routing_key="full")
        publisher.publish(Message(b"healthy"), routing_key="orders")
        vhost.wait_for_messages("orders", 1)
        wait_until(lambda: outbox.status().rows == 12, timeout=20, what="all confirmed that can be")
        publisher.close(1)
    assert outbox.status().rows == 12


def test_f46_a_forked_outbox_publisher_refuses_the_parents_works(vhost: VirtualHost, tmp_path: Path) -> None:
    """The child's copies raise; its end affects neither outbox nor relay."""
    outbox = SQLiteOutbox(tmp_path / "outbox")
    with Publisher(vhost.url, topology=[ORDERS], outbox=outbox) as publisher:
        publisher.publish(Message(b"parent"), routing_key="orders")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(UsageError, match="fork"):
                    publisher.publish(Message(b"child"), routing_key="orders")
                with pytest.raises(UsageError, match="fork"):
                    outbox.status()
                publisher.close()
                with Publisher(vhost.url, outbox=SQLiteOutbox(tmp_path / "outbox")) as own:
                    own.publish(Message(b"child"), routing_key="orders")
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        publisher.publish(Message(b"parent"), routing_key="orders")
        publisher.flush(20)
    vhost.wait_for_messages("orders", 3)


def test_several_processes_share_one_file(vhost: VirtualHost, tmp_path: Path, checker: Audit) -> None:
    """Each stored message is published once.

    When the relaying process ends, another one takes over.
    """
    path = tmp_path / "outbox"
    programs = [Killed(vhost, path, api, checker) for api in ("sync", "aio") * 2]
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(program.run, 20, 0) for program in programs]
        assert all(run.result() for run in runs)
    with Publisher(vhost.url, outbox=SQLiteOutbox(path)) as publisher:
        publisher.flush(30)
    checker.drain(vhost, ["orders"])
    balance = checker.close()
    assert balance.confirmed == 4 * 3 * 20
    assert not balance.duplicated
