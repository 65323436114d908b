"""``make demo``: a broker in a container, and ``reliable-mq demo`` on it, which kills that container under the orders.

The wheel knows nothing of docker: the demo is given the commands that kill and start a broker, here these two. With
``--observe`` (``make demo ARGS=--observe``), a shop runs beside the demo on the same broker, and everything that
watches it: Prometheus with the alerts, the probes, the page for dead letters. That stays up until Ctrl-C.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

from integration.support.monitored import INVOICES, ORDERS, MonitoredShop
from integration.support.prometheus import Prometheus
from reliable_mq.monitoring.alerts import AlertSettings, rules
from reliable_mq.testing import RabbitMQ, remove_leftovers
from reliable_mq.testing.containers import free_port

_OBSERVE = "--observe"
_ALERTS = AlertSettings(hold="5s", window="2m", max_age="10s")  # for a broker that is dead for seconds


def main(arguments: list[str]) -> int:
    """Run the demo with these arguments; return its exit status."""
    interrupted: list[int] = []
    signal.signal(
        signal.SIGINT, lambda number, _: interrupted.append(number)
    )  # Ctrl-C is the demo's; we clean up when it has ended
    remove_leftovers()
    _tell("starting RabbitMQ in a container")
    with RabbitMQ() as broker, ExitStack() as stack:
        observed = _OBSERVE in arguments
        if observed:
            for line in observe(broker.url, stack):
                _tell(line)
        hooks = ["--kill-command", f"docker kill {broker.container.id}"]
        hooks += ["--restart-command", f"docker start {broker.container.id}"]
        command = [sys.executable, "-m", "reliable_mq.cli", "demo", "--url", broker.url, *hooks]
        status = subprocess.run([*command, *(a for a in arguments if a != _OBSERVE)], check=False).returncode
        if observed and not interrupted:
            _tell("the demo has ended; the shop beside it goes on until Ctrl-C")
            pause = threading.Event()
            while not interrupted:
                pause.wait(0.5)
        return status


def observe(url: str, stack: ExitStack) -> list[str]:
    """Start a shop and what watches it, until the stack is closed; return where to look."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reliable-mq-demo-")))
    log = directory / "shop.log"
    _log_into(log)
    shop = stack.enter_context(MonitoredShop(url, directory, rate=50, failing=0.05))
    prometheus = stack.enter_context(Prometheus(directory, {"shop": [shop.address]}, rules=rules(_ALERTS)))
    port = free_port()
    dead = [f"{queue.name}.dead" for queue in (ORDERS, INVOICES)]
    page = [sys.executable, "-m", "reliable_mq.cli", "web", url, *dead, "--port", str(port), "--allow-changes"]
    with log.open("ab") as out:
        stack.callback(_end, subprocess.Popen(page, stdin=subprocess.DEVNULL, stdout=out, stderr=out))
    return [
        f"alerts:        {prometheus.url}/alerts",
        f"metrics:       http://{shop.address}/metrics, and graphs of them: {prometheus.url}/graph",
        f"probes:        http://{shop.address}/livez, /readyz, /progressz",
        f"dead letters:  http://127.0.0.1:{port}/",
        "dashboards:    reliable-mq grafana publishers, and consumers, for a Grafana with this Prometheus",
        f"logs:          {log}",
    ]


def _log_into(file: Path) -> None:
    """Keep the shop's log out of the display of the demo."""
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
