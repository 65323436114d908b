"""Probes of real programs on a real broker, over the life of a pod.

The tests call them as a kubelet does.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Self

from integration.support.command_line import run_cli
from integration.support.consuming import numbered, publish
from integration.support.processes import Process
from reliable_mq import Publisher, Queue
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from reliable_mq.testing import FaultProxyFactory, VirtualHost

ORDERS = Queue("orders")
TERMINATION_GRACE = 60.0  # seconds


class Pod:
    """`integration.programs.probed` and the actions of a kubelet."""

    def __init__(self, url: str, api: str, stop_timeout: float = 30.0) -> None:
        self.said: list[str] = []
        self._process = Process("integration.programs.probed", url, str(stop_timeout), api, stderr=2)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def wait_for(self, line: str) -> None:
        wait_until(lambda: line in self.said, timeout=60, what=lambda: f"{line!r}: {self.said}")

    def probe(self, path: str) -> tuple[int, dict[str, Any]]:
        wait_until(lambda: self.said, timeout=60, what="the URL of the probes")
        try:
            with urllib.request.urlopen(self.said[0] + path, timeout=10) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def exec_probe(self, path: str) -> int:
        """Return the exit status of the command that an exec probe runs."""
        return run_cli("health", self.said[0] + path, "--timeout", "20").returncode

    def terminate(self) -> None:
        self._process.terminate()

    def let_through(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"x")
        self._process.stdin.flush()

    def end(self) -> int:
        """Return the exit status of a process that ends within its grace period."""
        return self._process.wait(TERMINATION_GRACE)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(line.decode().rstrip("\n"))


def fill(vhost: VirtualHost) -> None:
    with Publisher(vhost.url, topology=[ORDERS]) as publisher:
        publisher.connect()
    publish(vhost, "orders", numbered(10))


def test_a_terminated_pod_turns_unready_finishes_and_requeues(vhost: VirtualHost, one_api: str) -> None:
    """It is live and not ready while it drains.

    Nothing is lost, and it ends within its grace period.
    """
    fill(vhost)
    with Pod(vhost.url, one_api, stop_timeout=300.0) as pod:  # the handler ends before that, after slow commands
        pod.wait_for("begun 0")
        wait_until(lambda: pod.probe("/readyz")[0] == 200, timeout=60, what=lambda: f"{pod.probe('/readyz')}")
        pod.terminate()
        wait_until(lambda: pod.probe("/readyz")[0] == 503, timeout=60, what="readiness off")
        _, report = pod.probe("/readyz")
        assert [one["reason"] for one in report["parts"]] == ["", "stopping"]
        assert pod.probe("/livez")[0] == 200
        assert (pod.exec_probe("/readyz"), pod.exec_probe("/livez")) == (1, 0)
        vhost.wait_for_messages("orders", 9)
        pod.let_through()
        assert pod.end() == 0
        pod.wait_for("returned")
        assert pod.said[1:] == ["begun 0", "done 0", "returned"]
    counts = vhost.live_counts(["orders", "shipped"])
    assert (counts["orders"], counts["shipped"]) == (9, 1)


def test_a_pod_whose_handler_hangs_ends_within_its_grace(vhost: VirtualHost, one_api: str) -> None:
    """After stop_timeout, its delivery is requeued."""
    fill(vhost)
    with Pod(vhost.url, one_api, stop_timeout=1.0) as pod:
        pod.wait_for("begun 0")
        began = time.monotonic()
        pod.terminate()
        assert pod.end() == 0
        assert time.monotonic() - began < TERMINATION_GRACE
    assert vhost.live_counts(["orders"])["orders"] == 10


def test_a_pod_whose_broker_is_away_lives_and_is_not_ready(
    vhost: VirtualHost, fault_proxy: FaultProxyFactory, one_api: str
) -> None:
    """It is not restarted, and becomes ready again by itself."""
    proxy = fault_proxy(vhost.url)
    with Pod(proxy.url, one_api) as pod:
        wait_until(lambda: pod.probe("/readyz")[0] == 200, timeout=60, what=lambda: f"{pod.probe('/readyz')}")
        proxy.refuse_connections()
        proxy.cut()
        wait_until(lambda: pod.probe("/readyz")[0] == 503, timeout=60, what="readiness off")
        wait_until(
            lambda: all("not connected" in part["reason"] for part in pod.probe("/livez")[1]["parts"]),
            timeout=60,
            what=lambda: f"both connections lost: {pod.probe('/livez')}",
        )
        assert pod.probe("/livez")[0] == 200
        proxy.heal()
        wait_until(lambda: pod.probe("/readyz")[0] == 200, timeout=60, what=lambda: f"{pod.probe('/readyz')}")
        pod.terminate()
        assert pod.end() == 0
