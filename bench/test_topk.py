"""topk against FlashInfer, SGLang and torch.topk: long rows with a hint of known overlap at k=2048,
scores of a real model's decode steps, and the small k of the block selectors.

FlashInfer is timed where `flashinfer.topk` can be imported (bench/flashinfer_pack.sh; 0.6.13, which
compiles with nvcc for a minute), SGLang where
its library lies at `.peers/common_ops.abi3.so` (sglang-kernel 0.4.2.post2, needs libnuma; its k is
2048, and past 128K its set is wrong).
"""

import functools
import importlib
import importlib.util
from pathlib import Path

import pytest
import torch
from topk_stats import decode_scores

from attnplug.ops import topk
from attnplug.ops.gather import select_blocks as blocks

K = 2048
LENGTHS = [8192, 32768, 65536, 131072, 262144, 1048576]
SGLANG_LIBRARY = Path(__file__).resolve().parent.parent / ".peers" / "common_ops.abi3.so"
PEERS = ["torch.topk"]
PEERS += ["flashinfer"] if importlib.util.find_spec("flashinfer") else []
PEERS += ["sglang"] if SGLANG_LIBRARY.exists() else []


def torch_topk(scores, k):
    return torch.topk(scores, k, dim=1, sorted=False)


def peer_of(name):
    """A function of (scores, k) that runs the peer as its users do."""
    if name == "torch.topk":
        return torch_topk
    if name == "flashinfer":
        from flashinfer.topk import top_k

        return top_k
    torch.ops.load_library(str(SGLANG_LIBRARY))

    def fast_topk(scores, k):
        picks = torch.empty(scores.shape[0], k, dtype=torch.int32, device="cuda")
        lengths = torch.full((scores.shape[0],), scores.shape[1], device="cuda").int()
        torch.ops.sgl_kernel.fast_topk(scores, picks, lengths, None)
        return picks

    return fast_topk


def hint_of(scores, k, overlap):
    """Picks of a step before: `overlap` per cent are still picks; of the others half rank up to 4k
    (where they overlap at all), the rest are anywhere."""
    rows, n = scores.shape
    order = scores.topk(min(4 * k, n), dim=1).indices
    kept = round(k * overlap / 100)
    near = (k - kept) // 2 if overlap >= 40 and n > 4 * k else 0
    parts = [
        order[:, torch.randperm(k, device="cuda")[:kept]],
        order[:, k + torch.randperm(max(order.shape[1] - k, 1), device="cuda")[:near]],
        torch.randint(0, n, (rows, k - kept - near), device="cuda"),
    ]
    hint = torch.cat(parts, 1)
    return hint[:, torch.randperm(k, device="cuda")].int().contiguous()


def run(gpu_bench, batch, n, k, overlap, peer):
    nbytes = batch * n * 4
    theirs = peer_of(peer)
    fns, peer_fns = [], []
    for seed in range(min(gpu_bench.sets(nbytes), 64)):  # 64 small ones stay in the L2, as they do
        torch.manual_seed(seed)
        scores = torch.randn(batch, n, device="cuda")
        hint = None if overlap is None else hint_of(scores, k, overlap)
        fns.append(functools.partial(topk, scores, k, hint=hint))
        peer_fns.append(functools.partial(theirs, scores, k))
    options = f"k={k}" + (f" overlap={overlap}" if overlap is not None else "")
    gpu_bench(
        op="topk", case="op", n=n, batch=batch, heads_q=1, heads_kv=1, head_dim=0,
        dtype=torch.float32, options=options, fns=fns, peer=peer, peer_fns=peer_fns,
        bytes=nbytes + 8 * batch * k, flops=0,
    )  # fmt: skip


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("overlap", [None, 0, 3, 40, 90])
@pytest.mark.parametrize("peer", PEERS)
def test_topk(gpu_bench, peer, overlap, batch, n):
    if peer == "sglang" and n > 131072:
        return
    run(gpu_bench, batch, n, K, overlap, peer)


real_scores = functools.cache(decode_scores)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(("n", "k"), [(8192, 1024), (32768, 2048)])
@pytest.mark.parametrize("peer", PEERS)
def test_real_scores(gpu_bench, peer, n, k, number):
    """Gemma 3 270M's scores, step after step, the picks of the step before as the hint."""
    layer, scores = list(real_scores("gemma3-270m", n, 40, "cuda").items())[number]
    scores = scores.transpose(0, 1).contiguous()
    picks = scores.topk(k, dim=2).indices
    pairs = zip(picks[1:].flatten(0, 1), picks[:-1].flatten(0, 1), strict=True)
    same = [torch.isin(new, old).float().mean().item() for new, old in pairs]
    hints, steps, rows = picks.int().contiguous(), scores[1:], scores.shape[1]
    theirs = peer_of(peer)
    gpu_bench(
        op="topk", case="op", n=n, batch=rows, heads_q=1, heads_kv=1, head_dim=0,
        dtype=torch.float32,
        options=f"k={k} gemma3-270m layer={layer} overlap={100 * sum(same) / len(same):.0f}%",
        fns=[functools.partial(topk, x, k, hint=h) for x, h in zip(steps, hints, strict=False)],
        peer=peer, peer_fns=[functools.partial(theirs, x, k) for x in steps],
        bytes=rows * (4 * n + 8 * k), flops=0,
        ceiling=lambda seconds: None,  # rows that are in the L2, as scores are left there
    )  # fmt: skip


@pytest.mark.parametrize("n", [256, 1024, 8192, 65536])
@pytest.mark.parametrize("batch", [4, 64, 512])
@pytest.mark.parametrize("k", [8, 64])
def test_small_k(gpu_bench, k, batch, n):
    """Block scores, many rows, no hint."""
    run(gpu_bench, batch, n, k, None, "torch.topk")


@pytest.mark.parametrize(
    ("n", "rows", "k"),
    [(256, 4, 8), (512, 64, 32), (1024, 64, 8), (8192, 4, 8), (8192, 32, 32), (8192, 256, 8)],
)
def test_choice(gpu_bench, n, rows, k):
    """select_blocks' own choice, from the keys and maxima that its score kernel leaves, beside
    topk of the same scores."""
    block, width = 128, 16
    scores = torch.randn(rows, n, device="cuda")
    bits = scores.view(torch.int32).to(torch.int64)
    bits = bits ^ ((bits >> 63) & 0x7FFFFFFF)
    keys = (bits << 32) | (0x7FFFFFFF - torch.arange(n, device="cuda"))
    none = -0x7FFFFFFFFFFFFFFF  # no candidate's key
    keys = torch.nn.functional.pad(keys, (0, 1), value=none)  # the query's own
    plan = blocks.plan_for(rows, n, k, block, 2, True)
    members = max(plan.members, 1)
    room = torch.nn.functional.pad(keys, (0, -(n + 1) % members), value=none)
    best = room.view(rows, -1, members).amax(2)
    left = blocks.Scores(keys.flatten(), best.flatten(), plan)
    size = (n + 1) * block  # the last block is the query's own
    shape, none = (rows, 1, size, width), (0, 0, 0, 1)
    cache = torch.zeros(width, dtype=torch.float16, device="cuda").as_strided(shape, none)
    progress = torch.zeros(rows, 2, dtype=torch.int32, device="cuda")
    length = torch.tensor([size], device="cuda")
    out = torch.empty(rows, 1, 1, k, dtype=torch.int32, device="cuda")
    choose = functools.partial(
        blocks.launch_choice, left, cache, progress, block, k, 1, length, None, n + 1, out
    )
    gpu_bench(
        op="select_blocks", case="choice", n=n, batch=rows, heads_q=1, heads_kv=1, head_dim=0,
        dtype=torch.float32, options=f"k={k}", fns=[choose] * 8,
        peer="topk", peer_fns=[functools.partial(topk, scores, k)] * 8,
        bytes=8 * rows * n + 4 * rows * k, flops=0,
        ceiling=lambda seconds: None,  # the scores are in the L2, as the score kernel leaves them
    )  # fmt: skip
    picks = topk(scores, k)[0]
    assert torch.equal(out.view(rows, k).sort(1).values, picks.sort(1).values)
