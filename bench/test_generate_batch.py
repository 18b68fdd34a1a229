"""`generate_batch` as a user calls it: many requests at once, under policies and by transformers'
own attention for continuous batching, in one run.

The shape is Qwen2.5-7B's with random bf16 weights (test_e2e_decode). Choose parts by pytest's -k
(`-k "dense-64x8192 or gather-16x32768"`) and by the environment:

    ATTNPLUG_BENCH_LOADS     requests x tokens of a prompt   "64x8192,16x32768"
    ATTNPLUG_BENCH_POLICIES                                  "dense;gather;gather(min_tokens=0)"
    ATTNPLUG_BENCH_PEER      what stock must attend with     "flash"; "" takes whatever is there
    ATTNPLUG_BENCH_ROUNDS    calls that are timed, a side    "2"

Where neither flash-attn nor kernels is installed, "flash" is vLLM's build of FlashAttention 3, and
a row's peer says so. Calls carry `.peers`, and `_flash_stand_in` shows it to transformers while
stock runs. Policies never see it.

A row's time is that of a new token: seconds from the first request to the last token, prompts and
all, by the new tokens of all requests. The first call warms up and is left out. A call that has not
answered all requests after LIMIT seconds fails, and its manager stops at once. A process that hangs
otherwise (a kernel, a capture) ends after twice LIMIT, and tells where each thread stood.
"""

import contextlib
import faulthandler
import functools
import gc
import os
import sys
import time
from typing import Any

import _flash_stand_in
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
ROUNDS = int(os.environ.get("ATTNPLUG_BENCH_ROUNDS", "2"))
NEW, LIMIT = 128, 120


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
        with contextlib.ExitStack() as failing:
            # The context manager would first let all requests run to their end.
            failing.callback(manager.stop, hard_stop=True)
            begun = time.perf_counter()  # graphs are captured: they are a server's start
            manager.add_requests(inputs=ids, max_new_tokens=tokens)
            await_all(manager, len(ids), tokens)
            taken = time.perf_counter() - begun
            failing.pop_all()
    return taken, name


def await_all(manager: Any, count: int, tokens: int) -> None:
    """Take the results of all requests; fail LIMIT seconds from now, or when none can come."""
    done, end = 0, time.perf_counter() + LIMIT
    while done < count:
        result = manager.get_result(timeout=1)  # None: there is none yet
        if result is not None:
            assert result.error is None, f"{done} of {count} requests are done: {result.error}"
            done += result.is_finished()
            assert not result.is_finished() or len(result.generated_tokens) == tokens
        elif not manager.is_running():
            pytest.fail(f"the manager's thread ended: {done} of {count} requests are done")
        if done < count and time.perf_counter() > end:
            pytest.fail(f"{done} of {count} requests are done after {LIMIT} s")


@contextlib.contextmanager
def ending_the_process():
    """The process ends, with a traceback of each thread, where one call takes twice LIMIT."""
    faulthandler.dump_traceback_later(2 * LIMIT, file=sys.__stderr__, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def stands_in() -> bool:
    """Whether stock attends by the stand-in."""
    return PEER == "flash" and _flash_stand_in.is_needed()


def side(policy: str) -> contextlib.AbstractContextManager[Any]:
    """Gives the model, under a policy or, for "", as transformers has it."""
    if policy:
        return attnplug.applied(model(), policy)
    if stands_in():
        return _flash_stand_in.attending_by_flash(model())
    return contextlib.nullcontext(model())


@functools.cache
def times_of(policy: str, count: int, tokens: int) -> tuple[list[float], str]:
    """Microseconds a new token of each round, and the attention that ran."""
    ids, found, name = prompts(count, tokens), [], ""
    with side(policy) as made:
        for number in range(ROUNDS + 1):
            with ending_the_process():
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
    attention = name.rpartition("|")[2]  # "paged|..." is two cells of a table
    peer = f"transformers' {attention}" + " (vLLM's build)" * stands_in()
    gpu_bench.record(
        op=policy, case="generate-batch", n=tokens, batch=count, **heads_of(CONFIG),
        dtype=torch.bfloat16, options=f"{NEW} new tokens, transformers {transformers.__version__}",
        times_us=times, peer=peer, peer_times_us=stock, bytes=nbytes / count,
        flops=flops / count, policy=policy_name(policy),
    )  # fmt: skip
