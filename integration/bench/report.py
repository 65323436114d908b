"""The report of a run as tables, for a terminal, Markdown and JSON.

Invariant: all figures were measured in this run. A contender that was not measured has a row that says why.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from integration.bench.contender import Bar, Contender, Limit, Measure, Role, Sample
from integration.bench.plan import Plan
from integration.bench.registry import Registry
from integration.bench.results import MEMORY, STREAM, Results
from integration.bench.summary import Judgement, figure, judge, ratio

__all__ = ["Report", "Table", "environment"]

NOTHING = "-"
CPU_INFO = Path("/proc/cpuinfo")
PACKAGES = ("pika", "aio-pika")
TITLES = {
    Role.PUBLISHER: "Publishers",
    Role.CONSUMER: "Consumers",
    Role.STREAM: "Readers",
    Role.MEMORY: "Memory of outstanding messages",
}
_KINDS = {Role.MEMORY: MEMORY, Role.STREAM: STREAM}  # of roles that are not measured on each queue type
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Table:
    """A title, a header and rows of text. All columns but the first are short."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.header, ("---", *["---:"] * (len(self.header) - 1)), *self.rows]
        return f"## {self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a run.

    Attributes:
        only: The names of the selected contenders.
        environment: The machine and the versions.
    """

    registry: Registry
    only: Sequence[str]
    plan: Plan
    queue_types: Sequence[str]
    results: Results
    environment: dict[str, str]

    @property
    def judgements(self) -> list[Judgement]:
        """The results of all bars of the selected contenders."""
        return list(self._judgements())

    @property
    def failures(self) -> list[str]:
        """The failed runs, and the contender modules that cannot be imported."""
        broken = [item for item in self.registry.missing if item.role is None and item.name in self.only]
        return [f"{item.label}: {item.reason}" for item in broken] + self.results.failures

    def tables(self) -> list[Table]:
        """Return all tables that are not empty."""
        tables = [self._role_table(role, kind) for role in (Role.PUBLISHER, Role.CONSUMER) for kind in self.queue_types]
        tables += [self._role_table(Role.STREAM, STREAM), self._memory_table()]
        tables += [self._bar_table()] if self.results.samples else []
        tables += [self._curve_table(kind, axis) for kind in self.queue_types for axis in ("window", "size")]
        return [table for table in tables if table.rows]

    def notes(self) -> list[str]:
        """Return the notes that explain the tables."""
        plan = self.plan
        first = (
            f"All confirmed, persistent, mandatory; bodies of {plan.size} bytes, durable queues; window {plan.window}. "
            f"Medians of {plan.rounds} round(s); {plan.published} messages for a pipelined publisher, "
            f"{plan.published_one_by_one} for one that waits at every message, {plan.consumed} for a consumer, "
            "whose clock starts at the first delivery. CPU is the client's, user and system."
        )
        notes = [first]
        if self.results.busy:
            notes.append(f"{self.results.busy} run(s) began while the machine was busy with something else.")
        return notes

    def markdown(self, *, plot: str | None) -> str:
        facts = "\n".join(f"- {name}: {value}" for name, value in self.environment.items())
        parts = ["# Benchmark\n", facts + "\n", *[f"{note}\n" for note in self.notes()]]
        parts += [table.markdown() for table in self.tables()]
        if plot is not None:
            parts.append(f"![throughput and CPU per message against window and message size]({plot})\n")
        if self.failures:
            parts.append("## Failed\n\n" + "\n".join(f"- {failure}" for failure in self.failures) + "\n")
        return "\n".join(parts)

    def json(self) -> str:
        results = self.results
        document = {
            "environment": self.environment,
            "plan": asdict(self.plan),
            "samples": [
                {"queue_type": kind, "contender": name, "rounds": [asdict(sample) for sample in samples]}
                for (kind, name), samples in results.samples.items()
            ],
            "curves": [
                {"queue_type": kind, "contender": name, **asdict(point), "rounds": [asdict(one) for one in samples]}
                for (kind, name, point), samples in results.curves.items()
            ],
            "bars": [
                {
                    "contender": judgement.bar.contender,
                    "queue_type": judgement.queue_type,
                    "any_of": [
                        {"measure": limit.measure.value, "limit": limit.value, "of": limit.of, "measured": value}
                        for limit, value in zip(judgement.bar.any_of, judgement.values, strict=True)
                    ],
                    "verdict": judgement.verdict.value,
                }
                for judgement in self.judgements
            ],
            "missing": [asdict(item) for item in self.registry.missing],
            "failures": self.failures,
            "busy": results.busy,
        }
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"

    # The tables

    def _role_table(self, role: Role, queue_type: str) -> Table:
        references = [contender for contender in self._contenders(role) if contender.reference]
        by_cpu = [one for one in references if self._is_compared_by_cpu(one)]
        header = ("", "msg/s", "min .. max", *[f"x {one.reference}" for one in references], "µs CPU")
        header += (*[f"CPU x {one.reference}" for one in by_cpu], "peak RSS")

        def row(contender: Contender) -> tuple[str, ...]:
            samples = self._samples(queue_type, contender.name)
            rate, cpu = figure(samples, Measure.RATE), figure(samples, Measure.CPU)
            rates = sorted(map(Measure.RATE.of, samples))
            rss = max((sample.peak_rss_bytes for sample in samples), default=None)
            return (
                contender.label,
                number(rate),
                f"{number(rates[0])} .. {number(rates[-1])}" if rates else NOTHING,
                *[number(ratio(rate, self._figure(queue_type, one, Measure.RATE)), 2) for one in references],
                number(cpu, 1),
                *[number(ratio(cpu, self._figure(queue_type, one, Measure.CPU)), 2) for one in by_cpu],
                NOTHING if rss is None else f"{rss / MIB:.0f} MiB",
            )

        measured = [one for one in self._contenders(role) if self._samples(queue_type, one.name)]
        rows = [row(contender) for contender in measured]
        title = f"{TITLES[role]}, {queue_type} queue"
        return Table(title, header, tuple(rows + self._not_measured(role, len(header)) if rows else []))

    def _memory_table(self) -> Table:
        header = ("", "outstanding", "bytes of RSS each, beyond the body", "seconds", "peak RSS")
        rows = [
            (
                contender.label,
                number(samples[0].messages),
                number(figure(samples, Measure.MEMORY)),
                number(samples[0].wall_seconds, 1),
                f"{samples[0].peak_rss_bytes / MIB:.0f} MiB",
            )
            for contender in self._contenders(Role.MEMORY)
            if (samples := self._samples(MEMORY, contender.name))
        ]
        return Table(TITLES[Role.MEMORY], header, tuple(rows))

    def _bar_table(self) -> Table:
        rows = tuple(
            (
                self._bar_text(judgement.bar),
                judgement.queue_type,
                " or ".join(number(value, 2) for value in judgement.values),
                judgement.verdict.value,
            )
            for judgement in self.judgements
        )
        return Table("Bars", ("", "queue", "measured", "verdict"), rows)

    def _curve_table(self, queue_type: str, axis: str) -> Table:
        points = [point for point in self.plan.points() if point.axis == axis]
        names = dict.fromkeys(name for kind, name, _ in self.results.curves if kind == queue_type)

        def cell(name: str, index: int) -> str:
            samples = self.results.curves.get((queue_type, name, points[index]), [])
            rate, cpu = figure(samples, Measure.RATE), figure(samples, Measure.CPU)
            return NOTHING if rate is None else f"{number(rate)} ({number(cpu, 1)})"

        unit = "window" if axis == "window" else "bytes"
        header = ("msg/s (µs CPU)", *[f"{unit} {point.x}" for point in points])
        rows = tuple(
            (self.registry.entries[name].contender.label, *[cell(name, index) for index in range(len(points))])
            for name in names
        )
        return Table(f"By {'window' if axis == 'window' else 'message size'}, {queue_type} queue", header, rows)

    def _not_measured(self, role: Role, width: int) -> list[tuple[str, ...]]:
        missing = [item for item in self.registry.missing if item.role is role and item.name in self.only]
        return [(f"{item.label}: not measured: {item.reason}", *[NOTHING] * (width - 1)) for item in missing]

    def _judgements(self) -> Iterator[Judgement]:
        for bar in self.registry.bars:
            if bar.contender not in self.only:
                continue
            entry = self.registry.entries.get(bar.contender)
            kind = None if entry is None else _KINDS.get(entry.contender.role)
            for queue_type in self.queue_types if kind is None else [kind]:
                samples = {name: rounds for (kind, name), rounds in self.results.samples.items() if kind == queue_type}
                yield judge(bar, queue_type, samples)

    def _bar_text(self, bar: Bar) -> str:
        def text(limit: Limit) -> str:
            sign = "≥" if limit.measure is Measure.RATE else "≤"
            other = self.registry.entries.get(limit.of or "")
            name = limit.of if other is None else other.contender.reference or other.contender.label
            return f"{limit.measure.value} {sign} {limit.value:g}" + (f" x {name}" if limit.of else "")

        return f"{bar.contender}: {' or '.join(text(limit) for limit in bar.any_of)}"

    # Look-ups

    def _contenders(self, role: Role) -> list[Contender]:
        return [entry.contender for entry in self.registry.entries.values() if entry.contender.role is role]

    def _samples(self, queue_type: str, name: str) -> list[Sample]:
        return self.results.samples.get((queue_type, name), [])

    def _figure(self, queue_type: str, contender: Contender, measure: Measure) -> float | None:
        return figure(self._samples(queue_type, contender.name), measure)

    def _is_compared_by_cpu(self, contender: Contender) -> bool:
        limits = [limit for bar in self.registry.bars for limit in bar.any_of]
        return any(limit.measure is Measure.CPU and limit.of == contender.name for limit in limits)


def number(value: float | None, digits: int = 0) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}".replace(",", " ")


def environment(broker_version: str) -> dict[str, str]:
    """Return the facts on which the figures depend."""
    facts = {
        "broker": broker_version,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "machine": f"{cpu_model()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}",
    }
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def cpu_model() -> str:
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
