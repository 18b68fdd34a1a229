"""The Markdown tables of bench/report.py: a row a line, and scores, a column a length or a task."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from _plots import Row, tokens
from studies import FLOOR

from attnplug.eval.runner import STOCK
from attnplug.eval.tasks import TASKS

Column = tuple[str, Callable[[Row], str]]

OPEN_ROWS = 8  # results.md folds a longer table
# What of a row's setting is said once above a table whose rows share it, and how.
SETTINGS = {
    "op": "{}",
    "case": "{}",
    "policy": "{}",
    "options": "{}",
    "batch": "batch {}",
    "heads": "{} heads",
    "D": "D {}",
    "dtype": "{}",
    "GPU": "{}",
    "model": "{}",
    "trials": "{} trials",
}


BEYOND = "beyond the model"


def beyond_model(row: Row) -> bool:
    """Whether the model's own attention answers so little of the row's task that what a policy
    scores says nothing about the policy."""
    return row["task"] in TASKS and row["dense"] < FLOOR


def table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(title for title, _ in columns) + " |"]
    lines.append("|" + "|".join(" --- " for _ in columns) + "|")
    lines += ["| " + " | ".join(show(row) for _, show in columns) + " |" for row in rows]
    return "\n".join(lines)


def constants(rows: Sequence[Row], columns: Sequence[Column]) -> tuple[str, list[Column]]:
    """What all rows share of their setting, in words, and the columns in which they differ."""
    told, kept = [], []
    for title, show in columns:
        values = {show(row) for row in rows}
        if title in SETTINGS and len(values) == 1:
            told += [SETTINGS[title].format(value) for value in values if value]
        elif values != {""}:
            kept.append((title, show))
    return f"Setting: {', '.join(told)}." if told else "", kept


def folded(rows: Sequence[Row], columns: Sequence[Column], name: str) -> list[str]:
    """What all rows share, and their table, behind a line to click on where it is long."""
    shared, columns = constants(rows, columns)
    parts = [shared] if shared else []
    if len(rows) <= OPEN_ROWS:
        return [*parts, table(rows, columns)]
    summary = f'<details markdown="1"><summary>{len(rows)} {name}</summary>'
    return [*parts, summary, table(rows, columns), "</details>"]


def scores(rows: Sequence[Row], show: str, across: str, floor: bool = False) -> str:
    """A Markdown table with a line for each model, task and policy, and a column for each length
    (`across` "n"), or with a column for each task and a line for each of the rest ("task"). `show`
    is a value whose interval is `low` to `high` or `SHOW_low` to `SHOW_high`. `floor`: a cell says
    so where the model's own attention scores below FLOOR, in place of a value; that attention's own
    value stands."""
    if across not in ("n", "task"):
        raise SystemExit(f"<!-- scores -->: across={across} is neither n nor task")
    keys = [key for key in ("model", "n", "task", "policy") if key != across]
    heads = sorted({row[across] for row in rows})
    lines: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        line = lines.setdefault(tuple(row[key] for key in keys), {})
        if row[across] in line:
            raise SystemExit(
                f"<!-- scores -->: two rows for {row['task']} of {row['policy']}: "
                "trials= or study= tells them apart"
            )
        line[row[across]] = row
    low, high = ("low", "high") if show == "value" else (f"{show}_low", f"{show}_high")

    shown = [row for row in rows if show in row]
    usual = {head: _usual(row["trials"] for row in shown if row[across] == head) for head in heads}

    def cell(row: Row | None) -> str:
        if row is None or show not in row:
            return ""
        if floor and row["policy"] != STOCK and beyond_model(row):
            return BEYOND
        trials = "" if row["trials"] == usual[row[across]] else f", {row['trials']} samples"
        value, *span = (0.0 if abs(row[key]) < 1e-12 else row[key] for key in (show, low, high))
        digits = 3 if abs(value) < 10 else 4  # of a perplexity, the second decimal
        return f"{value:.{digits}g} ({span[0]:.{digits}g} to {span[1]:.{digits}g}){trials}"

    def name(line: Row, key: str) -> str:
        shown = {"policy": f"`{line[key]}`", "n": tokens(line["n"]) if "n" in line else ""}
        return shown.get(key, line[key])

    whole = [dict(zip(keys, values, strict=True)) | {"": line} for values, line in lines.items()]
    columns: list[Column] = [
        (key, lambda line, key=key: name(line, key))
        for key in keys
        if len({line[key] for line in whole}) > 1 or key in ("task", "policy")
    ]
    if floor:  # a comparison of what users write
        columns.append(("served by", lambda line: _servers(line[""].values())))
    columns = [c for c in columns if c[0] != "policy" or len({x["policy"] for x in whole}) > 1]
    exceptions = any(row["trials"] != usual[row[across]] for row in shown)
    titles = {head: tokens(head) if across == "n" else head for head in heads}
    columns += [(titles[head], lambda line, head=head: cell(line[""].get(head))) for head in heads]
    told = [_samples(usual, titles, exceptions)]
    if floor and any(map(beyond_model, shown)):
        told.append(f"{BEYOND.capitalize()}: its own attention (`stock`) scores below {FLOOR}.")
    return f"{table(whole, columns)}\n\n{' '.join(told)}"


def _servers(rows: Iterable[Row]) -> str:
    """Of a line's rows, which are of one policy; of rows without steps where others have these, the
    others say it."""
    found = dict.fromkeys(filter(None, map(served_by, rows)))
    kept = [text for text in found if not any(other.startswith(f"{text}, ") for other in found)]
    return "; ".join(kept)


def served_by(row: Row) -> str:
    """Who served the layers that a policy can serve, prefill and steps."""
    by = [row.get("served", {}).get(phase, "") for phase in ("prefill", "decode")]
    own = [re.findall(r"(?:^|, )(?!sdpa|eager)([\w-]+)", text) for text in by]
    return ", then ".join(dict.fromkeys(" and ".join(names) for names in own if names))


def _usual(numbers: Iterable[int]) -> int:
    """The number that occurs most often; of equals the largest, 0 of none."""
    counts = Counter(numbers)
    return max(counts, key=lambda number: (counts[number], number), default=0)


def _samples(usual: dict[Any, int], titles: dict[Any, str], exceptions: bool) -> str:
    """The sentence under a table of scores: over how many samples a cell is."""
    most = _usual(number for number in usual.values() if number)
    columns: dict[int, list[str]] = {}
    for head, number in usual.items():
        if number not in (0, most):
            columns.setdefault(number, []).append(f"`{titles[head]}`")
    others = [f"{number} in {', '.join(heads)}" for number, heads in columns.items()]
    unless = ", unless it names another number" if exceptions else ""
    return f"Samples a cell{unless}: {'; '.join([str(most), *others])}."
