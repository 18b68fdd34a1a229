"""index_topk and latent_attention on one GPU: right against torch, how long they take at
DeepSeek-V3.2's sizes, and which plans are the fastest.

    python bench/latent_ops.py [--seconds 115] [--part all|checks|times|plans] [--out rows.jsonl]

Prints a JSON line a measurement, the first of them the card and the versions. Steps are CUDA graphs
of calls on caches that rotate past the L2, long calls are timed by events. `bytes_per_s` counts
what a method must read once, `flop_per_s` the products of the tokens that a query sees or has
picked. Each plan is held against the reference before it is timed. What fails is a line with its
error; the script goes on, and exits with 1. Kernels are compiled in parallel, before all lines.
"""

import argparse
import contextlib
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from _latent_checks import (
    FP16,
    FP32,
    HEADS,
    INDEX_HEADS,
    INDEX_WIDTH,
    LATENT,
    PICKS,
    ROPE,
    SCALE,
    SCALE_OF_INDEX,
    VALUE,
    WIDTHS,
    check_index,
    check_latent,
    index_inputs,
    latent_inputs,
    length_of,
    mask_of,
    normal,
    picks_of,
    run_index,
    run_latent,
)
from _op_rows import FAILURES, microseconds, sets_for

from attnplug.ops.common.device import card
from attnplug.ops.gvr import index_topk as indexing
from attnplug.ops.latent import latent_attention as attending

WARMERS = 12  # processes that compile
WARMING = False  # whether this is one of them: what would be timed is called once


class Lines:
    """A JSON line a measurement, on the screen and in a file. A warmer runs its `share` of them."""

    def __init__(self, seconds: float, out: Path | None, share: int | None = None):
        self.end, self.failed = time.monotonic() + seconds, 0
        self.share, self.asked = share, 0
        self.file = out.open("w") if out else None
        self.add(
            gpu=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__
        )

    def add(self, **line: Any) -> None:
        text = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()})
        print(text, flush=True)
        if self.file:
            print(text, file=self.file, flush=True)

    def attempt(self, what: str, case: str, variant: str, run: Callable[..., Any], *args: Any):
        self.asked += 1
        if self.share not in (None, self.asked % WARMERS):
            return
        line: dict[str, Any] = {"what": what, "case": case, "variant": variant}
        begin = time.monotonic()
        if begin > self.end:
            line["result"] = "skipped: out of time"
        else:
            try:
                line |= run(*args)
                torch.cuda.synchronize()
            except FAILURES as error:
                self.failed += 1
                line["result"] = f"FAILED {type(error).__name__}: {error}"[:400]
        self.add(**line, took_s=time.monotonic() - begin)


# --- checks ----------------------------------------------------------------------------------


def run_checks(lines: Lines) -> None:
    for name, shape, k, more in (
        ("step 32K", (1, 1, 32768), PICKS, {}),
        ("step 512K", (1, 1, 1 << 19), PICKS, {"lengths": length_of((1 << 19) - 77)}),
        ("batch 8, lengths", (8, 1, 40000), PICKS, {"lengths": length_of(39001)}),
        ("prefill, two slabs", (1, 1100, 20000), PICKS, {"lengths": length_of(19000)}),
        ("padded", (2, 70, 16384), PICKS, {"key_mask": mask_of(2, 16384)}),
        ("fewer than k", (2, 9, 3000), PICKS, {"lengths": length_of(1500)}),
        ("no more than k", (2, 9, 1000), PICKS, {"key_mask": mask_of(2, 1000)}),
        ("float16, 200 heads of 48", (1, 5, 5001, FP16, 200, 48), 100, {}),
        ("float32", (1, 33, 9000, FP32, 64, 128), 300, {}),
    ):
        lines.attempt("check", f"index {name}", "default", check_index_at, shape, k, more)
    for name, shape, count, more in (
        ("step", (1, 1, 32768), PICKS, {"lengths": length_of(32700)}),
        ("batch 8", (8, 1, 9000), PICKS, {}),
        ("prefill", (1, 300, 9000), PICKS, {"key_mask": mask_of(1, 9000)}),
        ("dense step", (2, 1, 9000), 0, {"lengths": length_of(8001)}),
        ("dense prefill", (1, 300, 3000), 0, {"key_mask": mask_of(1, 3000)}),
        ("float16, 6 heads of 48", (2, 33, 1003, FP16, 6, (48, 4)), 100, {}),
        ("float32, dense", (2, 33, 1003, FP32, 8, (64, 16)), 0, {}),
        ("float32", (1, 5, 3000, FP32, 128, WIDTHS), 500, {}),
    ):
        lines.attempt("check", f"latent {name}", "default", check_latent_at, shape, count, more)


def check_index_at(shape, k, more):
    return check_index(index_inputs(*shape), k, **more)


def check_latent_at(shape, count, more):
    picks = picks_of(*shape[:3], count) if count else None
    return check_latent(latent_inputs(*shape), picks, **more)


# --- times -----------------------------------------------------------------------------------


def by_events(call: Callable[[], Any]) -> dict[str, float]:
    """The median of few calls: for those that take milliseconds."""
    call()
    if WARMING:
        return {"p50_us": 1.0}
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return {"p50_us": statistics.median(times)}


def in_graphs(calls: list[Callable[[], Any]]) -> dict[str, float]:
    """The time of a step: at least four calls in a graph."""
    return by_events(calls[0]) if WARMING else microseconds(calls * -(-4 // len(calls)))


def rates(found: dict[str, float], read: float, flops: float) -> dict[str, float]:
    seconds = found["p50_us"] * 1e-6
    return {**found, "tb_per_s": read / seconds / 1e12, "tflop_per_s": flops / seconds / 1e12}


def time_index_step(batch: int, tokens: int, plan=None) -> dict[str, float]:
    read = batch * tokens * INDEX_WIDTH * 2
    sets = [index_inputs(batch, 1, tokens, seed=s) for s in range(min(8, sets_for(read, read)))]
    lengths = length_of(tokens)
    calls = [functools.partial(run_index, x, PICKS, plan, lengths) for x in sets]
    flops = 2.0 * batch * tokens * INDEX_WIDTH * INDEX_HEADS
    return rates(in_graphs(calls), read, flops)


def time_scores_step(batch: int, tokens: int, plan=None) -> dict[str, float]:
    """The scoring kernel alone."""
    read = batch * tokens * INDEX_WIDTH * 2
    sets = [index_inputs(batch, 1, tokens, seed=s) for s in range(min(8, sets_for(read, read)))]
    plan = plan or index_plan(sets[0])
    scores = torch.empty(batch, tokens, device="cuda")
    launch, last = indexing._launch_scores, (0, scores, plan, None, None)
    calls = [
        functools.partial(launch, *x, length_of(tokens), None, SCALE_OF_INDEX, *last) for x in sets
    ]
    flops = 2.0 * batch * tokens * INDEX_WIDTH * INDEX_HEADS
    return rates(in_graphs(calls), read, flops)


def index_plan(inputs) -> Any:
    q, _, keys = inputs
    slab = indexing.slab_for(len(q), q.shape[1], keys.shape[1], indexing.WORKSPACE)
    shape = slab, q.shape[2], keys.shape[1], q.shape[3], q.element_size()
    return indexing.plan_for(*shape, card(q.device))


def time_index_prefill(queries: int, tokens: int, plan=None, scores_only: bool = False):
    q, weights, keys = index_inputs(1, queries, tokens)
    lengths = length_of(tokens)
    seen = queries * (tokens - queries / 2)
    if scores_only:
        few = q[:, -512:], weights[:, -512:], keys
        scores = torch.empty(512, tokens, device="cuda")
        last = 0, scores, plan or index_plan(few), None, None
        call = functools.partial(
            indexing._launch_scores, *few, lengths, None, SCALE_OF_INDEX, *last
        )
        seen = 512 * (tokens - 256)
    else:
        call = functools.partial(run_index, (q, weights, keys), PICKS, plan, lengths)
    read = tokens * INDEX_WIDTH * 2
    return rates(by_events(call), read, 2.0 * seen * INDEX_WIDTH * INDEX_HEADS)


def time_latent(batch: int, queries: int, tokens: int, count: int, plan=None) -> dict[str, float]:
    each = (LATENT + ROPE) * 2
    taken = count or tokens - (queries - 1) / 2
    read = batch * queries * taken * each if count else batch * tokens * each
    sets = min(4, sets_for(int(read), batch * tokens * each)) if queries == 1 else 1
    made = [latent_inputs(batch, queries, tokens, seed=s) for s in range(sets)]
    picks = [picks_of(batch, queries, tokens, count, s) if count else None for s in range(sets)]
    lengths = length_of(tokens)
    calls = [
        functools.partial(run_latent, x, p, plan, lengths) for x, p in zip(made, picks, strict=True)
    ]
    flops = 2.0 * batch * queries * HEADS * taken * (2 * LATENT + ROPE)
    found = by_events(calls[0]) if queries > 1 else in_graphs(calls)
    return rates(found, read, flops)


def triton_plan(queries: int) -> attending.Plan:
    """What a prompt's picks ran by before Hopper's kernel, and run by on other cards."""
    shape = 1, queries, HEADS, PICKS, True, (LATENT, ROPE), 2
    return attending.plan_for(*shape, card(torch.device("cuda", 0)))


def time_stock(batch: int, tokens: int) -> dict[str, float]:
    """The step of transformers: latents expanded to all heads, and SDPA under a mask."""
    latents, rope = latent_inputs(batch, 1, tokens)[2:]
    expand = normal(5, HEADS * 2 * VALUE, LATENT) / LATENT**0.5
    query = normal(6, batch, HEADS, 1, VALUE + ROPE)
    picks = picks_of(batch, 1, tokens, PICKS).long()

    def call() -> torch.Tensor:
        kv = torch.nn.functional.linear(latents, expand)
        kv = kv.view(batch, tokens, HEADS, 2 * VALUE).transpose(1, 2)
        nope, value = kv.split(VALUE, -1)
        key = kv.new_empty(batch, HEADS, tokens, VALUE + ROPE)
        key[..., :VALUE].copy_(nope)
        key[..., VALUE:].copy_(rope[:, None].expand(-1, HEADS, -1, -1))
        mask = torch.zeros(batch, 1, tokens, dtype=torch.bool, device="cuda")
        mask = mask.scatter_(-1, picks, True)[:, None]
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, attn_mask=mask, scale=SCALE)

    return by_events(call)


def time_stock_index(batch: int, tokens: int) -> dict[str, float]:
    """The indexer of transformers in a step."""
    q, weights, keys = index_inputs(batch, 1, tokens)

    def call() -> torch.Tensor:
        x = (q.float() @ keys.mT.float().unsqueeze(1) * SCALE_OF_INDEX).relu()
        return (weights.unsqueeze(-2) @ x).squeeze(-2).topk(PICKS, -1).indices.int()

    return by_events(call)


def run_times(lines: Lines) -> None:
    for batch, tokens in ((1, 1 << 15), (1, 1 << 17), (1, 1 << 19), (8, 1 << 15), (8, 1 << 17)):
        case = f"{batch} x {tokens}"
        lines.attempt("index step", case, "default", time_index_step, batch, tokens)
        lines.attempt("scores step", case, "default", time_scores_step, batch, tokens)
        if batch * tokens <= 1 << 18 and not WARMING:
            lines.attempt("index step", case, "transformers", time_stock_index, batch, tokens)
    for batch, tokens in ((1, 1 << 15), (1, 1 << 17), (8, 1 << 15), (8, 1 << 17)):
        case = f"{batch} x {tokens}"
        lines.attempt("step", case, "picks", time_latent, batch, 1, tokens, PICKS)
        if batch == 1:
            lines.attempt("step", case, "dense", time_latent, batch, 1, tokens, 0)
            if not WARMING:
                lines.attempt("step", case, "transformers", time_stock, batch, tokens)
                torch.cuda.empty_cache()
    case = "4096 of 32768"
    lines.attempt("index prefill", case, "default", time_index_prefill, 4096, 1 << 15)
    for queries, tokens in ((4096, 1 << 15), (2048, 1 << 17)):
        case, shape = f"{queries} of {tokens}", (1, queries, tokens, PICKS)
        lines.attempt("prefill", case, "picks", time_latent, *shape)
        lines.attempt("prefill", case, "picks, Triton", time_latent, *shape, triton_plan(queries))
    lines.attempt("prefill", "1024 of 32768", "dense", time_latent, 1, 1024, 1 << 15, 0)


# --- plans -----------------------------------------------------------------------------------


def latent_plans(kind: str) -> Iterator[tuple[str, Any]]:
    """(name, plan): rows, tile, warps, stages, splits."""
    shapes = {
        "prefill": [
            (64, 64, 8, 2, 1), (64, 32, 8, 3, 1), (64, 32, 8, 2, 1), (32, 64, 8, 2, 1),
            (32, 64, 4, 2, 1), (64, 64, 8, 1, 1),
        ],
        "step": [
            (16, 64, 4, 2, 16), (16, 64, 4, 2, 32), (16, 32, 4, 3, 16), (32, 64, 8, 2, 32),
            (32, 32, 4, 3, 32), (64, 64, 8, 2, 32), (64, 32, 8, 3, 64), (64, 32, 8, 2, 64),
        ],
        "dense step": [
            (64, 64, 8, 2, 66), (64, 32, 8, 3, 66), (64, 32, 8, 4, 66), (64, 64, 8, 1, 66),
            (32, 64, 8, 2, 33), (64, 64, 8, 2, 132),
        ],
    }  # fmt: skip
    for rows, tile, warps, stages, splits in shapes[kind]:
        columns = LATENT if kind == "prefill" else 32
        plan = attending.Plan(rows, tile, splits, warps, stages, columns)
        yield f"{rows} rows, {tile}/{warps}w/{stages}s, {splits} splits", plan


def index_plans(kind: str) -> Iterator[tuple[str, Any]]:
    """(name, plan): tile, queries, programs, warps, stages."""
    shapes = {
        "scores step": [
            (128, 1, 264, 4, 4), (128, 1, 132, 4, 5), (64, 1, 396, 4, 6), (256, 1, 132, 8, 3),
            (128, 1, 264, 8, 4), (64, 1, 528, 4, 4),
        ],
        "scores prefill": [
            (128, 4, 4, 8, 3), (128, 4, 1, 8, 3), (128, 2, 2, 8, 3), (128, 2, 2, 4, 3),
            (64, 4, 4, 4, 4), (256, 2, 2, 8, 2), (128, 1, 1, 4, 4), (256, 1, 1, 8, 3),
        ],
    }  # fmt: skip
    for tile, queries, programs, warps, stages in shapes[kind]:
        plan = indexing.Plan(tile, queries, programs, warps, stages, INDEX_HEADS)
        yield f"{tile} x {queries}/{warps}w/{stages}s, {programs} programs", plan


def checked(check: Callable[[], dict[str, Any]], measure: Callable[[], dict[str, float]]):
    """A plan's line: it is right, and how long it takes."""
    return {**check(), **measure()}


def run_plans(lines: Lines) -> None:
    tokens = 1 << 15
    for kind, queries, count in (("prefill", 512, PICKS), ("step", 1, PICKS), ("dense step", 1, 0)):
        tensors = latent_inputs(1, queries, tokens)
        picks = picks_of(1, queries, tokens, count) if count else None
        for name, plan in latent_plans(kind):
            right = functools.partial(check_latent, tensors, picks, length_of(tokens), None, plan)
            timed = functools.partial(time_latent, 1, queries, tokens, count, plan)
            lines.attempt("plan of " + kind, f"{queries} of {tokens}", name, checked, right, timed)
    for kind, queries in (("scores prefill", 512), ("scores step", 1)):
        inputs = index_inputs(1, queries, tokens)
        for name, plan in index_plans(kind):
            right = functools.partial(check_index, inputs, PICKS, length_of(tokens), None, plan)
            timed = functools.partial(time_scores_step, 1, 4 * tokens, plan)
            if queries > 1:
                timed = functools.partial(time_index_prefill, 512, tokens, plan, True)
            lines.attempt("plan of " + kind, f"{queries} of {tokens}", name, checked, right, timed)


def warm(part: str, seconds: float) -> None:
    """Compile the kernels of all lines, in processes that share Triton's cache on disk."""
    command = [sys.executable, __file__, "--part", part, "--seconds", str(seconds), "--share"]
    with contextlib.ExitStack() as stack:
        for share in range(WARMERS):
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            stack.enter_context(subprocess.Popen([*command, str(share)], **quiet))


def main() -> int:
    global WARMING
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=115)
    parser.add_argument("--part", choices=("all", "checks", "times", "plans"), default="all")
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    parser.add_argument("--share", type=int, help="compile this share of the lines only")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    begin, WARMING = time.monotonic(), args.share is not None
    if not WARMING:
        warm(args.part, args.seconds / 2)
    lines = Lines(args.seconds - (time.monotonic() - begin), args.out, args.share)
    for part, run in (("checks", run_checks), ("times", run_times), ("plans", run_plans)):
        if args.part in ("all", part):
            run(lines)
    return 1 if lines.failed else 0


if __name__ == "__main__":
    sys.exit(main())
