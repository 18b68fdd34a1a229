"""A few queries at once over a long cache: the decode methods beside dense, one layer of
Qwen2.5-7B's heads, of one row at each length and of eight rows at 131,072 tokens.

    python bench/few_queries.py --out rows.jsonl

A row has the microseconds of a call of the policy as a user's own loop makes it (`eager_us`, the
host among them), and on a GPU of the same call in a CUDA graph (`graph_us`); `ratio` is dense's
time in a graph over the method's. Kernels are compiled before, by a process for each policy and
number of queries. `MEASURED` in attnplug/policies/_few_queries.py is what the rows decide.
`--small` is for a try on a CPU.
"""

import argparse
import dataclasses
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from whole_calls import say

from attnplug.bench.quick import PLANS, Heads, decode_call, gaussian
from attnplug.policies import parse

CALLS = 30
HEADS = Heads()
BATCH, BATCH_TOKENS, BATCH_QUERIES = 8, 131072, 4


def timed(asked: argparse.Namespace, policy: str, rows: int, tokens: int) -> Iterator[dict]:
    """The rows of a policy over one cache, by numbers of queries."""
    plan, method = PLANS[asked.device], parse(policy)
    assert method.decode is not None  # of every policy
    call, *_ = decode_call(HEADS, plan, tokens, method.decode, seed=0, batch=rows)
    for queries in (BATCH_QUERIES,) if rows > 1 else numbers(asked.queries):
        q = gaussian(plan, 1)(rows, HEADS.query, queries, HEADS.dim)
        yield times(asked, method, dataclasses.replace(call, q=q)) | {
            "policy": policy, "n": tokens, "batch": rows, "queries": queries
        }  # fmt: skip


@torch.inference_mode()
def times(asked: argparse.Namespace, method: Any, call: Any) -> dict[str, Any]:
    calls = 1 if asked.device == "cpu" or asked.compile else CALLS
    for _ in range(3):  # the third is as all later ones
        method.attend(call)
    row: dict[str, Any] = {"served_by": call.served_by}
    if asked.compile:
        return row
    row["eager_us"] = microseconds(lambda: method.attend(call), calls, asked.device)
    if asked.device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            method.attend(call)
        row["graph_us"] = microseconds(graph.replay, calls, asked.device)
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


def numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def cases(asked: argparse.Namespace) -> list[tuple[int, int]]:
    """(rows, tokens) of each cache."""
    alone = [(1, tokens) for tokens in numbers(asked.tokens)]
    return alone if asked.device == "cpu" else [*alone, (BATCH, BATCH_TOKENS)]


def compile_first(asked: argparse.Namespace) -> None:
    """Have processes compile all kernels, a process for each policy and number of queries."""
    started = []
    for policy in asked.policies.split(";"):
        for queries in numbers(asked.queries):
            own = "--compile", "--policies", policy, "--queries", str(queries)
            command = sys.executable, __file__, *own, "--tokens", asked.tokens
            started.append(subprocess.Popen(command))
    for process in started:
        if process.wait():
            raise SystemExit(process.returncode)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="32768,131072,524288,1048576")
    parser.add_argument("--queries", default="2,4,8,16")
    methods = (f"{name}(min_tokens=0)" for name in ("gather", "gvr", "sketch"))
    parser.add_argument("--policies", default=";".join(("dense", *methods)))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--compile", action="store_true", help="compile, and time nothing")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    asked.device = "cpu" if asked.small else "cuda"
    about = {"gpu": "cpu" if asked.small else torch.cuda.get_device_name()}
    about["torch"] = torch.__version__
    if asked.device == "cuda" and not asked.compile:
        compile_first(asked)
    dense: dict[tuple[int, int, int], float] = {}  # by rows, tokens and queries
    for rows, tokens in cases(asked):
        for policy in asked.policies.split(";"):
            for row in timed(asked, policy, rows, tokens):
                if asked.compile:
                    continue
                case = rows, tokens, row["queries"]
                if policy == "dense" and "graph_us" in row:
                    dense[case] = row["graph_us"]
                if case in dense:
                    row["ratio"] = round(dense[case] / row["graph_us"], 2)
                say(asked.out, row | about)


if __name__ == "__main__":
    main()
