"""Grafana's JSON of a dashboard, to be imported or provisioned.

Grafana prompts for the data source of an imported dashboard (``__inputs``), as for RabbitMQ's own dashboards. A
provisioned dashboard names its data source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from reliable_mq.monitoring.dashboards import Dashboard, Panel

_INPUT: Final = "DS_PROMETHEUS"
_SCHEMA_VERSION: Final = 39  # for Grafana 10.4 and newer, which migrate older schemas
_WIDTH: Final = 24  # columns of a dashboard
_STAT: Final = (4, 4)  # width and height of a panel
_LINES: Final = {True: (8, 7), False: (12, 7)}  # three panels side by side, or two


def dashboard_json(dashboard: Dashboard, datasource: str | None = None) -> dict[str, Any]:
    """Return the JSON model of a dashboard."""
    source = {"type": "prometheus", "uid": datasource or f"${{{_INPUT}}}"}
    inputs: dict[str, Any] = {
        "__inputs": [
            {
                "name": _INPUT,
                "label": "Prometheus",
                "description": "The Prometheus that scrapes the publishers and consumers.",
                "type": "datasource",
                "pluginId": "prometheus",
                "pluginName": "Prometheus",
            }
        ],
        "__requires": [
            {"type": "grafana", "id": "grafana", "name": "Grafana", "version": "10.4.0"},
            {"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"},
            {"type": "panel", "id": "stat", "name": "Stat", "version": ""},
            {"type": "panel", "id": "timeseries", "name": "Time series", "version": ""},
        ],
    }
    return {
        **({} if datasource else inputs),
        "uid": f"reliable-mq-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["rabbitmq", "reliable_mq"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {
            "list": [
                _variable(label, dashboard.metric, dashboard.variables[:position], source)
                for position, label in enumerate(dashboard.variables)
            ]
        },
        "panels": _panels(dashboard, source),
    }


def _matchers(labels: tuple[str, ...]) -> str:
    return ", ".join(f'{label}=~"${label}"' for label in labels)


def _variable(label: str, metric: str, before: tuple[str, ...], source: dict[str, str]) -> dict[str, Any]:
    matchers = f"{{{_matchers(before)}}}" if before else ""
    query = f"label_values({metric}{matchers}, {label})"
    return {
        "type": "query",
        "name": label,
        "label": label,
        "datasource": source,
        "definition": query,
        "query": query,
        "refresh": 2,  # when the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "hide": 0,
        "options": [],
        "regex": "",
        "skipUrlSync": False,
    }


def _panels(dashboard: Dashboard, source: dict[str, str]) -> list[dict[str, Any]]:
    """Lay out the panels from left to right, each row under its title."""
    matchers = _matchers(dashboard.variables)
    panels: list[dict[str, Any]] = []
    top = 0
    for row in dashboard.rows:
        panels.append(
            {
                "type": "row",
                "id": len(panels) + 1,
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": top, "w": _WIDTH, "h": 1},
                "panels": [],
            }
        )
        top, left, height = top + 1, 0, 0
        for panel in row.panels:
            width, height = _STAT if panel.kind == "stat" else _LINES[len(row.panels) % 3 == 0]
            if left + width > _WIDTH:
                top, left = top + height, 0
            position = {"x": left, "y": top, "w": width, "h": height}
            panels.append(_panel(panel, len(panels) + 1, position, matchers, source))
            left += width
        top += height
    return panels


def _panel(
    panel: Panel, number: int, position: dict[str, int], matchers: str, source: dict[str, str]
) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"value": None, "color": "green"}]
    if panel.warn is not None:
        steps.append({"value": panel.warn, "color": "yellow"})
    if panel.alarm is not None:
        steps.append({"value": panel.alarm, "color": "red"})
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
    options: dict[str, Any]
    if panel.kind == "stat":
        defaults["color"] = {"mode": "thresholds"}
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "background",
            "graphMode": "none",
            "justifyMode": "auto",
            "textMode": "value",
            "wideLayout": True,
            "showPercentChange": False,
            "percentChangeColorMode": "standard",
            "orientation": "auto",
        }
    else:
        defaults["color"] = {"mode": "palette-classic"}
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 10,
            "showPoints": "never",
            "thresholdsStyle": {"mode": "dashed" if len(steps) > 1 else "off"},
        }
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "type": panel.kind,
        "id": number,
        "title": panel.title,
        "description": panel.help,
        "datasource": source,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": source,
                "editorMode": "code",
                "expr": query.expression.replace("FILTER", matchers),
                "instant": panel.kind == "stat",
                "range": panel.kind != "stat",
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
    }
