"""The Triton kernels of `stream_mask`, in the order in which they run.

Names as in `branches`: r is a key block, `low` the row's first real key, `top` the last position of
a query block.
"""

from attnplug.ops.common.rows import row_span
from attnplug.ops.common.triton import tl, triton
from attnplug.ops.stream.kernels.branches import (
    NONE,
    best_branches,
    descend,
    interval,
    other_part,
    pack,
    representative,
    score_of,
    start_branches,
)


@triton.jit
def scope(
    program,
    h,
    b,
    lengths,
    start,
    budget,
    T,
    S,
    budget_strides,
    QUERY_BLOCK: tl.constexpr,
    K: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
):
    """(first query, position less query, first real key, last position, branches) of a query
    block; no branches where it is past the row's end."""
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    offset = length - T
    t = tl.maximum(low - offset, 0) + program * QUERY_BLOCK
    top = offset + tl.minimum(t + QUERY_BLOCK, T) - 1
    branches = K
    if budget is not None:
        budget_b, budget_h, budget_q = budget_strides
        branches = tl.load(budget + b * budget_b + h * budget_h + program * budget_q).to(tl.int32)
        branches = tl.maximum(tl.minimum(branches, K), 0)
    return t, offset, low, top, tl.where(t < T, branches, 0)


@triton.jit
def row_maxima(
    query,
    position,
    floor,
    k_at,
    mask_at,
    r,
    begin,
    low,
    top,
    k_s,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Each query's largest product with the keys that it sees among TILE keys of block r, from the
    block's key `begin` on. Every query sees the keys up to `floor`, so only a tile that reaches
    beyond has pairs to leave out."""
    d = tl.arange(0, DP)
    since = low + tl.where(r == NONE, 0, r) * BLOCK + begin
    at = since + tl.arange(0, TILE)
    seen = at <= tl.where(r == NONE, -1, top)
    if mask_at is not None:
        seen = seen & (tl.load(mask_at + at, mask=seen, other=0) != 0)
    key = tl.load(
        k_at + at.to(tl.int64)[None, :] * k_s + d[:, None],
        mask=seen[None, :] & (d < D)[:, None],
        other=0.0,
    )
    s = tl.dot(query, key, input_precision="ieee")
    if mask_at is not None:
        s = tl.where(seen[None, :] & (at[None, :] <= position[:, None]), s, float("-inf"))
    elif since + TILE - 1 > floor:
        s = tl.where(at[None, :] <= position[:, None], s, float("-inf"))
    return tl.maximum(tl.max(s, 1), float("-inf"))  # no NaN


@triton.jit
def seed(
    q,
    k,
    index,
    score,
    lengths,
    start,
    key_mask,
    after,
    before,
    block_mask,
    budget,
    T,
    S,
    q_strides,
    k_strides,
    mask_stride,
    allowed_strides,
    budget_strides,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
    STAGES: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Compute the scores that the first iteration needs, of a key tile for HEADS heads of a group
    at once: all heads begin with the same branches. The scores of the branches go to `score`. The
    scores of their other parts go to `index` as bits; `refine` reads them before it writes its
    result there."""
    q_b, q_h, q_t = q_strides
    k_b, k_h, k_s = k_strides
    allowed_b, allowed_h, allowed_q, allowed_k = allowed_strides
    program = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    CHUNKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv = tl.program_id(1) // CHUNKS
    g = tl.program_id(1) % CHUNKS * HEADS
    h = (kv * GROUP + g).to(tl.int64)
    heads = tl.num_programs(1) // CHUNKS * GROUP
    t, offset, low, top, branches = scope(
        program=program,
        h=h,
        b=b,
        lengths=lengths,
        start=start,
        budget=budget,
        T=T,
        S=S,
        budget_strides=budget_strides,
        QUERY_BLOCK=QUERY_BLOCK,
        K=K,
        LENGTH_STEP=LENGTH_STEP,
        START_STEP=START_STEP,
    )
    if branches > 0:
        to_block = b * allowed_b + h * allowed_h + program.to(tl.int64) * allowed_q
        allowed_at = block_mask
        if block_mask is not None:
            allowed_at = block_mask + to_block
        mask_at = key_mask
        after_at = after
        before_at = before
        if key_mask is not None:
            mask_at = key_mask + b * mask_stride
            after_at = after + b * S
            before_at = before + b * S
        limits = (allowed_k, low, top)
        first, width = interval(allowed_at, after_at, before_at, limits, BLOCK)
        rep, other = start_branches(first, width, branches, allowed_at, after_at, limits, BLOCK, KP)
        m = tl.arange(0, HEADS * ROWS)
        d = tl.arange(0, DP)
        row = t + m % ROWS
        live = (g + m // ROWS < GROUP) & (m % ROWS < QUERY_BLOCK) & (row < T)
        q_row = b * q_b + (h + m // ROWS) * q_h + row.to(tl.int64) * q_t
        query = tl.load(
            q + q_row[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0
        )
        position = tl.where(live, offset + row, -1)
        k_at = k + b * k_b + kv.to(tl.int64) * k_h
        i = tl.arange(0, KP)
        own = tl.arange(0, HEADS)
        out = ((b * heads + h + own) * tl.num_programs(0) + program) * K
        PARTS: tl.constexpr = BLOCK // TILE
        floor = tl.where(t + ROWS <= T, offset + t, -1)
        if ROWS != QUERY_BLOCK:
            floor = -1
        best = tl.full([HEADS * ROWS], float("-inf"), tl.float32)
        tiles = 2 * PARTS * branches
        for tile in tl.range(0, tiles, num_stages=STAGES):
            slot = tile // (2 * PARTS)
            second = tile // PARTS % 2
            r = tl.sum(tl.where(i == slot, tl.where(second == 1, other, rep), 0), 0)
            part = row_maxima(
                query=query,
                position=position,
                floor=floor,
                k_at=k_at,
                mask_at=mask_at,
                r=r,
                begin=tile % PARTS * TILE,
                low=low,
                top=top,
                k_s=k_s,
                D=D,
                DP=DP,
                BLOCK=BLOCK,
                TILE=TILE,
            )
            best = tl.maximum(part, tl.where(tile % PARTS == 0, float("-inf"), best))
            most = tl.max(tl.reshape(best, [HEADS, ROWS]), 1)
            heads_in = tl.where(tile % PARTS == PARTS - 1, tl.where(r == NONE, 0, GROUP), 0)
            here = g + own < tl.where(second == 0, heads_in, 0)
            tl.store(score + out + slot, most, mask=here)
            here = g + own < tl.where(second == 1, heads_in, 0)
            tl.store(index + out + slot, most.to(tl.int32, bitcast=True), mask=here)


@triton.jit
def refine(
    q,
    k,
    index,
    score,
    lengths,
    start,
    key_mask,
    after,
    before,
    block_mask,
    budget,
    T,
    S,
    q_strides,
    k_strides,
    mask_stride,
    allowed_strides,
    budget_strides,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The selection of one query block and head. It ends when every branch is one block: a further
    iteration would change nothing."""
    q_b, q_h, q_t = q_strides
    k_b, k_h, k_s = k_strides
    allowed_b, allowed_h, allowed_q, allowed_k = allowed_strides
    program = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    t, offset, low, top, branches = scope(
        program=program,
        h=h,
        b=b,
        lengths=lengths,
        start=start,
        budget=budget,
        T=T,
        S=S,
        budget_strides=budget_strides,
        QUERY_BLOCK=QUERY_BLOCK,
        K=K,
        LENGTH_STEP=LENGTH_STEP,
        START_STEP=START_STEP,
    )
    i = tl.arange(0, KP)
    out = ((b * tl.num_programs(1) + h) * tl.num_programs(0) + program) * K + i
    key = pack(tl.full([KP], float("-inf"), tl.float32), tl.full([KP], NONE, tl.int32))
    if branches > 0:
        to_block = b * allowed_b + h * allowed_h + program.to(tl.int64) * allowed_q
        allowed_at = block_mask
        if block_mask is not None:
            allowed_at = block_mask + to_block
        mask_at = key_mask
        after_at = after
        before_at = before
        if key_mask is not None:
            mask_at = key_mask + b * mask_stride
            after_at = after + b * S
            before_at = before + b * S
        limits = (allowed_k, low, top)
        first, width = interval(allowed_at, after_at, before_at, limits, BLOCK)
        rep, other = start_branches(first, width, branches, allowed_at, after_at, limits, BLOCK, KP)
        # `seed` has written no score where a branch, or its other part, has no valid block.
        own = tl.load(score + out, mask=rep != NONE, other=float("-inf"))
        new = tl.load(index + out, mask=other != NONE, other=0).to(tl.float32, bitcast=True)
        tl.debug_barrier()  # other warps store here at the end
        key = best_branches(pack(own, rep), pack(new, other), branches, KP)
        m = tl.arange(0, ROWS)
        d = tl.arange(0, DP)
        row = t + m
        live = (m < QUERY_BLOCK) & (row < T)
        query = tl.load(
            q + b * q_b + h * q_h + row.to(tl.int64)[:, None] * q_t + d[None, :],
            mask=live[:, None] & (d < D)[None, :],
            other=0.0,
        )
        position = tl.where(live, offset + row, -1)
        k_at = k + b * k_b + h // GROUP * k_h
        PARTS: tl.constexpr = BLOCK // TILE
        floor = tl.where(t + ROWS <= T, offset + t, -1)
        if ROWS != QUERY_BLOCK:
            floor = -1
        splits = 1
        longest = (tl.cdiv(width, branches) + 1) // 2
        while longest > 1:
            rep = representative(key)
            begin, end = descend(rep, first, width, branches, splits)
            other = other_part(rep, begin, end, allowed_at, after_at, limits, BLOCK, KP)
            new = tl.full([KP], float("-inf"), tl.float32)
            tiles = PARTS * branches
            for tile in tl.range(0, tiles, num_stages=STAGES):
                slot = tile // PARTS
                r = tl.sum(tl.where(i == slot, other, 0), 0)
                part = row_maxima(
                    query=query,
                    position=position,
                    floor=floor,
                    k_at=k_at,
                    mask_at=mask_at,
                    r=r,
                    begin=tile % PARTS * TILE,
                    low=low,
                    top=top,
                    k_s=k_s,
                    D=D,
                    DP=DP,
                    BLOCK=BLOCK,
                    TILE=TILE,
                )
                new = tl.where(i == slot, tl.maximum(new, tl.max(part, 0)), new)
            key = best_branches(key, pack(new, other), branches, KP)
            splits += 1
            longest = (longest + 1) // 2
    rep = representative(key)
    tl.store(index + out, tl.where(rep == NONE, -1, rep), mask=i < K)
    tl.store(score + out, score_of(key), mask=i < K)
