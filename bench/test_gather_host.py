"""gather decode from a cache in host memory: one layer, and a whole model at 1M tokens.

The ceiling of these rows is the link: bytes that crossed it a second, beside a plain copy of pinned
memory in the same run. Keys and values are Gaussian, so that which blocks a step wants hangs on its
query alone. `random` queries have nothing to do with one another, and next to no block is wanted
again while it is there; `drift` queries turn a little from step to step (cosine 0.99). Both stand
in `options` with the hit rate that was counted.

The whole model has the shape of Qwen2.5-7B with random bf16 weights and 1M tokens of keys and
values, 60 GB, in host memory; the allocator may take 24 GB of the GPU. No prefill runs. Its tokens
are drawn at random, or greedy, or `drift`: their embeddings turn from token to token (cosine 0.95).
A text's steps list again a half to four fifths of what the step before listed (docs/log/gather.md),
and 0.86 of what eight steps listed (results/page-turnover.json), which random tokens do not.
`steady` tokens come near to that: embeddings that turn less (cosine 0.99, `steadiest` 0.999) and
quiet values. The peer is dense attention over the same cache, read from the host: one layer's,
measured, times the layers."""

import functools
import gc
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _models import timed
from test_e2e_decode import CONFIG, Decoder, model, time_steps, work
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

import attnplug
from attnplug import Dense, Gather
from attnplug.bench.rows import policy_name
from attnplug.policies import AttentionCall, parse, residency

HEADS_Q, HEADS_KV, WIDTH = 28, 4, 128
MILLION = 1 << 20
STEPS, ROOM = 32, 64  # queries in turn; tokens that they may append
LIMIT = 24e9  # bytes of GPU memory for the whole model
WARMUP, TOKENS = 24, 60


@functools.cache
def link() -> float:
    """Bytes a second of a plain copy from pinned memory."""
    host = torch.empty(1 << 29, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    times = [timed(lambda: there.copy_(host, non_blocking=True)) for _ in range(6)]
    return host.nbytes / statistics.median(times[1:])


def fill(layer: Any, tokens: int, seed: int, values: float = 1.0) -> None:
    """Random keys, and random values of such a deviation, as many tokens as an update would have
    left there."""
    random = torch.Generator("cuda").manual_seed(seed)
    chunk = torch.empty(1, HEADS_KV, 1 << 17, WIDTH, dtype=torch.bfloat16, device="cuda")
    for buffer, deviation in zip(layer._buffers(), (1.0, values), strict=True):
        for part in buffer.split(chunk.shape[2], 2):
            part.copy_(chunk.normal_(std=deviation, generator=random)[:, :, : part.shape[2]])
    layer.cumulative_length.fill_(tokens)
    layer.crop(0)  # the ring, from the host
    layer.exposes_buffers = True  # as a prefill would have found


def turn(noise: torch.Tensor, cosine: float) -> torch.Tensor:
    """Standard normal rows, each of which becomes one at such a cosine to the row before."""
    for before, now in itertools.pairwise(noise):
        now.mul_((1 - cosine**2) ** 0.5).add_(before, alpha=cosine)
    return noise


def turning(kind: str, batch: int) -> torch.Tensor:
    """`[STEPS,B,Hq,1,D]` queries."""
    random = torch.Generator("cuda").manual_seed(7)
    noise = torch.randn(STEPS, batch, HEADS_Q, 1, WIDTH, device="cuda", generator=random)
    return turn(noise, {"random": 0.0, "drift": 0.99}[kind]).bfloat16()


class Layer:
    """One layer's cache in host memory, and a step on it for each query."""

    def __init__(self, policy: Gather, batch: int, n: int, kind: str):
        self.policy, self.n = policy, n
        self.layer = policy.cache_layer(n)
        empty = torch.empty(batch, HEADS_KV, 0, WIDTH, dtype=torch.bfloat16, device="cuda")
        self.layer.lazy_initialization(empty, empty)
        fill(self.layer, n - ROOM, 0)
        self.new = torch.randn(2, batch, HEADS_KV, 1, WIDTH, device="cuda").bfloat16()
        self.queries = turning(kind, batch)

    def call(self, step: int) -> AttentionCall:
        length = self.layer.cumulative_length.reshape(1)
        q, keys_values = self.queries[step], self.layer._buffers()
        return AttentionCall(q, *keys_values, WIDTH**-0.5, lengths=length, state=self.layer)

    def step(self, step: int) -> torch.Tensor:
        if step == 0:
            self.layer.cumulative_length.fill_(self.n - ROOM)
        self.layer.pending = self.new[0], self.new[1]
        return self.policy.attend(self.call(step))

    def dense(self) -> torch.Tensor:
        return Dense().attend(self.call(0))

    def steps(self) -> list[Callable[[], Any]]:
        return [functools.partial(self.step, step) for step in range(STEPS)]

    def count(self) -> tuple[float, float]:
        """(hit rate, bytes over the link a step) once what came before is forgotten."""
        for turn in range(2):
            if turn == 1:
                self.layer.near.counters[..., :2] = 0
            for step in self.steps():
                step()
        counted = self.layer.near.counters.sum((0, 1))
        block = self.layer.near.slots[0, 0, 0].nbytes
        return float(counted[1] / counted[0]), float(counted[0] - counted[1]) * block / STEPS


# k, batch, tokens, queries, slots a KV head: with the fewest that a step can do with, the link is
# what is measured.
POLICY = "gather(k=32, block=128, sink=1, local=4, scoring='bounds', kv='host')"
CASES = [
    *((32, 1, n, kind, 256) for n in (131072, MILLION) for kind in ("random", "drift")),
    *((8, 1, 131072, kind, 256) for kind in ("random", "drift")),
    *((32, batch, 131072, "random", 33) for batch in (1, 4)),
]


@pytest.mark.parametrize(("k", "batch", "n", "kind", "slots"), CASES)
def test_one_layer(gpu_bench, k, batch, n, kind, slots):
    paper = {"block": 128, "sink": 1, "local": 4, "scoring": "bounds"}
    policy = Gather(k=k, **paper, kv="host", resident=slots, min_tokens=0)
    made = Layer(policy, batch, n, kind)
    hits, crossed = made.count()
    summaries = batch * HEADS_KV * n // policy.block * 2 * WIDTH * 2
    gpu_bench(
        op="tiered",
        case="op",
        n=n,
        batch=batch,
        heads_q=HEADS_Q,
        heads_kv=HEADS_KV,
        head_dim=WIDTH,
        dtype=torch.bfloat16,
        options=f"k={k}, {slots} slots, {kind} queries, hits {hits:.3f}, "
        f"link {link() / 1e9:.1f} GB/s",
        fns=made.steps(),
        peer="dense from host",
        peer_fns=[made.dense],
        rounds=15,
        bytes=crossed + summaries,
        flops=4 * batch * HEADS_Q * WIDTH * policy.block * (5 + k),
        ceiling=lambda seconds: crossed / seconds / link(),
        policy=policy_name(policy),
    )


class Random(Decoder):
    """A token that nobody can foresee, at each step."""

    def step(self) -> torch.Tensor:
        self.token = torch.randint(2, CONFIG.vocab_size, (1, 1), device=self.model.device)
        return super().step()


class Drift(Decoder):
    """Tokens in turn whose embeddings turn a little from one to the next, at such a cosine."""

    cosine = 0.95

    def __init__(self, model: PreTrainedModel, cache: Cache, n: int):
        super().__init__(model, cache, n)
        rows = model.get_input_embeddings().weight[: WARMUP + TOKENS]
        random = torch.Generator(rows.device).manual_seed(8)
        noise = torch.randn(rows.shape, device=rows.device, generator=random)
        with torch.no_grad():
            rows.copy_(turn(noise, self.cosine) * rows.float().std())
        self.next = 0

    def step(self) -> torch.Tensor:
        self.token = torch.full((1, 1), self.next, device=self.model.device)
        self.next += 1
        return super().step()


class SteadyDrift(Drift):
    cosine = 0.99


class SteadiestDrift(Drift):
    cosine = 0.999


# A kind's tokens, and the deviation of values. With quiet ones layers have queries that turn as the
# embeddings do: what a layer read makes no noise for those behind it.
TOKENS_OF = {
    1.0: {"random": Random, "greedy": Decoder, "drift": Drift},
    0.001: {"steady": SteadyDrift, "steadiest": SteadiestDrift},
}


@functools.cache
def million(policy: str, values: float) -> dict[str, tuple[list[float], float, float, float]]:
    """Of each kind of tokens with such values: microseconds of each step, hit rate, bytes over the
    link a step; and under "dense" the microseconds of one layer, read whole."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(LIMIT / total)
    with attnplug.applied(model(), policy), torch.no_grad():
        found = million_steps(values)
    torch._dynamo.reset()  # its graphs hold the cache, and the host has no room for another
    gc.collect()
    torch.cuda.set_per_process_memory_fraction(1.0)
    return found


def million_steps(values: float) -> dict[str, tuple[list[float], float, float, float]]:
    kinds = TOKENS_OF[values]
    cache = attnplug.make_cache(model(), MILLION)
    cache.early_initialization(1, HEADS_KV, WIDTH, torch.bfloat16, torch.device("cuda"))
    for index, layer in enumerate(cache.layers):
        fill(layer, MILLION - (len(kinds) + 1) * (WARMUP + TOKENS), index, values)
    first = cache.layers[0]
    call = AttentionCall(
        torch.randn(1, HEADS_Q, 1, WIDTH, device="cuda").bfloat16(),
        *first._buffers(),
        WIDTH**-0.5,
        lengths=first.cumulative_length.reshape(1),
    )
    dense = [timed(lambda: Dense().attend(call)) * 1e6 for _ in range(4)]
    found = {"dense": (dense[1:], 0.0, first.keys.nbytes * 2.0, 0.0)}
    decoder = None
    for kind, made in kinds.items():
        forward = None if decoder is None else decoder.forward
        length = int(first.cumulative_length)
        decoder = made(model(), cache, length)
        decoder.forward = forward or decoder.forward  # compiled once
        found[kind] = measure(decoder, cache)
    return found


def measure(decoder: Decoder, cache: Any) -> tuple[list[float], float, float, float]:
    for _ in range(WARMUP):
        decoder.step()
    for layer in cache.layers:
        layer.near.counters[..., :2] = 0
    times = time_steps(decoder, TOKENS)
    rows = residency(cache)
    hits = sum(row.found for row in rows) / sum(row.wanted for row in rows)
    taken = torch.cuda.max_memory_reserved() / 1e9
    return times, hits, sum(row.link_bytes for row in rows) / TOKENS, taken


def record_million(
    gpu_bench: Any,
    *,
    op: str,
    policy: str,
    options: str,
    times: list[float],
    layer_times: list[float],
    crossed: float,
    scanned: float,
    taken: float,
) -> None:
    """The row of a whole model at a million tokens: microseconds of its steps, and of one layer
    that dense reads over the link; bytes that a step brings over it (`crossed`) and reads of codes
    on the GPU (`scanned`), of all layers; GB of the GPU that were `taken`."""
    weights, flops = work(0)
    gpu_bench.record(
        op=op,
        case="e2e-decode",
        n=MILLION,
        batch=1,
        heads_q=HEADS_Q,
        heads_kv=HEADS_KV,
        head_dim=WIDTH,
        dtype=torch.bfloat16,
        options=f"{options}, link {link() / 1e9:.1f} GB/s, GPU memory {taken:.1f} GB",
        times_us=times,
        peer="dense from host",
        peer_times_us=[CONFIG.num_hidden_layers * time for time in layer_times],
        bytes=weights + crossed + scanned,
        flops=flops,
        ceiling=lambda seconds: crossed / seconds / link(),
        policy=policy_name(policy),
    )


@pytest.mark.parametrize(
    ("kind", "values"), [(kind, values) for values, kinds in TOKENS_OF.items() for kind in kinds]
)
@pytest.mark.parametrize("policy", ["gather(kv='host')", POLICY], ids=["default", "paper"])
def test_a_million_tokens(gpu_bench, policy, kind, values):
    found = million(policy, values)
    times, hits, crossed, taken = found[kind]
    record_million(
        gpu_bench,
        op="tiered",
        policy=policy,
        options=f"k={parse(policy).decode.k}, {kind} tokens, hits {hits:.3f}",
        times=times,
        layer_times=found["dense"][0],
        crossed=crossed,
        scanned=0,
        taken=taken,
    )
    assert taken < LIMIT / 1e9
