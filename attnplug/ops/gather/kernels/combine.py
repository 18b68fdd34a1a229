"""The Triton kernel that makes one score of each block of its scores for several heads, for the
scoring "estimate" of select_blocks."""

from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.gather.kernels.select import row_limit, store_keys


@triton.jit
def combine_heads(
    scores,
    best,
    head_scores,
    lengths,
    start,
    T,
    S,
    N,
    chunks,
    kv_heads,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOCAL: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    MEMBERS: tl.constexpr,
    NEW: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """log sum over the heads of each one's softmax over the candidates, for one chunk."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    _, _, limit, _ = row_limit(
        lengths=lengths,
        start=start,
        row=row,
        T=T,
        S=S,
        kv_heads=kv_heads,
        BLOCK=BLOCK,
        LOCAL=LOCAL,
        NEW=NEW,
        LENGTH_STEP=LENGTH_STEP,
        START_STEP=START_STEP,
    )
    if chunk * CHUNK < limit:
        g = tl.arange(0, ROWS)
        c = tl.arange(0, CHUNKS)
        own = head_scores + row * GROUP * (N + chunks) + g
        in_group = g < GROUP
        lse = tl.load(
            own[None, :] + (N + c)[:, None] * GROUP,
            mask=in_group[None, :] & (c < tl.cdiv(limit, CHUNK))[:, None],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        top = tl.max(lse, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp(lse - top[None, :]), 0)
        lse = top + tl.log(tl.where(total > 0, total, 1.0))
        j = chunk * CHUNK + tl.arange(0, CHUNK)
        score = tl.load(
            own[None, :] + j[:, None] * GROUP,
            mask=in_group[None, :] & (j < limit)[:, None],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        any_nan = tl.sum((score != score).to(tl.int32), 1) > 0
        share = tl.where(score == score, score - lse[None, :], float("-inf"))
        high = tl.max(share, 1)
        shift = tl.where((high == float("-inf")) | (high == float("inf")), 0.0, high)
        total = tl.sum(tl.exp(share - shift[:, None]), 1)
        score = shift + tl.log(tl.where(total > 0, total, 1.0))
        score = tl.where(any_nan, float("inf"), score)
        best_at = best
        if MEMBERS > 0:
            best_at = best + row * tl.cdiv(N, MEMBERS)
        usable = any_nan | (high > float("-inf"))
        store_keys(score, chunk * CHUNK, usable, scores + row * N, best_at, limit, CHUNK, MEMBERS)
