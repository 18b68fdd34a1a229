"""Rows of results of what whole_calls.py measured, each beside stock, or else beside dense; and of
what exact_steps.py did, each beside dense.

    python bench/call_rows.py calls.jsonl [more.jsonl ...] --out rows.json
    python bench/install_rows.py rows.json

Calls of one commit and GPU are compared that have the same prompt, rows and new tokens. Those of
another tree (`--root`) make no row, and neither do steps of exact's draft alone.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from _results import row_policy, write_rows
from whole_calls import CONFIG

PEERS = ("stock", "dense")
RUN = ("gpu", "torch", "triton", "commit", "date")
Call = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("calls", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    lines = [line for path in asked.calls for line in path.read_text().splitlines()]
    measured = [json.loads(line) for line in lines]
    rows = rows_of_calls(each for each in measured if each["case"] == "call")
    rows += rows_of_steps([each for each in measured if each["case"] == "exact"])
    write_rows(asked.out, rows)
    print(f"{len(rows)} rows: {asked.out}")


def rows_of_calls(calls: Iterable[Call]) -> list[Call]:
    """A row for each policy of a group that has a peer."""
    groups: dict[tuple[Any, ...], dict[str, Call]] = defaultdict(dict)
    for call in calls:
        if "call_s" in call and not call["root"]:
            key = (call["n"], call["batch"], call["new"], call["warm"], *(call[x] for x in RUN))
            groups[key][call["policy"]] = call
    rows = []
    for group in groups.values():
        peer = next((name for name in PEERS if name in group), None)
        others = [call for name, call in group.items() if name != peer]
        rows += [_row(call, peer, group[peer]) for call in others if peer is not None]
    return rows


def _row(call: Call, peer: str, other: Call) -> Call:
    times, others = (1e6 * np.array(each["times_s"]) for each in (call, other))
    new = call["new"]
    options = f"{new} new token{'s' * (new != 1)}" + ", warmed" * call["warm"]
    if "imposed" in call and "exact" in call["policy"]:
        options += f", drafts accepted with chance {call['imposed']}"
    return _result("call", call, options, peer, times, float(np.median(others)))


def rows_of_steps(steps: list[Call]) -> list[Call]:
    """A row for each run of exact, whose options say which drafts the bench had accepted."""

    def place(step: Call) -> tuple[Any, ...]:
        return step["n"], step["batch"], *(step[key] for key in RUN)

    dense = {place(step): 1e3 * step["ms_a_token"] for step in steps if step["policy"] == "dense"}
    rows = []
    for step in steps:
        if step["imposed"] is not None:
            share, time = step["imposed"], np.array([1e3 * step["ms_a_token"]])
            chance = f"drafts accepted with chance {share}"
            accepted = chance if isinstance(share, float) else f"{share} drafts accepted a round"
            call = step | {"policy": row_policy(step["policy"])}
            rows.append(_result("generate", call, accepted, "dense", time, dense[place(step)]))
    return rows


def _result(
    case: str, call: Call, options: str, peer: str, times: np.ndarray, other: float
) -> Call:
    low, middle, high = np.percentile(times, (20, 50, 80)).tolist()
    row = {
        "op": call["policy"].split("+")[0].split("(")[0],
        "case": case,
        "n": call["n"],
        "batch": call["batch"],
        "heads_q": CONFIG.num_attention_heads,
        "heads_kv": CONFIG.num_key_value_heads,
        "head_dim": CONFIG.hidden_size // CONFIG.num_attention_heads,
        "dtype": "bfloat16",
        "options": options,
        "p20_us": low,
        "p50_us": middle,
        "p80_us": high,
        "peer": peer,
        "peer_p50_us": other,
        "ratio": other / middle,
        "bytes": None,
        "flops": None,
        "ceiling_fraction": None,
        "ceilings": None,
        "policy": call["policy"],
    }
    return row | {key: call[key] for key in RUN}


if __name__ == "__main__":
    main()
