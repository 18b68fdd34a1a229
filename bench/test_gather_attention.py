"""gather_attention alone, over a list of random blocks: one query a sequence, bf16, 28/4 heads of
128. gather's default keep set in pages of 16, and the paper's in blocks of 128, beside cuDNN over
as many keys side by side."""

import functools

import pytest
import torch
from peers import cudnn_attention

from attnplug.ops import gather_attention

HEADS_Q, HEADS_KV, WIDTH = 28, 4, 128
SCALE = WIDTH**-0.5
KEEP_SETS = {  # block, first blocks, last blocks, listed blocks
    "k=256, block=16": (16, 8, 32, 256),
    "k=32, block=128": (128, 1, 4, 32),
    "k=8, block=128": (128, 1, 4, 8),
}
CALLS = 8  # in one graph


@pytest.mark.parametrize("n", [32768, 131072, 1048576])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("options", KEEP_SETS)
def test_gather_attention(gpu_bench, options, batch, n):
    block, sink, local, listed = KEEP_SETS[options]
    kept = (sink + local + listed) * block
    nbytes = batch * HEADS_KV * kept * 4 * WIDTH
    fns, peer_fns = [], []
    for seed in range(min(gpu_bench.sets(nbytes), 4)):
        random = torch.Generator("cuda").manual_seed(seed)
        normal = functools.partial(
            torch.randn, dtype=torch.bfloat16, device="cuda", generator=random
        )
        q = normal(batch, HEADS_Q, 1, WIDTH)
        k, v = (normal(batch, HEADS_KV, n, WIDTH) for _ in range(2))
        rest = n // block - sink - local
        order = torch.rand(batch, HEADS_KV, 1, rest, device="cuda", generator=random)
        index = (sink + order.argsort(-1)[..., :listed]).int()
        keep = dict(scale=SCALE, block=block, sink=sink, local=local)
        fns.append(functools.partial(gather_attention, q, k, v, index, **keep))
        near = k[:, :, :kept], v[:, :, :kept]
        peer_fns.append(functools.partial(cudnn_attention, q, *near, scale=SCALE))
    each = max(1, CALLS // len(fns))
    gpu_bench(
        op="gather_attention",
        case="op",
        n=n,
        batch=batch,
        heads_q=HEADS_Q,
        heads_kv=HEADS_KV,
        head_dim=WIDTH,
        dtype=torch.bfloat16,
        options=options,
        fns=fns * each,
        peer="cudnn over as many",
        peer_fns=peer_fns * each,
        bytes=nbytes + 4 * batch * HEADS_Q * WIDTH,
        flops=4 * batch * HEADS_Q * kept * WIDTH,
    )
