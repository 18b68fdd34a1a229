"""measure_blocks, momo's first half (dense rows and the query blocks' lists), beside dense causal
prefill; over k, it is the fourth line of the paper's figure 4 (test_query_sparse_attention.py has
the other three, which still lack the merge)."""

import functools

import pytest
import test_momo
import torch
from peers import causal, causal_peers

from attnplug import Momo
from attnplug.ops import measure_blocks
from attnplug.policies import AttentionCall

LENGTHS = (8192, 32768, 131072, 524288)
CASES = [(n, 128, True) for n in LENGTHS] + [(32768, k, True) for k in (16, 32, 64, 256, 512)]
CASES += [(n, 128, False) for n in LENGTHS]


@pytest.mark.parametrize(("n", "top_k", "values"), CASES)
def test_measure_blocks(gpu_bench, n, top_k, values):
    batch, heads, kv_heads, dim = shape = test_momo.LLAMA
    q, k, v = test_momo.inputs(shape, n, 0)
    scale, momo, gamma = dim**-0.5, Momo(top_k=top_k), 16
    before = momo._first_local(AttentionCall(q, k, v, scale))
    rows = n // gamma
    peer, wide = causal_peers()[-1], heads if values else 0
    gpu_bench(
        op="measure_blocks",
        case="op",
        n=n,
        batch=batch,
        heads_q=heads,
        heads_kv=kv_heads,
        head_dim=dim,
        dtype=torch.bfloat16,
        options=f"gamma={gamma} k={top_k}" + ("" if values else " no values"),
        fns=[
            functools.partial(
                measure_blocks, q, k, v if values else None, before, scale=scale, top_k=top_k
            )
        ],
        peer=peer,
        peer_fns=[causal(peer, q, k, v, scale)],
        peer_graph=False,
        # each input once, out, lse, lists; scores once written and once read; half of the products
        bytes=2 * dim * ((heads + wide) * rows + (2 if values else 1) * kv_heads * n)
        + heads * (rows * 4 + n // momo.query_block * 4 * top_k + 2 * rows * n // 128 * 2),
        flops=dim * (heads + wide) * rows * n,
        rounds=25 if n < 100_000 else 5 if n < 500_000 else 1,
        replays=1 if n > 500_000 else None,
    )
