"""Plots throughput and CPU time per message over window and message size."""

from __future__ import annotations

from pathlib import Path

from integration.bench.contender import Measure, Unavailable
from integration.bench.registry import Registry
from integration.bench.results import Results
from integration.bench.summary import figure

__all__ = ["draw"]

COLUMNS = {"window": "window (outstanding messages)", "size": "message size (bytes)"}
ROWS = {Measure.RATE: "messages/s", Measure.CPU: "client CPU per message (µs)"}
LINES = ("-", "--", ":")  # one for each queue type


def draw(registry: Registry, results: Results, target: Path) -> None:
    """Draw the curves of a run as PNG.

    Raises:
        Unavailable: If matplotlib is not installed, or no curve was measured.
    """
    if not results.curves:
        raise Unavailable("no curve was measured")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unavailable(f"matplotlib is not installed (pip install 'reliable-mq[bench]'): {error}") from error

    picture = Figure(figsize=(13, 9), layout="constrained")
    FigureCanvasAgg(picture)
    panels = picture.subplots(len(ROWS), len(COLUMNS), sharex="col", squeeze=False)
    kinds = list(dict.fromkeys(kind for kind, _, _ in results.curves))
    names = list(dict.fromkeys(name for _, name, _ in results.curves))
    for (measure, y_label), row in zip(ROWS.items(), panels, strict=True):
        for (axis, x_label), panel in zip(COLUMNS.items(), row, strict=True):
            for color, name in enumerate(names):
                for line, kind in enumerate(kinds):
                    points = sorted(
                        (point.x, figure(samples, measure))
                        for (one_kind, one_name, point), samples in results.curves.items()
                        if (one_kind, one_name, point.axis) == (kind, name, axis)
                    )
                    if points:
                        xs, ys = zip(*points, strict=True)
                        label = f"{registry.entries[name].contender.label} · {kind}"
                        panel.plot(xs, ys, f"o{LINES[line % len(LINES)]}", color=f"C{color}", markersize=3, label=label)
            panel.set(xscale="log", yscale="log", xlabel=x_label, ylabel=y_label)
            panel.grid(which="both", alpha=0.25)
    handles, labels = panels[0][0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=len(kinds), fontsize="small")
    picture.suptitle("Confirmed publishing: persistent, durable queue; 1 KiB where the window varies")
    picture.savefig(target, dpi=110)
