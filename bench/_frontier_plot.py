"""The plot of bench/frontier.py's rows: what is lost against what is read, and against the time of
a step where there is one."""

import re
from collections.abc import Sequence

import numpy as np
from _plots import GRID, INK, MORE, Row, duration, grouped, natural, tokens
from _served import served
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

STUDY, TASK = "frontier", "output-error"
OURS = ("sketch", "gather", "gvr")
# a color a method, a marker a way to set it
MARKERS = "osD^v"
TIMED = {"case": "step", "batch": 1, "n": 131072, "heads_q": 28, "heads_kv": 4, "head_dim": 128}


def image_name(model: str) -> str:
    return f"{STUDY}-{model}.png"


def draw_frontiers(quality: Sequence[Row], timing: Sequence[Row]) -> dict[str, Figure]:
    """File name: figure, one a model, of its longest texts."""
    found = {}
    ours = [row for row in quality if row["study"] == STUDY and row["task"] == TASK]
    for (model,), rows in grouped(ours, "model").items():
        longest = max(row["n"] for row in rows)
        shown = [row for row in rows if row["n"] == longest]
        found[image_name(model)] = draw_frontier(model, shown, timing)
    return found


def line_of(policy: str) -> str:
    """What the policies of one line share: all but the budget of tokens."""
    return re.sub(r"k=\d+(, )?", "", policy).replace(", )", ")").replace("()", "")


def times(timing: Sequence[Row]) -> dict[str, float]:
    """Microseconds of a policy's step, of dense's too, by its string; of policies that run dense
    at that length none."""
    found = {}
    for row in served(timing):
        if all(row[key] == value for key, value in TIMED.items()):
            if row["op"] == "dense_decode":
                found["dense"] = row["p50_us"]
            elif "policy" in row:
                found[row["policy"]] = row["p50_us"]
    return found


def draw_frontier(model: str, rows: Sequence[Row], timing: Sequence[Row]) -> Figure:
    """One point a policy and budget, a line through the budgets; dense is the cross-hair."""
    known = times(timing)
    timed = [row for row in rows if row["policy"] in known]
    figure = Figure(figsize=(12.6 if timed else 8.2, 4.8), layout="constrained")
    panels = figure.subplots(1, 2 if timed else 1, squeeze=False, sharey=True)[0]
    n, width = rows[0]["n"], rows[0]["head_dim"]
    whole = 4 * width * n
    looks = looks_of(rows)
    read = {row["policy"]: row["step_bytes"] / whole for row in rows}
    _plot(panels[0], rows, read, 1.0, looks)
    panels[0].set_title(f"{model}, {tokens(n)} tokens", loc="left", fontsize=12, color=INK)
    panels[0].set_xlabel("bytes that a step reads, in parts of dense's", fontsize=11)
    panels[0].set_ylabel("error of a layer's output", fontsize=11)
    panels[0].xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.3g}"))
    if timed:
        _plot(panels[1], timed, known, known.get("dense"), looks)
        panels[1].set_xlabel(
            f"time of a step, {tokens(TIMED['n'])} tokens, 28/4 heads of 128", fontsize=11
        )
        panels[1].xaxis.set_major_formatter(FuncFormatter(lambda us, _: duration(us)))
    top = max(row["high"] for row in rows)
    panels[0].set_ylim(-0.0005 * top, 1.05 * top)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=9, frameon=False)
    return figure


def looks_of(rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """(color, marker) of each line by its name, attnplug's own first."""
    names = {line_of(row["policy"]) for row in rows}
    ordered = sorted(names, key=lambda name: (not name.startswith(OURS), natural(name)))
    methods: dict[str, list[str]] = {}
    for name in ordered:
        methods.setdefault(name.partition("(")[0], []).append(name)
    return {
        name: (MORE[place % len(MORE)], MARKERS[number % len(MARKERS)])
        for place, lines in enumerate(methods.values())
        for number, name in enumerate(lines)
    }


def _plot(
    axes: Axes,
    rows: Sequence[Row],
    x: dict[str, float],
    dense: float | None,
    looks: dict[str, tuple[str, str]],
) -> None:
    for name, (color, marker) in looks.items():
        line = [row for row in rows if line_of(row["policy"]) == name]
        line.sort(key=lambda row: row["read"])
        own = name.startswith(OURS)
        below = [max(0.0, row["value"] - row["low"]) for row in line]
        above = [max(0.0, row["high"] - row["value"]) for row in line]
        if line:
            axes.errorbar(
                [x[row["policy"]] for row in line],
                [row["value"] for row in line],
                [below, above],
                fmt=f"{marker}-" if own else f"{marker}--",
                mfc=color if own else "white",
                color=color,
                lw=1.6 if own else 1.0,
                ms=6 if own else 5,
                elinewidth=1,
                label=name,
            )
    axes.axhline(0.0, color=INK, lw=1.2)
    if dense is not None:
        axes.axvline(dense, color=INK, lw=1.2)
        axes.annotate(
            "dense", (dense, 0.0), (-4, 4), textcoords="offset points", ha="right", fontsize=10
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    # Errors near to none are told apart, and none at all is on the axis.
    axes.set_yscale("function", functions=(_root, _square))
    axes.grid(True, which="major", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _root(values):
    return np.sign(values) * np.sqrt(np.abs(values))


def _square(values):
    return np.sign(values) * np.square(values)
