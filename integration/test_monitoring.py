"""Dashboards and alerts on a real Prometheus with real publishers and consumers."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from integration.support.blocking import BlockingPublisher
from integration.support.command_line import run_cli
from integration.support.monitored import MonitoredShop
from integration.support.panels import wait_for_data
from integration.support.prometheus import Prometheus
from reliable_mq import Consumer, DeadLetter, KillSwitch, Message, Publisher, PublishError, Queue, RetryPolicy
from reliable_mq.errors import IdempotencyStoreError, OutboxError
from reliable_mq.monitoring import QueueDepths
from reliable_mq.monitoring.alerts import ALERTS
from reliable_mq.outbox import SQLiteOutbox
from reliable_mq.settings import Credentials
from reliable_mq.stores import MemoryStore
from reliable_mq.testing import connection_blocked
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from reliable_mq.core.idempotency import Claim
    from reliable_mq.core.outbox import NewRow, RowSettlement
    from reliable_mq.core.statistics import OutboxStatus
    from reliable_mq.testing import FaultProxy, FaultProxyFactory, RabbitMQ, VirtualHost

PATIENCE = 120.0  # seconds for Prometheus on a busy machine
SHORT = ("--for", "4s", "--window", "30s", "--max-age", "10s")


def test_every_query_of_every_panel_has_data_under_load(vhost: VirtualHost, tmp_path: Path) -> None:
    with (
        MonitoredShop(vhost.url, tmp_path, rate=50, failing=0.1) as shop,
        Prometheus(tmp_path, {"shop": [shop.address]}) as prometheus,
    ):
        wait_for_data(prometheus.query, timeout=PATIENCE)


# -- alerts ------------------------------------------------------------------------------------------------------------


class Faults:
    """A fault for each alert, with a publisher or consumer named like the alert.

    Each method opens that publisher or consumer without a fault, and returns a function that causes the fault.
    """

    def __init__(self, url: str, directory: Path, proxies: FaultProxyFactory, stack: ExitStack) -> None:
        self.registry = CollectorRegistry()
        self._url = url
        self._directory = directory
        self._proxies = proxies
        self._stack = stack
        self._end = threading.Event()
        stack.callback(self._end.set)
        self._sender = Publisher(url)
        stack.enter_context(self._sender)

    def of(self, alert: str) -> Callable[[], object]:
        """Open the publisher or consumer of an alert; return the function with its fault."""
        methods: dict[str, Callable[[str], Callable[[], object]]] = {
            "ReliableMQOldestOutstanding": self._confirms_held,
            "ReliableMQNothingConfirmed": self._confirms_held,
            "ReliableMQMessagesNotConfirmed": self._unroutable,
            "ReliableMQPublishingBlocked": self._blocked,
            "ReliableMQPublisherDisconnected": self._publisher_cut,
            "ReliableMQOldestInOutbox": self._outbox_without_broker,
            "ReliableMQOutboxFailing": self._outbox_full,
            "ReliableMQRelayFailing": self._outbox_unreadable,
            "ReliableMQOutboxSetAside": self._unroutable_in_outbox,
            "ReliableMQRejected": self._no_dead_letter_queue,
            "ReliableMQDeadLetters": self._dead_letters,
            "ReliableMQDeadLetterQueueGrows": self._growing,
            "ReliableMQConsumerPaused": self._all_handlers_fail,
            "ReliableMQConsumerDisconnected": self._consumer_cut,
            "ReliableMQHandlersOverdue": self._handler_hangs,
            "ReliableMQStoreFailing": self._store_down,
            "ReliableMQTokensNotRenewed": self._no_further_token,
            "ReliableMQEventLoopStalled": self._loop_blocked,
        }
        return methods[alert](alert)

    def _confirms_held(self, name: str) -> Callable[[], object]:
        proxy = self._proxies(self._url)
        publisher = self._publisher(name, proxy.url)

        def hold() -> None:
            proxy.hold_confirms()
            for _ in range(10):
                publisher.submit(Message(b"x"), routing_key="faults")

        return hold

    def _unroutable(self, name: str) -> Callable[[], object]:
        publisher = self._publisher(name)
        return lambda: publisher.publish_many([Message(b"x")], routing_key="nowhere")

    def _blocked(self, name: str) -> Callable[[], object]:
        proxy = self._proxies(self._url)
        self._publisher(name, proxy.url)
        return lambda: proxy.inject("to_client", connection_blocked("low on disk"))

    def _publisher_cut(self, name: str) -> Callable[[], object]:
        proxy = self._proxies(self._url)
        self._publisher(name, proxy.url)
        return partial(cut, proxy)

    def _outbox_without_broker(self, name: str) -> Callable[[], object]:
        proxy = self._proxies(self._url)
        publisher = self._publisher(name, proxy.url, outbox=SQLiteOutbox(self._directory / name))

        def store() -> None:
            cut(proxy)
            publisher.publish(Message(b"x"), routing_key="faults")

        return store

    def _outbox_full(self, name: str) -> Callable[[], object]:
        publisher = self._publisher(name, outbox=FailingOutbox(self._directory / name))

        def store() -> None:
            with suppress(OutboxError):
                publisher.publish(Message(b"x"), routing_key="faults")

        return store

    def _outbox_unreadable(self, name: str) -> Callable[[], object]:
        outbox = FailingOutbox(self._directory / name)
        self._publisher(name, outbox=outbox)
        return partial(setattr, outbox, "readable", False)

    def _unroutable_in_outbox(self, name: str) -> Callable[[], object]:
        publisher = self._publisher(name, outbox=SQLiteOutbox(self._directory / name))
        return lambda: publisher.publish(Message(b"x"), routing_key="nowhere")

    def _no_dead_letter_queue(self, name: str) -> Callable[[], object]:
        return self._consumer(name, dead_letter, queue=Queue(name, dead_letter=None))

    def _dead_letters(self, name: str) -> Callable[[], object]:
        return self._consumer(name, dead_letter)

    def _growing(self, name: str) -> Callable[[], object]:
        send = self._consumer(name, dead_letter)
        self._stack.enter_context(QueueDepths(self._url, [f"{name}.dead"], registry=self.registry, interval=0.5))
        return send

    def _all_handlers_fail(self, name: str) -> Callable[[], object]:
        switch = KillSwitch(share=0.5, window=10, minimum=3, pause=2, longest_pause=2)
        retry = RetryPolicy(max_attempts=100, delays=(0.1,))
        return self._consumer(name, fail, kill_switch=switch, retry=retry)

    def _consumer_cut(self, name: str) -> Callable[[], object]:
        proxy = self._proxies(self._url)
        self._consumer(name, lambda _delivery: None, url=proxy.url)
        return partial(cut, proxy)

    def _handler_hangs(self, name: str) -> Callable[[], object]:
        return self._consumer(name, lambda _delivery: self._end.wait(PATIENCE), consumer_timeout=8)

    def _store_down(self, name: str) -> Callable[[], object]:
        return self._consumer(name, lambda _delivery: None, idempotency=Down())

    def _no_further_token(self, name: str) -> Callable[[], object]:
        over = threading.Event()

        def credentials() -> Credentials:
            if over.is_set():
                raise OSError("the authorization server is away")
            return Credentials("guest", "guest", expires_in=2)

        self._publisher(name, self._url.replace("guest:guest@", ""), credentials=credentials)
        return over.set

    def _loop_blocked(self, name: str) -> Callable[[], object]:
        publisher = BlockingPublisher(self._url, registry=self.registry, name=name, heartbeat=5)
        self._stack.callback(publisher.close)
        publisher.connect()

        async def block() -> None:
            time.sleep(3)  # noqa: ASYNC251  # it is the fault

        loop = publisher._loop
        assert loop is not None
        return lambda: loop.call(block())

    def _publisher(self, name: str, url: str | None = None, **options: Any) -> Publisher:
        queue = Queue("faults", type="classic", dead_letter=None)
        publisher = Publisher(url or self._url, topology=[queue], name=name, registry=self.registry, **options)
        self._stack.callback(end, publisher)
        publisher.connect()
        return publisher

    def _consumer(
        self,
        name: str,
        handler: Callable[[Any], object],
        *,
        queue: Queue | None = None,
        url: str | None = None,
        **options: Any,
    ) -> Callable[[], object]:
        """Open a consumer; return a function that publishes to its queue."""
        consumer = Consumer(
            url or self._url,
            queue or Queue(name),
            handler,
            name=name,
            registry=self.registry,
            stop_timeout=1,
            **options,
        )
        consumer.connect()
        self._stack.enter_context(consumer)
        return lambda: self._sender.publish_many((Message(b"x") for _ in range(5)), routing_key=name)


def served(registry: CollectorRegistry, stack: ExitStack) -> str:
    """Serve a registry over HTTP until the stack is closed; return the address."""
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    stack.callback(thread.join)
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    return f"127.0.0.1:{server.server_port}"


def cut(proxy: FaultProxy) -> None:
    proxy.refuse_connections()
    proxy.cut()


def dead_letter(_delivery: object) -> None:
    raise DeadLetter("no such customer")


def fail(_delivery: object) -> None:
    raise OSError("the database is down")


def end(publisher: Publisher) -> None:
    """Close a publisher whose messages are not confirmed."""
    with suppress(PublishError):
        publisher.close(0)


class Down(MemoryStore):
    """A store that cannot be reached."""

    def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        raise IdempotencyStoreError("the database is down")


class FailingOutbox(SQLiteOutbox):
    """An outbox that stores no message. Its rows can be counted while it is `readable`."""

    readable = True

    def write(self, rows: Sequence[NewRow], settlements: Sequence[RowSettlement]) -> None:
        raise OutboxError("the disk is full")

    def status(self) -> OutboxStatus:
        if not self.readable:
            raise OutboxError("the disk cannot be read")
        return super().status()


def fired(prometheus: Prometheus) -> set[tuple[str, str]]:
    """Return each firing alert with the name of the publisher or consumer."""
    found = set()
    for alert in prometheus.alerts():
        labels = alert["labels"]
        assert "<error" not in alert["annotations"]["summary"]
        whom = labels.get("publisher") or labels.get("consumer") or labels["queue"].removesuffix(".dead")
        if alert["state"] == "firing":
            found.add((labels["alertname"], whom))
    return found


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_each_alert_fires_under_its_fault_beside_what_is_well(
    vhost: VirtualHost, tmp_path: Path, fault_proxy: FaultProxyFactory
) -> None:
    """No alert fires without a fault, and each fault fires only its own alert."""
    with (
        ExitStack() as stack,
        MonitoredShop(vhost.url, tmp_path, rate=20) as shop,
    ):
        faults = Faults(vhost.url, tmp_path, fault_proxy, stack)
        bring_about = {alert.name: faults.of(alert.name) for alert in ALERTS}
        address = served(faults.registry, stack)
        rules = run_cli("alerts", *SHORT).stdout.decode()
        prometheus = stack.enter_context(
            Prometheus(tmp_path, {"shop": [shop.address], "faults": [address]}, rules=rules)
        )
        wait_until(
            lambda: len(prometheus.query("max_over_time(up[1h]) == 1 and count_over_time(up[1h]) > 12")) == 2,
            timeout=PATIENCE,
            what="12 scrapes of both",
        )
        assert prometheus.query('ALERTS{alertstate="firing"}') == []

        began = {}
        for name, fault in bring_about.items():
            began[name] = time.monotonic()
            fault()
        after: dict[str, float] = {}

        def all_fired() -> bool:
            now = time.monotonic()
            for name, whom in fired(prometheus):
                if name == whom:
                    after.setdefault(name, now - began[name])
            return after.keys() == began.keys()

        wait_until(all_fired, timeout=PATIENCE, what=lambda: f"{began.keys() - after.keys()}", interval=0.5)
        for alert in ALERTS:
            print(f"{alert.name:35} {after[alert.name]:5.1f} s")  # for the guide
        ever = prometheus.query(
            'count by (alertname, job, publisher, consumer, queue) (count_over_time(ALERTS{alertstate="firing"}[1h]))'
        )
        assert ever
        assert [each["metric"] for each in ever if each["metric"]["job"] != "faults"] == []


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_broker_in_trouble_fires_alerts_until_it_is_well(
    private_broker: RabbitMQ, private_vhost: VirtualHost, tmp_path: Path
) -> None:
    """A memory alarm and a kill of the broker fire alerts, which end by themselves."""
    rules = run_cli("alerts", *SHORT).stdout.decode()
    with (
        MonitoredShop(private_vhost.url, tmp_path, rate=20) as shop,
        Prometheus(tmp_path, {"shop": [shop.address]}, rules=rules) as prometheus,
    ):

        def firing(*expected: str) -> None:
            began = time.monotonic()
            for name in expected:
                wait_until(lambda: name in prometheus.firing(), timeout=PATIENCE, what=name, interval=0.5)  # noqa: B023
                print(f"{name:35} {time.monotonic() - began:5.1f} s")

        wait_until(
            lambda: prometheus.query("count_over_time(up[1h]) > 12"), timeout=PATIENCE, what="12 scrapes of the shop"
        )
        assert not prometheus.firing()
        private_broker.alarm("memory")
        firing("ReliableMQPublishingBlocked", "ReliableMQNothingConfirmed", "ReliableMQOldestOutstanding")
        private_broker.clear_alarm("memory")
        wait_until(lambda: not prometheus.firing(), timeout=PATIENCE, what=lambda: f"quiet: {prometheus.firing()}")
        private_broker.kill()
        firing("ReliableMQPublisherDisconnected", "ReliableMQConsumerDisconnected", "ReliableMQOldestInOutbox")
        private_broker.start()
        wait_until(lambda: not prometheus.firing(), timeout=PATIENCE, what=lambda: f"quiet: {prometheus.firing()}")
