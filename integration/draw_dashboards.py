"""``make dashboards``: draw the dashboards in the manual from real data.

A shop runs for two and a half minutes on a broker in a container. For part of the time, the first attempts of a tenth
of its orders fail; then the broker is killed and started again. Prometheus scrapes the shop every second. Each panel
is drawn from the answers of Prometheus to its queries, at its place in Grafana.
"""

from __future__ import annotations

import math
import sys
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")

from matplotlib import pyplot as plt
from PIL import Image

from integration.support.monitored import MonitoredShop
from integration.support.panels import asked
from integration.support.prometheus import Prometheus
from reliable_mq.monitoring.dashboards import DASHBOARDS
from reliable_mq.monitoring.grafana import dashboard_json
from reliable_mq.testing import RabbitMQ, remove_leftovers

IMAGES = Path(__file__).parents[1] / "docs" / "_static"
SECONDS = 150.0
FAILING, WELL, KILLED = 30.0, 60.0, 75.0  # seconds after the start
INTERVALS = {"rate_interval": "8s", "over": f"{SECONDS:.0f}s"}
COLUMN, LINE = 0.56, 0.36  # inches per unit of Grafana's grid
COLORS = {"green": "#37872d", "yellow": "#e0b400", "red": "#c4162a"}
PALETTE = 64


def main() -> int:
    """Run the shop and draw the dashboards."""
    remove_leftovers()
    with (
        tempfile.TemporaryDirectory() as directory,
        RabbitMQ() as broker,
        MonitoredShop(broker.url, Path(directory), rate=100) as shop,
        Prometheus(Path(directory), {"shop": [shop.address]}) as prometheus,
    ):
        clock = threading.Event()
        clock.wait(FAILING)
        shop.failing = 0.1
        clock.wait(WELL - FAILING)
        shop.failing = 0.0
        clock.wait(KILLED - WELL)
        broker.kill()
        clock.wait(6)
        broker.start()
        clock.wait(SECONDS - KILLED - 6)
        for name, dashboard in DASHBOARDS.items():
            model = dashboard_json(dashboard)
            draw(model, prometheus, IMAGES / f"dashboard-{name}.png", dashboard.variables)
    return 0


def draw(model: dict[str, Any], prometheus: Prometheus, file: Path, variables: Iterable[str]) -> None:
    """Draw every panel in its place."""
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in model["panels"])
    figure = plt.figure(figsize=(24 * COLUMN, height * LINE + 0.5), facecolor="#f4f5f5")
    total = height * LINE + 0.5
    figure.text(0.01, 1 - 0.25 / total, model["title"], fontsize=13, fontweight="bold", va="center")
    for panel in model["panels"]:
        place = panel["gridPos"]
        left, width = place["x"] / 24, place["w"] / 24
        top, tall = (place["y"] * LINE + 0.5) / total, place["h"] * LINE / total
        if panel["type"] == "row":
            figure.text(0.01, 1 - top - tall / 2, panel["title"], fontsize=10, fontweight="bold", va="center")
            continue
        edge, title = 0.06 * COLUMN / (24 * COLUMN), 0.32 / total
        figure.patches.append(
            plt.Rectangle(
                (left + edge, 1 - top - tall + 0.04 / total),
                width - 2 * edge,
                tall - 0.08 / total,
                transform=figure.transFigure,
                facecolor="white",
                edgecolor="#d8d9da",
                linewidth=0.6,
                zorder=-1,
            )
        )
        figure.text(left + 4 * edge, 1 - top - 0.2 / total, panel["title"], fontsize=8, va="center")
        inside = (
            left + (0.045 if panel["type"] != "stat" else 0.01),
            1 - top - tall + (0.32 if panel["type"] != "stat" else 0.1) / total,
            width - (0.06 if panel["type"] != "stat" else 0.02),
            tall - title - (0.4 if panel["type"] != "stat" else 0.15) / total,
        )
        axes = figure.add_axes(inside)
        if panel["type"] == "stat":
            draw_number(axes, panel, prometheus, variables)
        else:
            draw_lines(axes, panel, prometheus, variables)
    figure.savefig(file, dpi=80)
    plt.close(figure)
    Image.open(file).convert("RGB").quantize(PALETTE).save(file, optimize=True)
    print(f"{file.name}: {file.stat().st_size // 1000} kB", file=sys.stderr)


def draw_number(axes: Any, panel: dict[str, Any], prometheus: Prometheus, variables: list[str]) -> None:
    """Draw the latest value on the colour of its threshold."""
    found = prometheus.query(asked(panel["targets"][0]["expr"], variables, **INTERVALS))
    value = float(found[0]["value"][1]) if found else math.nan
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    color = [step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1]
    axes.set_facecolor(COLORS[color])
    axes.set_xticks([])
    axes.set_yticks([])
    shown = readable(value, panel["fieldConfig"]["defaults"]["unit"])
    axes.text(0.5, 0.5, shown, color="white", fontsize=15, ha="center", va="center", transform=axes.transAxes)


def draw_lines(axes: Any, panel: dict[str, Any], prometheus: Prometheus, variables: list[str]) -> None:
    """Draw each series, and the visible thresholds as dashed lines."""
    defaults = panel["fieldConfig"]["defaults"]
    highest, number = 0.0, 0
    for target in panel["targets"]:
        for series in prometheus.query_range(asked(target["expr"], variables, **INTERVALS), SECONDS):
            legend = target["legendFormat"]
            for name, value in series["metric"].items():
                legend = legend.replace(f"{{{{{name}}}}}", value)
            start = float(series["values"][-1][0]) - SECONDS
            points = [(float(at) - start, float(value)) for at, value in series["values"]]
            finite = [value for _, value in points if math.isfinite(value)]
            highest = max([highest, *finite])
            axes.plot(*zip(*points, strict=True), linewidth=1, color=f"C{number % 10}", label=legend)
            number += 1
    for step in defaults["thresholds"]["steps"][1:]:
        if step["value"] <= highest * 1.2:
            axes.axhline(step["value"], color=COLORS[step["color"]], linewidth=0.8, linestyle="--")
    axes.set_xlim(0, SECONDS)
    axes.set_ylim(0, highest * 1.15 or 1)
    axes.tick_params(labelsize=6, length=2)
    axes.yaxis.set_major_formatter(lambda value, _: readable(value, defaults["unit"]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} s")
    axes.grid(linewidth=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if number > 0:
        with suppress(ValueError):
            axes.legend(fontsize=5.5, loc="upper left", ncol=2, frameon=False)


def readable(value: float, unit: str) -> str:
    """Return a value as Grafana shows it in that unit."""
    if not math.isfinite(value):
        return "No data"
    if unit == "s" and 0 < value < 1:
        return f"{value * 1000:.3g} ms"
    if unit == "bytes" and value >= 1024:
        return f"{value / 1024:.4g} KiB"
    if unit == "percentunit":
        return f"{value:.3g}".rstrip() if not value else f"{value * 100:.3g} %"
    return f"{value:.4g}{' s' if unit == 's' else '/s' if unit == 'ops' else ''}"


if __name__ == "__main__":
    sys.exit(main())
