"""``make demo-cluster``: orders on three nodes, each of which suffers faults.

Nodes are killed, cut off and restarted, one after the other. The shop and the audit are those of ``reliable-mq
demo``. Orders flow until the last fault is over; then all are handled, and the account is closed. The exit status is
1 if it does not add up.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import TYPE_CHECKING

from rich.console import Console

from reliable_mq.cli.demo.display import BrokerStatus, DemoResult, LinesDisplay, Story
from reliable_mq.cli.demo.scenario import BrokerState, Shop
from reliable_mq.testing import RabbitMQCluster, remove_leftovers, wait_until
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliable_mq.cli.demo.scenario import Progress
    from reliable_mq.testing import ClusterNode

_RATE = 400.0  # orders a second
_MANY = 10**9  # orders: more than there is time for
_CALM = 4.0  # seconds of undisturbed flow before each fault
_CUT_OFF = 8.0  # seconds for which the leader sees no other node
_STANDSTILL = 150.0  # seconds without progress that count as an error


class Faults:
    """The faults, one after the other, on a separate thread.

    Args:
        cluster: the cluster to harm.
        shop: publishes and handles orders during the faults.
        tell: is called with a line about each event.

    Attributes:
        failure: the error that ended the faults early.
    """

    def __init__(self, cluster: RabbitMQCluster, shop: Shop, tell: Callable[[str], None]) -> None:
        self.failure: Exception | None = None
        self._cluster = cluster
        self._shop = shop
        self._tell = tell
        self._thread = threading.Thread(target=self._run, name="faults")

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Wait until the faults are over."""
        self._thread.join()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            for fault in (self._kill_the_leader, self._cut_off_the_leader, self._restart_all):
                self._calm()
                fault()
            self._calm()
        except Exception as error:  # the watching thread reports it
            self.failure = error
        finally:
            self._shop.end()

    def _calm(self) -> None:
        """Wait until orders have flowed for a while; report the account."""
        self._wait_for_more()
        threading.Event().wait(_CALM)
        self._wait_for_more()
        balance = self._shop.audit.balance()
        self._tell(
            f"account: confirmed {balance.confirmed:,}, handled {balance.handled:,}, "
            f"dead-lettered {balance.dead_lettered:,}, on their way {len(balance.lost):,}, "
            f"twice {len(balance.repeated_effects):,}"
        )

    def _wait_for_more(self, count: int = 200) -> None:
        before = self._shop.progress

        def flows() -> bool:
            now = self._shop.progress
            return now.confirmed >= before.confirmed + count and now.handled >= before.handled + count

        wait_until(flows, timeout=_STANDSTILL, what="orders are confirmed and handled")

    def _leader(self) -> ClusterNode:
        return self._cluster.leader_of(self._shop.queues[0])

    def _kill_the_leader(self) -> None:
        leader = self._leader()
        self._tell(f"KILL: {leader.name}, the leader of the orders, is killed")
        began = time.monotonic()
        leader.kill()
        self._flows_again(began)
        self._tell(f"{leader.name} is started again")
        self._cluster.start()
        self._cluster.wait_ready()

    def _cut_off_the_leader(self) -> None:
        leader = self._leader()
        self._tell(f"PARTITION: {leader.name}, the leader of the orders, is cut off from the others, not from clients")
        began = time.monotonic()
        self._cluster.partition(leader)
        threading.Event().wait(_CUT_OFF)
        self._tell("the partition is healed")
        self._cluster.heal()
        self._flows_again(began)

    def _restart_all(self) -> None:
        for node in self._cluster.nodes:
            self._cluster.wait_ready()
            self._tell(f"ROLLING RESTART: {node.name} is drained, stopped and started")
            began, before = time.monotonic(), self._shop.progress
            self._cluster.drain(node)
            node.restart()
            after, seconds = self._shop.progress, time.monotonic() - began
            self._tell(f"{node.name} is back after {seconds:.1f} s; confirmed meanwhile: {_growth(before, after)}")
            self._wait_for_more()
        self._cluster.wait_ready()

    def _flows_again(self, began: float) -> None:
        self._wait_for_more()
        self._tell(f"orders are confirmed and handled again, {time.monotonic() - began:.1f} s after the fault began")


def _growth(before: Progress, after: Progress) -> str:
    return f"{after.confirmed - before.confirmed:,} orders, handled {after.handled - before.handled:,}"


def main() -> int:
    """Run the demo; return its exit status."""
    logging.getLogger("reliable_mq").setLevel(logging.CRITICAL + 1)  # the display shows the same
    remove_leftovers()
    console = Console(soft_wrap=True, highlight=False)
    console.print("starting three nodes of RabbitMQ in containers")
    with RabbitMQCluster() as cluster:
        settings = parse_url(cluster.url, connection_name="reliable-mq demo")
        shop = Shop(cluster.url, settings, orders=_MANY, rate=_RATE)
        with shop:
            began = time.monotonic()
            title = f"orders through {shop.broker}, three nodes, at {', '.join(map(str, settings.endpoints))}"
            with LinesDisplay(console, title) as display:
                faults = Faults(cluster, shop, lambda line: display.tell(time.monotonic() - began, line))
                faults.start()
                try:
                    error = _watch(shop, faults, display, began)
                finally:
                    shop.end()
                    faults.end()
        result = DemoResult(shop.audit.balance(), shop.progress, 0, time.monotonic() - began)
        console.print(result)
        console.print(f"lost {len(result.balance.lost)}, twice {len(result.balance.repeated_effects)}")
        if error is not None:
            console.print(f"ended early: {error}")
        return 1 if result.faults or error is not None else 0


def _watch(shop: Shop, faults: Faults, display: LinesDisplay, began: float) -> str | None:
    """Show the progress until all orders are handled; return the reason if it fails."""
    story, pause = Story(), threading.Event()
    latest, latest_at = shop.progress, 0.0
    while True:
        now, progress = time.monotonic() - began, shop.progress
        if progress != latest:
            latest, latest_at = progress, now
        connected = shop.publisher.connected, shop.consumer.connected
        status = BrokerStatus(BrokerState.RUNNING, *connected, shop.publisher.blocked)
        outstanding = shop.publisher.outstanding
        for event in story.events(now, status, outstanding=outstanding, republished=progress.republished):
            display.tell(now, event)
        display.update(now, progress, status)
        if faults.failure is not None:
            return f"a fault failed: {faults.failure}"
        if shop.failure is not None:
            return f"publishing ended: {shop.failure}"
        if now - latest_at > _STANDSTILL:
            return f"no progress for {_STANDSTILL:.0f} s"
        if faults.over and status.connected and shop.is_done():
            return None
        pause.wait(0.1)


if __name__ == "__main__":
    sys.exit(main())
