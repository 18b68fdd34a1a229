"""The Triton kernel of `stream_edges`. Names as in `branches`: r is a key block, `low` the row's
first real key, `top` the last position of a query block."""

import math

from attnplug.ops.common.softmax import online_softmax
from attnplug.ops.common.triton import tl, triton
from attnplug.ops.stream.kernels.refine import load_block, scope

SCORE, MASS, VALUE = range(3)  # the kinds of weights: MODE of the kernel, and of the reference
_SCORE, _MASS = tl.constexpr(SCORE), tl.constexpr(MASS)
_LN2 = tl.constexpr(math.log(2))


@triton.jit
def _logits(query, position, k_at, mask_at, at, top, k_s, D: tl.constexpr, DP: tl.constexpr):
    """(products of the queries with the keys `at`, -inf for a pair that does not see each other;
    which keys any query sees; which pairs see each other)."""
    d = tl.arange(0, DP)
    seen = at <= top
    if mask_at is not None:
        seen = seen & (tl.load(mask_at + at, mask=seen, other=0) != 0)
    key = tl.load(
        k_at + at.to(tl.int64)[None, :] * k_s + d[:, None],
        mask=seen[None, :] & (d < D)[:, None],
        other=0.0,
    )
    pairs = seen[None, :] & (at[None, :] <= position[:, None])
    s = tl.dot(query, key, input_precision="ieee")
    return tl.where(pairs, s, float("-inf")), seen, pairs


@triton.jit
def weigh_edges(
    q,
    cache,
    rows,
    index,
    weight,
    out,
    lse,
    scale,
    K,
    SHAPE: tl.constexpr,
    SEARCH: tl.constexpr,
    TILE: tl.constexpr,
    MODE: tl.constexpr,
    OUTPUT: tl.constexpr,
    STEPS: tl.constexpr,
):
    """The edges of one query block and head: first the softmax's sums, if the weights or the output
    need them, then the weight of each block."""
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    BLOCK: tl.constexpr = SEARCH.BLOCK
    program = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    t, offset, low, top, alive = scope(program, h, b, rows, None, q.T, SEARCH, STEPS)
    last = tl.where(alive > 0, (top - low) // BLOCK, -1)
    d = tl.arange(0, DP)
    n = tl.arange(0, TILE)
    query, position, live = load_block(q, t, offset, h, b, SHAPE, SEARCH)
    row = t + tl.arange(0, ROWS)
    k_at = cache.k + b * cache.k_b + h // GROUP * cache.k_h
    v_at = cache.v + b * cache.v_b + h // GROUP * cache.v_h
    mask_at = rows.key_mask
    if rows.key_mask is not None:
        mask_at = rows.key_mask + b * rows.mask_b
    edge = ((b * tl.num_programs(1) + h) * tl.num_programs(0) + program) * K
    high = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    if MODE > _SCORE or OUTPUT:
        for place in range(K):
            r = tl.load(index + edge + place)
            if (r >= 0) & (r <= last):
                for begin in range(0, BLOCK, TILE):
                    at = low + r * BLOCK + begin + n
                    s, seen, _ = _logits(query, position, k_at, mask_at, at, top, cache.k_s, D, DP)
                    s = s * scale
                    p, decay, high, total = online_softmax(s, high, total)
                    if OUTPUT:
                        value = tl.load(
                            v_at + at.to(tl.int64)[:, None] * cache.v_s + d[None, :],
                            mask=seen[:, None] & (d < D)[None, :],
                            other=0.0,
                        )
                        acc = tl.dot(
                            p.to(value.dtype), value, acc * decay[:, None], input_precision="ieee"
                        )
    empty = total == 0
    sums = tl.where(high == float("-inf"), 0.0, high) + tl.log2(tl.where(empty, 1.0, total))
    if OUTPUT:
        out_row = (b * tl.num_programs(1) + h) * q.T + row
        tl.store(lse + out_row, tl.where(empty, float("-inf"), sums * _LN2), mask=live)
        result = acc / tl.where(empty, 1.0, total)[:, None]
        tl.store(
            out + out_row[:, None] * D + d[None, :],
            result.to(out.dtype.element_ty),
            mask=live[:, None] & (d < D)[None, :],
        )
    for place in range(K):
        r = tl.load(index + edge + place)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        gain = tl.zeros([DP], tl.float32)
        if (r >= 0) & (r <= last):
            for begin in range(0, BLOCK, TILE):
                at = low + r * BLOCK + begin + n
                s, seen, pairs = _logits(query, position, k_at, mask_at, at, top, cache.k_s, D, DP)
                if MODE == _SCORE:
                    best = tl.maximum(best, tl.max(tl.where(s == s, s, float("-inf")), 1))
                else:
                    p = tl.where(pairs, tl.exp2(s * scale - sums[:, None]), 0.0)
                    column = tl.sum(p, 0)
                    if MODE == _MASS:  # the same sum in every column
                        gain += tl.sum(column, 0)
                    else:
                        value = tl.load(
                            v_at + at.to(tl.int64)[:, None] * cache.v_s + d[None, :],
                            mask=seen[:, None] & (d < D)[None, :],
                            other=0.0,
                        ).to(tl.float32)
                        gain += tl.sum(column[:, None] * value, 0)
        if MODE == _SCORE:
            tl.store(weight + edge + place, tl.max(best, 0))
        elif MODE == _MASS:
            tl.store(weight + edge + place, tl.sum(tl.where(d == 0, gain, 0.0), 0))
        else:
            tl.store(weight + edge + place, tl.sqrt(tl.sum(gain * gain, 0)))
