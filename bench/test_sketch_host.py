"""sketch decode from a cache in host memory: one layer, and a whole model at 1M tokens.

As test_gather_host, whose keys, values, queries and link these are: the ceiling is the link. Every
pick of every step crosses it. `policy` names what runs, and the basis is made once, of the keys and
of no query. The peer of one layer is the same step of a cache on the GPU, by the same kernels; of
the whole model, dense attention over the same cache, one layer's measured, times the layers.

The whole model has the shape of Qwen2.5-7B with random bf16 weights and 1M tokens of keys and
values, 60 GB, in host memory; the allocator may take 26 GB of the GPU. No prefill runs."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _models import timed
from test_e2e_decode import CONFIG, Decoder, model, time_steps
from test_gather_host import (
    HEADS_KV,
    HEADS_Q,
    MILLION,
    ROOM,
    STEPS,
    WIDTH,
    fill,
    link,
    record_million,
    turning,
)

import attnplug
from attnplug import Dense, Sketch
from attnplug.bench.rows import policy_name
from attnplug.ops.sketch.state import BLOCK
from attnplug.policies import AttentionCall, refit

LIMIT = 26e9  # bytes of GPU memory for the whole model, a layer's copy for its basis included
WARMUP, TOKENS = 24, 60
POLICY = "sketch(kv='host')"


class Layer:
    """One layer's cache, and a step on it for each query."""

    def __init__(self, policy: Sketch, batch: int, n: int):
        self.policy, self.n = policy, n
        self.layer = policy.cache_layer(n)
        self.layer.query_heads = HEADS_Q
        empty = torch.empty(batch, HEADS_KV, 0, WIDTH, dtype=torch.bfloat16, device="cuda")
        self.layer.lazy_initialization(empty, empty)
        fill(self.layer, n - ROOM, 0)
        self.layer.seen = n - ROOM
        self.layer.refit(None, None)
        self.layer.due = 2 * n  # steps alone are timed
        self.new = torch.randn(2, batch, HEADS_KV, 1, WIDTH, device="cuda").bfloat16()
        self.queries = turning("drift", batch)

    def step(self, step: int) -> torch.Tensor:
        if step == 0:
            self.layer.cumulative_length.fill_(self.n - ROOM)
        self.layer.pending = self.new[0], self.new[1]
        length, buffers = self.layer.cumulative_length.reshape(1), self.layer._buffers()
        call = AttentionCall(
            self.queries[step], *buffers, WIDTH**-0.5, lengths=length, state=self.layer
        )
        return self.policy.attend(call)

    def steps(self) -> list[Callable[[], Any]]:
        return [functools.partial(self.step, step) for step in range(STEPS)]


def crossed(k: int, batch: int) -> int:
    """Bytes over the link a step and layer: keys and values of the picks."""
    return 2 * batch * HEADS_KV * k * WIDTH * 2


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("k", [512, 2048])
def test_one_layer(gpu_bench, k, batch):
    n, policies = 131072, [Sketch(k=k, audit=0, min_tokens=0, kv=kv) for kv in ("host", "gpu")]
    host, near = (Layer(policy, batch, n) for policy in policies)
    link_bytes = crossed(k, batch)
    gpu_bench(
        op="sketch",
        case="op",
        n=n,
        batch=batch,
        heads_q=HEADS_Q,
        heads_kv=HEADS_KV,
        head_dim=WIDTH,
        dtype=torch.bfloat16,
        options=f"host memory, k={k}, drift queries, link {link() / 1e9:.1f} GB/s",
        policy=policy_name(Sketch(k=k, kv="host")),
        fns=host.steps(),
        peer="sketch on the GPU",
        peer_fns=near.steps(),
        rounds=15,
        bytes=link_bytes + batch * HEADS_KV * 24 * n,
        flops=4 * batch * HEADS_Q * WIDTH * (5 * BLOCK + k),
        ceiling=lambda seconds: link_bytes / seconds / link(),
    )


@functools.cache
def million() -> tuple[list[float], list[float], float]:
    """Microseconds of each step, of one layer read whole by dense, and GB of the GPU taken."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(LIMIT / total)
    with attnplug.applied(model(), POLICY), torch.no_grad():
        cache = attnplug.make_cache(model(), MILLION)
        cache.early_initialization(1, HEADS_KV, WIDTH, torch.bfloat16, torch.device("cuda"))
        length = MILLION - 2 * (WARMUP + TOKENS)
        for index, layer in enumerate(cache.layers):
            fill(layer, length, index)
            layer.seen = length
        refit(cache)
        first = cache.layers[0]
        call = AttentionCall(
            torch.randn(1, HEADS_Q, 1, WIDTH, device="cuda").bfloat16(),
            *first._buffers(),
            WIDTH**-0.5,
            lengths=first.cumulative_length.reshape(1),
        )
        dense = [timed(lambda: Dense().attend(call)) * 1e6 for _ in range(4)]
        decoder = Decoder(model(), cache, length)
        for _ in range(WARMUP):
            decoder.step()
        times = time_steps(decoder, TOKENS)
    taken = torch.cuda.max_memory_reserved() / 1e9
    torch.cuda.set_per_process_memory_fraction(1.0)
    return times, dense[1:], taken


def test_a_million_tokens(gpu_bench):
    times, dense, taken = million()
    layers = CONFIG.num_hidden_layers
    record_million(
        gpu_bench,
        op="sketch",
        policy=POLICY,
        options="host memory, greedy tokens",
        times=times,
        layer_times=dense,
        crossed=layers * crossed(Sketch().k, 1),
        scanned=layers * HEADS_KV * 24 * MILLION,
        taken=taken,
    )
    assert taken < LIMIT / 1e9
