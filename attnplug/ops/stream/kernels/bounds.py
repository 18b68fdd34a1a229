"""The Triton kernels of `stream_mask` with `search="bounds"`, in the order in which they run.

Names as in `branches`: r is a key block, `low` the row's first real key, `top` the last position of
a query block. A query block's `own` blocks begin with the block of its first query; those before it
are the *earlier* ones, which all its queries see whole.
"""

from attnplug.ops.common.constants import Constant
from attnplug.ops.common.rows import row_span
from attnplug.ops.common.triton import tl, triton
from attnplug.ops.common.views import Rows
from attnplug.ops.stream.kernels.branches import (
    NONE,
    best_branches,
    pack,
    representative,
    score_of,
    valid_blocks,
)
from attnplug.ops.stream.kernels.refine import (
    Look,
    floor_of,
    load_block,
    row_maxima,
    scope,
    within_gap,
)

WIDER = Constant(4)  # earlier blocks that are scored for each place of a list
LISTS = Constant(16)  # that a program of `rank` makes at once: the least rows of a product
_EMPTY = Constant(-0x8000000000000000)  # below every key of `pack`, and so are the next 2^32
_FULL = Constant(0x7FFFFFFFFFFFFFFF)


@triton.jit
def summarise(
    cache,
    rows,
    summaries,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Max and min of the shown keys of one block, if it is complete; NaN as its max where one of
    them is not finite."""
    KEYS: tl.constexpr = 16
    r = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    length, low = row_span(rows, b, STEPS)
    begin = low + r * BLOCK
    if begin + BLOCK <= length:
        d = tl.arange(0, DP)
        high = tl.full([KEYS, DP], float("-inf"), tl.float32)
        small = tl.full([KEYS, DP], float("inf"), tl.float32)
        odd = tl.zeros([KEYS, DP], tl.int32)
        for i in range(0, BLOCK, KEYS):
            at = begin + i + tl.arange(0, KEYS)
            seen = at < length
            if rows.key_mask is not None:
                seen = tl.load(rows.key_mask + b * rows.mask_b + at) != 0
            inside = seen[:, None] & (d < D)[None, :]
            key_at = cache.k + b * cache.k_b + h * cache.k_h
            key_at = key_at + at.to(tl.int64)[:, None] * cache.k_s + d[None, :]
            key = tl.load(key_at, mask=inside, other=0.0).to(tl.float32)
            high = tl.maximum(high, tl.where(inside, key, float("-inf")))
            small = tl.minimum(small, tl.where(inside, key, float("inf")))
            odd = tl.where(tl.abs(key) < float("inf"), odd, 1)
        any_odd = tl.max(tl.max(odd, 1), 0) > 0
        most = tl.max(high, 0)
        least = tl.min(small, 0)
        seen_any = most >= least  # else no key is shown, and nobody ranks the block
        most = tl.where(any_odd, float("nan"), tl.where(seen_any, most, 0.0))
        out = summaries + ((b * tl.num_programs(1) + h) * tl.num_programs(0) + r) * (2 * D) + d
        tl.store(out, most.to(summaries.dtype.element_ty), mask=d < D)
        least = tl.where(seen_any, least, 0.0).to(summaries.dtype.element_ty)
        tl.store(out + D, least, mask=d < D)


@triton.jit
def _exact_product(x, key):
    """`x [M, K]`, float32, times `key [K, N]`. Where key has 16 bits, x is cut into three parts of
    its type, which together have every bit of x that is not far below its largest one."""
    if key.dtype == tl.float32:
        s = tl.dot(x, key, input_precision="ieee")
    else:
        first = x.to(key.dtype)
        rest = x - first.to(tl.float32)
        second = rest.to(key.dtype)
        third = (rest - second.to(tl.float32)).to(key.dtype)
        s = tl.dot(first, key, tl.dot(second, key, tl.dot(third, key)))
    return s


@triton.jit
def _keep(kept, key):
    """The best of `kept [M, CP]` and `key [M, N]`, row by row, in no order: as long as a row's best
    newcomer is above the worst that is kept, they change places. No two keys of a row are equal,
    but that all newcomers that are none are _EMPTY, which is above nothing."""
    best = tl.max(key, 1)
    worst = tl.min(kept, 1)
    while tl.max((best > worst).to(tl.int32), 0) > 0:
        takes = (best > worst)[:, None]
        kept = tl.where(takes & (kept == worst[:, None]), best[:, None], kept)
        key = tl.where(takes & (key == best[:, None]), _EMPTY, key)
        best = tl.max(key, 1)
        worst = tl.min(kept, 1)
    return kept


@triton.jit
def _means(q_at, row, live, T, q_t, D: tl.constexpr, DP: tl.constexpr, QUERY_BLOCK, ROWS):
    """Sums of the finite values of the queries row .. row + ROWS - 1 of each list, over the size of
    a query block: [LISTS, DP]."""
    d = tl.arange(0, DP)
    mean = tl.zeros([LISTS, DP], tl.float32)
    for u in range(0, ROWS):
        here = live & (row + u < T)
        at = q_at + (row + u).to(tl.int64) * q_t
        x = tl.load(at[:, None] + d[None, :], mask=here[:, None] & (d < D)[None, :], other=0.0)
        x = x.to(tl.float32)
        mean += tl.where(tl.abs(x) < float("inf"), x * (1.0 / QUERY_BLOCK), 0.0)
    return mean


# None of these may want a kernel of its own: a server compiles before it serves.
@triton.jit(do_not_specialize=["T", "S", "N", "slots"])
def rank(
    q,
    summaries,
    chosen,
    lengths,
    start,
    after,
    allowed,
    budget,
    T,
    S,
    N,
    slots,
    q_strides,
    SHAPE: tl.constexpr,
    SEARCH: tl.constexpr,
    TILE: tl.constexpr,
    CP: tl.constexpr,
    STEPS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """The earlier blocks of highest bound, WIDER for each place of a list, ascending, of HEADS
    heads of a group and LISTS / HEADS query blocks. TILE blocks are compared at a time."""
    q_b, q_h, q_t = q_strides
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    QUERY_BLOCK: tl.constexpr = SEARCH.QUERY_BLOCK
    BLOCK: tl.constexpr = SEARCH.BLOCK
    K: tl.constexpr = SEARCH.K
    b = tl.program_id(2).to(tl.int64)
    CHUNKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv = tl.program_id(1) // CHUNKS
    kv_heads = tl.num_programs(1) // CHUNKS
    m = tl.arange(0, LISTS)
    g = tl.program_id(1) % CHUNKS * HEADS + m % HEADS
    i = tl.program_id(0) * (LISTS // HEADS) + m // HEADS
    exists = (g < GROUP) & (i < slots)
    h = (kv * GROUP + tl.where(exists, g, 0)).to(tl.int64)
    i = tl.where(exists, i, 0)
    t, offset, low, top, branches = scope(
        i, h, b, Rows(lengths, start, None, None, S), budget, T, SEARCH, STEPS
    )
    live = exists & (branches > 0)
    own = tl.where(live, (offset + t - low) // BLOCK, 0)
    until = tl.max(own, 0)
    mean = _means(q + b * q_b + h * q_h, t, live, T, q_t, D, DP, QUERY_BLOCK, ROWS)
    positive = tl.maximum(mean, 0.0)
    negative = tl.minimum(mean, 0.0)
    allowed_at = allowed.at
    if allowed.at is not None:
        to_block = b * allowed.b + h * allowed.h + i.to(tl.int64) * allowed.q
        allowed_at = (allowed.at + to_block)[:, None]
    after_at = after
    if after is not None:
        after_at = after + b * S
    place = tl.arange(0, CP)[None, :]
    usable = place < (branches * WIDER)[:, None]
    kept = tl.where(usable, place.to(tl.int64) + _EMPTY, _FULL)
    d = tl.arange(0, DP)[:, None]
    base = summaries + (b * kv_heads + kv) * N * (2 * D)
    for begin in range(0, until, TILE):
        r = begin + tl.arange(0, TILE)[None, :]
        at = base + r.to(tl.int64) * (2 * D) + d
        high = tl.load(at, mask=(r < until) & (d < D), other=0.0)
        small = tl.load(at + D, mask=(r < until) & (d < D), other=0.0)
        s = _exact_product(positive, high) + _exact_product(negative, small)
        r = r + tl.zeros([LISTS, TILE], tl.int32)
        limits = (allowed.k, low, top[:, None])
        valid = valid_blocks(r, r < own[:, None], allowed_at, after_at, limits, BLOCK)
        key = pack(tl.where(s == s, s, float("inf")), r)
        kept = _keep(kept, tl.where(valid, key, _EMPTY))
    r = tl.where(usable & (kept >= _EMPTY + CP), representative(kept), NONE)
    out = chosen + ((b * kv_heads * GROUP + h) * slots + i)[:, None] * (WIDER * K) + place
    tl.store(out, tl.sort(r, 1), mask=exists[:, None] & (place < WIDER * K))


@triton.jit
def rescore(
    q,
    cache,
    rows,
    chosen,
    index,
    score,
    after,
    allowed,
    budget,
    gap,
    SHAPE: tl.constexpr,
    SEARCH: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    STEPS: tl.constexpr,
):
    """The list of one query block and head: the best of what `rank` has chosen and of its own
    blocks, KP of them at a time."""
    GROUP: tl.constexpr = SHAPE.GROUP
    BLOCK: tl.constexpr = SEARCH.BLOCK
    K: tl.constexpr = SEARCH.K
    KP: tl.constexpr = SEARCH.KP
    program = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    t, offset, low, top, branches = scope(program, h, b, rows, budget, q.T, SEARCH, STEPS)
    i = tl.arange(0, KP)
    line = (b * tl.num_programs(1) + h) * tl.num_programs(0) + program
    key = pack(tl.full([KP], float("-inf"), tl.float32), tl.full([KP], NONE, tl.int32))
    if branches > 0:
        allowed_at = allowed.at
        if allowed.at is not None:
            to_block = b * allowed.b + h * allowed.h + program.to(tl.int64) * allowed.q
            allowed_at = allowed.at + to_block
        mask_at = rows.key_mask
        after_at = after
        if rows.key_mask is not None:
            mask_at = rows.key_mask + b * rows.mask_b
            after_at = after + b * rows.S
        limits = (allowed.k, low, top)
        query, position, _ = load_block(q, t, offset, h, b, SHAPE, SEARCH)
        k_at = cache.k + b * cache.k_b + h // GROUP * cache.k_h
        PARTS: tl.constexpr = BLOCK // TILE
        floor = floor_of(t, offset, q.T, SHAPE, SEARCH)
        look = Look(query, position, floor, k_at, cache.k_s, mask_at, low, top)
        own = (offset + t - low) // BLOCK
        earlier = tl.minimum(own, branches * WIDER)
        total = earlier + (top - low) // BLOCK - own + 1
        for base in range(0, total, KP):
            slot = base + i
            r_own = own + slot - earlier
            inside = (slot >= earlier) & (slot < total)
            inside = valid_blocks(r_own, inside, allowed_at, after_at, limits, BLOCK)
            listed = tl.load(chosen + line * (WIDER * K) + slot, mask=slot < earlier, other=NONE)
            rep = tl.where(inside, r_own, listed)
            new = tl.full([KP], float("-inf"), tl.float32)
            tiles = PARTS * tl.minimum(KP, total - base)
            for tile in tl.range(0, tiles, num_stages=STAGES):
                r = tl.sum(tl.where(i == tile // PARTS, rep, 0), 0)
                part = row_maxima(look, r, tile % PARTS * TILE, SHAPE, BLOCK, TILE)
                new = tl.where(i == tile // PARTS, tl.maximum(new, tl.max(part, 0)), new)
            key = best_branches(key, pack(new, rep), branches, KP)
        if gap is not None:
            key = within_gap(key, look, gap, SHAPE, SEARCH, TILE)
    rep = representative(key)
    tl.store(index + line * K + i, tl.where(rep == NONE, -1, rep), mask=i < K)
    tl.store(score + line * K + i, score_of(key), mask=i < K)
