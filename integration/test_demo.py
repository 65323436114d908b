"""The demos outside of the command line: an observed one and one on a cluster.

The monitoring of ``make demo ARGS=--observe`` answers, also after the broker was killed. The account of ``make
demo-cluster`` adds up.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from integration.support.panels import wait_for_data
from integration.support.processes import Process
from integration.support.programs import ROOT
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from typing import IO


def gather(stream: IO[bytes], lines: list[str]) -> threading.Thread:
    """Add each line of a stream to a list, on a thread that ends with the stream."""

    def read() -> None:
        while line := stream.readline():
            lines.append(line.decode())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_the_observed_demo_says_where_to_look_and_serves_it() -> None:
    told: list[str] = []
    shown: list[str] = []
    with Process("integration.demo", "--observe", "--messages", "5000", "--rate", "1000", "--kills", "1") as demo:
        assert demo.stdout is not None
        assert demo.stderr is not None
        readers = [gather(demo.stderr, told), gather(demo.stdout, shown)]
        try:
            wait_until(lambda: any("until Ctrl-C" in line for line in told), timeout=240, what=lambda: f"{told}{shown}")
            check("".join(told))
        finally:  # the audit follows
            demo.send_signal(signal.SIGINT)
            demo.wait(60)
            for reader in readers:
                reader.join(20)
    assert demo.returncode == 0
    assert "lost 0" in shown[-1]


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_the_observed_demo_leaves_nothing_when_terminated() -> None:
    told: list[str] = []
    with Process("integration.demo", "--observe", "--messages", "100000", "--rate", "100", "--kills", "0") as demo:
        assert demo.stdout is not None
        assert demo.stderr is not None
        readers = [gather(demo.stderr, told), gather(demo.stdout, [])]
        wait_until(lambda: any(line.startswith("logs:") for line in told), timeout=120, what=lambda: f"{told}")
        addresses = re.findall(r"(http://[^\s,]+)", "".join(told))
        assert len(addresses) >= 6
        demo.terminate()
        assert demo.wait(120) == 128 + signal.SIGTERM
        for reader in readers:
            reader.join(20)
    for address in addresses:
        with pytest.raises(URLError, match="refused"):
            got(address)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_demo_on_a_cluster_loses_nothing_and_repeats_nothing() -> None:
    command = [sys.executable, "-m", "integration.demo_cluster"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "lost 0, twice 0"
    for fault in ("KILL", "PARTITION", "ROLLING RESTART"):
        assert f"{fault}: rabbit@rabbit-" in done.stdout


def check(told: str) -> None:
    """Check that each address in the output shows the demo itself."""
    addresses = dict(re.findall(r"^(\w[\w ]+): +(http[^\s,]+)", told, re.MULTILINE))
    assert "ReliableMQDeadLetters" in got(addresses["alerts"])
    prometheus = "/".join(addresses["alerts"].split("/")[:3])
    rules = json.loads(got(f"{prometheus}/api/v1/rules"))
    assert len(rules["data"]["groups"][0]["rules"]) > 10
    metrics = got(addresses["metrics"])
    labels = 'outcome="confirmed",publisher="reliable-mq demo publisher"'
    assert f"reliable_mq_publisher_settled_total{{{labels}}} 5000.0" in metrics
    depth = re.compile(r'reliable_mq_queue_messages\{queue="(\S+\.dead)",role="dead_letters"} 10.0')
    wait_until(lambda: depth.search(got(addresses["metrics"])), timeout=30, what="the depth of the dead-letter queue")
    queue = depth.findall(got(addresses["metrics"]))[0]
    assert json.loads(got(addresses["probes"]))["live"] is True
    assert queue in got(addresses["dead letters"])

    def query(expression: str) -> list[dict[str, Any]]:
        asked = urlencode({"query": expression})
        found: list[dict[str, Any]] = json.loads(got(f"{prometheus}/api/v1/query?{asked}"))["data"]["result"]
        return found

    fired = 'count(count_over_time(ALERTS{alertname="ReliableMQDeadLetters",job="shop"}[1h]))'
    wait_until(lambda: query(fired), timeout=60, what="an alert in Prometheus")
    wait_for_data(query, timeout=60)


def got(url: str) -> str:
    with urlopen(url, timeout=30) as response:
        text: str = response.read().decode()
    return text
