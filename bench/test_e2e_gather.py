"""Decode of a whole model at any context: milliseconds a token with policy gather, and with policy
dense, which is attnplug's own and faster than stock (test_e2e_decode).

The shape is Qwen2.5-7B's with random bf16 weights. One cache with room for the longest context
serves all: a policy's step is compiled once (mode="reduce-overhead", fullgraph) and run at every
length, as a session that grows would. The cache holds random keys and values, no prefill runs; the
summaries are made by a length's first step, which is not timed. A sample is one token, between CUDA
events, with no host synchronisation."""

import functools
import itertools

import pytest
import torch
from test_e2e_decode import CONFIG, ROOM, STEPS, WARMUP, Decoder, fill, model, work

import attnplug
from attnplug import Gather
from attnplug.models.cache import PlugCache

TOKENS = [8192, 32768, 131072, 524288, 1048576]
SUMMARY = "gather(k={k}, min_tokens=0)"


@functools.cache
def cache() -> PlugCache:
    with attnplug.applied(model(), SUMMARY.format(k=8)):
        made = attnplug.make_cache(model(), max(TOKENS) + ROOM)
    fill(made, CONFIG, max(TOKENS), "cuda")
    for layer in made.layers:
        layer.lent = True  # as a prefill would have found
    return made


def set_length(decoder: Decoder, n: int) -> None:
    for layer in cache().layers:
        layer.cumulative_length.fill_(n)
        layer.progress.zero_()
    decoder.position = torch.full_like(decoder.position, n)


@functools.cache
def measure(policy: str) -> dict[int, list[float]]:
    """Microseconds of each step, at each length."""
    torch.compiler.reset()
    times, slots = {}, cache()
    with attnplug.applied(model(), policy):
        decoder = Decoder(model(), slots, TOKENS[0])
        for n in TOKENS:
            set_length(decoder, n)
            for _ in range(WARMUP):
                decoder.step()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
            torch.cuda.synchronize()
            events[0].record()
            for event in events[1:]:
                decoder.step()
                event.record()
            torch.cuda.synchronize()
            times[n] = [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]
    torch.compiler.reset()
    return times


@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize("k", [8, 32])
def test_e2e_gather(gpu_bench, k, n):
    weights, flops = work(0)
    policy = Gather(k=k)
    kept = min((policy.sink + policy.local + k) * policy.block, n)
    cached, scored = (x - y for x, y in zip(work(kept), (weights, flops), strict=True))
    cached += (work(n)[0] - weights) // policy.block
    gpu_bench.record(
        op="gather",
        case="e2e-decode",
        n=n,
        batch=1,
        heads_q=CONFIG.num_attention_heads,
        heads_kv=CONFIG.num_key_value_heads,
        head_dim=CONFIG.hidden_size // CONFIG.num_attention_heads,
        dtype=torch.bfloat16,
        options=f"k={k}, room for {max(TOKENS)}",
        times_us=measure(SUMMARY.format(k=k))[n],
        peer="dense",
        peer_times_us=measure("dense")[n],
        bytes=weights + cached,
        flops=flops + scored,
    )
