"""The kernels of index_topk beside those of topk: one scores tokens, one packs what was picked."""

from attnplug.ops.common.constants import Constant
from attnplug.ops.common.rows import row_span
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton

_LOWEST = Constant(-3.4028234663852886e38)  # of float32


@triton.jit
def _load_queries(at, head, heads_stride, live, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """(`[COLUMNS, DP]`, the query-head pairs whose queries begin `at`; which of them there are)"""
    d = tl.arange(0, DP)
    there = live & (head < H)
    found = tl.load(
        at[:, None] + head.to(tl.int64)[:, None] * heads_stride + d[None, :],
        mask=there[:, None] & (d < D)[None, :],
        other=0.0,
    )
    return found, there


@triton.jit
def _head_sums(key, query, weight, there, scale, PADDED: tl.constexpr, PRECISION: tl.constexpr):
    """sum over heads of weight relu(scale q.k), `[TILE, QUERIES]`; `query` has QUERIES * HEADS
    rows, and `weight` is `[QUERIES, HEADS]`. A NaN stays one."""
    s = tl.dot(key, query.T, input_precision=PRECISION) * scale
    s = tl.maximum(s, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if PADDED:  # a query of zeros times an infinite key is NaN
        s = tl.where(there[None, :], s, 0.0)
    QUERIES: tl.constexpr = weight.shape[0]
    HEADS: tl.constexpr = weight.shape[1]
    s = tl.reshape(s, [key.shape[0], QUERIES, HEADS])
    return tl.sum(s * weight[None, :, :], 2)


@triton.jit
def score_index(
    q,
    weights,
    keys,
    key_scale,
    tokens,
    seen,
    scores,
    scale,
    first,
    queries,
    S,
    programs,
    q_strides,
    weights_strides,
    keys_strides,
    key_scale_strides,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """QUERIES neighbours of the slab's `queries`, which begin at query `first`, score every
    `programs`-th tile of the tokens that one of them sees. HEADS heads are multiplied at a time.
    Scores of tokens behind a query's own are not written. `seen` `[B, S]`, where it is given, says
    how many a query sees, and `key_scale` `[B, T]` what the keys are to be multiplied by: a factor
    that is not negative leaves which products relu keeps."""
    q_b, q_s, q_h = q_strides
    w_b, w_s, w_h = weights_strides
    k_b, k_t = keys_strides
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    length, _ = row_span(tokens, b, STEPS)
    BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    PADDED: tl.constexpr = H % HEADS != 0
    # Pair c of a product is head c % HEADS of its block and of query c // HEADS.
    c = tl.arange(0, QUERIES * HEADS)
    here = tl.program_id(1) * QUERIES
    pair_query = here + c // HEADS
    live = pair_query < queries
    q_at = q + b * q_b + (first + pair_query).to(tl.int64) * q_s
    own = here + tl.arange(0, QUERIES)
    head = tl.arange(0, HEADS)
    w_at = weights + b * w_b + (first + own).to(tl.int64)[:, None] * w_s
    in_slab = own < queries
    query, there = _load_queries(q_at, c % HEADS, q_h, live, H, D, DP)
    wanted = in_slab[:, None] & (head < H)[None, :]
    weight = tl.load(w_at + head[None, :] * w_h, mask=wanted, other=0.0)

    if seen is not None:
        count = tl.load(seen + b * S + first + own, mask=in_slab, other=0, cache_modifier=".cg")
        position = count.to(tl.int32) - 1
        reach = tl.max(position, 0) + 1
    else:
        position = length - S + first + own
        reach = length - S + first + tl.minimum(here + QUERIES, queries)  # what the last sees
    keys_at = keys + b * k_b
    row = b * queries + own
    scores_at = scores + row[None, :] * tokens.S
    d = tl.arange(0, DP)
    for i in tl.range(tl.program_id(0), tl.cdiv(reach, TILE), programs, num_stages=STAGES):
        n = i * TILE + tl.arange(0, TILE)
        key = tl.load(
            keys_at + n.to(tl.int64)[:, None] * k_t + d[None, :],
            mask=(n < reach)[:, None] & (d < D)[None, :],
            other=0.0,
        )
        if key_scale is not None:
            key = key.to(query.dtype)
        x = _head_sums(key, query, weight, there, scale, PADDED, PRECISION)
        for block in tl.range(1, BLOCKS, num_stages=1):
            h = block * HEADS + head
            others, real = _load_queries(q_at, block * HEADS + c % HEADS, q_h, live, H, D, DP)
            wanted = in_slab[:, None] & (h < H)[None, :]
            theirs = tl.load(w_at + h[None, :] * w_h, mask=wanted, other=0.0)
            x += _head_sums(key, others, theirs, real, scale, PADDED, PRECISION)
        if key_scale is not None:
            c_b, c_t = key_scale_strides
            at = key_scale + b * c_b + n.to(tl.int64) * c_t
            x *= tl.load(at, mask=n < reach, other=0.0)[:, None]
        # -inf is the score of what may not be picked. A NaN is picked, and surfaces in attention.
        x = tl.where(x == x, tl.maximum(x, _LOWEST), float("inf"))
        if tokens.key_mask is not None:
            shown = tl.load(tokens.key_mask + b * tokens.mask_b + n, mask=n < reach, other=0) != 0
            x = tl.where(shown[:, None], x, float("-inf"))
        written = (n[:, None] <= position[None, :]) & in_slab[None, :]
        tl.store(scores_at + n[:, None], x, mask=written)


@triton.jit
def pack_picks(
    indices,
    values,
    tokens,
    seen,
    picks,
    S,
    K,
    KP: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of picks, left-packed and filled up with -1: those of `indices [K]` whose values are
    not -inf, or without `indices` all tokens that the row's query sees, of K = T."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, KP)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if indices is not None:
        token = tl.load(indices + row * K + place, mask=place < K, other=-1)
        value = tl.load(values + row * K + place, mask=place < K, other=float("-inf"))
        kept = (token >= 0) & (value > float("-inf"))
    else:
        b = row // S
        length, _ = row_span(tokens, b, STEPS)
        token = place
        kept = (place < K) & (place <= length - S + (row - b * S).to(tl.int32))
        if seen is not None:
            kept = (place < K) & (place < tl.load(seen + row, cache_modifier=".cg"))
        if tokens.key_mask is not None:
            at = tokens.key_mask + b * tokens.mask_b + place
            kept = kept & (tl.load(at, mask=kept, other=0) != 0)
    before = tl.cumsum(kept.to(tl.int32), 0)
    total = tl.max(before, 0)
    tl.store(picks + row * K + before - 1, token, mask=kept)
    spare = (place >= total) & (place < K)
    tl.store(picks + row * K + place, tl.full([KP], -1, tl.int32), mask=spare)
