"""``python -m integration.bench.recovery``: how long faults interrupt messages.

In each round all contenders run at the same time. Each publishes into its own quorum queue and consumes from it. The
queues have their leader on one node, and the clients are connected to one node, which is then harmed. Each contender
waits for a confirm before it publishes the next message, about twenty per second.

The result is the longest silence after the fault, in seconds: of confirms, and of handled deliveries. Each contender
uses the default settings of its library, except for heartbeats of 5 s. `pika` is the simplest loop: connect to the next
host and start again. aio-pika's `connect_robust` takes one host, which is the harmed node.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
import sys
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import aio_pika
import pika
from pika.exceptions import AMQPError

from integration.bench.report import Table
from integration.support.set_up import broker_image
from reliable_mq import AsyncConsumer, AsyncPublisher, Consumer, Message, Publisher, Queue, ReliableMQError
from reliable_mq.testing import RabbitMQCluster, VirtualHost, remove_leftovers, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from reliable_mq import Delivery
    from reliable_mq.testing import ClusterNode

_PAUSE: Final = 0.05  # seconds between two publishes of a contender
_LASTS: Final = 12.0  # seconds that a fault lasts
_SETTLED: Final = 3.0  # seconds until a queue is no longer new
_AGAIN: Final = 150.0  # seconds within which messages must flow again
_HEARTBEAT: Final = 5


class Contender:
    """A publisher and a consumer on threads, and the times of confirms and deliveries.

    Args:
        hosts: ``host:port`` of each node, in the order in which they are tried.
        vhost: The name of the virtual host.
    """

    label: str

    def __init__(self, hosts: Sequence[str], vhost: str) -> None:
        self.hosts = list(hosts)
        self.vhost = vhost
        self.queue = queue_of(type(self))
        self.confirmed: list[float] = []
        self.handled: list[float] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=run, name=self.label, daemon=True) for run in self.runs()]

    def runs(self) -> list[Callable[[], None]]:
        """Return the functions that publish and consume until `over` is true."""
        return [self.publish, self.consume]

    def publish(self) -> None:
        raise NotImplementedError

    def consume(self) -> None:
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@{','.join(self.hosts)}/{self.vhost}?heartbeat={_HEARTBEAT}"

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def pause(self, seconds: float = _PAUSE) -> bool:
        """Wait; return whether the contender must stop."""
        return self._over.wait(seconds)

    def was_confirmed(self, *_: object) -> None:
        self.confirmed.append(time.monotonic())

    def was_handled(self, *_: object) -> None:
        self.handled.append(time.monotonic())

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)


def queue_of(kind: type[Contender]) -> str:
    return f"recovery.{kind.label}"


class Ours(Contender):
    """`Publisher` and `Consumer`."""

    label = "reliable_mq"

    def publish(self) -> None:
        with Publisher(self.url, name=self.label) as publisher:
            while not self.pause():
                try:
                    publisher.publish(Message(b"x"), routing_key=self.queue)
                except ReliableMQError:
                    continue
                self.was_confirmed()

    def consume(self) -> None:
        def handle(_delivery: Delivery) -> None:
            self.was_handled()

        with Consumer(self.url, Queue(self.queue), handle, ack_every=1, name=self.label):
            while not self.pause():
                pass


class OnLoop(Contender):
    """A contender with coroutines, each on a separate loop."""

    def publish(self) -> None:
        self.until_over(self.publish_on_loop())

    def consume(self) -> None:
        self.until_over(self.consume_on_loop())

    def until_over(self, work: Coroutine[object, object, None]) -> None:
        async def watched() -> None:
            task = asyncio.create_task(work)
            over = asyncio.create_task(asyncio.to_thread(self._over.wait))
            await asyncio.wait([task, over], return_when=asyncio.FIRST_COMPLETED)
            task.cancel()
            await asyncio.wait([task], timeout=20)

        asyncio.run(watched())

    async def publish_on_loop(self) -> None:
        raise NotImplementedError

    async def consume_on_loop(self) -> None:
        raise NotImplementedError


class OursAsync(OnLoop):
    """`AsyncPublisher` and `AsyncConsumer`."""

    label = "reliable_mq, asyncio"

    async def publish_on_loop(self) -> None:
        async with AsyncPublisher(self.url, name=self.label) as publisher:
            while not self.over:
                await asyncio.sleep(_PAUSE)
                try:
                    await publisher.publish(Message(b"x"), routing_key=self.queue)
                except ReliableMQError:
                    continue
                self.was_confirmed()

    async def consume_on_loop(self) -> None:
        async def handle(_delivery: Delivery) -> None:
            self.was_handled()

        async with AsyncConsumer(self.url, Queue(self.queue), handle, ack_every=1, name=self.label):
            await asyncio.Event().wait()


class Robust(OnLoop):
    """aio-pika's robust connection. A publish has a timeout of 10 s."""

    label = "aio-pika connect_robust"

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@{self.hosts[0]}/{self.vhost}?heartbeat={_HEARTBEAT}"

    async def publish_on_loop(self) -> None:
        connection = await aio_pika.connect_robust(self.url)
        async with connection:
            channel = await connection.channel(publisher_confirms=True)
            message = aio_pika.Message(b"x", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            while not self.over:
                await asyncio.sleep(_PAUSE)
                try:
                    await channel.default_exchange.publish(message, self.queue, timeout=10)
                except Exception:  # from aio-pika, aiormq, asyncio or the system
                    continue
                self.was_confirmed()

    async def consume_on_loop(self) -> None:
        connection = await aio_pika.connect_robust(self.url)
        async with connection:
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=200)
            queue = await channel.get_queue(self.queue)

            async def handle(message: aio_pika.abc.AbstractIncomingMessage) -> None:
                self.was_handled()
                await message.ack()

            await queue.consume(handle)
            await asyncio.Event().wait()


class PikaLoop(Contender):
    """pika's blocking connection. After an error, it connects to the next host."""

    label = "pika, a loop that reconnects"

    def publish(self) -> None:
        def work(channel: pika.adapters.blocking_connection.BlockingChannel) -> None:
            channel.confirm_delivery()
            while not self.over:
                channel.connection.sleep(_PAUSE)
                channel.basic_publish("", self.queue, b"x", pika.BasicProperties(delivery_mode=2))
                self.was_confirmed()

        self._again_and_again(work)

    def consume(self) -> None:
        def work(channel: pika.adapters.blocking_connection.BlockingChannel) -> None:
            channel.basic_qos(prefetch_count=200)
            for method, _, _ in channel.consume(self.queue, inactivity_timeout=0.5):
                if self.over:
                    return
                if method is not None:
                    self.was_handled()
                    channel.basic_ack(method.delivery_tag)

        self._again_and_again(work)

    def _again_and_again(self, work: Callable[[pika.adapters.blocking_connection.BlockingChannel], None]) -> None:
        attempt = 0
        while not self.over:
            host = self.hosts[attempt % len(self.hosts)]
            attempt += 1
            try:
                parameters = pika.URLParameters(f"amqp://guest:guest@{host}/{self.vhost}?heartbeat={_HEARTBEAT}")
                with pika.BlockingConnection(parameters) as connection:
                    work(connection.channel())
            except (AMQPError, OSError):
                self.pause(0.5)


CONTENDERS: Final = (Ours, OursAsync, Robust, PikaLoop)


class Faults:
    """The faults of the matrix: `(row, what, harm, whether the leader is elsewhere)`."""

    def __init__(self, cluster: RabbitMQCluster) -> None:
        self._cluster = cluster
        self.all: list[tuple[int, str, Callable[[ClusterNode, VirtualHost], None], bool]] = [
            (20, "leader killed, with the clients' node; back after 12 s", self._kill, False),
            (21, "majority killed, with leader and clients' node; back after 12 s", self._kill_majority, False),
            (22, "leader cut off with its clients for 12 s", self._cut_off, False),
            (23, "leader and clients on a node that is drained and restarted", self._restart, False),
            (62, "leader paused for 12 s, with the clients' node", self._pause, False),
            (64, "leader transferred ten times, at first from the clients' node", self._transfer, False),
            (67, "node of the clients killed, the leader lives elsewhere; back after 12 s", self._kill, True),
        ]

    def _kill(self, node: ClusterNode, _vhost: VirtualHost) -> None:
        node.kill()
        _last()

    def _kill_majority(self, node: ClusterNode, _vhost: VirtualHost) -> None:
        node.kill()
        next(other for other in self._cluster.nodes if other is not node).kill()
        _last()

    def _cut_off(self, node: ClusterNode, _vhost: VirtualHost) -> None:
        self._cluster.partition(node)
        _last()

    def _pause(self, node: ClusterNode, _vhost: VirtualHost) -> None:
        node.pause()
        _last()

    def _restart(self, node: ClusterNode, _vhost: VirtualHost) -> None:
        self._cluster.drain(node)
        node.restart()

    def _transfer(self, node: ClusterNode, vhost: VirtualHost) -> None:
        nodes = self._cluster.nodes
        for number in range(1, 11):
            leader = nodes[(nodes.index(node) + number) % len(nodes)]
            for kind in CONTENDERS:
                self._cluster.transfer_leader(queue_of(kind), leader, vhost.name)


def measure(
    cluster: RabbitMQCluster, harm: Callable[[ClusterNode, VirtualHost], None], rng: random.Random, *, elsewhere: bool
) -> dict[str, tuple[float, float]]:
    """Return the seconds without confirms and without deliveries, by contender."""
    nodes = rng.sample(cluster.nodes, len(cluster.nodes))
    victim = nodes[0]
    vhost = VirtualHost(cluster, f"recovery-{rng.getrandbits(32):08x}")
    vhost.create()
    hosts = [f"{node.host}:{node.port}" for node in nodes]
    contenders = [kind(hosts, vhost.name) for kind in CONTENDERS]
    queues = [Queue(contender.queue) for contender in contenders]
    with Publisher(vhost.url, topology=queues) as publisher:
        publisher.connect()
    for queue in queues:
        cluster.transfer_leader(queue.name, nodes[1] if elsewhere else victim, vhost.name)
    with ExitStack() as stack:
        stack.callback(vhost.delete)
        for contender in contenders:
            contender.start()
            stack.callback(contender.stop)
        _flow(contenders, timeout=60)
        threading.Event().wait(_SETTLED)
        _flow(contenders, timeout=60)
        fault = time.monotonic()
        harm(victim, vhost)
        cluster.heal()
        _flow(contenders, timeout=_AGAIN)
        until = time.monotonic()
        return {
            each.label: (_silence(each.confirmed, fault, until), _silence(each.handled, fault, until))
            for each in contenders
        }


def _flow(contenders: Sequence[Contender], *, timeout: float) -> None:
    """Wait until each contender has had ten more confirms and ten more deliveries.

    After the timeout, report the contenders that have not, and return.
    """
    before = {each.label: (len(each.confirmed), len(each.handled)) for each in contenders}

    def behind() -> list[str]:
        return [
            each.label
            for each in contenders
            if len(each.confirmed) < before[each.label][0] + 10 or len(each.handled) < before[each.label][1] + 10
        ]

    try:
        wait_until(lambda: not behind(), timeout=timeout, what="messages flow")
    except TimeoutError:
        _tell(f"no messages within {timeout:g} s: {behind()}")


def _silence(moments: Sequence[float], since: float, until: float) -> float:
    """Return the seconds of the longest silence; infinite if it did not end."""
    after = [moment for moment in list(moments) if since < moment <= until]
    begin, end = max(pairwise([since, *after, until]), key=lambda gap: gap[1] - gap[0])
    return float("inf") if end == until and end - begin > _LASTS else end - begin


def _last() -> None:
    threading.Event().wait(_LASTS)


def table(rows: dict[tuple[int, str, str], list[tuple[float, float]]]) -> Table:
    """Return medians and maxima by fault and contender."""
    lines = []
    for (row, fault, label), times in rows.items():
        confirms, deliveries = zip(*times, strict=True)
        seconds = [statistics.median(confirms), max(confirms), statistics.median(deliveries), max(deliveries)]
        lines.append((f"{row}: {fault}", label, *(f"{each:.1f} s" for each in seconds)))
    header = ("row", "client", "confirm: p50", "max", "delivery: p50", "max")
    return Table("Recovery", header, tuple(lines))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m integration.bench.recovery")
    parser.add_argument("--rounds", type=int, default=5, help="of each fault")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    rng = random.Random(chosen.seed)
    remove_leftovers()
    rows: dict[tuple[int, str, str], list[tuple[float, float]]] = defaultdict(list)
    with RabbitMQCluster(image=broker_image("newest")) as cluster:
        for number in range(chosen.rounds):
            for row, fault, harm, elsewhere in Faults(cluster).all:
                for label, times in measure(cluster, harm, rng, elsewhere=elsewhere).items():
                    rows[row, fault, label].append(times)
                    _tell(f"{number + 1}: row {row}, {label}: confirm {times[0]:.1f} s, delivery {times[1]:.1f} s")
    print(table(dict(sorted(rows.items(), key=lambda item: item[0][0]))).markdown())
    return 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
