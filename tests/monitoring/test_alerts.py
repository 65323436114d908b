"""The alert rules use existing metrics and labels, and the manual describes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reliable_mq.errors import ConfigurationError
from reliable_mq.metrics.families import FAMILIES
from reliable_mq.monitoring.alerts import ALERTS, Alert, AlertSettings, rules

DOCS = Path(__file__).parents[2] / "docs"
SUFFIX = {"counter": "_total", "gauge": ""}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_reads_metrics_that_exist(alert: Alert) -> None:
    exposed = {f"{name}{SUFFIX.get(family.kind, '_bucket')}": family for name, family in FAMILIES.items()}
    named = re.findall(r"reliable_mq_\w+", alert.expression)
    assert named
    assert set(named) <= exposed.keys()
    labels = {label for name in named for label in exposed[name].labels} | {"job", "instance"}
    used = re.findall(r"\$labels\.(\w+)", alert.summary + alert.description)
    assert set(used) <= labels


def test_each_alert_is_in_the_runbook_and_the_monitoring_guide() -> None:
    names = [alert.name for alert in ALERTS]
    assert re.findall(r"^## (ReliableMQ\w+)$", (DOCS / "guides" / "runbook.md").read_text(), re.MULTILINE) == names
    rows = re.findall(
        r"^\| \[(ReliableMQ\w+)\]\(.*\| (\w+) \|$", (DOCS / "guides" / "monitoring.md").read_text(), re.MULTILINE
    )
    assert rows == [(alert.name, alert.severity) for alert in ALERTS]


def test_the_guide_tells_how_soon_each_alert_fires() -> None:
    rows = re.findall(
        r"^\| (ReliableMQ\w+) \| .* \| \d+ s \|$", (DOCS / "guides" / "monitoring.md").read_text(), re.MULTILINE
    )
    assert rows == [alert.name for alert in ALERTS]


def test_the_settings_replace_their_names_and_nothing_else() -> None:
    text = rules(AlertSettings(hold="7m", window="1h30m", max_age="1m30s500ms", manual_url="https://manual.example"))
    assert "[1h30m]" in text
    assert "[7m]" in text
    assert "for: 7m\n" in text
    assert "_age_seconds > 90.5\n" in text
    assert '"https://manual.example/guides/runbook.html#reliablemqrejected"' in text
    assert not re.search(r"HOLD|WINDOW|MAX_AGE", text)


@pytest.mark.parametrize("field", ["hold", "window", "max_age"])
@pytest.mark.parametrize("duration", ["", "0s", "90", "1.5m", "5x", "1s1m", "-1m", "1m; up", "293y"])
def test_a_duration_that_prometheus_would_refuse_is_refused(field: str, duration: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{field} \(--.*\) must be a duration of Prometheus"):
        AlertSettings(**{field: duration})


@pytest.mark.parametrize("url", ["https://manual.example/{{ x }}", "https://example/😀", "https://a b", "\udcff"])
def test_a_manual_url_that_would_spoil_the_rules_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^manual_url \(--manual-url\) holds a character that no URL has"):
        AlertSettings(manual_url=url)


def test_the_guide_has_the_defaults() -> None:
    defaults = AlertSettings()
    guide = (DOCS / "guides" / "monitoring.md").read_text()
    for option, value in (("for", defaults.hold), ("window", defaults.window), ("max-age", defaults.max_age)):
        assert f"| `--{option}` | {value} |" in guide
