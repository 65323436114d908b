"""Messages that kill or hang their consumer: moved aside after two returns, bounded, and their neighbours flow."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Self

from integration.support.consuming import dead_letters, send
from integration.support.programs import ROOT, environment
from integration.support.waiting import wait_until
from reliable_mq import Message, Publisher, Queue

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support.checker import Checker
    from integration.support.management import VirtualHost

ORDERS = Queue("orders")


class Restarted:
    """A consumer that messages kill, started again whenever it has died, as a supervisor does."""

    def __init__(self, url: str, log: Path, *, max_attempts: int = 3, delay: float = 0.2, prefetch: int = 50) -> None:
        self._log = log
        self._command = [
            sys.executable,
            "-m",
            "integration.programs.killed_by_messages",
            url,
            str(log),
            str(max_attempts),
            str(delay),
            str(prefetch),
        ]
        self.deaths = 0

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                assert self._process.wait(30) == 0
            finally:
                self._process.kill()

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, cwd=ROOT, env=environment())

    def revive(self) -> None:
        """Start it again, if it has been killed."""
        code = self._process.poll()
        if code is not None:
            assert code == -signal.SIGKILL, f"it ended by itself, with {code}"
            self.deaths += 1
            self._start()

    def calls(self) -> Counter[str]:
        """Handler calls by body."""
        return Counter(line.split()[0] for line in self.lines())

    def lines(self) -> list[str]:
        """One per handler call: body, attempt, time."""
        return self._log.read_text().splitlines() if self._log.exists() else []


def run_until_settled(vhost: VirtualHost, program: Restarted, dead: int, timeout: float) -> None:
    """Keep it alive until so many are dead-lettered, and nothing is left anywhere else."""

    def settled() -> bool:
        program.revive()
        counts = vhost.live_counts(["orders.dead"])
        return counts.pop("orders.dead") == dead and not any(counts.values())

    wait_until(settled, timeout=timeout, what=lambda: f"settled: {vhost.live_counts()}", interval=0.5)


def test_f27_messages_that_kill_their_consumer_are_dead_lettered_and_their_neighbours_handled(
    any_vhost: VirtualHost, tmp_path: Path, checker: Checker
) -> None:
    """Each killer is handed out twice, and ``max_attempts`` times from quarantine; no neighbour is given up."""
    bodies = [f"good-{number}" for number in range(100)]
    bodies.insert(10, "kill-1")
    messages = [Message(body.encode(), message_id=body) for body in bodies]
    with Publisher(any_vhost.url, topology=[ORDERS]) as publisher:
        publisher.connect()
    send(any_vhost, "orders", messages, checker)
    with Restarted(any_vhost.url, tmp_path / "calls", max_attempts=2) as program:
        run_until_settled(any_vhost, program, dead=1, timeout=90)
        calls = program.calls()
    assert program.deaths == calls["kill-1"] == 2 + 2
    assert set(calls) == set(bodies)
    checker.dead_lettered([dead["properties"]["message_id"] for dead in dead_letters(any_vhost, "orders.dead", 1)])
    for body in bodies:
        if body.startswith("good"):
            checker.handled(body)
    reasons = {
        dead["properties"]["headers"]["x-reliable-mq-dead-letter-reason"] for dead in any_vhost.peek("orders.dead")
    }
    assert reasons == {"2 of 2 attempts failed; 2 of them by the loss of their consumer"}
    checker.drain(any_vhost, ["orders", "orders.quarantine"], dead_letters=["orders.dead"])
    checker.close()
