"""The report of a benchmark, and how it lists contenders that were not measured."""

from __future__ import annotations

import json

from integration.bench.contender import Bar, Contender, Limit, Measure, Role, Sample
from integration.bench.plan import QUICK
from integration.bench.registry import Entry, Missing, Registry
from integration.bench.report import Report, Table
from integration.bench.results import MEMORY, Results

ENVIRONMENT = {"broker": "RabbitMQ 4.3.6"}


def sample(rate: float, growth: int | None = None) -> Sample:
    return Sample(
        messages=1000,
        wall_seconds=1000 / rate,
        cpu_seconds=rate / 1e6,
        peak_rss_bytes=50 << 20,
        rss_growth_bytes=growth,
    )


def report(results: Results) -> Report:
    contenders = [
        Contender(name="ours", label="Ours", role=Role.PUBLISHER, curve=True),
        Contender(name="peer", label="A peer", role=Role.PUBLISHER, reference="peer"),
        Contender(name="held", label="Held", role=Role.MEMORY),
    ]
    registry = Registry(
        entries={one.name: Entry(one, ("true",)) for one in contenders},
        bars=[Bar("ours", (Limit(Measure.CPU, 0.7, "peer"),)), Bar("held", (Limit(Measure.MEMORY, 600),))],
        missing=[
            Missing("c", "C client", Role.PUBLISHER, "there is no compiler"),
            Missing("new", "integration.bench.contenders.new", None, "No module named 'new'"),
            Missing("other", "integration.bench.contenders.other", None, "No module named 'other'"),
        ],
    )
    return Report(registry, ["ours", "peer", "held", "c", "new"], QUICK, ["classic", "quorum"], results, ENVIRONMENT)


def measured() -> Results:
    point = QUICK.points()[0]
    return Results(
        samples={
            ("classic", "ours"): [sample(30_000), sample(10_000), sample(20_000)],
            ("classic", "peer"): [sample(10_000)],
            (MEMORY, "held"): [sample(1000, growth=400_000)],
        },
        curves={("classic", "ours", point): [sample(700)]},
        failures=["A peer (quorum): failed: exit status 1"],
    )


def by_title(one: Report) -> dict[str, Table]:
    return {table.title: table for table in one.tables()}


def test_a_table_compares_medians_with_the_references() -> None:
    table = by_title(report(measured()))["Publishers, classic queue"]
    row = dict(zip(table.header, table.rows[0], strict=True))
    assert row["msg/s"] == "20 000"
    assert row["min .. max"] == "10 000 .. 30 000"
    assert (row["x peer"], row["CPU x peer"]) == ("2.00", "2.00")
    assert row["peak RSS"] == "50 MiB"


def test_what_cannot_run_has_a_row_with_its_reason() -> None:
    table = by_title(report(measured()))["Publishers, classic queue"]
    assert table.rows[-1][0] == "C client: not measured: there is no compiler"


def test_every_bar_has_a_verdict_on_every_type_of_queue() -> None:
    bars = by_title(report(measured()))["Bars"]
    assert [(row[1], row[3]) for row in bars.rows] == [
        ("classic", "MISSED"),
        ("quorum", "not measured"),
        ("memory", "reached"),
    ]


def test_a_requested_module_that_cannot_be_imported_is_a_failure() -> None:
    failures = report(measured()).failures
    assert "integration.bench.contenders.new: No module named 'new'" in failures
    assert "A peer (quorum): failed: exit status 1" in failures
    assert not any("other" in failure for failure in failures)


def test_markdown_and_json_hold_the_same_run() -> None:
    one = report(measured())
    text = one.markdown(plot="curves.png")
    assert "| Ours | 20 000 |" in text
    assert "(curves.png)" in text
    document = json.loads(one.json())
    assert [len(entry["rounds"]) for entry in document["samples"]] == [3, 1, 1]
    assert document["curves"][0]["window"] == QUICK.windows[0]
    assert [bar["verdict"] for bar in document["bars"]] == ["MISSED", "not measured", "reached"]


def test_an_interrupted_run_without_results_can_be_reported() -> None:
    one = report(Results())
    assert one.tables() == []
    assert one.markdown(plot=None)
