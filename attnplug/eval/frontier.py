"""What decode methods lose against how many keys they read: the plot of a study's fidelity rows."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnplug import files
from attnplug.errors import ArgumentError
from attnplug.eval.rows import Row

TASK = "kl"  # of the study's task fidelity
BUDGET = re.compile(r"\b(?:k|window|top_k|budget)=\d+(?:, )?")


def draw_frontier(rows: Sequence[Row], path: Path) -> Path:
    """Keys a step across, KL from dense (nats) up, a line for each method and length through its
    budgets. Left and low is better. Rows that dense served, or whose method reads all keys or does
    not say how many, are left out. Raises ArgumentError where none is left."""
    from matplotlib.figure import Figure

    lines: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        served = row.get("served", {}).get("decode", "dense") != "dense"
        if row["task"] == TASK and served and type(row["keys"]) is int:
            lines[_line(row)].append(row)
    if not lines:
        raise ArgumentError(
            "plot: no row of the task fidelity is of a decode method that served and says how many "
            "keys a step reads; give --tasks fidelity and policies with min_tokens=0"
        )
    figure = Figure(figsize=(8, 4.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    ends = [(name, _draw(axes, points)) for name, points in lines.items()]
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda keys, _: f"{keys:,.0f}")
    axes.set_yscale("log")
    axes.set_xlabel("keys that a step reads")
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
    rows = sorted(rows, key=lambda row: row["keys"])
    value = [row["value"] for row in rows]
    down = [row["value"] - max(row["low"], row["value"] / 10) for row in rows]
    up = [row["high"] - row["value"] for row in rows]
    keys = [row["keys"] for row in rows]
    return axes.errorbar(keys, value, yerr=[down, up], marker="o", markersize=4, capsize=2)
