"""Decode of a whole model with the methods that keep codes of all tokens, beside dense:
milliseconds a step at growing lengths, default options.

The shape is Qwen2.5-7B's with random bf16 weights. One cache with room for a million tokens is
filled up to each length in turn with random keys and values, through the layers' own `update`,
which writes the codes; no prefill runs. sketch's basis is made anew at each length, between two
steps. The step is compiled once a policy (mode="reduce-overhead", fullgraph), as in
test_e2e_gather, whose rows stand beside these. A sample is one step, between CUDA events, without
host synchronisation."""

import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _models import heads_of
from test_e2e_decode import CONFIG, ROOM, STEPS, WARMUP, Decoder, model, time_steps, work_of

import attnplug
from attnplug.bench.rows import policy_name
from attnplug.plan import read_tokens
from attnplug.policies import Phase, methods, refit

LENGTHS = [32768, 131072, 1048576]
CHUNK = 65536
METHODS = {name: methods()[name](min_tokens=0) for name in ("gvr", "sketch")}


def fill_up_to(cache: Any, n: int, batch: int = 1) -> None:
    """Append random tokens to every row and layer until there are n."""
    heads, dim = CONFIG.num_key_value_heads, CONFIG.hidden_size // CONFIG.num_attention_heads
    for index, layer in enumerate(cache.layers):
        random = torch.Generator("cuda").manual_seed(index)
        there = int(layer.cumulative_length) if layer.is_initialized else 0
        for first in range(there, n, CHUNK):
            shape = (2, batch, heads, min(CHUNK, n - first), dim)
            new = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            layer.update(*new.normal_(generator=random))
        layer.exposes_buffers = True  # as a prefill would have found


def decoders_at(
    lengths: list[int], model: Any, policy: str, room: int, batch: int = 1
) -> Iterator[tuple[int, Decoder]]:
    """(length, a warm decoder of compiled steps there), ascending: one cache is filled on."""
    with attnplug.applied(model, policy), torch.no_grad():
        cache = attnplug.make_cache(model, room + ROOM)
        decoder = None
        for n in lengths:
            fill_up_to(cache, n, batch)
            refit(cache)
            decoder = decoder or Decoder(model, cache, n, batch)
            decoder.position = torch.full_like(decoder.position, n)
            for _ in range(WARMUP):
                decoder.step()
            yield n, decoder


@functools.cache
def measured(name: str) -> dict[int, list[float]]:
    """Microseconds of each step, at each length."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()
    decoders = decoders_at(LENGTHS, model(), str(METHODS.get(name, name)), LENGTHS[-1])
    times = {n: time_steps(decoder, STEPS) for n, decoder in decoders}
    torch.compiler.reset()
    return times


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", METHODS)
def test_e2e_policies(gpu_bench, name, n):
    policy: Phase = METHODS[name]
    nbytes, flops = work_of(model(), CONFIG, read_tokens(policy, n, n))
    gpu_bench.record(
        op=name,
        case="e2e-decode",
        n=n,
        batch=1,
        **heads_of(CONFIG),
        dtype=torch.bfloat16,
        options=f"room for {LENGTHS[-1]}",
        times_us=measured(name)[n],
        peer="dense",
        peer_times_us=measured("dense")[n],
        bytes=nbytes,
        flops=flops,
        policy=policy_name(policy),
    )
