"""Decode of a whole model with policy certified beside policy dense: milliseconds a step.

The shape is Llama-3.1-8B's with random bf16 weights, one sequence of 128K random keys and values
(no prefill runs; the first step, which is not timed, quantizes them), the step compiled as one
graph (mode="reduce-overhead"). Two blocks are promoted and the rest is left to the bound, as in
test_certified's `bound`; random keys have no block that stands out, so that the ranking check would
recompute every head, and is off. Originals in host memory and on the device."""

import dataclasses
import functools
import gc

import pytest
import torch
from _models import heads_of, random_model, recomputed
from test_certified import BOUND, WIDTH, token_bytes
from test_e2e_decode import ROOM, STEPS, WARMUP, Decoder, fill, time_steps, work_of
from test_e2e_ttft import CONFIG as LLAMA
from transformers import LlamaForCausalLM

import attnplug
from attnplug import Certified, Policy
from attnplug.bench.rows import policy_name

TOKENS = 131072


def certified(originals: str) -> Certified:
    return dataclasses.replace(BOUND, ranking=0, originals=originals)


@functools.cache
def model() -> LlamaForCausalLM:
    return random_model(LlamaForCausalLM, LLAMA, "cuda")


@functools.cache
def measured(which: str) -> tuple[list[float], float]:
    """Microseconds of each step; the share of head-steps that were recomputed."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()
    policy = which if which == "dense" else Policy(decode=certified(which))
    with attnplug.applied(model(), policy):
        cache = fill(attnplug.make_cache(model(), TOKENS + ROOM), LLAMA, TOKENS, "cuda")
        decoder = Decoder(model(), cache, TOKENS)
        for _ in range(WARMUP):
            decoder.step()
        times = time_steps(decoder, STEPS)
        exact = recomputed(cache)
    torch.compiler.reset()
    return times, exact


@pytest.mark.parametrize("originals", ["device", "host"])
def test_e2e_certified(gpu_bench, originals):
    times, exact = measured(originals)
    nbytes, _ = work_of(model(), LLAMA, TOKENS * token_bytes(BOUND.block) / (4 * WIDTH))
    _, flops = work_of(model(), LLAMA, TOKENS)
    gpu_bench.record(
        op="certified",
        case="e2e-decode",
        n=TOKENS,
        batch=1,
        **heads_of(LLAMA),
        dtype=torch.bfloat16,
        options=f"bound, block=64, originals={originals}, exact {exact:.3f}",
        times_us=times,
        peer="dense",
        peer_times_us=measured("dense")[0],
        bytes=nbytes,
        flops=flops,
        policy=policy_name(certified(originals)),
    )
