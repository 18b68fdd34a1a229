"""momo prefill, the whole pipeline of one layer (query-sparse rows, merge, block-sparse attention,
delta correction), against dense causal attention. Gaussian data: the masks are random, which is no
easier for the kernels than a real model's."""

import functools

import peers
import pytest
import torch

from attnplug import Momo
from attnplug.policies.base import AttentionCall

HEADS_Q, HEADS_KV, HEAD_DIM = 32, 8, 128
CAPTURED = 32768  # longer calls take milliseconds: no graph, fewer rounds


def inputs(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator("cuda").manual_seed(seed)
    shape = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda", generator=random)
    q = shape(1, HEADS_Q, n, HEAD_DIM)
    return q, shape(1, HEADS_KV, n, HEAD_DIM), shape(1, HEADS_KV, n, HEAD_DIM)


def work(momo: Momo, n: int) -> tuple[int, int]:
    """Bytes (q, k, v and out once) and FLOPs that the method needs: every gamma-th row whole, and
    of every row its blocks, the sink, the window and half its own query block."""
    nbytes = 2 * n * HEAD_DIM * (2 * HEADS_Q + 2 * HEADS_KV)
    rows = n * n / 2 / momo.gamma
    kept = (momo.top_k + momo.sink) * momo.block + momo.window + momo.query_block / 2
    pairs = n * n / 2 if kept >= n else kept * n - kept * kept / 2
    return nbytes, int(4 * HEAD_DIM * HEADS_Q * (rows + pairs))


@pytest.mark.parametrize("top_k", [128, 64])
@pytest.mark.parametrize("n", [8192, 32768, 131072, 524288])
@pytest.mark.parametrize("peer", peers.causal_peers())
def test_momo(gpu_bench, peer, n, top_k):
    momo = Momo(top_k=top_k, min_tokens=0)
    nbytes, flops = work(momo, n)
    scale = HEAD_DIM**-0.5
    sets = [inputs(n, seed) for seed in range(gpu_bench.sets(nbytes))]
    captured = n <= CAPTURED
    gpu_bench(
        op="momo",
        case="op",
        n=n,
        batch=1,
        heads_q=HEADS_Q,
        heads_kv=HEADS_KV,
        head_dim=HEAD_DIM,
        dtype=torch.bfloat16,
        options=f"gamma={momo.gamma}, k={top_k}",
        fns=[functools.partial(momo.attend, AttentionCall(*qkv, scale=scale)) for qkv in sets],
        peer=peer,
        peer_fns=[peers.causal(peer, *qkv, scale) for qkv in sets],
        graph=captured,
        rounds=15 if captured else 5,
        bytes=nbytes,
        flops=flops,
    )
