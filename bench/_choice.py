"""The table "which method when": what one needs, the default that serves it, and of that one string
what its answers keep, how fast it is and what it takes, from rows alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from _plots import Row, bare
from _served import is_served
from _tables import beyond_model

from attnplug.eval.tasks import TASKS

NEEDS = (
    ("exact attention", "dense"),
    ("the first token sooner, on long prompts", "momo"),
    ("decode at nearly constant cost", "gather"),
    ("decode that finds single tokens", "gvr"),
    ("the same, and nothing is dropped", "sketch"),
    ("half the cache's GPU memory, with proof", "certified(min_tokens=0)"),
)
LENGTHS = {32768: "32K", 131072: "128K", 1 << 20: "1M"}
MODELS = {
    "smollm2-135m": ("quality: SmolLM2-135M, 8K", 8192),
    "gemma3-270m": ("quality: Gemma 3 270M, 32K", 32768),
}
# Of the study as-written, whose rows are of the very string; a column where it has rows.
LONG_MODELS = {
    "gemma3-270m@64k": ("quality: Gemma 3 270M@64k, 64K", 65536),
    "gemma3-270m@128k": ("quality: Gemma 3 270M@128k, 128K", 131072),
}
MEMORY_AT = 131072
NONE, DENSE = "not yet", "runs dense"


def choice(timing: Sequence[Row], quality: Sequence[Row], pages: str) -> str:
    """The table in Markdown; `pages` is the way to the pages of methods."""
    written = [row for row in quality if row["study"] == "as-written"]
    longer = {
        model: about
        for model, about in LONG_MODELS.items()
        if any((row["model"], row["n"]) == (model, about[1]) for row in written)
    }
    heads = ["for", "policy", *(title for title, _ in (MODELS | longer).values())]
    heads += [f"one layer's speed at {name}" for name in LENGTHS.values()]
    heads.append(f"cache memory at {LENGTHS[MEMORY_AT]}")
    lines = [heads, ["---"] * len(heads)]
    for need, asked in NEEDS:
        policy = bare(asked)
        cells = [need, f"[`{asked}`]({pages}/{policy}.md)"]
        cells += [_kept(quality, policy, model, n) for model, (_, n) in MODELS.items()]
        cells += [_written(written, asked, model, n) for model, (_, n) in longer.items()]
        cells += [_speed(timing, asked, n) for n in LENGTHS]
        lines.append([*cells, _memory(timing, policy)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def speed_of(timing: Sequence[Row], policy: str, n: int) -> float | None:
    """How many times faster than dense one layer of a default is: its step, or its prefill, beside
    the fastest peer that it was timed with."""
    found = [row["ratio"] for row in timing if _is_speed(row, policy) and row["n"] == n]
    return min((ratio for ratio in found if ratio), default=None)


def _is_speed(row: Row, policy: str) -> bool:
    if row.get("policy") != policy or row["batch"] != 1:
        return False
    if policy.partition("(")[0] == "momo":
        shape = (row["heads_q"], row["heads_kv"], row["head_dim"])
        return row["case"] == "op" and shape == (32, 8, 128) and row["peer"] in ("fa3", "cudnn")
    return row["case"] == "step" and row["peer"] == "dense"


def is_step(row: Row) -> bool:
    """Whether a row is of one layer's step of a row alone."""
    return row["case"] == "step" and row["batch"] == 1


def memory_of(timing: Sequence[Row], policy: str, n: int) -> float | None:
    """Bytes of the GPU that one layer's cache of n tokens takes."""
    steps = [row for row in timing if is_step(row) and row["n"] == n]
    return next((row["memory"] for row in steps if row["policy"] == policy), None)


def _speed(timing: Sequence[Row], asked: str, n: int) -> str:
    """The cell of what a user writes: its speed, or that it runs dense at that length."""
    policy = bare(asked)
    ratio = 1.0 if policy == "dense" else speed_of(timing, policy, n)
    if not is_served({"op": policy, "policy": asked, "batch": 1, "n": n}):
        return DENSE
    if ratio is None:
        return NONE
    return f"**{ratio:.2f}x**" if ratio > 1 else f"{ratio:.2f}x"


def _memory(timing: Sequence[Row], policy: str) -> str:
    if policy in ("dense", "momo"):  # momo serves no cache of its own
        return "100%"
    own, whole = (memory_of(timing, name, MEMORY_AT) for name in (policy, "dense"))
    return NONE if own is None or whole is None else f"{own / whole:.0%}"


def _kept(quality: Sequence[Row], policy: str, model: str, n: int) -> str:
    """Mean score beside dense's over the tasks that have rows, and how many of these are worse than
    dense on the same prompts (an interval of 0.95 all below zero)."""
    if policy == "dense":
        return "the reference"
    return _score(_tasks([row for row in quality if not row["study"]], policy, model, n))


def _written(written: Sequence[Row], asked: str, model: str, n: int) -> str:
    """The same of what a user writes, over the tasks that the model can do; where its default
    leaves all of them to dense, that."""
    if asked == "dense":
        return "the reference"
    found = _tasks(written, asked, model, n)
    able = {task: row for task, row in found.items() if not beyond_model(row)}
    method = bare(asked).partition("(")[0]
    if able and not any(method in str(row.get("served", "")) for row in able.values()):
        return DENSE
    return _score(able)


def _tasks(quality: Sequence[Row], policy: str, model: str, n: int) -> dict[str, Row]:
    """A policy's row of each task, that of most prompts."""
    found: dict[str, Row] = {}
    for row in quality:
        asked = (row["policy"], row["model"], row["n"]) == (policy, model, n)
        if asked and row["task"] in TASKS:
            best: Any = found.get(row["task"])
            found[row["task"]] = row if best is None or row["trials"] > best["trials"] else best
    return found


def _score(found: dict[str, Row]) -> str:
    if not found:
        return NONE
    ours, dense = (
        math.fsum(row[key] for row in found.values()) / len(found) for key in ("value", "dense")
    )
    worse = sum(row["diff_high"] < 0 for row in found.values())
    trials = sorted({row["trials"] for row in found.values()})
    prompts = str(trials[0]) if len(trials) == 1 else f"{trials[0]} to {trials[-1]}"
    told = f"{ours:.3f} beside {dense:.3f}; {worse} of {len(found)} tasks worse"
    return f"{told}; {prompts} prompts"
