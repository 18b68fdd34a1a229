"""The plots of bench/report.py. One figure an op and case: time against tokens, the ratio below."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

Row = dict[str, Any]

COLORS = ("#0b6e99", "#c4511b", "#3d8b37", "#7b4ea3", "#a8821a", "#b0306a")
# Where each has a point, and no line that crosses others.
MORE = (*COLORS, "#1f9e89", "#4d4d4d", "#e377c2")
STOCK = "stock"  # the policy of a row about the model itself
INK, GRID, PEER = "#222222", "#dddddd", "#7a7a7a"
PEERS = {
    "cudnn": "cuDNN SDPA",
    "cudnn by layer": "cuDNN SDPA, by one layer's time",
    "cudnn over as many": "cuDNN SDPA over as many keys",
    "flash": "the flash kernel",
    "fa3": "FlashAttention-3",
    "flashinfer": "FlashInfer",
    "minference": "MInference block-sparse",
    "stock": "stock transformers",
    "torch.topk": "torch.topk",
    "dense": "dense",
    "vllm": "vLLM",
}
COUNTED = re.compile(r", (link|tier|exact|hits|promoted|GPU memory) [^,]*")
MAX_PANELS = 2
SHAPE = ("heads_q", "heads_kv", "head_dim", "dtype")


def bare(policy: str) -> str:
    """A policy's string without `min_tokens=0`, which only says that no crossover was asked: rows
    are of the method. So one string has a default's time and its quality."""
    text = re.sub(r"([,;] ?)?\bmin_tokens=0\b", "", policy)
    return re.sub(r"\([,;] ?", "(", text).replace("()", "")


def tokens(n: float) -> str:
    """8192 as 8K, 1048576 as 1M, anything else as it is."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if n >= size and n % size == 0:
            return f"{int(n // size)}{unit}"
    return f"{int(n):,}"


def duration(us: float) -> str:
    """Microseconds in the unit that reads best, three digits."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} us"


def heads(row: Row) -> str:
    return f"{row['heads_q']}/{row['heads_kv']}"


def draw_all(
    rows: Sequence[Row],
    quality: Sequence[Row],
    folder: Path,
    more: Mapping[str, Figure] | None = None,
) -> list[str]:
    """Draw every figure into `folder`, and `more` of them by their file names; returns the file
    names, sorted."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = dict(more or {})
    for (op, case), group in grouped(rows, "op", "case").items():
        if has_line(group):
            figures[image_name(op, case)] = draw_timing(op, case, group)
    for (model,), group in grouped(quality, "model").items():
        figures[quality_name(model)] = draw_quality(group)
    for name, figure in figures.items():
        # without Software the bytes depend on the data alone
        figure.savefig(folder / name, dpi=130, metadata={"Software": None})
    return sorted(figures)


def has_line(rows: Iterable[Row]) -> bool:
    """Whether some shape was measured at more than one length."""
    return any(len({row["n"] for row in panel}) > 1 for panel in grouped(rows, *SHAPE).values())


PER_TOKEN = frozenset({"e2e-decode", "generate", "tp-decode", "vllm-decode"})


def image_name(op: str, case: str) -> str:
    return f"{op}.png" if case == "op" else f"{op}-{case}.png"


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by the values of some keys, in sorted order."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row[key] for key in keys)].append(row)
    return dict(sorted(found.items()))


def draw_timing(op: str, case: str, rows: Sequence[Row]) -> Figure:
    """One column a head count (and a batch, where there would be more lines than colors), the
    largest groups first; time above and, where there are peers, the ratio below. Of whole calls
    the method's own, where it was also timed beside another."""
    if case == "call":
        rows = [row for row in rows if row["policy"] == op] or rows
    panels = grouped(rows, *SHAPE)
    if any(len(_series(group)) > len(COLORS) for group in panels.values()):
        panels = grouped(rows, *SHAPE, "batch")
    panels = {key: group for key, group in panels.items() if len({row["n"] for row in group}) > 1}
    shown = sorted(panels, key=lambda key: (-len(panels[key]), key))[:MAX_PANELS]
    heights, height = ([3, 1.6], 6.2) if any(row["ratio"] for row in rows) else ([3], 4.2)
    figure = Figure(figsize=(8.4 * len(shown), height), layout="constrained")
    axes = figure.subplots(
        len(heights), len(shown), squeeze=False, sharex="col", height_ratios=heights
    )
    for column, key in enumerate(shown):
        group = _legible(panels[key])
        upper, lower = axes[0][column], axes[-1][column]
        kind = "per token" if case in PER_TOKEN else "per call"
        upper.set_title(_title(op, case, key), loc="left", fontsize=12, color=INK)
        _plot_times(upper, group)
        lower.set_xlabel("tokens", fontsize=11)
        if column == 0:
            upper.set_ylabel(f"time {kind}", fontsize=11)
        if lower is upper:
            continue
        _plot_ratios(lower, group)
        if column == 0:
            lower.set_ylabel("times faster than\nthe fastest peer", fontsize=11)
    return figure


def _title(op: str, case: str, panel: tuple[Any, ...]) -> str:
    """What a panel shows: the values of SHAPE, and of the batch where it has panels of its own."""
    heads_q, heads_kv, dim, dtype, *batch = panel
    title = op if case == "op" else f"{op} ({case})"
    title += f", {heads_q}/{heads_kv} heads of {dim}" if dim else ""  # of no heads: topk
    return f"{title}, {dtype}" + "".join(f", batch {size}" for size in batch)


def _plot_times(axes: Axes, rows: Sequence[Row]) -> None:
    labels: list[tuple[float, str, str]] = []
    for index, ((batch, options), line) in enumerate(_series(rows)):
        color = COLORS[index % len(COLORS)]
        ours = _hardest(line)
        x, y = [row["n"] for row in ours], [row["p50_us"] for row in ours]
        axes.fill_between(
            x,
            [r["p20_us"] for r in ours],
            [r["p80_us"] for r in ours],
            color=color,
            alpha=0.2,
            lw=0,
        )
        axes.plot(x, y, "o-", color=color, lw=2, ms=5)
        labels.append((y[-1], _label("attnplug", batch, options), color))
    for peer, batch, options, times in _peer_lines(rows):
        ns = sorted(times)
        axes.plot(ns, [times[n] for n in ns], "s--", color=PEER, lw=1.5, ms=4, mfc="white")
        labels.append((times[ns[-1]], _label(PEERS.get(peer, peer), batch, options), PEER))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda us, _: duration(us)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    _style(axes, sorted({row["n"] for row in rows}))
    _label_ends(axes, labels)


def _peer_lines(rows: Sequence[Row]) -> list[tuple[str, int, str, dict[int, float]]]:
    """(peer, batch, options, microseconds by n) of each line of a peer: one for all options that
    meet the same peer, or several, each with its options, where their times differ."""
    lines: list[tuple[str, int, str, dict[int, float]]] = []
    for (batch, options), line in _series(rows):
        for (peer,), beside in grouped([row for row in line if row["peer"]], "peer").items():
            found = {row["n"]: row["peer_p50_us"] for row in beside}
            same = [times for *key, times in lines if (peer, batch) == tuple(key[:2])]
            fits = [x for x in same if all(_near(x[n], found[n]) for n in x.keys() & found.keys())]
            if fits:
                fits[0].update(found | fits[0])
            else:
                lines.append((peer, batch, options, found))
    number = Counter(tuple(line[:2]) for line in lines)
    return [
        (peer, batch, options if number[peer, batch] > 1 else "", times)
        for peer, batch, options, times in lines
    ]


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=0.2)


def _plot_ratios(axes: Axes, rows: Sequence[Row]) -> None:
    axes.axhline(1, color=INK, lw=1)
    ratios = []
    for index, (_, line) in enumerate(_series(rows)):
        measured = [row for row in _hardest(line) if row["ratio"]]
        ratios += [row["ratio"] for row in measured]
        axes.plot(
            [row["n"] for row in measured], [row["ratio"] for row in measured],
            "o-", color=COLORS[index % len(COLORS)], lw=2, ms=5,
        )  # fmt: skip
    if ratios and max(ratios) / min(ratios) > 4:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.8), max(high, 1.25))  # a percent of noise must not look like a hill
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    _style(axes, sorted({row["n"] for row in rows}))


def _series(rows: Sequence[Row]) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """Rows of one line each, by batch and options, in order of n. What an option string says of
    its own run (hit rates, bytes) makes no other line."""
    keys = grouped(
        [row | {"options": COUNTED.sub("", row["options"])} for row in rows], "batch", "options"
    )
    lines = []
    for batch, options in sorted(keys, key=lambda key: (key[0], natural(key[1]))):
        group = keys[batch, options]
        lines.append(((batch, options), sorted(group, key=lambda row: row["n"])))
    return lines


def _legible(rows: Sequence[Row]) -> list[Row]:
    """The rows of as many lines as there are colors, the longest first. Single points are left to
    the tables where there are lines, and so is the rest."""
    lines = _series(rows)
    points = [len({row["n"] for row in line}) for _, line in lines]
    longest = sorted(range(len(lines)), key=lambda index: -points[index])[: len(COLORS)]
    kept = [index for index in sorted(longest) if points[index] > 1 or max(points) == 1]
    return [row for index in kept for row in lines[index][1]]


def _hardest(line: Sequence[Row]) -> list[Row]:
    """Of each n the row against the fastest peer."""
    return [
        min(rows, key=lambda row: row["ratio"] or math.inf) for rows in grouped(line, "n").values()
    ]


def natural(text: str) -> list[tuple[int, str]]:
    """A sorting key by which k=8 comes before k=32."""
    parts = re.findall(r"\d+|\D+", text)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _label(name: str, batch: int, options: str) -> str:
    options = re.sub(r"\d{4,}", lambda found: tokens(int(found[0])), options)
    return f"{name}, batch {batch}" + (f", {options}" if options else "")


def _style(axes: Axes, ns: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(_marked(ns)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: tokens(n)))
    axes.grid(True, which="major", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=10, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _marked(ns: Sequence[int]) -> list[int]:
    """Those whose names find room on the axis, the roundest first."""
    marked: list[int] = []
    for n in sorted(ns, key=lambda n: (len(tokens(n)), n)):
        if all(abs(math.log2(n / other)) > 0.2 for other in marked):
            marked.append(n)
    return sorted(marked)


def _label_ends(axes: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Write each line's name right of the axes at the height of its end, apart from the others."""
    if not labels:
        return
    low, high = axes.get_ylim()
    span = math.log(high / low)
    gap = 0.062  # of the axes' height: one line of text
    heights = [(math.log(y / low) / span, text, color) for y, text, color in labels]
    placed: list[float] = []
    for height, *_ in sorted(heights):
        placed.append(max(height, placed[-1] + gap) if placed else height)
    overflow = max(0.0, placed[-1] - 0.985)
    for index in reversed(range(len(placed))):  # push down what left the top
        limit = placed[index + 1] - gap if index + 1 < len(placed) else placed[-1] - overflow
        placed[index] = min(placed[index], limit)
    for where, (_, text, color) in zip(placed, sorted(heights), strict=True):
        axes.annotate(
            text, xy=(1.01, where), xycoords="axes fraction", fontsize=10, color=color,
            va="center", annotation_clip=False,
        )  # fmt: skip


def quality_name(model: str) -> str:
    return f"quality-{model}.png"


def draw_quality(rows: Sequence[Row]) -> Figure:
    """One model: a panel for each task, each policy's score with its interval against tokens, and
    the dense score it is paired with. Rows of traced heads are another question's."""
    rows = [row for row in rows if "heads" not in row]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows if row["policy"] != STOCK))
    lines = -(-len(tasks) // 3)
    figure = Figure(figsize=(12, 1.0 + 2.6 * lines), layout="constrained")
    panels = figure.subplots(lines, 3, squeeze=False).flatten()
    for axes, task in zip(panels, tasks, strict=False):
        mine = [row for row in rows if row["task"] == task]
        _plot_scores(axes, mine, policies)
        axes.set_title(task, fontsize=11, color=INK)
    for axes in panels[len(tasks) :]:
        axes.set_axis_off()
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3)
    return figure


def _plot_scores(axes: Axes, rows: Sequence[Row], policies: Sequence[str]) -> None:
    ns = sorted({row["n"] for row in rows})
    shown = [policy for policy in policies if any(row["policy"] == policy for row in rows)]
    for place, policy in enumerate(shown):
        mine = sorted((r for r in rows if r["policy"] == policy), key=lambda r: r["n"])
        # side by side, as intervals overlap
        at = [r["n"] * 2 ** (0.09 * (place - (len(shown) - 1) / 2)) for r in mine]
        spread = [[r["value"] - r["low"] for r in mine], [r["high"] - r["value"] for r in mine]]
        color = MORE[policies.index(policy) % len(MORE)]
        axes.errorbar(at, [r["value"] for r in mine], spread, fmt="o", color=color, label=policy)
    for row in rows:
        edges = [row["n"] / 2**0.3, row["n"] * 2**0.3]
        axes.plot(edges, [row["dense"]] * 2, color=INK, lw=1.5, label="dense")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ns, [tokens(n) for n in ns])
    axes.minorticks_off()
    axes.grid(True, axis="y", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=10, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
