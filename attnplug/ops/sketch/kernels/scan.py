"""The Triton kernel of `scan_sketch`."""

from attnplug.ops.common.rows import blocks_done, row_of, row_span
from attnplug.ops.common.triton import tl, triton
from attnplug.ops.sketch.kernels.codes import (
    BINS,
    BLOCK,
    CHUNK,
    EIGHT,
    LARGEST,
    NOTED,
    begin,
    bin_of,
    capped,
    estimated,
    exp2,
    load_unit,
    load_variance,
    load_weights,
    lowest_counted,
    near_block,
    parts_of,
    placed,
    share,
    unpack_coarse,
    unpack_fine,
)


@triton.jit
def scan(
    projected,
    fixed,
    codes,
    rows,
    hint,
    counted,
    scanned,
    k,
    cap,
    chunks,
    fewest,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    CODE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PIECES: tl.constexpr,
    REFRESH: tl.constexpr,
    CAPPED: tl.constexpr,
    CHECKED: tl.constexpr,
    ASM: tl.constexpr,
    NEW: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of the candidates of one row's KV head: shares, their histogram, and for each head
    the sums of the estimated weights 2^(s - norm) and of weight times s - norm (times s if capped).
    In the chain also, in `counted`, a bit for every eight candidates: whether any may be counted.
    """
    R4: tl.constexpr = CODE.R4
    R2: tl.constexpr = CODE.R2
    begin(PDL)
    part = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    place = b * tl.num_programs(1) + h
    own_row = row_of(b, STEPS)
    home = own_row * tl.num_programs(1) + h
    row = place * GROUP
    length, low = row_span(rows, b, STEPS, NEW)
    near = near_block(tl.minimum(length, rows.S), low)
    n_tokens = (near - 1) * BLOCK
    PER: tl.constexpr = TILE // BLOCK  # blocks a tile
    used = parts_of(near, scanned.parts, fewest)
    if part >= used:
        heads = tl.arange(0, HEADS)
        idle = scanned.sums + ((row + heads) * scanned.parts + part) * 2
        tl.store(idle, tl.zeros([HEADS], tl.float32), mask=heads < GROUP)
        tl.store(idle + 1, tl.zeros([HEADS], tl.float32), mask=heads < GROUP)
        return
    first = part * (near - 1) // used  # blocks after the sink
    last = (part + 1) * (near - 1) // used
    own_tokens = (last - first) * BLOCK
    total = scanned.total + place * BINS
    bins = tl.arange(0, BINS)

    n = tl.arange(0, TILE)
    g = tl.arange(0, HEADS)
    in_group = g < GROUP
    RP: tl.constexpr = 64 if R4 + R2 <= 64 else 128
    unit = load_unit(projected, row, R4 + R2, RP, GROUP, HEADS)
    fine_weights = load_weights(projected, row, 0, R4, 32 if R4 < 32 else R4, GROUP, HEADS, unit)
    coarse_weights = load_weights(projected, row, R4, R2, R2, GROUP, HEADS, unit)
    facts = projected.at + (row + g).to(tl.int64) * projected.columns + R4 + R2
    offset = tl.load(facts, mask=in_group, other=0.0, cache_modifier=".cg")
    mean = tl.load(facts + 1, mask=in_group, other=0.0, cache_modifier=".cg")
    variance = load_variance(projected, row, R4 + R2, RP, GROUP, HEADS)
    j = tl.arange(0, PIECES)
    known = tl.load(
        fixed.lse + (row + g).to(tl.int64)[None, :] * fixed.number + j[:, None],
        mask=in_group[None, :] & (j < fixed.number)[:, None],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    base, likely = placed(known, mean, variance, n_tokens, k, cap, CAPPED, ASM)
    centre = tl.max(tl.where(in_group, likely, float("-inf")), 0)
    centre = tl.where(tl.abs(centre) < 1e30, centre, 0.0)
    if part == 0:
        tl.store(scanned.norm + row + g, base, mask=in_group)
        tl.store(scanned.middle + place, centre)
    # Heads that pad the group have no share of anything.
    base = tl.where(in_group, base, float("inf"))
    shift = offset if CAPPED else offset - base

    since = low + BLOCK + first * BLOCK
    slot = home * rows.S + since + n
    fine_at = codes.fine + slot[:, None] * (R4 // 2) + tl.arange(0, R4 // 2)[None, :]
    coarse_at = codes.coarse + slot[:, None] * (R2 // 4) + tl.arange(0, R2 // 4)[None, :]
    shares_at = scanned.shares + slot
    if STEPS.QUERIES > 1:
        shares_at += (place - home) * rows.S
    counted_at = counted
    if counted is not None:
        counted_at += place * (rows.S // NOTED) + first * (BLOCK // NOTED)
    mask_at = rows.key_mask
    if rows.key_mask is not None:
        mask_at = rows.key_mask + own_row * rows.mask_b + since + n
    mass = tl.zeros([TILE, HEADS], tl.float32)
    moment = tl.zeros([TILE, HEADS], tl.float32)
    visible = tl.zeros([TILE], tl.int32)
    floor = 1  # lowest bin that is counted
    due = 1
    if hint is not None:
        floor = lowest_counted(tl.load(hint + home, cache_modifier=".cg"))
        due = tl.where(floor > 1, -1, 1)
    for i in tl.range(0, (last - first + PER - 1) // PER, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        at = i * TILE  # times 32 bytes it stays below 2^31
        seen = at + n < own_tokens
        if PER == 1:
            fine_bytes = tl.load(fine_at + at * (R4 // 2))
            coarse_bytes = tl.load(coarse_at + at * (R2 // 4))
        else:
            fine_bytes = tl.load(fine_at + at * (R4 // 2), mask=seen[:, None], other=0)
            coarse_bytes = tl.load(coarse_at + at * (R2 // 4), mask=seen[:, None], other=0)
        if rows.key_mask is not None:
            seen = seen & (tl.load(mask_at + at, mask=seen, other=0) != 0)
        s = estimated(
            unpack_fine(fine_bytes, ASM),
            unpack_coarse(coarse_bytes, ASM),
            fine_weights,
            coarse_weights,
            unit,
            shift,
        )
        limit = LARGEST
        if PER > 1 or rows.key_mask is not None:
            limit = tl.where(seen, LARGEST, float("-inf"))[:, None]
        if CAPPED:
            e = exp2(tl.minimum(capped(s, cap, CAPPED) - base[None, :], limit), ASM)
        else:
            e = exp2(tl.minimum(s, limit), ASM)
        mass += e
        moment += e * s
        h_tile = tl.where(seen, share(e, ASM), float("-inf"))
        tl.store(shares_at + at, h_tile, mask=at + n < own_tokens)
        visible += seen.to(tl.int32)
        if i == due:  # `total` only grows: a share that k tokens have reached stays a lower bound
            reached = tl.cumsum(tl.load(total + bins, cache_modifier=".cg"), 0, reverse=True)
            index = tl.sum((reached >= k).to(tl.int32), 0) - 1
            floor = tl.maximum(floor, index)
            due += due * REFRESH
        index = bin_of(h_tile, centre)
        own = seen & (index >= floor)
        tl.atomic_add(total + index, 1, mask=own, sem="relaxed")
        if counted is not None:
            eights = tl.max(tl.reshape(own.to(tl.int32), (TILE // NOTED, NOTED // EIGHT, EIGHT)), 2)
            byte = tl.sum(eights << tl.arange(0, NOTED // EIGHT)[None, :], 1)
            where = at // NOTED + tl.arange(0, TILE // NOTED)
            tl.store(counted_at + where, byte.to(tl.uint8), mask=where < own_tokens // NOTED)

    tl.atomic_add(total, tl.sum(visible, 0), sem="relaxed")
    wrong = tl.zeros([BINS], tl.int32)
    flags = codes.odd + home * chunks
    end = (1 + last) * (BLOCK // CHUNK)
    for j in range((1 + first) * (BLOCK // CHUNK), end, BINS):
        there = j + bins < end
        wrong |= (tl.load(flags + j + bins, mask=there, other=0) != 0).to(tl.int32)
    bad = tl.max(wrong, 0) > 0
    if CHECKED:
        bad = bad | (blocks_done(codes.progress, own_row, low) < near) & (near > 1)
    poison = tl.where(bad, float("nan"), 0.0)
    sums = scanned.sums + ((row + g) * scanned.parts + part) * 2
    tl.store(sums, tl.sum(mass, 0) + poison, mask=in_group)
    tl.store(sums + 1, tl.sum(moment, 0), mask=in_group)
