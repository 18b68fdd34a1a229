"""Both searches of stream_mask against one dense causal forward, on Gaussian data: blocks of 64,
the 32 best, 32/8 heads of 128. And what a trace adds to the forward pass of a whole model (32
layers of Llama-3.1-8B's shape, random weights, momo serving, no cache): mask, masses, copy to the
host and the file's writing included; its peer is the same pass untraced. At 1M tokens that is four
minutes.

ATTNPLUG_BENCH_STREAM names the tests' lengths ("131072,1048576")."""

import functools
import math
import os
import time

import peers
import pytest
import test_momo
import torch
from _models import PART, mlps_in_parts, random_model
from test_e2e_ttft import CONFIG
from transformers import LlamaForCausalLM

import attnplug
import attnplug.trace
from attnplug.bench.rows import policy_name
from attnplug.ops import stream_mask
from attnplug.ops.stream.bounds import WIDER

TOKENS = [int(n) for n in os.environ.get("ATTNPLUG_BENCH_STREAM", "131072,1048576").split(",")]
LONG = 524288  # from here on the dense peer runs once, while ours is compiled
ROUNDS = 5
BLOCK, TOP_K = 64, 32
TRACED = f"momo+stream(top_k={TOP_K})"
WANTED = {131072: 3.0, 1048576: 15.0}  # issue 6
LONGEST_US = {1048576: 465e3}  # issue 25: bounds are no slower than branches were
SHAPE = test_momo.LLAMA
OPTIONS = {"bounds": f"b={BLOCK}, k={TOP_K}", "branches": f"b={BLOCK}, k={TOP_K}, branches"}


def scored_blocks(n: int) -> int:
    """Key blocks that a query block scores, summed over the query blocks of one head."""
    total = 0
    for width in range(1, -(-n // BLOCK) + 1):
        branches = min(TOP_K, width)
        total += branches + min(width - branches, branches)
        longest = (-(-width // TOP_K) + 1) // 2
        while longest > 1:
            total += TOP_K
            longest = (longest + 1) // 2
    return total


def work(n: int, search: str) -> tuple[int, int]:
    """Bytes (q and k once, the outputs) and FLOPs of the scores and bounds that are needed."""
    lists = 8 * TOP_K * SHAPE.heads_q * n // BLOCK
    nbytes = 2 * n * SHAPE.dim * (SHAPE.heads_q + SHAPE.heads_kv) + lists
    score = 2 * BLOCK * BLOCK * SHAPE.dim * SHAPE.heads_q
    if search == "branches":
        return nbytes, score * scored_blocks(n)
    slots = -(-n // BLOCK)
    bounds = 2 * 2 * SHAPE.dim * SHAPE.heads_q * (slots * (slots - 1) // 2)
    return nbytes, bounds + score * sum(min(own, WIDER * TOP_K) + 1 for own in range(slots))


def most_beside(n: int, search: str, lists: int) -> int:
    """Bytes that the search may take beside its `lists`: 8 a token, and for bounds max and min of
    the key blocks and WIDER candidates for each place of a list."""
    keys = 2 * n * SHAPE.dim * SHAPE.heads_kv
    return 8 * n + (2 * keys // BLOCK + WIDER * lists // 2 if search == "bounds" else 0)


def timed(fn) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    fn()
    end.record()
    return begin, end


@pytest.mark.parametrize("search", OPTIONS)
@pytest.mark.parametrize("n", TOKENS)
def test_stream_mask(gpu_bench, n, search):
    peer = "fa3" if "fa3" in peers.causal_peers() else "cudnn"
    q, k, v = test_momo.inputs(SHAPE, n, 0)
    dense = peers.causal(peer, q, k, v, SHAPE.dim**-0.5)
    if n < LONG:
        dense()
    theirs = [timed(dense) for _ in range(1 if n >= LONG else ROUNDS)]
    options = {"block": BLOCK, "query_block": BLOCK, "top_k": TOP_K, "search": search}
    ours = functools.partial(stream_mask, q, k, **options)
    ours()  # compiled while the peer runs
    times = [timed(ours) for _ in range(3 if n >= LONG else ROUNDS)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    index, score = ours()
    lists = index.nbytes + score.nbytes
    auxiliary = torch.cuda.max_memory_allocated() - before - lists
    print(f"{n} {search}: lists {lists:,} bytes, memory beside them {auxiliary:,}")
    assert auxiliary <= most_beside(n, search, lists)
    nbytes, flops = work(n, search)
    row = gpu_bench.record(
        op="stream_mask",
        case="op",
        n=n,
        batch=1,
        heads_q=SHAPE.heads_q,
        heads_kv=SHAPE.heads_kv,
        head_dim=SHAPE.dim,
        dtype=torch.bfloat16,
        options=OPTIONS[search],
        times_us=[begin.elapsed_time(end) * 1e3 for begin, end in times],
        peer=peer,
        peer_times_us=[begin.elapsed_time(end) * 1e3 for begin, end in theirs],
        bytes=nbytes,
        flops=flops,
    )
    assert row["ratio"] >= WANTED.get(n, 1.0)
    assert search == "branches" or row["p50_us"] <= LONGEST_US.get(n, math.inf)


def seconds(fn) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    fn()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def record_row(gpu_bench, n: int, layers: int, path, edges: int, traced: float, plain: float):
    size = path.stat().st_size
    print(f"{n} tokens, {layers} layers: {plain:.2f} s, traced {traced:.2f} s, {edges:,} edges, ")
    print(f"{size:,} bytes")
    nbytes, flops = work(n, "branches")
    gpu_bench.record(
        op="stream_mask",
        case="trace",
        n=n,
        batch=1,
        heads_q=SHAPE.heads_q,
        heads_kv=SHAPE.heads_kv,
        head_dim=SHAPE.dim,
        dtype=torch.bfloat16,
        options=f"{layers} layers, {edges / 1e6:.1f}M edges, {size / 1e6:.0f} MB",
        times_us=[traced * 1e6],
        peer="untraced",
        peer_times_us=[plain * 1e6],
        bytes=layers * nbytes,
        flops=layers * flops,
        policy=policy_name(TRACED),
    )


@torch.no_grad()
@pytest.mark.parametrize("n", TOKENS)
def test_trace_of_a_model(gpu_bench, tmp_path, n):
    model = random_model(LlamaForCausalLM, CONFIG, "cuda")
    ids = torch.randint(0, CONFIG.vocab_size, (1, n), device="cuda")
    path = tmp_path / "run.parquet"

    def forward():
        return model.base_model(ids, use_cache=False)

    def traced():
        with attnplug.trace.record(model, path) as recording:
            forward()
        return recording

    with mlps_in_parts(model), attnplug.applied(model, TRACED):
        model.base_model(ids[:, :PART], use_cache=False)  # compiles momo's kernels
        plain = seconds(forward)
        with attnplug.trace.record(model, path):
            model.base_model(ids[:, :PART], use_cache=False)
        full = seconds(traced)
    found = attnplug.trace.read(path)
    record_row(gpu_bench, n, CONFIG.num_hidden_layers, path, found.meta["edges"], full, plain)
