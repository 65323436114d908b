"""The queries of the dashboard panels, as Grafana sends them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from reliable_mq.monitoring.dashboards import DASHBOARDS
from reliable_mq.monitoring.grafana import dashboard_json
from reliable_mq.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["asked", "expressions", "wait_for_data"]


def asked(expression: str, variables: Iterable[str], *, rate_interval: str, over: str) -> str:
    """Return the query that Grafana sends for an expression, with everything selected.

    Args:
        expression: The expression of a panel.
        variables: The variables of its dashboard.
        rate_interval: Several scrape intervals, in the notation of Prometheus.
        over: The time range of the dashboard.
    """
    for name in variables:
        expression = expression.replace(f'"${name}"', '".*"')
    expression = expression.replace("$__rate_interval", rate_interval).replace("$__range", over)
    assert "$" not in expression
    return expression


def expressions() -> dict[str, str]:
    """Return the queries of all panels by name, with a scrape interval of one second."""
    return {
        f"{name}: {panel['title']} {target['refId']}": asked(
            target["expr"], dashboard.variables, rate_interval="6s", over="30s"
        )
        for name, dashboard in DASHBOARDS.items()
        for panel in dashboard_json(dashboard)["panels"]
        for target in panel.get("targets", ())
    }


def wait_for_data(query: Callable[[str], list[dict[str, Any]]], *, timeout: float) -> None:
    """Wait until each query of each panel has had a finite value.

    Args:
        query: Returns the instant vector of an expression.
        timeout: Seconds.

    Raises:
        TimeoutError: If some queries had none. The message names them.
    """
    missing = expressions()
    assert len(missing) > 60

    def all_answered() -> bool:
        for name, expression in list(missing.items()):
            if any(math.isfinite(float(series["value"][1])) for series in query(expression)):
                del missing[name]
        return not missing

    wait_until(all_answered, timeout=timeout, what=lambda: f"data for {missing}", interval=1)
