"""The broker of a run, started here or given by URL, and its queues.

Invariant: every wait is for a condition, and has a deadline.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pika
from pika.exceptions import AMQPError

from reliable_mq.testing.waiting import wait_until

__all__ = ["REST_SHARE", "BenchBroker", "BrokerError", "started", "wait_for_rest"]

AMQP_PORT = 5672
ANSWER_DEADLINE = 60.0
DEPTH_DEADLINE = 20.0
REST_INTERVAL = 0.25
REST_SHARE = 0.15  # of the machine's CPU time; a busy broker and client use most of two cores
PROC_STAT = Path("/proc/stat")


class BrokerError(Exception):
    """The broker does not do what the benchmark needs."""


class BenchBroker:
    """A broker, given by its URL.

    Each call opens and closes a connection, so that no idle connection is open during a measurement.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        # Name the default virtual host explicitly, because clients interpret an empty path differently.
        self.url = urlunsplit(parts._replace(path="/%2F")) if parts.path in {"", "/"} else url

    @property
    def version(self) -> str:
        """The broker's product and version, such as ``RabbitMQ 4.3.6``."""
        with self._connection() as connection:
            properties = connection._impl.server_properties
            return f"{properties['product']} {properties['version']}"

    def make_queue(self, name: str, queue_type: str) -> None:
        """Delete the queue, if it exists, and declare it again, durable and empty."""
        with self._channel() as channel:
            channel.queue_delete(name)
            channel.queue_declare(name, durable=True, arguments={"x-queue-type": queue_type})

    def delete_queue(self, name: str) -> None:
        with self._channel() as channel:
            channel.queue_delete(name)

    def delete_exchange(self, name: str) -> None:
        with self._channel() as channel:
            channel.exchange_delete(name)

    def wait_for_depth(self, name: str, messages: int) -> None:
        """Wait until exactly `messages` messages are ready in a queue.

        Raises:
            BrokerError: If this does not happen in time.
        """
        with self._channel() as channel:

            def depth() -> int:
                count: int = channel.queue_declare(name, passive=True).method.message_count
                return count

            try:
                wait_until(lambda: depth() == messages, timeout=DEPTH_DEADLINE, what="the queue's depth")
            except TimeoutError as error:
                raise BrokerError(f"{depth()} messages are ready in queue {name}, not {messages}") from error

    def wait_for_first_delivery(self, name: str, messages: int) -> None:
        """Wait until fewer than `messages` messages are ready in a queue.

        Raises:
            TimeoutError: If this does not happen in time.
        """
        with self._channel() as channel:
            wait_until(
                lambda: channel.queue_declare(name, passive=True).method.message_count < messages,
                timeout=DEPTH_DEADLINE, what="the first delivery", interval=0.01,
            )  # fmt: skip

    def wait_until_it_answers(self) -> None:
        """Wait until the broker accepts a connection.

        Raises:
            BrokerError: If this does not happen in time.
        """
        cause: BrokerError | None = None

        def answers() -> bool:
            nonlocal cause
            try:
                return bool(self.version)
            except BrokerError as error:
                cause = error
                return False

        try:
            wait_until(answers, timeout=ANSWER_DEADLINE, what="the broker")
        except TimeoutError as error:
            raise cause or BrokerError("the broker says nothing") from error

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Any]:
        """Open a connection; raise errors of the broker and the network as BrokerError."""
        connection = None
        try:
            connection = pika.BlockingConnection(pika.URLParameters(self.url))
            yield connection
            connection.close()
        except (AMQPError, OSError) as error:
            raise BrokerError(f"the broker does not do its part: {error!r}") from error
        finally:
            if connection is not None and connection.is_open:
                connection.close()

    @contextlib.contextmanager
    def _channel(self) -> Iterator[Any]:
        with self._connection() as connection:
            yield connection.channel()


@contextlib.contextmanager
def started(line: str) -> Iterator[BenchBroker]:
    """Run a broker of the line ``newest`` or ``4.0`` in a container during the block.

    The URL has the address on the container network if this machine can reach it: docker's proxy for ports published on
    loopback would use CPU time during the measurements.
    """
    from integration.support.set_up import broker_image
    from reliable_mq.testing import RabbitMQ, remove_leftovers

    image = broker_image(line)
    remove_leftovers()
    with RabbitMQ(image) as broker:
        address = broker.address
        direct = address and listens(address)
        yield BenchBroker(f"amqp://guest:guest@{address}:{AMQP_PORT}/" if direct else broker.url)


def listens(address: str) -> bool:
    try:
        socket.create_connection((address, AMQP_PORT), timeout=5).close()
    except OSError:
        return False
    return True


def wait_for_rest(timeout: float) -> float:
    """Wait up to `timeout` seconds until this machine is nearly idle.

    By then the previous run is over, also in the broker.

    Returns:
        The share of CPU time in use at the end. It is above `REST_SHARE` if the machine did not become idle in time.
    """
    share, before = 0.0, cpu_ticks()

    def at_rest() -> bool:
        nonlocal share, before
        now = cpu_ticks()
        (busy, total), (busy_before, total_before) = now, before
        if total == total_before:
            return not PROC_STAT.exists()
        share, before = (busy - busy_before) / (total - total_before), now
        return share < REST_SHARE

    with contextlib.suppress(TimeoutError):
        wait_until(at_rest, timeout=timeout, what="rest", interval=REST_INTERVAL)
    return share


def cpu_ticks() -> tuple[int, int]:
    """Return the busy and the total time of the machine's CPUs; zeros if unknown."""
    if not PROC_STAT.exists():
        return 0, 0
    user, nice, system, idle, waiting, *rest = map(int, PROC_STAT.read_text().split("\n", 1)[0].split()[1:9])
    busy = user + nice + system + sum(rest)
    return busy, busy + idle + waiting
