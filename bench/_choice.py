"""The table "which method when": what one needs, the default that serves it, and of that very
string where it serves, what its answers keep, how fast whole calls are and what its cache takes,
from rows alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from _plots import Row, bare, tokens
from _served import is_served, serves_from
from _tables import beyond_model

from attnplug.eval.tasks import TASKS

NEEDS = (
    ("a sensible choice made for you", "auto"),
    ("exact attention", "dense"),
    ("the first token sooner, on long prompts", "momo"),
    ("decode at nearly constant cost", "gather"),
    ("both", "momo+gather"),
    ("decode that finds single tokens and drops nothing", "sketch"),
    ("decode that finds single tokens, in vLLM", "gvr"),
    ("dense's own tokens, in fewer passes", "exact"),
    ("half the cache's GPU memory, with proof", "certified(min_tokens=0)"),
)
# Whose rows of the study as-written are of the very string.
MODELS = {32768: "gemma3-270m", 65536: "gemma3-270m@64k", 131072: "gemma3-270m@128k"}
LONG = "long-decode-perplexity"  # over 1,024 steps
CALL = "128 new tokens"  # the options of whole calls
MEMORY_AT = 131072
NONE, DENSE = "not yet", "runs dense"


def choice(timing: Sequence[Row], quality: Sequence[Row], pages: str) -> str:
    """The table in Markdown; `pages` is the way to the pages of methods."""
    written = [row for row in quality if row["study"] == "as-written"]
    heads = ["for", "policy", "serves from"]
    heads += [f"quality at {tokens(n)}" for n in MODELS]
    heads += [f"whole call at {tokens(n)}" for n in MODELS]
    heads.append(f"cache memory at {tokens(MEMORY_AT)}")
    lines = [heads, ["---"] * len(heads)]
    for need, asked in NEEDS:
        names = [bare(part) for part in asked.split("+")]
        links = "+".join(f"[`{part}`]({pages}/{bare(part)}.md)" for part in asked.split("+"))
        cells = [need, links, serves_from(asked)]
        cells += [_written(written, asked, model, n) for n, model in MODELS.items()]
        cells += [_call(timing, asked, n) for n in MODELS]
        lines.append([*cells, _memory(timing, names[-1])])
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


def _call(timing: Sequence[Row], asked: str, n: int) -> str:
    """How many times faster than dense a whole call is, or that the default runs dense."""
    if asked == "dense":
        return "1.00x"
    if not is_served({"case": "call", "policy": asked, "batch": 1, "n": n}):
        return DENSE
    found = [
        row["ratio"]
        for row in timing
        if (row["case"], row["batch"], row["peer"]) == ("call", 1, "dense")
        and (row.get("policy"), row["n"], row["options"]) == (asked, n, CALL)
    ]
    if not found:
        return NONE
    return f"**{found[-1]:.2f}x**" if found[-1] > 1 else f"{found[-1]:.2f}x"


# Whose rows tell the cache of a policy that takes methods, or drafts; picks take no memory.
CACHES = {"auto": "sketch(k=2048)", "sketch": "sketch(k=2048)", "exact": "gather"}


def _memory(timing: Sequence[Row], policy: str) -> str:
    if policy in ("dense", "momo"):  # momo serves no cache of its own
        return "100%"
    names = (CACHES.get(policy, policy), "dense")
    own, whole = (memory_of(timing, name, MEMORY_AT) for name in names)
    return NONE if own is None or whole is None else f"{own / whole:.0%}"


def _written(written: Sequence[Row], asked: str, model: str, n: int) -> str:
    """Mean score beside dense's over the tasks that the model can do, which of these are worse than
    dense on the same prompts (an interval of 0.95 all below zero), and the perplexity of long
    decodes; where the default leaves all of them to dense, that."""
    if asked == "dense":
        return "the reference"
    found = _tasks(written, asked, model, n)
    able = {task: row for task, row in found.items() if not beyond_model(row)}
    methods = {bare(part).partition("(")[0] for part in asked.split("+")} - {"auto"}
    served = " ".join(str(row.get("served", "")) for row in able.values())
    if able and methods and not any(method in served for method in methods):
        return DENSE
    long = [row for row in written if (row["policy"], row["model"], row["n"]) == (asked, model, n)]
    return "; ".join([_score(able), *(_perplexity(row) for row in long if row["task"] == LONG)])


def _perplexity(row: Row) -> str:
    own = f"{row['value']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
    return f"perplexity {own} beside {row['dense']:.2f}"


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
    worse = [
        f"{task} {row['diff_low']:+.2f} to {row['diff_high']:+.2f}"
        for task, row in found.items()
        if row["diff_high"] < 0
    ]
    told = f" ({', '.join(worse)})" if worse else ""
    trials = sorted({row["trials"] for row in found.values()})
    prompts = str(trials[0]) if len(trials) == 1 else f"{trials[0]} to {trials[-1]}"
    tasks = f"{len(worse)} of {len(found)} tasks worse{told}"
    return f"{ours:.3f} beside {dense:.3f}; {tasks}; {prompts} prompts"
