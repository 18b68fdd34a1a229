"""`generate_batch` as a user calls it: many requests at once, under policies and by transformers'
own attention for continuous batching, in one run.

The shape is Qwen2.5-7B's with random bf16 weights (test_e2e_decode). Choose parts by pytest's -k
and by the environment:

    ATTNPLUG_BENCH_LOADS     requests x tokens of a prompt   "64x8192,16x32768"
    ATTNPLUG_BENCH_POLICIES                                  "dense;gather;gather(min_tokens=0)"
    ATTNPLUG_BENCH_PEER      what stock must attend with     "flash"; "" takes whatever is there

A row's time is that of a new token: seconds from the first request to the last token, prompts and
all, by the new tokens of all requests. The first call warms up and is left out.
"""

import functools
import gc
import os
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from _models import heads_of
from test_e2e_decode import CONFIG, model, work_of
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

import attnplug
from attnplug.bench.rows import policy_name

LOADS = os.environ.get("ATTNPLUG_BENCH_LOADS", "64x8192,16x32768").split(",")
POLICIES = os.environ.get("ATTNPLUG_BENCH_POLICIES", "dense;gather;gather(min_tokens=0)").split(";")
PEER = os.environ.get("ATTNPLUG_BENCH_PEER", "flash")
NEW, ROUNDS = 128, 2


def prompts(count: int, tokens: int) -> list[list[int]]:
    """Random prompts without a common beginning, so that no page is shared."""
    random = torch.Generator().manual_seed(tokens)
    return torch.randint(10, CONFIG.vocab_size, (count, tokens), generator=random).tolist()


def call(made: Any, ids: list[list[int]], tokens: int) -> tuple[float, str]:
    """Seconds of one call, and the attention that it ran with."""
    generation = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1)
    with made.continuous_batching_context_manager(
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(),
        warmup=True,
        workload_hints=WorkloadHints(max(map(len, ids)), tokens, len(ids)),
    ) as manager:
        name = made.config._attn_implementation
        begun = time.perf_counter()  # graphs are captured: they are a server's start
        manager.add_requests(inputs=ids, max_new_tokens=tokens)
        done = 0
        while done < len(ids):
            result = manager.get_result(timeout=60)
            assert result is not None and result.error is None, result
            done += result.is_finished()
            assert not result.is_finished() or len(result.generated_tokens) == tokens
        taken = time.perf_counter() - begun
    return taken, name


@functools.cache
def times_of(policy: str, count: int, tokens: int) -> tuple[list[float], str]:
    """Microseconds a new token of each round, and the attention that ran."""
    ids, found, name = prompts(count, tokens), [], ""
    with attnplug.applied(model(), policy) if policy else nullcontext(model()) as made:
        for number in range(ROUNDS + 1):
            taken, name = call(made, ids, NEW)
            print(f"{policy or 'stock'} {name} {count}x{tokens}: {taken:.2f} s", flush=True)
            if number:
                found.append(taken / (count * NEW) * 1e6)
    gc.collect()
    torch.cuda.empty_cache()
    return found, name


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("policy", POLICIES)
def test_load(gpu_bench, policy, load):
    count, tokens = map(int, load.split("x"))
    stock, name = times_of("", count, tokens)
    assert PEER in name, f"stock attends with {name}, not {PEER}: install flash-attn or kernels"
    times, _ = times_of(policy, count, tokens)
    nbytes, flops = work_of(model(), CONFIG, tokens, count)
    gpu_bench.record(
        op=policy, case="generate-batch", n=tokens, batch=count, **heads_of(CONFIG),
        dtype=torch.bfloat16, options=f"{NEW} new tokens, transformers {transformers.__version__}",
        times_us=times, peer=f"transformers {name}", peer_times_us=stock, bytes=nbytes / count,
        flops=flops / count, policy=policy_name(policy),
    )  # fmt: skip
