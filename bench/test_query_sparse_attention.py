"""query_sparse_attention beside dense causal prefill: gamma=1, top_k=0 is the same work, the other
rows are the first step of momo. The three selections over k are the paper's figure 4."""

import functools

import pytest
import torch
from peers import causal, causal_peers

from attnplug.ops.momo.online_topk import ALGORITHMS
from attnplug.ops.momo.query_sparse_attention import query_sparse_attention

HEADS, KV_HEADS, DIM = 32, 8, 128
CASES = {
    "gamma=1 k=0": dict(gamma=1, top_k=0),
    "gamma=16 k=0": dict(gamma=16, top_k=0),
    "gamma=16 k=128 estimated": dict(gamma=16, top_k=128, exact_k=8, algorithm="estimated"),
}
LONG = 524288
PAIRS = [(options, n) for options in CASES for n in (8192, 32768, 131072)] + [
    ("gamma=16 k=0", LONG),
    ("gamma=16 k=128 estimated", LONG),
]


def bench(gpu_bench, n, peer, options, chosen):
    rows, top_k = n // chosen["gamma"], chosen["top_k"]
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, n, DIM, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    gpu_bench(
        op="query_sparse_attention",
        case="op",
        n=n,
        batch=1,
        heads_q=HEADS,
        heads_kv=KV_HEADS,
        head_dim=DIM,
        dtype=torch.bfloat16,
        options=options,
        fns=[functools.partial(query_sparse_attention, q, k, v, scale=DIM**-0.5, **chosen)],
        peer=peer,
        peer_fns=[causal(peer, q, k, v, DIM**-0.5)],
        peer_graph=False,
        # each input once, out and lse, the lists; causal: half of each row's products
        bytes=2 * DIM * (2 * HEADS * rows + 2 * KV_HEADS * n) + HEADS * rows * (4 + 8 * top_k),
        flops=2 * DIM * HEADS * rows * n,
        rounds=25 if n < 100_000 else 5 if n < LONG else 1,
        replays=1 if n >= LONG else None,
    )


@pytest.mark.parametrize(("options", "n"), PAIRS)
def test_query_sparse_attention(gpu_bench, options, n):
    bench(gpu_bench, n, causal_peers()[-1], options, CASES[options])


@pytest.mark.parametrize("top_k", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_selections(gpu_bench, algorithm, top_k):
    chosen = dict(gamma=16, top_k=top_k, exact_k=8, algorithm=algorithm)
    bench(gpu_bench, 32768, causal_peers()[-1], f"gamma=16 k={top_k} {algorithm}", chosen)
