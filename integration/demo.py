"""``make demo``: run ``reliable-mq demo`` on a container, and kill the container.

The wheel does not know docker: the demo gets the commands that kill and start a broker. With ``--observe`` (``make
demo ARGS=--observe``) the same shop runs in this process, more slowly, together with its monitoring: Prometheus with
the alerts, the probes, and the page for dead letters. A second, small shop adds the features that the demo lacks (an
outbox, asyncio, a stage), so that every panel of the dashboards has data. When all orders are handled, everything
stays up until Ctrl-C. The audit follows after that, so that the dead letters can be inspected.
"""

from __future__ import annotations

import argparse
import logging
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

from prometheus_client import CollectorRegistry

from integration.support.monitored import MonitoredShop
from integration.support.prometheus import Prometheus
from reliable_mq.cli.demo.display import run
from reliable_mq.cli.demo.scenario import Outages, Shop
from reliable_mq.health import HealthServer
from reliable_mq.monitoring import QueueDepths
from reliable_mq.monitoring.alerts import AlertSettings, rules
from reliable_mq.testing import RabbitMQ, remove_leftovers
from reliable_mq.testing.containers import free_port
from reliable_mq.url import parse_url

if TYPE_CHECKING:
    from types import TracebackType

_OBSERVE = "--observe"
_BESIDE = 20.0  # orders a second of the small shop
_ALERTS = AlertSettings(hold="5s", window="2m", max_age="10s")  # short, because the broker is dead for seconds


def main(arguments: list[str]) -> int:
    """Run the demo with these arguments; return its exit status."""
    observed = _OBSERVE in arguments
    # The demo handles Ctrl-C. Without --observe it is a separate process, after which this one cleans up.
    signal.signal(signal.SIGINT, signal.default_int_handler if observed else lambda *_: None)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # also ends the processes started here
    remove_leftovers()
    _tell("starting RabbitMQ in a container")
    with RabbitMQ() as broker:
        kill, restart = f"docker kill {broker.container.id}", f"docker start {broker.container.id}"
        if observed:
            return observe(broker.url, arguments, kill, restart)
        hooks = ["--kill-command", kill, "--restart-command", restart]
        command = [sys.executable, "-m", "reliable_mq.cli", "demo", "--url", broker.url, *hooks, *arguments]
        return subprocess.run(command, check=False).returncode


def observe(url: str, arguments: list[str], kill: str, restart: str) -> int:
    """Run the demo in this process with its monitoring; return its exit status."""
    parser = argparse.ArgumentParser(prog="integration.demo")
    parser.add_argument(_OBSERVE, action="store_true", help="watch the demo")
    parser.add_argument("--messages", type=int, default=30_000, help="orders to publish")
    parser.add_argument("--rate", type=float, default=300.0, help="orders a second")
    parser.add_argument("--kills", type=int, default=2, help="how often to kill the broker")
    given = parser.parse_args(arguments)
    shop = ObservedShop(url, orders=given.messages, rate=given.rate)
    settings = parse_url(url, connection_name="reliable-mq demo")
    return run(shop, Outages(kill, restart, times=given.kills), ", ".join(map(str, settings.endpoints)))


class ObservedShop(Shop):
    """The shop of the demo with its monitoring. A context manager.

    When all orders are handled, leaving it waits for Ctrl-C.

    Args:
        url: of the broker.
        orders: number of orders to publish.
        rate: orders per second.
    """

    def __init__(self, url: str, *, orders: int, rate: float) -> None:
        self._registry = CollectorRegistry()
        self._broker_url = url
        self._watching = ExitStack()
        settings = parse_url(url, connection_name="reliable-mq demo")
        super().__init__(url, settings, orders=orders, rate=rate, registry=self._registry)

    def __enter__(self) -> Self:
        directory = Path(self._watching.enter_context(tempfile.TemporaryDirectory(prefix="reliable-mq-demo-")))
        _log_into(directory / "shop.log")
        try:
            super().__enter__()
            for line in self._watch(directory):
                _tell(line)
        except BaseException:
            self._watching.close()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.is_done():
            _tell("all orders are handled; everything stays up until Ctrl-C, then comes the audit")
            _wait_for_interrupt()
        self._watching.close()  # before the queues are deleted
        super().__exit__(exc_type, exc, traceback)

    def _watch(self, directory: Path) -> list[str]:
        """Start the monitoring; return lines with its addresses."""
        stack, log = self._watching, directory / "shop.log"
        stack.enter_context(QueueDepths(self._broker_url, [self.queue], registry=self._registry, interval=0.5))
        served = HealthServer(self.publisher, self.consumer, port=0, registry=self._registry)
        address = stack.enter_context(served).url.removeprefix("http://")
        beside = stack.enter_context(MonitoredShop(self._broker_url, directory, rate=_BESIDE)).address
        targets = {"shop": [address], "beside": [beside]}
        prometheus = stack.enter_context(Prometheus(directory, targets, rules=rules(_ALERTS)))
        port = free_port()
        page = [sys.executable, "-m", "reliable_mq.cli", "web", self._broker_url, self.queues[1]]
        with log.open("ab") as out:
            options = ["--port", str(port), "--allow-changes"]
            # In a separate session, so that Ctrl-C does not end it.
            process = subprocess.Popen(
                [*page, *options], stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        stack.callback(_end, process)
        return [
            f"alerts:        {prometheus.page('alerts')}",
            f"metrics:       http://{address}/metrics, and graphs of them: {prometheus.page('graph')}",
            f"beside it:     http://{beside}/metrics: an outbox, asyncio and a stage, at {_BESIDE:.0f} orders a second",
            f"probes:        http://{address}/livez, /readyz, /progressz",
            f"dead letters:  http://127.0.0.1:{port}/ (the audit counts what you delete there as lost)",
            "dashboards:    reliable-mq grafana publishers, and consumers, for a Grafana with this Prometheus",
            f"logs:          {log}",
        ]


def _wait_for_interrupt() -> None:
    pause = threading.Event()
    try:
        while True:
            pause.wait(0.5)
    except KeyboardInterrupt:
        pass


def _log_into(file: Path) -> None:
    """Write the shop's log to a file, and not to the display of the demo."""
    logger = logging.getLogger("reliable_mq")
    logger.addHandler(logging.FileHandler(file))
    logger.propagate = False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(30)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
