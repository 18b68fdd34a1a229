"""dense_decode against cuDNN: one query a sequence, bf16, D = 128, 8K to 1M tokens; the same with a
cache larger than what is valid in it, which cuDNN is spared; and a few queries at once."""

import functools

import pytest
import torch
from peers import cudnn_attention

from attnplug.ops.dense.dense_decode import dense_decode

WIDTH = 128
HEADS = [(28, 4), (32, 8)]
LENGTHS = [8192, 32768, 131072, 524288, 1048576]


def run(gpu_bench, heads, batch, n, size=None, queries=1):
    heads_q, heads_kv = heads
    size = size or n
    kv_bytes = batch * heads_kv * n * WIDTH * 2 * 2
    q_bytes = batch * heads_q * queries * WIDTH * 2
    lengths = torch.tensor([n], device="cuda")
    fns, peer_fns = [], []
    for seed in range(gpu_bench.sets(kv_bytes)):
        torch.manual_seed(seed)
        q = torch.randn(batch, heads_q, queries, WIDTH, dtype=torch.bfloat16, device="cuda")
        k, v = (
            torch.empty(batch, heads_kv, size, WIDTH, dtype=torch.bfloat16, device="cuda").normal_()
            for _ in range(2)
        )
        scale = WIDTH**-0.5
        fns.append(functools.partial(dense_decode, q, k, v, scale=scale, lengths=lengths))
        valid = k[:, :, :n], v[:, :, :n]
        peer_fns.append(functools.partial(cudnn_attention, q, *valid, scale=scale))
    options = [f"cache={size}"] * (size > n) + [f"queries={queries}"] * (queries > 1)
    gpu_bench(
        op="dense_decode",
        case="op",
        n=n,
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=WIDTH,
        dtype=torch.bfloat16,
        options=" ".join(options),
        fns=fns,
        peer="cudnn",
        peer_fns=peer_fns,
        bytes=kv_bytes + 2 * q_bytes,
        flops=4 * batch * heads_q * queries * n * WIDTH,
    )


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("heads", HEADS, ids=["28-4", "32-8"])
def test_dense_decode(gpu_bench, heads, batch, n):
    run(gpu_bench, heads, batch, n)


@pytest.mark.parametrize(("n", "size"), [(8192, 131072), (32768, 131072), (131072, 1048576)])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("heads", HEADS, ids=["28-4", "32-8"])
def test_cache_larger_than_valid(gpu_bench, heads, batch, n, size):
    run(gpu_bench, heads, batch, n, size)


@pytest.mark.parametrize("n", [8192, 131072])
@pytest.mark.parametrize("queries", [4, 16])
def test_speculative_verification(gpu_bench, queries, n):
    """cuDNN runs unmasked: it sees a few keys more."""
    run(gpu_bench, HEADS[0], 1, n, queries=queries)
