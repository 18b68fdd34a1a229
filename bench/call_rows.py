"""Rows of results of what whole_calls.py measured, each beside stock, or else beside dense.

    python bench/call_rows.py calls.jsonl [more.jsonl ...] --out rows.json
    python bench/install_rows.py rows.json

Calls of one commit and GPU are compared that have the same prompt, rows and new tokens. Those of
another tree (`--root`) make no row.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from _results import write_rows
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
    rows = rows_of_calls(map(json.loads, lines))
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
    low, middle, high = np.percentile(times, (20, 50, 80)).tolist()
    new = call["new"]
    row = {
        "op": call["policy"].split("+")[0].split("(")[0],
        "case": "call",
        "n": call["n"],
        "batch": call["batch"],
        "heads_q": CONFIG.num_attention_heads,
        "heads_kv": CONFIG.num_key_value_heads,
        "head_dim": CONFIG.hidden_size // CONFIG.num_attention_heads,
        "dtype": "bfloat16",
        "options": f"{new} new token{'s' * (new != 1)}" + ", warmed" * call["warm"],
        "p20_us": low,
        "p50_us": middle,
        "p80_us": high,
        "peer": peer,
        "peer_p50_us": float(np.median(others)),
        "ratio": float(np.median(others)) / middle,
        "bytes": None,
        "flops": None,
        "ceiling_fraction": None,
        "ceilings": None,
        "policy": call["policy"],
    }
    return row | {key: call[key] for key in RUN}


if __name__ == "__main__":
    main()
