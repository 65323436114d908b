"""The dashboards match Grafana's schema, and their queries use existing metrics."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from reliable_mq.cli.app import app
from reliable_mq.metrics.families import FAMILIES
from reliable_mq.monitoring.dashboards import DASHBOARDS, Dashboard, Panel
from reliable_mq.monitoring.grafana import dashboard_json

SCHEMAS = Path(__file__).parent / "grafana_schemas"
NOT_IN_THE_SCHEMA = ("__inputs", "__requires")  # fields of an export, which the import dialog removes
EVERY = [(dashboard, panel) for dashboard in DASHBOARDS.values() for row in dashboard.rows for panel in row.panels]


@cache
def schema(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((SCHEMAS / f"{name}.jsonschema.json").read_text())
    return loaded


def check(value: object, name: str, definition: str) -> None:
    """Validate against one definition of a schema."""
    part = {"definitions": schema(name)["definitions"], "$ref": f"#/definitions/{definition}"}
    errors = list(jsonschema.Draft7Validator(part).iter_errors(value))
    assert not errors, "\n".join(f"{list(error.absolute_path)}: {error.message[:300]}" for error in errors)


@pytest.fixture(params=DASHBOARDS)
def dashboard(request: pytest.FixtureRequest) -> Dashboard:
    return DASHBOARDS[request.param]


def panels_of(model: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in model["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("datasource", [None, "prometheus-1"])
def test_a_dashboard_is_valid_by_grafanas_schema(dashboard: Dashboard, datasource: str | None) -> None:
    """The dashboard and the options, fields and queries of its panels are valid."""
    model = json.loads(json.dumps(dashboard_json(dashboard, datasource)))
    check({key: value for key, value in model.items() if key not in NOT_IN_THE_SCHEMA}, "dashboard", "Dashboard")
    for panel in model["panels"]:
        check(panel, "dashboard", "RowPanel" if panel["type"] == "row" else "Panel")
    for panel in panels_of(model):
        check(panel["options"], panel["type"], "Options")
        if panel["type"] == "timeseries":
            check(panel["fieldConfig"]["defaults"]["custom"], "timeseries", "FieldConfig")
        for target in panel["targets"]:
            check(target, "prometheus", "Dataquery")


def test_the_schema_finds_mistakes(dashboard: Dashboard) -> None:
    """The validation must not accept everything."""
    for change in ({"titel": "x"}, {"refresh": 15}, {"graphTooltip": 7}, {"panels": [{"title": "no type"}]}):
        with pytest.raises(AssertionError):
            check({**dashboard_json(dashboard, "uid"), **change}, "dashboard", "Dashboard")


def test_an_imported_dashboard_asks_for_its_data_source(dashboard: Dashboard) -> None:
    model = dashboard_json(dashboard)
    assert [each["name"] for each in model["__inputs"]] == ["DS_PROMETHEUS"]
    used = {part["datasource"]["uid"] for part in (*panels_of(model), *model["templating"]["list"])}
    used |= {target["datasource"]["uid"] for panel in panels_of(model) for target in panel["targets"]}
    assert used == {"${DS_PROMETHEUS}"}
    assert "__inputs" not in dashboard_json(dashboard, "mine")
    assert "DS_PROMETHEUS" not in json.dumps(dashboard_json(dashboard, "mine"))


def test_the_panels_are_told_apart_and_do_not_overlap(dashboard: Dashboard) -> None:
    model = dashboard_json(dashboard)
    assert len({panel["id"] for panel in model["panels"]}) == len(model["panels"])
    cells = [
        (x, y)
        for position in (panel["gridPos"] for panel in model["panels"])
        for x in range(position["x"], position["x"] + position["w"])
        for y in range(position["y"], position["y"] + position["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23


@pytest.mark.parametrize(("dashboard", "panel"), EVERY, ids=lambda part: getattr(part, "title", None))
def test_a_panel_asks_for_metrics_and_labels_that_exist(dashboard: Dashboard, panel: Panel) -> None:
    assert len(panel.help) > 20
    suffix = {"counter": "_total", "gauge": "", "histogram": "_bucket"}
    exposed = {f"{name}{suffix[family.kind]}": family for name, family in FAMILIES.items()}
    variables = set(dashboard.variables)
    for query in panel.queries:
        named = re.findall(r"reliable_mq_\w+", query.expression)
        assert named
        assert set(named) <= exposed.keys()
        labels = {"job", "instance", "le"} | {label for name in named for label in exposed[name].labels}
        assert "FILTER" not in query.expression or variables <= labels
        used = re.findall(r"by \(([^)]*)\)", query.expression)
        grouped = {label for group in used for label in group.split(", ")}
        assert grouped <= labels
        assert set(re.findall(r"{{(\w+)}}", query.legend)) <= grouped
        assert "[$__" in query.expression or "rate(" not in query.expression


def test_no_panel_adds_up_reports_of_the_same_thing() -> None:
    """Several processes may report the rows of one outbox, or the depth of one queue."""
    highest = {name for name, family in FAMILIES.items() if family.merged == "highest"}
    asked = [
        (panel.title, name, query.expression)
        for _, panel in EVERY
        for query in panel.queries
        for name in highest & set(re.findall(r"reliable_mq_\w+", query.expression))
    ]
    assert {name for _, name, _ in asked} >= highest - {"reliable_mq_queue_consumers"}
    for title, name, expression in asked:
        assert re.search(rf"\bmax(?: by \([^)]*\) )?\({name}\b", expression), (title, expression)


@pytest.mark.parametrize(("_dashboard", "panel"), EVERY, ids=lambda part: getattr(part, "title", None))
def test_the_selected_jobs_filter_every_query(_dashboard: Dashboard, panel: Panel) -> None:
    """One Prometheus may have the metrics of staging and production."""
    for query in panel.queries:
        selectors = re.findall(r"reliable_mq_\w+(\{[^}]*\})?", query.expression)
        assert all("FILTER" in selector or 'job=~"$job"' in selector for selector in selectors), query.expression


def test_the_share_of_failed_attempts_is_at_most_1() -> None:
    """With retries in memory, there are more attempts than deliveries."""
    [panel] = [panel for _, panel in EVERY if panel.title == "Failed attempts"]
    share, of_all = panel.queries[0].expression.split("\n/ ")
    assert share in of_all
    assert "handled_total" in of_all


def test_the_variables_are_values_of_labels(dashboard: Dashboard) -> None:
    before: list[str] = []
    for variable in dashboard_json(dashboard)["templating"]["list"]:
        found = re.fullmatch(r"label_values\((reliable_mq_\w+)({.*})?, (\w+)\)", variable["query"])
        assert found is not None
        assert found[1] in FAMILIES
        assert found[3] == variable["name"]
        assert re.findall(r"\$(\w+)", found[2] or "") == before
        before.append(found[3])


def test_every_metric_is_in_a_panel() -> None:
    """All metrics but two of queues are in a panel."""
    shown = {
        name
        for _, panel in EVERY
        for query in panel.queries
        for name in re.findall(r"reliable_mq_\w+", query.expression)
    }
    missing = {name for name in FAMILIES if not {name, f"{name}_total", f"{name}_bucket"} & shown}
    of_queues = {"reliable_mq_queue_consumers", "reliable_mq_queue_depth_failures"}
    assert missing == of_queues


def test_the_command_prints_one_or_both() -> None:
    both = CliRunner().invoke(app, ["grafana"]).stdout.splitlines()
    assert [json.loads(line)["uid"] for line in both] == ["reliable-mq-publishers", "reliable-mq-consumers"]
    one = CliRunner().invoke(app, ["grafana", "consumers", "--datasource", "mine"]).stdout
    assert json.loads(one) == dashboard_json(DASHBOARDS["consumers"], "mine")
    assert CliRunner().invoke(app, ["grafana", "spark"]).exit_code == 2
