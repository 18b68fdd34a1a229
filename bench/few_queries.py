"""A few queries at once over a long cache: a decode method beside dense, one layer of Qwen2.5-7B's
heads.

    python bench/few_queries.py --tokens 131072,1000000 --queries 1,2,4,8,16 --out rows.jsonl

A row has the microseconds of a call of the policy as a user's own loop makes it (`eager_us`, the
host among them), and on a GPU of the same call in a CUDA graph (`graph_us`). `--small` is for a try
on a CPU.
"""

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from whole_calls import say

from attnplug.bench.quick import PLANS, Heads, decode_call, gaussian
from attnplug.policies import parse

CALLS = 50
HEADS = Heads()


@torch.inference_mode()
def timed(policy: str, tokens: int, queries: int, device: str, calls: int) -> dict[str, Any]:
    plan, method = PLANS[device], parse(policy)
    assert method.decode is not None  # of every policy
    call, *_ = decode_call(HEADS, plan, tokens, method.decode, seed=0)
    call = dataclasses.replace(call, q=gaussian(plan, 1)(1, HEADS.query, queries, HEADS.dim))
    row: dict[str, Any] = {"policy": policy, "n": tokens, "queries": queries}
    for _ in range(5):
        method.attend(call)
    row["served_by"] = call.served_by
    row["eager_us"] = microseconds(lambda: method.attend(call), calls, device)
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            method.attend(call)
        row["graph_us"] = microseconds(graph.replay, calls, device)
    return row


def microseconds(run: Any, calls: int, device: str) -> float:
    """Of one of so many runs in a row."""
    synchronize = torch.cuda.synchronize if device == "cuda" else torch.cpu.synchronize
    run()
    synchronize()
    begun = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize()
    return round((time.perf_counter() - begun) / calls * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="131072,1000000")
    parser.add_argument("--queries", default="1,2,4,8,16")
    parser.add_argument("--policies", default="dense;gather(min_tokens=0);gvr(min_tokens=0)")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    device = "cpu" if asked.small else "cuda"
    about = {"gpu": "cpu" if asked.small else torch.cuda.get_device_name()}
    about["torch"] = torch.__version__
    for tokens in map(int, asked.tokens.split(",")):
        for queries in map(int, asked.queries.split(",")):
            for policy in asked.policies.split(";"):
                calls = 2 if asked.small else CALLS
                say(asked.out, timed(policy, tokens, queries, device, calls) | about)


if __name__ == "__main__":
    main()
