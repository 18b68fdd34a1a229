"""The three plots of the page of results: what is kept against speed, speed against length, memory
against length. Each is of rows alone; one without rows is not drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from _choice import memory_of, speed_of
from _plots import COLORS, GRID, INK, Row, bare, tokens
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

QUALITY, SPEED, MEMORY = "story-quality.png", "story-speed.png", "story-memory.png"
CAPTIONS = {
    QUALITY: "What a policy keeps against how fast it is",
    SPEED: "How much faster than dense, by length",
    MEMORY: "What a cache takes of the GPU, by length",
}
DECODES = ("gather", "gvr", "sketch", "certified")
COLOR = dict(zip(("momo", *DECODES), COLORS, strict=False)) | {"dense": INK}
MODEL, MODEL_NAME, MODEL_TOKENS = "gemma3-270m", "Gemma 3 270M", 32768
SPEED_AT = 131072
PEERS = ("dense", "cudnn", "fa3")  # the dense ones
LENGTHS = (8192, 32768, 131072, 524288, 1 << 20)
Points = dict[str, tuple[float, float]]  # policy: times as fast as dense, what it keeps


def draw_story(timing: Sequence[Row], quality: Sequence[Row]) -> dict[str, Figure]:
    """File name: figure."""
    figures: dict[str, Figure] = {}
    panels = {
        "decode: share of next tokens that dense chooses too": decode_points(timing, quality),
        "prefill: share of dense's attention that is kept": prefill_points(timing, quality),
    }
    panels = {title: points for title, points in panels.items() if points}
    if panels:
        figures[QUALITY] = draw_quality_against_speed(panels)
    lines = speed_lines(timing)
    if lines:
        figures[SPEED] = draw_speed(lines)
    sizes = memory_lines(timing)
    if sizes:
        figures[MEMORY] = draw_memory(sizes)
    return figures


def pictures(timing: Sequence[Row], quality: Sequence[Row], folder: str) -> str:
    """The plots that rows allow, in Markdown, under their captions."""
    drawn = draw_story(timing, quality)
    shown = [f"### {CAPTIONS[name]}\n\n![{CAPTIONS[name]}]({folder}/{name})" for name in drawn]
    return "\n\n".join(shown) or "Not measured yet."


def decode_points(timing: Sequence[Row], quality: Sequence[Row]) -> Points:
    """Of each policy and budget that has a step's time and its agreement with dense."""
    kept = _quality(quality, "agreement")
    return {
        policy: (ratio, kept[policy]["value"])
        for policy, ratio in _ratios(timing, ("step", "op"), (28, 4, 128)).items()
        if policy in kept and policy.partition("(")[0] in DECODES
    }


def prefill_points(timing: Sequence[Row], quality: Sequence[Row]) -> Points:
    kept = _quality(quality, "captured-mass")
    return {
        policy: (ratio, kept[policy]["value"])
        for policy, ratio in _ratios(timing, ("op",), (32, 8, 128)).items()
        if policy in kept and policy.startswith("momo")
    }


def _quality(quality: Sequence[Row], task: str) -> dict[str, Row]:
    """By policy the row with most samples, of the model's longest texts."""
    found: dict[str, Row] = {}
    for row in quality:
        if (row["task"], row["model"], row["n"]) == (task, MODEL, MODEL_TOKENS):
            best = found.get(row["policy"])
            if best is None or row["trials"] > best["trials"]:
                found[row["policy"]] = row
    return found


def _ratios(
    timing: Sequence[Row], cases: Sequence[str], shape: tuple[int, int, int]
) -> dict[str, float]:
    """Policy: times as fast as the fastest dense peer; of a step where there is one."""
    found: dict[str, float] = {}
    for case in cases:
        mine: dict[str, float] = {}
        for row in timing:
            heads = row["heads_q"], row["heads_kv"], row["head_dim"]
            asked = (row["case"], row["n"], row["batch"], heads) == (case, SPEED_AT, 1, shape)
            if asked and row["peer"] in PEERS and row.get("policy") and row["ratio"]:
                policy = bare(row["policy"])
                mine[policy] = min(row["ratio"], mine.get(policy, row["ratio"]))
        found = mine | found
    return found


def draw_quality_against_speed(panels: Mapping[str, Points]) -> Figure:
    """One point a policy and budget; dense is the cross-hair. A name stands in the legend."""
    figure = Figure(figsize=(6.4 * len(panels), 5.6), layout="constrained", facecolor="white")
    for axes, (title, points) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        axes.axhline(1, color=INK, lw=1)
        axes.axvline(1, color=INK, lw=1)
        markers: dict[str, int] = {}
        for policy, (speed, kept) in sorted(points.items()):
            name = policy.partition("(")[0]
            number = markers[name] = markers.get(name, -1) + 1
            axes.plot(
                speed, kept, "osD^vP*X"[number % 8], ms=9, color=COLOR[name],
                mec="white", mew=0.8, label=policy, ls="none",
            )  # fmt: skip
        axes.annotate("dense", (1, 1), (4, 4), textcoords="offset points", fontsize=10, color=INK)
        axes.set_title(title, loc="left", fontsize=11, color=INK)
        axes.set_xlabel(f"times as fast as dense, one layer, {tokens(SPEED_AT)} tokens")
        _plain(axes)
        axes.margins(0.12)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize=8.5, frameon=False)
    figure.suptitle(f"quality on {MODEL_NAME}, {tokens(MODEL_TOKENS)} tokens", fontsize=12)
    return figure


def speed_lines(timing: Sequence[Row]) -> dict[str, dict[str, dict[int, float]]]:
    """Panel: policy: times as fast as dense, by length."""
    decode = {
        policy: {n: r for n in LENGTHS if (r := speed_of(timing, policy, n))} for policy in DECODES
    }
    whole = [row for row in timing if (row["op"], row["case"]) == ("momo", "e2e-ttft")]
    measured = {bare(row["policy"]) for row in whole}
    prefill: dict[str, dict[int, float]] = {}
    for policy in sorted(measured & {"momo"} or measured):  # another one until the default has rows
        layer = {n: r for n in (*LENGTHS, 16384) if (r := speed_of(timing, policy, n))}
        first = {row["n"]: row["ratio"] for row in whole if bare(row["policy"]) == policy}
        prefill |= {f"{policy}, one layer": layer, f"{policy}, time to first token": first}
    panels = {"decode, one layer's step": decode, "prefill": prefill}
    panels = {
        title: {name: line for name, line in lines.items() if len(line) > 1}
        for title, lines in panels.items()
    }
    return {title: lines for title, lines in panels.items() if lines}


def draw_speed(panels: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Figure:
    figure = Figure(figsize=(6.4 * len(panels), 4.8), layout="constrained", facecolor="white")
    for axes, (title, lines) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        axes.axhline(1, color=INK, lw=1.2, label="dense")
        for number, (name, line) in enumerate(lines.items()):
            color = COLOR.get(name.partition(",")[0], COLORS[0])
            style = "o-" if number == 0 or "," not in name else "s--"
            points = zip(*sorted(line.items()), strict=True)
            axes.plot(*points, style, color=color, label=name, lw=2)
        _lengths(axes, sorted({n for line in lines.values() for n in line}))
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylabel("times as fast as dense")
        axes.set_title(title, loc="left", fontsize=11, color=INK)
        _plain(axes)
        axes.legend(fontsize=9.5, frameon=False, loc="upper left")
    return figure


def memory_lines(timing: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Policy: GiB of one layer's cache, by length."""
    found = {
        policy: {
            n: size / 2**30 for n in LENGTHS if (size := memory_of(timing, policy, n)) is not None
        }
        for policy in ("dense", *DECODES)
    }
    return {policy: line for policy, line in found.items() if len(line) > 1}


def draw_memory(lines: Mapping[str, Mapping[int, float]]) -> Figure:
    """Both axes linear: the lines part where it matters. Names stand at their ends, apart."""
    figure = Figure(figsize=(7.6, 4.8), layout="constrained", facecolor="white")
    axes = figure.subplots()
    ends: list[tuple[float, str]] = []
    for policy, line in lines.items():
        points = sorted(line.items())
        axes.plot(*zip(*points, strict=True), "o-", color=COLOR[policy], lw=2, ms=5)
        ends.append((points[-1][1], policy))
    top = max(size for size, _ in ends)
    longest = max(n for line in lines.values() for n in line)
    least = 0.0
    for size, policy in sorted(ends):
        least = max(size, least)
        axes.annotate(
            policy, (longest, least), (8, 0), textcoords="offset points", va="center",
            color=COLOR[policy], annotation_clip=False,
        )  # fmt: skip
        least += 0.055 * top
    axes.set(xlim=(0, longest), ylim=(0, 1.08 * top), xlabel="tokens", ylabel="GiB")
    axes.xaxis.set_major_locator(FixedLocator([n for n in LENGTHS if n >= 131072]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: tokens(n)))
    axes.set_title(
        "GPU memory of one layer's cache, 4 KV heads of 128, bf16", loc="left", fontsize=11,
        color=INK,
    )  # fmt: skip
    _plain(axes)
    return figure


def _lengths(axes: Axes, ns: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(ns)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: tokens(n)))
    axes.set_xlabel("tokens")


def _plain(axes: Axes) -> None:
    axes.grid(True, color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=10, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
