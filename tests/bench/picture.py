"""build/bench.svg: the distribution of latencies, and throughput over depth."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .rows import QUANTILES

LATENCIES = re.compile(
    r"(software/echo/64|rxe/send_receive/64/(polling|events)|rxe/(read|write)/64)$"
)
DEPTH = re.compile(r"rxe/write/64/depth(\d+)$")


def draw(rows: Sequence[dict[str, Any]], file: Path) -> bool:
    """Draw what there is of it; False if there is nothing."""
    timed = [row for row in rows if LATENCIES.match(row["name"]) and row["distribution"]]
    deep = [(int(found[1]), row) for row in rows if (found := DEPTH.match(row["name"]))]
    if not timed and not deep:
        return False
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(11, 5), layout="constrained")
        left, right = figure.subplots(1, 2)
        _latencies(left, timed)
        _depths(right, sorted(deep, key=lambda each: each[0]))
        figure.savefig(file)
    return True


def _latencies(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    axes.set_title("Latency: so many operations took at most ...", loc="left")
    for row in rows:
        (line,) = axes.plot(row["distribution"], QUANTILES, label=row["name"])
        if row["reference_value"]:
            axes.plot(
                [row["reference_value"]],
                [50],
                marker="D",
                linestyle="none",
                color=line.get_color(),
                label=f"  {row['reference']}, median",
            )
    axes.set_xscale("log")
    axes.set_xlabel("microseconds")
    axes.set_ylabel("percent")
    _finish(axes, rows)


def _depths(axes: Axes, rows: Sequence[tuple[int, dict[str, Any]]]) -> None:
    axes.set_title("WRITEs of 64 bytes per second, over how many are in flight", loc="left")
    for key, label in (("value", "aiordma, each awaited"), ("reference_value", "ib_write_bw -Q 1")):
        points = [(depth, row[key]) for depth, row in rows if row[key] is not None]
        axes.plot(*zip(*points, strict=True) if points else ([], []), marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks([depth for depth, _ in rows], [str(depth) for depth, _ in rows])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("in flight")
    _finish(axes, rows)


def _finish(axes: Axes, rows: Sequence[object]) -> None:
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if rows:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14)}
        axes.legend(frameon=False, fontsize=8, ncols=2, **place)
    else:
        axes.text(0.5, 0.5, "not measured in this run", transform=axes.transAxes, ha="center")
