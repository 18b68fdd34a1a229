"""Decode of a whole model: milliseconds a token of stock transformers and of policy dense.

The shape is Qwen2.5-7B's with random bf16 weights; the cache is filled with random keys and values
to n tokens, no prefill runs. Stock is what a user gets from generate with a static cache: SDPA, the
forward compiled with mode="reduce-overhead", inputs and mask prepared as its generate prepares them
(transformers 5.17 keeps a mask of ones, 5.23 drops it). Ours is the same model after
`attnplug.apply(model, "dense")`: same weights, same cache contents, same loop. A sample is one
token, between CUDA events, with no host synchronisation.
"""

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _models import heads_of, random_model
from transformers import (
    Cache,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    StaticCache,
)

import attnplug
from attnplug.models.names import CACHE

TOKENS = [8192, 131072]
ROOM = 128  # cache slots past n: the steps of one measurement
WARMUP, STEPS = 8, 40
CONFIG = Qwen2Config(
    hidden_size=3584,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    intermediate_size=18944,
    vocab_size=152064,
    max_position_embeddings=262144,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    tie_word_embeddings=False,
    attn_implementation="sdpa",
)


@functools.cache
def model() -> Qwen2ForCausalLM:
    return random_model(Qwen2ForCausalLM, CONFIG, "cuda")


def fill(cache: Cache, config: PreTrainedConfig, n: int, device: str, batch: int = 1) -> Cache:
    """Give every layer n random tokens, the same for every cache."""
    dim = config.hidden_size // config.num_attention_heads
    cache.early_initialization(
        batch, config.num_key_value_heads, dim, torch.bfloat16, torch.device(device)
    )
    for index, layer in enumerate(cache.layers):
        random = torch.Generator(device).manual_seed(index)
        layer.keys[:, :, :n].normal_(generator=random)
        layer.values[:, :, :n].normal_(generator=random)
        layer.cumulative_length.fill_(n)
    return cache


def keeps_mask(model: PreTrainedModel) -> bool:
    """Whether this model's generate hands an all-ones attention mask on to its decode steps."""
    prepare = model.prepare_inputs_for_generation
    masked = []

    @functools.wraps(prepare)
    def record(*args: Any, **kwargs: Any) -> Any:
        masked.append(kwargs.get("attention_mask") is not None)
        return prepare(*args, **kwargs)

    model.prepare_inputs_for_generation = record
    try:
        prompt = torch.full((1, 4), 7, device=model.device)
        options: dict[str, Any] = dict(cache_implementation="static", disable_compile=True)
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, **options)
    finally:
        del model.prepare_inputs_for_generation
    return masked[-1]


class Decoder:
    """Greedy decoding, one compiled step a call, as generate's loop does it."""

    def __init__(self, model: PreTrainedModel, cache: Cache, n: int, batch: int = 1):
        self.model, self.cache = model, cache
        self.forward = torch.compile(model.__call__, mode="reduce-overhead", fullgraph=True)
        device = model.device
        self.token = torch.full((batch, 1), 7, device=device)
        self.mask = None
        if keeps_mask(model):
            self.mask = torch.ones(batch, n + 1, dtype=torch.long, device=device)
        self.position = torch.full((1, 1), n, device=device)

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """Feed the last tokens; returns the logits `[B,V]` of the next."""
        inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            self.token,
            next_sequence_length=1,
            **{CACHE: self.cache},
            attention_mask=self.mask,
            position_ids=self.position,
            use_cache=True,
        )
        logits = self.forward(**inputs, return_dict=True).logits[:, -1].float()
        self.token = logits.argmax(-1, keepdim=True)
        if self.mask is not None:
            self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        self.position = self.position + 1
        return logits


def time_steps(decoder: Decoder, steps: int) -> list[float]:
    """Microseconds of each of so many steps, with no host synchronisation between."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        decoder.step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]


def measure(make_cache: Callable[[], Cache], n: int) -> tuple[list[float], torch.Tensor]:
    """Microseconds of each step at n to n + ROOM tokens, and the logits of the first."""
    torch.compiler.reset()
    decoder = Decoder(model(), fill(make_cache(), CONFIG, n, "cuda"), n)
    first = decoder.step().clone()
    for _ in range(WARMUP):
        decoder.step()
    times = time_steps(decoder, STEPS)
    if os.environ.get("ATTNPLUG_BENCH_PROFILE"):
        profile(decoder)
    del decoder
    torch.compiler.reset()
    torch.cuda.empty_cache()
    return times, first


def profile(decoder: Decoder, steps: int = 5) -> Any:
    """Prints where the time of so many steps went; returns the profiler's averages."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(steps):
            decoder.step()
        torch.cuda.synchronize()
    averages = recorded.key_averages()
    print(averages.table(sort_by="self_cuda_time_total", row_limit=18, max_name_column_width=70))
    return averages


def work(n: int) -> tuple[int, int]:
    """Bytes and FLOPs that a token needs of this shape: see `work_of`."""
    return work_of(model(), CONFIG, n)


def work_of(
    model: PreTrainedModel, config: PreTrainedConfig, n: float, batch: int = 1
) -> tuple[int, int]:
    """Bytes and FLOPs of a step: every weight but the embedding table once, and keys and values of
    n tokens for each sequence."""
    read = sum(p.numel() for p in model.parameters()) - config.vocab_size * config.hidden_size
    dim = config.hidden_size // config.num_attention_heads
    cached = config.num_hidden_layers * 2 * config.num_key_value_heads * dim * n
    scored = config.num_hidden_layers * 4 * config.num_attention_heads * dim * n
    return int(2 * (read + batch * cached)), int(batch * (2 * read + scored))


@pytest.mark.parametrize("n", TOKENS)
def test_e2e_decode(gpu_bench, n):
    length = n + ROOM
    stock, wanted = measure(lambda: StaticCache(CONFIG, max_cache_len=length), n)
    with attnplug.applied(model(), "dense"):
        ours, found = measure(lambda: attnplug.make_cache(model(), length), n)
    error = float((found - wanted).norm() / wanted.norm())
    assert error < 0.05, f"the first logits differ by {error:.3f}: not the same computation"
    nbytes, flops = work(n)
    row = gpu_bench.record(
        op="dense_decode",
        case="e2e-decode",
        n=n,
        batch=1,
        **heads_of(CONFIG),
        dtype=torch.bfloat16,
        times_us=ours,
        peer="stock",
        peer_times_us=stock,
        bytes=nbytes,
        flops=flops,
        policy="dense",
    )
    assert row["ratio"] >= {8192: 1.3, 131072: 6.0}[n]
