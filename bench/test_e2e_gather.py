"""Decode of a whole model at any context: milliseconds a step with policy gather, and with policy
dense, which is attnplug's own and faster than stock (test_e2e_decode).

The shapes are those of Qwen2.5-7B and Llama-3.1-8B with random bf16 weights. One cache with room
for the longest context of a setting serves all: a policy's step is compiled once for each shape and
batch (mode="reduce-overhead", fullgraph) and run at every length, as a session that grows would.
The cache holds random keys and values, no prefill runs; the summaries are made by a length's first
step, which is not timed. A sample is one step of all sequences, between CUDA events, with no host
synchronisation. With ATTNPLUG_BENCH_PROFILE the kernels of a step at 128K are printed.

`-k parts` profiles a step of the Qwen shape at 8K and says which kernels it consists of: the
products with weights, gather's own, and all others. They are sums of the kernels' times; those that
are launched early wait inside, so that they may add up to more than the step.

A setting is `-k qwen-1`, `qwen-4`, `qwen-8` or `llama-1`: three compilations each, so that one call
can have a part of them."""

import functools
import gc
import os
from typing import Any

import pytest
import torch
from _models import heads_of, random_model
from test_e2e_decode import (
    CONFIG,
    ROOM,
    STEPS,
    WARMUP,
    Decoder,
    fill,
    profile,
    time_steps,
    work_of,
)
from test_e2e_ttft import CONFIG as LLAMA
from transformers import LlamaForCausalLM, Qwen2ForCausalLM

import attnplug
from attnplug import Gather
from attnplug.bench.rows import policy_name
from attnplug.models.cache import PlugCache
from attnplug.plan import read_tokens

SHAPES = {"qwen": (Qwen2ForCausalLM, CONFIG), "llama": (LlamaForCausalLM, LLAMA)}
# shape, batch: contexts. A million tokens of Llama would be 137 GB.
SETTINGS = {
    ("qwen", 1): [8192, 32768, 131072, 524288, 1048576],
    ("qwen", 4): [131072],
    ("qwen", 8): [131072],
    ("llama", 1): [8192, 32768, 131072, 524288],
}
BUDGETS = [None, 8, 32, 256]  # None: dense, rows of its own that attnplug.plan is fitted to
PAPER = "gather(k={k}, block=128, sink=1, local=4, scoring='bounds', min_tokens=0)"


def policy_of(k: int) -> str:
    """The paper's policy of a budget; of 256 blocks, the default."""
    return "gather(min_tokens=0)" if k == 256 else PAPER.format(k=k)


CASES = {
    f"{shape}-{batch}-{f'k{k}' if k else 'dense'}-{n}": (shape, batch, k, n)
    for (shape, batch), lengths in SETTINGS.items()
    for k in BUDGETS
    for n in lengths
}


class Session:
    """One setting's model and cache: the last is all that fits."""

    now: "Session | None" = None

    def __init__(self, shape: str, batch: int, model: Any):
        model_class, self.config = SHAPES[shape]
        self.shape, self.batch = shape, batch
        self.lengths = SETTINGS[shape, batch]
        self.model = model or random_model(model_class, self.config, "cuda")
        with attnplug.applied(self.model, policy_of(8)):
            self.cache: PlugCache = attnplug.make_cache(self.model, max(self.lengths) + ROOM)
        fill(self.cache, self.config, max(self.lengths), "cuda", batch)
        for layer in self.cache.layers:
            layer.exposes_buffers = True  # as a prefill would have found
        self.times: dict[str, dict[int, list[float]]] = {}

    @classmethod
    def of(cls, shape: str, batch: int) -> "Session":
        old, model = cls.now, None
        if old is None or (old.shape, old.batch) != (shape, batch):
            if old is not None:
                cls.now, model = None, old.model if old.shape == shape else None
                del old
                gc.collect()
                torch.cuda.empty_cache()
            cls.now = cls(shape, batch, model)
        assert cls.now is not None
        return cls.now

    def measured(self, policy: str) -> dict[int, list[float]]:
        """Microseconds of each step, at each length."""
        if policy not in self.times:
            torch.compiler.reset()
            self._summarise_for(policy)
            with attnplug.applied(self.model, policy):
                decoder = Decoder(self.model, self.cache, self.lengths[0], self.batch)
                self.times[policy] = {n: self._steps(decoder, n) for n in self.lengths}
            torch.compiler.reset()
        return self.times[policy]

    def _summarise_for(self, policy: str) -> None:
        """Give the cache's layers the summaries that a gather policy needs."""
        method = attnplug.policies.parse(policy).decode
        if isinstance(method, Gather):
            for layer in self.cache.layers:
                layer.block, layer.form = method.block, method.summary_form(layer.max_cache_len)
                layer._make_summaries()

    def _steps(self, decoder: Decoder, n: int) -> list[float]:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(n)
            layer.progress.zero_()
        decoder.position = torch.full_like(decoder.position, n)
        for _ in range(WARMUP):
            decoder.step()
        times = time_steps(decoder, STEPS)
        if n == 131072 and os.environ.get("ATTNPLUG_BENCH_PROFILE"):
            profile(decoder)
        return times

    def work(self, n: float) -> tuple[int, int]:
        return work_of(self.model, self.config, n, self.batch)


@pytest.mark.parametrize(("shape", "batch", "k", "n"), CASES.values(), ids=CASES)
def test_e2e_gather(gpu_bench, shape, batch, k, n):
    session = Session.of(shape, batch)
    config, dense = session.config, session.measured("dense")[n]
    policy = attnplug.policies.parse(policy_of(k or 0)).decode
    read = n if k is None else read_tokens(policy, n, max(session.lengths) + ROOM)
    nbytes, flops = session.work(read)
    facts = dict(
        case="e2e-decode",
        n=n,
        batch=batch,
        **heads_of(config),
        dtype=torch.bfloat16,
        bytes=nbytes,
        flops=flops,
    )
    room = f"room for {max(session.lengths)}"
    if k is None:
        gpu_bench.record(op="dense_decode", options=room, times_us=dense, policy="dense", **facts)
        return
    gpu_bench.record(
        op="gather",
        options=f"k={k}, {room}",
        times_us=session.measured(policy_of(k))[n],
        policy=policy_name(policy),
        peer="dense",
        peer_times_us=dense,
        **facts,
    )


PARTS = {
    "products with weights": ("nvjet", "cublas", "gemm", "gemv"),
    "gather": ("score_blocks", "select_best", "attend_kept", "merge_splits", "append"),
    "everything else": ("",),
}
PROFILED, PROFILED_STEPS = 8192, 5


@functools.cache
def kernels_of_a_step() -> dict[str, list[tuple[float, int]]]:
    """Of each part (microseconds, launches) of every kernel, all profiled steps together."""
    torch.compiler.reset()
    session = Session.of("qwen", 1)
    session._summarise_for(policy_of(8))
    with attnplug.applied(session.model, policy_of(8)):
        decoder = Decoder(session.model, session.cache, PROFILED)
        session._steps(decoder, PROFILED)
        averages = profile(decoder, PROFILED_STEPS)
    torch.compiler.reset()
    parts: dict[str, list[tuple[float, int]]] = {part: [] for part in PARTS}
    for row in averages:
        if row.device_type == torch.autograd.DeviceType.CUDA and "##" not in row.key:
            part = next(p for p, names in PARTS.items() if any(name in row.key for name in names))
            parts[part].append((row.self_device_time_total, row.count))
    return parts


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_a_step(gpu_bench, part):
    kernels = kernels_of_a_step()[part]
    session = Session.of("qwen", 1)
    config = session.config
    weights, flops = session.work(0) if part == "products with weights" else (0, 0)
    count = sum(launches for _, launches in kernels) // PROFILED_STEPS
    row = gpu_bench.record(
        op="gather",
        case="e2e-part",
        n=PROFILED,
        batch=1,
        **heads_of(config),
        dtype=torch.bfloat16,
        options=f"k=8, {part}, {count} kernels",
        times_us=[sum(time for time, _ in kernels) / PROFILED_STEPS],
        bytes=weights,
        flops=flops,
        policy=policy_name(policy_of(8)),
    )
    assert row["p50_us"] > 0
