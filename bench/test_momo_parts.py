"""The parts of momo after the query-sparse pass, bf16, 32/8 heads, D = 128, gamma 16, 128 blocks of
64 keys for 128 queries: block-sparse attention against dense causal attention, merge and delta
against the same in eager torch, the dense tail with the keys split against the flash kernel."""

import functools

import pytest
import torch
from peers import causal, causal_peers

from attnplug.ops import dense_decode, query_sparse_attention
from attnplug.ops.momo.block_sparse_attention import block_sparse_attention
from attnplug.ops.momo.delta_correct import delta_correct
from attnplug.ops.momo.merge_block_rows import merge_block_rows

HEADS, KV_HEADS, WIDTH = 32, 8, 128
GAMMA, QUERY_BLOCK, BLOCK, KEPT = 16, 128, 64, 128
ROWS = QUERY_BLOCK // GAMMA
SHAPE = dict(
    case="op", batch=1, heads_q=HEADS, heads_kv=KV_HEADS, head_dim=WIDTH, dtype=torch.bfloat16
)
OPTIONS = f"gamma={GAMMA} k={KEPT} query_block={QUERY_BLOCK} block={BLOCK}"


def random_lists(n):
    """[1,H,n/128,128] int32: distinct random blocks before the local part, ascending, -1 last."""
    local = torch.arange(n // QUERY_BLOCK, device="cuda") * (QUERY_BLOCK // BLOCK)
    blocks = torch.arange(n // BLOCK, device="cuda")
    lists = []
    for _ in range(HEADS):
        noise = torch.rand(len(local), len(blocks), device="cuda")
        noise[(blocks >= local[:, None]) | (blocks == 0)] = -1.0
        best = noise.topk(min(KEPT, len(blocks)))
        names = torch.where(best.values >= 0, best.indices, n).sort().values
        lists.append(torch.where(names == n, -1, names).int())
    return torch.stack(lists)[None]


def attended(lists):
    """Query-key pairs that block-sparse attention over these lists needs."""
    listed = (lists >= 0).sum(-1) * BLOCK
    listed[:, :, 1:] += BLOCK  # the sink
    causal_part = QUERY_BLOCK * (QUERY_BLOCK + 1) // 2
    return int((listed * QUERY_BLOCK + causal_part).sum())


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("n", [32768, 131072, 524288])
def test_block_sparse_attention(gpu_bench, n, corrected):
    peer = causal_peers()[-1]
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, n, WIDTH, dtype=torch.bfloat16, device="cuda")
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    lists = random_lists(n)
    scale = WIDTH**-0.5
    rows = torch.randn_like(q[:, :, ::GAMMA]).contiguous() if corrected else None
    attend = functools.partial(block_sparse_attention, q, k, v, lists, scale=scale, rows=rows)
    gpu_bench(
        op="block_sparse_attention",
        n=n,
        **SHAPE,
        options=OPTIONS + (" corrected" if corrected else ""),
        fns=[attend],
        peer=peer,
        peer_fns=[causal(peer, q, k, v, scale)],
        peer_graph=False,
        rounds=10 if n < 500_000 else 1,
        replays=1 if n > 500_000 else None,
        bytes=(2 * HEADS + 2 * KV_HEADS) * n * WIDTH * 2 + lists.nbytes,
        flops=4 * WIDTH * attended(lists),
    )


@pytest.mark.parametrize("n", [16384, 32768, 131072, 524288, 1048576])
def test_tail(gpu_bench, n):
    torch.manual_seed(0)
    k, v = (torch.randn(1, KV_HEADS, n, WIDTH, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    q = torch.randn(1, HEADS, QUERY_BLOCK, WIDTH, dtype=torch.bfloat16, device="cuda")
    flash = functools.partial(
        query_sparse_attention, q, k, v, scale=WIDTH**-0.5, gamma=1, top_k=0, exact_k=0
    )
    gpu_bench(
        op="dense_decode",
        n=n,
        **SHAPE,
        options=f"{QUERY_BLOCK} queries",
        fns=[functools.partial(dense_decode, q, k, v, scale=WIDTH**-0.5)],
        peer="flash",
        peer_fns=[flash],
        bytes=2 * KV_HEADS * n * WIDTH * 2,
        flops=4 * WIDTH * HEADS * QUERY_BLOCK * n,
    )


def merge_in_torch(index, score, lse):
    names = index.unflatten(2, (-1, ROWS)).flatten(3)
    mass = (score - lse[..., None]).exp().unflatten(2, (-1, ROWS)).flatten(3)
    names, order = names.sort(-1)
    fresh = torch.ones_like(names, dtype=torch.bool)
    fresh[..., 1:] = names[..., 1:] != names[..., :-1]
    run = fresh.cumsum(-1) - 1
    total = torch.zeros_like(mass).scatter_add_(-1, run, mass.gather(-1, order))
    block = torch.full_like(names, -1).scatter_(-1, run, names)
    return block.gather(-1, total.topk(KEPT).indices).sort(-1).values


@pytest.mark.parametrize("n", [32768, 131072, 524288])
def test_merge_block_rows(gpu_bench, n):
    torch.manual_seed(0)
    shape = (1, HEADS, n // GAMMA, KEPT)
    index = torch.randint(0, n // BLOCK, shape, dtype=torch.int32, device="cuda")
    score, lse = torch.randn(shape, device="cuda"), torch.full(shape[:3], 6.0, device="cuda")
    gpu_bench(
        op="merge_block_rows",
        n=n,
        options=OPTIONS,
        **SHAPE,
        fns=[functools.partial(merge_block_rows, index, score, lse, rows=ROWS, trim=KEPT)],
        peer="torch",
        peer_fns=[functools.partial(merge_in_torch, index, score, lse)],
        peer_graph=False,
        rounds=10,
        bytes=index.nbytes + score.nbytes + lse.nbytes + index.nbytes // ROWS,
        flops=0,
    )


def correct_in_torch(out_sparse, out_rows):
    delta = out_rows.float() - out_sparse[:, :, ::GAMMA].float()
    return (out_sparse + delta.repeat_interleave(GAMMA, 2)).to(out_sparse.dtype)


@pytest.mark.parametrize("n", [32768, 131072, 524288])
def test_delta_correct(gpu_bench, n):
    torch.manual_seed(0)
    out_sparse = torch.randn(1, HEADS, n, WIDTH, dtype=torch.bfloat16, device="cuda")
    out_rows = torch.randn(1, HEADS, n // GAMMA, WIDTH, dtype=torch.bfloat16, device="cuda")
    gpu_bench(
        op="delta_correct",
        n=n,
        options=OPTIONS,
        **SHAPE,
        fns=[functools.partial(delta_correct, out_sparse, out_rows, gamma=GAMMA)],
        peer="torch",
        peer_fns=[functools.partial(correct_in_torch, out_sparse, out_rows)],
        peer_graph=False,
        rounds=10,
        bytes=2 * out_sparse.nbytes + out_rows.nbytes,
        flops=0,
    )
