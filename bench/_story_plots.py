"""The three plots of the page of results: what is kept against speed, speed against length, memory
against length. Each is of rows alone; one without rows is not drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from _choice import is_step, memory_of, speed_of
from _plots import COLORS, GRID, INK, PEER, PEERS, Row, bare, heads, natural, tokens
from _served import served
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MultipleLocator, NullLocator

QUALITY, SPEED, MEMORY = "story-quality.png", "story-speed.png", "story-memory.png"
CAPTIONS = {
    QUALITY: "What a policy keeps against how fast it is",
    SPEED: "How much faster than dense, by length",
    MEMORY: "What a cache takes of the GPU, by length",
}
DECODES = ("gather", "gvr", "sketch", "certified")
COLOR = dict(zip(("momo", *DECODES), COLORS, strict=False)) | {"dense": INK}
# Quality and speed are of one length, the longest that the model's texts have.
MODEL, MODEL_NAME, MODEL_TOKENS = "gemma3-270m", "Gemma 3 270M", 32768
LENGTHS = (8192, 16384, 32768, 131072, 524288, 1 << 20)
TIMES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)  # marked where they are shown
# what a default's row and those of its other options share, to stand in one panel
KIND = (
    "op", "case", "n", "batch", "heads_q", "heads_kv", "head_dim", "dtype", "peer", "gpu"
)  # fmt: skip
ASKED = {"certified": "certified(min_tokens=0)"}  # its default serves no cache
REASON = {"dense": "dense (rounding\nin another order)"}  # why a name's point is where it is
Named = tuple[float, float, str, str]  # x and y of a point, its name, its color


class Panel(NamedTuple):
    """What one half of the plot of quality shows: by policy the row of its time, and of what it
    keeps; `whole` says what 1 is, `what` what the height is."""

    title: str
    what: str
    whole: str
    timed: dict[str, Row]
    kept: dict[str, Row]


def draw_story(timing: Sequence[Row], quality: Sequence[Row]) -> dict[str, Figure]:
    """File name: figure. Speeds are those of lengths at which a policy serves."""
    figures: dict[str, Figure] = {}
    shown = served(timing)
    panels = [panel for panel in quality_panels(shown, quality) if panel.timed]
    if panels:
        figures[QUALITY] = draw_quality_against_speed(panels)
    lines = speed_lines(shown)
    if lines:
        figures[SPEED] = draw_speed(lines)
    shares = memory_lines(timing)
    if shares:
        figures[MEMORY] = draw_memory(shares, [r for r in timing if is_step(r)])
    return figures


def pictures(timing: Sequence[Row], quality: Sequence[Row], folder: str) -> str:
    """The plots that rows allow, in Markdown, under their captions."""
    drawn = draw_story(timing, quality)
    shown = [f"### {CAPTIONS[name]}\n\n![{CAPTIONS[name]}]({folder}/{name})" for name in drawn]
    return "\n\n".join(shown) or "Not measured yet."


def quality_panels(timing: Sequence[Row], quality: Sequence[Row]) -> list[Panel]:
    """Decode and prefill: the policies that have both a time and a score. Of dense, whose score in
    decode is what rounding in another order makes, the time is 1."""
    asked = (
        ("decode", "share of next tokens that the model's own attention chooses too",
         "the model's own attention", "agreement", DECODES),
        ("prefill", "share of dense's attention that is kept", "all of dense's attention",
         "captured-mass", ("momo",)),
    )  # fmt: skip
    panels = []
    for title, what, whole, task, names in asked:
        timed, kept = timed_alike(timing, names), _quality(quality, task)
        timed = {policy: timed[policy] for policy in sorted(timed, key=natural) if policy in kept}
        kept = {policy: kept[policy] for policy in (*timed, "dense") if policy in kept}
        panels.append(Panel(title, what, whole, timed, kept))
    return panels


def timed_alike(timing: Sequence[Row], names: Iterable[str]) -> dict[str, Row]:
    """By policy the row of its speed at MODEL_TOKENS: of each default, and of its other options
    where they were timed in the same case, on the same shape and beside the same peer."""
    found: dict[str, Row] = {}
    for name in names:
        own = speed_row(timing, name, MODEL_TOKENS)
        for row in timing if own else ():
            policy = bare(row.get("policy") or "")
            if all(row[key] == own[key] for key in KIND) and policy.startswith(name):
                slowest = found.get(policy, row)
                found[policy] = min(slowest, row, key=lambda row: row["ratio"])
    return found


def speed_row(timing: Sequence[Row], policy: str, n: int) -> Row | None:
    """The row whose ratio the table "which method when" shows."""
    ratio = speed_of(timing, policy, n)
    rows = (row for row in timing if (row.get("policy"), row["n"]) == (policy, n))
    return next((row for row in rows if ratio and row["ratio"] == ratio), None)


def _quality(quality: Sequence[Row], task: str) -> dict[str, Row]:
    """By policy its row of the model's longest texts: of the run that all defaults share, else the
    study's with most samples."""
    found: dict[str, Row] = {}
    for row in quality:
        if (row["task"], row["model"], row["n"]) == (task, MODEL, MODEL_TOKENS):
            found[row["policy"]] = max(found.get(row["policy"], row), row, key=_weight)
    return found


def _weight(row: Row) -> tuple[bool, int]:
    return not row.get("study"), row["trials"]


def draw_quality_against_speed(panels: Sequence[Panel]) -> Figure:
    """One point a policy and options with its interval, and its name beside it; dense's speed and
    what it would be to keep all are the cross-hair."""
    figure = Figure(figsize=(6.8 * len(panels), 5.2), layout="constrained", facecolor="white")
    for axes, panel in zip(_side_by_side(figure, len(panels)), panels, strict=True):
        points: list[Named] = []
        for policy, row in panel.kept.items():
            speed = panel.timed[policy]["ratio"] if policy in panel.timed else 1.0
            color = COLOR[policy.partition("(")[0]]
            spread = [[row["value"] - row["low"]], [row["high"] - row["value"]]]
            axes.errorbar(speed, row["value"], spread, fmt="o", ms=8, color=color, mec=color)
            points.append((speed, row["value"], REASON.get(policy, policy), color))
        _cross_hair(axes, panel)
        _name(axes, points)
        rows = list(panel.timed.values())
        axes.set_title(f"{panel.title}: {panel.what}", loc="left", fontsize=11, color=INK)
        axes.set_ylabel(f"mean of {_texts(panel.kept.values())} of {tokens(MODEL_TOKENS)} tokens")
        axes.set_xlabel(
            f"times as fast as {_dense(rows)}: one layer, {_shape(rows)}, "
            f"{tokens(MODEL_TOKENS)} tokens"
        )
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        _plain(axes)
    figure.get_layout_engine().set(h_pad=0.1)
    figure.suptitle(
        f"quality of {MODEL_NAME} against one layer's speed, at {tokens(MODEL_TOKENS)} tokens\n"
        "(bars: intervals of 0.95, where wider than a dot), "
        f"{_machines(row for panel in panels for row in panel.timed.values())}",
        fontsize=12,
    )
    return figure


def _cross_hair(axes: Axes, panel: Panel) -> None:
    """The lines of dense's speed and of all that can be kept, named, with room for names."""
    axes.axhline(1, color=INK, lw=1)
    axes.axvline(1, color=INK, lw=1)
    low = min(row["low"] for row in panel.kept.values())
    most = max(row["ratio"] for row in panel.timed.values())
    axes.set_xlim(0, 1.15 * max(most, 1))
    axes.set_ylim(1 - 1.08 * (1 - low), 1 + 0.12 * (1 - low))
    told = dict(textcoords="offset points", fontsize=9.5, color=INK)
    axes.annotate(panel.whole, (axes.get_xlim()[1], 1), (-4, 4), ha="right", **told)
    dense = _dense(panel.timed.values())
    axes.annotate(
        dense, (1, axes.get_ylim()[0]), (4, 6), rotation=90, ha="left", va="bottom", **told
    )


def _texts(rows: Iterable[Row]) -> str:
    """How many texts the scores are of."""
    trials = sorted({row["trials"] for row in rows})
    return f"{' to '.join(str(number) for number in dict.fromkeys((trials[0], trials[-1])))} texts"


def speed_lines(timing: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """Panel: what a line is of: its rows by length, whose ratio is times as fast as dense."""
    decode = {policy: _by_length(timing, policy) for policy in DECODES}
    whole = [row for row in timing if (row["op"], row["case"]) == ("momo", "e2e-ttft")]
    measured = {bare(row["policy"]) for row in whole}
    prefill: dict[str, list[Row]] = {}
    for policy in sorted(measured & {"momo"} or measured):  # another one until the default has rows
        first = [row for row in whole if bare(row["policy"]) == policy]
        prefill[f"{policy}, one layer"] = _by_length(timing, policy)
        prefill[f"{policy}, time to first token"] = sorted(first, key=lambda row: row["n"])
    panels = {"decode: one layer's step": decode, "prefill": prefill}
    panels = {
        title: {name: rows for name, rows in lines.items() if len(rows) > 1}
        for title, lines in panels.items()
    }
    return {title: lines for title, lines in panels.items() if lines}


def _by_length(timing: Sequence[Row], policy: str) -> list[Row]:
    return [row for n in LENGTHS if (row := speed_row(timing, policy, n))]


def draw_speed(panels: Mapping[str, Mapping[str, Sequence[Row]]]) -> Figure:
    """A line a policy with its last value at its end. Rows of another commit than most of a line's
    are hollow, and lines to them dotted."""
    figure = Figure(figsize=(7.4 * len(panels), 5), layout="constrained", facecolor="white")
    for axes, (title, lines) in zip(
        _side_by_side(figure, len(panels)), panels.items(), strict=True
    ):
        every = [row for rows in lines.values() for row in rows]
        axes.axhline(1, color=INK, lw=1.2)
        for number, (name, rows) in enumerate(lines.items()):
            second = number > 0 and "," in name
            _plot_rows(axes, rows, _color(name), "s--" if second else "o-")
        _times(axes, [row["ratio"] for row in every])
        _lengths(axes, sorted({row["n"] for row in every}))
        longest = max(row["n"] for row in every)
        ends = [_end(name, rows) for name, rows in lines.items()]
        _name(axes, [*ends, (longest, 1.0, "dense", INK)], at_end=True)
        axes.set_ylabel("times as fast as dense")
        axes.set_title(
            f"{title}, {_shape(every)}, {_machines(every)}", loc="left", fontsize=11, color=INK
        )
        _plain(axes)
        if any(len({row["commit"] for row in rows}) > 1 for rows in lines.values()):
            axes.legend(handles=[_hollow()], fontsize=9.5, frameon=False, loc="upper left")
    return figure


def _plot_rows(axes: Axes, rows: Sequence[Row], color: str, style: str) -> None:
    """In this style through the rows of the commit that has most of them, dotted to the others."""
    most = Counter(row["commit"] for row in rows).most_common(1)[0][0]
    mine = [row for row in rows if row["commit"] == most]
    others = [row for row in rows if row["commit"] != most]
    marker, line = style[0], style[1:]
    for shown, how in ((rows if others else [], ":"), (mine, line)):
        axes.plot(*_points(shown), how, color=color, lw=2)
    for shown, fill in ((others, "white"), (mine, color)):
        axes.plot(*_points(shown), marker, color=color, mfc=fill, mew=1.5, ms=6, zorder=3)


def _points(rows: Sequence[Row]) -> tuple[list[int], list[float]]:
    return [row["n"] for row in rows], [row["ratio"] for row in rows]


def _hollow() -> Line2D:
    label = "rows of other commits, same options"
    return Line2D([], [], color=PEER, ls=":", marker="o", mfc="white", label=label)


def _end(name: str, rows: Sequence[Row]) -> Named:
    """A line's last point, and what stands beside it: the peer too, where lines have their own."""
    last = rows[-1]
    peer = f"\nbeside {_peers(rows)}".replace(", ", ",\n") if "," in name else ""
    return last["n"], last["ratio"], f"{name} {last['ratio']:.2f}x{peer}", _color(name)


def _color(name: str) -> str:
    return COLOR.get(name.partition(",")[0].partition("(")[0], COLORS[0])


def memory_lines(timing: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Policy: one layer's cache as a share of dense's, by length."""
    dense = {n: size for n in LENGTHS if (size := memory_of(timing, "dense", n))}
    found = {
        policy: {
            n: size / whole for n, whole in dense.items() if (size := memory_of(timing, policy, n))
        }
        for policy in ("dense", *DECODES)
    }
    return {policy: line for policy, line in found.items() if len(line) > 1}


def draw_memory(lines: Mapping[str, Mapping[int, float]], steps: Sequence[Row]) -> Figure:
    """A line a policy, dense's at 100%, with its last share at its end. Below each length stand the
    bytes of dense's cache."""
    figure = Figure(figsize=(8.6, 5), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for policy, line in lines.items():
        style = "-" if policy == "dense" else "o-"
        axes.plot(list(line), list(line.values()), style, color=COLOR[policy], lw=2, ms=6)
    ns = sorted({n for line in lines.values() for n in line})
    _lengths(axes, ns, lambda n: f"{tokens(n)}\n{_size(memory_of(steps, 'dense', int(n)) or 0)}")
    axes.set_xlabel("tokens; below, what dense's cache takes of the GPU")
    axes.set_ylim(0, 1.08 * max(share for line in lines.values() for share in line.values()))
    axes.yaxis.set_major_locator(MultipleLocator(0.25))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    axes.set_ylabel("share of dense's cache")
    ends = [
        (
            max(line),
            line[max(line)],
            f"{ASKED.get(policy, policy)} {line[max(line)]:.0%}",
            COLOR[policy],
        )
        for policy, line in lines.items()
    ]
    _name(axes, ends, at_end=True)
    kind = sorted(
        {f"{row['heads_kv']} KV heads of {row['head_dim']}, {row['dtype']}" for row in steps}
    )
    axes.set_title(
        "GPU memory of one layer's cache beside dense's (what is in host memory is not counted)\n"
        f"{', '.join(kind)}, {_machines(steps)}", loc="left", fontsize=11, color=INK,
    )  # fmt: skip
    _plain(axes)
    return figure


def _size(size: float) -> str:
    unit, name = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{size / unit:.3g} {name}"


def _peers(rows: Iterable[Row]) -> str:
    names = sorted({PEERS.get(row["peer"], row["peer"]) for row in rows})
    return " or ".join(name.removeprefix(f"{names[0]}, ") for name in names)


def _dense(rows: Iterable[Row]) -> str:
    """What dense is here: attnplug's own, or the kernel beside which the rows were timed."""
    return "dense" if (peers := _peers(rows)) == "dense" else f"dense ({peers})"


def _machines(rows: Iterable[Row]) -> str:
    return " and ".join(sorted({row["gpu"] for row in rows}))


def _shape(rows: Iterable[Row]) -> str:
    return " and ".join(sorted({f"{heads(row)} heads of {row['head_dim']}" for row in rows}))


def _side_by_side(figure: Figure, panels: int) -> Sequence[Axes]:
    return figure.subplots(1, panels, squeeze=False)[0]


def _times(axes: Axes, ratios: Sequence[float]) -> None:
    """A log axis of ratios, with a few marks that read as such, and room above and below."""
    axes.set_yscale("log")
    axes.set_ylim(min(*ratios, 1) / 1.8, max(*ratios, 1) * 1.8)
    axes.yaxis.set_major_locator(FixedLocator(list(TIMES)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))


def _lengths(axes: Axes, ns: Sequence[int], told: Callable[[float], str] = tokens) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(ns[0] / 1.25, ns[-1] * 1.25)
    axes.xaxis.set_major_locator(FixedLocator(list(ns)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: told(n)))
    axes.set_xlabel("tokens")


def _name(axes: Axes, points: Sequence[Named], *, at_end: bool = False) -> None:
    """Write each point's name beside it, on the side that has room, or (`at_end`) right of the
    axes; names are apart, and a thin line leads to one that had to move. Limits are set before."""
    sides: dict[float, list[tuple[float, float, Named]]] = {}
    for point in points:
        x, y = axes.transLimits.transform(axes.transScale.transform(point[:2]))
        sides.setdefault(1.0 if at_end or x < 0.6 else -1.0, []).append((y, x, point))
    for side, placed in sides.items():
        placed.sort(key=lambda entry: entry[0])
        lines = [point[2].count("\n") + 1 for *_, point in placed]
        heights = spread([y for y, *_ in placed], [0.055 * number for number in lines])
        for height, (_, x, (*where, name, color)) in zip(heights, placed, strict=True):
            axes.annotate(
                name, where, (1.03 if at_end else x + side * 0.025, height),
                textcoords="axes fraction", ha="left" if side > 0 else "right", va="center",
                fontsize=10, color=color, annotation_clip=False,
                arrowprops=dict(arrowstyle="-", color=color, lw=0.7, shrinkA=1, shrinkB=4),
            )  # fmt: skip


def spread(middles: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Where things of these sizes stand, one above the other from the first to the last, so that
    none covers another and they are as near to their middles, which ascend, as that allows."""
    below = [sum(sizes[:place]) + sizes[place] / 2 for place in range(len(sizes))]
    groups: list[list[float]] = []
    for middle, filled in zip(middles, below, strict=True):
        groups.append([middle - filled])
        while len(groups) > 1 and fmean(groups[-2]) > fmean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    starts = [fmean(group) for group in groups for _ in group]
    return [start + filled for start, filled in zip(starts, below, strict=True)]


def _plain(axes: Axes) -> None:
    axes.grid(True, color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=10, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
