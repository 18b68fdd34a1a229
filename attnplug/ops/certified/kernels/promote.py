"""Triton code of `certified_attention` that reads chosen blocks exactly and says what that changes;
and the kernel that does so for a list of them. To the base 2."""

from attnplug.ops.certified.kernels.exact import load_values
from attnplug.ops.certified.kernels.tier import (
    bf16_value,
    load_key_codes,
    load_key_scales,
    load_value_codes,
    values_of,
)
from attnplug.ops.certified.kernels.tiles import arrived, capped, load_query, split_dot
from attnplug.ops.certified.records import R
from attnplug.ops.certified.scratch import source, words_of
from attnplug.ops.common.rows import row_span
from attnplug.ops.common.triton import gdc_wait, tl, triton


@triton.jit
def _insert(v, n, v0, n0, v1, n1, v2, n2, v3, n3, DEPTH: tl.constexpr):
    """(log-mass v, block n) put in its place in a descending list of up to four, after equals."""
    up = v > v0
    v0, v = tl.where(up, v, v0), tl.where(up, v0, v)
    n0, n = tl.where(up, n, n0), tl.where(up, n0, n)
    if DEPTH > 1:
        up = v > v1
        v1, v = tl.where(up, v, v1), tl.where(up, v1, v)
        n1, n = tl.where(up, n, n1), tl.where(up, n1, n)
        up = v > v2
        v2, v = tl.where(up, v, v2), tl.where(up, v2, v)
        n2, n = tl.where(up, n, n2), tl.where(up, n2, n)
        up = v > v3
        v3, n3 = tl.where(up, v, v3), tl.where(up, n, n3)
    return v0, n0, v1, n1, v2, n2, v3, n3


@triton.jit
def _store_rank(
    at, rank: tl.constexpr, pieces, rough, rough_block, exact, exact_block, in_group
):  # fmt: skip  # as short as its docstring
    """One of the first blocks of a piece by quantized and by exact log-mass."""
    at += (R.PROMOTED_RANKS + R.RANK_FIELDS * rank) * pieces
    tl.store(at + R.RANK_ROUGH * pieces, rough, mask=in_group)
    tl.store(at + R.RANK_ROUGH_BLOCK * pieces, rough_block, mask=in_group)
    tl.store(at + R.RANK_EXACT * pieces, exact, mask=in_group)
    tl.store(at + R.RANK_EXACT_BLOCK * pieces, exact_block, mask=in_group)


@triton.jit
def _entry(block_list, group, index, ends, listed, PROGRAMS: tl.constexpr):
    """A KV head's promoted block `index` in the lists of its chunks, which have `listed` blocks and
    end at `ends`: (its name, the places of its keys and of its values)."""
    before = ends <= index
    chunk = tl.sum(before.to(tl.int32), 0)
    rest = index - tl.sum(tl.where(before, listed, 0), 0)
    at = block_list + ((group * PROGRAMS.CHUNKS + chunk) * PROGRAMS.OWN + rest) * R.LIST_FIELDS
    return tl.load(at + R.LIST_NAME), tl.load(at + R.LIST_KEYS), tl.load(at + R.LIST_VALUES)


@triton.jit
def _sealed(word, item, place, seals_at):
    """Compare the seal of a slot that was read, or write that of one that is being filled; whether
    it did not fit."""
    slot = tl.where(place >= 0, place, -2 - place)
    seal = word + item * R.CHECK_STEP + R.CHECK_SEED
    stored = tl.load(seals_at + slot, mask=place >= 0, other=0)
    tl.store(seals_at + slot, seal, mask=place < -1)
    return (place >= 0) & (stored != seal)


@triton.jit
def read_blocks(
    query,
    cache,
    tier,
    rows,
    scores,
    promotion,
    scratch,
    scale,
    cap,
    N,
    SLOTS,
    b,
    h,
    group,
    low,
    piece,
    pieces,
    first,
    count,
    step,
    own_blocks,
    block_lists,
    SHAPE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    DEPTH: tl.constexpr,
    LISTED: tl.constexpr,
    MATH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Read the promoted blocks first, first + step, .. below `count` of a KV head. LISTED: those in
    the lists of its chunks, `block_lists` (block_list, ends, listed) as in `_entry`, from the slots
    of the scratch cache that hold them. Else a program's own, `own_blocks` (ranks, names). Leaves
    `promoted_sums` of each head as number `piece` of `pieces`, and in `changes` what is to be added
    to its output. Scores and values must be within their bounds, and slots as they were filled: one
    that is not is dropped."""
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    BLOCK: tl.constexpr = SHAPE.BLOCK
    QK: tl.constexpr = tl.float32 if MATH.FLOAT32_KEYS else tl.bfloat16
    PV: tl.constexpr = tl.float32 if MATH.FLOAT32_VALUES else tl.float16
    PARTS: tl.constexpr = MATH.PARTS
    rank, name = own_blocks
    block_list, ends, listed = block_lists
    r = tl.arange(0, ROWS)
    in_group = r < SHAPE.GROUP
    row = group * SHAPE.GROUP + r
    at = promotion.promoted_sums + row * (R.PROMOTED_FIELDS * pieces) + piece
    COLUMNS: tl.constexpr = SHAPE.HALF * 16
    CP: tl.constexpr = SHAPE.HALF_P * 16
    d = tl.arange(0, SHAPE.DP)
    n = tl.arange(0, BLOCK)
    c = tl.arange(0, CP)
    in_width = d < D
    query = arrived(query, PDL)
    scaled = query.to(tl.float32) * scale
    k_at = cache.k + b * cache.k_b + h.to(tl.int64) * cache.k_h
    v_at = cache.v + b * cache.v_b + h.to(tl.int64) * cache.v_h
    summary_at = tier.summary + group * N * R.SUMMARY_FIELDS
    slots_at, owner_at, seals_at = cache.k, cache.k, cache.k
    if scratch is not None:
        slots_at = scratch.slots + group * SLOTS * (BLOCK * D)
        owner_at = scratch.owner + group * SLOTS
        seals_at = scratch.seals + group * SLOTS
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    held = tl.zeros([ROWS], tl.float32)
    held_before = tl.zeros([ROWS], tl.float32)
    error_held = tl.zeros([ROWS], tl.float32)
    acc_low = tl.zeros([ROWS, CP], tl.float32)
    acc_high = tl.zeros([ROWS, CP], tl.float32)
    wrong = tl.zeros([BLOCK], tl.int32)
    rough0, rough1, rough2, rough3 = top, top, top, top
    rough_block0, rough_block1, rough_block2, rough_block3 = total, total, total, total
    exact0, exact1, exact2, exact3 = top, top, top, top
    exact_block0, exact_block1, exact_block2, exact_block3 = total, total, total, total
    ahead, key_ahead, value_ahead = -1, -1, -1  # the next block's entry, loaded beside this block
    if LISTED:
        ahead, key_ahead, value_ahead = _entry(block_list, group, first, ends, listed, PROGRAMS)
    for index in range(first, count, step):
        this, key_place, value_place = ahead, key_ahead, value_ahead
        if LISTED:
            following = tl.minimum(index + step, count - 1)
            ahead, key_ahead, value_ahead = _entry(
                block_list, group, following, ends, listed, PROGRAMS
            )
        else:
            this = tl.sum(tl.where(rank == index + 1, name, 0), 0)
        block = this // R.NAME_STEP
        whole = this & R.NAME_VALUES
        place = group * N + block
        tokens = low + block * BLOCK + n
        item = 2 * (low + block * BLOCK)
        seen = tokens >= 0
        if rows.key_mask is not None:
            seen = tl.load(rows.key_mask + b * rows.mask_b + tokens) != 0
        bits = load_key_scales(tier.k_meta, place, SHAPE)
        codes = load_key_codes(tier.k_codes, place, SHAPE)
        loadable = seen[:, None] & in_width[None, :]
        if scratch is None:
            key_at = k_at + tokens.to(tl.int64)[:, None] * cache.k_s + d[None, :]
            key = tl.load(key_at, mask=loadable, other=0.0)
        else:
            rows_at, row_0, row_step = source(
                key_place, slots_at, k_at, low + block * BLOCK, cache.k_s, BLOCK * D, D
            )
            key_at = rows_at + (row_0 + n).to(tl.int64)[:, None] * row_step + d[None, :]
            # Not .cg: a thread has 32 bytes, loaded by two instructions, and without the L1 each of
            # them would have the whole sectors sent, over the link twice.
            key = tl.load(key_at, mask=loadable, other=0.0)
        value_codes, low_words, high_words = load_value_codes(
            tier.v_codes, tier.v_meta, place, SHAPE
        )
        bias = tl.load(scores.base + row * N + block, mask=in_group, other=0.0)
        limit = tl.load(scores.delta + row * N + block, mask=in_group, other=0.0)
        eta_b = tl.load(summary_at + block * R.SUMMARY_FIELDS + R.ETA)
        bits, codes, key = arrived(bits, PDL), arrived(codes, PDL), arrived(key, PDL)
        value_codes = arrived(value_codes, PDL)
        low_words, high_words = arrived(low_words, PDL), arrived(high_words, PDL)
        nothing = tl.zeros([ROWS, BLOCK], tl.float32)
        rough = split_dot(scaled * bf16_value(bits)[None, :], codes.to(QK).T, nothing, QK, PARTS)
        rough += bias[:, None]
        s = tl.dot(query, key.T, input_precision="ieee") * scale
        if MATH.CAPPED:
            rough = capped(rough, cap)
            s = capped(s, cap)
        off = ~(tl.abs(s - rough) <= limit[:, None]) & in_group[:, None] & seen[None, :]
        off_n = tl.max(off.to(tl.int32), 0)
        if scratch is not None:
            bad = _sealed(words_of(key, 1), item, key_place, seals_at)
            fill = slots_at - (2 + key_place).to(tl.int64) * (BLOCK * D) + n[:, None] * D
            tl.store(fill + d[None, :], key, mask=(d < tl.where(key_place < -1, D, 0))[None, :])
            off_n = tl.maximum(off_n, bad.to(tl.int32))
            bad = (key_place >= 0) & (tl.max(off_n, 0) > 0)
            tl.store(owner_at + key_place, -1, mask=bad)
        wrong = tl.maximum(wrong, off_n)
        s = tl.where(seen[None, :], s, float("-inf"))
        rough = tl.where(seen[None, :], rough, float("-inf"))
        best = tl.maximum(top, tl.maximum(tl.max(s, 1), tl.max(rough, 1)))
        shift = tl.where(best == float("-inf"), 0.0, best)
        p = tl.exp2(s - shift[:, None])
        old = tl.exp2(rough - shift[:, None])
        decay = tl.exp2(top - shift)
        top = best
        mass_r = tl.sum(p, 1)
        total = total * decay + mass_r
        error_held = error_held * decay + tl.where(whole > 0, 0.0, mass_r * eta_b)
        block_r = block.to(tl.float32) + mass_r * 0
        (
            rough0,
            rough_block0,
            rough1,
            rough_block1,
            rough2,
            rough_block2,
            rough3,
            rough_block3,
        ) = _insert(
            v=shift + tl.log2(tl.sum(old, 1)),
            n=block_r,
            v0=rough0,
            n0=rough_block0,
            v1=rough1,
            n1=rough_block1,
            v2=rough2,
            n2=rough_block2,
            v3=rough3,
            n3=rough_block3,
            DEPTH=DEPTH,
        )
        (
            exact0,
            exact_block0,
            exact1,
            exact_block1,
            exact2,
            exact_block2,
            exact3,
            exact_block3,
        ) = _insert(
            v=shift + tl.log2(mass_r),
            n=block_r,
            v0=exact0,
            n0=exact_block0,
            v1=exact1,
            n1=exact_block1,
            v2=exact2,
            n2=exact_block2,
            v3=exact3,
            n3=exact_block3,
            DEPTH=DEPTH,
        )
        change = p - old
        value_low = values_of(value_codes & 15, low_words, BLOCK, CP)
        acc_low = split_dot(change, value_low.to(PV), acc_low * decay[:, None], PV, PARTS)
        value_high = values_of(value_codes >> 4, high_words, BLOCK, CP)
        lengths = tl.sqrt(tl.sum(value_low * value_low, 1) + tl.sum(value_high * value_high, 1))
        held = held * decay + tl.sum(p * (lengths + eta_b)[None, :], 1)
        held_before = held_before * decay + tl.sum(old * lengths[None, :], 1)
        acc_high = split_dot(change, value_high.to(PV), acc_high * decay[:, None], PV, PARTS)
        if whole > 0:
            if scratch is None:
                new_low, new_high = load_values(v_at, tokens, cache.v_s, seen, SHAPE)
            else:
                rows_at, row_0, row_step = source(
                    value_place, slots_at, v_at, low + block * BLOCK, cache.v_s, BLOCK * D, D
                )
                new_low, new_high = load_values(rows_at, row_0 + n, row_step, seen, SHAPE)
            new_low, new_high = arrived(new_low, PDL), arrived(new_high, PDL)
            in_low = (c < COLUMNS)[None, :] & seen[:, None]
            in_high = in_low & (c + COLUMNS < D)[None, :]
            error_low = tl.where(in_low, new_low.to(tl.float32) - value_low, 0.0)
            error_high = tl.where(in_high, new_high.to(tl.float32) - value_high, 0.0)
            error = tl.sqrt(tl.sum(error_low * error_low, 1) + tl.sum(error_high * error_high, 1))
            off_n = (seen & ~(error <= eta_b)).to(tl.int32)
            if scratch is not None:
                word = words_of(new_low, 1) + words_of(new_high, 2 * BLOCK * CP + 1)
                bad = _sealed(word, item + 1, value_place, seals_at)
                fill = slots_at - (2 + value_place).to(tl.int64) * (BLOCK * D) + n[:, None] * D
                room = tl.where(value_place < -1, D, 0)
                tl.store(fill + c[None, :], new_low, mask=(c < tl.minimum(room, COLUMNS))[None, :])
                in_high_n = ((c < COLUMNS) & (c + COLUMNS < room))[None, :]
                tl.store(fill + COLUMNS + c[None, :], new_high, mask=in_high_n)
                off_n = tl.maximum(off_n, bad.to(tl.int32))
                bad = (value_place >= 0) & (tl.max(off_n, 0) > 0)
                tl.store(owner_at + value_place, -1, mask=bad)
            wrong = tl.maximum(wrong, off_n)
            acc_low = split_dot(p, error_low.to(PV), acc_low, PV, PARTS)
            acc_high = split_dot(p, error_high.to(PV), acc_high, PV, PARTS)

    tl.store(promotion.flags + group * R.FLAG_FIELDS + R.FLAG_SCORE, 1, mask=tl.max(wrong, 0) > 0)
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    lse = tl.where(top == float("-inf"), 0.0, top) + tl.log2(divisor)
    lse = tl.where(empty, float("-inf"), lse)
    tl.store(at + R.PROMOTED_LSE * pieces, lse, mask=in_group)
    tl.store(at + R.PROMOTED_NORM * pieces, held / divisor, mask=in_group)
    tl.store(at + R.PROMOTED_ERROR * pieces, error_held / divisor, mask=in_group)
    tl.store(at + R.PROMOTED_TOP * pieces, top, mask=in_group)
    tl.store(at + R.PROMOTED_BEFORE * pieces, held_before, mask=in_group)
    if DEPTH > 0:
        _store_rank(at, 0, pieces, rough0, rough_block0, exact0, exact_block0, in_group)
    if DEPTH > 1:
        _store_rank(at, 1, pieces, rough1, rough_block1, exact1, exact_block1, in_group)
        _store_rank(at, 2, pieces, rough2, rough_block2, exact2, exact_block2, in_group)
        _store_rank(at, 3, pieces, rough3, rough_block3, exact3, exact_block3, in_group)
    out_at = promotion.changes + (row * pieces + piece)[:, None] * D + c[None, :]
    mask = in_group[:, None] & (c < COLUMNS)[None, :]
    tl.store(out_at, acc_low, mask=mask)
    tl.store(out_at + COLUMNS, acc_high, mask=mask & (c + COLUMNS < D)[None, :])


@triton.jit
def promote(
    q,
    cache,
    tier,
    rows,
    scores,
    promotion,
    scratch,
    scale,
    cap,
    N,
    SLOTS,
    SHAPE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PIECES: tl.constexpr,
    DEPTH: tl.constexpr,
    MATH: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every PIECES-th of the blocks that `choose_blocks` has listed for a KV head."""
    if PDL:
        gdc_wait()  # the end is launched when the last of these has ended, and finds room
    piece = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    group = b * tl.num_programs(1) + h
    query = load_query(q, b, h, SHAPE.GROUP, SHAPE)
    CHUNKS: tl.constexpr = PROGRAMS.CHUNKS
    counts_at = promotion.counts + group * (R.COUNT_FIELDS * CHUNKS) + R.COUNT_KEYS * CHUNKS
    listed = tl.load(counts_at + tl.arange(0, CHUNKS))
    count = tl.sum(listed, 0)
    if piece >= count:
        return
    _length, low = row_span(rows, b, STEPS)
    read_blocks(
        query,
        cache=cache,
        tier=tier,
        rows=rows,
        scores=scores,
        promotion=promotion,
        scratch=scratch,
        scale=scale,
        cap=cap,
        N=N,
        SLOTS=SLOTS,
        b=b,
        h=h,
        group=group,
        low=low,
        piece=piece,
        pieces=PIECES,
        first=piece,
        count=count,
        step=PIECES,
        own_blocks=(listed, listed),
        block_lists=(promotion.block_list, tl.cumsum(listed, 0), listed),
        SHAPE=SHAPE,
        PROGRAMS=PROGRAMS,
        DEPTH=DEPTH,
        LISTED=True,
        MATH=MATH,
        PDL=PDL,
    )
