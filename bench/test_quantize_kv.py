"""quantize_kv alone: the tier of a whole prompt, as certified makes it after a prefill, and of the
one block that a step completes; bf16, 8 KV heads of 128, originals on the GPU and, for a block, in
host memory, where a step finds them."""

import functools

import pytest
import torch

from attnplug.models.host_memory import host_zeros
from attnplug.ops import QuantizedKV, quantize_kv

HEADS_KV, WIDTH = 8, 128
CALLS = 8  # in one graph


def bench(gpu_bench, n: int, block: int, new: int, originals: str) -> None:
    """Quantize the last `new` blocks of n tokens; the others are there already."""
    blocks, size = n // block, 2 * HEADS_KV * block * WIDTH * 2
    fns, each = [], QuantizedKV.empty(1, HEADS_KV, block, WIDTH, block, "cuda").nbytes()
    for seed in range(min(gpu_bench.sets(new * size), CALLS)):
        random = torch.Generator("cuda").manual_seed(seed)
        shape = (1, HEADS_KV, n, WIDTH)
        k, v = (
            torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=random)
            for _ in range(2)
        )
        if originals == "host":
            k, v = (host_zeros(shape, x.dtype, x.device).copy_(x) for x in (k, v))
        tier = QuantizedKV.empty(1, HEADS_KV, n, WIDTH, block, "cuda")
        quantize_kv(k, v, tier, block=block)
        fns.append(functools.partial(refresh, k, v, tier, block, blocks - new))
    what = "whole prompt" if new == blocks else "one block"
    gpu_bench(
        op="quantize_kv",
        case="op",
        n=n,
        batch=1,
        heads_q=HEADS_KV,
        heads_kv=HEADS_KV,
        head_dim=WIDTH,
        dtype=torch.bfloat16,
        options=f"block={block}, {what}, originals={originals}",
        fns=fns * max(1, CALLS // len(fns)),
        bytes=new * (size + each),
        flops=0,
        ceiling=(lambda seconds: None) if originals == "host" else None,
    )


def refresh(k: torch.Tensor, v: torch.Tensor, tier: QuantizedKV, block: int, done: int) -> None:
    tier.progress[:, 0].fill_(done)
    quantize_kv(k, v, tier, block=block)


@pytest.mark.parametrize("n", [32768, 131072, 524288])
@pytest.mark.parametrize("block", [64, 16])
def test_a_prompt(gpu_bench, block, n):
    bench(gpu_bench, n, block, n // block, "device")


@pytest.mark.parametrize("originals", ["host", "device"])
def test_a_block(gpu_bench, originals):
    """The filling of the count, a kernel of its own, is in it."""
    bench(gpu_bench, 131072, 64, 1, originals)
