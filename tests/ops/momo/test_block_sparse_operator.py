"""block_sparse_attention as an operator: what torch asks of it, the arguments that it refuses, and
that it can be captured. test_block_sparse_attention.py holds what it computes."""

import pytest
import torch
from momo_cases import attention_inputs

from attnplug.errors import ArgumentError
from attnplug.ops.momo.block_sparse_attention import block_sparse_attention


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(index=torch.zeros(1, 2, 3, 4, dtype=torch.int32)), r"index has shape \(1, 2, 3, 4\)"),
        (dict(index=torch.zeros(1, 2, 2, 4)), "index is torch.float32, needs int32"),
        (dict(index=torch.zeros(1, 2, 2, 9000, dtype=torch.int32)), "names 9000 blocks"),
        (dict(block=0), "block is 0, needs at least 1"),
        (dict(query_block=0), "query_block is 0, needs at least 1"),
        (dict(sink=-1), "sink is -1, needs at least 0"),
        (dict(window=-1), "window is -1, needs at least 0"),
        (dict(softcap=-1.0), "softcap is -1.0, needs at least 0"),
        (dict(gamma=0), "gamma is 0, needs at least 1"),
        (dict(rows=torch.zeros(1, 2, 3, 64)), r"rows is \(1, 2, 3, 64\)"),
        (dict(k=torch.zeros(1, 1, 40, 80)), "head dimension 64 but k has 80"),
        (dict(lengths=torch.tensor([41])), "lengths go to 41"),
        (dict(start=torch.tensor([-1])), "start from -1"),
    ],
)
def test_bad_arguments(change, message):
    good = dict(
        q=torch.zeros(1, 2, 20, 64),
        k=torch.zeros(1, 1, 40, 64),
        v=torch.zeros(1, 1, 40, 64),
        index=torch.zeros(1, 2, 2, 4, dtype=torch.int32),
        query_block=16,
        block=8,
    )
    given = good | change
    if "k" in change:
        given["v"] = change["k"]
    with pytest.raises(ArgumentError, match=message):
        block_sparse_attention(**given, scale=1.0)


@pytest.mark.gpu
def test_cuda_graph_follows_the_length():
    q, k, v = attention_inputs(1, 4, 2, 64, 256, 64, torch.float16, seed=10)
    generator = torch.Generator().manual_seed(10)
    index = torch.randint(-1, 30, (1, 4, 4, 5), generator=generator, dtype=torch.int32)
    q, k, v, index = (x.cuda() for x in (q, k, v, index))
    lengths = torch.tensor([100], device="cuda")
    options = dict(scale=0.125, query_block=16, block=8, lengths=lengths)
    block_sparse_attention(q, k, v, index, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = block_sparse_attention(q, k, v, index, **options)
    for length in (100, 256, 64):
        lengths.fill_(length)
        graph.replay()
        want, want_lse = block_sparse_attention(q, k, v, index, **options)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
