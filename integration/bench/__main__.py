"""``python -m integration.bench``: run the benchmark, show and write its report.

The report is written to ``report.md``, ``report.json`` and ``curves.png``.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from integration.bench.broker import BenchBroker, BrokerError, started
from integration.bench.contender import Unavailable
from integration.bench.paths import OUTPUT
from integration.bench.plan import FULL, QUICK, Plan
from integration.bench.plot import draw
from integration.bench.registry import Registry, discover
from integration.bench.report import Report, environment
from integration.bench.runner import Runner
from integration.bench.summary import Verdict
from integration.bench.terminal import Terminal, terminal

INTERRUPTED = 130


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m integration.bench", description=__doc__)
    parser.add_argument("--url", help="a broker that runs; default: one is started in docker")
    parser.add_argument("--line", default="newest", help="which broker to start: newest (default) or 4.0")
    parser.add_argument("--quick", action="store_true", help="few messages, one round: does it work, not how fast")
    parser.add_argument("--rounds", type=int, help=f"default {FULL.rounds}")
    parser.add_argument("--messages", type=int, help=f"of a pipelined publisher; default {FULL.published}")
    parser.add_argument("--consumed", type=int, help=f"of a consumer; default {FULL.consumed}")
    parser.add_argument("--queue-types", type=queue_types, default="classic,quorum", help="default classic,quorum")
    parser.add_argument("--only", default="*", help="names of contenders, with wildcards, separated by commas")
    parser.add_argument("--no-table", action="store_true", help="measure the curves only")
    parser.add_argument("--no-curves", action="store_true", help="leave out the curves over window and message size")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for one process; default 300")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="directory; default .bench")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless every bar is reached")
    parser.add_argument("--list", action="store_true", help="list the contenders and exit")
    return parser.parse_args(arguments)


def queue_types(text: str) -> list[str]:
    kinds = text.split(",")
    if not set(kinds) <= {"classic", "quorum"}:
        raise argparse.ArgumentTypeError("classic, quorum, or both, separated by a comma")
    return kinds


def main() -> int:
    options = parse()
    registry = discover()
    only = chosen(registry, options.only)
    if options.list:
        show_contenders(registry)
        return 0
    if not only:
        print(f"no contender is called {options.only}; --list shows them", file=sys.stderr)
        return 2
    try:
        with terminal() as screen, broker(options) as one:
            report, interrupted = measure(options, registry, only, one, screen)
            show(report, screen, options.output)
    except BrokerError as error:
        print(error, file=sys.stderr)
        return 1
    if interrupted:
        return INTERRUPTED
    missed = [judgement for judgement in report.judgements if judgement.verdict is not Verdict.PASS]
    return int(bool(report.failures or (options.check and missed)))


def measure(
    options: argparse.Namespace, registry: Registry, only: list[str], broker: BenchBroker, screen: Terminal
) -> tuple[Report, bool]:
    """Run all contenders; return the report and whether the run was interrupted.

    An interrupted run has a report of its measurements so far.
    """
    plan = planned(options)
    facts = environment(broker.version)
    runner = Runner(
        registry,
        [registry.entries[name] for name in only if name in registry.entries],
        plan,
        broker,
        queue_types=options.queue_types,
        deadline=options.deadline,
        progress=screen.progress,
    )
    interrupted = False
    try:
        runner.run(table=not options.no_table, curves=not options.no_curves)
    except KeyboardInterrupt:
        interrupted = True
    return Report(registry, only, plan, options.queue_types, runner.results, facts), interrupted


def show(report: Report, screen: Terminal, output: Path) -> None:
    """Show the report, and write its files."""
    for table in report.tables():
        screen.table(table)
    for line in (*report.notes(), *[f"FAILED: {failure}" for failure in report.failures]):
        screen.line(line)
    output.mkdir(parents=True, exist_ok=True)
    plot: Path | None = output / "curves.png"
    try:
        draw(report.registry, report.results, output / "curves.png")
    except Unavailable as reason:
        screen.line(f"no plot: {reason}")
        plot = None
    (output / "report.md").write_text(report.markdown(plot=plot.name if plot else None))
    (output / "report.json").write_text(report.json())
    screen.line(f"written: {output / 'report.md'}, report.json" + (f", {plot.name}" if plot else ""))


@contextmanager
def broker(options: argparse.Namespace) -> Iterator[BenchBroker]:
    if options.url is None:
        with started(options.line) as one:
            yield one
    else:
        given = BenchBroker(options.url)
        given.wait_until_it_answers()
        yield given


def planned(options: argparse.Namespace) -> Plan:
    plan = QUICK if options.quick else FULL
    given = {"rounds": options.rounds, "published": options.messages, "consumed": options.consumed}
    return dataclasses.replace(plan, **{name: value for name, value in given.items() if value is not None})


def chosen(registry: Registry, patterns: str) -> list[str]:
    names = [*registry.entries, *[item.name for item in registry.missing]]
    return [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns.split(","))]


def show_contenders(registry: Registry) -> None:
    for name, entry in registry.entries.items():
        print(f"{name:24} {entry.contender.role.value:10} {entry.contender.label}")
    for item in registry.missing:
        print(f"{item.name:24} {'?' if item.role is None else item.role.value:10} not measured: {item.reason}")


if __name__ == "__main__":
    sys.exit(main())
