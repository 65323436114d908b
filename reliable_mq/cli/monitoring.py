"""The commands ``reliable-mq alerts`` and ``grafana``."""

from __future__ import annotations

import enum
import json
from typing import Annotated

import typer

from reliable_mq.cli.terminal import product


class DashboardName(enum.StrEnum):
    """The dashboards, as named on the command line."""

    PUBLISHERS = "publishers"
    CONSUMERS = "consumers"


def alerts(
    *,
    hold: Annotated[
        str, typer.Option("--for", metavar="DURATION", help="How long a state must last before its alert fires.")
    ] = "2m",
    window: Annotated[
        str, typer.Option(metavar="DURATION", help="The period in which events, such as dead letters, count.")
    ] = "15m",
    max_age: Annotated[
        str,
        typer.Option(
            metavar="DURATION", help="The maximum age of an outstanding message, or of a message in an outbox."
        ),
    ] = "1m",
    manual_url: Annotated[
        str, typer.Option(metavar="URL", help="The address of the manual, for links to the runbook.")
    ] = "",
) -> None:
    """Print alert rules for Prometheus, as YAML.

    Write them to a file that `rule_files` of Prometheus names. Durations are Prometheus's, such as 90s or 1h30m. --for
    and --window should be above three scrape intervals. Each alert has a section in the runbook of the manual.
    """
    from reliable_mq.monitoring.alerts import AlertSettings, rules

    settings = AlertSettings(hold=hold, window=window, max_age=max_age, manual_url=manual_url)
    out = product(as_json=False)
    out.write(rules(settings).encode())
    out.flush()


def grafana(
    name: Annotated[
        DashboardName | None,
        typer.Argument(metavar="[publishers|consumers]", help="The dashboard to print. Default: both."),
    ] = None,
    *,
    datasource: Annotated[
        str | None,
        typer.Option(
            metavar="UID",
            help="The data source that the panels query. Default: Grafana asks for it during the import.",
        ),
    ] = None,
) -> None:
    """Print dashboards for Grafana, as JSON.

    `publishers` shows publishers and outboxes, `consumers` shows consumers, retries and dead letters. With a name, the
    output is one dashboard to import; without, each line is one. For dashboards that are provisioned from files, give
    --datasource.
    """
    from reliable_mq.monitoring.dashboards import DASHBOARDS
    from reliable_mq.monitoring.grafana import dashboard_json

    out = product(as_json=True)
    for dashboard in DASHBOARDS.values() if name is None else [DASHBOARDS[name]]:
        model = json.dumps(dashboard_json(dashboard, datasource), indent=None if name is None else 2)
        out.write(f"{model}\n".encode())
    out.flush()
