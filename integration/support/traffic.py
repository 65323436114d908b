"""Traffic on a cluster during faults, with a history of all operations.

Publishers and consumers of both APIs run at the same time:

=============  ========================================================================================================
queue          consumers
=============  ========================================================================================================
`orders`       one of each API, with one idempotency store: each message takes effect once
`plain`        one of each API, without a store: a duplicate takes effect again
=============  ========================================================================================================

Some messages fail at first and are retried from a delay queue. Some always fail and are dead-lettered. There is one
publisher of each API, and one of each API with an outbox; each publishes into both queues. Some messages have a
deadline of a few seconds. Each client has its own order of hosts, chosen by the seed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from integration.support.blocking import BlockingPublisher
from integration.support.blocking_consumer import BlockingConsumer
from integration.support.lag import Lag
from integration.support.rounds import Round
from integration.support.seeds import soaking
from reliable_mq import Consumer, Message, Publisher, PublishError, Queue, RetryPolicy
from reliable_mq.outbox import SQLiteOutbox
from reliable_mq.stores import MemoryStore
from reliable_mq.testing import Audit, wait_until
from reliable_mq.testing.history import History, OperationKind, OperationOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from random import Random

    from reliable_mq import Delivery
    from reliable_mq.testing import ClusterNode, RabbitMQCluster, VirtualHost
    from reliable_mq.testing.history import HistoryResult, Operation

ORDERS, PLAIN = Queue("orders"), Queue("plain")
RETRY = RetryPolicy(max_attempts=3, delays=(0.3,))
DELAY_QUEUE, DEAD_LETTERS = "orders.retry.300", "orders.dead"
DIRECT, STORED = ("sync publisher", "asyncio publisher"), ("sync outbox", "asyncio outbox")
BODIES = {b"fine": 90, b"fails once": 6, b"fails always": 4}
PAUSE = 0.02 if soaking() else 0.15  # seconds between two messages of a publisher
LONG = 300.0  # seconds, longer than any fault here
LATE = 3.0  # seconds by which a call may exceed its deadline, in addition to the measured `Lag`
UNCERTAIN = 2.0  # seconds within which a client reports a received confirm, in addition to `Lag`
SLOW = 20.0  # seconds within which queues become empty and threads end
GRACE = 2.5  # seconds until a queue is no longer new
OPTIONS: dict[str, Any] = {
    "heartbeat": 5,
    "connect_timeout": 3.0,
    "reconnect_wait": lambda _: 0.3,
    "new_queue_grace": 2.0,
}


def url_of(vhost: VirtualHost, nodes: Iterable[ClusterNode]) -> str:
    """Return the URL of a virtual host, with the hosts in this order."""
    return f"amqp://guest:guest@{','.join(f'{node.host}:{node.port}' for node in nodes)}/{vhost.name}"


class Source:
    """A thread that publishes several messages per second; records the outcomes."""

    def __init__(self, name: str, publisher: Any, traffic: Traffic, rng: Random, *, stored: bool) -> None:
        self.name = name
        self.publisher = publisher
        self._traffic = traffic
        self._rng = rng
        self._stored = stored
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)
        self._failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(LONG)
        assert not self._thread.is_alive(), f"{self.name}: a publish hangs"
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._stop.wait(PAUSE):
                self._publish_one()
        except BaseException as error:
            self._failure = error

    def _publish_one(self) -> None:
        queue = self._rng.choice((ORDERS.name, PLAIN.name))
        (body,) = self._rng.choices(list(BODIES), list(BODIES.values()))
        message = Message(body)
        short = not self._stored and self._rng.random() < 0.05
        timeout = self._rng.uniform(1, 6) if short else LONG
        operation = self._traffic.histories[queue].begin(
            OperationKind.PUBLISH, message.message_id, by=self.name, timeout=timeout
        )
        try:
            if self._stored:
                self.publisher.publish(message, routing_key=queue)
                self._settled(operation, None, short=False)
            else:
                confirmation = self.publisher.submit(message, routing_key=queue, timeout=timeout)
                confirmation.add_done_callback(lambda done: self._settled(operation, done.exception(), short=short))
        except PublishError as error:
            self._settled(operation, error, short=short)

    def _settled(self, operation: Operation, error: PublishError | None, *, short: bool) -> None:
        if error is None:
            operation.end()
            self._traffic.count(self.name)
            return
        operation.end(OperationOutcome.UNKNOWN if error.may_have_arrived else OperationOutcome.FAILED)
        if not short:
            self._traffic.errors.append(error)


class Traffic:
    """The traffic. A context manager.

    On entry it declares the queues, and waits until messages flow.

    Args:
        vhost: A virtual host on the cluster.
        cluster: The cluster that the test harms.
        rng: Chooses messages, deadlines and the order of hosts.
        directory: For the outboxes.
        report: Called with lines of text, such as one about each queue at the end.
        record_round: Called with the figures of each fault, by queue.
        pinned: Returns the nodes that each client connects to, by the name of the publisher or consumer. Clients
            without an entry use all nodes. Called when the queues exist and have leaders.
        order: The order of hosts for all clients. None for a separate order for each client.

    Attributes:
        histories: The histories by queue.
        errors: The errors of failed messages without a short deadline.
        lag: The lag of this machine.
    """

    def __init__(
        self,
        vhost: VirtualHost,
        cluster: RabbitMQCluster,
        rng: Random,
        directory: Path,
        report: Callable[[str], None],
        record_round: Callable[[Round], None],
        *,
        pinned: Callable[[], Mapping[str, Collection[ClusterNode]]] = dict,
        order: Sequence[ClusterNode] | None = None,
    ) -> None:
        self.vhost = vhost
        self.cluster = cluster
        self.histories = {queue.name: History(Audit()) for queue in (ORDERS, PLAIN)}
        self.errors: list[PublishError] = []
        self.lag = Lag()
        self._rng = rng
        self._directory = directory
        self._report = report
        self._record_round = record_round
        self._pinned = pinned
        self._order = order
        self._progress: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._sources: list[Source] = []
        self._consumers: dict[str, Any] = {}
        self._faults: list[tuple[int, str, float]] = []
        self._over = 0.0

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            self._stack = undo
            undo.enter_context(self.lag)
            with Publisher(self.vhost.url, topology=[ORDERS, PLAIN], **OPTIONS) as publisher:
                publisher.connect()
            born = time.monotonic()
            self._connect(undo)
            for source in self._sources:
                source.start()
                undo.callback(source.stop)
            wait_until(lambda: time.monotonic() > born + GRACE, timeout=60, what="the queues are not new any more")
            self.wait_progress()
            self._stack = undo.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    # -- while it runs -------------------------------------------------------------------------------------------------

    def fault(self, row: int, what: str) -> None:
        """Start a round of a row of the fault matrix; silences are measured from now."""
        self._faults.append((row, what, time.monotonic()))

    def count(self, name: str) -> None:
        with self._lock:
            self._progress[name] += 1

    def wait_progress(self, names: Collection[str] | None = None, *, timeout: float = 120) -> None:
        """Wait until each of these publishers and each queue has made progress.

        A publisher must have more messages confirmed or stored, and a queue more messages handled.
        """
        wanted = [*((*DIRECT, *STORED) if names is None else names), ORDERS.name, PLAIN.name]
        with self._lock:
            before = Counter(self._progress)

        def behind() -> dict[str, int]:
            with self._lock:
                return {
                    name: self._progress[name] - before[name]
                    for name in wanted
                    if self._progress[name] < before[name] + 10
                }

        wait_until(lambda: not behind(), timeout=timeout, what=lambda: f"progress of {behind()}")

    def connected_to(self, node: ClusterNode) -> list[str]:
        """Return the names of the clients whose last connection was to this node."""
        clients = {source.name: source.publisher for source in self._sources} | self._consumers
        return [name for name, client in clients.items() if _port(client) == node.port]

    def wait_elsewhere(self, node: ClusterNode, *, within: float) -> None:
        """Wait until all clients are connected, and none to this node, which has died.

        Raises:
            AssertionError: If that takes `within` seconds, plus the lag of this machine until the end.
        """
        began = time.monotonic()
        clients = [*(source.publisher for source in self._sources), *self._consumers.values()]
        wait_until(
            lambda: all(client.connected for client in clients) and not self.connected_to(node),
            timeout=120,
            what=lambda: f"connections to another node of {self.connected_to(node)}",
            interval=0.02,
        )
        assert time.monotonic() - began < within + self.lag.worst, "the clients connect to another node too late"
        _, what, since = self._faults[-1]
        self._report(f"{what}: all are connected to another node {time.monotonic() - since:.1f} s after it")

    @contextmanager
    def only_on(self, node: ClusterNode) -> Iterator[str]:
        """Publish with an additional publisher that knows only this node. Yields its name.

        At the end of the block, all of its messages are settled.
        """
        name = f"{self._rng.choice(('sync', 'asyncio'))} publisher on {node.name}"
        source = self._source(name, url_of(self.vhost, [node]))
        with source.publisher:
            source.start()
            try:
                yield name
            finally:
                source.stop()
            source.publisher.flush(LONG / 2)

    @contextmanager
    def without_majority(self, by: Collection[str]) -> Iterator[None]:
        """Record that these publishers must not get confirms during the block.

        They must publish in the block.
        """
        began = time.monotonic()
        with ExitStack() as windows:
            for history in self.all_histories:
                windows.enter_context(history.without_majority(by=by, uncertainty=UNCERTAIN + self.lag.worst))
            yield
        for history in self.all_histories:
            begun = {each.by for each in history.operations if each.start > began}
            assert begun.issuperset(by), f"of {by} only {begun} have published meanwhile"

    def silence(self, row: int) -> float:
        """Return the longest time without confirms, in seconds, after the faults of a row.

        Each direct publisher is measured separately.
        """
        return max(
            history.longest_silence(OperationKind.PUBLISH, since, until, by=[name])
            for history in self.all_histories
            for each, _, since, until in self._spans()
            for name in DIRECT
            if each == row
        )

    def _spans(self) -> list[tuple[int, str, float, float]]:
        ends = [*(at for *_, at in self._faults[1:]), self._over]
        return [(*fault, until) for fault, until in zip(self._faults, ends, strict=True)]

    @property
    def all_histories(self) -> list[History]:
        return list(self.histories.values())

    # -- at the end ----------------------------------------------------------------------------------------------------

    def finish(self, *, cut_off: bool = False) -> None:
        """Stop publishing, wait until all messages are handled, and check the histories.

        Args:
            cut_off: Whether a node that the others could not reach kept its clients. RabbitMQ may then be late in two
                ways. The dead-lettering from a delay queue hangs in a call to the node that was cut off, for 75 s after
                the fault (`rabbit_fifo_client:enqueue/4`, seen on 4.3.6). Or a queue waits for acks that these clients
                have already sent, and delivers no more to them; then their connections are closed.
        """
        self._over = time.monotonic()
        for source in self._sources:
            source.stop()
        for source in self._sources:
            source.publisher.flush(LONG / 2)
        try:
            self._wait_until_handled(180)
        except TimeoutError as error:
            unsettled = {name: each._subscription.session.outstanding for name, each in self._consumers.items()}
            state = f"{error}; not settled by these clients: {unsettled}; the broker: {self._seen_by_broker()}"
            if not cut_off or any(unsettled.values()):
                raise TimeoutError(state) from None
            self._report(f"the broker waits for acks that it was sent, until connections are closed: {state}")
            self.vhost.close_connections("it waits for acks that it was sent")
            self._wait_until_handled(180)
        emptied = time.monotonic() - self._over
        if emptied > SLOW:
            self._report(f"queues were empty {emptied:.0f} s after the last publish")
        self._stack.close()
        for queue, history in self.histories.items():
            account = history.account
            assert isinstance(account, Audit)
            account.drain(self.vhost, [queue], dead_letters=[f"{queue}.dead"], timeout=120)
            result = history.result(tolerance=LATE + self.lag.worst)
            self._report(f"{queue}: {result}")
            self._record(queue, result)
            result.check(effects_once=queue == ORDERS.name)
            assert not result.balance.refuted, "an error said that the broker does not have a message that it has"
            assert result.balance.confirmed > 20
            assert result.balance.dead_lettered
        self._report(f"threads ran late by up to {self.lag.worst:.2f} s")
        assert not self.errors, f"{len(self.errors)} failed, such as {self.errors[0]!r}"

    def _record(self, queue: str, result: HistoryResult) -> None:
        first = queue == ORDERS.name
        for row, what, since, until in self._spans():
            figures = Round.of(
                row,
                what,
                self.histories[queue],
                result,
                since=since,
                until=until,
                publishers=DIRECT,
                effects_once=first,
                rounds=int(first),
            )
            self._record_round(figures)

    def _seen_by_broker(self) -> str:
        """Return the broker's view of queues and channels, for the text of a failure."""
        api = self.cluster.management
        queues = [
            f"{queue['name']}: ready {queue.get('messages_ready')}, unacked {queue.get('messages_unacknowledged')}, "
            f"led by {queue.get('leader')}, consumers {queue.get('consumers')}"
            for queue in api.call("GET", "queues", self.vhost.name)
            if queue.get("messages")
        ]
        channels = [
            f"{channel['connection_details'].get('name')} on {channel.get('node')}: "
            f"unacked {channel.get('messages_unacknowledged')}, uncommitted {channel.get('acks_uncommitted')}"
            for channel in api.call("GET", "vhosts", self.vhost.name, "channels")
            if channel.get("consumer_count")
        ]
        return "; ".join((*queues, *channels))

    def _wait_until_handled(self, timeout: float) -> None:
        waiting: dict[str, int] = {}

        def empty() -> bool:
            waiting.clear()
            counts = self.vhost.live_counts()
            waiting.update((name, count) for name, count in counts.items() if count and not name.endswith(".dead"))
            return not waiting

        def left() -> str:
            counts = {
                name: (each.statistics.delivered, each.statistics.acked) for name, each in self._consumers.items()
            }
            return f"all handled: {waiting}; delivered and acked: {counts}"

        wait_until(empty, timeout=timeout, what=left, interval=0.3)

    # -- clients -------------------------------------------------------------------------------------------------------

    def _connect(self, stack: ExitStack) -> None:
        pinned = self._pinned()
        store = MemoryStore()

        def url(name: str) -> str:
            nodes = list(pinned.get(name, self._order or self.cluster.nodes))
            if self._order is None:
                self._rng.shuffle(nodes)
            return url_of(self.vhost, nodes)

        for name in (*DIRECT, *STORED):
            source = self._source(name, url(name))
            stack.enter_context(source.publisher)
            self._sources.append(source)
        for queue in (ORDERS, PLAIN):
            idempotency = store if queue is ORDERS else None
            for api, make, handler in (
                ("sync", Consumer, self._handle),
                ("asyncio", BlockingConsumer, self._handle_on_loop),
            ):
                name = f"{api} {queue.name}"
                consumer: Any = make(
                    url(name),
                    queue,
                    partial(handler, queue.name, name),
                    retry=RETRY,
                    idempotency=idempotency,
                    name=name,
                    **OPTIONS,
                )
                stack.enter_context(consumer)
                self._consumers[name] = consumer

    def _source(self, name: str, url: str) -> Source:
        kind = BlockingPublisher if name.startswith("asyncio") else Publisher
        stored = name in STORED
        publisher: Any = kind(
            url,
            outbox=SQLiteOutbox(self._directory / f"{name}.db") if stored else None,
            name=name,
            confirm_timeout=4.0,
            delivery_timeout=LONG,
            max_outstanding=50_000,
            **OPTIONS,
        )
        return Source(name, publisher, self, _fork(self._rng), stored=stored)

    def _handle(self, queue: str, name: str, delivery: Delivery) -> None:
        history, message_id = self.histories[queue], delivery.message_id or ""
        with history.during(OperationKind.HANDLE, message_id, by=name):
            if delivery.body == b"fails always" or (delivery.body == b"fails once" and delivery.attempt == 1):
                raise RuntimeError(delivery.body.decode())
            with history.during(OperationKind.EFFECT, message_id, by=name):
                self.count(queue)

    async def _handle_on_loop(self, queue: str, name: str, delivery: Delivery) -> None:
        self._handle(queue, name, delivery)


def _port(client: Any) -> int | None:
    """Return the port of the last connection of a publisher or consumer."""
    if isinstance(client, BlockingPublisher):
        client = client.publisher
    channel = client._subscription if isinstance(client, (Consumer, BlockingConsumer)) else client._channel
    peer = channel._io.peer
    return None if peer is None else peer.port


def _fork(rng: Random) -> Random:
    return type(rng)(rng.random())
