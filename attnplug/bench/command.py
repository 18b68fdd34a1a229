"""What stands behind `attnplug bench --quick`: the layer's shape, the run, its table and files."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from attnplug import files
from attnplug.bench.quick import DECODES, PLANS, PREFILLS, SHORTEST, Heads, Plan, measure
from attnplug.bench.rows import Row
from attnplug.errors import ArgumentError, first_line
from attnplug.extras import require
from attnplug.models.layers import config_heads
from attnplug.models.pretrained import damaged, text_config
from attnplug.policies import methods
from attnplug.policies.crossover import NEVER, DenseBelow


def heads_of(model: str | None) -> Heads:
    """A model's heads by its config alone; Qwen2.5-7B's for None. Raises ArgumentError where there
    is no config, WeightsUnavailableError for a named model that cannot be had."""
    if model is None:
        return Heads()
    try:
        return Heads(*config_heads(text_config(model)))
    except damaged() as error:
        raise ArgumentError(f"bench: {model!r} has no config: {first_line(error)}") from error


def problem(device: str, *, quick: bool = True) -> str:
    """Why this cannot be measured here, "" if it can."""
    if not quick:
        return "give --quick; the whole benches are bench/ of attnplug's repository"
    if device not in PLANS:
        return f"device is {device!r}, needs {' or '.join(PLANS)}"
    if device == "cuda" and not torch.cuda.is_available():
        return "torch sees no GPU here; --device cpu times the ops' references at short lengths"
    return ""


def run(
    heads: Heads,
    device: str,
    folder: Path,
    console: Console,
    lengths: Sequence[int] | None = None,
) -> list[Row]:
    """Measure, write `rows.json` and `speed.png` into `folder`, show the table. Raises
    MissingPackageError before it measures."""
    require("plot", "attnplug bench")
    if lengths and min(lengths) < SHORTEST:
        raise ArgumentError(f"lengths is {min(lengths)}, needs at least {SHORTEST} tokens")
    plan = PLANS[device]
    if lengths:
        plan = dataclasses.replace(plan, decode=tuple(lengths), prefill=tuple(lengths))
    left_out: list[str] = []

    with console.status("compiling and measuring") as status:
        rows = list(measure(heads, plan, status.update, left_out.append))
    files.make_folder(folder)
    written = [folder / "rows.json", folder / "speed.png"]
    files.write_text(written[0], json.dumps({"rows": rows}, indent=1) + "\n")
    draw(rows, plan, written[1])
    console.print(table(rows, plan))
    for line in [*left_out, *crossovers(heads, device)]:
        console.print(line, highlight=False, markup=False)
    console.print(f"wrote {', '.join(map(str, written))}", highlight=False, markup=False)
    return rows


def crossovers(heads: Heads, device: str) -> list[str]:
    """From which length on each method serves such heads here by default, and where that comes
    from, a line each: what `apply` reads, the file of `attnplug tune` too."""
    shape, found = heads.shape(device), []
    for name in (*DECODES, *PREFILLS):
        method = methods()[name]().on_this_machine(shape)
        if isinstance(method, DenseBelow):
            tokens = method.crossover(shape.device)
            serves = "at no length" if tokens >= NEVER else f"from {tokens:,} tokens on"
            origin = method.origin(shape.device) or ", by default"
            found.append(f"{name} serves {serves}{origin}")
    return found


def title(rows: Sequence[Row], plan: Plan) -> str:
    """What the numbers are of: one layer, its heads, and the machine."""
    if not rows:
        return "nothing fits this device's memory"
    first = rows[0]
    shape = f"{first['heads_q']}/{first['heads_kv']}x{first['head_dim']} {first['dtype']}"
    where = first["gpu"] if plan.device == "cuda" else "CPU, the ops' references, no GPU kernel"
    return f"one layer, {shape}, {where}"


def table(rows: Sequence[Row], plan: Plan) -> Table:
    """Median times; `ratio` above 1 is faster than the peer."""
    shown = Table(title=title(rows, plan), caption="medians; ratio above 1: faster than the peer")
    for name in ("phase", "tokens", "policy"):
        shown.add_column(name, overflow="fold")
    for name in ("time", "peer", "ratio"):
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(
            _phase(row),
            f"{row['n']:,}",
            row["policy"],
            _time(row["p50_us"]),
            f"{row['peer']} {_time(row['peer_p50_us'])}",
            f"{row['ratio']:.2f}",
        )
    return shown


def _phase(row: Row) -> str:
    return "prefill" if row["op"] in PREFILLS else "decode"


def _time(us: float) -> str:
    return f"{us / 1000:.3g} ms" if us >= 1000 else f"{us:.3g} us"


def draw(rows: Sequence[Row], plan: Plan, path: Path) -> None:
    """A panel each for decode and prefill: time against tokens, both axes logarithmic. Raises
    MissingPackageError."""
    require("plot", "the plot of attnplug bench")
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure = Figure(figsize=(9, 4.6), dpi=120, layout="constrained")
    for axes, phase in zip(figure.subplots(1, 2), ("decode", "prefill"), strict=True):
        mine = [row for row in rows if _phase(row) == phase]
        peers: dict[int, list[float]] = {}
        for row in mine:
            peers.setdefault(row["n"], []).append(row["peer_p50_us"])
        if mine:
            lines = sorted(peers.items())
            middles = [sorted(found)[len(found) // 2] for _, found in lines]
            style = dict(color="#7a7a7a", linestyle="--", marker="s", markersize=4)
            axes.plot([n for n, _ in lines], middles, label=f"torch: {mine[0]['peer']}", **style)
        for policy in dict.fromkeys(row["policy"] for row in mine):
            points = [(row["n"], row["p50_us"]) for row in mine if row["policy"] == policy]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=policy)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="time, one layer")
        axes.set_title(phase, fontsize=10)
        axes.set_xticks(sorted(peers), [f"{n:,}" for n in sorted(peers)], fontsize=8)
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda us, _: _time(us)))
        axes.grid(color="#dddddd")
        if mine:
            axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    figure.suptitle(title(rows, plan), fontsize=10)
    files.write_figure(path, figure)
