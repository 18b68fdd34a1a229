"""Whole calls in a reader's words: columns of README's table, and the numbers of the first page."""

from __future__ import annotations

import re
from collections.abc import Sequence

from _plots import Row, heads
from _tables import Column

CALLS = {
    "generate": "a new token in `generate`",
    "generate-prefill": "the first token in `generate`",
    "call": "a whole call of `generate`, {options}",
    "e2e-ttft": "the first token, without a cache",
    "vllm-ttft": "the first token in vLLM",
    "vllm-load": "{batch} requests at once in vLLM, 256 new tokens each",
}
MODELS = {"28/4": "Qwen2.5-7B", "32/8": "Llama-3.1-8B"}  # whose shapes whole calls are timed in


def _rounds(row: Row) -> str:
    """Of a token that exact makes: which of its drafts the bench has accepted."""
    if (row["op"], row["case"]) != ("exact", "generate"):
        return ""
    rows = f" of each of {row['batch']} rows" if row["batch"] > 1 else ""
    return f"{rows}, {row['options']}"


CALL_COLUMNS: list[Column] = [
    ("what", lambda row: CALLS[row["case"]].format(**row) + _rounds(row)),
    ("shape", lambda row: MODELS[heads(row)]),
]


def numbers(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """The ratios of whole calls in large, and in words what each is of."""
    known = dict([*columns, *CALL_COLUMNS])
    boxes = []
    for row in rows:
        told = {
            title: re.sub("`(.*?)`", r"<code>\1</code>", show(row)) for title, show in known.items()
        }
        boxes.append(
            f"<div><strong>{row['ratio']:.2f}x</strong> speed-up of {told['what']} at "
            f"{told['tokens']} tokens, by {told['policy']} beside {told['peer']}, "
            f"{told['shape']} on an {told['GPU']}</div>"
        )
    return "\n".join(['<div class="numbers">', *boxes, "</div>"])
