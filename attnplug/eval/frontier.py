"""What decode methods lose against the bytes that they read: a plot of a study's fidelity rows."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnplug import files
from attnplug.errors import ArgumentError
from attnplug.eval.rows import Row
from attnplug.eval.served import ALL

TASK = "kl"  # of the study's task fidelity
BUDGET = re.compile(r"\b(?:(?:k|window|top_k|budget)=\d+|like='[^']*')(?:, )?")


def draw_frontier(rows: Sequence[Row], path: Path) -> Path:
    """Bytes a step across, KL from dense (nats) up, a line for each method and length through its
    budgets. Left and low is better. Rows that dense served, or whose method reads all keys or does
    not say what it reads, are left out. Raises ArgumentError where none is left."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, NullFormatter

    lines: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        served = row.get("served", {}).get("decode", "dense") != "dense"
        if row["task"] == TASK and served and row.get("bytes") and row["keys"] != ALL:
            lines[_line(row)].append(row)
    if not lines:
        raise ArgumentError(
            "plot: no row of the task fidelity is of a decode method that served and says what a "
            "step reads; give --tasks fidelity and policies with min_tokens=0"
        )
    figure = Figure(figsize=(8, 4.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    ends = [(name, _draw(axes, points)) for name, points in lines.items()]
    axes.set_xscale("log", base=2)
    read = [row["bytes"] for points in lines.values() for row in points]
    if max(read) < 4 * min(read):  # too narrow for powers of two
        axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(lambda size, _: f"{size / 1e6:,.3g}")
    axes.set_yscale("log")
    axes.set_xlabel("MB that a step reads, scanned summaries or codes included")
    axes.set_ylabel("KL from dense, nats")
    axes.set_title(f"{rows[0]['model']}: what decode loses against what it reads", fontsize=10)
    axes.grid(color="#d8dade", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend([end for _, end in ends], [name for name, _ in ends], fontsize=8, frameon=False)
    files.write_figure(path, figure)
    return path


def _line(row: Row) -> str:
    """What the points of a line share: the policy without its budget, and the length."""
    policy = re.sub(r"\b(min_tokens=0)(, )?", "", BUDGET.sub("", row["policy"]))
    policy = policy.replace(", )", ")").replace("()", "")
    return f"{policy}, {row['n']:,} tokens"


def _draw(axes: Any, rows: Sequence[Row]) -> Any:
    """A line with the rows' intervals; an interval that reaches 0 ends at a tenth of the value."""
    rows = sorted(rows, key=lambda row: row["bytes"])
    value = [row["value"] for row in rows]
    down = [row["value"] - max(row["low"], row["value"] / 10) for row in rows]
    up = [row["high"] - row["value"] for row in rows]
    read = [row["bytes"] for row in rows]
    return axes.errorbar(read, value, yerr=[down, up], marker="o", markersize=4, capsize=2)
