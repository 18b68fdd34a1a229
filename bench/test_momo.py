"""momo prefill, the whole pipeline of one layer (query-sparse rows, merge, block-sparse attention,
delta correction), against dense causal attention. Gaussian data: the masks are random, which is no
easier for the kernels than a real model's."""

import functools
from typing import NamedTuple

import peers
import pytest
import torch

from attnplug import Momo
from attnplug.bench.rows import policy_name
from attnplug.policies import AttentionCall
from attnplug.policies.momo import FAR_GAMMA, FAR_TOP_K, NEAR_GAMMA, NEAR_TOP_K

# What rows of `None` are called.
GAMMAS, BLOCKS = f"{NEAR_GAMMA} then {FAR_GAMMA}", f"{NEAR_TOP_K} then {FAR_TOP_K}"


class Shape(NamedTuple):
    batch: int
    heads_q: int
    heads_kv: int
    dim: int


LLAMA = Shape(1, 32, 8, 128)
# Longer calls take milliseconds: no graph, fewer rounds. FA3 takes 3.5 s at 512K and 14 s at 1M.
CAPTURED = 32768
ROUNDS = {8192: 15, 12288: 15, 16384: 15, 32768: 15, 131072: 5, 524288: 2, 1048576: 1}
ONE_BUDGET = (12288, 1048576)  # of the default alone
CASES = [(LLAMA, n, k) for n in ROUNDS for k in ((None,) if n in ONE_BUDGET else (None, 128, 64))]
CASES += [
    (shape, n, None)
    for shape in (Shape(1, 32, 8, 64), Shape(1, 28, 4, 128), Shape(2, 32, 8, 128))
    for n in (32768, 131072)
]
# Where vLLM's chunks begin to be sparse, and where all prompts do.
CASES += [(Shape(1, 28, 4, 128), n, None) for n in (12288, 16384)]
# Past 128K the fastest peer alone: cuDNN is slower than FA3 all along.
PEERED = [
    (peer, *case)
    for peer in peers.causal_peers()
    for case in CASES
    if case[1] <= 131072 or peer == peers.causal_peers()[-1]
]


def inputs(shape: Shape, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator("cuda").manual_seed(seed)
    draw = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda", generator=random)
    batch, heads_q, heads_kv, dim = shape
    q = draw(batch, heads_q, n, dim)
    return q, draw(batch, heads_kv, n, dim), draw(batch, heads_kv, n, dim)


def work(shape: Shape, momo: Momo, n: int) -> tuple[int, int]:
    """Bytes (q, k, v and out once) and FLOPs that the method needs, span by span: every gamma-th
    row whole, or its logits alone where `delta` is None, and of every row its blocks, the sink, the
    window and half its own query block."""
    batch, heads_q, heads_kv, dim = shape
    nbytes = 2 * batch * n * dim * (2 * heads_q + 2 * heads_kv)
    rows = pairs = 0.0
    for span in momo.spans():
        begin, end = min(n, span.begin), n if span.end is None else min(n, span.end)
        rows += (end**2 - begin**2) / 2 / span.gamma
        kept = (span.top_k + momo.sink) * momo.block + momo.window + momo.query_block / 2
        pairs += pairs_before(end, kept) - pairs_before(begin, kept)
    rows /= 2 if momo.delta is None else 1
    return nbytes, int(4 * dim * batch * heads_q * (rows + pairs))


def pairs_before(n: int, kept: float) -> float:
    """Keys that the first n queries read, at most `kept` each."""
    return n * n / 2 if kept >= n else kept * n - kept * kept / 2


# Another block-sparse prefill of the same budget, where this checkout has it.
if peers.MINFERENCE.exists():
    PEERED += [("minference", LLAMA, n, 128) for n in (32768, 131072)]


def peer_call(peer: str, qkv: tuple[torch.Tensor, ...], top_k: int | None, scale: float):
    if peer == "minference":
        assert top_k is not None  # it has one budget for all
        return peers.minference_block_sparse(*qkv, top_k)
    return peers.causal(peer, *qkv, scale)


@pytest.mark.parametrize(("peer", "shape", "n", "top_k"), PEERED)
def test_momo(gpu_bench, peer, shape, n, top_k):
    run(gpu_bench, peer, shape, n, Momo(top_k=top_k, min_tokens=0))


@pytest.mark.parametrize("n", [32768, 131072])
@pytest.mark.parametrize("top_k", [128, 64])
def test_the_papers_selection(gpu_bench, top_k, n):
    momo = Momo(top_k=top_k, selection="estimated", delta=1.0, min_tokens=0)
    run(gpu_bench, peers.causal_peers()[-1], LLAMA, n, momo, ", selection=estimated")


@pytest.mark.parametrize("n", [32768, 131072, 524288, 1048576])
@pytest.mark.parametrize(("gamma", "top_k"), [(16, 128), (32, 128), (16, 64), (32, 64)])
def test_one_gamma(gpu_bench, gamma, top_k, n):
    momo = Momo(gamma=gamma, top_k=top_k, min_tokens=0)
    run(gpu_bench, peers.causal_peers()[-1], LLAMA, n, momo)


def run(gpu_bench, peer: str, shape: Shape, n: int, momo: Momo, options: str = "") -> None:
    nbytes, flops = work(shape, momo, n)
    scale = shape.dim**-0.5
    sets = [inputs(shape, n, seed) for seed in range(gpu_bench.sets(nbytes))]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = momo.attend(AttentionCall(*sets[0], scale=scale))
    workspace = torch.cuda.max_memory_allocated() - before - out.nbytes
    del out
    print(f"workspace beside the output: {workspace / 2**30:.2f} GiB")
    assert workspace < 2 << 30
    gpu_bench(
        op="momo",
        case="op",
        n=n,
        batch=shape.batch,
        heads_q=shape.heads_q,
        heads_kv=shape.heads_kv,
        head_dim=shape.dim,
        dtype=torch.bfloat16,
        options=f"gamma={momo.gamma or GAMMAS}, k={momo.top_k or BLOCKS}{options}",
        fns=[functools.partial(momo.attend, AttentionCall(*qkv, scale=scale)) for qkv in sets],
        peer=peer,
        peer_fns=[peer_call(peer, qkv, momo.top_k, scale) for qkv in sets],
        graph=n <= CAPTURED,
        peer_graph=n <= CAPTURED and peer != "minference",  # it makes tensors from host data
        replays=1 if n > CAPTURED else None,
        rounds=ROUNDS[n],
        bytes=nbytes,
        flops=flops,
        policy=policy_name(momo),
    )
