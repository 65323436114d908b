"""Runs the contenders one after the other, and collects their results.

Invariants:

- each run has a new process and a new queue;
- a run that fails or times out is recorded and does not stop the others; its process has ended before the next run;
- before each run, the queue has exactly the messages to consume, and the machine is idle;
- after each run, the queue has exactly the confirmed messages, or none if all were acked; otherwise the run has failed.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Callable, Sequence

from integration.bench.broker import REST_SHARE, BenchBroker, BrokerError, wait_for_rest
from integration.bench.contender import Job, Role, Sample
from integration.bench.paths import ROOT
from integration.bench.plan import Plan, Point, rotated
from integration.bench.registry import Entry, Registry
from integration.bench.results import MEMORY, STREAM, Results
from integration.bench.silent_peer import serving

__all__ = ["Runner"]

QUEUE = "reliable-mq-bench"
FILLERS = ("rabbitmq-c", "pika-select")
FILLERS_WITH_IDS = ("ours-many",)
WARMUP_SHARE = 0.02
# The last line of a traceback. A Spark exception is a page long, with the Python exception in the middle.
_RAISED = re.compile(r"^(?:(?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*|\w*(?:Error|Exception)): ")


class RunFailed(Exception):
    """A run of a contender has failed; the message says how."""


class Runner:
    """Measures `entries` by `plan` on `broker`.

    Args:
        progress: Called after each run with its number, the total number of runs, and the outcome.
        deadline: Seconds for one process.
    """

    def __init__(
        self,
        registry: Registry,
        entries: Sequence[Entry],
        plan: Plan,
        broker: BenchBroker,
        *,
        queue_types: Sequence[str],
        deadline: float,
        progress: Callable[[int, int, str], None],
    ) -> None:
        self.results = Results()
        self._registry = registry
        self._entries = entries
        self._plan = plan
        self._broker = broker
        self._queue_types = queue_types
        self._deadline = deadline
        self._progress = progress
        self._done = self._total = 0

    def run(self, *, table: bool = True, curves: bool = True) -> None:
        """Measure the selected contenders."""
        by_role = {role: [entry for entry in self._entries if entry.contender.role is role] for role in Role}
        on_curves = [entry for entry in by_role[Role.PUBLISHER] if entry.contender.curve] if curves else []
        measured = by_role[Role.PUBLISHER] + by_role[Role.CONSUMER] if table else []
        streams = by_role[Role.STREAM] if table else []
        memory = by_role[Role.MEMORY] if table else []
        points, types, plan = self._plan.points(), self._queue_types, self._plan
        self._total = (
            (len(measured) * len(types) + len(streams)) * plan.rounds
            + len(memory)
            + len(on_curves) * len(points) * len(types) * plan.curve_rounds
        )
        try:
            for number in range(plan.rounds):
                for queue_type in rotated(types, number):
                    for entry in rotated(measured, number):
                        self._measure(entry, queue_type)
                for entry in rotated(streams, number):
                    self._measure(entry, STREAM)
            for entry in memory:
                self._measure_memory(entry)
            for number in range(plan.curve_rounds if on_curves else 0):
                for queue_type in rotated(types, number):
                    for index, point in enumerate(points):
                        for entry in rotated(on_curves, number + index):
                            self._measure_point(entry, queue_type, point)
        finally:
            with contextlib.suppress(BrokerError):  # if the broker is gone, the runs have reported it
                self._broker.delete_queue(QUEUE)

    def _measure(self, entry: Entry, queue_type: str) -> None:
        job = self._job(self._plan.messages(entry.contender), self._plan.window, self._plan.size)
        sample = self._attempt(entry, queue_type, lambda: self._on_queue(entry, queue_type, job))
        if sample is not None:
            self.results.samples.setdefault((queue_type, entry.contender.name), []).append(sample)

    def _measure_point(self, entry: Entry, queue_type: str, point: Point) -> None:
        job = self._job(point.messages, point.window, point.size)
        where = f"{queue_type}, window {point.window}, {point.size} B"
        sample = self._attempt(entry, where, lambda: self._on_queue(entry, queue_type, job))
        if sample is not None:
            self.results.curves.setdefault((queue_type, entry.contender.name, point), []).append(sample)

    def _measure_memory(self, entry: Entry) -> None:
        def measure() -> Sample:
            with serving(self._plan.held) as url:
                job = Job(url=url, queue=MEMORY, messages=self._plan.held, size=self._plan.held_size)
                return self._process(entry, job)

        sample = self._attempt(entry, MEMORY, measure)
        if sample is not None:
            self.results.samples.setdefault((MEMORY, entry.contender.name), []).append(sample)

    def _job(self, messages: int, window: int, size: int) -> Job:
        warmup = max(int(messages * WARMUP_SHARE), 1)
        return Job(url=self._broker.url, queue=QUEUE, messages=messages, window=window, size=size, warmup=warmup)

    def _attempt(self, entry: Entry, where: str, measure: Callable[[], Sample]) -> Sample | None:
        label = f"{entry.contender.label} ({where})"
        sample: Sample | None = None
        try:
            sample = measure()
            rate, cpu = sample.messages / sample.wall_seconds, sample.cpu_seconds / sample.messages * 1e6
            outcome = f"{label}: {rate:,.0f} msg/s, {cpu:.1f} µs CPU/message"
        except (RunFailed, BrokerError) as error:
            outcome = f"{label}: failed: {error}"
            self.results.failures.append(outcome)
        self._done += 1
        self._progress(self._done, self._total, outcome)
        return sample

    def _on_queue(self, entry: Entry, queue_type: str, job: Job) -> Sample:
        self._broker.make_queue(QUEUE, queue_type)
        consuming = entry.contender.role is Role.CONSUMER
        if consuming or queue_type == STREAM:
            self._fill(job, FILLERS_WITH_IDS if entry.contender.identified else FILLERS, counted=consuming)
        if wait_for_rest(self._plan.rest) > REST_SHARE:
            self.results.busy += 1
        sample = self._process(entry, job)
        if queue_type != STREAM:  # a stream keeps the messages that were read, and counts late
            self._broker.wait_for_depth(QUEUE, 0 if consuming else job.messages + job.warmup)
        return sample

    def _fill(self, job: Job, fillers: Sequence[str], *, counted: bool) -> None:
        entries = self._registry.entries
        filler = next((entries[name] for name in fillers if name in entries), None)
        if filler is None:
            raise RunFailed(f"nobody can fill the queue: not available: {', '.join(fillers)}")
        self._process(filler, Job(url=job.url, queue=job.queue, messages=job.messages, size=job.size))
        if counted:
            self._broker.wait_for_depth(QUEUE, job.messages)

    def _process(self, entry: Entry, job: Job) -> Sample:
        try:
            done = subprocess.run(
                entry.command(job),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self._deadline,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RunFailed(f"not done after {self._deadline:g} s") from error
        if done.returncode:
            raise RunFailed(f"exit status {done.returncode}: {reason_in(done.stderr)}")
        return Sample(**json.loads(done.stdout.splitlines()[-1]))


def reason_in(stderr: str) -> str:
    """Return the last exception in the output of a failed process, or its last line."""
    lines = stderr.strip().splitlines() or ["nothing on stderr"]
    return next((line for line in reversed(lines) if _RAISED.match(line)), lines[-1])
