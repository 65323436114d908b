"""Consumers that messages kill, and the calls of their handlers."""

from __future__ import annotations

import signal
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, Self

from integration.programs.killed_by_messages import Settings
from integration.support.processes import Process

if TYPE_CHECKING:
    from pathlib import Path

    from reliable_mq.testing import VirtualHost

__all__ = ["Call", "Killed", "Settings"]


class Call(NamedTuple):
    """One call of the handler."""

    body: str
    attempt: int
    at: float  # seconds since 1970


class Killed:
    """``integration.programs.killed_by_messages`` with a supervisor that restarts it.

    Attributes:
        deaths: How often the program itself was killed. With ``workers``, the log has the deaths of its consumers.
    """

    def __init__(self, url: str, log: Path, settings: Settings) -> None:
        self._log = log
        self._arguments = [url, str(log), *settings.arguments()]
        self.deaths = 0

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                code = self._process.wait(60)
                assert code == 0, f"it ended with {code}"
            finally:
                self._process.kill()

    def _start(self) -> None:
        program = "integration.programs.killed_by_messages"
        self._process = Process(program, *self._arguments, stdin=0, stdout=1, stderr=2)

    def revive(self) -> None:
        """Restart the program if it was killed."""
        code = self._process.poll()
        if code is not None:
            assert code == -signal.SIGKILL, f"it ended by itself, with {code}"
            self.deaths += 1
            self._start()

    def calls(self) -> list[Call]:
        """Return the calls of the handler so far."""
        return [call for call in self._lines() if call.body != "died"]

    def counts(self) -> Counter[str]:
        """Return the number of handler calls by body."""
        return Counter(call.body for call in self.calls())

    def died(self) -> int:
        """Return how many workers were killed."""
        return sum(call.body == "died" for call in self._lines())

    def _lines(self) -> list[Call]:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [Call(body, int(attempt), float(at)) for body, attempt, at in map(str.split, lines)]

    def run_until_settled(self, vhost: VirtualHost, dead: int, patience: float) -> None:
        """Keep the program alive until ``dead`` messages are dead-lettered.

        Some may be dead-lettered twice. All other queues must be empty.

        Raises:
            TimeoutError: If no count changes for ``patience`` seconds. The total time is not limited, because the
                machine may be busy.
        """
        counts: dict[str, int] = {}
        changed_at = time.monotonic()
        while True:
            self.revive()
            before, counts = counts, vhost.live_counts(["orders.dead"])
            if counts["orders.dead"] >= dead and not any(counts[name] for name in counts.keys() - {"orders.dead"}):
                return
            if counts != before:
                changed_at = time.monotonic()
            elif time.monotonic() - changed_at > patience:
                raise TimeoutError(f"nothing has changed for {patience:g} s: {counts}")
            time.sleep(0.5)
