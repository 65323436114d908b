"""Debian's Prometheus and promtool: checks of rules, and a server for a test."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from integration.support.set_up import set_up
from reliable_mq.testing.containers import free_port
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Prometheus", "promtool"]


@cache
def _installed() -> None:
    set_up("prometheus")


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run promtool and wait until it ends."""
    _installed()
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)


class Prometheus:
    """A server on a free port, with short intervals for scrapes and rules.

    A context manager.

    Args:
        directory: For its configuration, data and log.
        targets: The addresses to scrape, by job.
        rules: The text of a rule file. Empty for none.
        interval: Seconds between two scrapes, and between two evaluations of the rules.

    Attributes:
        url: The URL of the server.
    """

    def __init__(
        self, directory: Path, targets: Mapping[str, Sequence[str]], *, rules: str = "", interval: float = 1.0
    ) -> None:
        _installed()
        every = f"{interval * 1000:.0f}ms"
        (directory / "rules.yml").write_text(rules or "groups: []\n")
        configuration = {
            "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
            "rule_files": ["rules.yml"],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
                for job, addresses in targets.items()
            ],
        }
        (directory / "prometheus.yml").write_text(json.dumps(configuration))  # JSON is YAML
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = directory / "prometheus.log"
        self._command = [
            "prometheus",
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ]

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            wait_until(self._is_ready, timeout=60, what=lambda: f"Prometheus: {self._log.read_text()}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the instant vector of an expression, with ``metric`` and ``value`` each."""
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def query_range(self, expression: str, seconds: float, *, points: int = 120) -> list[dict[str, Any]]:
        """Return the series of an expression over the last `seconds`.

        Each has ``metric`` and ``values``.
        """
        end = time.time()
        found: list[dict[str, Any]] = self._get(
            "query_range", query=expression, start=f"{end - seconds}", end=f"{end}", step=f"{seconds / points:.3f}"
        )["result"]
        return found

    def alerts(self) -> list[dict[str, Any]]:
        """Return pending and firing alerts, with ``labels``, ``annotations``, ``state``."""
        found: list[dict[str, Any]] = self._get("alerts")["alerts"]
        return found

    def firing(self) -> set[str]:
        """Return the names of the alerts that are firing."""
        return {alert["labels"]["alertname"] for alert in self.alerts() if alert["state"] == "firing"}

    def page(self, name: str) -> str:
        """Return the address of a page, such as ``alerts``.

        Debian's Prometheus has only the older pages.
        """
        try:
            urllib.request.urlopen(f"{self.url}/{name}", timeout=15).close()
        except urllib.error.HTTPError:
            return f"{self.url}/classic/{name}"
        return f"{self.url}/{name}"

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=15) as response:
            return json.load(response)["data"]

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:  # or HTTPError, while the server starts
            return False
