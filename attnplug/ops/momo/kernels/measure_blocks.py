"""The Triton kernels of measure_blocks: from the scores of a query block's rows
to the masses of its key blocks, and from these to its list."""

import torch

from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.sizes import cdiv, next_power_of_two
from attnplug.ops.common.triton import tl, triton


@triton.jit(do_not_specialize=["R", "NQ", "kept", "first", "heads", "before_b"])
def _mass_kernel(
    SCORE,
    LSE,
    BEFORE,
    MASS,
    R,
    NQ,
    kept,
    first,
    heads,
    before_b,
    before_p,
    ROWS: tl.constexpr,
    PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
):
    """Masses `[head,NQ,kept]` of N blocks for GROUPS query blocks of ROWS rows (PAD: a power of
    two) from scores `[head,kept,R]`. The masses of blocks that are no
    query block's candidates stay unwritten."""
    head = tl.program_id(0).to(tl.int64)
    query_block = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    edge = BEFORE + head // heads * before_b + (first + query_block) * before_p
    if tl.program_id(2) * N >= tl.max(tl.load(edge, mask=query_block < NQ, other=0), 0):
        return
    j = tl.program_id(2) * N + tl.arange(0, N)
    slot = tl.arange(0, GROUPS * PAD)
    row = (tl.program_id(1) * GROUPS + slot // PAD) * ROWS + slot % PAD
    real = (slot % PAD < ROWS) & (row < R)
    lse = tl.load(LSE + head * R + row, mask=real, other=0.0)
    # -inf: the row saw no key. Its scores are -inf too, and -inf - 0 is no NaN.
    lse = tl.where(lse == -float("inf"), 0.0, lse)
    at = SCORE + head * kept * R + j[:, None] * R + row[None, :]
    score = tl.load(at, mask=(j < kept)[:, None] & real[None, :], other=float("-inf"))
    part = tl.exp(score.to(tl.float32) - lse[None, :])
    part = tl.where(part < float("inf"), part, 0.0)  # NaN is not below it either
    mass = tl.sum(tl.reshape(part, [N, GROUPS, PAD]), 2)
    at = MASS + (head * NQ + query_block[None, :]) * kept + j[:, None]
    tl.store(at, mass, mask=(j < kept)[:, None] & (query_block < NQ)[None, :])


@triton.jit(
    do_not_specialize=["R", "NQ", "kept", "first", "heads", "before_b", "all_query_blocks", "sink"]
)
def _choose_kernel(
    MASS,
    LSE,
    BEFORE,
    OUT,
    R,
    NQ,
    kept,
    first,
    heads,
    before_b,
    before_p,
    all_query_blocks,
    sink,
    ROWS: tl.constexpr,
    PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    PAD_K: tl.constexpr,
):
    """The TOP_K largest of one query block's masses, by bisection over their bits: those of floats
    that are not negative are ordered as the floats are."""
    program = tl.program_id(0).to(tl.int64)
    head, query_block = program // NQ, first + program % NQ
    edge = tl.load(BEFORE + head // heads * before_b + query_block * before_p)
    slot = tl.arange(0, PAD)
    row = program % NQ * ROWS + slot
    lse = tl.load(LSE + head * R + row, mask=(slot < ROWS) & (row < R), other=-float("inf"))
    edge = tl.where(tl.max((lse != -float("inf")).to(tl.int32), 0) == 1, edge, 0)
    j = tl.arange(0, N)
    candidate = (j >= sink) & (j < tl.minimum(edge, kept))
    mass = tl.load(MASS + program * kept + j, mask=candidate, other=0.0)
    key = tl.where(candidate, mass.to(tl.int32, bitcast=True), -1)
    least = tl.zeros([], tl.int32)  # of the kept keys, if there are more than TOP_K
    for i in range(31):
        higher = least | (1 << (30 - i))
        least = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= TOP_K, higher, least)
    above = key > least
    equal = (key == least).to(tl.int32)
    room = TOP_K - tl.sum(above.to(tl.int32), 0)
    chosen = (above | ((equal == 1) & (tl.cumsum(equal, 0) <= room))).to(tl.int32)
    slot = tl.cumsum(chosen, 0) - 1
    out = OUT + (head * all_query_blocks + query_block) * TOP_K
    tl.store(out + slot, j, mask=chosen == 1)
    empty = tl.arange(0, PAD_K)
    listed = tl.sum(chosen, 0)
    tl.store(out + empty, tl.full([PAD_K], -1, tl.int32), (empty >= listed) & (empty < TOP_K))


def launch_lists(score, lse, before, blocks, *, first, rows, sink):
    """Fill the lists `blocks[:, :, first : first + NQ]` of NQ consecutive query blocks of `rows`
    rows, from score `[B,Hq,kept,R]` and lse `[B,Hq,R]` of their rows."""
    heads, (kept, all_rows) = lse.shape[0] * lse.shape[1], score.shape[2:]
    query_blocks = cdiv(all_rows, rows)
    mass = torch.empty((heads, query_blocks, kept), dtype=torch.float32, device=score.device)
    pad = next_power_of_two(rows)
    groups = max(1, 128 // pad)
    common = dict(
        LSE=lse,
        BEFORE=before,
        MASS=mass,
        R=all_rows,
        NQ=query_blocks,
        kept=kept,
        first=first,
        heads=lse.shape[1],
        before_b=before.stride(0),
        before_p=before.stride(1),
        ROWS=rows,
        PAD=pad,
    )
    launch_kernel(
        _mass_kernel,
        grid=(heads, cdiv(query_blocks, groups), cdiv(kept, 64)),
        SCORE=score,
        GROUPS=groups,
        N=64,
        num_warps=8,
        **common,
    )
    width = max(2, next_power_of_two(kept))
    launch_kernel(
        _choose_kernel,
        grid=(heads * query_blocks,),
        OUT=blocks,
        all_query_blocks=blocks.shape[2],
        sink=sink,
        TOP_K=blocks.shape[3],
        N=width,
        PAD_K=next_power_of_two(blocks.shape[3]),
        num_warps=min(16, max(1, width // 512)),
        **common,
    )
