"""block_bounds alone: the summaries of a whole prompt's key blocks, as after a prefill, and of the
one block that a step completes. bf16 keys, 4 KV heads of 128; pages of 16 with gather's default
summaries, and the paper's bounds of blocks of 128."""

import functools

import pytest
import torch

from attnplug.ops import block_bounds
from attnplug.ops.gather.block_bounds import empty_bounds

HEADS_KV, WIDTH = 4, 128
FORMS = {"band, block=16": 16, "bounds, block=128": 128}
LENGTHS = [32768, 131072, 1048576]
CALLS = 8  # in one graph


def bench(gpu_bench, n: int, form: str, new: int) -> None:
    """Summarise the last `new` blocks of n tokens; the others are there already."""
    block, band = FORMS[form], form.startswith("band")
    blocks, size = n // block, HEADS_KV * block * WIDTH * 2
    fns = []
    for seed in range(min(gpu_bench.sets(new * size), CALLS)):
        random = torch.Generator("cuda").manual_seed(seed)
        shape = (1, HEADS_KV, n, WIDTH)
        k = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=random)
        bounds = empty_bounds(k, block, 1 if band else 2, dtype=torch.int8)
        progress = torch.zeros(1, 2, dtype=torch.int32, device="cuda")
        block_bounds(k, bounds, progress, block=block, band=band)
        fns.append(functools.partial(refresh, k, bounds, progress, block, band, blocks - new))
    gpu_bench(
        op="block_bounds",
        case="op",
        n=n,
        batch=1,
        heads_q=HEADS_KV,
        heads_kv=HEADS_KV,
        head_dim=WIDTH,
        dtype=torch.bfloat16,
        options=f"{form}, {'whole prompt' if new == blocks else 'one block'}",
        fns=fns * max(1, CALLS // len(fns)),
        bytes=new * (size + (1 if band else 2) * HEADS_KV * WIDTH),
        flops=0,
    )


def refresh(
    k: torch.Tensor, bounds: torch.Tensor, progress: torch.Tensor, block: int, band: bool, done: int
) -> None:
    progress[:, 0].fill_(done)
    block_bounds(k, bounds, progress, block=block, band=band)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("form", FORMS)
def test_a_prompt(gpu_bench, form, n):
    bench(gpu_bench, n, form, n // FORMS[form])


@pytest.mark.parametrize("form", FORMS)
def test_a_block(gpu_bench, form):
    """The filling of the count, a kernel of its own, is in it."""
    bench(gpu_bench, 131072, form, 1)
