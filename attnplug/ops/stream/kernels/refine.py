"""The Triton kernels of `stream_mask`, in the order in which they run.

A branch is kept as one int64, (score, representative) in the total order of the selection: the
interval that it stands for follows from the representative and the number of splits, because
branches are disjoint. For the same reason two valid candidates never share a representative, and
the order's last two places (branch, part) have nothing left to decide.
"""

import triton
import triton.language as tl

from attnplug.ops.common.rows import row_span

NONE = tl.constexpr(0x7FFFFFFF)  # the representative of a part without a valid block
_LOW = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _pack(score, rep):
    """int64 that is larger for the candidate that comes first."""
    score = tl.where(rep == NONE, float("-inf"), tl.where(score == 0.0, 0.0, score))  # -0.0 ties
    bits = score.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (rep ^ NONE).to(tl.int64)


@triton.jit
def _rep(key):
    return (key & _LOW).to(tl.int32) ^ NONE


@triton.jit
def _score(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(old, new, branches, KP: tl.constexpr):
    """The best `branches` of both, sorted; the rest is empty."""
    key = tl.topk(tl.reshape(tl.join(old, new), [2 * KP]), KP)
    i = tl.arange(0, KP)
    empty = _pack(tl.full([KP], float("-inf"), tl.float32), tl.full([KP], NONE, tl.int32))
    return tl.where(i < branches, key, empty)


@triton.jit
def _valid(r, inside, allowed_at, after_at, top, low, blocks_s, BLOCK: tl.constexpr):
    """Which of the blocks r the query block may look at, by both masks."""
    if allowed_at is not None:
        inside &= tl.load(allowed_at + r.to(tl.int64) * blocks_s, mask=inside, other=0) != 0
    if after_at is not None:
        seen = tl.load(after_at + low + r * BLOCK, mask=inside, other=NONE)
        inside &= (seen <= top) & (seen < low + (r + 1) * BLOCK)
    return inside


@triton.jit
def _first_valid(
    a, b, allowed_at, after_at, top, low, blocks_s, BLOCK: tl.constexpr, KP: tl.constexpr
):
    """The first valid block of every interval [a, b), NONE where there is none."""
    found = tl.full([KP], NONE, tl.int32)
    if allowed_at is not None:
        WIDE: tl.constexpr = 16
        for offset in range(0, tl.max(b - a, 0), WIDE):
            r = (a + offset)[:, None] + tl.arange(0, WIDE)[None, :]
            valid = _valid(r, r < b[:, None], allowed_at, after_at, top, low, blocks_s, BLOCK)
            found = tl.minimum(found, tl.min(tl.where(valid, r, NONE), 1))
    elif after_at is not None:
        seen = tl.load(after_at + low + a * BLOCK, mask=a < b, other=NONE)
        r = (tl.minimum(seen, top + 1) - low) // BLOCK
        found = tl.where((seen <= top) & (r < b), r, found)
    else:
        found = tl.where(a < b, a, found)
    return found


@triton.jit
def _interval(allowed_at, after_at, before_at, top, low, blocks_s, BLOCK: tl.constexpr):
    """(first valid block, blocks up to the last valid one, both included)."""
    first = 0
    last = (top - low) // BLOCK
    if allowed_at is not None:
        WIDE: tl.constexpr = 256
        i = tl.arange(0, WIDE)
        lowest = tl.full([WIDE], NONE, tl.int32)
        highest = tl.full([WIDE], -1, tl.int32)
        for offset in range(0, last + 1, WIDE):
            r = offset + i
            valid = _valid(r, r <= last, allowed_at, after_at, top, low, blocks_s, BLOCK)
            lowest = tl.minimum(lowest, tl.where(valid, r, NONE))
            highest = tl.maximum(highest, tl.where(valid, r, -1))
        first = tl.min(lowest, 0)
        last = tl.max(highest, 0)
    elif after_at is not None:
        seen = tl.load(after_at + low)
        last = tl.load(before_at + top)
        first = tl.where(seen <= top, (tl.minimum(seen, top) - low) // BLOCK, NONE)
        last = tl.where(last >= low, (tl.maximum(last, low) - low) // BLOCK, -1)
    return first, tl.where(last >= 0, last - first + 1, 0)


@triton.jit
def _descend(rep, first, width, branches, splits):
    """The interval [a, b) of the branch that `rep` lies in, `splits` splits after the start."""
    size = width // tl.maximum(branches, 1)
    more = width - size * branches  # branches that are one longer
    x = rep - first
    wide = x < more * (size + 1)
    i = tl.where(wide, x // (size + 1), more + (x - more * (size + 1)) // tl.maximum(size, 1))
    a = first + i * size + tl.minimum(i, more)
    b = a + size + (i < more).to(tl.int32)
    for _ in range(splits):
        cut = a + (b - a + 1) // 2
        right = rep >= cut
        a = tl.where(right, cut, a)
        b = tl.where(right, b, cut)
    return a, b


@triton.jit
def _other_part(
    rep, a, b, allowed_at, after_at, top, low, blocks_s, BLOCK: tl.constexpr, KP: tl.constexpr
):
    """The representative of the part of [a, b) that does not have the branch's own: the right
    part's, or NONE where the left part has no valid block."""
    cut = tl.where(rep == NONE, b, a + (b - a + 1) // 2)
    cut = tl.where(rep < cut, cut, b)
    return _first_valid(cut, b, allowed_at, after_at, top, low, blocks_s, BLOCK, KP)


@triton.jit
def _start(
    first, width, branches, allowed_at, after_at, top, low, blocks_s,
    BLOCK: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Representatives of the first branches, and of their other parts."""
    i = tl.arange(0, KP)
    size = width // tl.maximum(branches, 1)
    more = width - size * branches
    a = first + i * size + tl.minimum(i, more)
    b = tl.where(i < branches, a + size + (i < more).to(tl.int32), a)
    rep = _first_valid(a, b, allowed_at, after_at, top, low, blocks_s, BLOCK, KP)
    other = _other_part(rep, a, b, allowed_at, after_at, top, low, blocks_s, BLOCK, KP)
    return rep, other


@triton.jit
def scope(
    program, h, b, lengths, start, budget, T, S, budget_b, budget_h, budget_q,
    QUERY_BLOCK: tl.constexpr, K: tl.constexpr,
    LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr,
):  # fmt: skip
    """(first query, position less query, first real key, last position, branches) of a query
    block; no branches where it is past the row's end."""
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    offset = length - T
    t = tl.maximum(low - offset, 0) + program * QUERY_BLOCK
    top = offset + tl.minimum(t + QUERY_BLOCK, T) - 1
    branches = K
    if budget is not None:
        branches = tl.load(budget + b * budget_b + h * budget_h + program * budget_q).to(tl.int32)
        branches = tl.maximum(tl.minimum(branches, K), 0)
    return t, offset, low, top, tl.where(t < T, branches, 0)


@triton.jit
def _row_maxima(
    query, position, floor, k_at, mask_at, r, begin, low, top, k_s,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Each query's largest product with the keys that it sees of block r from key `begin` on, TILE
    of them. Every query sees the keys up to `floor`: only a tile beyond has pairs to leave out."""
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
    q, k, index, score, lengths, start, key_mask, after, before, block_mask, budget, T, S,
    q_b, q_h, q_t, k_b, k_h, k_s, mask_b, allowed_b, allowed_h, allowed_q, allowed_k,
    budget_b, budget_h, budget_q,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, QUERY_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr, STAGES: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """The scores that the first iteration needs, a key tile for HEADS heads of a group at once,
    since they all begin with the same branches. The branches' own go to `score`; those of their
    other parts to `index`, as bits: `refine` takes them out before it writes its results."""
    program = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    CHUNKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv = tl.program_id(1) // CHUNKS
    g = tl.program_id(1) % CHUNKS * HEADS
    h = (kv * GROUP + g).to(tl.int64)
    heads = tl.num_programs(1) // CHUNKS * GROUP
    t, offset, low, top, branches = scope(
        program, h, b, lengths, start, budget, T, S, budget_b, budget_h, budget_q,
        QUERY_BLOCK, K, LENGTH_STEP, START_STEP,
    )  # fmt: skip
    if branches > 0:
        to_block = b * allowed_b + h * allowed_h + program.to(tl.int64) * allowed_q
        allowed_at = block_mask
        if block_mask is not None:
            allowed_at = block_mask + to_block
        mask_at = key_mask
        after_at = after
        before_at = before
        if key_mask is not None:
            mask_at = key_mask + b * mask_b
            after_at = after + b * S
            before_at = before + b * S
        first, width = _interval(allowed_at, after_at, before_at, top, low, allowed_k, BLOCK)
        rep, other = _start(
            first, width, branches, allowed_at, after_at, top, low, allowed_k, BLOCK, KP
        )
        m = tl.arange(0, HEADS * ROWS)
        d = tl.arange(0, DP)
        row = t + m % ROWS
        live = (g + m // ROWS < GROUP) & (m % ROWS < QUERY_BLOCK) & (row < T)
        place = b * q_b + (h + m // ROWS) * q_h + row.to(tl.int64) * q_t
        query = tl.load(
            q + place[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0
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
        steps = 2 * PARTS * branches
        for step in tl.range(0, steps, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            slot = step // (2 * PARTS)
            second = step // PARTS % 2
            name = tl.sum(tl.where(i == slot, tl.where(second == 1, other, rep), 0), 0)
            part = _row_maxima(
                query, position, floor, k_at, mask_at, name, step % PARTS * TILE, low, top, k_s,
                D, DP, BLOCK, TILE,
            )  # fmt: skip
            best = tl.maximum(part, tl.where(step % PARTS == 0, float("-inf"), best))
            most = tl.max(tl.reshape(best, [HEADS, ROWS]), 1)
            heads_in = tl.where(step % PARTS == PARTS - 1, tl.where(name == NONE, 0, GROUP), 0)
            here = g + own < tl.where(second == 0, heads_in, 0)
            tl.store(score + out + slot, most, mask=here)
            here = g + own < tl.where(second == 1, heads_in, 0)
            tl.store(index + out + slot, most.to(tl.int32, bitcast=True), mask=here)


@triton.jit
def refine(
    q, k, index, score, lengths, start, key_mask, after, before, block_mask, budget, T, S,
    q_b, q_h, q_t, k_b, k_h, k_s, mask_b, allowed_b, allowed_h, allowed_q, allowed_k,
    budget_b, budget_h, budget_q,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, QUERY_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The selection of one query block and head. It ends when every branch is one block: a further
    iteration would keep what there is."""
    program = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    t, offset, low, top, branches = scope(
        program, h, b, lengths, start, budget, T, S, budget_b, budget_h, budget_q,
        QUERY_BLOCK, K, LENGTH_STEP, START_STEP,
    )  # fmt: skip
    i = tl.arange(0, KP)
    out = ((b * tl.num_programs(1) + h) * tl.num_programs(0) + program) * K + i
    key = _pack(tl.full([KP], float("-inf"), tl.float32), tl.full([KP], NONE, tl.int32))
    if branches > 0:
        to_block = b * allowed_b + h * allowed_h + program.to(tl.int64) * allowed_q
        allowed_at = block_mask
        if block_mask is not None:
            allowed_at = block_mask + to_block
        mask_at = key_mask
        after_at = after
        before_at = before
        if key_mask is not None:
            mask_at = key_mask + b * mask_b
            after_at = after + b * S
            before_at = before + b * S
        first, width = _interval(allowed_at, after_at, before_at, top, low, allowed_k, BLOCK)
        rep, other = _start(
            first, width, branches, allowed_at, after_at, top, low, allowed_k, BLOCK, KP
        )
        # What `seed` has left; nothing where there was no block.
        own = tl.load(score + out, mask=rep != NONE, other=float("-inf"))
        new = tl.load(index + out, mask=other != NONE, other=0).to(tl.float32, bitcast=True)
        tl.debug_barrier()  # other warps store here at the end
        key = _best(_pack(own, rep), _pack(new, other), branches, KP)
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
            rep = _rep(key)
            begin, end = _descend(rep, first, width, branches, splits)
            other = _other_part(
                rep, begin, end, allowed_at, after_at, top, low, allowed_k, BLOCK, KP
            )
            new = tl.full([KP], float("-inf"), tl.float32)
            steps = PARTS * branches
            for step in tl.range(0, steps, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
                slot = step // PARTS
                name = tl.sum(tl.where(i == slot, other, 0), 0)
                part = _row_maxima(
                    query, position, floor, k_at, mask_at, name, step % PARTS * TILE, low, top,
                    k_s, D, DP, BLOCK, TILE,
                )  # fmt: skip
                new = tl.where(i == slot, tl.maximum(new, tl.max(part, 0)), new)
            key = _best(key, _pack(new, other), branches, KP)
            splits += 1
            longest = (longest + 1) // 2
    rep = _rep(key)
    tl.store(index + out, tl.where(rep == NONE, -1, rep), mask=i < K)
    tl.store(score + out, _score(key), mask=i < K)
