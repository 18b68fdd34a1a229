"""The Triton kernels of `stream_mask`, in the order in which they run.

Names as in `branches`: r is a key block, `low` the row's first real key, `top` the last position of
a query block.
"""

from typing import Any, NamedTuple

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


class Search(NamedTuple):
    """What lists the kernels are compiled for."""

    QUERY_BLOCK: int  # queries that share a list
    BLOCK: int  # keys of a listed block
    K: int  # places of a list
    KP: int  # K, padded


class Budget(NamedTuple):
    """How long the lists are, `[B, Hq, NQ]` and its strides."""

    at: Any
    b: Any
    h: Any
    q: Any


class Allowed(NamedTuple):
    """The block mask's bytes `[B, Hq, NQ, NK]` and its strides; `at` is None where all are."""

    at: Any
    b: Any
    h: Any
    q: Any
    k: Any


@triton.jit
def scope(
    program,
    h,
    b,
    rows,
    budget,
    T,
    SEARCH: tl.constexpr,
    STEPS: tl.constexpr,
):
    """(first query, position less query, first real key, last position, branches) of a query
    block; no branches where it is past the row's end."""
    QUERY_BLOCK: tl.constexpr = SEARCH.QUERY_BLOCK
    length, low = row_span(rows, b, STEPS)
    offset = length - T
    t = tl.maximum(low - offset, 0) + program * QUERY_BLOCK
    top = offset + tl.minimum(t + QUERY_BLOCK, T) - 1
    branches = SEARCH.K
    if budget is not None:
        at = budget.at + b * budget.b + h * budget.h + program * budget.q
        branches = tl.maximum(tl.minimum(tl.load(at).to(tl.int32), SEARCH.K), 0)
    return t, offset, low, top, tl.where(t < T, branches, 0)


@triton.jit
def load_block(q, t, offset, h, b, SHAPE: tl.constexpr, SEARCH: tl.constexpr):
    """(queries `[ROWS, DP]` of head h's query block from query t on, their positions, -1 for none,
    and from which rows of the tile they are)."""
    ROWS: tl.constexpr = SHAPE.ROWS
    DP: tl.constexpr = SHAPE.DP
    m = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    row = t + m
    live = (m < SEARCH.QUERY_BLOCK) & (row < q.T)
    query = tl.load(
        q.at + b * q.b + h * q.h + row.to(tl.int64)[:, None] * q.t + d[None, :],
        mask=live[:, None] & (d < SHAPE.D)[None, :],
        other=0.0,
    )
    return query, tl.where(live, offset + row, -1), live


@triton.jit
def floor_of(t, offset, T, SHAPE: tl.constexpr, SEARCH: tl.constexpr):
    """The last position that every query of a tile sees, -1 where the tile has rows for none."""
    floor = tl.where(t + SHAPE.ROWS <= T, offset + t, -1)
    if SHAPE.ROWS != SEARCH.QUERY_BLOCK:
        floor = -1
    return floor


class Look(NamedTuple):
    """The queries of a program, and the keys that it may look at."""

    query: Any
    position: Any
    floor: Any  # every query sees the keys up to here
    k_at: Any  # of the KV head
    k_s: Any
    mask_at: Any  # of the row; None where it shows all
    low: Any
    top: Any


@triton.jit
def row_maxima(look, r, begin, SHAPE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Each query's largest product with the keys that it sees among TILE keys of block r, from the
    block's key `begin` on. Only a tile that reaches beyond the floor has pairs to leave out."""
    DP: tl.constexpr = SHAPE.DP
    mask_at = look.mask_at
    d = tl.arange(0, DP)
    since = look.low + tl.where(r == NONE, 0, r) * BLOCK + begin
    at = since + tl.arange(0, TILE)
    seen = at <= tl.where(r == NONE, -1, look.top)
    if mask_at is not None:
        seen = seen & (tl.load(mask_at + at, mask=seen, other=0) != 0)
    key = tl.load(
        look.k_at + at.to(tl.int64)[None, :] * look.k_s + d[:, None],
        mask=seen[None, :] & (d < SHAPE.D)[:, None],
        other=0.0,
    )
    s = tl.dot(look.query, key, input_precision="ieee")
    if mask_at is not None:
        s = tl.where(seen[None, :] & (at[None, :] <= look.position[:, None]), s, float("-inf"))
    elif since + TILE - 1 > look.floor:
        s = tl.where(at[None, :] <= look.position[:, None], s, float("-inf"))
    return tl.maximum(tl.max(s, 1), float("-inf"))  # no NaN


@triton.jit
def within_gap(
    key,
    look,
    gap,
    SHAPE: tl.constexpr,
    SEARCH: tl.constexpr,
    TILE: tl.constexpr,
):
    """The sorted list `key` without the blocks of which no query has a score that is at most `gap`
    below its best one in the list. Each listed block is read twice more, for each query's best and
    then for who comes near it: the maxima of all blocks together would not fit beside the keys."""
    BLOCK: tl.constexpr = SEARCH.BLOCK
    KP: tl.constexpr = SEARCH.KP
    PARTS: tl.constexpr = BLOCK // TILE
    i = tl.arange(0, KP)
    rep = representative(key)
    tiles = PARTS * tl.sum((rep != NONE).to(tl.int32), 0)  # the list has its blocks in front
    best = tl.full([SHAPE.ROWS], float("-inf"), tl.float32)
    # No pipelines: no GPU has compared one over these gathered keys (see `Plan`).
    for tile in tl.range(0, tiles, num_stages=1):
        r = tl.sum(tl.where(i == tile // PARTS, rep, 0), 0)
        best = tl.maximum(best, row_maxima(look, r, tile % PARTS * TILE, SHAPE, BLOCK, TILE))
    near = tl.zeros([KP], tl.int32)
    for tile in tl.range(0, tiles, num_stages=1):
        r = tl.sum(tl.where(i == tile // PARTS, rep, 0), 0)
        part = row_maxima(look, r, tile % PARTS * TILE, SHAPE, BLOCK, TILE)
        found = tl.where(part > float("-inf"), (part >= best - gap).to(tl.int32), 0)
        near = tl.where(i == tile // PARTS, tl.maximum(near, tl.max(found, 0)), near)
    empty = pack(tl.full([KP], float("-inf"), tl.float32), tl.full([KP], NONE, tl.int32))
    return tl.sort(tl.where(near > 0, key, empty), descending=True)


@triton.jit
def seed(
    q,
    cache,
    rows,
    index,
    score,
    after,
    before,
    allowed,
    budget,
    SHAPE: tl.constexpr,
    SEARCH: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    STEPS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Compute the scores that the first iteration needs, of a key tile for HEADS heads of a group
    at once: all heads begin with the same branches. The scores of the branches go to `score`. The
    scores of their other parts go to `index` as bits; `refine` reads them before it writes its
    result there."""
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    QUERY_BLOCK: tl.constexpr = SEARCH.QUERY_BLOCK
    BLOCK: tl.constexpr = SEARCH.BLOCK
    K: tl.constexpr = SEARCH.K
    KP: tl.constexpr = SEARCH.KP
    program = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    CHUNKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv = tl.program_id(1) // CHUNKS
    g = tl.program_id(1) % CHUNKS * HEADS
    h = (kv * GROUP + g).to(tl.int64)
    heads = tl.num_programs(1) // CHUNKS * GROUP
    t, offset, low, top, branches = scope(program, h, b, rows, budget, q.T, SEARCH, STEPS)
    if branches > 0:
        to_block = b * allowed.b + h * allowed.h + program.to(tl.int64) * allowed.q
        allowed_at = allowed.at
        if allowed.at is not None:
            allowed_at = allowed.at + to_block
        mask_at = rows.key_mask
        after_at = after
        before_at = before
        if rows.key_mask is not None:
            mask_at = rows.key_mask + b * rows.mask_b
            after_at = after + b * rows.S
            before_at = before + b * rows.S
        limits = (allowed.k, low, top)
        first, width = interval(allowed_at, after_at, before_at, limits, BLOCK)
        rep, other = start_branches(first, width, branches, allowed_at, after_at, limits, BLOCK, KP)
        m = tl.arange(0, HEADS * ROWS)
        d = tl.arange(0, DP)
        row = t + m % ROWS
        live = (g + m // ROWS < GROUP) & (m % ROWS < QUERY_BLOCK) & (row < q.T)
        q_row = b * q.b + (h + m // ROWS) * q.h + row.to(tl.int64) * q.t
        query = tl.load(
            q.at + q_row[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0
        )
        position = tl.where(live, offset + row, -1)
        k_at = cache.k + b * cache.k_b + kv.to(tl.int64) * cache.k_h
        i = tl.arange(0, KP)
        own = tl.arange(0, HEADS)
        out = ((b * heads + h + own) * tl.num_programs(0) + program) * K
        PARTS: tl.constexpr = BLOCK // TILE
        floor = floor_of(t, offset, q.T, SHAPE, SEARCH)
        look = Look(query, position, floor, k_at, cache.k_s, mask_at, low, top)
        best = tl.full([HEADS * ROWS], float("-inf"), tl.float32)
        tiles = 2 * PARTS * branches
        for tile in tl.range(0, tiles, num_stages=STAGES):
            slot = tile // (2 * PARTS)
            second = tile // PARTS % 2
            r = tl.sum(tl.where(i == slot, tl.where(second == 1, other, rep), 0), 0)
            part = row_maxima(look, r, tile % PARTS * TILE, SHAPE, BLOCK, TILE)
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
    cache,
    rows,
    index,
    score,
    after,
    before,
    allowed,
    budget,
    gap,
    SHAPE: tl.constexpr,
    SEARCH: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    STEPS: tl.constexpr,
):
    """The selection of one query block and head. It ends when every branch is one block: a further
    iteration would change nothing."""
    GROUP: tl.constexpr = SHAPE.GROUP
    BLOCK: tl.constexpr = SEARCH.BLOCK
    K: tl.constexpr = SEARCH.K
    KP: tl.constexpr = SEARCH.KP
    program = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    t, offset, low, top, branches = scope(program, h, b, rows, budget, q.T, SEARCH, STEPS)
    i = tl.arange(0, KP)
    out = ((b * tl.num_programs(1) + h) * tl.num_programs(0) + program) * K + i
    key = pack(tl.full([KP], float("-inf"), tl.float32), tl.full([KP], NONE, tl.int32))
    if branches > 0:
        to_block = b * allowed.b + h * allowed.h + program.to(tl.int64) * allowed.q
        allowed_at = allowed.at
        if allowed.at is not None:
            allowed_at = allowed.at + to_block
        mask_at = rows.key_mask
        after_at = after
        before_at = before
        if rows.key_mask is not None:
            mask_at = rows.key_mask + b * rows.mask_b
            after_at = after + b * rows.S
            before_at = before + b * rows.S
        limits = (allowed.k, low, top)
        first, width = interval(allowed_at, after_at, before_at, limits, BLOCK)
        rep, other = start_branches(first, width, branches, allowed_at, after_at, limits, BLOCK, KP)
        # `seed` has written no score where a branch, or its other part, has no valid block.
        own = tl.load(score + out, mask=rep != NONE, other=float("-inf"))
        new = tl.load(index + out, mask=other != NONE, other=0).to(tl.float32, bitcast=True)
        tl.debug_barrier()  # other warps store here at the end
        key = best_branches(pack(own, rep), pack(new, other), branches, KP)
        query, position, _ = load_block(q, t, offset, h, b, SHAPE, SEARCH)
        k_at = cache.k + b * cache.k_b + h // GROUP * cache.k_h
        PARTS: tl.constexpr = BLOCK // TILE
        floor = floor_of(t, offset, q.T, SHAPE, SEARCH)
        look = Look(query, position, floor, k_at, cache.k_s, mask_at, low, top)
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
                part = row_maxima(look, r, tile % PARTS * TILE, SHAPE, BLOCK, TILE)
                new = tl.where(i == slot, tl.maximum(new, tl.max(part, 0)), new)
            key = best_branches(key, pack(new, other), branches, KP)
            splits += 1
            longest = (longest + 1) // 2
        if gap is not None:
            key = within_gap(key, look, gap, SHAPE, SEARCH, TILE)
    rep = representative(key)
    tl.store(index + out, tl.where(rep == NONE, -1, rep), mask=i < K)
    tl.store(score + out, score_of(key), mask=i < K)
