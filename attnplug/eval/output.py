"""What a study leaves behind: rows.json, tables.md and heatmap.png, beside its samples.jsonl."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from attnplug import files
from attnplug.eval.rows import Row
from attnplug.eval.runner import STOCK, Outcome
from attnplug.eval.served import ALL

BINS = tuple(f"{i / 10:.1f}" for i in range(10))
MISSING = "-"
COVERED = f"{ALL} (budget covers)"


def write_outputs(rows: Sequence[Row], outcome: Outcome, folder: Path) -> list[Path]:
    """Write the rows (the quality format that `bench/report.py` reads), the Markdown tables and,
    where answers have depths, the heat map. Returns what was written."""
    files.make_folder(folder)
    written = [folder / "rows.json", folder / "tables.md"]
    facts = {"rows": list(rows), "left_out": outcome.left_out, "stopped": outcome.stopped}
    files.write_text(written[0], json.dumps(facts, indent=1) + "\n")
    files.write_text(written[1], markdown(rows, outcome))
    if any(row.get("depths") for row in rows):
        written.append(folder / "heatmap.png")
        draw_heatmap(rows, written[-1])
    return written


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("task", lambda row: row["task"]),
    ("tokens", lambda row: f"{row['n']:,}"),
    ("trials", lambda row: str(row["trials"])),
    ("policy", lambda row: row["policy"]),
    ("served by", lambda row: _served(row)),
    ("keys a step", lambda row: _keys(row)),
    ("bytes a step", lambda row: _bytes(row)),
    ("drafts accepted", lambda row: f"{row['accepted']:.2f}" if "accepted" in row else MISSING),
    ("dense", lambda row: f"{row['dense']:.3g}"),
    ("value (95% interval)", lambda row: _span(row, "value", "low", "high")),
    ("policy - dense", lambda row: _span(row, "diff", "diff_low", "diff_high")),
    ("dense only / policy only", lambda row: _discordant(row)),
    ("McNemar p", lambda row: f"{row['p_value']:.2g}" if _paired(row) else MISSING),
)

SHOWN = (
    *("task", "tokens", "policy", "served by", "keys a step", "bytes a step"),
    *("dense", "value (95% interval)"),
)


def _served(row: Row) -> str:
    """Who served the prefill and the steps: "momo, then gather", or one name for both."""
    if row["policy"] == STOCK:
        return MISSING
    by = [row.get("served", {}).get(phase) for phase in ("prefill", "decode")]
    return ", then ".join(dict.fromkeys(filter(None, by))) or MISSING


def _keys(row: Row) -> str:
    """The most keys that a step reads; "all" is dense, and a method whose budget covers a prompt,
    which its row then says nothing about, is marked."""
    decode, keys = _decoder(row), row.get("keys")
    if decode == "dense":
        return ALL
    if decode is None or keys is None:
        return MISSING
    return COVERED if keys == ALL else f"{keys:,}"


def _bytes(row: Row) -> str:
    """The bytes that a step reads in layers that keep the whole context."""
    if _decoder(row) is None or row.get("bytes") is None:
        return MISSING
    return f"{row['bytes'] / 1e6:,.3g} MB"


def _decoder(row: Row) -> str | None:
    """The method that served the steps, None where none came."""
    return "dense" if row["policy"] == STOCK else row.get("served", {}).get("decode")


def _paired(row: Row) -> bool:
    return row["policy"] != STOCK and "p_value" in row


def _span(row: Row, value: str, low: str, high: str) -> str:
    if value not in row or (value == "diff" and row["policy"] == STOCK):
        return MISSING
    return f"{row[value]:.3g} ({row[low]:.3g} to {row[high]:.3g})"


def _discordant(row: Row) -> str:
    return f"{row['dense_only']} / {row['policy_only']}" if _paired(row) else MISSING


def result_table(rows: Sequence[Row]) -> Table:
    """The rows as a rich table, without the columns that a terminal is too narrow for."""
    table = Table(title=rows[0]["model"] if rows else "no complete pair of samples")
    columns = [column for column in COLUMNS if column[0] in SHOWN]
    for name, _ in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(show(row) for _, show in columns))
    return table


def markdown(rows: Sequence[Row], outcome: Outcome) -> str:
    """Tables by length and task, and by depth; then what was left out."""
    parts = [f"# {rows[0]['model']}" if rows else "# No complete pair of samples"]
    for n in sorted({row["n"] for row in rows}):
        parts += [f"## {n:,} tokens", _markdown_table(COLUMNS, [r for r in rows if r["n"] == n])]
    deep = [row for row in rows if row.get("depths")]
    if deep:
        columns: list[tuple[str, Callable[[Row], str]]] = [*COLUMNS[:2], COLUMNS[3]]
        columns += [(name, lambda row, name=name: _share(row, name)) for name in BINS]
        title = "## By depth\n\nAnswers found of answers asked for, by tenth of the prompt."
        parts += [title, _markdown_table(columns, deep)]
    if outcome.left_out:
        reasons = [f"- {cell}: {reason}" for cell, reason in outcome.left_out.items()]
        parts += ["## Left out", "\n".join(reasons)]
    if outcome.stopped:
        parts.append("Stopped at the time limit; the same command goes on from here.")
    return "\n\n".join(parts) + "\n"


def _share(row: Row, name: str) -> str:
    found, asked = row["depths"].get(name, (0, 0))
    return f"{found}/{asked}" if asked else MISSING


def _markdown_table(
    columns: Sequence[tuple[str, Callable[[Row], str]]], rows: Sequence[Row]
) -> str:
    lines = ["| " + " | ".join(name for name, _ in columns) + " |", "| --- " * len(columns) + "|"]
    lines += ["| " + " | ".join(show(row) for _, show in columns) + " |" for row in rows]
    return "\n".join(lines)


def draw_heatmap(rows: Sequence[Row], path: Path) -> None:
    """Length across, depth down, the share of answers found as colour and number; a panel for each
    task and policy."""
    from matplotlib.figure import Figure

    deep = [row for row in rows if row.get("depths")]
    tasks = list(dict.fromkeys(row["task"] for row in deep))
    policies = list(dict.fromkeys(row["policy"] for row in deep))
    lengths = sorted({row["n"] for row in deep})
    # Wide enough for the policy's text above a panel of one length.
    size = (1.6 + max(2.4, 0.62 * len(lengths) + 0.4) * len(policies), 0.7 + 2.7 * len(tasks))
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    panels = figure.subplots(len(tasks), len(policies), squeeze=False, sharex=True, sharey=True)
    image = None
    for line, task in enumerate(tasks):
        for column, policy in enumerate(policies):
            axes = panels[line][column]
            mine = {r["n"]: r for r in deep if (r["task"], r["policy"]) == (task, policy)}
            image = _panel(axes, mine, lengths)
            if line == 0:
                axes.set_title(_wrapped(policy), fontsize=8)
            if column == 0:
                axes.set_ylabel(f"{task}\ndepth")
            if line == len(tasks) - 1:
                axes.set_xlabel("tokens")
    assert image is not None  # the caller checked that some row has depths
    figure.colorbar(image, ax=panels, label="share of answers found", shrink=0.8)
    figure.suptitle(deep[0]["model"], fontsize=10)
    files.write_figure(path, figure)


def _panel(axes: Any, rows: dict[int, Row], lengths: Sequence[int]) -> Any:
    grid = [[float("nan")] * len(lengths) for _ in BINS]
    for x, n in enumerate(lengths):
        for y, name in enumerate(BINS):
            found, asked = rows[n]["depths"].get(name, (0, 0)) if n in rows else (0, 0)
            if asked:
                grid[y][x] = found / asked
                colour = "white" if found / asked < 0.55 else "black"
                text = f"{found}/{asked}"
                axes.text(x, y, text, ha="center", va="center", fontsize=6, color=colour)
    axes.set_facecolor("#e4e7ec")  # no sample there
    axes.set_xticks(range(len(lengths)), [_short(n) for n in lengths], fontsize=7)
    axes.set_yticks(range(0, 10, 2), BINS[::2], fontsize=7)
    return axes.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def _wrapped(policy: str, width: int = 26) -> str:
    lines = [""]
    for word in policy.split(" "):
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
