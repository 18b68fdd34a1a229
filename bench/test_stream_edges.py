"""stream_edges alone: the weights of the edges that stream_mask lists, 32 blocks of 64 keys for
each block of 64 queries, Gaussian data, 32/8 heads of 128, bf16."""

import functools

import pytest
import test_momo
import torch

from attnplug.ops import stream_edges, stream_mask
from attnplug.ops.stream.stream_edges import WEIGHTS

BLOCK, TOP_K = 64, 32
SHAPE = test_momo.LLAMA


@pytest.mark.parametrize("n", [32768, 131072])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_stream_edges(gpu_bench, weights, n):
    q, k, v = test_momo.inputs(SHAPE, n, 0)
    index, _ = stream_mask(q, k, block=BLOCK, query_block=BLOCK, top_k=TOP_K)
    edges = int((index >= 0).sum())
    products = {"score": 1, "mass": 1, "value": 2}[weights]  # q.k, and p.v
    gpu_bench(
        op="stream_edges",
        case="op",
        n=n,
        batch=SHAPE.batch,
        heads_q=SHAPE.heads_q,
        heads_kv=SHAPE.heads_kv,
        head_dim=SHAPE.dim,
        dtype=torch.bfloat16,
        options=f"b={BLOCK}, k={TOP_K}, {weights}",
        fns=[
            functools.partial(
                stream_edges, q, k, v, index, scale=SHAPE.dim**-0.5, weights=weights,
                query_block=BLOCK, block=BLOCK,
            )
        ],
        graph=False,
        rounds=5,
        bytes=q.nbytes + products * k.nbytes + 2 * index.nbytes,
        flops=2 * products * edges * BLOCK * BLOCK * SHAPE.dim,
    )  # fmt: skip
