"""A gvr decode step of one layer (scores from INT8 keys, exact top-k, attention over the picks)
against the fastest dense decode of the same run over the same cache: one query a sequence, bf16,
28/4 heads of 128. Gaussian keys: which tokens are picked is random. Writing the token is not in it,
on either side."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peers import cudnn_attention

from attnplug import Dense, Gvr
from attnplug.bench.rows import policy_name
from attnplug.ops import (
    gather_tokens_attention,
    score_tokens,
    top_tokens,
    topk,
)
from attnplug.policies import AttentionCall

HEADS_Q, HEADS_KV, WIDTH = 28, 4, 128
SCALE = WIDTH**-0.5
CALLS = 8  # in one graph
CHUNK = 65536
# (k, batch, tokens)
SHAPES = [
    *((2048, 1, n) for n in (32768, 65536, 131072, 524288, 1048576)),
    (512, 1, 131072),
    (2048, 8, 131072),
]


def call_of(policy: Gvr, batch: int, n: int, seed: int) -> AttentionCall:
    """A step on a cache of n tokens, all of them there."""
    random = torch.Generator("cuda").manual_seed(seed)
    normal = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda", generator=random)
    layer = policy.cache_layer(n)
    for _ in range(0, n, CHUNK):
        layer.update(*normal(2, batch, HEADS_KV, min(n, CHUNK), WIDTH))
    assert layer.keys is not None and layer.values is not None
    return AttentionCall(
        normal(batch, HEADS_Q, 1, WIDTH),
        layer.keys,
        layer.values,
        SCALE,
        lengths=layer.cumulative_length.reshape(1),
        state=layer,
    )


@pytest.mark.parametrize("peer", ["dense", "cudnn"])
@pytest.mark.parametrize("k, batch, n", SHAPES)
def test_gvr(gpu_bench, k, batch, n, peer):
    policy = Gvr(k=k, min_tokens=0)
    cache_bytes = batch * HEADS_KV * n * (5 * WIDTH + 4)
    count = min(gpu_bench.sets(cache_bytes), 4)
    calls = [call_of(policy, batch, n, seed) for seed in range(count)]
    theirs = Dense().attend if peer == "dense" else cudnn
    scanned = n * (WIDTH + 4) + min(policy.kept, n) * 4 * WIDTH
    calls *= max(1, CALLS // count)
    gpu_bench(
        op="gvr", case="op", n=n, batch=batch, heads_q=HEADS_Q, heads_kv=HEADS_KV, head_dim=WIDTH,
        dtype=torch.bfloat16, options=f"k={k}",
        fns=[functools.partial(policy.attend, c) for c in calls],
        peer=peer, peer_fns=[functools.partial(theirs, c) for c in calls],
        bytes=batch * (HEADS_KV * scanned + 4 * HEADS_Q * WIDTH), flops=0,
        policy=policy_name(policy),
    )  # fmt: skip


@pytest.mark.parametrize("n", [32768, 65536, 131072, 524288, 1048576])
@pytest.mark.parametrize("part", ["score_tokens", "topk", "top_tokens", "gather_tokens_attention"])
def test_part(gpu_bench, part, n):
    """An op of a step alone: scores, the top-k of the KV heads' rows, attention. Caches go
    round, so that none is read from the L2."""
    policy = Gvr(min_tokens=0)
    nbytes = {
        "score_tokens": HEADS_KV * n * (WIDTH + 8),
        "topk": HEADS_KV * (4 * n + 8 * policy.k),
        "top_tokens": HEADS_KV * (n * (WIDTH + 8) + 8 * policy.k),
        "gather_tokens_attention": HEADS_KV * min(policy.kept, n) * 4 * WIDTH,
    }[part]
    count = min(gpu_bench.sets(nbytes), CALLS)
    fns = [part_of(part, policy, call_of(policy, 1, n, seed)) for seed in range(count)]
    row = {"batch": 1, "heads_q": HEADS_Q, "heads_kv": HEADS_KV, "head_dim": WIDTH}
    options, dtype = f"k={policy.k}", torch.bfloat16
    if part == "score_tokens":
        options = ""
    elif part == "topk":
        row = {"batch": HEADS_KV, "heads_q": 1, "heads_kv": 1, "head_dim": 0}
        options, dtype = f"{options} in gvr's step", torch.float32
    gpu_bench(
        op=part, case="op", n=n, dtype=dtype, options=options,
        fns=fns * max(1, CALLS // count), bytes=nbytes, flops=0, **row,
    )  # fmt: skip


def part_of(part: str, policy: Gvr, call: AttentionCall) -> Callable[[], Any]:
    """One op of a step, with its inputs ready."""
    layer: Any = call.state
    kept: dict[str, Any] = {
        "sink": policy.sink,
        "window": policy.window,
        "lengths": call.lengths,
    }
    keys = call.q, layer.codes, layer.scales
    scoring = functools.partial(score_tokens, *keys, **kept)
    if part == "score_tokens":
        return scoring
    if part == "top_tokens":
        return functools.partial(top_tokens, *keys, policy.k, **kept)
    scores = scoring()
    if part == "topk":
        return functools.partial(topk, scores, policy.k, lengths=call.lengths)
    index = topk(scores, policy.k, lengths=call.lengths)[0].view(1, HEADS_KV, 1, policy.k)
    qkv = call.q, call.k, call.v, index
    return functools.partial(gather_tokens_attention, *qkv, scale=SCALE, **kept)


def cudnn(call: AttentionCall) -> torch.Tensor:
    return cudnn_attention(call.q, call.k, call.v, scale=SCALE)
